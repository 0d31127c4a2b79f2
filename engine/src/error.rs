//! Errors: one small enum per operation; each names the setting, the limit or the offset.

use std::fmt;

/// A setting that cannot be had, found when something is built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidSetting {
    /// Name of the setting, as the builder spells it.
    pub setting: &'static str,
    /// What is wrong with its value.
    pub reason: String,
}

impl InvalidSetting {
    pub(crate) fn new(setting: &'static str, reason: impl Into<String>) -> Self {
        InvalidSetting { setting, reason: reason.into() }
    }
}

impl fmt::Display for InvalidSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "setting `{}`: {}", self.setting, self.reason)
    }
}

impl std::error::Error for InvalidSetting {}

/// Why a record was not admitted, or an epoch not moved on. The caller still has the record, and but
/// for [`Done`](Self::Done) nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refused {
    /// The window holds as many unfinished or not yet passed records as it may. Offer the record
    /// again after the watermark has moved.
    Full {
        /// The window's capacity, records.
        capacity: u32,
    },
    /// The offset is not above the last admitted one: the record is already in the window, or
    /// was. It must not be handled a second time.
    Duplicate {
        /// The offered offset.
        offset: i64,
        /// The last admitted offset of this epoch, or the one below that to which it was moved on.
        last: i64,
    },
    /// The offset is below the start of the epoch.
    Below {
        /// The offered offset.
        offset: i64,
        /// The first offset of the epoch.
        start: i64,
    },
    /// Offsets are `0..=i64::MAX - 1`, so that the watermark after the last one still fits.
    OutOfRange {
        /// The offered offset.
        offset: i64,
    },
    /// The bytes of the record do not fit beside those that the window holds. Offer it again after
    /// the watermark has moved.
    Bytes {
        /// Bytes of the offered record.
        bytes: u64,
        /// Bytes that the window holds.
        held: u64,
        /// The window's limit, bytes.
        limit: u64,
    },
    /// The bytes of the record do not fit into the budget that the window shares with others. Offer
    /// it again after a watermark has moved; see [`Budget`](crate::Budget) for the rule.
    Budget {
        /// Bytes of the offered record.
        bytes: u64,
        /// Bytes that all windows hold.
        used: u64,
        /// Size of the budget, bytes.
        budget: u64,
    },
    /// The offset is too far above the watermark. Offer it again after the watermark has moved.
    Span {
        /// The offered offset.
        offset: i64,
        /// The watermark.
        watermark: i64,
        /// The window's limit, offsets.
        span: u64,
    },
    /// The record was finished in an earlier life, says the restored done-map: it must not be handled
    /// again. The watermark counts it as finished, and the next offset is expected.
    Done {
        /// The offered offset.
        offset: i64,
    },
    /// The epoch cannot be moved back.
    Backwards {
        /// The next offset it should have been moved to.
        next: i64,
        /// The least to which it can be moved: the offset after the last admitted one.
        least: i64,
    },
    /// The epoch does not take records any more: it was closed, revoked or halted.
    Closed,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::Full { capacity } => write!(f, "the window of {capacity} records is full"),
            Refused::Duplicate { offset, last } => {
                write!(f, "offset {offset} is not above the last admitted offset {last}")
            }
            Refused::Below { offset, start } => {
                write!(f, "offset {offset} is below the start {start} of the epoch")
            }
            Refused::OutOfRange { offset } => {
                write!(f, "offset {offset} is outside 0..={}", i64::MAX - 1)
            }
            Refused::Bytes { bytes, held, limit } => {
                write!(f, "{bytes} bytes beside the {held} held exceed the limit of {limit} bytes")
            }
            Refused::Budget { bytes, used, budget } => {
                write!(f, "{bytes} bytes beside the {used} in use: budget of {budget} bytes")
            }
            Refused::Span { offset, watermark, span } => {
                write!(f, "offset {offset} is more than {span} above the watermark {watermark}")
            }
            Refused::Done { offset } => write!(f, "offset {offset} was finished before"),
            Refused::Backwards { next, least } => {
                write!(f, "next offset {next} is below {least}, to which the epoch has come")
            }
            Refused::Closed => f.write_str("the epoch takes no more records"),
        }
    }
}

impl std::error::Error for Refused {}
