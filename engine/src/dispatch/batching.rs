//! How batches are put together: what they have in common, how large they are, how long they wait.
//!
//! # Linger
//! Entries that wait for their batch to become full lie in the lane, pushed and not published: the
//! worker does not see them, and the dispatcher can take them back. Whole batches are published at
//! once, a partial one when its first record has waited long enough, counted in the time of
//! [`Executor::pass`]. A lane with a partial batch is filled before another one is considered.
//!
//! What must not wait publishes the lane it is put into: a record that is tried again, and one of an
//! epoch whose intake has ended.

use super::lane::Lane;
use super::rate::Rate;
use super::{Builder, Executor};
use crate::batch::Entry;
use crate::error::InvalidSetting;
use crate::worker::{Size, size_of};
use std::time::Duration;

/// The longest linger.
const LONGEST: Duration = Duration::from_secs(3_600);

/// What the records of one batch have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum BatchOf {
    /// Nothing: whatever lies next to each other in front of a worker.
    #[default]
    Mixed,
    /// Their shard: all their keys are in order with each other.
    Shard,
    /// Their key, that is, the hash they were offered with. Records without an order make up batches
    /// of their own.
    Key,
}

/// The settings that this file, `rate` and `conflate` deal with.
#[derive(Debug, Clone, Default)]
pub(super) struct Batching {
    pub(super) linger: Duration,
    pub(super) of: BatchOf,
    pub(super) bytes: Option<usize>,
    pub(super) conflate: bool,
    pub(super) rate: Option<Rate>,
    pub(super) key_rate: Option<Rate>,
}

impl Batching {
    pub(super) fn check(&self) -> Result<(), InvalidSetting> {
        if self.linger > LONGEST {
            let reason = format!("{:?} is longer than {LONGEST:?}", self.linger);
            return Err(InvalidSetting::new("linger", reason));
        }
        if self.bytes == Some(0) {
            return Err(InvalidSetting::new("batch_bytes", "0 bytes hold no record"));
        }
        self.rate.map_or(Ok(()), |rate| rate.check("rate"))?;
        self.key_rate.map_or(Ok(()), |rate| rate.check("key_rate"))
    }

    /// Whether the entries of a run are put together in a way of their own.
    pub(super) fn groups(&self) -> bool {
        self.of != BatchOf::Mixed || self.bytes.is_some()
    }
}

impl Builder {
    /// How long a batch may wait to become full, counted from its first record, in the time of
    /// [`Executor::pass`]; default 0, at most an hour.
    ///
    /// With 0 a batch takes what is there. Otherwise a worker is given a batch when it is full, and a
    /// partial one when the linger is over; at once when the intake of an epoch ends
    /// ([`Executor::stop_intake`], [`halt`](Executor::halt), [`close`](Executor::close),
    /// [`stop`](Executor::stop)) or when it holds a record that is tried again. Each worker has a
    /// partial batch of its own; another one is begun only for records whose key is busy elsewhere.
    /// The time in which a record waits because its key is busy or no worker has room is not
    /// counted.
    ///
    /// A batch is full with [`batch`](Self::batch) records or [`batch_bytes`](Self::batch_bytes);
    /// batches [of one shard or key](Self::batch_of) are made of what is then handed over. Handlers
    /// for single records do not linger.
    pub fn linger(mut self, linger: Duration) -> Self {
        self.batching.linger = linger;
        self
    }

    /// What the records of one batch have in common; default [`BatchOf::Mixed`].
    ///
    /// Batches of a shard or a key are put together from what a worker takes at once, at most
    /// [`batch`](Self::batch) records: a key with many records fills batches, others get small ones.
    pub fn batch_of(mut self, of: BatchOf) -> Self {
        self.batching.of = of;
        self
    }

    /// Most bytes of a batch; default no limit. A record that alone has more goes alone. The size
    /// comes from [`Handler::record_bytes`](crate::Handler::record_bytes), which must be set.
    pub fn batch_bytes(mut self, bytes: usize) -> Self {
        self.batching.bytes = Some(bytes);
        self
    }

    /// Whether of several waiting records of one key and epoch only the newest is handled; default
    /// `false`. For records that replace each other, such as states.
    ///
    /// The others are finished when the newest has taken effect, was skipped, or was taken by the
    /// dead-letter hook; until then the watermark does not pass them. They are counted in
    /// [`Counts::conflated`](crate::Counts::conflated). Waiting are records that no worker has room
    /// for, whose key is busy or whose key is parked; not those in front of a worker (about 4 ms of
    /// work), nor a record that has failed and is to be tried again. To let more of them meet,
    /// [`Executor::demand`] asks for records while no worker has room, too.
    /// Records without an order and those of quarantined keys are all handled.
    pub fn conflate(mut self, conflate: bool) -> Self {
        self.batching.conflate = conflate;
        self
    }

