//! A worker's lane: one producer (the dispatcher), one consumer (the worker), entries used in place.
//!
//! Unlike a plain queue nothing is moved out: the worker claims a run of entries, works on them
//! where they lie, and moves `done` past the run; the dispatcher then takes the slots back and
//! destroys what is in them. So the worker neither copies nor frees, and whatever it left in an
//! entry flows back to the dispatcher with the same single store that says "done".
//!
//! ```text
//!   reclaimed        done         claim          end        staged
//!   ----|-------------|-------------|-------------|-------------|----
//!    free  dispatcher's   worker's     unclaimed    dispatcher's   free
//!          to take back   to work on                to publish
//! ```
//!
//! All positions count entries since the lane began, modulo 2^31.
//!
//! | part of `word` | written by | meaning |
//! |---|---|---|
//! | bits 0..31 `claim` | worker, compare-exchange | entries up to here belong to the worker |
//! | bit 31 `asleep` | worker sets it only if claim = end | the next flush must wake the worker |
//! | bits 32..64 `end` | dispatcher, add (carries fall off the top) | entries up to here are published |
//!
//! Claiming and falling asleep decide on one word, so no wake-up can be lost: either the flush
//! sees `asleep` in the value it replaced, or the worker's exchange fails because `end` moved.
//!
//! This file holds the engine's only `unsafe`. Its invariant, on which every block rests: **a slot
//! is accessed by the dispatcher while it lies outside `reclaimed..end`, or in `reclaimed..done`;
//! by the worker while it lies in `done..claim`; and by nobody else.** The halves are enforced by
//! type: there is one [`LaneTx`] and one [`LaneRx`], neither can be cloned, and their methods take
//! `&mut self`. Tested by `lane_hand_over` and its twins in `loom-tests` (loom checks each cell
//! access) and by the drop tests below.

use crate::ring::boxed;
use crate::sync::{Arc, AtomicBool, AtomicU32, AtomicU64, Ordering, UnsafeCell};
use crossbeam_utils::CachePadded;
use std::mem::MaybeUninit;

/// The largest position; adding it steps one back.
pub(crate) const POSITION: u32 = (1 << 31) - 1;
const ASLEEP: u64 = 1 << 31;
const END_SHIFT: u32 = 32;
/// How many entries ahead a [`Writer`] asks for a slot, whose cache line the worker holds since the
/// last lap. What it saves was measured: see "The dispatcher asks for a lane's lines ahead" in
/// `docs/src/design.md`.
const AHEAD: u32 = 64;

#[inline(always)]
fn claim_of(word: u64) -> u32 {
    word as u32 & POSITION
}

#[inline(always)]
fn available(word: u64) -> u32 {
    ((word >> END_SHIFT) as u32).wrapping_sub(word as u32) & POSITION
}

/// How many entries lie from `from` up to `to`.
#[inline(always)]
pub(crate) fn distance(from: u32, to: u32) -> u32 {
    to.wrapping_sub(from) & POSITION
}

/// The position `step` entries after `position`.
#[inline(always)]
pub(crate) fn advance(position: u32, step: u32) -> u32 {
    position.wrapping_add(step) & POSITION
}

/// Whether a position counter has reached `position`. Right while the two are less than 2^30
/// apart; a much older position can at worst look as if it were not reached.
#[inline(always)]
pub(crate) fn reached(counter: u32, position: u32) -> bool {
    distance(position, counter) < 1 << 30
}

#[derive(Debug)]
struct Shared<E> {
    word: CachePadded<AtomicU64>,
    /// The worker has finished all entries up to here. Written by the worker only.
    done: CachePadded<AtomicU32>,
    /// How many entries one claim should take. A hint, written by the dispatcher only.
    run: CachePadded<AtomicU32>,
    /// Position after the last entry that the worker handed back. Written by the worker only.
    back: AtomicU32,
    stop: AtomicBool,
    /// Written once, when the `LaneTx` goes: what is left for `drop` to destroy.
    left_from: AtomicU32,
    left_to: AtomicU32,
    slots: Box<[UnsafeCell<MaybeUninit<E>>]>,
}

