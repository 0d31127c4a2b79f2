//! When a failed record is tried again, and what becomes of it after the last attempt.

use crate::error::InvalidSetting;
use std::time::Duration;

/// What becomes of a record whose attempts are used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Exhausted {
    /// The epoch halts at the record: nothing of it starts any more, the watermark stays below it,
    /// and [`Executor::take_failure`](crate::Executor::take_failure) names it. Other epochs go on.
    #[default]
    Halt,
    /// The record is passed over and counted.
    Skip,
    /// The record goes to the dead-letter hook; it is finished when the hook succeeds.
    DeadLetter,
    /// As `DeadLetter`, and so do all later records of its key, in order and one at a time, until
    /// the key is [released](crate::Executor::release).
    Quarantine,
}

impl Exhausted {
    pub(crate) fn needs_hook(self) -> bool {
        matches!(self, Exhausted::DeadLetter | Exhausted::Quarantine)
    }
}

/// When a failed record is tried again.
///
/// The delay before the second attempt is `first`, and each further one `factor` times the one
/// before, at most `cap`. Of each delay a random part, up to `jitter`, is taken off, so that keys
/// that failed together do not come back together.
///
/// ```
/// use plimsoll_engine::{Exhausted, Retry};
/// use std::time::Duration;
///
/// let retry = Retry::times(5).first(Duration::from_millis(10)).then(Exhausted::DeadLetter);
/// assert_eq!(retry.delay(1, 0.0), Some(Duration::from_millis(10)));
/// assert_eq!(retry.delay(4, 0.0), Some(Duration::from_millis(80)));
/// assert_eq!(retry.delay(5, 0.0), None); // the fifth attempt was the last
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Retry {
    attempts: u32,
    first: Duration,
    factor: f64,
    cap: Duration,
    jitter: f64,
    pub(crate) then: Exhausted,
}

impl Default for Retry {
    fn default() -> Self {
        Self::never()
    }
}

impl Retry {
    /// One attempt: a failed record is exhausted at once. The default, with [`Exhausted::Halt`].
    pub fn never() -> Self {
        Self::times(1)
    }

    /// At most `attempts` attempts, the first one included.
    pub fn times(attempts: u32) -> Self {
        Retry {
            attempts,
            first: Duration::from_millis(100),
            factor: 2.0,
            cap: Duration::from_secs(60),
            jitter: 0.2,
            then: Exhausted::default(),
        }
    }

    /// As many attempts as it takes.
    pub fn forever() -> Self {
        Self::times(u32::MAX)
    }

    /// Delay before the second attempt; default 100 ms.
    pub fn first(mut self, delay: Duration) -> Self {
        self.first = delay;
        self
    }

    /// How much longer each delay is than the one before; default 2, at least 1.
    pub fn factor(mut self, factor: f64) -> Self {
        self.factor = factor;
        self
    }

    /// The longest delay; default 60 s.
    pub fn cap(mut self, cap: Duration) -> Self {
        self.cap = cap;
        self
    }

    /// The part of a delay that may randomly be taken off, `0.0..=1.0`; default 0.2.
    pub fn jitter(mut self, part: f64) -> Self {
        self.jitter = part;
        self
    }

    /// What becomes of a record whose attempts are used up; default [`Exhausted::Halt`].
    pub fn then(mut self, exhausted: Exhausted) -> Self {
        self.then = exhausted;
        self
    }

    pub(crate) fn check(&self) -> Result<(), InvalidSetting> {
        if self.attempts == 0 {
            return Err(InvalidSetting::new("retry", "at least 1 attempt"));
        }
        if !(self.factor >= 1.0 && self.factor.is_finite()) {
            let reason = format!("the factor {} is below 1 or not finite", self.factor);
            return Err(InvalidSetting::new("retry", reason));
        }
        if !(0.0..=1.0).contains(&self.jitter) {
            let reason = format!("the jitter {} is outside 0..=1", self.jitter);
            return Err(InvalidSetting::new("retry", reason));
        }
        Ok(())
    }

    /// Delay after `failed` failed attempts, for a `random` number in `0.0..1.0`; `None` when that
    /// was the last one.
    pub fn delay(&self, failed: u32, random: f64) -> Option<Duration> {
        if failed >= self.attempts && self.attempts != u32::MAX {
            return None;
        }
        Some(self.backoff(failed, random))
    }

    /// As [`delay`](Self::delay), for something that is repeated until it succeeds.
    pub(crate) fn backoff(&self, failed: u32, random: f64) -> Duration {
        // Saturates at infinity, which the cap bounds.
        let exponent = i32::try_from(failed.saturating_sub(1)).unwrap_or(i32::MAX);
        let seconds = self.first.as_secs_f64() * self.factor.powi(exponent);
        // `0 * inf` is not a number; a first delay of zero stays zero.
        let seconds = if self.first.is_zero() { 0.0 } else { seconds };
        let capped = seconds.min(self.cap.as_secs_f64());
        let less = capped * self.jitter * random.clamp(0.0, 1.0);
        Duration::try_from_secs_f64(capped - less).unwrap_or(self.cap)
    }
}

/// Which attempt a handler is called for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attempt {
    /// From 1.
    pub number: u32,
    /// When the first attempt failed, in the time of [`Executor::pass`](crate::Executor::pass);
    /// `None` for the first attempt.
    pub first_failure: Option<Duration>,
}

impl Attempt {
    pub(crate) const FIRST: Attempt = Attempt { number: 1, first_failure: None };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_to_the_cap_and_never_overflow() {
        let retry = Retry::forever().first(Duration::from_millis(10)).cap(Duration::from_secs(1));
        let delays: Vec<_> = [1, 2, 3, 7, 8, 1_000, u32::MAX]
            .map(|failed| retry.delay(failed, 0.0).unwrap().as_millis())
            .into();
        assert_eq!(delays, [10, 20, 40, 640, 1_000, 1_000, 1_000]);
        let longest = Retry::forever().first(Duration::MAX).cap(Duration::MAX).factor(1e300);
        assert_eq!(longest.delay(u32::MAX, 0.0), Some(Duration::MAX));
        let zero = Retry::forever().first(Duration::ZERO).factor(1e300);
        assert_eq!(zero.delay(u32::MAX, 0.5), Some(Duration::ZERO));
    }

    #[test]
    fn jitter_takes_off_at_most_its_part() {
        let retry = Retry::times(3).first(Duration::from_secs(1)).jitter(0.2);
        assert_eq!(retry.delay(1, 0.0), Some(Duration::from_secs(1)));
        assert_eq!(retry.delay(1, 1.0), Some(Duration::from_millis(800)));
        assert_eq!(retry.delay(3, 0.0), None);
    }

    #[test]
    fn settings_that_mean_nothing_are_refused() {
        for bad in [
            Retry::times(0),
            Retry::times(2).factor(0.5),
            Retry::times(2).factor(f64::NAN),
            Retry::times(2).factor(f64::INFINITY),
            Retry::times(2).jitter(-0.1),
            Retry::times(2).jitter(1.1),
            Retry::times(2).jitter(f64::NAN),
        ] {
            assert_eq!(bad.check().unwrap_err().setting, "retry", "{bad:?}");
        }
        Retry::never().check().unwrap();
    }
}
