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

#[cfg(all(test, not(loom)))]
mod model;
mod parking;

use crate::batch::{Batch, Entry, Tag, class_of};
use crate::epoch::{EpochId, Registry};
use crate::error::{InvalidSetting, Refused};
use crate::lane::{LaneTx, Order, POSITION, Writer, advance, distance, lane, reached};
use crate::outcome::{IntoBatchOutcome, IntoOutcome};
use crate::retry::Retry;
use crate::ring::{Place, boxed};
use crate::shard::{Shard, Slab, Waiting};
use crate::sync::Arc;
use crate::wake::Waker;
use crate::window::{Progress, Watermark, Window};
use crate::worker::{Common, Handler, Passed, Post, Spin, Worker};
use crossbeam_queue::SegQueue;
use parking::{Hold, Parking};
use std::collections::VecDeque;
use std::fmt;
use std::thread::JoinHandle;
use std::time::Duration;

pub use parking::ParkedKey;

/// Bounds of the settings.
const MOST_WORKERS: u32 = 4_096;
const MOST_SHARDS: u32 = 1 << 24;
pub(crate) const MOST_BATCH: u32 = 4_096;

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
/// Stands for the hash of a record without an order.
const FREE: u64 = u64::MAX;
/// From here on hashes are those of records without an order that were parked, one for each.
const FIRST_FREE: u64 = FREE - (1 << 32);

/// Whether a hash is that of a record without an order.
#[inline(always)]
fn is_free(hash: u64) -> bool {
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
    retry: Retry,
}