// SAFETY: the invariant in the module's documentation gives every slot one owner at a time, and
// ownership passes through Release/Acquire pairs on `word` and `done`; so entries only ever move
// between threads (`E: Send`). Exercised by `lane_hand_over` in `loom-tests`.
unsafe impl<E: Send> Sync for Shared<E> {}
// SAFETY: as above; dropping the lane on another thread drops the entries there.
unsafe impl<E: Send> Send for Shared<E> {}

impl<E> Shared<E> {
    #[inline(always)]
    fn slot(&self, position: u32) -> &UnsafeCell<MaybeUninit<E>> {
        slot_of(&self.slots, position)
    }
}

/// Fetches the cache line of a slot that will be written soon.
#[inline(always)]
fn prefetch_for_write<T>(slot: *mut T) {
    #[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
    // SAFETY: a prefetch neither reads nor writes anything a program can see, whatever the address;
    // processors without it take it for a no-op. Exercised by every test of an executor.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) slot, options(nostack, preserves_flags));
    }
    #[cfg(not(all(target_arch = "x86_64", not(loom), not(miri))))]
    let _ = slot;
}

/// The slot of a position.
#[inline(always)]
fn slot_of<T>(slots: &[T], position: u32) -> &T {
    let index = position as usize & (slots.len() - 1);
    debug_assert!(index < slots.len());
    // SAFETY: the length is a power of two and so at least 1 (checked by `lane`); a number masked
    // by it less one is below it. Exercised by every test.
    unsafe { slots.get_unchecked(index) }
}

impl<E> Drop for Shared<E> {
    fn drop(&mut self) {
        // Relaxed: dropping the last `Arc` has synchronised with both halves.
        let mut position = self.left_from.load(Ordering::Relaxed);
        let to = self.left_to.load(Ordering::Relaxed);
        while position != to {
            // SAFETY: both halves are gone, so nobody else has access, and `left_from..left_to` is
            // what was pushed and never reclaimed. Tested by `what_is_left_is_dropped_once`.
            self.slot(position).with_mut(|slot| unsafe { (*slot).assume_init_drop() });
            position = advance(position, 1);
        }
    }
}

/// How the halves order their hand-overs. Only [`Order::Right`] is right; the others exist for the
/// loom twins that must fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// As shipped.
    Right,
    /// The flush publishes with `Relaxed`.
    #[cfg(loom)]
    WeakFlush,
    /// `done` is stored with `Relaxed`.
    #[cfg(loom)]
    WeakDone,
    /// The worker announces its sleep without looking at `end` again.
    #[cfg(loom)]
    BlindSleep,
    /// The recall takes back `end` without looking whether the worker has claimed meanwhile.
    #[cfg(loom)]
    BlindRecall,
    /// The worker says that it handed something back only after it has moved `done`.
    #[cfg(loom)]
    LateBack,
}

/// Makes a lane of `length` slots (a power of two, at most 2^16).
///
/// `None` when the memory cannot be had.
pub fn lane<E>(length: u32, order: Order) -> Option<(LaneTx<E>, LaneRx<E>)> {
    lane_from(length, order, 0)
}

/// As [`lane`], but its first entry is at position `from`, so that positions in a lane that was there
/// before count as reached.
pub(crate) fn lane_from<E>(length: u32, order: Order, from: u32) -> Option<(LaneTx<E>, LaneRx<E>)> {
    assert!(length.is_power_of_two() && length <= 1 << 16, "lane length {length}");
    let shared = Arc::new(Shared {
        word: CachePadded::new(AtomicU64::new((u64::from(from) << END_SHIFT) | u64::from(from))),
        done: CachePadded::new(AtomicU32::new(from)),
        run: CachePadded::new(AtomicU32::new(1)),
        back: AtomicU32::new(from),
        stop: AtomicBool::new(false),
        left_from: AtomicU32::new(from),
        left_to: AtomicU32::new(from),
        slots: boxed(length, || UnsafeCell::new(MaybeUninit::uninit()))?,
    });
    let tx = LaneTx {
        shared: Arc::clone(&shared),
        reclaimed: from,
        staged: from,
        published: from,
        order,
    };
    let rx = LaneRx { shared, order };
    Some((tx, rx))
}

