//! Paired, interleaved measurement.
//!
//! The speed of a machine drifts: clock, placement of threads, neighbours. So two things are never measured one after
//! the other, but in turn (A B A B ...), a ratio is taken within each pair, and the median of these ratios is the
//! figure. The least and the greatest ratio are kept, for a median alone hides how sure it is.
//!
//! On a virtual machine the host sometimes runs something else in our place ("steal" in `/proc/stat`). A run of some
//! ten milliseconds that loses one of them says nothing, so a pair in which the host took time is measured again, a
//! limited number of times; how many were is part of the result. The same goes for a pair in which the scheduler left a core
//! idle.

use std::{convert::Infallible, time::Duration};

use rustix::time::{ClockId, clock_gettime};

/// Median, least and greatest of some values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// The middle value, or the mean of the two middle ones.
    pub median: f64,
    /// The least value.
    pub min: f64,
    /// The greatest value.
    pub max: f64,
}

impl Summary {
    /// Sums up `values`.
    ///
    /// # Panics
    /// If there is no value.
    #[must_use]
    pub fn of(values: &[f64]) -> Self {
        assert!(!values.is_empty(), "a summary needs a value");
        let mut sorted = values.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let last = sorted.len() - 1;
        Self {
            median: f64::midpoint(sorted[last / 2], sorted[sorted.len() / 2]),
            min: sorted[0],
            max: sorted[last],
        }
    }
}

/// Result of [`paired`].
#[derive(Clone, Debug)]
pub struct Pairs {
    /// First value divided by second value, of each pair.
    pub ratio: Summary,
    /// The first values.
    pub first: Summary,
    /// The second values.
    pub second: Summary,
    /// Pairs that were measured again because they were disturbed: mostly because the host took time during them.
    pub set_aside: usize,
    /// Pairs that count although they were disturbed, since hardly any were not.
    pub disturbed: usize,
}

/// How many pairs are measured at most, for each that shall count.
const MOST_TRIES: usize = 4;

/// Whether a run had about one core only: a scheduler may pack all threads of a process on one core and leave the other
/// idle, for minutes. Threads that are hardly ever without work use far more in that time on two cores.
pub(crate) fn was_packed(cpu: Duration, wall: Duration) -> bool {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    cores > 1 && cpu < wall.mul_f64(1.25)
}

/// Takes `rounds` pairs of values in turn, after one uncounted pair.
///
/// At least one round is taken. A pair during which the host took processor time away is taken again, as long as no more
/// than four times the rounds are taken.
///
/// # Errors
/// The first error of `first` or `second`.
pub fn try_paired<E>(
    rounds: usize,
    first: impl FnMut() -> Result<f64, E>,
    second: impl FnMut() -> Result<f64, E>,
) -> Result<Pairs, E> {
    try_paired_while(stolen_ticks, rounds, first, second)
}

/// [`try_paired`] with another sign that a pair was disturbed: that this counter has moved.
pub(crate) fn try_paired_while<E>(
    mut disturbances: impl FnMut() -> u64,
    rounds: usize,
    mut first: impl FnMut() -> Result<f64, E>,
    mut second: impl FnMut() -> Result<f64, E>,
) -> Result<Pairs, E> {
    // The uncounted pair pages memory in and wakes the clock of the processor up.
    first()?;
    second()?;
    let rounds = rounds.max(1);
    let (mut pairs, mut disturbed) = (Vec::new(), Vec::new());
    while pairs.len() < rounds && pairs.len() + disturbed.len() < rounds * MOST_TRIES {
        let before = disturbances();
        let pair = (first()?, second()?);
        if disturbances() == before { &mut pairs } else { &mut disturbed }.push(pair);
    }
    let missing = rounds - pairs.len();
    let set_aside = disturbed.len() - missing;
    pairs.extend(disturbed.into_iter().take(missing));
    let summary =
        |of: fn(&(f64, f64)) -> f64| Summary::of(&pairs.iter().map(of).collect::<Vec<_>>());
    Ok(Pairs {
        ratio: summary(|pair| pair.0 / pair.1),
        first: summary(|pair| pair.0),
        second: summary(|pair| pair.1),
        set_aside,
        disturbed: missing,
    })
}

/// Processor time the host has taken from all processors of this machine, in ticks (mostly 10 ms); 0 where that is not
/// known.
pub(crate) fn stolen_ticks() -> u64 {
    let steal = |text: String| text.lines().next()?.split_whitespace().nth(8)?.parse().ok();
    std::fs::read_to_string("/proc/stat").ok().and_then(steal).unwrap_or_default()
}

