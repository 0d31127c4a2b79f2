//! The window: one epoch of one partition. Admission on one side, the watermark on the other.
//!
//! Records are numbered densely as they are admitted, and the ring of flags is indexed by that
//! sequence. Offsets are not kept per record: as long as they are contiguous an offset is the
//! sequence plus a constant, and where they are not, the new constant is noted as a jump, see [`Jumps`]. So a
//! gap of any size costs one note, and a record without a gap before it costs no store at all.

use crate::batch::Entry;
use crate::error::{InvalidSetting, Refused};
use crate::limits::{Limits, Meter, Settled, Taken};
use crate::ring::{Flag, Mark, Place, Ring, boxed};
use crate::snapshot::{Merge, Snapshot, drop_below, normalised};
use crate::sync::{Arc, AtomicBool, AtomicI64, AtomicU32, AtomicU64, Mutex, Ordered64, Ordering};
use crate::ticket::Ticket;
use crate::tickets::Tickets;
use crate::wake::{Waiter, Waker};
use crossbeam_utils::CachePadded;
use std::collections::VecDeque;
use std::num::NonZeroU8;
use std::ops::Range;
use std::time::Duration;

/// The last offset a record may have: the watermark after it must still be an `i64`.
pub(crate) const LAST_OFFSET: i64 = i64::MAX - 1;

/// Where the reader of the flags stands.
#[derive(Debug)]
struct Cursor {
    place: Place,
    sequence: u64,
    /// Offset less sequence of the last passed record; of the epoch's start before there is one.
    base: i64,
    /// Jumps passed.
    jumps: u64,
    /// Where the watermark goes when it has passed all records below a sequence.
    target: Option<Target>,
    /// What was finished before the epoch, as far as the watermark has not passed it.
    restored: VecDeque<Range<i64>>,
    settled: Settled,
}

/// The source's next offset after the records below `sequence`.
#[derive(Debug, Clone, Copy)]
struct Target {
    sequence: u64,
    next: i64,
}

/// The records whose offset is not the one after the record before: rings as long as that of the
/// flags, since a jump is passed with its record. 12 bytes a slot.
#[derive(Debug)]
struct Jumps {
    offsets: Box<[Ordered64]>,
    /// The lower half of each one's sequence: jumps that are not passed lie less than the capacity,
    /// a `u32`, above the cursor.
    sequences: Box<[AtomicU32]>,
}

impl Jumps {
    fn new(capacity: u32) -> Option<Self> {
        let offsets = boxed(capacity, || Ordered64::new(0))?;
        Some(Jumps { offsets, sequences: boxed(capacity, || AtomicU32::new(0))? })
    }

    fn index(&self, number: u64) -> usize {
        (number % self.offsets.len() as u64) as usize
    }

    fn set(&self, number: u64, sequence: u64, offset: i64) {
        let index = self.index(number);
        // Relaxed: published with `jumped`, as the offset is.
        self.sequences[index].store(sequence as u32, Ordering::Relaxed);
        self.offsets[index].set(offset);
    }

    /// Sequence and offset of a jump at or above `from`.
    fn get(&self, number: u64, from: u64) -> (u64, i64) {
        let index = self.index(number);
        // Relaxed: ordered by `jumped`.
        let ahead = self.sequences[index].load(Ordering::Relaxed).wrapping_sub(from as u32);
        (from + u64::from(ahead), self.offsets[index].get())
    }
}

/// Offset less sequence. Sequences are counts of records, far below 2^63.
fn base(offset: i64, sequence: u64) -> i64 {
    offset - sequence as i64
}

/// What the two sides of a window share.
#[derive(Debug)]
pub(crate) struct Shared {
    ring: Ring,
    /// Written at admission, before `jumped` and `admitted` say so; read by the scan, after it has
    /// read both.
    jumps: Jumps,
    /// Jumps since the epoch began. Written by the admitting side only.
    jumped: AtomicU64,
    /// Records admitted since the epoch began. Written by the admitting side only.
    admitted: CachePadded<AtomicU64>,
    /// Records the scan has passed. Written under the cursor's lock only.
    passed: CachePadded<AtomicU64>,
    /// The published watermark. Written under the cursor's lock only.
    watermark: AtomicI64,
    /// Taken once per scan, never per record.
    cursor: Mutex<Cursor>,
    /// Only if bytes are limited.
    meter: Option<Meter>,
    /// The executor's: records that have not been started must not start any more.
    halted: AtomicBool,
    /// Who may wait for records to end.
    waker: Option<Waker>,
}

