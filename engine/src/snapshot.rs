//! What is finished above the watermark, from one moment.

use std::collections::VecDeque;
use std::ops::Range;

/// A watermark and what was finished above it at the same moment, as
/// [`Watermark::snapshot`](crate::Watermark::snapshot) fills it in. Made to be used again: its memory
/// grows to what was needed once.
///
/// # Guarantees
/// - Every offset in [`done`](Self::done) is that of a finished record, with its effects visible; none
///   is below [`watermark`](Self::watermark). So no record is counted twice, and none that was below
///   the watermark is missing.
/// - The record that holds the watermark is not listed, even if it is finished a moment later.
/// - Any other record that is finished while the snapshot is taken may be in it or not.
///
/// ```
/// use plimsoll_engine::{Snapshot, Window};
///
/// let mut window = Window::open(10, 16)?;
/// let tickets: Vec<_> = [10, 11, 12, 15, 16].map(|offset| window.admit(offset).unwrap()).into();
/// let mut snapshot = Snapshot::new();
/// for ticket in tickets.into_iter().filter(|ticket| ticket.offset() != 11) {
///     ticket.finish();
/// }
/// window.watermark().snapshot(&mut snapshot);
/// // The ticket of 11 was dropped: it holds the watermark.
/// assert_eq!((snapshot.watermark(), snapshot.done()), (11, &[12..13, 15..17][..]));
/// # Ok::<(), plimsoll_engine::InvalidSetting>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    watermark: i64,
    done: Vec<Range<i64>>,
}

impl Snapshot {
    /// An empty one, to be filled in.
    pub fn new() -> Self {
        Self::default()
    }

    /// The watermark: everything below it is finished.
    pub fn watermark(&self) -> i64 {
        self.watermark
    }

    /// Offsets at or above the watermark that are finished: ranges in ascending order, none empty, no
    /// two that touch. Offsets that do not exist are in none of them.
    pub fn done(&self) -> &[Range<i64>] {
        &self.done
    }

    /// The same, offset by offset.
    pub fn offsets(&self) -> impl Iterator<Item = i64> + '_ {
        self.done.iter().cloned().flatten()
    }

    pub(crate) fn begin(&mut self, watermark: i64) {
        self.watermark = watermark;
        self.done.clear();
    }

    #[cfg(loom)]
    pub(crate) fn set_watermark(&mut self, watermark: i64) {
        self.watermark = watermark;
    }

    /// Appends offsets above all that are in it.
    fn push(&mut self, range: Range<i64>) {
        match self.done.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.done.push(range),
        }
    }
}

/// Merges what was restored into what is found in the ring. Both ascend, and no offset is in both.
pub(crate) struct Merge<'a, I> {
    into: &'a mut Snapshot,
    restored: I,
    next: Option<Range<i64>>,
}

impl<'a, I: Iterator<Item = Range<i64>>> Merge<'a, I> {
    pub(crate) fn new(into: &'a mut Snapshot, mut restored: I) -> Self {
        let next = restored.next();
        Merge { into, restored, next }
    }

    fn push_restored_below(&mut self, offset: i64) {
        while let Some(range) = self.next.take_if(|range| range.start < offset) {
            let start = range.start.max(self.into.watermark);
            if start < range.end {
                self.into.push(start..range.end);
            }
            self.next = self.restored.next();
        }
    }

    pub(crate) fn push(&mut self, range: Range<i64>) {
        self.push_restored_below(range.start);
        self.into.push(range);
    }

    pub(crate) fn end(mut self) {
        self.push_restored_below(i64::MAX);
    }
}

/// Drops the ranges that end at or below `offset` from those that ascend.
pub(crate) fn drop_below(ranges: &mut VecDeque<Range<i64>>, offset: i64) {
    while ranges.front().is_some_and(|range| range.end <= offset) {
        ranges.pop_front();
    }
}

/// Offsets as ranges that ascend and do not touch, none below `start`.
pub(crate) fn normalised(done: &[Range<i64>], start: i64) -> Vec<Range<i64>> {
    let clipped = done.iter().map(|range| range.start.max(start)..range.end);
    let mut ranges: Vec<_> = clipped.filter(|range| range.start < range.end).collect();
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, last| {
        let touch = next.start <= last.end;
        if touch {
            last.end = last.end.max(next.end);
        }
        touch
    });
    ranges
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_sorted_clipped_and_joined() {
        let backwards = Range { start: 7, end: 2 };
        let ranges = [8..9, 20..i64::MAX, 0..3, 9..12, 5..5, backwards, 4..6, 21..30];
        assert_eq!(normalised(&ranges, 2), [2..3, 4..6, 8..12, 20..i64::MAX]);
        assert_eq!(normalised(&ranges, 9), [9..12, 20..i64::MAX]);
    }
}
