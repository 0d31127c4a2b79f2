//! What holds each watermark, and what each worker is at.
//!
//! Nothing is kept for this per record. A lane remembers its **streaks**: runs of neighbouring entries
//! that are neighbours in the ring of one epoch, too; most entries come in streaks of many. An epoch
//! remembers when it had admitted how much, at most once in [`RESOLUTION`].

use super::conflate::Conflation;
use super::lane::Lane;
use super::parking::Parked;
use super::resize::Place as Seat;
use super::{Executor, Slot, is_free, shard_of};
use crate::batch::{Entry, Tag};
use crate::epoch::EpochId;
use crate::lane::{advance, distance, reached};
use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU8;
use std::time::Duration;

/// How exactly a record's age is known.
const RESOLUTION: Duration = Duration::from_millis(10);
/// Most notes of an epoch's admissions. Then every second one is forgotten, but not the first.
const NOTES: usize = 256;

/// The record that holds a watermark.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stall {
    /// Its epoch.
    pub epoch: EpochId,
    /// Its offset.
    pub offset: i64,
    /// The hash it was offered with; `None` for a record without an order, and after it has ended.
    pub hash: Option<u64>,
    /// Its shard, likewise.
    pub shard: Option<u32>,
    /// Which attempt it waits for or is in, from 1.
    pub attempt: u32,
    /// How long ago it was admitted, up to 10 ms more than that.
    pub age: Duration,
    /// What it is waiting for.
    pub state: StallState,
    /// Whether it is the dead-letter hook that it goes to.
    pub dead_letter: bool,
    /// Finished records of the epoch that wait behind it.
    pub finished_behind: u64,
    /// Records of the epoch that are admitted and not finished, itself included.
    pub unfinished: u64,
}

/// Where the record is that holds a watermark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum StallState {
    /// It has not been taken by a worker yet.
    Queued {
        /// The worker it lies in front of, or to which its shard is tied; `None` while it may go to
        /// any.
        worker: Option<usize>,
        /// Whether a handler of an earlier epoch of its shard, which is closed, still runs there.
        behind_closed_epoch: bool,
    },
    /// A worker has taken it: it is being handled, or is behind one that is and was taken with it.
    Running {
        /// Which worker, from 0.
        worker: usize,
        /// How long that worker has not finished anything.
        busy: Duration,
    },
    /// It is handed out to a future or to who pulled it.
    InFlight {
        /// For how long.
        busy: Duration,
    },
    /// Its rate does not let it go yet.
    Throttled,
    /// It failed and waits for its next attempt.
    Parked {
        /// When that is due, in the time of [`Executor::pass`].
        until: Duration,
    },
    /// It waits behind an earlier record of its key that failed or is quarantined.
    BehindParked,
    /// It has ended without success, and its epoch has halted.
    Failed,
    /// It has ended; the next [`pass`](Executor::pass) takes notice.
    Ending,
}

/// What a worker is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerState {
    /// Which worker, from 0.
    pub worker: usize,
    /// Records it has taken and not finished.
    pub taken: u32,
    /// Records in front of it that it has not taken.
    pub queued: u32,
    /// How long it has had records and not finished any. A long time means that it hangs, or that
    /// its records take so long.
    pub busy: Duration,
    /// It was asked to go by [`Executor::set_workers`] and has not ended yet.
    pub leaving: bool,
}

/// A handler that still runs a record of a closed epoch: see [`Builder::old_handler`].
///
/// [`Builder::old_handler`]: crate::Builder::old_handler
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Overdue {
    /// The closed epoch.
    pub epoch: EpochId,
    /// Its first record that the worker has not finished.
    pub offset: i64,
    /// The worker, from 0.
    pub worker: usize,
    /// How long the epoch has been closed.
    pub closed_for: Duration,
}

/// What is done about handlers that outlive their epoch. Records of their keys in a new epoch never
/// start before they end, whatever is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum OldHandler {
    /// They are waited for.
    #[default]
    Wait,
    /// They are waited for, and [`Executor::take_overdue`] tells of each once, when its epoch has been
    /// closed for so long.
    Report(Duration),
}

/// Neighbours in a lane that are neighbours in a ring.
#[derive(Debug, Clone, Copy)]
pub(super) struct Streak {
    /// Position of the first one.
    position: u32,
    count: u32,
    /// Slot in the ring of the first one, and the lap, which tells records that had the slot before.
    index: u32,
    lap: NonZeroU8,
    epoch: u16,
}