    /// Most records that are handed to the workers per second, in the time of [`Executor::pass`];
    /// default no limit. Further attempts count, the dead-letter hook does not.
    ///
    /// [`Executor::demand`] asks for no more than that; what is offered beyond waits in the executor
    /// and holds no worker.
    pub fn rate(mut self, rate: Rate) -> Self {
        self.batching.rate = Some(rate);
        self
    }

    /// As [`rate`](Self::rate), for the records of each key: those of a key that is over its rate
    /// wait, in order, while other keys go on. Records without an order are not limited by it.
    ///
    /// Takes memory for the keys that have been used so recently that their burst is not
    /// replenished, and for no others.
    pub fn key_rate(mut self, rate: Rate) -> Self {
        self.batching.key_rate = Some(rate);
        self
    }
}

/// How the dispatcher lets batches gather in lanes.
#[derive(Debug)]
pub(super) struct Gather {
    linger: Duration,
    bytes: Option<usize>,
    /// Records were recalled from a lane: since when the oldest of them lingers.
    recalled: Option<Duration>,
    /// Some of them had been published: they were full batches, or had waited long enough.
    hurry: bool,
}

impl Gather {
    pub(super) fn new(linger: Duration, bytes: Option<usize>) -> Self {
        Gather { linger, bytes, recalled: None, hurry: false }
    }
}

/// The partial batch of a lane.
#[derive(Debug, Default)]
pub(super) struct Partial {
    /// Records of a full batch; 0 while nothing gathers.
    pub(super) batch: u32,
    /// Records and bytes of the partial batch, as far as it was looked at.
    count: u32,
    bytes: usize,
    /// When its first record came.
    since: Option<Duration>,
    /// It must not wait.
    urgent: bool,
}

impl<T> Lane<T> {
    /// Whether it holds a batch that is begun and not full.
    fn gathers(&self) -> bool {
        let batch = self.partial.batch;
        batch > 0 && (self.partial.count > 0 || !self.tx.unpublished().is_multiple_of(batch))
    }

    /// Lets batches be filled without a look at other lanes.
    #[cold]
    pub(super) fn set_gather_limits(&mut self) {
        if self.held == 0 {
            let (pending, batch) = (self.tx.pending(), self.partial.batch);
            let aim = self.easy.max(pending);
            let begun = (aim - pending + self.tx.unpublished()) % batch;
            let rest = if begun == 0 { 0 } else { batch - begun };
            self.easy = self.limit.min(aim + rest);
        }
        // One batch a claim.
        self.tx.set_run(1);
    }

    /// Unpublished entries that make up whole batches.
    fn whole(&mut self, most_bytes: Option<usize>, size: Option<&Size<T>>) -> u32 {
        let (unpublished, batch) = (self.tx.unpublished(), self.partial.batch);
        let Some(most_bytes) = most_bytes else {
            self.partial.count = unpublished % batch;
            return unpublished - self.partial.count;
        };
        let mut whole = 0;
        let (mut count, mut bytes) = (self.partial.count.min(unpublished), self.partial.bytes);
        let looked_at = count;
        for step in looked_at..unpublished {
            let Some(Entry { payload, .. }) = self.tx.peek(step) else { break };
            let more = size_of(size, payload);
            if count > 0 && bytes.saturating_add(more) > most_bytes {
                (whole, count, bytes) = (step, 0, 0);
            }
            (count, bytes) = (count + 1, bytes.saturating_add(more));
            if count == batch || bytes >= most_bytes {
                (whole, count, bytes) = (step + 1, 0, 0);
            }
        }
        (self.partial.count, self.partial.bytes) = (count, bytes);
        whole
    }

    /// Publishes whole batches, and a partial one whose time has come.
    fn flush_gathered(&mut self, gather: &Gather, size: Option<&Size<T>>, now: Duration) {
        let unpublished = self.tx.unpublished();
        let whole = self.whole(gather.bytes, size);
        if whole > 0 {
            self.partial.since = None;
        }
        let mut count = whole;
        if whole < unpublished {
            let since = *self.partial.since.get_or_insert(now);
            if self.partial.urgent || now >= since.saturating_add(gather.linger) {
                count = unpublished;
            }
        }
        if count == unpublished {
            self.reset_partial();
        }
        self.owed |= self.tx.publish(count);
        if self.owed {
            self.wake();
        }
    }

