//! How a record's handling ends.

use std::fmt::Display;
use std::time::Duration;

/// How one handler call ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The records took effect; the watermark may pass them.
    Done,
    /// They are passed over on purpose, for this reason: counted, and the watermark may pass them.
    Skip(String),
    /// A failed attempt, for this reason. The [`Retry`](crate::Retry) policy says when the next one
    /// is, and what happens after the last.
    Failed(String),
    /// A failed attempt that is to be repeated after this time instead of the policy's; at once if
    /// it is zero. It counts as an attempt.
    RetryAfter(Duration, String),
    /// No further attempt: the record goes to the dead-letter hook, for this reason. Without a hook
    /// the epoch halts.
    DeadLetter(String),
    /// No further attempt: the epoch halts at this record, for this reason.
    Halt(String),
}

/// What a handler may return: nothing, a `Result`, or an [`Outcome`].
pub trait IntoOutcome {
    /// The outcome it stands for.
    fn into_outcome(self) -> Outcome;
}

impl IntoOutcome for Outcome {
    fn into_outcome(self) -> Outcome {
        self
    }
}

/// A handler that returns nothing is done when it returns.
impl IntoOutcome for () {
    #[inline(always)]
    fn into_outcome(self) -> Outcome {
        Outcome::Done
    }
}

/// An error is a failed attempt whose reason is the error's text.
impl<E: Display> IntoOutcome for Result<(), E> {
    #[inline]
    fn into_outcome(self) -> Outcome {
        match self {
            Ok(()) => Outcome::Done,
            Err(error) => Outcome::Failed(error.to_string()),
        }
    }
}

/// How the records of one batch ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum BatchOutcome {
    /// All in the same way.
    All(Outcome),
    /// The first ones took effect, the next one ended as given, and those behind it were not
    /// handled: they come again, without an attempt being counted. A count of all records or more
    /// means that all took effect.
    Prefix(usize, Outcome),
    /// Each in its own way, in the order of the batch. Records without an outcome have failed.
    ///
    /// Of two records of one key a failed one must not come before one that is done: what took
    /// effect cannot be taken back, so the engine counts it as done, out of order.
    Each(Vec<Outcome>),
}

impl BatchOutcome {
    /// The outcome of each record, without end; `None` for one that was not handled.
    pub(crate) fn each(self) -> impl Iterator<Item = Option<Outcome>> {
        let (list, all) = match self {
            BatchOutcome::All(outcome) => (Vec::new(), Some(outcome)),
            BatchOutcome::Prefix(done, outcome) => {
                // A batch is at most so long.
                let done = done.min(crate::dispatch::MOST_BATCH as usize);
                let mut list = vec![Outcome::Done; done];
                list.push(outcome);
                (list, None)
            }
            BatchOutcome::Each(list) => {
                let none = "the handler gave no outcome for the record";
                (list, Some(Outcome::Failed(none.to_owned())))
            }
        };
        list.into_iter().map(Some).chain(std::iter::repeat(all))
    }
}

/// What a batch handler may return: nothing, a `Result`, an [`Outcome`] for all records, a `Vec` of
/// one for each, or a [`BatchOutcome`].
pub trait IntoBatchOutcome {
    /// The outcome it stands for.
    fn into_batch_outcome(self) -> BatchOutcome;
}

impl IntoBatchOutcome for BatchOutcome {
    fn into_batch_outcome(self) -> BatchOutcome {
        self
    }
}

impl IntoBatchOutcome for Vec<Outcome> {
    fn into_batch_outcome(self) -> BatchOutcome {
        BatchOutcome::Each(self)
    }
}

impl IntoBatchOutcome for Outcome {
    fn into_batch_outcome(self) -> BatchOutcome {
        BatchOutcome::All(self)
    }
}

impl IntoBatchOutcome for () {
    #[inline(always)]
    fn into_batch_outcome(self) -> BatchOutcome {
        BatchOutcome::All(Outcome::Done)
    }
}

impl<E: Display> IntoBatchOutcome for Result<(), E> {
    #[inline]
    fn into_batch_outcome(self) -> BatchOutcome {
        BatchOutcome::All(self.into_outcome())
    }
}