impl Streak {
    fn end(&self) -> u32 {
        advance(self.position, self.count)
    }
}

impl<T> Lane<T> {
    /// Notes entries that were pushed.
    #[inline]
    pub(super) fn note(&mut self, epoch: u16, place: (u32, NonZeroU8), position: u32, count: u32) {
        let (index, lap) = place;
        if let Some(last) = self.streaks.back_mut()
            && last.epoch == epoch
            && last.index.wrapping_add(last.count) == index
            && last.lap == lap
            && last.end() == position
        {
            last.count += count;
        } else if count > 0 {
            self.streaks.push_back(Streak { position, count, index, lap, epoch });
        }
    }

    /// Forgets what is reclaimed.
    #[inline]
    pub(super) fn trim_streaks(&mut self) {
        let reclaimed = self.tx.reclaimed();
        while let Some(first) = self.streaks.front()
            && reached(reclaimed, first.end())
        {
            self.streaks.pop_front();
        }
    }

    /// Forgets what was recalled: everything from the end on.
    pub(super) fn cut_streaks(&mut self) {
        let end = self.tx.end();
        while let Some(last) = self.streaks.back_mut() {
            if reached(end, last.position) && end != last.position {
                last.count = last.count.min(distance(last.position, end));
                return;
            }
            self.streaks.pop_back();
        }
    }

    /// Position of the entry of a place in an epoch's ring.
    fn position_of(&self, (epoch, index, lap): Key) -> Option<u32> {
        let has = |streak: &&Streak| {
            streak.epoch == epoch
                && streak.lap == lap
                && index.wrapping_sub(streak.index) < streak.count
        };
        // The youngest, should it have been sent more than once.
        let streak = self.streaks.iter().rev().find(has)?;
        let position = advance(streak.position, index - streak.index);
        // What is reclaimed is not here any more.
        let there = distance(self.tx.reclaimed(), position) < self.tx.pending();
        there.then_some(position)
    }

    fn busy(&self) -> Duration {
        Duration::from_nanos(self.stuck_ns as u64)
    }
}

/// When an epoch had admitted how many records.
#[derive(Debug, Default)]
pub(super) struct Admissions {
    /// Records admitted before, and the time from which on the next ones were; oldest first.
    notes: VecDeque<(u64, Duration)>,
    next: Duration,
}

impl Admissions {
    #[inline(always)]
    fn is_due(&self, now: Duration) -> bool {
        now >= self.next || self.notes.is_empty()
    }

    /// Notes that the records from now on come after so many others, of which some are passed.
    #[cold]
    fn add(&mut self, admitted: u64, passed: u64, now: Duration) {
        self.trim(passed);
        if self.notes.back().is_some_and(|(before, _)| *before == admitted) {
            self.notes.pop_back();
        }
        if self.notes.len() >= NOTES {
            let mut nth = 0;
            self.notes.retain(|_| {
                nth += 1;
                nth % 2 == 1
            });
        }
        self.notes.push_back((admitted, now));
        self.next = now.saturating_add(RESOLUTION);
    }

    /// Forgets what is below the watermark.
    fn trim(&mut self, passed: u64) {
        while self.notes.get(1).is_some_and(|(before, _)| *before <= passed) {
            self.notes.pop_front();
        }
    }

    fn age(&self, sequence: u64, now: Duration) -> Duration {
        let note = self.notes.iter().rev().find(|(before, _)| *before <= sequence);
        note.map_or(Duration::ZERO, |(_, at)| now.saturating_sub(*at))
    }
}

/// A record: the slot of its epoch, its slot and lap in the ring.
type Key = (u16, u32, NonZeroU8);

/// Where a record was found.
struct Found {
    hash: u64,
    tracked: bool,
    state: StallState,
}

