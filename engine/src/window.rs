//! The window: one epoch of one partition. Admission on one side, the watermark on the other.
//!
//! Records are numbered densely as they are admitted; the ring of flags is indexed by that
//! sequence and the offset is kept beside the slot. A gap between two offsets, of any size,
//! therefore costs nothing: the slot after a gap is simply the next slot.

use crate::error::{InvalidSetting, Refused};
use crate::ring::{Flag, Mark, Place, Ring, boxed};
use crate::sync::{Arc, AtomicBool, AtomicI64, AtomicU64, Mutex, Ordered64, Ordering};
use crate::ticket::Ticket;
use crossbeam_utils::CachePadded;

/// The last offset a record may have: the watermark after it must still be an `i64`.
pub(crate) const LAST_OFFSET: i64 = i64::MAX - 1;

/// Where the reader of the flags stands.
#[derive(Debug)]
struct Cursor {
    place: Place,
    sequence: u64,
}

/// What the two sides of a window share.
#[derive(Debug)]
pub(crate) struct Shared {
    ring: Ring,
    /// Offset of the record in each slot. Written at admission, before `admitted` says so; read
    /// by the scan, after it has read `admitted`.
    offsets: Box<[Ordered64]>,
    /// Records admitted since the epoch began. Written by the admitting side only.
    admitted: CachePadded<AtomicU64>,
    /// Records the scan has passed. Written under the cursor's lock only.
    passed: CachePadded<AtomicU64>,
    /// The published watermark. Written under the cursor's lock only.
    watermark: AtomicI64,
    /// Taken once per scan, never per record.
    cursor: Mutex<Cursor>,
    /// The executor's: records that have not been started must not start any more.
    halted: AtomicBool,
}

impl Shared {
    #[inline]
    pub(crate) fn finish(&self, place: &Place, order: Mark) {
        self.ring.mark(place, order);
    }

    #[inline]
    pub(crate) fn fail(&self, place: &Place) {
        self.ring.mark_failed(place);
    }

    #[cfg(loom)]
    pub(crate) fn fail_weakly(&self, place: &Place) {
        self.ring.mark_failed_weakly(place);
    }

    #[inline(always)]
    pub(crate) fn halted(&self) -> bool {
        // Relaxed: a worker that halts an epoch sees its own store for the later records of the
        // same key, which are in the same lane; for other keys any moment is as good.
        self.halted.load(Ordering::Relaxed)
    }

    /// Whether it was halted before.
    pub(crate) fn halt(&self) -> bool {
        // AcqRel: who finds it set also finds the count that its setter made before; see
        // `Registry::halt`.
        self.halted.swap(true, Ordering::AcqRel)
    }

    /// Offset of the record in an admitted and not yet passed place.
    pub(crate) fn offset_at(&self, index: u32) -> i64 {
        // Whoever holds the place got it after `admit` wrote the offset.
        self.offsets[index as usize].get()
    }

    fn watermark(&self) -> i64 {
        // Acquire: pairs with the Release in `scan`; who sees a watermark also sees the effects
        // of every record below it.
        self.watermark.load(Ordering::Acquire)
    }

    fn scan(&self, cursor: &mut Cursor, publish: Publish) -> Progress {
        // Acquire: pairs with the Release in `admit`; the offsets of these slots are written.
        let admitted = self.admitted.load(Ordering::Acquire);
        let capacity = self.ring.capacity();
        let begun = cursor.sequence;
        let mut last = None;
        let mut failed = None;
        while cursor.sequence < admitted {
            // Bounded by the ring's capacity, which is a `u32`.
            let most = (admitted - cursor.sequence).min(u64::from(capacity)) as u32;
            let (count, stop) = self.ring.read(&cursor.place, most);
            if count > 0 {
                last = Some(cursor.place.index() + count - 1);
                cursor.place.skip(count, capacity);
                cursor.sequence += u64::from(count);
            }
            match stop {
                Flag::Done => {}
                Flag::Open => break,
                Flag::Failed => {
                    failed = Some(self.offset_at(cursor.place.index()));
                    break;
                }
            }
        }
        // Read before the slots are given back: from then on they may be overwritten.
        if let Some(last) = last {
            #[cfg(loom)]
            if publish == Publish::Early {
                self.passed.store(cursor.sequence, Ordering::Release);
            }
            let next = self.offset_at(last) + 1;
            // Release: pairs with `watermark`. The flags were read with Acquire, so this carries
            // what the handlers did on to whoever commits.
            self.watermark.store(next, publish.announcing());
            // Release: pairs with the Acquire in `admit`; the slots up to here were read for the
            // last time, so they may be used again.
            self.passed.store(cursor.sequence, publish.ordering());
        }
        Progress {
            // Relaxed: written under the lock we hold.
            watermark: self.watermark.load(Ordering::Relaxed),
            advanced: cursor.sequence - begun,
            passed: cursor.sequence,
            unfinished: admitted - cursor.sequence,
            failed,
        }
    }
}

