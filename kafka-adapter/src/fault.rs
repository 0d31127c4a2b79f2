//! Planted faults: a test proves that the checks find what they are there to find.
//!
//! Without the feature `planted-faults` nothing of it is compiled in.

#[cfg(not(feature = "planted-faults"))]
mod none {
    use plimsoll_engine::Progress;

    /// No fault.
    #[derive(Debug, Clone)]
    pub(crate) struct Planted;

    impl Planted {
        pub(crate) fn nothing() -> Self {
            Planted
        }

        #[inline(always)]
        pub(crate) fn swap<T>(&self, _: &mut [T]) -> Option<Vec<i64>> {
            None
        }

        #[inline(always)]
        pub(crate) fn watermark_of(&self, progress: &Progress) -> i64 {
            progress.watermark
        }

        #[inline(always)]
        pub(crate) fn drops(&self) -> bool {
            false
        }
    }
}

#[cfg(feature = "planted-faults")]
mod some {
    use crate::client::Intake;
    use plimsoll_engine::Progress;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A fault.
    #[doc(hidden)]
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum Fault {
        /// Commits one past the lowest unfinished record, again and again: such a record often ends
        /// before the commit is acknowledged, and then nobody can tell.
        CommitTooFar,
        /// Hands two records of one key to the handler in the wrong order, once.
        SwapKey,
        /// Counts a record as finished whose handler was not called, once.
        DropTicket,
    }

    /// Occasions that pass before the fault strikes, so that it is not at the very start.
    const DELAY: u32 = 20;

    #[derive(Debug, Clone)]
    pub(crate) struct Planted {
        fault: Option<Fault>,
        occasions: Arc<AtomicU32>,
    }

    impl Planted {
        pub(crate) fn nothing() -> Self {
            Planted { fault: None, occasions: Arc::default() }
        }

        pub(crate) fn new(fault: Fault) -> Self {
            Planted { fault: Some(fault), occasions: Arc::default() }
        }

        fn strikes(&self, fault: Fault) -> bool {
            self.fault == Some(fault) && self.occasions.fetch_add(1, Ordering::Relaxed) == DELAY
        }

        /// Swaps the first two records of one key; the offsets to admit them under, if it did.
        pub(crate) fn swap<T: Intake>(&self, records: &mut [T]) -> Option<Vec<i64>> {
            if self.fault != Some(Fault::SwapKey) {
                return None;
            }
            let pair = (0..records.len()).find_map(|first| {
                let key = records[first].key()?;
                let second = (first + 1..records.len()).find(|at| records[*at].key() == Some(key));
                second.map(|second| (first, second))
            });
            let (first, second) = pair?;
            if !self.strikes(Fault::SwapKey) {
                return None;
            }
            let offsets = records.iter().map(Intake::offset).collect();
            records.swap(first, second);
            Some(offsets)
        }

        pub(crate) fn watermark_of(&self, progress: &Progress) -> i64 {
            // The record at the watermark, or behind the gap there, is unfinished.
            let wrong = progress.unfinished > 0
                && progress.passed > 0
                && self.fault == Some(Fault::CommitTooFar)
                && self.occasions.fetch_add(1, Ordering::Relaxed) >= DELAY;
            progress.watermark + i64::from(wrong)
        }

        pub(crate) fn drops(&self) -> bool {
            self.strikes(Fault::DropTicket)
        }
    }
}

#[cfg(not(feature = "planted-faults"))]
pub(crate) use none::Planted;
#[cfg(feature = "planted-faults")]
pub use some::Fault;
#[cfg(feature = "planted-faults")]
pub(crate) use some::Planted;
