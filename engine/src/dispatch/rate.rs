//! Rates: how many records per second may go to the workers, in all and of each key.
//!
//! A record that may not go yet waits at a gate between its window and its shard: so whatever is
//! behind the gate (lists, lanes, recalls, parked keys) knows nothing of rates, no worker is held, and
//! the order of a key is that of one queue. What has passed the gate was paid for, by its key first
//! and then by the executor, and goes on as if it had been offered just then.
//!
//! # Order
//! A key's records that its rate holds back wait in the key's own queue, and a later record of the key
//! joins it. What a key has paid for waits for the executor's rate in one line, first come first
//! served. While a key is parked after a failure its records stay at the gate, or they would pass it
//! all together later; its next attempt stands in the line like any record.
//!
//! # Cost
//! O(log n) per record that a key's rate holds back, O(1) for others, n being the keys whose burst is
//! not replenished; only these are remembered.

use super::{EpochId, Executor, FREE, Rejected, Route, is_free, not_free, shard_of};
use crate::batch::{Entry, class_of};
use crate::error::{InvalidSetting, Refused};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::time::Duration;

/// The highest rate and the largest burst.
const MOST: u32 = 1_000_000_000;
/// Picoseconds, so that the highest rate is still exact to a thousandth.
const SECOND: u128 = 1_000_000_000_000;
const PER_NANO: u128 = 1_000;

/// So many records per second, and so many at once.
///
/// ```
/// use plimsoll_engine::Rate;
///
/// let rate = Rate::per_second(500).burst(50);
/// # let _ = rate;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    per_second: u32,
    burst: u32,
}

impl Rate {
    /// `records` per second, at most 1,000,000,000. The burst is as many, until it is set.
    pub fn per_second(records: u32) -> Self {
        Rate { per_second: records, burst: records }
    }

    /// Most records at once, after a time without any; at least 1, at most 1,000,000,000.
    ///
    /// Since rates are looked at in each [`Executor::pass`](crate::Executor::pass), the burst should
    /// cover the time between two of them.
    pub fn burst(mut self, records: u32) -> Self {
        self.burst = records;
        self
    }

    pub(super) fn check(self, setting: &'static str) -> Result<(), InvalidSetting> {
        for (what, value) in [("records per second", self.per_second), ("a burst", self.burst)] {
            if !(1..=MOST).contains(&value) {
                let reason = format!("{what} of {value} is outside 1..={MOST}");
                return Err(InvalidSetting::new(setting, reason));
            }
        }
        Ok(())
    }

    /// Time between two records, rounded up: never more of them than asked for.
    fn interval(self) -> u128 {
        SECOND.div_ceil(u128::from(self.per_second.max(1)))
    }
}

fn picos(time: Duration) -> u128 {
    time.as_nanos() * PER_NANO
}