/// The dispatcher's half.
#[derive(Debug)]
pub struct LaneTx<E> {
    shared: Arc<Shared<E>>,
    reclaimed: u32,
    staged: u32,
    published: u32,
    order: Order,
}

impl<E> LaneTx<E> {
    /// Number of slots.
    pub fn length(&self) -> u32 {
        self.shared.slots.len() as u32
    }

    /// Entries pushed and not yet reclaimed.
    #[inline]
    pub fn pending(&self) -> u32 {
        distance(self.reclaimed, self.staged)
    }

    /// Entries published and not yet reclaimed.
    #[inline]
    pub fn in_flight(&self) -> u32 {
        distance(self.reclaimed, self.published)
    }

    /// Entries pushed and not yet published.
    #[inline]
    pub fn unpublished(&self) -> u32 {
        distance(self.published, self.staged)
    }

    /// The entry `step` behind the first one that is not published.
    pub fn peek(&self, step: u32) -> Option<&E> {
        (step < self.unpublished()).then(|| {
            self.shared.slot(advance(self.published, step)).with(|slot| {
                // SAFETY: the slot lies in `published..staged`, outside `reclaimed..end`: it was
                // written by `push`, is the dispatcher's, and stays so while the reference borrows
                // this half. Tested by `an_unflushed_entry_is_not_seen`.
                unsafe { (*slot).assume_init_ref() }
            })
        })
    }

    /// Position after the last pushed entry.
    #[inline]
    pub fn end(&self) -> u32 {
        self.staged
    }

    /// Position up to which the worker has claimed entries.
    pub fn claimed(&self) -> u32 {
        // Relaxed: a hint.
        claim_of(self.shared.word.load(Ordering::Relaxed))
    }

    /// Whether the worker's half is gone.
    pub fn is_abandoned(&self) -> bool {
        Arc::strong_count(&self.shared) == 1
    }

    /// Position up to which the worker was done when [`reclaim`](Self::reclaim) last looked.
    #[inline]
    pub fn reclaimed(&self) -> u32 {
        self.reclaimed
    }

    /// Puts an entry behind the last one; the worker sees it after [`flush`](Self::flush).
    ///
    /// # Errors
    /// Hands the entry back when no slot is free.
    #[inline]
    pub fn push(&mut self, entry: E) -> Result<(), E> {
        if self.pending() == self.length() {
            return Err(entry);
        }
        self.shared.slot(self.staged).with_mut(|slot| {
            // SAFETY: `staged` lies outside `reclaimed..end`, so the slot is the dispatcher's, and
            // it holds nothing: it was never written or was emptied by `reclaim`. Tested by
            // `lane_hand_over` (loom).
            unsafe { (*slot).write(entry) };
        });
        self.staged = advance(self.staged, 1);
        Ok(())
    }

