//! A broken promise, with the record at which it showed.

use std::fmt;

/// Where and how a promise was broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Violation {
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) breach: Breach,
}

/// The promise that was broken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Breach {
    /// A key's records came out of order; sequences count from 0 per key.
    Order { key: String, expected: u64, found: u64 },
    /// Two records of one key were in handlers at once.
    Overlap { key: String },
    /// A record was handed out again although its partition was not assigned anew.
    Repeat,
    /// A record that the demo never produced, or not as it arrived.
    Foreign { what: &'static str },
    /// A commit passed a record whose handler had not returned.
    Watermark { committed: i64 },
    /// A commit passed the last record of the partition.
    BeyondEnd { committed: i64 },
    /// A commit lies below an earlier one.
    WentBack { before: i64 },
    /// A record was never handled although the run came to its end.
    Lost,
    /// The broker does not have all that was handled as committed.
    Lag { end: i64 },
    /// Nothing moved any more.
    Stalled { seconds: u64, state: Holds },
    /// The consumer ended by itself.
    Ended { reason: String },
    /// The consumer did not end although it was told to.
    DidNotStop { seconds: u64 },
}

/// What the record that holds a watermark is waiting for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holds {
    /// It was appended, but no handler ever got it.
    NotHanded,
    /// Its handler has not returned.
    Running,
    /// Its handler returned, but no commit covers it.
    NotCommitted,
}

impl Breach {
    /// Name for machines.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Order { .. } => "order",
            Self::Overlap { .. } => "overlap",
            Self::Repeat => "repeat",
            Self::Foreign { .. } => "foreign",
            Self::Watermark { .. } => "watermark",
            Self::BeyondEnd { .. } => "beyond_end",
            Self::WentBack { .. } => "went_back",
            Self::Lost => "lost",
            Self::Lag { .. } => "lag",
            Self::Stalled { .. } => "stalled",
            Self::Ended { .. } => "ended",
            Self::DidNotStop { .. } => "did_not_stop",
        }
    }

    /// Whether the order of a key's records is what was broken.
    pub(crate) fn is_of_order(&self) -> bool {
        matches!(self, Self::Order { .. } | Self::Overlap { .. })
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "partition {}, offset {}: ", self.partition, self.offset)?;
        match &self.breach {
            Breach::Order { key, expected, found } => {
                write!(
                    f,
                    "key `{key}` out of order: its record {found} was handled when {expected} was due"
                )
            }
            Breach::Overlap { key } => {
                write!(f, "key `{key}`: two of its records were in handlers at once")
            }
            Breach::Repeat => {
                f.write_str("handed out again although the partition was not assigned anew")
            }
            Breach::Foreign { what } => write!(f, "not a record as the demo produced it: {what}"),
            Breach::Watermark { committed } => {
                write!(f, "unfinished, but the commit of offset {committed} is past it")
            }
            Breach::BeyondEnd { committed } => {
                write!(f, "no such record, but the commit of offset {committed} is past it")
            }
            Breach::WentBack { before } => write!(f, "committed after offset {before} had been"),
            Breach::Lost => f.write_str("never handled: lost"),
            Breach::Lag { end } => {
                write!(
                    f,
                    "the broker has this as the committed offset, but the partition ends at {end}"
                )
            }
            Breach::Stalled { seconds, state } => {
                let state = match state {
                    Holds::NotHanded => "no handler was given this record",
                    Holds::Running => "the handler of this record has not returned",
                    Holds::NotCommitted => "this record is finished and no commit covers it",
                };
                write!(f, "holds the watermark, nothing moved for {seconds} s: {state}")
            }
            Breach::Ended { reason } => {
                write!(f, "not committed over, and the consumer ended: {reason}")
            }
            Breach::DidNotStop { seconds } => {
                write!(f, "not committed over, and the consumer did not stop within {seconds} s")
            }
        }
    }
}

/// A key, fit for a message.
pub(crate) fn key_text(key: &[u8]) -> String {
    const MOST: usize = 64;
    String::from_utf8_lossy(&key[..key.len().min(4 * MOST)]).escape_debug().take(MOST).collect()
}
