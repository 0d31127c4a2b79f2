//! The partitions this consumer owns, and where each stands.

use crate::client::{Source, TopicPartition};
use crate::resume::{Brake, Stored};
use foldhash::fast::FixedState;
use plimsoll_engine::{EpochId, OrderBy, Router};
use std::hash::BuildHasher;

/// One owned partition.
#[derive(Debug)]
pub(crate) struct Partition<R> {
    pub(crate) name: TopicPartition,
    pub(crate) source: Source,
    /// Opened by the first record that is delivered, whatever its offset: what came before it in
    /// the log, if anything, is not there any more.
    pub(crate) epoch: Option<Open>,
    /// The look-up of what it was committed with: no intake before its answer.
    pub(crate) looking: Option<usize>,
    /// What the look-up has found, until the epoch is opened.
    pub(crate) stored: Option<Stored>,
    /// The metadata that was last sent, or found.
    pub(crate) sent_metadata: String,
    /// Records that were fetched and not admitted for lack of room.
    pub(crate) held: Vec<R>,
    pub(crate) brake: Brake,
    /// Records skipped because an earlier life had finished them.
    pub(crate) resumed: u64,
    /// Being given up: no intake.
    pub(crate) leaving: bool,
    /// Its window was full at the last look.
    pub(crate) full: bool,
    /// Records below the watermarks of the epochs so far.
    pub(crate) finished: u64,
    /// The last acknowledged offset.
    pub(crate) committed: Option<i64>,
    router: Router,
}

/// An open epoch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Open {
    pub(crate) id: EpochId,
    /// What was last sent, or the start: nothing is committed before something is finished.
    pub(crate) sent: i64,
}

impl<R> Partition<R> {
    pub(crate) fn new(name: TopicPartition, source: Source) -> Self {
        let seed = FixedState::with_seed(0).hash_one(&name);
        Partition {
            name,
            source,
            epoch: None,
            looking: None,
            stored: None,
            sent_metadata: String::new(),
            held: Vec::new(),
            brake: Brake::default(),
            resumed: 0,
            leaving: false,
            full: false,
            finished: 0,
            committed: None,
            router: OrderBy::Key.router(seed),
        }
    }

    pub(crate) fn router(&self) -> Router {
        self.router.clone()
    }
}
