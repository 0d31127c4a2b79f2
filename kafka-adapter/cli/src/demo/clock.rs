//! One clock for the whole run, so that stamps of different threads can be subtracted.

use std::time::Instant;

/// Nanoseconds since the demo's start.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock {
    start: Instant,
}

impl Clock {
    /// Starts at 1, so that 0 can mean "never".
    pub(crate) fn start() -> Self {
        Self { start: Instant::now() }
    }

    /// Nanoseconds since the start, never 0.
    pub(crate) fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX).max(1)
    }
}