    /// Free slots behind the last entry, at most `most` and those that lie together.
    #[inline(always)]
    pub fn writer(&mut self, most: u32) -> Writer<'_, E> {
        let most = most.min(self.length() - self.pending());
        let LaneTx { shared, staged, .. } = self;
        let from = *staged as usize & (shared.slots.len() - 1);
        let to = shared.slots.len().min(from + most as usize);
        Writer { slots: &shared.slots[from..to], staged, written: 0 }
    }

    /// Publishes what was pushed. Returns whether the worker was asleep: the caller must unpark it.
    #[inline]
    pub fn flush(&mut self) -> bool {
        self.publish(u32::MAX)
    }

    /// As [`flush`](Self::flush), but only the first `most` of the unpublished entries.
    #[inline]
    pub fn publish(&mut self, most: u32) -> bool {
        let count = self.unpublished().min(most);
        if count == 0 {
            return false;
        }
        self.published = advance(self.published, count);
        let order = match self.order {
            #[cfg(loom)]
            Order::WeakFlush => Ordering::Relaxed,
            // AcqRel: Release pairs with the worker's claim, which then sees the entries; Acquire
            // is for the wake-up: what the worker did before it slept happened before.
            _ => Ordering::AcqRel,
        };
        let before = self.shared.word.fetch_add(u64::from(count) << END_SHIFT, order);
        if before & ASLEEP == 0 {
            return false;
        }
        // Relaxed: only a hint that is already taken; a worker that set it again meanwhile finds
        // its bit gone when it is unparked and looks again.
        self.shared.word.fetch_and(!ASLEEP, Ordering::Relaxed);
        true
    }

    /// Takes back every entry the worker is done with and destroys it here, in lane order. Returns
    /// how many there were. For entries without a destructor it is O(1) and touches no slot.
    #[inline]
    pub fn reclaim(&mut self) -> u32 {
        self.reclaim_with(|_, entry| drop(entry))
    }

    /// As [`reclaim`](Self::reclaim), but when the worker has [handed back](Run::hand_back) any of
    /// them, each is passed to `take` with its position; others may be, too.
    #[inline]
    pub fn reclaim_with(&mut self, mut take: impl FnMut(u32, E)) -> u32 {
        // Acquire: pairs with the Release in `Run::drop`; all the worker did with the entries
        // happened before.
        let done = self.shared.done.load(Ordering::Acquire);
        let count = distance(self.reclaimed, done);
        // Relaxed: written before `done`. It may be newer, but never older than the last one handed
        // back up to `done`.
        let back = distance(self.reclaimed, self.shared.back.load(Ordering::Relaxed));
        let handed_back = back != 0 && back < 1 << 30;
        if !handed_back && !std::mem::needs_drop::<E>() {
            self.reclaimed = done;
            return count;
        }
        while self.reclaimed != done {
            let position = self.reclaimed;
            // First, so that a panic in the destructor or in `take` cannot lead to a second read.
            self.reclaimed = advance(position, 1);
            let entry = self.shared.slot(position).with_mut(|slot| {
                // SAFETY: the slot lay in `reclaimed..done`: it was written by `push`, the worker
                // has let go of it, and `reclaimed` has moved on, so this is the only read. Tested
                // by `lane_hand_over` (loom) and `what_is_left_is_dropped_once`.
                unsafe { (*slot).assume_init_read() }
            });
            if handed_back {
                take(position, entry);
            }
        }
        count
    }

    /// Takes back every entry that the worker has not claimed, **last one first**, passing each to
    /// `take`. Returns how many there were.
    ///
    /// Recall and claim decide on one word: an entry is either claimed or recalled, never both.
    pub fn recall(&mut self, mut take: impl FnMut(E)) -> u32 {
        // Relaxed: the exchange decides.
        let mut word = self.shared.word.load(Ordering::Relaxed);
        let claim = loop {
            let claim = claim_of(word);
            // `end` := `claim`; the lower half stays.
            let next = (u64::from(claim) << END_SHIFT) | (word & u64::from(u32::MAX));
            #[cfg(loom)]
            if self.order == Order::BlindRecall {
                self.shared.word.store(next, Ordering::Release);
                break claim;
            }
            // AcqRel: stays in the release sequence of `flush`; a worker that later claims at the
            // same numbers acquires the flush that refilled the slots.
            match self.shared.word.compare_exchange_weak(
                word,
                next,
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => break claim,
                Err(newer) => word = newer,
            }
        };
        let count = distance(claim, self.staged);
        self.published = claim;
        while self.staged != claim {
            // First, so that a panic in `take` cannot lead to a second read.
            self.staged = self.staged.wrapping_sub(1) & POSITION;
            let entry = self.shared.slot(self.staged).with_mut(|slot| {
                // SAFETY: the slot lies in `claim..staged` and `end` is `claim` now, so it is
                // outside `reclaimed..end`: the dispatcher's. It was written by `push` and
                // `staged` has moved below it, so this is the only read. Tested by
                // `lane_recall` (loom) and `what_was_recalled_comes_back_once`.
                unsafe { (*slot).assume_init_read() }
            });
            take(entry);
        }
        count
    }

    /// How many entries [`reclaim`](Self::reclaim) would take back.
    #[inline]
    pub fn finished(&self) -> u32 {
        // Relaxed: a hint.
        distance(self.reclaimed, self.shared.done.load(Ordering::Relaxed))
    }

    /// How many entries one claim should take at most.
    #[inline]
    pub fn set_run(&mut self, run: u32) {
        // Relaxed: a hint.
        self.shared.run.store(run, Ordering::Relaxed);
    }

    /// Tells the worker to end when the lane is empty. The caller must unpark it.
    pub fn stop(&mut self) {
        // Release: pairs with `LaneRx::stopped`; entries flushed before are seen with it.
        self.shared.stop.store(true, Ordering::Release);
    }

    /// The broken twin of [`stop`](Self::stop), for the model that must fail.
    #[cfg(loom)]
    pub fn stop_weakly(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}

