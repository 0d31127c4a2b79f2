//! What every design under test has in common.

use std::{fmt, hint::black_box};

use crate::input::{Input, Record};

/// A design under test, with its settings.
pub trait Contender: Sync {
    /// A short name for tables.
    fn name(&self) -> &'static str;

    /// Takes all of `input` through `workers` workers with a handler that does nothing, at most `batch` records a call.
    ///
    /// The time runs from the first record until the watermark of every partition has reached its end. Starting
    /// threads and allocating what is allocated once is not part of it.
    ///
    /// # Panics
    /// If `workers` or `batch` is 0.
    fn run(&self, input: &Input, workers: usize, batch: usize) -> Outcome;
}

/// The result of one run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Length of the timed part in seconds.
    pub seconds: f64,
    /// Number of records that the handler has seen.
    pub records: u64,
    /// Per partition the final watermark: the next offset to read after a restart.
    pub watermarks: Vec<i64>,
}

impl Outcome {
    /// Wall-clock time per record in nanoseconds.
    #[must_use]
    pub fn ns_per_record(&self) -> f64 {
        self.seconds * 1e9 / self.records as f64
    }
}

/// A run that lost or repeated records, or did not commit to the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongOutcome {
    contender: &'static str,
    expected: (u64, Vec<i64>),
    actual: (u64, Vec<i64>),
}

impl fmt::Display for WrongOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Of a thousand partitions only those that differ.
        let partitions = self.actual.1.iter().zip(&self.expected.1).enumerate();
        let wrong: Vec<_> = partitions
            .filter(|(_, (actual, expected))| actual != expected)
            .map(|(partition, (actual, expected))| format!("{partition}: {actual} of {expected}"))
            .take(8)
            .collect();
        write!(
            f,
            "{}: {} records of {} handled; watermarks that fall short, by partition: [{}]",
            self.contender,
            self.actual.0,
            self.expected.0,
            wrong.join(", ")
        )
    }
}

impl std::error::Error for WrongOutcome {}

/// Runs a contender and checks that it did all of the work. A time is worth nothing without this.
///
/// # Errors
/// If the number of handled records or the final watermark of a partition is not that of the input.
pub fn run_checked(
    contender: &dyn Contender,
    input: &Input,
    workers: usize,
    batch: usize,
) -> Result<Outcome, WrongOutcome> {
    let outcome = contender.run(input, workers, batch);
    check(contender.name(), input, outcome)
}

/// The outcome, if it is one of a run over all of `input`.
///
/// # Errors
/// As [`run_checked`].
pub(crate) fn check(
    contender: &'static str,
    input: &Input,
    outcome: Outcome,
) -> Result<Outcome, WrongOutcome> {
    let expected = (input.len() as u64, input.ends().to_vec());
    if outcome.records == expected.0 && outcome.watermarks == expected.1 {
        Ok(outcome)
    } else {
        Err(WrongOutcome { contender, expected, actual: (outcome.records, outcome.watermarks) })
    }
}

/// The handler that does nothing, but has to be called.
pub fn no_op(batch: &[Record]) {
    black_box(batch);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::Flights;

    struct Liar {
        records: u64,
        short_by: i64,
    }

    impl Contender for Liar {
        fn name(&self) -> &'static str {
            "liar"
        }

        fn run(&self, input: &Input, _: usize, _: usize) -> Outcome {
            let mut watermarks = input.ends().to_vec();
            watermarks[3] -= self.short_by;
            Outcome { seconds: 1e-3, records: self.records, watermarks }
        }
    }

    #[test]
    fn a_run_that_did_not_finish_is_refused() {
        let input = Flights::january().unwrap().input(1_000, 4);
        let run = |records, short_by| run_checked(&Liar { records, short_by }, &input, 2, 64);
        let outcome = run(1_000, 0).unwrap();
        assert!((outcome.ns_per_record() - 1_000.0).abs() < 1e-6);
        assert!(run(1_000, 1).unwrap_err().to_string().contains("liar"));
        assert!(run(999, 0).is_err(), "a lost record");
        assert!(run(1_001, 0).is_err(), "a repeated record");
    }
}
