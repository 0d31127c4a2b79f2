//! This project's engine as a [`Contender`], and the loop that drives it, with its default settings.

use std::{
    fmt,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use plimsoll_engine::{
    Batch, BuildError, EpochId, Executor, Failure, IntoBatchOutcome, IntoOutcome, InvalidSetting,
    Retry, Route, Spawn, Task, Waiter,
};

use crate::{
    contender::{Contender, Outcome},
    input::{self, Input},
    tally::Tally,
};

/// Records of one partition that may be admitted and not yet passed by its watermark: the default of the adapter.
pub const WINDOW: u32 = 16_384;
/// How often all watermarks are advanced, as a committer would.
const COMMIT: Duration = Duration::from_millis(1);
/// The longest sleep of the driving thread while records are in the lanes.
const NAP: Duration = Duration::from_micros(150);
/// The longest sleep of the driving thread while there are none: what the adapter's timers allow.
const LONG_NAP: Duration = Duration::from_millis(100);

/// What travels to the handler: of a pointer's size, as a client's message is. It says which record it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handle(u64);

impl Handle {
    /// Bits of the offset; those above are the partition's. Benchmarks have far fewer records and partitions.
    const OFFSET: u32 = 40;

    #[inline]
    pub(crate) fn new(partition: u32, offset: i64) -> Self {
        Self(u64::from(partition) << Self::OFFSET | offset as u64)
    }

    /// The record's partition.
    #[inline]
    #[must_use]
    pub fn partition(self) -> usize {
        (self.0 >> Self::OFFSET) as usize
    }

    /// The record's offset.
    #[inline]
    #[must_use]
    pub fn offset(self) -> usize {
        (self.0 & ((1 << Self::OFFSET) - 1)) as usize
    }
}

/// Why the engine did not take all records through.
#[derive(Debug)]
#[non_exhaustive]
pub enum DriveError {
    /// It could not be set up.
    Build(BuildError),
    /// A handler failed or panicked.
    Failed(Failure),
}

impl fmt::Display for DriveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Build(error) => error.fmt(f),
            Self::Failed(failure) => write!(f, "offset {}: {}", failure.offset, failure.reason),
        }
    }
}

impl std::error::Error for DriveError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Build(error) => Some(error),
            Self::Failed(_) => None,
        }
    }
}

impl From<BuildError> for DriveError {
    fn from(error: BuildError) -> Self {
        Self::Build(error)
    }
}

impl From<InvalidSetting> for DriveError {
    fn from(error: InvalidSetting) -> Self {
        Self::Build(error.into())
    }
}

/// An executor with a window for each partition, and the loop of the thread that drives it.
#[derive(Debug)]
pub struct Driver {
    executor: Executor<Handle>,
    waiter: Waiter,
    epochs: Vec<EpochId>,
    began: Instant,
    next_commit: Duration,
}

