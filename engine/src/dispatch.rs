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

use crate::batch::{Batch, Entry, Tag};
use crate::epoch::{EpochId, Registry};
use crate::error::{InvalidSetting, Refused};
use crate::lane::{LaneTx, Order, POSITION, Writer, advance, distance, lane, reached};
use crate::outcome::IntoOutcome;
use crate::ring::boxed;
use crate::shard::{NONE, Shard, Slab};
use crate::sync::Arc;
use crate::wake::Waker;
use crate::window::{Progress, Watermark, Window};
use crate::worker::{Batches, Common, Each, Process, Spin, work};
use crossbeam_queue::SegQueue;
use std::collections::VecDeque;
use std::fmt;
use std::marker::PhantomData;
use std::thread::JoinHandle;
use std::time::Duration;

/// Bounds of the settings.
const MOST_WORKERS: u32 = 4_096;
const MOST_SHARDS: u32 = 1 << 24;
const MOST_BATCH: u32 = 4_096;

/// Slots of a lane.
const LANE: u32 = 8_192;
/// Most records one pass takes in.
const PASS: u32 = 512;
/// Estimated work a lane may hold.
const DEPTH: Duration = Duration::from_millis(4);
/// Estimated backlog above which the next record goes to another lane.
const SPILL: Duration = Duration::from_micros(100);
/// Estimated work one claim should take.
const RUN: Duration = Duration::from_micros(2);
/// Most records one claim takes, unless a batch wants more.
const MOST_RUN: u32 = 64;
/// What a record is taken to cost before anything is known.
const FIRST_GUESS: Duration = Duration::from_micros(10);
/// The estimate forgets half of what it knows after so much busy time.
const MEMORY: Duration = Duration::from_millis(4);
/// A lane that has not moved for so long gives up what its worker has not claimed, if another
/// worker has nothing to do.
const STUCK: Duration = Duration::from_micros(300);
/// While records keep coming in, a worker that sleeps is woken when its lane holds so much
/// estimated work, or so many records. Else a cheap handler would be woken for every chunk, which
/// costs more than the chunk.
const WORTH_WAKING: Duration = Duration::from_micros(50);
const MANY: u32 = LANE / 4;
/// Most tied shards of one lane a pass looks at.
const TIED: usize = 32;

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

/// A record whose handler failed or panicked. Its epoch has halted: no record of it starts any
/// more, and its watermark stays at or below `offset`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The epoch that halted.
    pub epoch: EpochId,
    /// The record's offset.
    pub offset: i64,
    /// The handler's error, or the panic's text.
    pub reason: String,
}

/// Why an executor was not built.
#[derive(Debug)]
#[non_exhaustive]
pub enum BuildError {
    /// A setting cannot be had.
    Setting(InvalidSetting),
    /// The operating system refused a worker's thread.
    Spawn {
        /// Which worker, from 0.
        worker: usize,
        /// The system's error.
        source: std::io::Error,
    },
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BuildError::Setting(invalid) => invalid.fmt(f),
            BuildError::Spawn { worker, .. } => write!(f, "cannot start worker {worker}"),
        }
    }
}

impl std::error::Error for BuildError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            BuildError::Setting(invalid) => Some(invalid),
            BuildError::Spawn { source, .. } => Some(source),
        }
    }
}

impl From<InvalidSetting> for BuildError {
    fn from(invalid: InvalidSetting) -> Self {
        BuildError::Setting(invalid)
    }
}

/// Settings of an [`Executor`].
#[derive(Debug, Clone)]
pub struct Builder {
    workers: usize,
    shards: usize,
    batch: usize,
    spin: Spin,
    name: String,
}

impl Default for Builder {
    fn default() -> Self {
        Builder {
            workers: 2,
            shards: 1_024,
            batch: 64,
            spin: Spin::default(),
            name: "plimsoll".to_owned(),
        }
    }
}

