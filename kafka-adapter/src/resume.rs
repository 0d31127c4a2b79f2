//! Resuming without repeats: what is finished above the watermark goes into the metadata of each
//! commit, and is read back before the intake of a partition begins.

use crate::done_map::{self, DoneMap, Encoder, Ignored, MAX_GROWTH, span_that_fits};
use crate::error::Error;
use crate::fault::Planted;
use plimsoll_engine::{EpochId, Executor, Snapshot};
use std::fmt;
use std::ops::Range;
use std::time::Duration;

/// The shortest limit that holds a text at all.
const LEAST_LIMIT: usize = 16;
/// With less than that, intake that slows down would handle one record after the other.
const LEAST_TO_SLOW_DOWN: usize = 256;
/// Kafka's protocol knows no longer text.
const MOST_LIMIT: usize = i16::MAX as usize;
/// Measuring a map takes at most this part of the poller's time.
const SHARE: u32 = 10;
const LEAST_PAUSE: Duration = Duration::from_micros(200);

/// Whether commits carry what is finished above the committed offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DoneMaps {
    /// A commit carries the [done-map](crate::done_map) in its metadata, and whoever is assigned the
    /// partition next, after a stop, a crash or a move, skips what it lists.
    #[default]
    On,
    /// Commits have no metadata, and none is read: what was finished above the committed offset is
    /// handled again.
    Off,
}

/// What happens when a done-map would not fit into the metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MetadataFull {
    /// The map is cut to the part nearest the committed offset. After a restart the records of the
    /// rest are handled again.
    #[default]
    Cut,
    /// Intake of the partition slows down, and pauses if need be, while the map could outgrow the
    /// limit. One record that stays unfinished may so hold its partition. Offsets that do not exist
    /// may still make a map too long; then it is cut.
    SlowDown,
}

/// The settings together.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) maps: DoneMaps,
    pub(crate) limit: usize,
    pub(crate) full: MetadataFull,
    pub(crate) parallel_consumer: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            maps: DoneMaps::default(),
            limit: done_map::DEFAULT_LIMIT,
            full: MetadataFull::default(),
            parallel_consumer: false,
        }
    }
}

impl Settings {
    pub(crate) fn check(&self) -> Result<(), Error> {
        let least = match self.full {
            MetadataFull::Cut => LEAST_LIMIT,
            MetadataFull::SlowDown => LEAST_TO_SLOW_DOWN,
        };
        if !(least..=MOST_LIMIT).contains(&self.limit) {
            let reason = format!("{} bytes is outside {least}..={MOST_LIMIT}", self.limit);
            return Err(Error::config("metadata_limit", reason));
        }
        if self.parallel_consumer && self.maps == DoneMaps::Off {
            let reason = "reads metadata, which `done_map` has turned off";
            return Err(Error::config("resume_from_parallel_consumer", reason));
        }
        Ok(())
    }
}

/// What a partition was committed with before it was assigned.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) map: DoneMap,
    /// The metadata as it was found, so that it is not written again unchanged.
    pub(crate) text: String,
}

/// Why stored metadata is of no use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Unusable {
    NotText,
    Map(Ignored),
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unusable::NotText => f.write_str("the metadata is not text"),
            Unusable::Map(ignored) => ignored.fmt(f),
        }
    }
}

/// Reads the metadata of a committed offset.
pub(crate) fn read(
    settings: &Settings,
    committed: i64,
    metadata: Vec<u8>,
) -> Result<Stored, Unusable> {
    let text = String::from_utf8(metadata).map_err(|_| Unusable::NotText)?;
    let map = match DoneMap::decode(committed, &text) {
        Err(Ignored::Foreign) if settings.parallel_consumer => {
            done_map::parallel_consumer::decode(committed, &text)
        }
        other => other,
    };
    Ok(Stored { map: map.map_err(Unusable::Map)?, text })
}

