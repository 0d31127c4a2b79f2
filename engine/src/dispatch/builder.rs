//! Settings of an executor.

use super::batching::{Batching, Gather};
use super::conflate::Conflation;
use super::flights::Flights;
use super::parking::Parking;
use super::rate::Rates;
use super::resize::{Place, Recipe};
use super::stall::OldHandler;
use super::{Counts, Executor};
use crate::batch::Batch;
use crate::epoch::Registry;
use crate::error::InvalidSetting;
use crate::flight::Launcher;
use crate::outcome::{IntoBatchOutcome, IntoOutcome};
use crate::retry::Retry;
use crate::ring::boxed;
use crate::shard::{Shard, Slab};
use crate::sync::Arc;
use crate::wake::Waker;
use crate::worker::{Common, Handler, Spin, Worker};
use crossbeam_queue::SegQueue;
use std::collections::VecDeque;
use std::fmt;

/// Bounds of the settings.
pub(super) const MOST_WORKERS: u32 = 4_096;
const MOST_SHARDS: u32 = 1 << 24;
pub(crate) const MOST_BATCH: u32 = 4_096;
const MOST_CONCURRENCY: u32 = 1 << 20;
/// Shards for each record in flight, and bounds of their default.
const SHARDS_PER_FLIGHT: u32 = 64;
const FLIGHT_SHARDS: (u32, u32) = (1_024, 1 << 20);

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
    /// Whether they were asked for: the default of flights is another one.
    own_shards: bool,
    concurrency: usize,
    batch: usize,
    spin: Spin,
    name: String,
    retry: Retry,
    pub(super) batching: Batching,
    old_handler: OldHandler,
}

impl Default for Builder {
    fn default() -> Self {
        Builder {
            workers: 2,
            shards: 1_024,
            own_shards: false,
            concurrency: 1_000,
            batch: 64,
            spin: Spin::default(),
            name: "plimsoll".to_owned(),
            retry: Retry::default(),
            batching: Batching::default(),
            old_handler: OldHandler::default(),
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
        self.own_shards = true;
        self
    }

    /// Most records in flight at once, for handlers that are futures and for records that are pulled;
    /// default 1,000, at most 2^20. Unless [`shards`](Self::shards) are given there are 64 times as many
    /// of them, rounded up to a power of two, at least 1,024 and at most 2^20: so few records wait for
    /// another key's.
    pub fn concurrency(mut self, records: usize) -> Self {
        self.concurrency = records;
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

    /// What is done about handlers that still run when their epoch has been closed; default
    /// [`OldHandler::Wait`].
    pub fn old_handler(mut self, policy: OldHandler) -> Self {
        self.old_handler = policy;
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
        within("concurrency", self.concurrency, MOST_CONCURRENCY)?;
        self.retry.check()?;
        self.batching.check()
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
    /// what is there; it waits for more only with a [`linger`](Self::linger).
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
    pub(super) fn assemble<T: Send + 'static>(
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
        if self.batching.bytes.is_some() && handler.size.is_none() {
            let reason = "the size of a record is not known: `Handler::record_bytes` tells it";
            return Err(InvalidSetting::new("batch_bytes", reason));
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
        let batching = self.batching;
        let gathers = !batching.linger.is_zero() && least > 1;
        let groups = batching.groups() && least > 1;
        let recipe = Recipe {
            name: self.name,
            batch,
            least,
            gathers,
            groups: groups.then(|| (batching.of, batching.bytes.unwrap_or(usize::MAX))),
            shards: shards as usize,
        };
        let mut lanes = Vec::with_capacity(workers as usize);
        let mut idle = Vec::with_capacity(workers as usize);
        for _ in 0..workers {
            let made = recipe.make(&handler, &common, 0);
            let (lane, worker) = made.ok_or_else(|| no_memory("workers"))?;
            lanes.push(lane);
            idle.push(worker);
        }
        let executor = Executor {
            lanes,
            recipe,
            retiring: 0,
            stopped: false,
            current: 0,
            shards: boxed(shards, Shard::new).ok_or_else(|| no_memory("shards"))?,
            ready: VecDeque::new(),
            slab: Slab::new(shards).ok_or_else(|| no_memory("shards"))?,
            recalled: Vec::new(),
            epochs: Vec::new(),
            closing: Vec::new(),
            generation: 0,
            common,
            handler,
            retry: self.retry,
            parking: Parking::new(),
            flights: None,
            failures: VecDeque::new(),
            skipped: VecDeque::new(),
            counts: Counts::default(),
            gather: gathers.then(|| Gather::new(batching.linger, batching.bytes)),
            conflation: batching.conflate.then(Conflation::new),
            rates: Rates::new(batching.rate, batching.key_rate),
            old_handler: self.old_handler,
            least,
            last_pass: None,
        };
        Ok((executor, idle))
    }

    /// An executor whose records fly.
    pub(super) fn assemble_flights<T: Send + 'static>(
        mut self,
        waker: Waker,
        launcher: Launcher<T>,
    ) -> Result<Executor<T>, InvalidSetting> {
        self.check()?;
        let concurrency = within("concurrency", self.concurrency, MOST_CONCURRENCY)?;
        if self.batching.conflate {
            let reason = "only handlers on workers can be spared older records";
            return Err(InvalidSetting::new("conflate", reason));
        }
        if !self.own_shards {
            let wanted = concurrency.saturating_mul(SHARDS_PER_FLIGHT).min(FLIGHT_SHARDS.1);
            self.shards = wanted.next_power_of_two().max(FLIGHT_SHARDS.0) as usize;
        }
        // One lane, which stays empty, and a handler that is never called; the hook only says that there
        // is one.
        self.workers = 1;
        let mut unused = Handler::each(|_: &T| ());
        if launcher.buries() {
            unused = unused.dead_letter(|_, _| Ok::<(), String>(()));
        }
        let flights = Flights::new(waker.clone(), launcher, concurrency);
        let (mut executor, _) = self.assemble(waker, unused)?;
        executor.flights = Some(Box::new(flights));
        for lane in &mut executor.lanes {
            lane.place = Place::Vacant;
            lane.set_limits(executor.least);
        }
        Ok(executor)
    }
}

pub(super) fn within(
    setting: &'static str,
    value: usize,
    most: u32,
) -> Result<u32, InvalidSetting> {
    match u32::try_from(value) {
        Ok(fits) if (1..=most).contains(&fits) => Ok(fits),
        _ => Err(InvalidSetting::new(setting, format!("{value} is outside 1..={most}"))),
    }
}