impl Builder {
    /// Threads that run handlers; default 2, at most 4,096.
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// Ordering domains; default 1,024, at most 2^24. Keys that share a shard wait for each other,
    /// so it should be far above the number of workers.
    pub fn shards(mut self, shards: usize) -> Self {
        self.shards = shards;
        self
    }

    /// Most records of one call of a batch handler; default 64, at most 4,096.
    pub fn batch(mut self, batch: usize) -> Self {
        self.batch = batch;
        self
    }

    /// How long a worker without work spins before it sleeps.
    pub fn spin(mut self, spin: Spin) -> Self {
        self.spin = spin;
        self
    }

    /// Prefix of the worker threads' names; default "plimsoll".
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Whether the settings can be had, without starting anything.
    ///
    /// # Errors
    /// [`InvalidSetting`] names the first that cannot.
    pub fn check(&self) -> Result<(), InvalidSetting> {
        within("workers", self.workers, MOST_WORKERS)?;
        within("shards", self.shards, MOST_SHARDS)?;
        within("batch", self.batch, MOST_BATCH)?;
        Ok(())
    }

    /// Starts the workers, with a handler for one record.
    ///
    /// `waker` wakes the thread that will drive the executor.
    ///
    /// # Errors
    /// [`BuildError`] names the setting, or the worker whose thread could not be started.
    pub fn each<T, F, R>(self, waker: Waker, handler: F) -> Result<Executor<T>, BuildError>
    where
        T: Send + 'static,
        F: Fn(&T) -> R + Send + Sync + 'static,
        R: IntoOutcome + 'static,
    {
        self.start(waker, Each { handler, returns: PhantomData })
    }