/// Makes the offsets and the metadata of commits, and keeps its memory from one to the next.
#[derive(Debug)]
pub(crate) struct Maps {
    settings: Settings,
    /// In bytes; shrinks when the broker takes less.
    limit: usize,
    snapshot: Snapshot,
    map: DoneMap,
    encoder: Encoder,
}

impl Maps {
    pub(crate) fn new(settings: Settings) -> Self {
        Maps {
            limit: settings.limit,
            settings,
            snapshot: Snapshot::new(),
            map: DoneMap::new(0),
            encoder: Encoder::new(),
        }
    }

    pub(crate) fn settings(&self) -> &Settings {
        &self.settings
    }

    pub(crate) fn is_on(&self) -> bool {
        self.settings.maps == DoneMaps::On
    }

    pub(crate) fn slows_down(&self) -> bool {
        self.is_on() && self.settings.full == MetadataFull::SlowDown
    }

    /// Offset and metadata to commit for an epoch, both from one moment, and whether the map was cut.
    /// `None` if the epoch is gone.
    pub(crate) fn commit_of<T: Send + 'static>(
        &mut self,
        executor: &Executor<T>,
        id: EpochId,
        planted: &Planted,
    ) -> Option<(i64, &str, bool)> {
        if !self.is_on() {
            return executor
                .progress(id)
                .map(|progress| (planted.watermark_of(&progress), "", false));
        }
        let progress = executor.snapshot(id, &mut self.snapshot)?;
        let offset = fill(&mut self.map, planted.watermark_of(&progress), self.snapshot.done());
        let (text, cut) = self.encoder.encode_within(&self.map, self.limit);
        Some((offset, text, !cut.is_whole()))
    }

    /// The broker refused metadata of so many bytes. The next ones are at most half as long.
    pub(crate) fn shrink(&mut self, refused: usize) {
        self.limit = self.limit.min(refused / 2);
    }

    /// How many records of a partition may be admitted now, so that its map stays whole.
    pub(crate) fn allowance<T: Send + 'static>(
        &mut self,
        executor: &Executor<T>,
        id: EpochId,
        brake: &mut Brake,
        now: impl Fn() -> Duration,
    ) -> u32 {
        let Some(progress) = executor.progress(id) else { return u32::MAX };
        let span = span_that_fits(self.limit);
        let above = u64::try_from(brake.end - progress.watermark).unwrap_or(0);
        if above < span {
            return u32::try_from(span - above).unwrap_or(u32::MAX);
        }
        let began = now();
        if brake.left == 0 && began >= brake.not_before {
            brake.left = self.measure(executor, id, brake);
            let ended = now();
            brake.not_before = ended + ((ended - began) * SHARE).max(LEAST_PAUSE);
        }
        if brake.left == 0 && progress.unfinished == 0 {
            // Nothing that is unfinished holds the map: it can only become shorter.
            return 1;
        }
        brake.left
    }

    /// Records that may be admitted beside those that are unfinished, if each lengthens the map as
    /// much as a record can.
    fn measure<T: Send + 'static>(
        &mut self,
        executor: &Executor<T>,
        id: EpochId,
        brake: &Brake,
    ) -> u32 {
        let Some(progress) = executor.snapshot(id, &mut self.snapshot) else { return 0 };
        let done = |ranges: &[Range<i64>]| -> u64 {
            let above = ranges.iter().map(|range| range.start.max(progress.watermark)..range.end);
            above.map(|range| u64::try_from(range.end - range.start).unwrap_or(0)).sum()
        };
        // Of those listed as done, the restored ones are not among the admitted.
        let finished = done(self.snapshot.done()).saturating_sub(done(&brake.restored));
        let unfinished = progress.unfinished.saturating_sub(finished);
        fill(&mut self.map, progress.watermark, self.snapshot.done());
        let steps = self.map.room(self.limit).bytes() / MAX_GROWTH;
        u32::try_from((steps as u64).saturating_sub(unfinished)).unwrap_or(u32::MAX)
    }
}