    pub(super) fn reset_partial(&mut self) {
        self.partial = Partial { batch: self.partial.batch, ..Partial::default() };
    }

    /// A record was put into it that must not wait.
    pub(super) fn hurry(&mut self) {
        self.partial.urgent = self.partial.batch > 0;
    }
}

impl<T: Send + 'static> Executor<T> {
    /// Publishes what need not wait any longer.
    #[cold]
    pub(super) fn flush_gathered(&mut self) {
        let now = self.last_pass.unwrap_or_default();
        let Some(gather) = &mut self.gather else { return };
        if self.slab.len() == 0 {
            (gather.recalled, gather.hurry) = (None, false);
        }
        for lane in &mut self.lanes {
            lane.flush_gathered(gather, self.handler.size.as_ref(), now);
        }
    }

    /// Publishes everything: an epoch's intake has ended.
    pub(super) fn hurry_all(&mut self) {
        if self.gather.is_some() {
            self.lanes.iter_mut().for_each(Lane::hurry);
            self.flush_gathered();
        }
    }

    /// The lane to stay with because a batch gathers in it.
    pub(super) fn gathering(&self) -> Option<usize> {
        let lane = &self.lanes[self.current];
        (self.gather.is_some() && lane.gathers() && lane.room() > 0).then_some(self.current)
    }

    /// A record has come from a list into a lane.
    pub(super) fn note_fed(&mut self, index: usize, hurry: bool) {
        let Some(gather) = &self.gather else { return };
        let lane = &mut self.lanes[index];
        if let Some(recalled) = gather.recalled {
            let since = lane.partial.since.get_or_insert(recalled);
            *since = recalled.min(*since);
        }
        if hurry || gather.hurry {
            lane.hurry();
        }
    }

    /// Records of a lane were recalled, some of which had been published: they keep the time they
    /// have waited.
    pub(super) fn note_recall(&mut self, index: usize, published: bool) {
        let Some(gather) = &mut self.gather else { return };
        let lane = &mut self.lanes[index];
        gather.hurry |= published;
        if let Some(since) = lane.partial.since {
            gather.recalled = Some(gather.recalled.map_or(since, |other| other.min(since)));
        }
        lane.reset_partial();
    }

    /// When the next partial batch has waited long enough.
    pub(super) fn next_linger(&self) -> Option<Duration> {
        let gather = self.gather.as_ref()?;
        let now = self.last_pass.unwrap_or_default();
        let begun = self.lanes.iter().filter(|lane| lane.tx.unpublished() > 0);
        let since = begun.map(|lane| lane.partial.since.unwrap_or(now)).min()?;
        Some(since.saturating_add(gather.linger))
    }
}

#[cfg(all(test, not(loom)))]
impl<T: Send + 'static> Executor<T> {
    /// After a pass nothing lingers that is a full batch or has waited long enough.
    pub(super) fn check_gather(&self) -> Result<(), String> {
        let Some(gather) = &self.gather else { return Ok(()) };
        let now = self.last_pass.unwrap_or_default();
        for lane in &self.lanes {
            let (count, since) = (lane.tx.unpublished(), lane.partial.since);
            let lingers = since.is_some_and(|since| now < since.saturating_add(gather.linger));
            if count >= lane.partial.batch || (count > 0 && (!lingers || lane.partial.urgent)) {
                return Err(format!("{count} linger since {since:?}: {:?}", lane.partial));
            }
            if count > 0 && self.next_due().is_none_or(|due| due > now + gather.linger) {
                return Err(format!("the driver is not told of the linger of {count}"));
            }
        }
        Ok(())
    }

    /// Nothing is left at the gate, nothing is carried; and no key is remembered for ever.
    pub(super) fn check_nothing_left(&mut self) {
        assert!(self.conflation.as_ref().is_none_or(super::conflate::Conflation::is_empty));
        if let Some(rates) = &self.rates {
            assert_eq!(rates.waiting(), 0);
        }
        let later = self.last_pass.unwrap_or_default() + Duration::from_secs(100);
        self.pass(later);
        self.pass(later + Duration::from_secs(1));
        assert_eq!(self.rates.as_ref().map_or(0, |rates| rates.remembered()), 0);
        assert_eq!(self.next_due(), None);
    }
}