    /// Starts the workers, with a handler for up to [`batch`](Self::batch) records. A batch takes
    /// what is there; it does not wait for more.
    ///
    /// # Errors
    /// As [`each`](Self::each).
    pub fn batches<T, F, R>(self, waker: Waker, handler: F) -> Result<Executor<T>, BuildError>
    where
        T: Send + 'static,
        F: Fn(&Batch<'_, T>) -> R + Send + Sync + 'static,
        R: IntoOutcome + 'static,
    {
        let most = within("batch", self.batch, MOST_BATCH)?;
        self.start(waker, Batches { handler, most, returns: PhantomData })
    }

    fn start<T, P>(self, waker: Waker, process: P) -> Result<Executor<T>, BuildError>
    where
        T: Send + 'static,
        P: Process<T>,
    {
        self.check()?;
        let workers = within("workers", self.workers, MOST_WORKERS)?;
        let shards = within("shards", self.shards, MOST_SHARDS)?;
        let no_memory = |setting| InvalidSetting::new(setting, "no memory for so many");
        let common = Arc::new(Common {
            registry: Registry::new(),
            failed: SegQueue::new(),
            waker,
            spin: self.spin,
        });
        let least = process.least();
        let mut executor = Executor {
            lanes: Vec::with_capacity(workers as usize),
            current: 0,
            shards: boxed(shards, Shard::new).ok_or_else(|| no_memory("shards"))?,
            ready: VecDeque::new(),
            slab: Slab::new(),
            recalled: Vec::new(),
            epochs: Vec::new(),
            closing: Vec::new(),
            generation: 0,
            common,
            least,
            last_pass: None,
        };
        let process = Arc::new(process);
        for worker in 0..workers {
            let (tx, rx) = lane(LANE, Order::Right).ok_or_else(|| no_memory("workers"))?;
            let thread = std::thread::Builder::new()
                .name(format!("{}-worker-{worker}", self.name))
                .spawn({
                    let (process, common) = (Arc::clone(&process), Arc::clone(&executor.common));
                    move || work(rx, &*process, common)
                })
                // Dropping the executor ends the workers that have been started.
                .map_err(|source| BuildError::Spawn { worker: worker as usize, source })?;
            executor.lanes.push(Lane::new(tx, thread));
        }
        for lane in &mut executor.lanes {
            lane.set_limits(least);
        }
        Ok(executor)
    }
}

/// The shard of a hash: its high half, scaled. Any number of shards, no division.
#[inline(always)]
fn shard_of(hash: u64, shards: usize) -> u32 {
    (((hash >> 32) * shards as u64) >> 32) as u32
}

fn within(setting: &'static str, value: usize, most: u32) -> Result<u32, InvalidSetting> {
    match u32::try_from(value) {
        Ok(fits) if (1..=most).contains(&fits) => Ok(fits),
        _ => Err(InvalidSetting::new(setting, format!("{value} is outside 1..={most}"))),
    }
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

/// A lane with what the dispatcher believes about it.
#[derive(Debug)]
struct Lane<T> {
    tx: LaneTx<Entry<T>>,
    thread: JoinHandle<()>,
    /// Shard of the entry at each position: the slots themselves may be the worker's.
    shards: Box<[u32; LANE as usize]>,
    /// Shards with waiting records that are tied to this lane.
    tied: VecDeque<u32>,
    /// How long it has not moved, ns.
    stuck_ns: f64,
    /// Its worker slept when something was published, and was not woken yet.
    owed: bool,
    /// For how long, ns: it does not stay so, whatever the driver does.
    owed_ns: f64,
    /// Its worker was woken and has not finished anything since: that time says nothing.
    waking: bool,
    /// Recalled: takes nothing until it moves, or its tail would go back and forth.
    closed: bool,
    /// Busy time and records it was spent on, decaying: their quotient is a record's cost.
    busy_ns: f64,
    busy_records: f64,
    /// Most pending records; 0 while closed.
    limit: u32,
    /// Pending records from which on others are considered; at most `limit`.
    easy: u32,
    /// As `easy`, but not bounded by the limit: below it a lane without room is waited for.
    patience: u32,
}

impl<T> Lane<T> {
    fn new(tx: LaneTx<Entry<T>>, thread: JoinHandle<()>) -> Self {
        Lane {
            tx,
            thread,
            shards: Box::new([NONE; LANE as usize]),
            tied: VecDeque::new(),
            stuck_ns: 0.0,
            owed: false,
            owed_ns: 0.0,
            waking: false,
            closed: false,
            busy_ns: FIRST_GUESS.as_nanos() as f64,
            busy_records: 1.0,
            limit: 0,
            easy: 0,
            patience: 0,
        }
    }

    /// Pushes into a lane that has room; returns the position after the entry.
    #[inline(always)]
    fn push(&mut self, shard: u32, entry: Entry<T>) -> u32 {
        self.shards[self.tx.end() as usize % LANE as usize] = shard;
        let pushed = self.tx.push(entry).is_ok();
        // The limit is never above the number of slots, and callers look at the room first.
        debug_assert!(pushed, "a lane with room has a free slot");
        self.tx.end()
    }

    /// The position after each entry in a range, and its shard.
    fn shards_between(&self, from: u32, to: u32) -> impl Iterator<Item = (u32, u32)> {
        (0..distance(from, to)).map(move |step| {
            let position = advance(from, step);
            (advance(position, 1), self.shard_at(position))
        })
    }

    /// The shard of the entry at a position.
    fn shard_at(&self, position: u32) -> u32 {
        self.shards[position as usize % LANE as usize]
    }

    /// Records it has room for.
    #[inline(always)]
    fn room(&self) -> u32 {
        self.limit.saturating_sub(self.tx.pending())
    }

    /// Whether it should be filled further, or waited for, before another lane is considered.
    #[inline(always)]
    fn is_preferred(&self) -> bool {
        self.tx.pending() < self.patience
    }

    fn close(&mut self) {
        self.closed = true;
        (self.limit, self.easy, self.patience) = (0, 0, 0);
    }

    fn is_stuck(&self) -> bool {
        !self.closed && self.tx.pending() > 0 && self.stuck_ns > STUCK.as_nanos() as f64
    }

    fn cost_ns(&self) -> f64 {
        // Never zero: records may be finished faster than the clock ticks.
        (self.busy_ns / self.busy_records.max(f64::MIN_POSITIVE)).max(0.1)
    }

    fn backlog_ns(&self) -> f64 {
        f64::from(self.tx.pending()) * self.cost_ns()
    }

    /// Takes back what the worker has finished in the `elapsed` time since the last look.
    #[inline]
    fn refresh(&mut self, elapsed_ns: f64, least: u32) {
        let before = self.tx.pending();
        if self.owed {
            self.owed_ns += elapsed_ns;
            if self.owed_ns > WORTH_WAKING.as_nanos() as f64 {
                self.wake();
            }
        }
        if before > 0 {
            let finished = self.tx.reclaim();
            self.learn(elapsed_ns, before, f64::from(finished));
        } else {
            self.stuck_ns = 0.0;
            self.closed = false;
        }
        self.set_limits(least);
    }

    /// Learns from what was `finished` of the `before` records in the elapsed time.
    fn learn(&mut self, elapsed_ns: f64, before: u32, finished: f64) {
        if finished > 0.0 {
            self.stuck_ns = 0.0;
            self.closed = false;
            if std::mem::take(&mut self.waking) {
                return;
            }
        } else if self.owed {
            return;
        } else {
            self.stuck_ns += elapsed_ns;
        }
        if finished == f64::from(before) && elapsed_ns > finished * self.cost_ns() {
            // It ran dry at some moment in between: that says nothing unless it was fast.
            return;
        }
        self.busy_ns += elapsed_ns;
        self.busy_records += finished;
        if self.busy_ns > MEMORY.as_nanos() as f64 {
            self.busy_ns /= 2.0;
            self.busy_records /= 2.0;
        }
    }

    fn set_limits(&mut self, least: u32) {
        let cost = self.cost_ns();
        // Casts saturate.
        let records = |time: Duration| (time.as_nanos() as f64 / cost) as u32;
        self.limit = records(DEPTH).clamp((2 * least).max(3), LANE);
        self.patience = records(SPILL).max(1);
        if self.closed {
            (self.limit, self.patience) = (0, 0);
        }
        self.easy = self.limit.min(self.patience);
        self.tx.set_run(records(RUN).clamp(1, MOST_RUN));
    }

    /// Publishes what was pushed. Wakes the worker if it sleeps; with `more` to come only if it is
    /// worth it already.
    #[inline]
    fn flush(&mut self, more: bool) {
        self.owed |= self.tx.flush();
        if self.owed && (!more || self.is_worth_waking()) {
            self.wake();
        }
    }

    /// Tells the worker to end when the lane is empty.
    fn stop(&mut self) {
        self.flush(false);
        self.tx.stop();
        self.thread.thread().unpark();
    }

    fn is_worth_waking(&self) -> bool {
        self.tx.pending() >= MANY || self.backlog_ns() >= WORTH_WAKING.as_nanos() as f64
    }

    #[cold]
    fn wake(&mut self) {
        self.owed = false;
        self.owed_ns = 0.0;
        self.waking = true;
        self.thread.thread().unpark();
    }
}

/// An epoch as the dispatcher sees it.
#[derive(Debug)]
struct Slot {
    generation: u32,
    /// The generation while it takes records, 0 afterwards.
    accepts: u32,
    window: Window,
    watermark: Watermark,
    /// Records of it in shard lists.
    waiting: u32,
    /// Fenced and forgotten; the slot stays until no entry names it.
    closed: bool,
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
        let window = Window::open(start, capacity)?;
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
        let opened =
            Slot { generation, accepts: generation, window, watermark, waiting: 0, closed: false };
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
        let Some(slot) = self.accepting(id) else { return 0 };
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
        let current = &self.lanes[self.current];
        if !self.ready.is_empty() {
            return 0;
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
        let Some(slot) = self.accepting(id) else {
            return Err(Rejected { payload, refused: Refused::Closed });
        };
        let place = match slot.window.admit_place(offset) {
            Ok(place) => place,
            Err(refused) => return Err(Rejected { payload, refused }),
        };
        self.send(route, Entry::new(payload, &place, id.slot));
        Ok(())
    }

    /// Admits records of one epoch in offset order, as many as `records` yields; otherwise as
    /// [`offer`](Self::offer). Returns how many were admitted.
    ///
    /// # Errors
    /// [`Rejected`] hands back the first record that was not admitted; those before it were, and
    /// those after it were not taken from the iterator.
    #[inline]
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
            self.offer(id, offset, route, payload)?;
            count += 1;
        }
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
        let places = slot.window.places(lane.easy.saturating_sub(lane.tx.pending()));
        let (current, shards, shards_of) =
            (self.current as u32, &mut *self.shards, &mut *lane.shards);
        let mut stream = Stream { writer: lane.tx.writer(places.count), window: &mut slot.window };
        let writer = &mut stream.writer;
        let tag = Tag::new(places.index, id.slot, places.lap);
        let mut first = None;
        for record in records {
            let Route::Ordered(hash) = record.1 else {
                first = Some(record);
                break;
            };
            let index = shard_of(hash, shards.len());
            // Whether or not its earlier records are still in the lane, it may go there. One test
            // for both cases, because which it is nobody can predict.
            let Some(shard) = shards.get_mut(index as usize).filter(|shard| {
                shard.lane == current
                    && !shard.waits()
                    && record.0.wrapping_sub(places.offset) == i64::from(writer.written())
                    && !writer.is_full()
            }) else {
                first = Some(record);
                break;
            };
            shards_of[writer.end() as usize % LANE as usize] = index;
            let tag = tag.plus(writer.written());
            let pushed = writer.push(Entry { payload: record.2, tag }).is_ok();
            debug_assert!(pushed, "it was not full");
            shard.position = writer.end();
        }
        (stream.writer.written(), first)
    }

