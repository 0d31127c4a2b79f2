//! Ordered, parallel record processing with a watermark.
//!
//! For anyone who has an ordered source with offsets (a Kafka partition, a log file) and wants to
//! handle its records on all cores, finish them out of order, and still know at every moment up to
//! where everything is done.
//!
//! - [`Window`]: one epoch of one partition. Admits records, hands out [`Ticket`]s, which finish
//!   from any thread in any order by one store; its [`Watermark`] moves over what is contiguous
//!   and done, and never past an unfinished record.
//!   [`Limits`] bound it in records, bytes and offsets, a [`Budget`] bounds many together, a
//!   [`Snapshot`] lists what is finished above the watermark.
//! - [`Executor`]: workers that run a handler over the records of many windows, those of one key
//!   in offset order and never two at once, with no lock and no allocation per record; or futures on
//!   the user's runtime, or threads that pull, over the same windows. It batches, tries again, parks
//!   keys, buries, limits rates, changes its workers while it runs, and says at any moment which record
//!   holds which watermark ([`Executor::stalls`]).
//!
//! It knows no Kafka, does no I/O, and has no clock of its own: the driving thread tells it the
//! time. A failed record is tried again as its [`Retry`] policy says, while other keys go on.

mod batch;
mod budget;
mod dispatch;
mod epoch;
mod error;
mod flight;
mod lane;
mod limits;
mod order;
mod outcome;
mod pull;
mod retry;
mod ring;
mod shard;
mod snapshot;
mod sync;
mod ticket;
mod tickets;
mod wake;
mod window;
mod worker;

pub use batch::Batch;
pub use budget::Budget;
pub use dispatch::{
    BatchOf, BuildError, Builder, Counts, EpochReport, Executor, Failure, OldHandler, Overdue,
    ParkedKey, Rate, Rejected, Report, Route, Skipped, Stall, StallState, WorkerState,
};
pub use epoch::EpochId;
pub use error::{InvalidSetting, Refused};
pub use flight::{AsyncHandler, FlightFuture, Spawn, Task};
pub use limits::Limits;
pub use order::{OrderBy, Router};
pub use outcome::{BatchOutcome, IntoBatchOutcome, IntoOutcome, Outcome};
pub use pull::{Ended, Pulled, Puller};
pub use retry::{Attempt, Exhausted, Retry};
pub use snapshot::Snapshot;
pub use ticket::Ticket;
pub use tickets::Tickets;
pub use wake::{Waiter, Waker};
pub use window::{Progress, Watermark, Window};
pub use worker::{DeadLetter, Handler, Spin};

/// Not public: the internals that the models in `loom-tests` and the benches drive directly.
#[doc(hidden)]
pub mod internals {
    #[cfg(loom)]
    pub use crate::budget::Flaw;
    pub use crate::dispatch::Hashes;
    #[cfg(loom)]
    pub use crate::flight::model::{Air, Reporter};
    pub use crate::lane::{LaneRx, LaneTx, Order, Run, lane};
}