/// [`LaneTx::push`] for many entries, slot by slot. Dropping it gives the lane its position back.
#[derive(Debug)]
pub struct Writer<'a, E> {
    slots: &'a [UnsafeCell<MaybeUninit<E>>],
    staged: &'a mut u32,
    written: u32,
}

/// A free slot of a [`Writer`].
#[derive(Debug)]
pub struct FreeSlot<'a, E> {
    slot: &'a UnsafeCell<MaybeUninit<E>>,
    number: u32,
}

impl<'a, E> Writer<'a, E> {
    /// The free slots, in order. They are to be [filled](Self::fill) in order, without a gap.
    #[inline(always)]
    pub fn slots(&self) -> impl ExactSizeIterator<Item = FreeSlot<'a, E>> + use<'a, E> {
        // Fewer than 2^16.
        let numbered = self.slots.iter().enumerate();
        numbered.map(|(number, slot)| FreeSlot { slot, number: number as u32 })
    }

    /// Puts an entry into the next slot.
    ///
    /// # Panics
    /// When it is not the next one: nothing is written then.
    #[inline(always)]
    pub fn fill(&mut self, free: FreeSlot<'a, E>, entry: E) {
        assert!(free.number == self.written, "slot {} after {}", free.number, self.written);
        free.slot.with_mut(|slot| {
            prefetch_for_write(slot.wrapping_add(AHEAD as usize));
            // SAFETY: as in `LaneTx::push`, whose half this borrows: the slot is one of those that
            // are free behind `staged`, and `written`, which only grows, has not reached it before.
            // Tested by `lane_hand_over` (loom).
            unsafe { (*slot).write(entry) };
        });
        self.written = free.number + 1;
    }

    /// Entries put into slots.
    #[inline(always)]
    pub fn written(&self) -> u32 {
        self.written
    }
}

impl<E> Drop for Writer<'_, E> {
    #[inline(always)]
    fn drop(&mut self) {
        *self.staged = advance(*self.staged, self.written);
    }
}

impl<E> Drop for LaneTx<E> {
    fn drop(&mut self) {
        // Relaxed: read only by the drop of the shared part, which is ordered after this one.
        self.shared.left_from.store(self.reclaimed, Ordering::Relaxed);
        self.shared.left_to.store(self.staged, Ordering::Relaxed);
        self.stop();
    }
}

/// The worker's half.
#[derive(Debug)]
pub struct LaneRx<E> {
    shared: Arc<Shared<E>>,
    order: Order,
}

