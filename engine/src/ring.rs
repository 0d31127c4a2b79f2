//! The ring of atomic done-flags: one byte per slot, stamped with the lap in which its record ended.
//!
//! A worker finishes a record by one `Release` store to the record's own byte: no lock, no
//! read-modify-write, no wake-up, and no shared word that two workers would fight for. A slot is
//! done when its byte holds the stamp of the lap that is being read; the byte of an earlier lap is
//! a different value, so that nothing has to be cleared before a slot is used again.
//!
//! The idea of a stamp per slot is that of the LMAX Disruptor's available buffer; here a stamp is a
//! byte and also says whether the record failed. One byte is enough because a slot is reused only
//! after the reader has passed it: the only foreign value that can be met is that of the lap before.

use crate::sync::{AtomicU8, Ordering};
use std::num::NonZeroU8;

/// Laps cycle through `1..=LAPS`; zero is "never used". Two neighbouring laps always differ.
const LAPS: u8 = 127;
/// The lowest bit of a stamp: the record ended without success.
const FAILED: u8 = 1;

/// A place in the ring: which slot, and in which lap.
///
/// Neither `Copy` nor `Clone`: there is one per admitted record, in its ticket or in its entry of a
/// lane, and it goes when the record is finished.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) index: u32,
    /// Never zero, so that an `Option<Place>` is no larger.
    pub(crate) lap: NonZeroU8,
}

impl Place {
    pub(crate) fn first() -> Self {
        Place { index: 0, lap: NonZeroU8::MIN }
    }

    #[inline]
    pub(crate) fn index(&self) -> u32 {
        self.index
    }

    /// Moves on by `count` places, which must not lead beyond the last slot of the ring.
    pub(crate) fn skip(&mut self, count: u32, capacity: u32) {
        if count > 0 {
            self.index += count - 1;
            self.step(capacity);
        }
    }

    /// The same place once more, for those who share a run of places and mark different ones.
    pub(crate) fn copy(&self) -> Place {
        Place { index: self.index, lap: self.lap }
    }

    /// The place `count` further on, at most a lap away.
    pub(crate) fn plus(&self, count: u32, capacity: u32) -> Place {
        let mut place = self.copy();
        let to_wrap = capacity - place.index;
        if count < to_wrap {
            place.index += count;
        } else {
            place.skip(to_wrap, capacity);
            place.index = count - to_wrap;
        }
        place
    }

    /// Returns this place and moves on to the following one in a ring of `capacity` slots.
    #[inline(always)]
    pub(crate) fn step(&mut self, capacity: u32) -> Place {
        let here = Place { index: self.index, lap: self.lap };
        self.index += 1;
        if self.index == capacity {
            self.index = 0;
            self.lap = match self.lap.get() {
                LAPS => NonZeroU8::MIN,
                _ => self.lap.saturating_add(1),
            };
        }
        here
    }

    #[inline]
    fn done(&self) -> u8 {
        self.lap.get() << 1
    }
}

/// What a reader finds in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flag {
    /// The record has not ended.
    Open,
    /// The record ended with success.
    Done,
    /// The record's ticket was dropped, or its attempt failed for good.
    Failed,
}

/// The flags of one epoch of one partition.
#[derive(Debug)]
pub(crate) struct Ring {
    stamps: Box<[AtomicU8]>,
}

impl Ring {
    /// `None` when the memory cannot be had.
    pub(crate) fn new(capacity: u32) -> Option<Self> {
        Some(Ring { stamps: boxed(capacity, || AtomicU8::new(0))? })
    }

    #[inline]
    pub(crate) fn capacity(&self) -> u32 {
        // Built from a `u32`, so the length fits.
        self.stamps.len() as u32
    }

    /// Marks a record as done; visible to the reader with everything the caller did before.
    #[inline]
    pub(crate) fn mark(&self, place: &Place, order: Mark) {
        self.stamps[place.index as usize].store(place.done(), order.ordering());
    }

    /// Marks a record and its neighbours as done, as long as `next` finds that there is one more. It is
    /// not asked beyond the end of the ring, but once more there.
    #[inline(always)]
    pub(crate) fn mark_streak(&self, first: &Place, mut next: impl FnMut() -> bool) {
        for stamp in &self.stamps[first.index as usize..] {
            // Release: as `mark`.
            stamp.store(first.done(), Ordering::Release);
            if !next() {
                return;
            }
        }
    }

    /// Marks a record as failed: the reader stops there.
    #[inline]
    pub(crate) fn mark_failed(&self, place: &Place) {
        // Release: pairs with `read`, so that the reader also sees what the failed attempt did.
        self.stamps[place.index as usize].store(place.done() | FAILED, Ordering::Release);
    }

