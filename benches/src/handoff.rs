//! How long it takes until a sleeping worker handles a record, beside a bare channel with a sleeping receiver.
//!
//! One record at a time, with a pause before each that is long enough for the receiving thread to sleep. What is
//! measured is mostly how long the system needs to wake a thread; the channel shows how long that is.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::bounded;
use plimsoll_engine::{Executor, Route, Waiter};

use crate::ours::{DriveError, WINDOW};

/// After so long a record counts as lost.
const LOST: Duration = Duration::from_secs(10);

/// Why there is no latency.
#[derive(Debug)]
#[non_exhaustive]
pub enum HandoffError {
    /// The engine could not be set up.
    Drive(DriveError),
    /// A record was not received, or not passed by the watermark.
    Lost(usize),
}

impl fmt::Display for HandoffError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drive(error) => error.fmt(f),
            Self::Lost(record) => write!(f, "record {record} was lost on its way"),
        }
    }
}

impl std::error::Error for HandoffError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Drive(error) => Some(error),
            Self::Lost(_) => None,
        }
    }
}

impl<E: Into<DriveError>> From<E> for HandoffError {
    fn from(error: E) -> Self {
        Self::Drive(error.into())
    }
}

/// A clock that both sides read, and the latency of the record on its way.
#[derive(Clone, Debug)]
struct Stopwatch {
    base: Instant,
    /// In nanoseconds; 0 as long as the record has not been received.
    took: Arc<AtomicU64>,
}

impl Stopwatch {
    fn new() -> Self {
        Self { base: Instant::now(), took: Arc::default() }
    }

    /// Nanoseconds since the base; centuries of them fit.
    fn now(&self) -> u64 {
        self.base.elapsed().as_nanos() as u64
    }

    fn received(&self, sent: u64) {
        let took = self.now().saturating_sub(sent).max(1);
        // Release: pairs with the Acquire in `rounds`, for what the receiver did before.
        self.took.store(took, Ordering::Release);
    }

    /// Sends `count` records after a pause each; returns their latencies.
    fn rounds(
        &self,
        count: usize,
        pause: Duration,
        mut send: impl FnMut(usize) -> Result<(), HandoffError>,
    ) -> Result<Vec<u64>, HandoffError> {
        let mut latencies = Vec::with_capacity(count);
        for record in 0..count {
            thread::sleep(pause);
            send(record)?;
            // Not by looking at `took`: a thread that keeps looking changes how fast the other one wakes.
            thread::sleep(pause / 4);
            let sent = Instant::now();
            let took = loop {
                match self.took.swap(0, Ordering::Acquire) {
                    0 if sent.elapsed() > LOST => return Err(HandoffError::Lost(record)),
                    0 => thread::yield_now(),
                    took => break took,
                }
            };
            latencies.push(took);
        }
        Ok(latencies)
    }
}

/// Latencies in nanoseconds from the admission of a record to the start of its handler.
///
/// # Errors
/// If the engine cannot be set up, or a record is lost.
pub fn ours(count: usize, pause: Duration) -> Result<Vec<u64>, HandoffError> {
    let (waiter, watch) = (Waiter::new(), Stopwatch::new());
    let mut executor = Executor::builder().each(waiter.waker(), {
        let watch = watch.clone();
        move |sent: &u64| watch.received(*sent)
    })?;
    let epoch = executor.open(0, WINDOW)?;
    let latencies = watch.rounds(count, pause, |record| {
        executor.pass(watch.base.elapsed());
        executor.progress(epoch);
        let sent = watch.now();
        // All of one key, whose handlers may run anywhere as the one before has ended. Records are few.
        executor
            .offer(epoch, record as i64, Route::Ordered(0), sent)
            .map_err(|_| HandoffError::Lost(record))?;
        executor.flush();
        Ok(())
    })?;
    // The handler of the last record has begun, but need not have ended.
    let began = Instant::now();
    loop {
        let passed = executor.progress(epoch).map_or(0, |progress| progress.watermark);
        if passed == count as i64 {
            return Ok(latencies);
        }
        if began.elapsed() > LOST {
            return Err(HandoffError::Lost(passed as usize));
        }
        thread::yield_now();
    }
}

/// Latencies in nanoseconds from the sending of a number to the return of `recv`.
///
/// # Errors
/// If a number is lost.
pub fn channel(count: usize, pause: Duration) -> Result<Vec<u64>, HandoffError> {
    let watch = Stopwatch::new();
    let (sender, receiver) = bounded::<u64>(1_024);
    thread::scope(|scope| {
        scope.spawn(|| receiver.iter().for_each(|sent| watch.received(sent)));
        // Goes when this ends, and with it the receiving thread.
        let sender = sender;
        watch.rounds(count, pause, |record| {
            sender.send(watch.now()).map_err(|_| HandoffError::Lost(record))
        })
    })
}

/// The value that 99 % of `values` do not exceed.
///
/// # Panics
/// If there is no value.
#[must_use]
pub fn p99(mut values: Vec<u64>) -> u64 {
    assert!(!values.is_empty(), "a percentile needs a value");
    values.sort_unstable();
    values[(values.len() * 99).div_ceil(100) - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_99th_percentile() {
        assert_eq!(p99(vec![7]), 7);
        assert_eq!(p99((1..=100).rev().collect()), 99);
        assert_eq!(p99((1..=1_000).collect()), 990);
        assert_eq!(p99((1..=99).collect()), 99);
    }

    #[test]
    fn both_hand_over_all_records_in_a_plausible_time() {
        let pause = Duration::from_micros(200);
        for latencies in [ours(50, pause).unwrap(), channel(50, pause).unwrap()] {
            assert_eq!(latencies.len(), 50);
            assert!(latencies.iter().all(|&ns| ns < 10_000_000_000), "{latencies:?}");
            assert!(latencies.iter().any(|&ns| ns > 100), "{latencies:?}");
        }
    }

    #[test]
    fn a_lost_record_is_named() {
        // The deadline is long, so a send that fails stands for one.
        let lost =
            Stopwatch::new().rounds(3, Duration::ZERO, |record| Err(HandoffError::Lost(record)));
        assert!(lost.unwrap_err().to_string().contains("record 0"));
    }
}
