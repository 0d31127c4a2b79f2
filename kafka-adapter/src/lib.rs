//! A Kafka consumer that uses all cores without losing order per key and without committing past
//! unfinished work.
//!
//! - [`Consumer`]: reads topics, runs a handler on worker threads, commits the watermark.
//! - [`Record`], [`Batch`]: what a handler is given, read in place.
//! - [`Event`], [`Report`], [`Error`]: what it tells.
//! - [`Handle`]: stops it.
//!
//! # Guarantees
//! - A commit never passes an unfinished record; an error, a panic, a kill or a rebalance means
//!   that the unfinished records are delivered again (at least once). What is finished above the
//!   committed offset is in the commit's metadata ([`done_map`]) and is skipped.
//! - Records of one key of one partition are handled in offset order, never two at once. Records
//!   with a null key have no order; an empty key is a key.
//!
//! A failed record is tried again as [`ConsumerBuilder::retry`] says; by default, and after the last
//! attempt unless it is to be passed over, it halts its partition and ends [`Consumer::run`]. There
//! is no dead-letter topic and there are no transactions yet.
//!
//! It sets no global allocator. librdkafka allocates for every record on one thread and frees on
//! another, so the allocator is a large part of the cost: a program does well to link one that C
//! code uses too, such as the crate `mimalloc` with its feature `override`.

mod assignment;
mod client;
mod consumer;
pub mod done_map;
mod error;
mod event;
mod fault;
mod native;
mod poller;
mod resume;
#[cfg(test)]
mod scripted;

pub use consumer::{Batch, Consumer, ConsumerBuilder, Handle};
pub use error::Error;
pub use event::{Committed, Event, PartitionReport, Report};
#[cfg(feature = "planted-faults")]
pub use fault::Fault;
pub use native::{Headers, Record};
pub use plimsoll_engine::{BatchOutcome, Exhausted, IntoBatchOutcome, IntoOutcome, Outcome, Retry};
pub use resume::{DoneMaps, MetadataFull};

/// Not public: what the tests of this workspace need of librdkafka's mock cluster.
#[doc(hidden)]
pub mod testing {
    pub use crate::native::hasten_first_rebalance;
}

/// The README's program is compiled with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
