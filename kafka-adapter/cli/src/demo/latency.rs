//! Latencies, recorded by many threads at once.

use std::cell::Cell;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};

use hdrhistogram::Histogram;
use serde::Serialize;

/// Enough that two of the demo's workers seldom meet at one lock.
const SHARDS: usize = 16;

/// Longest latency told apart: an hour, in nanoseconds.
const LONGEST: u64 = 3_600_000_000_000;

/// A histogram in nanoseconds, with three digits.
#[derive(Debug)]
pub(crate) struct Latency {
    shards: Vec<Mutex<Histogram<u64>>>,
}

/// What is reported of a histogram, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Quantiles {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
    pub(crate) max: f64,
}

impl Latency {
    pub(crate) fn new() -> Self {
        Self { shards: (0..SHARDS).map(|_| Mutex::new(empty())).collect() }
    }

    /// Records one latency in nanoseconds.
    pub(crate) fn record(&self, nanos: u64) {
        self.with_shard(|shard| shard.saturating_record(nanos));
    }

    /// Records several at once, under one lock.
    pub(crate) fn record_all(&self, nanos: impl Iterator<Item = u64>) {
        self.with_shard(|shard| nanos.for_each(|nanos| shard.saturating_record(nanos)));
    }

    fn with_shard(&self, record: impl FnOnce(&mut Histogram<u64>)) {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        thread_local! {
            static SHARD: Cell<usize> = Cell::new(NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS);
        }
        let shard = &self.shards[SHARD.get()];
        record(&mut shard.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// All that was recorded so far; all zero if nothing was.
    pub(crate) fn quantiles(&self) -> Quantiles {
        let mut all = empty();
        for shard in &self.shards {
            // Equal bounds and precision: the sum always fits.
            let _ = all.add(&*shard.lock().unwrap_or_else(PoisonError::into_inner));
        }
        // The histogram answers with the upper end of a bucket, which may lie above the largest value recorded.
        let micros = |nanos: u64| nanos.min(all.max()) as f64 / 1_000.0;
        Quantiles {
            p50: micros(all.value_at_quantile(0.5)),
            p99: micros(all.value_at_quantile(0.99)),
            p999: micros(all.value_at_quantile(0.999)),
            max: micros(all.max()),
        }
    }
}

fn empty() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LONGEST, 3)
        .expect("the bounds are constants that the histogram takes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_join_all_threads() {
        let latency = Latency::new();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let latency = &latency;
                scope.spawn(move || {
                    (0..250).for_each(|n| latency.record((thread * 250 + n + 1) * 1_000))
                });
            }
        });
        let quantiles = latency.quantiles();
        let near = |found: f64, expected: f64| {
            assert!((found / expected - 1.0).abs() < 0.002, "{found} {expected}")
        };
        near(quantiles.p50, 500.0);
        near(quantiles.p99, 990.0);
        near(quantiles.p999, 999.0);
        near(quantiles.max, 1000.0);
    }

    #[test]
    fn nothing_recorded_is_zero_and_an_age_is_capped() {
        let latency = Latency::new();
        assert_eq!(latency.quantiles(), Quantiles { p50: 0.0, p99: 0.0, p999: 0.0, max: 0.0 });
        latency.record_all([u64::MAX, 0].into_iter());
        assert!(latency.quantiles().max >= LONGEST as f64 / 1_000.0);
    }
}
