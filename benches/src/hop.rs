//! Latency of one cache line between two cores.
//!
//! All designs here move cache lines between cores, so this latency sets their speed. It differs by a factor of ten
//! between machines, and on virtual machines between moments. Printed with each ratio it tells whether two ratios were
//! measured under like conditions.

use std::{
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Instant,
};

use crossbeam_utils::CachePadded;

use crate::measure::Summary;

const SAMPLES: usize = 301;
const ROUND_TRIPS: u32 = 100;
/// After so many looks in vain the other thread is presumably not running, and needs this core.
const PATIENCE: u32 = 50_000;

/// Measures the median one-way latency in nanoseconds: a store of one thread until a thread on another core sees it.
///
/// Takes a few milliseconds. On Linux the two threads are pinned to the first and the last core that this process may
/// use; elsewhere the scheduler places them. `None` if there is only one core.
#[must_use]
pub fn one_way_ns() -> Option<f64> {
    let cores = pin::first_and_last()?;
    let turn = CachePadded::new(AtomicU32::new(0));
    let turns = u32::try_from(SAMPLES).ok()? * ROUND_TRIPS;

    let samples = thread::scope(|scope| {
        scope.spawn(|| {
            pin::to(cores.1);
            for i in 0..turns {
                wait_for(&turn, 2 * i + 1);
                turn.store(2 * i + 2, Ordering::Release);
            }
        });
        let near = scope.spawn(|| {
            pin::to(cores.0);
            let mut next = 0;
            let sample = |_| {
                let start = Instant::now();
                for _ in 0..ROUND_TRIPS {
                    turn.store(next + 1, Ordering::Release);
                    wait_for(&turn, next + 2);
                    next += 2;
                }
                start.elapsed().as_secs_f64() * 1e9 / f64::from(2 * ROUND_TRIPS)
            };
            (0..SAMPLES).map(sample).collect::<Vec<_>>()
        });
        near.join()
    });
    Some(Summary::of(&samples.ok()?).median)
}

fn wait_for(turn: &AtomicU32, value: u32) {
    // Without a pause instruction, whose length would be part of the latency.
    let mut looks = 0;
    while turn.load(Ordering::Acquire) != value {
        looks += 1;
        if looks == PATIENCE {
            looks = 0;
            thread::yield_now();
        }
    }
}

#[cfg(target_os = "linux")]
mod pin {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    pub(super) fn first_and_last() -> Option<(usize, usize)> {
        let allowed = sched_getaffinity(None).ok()?;
        let mut cores = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core));
        let first = cores.next()?;
        Some((first, cores.next_back()?))
    }

    /// Pins the calling thread. If that fails, the scheduler goes on placing it, as for the contenders.
    pub(super) fn to(core: usize) {
        let mut only = CpuSet::new();
        only.set(core);
        let _ = sched_setaffinity(None, &only);
    }
}

#[cfg(not(target_os = "linux"))]
mod pin {
    pub(super) fn first_and_last() -> Option<(usize, usize)> {
        let cores = std::thread::available_parallelism().ok()?.get();
        (cores > 1).then(|| (0, cores - 1))
    }

    pub(super) fn to(_core: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hop_takes_a_plausible_time() {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        match one_way_ns() {
            None => assert_eq!(cores, 1, "not measured in spite of several cores"),
            // Far above what any machine needs, since others may be using its cores.
            Some(ns) => assert!(ns > 1.0 && ns < 1e6, "{ns} ns"),
        }
    }
}
