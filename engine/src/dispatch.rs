//! The executor: the dispatcher that owns all shards, and its workers' lanes.
//!
//! The thread that admits records drives it; there is no other thread but the workers. **Order
//! lives in shards, which only the dispatcher touches; parallelism lives in workers; truth lives
//! in the rings.**
//!
//! # The rule of order
//! A shard's records are in at most one lane. Lane and list are first-in first-out, and the list is
//! emptied only into the one lane that holds the shard. A shard changes lane only when the
//! dispatcher has read (Acquire) a `done` that has reached the position after the shard's last
//! record: every earlier handler of the shard happened before that store, and so before the
//! hand-over to the next worker.
//!
//! # Where a record goes
//! Records are packed into the current lane while its estimated backlog is below 100 us, so that a
//! cheap handler runs on one warm worker; when more piles up, the next lane is the one with the
//! least backlog. Lanes are deep in time, not in records: a lane takes about 4 ms of estimated
//! work, so that a slow handler holds few records hostage. Records are taken in only while some
//! lane has room ([`Executor::demand`]), so what cannot run yet stays with its source.

mod batching;
mod builder;
mod conflate;
mod drain;
mod flights;
mod lane;
mod limited;
#[cfg(all(test, not(loom)))]
mod model;
#[cfg(all(test, not(loom)))]
mod model_flights;
mod parking;
mod rate;
mod resize;
mod stall;
#[cfg(all(test, not(loom)))]
mod stepped;

use crate::batch::{Entry, Tag, class_of};
use crate::epoch::EpochId;
use crate::error::{InvalidSetting, Refused};
use crate::lane::{POSITION, Writer, advance, reached};
use crate::retry::Retry;
use crate::ring::Place;
use crate::shard::{Shard, Slab, Waiting};
use crate::sync::Arc;
use crate::window::{Progress, Watermark, Window};
use crate::worker::{Common, Handler, Passed};
use batching::Gather;
use conflate::Conflation;
use flights::Flights;
use lane::Lane;
use parking::Parking;
use rate::Rates;
use resize::{Place as Seat, Recipe};
use stall::Admissions;
use std::collections::VecDeque;
use std::time::Duration;

pub use batching::BatchOf;
pub(crate) use builder::MOST_BATCH;
pub use builder::{BuildError, Builder};
pub use drain::{EpochReport, Report};
pub use lane::Hashes;
pub use parking::ParkedKey;
pub use rate::Rate;
pub use stall::{OldHandler, Overdue, Stall, StallState, WorkerState};

/// Most records one pass takes in.
const PASS: u32 = 512;
/// Most tied shards of one lane a pass looks at.
const TIED: usize = 32;
/// Most records of one shard that move from its list into a lane at a time, if others wait.
const TURN: u32 = 64;
/// Stands for the hash of a record without an order.
pub(crate) const FREE: u64 = u64::MAX;
/// From here on hashes are those of records without an order that were parked, one for each.
const FIRST_FREE: u64 = FREE - (1 << 32);

/// Whether a hash is that of a record without an order.
#[inline(always)]
pub(crate) fn is_free(hash: u64) -> bool {
    hash >= FIRST_FREE
}

/// A hash that is none of a record without an order. Records whose hashes become one are in order
/// with each other.
#[inline(always)]
fn not_free(hash: u64) -> u64 {
    hash.min(FIRST_FREE - 1)
}

/// Which records must keep their order among each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Route {
    /// In order with all records of the same hash. The hash must cover whatever makes the ordering
    /// domain (partition and key, or the partition alone) and be spread over all 64 bits.
    Ordered(u64),
    /// In no order: goes to whoever is free.
    Free,
}

/// A record that was not taken, handed back with the reason.
#[derive(Debug)]
pub struct Rejected<T> {
    /// The record.
    pub payload: T,
    /// Why.
    pub refused: Refused,
}

/// A record whose handler failed for good. Its epoch has halted: no record of it starts any more, and
/// its watermark stays at or below `offset`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The epoch that halted.
    pub epoch: EpochId,
    /// The record's offset.
    pub offset: i64,
    /// The handler's error, or the panic's text.
    pub reason: String,
}

/// A record that was passed over: it did not take effect, and the watermark may pass it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    /// Its epoch.
    pub epoch: EpochId,
    /// The record's offset.
    pub offset: i64,
    /// The handler's reason, or the last attempt's.
    pub reason: String,
}

