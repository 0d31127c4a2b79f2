//! Epochs as the workers see them: where to mark, and whether to go on.

use crate::sync::{Arc, AtomicU32, AtomicU64, Ordering};
use crate::window::Shared;
use parking_lot::RwLock;

/// Names one epoch of one partition inside an executor. A new assignment of the same partition is
/// a new epoch with a new id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EpochId {
    pub(crate) slot: u16,
    pub(crate) generation: u32,
}

/// The epochs by slot, for the workers. Locked when an epoch opens or closes, never per record.
#[derive(Debug)]
pub(crate) struct Registry {
    version: AtomicU64,
    /// Epochs that are halted and not yet gone, and tracked records on their way: while there is
    /// none, no record has to be looked at.
    caution: AtomicU32,
    slots: RwLock<Vec<Option<Arc<Shared>>>>,
}

impl Registry {
    pub(crate) fn new() -> Self {
        Registry {
            version: AtomicU64::new(0),
            caution: AtomicU32::new(0),
            slots: RwLock::new(Vec::new()),
        }
    }

    /// Halts an epoch: of its records none starts that has not started.
    pub(crate) fn halt(&self, epoch: &Shared) {
        // Counted before the flag is set, never after: whoever finds the flag set by another thread
        // must find the count too, or it would start a later record of the key that just failed.
        // Relaxed: ordered by the swap in `Shared::halt`.
        self.caution.fetch_add(1, Ordering::Relaxed);
        if epoch.halt() {
            // Relaxed: the one that set the flag keeps its count until the epoch is gone.
            self.caution.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// A tracked record is sent.
    pub(crate) fn add_caution(&self) {
        // Relaxed: before the flush that publishes the record.
        self.caution.fetch_add(1, Ordering::Relaxed);
    }

    /// A halted epoch's slot is free, or a tracked record is back.
    pub(crate) fn drop_caution(&self) {
        // Relaxed: no entry in a lane depends on it any more.
        self.caution.fetch_sub(1, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn is_cautious(&self) -> bool {
        // Relaxed: see `Shared::halted`; for a tracked record the claim has acquired its flush.
        self.caution.load(Ordering::Relaxed) > 0
    }

    pub(crate) fn set(&self, slot: u16, epoch: Option<Arc<Shared>>) {
        let mut slots = self.slots.write();
        if slots.len() <= usize::from(slot) {
            slots.resize(usize::from(slot) + 1, None);
        }
        slots[usize::from(slot)] = epoch;
        // Release: pairs with `Cache::refresh`. A slot is filled before an entry that names it is
        // flushed, so a worker that claims the entry sees at least this version.
        self.version.fetch_add(1, Ordering::Release);
    }
}

/// A worker's copy of the registry, renewed when its version has moved: one load per run.
#[derive(Debug)]
pub(crate) struct Cache {
    version: u64,
    slots: Vec<Option<Arc<Shared>>>,
}

impl Cache {
    pub(crate) fn new() -> Self {
        Cache { version: 0, slots: Vec::new() }
    }

    #[inline]
    pub(crate) fn refresh(&mut self, registry: &Registry) {
        // Acquire: pairs with `set`.
        let version = registry.version.load(Ordering::Acquire);
        if version != self.version {
            self.renew(version, registry);
        }
    }

    #[cold]
    fn renew(&mut self, version: u64, registry: &Registry) {
        self.slots.clone_from(&registry.slots.read());
        self.version = version;
    }

    /// The epoch in a slot; `None` only if the entry were older than its epoch's end, which the
    /// dispatcher rules out: it frees a slot after the last entry that names it.
    #[inline(always)]
    pub(crate) fn get(&self, slot: u16) -> Option<&Shared> {
        self.slots.get(usize::from(slot))?.as_deref()
    }
}