impl Driver {
    /// With a handler for one record.
    ///
    /// # Errors
    /// If the engine refuses a setting or a thread cannot be started.
    pub fn each<R: IntoOutcome + 'static>(
        workers: usize,
        partitions: usize,
        handler: impl Fn(Handle) -> R + Send + Sync + 'static,
    ) -> Result<Self, DriveError> {
        let waiter = Waiter::new();
        let handler = move |handle: &Handle| handler(*handle);
        let executor = Executor::builder().workers(workers).each(waiter.waker(), handler)?;
        Self::open(executor, waiter, partitions)
    }

    /// As [`each`](Self::each); records that fail are tried again.
    ///
    /// # Errors
    /// As [`each`](Self::each).
    pub fn retrying<R: IntoOutcome + 'static>(
        workers: usize,
        partitions: usize,
        retry: Retry,
        handler: impl Fn(Handle) -> R + Send + Sync + 'static,
    ) -> Result<Self, DriveError> {
        let waiter = Waiter::new();
        let handler = move |handle: &Handle| handler(*handle);
        let builder = Executor::builder().workers(workers).retry(retry);
        Self::open(builder.each(waiter.waker(), handler)?, waiter, partitions)
    }

    /// With a handler for up to `batch` records.
    ///
    /// # Errors
    /// As [`each`](Self::each).
    pub fn batches<R: IntoBatchOutcome + 'static>(
        workers: usize,
        batch: usize,
        partitions: usize,
        handler: impl Fn(&Batch<'_, Handle>) -> R + Send + Sync + 'static,
    ) -> Result<Self, DriveError> {
        let waiter = Waiter::new();
        let builder = Executor::builder().workers(workers).batch(batch);
        let executor = builder.batches(waiter.waker(), handler)?;
        Self::open(executor, waiter, partitions)
    }

    /// With a future for each record, of which up to `concurrency` run at once.
    ///
    /// # Errors
    /// As [`each`](Self::each).
    pub fn futures<F: Future<Output: IntoOutcome> + Send + 'static>(
        concurrency: usize,
        partitions: usize,
        spawner: impl Spawn + 'static,
        handler: impl Fn(Handle) -> F + Send + Sync + 'static,
    ) -> Result<Self, DriveError> {
        let waiter = Waiter::new();
        // The guard ends with the future, as that of a handler that works on the record does.
        let handler = Arc::new(handler);
        let handler = move |task: Task<Handle>| {
            let handler = Arc::clone(&handler);
            async move { handler(*task).await.into_outcome() }
        };
        let builder = Executor::builder().concurrency(concurrency);
        let executor = builder.futures(waiter.waker(), spawner, handler)?;
        Self::open(executor, waiter, partitions)
    }

    fn open(
        mut executor: Executor<Handle>,
        waiter: Waiter,
        partitions: usize,
    ) -> Result<Self, DriveError> {
        let epochs =
            (0..partitions).map(|_| executor.open(0, WINDOW)).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { executor, waiter, epochs, began: Instant::now(), next_commit: COMMIT })
    }

    /// Takes all of `batches` through; returns how long it took until the last watermark had moved.
    ///
    /// Offsets of a partition go on from one call to the next.
    ///
    /// # Errors
    /// If a handler failed or panicked.
    pub fn drive<'a>(
        &mut self,
        mut batches: impl Iterator<Item = input::Batch<'a>>,
    ) -> Result<Duration, DriveError> {
        let Self { executor, waiter, epochs, began, next_commit } = self;
        let start = Instant::now();
        let mut pending = batches.next();
        loop {
            let now = began.elapsed();
            executor.pass(now);
            if now >= *next_commit {
                *next_commit = now + COMMIT;
                for epoch in &*epochs {
                    executor.progress(*epoch);
                }
            }
            let mut taken = 0;
            if let Some(batch) = &mut pending {
                let epoch = epochs[batch.partition as usize];
                let most = executor.demand().min(executor.room(epoch)) as usize;
                taken = most.min(batch.key_hashes.len());
                let (now, later) = batch.key_hashes.split_at(taken);
                let records = (batch.first..).zip(now).map(|(offset, hash)| {
                    (offset, Route::Ordered(*hash), Handle::new(batch.partition, offset))
                });
                // An epoch that has halted is full rather than closed, and its failure is taken below.
                executor.offer_all(epoch, records).expect("there is room for all of them");
                // At most a batch's length.
                batch.first += taken as i64;
                batch.key_hashes = later;
                if later.is_empty() {
                    pending = batches.next();
                }
            }
            if taken > 0 {
                executor.flush_more();
                continue;
            }
            executor.flush();
            if let Some(failure) = executor.take_failure() {
                return Err(DriveError::Failed(failure));
            }
            if pending.is_none() && !executor.busy() && executor.next_due().is_none() {
                break;
            }
            rest(executor, waiter);
        }
        for epoch in &*epochs {
            executor.progress(*epoch);
        }
        Ok(start.elapsed())
    }

    /// Waits for records that do not come, for the `time`, as the adapter does.
    pub fn idle(&mut self, time: Duration) {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.executor.pass(self.began.elapsed());
            self.executor.flush();
            self.waiter.wait(left.min(LONG_NAP), || self.executor.finished_something());
        }
    }

    /// The watermark of each partition.
    #[must_use]
    pub fn watermarks(&self) -> Vec<i64> {
        let progress = self.epochs.iter().filter_map(|epoch| self.executor.progress(*epoch));
        progress.map(|progress| progress.watermark).collect()
    }
}