/// How strongly the scan gives slots back. Only [`Publish::Release`] is right; the other exists
/// for the loom twin that must fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Publish {
    /// The slots were read for the last time before they may be reused.
    Release,
    /// Slots are given back with `Relaxed`: wrong, and found wrong by the models.
    #[cfg(loom)]
    Weak,
    /// Slots are given back before they were read for the last time: likewise.
    #[cfg(loom)]
    Early,
    /// The watermark is announced with `Relaxed`: likewise.
    #[cfg(loom)]
    Mute,
}

impl Publish {
    fn ordering(self) -> Ordering {
        match self {
            #[cfg(loom)]
            Publish::Weak => Ordering::Relaxed,
            // Release: pairs with the Acquire in `Window::fresh_room`.
            _ => Ordering::Release,
        }
    }

    fn announcing(self) -> Ordering {
        match self {
            #[cfg(loom)]
            Publish::Mute => Ordering::Relaxed,
            // Release: pairs with the Acquire in `Shared::watermark`.
            _ => Ordering::Release,
        }
    }
}

/// What one scan of the flags found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// The offset to commit: the next offset to read after a restart. Every admitted record below
    /// it is finished. It is the epoch's start until the first record is passed.
    pub watermark: i64,
    /// Records passed by this scan.
    pub advanced: u64,
    /// Records passed since the epoch began.
    pub passed: u64,
    /// Admitted records at or above the watermark, finished or not.
    pub unfinished: u64,
    /// Offset of the record that holds the watermark because it ended without success (its ticket
    /// was dropped, or its handler failed for good). The watermark does not pass it.
    pub failed: Option<i64>,
}

/// One epoch of one partition: admits records in offset order and hands out their tickets.
///
/// `Window` is the admitting side and has one owner. [`Window::watermark`] gives the reading side,
/// which can be cloned and used from any thread; [`Ticket`]s finish from any thread, in any order.
///
/// # Guarantees
/// - The watermark never passes a record that has not been finished, and never goes down.
/// - At most `capacity` records are admitted and not yet passed by the watermark.
/// - A gap between offsets of any size costs O(1) time and no memory.
///
/// ```
/// use plimsoll_engine::Window;
///
/// let mut window = Window::open(100, 1_024)?;
/// let watermark = window.watermark();
/// let first = window.admit(100).unwrap();
/// let second = window.admit(107).unwrap(); // a gap: 101..=106 do not exist
/// second.finish();
/// assert_eq!(watermark.advance().watermark, 100); // the first one is unfinished
/// first.finish();
/// assert_eq!(watermark.advance().watermark, 108);
/// # Ok::<(), plimsoll_engine::InvalidSetting>(())
/// ```
#[derive(Debug)]
pub struct Window {
    shared: Arc<Shared>,
    next: Place,
    admitted: u64,
    /// Up to how many may be admitted: capacity beyond the last `passed` that was read, which is
    /// refreshed only when the window looks full.
    full_at: u64,
    /// The last admitted offset; `start - 1` before the first.
    last: i64,
    start: i64,
}

impl Window {
    /// Opens an epoch that starts at offset `start` and holds at most `capacity` records.
    ///
    /// # Errors
    /// [`InvalidSetting`] when `capacity` is 0, when its memory (9 bytes a slot) cannot be had, or
    /// when `start` is not in `0..=i64::MAX - 1`.
    pub fn open(start: i64, capacity: u32) -> Result<Self, InvalidSetting> {
        if !(0..=LAST_OFFSET).contains(&start) {
            let reason = format!("{start} is outside 0..={LAST_OFFSET}");
            return Err(InvalidSetting::new("start", reason));
        }
        if capacity == 0 {
            return Err(InvalidSetting::new("window", "must hold at least 1 record"));
        }
        let no_memory = || {
            InvalidSetting::new("window", format!("no memory for a window of {capacity} records"))
        };
        let shared = Shared {
            ring: Ring::new(capacity).ok_or_else(no_memory)?,
            offsets: boxed(capacity, || Ordered64::new(0)).ok_or_else(no_memory)?,
            admitted: CachePadded::new(AtomicU64::new(0)),
            passed: CachePadded::new(AtomicU64::new(0)),
            watermark: AtomicI64::new(start),
            cursor: Mutex::new(Cursor { place: Place::first(), sequence: 0 }),
            halted: AtomicBool::new(false),
        };
        Ok(Window {
            shared: Arc::new(shared),
            next: Place::first(),
            admitted: 0,
            full_at: u64::from(capacity),
            last: start - 1,
            start,
        })
    }

