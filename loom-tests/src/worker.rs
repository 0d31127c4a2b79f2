//! The worker's loop around its lane, as the engine's worker has it, with loom's parking.

use crate::witness::Spared;
use loom::sync::Notify;
use plimsoll_engine::internals::{self, LaneRx, LaneTx, Order, Run};
use std::rc::Rc;

/// The engine's lane, whose halves survive a twin's panic.
///
/// # Panics
/// When `length` is not a power of two, or its memory cannot be had.
pub fn lane<E>(length: u32, order: Order) -> (Spared<LaneTx<E>>, Spared<LaneRx<E>>) {
    let (tx, rx) = internals::lane(length, order).expect("memory for a few slots");
    (Spared::new(tx), Spared::new(rx))
}

/// `std::thread::park` and `unpark` of one thread: one token, and now and then a wake-up without
/// one (loom tries it once per execution). A wake-up that is lost is a deadlock, which loom reports.
#[derive(Debug, Clone, Default)]
pub struct Parking(Rc<Notify>);

impl Parking {
    /// A place to park for one thread.
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits for the token and takes it.
    pub fn park(&self) {
        self.0.wait();
    }

    /// Leaves the token.
    pub fn unpark(&self) {
        self.0.notify();
    }
}

/// How a worker goes about its lane. [`Worker::RIGHT`] is the engine's loop (`work` in its
/// `worker.rs`, without the spinning); the other values are for the twins that must fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Worker {
    /// After a wake-up it announces its sleep again before it sleeps again.
    pub announces_each_sleep: bool,
    /// It looks into the lane once more after it has learnt that it should stop.
    pub looks_after_stop: bool,
}

impl Worker {
    /// As shipped.
    pub const RIGHT: Self = Worker { announces_each_sleep: true, looks_after_stop: true };

    /// Works until the lane is stopped and empty, or until `handle` says `false`.
    pub fn work<E>(
        self,
        lane: &mut LaneRx<E>,
        parking: &Parking,
        mut handle: impl FnMut(&mut Run<'_, E>) -> bool,
    ) {
        loop {
            if let Some(mut run) = lane.claim(1) {
                if !handle(&mut run) {
                    return;
                }
                continue;
            }
            if lane.stopped() {
                if !self.looks_after_stop || lane.is_empty() {
                    return;
                }
                continue;
            }
            if !lane.doze() {
                continue;
            }
            if self.announces_each_sleep {
                parking.park();
                continue;
            }
            while lane.is_empty() && !lane.stopped() {
                parking.park();
            }
        }
    }
}
