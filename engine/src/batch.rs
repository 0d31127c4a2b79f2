//! What a handler is given.

use crate::lane::Run;
use crate::ring::Place;

/// One record on its way through a lane.
#[derive(Debug)]
pub(crate) struct Entry<T> {
    pub(crate) payload: T,
    pub(crate) place: Place,
    /// Slot of its epoch.
    pub(crate) epoch: u32,
    pub(crate) shard: u32,
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
        let run = self.run;
        (self.from..self.to).map(move |index| &run.get(index).payload)
    }
}