    /// Admits the record at `offset` and hands out its ticket. Never waits.
    ///
    /// # Errors
    /// [`Refused`] names the limit or the rule that forbids it; nothing has changed.
    pub fn admit(&mut self, offset: i64) -> Result<Ticket, Refused> {
        let place = self.admit_place(offset)?;
        Ok(Ticket::new(Arc::clone(&self.shared), place))
    }

    #[inline(always)]
    pub(crate) fn admit_place(&mut self, offset: i64) -> Result<Place, Refused> {
        if offset <= self.last || offset > LAST_OFFSET {
            return Err(self.refuse(offset));
        }
        if self.admitted == self.full_at && self.fresh_room() == 0 {
            return Err(Refused::Full { capacity: self.capacity() });
        }
        let place = self.next.step(self.shared.ring.capacity());
        // Published by the Release below.
        self.shared.offsets[place.index() as usize].set(offset);
        self.admitted += 1;
        self.last = offset;
        // Release: pairs with the Acquire in `scan`; the slot's offset is written.
        self.shared.admitted.store(self.admitted, Ordering::Release);
        Ok(place)
    }

    #[cold]
    fn refuse(&self, offset: i64) -> Refused {
        if !(0..=LAST_OFFSET).contains(&offset) {
            Refused::OutOfRange { offset }
        } else if offset < self.start {
            Refused::Below { offset, start: self.start }
        } else {
            Refused::Duplicate { offset, last: self.last }
        }
    }

    /// How many records can be admitted now. Never less than at the last call minus what was
    /// admitted since; it grows when the watermark moves.
    #[inline]
    pub fn room(&mut self) -> u32 {
        if self.admitted == self.full_at {
            return self.fresh_room();
        }
        // At most the capacity, which is a `u32`.
        (self.full_at - self.admitted) as u32
    }

    /// As [`room`](Self::room), but always with the newest word of the reading side.
    #[cold]
    pub fn fresh_room(&mut self) -> u32 {
        // Acquire: pairs with the Release in `scan`; the passed slots are free for reuse.
        let passed = self.shared.passed.load(Ordering::Acquire);
        self.full_at = passed + u64::from(self.shared.ring.capacity());
        // At most the capacity, which is a `u32`.
        (self.full_at - self.admitted) as u32
    }

    /// The reading side.
    pub fn watermark(&self) -> Watermark {
        Watermark { shared: Arc::clone(&self.shared) }
    }

    /// Most records that may be admitted and not yet passed.
    pub fn capacity(&self) -> u32 {
        self.shared.ring.capacity()
    }

    /// First offset of the epoch.
    pub fn start(&self) -> i64 {
        self.start
    }

    /// The last admitted offset, if any.
    pub fn last_admitted(&self) -> Option<i64> {
        (self.last >= self.start).then_some(self.last)
    }

    /// Records admitted since the epoch began.
    pub fn admitted(&self) -> u64 {
        self.admitted
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

/// The reading side of a [`Window`]: the watermark and what holds it.
///
/// Cheap to clone; every clone reads the same epoch.
#[derive(Debug, Clone)]
pub struct Watermark {
    shared: Arc<Shared>,
}

impl Watermark {
    /// The watermark as it was last published by [`advance`](Self::advance). One load.
    pub fn get(&self) -> i64 {
        self.shared.watermark()
    }

    /// Reads the flags from where the last scan stopped, moves the watermark over every finished
    /// record, and stops at the first one that is not.
    ///
    /// Costs one byte load per record passed. Two threads may call it at once; one waits for the
    /// other (the lock is taken once per call, never by a worker).
    pub fn advance(&self) -> Progress {
        self.shared.scan(&mut self.shared.cursor.lock(), Publish::Release)
    }

    /// As [`advance`](Self::advance), but `None` at once when another thread is scanning.
    pub fn try_advance(&self) -> Option<Progress> {
        let mut cursor = self.shared.cursor.try_lock()?;
        Some(self.shared.scan(&mut cursor, Publish::Release))
    }

    /// The broken twin of [`advance`](Self::advance), for the model that must fail.
    #[cfg(loom)]
    pub fn advance_weakly(&self) -> Progress {
        self.shared.scan(&mut self.shared.cursor.lock(), Publish::Weak)
    }

    /// Gives slots back before it has read them for the last time; for the model that must fail.
    #[cfg(loom)]
    pub fn advance_early(&self) -> Progress {
        self.shared.scan(&mut self.shared.cursor.lock(), Publish::Early)
    }

    /// Announces the watermark with `Relaxed`; for the model that must fail.
    #[cfg(loom)]
    pub fn advance_mutely(&self) -> Progress {
        self.shared.scan(&mut self.shared.cursor.lock(), Publish::Mute)
    }
}