impl<E> LaneRx<E> {
    /// Claims the next entries, at most the run the dispatcher asked for (at least `least`, if so
    /// many are there) and never around the end of the slots. `None` when there is nothing.
    #[inline]
    pub fn claim(&mut self, least: u32) -> Option<Run<'_, E>> {
        self.claim_some(least, false)
    }

    /// As [`claim`](Self::claim), but also around the end of the slots: see [`Run::split`].
    #[inline]
    pub fn claim_around(&mut self, least: u32) -> Option<Run<'_, E>> {
        self.claim_some(least, true)
    }

    #[inline(always)]
    fn claim_some(&mut self, least: u32, around: bool) -> Option<Run<'_, E>> {
        let shared = &*self.shared;
        // Relaxed: only the successful exchange below must see the entries.
        let mut word = shared.word.load(Ordering::Relaxed);
        loop {
            let available = available(word);
            if available == 0 {
                return None;
            }
            let from = claim_of(word);
            let length = shared.slots.len() as u32;
            let to_wrap = if around { length } else { length - (from & (length - 1)) };
            // Relaxed: a hint.
            let run = shared.run.load(Ordering::Relaxed).max(least);
            let count = available.min(run).min(to_wrap).max(1);
            let to = advance(from, count);
            // Awake, in any case.
            let next = (word >> END_SHIFT << END_SHIFT) | u64::from(to);
            // AcqRel: Acquire pairs with the Release of `flush`; the entries are written.
            match shared.word.compare_exchange_weak(word, next, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => {
                    return Some(Run {
                        lane: self,
                        from,
                        count,
                        back: 0,
                        #[cfg(loom)]
                        late: None,
                    });
                }
                Err(newer) => word = newer,
            }
        }
    }

    /// Announces that the worker will sleep. `false` when entries have arrived: claim again. After
    /// `true` the next flush wakes the worker; until then it may park.
    #[inline]
    pub fn doze(&mut self) -> bool {
        let shared = &*self.shared;
        #[cfg(loom)]
        if self.order == Order::BlindSleep {
            let empty = available(shared.word.load(Ordering::Relaxed)) == 0;
            if empty {
                shared.word.fetch_or(ASLEEP, Ordering::AcqRel);
            }
            return empty;
        }
        // Relaxed: the exchange decides.
        let word = shared.word.load(Ordering::Relaxed);
        available(word) == 0
            // AcqRel: the flush that finds the bit sees what was done before; see `flush`.
            && shared
                .word
                .compare_exchange(word, word | ASLEEP, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
    }

    /// Whether nothing is published that is not claimed.
    #[inline]
    pub fn is_empty(&self) -> bool {
        // Relaxed: a hint; `claim` and `doze` decide.
        available(self.shared.word.load(Ordering::Relaxed)) == 0
    }

    /// Whether the dispatcher has asked the worker to end, or is gone.
    #[inline]
    pub fn stopped(&self) -> bool {
        // Acquire: pairs with `stop`; whatever was flushed before it is visible to `claim`.
        self.shared.stop.load(Ordering::Acquire)
    }
}

/// Entries the worker has claimed. Dropping it moves `done` past them.
#[derive(Debug)]
pub struct Run<'a, E> {
    lane: &'a mut LaneRx<E>,
    from: u32,
    count: u32,
    /// One more than the largest index that was handed back.
    back: u32,
    #[cfg(loom)]
    late: Option<u32>,
}

