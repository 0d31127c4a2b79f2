//! What a handler is given.

use crate::lane::Run;
use crate::retry::Attempt;
use crate::ring::Place;
use std::num::NonZeroU8;

/// One record on its way through a lane: 8 bytes beside the payload, since what a record costs is
/// mostly the cache lines that cross from the dispatcher to the worker.
#[derive(Debug)]
pub(crate) struct Entry<T> {
    pub(crate) payload: T,
    pub(crate) tag: Tag,
}

/// Where a record is to be marked. There is one entry per place, and its worker marks it once.
///
/// | bits | meaning |
/// |---|---|
/// | 0..32 | slot of the ring |
/// | 32..48 | slot of the epoch |
/// | 48..55 | lap of the ring |
/// | 55 | tracked: the worker hands the entry back whatever becomes of it |
/// | 56..63 | class of the shard; in an entry that is handed back: why |
/// | 63 | handed back |
///
/// One number, not fields, so that it is written by one store and read by one load.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tag(u64);

const TRACKED: u64 = 1 << 55;
const CLASS_SHIFT: u32 = 56;
const BACK: u64 = 1 << 63;

/// Number of classes.
pub(crate) const CLASSES: u32 = 128;

/// Which entries a worker hands back unhandled after one of them failed: those of the same class.
/// Shards are spread over the classes, so a class is a little wider than a shard.
#[inline(always)]
pub(crate) fn class_of(shard: u32) -> u32 {
    shard % CLASSES
}

/// Why an entry is handed back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Back {
    /// The attempt did not finish the record; a report says how.
    Failed,
    /// Not handled: it might belong to the key of a failed one.
    Bounced,
    /// Finished, and tracked.
    Done,
    /// Not handled, since its epoch has halted, and tracked.
    Halted,
}

impl Tag {
    #[inline(always)]
    pub(crate) fn new(index: u32, epoch: u16, lap: NonZeroU8) -> Self {
        Tag(u64::from(index) | u64::from(epoch) << 32 | u64::from(lap.get()) << 48)
    }

    /// Slot of the epoch.
    #[inline(always)]
    pub(crate) fn epoch(self) -> u16 {
        (self.0 >> 32) as u16
    }

    /// Which record it is: the next number is the next slot of the same ring and lap.
    #[inline(always)]
    pub(crate) fn bare(self) -> u64 {
        self.0 & (TRACKED - 1)
    }

    /// Slot of its epoch, slot and lap of the ring.
    pub(crate) fn key(self) -> (u16, u32, NonZeroU8) {
        (self.epoch(), self.0 as u32, self.lap())
    }

    #[inline(always)]
    fn lap(self) -> NonZeroU8 {
        // Laps have 7 bits.
        NonZeroU8::new((self.0 >> 48) as u8 & 0x7f).unwrap_or(NonZeroU8::MIN)
    }

    /// Whether the record comes back whatever becomes of it.
    pub(crate) fn is_tracked(self) -> bool {
        self.0 & TRACKED != 0
    }

    /// That of a later slot in the same lap, for a shard of a class.
    #[inline(always)]
    pub(crate) fn plus(self, slots: u32, class: u32) -> Self {
        Tag(self.0 + (u64::from(slots) | u64::from(class) << CLASS_SHIFT))
    }
}

impl<T> Entry<T> {
    #[inline(always)]
    pub(crate) fn new(payload: T, place: &Place, epoch: u16, class: u32) -> Self {
        Entry { payload, tag: Tag::new(place.index, epoch, place.lap).plus(0, class) }
    }

    /// Slot of its epoch.
    #[inline(always)]
    pub(crate) fn epoch(&self) -> u16 {
        self.tag.epoch()
    }

    /// Its place in its epoch's ring.
    #[inline(always)]
    pub(crate) fn place(&self) -> Place {
        Place { index: self.tag.0 as u32, lap: self.tag.lap() }
    }

    /// Class of its shard.
    #[inline(always)]
    pub(crate) fn class(&self) -> u32 {
        (self.tag.0 >> CLASS_SHIFT) as u32 % CLASSES
    }

    #[inline(always)]
    pub(crate) fn is_tracked(&self) -> bool {
        self.tag.0 & TRACKED != 0
    }

    /// Whether the worker handed it back, and why.
    #[inline(always)]
    pub(crate) fn back(&self) -> Option<Back> {
        if self.tag.0 & BACK == 0 {
            return None;
        }
        Some(match self.class() {
            0 => Back::Failed,
            1 => Back::Bounced,
            2 => Back::Done,
            _ => Back::Halted,
        })
    }