    /// The broken twin of [`mark_failed`](Self::mark_failed), for the model that must fail.
    #[cfg(loom)]
    pub(crate) fn mark_failed_weakly(&self, place: &Place) {
        self.stamps[place.index as usize].store(place.done() | FAILED, Ordering::Relaxed);
    }

    /// How many records from `place` on are done without a hole, at most `most` and not around the
    /// end of the ring; and what stopped it: [`Flag::Done`] if nothing did.
    #[inline]
    pub(crate) fn read(&self, place: &Place, most: u32) -> (u32, Flag) {
        let done = place.done();
        let most = most.min(self.capacity() - place.index);
        let stamps = &self.stamps[place.index as usize..][..most as usize];
        // Acquire: pairs with the Release of `mark`; all effects of the record's handler happen
        // before anything that is done with the watermark.
        let is_done = |stamp: &AtomicU8| stamp.load(Ordering::Acquire) == done;
        // Eight at a time, without a branch for each, as long as all are done.
        let eights = stamps
            .chunks_exact(8)
            .take_while(|eight| eight.iter().fold(true, |all, stamp| all & is_done(stamp)));
        let skipped = 8 * eights.count();
        let Some(at) = stamps[skipped..].iter().position(|stamp| !is_done(stamp)) else {
            return (most, Flag::Done);
        };
        let count = skipped + at;
        // Acquire: as above.
        let failed = stamps[count].load(Ordering::Acquire) == done | FAILED;
        // Below `most`, which is a `u32`.
        (count as u32, if failed { Flag::Failed } else { Flag::Open })
    }
}

impl Ring {
    /// Whether the record at `place` is done, and how many records from there on are like it, at most
    /// `most` (not 0) and not around the end of the ring.
    pub(crate) fn run(&self, place: &Place, most: u32) -> (bool, u32) {
        let done = place.done();
        let most = most.min(self.capacity() - place.index);
        // Acquire: pairs with the Release of `mark`, as in `read`.
        let mut flags = self.stamps[place.index as usize..][..most as usize]
            .iter()
            .map(|stamp| stamp.load(Ordering::Acquire) == done);
        let first = flags.next().unwrap_or(false);
        // Below `most`, which is a `u32`.
        (first, 1 + flags.take_while(|flag| *flag == first).count() as u32)
    }
}

/// How strongly a mark publishes. Only [`Mark::Publish`] is right; the other exists for the loom
/// twin that must fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mark {
    /// `Release`: what the handler did is visible to whoever reads the watermark past the record.
    Publish,
    /// `Relaxed`: wrong, and found wrong by the models.
    #[cfg(loom)]
    Weak,
}

impl Mark {
    #[inline(always)]
    fn ordering(self) -> Ordering {
        match self {
            // Release: pairs with the Acquire of `Ring::read`.
            Mark::Publish => Ordering::Release,
            #[cfg(loom)]
            Mark::Weak => Ordering::Relaxed,
        }
    }
}

/// A boxed slice of exactly `len` values, or `None` when the memory cannot be had.
pub(crate) fn boxed<T>(len: u32, make: impl FnMut() -> T) -> Option<Box<[T]>> {
    let mut values = Vec::new();
    values.try_reserve_exact(len as usize).ok()?;
    values.resize_with(len as usize, make);
    Some(values.into_boxed_slice())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_read_stops_at_the_hole_the_bound_and_the_end() {
        let ring = Ring::new(5).unwrap();
        let mut place = Place::first();
        for _ in 0..4 {
            ring.mark(&place.step(5), Mark::Publish);
        }
        let mut first = Place::first();
        assert_eq!(ring.read(&first, 9), (4, Flag::Open));
        assert_eq!(ring.read(&first, 3), (3, Flag::Done));
        ring.mark(&place.step(5), Mark::Publish);
        assert_eq!(ring.read(&first, 9), (5, Flag::Done));
        first.skip(5, 5);
        assert_eq!(first, place);
        assert_eq!(ring.read(&first, 5), (0, Flag::Open));
    }

    #[test]
    fn laps_never_repeat_next_to_each_other() {
        let mut place = Place::first();
        let mut before = 0;
        for _ in 0..1000 {
            let here = place.step(1);
            assert_eq!(here.index(), 0);
            assert_ne!(here.done(), before);
            assert_ne!(here.done() | FAILED, before);
            before = here.done();
        }
    }

    #[test]
    fn a_stamp_of_the_lap_before_is_open() {
        let ring = Ring::new(3).unwrap();
        let mut place = Place::first();
        for _ in 0..1000 {
            let here = place.step(3);
            assert_eq!(ring.read(&here, 1), (0, Flag::Open));
            ring.mark(&here, Mark::Publish);
            assert_eq!(ring.read(&here, 1), (1, Flag::Done));
        }
        let here = place.step(3);
        ring.mark_failed(&here);
        assert_eq!(ring.read(&here, 1), (0, Flag::Failed));
    }
}