/// What has happened since the executor was built.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Attempts that did not finish their record, of the handler and of the dead-letter hook.
    pub failed_attempts: u64,
    /// Records that were passed over.
    pub skipped: u64,
    /// Records that the dead-letter hook has taken.
    pub dead_lettered: u64,
    /// Records that were not handled because a newer one of their key was, with
    /// [`Builder::conflate`].
    pub conflated: u64,
}

/// The shard of a hash: its high half, scaled. Any number of shards, no division.
#[inline(always)]
pub(crate) fn shard_of(hash: u64, shards: usize) -> u32 {
    (((hash >> 32) * shards as u64) >> 32) as u32
}

/// Records on their way into a lane. When it goes, they are admitted; also if it goes because the
/// iterator they come from panics.
struct Stream<'a, T> {
    writer: Writer<'a, Entry<T>>,
    window: &'a mut Window,
}

impl<T> Drop for Stream<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        self.window.admit_places(self.writer.written());
    }
}

/// An epoch as the dispatcher sees it.
#[derive(Debug)]
struct Slot {
    generation: u32,
    /// The generation while it takes records, 0 afterwards.
    accepts: u32,
    /// It takes records, but they have to pass the gate; then `accepts` is 0.
    gated: bool,
    window: Window,
    watermark: Watermark,
    /// Records of it in shard lists.
    waiting: u32,
    /// Fenced and forgotten; the slot stays until no entry names it.
    closed: bool,
    admissions: Admissions,
}

impl Slot {
    #[inline(always)]
    fn is(&self, id: EpochId) -> bool {
        self.generation == id.generation && !self.closed
    }
}

/// A closed epoch whose slot may still be named by entries in lanes.
#[derive(Debug)]
struct Closing {
    slot: u16,
    since: Duration,
    /// Workers of which [`Executor::take_overdue`] has told.
    told: Vec<usize>,
    /// Ends of all lanes when it was closed; lists are counted in the slot.
    ends: Vec<u32>,
}

/// Runs records through handlers: in order per shard, in parallel over shards.
///
/// Driven by one thread, in a loop of [`pass`](Self::pass), [`demand`](Self::demand),
/// [`offer`](Self::offer) and [`flush`](Self::flush) (or [`flush_more`](Self::flush_more)). Nothing here waits, locks or allocates per
/// record. Dropping it fences all epochs and tells the workers to end, without waiting for them.
///
/// ```
/// use plimsoll_engine::{Executor, Route, Waiter};
/// use std::time::{Duration, Instant};
///
/// let waiter = Waiter::new();
/// let mut executor = Executor::builder()
///     .workers(2)
///     .each(waiter.waker(), |record: &u64| assert!(*record < 1_000))?;
/// let epoch = executor.open(0, 256)?;
/// let began = Instant::now();
/// let mut next = 0;
/// while executor.progress(epoch).unwrap().watermark < 1_000 {
///     executor.pass(began.elapsed());
///     let room = executor.demand().min(executor.room(epoch));
///     for _ in 0..room.min(1_000 - next as u32) {
///         // Records with the same hash are handled one after the other.
///         executor.offer(epoch, next, Route::Ordered(next as u64 % 10 << 60), next as u64).unwrap();
///         next += 1;
///     }
///     executor.flush();
///     waiter.wait(Duration::from_micros(100), || false);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Executor<T> {
    lanes: Vec<Lane<T>>,
    recipe: Recipe,
    /// Lanes whose worker is to go.
    retiring: usize,
    stopped: bool,
    current: usize,
    shards: Box<[Shard]>,
    /// Shards with waiting records and nothing in a lane: they may go anywhere.
    ready: VecDeque<u32>,
    slab: Slab<Entry<T>>,
    /// Scratch of a recall.
    recalled: Vec<Entry<T>>,
    epochs: Vec<Option<Slot>>,
    closing: Vec<Closing>,
    generation: u32,
    common: Arc<Common>,
    handler: Arc<Handler<T>>,
    retry: Retry,
    parking: Parking<T>,
    /// Records fly instead of going through lanes. There is one lane then, which stays empty and which no
    /// shard is at home in.
    flights: Option<Box<Flights<T>>>,
    failures: VecDeque<Failure>,
    skipped: VecDeque<Skipped>,
    counts: Counts,
    /// `None` without a linger.
    gather: Option<Gather>,
    conflation: Option<Conflation>,
    rates: Option<Box<Rates<T>>>,
    old_handler: OldHandler,
    least: u32,
    last_pass: Option<Duration>,
}