    /// Hands it back.
    pub(crate) fn hand_back(&mut self, why: Back) {
        let why = match why {
            Back::Failed => 0,
            Back::Bounced => 1,
            Back::Done => 2,
            Back::Halted => 3,
        };
        self.tag.0 =
            self.tag.0 & !(u64::from(CLASSES - 1) << CLASS_SHIFT) | why << CLASS_SHIFT | BACK;
    }

    /// Ready to be sent once more.
    pub(crate) fn send_again(&mut self, class: u32, tracked: bool) {
        let tag = self.tag.0 & !(BACK | TRACKED | u64::from(CLASSES - 1) << CLASS_SHIFT);
        self.tag.0 = tag | u64::from(class) << CLASS_SHIFT | if tracked { TRACKED } else { 0 };
    }
}

/// The records of one handler call: at least one, at most the executor's batch size.
///
/// Records of one key are in offset order; a batch may mix keys and partitions, unless
/// [`Builder::batch_of`](crate::Builder::batch_of) says otherwise.
#[derive(Debug)]
pub struct Batch<'a, T> {
    run: &'a Run<'a, Entry<T>>,
    from: u32,
    to: u32,
    /// The entries, if they are no neighbours; then `from..to` is a range in this list.
    listed: Option<&'a [u32]>,
    attempt: Attempt,
}

impl<'a, T> Batch<'a, T> {
    pub(crate) fn new(run: &'a Run<'a, Entry<T>>, from: u32, to: u32, attempt: Attempt) -> Self {
        Batch { run, from, to, listed: None, attempt }
    }

    /// Of the listed entries of a run.
    pub(crate) fn listed(run: &'a Run<'a, Entry<T>>, listed: &'a [u32], attempt: Attempt) -> Self {
        // A run is at most as long as a lane.
        Batch { run, from: 0, to: listed.len() as u32, listed: Some(listed), attempt }
    }

    /// Which attempt it is. A record that is tried again comes alone.
    pub fn attempt(&self) -> Attempt {
        self.attempt
    }

    /// Number of records.
    pub fn len(&self) -> usize {
        (self.to - self.from) as usize
    }

    /// Never true: a handler is not called without records.
    pub fn is_empty(&self) -> bool {
        self.from == self.to
    }

    /// The record at `index`.
    pub fn get(&self, index: usize) -> Option<&'a T> {
        let index = u32::try_from(index).ok()?.checked_add(self.from)?;
        let index = if index < self.to { index } else { return None };
        let index = self.listed.map_or(index, |listed| listed[index as usize]);
        Some(&self.run.get(index).payload)
    }

    /// The records, those of one key in offset order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &'a T> + use<'a, T> {
        let run = self.run;
        let (straight, split) = match self.listed {
            None => (self.to, run.split(self.from, self.to)),
            Some(_) => (self.from, self.from),
        };
        Records {
            straight: run.range(self.from, split),
            around: run.range(split, straight),
            listed: self.listed.unwrap_or_default().iter(),
            run,
        }
    }
}

/// The records of a batch: first those that lie together, and in most batches no others; then those
/// around the end of the lane's slots, or those of a list.
struct Records<'a, T, I> {
    straight: I,
    around: I,
    listed: std::slice::Iter<'a, u32>,
    run: &'a Run<'a, Entry<T>>,
}

impl<'a, T: 'a, I: ExactSizeIterator<Item = &'a Entry<T>>> Iterator for Records<'a, T, I> {
    type Item = &'a T;

    #[inline]
    fn next(&mut self) -> Option<&'a T> {
        match self.straight.next() {
            Some(entry) => Some(&entry.payload),
            None => self.next_elsewhere(),
        }
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.straight.len() + self.around.len() + self.listed.len();
        (left, Some(left))
    }

    #[inline]
    fn fold<B, F: FnMut(B, &'a T) -> B>(self, init: B, mut f: F) -> B {
        let run = self.run;
        let all = self.straight.fold(init, |all, entry| f(all, &entry.payload));
        let all = self.around.fold(all, |all, entry| f(all, &entry.payload));
        self.listed.fold(all, |all, index| f(all, &run.get(*index).payload))
    }
}

impl<'a, T: 'a, I: ExactSizeIterator<Item = &'a Entry<T>>> ExactSizeIterator for Records<'a, T, I> {}

impl<'a, T: 'a, I: Iterator<Item = &'a Entry<T>>> Records<'a, T, I> {
    fn next_elsewhere(&mut self) -> Option<&'a T> {
        match self.around.next() {
            Some(entry) => Some(&entry.payload),
            None => self.listed.next().map(|index| &self.run.get(*index).payload),
        }
    }
}
