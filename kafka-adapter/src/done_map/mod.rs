//! What is finished above the committed offset, as text for the metadata of a commit.
//!
//! For a consumer or a tool that commits the first unfinished offset and wants a restart, a crash or a
//! move to another process to repeat only what was unfinished. Nothing here does input or output.
//!
//! - [`DoneMap`]: the finished offsets, as ranges; made from them, or by [`DoneMap::decode`].
//! - [`Encoder`]: the text, within a limit in bytes; [`Cut`] says what had to be left out.
//! - [`Room`]: how much a map can still grow, for slowing down intake in time.
//! - [`parallel_consumer`]: reads the metadata of the Confluent Parallel Consumer.
//!
//! A text is bound to its committed offset by a check value. What is damaged, foreign, of another version
//! or of another commit is [`Ignored`]: then finished records are repeated, and nothing is lost.

mod bits;
mod codec;
pub mod parallel_consumer;
#[cfg(test)]
mod round_trip;
mod text;

use std::fmt;
use std::ops::Range;

/// The most ranges that a map is read or written with: 4 MiB of memory. The text of a map with more is cut.
pub const MAX_RANGES: usize = 1 << 18;

/// The limit of a broker's default configuration (`offset.metadata.max.bytes`), in bytes.
pub const DEFAULT_LIMIT: usize = 4_096;

/// One more finished record lengthens the text by at most so many bytes.
// It can break one token into four: three more, each with three values of at most 20 + 6 + 63 bits. These
// are 801 bits, in pairs of 13 with up to 7 bits of filling: 126 characters.
pub const MAX_GROWTH: usize = 126;

/// Finished offsets above a committed one: sorted ranges that neither overlap nor touch.
///
/// The committed offset itself is never finished: a commit names the first offset that is not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DoneMap {
    committed: i64,
    ranges: Vec<Range<i64>>,
}

impl DoneMap {
    /// An empty map above `committed`; a negative offset counts as 0.
    #[must_use]
    pub fn new(committed: i64) -> Self {
        DoneMap { committed: committed.max(0), ranges: Vec::new() }
    }

    /// Empties the map for another committed offset and keeps its memory.
    pub fn reset(&mut self, committed: i64) {
        self.committed = committed.max(0);
        self.ranges.clear();
    }

    /// The offset that the map stands above.
    #[must_use]
    pub fn committed(&self) -> i64 {
        self.committed
    }

    /// Adds finished offsets above all that are in the map. An empty range changes nothing.
    ///
    /// Offsets that do not exist (compacted, markers of transactions) may lie in a range or between two;
    /// a range over them makes the text shorter.
    ///
    /// # Errors
    /// [`OutOfOrder`] if the range begins below the end of the map, or at the committed offset or below it;
    /// the map is unchanged.
    pub fn push_range(&mut self, range: Range<i64>) -> Result<(), OutOfOrder> {
        if range.is_empty() {
            return Ok(());
        }
        let lowest = self.ranges.last().map_or(self.committed.saturating_add(1), |last| last.end);
        if range.start < lowest {
            return Err(OutOfOrder { start: range.start, lowest });
        }
        self.append(range);
        Ok(())
    }

    /// Adds one finished offset above all that are in the map.
    ///
    /// # Errors
    /// [`OutOfOrder`] as for [`push_range`](Self::push_range), and for `i64::MAX`, which no record can have.
    pub fn push(&mut self, offset: i64) -> Result<(), OutOfOrder> {
        match offset.checked_add(1) {
            Some(end) => self.push_range(offset..end),
            None => Err(OutOfOrder { start: offset, lowest: self.end() }),
        }
    }

    /// A range that is not empty and not below the end.
    fn append(&mut self, range: Range<i64>) {
        match self.ranges.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.ranges.push(range),
        }
    }

    /// The finished offsets, ascending; between two ranges lies at least one offset.
    #[must_use]
    pub fn ranges(&self) -> &[Range<i64>] {
        &self.ranges
    }

    /// The offset after the highest finished one; the committed offset if there is none.
    #[must_use]
    pub fn end(&self) -> i64 {
        self.ranges.last().map_or(self.committed, |last| last.end)
    }

    /// Whether the offset is finished. Takes a time that grows with the logarithm of the ranges.
    #[must_use]
    pub fn contains(&self, offset: i64) -> bool {
        let after = self.ranges.partition_point(|range| range.start <= offset);
        after > 0 && offset < self.ranges[after - 1].end
    }

    /// The number of finished offsets.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.ranges.iter().map(|range| range.end.abs_diff(range.start)).sum()
    }

    /// Whether no offset is finished.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Exactly the bytes of the text of [`Encoder::encode`]; 0 if the map is empty.
    #[must_use]
    pub fn encoded_len(&self) -> usize {
        codec::encoded_len(self)
    }

    /// How much the text can grow below `limit` bytes.
    #[must_use]
    pub fn room(&self, limit: usize) -> Room {
        Room { used: self.encoded_len(), limit }
    }

    /// Reads the metadata of a commit of the offset `committed`. No metadata is an empty map.
    ///
    /// Time and memory are bounded by the length of the text and [`MAX_RANGES`], whatever it says.
    ///
    /// # Errors
    /// [`Ignored`] if it is not the text of a map above this offset. A text that was damaged by chance, or
    /// written for another offset, passes with a probability of 2⁻³²; damage to a single character
    /// never does.
    pub fn decode(committed: i64, metadata: &str) -> Result<Self, Ignored> {
        codec::decode(committed, metadata)
    }
}

