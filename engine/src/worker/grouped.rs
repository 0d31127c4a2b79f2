//! Batches of one shard or of one key, and batches of so many bytes: the entries of a claimed run,
//! put together anew.
//!
//! The worker is serial, so within one run only the order within each key matters. All entries of a
//! run are handed back to the dispatcher by one store when the run ends; so for it, too, it does not
//! matter in which order they were handled. What it is told must still be in the order of the lane:
//! the reports are collected and sorted, and whether an entry has to be handed back is decided by its
//! position, not by how far the worker has come.

use super::{BatchOutcome, Desk, Errand, FIRST, Gate, Handler, Outcome, bury, panic_text};
use crate::batch::Entry;
use crate::dispatch::{BatchOf, FREE, Hashes, is_free, shard_of};
use crate::lane::Run;
use crate::sync::Arc;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// The size of a record, for [`Builder::batch_bytes`](crate::Builder::batch_bytes).
pub(crate) type Size<T> = Box<dyn Fn(&T) -> usize + Send + Sync>;

/// A record's size. One that cannot be told goes alone.
pub(crate) fn size_of<T>(size: Option<&Size<T>>, record: &T) -> usize {
    let Some(size) = size else { return 0 };
    catch_unwind(AssertUnwindSafe(|| size(record))).unwrap_or(usize::MAX)
}

/// How a worker puts batches together, with its scratch memory: nothing is allocated per run once
/// it has grown to the largest one.
#[derive(Debug)]
pub(crate) struct Grouping {
    of: BatchOf,
    /// Most bytes of a batch.
    bytes: usize,
    hashes: Arc<Hashes>,
    shards: usize,
    /// Group and index of each entry.
    keyed: Vec<(u64, u32)>,
    /// First index, and range in `keyed`, of each group.
    groups: Vec<(u32, u32, u32)>,
    /// Indices of the batch.
    picked: Vec<u32>,
}

impl Grouping {
    pub(crate) fn new(of: BatchOf, bytes: usize, hashes: Arc<Hashes>, shards: usize) -> Self {
        let (keyed, groups, picked) = (Vec::new(), Vec::new(), Vec::new());
        Grouping { of, bytes, hashes, shards, keyed, groups, picked }
    }

    /// What entries of one batch have in common.
    fn group(&self, position: u32) -> u64 {
        let hash = self.hashes.get(position);
        match self.of {
            BatchOf::Mixed => 0,
            _ if is_free(hash) => FREE,
            BatchOf::Shard => u64::from(shard_of(hash, self.shards)),
            BatchOf::Key => hash,
        }
    }

    /// Sorts a run into groups: the one with the oldest entry first, each in the order of the lane.
    fn sort<T>(&mut self, run: &Run<'_, Entry<T>>) {
        self.keyed.clear();
        for index in 0..run.len() {
            self.keyed.push((self.group(run.position(index)), index));
        }
        if self.of != BatchOf::Mixed {
            self.keyed.sort_unstable();
        }
        self.groups.clear();
        let mut from = 0;
        for group in self.keyed.chunk_by(|a, b| a.0 == b.0) {
            let to = from + group.len() as u32;
            self.groups.push((group[0].1, from, to));
            from = to;
        }
        self.groups.sort_unstable();
    }

    pub(crate) fn process<T: Send + 'static>(
        &mut self,
        run: &mut Run<'_, Entry<T>>,
        desk: &mut Desk,
        handler: &Handler<T>,
        most: u32,
    ) {
        desk.heed_fences(run.position(0));
        desk.sorted = Some(Vec::new());
        self.sort(run);
        for group in 0..self.groups.len() {
            let (_, mut at, to) = self.groups[group];
            while at < to {
                at = self.batch(run, desk, handler, most, at, to);
            }
        }
        let mut reports = desk.sorted.take().unwrap_or_default();
        reports.sort_by_key(|(index, _)| *index);
        for (_, report) in reports {
            desk.post.reports.push(report);
        }
    }

    /// Handles the next batch of a group, or passes an entry that is not to be handled. Returns where
    /// the next one begins.
    fn batch<T: 'static>(
        &mut self,
        run: &mut Run<'_, Entry<T>>,
        desk: &mut Desk,
        handler: &Handler<T>,
        most: u32,
        from: u32,
        to: u32,
    ) -> u32 {
        let first = self.keyed[from as usize].1;
        let mut errand = Errand { attempt: FIRST, bury: None };
        let cautious = desk.is_cautious();
        if cautious {
            match desk.gate_here(run, first) {
                Gate::Pass => return from + 1,
                Gate::Run(what) => errand = what,
            }
        }
        self.picked.clear();
        self.picked.push(first);
        if !run.get(first).is_tracked() {
            let size = handler.size.as_ref();
            let mut bytes = size_of(size, &run.get(first).payload);
            for (_, next) in &self.keyed[from as usize + 1..to.min(from + most) as usize] {
                if cautious && !desk.is_plain_here(run, *next) {
                    break;
                }
                bytes = bytes.saturating_add(size_of(size, &run.get(*next).payload));
                if bytes > self.bytes {
                    break;
                }
                self.picked.push(*next);
            }
        }
        let picked = &*self.picked;
        let ended = catch_unwind(AssertUnwindSafe(|| match errand.bury {
            None => handler.process.call(run, picked, errand.attempt),
            Some(reason) => {
                let hook = handler.hook.as_ref();
                let outcome = bury(hook, &run.get(first).payload, errand.attempt, reason);
                BatchOutcome::All(outcome)
            }
        }));
        let outcome =
            ended.unwrap_or_else(|panic| BatchOutcome::All(Outcome::Failed(panic_text(&*panic))));
        match outcome {
            BatchOutcome::All(Outcome::Done) if !cautious => {
                picked.iter().for_each(|index| desk.done(run.get(*index)));
            }
            outcome => {
                for (index, how) in picked.iter().zip(outcome.each()) {
                    desk.settle_in_batch(run, *index, how);
                }
            }
        }
        from + picked.len() as u32
    }
}