impl<T: Send + 'static> Executor<T> {
    /// For each open epoch with unfinished records, the one that holds its watermark. The watermarks
    /// are advanced first.
    ///
    /// Costs O(workers + waiting records + window sizes), for all epochs together; meant for each
    /// scrape of metrics, not for each pass.
    pub fn stalls(&self) -> Vec<Stall> {
        let now = self.last_pass.unwrap_or_default();
        let mut wanted = HashMap::new();
        let mut stalls = Vec::new();
        for (index, slot) in self.epochs.iter().enumerate() {
            let Some(slot) = slot.as_ref().filter(|slot| !slot.closed) else { continue };
            let standing = slot.window.shared().standing();
            if standing.progress.unfinished == 0 {
                continue;
            }
            // At most 2^16 epochs.
            let number = index as u16;
            wanted.insert((number, standing.place.index, standing.place.lap), stalls.len());
            stalls.push(Stall {
                epoch: EpochId { slot: number, generation: slot.generation },
                offset: standing.offset,
                hash: None,
                shard: None,
                attempt: 1,
                age: slot.admissions.age(standing.progress.passed, now),
                state: match standing.progress.failed {
                    Some(_) => StallState::Failed,
                    None => StallState::Ending,
                },
                dead_letter: false,
                finished_behind: standing.finished_behind,
                unfinished: standing.progress.unfinished - standing.finished_behind,
            });
        }
        // A record that was conflated is where the newer one is.
        for (carried, carrier) in self.conflation.iter().flat_map(Conflation::pairs) {
            if let Some(at) = wanted.get(&carried) {
                wanted.insert(carrier, *at);
            }
        }
        for (key, at) in &wanted {
            if stalls[*at].state == StallState::Failed {
                continue;
            }
            if let Some(found) = self.find_in_lanes(*key) {
                self.tell(&mut stalls[*at], found);
            }
        }
        let mut tell = |tag: Tag, hash: u64, state: StallState| {
            if let Some(at) = wanted.get(&tag.key()) {
                let found = Found { hash, tracked: tag.is_tracked(), state };
                self.tell(&mut stalls[*at], found);
            }
        };
        for (hash, entry) in self.waiting() {
            tell(entry.tag, hash, self.state_in_list(hash));
        }
        if let Some(flights) = &self.flights {
            for (hash, tag, since) in flights.aloft() {
                tell(tag, hash, StallState::InFlight { busy: now.saturating_sub(since) });
            }
        }
        for (hash, entry) in self.rates.iter().flat_map(|rates| rates.records()) {
            tell(entry.tag, hash, StallState::Throttled);
        }
        for (hash, entry, until) in self.parking.records() {
            tell(entry.tag, hash, StallState::Parked { until });
        }
        for (hash, entry) in self.parking.later() {
            tell(entry.tag, hash, StallState::BehindParked);
        }
        stalls
    }

    fn tell(&self, stall: &mut Stall, found: Found) {
        let Found { hash, tracked, state } = found;
        stall.state = state;
        if !is_free(hash) {
            stall.hash = Some(hash);
            stall.shard = Some(shard_of(hash, self.shards.len()));
        }
        let parked =
            self.parking.of(hash).filter(|_| tracked || matches!(state, StallState::Parked { .. }));
        stall.attempt = parked.map_or(1, Parked::attempt);
        stall.dead_letter = parked.is_some_and(Parked::is_buried);
    }

    fn find_in_lanes(&self, key: Key) -> Option<Found> {
        self.lanes.iter().enumerate().find_map(|(worker, lane)| {
            let position = lane.position_of(key)?;
            let hash = lane.hash_at(position);
            // An entry that is handed back and held is no longer in its lane.
            let taken = distance(lane.tx.reclaimed(), position)
                < distance(lane.tx.reclaimed(), lane.tx.claimed());
            let state = if taken {
                StallState::Running { worker, busy: lane.busy() }
            } else {
                let behind_closed_epoch = self.is_behind_closed(worker, hash, position);
                StallState::Queued { worker: Some(worker), behind_closed_epoch }
            };
            // Whether it is tracked is only known of parked keys.
            let tracked = self.parking.of(hash).is_some_and(Parked::is_sent);
            Some(Found { hash, tracked, state })
        })
    }

    fn state_in_list(&self, hash: u64) -> StallState {
        if is_free(hash) {
            return StallState::Queued { worker: None, behind_closed_epoch: false };
        }
        let shard = shard_of(hash, self.shards.len());
        let worker = self.is_in_lane(shard).then(|| self.shards[shard as usize].lane());
        let behind_closed_epoch = worker
            .is_some_and(|worker| self.is_behind_closed(worker, hash, self.lanes[worker].tx.end()));
        StallState::Queued { worker, behind_closed_epoch }
    }

    /// Whether the worker has taken a record of a closed epoch whose shard is that of the hash, before
    /// a position.
    fn is_behind_closed(&self, worker: usize, hash: u64, before: u32) -> bool {
        let lane = &self.lanes[worker];
        if self.closing.is_empty() || is_free(hash) {
            return false;
        }
        let shards = self.shards.len();
        let shard = shard_of(hash, shards);
        let closed = |streak: &Streak| {
            self.epochs[usize::from(streak.epoch)].as_ref().is_some_and(|slot| slot.closed)
        };
        let reclaimed = lane.tx.reclaimed();
        let most = distance(reclaimed, lane.tx.claimed()).min(distance(reclaimed, before));
        lane.streaks.iter().filter(|streak| closed(streak)).any(|streak| {
            (0..streak.count).map(|step| advance(streak.position, step)).any(|position| {
                let hash = lane.hash_at(position);
                distance(reclaimed, position) < most
                    && !is_free(hash)
                    && shard_of(hash, shards) == shard
            })
        })
    }

    /// What each worker is at, those that are to go included.
    pub fn worker_states(&self) -> impl Iterator<Item = WorkerState> {
        let there = |(_, lane): &(usize, &Lane<T>)| lane.place != Seat::Vacant;
        self.lanes.iter().enumerate().filter(there).map(|(worker, lane)| {
            let taken = distance(lane.tx.reclaimed(), lane.tx.claimed()).min(lane.tx.pending());
            WorkerState {
                worker,
                taken,
                queued: lane.tx.pending() - taken,
                busy: if lane.tx.pending() > 0 { lane.busy() } else { Duration::ZERO },
                leaving: lane.place == Seat::Retiring,
            }
        })
    }

    /// The next handler of a closed epoch that has run too long and was not told of yet; only with
    /// [`OldHandler::Report`].
    pub fn take_overdue(&mut self) -> Option<Overdue> {
        let OldHandler::Report(after) = self.old_handler else { return None };
        let now = self.last_pass.unwrap_or_default();
        for closing in &mut self.closing {
            let closed_for = now.saturating_sub(closing.since);
            let slot = self.epochs[usize::from(closing.slot)].as_ref();
            let Some(slot) = slot.filter(|_| closed_for >= after) else { continue };
            for (worker, lane) in self.lanes.iter().enumerate() {
                if closing.told.contains(&worker) {
                    continue;
                }
                if let Some(index) = lane.first_taken_of(closing.slot, slot) {
                    closing.told.push(worker);
                    let epoch = EpochId { slot: closing.slot, generation: slot.generation };
                    let offset = slot.window.shared().offset_at(index);
                    return Some(Overdue { epoch, offset, worker, closed_for });
                }
            }
        }
        None
    }

    /// Before records are admitted to an epoch.
    #[inline(always)]
    pub(super) fn note_admission(slot: &mut Slot, now: Option<Duration>) {
        let now = now.unwrap_or_default();
        if slot.admissions.is_due(now) {
            slot.admissions.add(slot.window.admitted(), slot.window.passed(), now);
        }
    }
}

