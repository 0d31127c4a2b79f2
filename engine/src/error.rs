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

/// Why a record was not admitted. Nothing was changed; the caller still has the record.
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
        /// The last admitted offset of this epoch.
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
            Refused::Closed => f.write_str("the epoch takes no more records"),
        }
    }
}

impl std::error::Error for Refused {}
