//! What can go wrong, by name.

use std::fmt;
use std::time::Duration;

/// Why a consumer was not built, did not start, or ended.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// A setting is missing, out of range, contradictory, unknown to librdkafka, or one that the
    /// consumer must own.
    Config {
        /// Name of the setting, as the builder or librdkafka spells it.
        setting: String,
        /// What is wrong with it.
        reason: String,
    },
    /// No broker answered within the start-up limit.
    BrokerUnreachable {
        /// The brokers that were tried.
        brokers: String,
        /// How long.
        limit: Duration,
        /// librdkafka's last word.
        reason: String,
    },
    /// A subscribed topic does not exist.
    TopicMissing {
        /// The topic.
        topic: String,
    },
    /// A broker answered the look-up of a topic with an error.
    Topic {
        /// The topic.
        topic: String,
        /// The broker's error.
        reason: String,
    },
    /// A handler returned an error or panicked. Its partition halted at that record; everything
    /// else was drained and committed, and nothing was committed past the record.
    Handler {
        /// Topic of the record.
        topic: String,
        /// Partition of the record.
        partition: i32,
        /// Offset of the record.
        offset: i64,
        /// The handler's error, or the panic's text.
        reason: String,
    },
    /// The group coordinator refuses this consumer's commits for good (authorisation, fencing).
    Commit {
        /// Topic of the first refused partition.
        topic: String,
        /// The first refused partition.
        partition: i32,
        /// Its offset to commit.
        offset: i64,
        /// The broker's error.
        reason: String,
    },
    /// librdkafka reported an error that it cannot recover from.
    Client {
        /// Its text.
        reason: String,
    },
    /// The operating system refused something the consumer needs.
    System {
        /// What was needed.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
}

impl Error {
    pub(crate) fn config(setting: impl Into<String>, reason: impl Into<String>) -> Self {
        Error::Config { setting: setting.into(), reason: reason.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Config { setting, reason } => write!(f, "setting `{setting}`: {reason}"),
            Error::BrokerUnreachable { brokers, limit, reason } => {
                write!(f, "no broker of {brokers} answered within {limit:?}: {reason}")
            }
            Error::TopicMissing { topic } => write!(f, "topic `{topic}` does not exist"),
            Error::Topic { topic, reason } => write!(f, "topic `{topic}`: {reason}"),
            Error::Handler { topic, partition, offset, reason } => {
                write!(f, "handler failed at {topic}/{partition} offset {offset}: {reason}")
            }
            Error::Commit { topic, partition, offset, reason } => {
                write!(f, "commit of {topic}/{partition} at {offset} refused for good: {reason}")
            }
            Error::Client { reason } => write!(f, "the Kafka client failed: {reason}"),
            Error::System { what, .. } => write!(f, "cannot get {what}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::System { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl From<plimsoll_engine::BuildError> for Error {
    fn from(error: plimsoll_engine::BuildError) -> Self {
        match error {
            plimsoll_engine::BuildError::Setting(invalid) => invalid.into(),
            plimsoll_engine::BuildError::Spawn { worker, source } => {
                Error::System { what: format!("a thread for worker {worker}"), source }
            }
            other => Error::Client { reason: other.to_string() },
        }
    }
}

impl From<plimsoll_engine::InvalidSetting> for Error {
    fn from(invalid: plimsoll_engine::InvalidSetting) -> Self {
        Error::config(invalid.setting, invalid.reason)
    }
}