impl<T> Lane<T> {
    /// Slot in the ring of the first record of an epoch that the worker has taken and not finished.
    fn first_taken_of(&self, epoch: u16, slot: &Slot) -> Option<u32> {
        let reclaimed = self.tx.reclaimed();
        let taken = distance(reclaimed, self.tx.claimed()).min(self.tx.pending());
        let of = self.streaks.iter().filter(|streak| streak.epoch == epoch);
        of.flat_map(|streak| {
            (0..streak.count).map(|step| (advance(streak.position, step), streak.index + step))
        })
        .filter(|(position, _)| distance(reclaimed, *position) < taken)
        .map(|(_, index)| index)
        .find(|index| slot.window.shared().is_unfinished(*index))
    }
}

impl<T: Send + 'static> Executor<T> {
    /// Waiting records with their hashes: those in the lists, and those that are held.
    fn waiting(&self) -> impl Iterator<Item = (u64, &Entry<T>)> {
        let listed = self.slab.all().map(|waiting| (waiting.hash, &waiting.entry));
        let holds = self.lanes.iter().flat_map(|lane| &lane.holds);
        let loose = self.flights.iter().flat_map(|flights| flights.loose_records());
        listed.chain(holds.flat_map(|hold| hold.entries())).chain(loose)
    }
}
