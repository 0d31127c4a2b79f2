//! A budget of bytes that many windows share.

use crate::error::InvalidSetting;
use crate::sync::{Arc, AtomicU64, Ordering};
use crossbeam_utils::CachePadded;

/// Bytes that many [`Window`](crate::Window)s may hold together. Cheap to clone; every clone is the
/// same budget. Atomic counts, no lock.
///
/// # The rule
/// With a budget of *B* bytes and *n* open windows, each window's **share** is *B* / 2*n*. A window may
/// take a record when
/// 1. it holds nothing: so a record of any size gets through, be it larger than the whole budget; or
/// 2. it stays within its share: always, whatever the others hold; or
/// 3. all windows together stay within *B* less the shares of the other windows.
///
/// So **no window is starved**: what the others hold can only keep it from going beyond its share. And
/// one that is alone may hold the whole budget.
///
/// **The sum stays within *B*** as long as no record is larger than a share and *n* does not grow. For
/// let a window take a record by 3: then the sum is at most *B* less the others' shares. From there on
/// until the next such moment each other window that grows does so within its share, so that together
/// they add no more than their shares. Each window that holds a single record larger than its share
/// may add that record. A window that is opened adds its share at once, while the others still hold
/// what they were allowed to hold before.
///
/// A window gives bytes back when its watermark passes their records, and all of them when it is
/// dropped: what its late tickets do changes nothing here.
///
/// ```
/// use plimsoll_engine::{Budget, Limits, Refused, Window};
///
/// let budget = Budget::new(1_000)?;
/// let mut large = Window::open_with(0, &Limits::new(64).budget(&budget))?;
/// let mut small = Window::open_with(0, &Limits::new(64).budget(&budget))?;
/// let held = large.admit_sized(0, 700).unwrap();
/// assert!(matches!(large.admit_sized(1, 100), Err(Refused::Budget { .. })));
/// // What `large` holds does not keep `small` from its share.
/// small.admit_sized(0, 250).unwrap().finish();
/// held.finish();
/// large.watermark().advance();
/// assert_eq!(budget.used(), 250);
/// # Ok::<(), plimsoll_engine::InvalidSetting>(())
/// ```
#[derive(Debug, Clone)]
pub struct Budget(Arc<Pool>);

#[derive(Debug)]
struct Pool {
    total: u64,
    /// Bytes held by all windows.
    used: CachePadded<AtomicU64>,
    /// Windows that may hold some.
    windows: AtomicU64,
    #[cfg(loom)]
    flaw: Flaw,
}

/// What is wrong with a budget, or with the windows that share it: for the models that must fail.
#[cfg(loom)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flaw {
    /// Nothing.
    None,
    /// Whether bytes are free is found out in one step, and they are taken in another.
    TwoSteps,
    /// Notes are counted with `Relaxed`.
    MuteNotes,
    /// A window counts bytes as given back before the budget has them.
    EarlyRoom,
}

impl Budget {
    /// A budget of so many bytes.
    ///
    /// # Errors
    /// [`InvalidSetting`] when it is 0.
    pub fn new(bytes: u64) -> Result<Self, InvalidSetting> {
        if bytes == 0 {
            return Err(InvalidSetting::new("budget", "must be at least 1 byte"));
        }
        Ok(Budget(Arc::new(Pool {
            total: bytes,
            used: CachePadded::new(AtomicU64::new(0)),
            windows: AtomicU64::new(0),
            #[cfg(loom)]
            flaw: Flaw::None,
        })))
    }

    /// With a flaw, for the models that must fail.
    #[cfg(loom)]
    pub fn flawed(bytes: u64, flaw: Flaw) -> Self {
        let (used, windows) = (CachePadded::new(AtomicU64::new(0)), AtomicU64::new(0));
        Budget(Arc::new(Pool { total: bytes, used, windows, flaw }))
    }

    #[cfg(loom)]
    pub(crate) fn has(&self, flaw: Flaw) -> bool {
        self.0.flaw == flaw
    }

    /// Its size, bytes.
    pub fn bytes(&self) -> u64 {
        self.0.total
    }

    /// Bytes that the open windows hold now.
    pub fn used(&self) -> u64 {
        // Relaxed: a gauge; nothing is read on the strength of it.
        self.0.used.load(Ordering::Relaxed)
    }

    /// Open windows.
    pub fn windows(&self) -> u64 {
        // Relaxed: as in `used`.
        self.0.windows.load(Ordering::Relaxed)
    }

    /// Bytes that each open window may hold whatever the others do.
    pub fn share(&self) -> u64 {
        self.0.total / 2 / self.windows().max(1)
    }

    pub(crate) fn join(&self) {
        // Relaxed: a count; who reads an older one applies the rule of a moment before.
        self.0.windows.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn leave(&self) {
        // Relaxed: as in `join`.
        self.0.windows.fetch_sub(1, Ordering::Relaxed);
    }

    /// Takes `bytes` for a window that holds `held`, if the rule allows it.
    pub(crate) fn take(&self, held: u64, bytes: u64) -> bool {
        let share = self.share();
        if held == 0 || held + bytes <= share {
            // Relaxed: a count, exact because it is only changed by read-modify-writes.
            self.0.used.fetch_add(bytes, Ordering::Relaxed);
            return true;
        }
        #[cfg(loom)]
        if self.has(Flaw::TwoSteps) {
            return self.take_in_two_steps(bytes);
        }
        let others = share * self.windows().saturating_sub(1);
        let bound = self.0.total.saturating_sub(others);
        let fits = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= bound);
        // Relaxed: as above. One step, or two windows could both find the same bytes free.
        self.0.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    pub(crate) fn give(&self, bytes: u64) {
        // Relaxed: as in `take`.
        self.0.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// [`take`](Self::take) by the third rule in two steps, for the model that must fail.
    #[cfg(loom)]
    fn take_in_two_steps(&self, bytes: u64) -> bool {
        let others = self.share() * self.windows().saturating_sub(1);
        let fits = self.used() + bytes <= self.0.total - others;
        if fits {
            self.0.used.fetch_add(bytes, Ordering::Relaxed);
        }
        fits
    }
}