    #[inline(always)]
    fn send(&mut self, route: Route, entry: Entry<T>) {
        match route {
            Route::Ordered(hash) => {
                let index = shard_of(hash, self.shards.len());
                let shard = &mut self.shards[index as usize];
                let lane = &mut self.lanes[self.current];
                // Whether or not its earlier records are still in the lane, it may go there. One
                // test for both cases, because which it is nobody can predict.
                if shard.lane == self.current as u32
                    && !shard.waits()
                    && lane.tx.pending() < lane.easy
                {
                    shard.position = lane.push(index, entry);
                } else {
                    self.dispatch(index, entry);
                }
            }
            Route::Free => self.dispatch_free(entry),
        }
    }

    fn dispatch(&mut self, index: u32, entry: Entry<T>) {
        let shard = &mut self.shards[index as usize];
        if !shard.waits() {
            if let Some(lane) = self.lanes.get_mut(shard.lane as usize)
                && !reached(lane.tx.reclaimed(), shard.position)
            {
                // Its earlier records are in this lane, so it must go there too.
                if lane.room() > 0 {
                    shard.position = lane.push(index, entry);
                    return;
                }
            } else if let Some(lane) = self.pick() {
                let shard = &mut self.shards[index as usize];
                shard.lane = lane as u32;
                shard.position = self.lanes[lane].push(index, entry);
                return;
            }
        }
        self.wait(index, entry);
    }