/// Looks for something to take back, then sleeps.
fn rest(executor: &Executor<Handle>, waiter: &Waiter) {
    for look in 0..60 {
        if executor.finished_something() {
            return;
        }
        if look < 20 {
            std::hint::spin_loop();
        } else {
            thread::yield_now();
        }
    }
    waiter.wait(NAP, || executor.finished_something());
}

/// A no-op that the compiler cannot remove, and one addition per call to count.
pub(crate) fn counting_no_op(
    handled: &Arc<Tally>,
) -> impl Fn(&Batch<'_, Handle>) + Send + Sync + 'static {
    let handled = Arc::clone(handled);
    move |batch| {
        for record in batch.iter() {
            std::hint::black_box(record.0);
        }
        handled.add(batch.len() as u64);
    }
}

/// The executor, driven by the thread that admits.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ours;

impl Contender for Ours {
    fn name(&self) -> &'static str {
        "ours"
    }

    fn run(&self, input: &Input, workers: usize, batch: usize) -> Outcome {
        assert!(workers > 0 && batch > 0, "{workers} workers, batch {batch}");
        let handled = Arc::new(Tally::new(workers));
        let no_op = counting_no_op(&handled);
        let mut driver = Driver::batches(workers, batch, input.partitions(), no_op)
            .expect("the settings of a benchmark are valid");
        let time = driver.drive(input.batches()).expect("a no-op cannot fail");
        Outcome {
            seconds: time.as_secs_f64(),
            records: handled.total(),
            watermarks: driver.watermarks(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::{
        contender::run_checked,
        input::{DEALT, Flights},
    };

    #[test]
    fn no_op_runs_reach_the_ends() {
        let january = Flights::january().unwrap();
        for partitions in [1, 4, 300] {
            let input = january.dealt(60_000, partitions, partitions);
            for (workers, batch) in [(1, 1), (2, 64), (5, 3)] {
                run_checked(&Ours, &input, workers, batch).unwrap();
            }
        }
    }

    #[test]
    fn a_second_drive_goes_on_where_the_first_ended() {
        let input = Flights::january().unwrap().dealt(40 * DEALT, 8, 4);
        let seen = Arc::new(AtomicU64::new(0));
        let mut driver = Driver::each(2, 4, {
            let seen = Arc::clone(&seen);
            move |handle: Handle| {
                seen.fetch_add((handle.partition() + handle.offset()) as u64, Ordering::Relaxed);
            }
        })
        .unwrap();
        let mut batches = input.batches();
        driver.drive(batches.by_ref().take(21)).unwrap();
        let reached = driver.watermarks().iter().sum::<i64>();
        assert_eq!(reached, 21 * DEALT as i64);
        driver.drive(batches).unwrap();
        assert_eq!(driver.watermarks(), input.ends());
        let sum = input.iter().map(|record| u64::from(record.partition) + record.offset as u64);
        assert_eq!(seen.load(Ordering::Relaxed), sum.sum::<u64>());
    }

    #[test]
    fn a_failed_handler_ends_the_drive() {
        let input = Flights::january().unwrap().input(60_000, 4);
        let fail = |handle: Handle| {
            if handle.offset() == 700 { Err("not this one") } else { Ok(()) }
        };
        let error = Driver::each(2, 4, fail).unwrap().drive(input.batches()).unwrap_err();
        assert!(error.to_string().contains("offset 700: not this one"), "{error}");
    }

    #[test]
    fn idling_takes_its_time_and_no_longer() {
        let mut driver = Driver::each(1, 1, |_| ()).unwrap();
        let start = Instant::now();
        driver.idle(Duration::from_millis(30));
        let idled = start.elapsed();
        assert!(idled >= Duration::from_millis(30) && idled < Duration::from_secs(20), "{idled:?}");
    }
}
