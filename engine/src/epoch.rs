//! Epochs as the workers see them: where to mark, and whether to go on.

use crate::sync::{Arc, AtomicBool, AtomicU64, Ordering};
use crate::window::Shared;
use parking_lot::RwLock;

/// Names one epoch of one partition inside an executor. A new assignment of the same partition is
/// a new epoch with a new id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EpochId {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

/// What workers need of an epoch.
#[derive(Debug)]
pub(crate) struct Epoch {
    pub(crate) shared: Arc<Shared>,
    /// Records that have not been started must not start any more.
    halted: AtomicBool,
}

impl Epoch {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Epoch { shared, halted: AtomicBool::new(false) }
    }

    #[inline(always)]
    pub(crate) fn halted(&self) -> bool {
        // Relaxed: a worker that halts an epoch sees its own store for the later records of the
        // same key, which are in the same lane; for other keys any moment is as good.
        self.halted.load(Ordering::Relaxed)
    }

    pub(crate) fn halt(&self) {
        // Relaxed: see `halted`.
        self.halted.store(true, Ordering::Relaxed);
    }
}

/// The epochs by slot, for the workers. Locked when an epoch opens or closes, never per record.
#[derive(Debug)]
pub(crate) struct Registry {
    version: AtomicU64,
    slots: RwLock<Vec<Option<Arc<Epoch>>>>,
}

impl Registry {
    pub(crate) fn new() -> Self {
        Registry { version: AtomicU64::new(0), slots: RwLock::new(Vec::new()) }
    }

    pub(crate) fn set(&self, slot: u32, epoch: Option<Arc<Epoch>>) {
        let mut slots = self.slots.write();
        if slots.len() <= slot as usize {
            slots.resize(slot as usize + 1, None);
        }
        slots[slot as usize] = epoch;
        // Release: pairs with `Cache::refresh`. A slot is filled before an entry that names it is
        // flushed, so a worker that claims the entry sees at least this version.
        self.version.fetch_add(1, Ordering::Release);
    }
}

/// A worker's copy of the registry, renewed when its version has moved: one load per run.
#[derive(Debug)]
pub(crate) struct Cache {
    version: u64,
    slots: Vec<Option<Arc<Epoch>>>,
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
    pub(crate) fn get(&self, slot: u32) -> Option<&Epoch> {
        self.slots.get(slot as usize)?.as_deref()
    }
}