impl Executor<()> {
    /// Settings, with their defaults.
    pub fn builder() -> Builder {
        Builder::default()
    }
}

impl<T: Send + 'static> Executor<T> {
    /// Opens an epoch: records of one partition from offset `start` on, of which at most
    /// `capacity` may be admitted and not yet passed by the watermark.
    ///
    /// # Errors
    /// As [`Window::open`]; and when 65,536 epochs are open or being closed.
    pub fn open(&mut self, start: i64, capacity: u32) -> Result<EpochId, InvalidSetting> {
        self.adopt(Window::open(start, capacity)?)
    }

    fn adopt(&mut self, window: Window) -> Result<EpochId, InvalidSetting> {
        let watermark = window.watermark();
        // Never 0.
        self.generation = self.generation.wrapping_add(1).max(1);
        let generation = self.generation;
        let free = self.epochs.iter().position(Option::is_none).unwrap_or(self.epochs.len());
        let slot = u16::try_from(free).map_err(|_| {
            InvalidSetting::new("epochs", format!("more than {free} are open or being closed"))
        })?;
        if free == self.epochs.len() {
            self.epochs.push(None);
        }
        self.common.registry.set(slot, Some(Arc::clone(window.shared())));
        let gated = self.rates.is_some();
        let accepts = if gated { 0 } else { generation };
        let opened = Slot {
            generation,
            accepts,
            gated,
            window,
            watermark,
            waiting: 0,
            closed: false,
            admissions: Admissions::default(),
        };
        self.epochs[free] = Some(opened);
        Ok(EpochId { slot, generation })
    }

    #[inline]
    fn slot(&self, id: EpochId) -> Option<&Slot> {
        self.epochs.get(usize::from(id.slot))?.as_ref().filter(|slot| slot.is(id))
    }

    #[inline]
    fn slot_mut(&mut self, id: EpochId) -> Option<&mut Slot> {
        self.epochs.get_mut(usize::from(id.slot))?.as_mut().filter(|slot| slot.is(id))
    }

    /// The slot of an epoch that takes records.
    #[inline(always)]
    fn accepting(&mut self, id: EpochId) -> Option<&mut Slot> {
        match self.epochs.get_mut(usize::from(id.slot)) {
            Some(Some(slot)) if slot.accepts == id.generation => Some(slot),
            _ => None,
        }
    }

    /// Records the epoch's window can admit now; 0 for an epoch that is closed. When the window
    /// looks full, the watermark is advanced first.
    pub fn room(&mut self, id: EpochId) -> u32 {
        let Some(slot) = self.slot_mut(id) else { return 0 };
        if slot.accepts == 0 && !slot.gated {
            return 0;
        }
        match slot.window.room() {
            0 => {
                slot.watermark.advance();
                slot.window.fresh_room()
            }
            room => room,
        }
    }

    /// Records that should be taken in now: enough to keep the lanes filled, 0 when they are.
    ///
    /// Offering more is allowed (it waits in lists) but lets one partition run ahead of others.
    pub fn demand(&self) -> u32 {
        // Records that wait can only be conflated when they are here.
        let demand = match &self.conflation {
            Some(_) if self.slab.len() < lane::LANE as usize => PASS,
            _ => self.room_of_lanes(),
        };
        let now = self.last_pass.unwrap_or_default();
        self.rates.as_ref().map_or(demand, |rates| demand.min(rates.demand(now)))
    }

    /// Records without a home that the lanes have room for, at most those of a pass.
    fn room_of_lanes(&self) -> u32 {
        let current = &self.lanes[self.current];
        if !self.ready.is_empty() {
            return 0;
        }
        if let Some(flights) = &self.flights {
            return flights.room().min(PASS);
        }
        if current.is_preferred() {
            return current.room().min(PASS);
        }
        self.lanes.iter().fold(0, |sum: u32, lane| sum.saturating_add(lane.room())).min(PASS)
    }

    /// Admits a record to its epoch's window and sends it on its way. The workers see it after the
    /// next [`flush`](Self::flush).
    ///
    /// # Errors
    /// [`Rejected`] hands the record back and names the limit; nothing has changed.
    #[inline(always)]
    pub fn offer(
        &mut self,
        id: EpochId,
        offset: i64,
        route: Route,
        payload: T,
    ) -> Result<(), Rejected<T>> {
        self.offer_sized(id, offset, 0, route, payload)
    }

    /// Admits records of one epoch in offset order, as many as `records` yields; otherwise as
    /// [`offer`](Self::offer). Returns how many were admitted.
    ///
    /// # Errors
    /// [`Rejected`] hands back the first record that was not admitted; those before it were, and
    /// those after it were not taken from the iterator.
    // In a function of its own the loop has all registers.
    #[inline(never)]
    pub fn offer_all(
        &mut self,
        id: EpochId,
        records: impl IntoIterator<Item = (i64, Route, T)>,
    ) -> Result<u32, Rejected<T>> {
        let mut records = records.into_iter();
        let mut count = 0;
        loop {
            let (taken, first) = self.stream(id, &mut records);
            count += taken;
            let Some((offset, route, payload)) = first else { return Ok(count) };
            self.offer_one(id, offset, route, payload)?;
            count += 1;
        }
    }

    /// [`offer`](Self::offer) for [`offer_all`](Self::offer_all), out of its way.
    #[cold]
    #[inline(never)]
    fn offer_one(
        &mut self,
        id: EpochId,
        offset: i64,
        route: Route,
        payload: T,
    ) -> Result<(), Rejected<T>> {
        self.offer(id, offset, route, payload)
    }

    /// Takes records in as long as they are contiguous and go straight into the current lane.
    /// Returns how many, and the first that does not.
    #[inline(always)]
    fn stream(
        &mut self,
        id: EpochId,
        records: &mut impl Iterator<Item = (i64, Route, T)>,
    ) -> (u32, Option<(i64, Route, T)>) {
        let (Some(Some(slot)), Some(lane)) =
            (self.epochs.get_mut(usize::from(id.slot)), self.lanes.get_mut(self.current))
        else {
            return (0, records.next());
        };
        if slot.accepts != id.generation {
            return (0, records.next());
        }
        Self::note_admission(slot, self.last_pass);
        let places = slot.window.places(lane.easy.saturating_sub(lane.tx.pending()));
        let (current, shards) = (self.current as u32, &mut *self.shards);
        let position = lane.tx.end();
        let hashes = lane.hashes.from(position);
        let tag = Tag::new(places.index, id.slot, places.lap);
        let mut stream = Stream { writer: lane.tx.writer(places.count), window: &mut slot.window };
        let slots = stream.writer.slots();
        // One counter for everything, and nothing that may panic but the source: so that what the loop
        // works on stays in registers.
        let mut expected = places.offset;
        let first = 'fill: {
            for (n, (free, hash_place)) in (0_u32..).zip(slots.zip(hashes)) {
                let Some(record) = records.next() else { break 'fill None };
                let Route::Ordered(hash) = record.1 else { break 'fill Some(record) };
                let hash = not_free(hash);
                let index = shard_of(hash, shards.len());
                // Whether or not its earlier records are still in the lane, it may go there. One
                // test for both cases, because which it is nobody can predict.
                let Some(shard) = shards.get_mut(index as usize) else { break 'fill Some(record) };
                if !shard.goes_straight_to(current) || record.0 != expected {
                    break 'fill Some(record);
                }
                // At most the last offset and one.
                expected = expected.wrapping_add(1);
                hash_place.set(hash as i64);
                let tag = tag.plus(n, class_of(index));
                stream.writer.fill(free, Entry { payload: record.2, tag });
                shard.position = advance(position, n + 1);
            }
            records.next()
        };
        let written = stream.writer.written();
        drop(stream);
        lane.note(id.slot, (places.index, places.lap), position, written);
        (written, first)
    }

    #[inline(always)]
    fn send(&mut self, route: Route, epoch: u16, place: &Place, payload: T) {
        match route {
            Route::Ordered(hash) => {
                let hash = not_free(hash);
                let index = shard_of(hash, self.shards.len());
                let entry = Entry::new(payload, place, epoch, class_of(index));
                let shard = &mut self.shards[index as usize];
                let lane = &mut self.lanes[self.current];
                // Whether or not its earlier records are still in the lane, it may go there. One
                // test for both cases, because which it is nobody can predict.
                if shard.goes_straight_to(self.current as u32) && lane.tx.pending() < lane.easy {
                    shard.position = lane.push(hash, entry);
                } else {
                    self.dispatch(index, hash, entry);
                }
            }
            Route::Free => {
                let class = class_of(place.index() % self.shards.len() as u32);
                self.dispatch_free(Entry::new(payload, place, epoch, class));
            }
        }
    }

    fn dispatch(&mut self, index: u32, hash: u64, entry: Entry<T>) {
        if self.flights.is_some() {
            return self.dispatch_flight(index, hash, entry);
        }
        let shard = &mut self.shards[index as usize];
        if !shard.waits() {
            if shard.has_parked() && self.is_parked(hash) {
                self.count_waiting(&entry);
                self.park_behind(hash, entry);
                return;
            }
            let shard = &mut self.shards[index as usize];
            if let Some(lane) = self.lanes.get_mut(shard.lane())
                && !reached(lane.tx.reclaimed(), shard.position)
            {
                // Its earlier records are in this lane, so it must go there too.
                if lane.room() > 0 && !lane.holds_back(index) {
                    shard.position = lane.push(hash, entry);
                    return;
                }
            } else if let Some(lane) = self.pick() {
                let shard = &mut self.shards[index as usize];
                shard.set_lane(lane as u32);
                shard.position = self.lanes[lane].push(hash, entry);
                return;
            }
        }
        self.wait(index, hash, entry);
    }

    /// A record without an order: to the lane that is picked; else it waits in some shard's list.
    #[inline]
    fn dispatch_free(&mut self, entry: Entry<T>) {
        if self.flights.is_some() {
            return self.dispatch_loose(entry);
        }
        match self.pick() {
            Some(lane) => {
                self.lanes[lane].push(FREE, entry);
            }
            None => self.wait_anywhere(FREE, entry),
        }
    }

    fn wait_anywhere(&mut self, hash: u64, entry: Entry<T>) {
        let index = entry.place().index() % self.shards.len() as u32;
        self.wait(index, hash, entry);
    }

    /// Puts a record at the end of its shard's list, and the shard where it will be found.
    #[cold]
    fn wait(&mut self, index: u32, hash: u64, entry: Entry<T>) {
        self.count_waiting(&entry);
        if self.flights.is_some() && is_free(hash) {
            return self.wait_loose(hash, entry);
        }
        let first = !self.shards[index as usize].waits();
        self.list(index, hash, entry, false);
        if first {
            self.queue_shard(index);
        }
    }

    /// Puts a shard that has begun to wait where it will be found.
    fn queue_shard(&mut self, index: u32) {
        if self.flights.is_some() {
            return self.queue_for_flight(index);
        }
        if self.is_in_lane(index) {
            let lane = self.shards[index as usize].lane();
            self.lanes[lane].tied.push_back(index);
        } else {
            self.ready.push_back(index);
        }
    }

    /// Whether a lane holds records of the shard.
    fn is_in_lane(&self, index: u32) -> bool {
        let shard = &self.shards[index as usize];
        let lane = self.lanes.get(shard.lane());
        lane.is_some_and(|lane| !reached(lane.tx.reclaimed(), shard.position))
    }

    fn count_waiting(&mut self, entry: &Entry<T>) {
        if let Some(slot) = &mut self.epochs[usize::from(entry.epoch())] {
            slot.waiting += 1;
        }
    }

    fn uncount_waiting(&mut self, entry: &Entry<T>) {
        if let Some(slot) = &mut self.epochs[usize::from(entry.epoch())] {
            slot.waiting -= 1;
        }
    }

    /// The lane for a record that may go anywhere; `None` when it should wait.
    #[inline(always)]
    fn pick(&mut self) -> Option<usize> {
        let current = &self.lanes[self.current];
        if current.is_preferred() {
            // Little work in it; if its slots are all taken nevertheless, it is worth waiting for.
            return (current.room() > 0).then_some(self.current);
        }
        self.spread()
    }

    #[cold]
    fn spread(&mut self) -> Option<usize> {
        if let Some(lane) = self.gathering() {
            return Some(lane);
        }
        let roomy = self.lanes.iter().enumerate().filter(|(_, lane)| lane.room() > 0);
        let least = roomy.min_by(|(_, a), (_, b)| a.backlog_ns().total_cmp(&b.backlog_ns()))?;
        self.current = least.0;
        Some(self.current)
    }

    /// Serves the lanes: takes back finished entries, moves waiting records on, publishes as
    /// [`flush_more`](Self::flush_more) does.
    ///
    /// `now` is the time since any fixed moment; it must not go backwards (if it does, the time
    /// counts as not having passed). Costs O(workers), plus O(1) for each entry that moves.
    pub fn pass(&mut self, now: Duration) {
        let elapsed = now.saturating_sub(self.last_pass.unwrap_or(now)).as_nanos() as f64;
        if self.gather.is_some() {
            // What came since the last pass counts from then.
            self.flush_gathered();
        }
        self.last_pass = Some(now);
        let (mut idle, mut stuck, mut back) = (false, false, false);
        for lane in &mut self.lanes {
            lane.refresh(elapsed, self.least);
            idle |= lane.tx.in_flight() == 0 && lane.place == Seat::Active;
            stuck |= lane.is_stuck();
            back |= !lane.handed_back.is_empty() || lane.held != 0;
        }
        if back {
            for index in 0..self.lanes.len() {
                self.take_back(index, now);
            }
        }
        self.land(now);
        self.send_due(now);
        if idle && stuck && self.ready.is_empty() {
            self.recall_stuck();
        }
        self.serve();
        if self.rates.is_some() {
            self.open_gate(now);
            self.serve();
        }
        self.collect_skipped();
        if !self.closing.is_empty() {
            self.free_slots();
        }
        self.vacate();
        self.flush_more();
    }

    /// Takes back what lies unclaimed behind records that take long, so that idle workers get it.
    #[cold]
    fn recall_stuck(&mut self) {
        for index in 0..self.lanes.len() {
            if self.lanes[index].is_stuck() {
                self.recall(index);
            }
        }
    }

    fn recall(&mut self, index: usize) {
        let mut recalled = std::mem::take(&mut self.recalled);
        let lane = &mut self.lanes[index];
        lane.close();
        let (end, unpublished) = (lane.tx.end(), lane.tx.unpublished());
        let count = lane.tx.recall(|entry| recalled.push(entry));
        lane.cut_streaks();
        let (reclaimed, claim) = (lane.tx.reclaimed(), lane.tx.end());
        // Their shards have nothing in the lane any more, ...
        let shards = self.shards.len();
        for (_, hash) in lane.hashes_between(claim, end) {
            if !is_free(hash) {
                self.shards[shard_of(hash, shards) as usize].position = reclaimed;
            }
        }
        // ... unless an older record of theirs is among the claimed, ...
        for (position, hash) in lane.hashes_between(reclaimed, claim) {
            if !is_free(hash) {
                self.shards[shard_of(hash, shards) as usize].position = position;
            }
        }
        // ... or has come back and is held, which may now be for a shorter time.
        for (hash, until) in lane.shorten_holds(claim) {
            let shard = &mut self.shards[shard_of(hash, shards) as usize];
            let moves = reached(until, shard.position) || !reached(claim, shard.position);
            if !is_free(hash) && moves {
                shard.position = until;
            }
        }
        // What was recalled is in the lists, where it is counted.
        for closing in &mut self.closing {
            // A lane that came later holds nothing of the epoch.
            if let Some(end) = closing.ends.get_mut(index)
                && !reached(claim, *end)
            {
                *end = claim;
            }
        }
        if count > 0 {
            self.note_recall(index, count > unpublished);
        }
        // The last one came first, and each goes to the front: older than what waits already,
        // younger than what is claimed.
        let mut position = end;
        for mut entry in recalled.drain(..) {
            position = advance(position, POSITION);
            let hash = self.lanes[index].hash_at(position);
            if entry.is_tracked() {
                self.lanes[index].post.errands.lock().remove(&position);
                self.untrack_carrier(hash, &mut entry);
            }
            if is_free(hash) {
                self.wait_anywhere(hash, entry);
                continue;
            }
            self.count_waiting(&entry);
            let Some(entry) = self.park_in_front(hash, entry) else { continue };
            let shard = shard_of(hash, shards);
            let first = !self.shards[shard as usize].waits();
            self.list(shard, hash, entry, true);
            if first {
                self.lanes[index].tied.push_back(shard);
            }
        }
        self.recalled = recalled;
        // Perhaps all that was waited for was recalled.
        self.let_go(index, reclaimed);
    }

    /// Moves waiting records on.
    fn serve(&mut self) {
        if self.flights.is_some() {
            self.serve_flights();
        } else if self.slab.len() > 0 {
            self.serve_waiting();
        }
    }

    fn serve_waiting(&mut self) {
        for index in 0..self.lanes.len() {
            for _ in 0..TIED.min(self.lanes[index].tied.len()) {
                let lane = &mut self.lanes[index];
                let Some(shard) = lane.tied.pop_front() else { break };
                if reached(lane.tx.reclaimed(), self.shards[shard as usize].position) {
                    self.ready.push_back(shard);
                } else if lane.room() > 0 && !lane.holds_back(shard) {
                    self.feed(shard, index);
                } else {
                    lane.tied.push_back(shard);
                }
            }
        }
        while !self.ready.is_empty() {
            let Some(lane) = self.pick() else { break };
            let Some(shard) = self.ready.pop_front() else { break };
            // It became ready before all lanes were looked at, and one of them gave back something.
            if self.is_in_lane(shard) {
                self.queue_shard(shard);
            } else {
                self.feed(shard, lane);
            }
        }
    }

    /// Moves a shard's waiting records into a lane, as many as it has room for; while other shards wait
    /// for their turn, not more than [`TURN`] of them, or a batch.
    fn feed(&mut self, index: u32, to: usize) {
        let mut ended = Vec::new();
        let alone = self.ready.is_empty() && self.lanes[to].tied.is_empty();
        let mut turn = if alone { u32::MAX } else { TURN.max(self.least) };
        while self.lanes[to].room() > 0 && turn > 0 {
            turn -= 1;
            let shard = &mut self.shards[index as usize];
            let (parked, node) = (shard.has_parked(), self.slab.head(index));
            let Some(Waiting { hash, mut entry }) = self.slab.pop(index, shard) else { break };
            self.unlist(hash, node);
            let tracked = entry.is_tracked();
            if parked && !tracked && self.is_parked(hash) {
                self.park_behind(hash, entry);
                continue;
            }
            let (mut halted, mut ending) = (false, tracked);
            if let Some(slot) = &mut self.epochs[usize::from(entry.epoch())] {
                slot.waiting -= 1;
                halted = slot.window.shared().halted();
                ending |= slot.accepts == 0 && !slot.gated;
            }
            if !halted {
                self.send_carrier(hash, &mut entry);
                if tracked {
                    self.send_errand(to, self.lanes[to].tx.end(), hash);
                }
                let shard = &mut self.shards[index as usize];
                let position = self.lanes[to].push(hash, entry);
                if !is_free(hash) {
                    shard.set_lane(to as u32);
                    shard.position = position;
                }
                self.note_fed(to, ending);
            } else if tracked {
                ended.push((hash, entry));
            }
        }
        if self.shards[index as usize].waits() {
            self.queue_shard(index);
        }
        // Only now: it may add to this list, which must not be queued twice.
        for (hash, entry) in ended {
            self.drop_tracked(hash, entry);
        }
    }

    /// Publishes what was offered since the last flush, and wakes workers that sleep. To be called
    /// before the driving thread sleeps, or does anything else that takes long.
    ///
    /// With a [linger](Builder::linger) only full batches are published, and what has waited long
    /// enough.
    pub fn flush(&mut self) {
        if self.gather.is_some() {
            return self.flush_gathered();
        }
        for lane in &mut self.lanes {
            lane.flush(false);
        }
    }

    /// As [`flush`](Self::flush) for a driver that comes back at once with more records: a worker
    /// that sleeps is woken only when there is enough work for it (about 50 us).
    pub fn flush_more(&mut self) {
        if self.gather.is_some() {
            return self.flush_gathered();
        }
        for lane in &mut self.lanes {
            lane.flush(true);
        }
    }

    /// Whether any record is in a lane or in flight, or waits for that.
    pub fn busy(&self) -> bool {
        self.flights.as_ref().is_some_and(|flights| flights.busy())
            || self.slab.len() > 0
            || self.lanes.iter().any(|lane| lane.tx.pending() > 0)
    }

    /// Whether [`pass`](Self::pass) would find something to take back.
    pub fn finished_something(&self) -> bool {
        self.flights.as_ref().is_some_and(|flights| flights.has_ends())
            || self.lanes.iter().any(|lane| lane.tx.finished() > 0)
    }

    /// Estimated work in the lane that has least, to judge how long a nap may be.
    pub fn backlog(&self) -> Duration {
        let active = self.lanes.iter().filter(|lane| lane.place == Seat::Active);
        let least = active.map(Lane::backlog_ns).fold(f64::INFINITY, f64::min);
        if least.is_finite() { Duration::from_nanos(least as u64) } else { Duration::ZERO }
    }

    /// Advances the epoch's watermark and says where it stands; `None` for an epoch that is gone.
    pub fn progress(&self, id: EpochId) -> Option<Progress> {
        self.slot(id).map(|slot| slot.watermark.advance())
    }

    /// Highest admitted offset of the epoch, if any.
    pub fn last_admitted(&self, id: EpochId) -> Option<i64> {
        self.slot(id)?.window.last_admitted()
    }

    /// The next record that failed for good and was not taken yet. Its epoch has halted.
    pub fn take_failure(&mut self) -> Option<Failure> {
        self.failures.pop_front()
    }

    /// The next record that was passed over and was not taken yet. To be called now and then when
    /// handlers skip records: what is not taken is kept.
    pub fn take_skipped(&mut self) -> Option<Skipped> {
        self.collect_skipped();
        self.skipped.pop_front()
    }

    fn collect_skipped(&mut self) {
        while let Some(Passed { epoch, offset, reason }) = self.common.skipped.pop() {
            // The slot cannot have been given to another epoch: it is freed after the entry was taken
            // back, and this queue was filled before that and is emptied in each pass.
            if let Some(Some(slot)) = self.epochs.get(usize::from(epoch)) {
                let epoch = EpochId { slot: epoch, generation: slot.generation };
                self.note_skipped(epoch, offset, reason);
            }
        }
    }

    fn note_skipped(&mut self, epoch: EpochId, offset: i64, reason: String) {
        self.counts.skipped += 1;
        self.skipped.push_back(Skipped { epoch, offset, reason });
    }

    /// What has happened so far. Skipped records are counted by the pass after they were handled.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Stops an epoch: it admits nothing more, and of its admitted records none starts that has
    /// not started. Those that run go on; their completion still counts for
    /// [`progress`](Self::progress) until the epoch is [closed](Self::close).
    pub fn halt(&mut self, id: EpochId) {
        let Some(Some(slot)) = self.epochs.get_mut(usize::from(id.slot)) else { return };
        if slot.is(id) {
            (slot.accepts, slot.gated) = (0, false);
            self.common.registry.halt(slot.window.shared());
            self.cancel_flights(id.slot);
            self.forget_parked(id.slot);
            self.hurry_all();
        }
    }

    /// Ends intake of an epoch; what is admitted still runs.
    pub fn stop_intake(&mut self, id: EpochId) {
        if let Some(slot) = self.slot_mut(id) {
            (slot.accepts, slot.gated) = (0, false);
        }
        self.hurry_all();
    }

    /// Fences an epoch and forgets it: it is halted, and completions that arrive later touch
    /// nothing but its orphaned ring. Returns the last word on its watermark.
    ///
    /// The shards outlive it: records of the same key in a later epoch wait until the handler that
    /// may still be running has ended.
    pub fn close(&mut self, id: EpochId) -> Option<Progress> {
        let progress = self.progress(id)?;
        self.halt(id);
        let ends = self.lanes.iter().map(|lane| lane.tx.end()).collect();
        if let Some(slot) = self.slot_mut(id) {
            slot.closed = true;
            slot.window.release();
        }
        let since = self.last_pass.unwrap_or_default();
        self.closing.push(Closing { slot: id.slot, since, told: Vec::new(), ends });
        Some(progress)
    }

    fn free_slots(&mut self) {
        let flights = self.flights.as_deref();
        let (lanes, epochs, registry) = (&self.lanes, &mut self.epochs, &self.common.registry);
        let conflation = &mut self.conflation;
        self.closing.retain(|closing| {
            let slot = &mut epochs[usize::from(closing.slot)];
            let listed = slot.as_ref().is_some_and(|slot| slot.waiting > 0);
            let in_lane = closing
                .ends
                .iter()
                .zip(lanes)
                .any(|(end, lane)| !reached(lane.tx.reclaimed(), *end));
            let flies = flights.is_some_and(|flights| flights.names(closing.slot));
            if listed || in_lane || flies {
                return true;
            }
            *slot = None;
            Self::forget_carried(conflation, closing.slot);
            registry.set(closing.slot, None);
            registry.drop_caution();
            false
        });
    }

    /// Tells the workers to end when their lanes are empty. Halt or close the epochs first if what
    /// is queued must not run any more.
    pub fn stop(&mut self) {
        self.stopped = true;
        for lane in &mut self.lanes {
            lane.stop();
        }
        if let Some(flights) = &self.flights {
            flights.stop();
        }
    }

    /// Workers whose thread has not ended.
    pub fn running_workers(&self) -> usize {
        let runs =
            |lane: &&Lane<T>| lane.thread.as_ref().is_some_and(|thread| !thread.is_finished());
        self.lanes.iter().filter(runs).count()
    }
}

impl<T> Drop for Executor<T> {
    fn drop(&mut self) {
        for slot in self.epochs.iter().flatten() {
            self.common.registry.halt(slot.window.shared());
        }
        for lane in &mut self.lanes {
            lane.stop();
        }
        if let Some(flights) = &self.flights {
            flights.end();
        }
    }
}