/// What is left of a partition's room in the metadata.
#[derive(Debug, Default)]
pub(crate) struct Brake {
    /// The offset after the highest that is admitted or restored.
    pub(crate) end: i64,
    /// Records that may still be admitted after the last measurement.
    pub(crate) left: u32,
    /// No measurement before.
    not_before: Duration,
    pub(crate) restored: Vec<Range<i64>>,
    /// Told once that intake pauses.
    pub(crate) told: bool,
}

impl Brake {
    /// So many records were admitted, up to an offset.
    pub(crate) fn note(&mut self, records: u32, last: i64) {
        self.left = self.left.saturating_sub(records);
        self.end = self.end.max(last.saturating_add(1));
    }
}

/// Fills the map with what is done above `watermark`, and returns the offset to commit: the watermark,
/// or the end of what an earlier life had finished from there on and what is not delivered yet.
fn fill(map: &mut DoneMap, watermark: i64, done: &[Range<i64>]) -> i64 {
    let below = done.iter().take_while(|range| range.start <= watermark);
    let (count, end) = below.fold((0, watermark), |(n, end), range| (n + 1, end.max(range.end)));
    map.reset(end);
    for range in &done[count..] {
        // A snapshot's ranges ascend and do not touch.
        let pushed = map.push_range(range.clone());
        debug_assert_eq!(pushed, Ok(()));
    }
    end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_from_the_watermark_on_is_committed_over() {
        let mut map = DoneMap::new(0);
        assert_eq!(fill(&mut map, 5, &[7..9, 12..13]), 5);
        assert_eq!((map.committed(), map.ranges()), (5, &[7..9, 12..13][..]));
        // Restored and not delivered yet.
        assert_eq!(fill(&mut map, 5, &[5..9, 12..13, 15..16]), 9);
        assert_eq!((map.committed(), map.ranges()), (9, &[12..13, 15..16][..]));
        assert_eq!(fill(&mut map, 5, &[]), 5);
        assert!(map.is_empty());
    }

    #[test]
    fn stored_metadata_is_read_or_the_reason_is_named() {
        let own = Settings::default();
        let both = Settings { parallel_consumer: true, ..Settings::default() };
        let mut map = DoneMap::new(500);
        map.push_range(502..510).unwrap();
        let text = Encoder::new().encode(&map).to_owned();
        // 502..505 and 506..510, as the Parallel Consumer writes it.
        let foreign = "bAAK3AMA";
        for settings in [&own, &both] {
            let stored = read(settings, 500, text.clone().into_bytes()).unwrap();
            assert_eq!((&stored.map, &stored.text), (&map, &text));
            assert_eq!(read(settings, 500, vec![b'~', 0xff]).unwrap_err(), Unusable::NotText);
            assert!(read(settings, 500, Vec::new()).unwrap().map.is_empty());
            assert!(read(settings, 501, text.clone().into_bytes()).is_err());
        }
        let refused = read(&own, 500, foreign.into()).unwrap_err();
        assert_eq!(refused, Unusable::Map(Ignored::Foreign));
        let stored = read(&both, 500, foreign.into()).unwrap();
        assert_eq!(stored.map.ranges(), [502..505, 506..510]);
    }

    #[test]
    fn limits_that_cannot_be_meant_are_refused() {
        let with = |limit, full| Settings { limit, full, ..Settings::default() }.check();
        for (limit, full) in [
            (0, MetadataFull::Cut),
            (15, MetadataFull::Cut),
            (32_768, MetadataFull::Cut),
            (255, MetadataFull::SlowDown),
        ] {
            let error = with(limit, full).unwrap_err().to_string();
            assert!(error.contains("metadata_limit") && error.contains(&limit.to_string()));
        }
        with(16, MetadataFull::Cut).unwrap();
        with(32_767, MetadataFull::Cut).unwrap();
        with(256, MetadataFull::SlowDown).unwrap();
        let off = Settings { maps: DoneMaps::Off, parallel_consumer: true, ..Settings::default() };
        assert!(off.check().unwrap_err().to_string().contains("resume_from_parallel_consumer"));
    }
}
