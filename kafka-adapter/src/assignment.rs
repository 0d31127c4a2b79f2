//! The partitions this consumer owns, and where each stands.

use crate::client::{Source, TopicPartition};
use foldhash::fast::FixedState;
use plimsoll_engine::{EpochId, OrderBy, Router};
use std::hash::BuildHasher;

/// One owned partition.
#[derive(Debug)]
pub(crate) struct Partition {
    pub(crate) name: TopicPartition,
    pub(crate) source: Source,
    /// Opened by the first record that is delivered, whatever its offset: what came before it in
    /// the log, if anything, is not there any more.
    pub(crate) epoch: Option<Open>,
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

impl Partition {
    pub(crate) fn new(name: TopicPartition, source: Source) -> Self {
        let seed = FixedState::with_seed(0).hash_one(&name);
        Partition {
            name,
            source,
            epoch: None,
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
