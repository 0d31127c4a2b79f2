//! The narrow waist between the consumer's logic and the outside world: a client, a clock, a way to
//! sleep. `native` implements it over librdkafka; tests implement it by script. The poller,
//! the assignment and the committer are the same code over both.

use crate::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A partition of a topic.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct TopicPartition {
    pub(crate) topic: Arc<str>,
    pub(crate) partition: i32,
}

impl fmt::Display for TopicPartition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.topic, self.partition)
    }
}

/// Names the intake of one attached partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Source(pub(crate) usize);

/// What became of one partition of a commit request.
#[derive(Debug, Clone)]
pub(crate) struct CommitResult {
    pub(crate) partition: TopicPartition,
    pub(crate) offset: i64,
    pub(crate) outcome: Result<(), Refusal>,
}

/// Why a commit or a look-up was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) reason: String,
    pub(crate) kind: RefusalKind,
}

/// What can be done about a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RefusalKind {
    /// Trying again may help.
    Passing,
    /// Trying again cannot help (authorisation, fencing).
    Fatal,
    /// The broker takes no metadata of this length.
    MetadataTooLarge,
}

/// One partition of a commit request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Commit {
    pub(crate) partition: TopicPartition,
    pub(crate) offset: i64,
    /// None if it is empty.
    pub(crate) metadata: String,
}

/// What a partition was last committed with.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) partition: TopicPartition,
    /// Offset and metadata; `Ok(None)` if there was no commit.
    pub(crate) committed: Result<Option<(i64, Vec<u8>)>, String>,
}

/// What the client has to say. A rebalance waits until it is confirmed.
#[derive(Debug)]
pub(crate) enum Event {
    Assign(Vec<TopicPartition>),
    Revoke {
        partitions: Vec<TopicPartition>,
        lost: bool,
    },
    /// The answer to the one commit in flight.
    CommitDone(Vec<CommitResult>),
    /// The answer to the look-up of this number.
    Found {
        look_up: usize,
        outcome: Result<Vec<Found>, Refusal>,
    },
    Warning(String),
    Fatal(Error),
}

/// A record as the poller needs it.
pub(crate) trait Intake: Send + 'static {
    fn offset(&self) -> i64;
    fn key(&self) -> Option<&[u8]>;
}

/// A Kafka client, seen by its one owner, the poller. No method but `wait` and `close` blocks.
pub(crate) trait Client {
    type Record: Intake;

    /// Time since a fixed moment.
    fn now(&self) -> Duration;

    /// Sleeps until something happens, or `limit` has passed. `ready` is asked once more after the
    /// sleep was announced.
    fn wait(&self, limit: Duration, ready: &mut dyn FnMut() -> bool);

    /// Whether [`events`](Self::events) may have something.
    fn has_events(&self) -> bool;

    /// Serves the client and moves what it reports into `out`.
    fn events(&mut self, out: &mut Vec<Event>);

    /// Prepares the intake of a partition that is about to be assigned.
    fn attach(&mut self, partition: &TopicPartition) -> Result<Source, Error>;

    /// Ends the intake of a partition; what was prefetched is gone.
    fn detach(&mut self, source: Source);

    /// Completes an [`Event::Assign`].
    fn confirm_assign(&mut self, partitions: &[TopicPartition]) -> Result<(), Error>;

    /// Completes an [`Event::Revoke`].
    fn confirm_revoke(&mut self, partitions: &[TopicPartition]) -> Result<(), Error>;

    /// Whether [`fetch`](Self::fetch) may find records.
    fn is_ready(&self, source: Source) -> bool;

    /// Takes all partitions for ready once, against a lost signal.
    fn assume_ready(&mut self);

    /// Moves at most `most` prefetched records into `out`, in offset order.
    fn fetch(
        &mut self,
        source: Source,
        most: usize,
        out: &mut Vec<Self::Record>,
    ) -> Result<(), Error>;

    /// Sends offsets with their metadata; the answer comes as [`Event::CommitDone`]. One at a time.
    fn commit(&mut self, commits: &[Commit]) -> Result<(), Error>;

    /// Asks what was last committed for these partitions, which are at least one; the answer comes
    /// as [`Event::Found`] with the number `look_up`, usually within `limit`.
    fn look_up_committed(
        &mut self,
        look_up: usize,
        partitions: &[TopicPartition],
        limit: Duration,
    ) -> Result<(), Error>;

    /// Leaves the group and ends the client. Blocks for at most `limit`; whether it was enough.
    fn close(self, limit: Duration) -> bool;
}