/// [`try_paired`] for values that cannot fail.
pub fn paired(
    rounds: usize,
    mut first: impl FnMut() -> f64,
    mut second: impl FnMut() -> f64,
) -> Pairs {
    match try_paired::<Infallible>(rounds, || Ok(first()), || Ok(second())) {
        Ok(pairs) => pairs,
        Err(never) => match never {},
    }
}

/// Processor time that all threads of this process have used so far, in user and kernel mode.
#[must_use]
pub fn process_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    // The clock counts from 0 upwards and its nanoseconds stay below a second.
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or_default(),
        u32::try_from(time.tv_nsec).unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use std::{
        cell::RefCell,
        thread,
        time::{Duration, Instant},
    };

    use super::*;

    #[test]
    fn summary_of_odd_and_even() {
        let odd = Summary::of(&[9.0, 1.0, 2.0]);
        assert_eq!((odd.min, odd.median, odd.max), (1.0, 2.0, 9.0));
        let even = Summary::of(&[4.0, 1.0, 2.0, 9.0]);
        assert_eq!((even.min, even.median, even.max), (1.0, 3.0, 9.0));
    }

    #[test]
    fn pairs_interleave_and_divide_within_the_pair() {
        let order = RefCell::new(String::new());
        let count = RefCell::new(0.0);
        let pairs = paired(
            3,
            || {
                order.borrow_mut().push('a');
                *count.borrow_mut() += 1.0;
                *count.borrow() * 10.0
            },
            || {
                order.borrow_mut().push('b');
                *count.borrow()
            },
        );
        assert_eq!(*order.borrow(), "abababab");
        assert_eq!(
            (pairs.ratio.min, pairs.ratio.median, pairs.ratio.max),
            (10.0, 10.0, 10.0),
            "drift of the values must not show in the ratio"
        );
        // The first pair, 10 and 1, does not count.
        assert_eq!((pairs.first.min, pairs.first.max), (20.0, 40.0));
        assert_eq!((pairs.second.min, pairs.second.max), (2.0, 4.0));
    }

    #[test]
    fn disturbed_pairs_are_taken_again_but_not_for_ever() {
        // Of the pairs after the uncounted one, the first and the third are disturbed.
        let (taken, ticks) = (RefCell::new(0), RefCell::new(0));
        let pairs = |disturbed: fn(u64) -> bool| {
            (*taken.borrow_mut(), *ticks.borrow_mut()) = (0, 0);
            try_paired_while::<Infallible>(
                || *ticks.borrow(),
                3,
                || {
                    *taken.borrow_mut() += 1;
                    *ticks.borrow_mut() += u64::from(disturbed(*taken.borrow() - 1));
                    Ok(*taken.borrow() as f64)
                },
                || Ok(1.0),
            )
            .unwrap()
        };
        let some = pairs(|pair| pair == 1 || pair == 3);
        assert_eq!((some.set_aside, some.disturbed, *taken.borrow()), (2, 0, 6));
        assert_eq!((some.first.min, some.first.median, some.first.max), (3.0, 5.0, 6.0));
        // All are: the first three count, of twelve.
        let all = pairs(|_| true);
        assert_eq!((all.set_aside, all.disturbed, *taken.borrow()), (9, 3, 13));
        assert_eq!((all.first.min, all.first.max), (2.0, 4.0));
        // All but one are: that one counts, and the first two of the others.
        let one = pairs(|pair| pair != 5);
        assert_eq!((one.set_aside, one.disturbed), (9, 2));
        assert_eq!((one.first.min, one.first.median, one.first.max), (2.0, 3.0, 6.0));
    }

    #[test]
    fn one_busy_core_of_several_is_packed() {
        let several = thread::available_parallelism().map_or(1, usize::from) > 1;
        let packed = |cpu| was_packed(Duration::from_millis(cpu), Duration::from_millis(100));
        assert_eq!((packed(105), packed(124)), (several, several));
        assert!(!packed(126) && !packed(195));
    }

    #[test]
    fn the_first_error_ends_the_rounds() {
        let calls = RefCell::new(0);
        let result = try_paired(
            9,
            || {
                *calls.borrow_mut() += 1;
                if *calls.borrow() == 3 { Err("third") } else { Ok(1.0) }
            },
            || Ok(1.0),
        );
        assert_eq!(result.unwrap_err(), "third");
        assert_eq!(*calls.borrow(), 3);
    }

    #[test]
    fn cpu_time_counts_work_of_all_threads() {
        let before = process_cpu_time();
        let spin = || {
            let start = process_cpu_time();
            let wall = Instant::now();
            while process_cpu_time() - start < Duration::from_millis(20)
                && wall.elapsed() < Duration::from_secs(20)
            {}
        };
        thread::scope(|scope| {
            scope.spawn(spin);
        });
        assert!(process_cpu_time() - before >= Duration::from_millis(20));
    }
}