impl<E> Run<'_, E> {
    /// Number of entries; at least 1.
    #[inline(always)]
    pub fn len(&self) -> u32 {
        self.count
    }

    /// Never true; there for symmetry.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The entry at `index`.
    ///
    /// # Panics
    /// When `index` is not below [`len`](Self::len).
    #[inline(always)]
    pub fn get(&self, index: u32) -> &E {
        assert!(index < self.count, "entry {index} of {}", self.count);
        self.lane.shared.slot(self.from.wrapping_add(index)).with(|slot| {
            // SAFETY: the slot lies in `done..claim` (this run moves `done` only when it is
            // dropped), so it is written and the worker's alone; the reference borrows the run.
            // Tested by `lane_hand_over` (loom).
            unsafe { (*slot).assume_init_ref() }
        })
    }

    /// The entries of a range.
    ///
    /// # Panics
    /// When the range does not lie in `0..len`, or goes around the end of the slots.
    #[inline(always)]
    pub fn range(&self, from: u32, to: u32) -> impl ExactSizeIterator<Item = &E> + Clone {
        assert!(from <= to && to <= self.count, "entries {from}..{to} of {}", self.count);
        let slots = &self.lane.shared.slots;
        let start = self.from.wrapping_add(from) as usize & (slots.len() - 1);
        slots[start..start + (to - from) as usize].iter().map(|slot| {
            // SAFETY: as in `get`.
            slot.with(|slot| unsafe { (*slot).assume_init_ref() })
        })
    }

    /// Where the entries of a range go around the end of the slots: those before it and those from
    /// it on lie together. `to` when they do not.
    #[inline(always)]
    pub fn split(&self, from: u32, to: u32) -> u32 {
        let length = self.lane.shared.slots.len() as u32;
        let to_wrap = length - (self.from.wrapping_add(from) & (length - 1));
        from + to_wrap.min(to - from)
    }

    /// Position of the entry at `index`.
    pub fn position(&self, index: u32) -> u32 {
        advance(self.from, index)
    }

    /// Notes that the entry at `index` is handed back: [`LaneTx::reclaim_with`] passes it on. In any
    /// order: the last entry counts.
    pub fn hand_back(&mut self, index: u32) {
        if index < self.back {
            return;
        }
        self.back = index + 1;
        let after = advance(self.from, index + 1);
        #[cfg(loom)]
        if self.lane.order == Order::LateBack {
            self.late = Some(after);
            return;
        }
        // Relaxed: published by the Release of `done` in `drop`.
        self.lane.shared.back.store(after, Ordering::Relaxed);
    }

    /// The entry at `index`, to change.
    ///
    /// # Panics
    /// When `index` is not below [`len`](Self::len).
    #[inline(always)]
    pub fn get_mut(&mut self, index: u32) -> &mut E {
        assert!(index < self.count, "entry {index} of {}", self.count);
        self.lane.shared.slot(self.from.wrapping_add(index)).with_mut(|slot| {
            // SAFETY: as in `get`; `&mut self` makes the reference the only one.
            unsafe { (*slot).assume_init_mut() }
        })
    }
}

