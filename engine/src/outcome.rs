//! How a record's handling ends.

use std::fmt::Display;

/// How one handler call ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The records took effect; the watermark may pass them.
    Done,
    /// They did not, for this reason: the epoch halts, the watermark stays below them.
    Failed(String),
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

/// An error is a failure whose reason is the error's text.
impl<E: Display> IntoOutcome for Result<(), E> {
    #[inline]
    fn into_outcome(self) -> Outcome {
        match self {
            Ok(()) => Outcome::Done,
            Err(error) => Outcome::Failed(error.to_string()),
        }
    }
}