fn duration(picos: u128) -> Duration {
    let nanos = picos.div_ceil(PER_NANO);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// What a rate has left: the moment at which the burst is replenished, in picoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Bucket(u128);

impl Bucket {
    /// Records that may go now.
    fn left(self, rate: Rate, now: u128) -> u32 {
        let missing = self.0.saturating_sub(now).div_ceil(rate.interval());
        // The burst is a `u32`.
        u128::from(rate.burst).saturating_sub(missing) as u32
    }

    /// When the next record may go; may lie in the past.
    fn next(self, rate: Rate) -> u128 {
        self.0.saturating_sub(u128::from(rate.burst - 1) * rate.interval())
    }

    /// A record goes, if it may.
    fn take(&mut self, rate: Rate, now: u128) -> bool {
        let goes = self.next(rate) <= now;
        if goes {
            self.0 = self.0.max(now) + rate.interval();
        }
        goes
    }
}

/// A key whose burst is not replenished, or that waits.
#[derive(Debug)]
struct Key<T> {
    bucket: Bucket,
    queue: VecDeque<Entry<T>>,
    /// It is parked: its queue waits for its release.
    parked: bool,
}

/// Who stands in the line.
#[derive(Debug)]
enum Turn<T> {
    Record(u64, Entry<T>),
    /// The next attempt of a parked key, with the number of its due time.
    Attempt(u64, u64),
}

/// The gate. Only the dispatcher touches it.
#[derive(Debug)]
pub(super) struct Rates<T> {
    all: Option<Rate>,
    bucket: Bucket,
    line: VecDeque<Turn<T>>,
    each: Option<Rate>,
    keys: HashMap<u64, Key<T>>,
    /// When the next record in a key's queue may go; one for each key with a queue that is not parked.
    due: BinaryHeap<Reverse<(u128, u64)>>,
    /// When a key's burst is replenished, as it was known; one for each key.
    full: BinaryHeap<Reverse<(u128, u64)>>,
}

impl<T> Rates<T> {
    pub(super) fn new(all: Option<Rate>, each: Option<Rate>) -> Option<Box<Self>> {
        (all.is_some() || each.is_some()).then(|| {
            Box::new(Rates {
                all,
                bucket: Bucket::default(),
                line: VecDeque::new(),
                each,
                keys: HashMap::new(),
                due: BinaryHeap::new(),
                full: BinaryHeap::new(),
            })
        })
    }

    /// Records that wait at the gate, with their hashes.
    pub(super) fn records(&self) -> impl Iterator<Item = (u64, &Entry<T>)> {
        let lined = self.line.iter().filter_map(|turn| match turn {
            Turn::Record(hash, entry) => Some((*hash, entry)),
            Turn::Attempt(..) => None,
        });
        let queued = self.keys.iter();
        lined.chain(queued.flat_map(|(hash, key)| key.queue.iter().map(|entry| (*hash, entry))))
    }

    /// Whether a record of the key is paid for by its key; when not, it has to join its queue.
    fn pays(&mut self, hash: u64, now: u128, parked: bool) -> bool {
        let Some(rate) = self.each.filter(|_| !is_free(hash)) else { return true };
        let key = self.key(hash, now);
        key.queue.is_empty() && !parked && key.bucket.take(rate, now)
    }

    fn key(&mut self, hash: u64, now: u128) -> &mut Key<T> {
        let full = &mut self.full;
        self.keys.entry(hash).or_insert_with(|| {
            full.push(Reverse((now, hash)));
            Key { bucket: Bucket::default(), queue: VecDeque::new(), parked: false }
        })
    }

    /// The last record in a key's queue.
    fn last_mut(&mut self, hash: u64) -> Option<&mut Entry<T>> {
        self.keys.get_mut(&hash)?.queue.back_mut()
    }

    /// Puts a record behind those of its key.
    fn queue(&mut self, hash: u64, entry: Entry<T>, now: u128, parked: bool) {
        let Some(rate) = self.each else { return };
        let key = self.key(hash, now);
        key.queue.push_back(entry);
        if key.queue.len() == 1 {
            key.parked = parked;
            let next = key.bucket.next(rate);
            if !parked {
                self.due.push(Reverse((next, hash)));
            }
        }
    }

    /// Forgets keys whose burst is replenished.
    fn forget_full(&mut self, now: u128) {
        while let Some(Reverse((full, hash))) = self.full.peek().copied() {
            if full > now {
                return;
            }
            self.full.pop();
            match self.keys.get(&hash) {
                Some(key) if key.bucket.0 <= now && key.queue.is_empty() => {
                    self.keys.remove(&hash);
                }
                // Used since; or parked with a queue, which need not be looked at in each pass.
                Some(key) if key.bucket.0 > now => {
                    self.full.push(Reverse((key.bucket.0, hash)));
                }
                Some(_) => self.full.push(Reverse((now + SECOND, hash))),
                None => {}
            }
        }
    }

    /// Forgets the records of an epoch.
    pub(super) fn forget(&mut self, slot: u16) {
        self.line.retain(|turn| match turn {
            Turn::Record(_, entry) => entry.epoch() != slot,
            Turn::Attempt(..) => true,
        });
        for key in self.keys.values_mut() {
            key.queue.retain(|entry| entry.epoch() != slot);
        }
        let keys = &self.keys;
        self.due
            .retain(|Reverse((_, hash))| keys.get(hash).is_some_and(|key| !key.queue.is_empty()));
    }

    /// A key is not parked any more.
    pub(super) fn unpark(&mut self, hash: u64) {
        let Some(rate) = self.each else { return };
        if let Some(key) = self.keys.get_mut(&hash)
            && std::mem::take(&mut key.parked)
            && !key.queue.is_empty()
        {
            self.due.push(Reverse((key.bucket.next(rate), hash)));
        }
    }

    /// Records that may be taken in.
    pub(super) fn demand(&self, now: Duration) -> u32 {
        let Some(rate) = self.all else { return u32::MAX };
        let line = u32::try_from(self.line.len()).unwrap_or(u32::MAX);
        self.bucket.left(rate, picos(now)).saturating_sub(line)
    }

    /// The next moment at which something may pass. What the rates let go already waits for `room`
    /// in the lanes.
    fn next_due(&self, now: u128, room: bool) -> Option<Duration> {
        let key = self.due.peek().map(|Reverse((due, _))| *due);
        let next = self.all.map_or(0, |rate| self.bucket.next(rate)).max(now);
        let line = (!self.line.is_empty() && (next > now || room)).then_some(next);
        [key, line].into_iter().flatten().min().map(duration)
    }

    /// Records that wait.
    #[cfg(all(test, not(loom)))]
    pub(super) fn waiting(&self) -> usize {
        self.line.len() + self.keys.values().map(|key| key.queue.len()).sum::<usize>()
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn remembered(&self) -> usize {
        self.keys.len().max(self.full.len()).max(self.due.len())
    }
}

impl<T: Send + 'static> Executor<T> {
    /// When the next record may pass the gate.
    pub(super) fn next_at_gate(&self) -> Option<Duration> {
        let now = picos(self.last_pass.unwrap_or_default());
        self.rates.as_ref()?.next_due(now, self.room_of_lanes() > 0)
    }

    /// As [`offer`](Self::offer), for an epoch that takes nothing in on the straight way: it is
    /// closed, or its records have to pass the gate.
    #[cold]
    pub(super) fn offer_at_gate(
        &mut self,
        id: EpochId,
        offset: i64,
        bytes: u32,
        route: Route,
        payload: T,
    ) -> Result<(), Rejected<T>> {
        let now = self.last_pass;
        let Some(slot) = self.slot_mut(id).filter(|slot| slot.gated) else {
            return Err(Rejected { payload, refused: Refused::Closed });
        };
        Self::note_admission(slot, now);
        let place = match slot.window.admit_place_sized(offset, bytes) {
            Ok(place) => place,
            Err(refused) => match self.admit_again(id, offset, bytes, refused) {
                Ok(place) => place,
                Err(refused) => return Err(Rejected { payload, refused }),
            },
        };
        let now = now.unwrap_or_default();
        let Some(rates) = &mut self.rates else {
            return Err(Rejected { payload, refused: Refused::Closed });
        };
        let (shards, now) = (self.shards.len(), picos(now));
        let (hash, shard) = match route {
            Route::Ordered(hash) => (not_free(hash), shard_of(not_free(hash), shards)),
            Route::Free => (FREE, place.index() % shards as u32),
        };
        let entry = Entry::new(payload, &place, id.slot, class_of(shard));
        let parked = self.parking.is_waiting(hash);
        if !rates.pays(hash, now, parked) {
            if let (Some(conflation), Some(last)) = (&mut self.conflation, rates.last_mut(hash))
                && last.epoch() == entry.epoch()
            {
                let older = std::mem::replace(last, entry);
                conflation.carry(last, &older);
                return Ok(());
            }
            rates.queue(hash, entry, now, parked);
            return Ok(());
        }
        let goes =
            rates.line.is_empty() && rates.all.is_none_or(|rate| rates.bucket.take(rate, now));
        if goes {
            self.pass_gate(hash, entry);
        } else {
            rates.line.push_back(Turn::Record(hash, entry));
        }
        Ok(())
    }

    fn pass_gate(&mut self, hash: u64, entry: Entry<T>) {
        let shard = self.shard_for(hash, &entry);
        if is_free(hash) {
            self.dispatch_free(entry);
        } else if self.conflation.as_ref().is_some_and(|conflation| conflation.carries(&entry)) {
            // Carriers go into lanes from lists.
            self.wait(shard, hash, entry);
        } else {
            self.dispatch(shard, hash, entry);
        }
    }

    /// Puts the next attempt of a parked key into the line; or later, if its key is over its rate.
    pub(super) fn line_up(&mut self, key: u64, serial: u64, now: Duration) {
        // The hook is not limited.
        let free = !self.parking.attempts_next(key, serial);
        let Some(rates) = self.rates.as_mut().filter(|_| !free) else {
            return self.send_parked(key, serial);
        };
        if let Some(rate) = rates.each.filter(|_| !is_free(key)) {
            let now = picos(now);
            let known = rates.key(key, now);
            if !known.bucket.take(rate, now) {
                let next = duration(known.bucket.next(rate));
                return self.parking.postpone(key, serial, next);
            }
        }
        rates.line.push_back(Turn::Attempt(key, serial));
    }

    /// Lets pass what may.
    #[cold]
    pub(super) fn open_gate(&mut self, now: Duration) {
        // Not more than the workers have room for: what has passed is paid for, and would run as soon
        // as a slow handler lets it.
        let mut room = self.room_of_lanes();
        let now = picos(now);
        let Some(rates) = &mut self.rates else { return };
        rates.forget_full(now);
        while let (Some(rate), Some(Reverse((due, hash)))) = (rates.each, rates.due.peek().copied())
        {
            if due > now {
                break;
            }
            rates.due.pop();
            let Some(key) = rates.keys.get_mut(&hash) else { continue };
            key.parked = self.parking.is_waiting(hash);
            if key.parked {
                continue;
            }
            while !key.queue.is_empty() && key.bucket.take(rate, now) {
                rates.line.extend(key.queue.pop_front().map(|entry| Turn::Record(hash, entry)));
            }
            if !key.queue.is_empty() {
                rates.due.push(Reverse((key.bucket.next(rate), hash)));
            }
        }
        while room > 0
            && let Some(rates) = &mut self.rates
            && let Some(first) = rates.line.front()
        {
            // A key whose epoch has halted has no attempt any more.
            if let Turn::Attempt(key, serial) = first
                && !self.parking.attempts_next(*key, *serial)
            {
                rates.line.pop_front();
                continue;
            }
            let goes = rates.all.is_none_or(|rate| rates.bucket.take(rate, now));
            if !goes {
                return;
            }
            let Some(turn) = rates.line.pop_front() else { return };
            room -= 1;
            match turn {
                Turn::Record(hash, entry) => self.pass_gate(hash, entry),
                Turn::Attempt(key, serial) => self.send_parked(key, serial),
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// In any time no more than the burst and what was replenished meanwhile; and it is not
        /// slower than it must be.
        #[test]
        fn a_bucket_keeps_its_rate(
            per_second in prop_oneof![1..20_u32, 1..2_000_000_u32, Just(MOST)],
            burst in 1..50_u32,
            steps in prop::collection::vec(0..200_000_u64, 1..300),
        ) {
            let rate = Rate::per_second(per_second).burst(burst);
            let (mut bucket, mut now) = (Bucket::default(), 0);
            let mut taken: Vec<u128> = Vec::new();
            for step in steps {
                now += u128::from(step) * PER_NANO * 1_000;
                let left = bucket.left(rate, now);
                if left == 0 {
                    prop_assert!(bucket.next(rate) > now);
                    prop_assert!(!bucket.clone().take(rate, now));
                    now = bucket.next(rate);
                }
                let mut count = 0;
                while count < 60 && bucket.take(rate, now) {
                    taken.push(now);
                    count += 1;
                }
                prop_assert!(left == 0 || count == left.min(60));
                prop_assert!(count > 0);
            }
            for (index, from) in taken.iter().enumerate() {
                for (count, to) in (1_u128..).zip(&taken[index..]).take(200) {
                    let most = u128::from(burst) + (to - from) / rate.interval();
                    prop_assert!(count <= most, "{count} from {from} to {to}, not {most}");
                }
            }
        }
    }
}