impl<E> Drop for Run<'_, E> {
    #[inline]
    fn drop(&mut self) {
        let done = advance(self.from, self.count);
        let order = match self.lane.order {
            #[cfg(loom)]
            Order::WeakDone => Ordering::Relaxed,
            // Release: pairs with the Acquire in `reclaim`; the worker has let go of the entries.
            _ => Ordering::Release,
        };
        self.lane.shared.done.store(done, order);
        #[cfg(loom)]
        if let Some(after) = self.late {
            self.lane.shared.back.store(after, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::rc::Rc;

    fn pair<E>(length: u32) -> (LaneTx<E>, LaneRx<E>) {
        lane(length, Order::Right).unwrap()
    }

    #[test]
    fn runs_come_in_order_and_never_wrap() {
        let (mut tx, mut rx) = pair::<u32>(4);
        tx.set_run(64);
        let (mut sent, mut seen) = (0, 0);
        while seen < 1000 {
            while tx.push(sent).is_ok() {
                sent += 1;
            }
            tx.flush();
            while let Some(run) = rx.claim(1) {
                for index in 0..run.len() {
                    assert_eq!(*run.get(index), seen);
                    seen += 1;
                }
            }
            tx.reclaim();
            assert_eq!(tx.pending(), 0);
        }
    }

    #[test]
    fn an_unflushed_entry_is_not_seen() {
        let (mut tx, mut rx) = pair::<u32>(4);
        tx.push(1).unwrap();
        assert_eq!((tx.in_flight(), tx.unpublished()), (0, 1));
        assert_eq!((tx.peek(0), tx.peek(1)), (Some(&1), None));
        assert!(rx.claim(1).is_none());
        assert!(rx.doze());
        assert!(tx.flush(), "the worker had said that it sleeps");
        assert!(!rx.doze());
        assert_eq!(rx.claim(1).unwrap().len(), 1);
    }

    #[test]
    fn a_run_may_go_around_the_end_when_asked_to() {
        let (mut tx, mut rx) = pair::<u32>(8);
        for first in (0..1_000).step_by(5) {
            (first..first + 5).for_each(|value| tx.push(value).unwrap());
            tx.publish(3);
            assert_eq!((tx.in_flight(), tx.unpublished()), (3, 2));
            assert_eq!(rx.claim_around(5).unwrap().len(), 3);
            tx.flush();
            let run = rx.claim_around(5).unwrap();
            assert_eq!(run.len(), 2);
            drop(run);
            tx.reclaim();
            (0..8).for_each(|value| tx.push(value).unwrap());
            tx.flush();
            let mut run = rx.claim_around(8).unwrap();
            let split = run.split(1, 7);
            let seen: Vec<u32> = run.range(1, split).chain(run.range(split, 7)).copied().collect();
            assert_eq!(seen, [1, 2, 3, 4, 5, 6]);
            run.hand_back(6);
            run.hand_back(2);
            drop(run);
            let mut back = Vec::new();
            tx.reclaim_with(|_, value| back.push(value));
            assert_eq!(back, [0, 1, 2, 3, 4, 5, 6, 7], "from the first to the last of them");
        }
    }

    #[test]
    fn a_writer_fills_what_lies_together() {
        let (mut tx, mut rx) = pair::<u32>(8);
        let mut next = 0;
        for most in (0..9).cycle().take(200) {
            let mut writer = tx.writer(most);
            let slots = writer.slots();
            assert!(slots.len() <= most as usize);
            for free in slots {
                writer.fill(free, next);
                next += 1;
            }
            drop(writer);
            tx.flush();
            tx.set_run(8);
            while let Some(run) = rx.claim(8) {
                let first = next - run.len();
                assert!(run.range(0, run.len()).copied().eq(first..next));
            }
            tx.reclaim();
        }
        assert!(next > 500);
    }

    #[test]
    #[should_panic(expected = "slot 1 after 0")]
    fn a_slot_cannot_be_left_out() {
        let (mut tx, _rx) = pair::<u32>(8);
        let mut writer = tx.writer(4);
        let free = writer.slots().nth(1).unwrap();
        writer.fill(free, 1);
    }

    #[test]
    fn positions_survive_their_wrap() {
        assert_eq!(distance(POSITION, 0), 1);
        assert!(reached(0, POSITION));
        assert!(!reached(POSITION, 0));
        let word = u64::from(POSITION) | (1 << 63);
        assert_eq!(available(word), 1);
        // `end` carries off the top of the word and leaves the claim alone.
        let word = (u64::from(u32::MAX) << END_SHIFT) | u64::from(POSITION);
        assert_eq!(available(word), 0);
        assert_eq!(available(word.wrapping_add(3 << END_SHIFT)), 3);
    }

    #[test]
    fn what_was_recalled_comes_back_once() {
        let (mut tx, mut rx) = pair::<Rc<u32>>(8);
        let values: Vec<_> = (0..6).map(Rc::new).collect();
        for round in 0..1_000 {
            values.iter().for_each(|value| tx.push(Rc::clone(value)).unwrap());
            if round % 2 == 0 {
                tx.flush();
            }
            tx.set_run(2);
            let claimed = rx.claim(1).map_or(0, |run| run.len());
            let mut back = Vec::new();
            assert_eq!(tx.recall(|value| back.push(*value)), 6 - claimed);
            assert!(back.iter().copied().eq((claimed..6).rev()), "{back:?}");
            assert_eq!(tx.pending(), claimed);
            assert!(rx.claim(1).is_none());
            tx.reclaim();
            assert!(values.iter().all(|value| Rc::strong_count(value) == 1));
        }
    }

    #[test]
    fn what_is_left_is_dropped_once() {
        let witness = Rc::new(());
        let (mut tx, mut rx) = pair::<Rc<()>>(8);
        for _ in 0..6 {
            tx.push(Rc::clone(&witness)).unwrap();
        }
        tx.flush();
        tx.set_run(2);
        drop(rx.claim(2).unwrap());
        assert_eq!(tx.reclaim(), 2);
        assert_eq!(Rc::strong_count(&witness), 5);
        drop(rx.claim(2).unwrap()); // done, not reclaimed
        tx.push(Rc::clone(&witness)).unwrap(); // pushed, not flushed
        drop(tx);
        assert!(rx.stopped());
        assert_eq!(Rc::strong_count(&witness), 6);
        drop(rx);
        assert_eq!(Rc::strong_count(&witness), 1);
    }
}