    /// A record without an order: to the lane that is picked; else it waits in some shard's list.
    #[inline]
    fn dispatch_free(&mut self, entry: Entry<T>) {
        match self.pick() {
            Some(lane) => {
                self.lanes[lane].push(NONE, entry);
            }
            None => self.wait_anywhere(entry),
        }
    }

    fn wait_anywhere(&mut self, entry: Entry<T>) {
        let index = entry.place().index() % self.shards.len() as u32;
        self.wait(index, entry);
    }

    /// Puts a record at the end of its shard's list, and the shard where it will be found.
    #[cold]
    fn wait(&mut self, index: u32, entry: Entry<T>) {
        self.count_waiting(&entry);
        let shard = &mut self.shards[index as usize];
        if !shard.waits() {
            match self.lanes.get_mut(shard.lane as usize) {
                Some(lane) if !reached(lane.tx.reclaimed(), shard.position) => {
                    lane.tied.push_back(index);
                }
                _ => self.ready.push_back(index),
            }
        }
        self.slab.push(shard, entry);
    }

    fn count_waiting(&mut self, entry: &Entry<T>) {
        if let Some(slot) = &mut self.epochs[usize::from(entry.epoch())] {
            slot.waiting += 1;
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
        self.last_pass = Some(now);
        let (mut idle, mut stuck) = (false, false);
        for lane in &mut self.lanes {
            lane.refresh(elapsed, self.least);
            idle |= lane.tx.pending() == 0;
            stuck |= lane.is_stuck();
        }
        if idle && stuck && self.ready.is_empty() {
            self.recall_stuck();
        }
        if self.slab.len() > 0 {
            self.serve_waiting();
        }
        if !self.closing.is_empty() {
            self.free_slots();
        }
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
        let end = lane.tx.end();
        lane.tx.recall(|entry| recalled.push(entry));
        let (reclaimed, claim) = (lane.tx.reclaimed(), lane.tx.end());
        // Their shards have nothing in the lane any more, ...
        for (_, shard) in lane.shards_between(claim, end) {
            if shard != NONE {
                self.shards[shard as usize].position = reclaimed;
            }
        }
        // ... unless an older record of theirs is among the claimed.
        for (position, shard) in lane.shards_between(reclaimed, claim) {
            if shard != NONE {
                self.shards[shard as usize].position = position;
            }
        }
        // The last one came first, and each goes to the front: older than what waits already,
        // younger than what is claimed.
        let mut position = end;
        for entry in recalled.drain(..) {
            position = advance(position, POSITION);
            let shard = self.lanes[index].shard_at(position);
            if shard == NONE {
                self.wait_anywhere(entry);
                continue;
            }
            self.count_waiting(&entry);
            let list = &mut self.shards[shard as usize];
            if !list.waits() {
                self.lanes[index].tied.push_back(shard);
            }
            self.slab.push_front(list, entry);
        }
        self.recalled = recalled;
    }

    fn serve_waiting(&mut self) {
        for index in 0..self.lanes.len() {
            for _ in 0..TIED.min(self.lanes[index].tied.len()) {
                let lane = &mut self.lanes[index];
                let Some(shard) = lane.tied.pop_front() else { break };
                if reached(lane.tx.reclaimed(), self.shards[shard as usize].position) {
                    self.ready.push_back(shard);
                } else if lane.room() > 0 {
                    self.feed(shard, index);
                } else {
                    lane.tied.push_back(shard);
                }
            }
        }
        while !self.ready.is_empty() {
            let Some(lane) = self.pick() else { break };
            if let Some(shard) = self.ready.pop_front() {
                self.feed(shard, lane);
            }
        }
    }

    /// Moves a shard's waiting records into a lane, as many as it has room for.
    fn feed(&mut self, index: u32, to: usize) {
        let shard = &mut self.shards[index as usize];
        let lane = &mut self.lanes[to];
        while lane.room() > 0 {
            let Some(entry) = self.slab.pop(shard) else { return };
            let mut halted = false;
            if let Some(slot) = &mut self.epochs[usize::from(entry.epoch())] {
                slot.waiting -= 1;
                halted = slot.window.shared().halted();
            }
            if !halted {
                shard.lane = to as u32;
                shard.position = lane.push(index, entry);
            }
        }
        if shard.waits() {
            lane.tied.push_back(index);
        }
    }

    /// Publishes what was offered since the last flush, and wakes workers that sleep. To be called
    /// before the driving thread sleeps, or does anything else that takes long.
    pub fn flush(&mut self) {
        for lane in &mut self.lanes {
            lane.flush(false);
        }
    }

    /// As [`flush`](Self::flush) for a driver that comes back at once with more records: a worker
    /// that sleeps is woken only when there is enough work for it (about 50 us).
    pub fn flush_more(&mut self) {
        for lane in &mut self.lanes {
            lane.flush(true);
        }
    }

    /// Whether any record is in a lane or waits for one.
    pub fn busy(&self) -> bool {
        self.slab.len() > 0 || self.lanes.iter().any(|lane| lane.tx.pending() > 0)
    }

    /// Whether [`pass`](Self::pass) would find something to take back.
    pub fn finished_something(&self) -> bool {
        self.lanes.iter().any(|lane| lane.tx.finished() > 0)
    }

    /// Estimated work in the lane that has least, to judge how long a nap may be.
    pub fn backlog(&self) -> Duration {
        let least = self.lanes.iter().map(Lane::backlog_ns).fold(f64::INFINITY, f64::min);
        Duration::from_nanos(least as u64)
    }

    /// Advances the epoch's watermark and says where it stands; `None` for an epoch that is gone.
    pub fn progress(&self, id: EpochId) -> Option<Progress> {
        self.slot(id).map(|slot| slot.watermark.advance())
    }

    /// Highest admitted offset of the epoch, if any.
    pub fn last_admitted(&self, id: EpochId) -> Option<i64> {
        self.slot(id)?.window.last_admitted()
    }

    /// The next failed record that was not taken yet. Its epoch has halted.
    pub fn take_failure(&mut self) -> Option<Failure> {
        loop {
            let failed = self.common.failed.pop()?;
            // A failure of an epoch that is gone concerns nobody any more. The slot cannot have been
            // given to another epoch: it is freed after the failed entry was taken back, and this
            // queue was filled before that.
            if let Some(Some(slot)) = self.epochs.get(usize::from(failed.epoch))
                && !slot.closed
            {
                let epoch = EpochId { slot: failed.epoch, generation: slot.generation };
                return Some(Failure { epoch, offset: failed.offset, reason: failed.reason });
            }
        }
    }

    /// Stops an epoch: it admits nothing more, and of its admitted records none starts that has
    /// not started. Those that run go on; their completion still counts for
    /// [`progress`](Self::progress) until the epoch is [closed](Self::close).
    pub fn halt(&mut self, id: EpochId) {
        let Some(Some(slot)) = self.epochs.get_mut(usize::from(id.slot)) else { return };
        if slot.is(id) {
            slot.accepts = 0;
            self.common.registry.halt(slot.window.shared());
        }
    }

    /// Ends intake of an epoch; what is admitted still runs.
    pub fn stop_intake(&mut self, id: EpochId) {
        if let Some(slot) = self.slot_mut(id) {
            slot.accepts = 0;
        }
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
        }
        self.closing.push(Closing { slot: id.slot, ends });
        Some(progress)
    }

    fn free_slots(&mut self) {
        let (lanes, epochs, registry) = (&self.lanes, &mut self.epochs, &self.common.registry);
        self.closing.retain(|closing| {
            let slot = &mut epochs[usize::from(closing.slot)];
            let listed = slot.as_ref().is_some_and(|slot| slot.waiting > 0);
            let in_lane = closing
                .ends
                .iter()
                .zip(lanes)
                .any(|(end, lane)| !reached(lane.tx.reclaimed(), *end));
            if listed || in_lane {
                return true;
            }
            *slot = None;
            registry.set(closing.slot, None);
            registry.forget_halted();
            false
        });
    }

    /// Tells the workers to end when their lanes are empty. Halt or close the epochs first if what
    /// is queued must not run any more.
    pub fn stop(&mut self) {
        for lane in &mut self.lanes {
            lane.stop();
        }
    }

    /// Workers whose thread has not ended.
    pub fn running_workers(&self) -> usize {
        self.lanes.iter().filter(|lane| !lane.thread.is_finished()).count()
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
    }
}
