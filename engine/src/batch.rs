//! What a handler is given.

use crate::lane::Run;
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
/// | 48..56 | lap of the ring |
///
/// One number, not fields, so that it is written by one store and read by one load.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tag(u64);

impl Tag {
    #[inline(always)]
    pub(crate) fn new(index: u32, epoch: u16, lap: NonZeroU8) -> Self {
        Tag(u64::from(index) | u64::from(epoch) << 32 | u64::from(lap.get()) << 48)
    }

    /// That of a later slot in the same lap.
    #[inline(always)]
    pub(crate) fn plus(self, slots: u32) -> Self {
        Tag(self.0 + u64::from(slots))
    }
}

impl<T> Entry<T> {
    #[inline(always)]
    pub(crate) fn new(payload: T, place: &Place, epoch: u16) -> Self {
        Entry { payload, tag: Tag::new(place.index, epoch, place.lap) }
    }

    /// Slot of its epoch.
    #[inline(always)]
    pub(crate) fn epoch(&self) -> u16 {
        (self.tag.0 >> 32) as u16
    }

    /// Its place in its epoch's ring.
    #[inline(always)]
    pub(crate) fn place(&self) -> Place {
        let lap = NonZeroU8::new((self.tag.0 >> 48) as u8).unwrap_or(NonZeroU8::MIN);
        Place { index: self.tag.0 as u32, lap }
    }
}

/// The records of one handler call: at least one, at most the executor's batch size.
///
/// Records of one key are in offset order; a batch may mix keys and partitions.
#[derive(Debug)]
pub struct Batch<'a, T> {
    run: &'a Run<'a, Entry<T>>,
    from: u32,
    to: u32,
}

impl<'a, T> Batch<'a, T> {
    pub(crate) fn new(run: &'a Run<'a, Entry<T>>, from: u32, to: u32) -> Self {
        Batch { run, from, to }
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
        (index < self.to).then(|| &self.run.get(index).payload)
    }

    /// The records, those of one key in offset order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &'a T> + use<'a, T> {
        self.run.range(self.from, self.to).map(|entry| &entry.payload)
    }
}