impl Shared {
    #[inline]
    pub(crate) fn finish(&self, place: &Place, order: Mark) {
        self.ring.mark(place, order);
    }

    /// Marks entries of this epoch as done: `first` and those of `more` that are its neighbours in the
    /// ring, as most are. Returns the first of the others.
    #[inline]
    pub(crate) fn finish_streak<'a, T>(
        &self,
        first: &'a Entry<T>,
        more: &mut impl Iterator<Item = &'a Entry<T>>,
    ) -> Option<&'a Entry<T>> {
        let mut others = None;
        let mut place = first.tag.bare();
        self.ring.mark_streak(&first.place(), || {
            place += 1;
            others = more.next();
            others.is_some_and(|entry| entry.tag.bare() == place)
        });
        others
    }

    #[inline]
    pub(crate) fn fail(&self, place: &Place) {
        self.ring.mark_failed(place);
    }

    #[cfg(loom)]
    pub(crate) fn fail_weakly(&self, place: &Place) {
        self.ring.mark_failed_weakly(place);
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.ring.capacity()
    }

    #[inline(always)]
    pub(crate) fn halted(&self) -> bool {
        // Relaxed: a worker that halts an epoch sees its own store for the later records of the
        // same key, which are in the same lane; for other keys any moment is as good.
        self.halted.load(Ordering::Relaxed)
    }

    /// Tickets have ended.
    #[inline]
    pub(crate) fn tell(&self) {
        if let Some(waker) = &self.waker {
            waker.wake_refused();
        }
    }

    /// The broken twin of [`tell`](Self::tell), for the model that must fail.
    #[cfg(loom)]
    pub(crate) fn tell_weakly(&self) {
        if let Some(waker) = &self.waker {
            waker.wake_refused_weakly();
        }
    }

    /// Whether it was halted before.
    pub(crate) fn halt(&self) -> bool {
        // AcqRel: who finds it set also finds the count that its setter made before; see
        // `Registry::halt`.
        self.halted.swap(true, Ordering::AcqRel)
    }

    /// Offset of an unfinished record. Waits for a scan that is running; O(log n) in the number of
    /// gaps.
    pub(crate) fn offset_of(&self, place: &Place) -> i64 {
        let cursor = self.cursor.lock();
        // The record is not passed, and at most the capacity is admitted and not passed.
        let capacity = self.ring.capacity();
        let ahead = match place.index().checked_sub(cursor.place.index()) {
            Some(ahead) => ahead,
            None => place.index() + (capacity - cursor.place.index()),
        };
        let sequence = cursor.sequence + u64::from(ahead);
        // The last jump at or before the record. Acquire: as in `pass_jumps`.
        let (mut from, mut to) = (cursor.jumps, self.jumped.load(Ordering::Acquire));
        while from < to {
            let middle = from.midpoint(to);
            if self.jumps.get(middle, cursor.sequence).0 <= sequence {
                from = middle + 1;
            } else {
                to = middle;
            }
        }
        let base = if from == cursor.jumps {
            cursor.base
        } else {
            let (at, offset) = self.jumps.get(from - 1, cursor.sequence);
            base(offset, at)
        };
        base + sequence as i64
    }

    /// Whether the record in a slot, which is admitted and not passed, has not ended.
    pub(crate) fn is_unfinished(&self, index: u32) -> bool {
        let cursor = self.cursor.lock();
        self.ring.read(&self.place_of(&cursor, index), 1) == (0, Flag::Open)
    }

    /// As [`offset_of`](Self::offset_of).
    pub(crate) fn offset_at(&self, index: u32) -> i64 {
        self.offset_of(&Place { index, lap: NonZeroU8::MIN })
    }

    /// The place of a slot in the lap it is in for the cursor.
    fn place_of(&self, cursor: &Cursor, index: u32) -> Place {
        let mut place = Place { index: cursor.place.index, lap: cursor.place.lap };
        let capacity = self.ring.capacity();
        if index < place.index {
            place.skip(capacity - place.index, capacity);
        }
        place.skip(index - place.index, capacity);
        place
    }

    /// Where the watermark stands, and what is finished behind it. O(unfinished records).
    pub(crate) fn standing(&self) -> Standing {
        let mut cursor = self.cursor.lock();
        let progress = self.scan(&mut cursor, Publish::Release);
        let capacity = self.ring.capacity();
        let mut place = Place { index: cursor.place.index, lap: cursor.place.lap };
        let mut left = progress.unfinished;
        let mut finished_behind = 0;
        while left > 0 {
            // Bounded by the ring's capacity, which is a `u32`.
            let (count, _) = self.ring.read(&place, left.min(u64::from(capacity)) as u32);
            finished_behind += u64::from(count);
            // And the one that is not done, if it is not the end of the ring that stopped it.
            let stopped = count == 0 || place.index + count < capacity;
            let step = u64::from(count) + u64::from(stopped);
            let step = step.min(left) as u32;
            place.skip(step, capacity);
            left -= u64::from(step);
        }
        let begun = cursor.sequence;
        let offset = self.pass_jumps(&mut cursor, begun);
        let place = Place { index: cursor.place.index, lap: cursor.place.lap };
        Standing { progress, place, offset, finished_behind }
    }

    /// Moves the cursor's base over the jumps up to the record before its sequence, which was at
    /// `begun` when this was last done; returns the offset of the record at its sequence.
    fn pass_jumps(&self, cursor: &mut Cursor, begun: u64) -> i64 {
        // Acquire: pairs with the Release in `Window::admit_place`.
        let jumped = self.jumped.load(Ordering::Acquire);
        while cursor.jumps < jumped {
            let (sequence, offset) = self.jumps.get(cursor.jumps, begun);
            if sequence > cursor.sequence {
                break;
            }
            if sequence == cursor.sequence {
                return offset;
            }
            cursor.base = base(offset, sequence);
            cursor.jumps += 1;
        }
        cursor.base + cursor.sequence as i64
    }

    fn watermark(&self) -> i64 {
        // Acquire: pairs with the Release in `scan`; who sees a watermark also sees the effects
        // of every record below it.
        self.watermark.load(Ordering::Acquire)
    }

    fn scan(&self, cursor: &mut Cursor, publish: Publish) -> Progress {
        // Acquire: pairs with the Release in `admit`; the jumps up to there are written.
        let admitted = self.admitted.load(Ordering::Acquire);
        let capacity = self.ring.capacity();
        let begun = cursor.sequence;
        let mut stop = Flag::Open;
        while cursor.sequence < admitted {
            // Bounded by the ring's capacity, which is a `u32`.
            let most = (admitted - cursor.sequence).min(u64::from(capacity)) as u32;
            let count;
            (count, stop) = self.ring.read(&cursor.place, most);
            cursor.place.skip(count, capacity);
            cursor.sequence += u64::from(count);
            if stop != Flag::Done {
                break;
            }
        }
        #[cfg(loom)]
        if publish == Publish::Early {
            self.passed.store(cursor.sequence, Ordering::Release);
        }
        let mut failed = None;
        if cursor.sequence > begun || stop == Flag::Failed {
            // Before the slots are given back: from then on the jumps may be overwritten.
            let offset = self.pass_jumps(cursor, begun);
            failed = (stop == Flag::Failed).then_some(offset);
        }
        if cursor.sequence > begun {
            // Release: pairs with `watermark`. The flags were read with Acquire, so this carries
            // what the handlers did on to whoever commits.
            self.watermark.store(cursor.base + cursor.sequence as i64, publish.announcing());
            // Release: pairs with the Acquire in `fresh_room`; the slots and jumps up to here were
            // read for the last time, so they may be used again.
            self.passed.store(cursor.sequence, publish.ordering());
        }
        if cursor.target.is_some() {
            self.reach(cursor);
        }
        if let Some(meter) = &self.meter {
            meter.settle(&mut cursor.settled, cursor.sequence, &self.admitted);
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

impl Shared {
    /// Moves the watermark to its target, if all records below that are passed.
    fn reach(&self, cursor: &mut Cursor) {
        let Some(target) = cursor.target.take_if(|target| target.sequence <= cursor.sequence)
        else {
            return;
        };
        // Otherwise a record above it was passed already. The next record notes a jump in any case,
        // see `Window::pinned`, so the base stays.
        if target.sequence == cursor.sequence {
            // Release: pairs with `watermark`, as in `scan`.
            self.watermark.store(target.next, Ordering::Release);
        }
    }

    /// Moves the watermark on to `next` when all records below `sequence` are passed: perhaps at once.
    fn aim(&self, sequence: u64, next: i64) {
        let mut cursor = self.cursor.lock();
        cursor.target = Some(Target { sequence, next });
        self.reach(&mut cursor);
    }

    fn snapshot(&self, into: &mut Snapshot) -> Progress {
        let mut cursor = self.cursor.lock();
        let progress = self.scan(&mut cursor, Publish::Release);
        into.begin(progress.watermark);
        self.list(&mut cursor, progress, into);
        progress
    }

    /// Lists what is done above the watermark, after a scan.
    fn list(&self, cursor: &mut Cursor, progress: Progress, into: &mut Snapshot) {
        drop_below(&mut cursor.restored, progress.watermark);
        let mut merge = Merge::new(into, cursor.restored.iter().cloned());
        let admitted = cursor.sequence + progress.unfinished;
        // Acquire: as in `pass_jumps`.
        let jumped = self.jumped.load(Ordering::Acquire);
        let capacity = self.ring.capacity();
        let (mut place, mut sequence) = (cursor.place.copy(), cursor.sequence);
        let (mut base_here, mut jumps) = (cursor.base, cursor.jumps);
        while sequence < admitted {
            let mut until = admitted;
            if jumps < jumped {
                let (at, offset) = self.jumps.get(jumps, cursor.sequence);
                if at == sequence {
                    base_here = base(offset, at);
                    jumps += 1;
                    continue;
                }
                until = until.min(at);
            }
            let (done, count) = if sequence == cursor.sequence {
                // The scan has found it unfinished, and so the watermark stands there. It may be done
                // by now, but not in this snapshot.
                (false, 1)
            } else {
                // At most the capacity, a `u32`.
                self.ring.run(&place, (until - sequence) as u32)
            };
            if done {
                let offset = base_here + sequence as i64;
                merge.push(offset..offset + i64::from(count));
            }
            place.skip(count, capacity);
            sequence += u64::from(count);
        }
        merge.end();
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

/// A closer look at where a watermark stands.
#[derive(Debug)]
pub(crate) struct Standing {
    pub(crate) progress: Progress,
    /// Place of the record at the watermark.
    pub(crate) place: Place,
    /// Its offset.
    pub(crate) offset: i64,
    pub(crate) finished_behind: u64,
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
    jumped: u64,
    start: i64,
    /// Only if each record has to be looked at.
    gate: Option<Box<Gate>>,
    /// The last move that admitted nothing: how many records were admitted then, and the last one's
    /// offset.
    moved: Option<(u64, i64)>,
    /// What `passed` was when room was last looked for.
    seen: u64,
}

/// What each record has to pass, beside the capacity.
#[derive(Debug)]
struct Gate {
    span: Option<u64>,
    taken: Taken,
    /// Offsets finished before the epoch, of which none was offered yet.
    restored: VecDeque<Range<i64>>,
}

impl Window {
    /// Opens an epoch that starts at offset `start` and holds at most `capacity` records.
    ///
    /// # Errors
    /// [`InvalidSetting`] when `capacity` is 0, when its memory (13 bytes a slot) cannot be had, or
    /// when `start` is not in `0..=i64::MAX - 1`.
    pub fn open(start: i64, capacity: u32) -> Result<Self, InvalidSetting> {
        Self::open_with(start, &Limits::new(capacity))
    }

    /// As [`open`](Self::open), with limits on bytes and offsets, too.
    ///
    /// # Errors
    /// As [`open`](Self::open), and when another limit is 0.
    pub fn open_with(start: i64, limits: &Limits) -> Result<Self, InvalidSetting> {
        Self::restore(start, limits, &[])
    }

    /// As [`open_with`](Self::open_with), for an epoch of which an earlier life has finished some
    /// records above the start: `done`, in any order, as a [`Snapshot`] has listed them.
    ///
    /// When such an offset is offered it is refused as [`Refused::Done`], takes no place and no bytes,
    /// and counts as finished. Those that are never offered, because they do not exist any more, are
    /// not waited for. All of them are in the epoch's own snapshots until the watermark has passed
    /// them. What lies below the start is ignored.
    ///
    /// # Errors
    /// As [`open_with`](Self::open_with).
    ///
    /// ```
    /// use plimsoll_engine::{Limits, Refused, Window};
    ///
    /// let mut window = Window::restore(5, &Limits::new(16), &[6..8])?;
    /// window.admit(5).unwrap().finish();
    /// assert_eq!(window.admit(6).unwrap_err(), Refused::Done { offset: 6 });
    /// assert_eq!(window.watermark().advance().watermark, 7);
    /// # Ok::<(), plimsoll_engine::InvalidSetting>(())
    /// ```
    pub fn restore(
        start: i64,
        limits: &Limits,
        done: &[Range<i64>],
    ) -> Result<Self, InvalidSetting> {
        limits.check()?;
        let capacity = limits.records;
        if !(0..=LAST_OFFSET).contains(&start) {
            let reason = format!("{start} is outside 0..={LAST_OFFSET}");
            return Err(InvalidSetting::new("start", reason));
        }
        let no_memory = || {
            InvalidSetting::new("window", format!("no memory for a window of {capacity} records"))
        };
        let restored = VecDeque::from(normalised(done, start));
        let shared = Shared {
            ring: Ring::new(capacity).ok_or_else(no_memory)?,
            jumps: Jumps::new(capacity).ok_or_else(no_memory)?,
            jumped: AtomicU64::new(0),
            admitted: CachePadded::new(AtomicU64::new(0)),
            passed: CachePadded::new(AtomicU64::new(0)),
            watermark: AtomicI64::new(start),
            cursor: Mutex::new(Cursor {
                place: Place::first(),
                sequence: 0,
                base: base(start, 0),
                jumps: 0,
                target: None,
                restored: restored.clone(),
                settled: Settled::default(),
            }),
            // The last that can fail: from here on it must be ended, see `release`.
            meter: Meter::new(limits).map_err(|()| no_memory())?,
            halted: AtomicBool::new(false),
            waker: limits.waker.clone(),
        };
        let gated = limits.span.is_some() || shared.meter.is_some() || !restored.is_empty();
        let gate =
            gated.then(|| Box::new(Gate { span: limits.span, taken: Taken::default(), restored }));
        Ok(Window {
            full_at: if gated { 0 } else { u64::from(capacity) },
            gate,
            moved: None,
            seen: 0,
            shared: Arc::new(shared),
            next: Place::first(),
            admitted: 0,
            last: start - 1,
            jumped: 0,
            start,
        })
    }

    /// Admits the record at `offset` and hands out its ticket. Never waits.
    ///
    /// # Errors
    /// [`Refused`] names the limit or the rule that forbids it; nothing has changed.
    pub fn admit(&mut self, offset: i64) -> Result<Ticket, Refused> {
        let place = self.admit_place(offset)?;
        Ok(Ticket::new(Arc::clone(&self.shared), place, offset))
    }

    /// As [`admit`](Self::admit), for a window whose bytes are limited; `bytes` are held until the
    /// watermark has passed the record. Without such a limit they do not matter.
    ///
    /// # Errors
    /// As [`admit`](Self::admit).
    pub fn admit_sized(&mut self, offset: i64, bytes: u32) -> Result<Ticket, Refused> {
        let place = self.admit_place_sized(offset, bytes)?;
        Ok(Ticket::new(Arc::clone(&self.shared), place, offset))
    }

    /// Admits records together, the first [`Tickets::MOST`] of `offsets` at most, and hands out one
    /// object for all of them. Gaps are allowed. Ends at the first record that is refused:
    /// [`Tickets::len`] says how many were admitted.
    ///
    /// # Errors
    /// The reason why the first one was refused.
    pub fn admit_batch(&mut self, offsets: &[i64]) -> Result<Tickets, Refused> {
        self.admit_several(offsets.iter().map(|offset| (*offset, 0)))
    }

    /// As [`admit_batch`](Self::admit_batch), for records given by offset and bytes.
    ///
    /// # Errors
    /// As [`admit_batch`](Self::admit_batch).
    pub fn admit_batch_sized(&mut self, records: &[(i64, u32)]) -> Result<Tickets, Refused> {
        self.admit_several(records.iter().copied())
    }

    fn admit_several(
        &mut self,
        records: impl Iterator<Item = (i64, u32)>,
    ) -> Result<Tickets, Refused> {
        let mut first = None;
        let mut len = 0;
        let mut refused = None;
        for (offset, bytes) in records.take(Tickets::MOST) {
            match self.admit_place_sized(offset, bytes) {
                Ok(place) => {
                    first.get_or_insert(place);
                    len += 1;
                }
                Err(reason) => {
                    refused = Some(reason);
                    break;
                }
            }
        }
        match (first, refused) {
            (None, Some(refused)) => Err(refused),
            (first, _) => {
                let place = first.unwrap_or_else(|| self.next.copy());
                Ok(Tickets::new(Arc::clone(&self.shared), place, len))
            }
        }
    }

    /// Moves on to the source's real next offset: there is no record below `next` that was not
    /// offered. The watermark goes there as soon as everything that is admitted is finished (at once
    /// if it is, else in a later [`Watermark::advance`]), so that an idle partition's lag reaches 0
    /// though its log ends with transaction markers. A gap of any size costs O(1). Moving to where the
    /// epoch is already changes nothing.
    ///
    /// # Errors
    /// [`Refused::Backwards`] when `next` is not above the last admitted offset or below an earlier
    /// move. From now on offsets below `next` are refused as [`Refused::Duplicate`].
    ///
    /// ```
    /// use plimsoll_engine::Window;
    ///
    /// let mut window = Window::open(0, 16)?;
    /// let ticket = window.admit(0).unwrap();
    /// assert_eq!(window.advance_to(3).unwrap().watermark, 0);
    /// ticket.finish();
    /// assert_eq!(window.watermark().advance().watermark, 3);
    /// # Ok::<(), plimsoll_engine::InvalidSetting>(())
    /// ```
    pub fn advance_to(&mut self, next: i64) -> Result<Progress, Refused> {
        let least = self.last + 1;
        if next < least {
            return Err(Refused::Backwards { next, least });
        }
        if next > least {
            self.move_to(next);
        }
        Ok(self.watermark().advance())
    }

    fn move_to(&mut self, next: i64) {
        let last = match self.moved {
            Some((admitted, last)) if admitted == self.admitted => last,
            _ => self.last,
        };
        self.moved = Some((self.admitted, last));
        self.last = next - 1;
        // The next record must note a jump: see `pinned`.
        self.full_at = self.admitted;
        self.shared.aim(self.admitted, next);
    }

    /// Whether the next record must come the slow way, by `full_at` being `admitted`: because each has
    /// to pass the gate, or because the epoch was moved on, so that the record has to note a jump even
    /// if it has the next offset. So the fast way needs no test of its own.
    fn pinned(&self) -> bool {
        self.gate.is_some() || self.moved.is_some_and(|(admitted, _)| admitted == self.admitted)
    }

    /// The slow way: there seems to be no room. Afterwards there is room for the record.
    #[cold]
    fn make_room(&mut self, offset: i64, bytes: u32) -> Result<(), Refused> {
        let done = self.gate.as_mut().is_some_and(|gate| {
            // Not below `offset`, which may be refused: then a lower one may come.
            drop_below(&mut gate.restored, self.last + 1);
            let at = gate.restored.partition_point(|range| range.end <= offset);
            gate.restored.get(at).is_some_and(|range| range.start <= offset)
        });
        if done {
            self.move_to(offset + 1);
            return Err(Refused::Done { offset });
        }
        let room = self.fresh_room();
        if room == 0 {
            return Err(Refused::Full { capacity: self.capacity() });
        }
        let mut open = false;
        if let Some(gate) = &self.gate {
            let (meter, empty) = (self.shared.meter.as_ref(), room == self.capacity());
            if let Some(span) = gate.span.filter(|_| !empty) {
                let watermark = self.shared.watermark();
                // Not below the watermark.
                if offset.abs_diff(watermark) > span {
                    return Err(Refused::Span { offset, watermark, span });
                }
            }
            if let Some(meter) = meter {
                meter.take(&gate.taken, bytes)?;
            }
            open = gate.span.is_none() && meter.is_none() && gate.restored.is_empty();
        }
        if open {
            self.gate = None;
        }
        if self.pinned() {
            if self.moved.is_some_and(|(admitted, _)| admitted == self.admitted)
                && offset == self.last + 1
            {
                // Release: as in `admit_place`.
                self.jump(offset, Ordering::Release);
            }
            // For this one only.
            self.full_at = self.admitted + 1;
        } else {
            self.fresh_room();
        }
        Ok(())
    }

    /// Notes the bytes of the record that was just admitted.
    #[cold]
    fn note(&mut self, bytes: u32) {
        if let (Some(gate), Some(meter)) = (&mut self.gate, &self.shared.meter) {
            meter.note(&mut gate.taken, bytes, self.admitted);
        }
    }

    /// Gives all bytes back: the epoch has ended, and what happens to its records changes nothing.
    pub(crate) fn release(&mut self) {
        if let (Some(gate), Some(meter)) = (&self.gate, &self.shared.meter) {
            meter.end(&mut self.shared.cursor.lock().settled, &gate.taken);
        }
    }

    /// Whether bytes are limited.
    pub(crate) fn is_metered(&self) -> bool {
        self.shared.meter.is_some()
    }

    /// Bytes that the window holds; 0 if they are not limited.
    pub fn held_bytes(&self) -> u64 {
        match (&self.gate, &self.shared.meter) {
            (Some(gate), Some(meter)) => meter.held(&gate.taken),
            _ => 0,
        }
    }

    /// The broken twin of [`admit`](Self::admit), which does not publish its jump, for the model that
    /// must fail.
    #[cfg(loom)]
    pub fn admit_weakly(&mut self, offset: i64) -> Result<Ticket, Refused> {
        let place = self.admit_ordered(offset, 0, Ordering::Relaxed)?;
        Ok(Ticket::new(Arc::clone(&self.shared), place, offset))
    }

    #[inline(always)]
    pub(crate) fn admit_place(&mut self, offset: i64) -> Result<Place, Refused> {
        self.admit_place_sized(offset, 0)
    }

    #[inline(always)]
    pub(crate) fn admit_place_sized(&mut self, offset: i64, bytes: u32) -> Result<Place, Refused> {
        // Release: pairs with the Acquire in `pass_jumps`; the jump is written.
        let place = self.admit_ordered(offset, bytes, Ordering::Release)?;
        if bytes > 0 {
            self.note(bytes);
        }
        Ok(place)
    }

    #[inline(always)]
    fn admit_ordered(
        &mut self,
        offset: i64,
        bytes: u32,
        jumped: Ordering,
    ) -> Result<Place, Refused> {
        if offset <= self.last || offset > LAST_OFFSET {
            return Err(self.refuse(offset));
        }
        if self.admitted == self.full_at {
            self.make_room(offset, bytes)?;
        }
        if offset != self.last + 1 {
            self.jump(offset, jumped);
        }
        let place = self.next.step(self.shared.ring.capacity());
        self.admitted += 1;
        self.last = offset;
        // Release: pairs with the Acquire in `scan`; a jump to the record is written.
        self.shared.admitted.store(self.admitted, Ordering::Release);
        Ok(place)
    }

    /// Notes that the next record does not have the next offset.
    #[cold]
    fn jump(&mut self, offset: i64, order: Ordering) {
        // Published by the store below. The place was read for the last time: each jump has a record
        // of its own, and that of the one before in this place was passed, see `room`.
        self.shared.jumps.set(self.jumped, self.admitted, offset);
        self.jumped += 1;
        self.shared.jumped.store(self.jumped, order);
    }

    /// Up to `most` places that a run of contiguous records will take, those of one lap.
    #[inline(always)]
    pub(crate) fn places(&mut self, most: u32) -> Places {
        let to_wrap = self.shared.ring.capacity() - self.next.index;
        // At most `most`, a `u32`.
        let offsets = u64::from(most).min((LAST_OFFSET - self.last) as u64) as u32;
        if self.admitted == self.full_at {
            self.fresh_room();
        }
        // At most the capacity, which is a `u32`; none if each record has to pass the gate.
        let room = (self.full_at - self.admitted) as u32;
        let count = offsets.min(room).min(to_wrap);
        Places { index: self.next.index, lap: self.next.lap, offset: self.last + 1, count }
    }

    /// Admits the first `count` of the [`places`](Self::places) that were taken.
    #[inline(always)]
    pub(crate) fn admit_places(&mut self, count: u32) {
        self.next.skip(count, self.shared.ring.capacity());
        self.admitted += u64::from(count);
        self.last += i64::from(count);
        // Release: pairs with the Acquire in `scan`; jumps to earlier records are written.
        self.shared.admitted.store(self.admitted, Ordering::Release);
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
        self.seen = passed;
        let full_at = passed + u64::from(self.shared.ring.capacity());
        if !self.pinned() {
            self.full_at = full_at;
        }
        // At most the capacity, which is a `u32`.
        (full_at - self.admitted) as u32
    }

    /// Sleeps, after a record was refused, until it is worth offering it again: until the watermark has
    /// moved since then, or `limit` has passed. Returns whether it has moved.
    ///
    /// The window must have been opened with the [waker](Limits::waker) of `waiter`; its tickets then
    /// wake the sleeping thread when they end, and only then. No wake-up is lost. Room in a
    /// [`Budget`](crate::Budget) may come from another window; its tickets wake this thread if it was
    /// opened with the same waker, and `limit` bounds the sleep in any case.
    pub fn wait_room(&self, waiter: &Waiter, limit: Duration) -> bool {
        self.wait_room_with(|ready| waiter.wait_refused(limit, ready))
    }

    fn wait_room_with(&self, wait: impl FnOnce(&dyn Fn() -> bool)) -> bool {
        let (watermark, seen) = (self.watermark(), self.seen);
        let moved = || {
            watermark.advance();
            // Acquire: pairs with the Release in `scan`; the passed slots are free for reuse.
            watermark.shared.passed.load(Ordering::Acquire) != seen
        };
        if moved() {
            return true;
        }
        wait(&moved);
        moved()
    }

    /// The broken twin of [`wait_room`](Self::wait_room), which is deaf to tickets.
    #[cfg(loom)]
    pub fn wait_room_weakly(&self, waiter: &Waiter, limit: Duration) -> bool {
        self.wait_room_with(|ready| waiter.wait_refused_weakly(limit, ready))
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
        let last = match self.moved {
            Some((admitted, last)) if admitted == self.admitted => last,
            _ => self.last,
        };
        (last >= self.start).then_some(last)
    }

    /// Records admitted since the epoch began.
    pub fn admitted(&self) -> u64 {
        self.admitted
    }

    /// Records the watermark has passed, as far as this side knows.
    pub(crate) fn passed(&self) -> u64 {
        // Relaxed: a hint.
        self.shared.passed.load(Ordering::Relaxed)
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.release();
    }
}

/// Free places for contiguous records: `count` slots from `index` on, of one lap, for the offsets
/// from `offset` on.
#[derive(Debug)]
pub(crate) struct Places {
    pub(crate) index: u32,
    pub(crate) lap: NonZeroU8,
    pub(crate) offset: i64,
    pub(crate) count: u32,
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

    /// [Advances](Self::advance), and lists what is finished above the watermark at the same moment.
    ///
    /// Costs one byte load for each admitted record, and memory only when more ranges are found than
    /// in any earlier use of `into`. Waits for another thread's scan, and others for this one.
    pub fn snapshot(&self, into: &mut Snapshot) -> Progress {
        self.shared.snapshot(into)
    }

    /// The broken twin of [`snapshot`](Self::snapshot): its two parts are of different moments.
    #[cfg(loom)]
    pub fn snapshot_in_two(&self, into: &mut Snapshot) -> Progress {
        self.snapshot(into);
        let progress = self.advance();
        into.set_watermark(progress.watermark);
        progress
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