impl Default for Builder {
    fn default() -> Self {
        Builder {
            workers: 2,
            shards: 1_024,
            batch: 64,
            spin: Spin::default(),
            name: "plimsoll".to_owned(),
            retry: Retry::default(),
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

    /// When a failed record is tried again, and what becomes of it after the last attempt; default
    /// [`Retry::never`], after which its epoch halts.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.retry = retry;
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
        self.retry.check()
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
        self.start(waker, Handler::each(handler))
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
        R: IntoBatchOutcome + 'static,
    {
        self.start(waker, Handler::batches(handler))
    }

    /// Starts the workers.
    ///
    /// # Errors
    /// As [`each`](Self::each).
    pub fn start<T: Send + 'static>(
        self,
        waker: Waker,
        handler: Handler<T>,
    ) -> Result<Executor<T>, BuildError> {
        let name = self.name.clone();
        let (mut executor, workers) = self.assemble(waker, handler)?;
        for (index, worker) in workers.into_iter().enumerate() {
            let thread = std::thread::Builder::new()
                .name(format!("{name}-worker-{index}"))
                .spawn(move || worker.work())
                // Dropping the executor ends the workers that have been started.
                .map_err(|source| BuildError::Spawn { worker: index, source })?;
            executor.lanes[index].thread = Some(thread);
        }
        Ok(executor)
    }

    /// An executor whose workers have no threads yet.
    fn assemble<T: Send + 'static>(
        self,
        waker: Waker,
        handler: Handler<T>,
    ) -> Result<(Executor<T>, Vec<Worker<T>>), InvalidSetting> {
        self.check()?;
        let workers = within("workers", self.workers, MOST_WORKERS)?;
        let shards = within("shards", self.shards, MOST_SHARDS)?;
        let batch = within("batch", self.batch, MOST_BATCH)?;
        if self.retry.then.needs_hook() && handler.hook.is_none() {
            let reason = "dead letters need a hook that takes them";
            return Err(InvalidSetting::new("retry", reason));
        }
        let no_memory = |setting| InvalidSetting::new(setting, "no memory for so many");
        let common = Arc::new(Common {
            registry: Registry::new(),
            skipped: SegQueue::new(),
            waker,
            spin: self.spin,
        });
        let handler = Arc::new(handler);
        let least = handler.process.least(batch);
        let mut lanes = Vec::with_capacity(workers as usize);
        let mut idle = Vec::with_capacity(workers as usize);
        for _ in 0..workers {
            let (tx, rx) = lane(LANE, Order::Right).ok_or_else(|| no_memory("workers"))?;
            let post = Arc::new(Post::default());
            let (handler, common) = (Arc::clone(&handler), Arc::clone(&common));
            idle.push(Worker::new(rx, handler, common, Arc::clone(&post), batch));
            let mut lane = Lane::new(tx, post);
            lane.set_limits(least);
            lanes.push(lane);
        }
        let executor = Executor {
            lanes,
            current: 0,
            shards: boxed(shards, Shard::new).ok_or_else(|| no_memory("shards"))?,
            ready: VecDeque::new(),
            slab: Slab::new(),
            recalled: Vec::new(),
            epochs: Vec::new(),
            closing: Vec::new(),
            generation: 0,
            common,
            handler,
            retry: self.retry,
            parking: Parking::new(),
            failures: VecDeque::new(),
            skipped: VecDeque::new(),
            counts: Counts::default(),
            least,
            last_pass: None,
        };
        Ok((executor, idle))
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
    /// `None` only before it is started.
    thread: Option<JoinHandle<()>>,
    post: Arc<Post>,
    /// Hash of the entry at each position: the slots themselves may be the worker's.
    hashes: Box<[u64; LANE as usize]>,
    /// What the worker handed back, until the dispatcher has dealt with it.
    handed_back: Vec<(u32, u64, Entry<T>)>,
    /// Entries that were handed back unhandled, oldest first.
    holds: VecDeque<Hold<T>>,
    /// The classes of `holds`, a bit each.
    held: u128,
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
    fn new(tx: LaneTx<Entry<T>>, post: Arc<Post>) -> Self {
        Lane {
            tx,
            thread: None,
            post,
            hashes: Box::new([FREE; LANE as usize]),
            handed_back: Vec::new(),
            holds: VecDeque::new(),
            held: 0,
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
    fn push(&mut self, hash: u64, entry: Entry<T>) -> u32 {
        self.hashes[self.tx.end() as usize % LANE as usize] = hash;
        let pushed = self.tx.push(entry).is_ok();
        // The limit is never above the number of slots, and callers look at the room first.
        debug_assert!(pushed, "a lane with room has a free slot");
        self.tx.end()
    }

    /// The position after each entry in a range, and its hash.
    fn hashes_between(&self, from: u32, to: u32) -> impl Iterator<Item = (u32, u64)> {
        (0..distance(from, to)).map(move |step| {
            let position = advance(from, step);
            (advance(position, 1), self.hash_at(position))
        })
    }

    /// The hash of the entry at a position.
    fn hash_at(&self, position: u32) -> u64 {
        self.hashes[position as usize % LANE as usize]
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
            let (hashes, handed_back) = (&self.hashes, &mut self.handed_back);
            let finished = self.tx.reclaim_with(|position, entry| {
                if entry.back().is_some() {
                    handed_back.push((position, hashes[position as usize % LANE as usize], entry));
                }
            });
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
        // While something is held each record has to be looked at.
        self.easy = if self.held == 0 { self.limit.min(self.patience) } else { 0 };
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
        self.unpark();
    }

    fn unpark(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    fn is_worth_waking(&self) -> bool {
        self.tx.pending() >= MANY || self.backlog_ns() >= WORTH_WAKING.as_nanos() as f64
    }

    #[cold]
    fn wake(&mut self) {
        self.owed = false;
        self.owed_ns = 0.0;
        self.waking = true;
        self.unpark();
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
    handler: Arc<Handler<T>>,
    retry: Retry,
    parking: Parking<T>,
    failures: VecDeque<Failure>,
    skipped: VecDeque<Skipped>,
    counts: Counts,
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
        self.send(route, id.slot, &place, payload);
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
        let (current, shards, hashes) = (self.current as u32, &mut *self.shards, &mut *lane.hashes);
        let mut stream = Stream { writer: lane.tx.writer(places.count), window: &mut slot.window };
        let writer = &mut stream.writer;
        let tag = Tag::new(places.index, id.slot, places.lap);
        let mut first = None;
        for record in records {
            let Route::Ordered(hash) = record.1 else {
                first = Some(record);
                break;
            };
            let hash = not_free(hash);
            let index = shard_of(hash, shards.len());
            // Whether or not its earlier records are still in the lane, it may go there. One test
            // for both cases, because which it is nobody can predict.
            let Some(shard) = shards.get_mut(index as usize).filter(|shard| {
                shard.goes_straight_to(current)
                    && record.0.wrapping_sub(places.offset) == i64::from(writer.written())
                    && !writer.is_full()
            }) else {
                first = Some(record);
                break;
            };
            hashes[writer.end() as usize % LANE as usize] = hash;
            let tag = tag.plus(writer.written(), class_of(index));
            let pushed = writer.push(Entry { payload: record.2, tag }).is_ok();
            debug_assert!(pushed, "it was not full");
            shard.position = writer.end();
        }
        (stream.writer.written(), first)
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
        let shard = &mut self.shards[index as usize];
        let first = !shard.waits();
        self.slab.push(shard, Waiting { hash, entry });
        if first {
            self.queue_shard(index);
        }
    }

    /// Puts a shard that has begun to wait where it will be found.
    fn queue_shard(&mut self, index: u32) {
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
        let (mut idle, mut stuck, mut back) = (false, false, false);
        for lane in &mut self.lanes {
            lane.refresh(elapsed, self.least);
            idle |= lane.tx.pending() == 0;
            stuck |= lane.is_stuck();
            back |= !lane.handed_back.is_empty() || lane.held != 0;
        }
        if back {
            for index in 0..self.lanes.len() {
                self.take_back(index, now);
            }
        }
        self.send_due(now);
        if idle && stuck && self.ready.is_empty() {
            self.recall_stuck();
        }
        if self.slab.len() > 0 {
            self.serve_waiting();
        }
        self.collect_skipped();
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
        // ... or has come back and is held.
        for (hash, until) in lane.shorten_holds(claim) {
            let shard = &mut self.shards[shard_of(hash, shards) as usize];
            if !is_free(hash) && reached(until, shard.position) {
                shard.position = until;
            }
        }
        // What was recalled is in the lists, where it is counted.
        for closing in &mut self.closing {
            let end = &mut closing.ends[index];
            if !reached(claim, *end) {
                *end = claim;
            }
        }
        // The last one came first, and each goes to the front: older than what waits already,
        // younger than what is claimed.
        let mut position = end;
        for entry in recalled.drain(..) {
            position = advance(position, POSITION);
            let hash = self.lanes[index].hash_at(position);
            if entry.is_tracked() {
                self.lanes[index].post.errands.lock().remove(&position);
            }
            if is_free(hash) {
                self.wait_anywhere(hash, entry);
                continue;
            }
            self.count_waiting(&entry);
            let Some(entry) = self.park_in_front(hash, entry) else { continue };
            let shard = shard_of(hash, shards);
            let list = &mut self.shards[shard as usize];
            let first = !list.waits();
            self.slab.push_front(list, Waiting { hash, entry });
            if first {
                self.lanes[index].tied.push_back(shard);
            }
        }
        self.recalled = recalled;
        // Perhaps all that was waited for was recalled.
        self.let_go(index, reclaimed);
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

    /// Moves a shard's waiting records into a lane, as many as it has room for.
    fn feed(&mut self, index: u32, to: usize) {
        let mut ended = Vec::new();
        while self.lanes[to].room() > 0 {
            let shard = &mut self.shards[index as usize];
            let parked = shard.has_parked();
            let Some(Waiting { hash, entry }) = self.slab.pop(shard) else { break };
            let tracked = entry.is_tracked();
            if parked && !tracked && self.is_parked(hash) {
                self.park_behind(hash, entry);
                continue;
            }
            let mut halted = false;
            if let Some(slot) = &mut self.epochs[usize::from(entry.epoch())] {
                slot.waiting -= 1;
                halted = slot.window.shared().halted();
            }
            if !halted {
                if tracked {
                    self.send_errand(to, self.lanes[to].tx.end(), hash);
                }
                let shard = &mut self.shards[index as usize];
                let position = self.lanes[to].push(hash, entry);
                if !is_free(hash) {
                    shard.set_lane(to as u32);
                    shard.position = position;
                }
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
            slot.accepts = 0;
            self.common.registry.halt(slot.window.shared());
            self.forget_parked(id.slot);
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
            registry.drop_caution();
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
    }
}
