//! Why a run could not be done: bad input or environment, exit code 2.

use std::io;

use rdkafka::error::KafkaError;

use super::input::InputError;

/// Nothing is known to be broken, but the run could not be carried out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    /// The input is unusable.
    #[error(transparent)]
    Input(#[from] InputError),
    /// No broker answers.
    #[error("no broker answered at {brokers} within {seconds} s: {source}")]
    Unreachable { brokers: String, seconds: u64, source: KafkaError },
    /// The demo's topic cannot be made.
    #[error("cannot create topic {topic}: {reason}")]
    Topic { topic: String, reason: String },
    /// A client cannot be made; or the broker in this process.
    #[error("cannot start {what}: {source}")]
    Client { what: &'static str, source: KafkaError },
    /// The consumer gave up.
    #[error("the consumer failed: {0}")]
    Consumer(#[from] plimsoll_kafka::Error),
    /// A record did not reach the broker.
    #[error("record {record} of the run was not appended: {reason}")]
    Append { record: u64, reason: String },
    /// The group never got going.
    #[error("the broker assigned no partition of {topic} within {seconds} s")]
    NotAssigned { topic: String, seconds: u64 },
    /// The broker cannot be asked what was committed.
    #[error("cannot read the offsets of {topic}: {reason}")]
    Offsets { topic: String, reason: String },
    /// Signals cannot be caught.
    #[error("cannot listen for signals: {0}")]
    Signals(io::Error),
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    /// The result cannot be written.
    #[error("cannot write the result: {0}")]
    Output(io::Error),
}
