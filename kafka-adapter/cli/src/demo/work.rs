//! What a handler does: it takes time, drawn from the record itself, so that a run can be repeated.

use std::thread;
use std::time::{Duration, Instant};

/// Below this a sleep would cost more than it is long, so the handler computes instead.
const SHORTEST_SLEEP: Duration = Duration::from_micros(100);

/// How the times of handlers are drawn.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cost {
    seed: u64,
    /// `None`: the mixture of a typical service, see [`Cost::of`].
    range: Option<(Duration, Duration)>,
}

impl Cost {
    /// Most records free, some slow.
    pub(crate) fn mixed(seed: u64) -> Self {
        Self { seed, range: None }
    }

    /// Evenly drawn from `from..=to`.
    pub(crate) fn even(seed: u64, from: Duration, to: Duration) -> Self {
        Self { seed, range: Some((from, to)) }
    }

    /// The longest time that can be drawn.
    pub(crate) fn longest(&self) -> Duration {
        self.range.map_or(Duration::from_millis(20), |(_, to)| to)
    }

    /// Time of the record with this value, which is the `repetition`-th of its key (or of its partition).
    pub(crate) fn of(&self, value: &[u8], repetition: u64) -> Duration {
        let draw = mix(self.seed ^ mix(fnv(value) ^ repetition));
        let even =
            |from: u64, to: u64| Duration::from_micros(from + (draw >> 16) % (to - from + 1));
        match self.range {
            Some((from, to)) => {
                let micros =
                    |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX / 2);
                even(micros(from), micros(to))
            }
            // In ten thousand records: 9,000 free, 800 short computations, 190 waits, 10 long waits.
            None => match draw % 10_000 {
                0..9_000 => Duration::ZERO,
                9_000..9_800 => even(20, 90),
                9_800..9_990 => even(500, 3_000),
                _ => even(5_000, 20_000),
            },
        }
    }
}

/// Takes that long: computing if short, else waiting.
pub(crate) fn perform(time: Duration) {
    if time.is_zero() {
        return;
    }
    if time >= SHORTEST_SLEEP {
        thread::sleep(time);
        return;
    }
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// FNV-1a: small, and the same for ever and everywhere.
pub(crate) fn fnv(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The finaliser of SplitMix64: spreads what FNV leaves in the low bits.
pub(crate) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_depend_on_seed_and_record_alone() {
        let cost = Cost::mixed(7);
        let all = |cost: Cost| (0..500).map(|n| cost.of(b"line", n)).collect::<Vec<_>>();
        assert_eq!(all(cost), all(Cost::mixed(7)));
        assert_ne!(all(cost), all(Cost::mixed(8)));
        assert_ne!(all(cost), (0..500).map(|n| cost.of(b"other", n)).collect::<Vec<_>>());
    }

    #[test]
    fn the_mixture_is_mostly_free_and_sometimes_slow() {
        let cost = Cost::mixed(1);
        let times: Vec<_> = (0..100_000).map(|n| cost.of(b"", n)).collect();
        let free = times.iter().filter(|time| time.is_zero()).count();
        let long = times.iter().filter(|time| **time >= Duration::from_millis(5)).count();
        assert!((89_000..91_000).contains(&free), "{free} free");
        assert!((50..200).contains(&long), "{long} long");
        assert!(times.iter().all(|time| *time <= cost.longest()));
    }

    #[test]
    fn an_even_range_is_used_whole() {
        let us = Duration::from_micros;
        let cost = Cost::even(3, us(10), us(12));
        let times: Vec<_> = (0..200).map(|n| cost.of(b"", n)).collect();
        for time in 10..=12 {
            assert!(times.contains(&us(time)));
        }
        assert!(times.iter().all(|time| (us(10)..=us(12)).contains(time)));
    }
}