/// Writes the texts of maps, and keeps its memory from one to the next.
#[derive(Debug, Default)]
pub struct Encoder {
    body: Vec<u8>,
    text: String,
}

impl Encoder {
    /// An encoder without memory yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The text of the whole map, whatever its length; cut only above [`MAX_RANGES`].
    pub fn encode(&mut self, map: &DoneMap) -> &str {
        self.encode_within(map, usize::MAX).0
    }

    /// The text of as many ranges as fit into `limit` bytes, those next to the committed offset first.
    ///
    /// A higher limit never keeps fewer. The text is empty if no range fits. What was cut is repeated after
    /// a restart.
    pub fn encode_within(&mut self, map: &DoneMap, limit: usize) -> (&str, Cut) {
        let cut = codec::encode(map, limit, &mut self.body, &mut self.text);
        (&self.text, cut)
    }
}

/// What a text holds of its map, and what was left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Ranges in the text.
    pub kept_ranges: usize,
    /// Ranges that are not.
    pub cut_ranges: usize,
    /// Finished offsets that are not.
    pub cut_offsets: u64,
    /// The first of them.
    pub from: Option<i64>,
}

impl Cut {
    /// Whether the text holds the whole map.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.cut_ranges == 0
    }
}

/// The length of a map's text against its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Bytes of the text.
    pub used: usize,
    /// Bytes that it may have.
    pub limit: usize,
}

impl Room {
    /// Bytes by which the text can grow; 0 if it is too long already.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.limit.saturating_sub(self.used)
    }

    /// Whether the whole map fits.
    #[must_use]
    pub fn fits(&self) -> bool {
        self.used <= self.limit
    }

    /// Whether fewer than `reserve` bytes are left, so that intake of the partition should slow down.
    ///
    /// A reserve of [`MAX_GROWTH`] keeps the map whole for one further record, whichever it is.
    #[must_use]
    pub fn is_short(&self, reserve: usize) -> bool {
        self.bytes() < reserve
    }
}

/// Every map fits into `limit` bytes whose end is at most so many offsets above the committed one.
///
/// While a window is no wider there is no need to ask for [`DoneMap::room`].
#[must_use]
pub fn span_that_fits(limit: usize) -> u64 {
    // With both parameters 0 a value takes one bit for each offset, or when escaped at worst 31 for 21.
    codec::budget(limit).saturating_sub(codec::PLAIN_HEADER_BITS) * 21 / 31
}

/// A range that does not lie above what the map already holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OutOfOrder {
    /// Where the refused range begins.
    pub start: i64,
    /// Where it could have begun.
    pub lowest: i64,
}

impl fmt::Display for OutOfOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OutOfOrder { start, lowest } = self;
        write!(
            f,
            "finished offsets from {start} do not lie at {lowest} or above, in ascending order"
        )
    }
}

impl std::error::Error for OutOfOrder {}

/// Why metadata was ignored. The records above the committed offset are then all repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ignored {
    /// The offset is not one that can be committed.
    NoCommittedOffset {
        /// The offset.
        committed: i64,
    },
    /// The text is not a done-map.
    Foreign,
    /// A done-map of a version that is not known here.
    UnknownVersion {
        /// The version; `None` if the text ends before it.
        version: Option<char>,
    },
    /// A character that cannot stand where it stands.
    BadCharacter {
        /// Its place in the text, in bytes.
        position: usize,
    },
    /// The text ends before the map begins.
    TooShort {
        /// The bytes of the text.
        bytes: usize,
    },
    /// The text is damaged, cut off, or was written for another committed offset.
    CheckFailed {
        /// The offset that it came with.
        committed: i64,
    },
    /// The check value is right, if there is one, but the content cannot be.
    Malformed {
        /// What is wrong.
        what: &'static str,
    },
    /// More ranges than are read.
    TooManyRanges {
        /// The most that are read.
        limit: usize,
    },
    /// More bytes after decompression than are read.
    TooLarge {
        /// The most that are read, in bytes.
        limit: usize,
    },
}

impl fmt::Display for Ignored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ignored::NoCommittedOffset { committed } => {
                write!(f, "offset {committed} cannot have been committed")
            }
            Ignored::Foreign => f.write_str("the metadata is not a done-map"),
            Ignored::UnknownVersion { version: Some(version) } => {
                write!(f, "the done-map has the unknown version {version:?}")
            }
            Ignored::UnknownVersion { version: None } => f.write_str("the done-map has no version"),
            Ignored::BadCharacter { position } => {
                write!(f, "the metadata cannot have the character at byte {position}")
            }
            Ignored::TooShort { bytes } => {
                write!(f, "metadata of {bytes} bytes is too short for a done-map")
            }
            Ignored::CheckFailed { committed } => write!(
                f,
                "the done-map is damaged or was not written for the committed offset {committed}"
            ),
            Ignored::Malformed { what } => write!(f, "the metadata is malformed: {what}"),
            Ignored::TooManyRanges { limit } => {
                write!(f, "the metadata has more than {limit} ranges")
            }
            Ignored::TooLarge { limit } => {
                write!(f, "the metadata has more than {limit} bytes when decompressed")
            }
        }
    }
}

impl std::error::Error for Ignored {}
