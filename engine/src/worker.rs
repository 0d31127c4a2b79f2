//! The worker: claims runs from its lane, calls the handler, marks the flags.

use crate::batch::{Batch, Entry};
use crate::epoch::{Cache, Registry};
use crate::lane::{LaneRx, Run};
use crate::outcome::{IntoOutcome, Outcome};
use crate::ring::Mark;
use crate::sync::Arc;
use crate::wake::Waker;
use crossbeam_queue::SegQueue;
use std::any::Any;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A record whose handling failed, as the worker reports it.
#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) epoch: u16,
    pub(crate) offset: i64,
    pub(crate) reason: String,
}

/// What all workers of an executor share with the dispatcher.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) registry: Registry,
    /// Pushed to only when a handler fails.
    pub(crate) failed: SegQueue<Failed>,
    pub(crate) waker: Waker,
    pub(crate) spin: Spin,
}

/// How long a worker that has run dry looks for new work before it sleeps.
///
/// Longer costs CPU and saves the wake-up, which takes some microseconds to some tens of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spin {
    /// Looks with a processor pause (some nanoseconds) between them.
    pub pauses: u32,
    /// Looks with a yield to the scheduler between them, after the pauses.
    pub yields: u32,
}

impl Default for Spin {
    fn default() -> Self {
        Spin { pauses: 20, yields: 8 }
    }
}

/// Where a worker looks up epochs and leaves outcomes.
#[derive(Debug)]
pub(crate) struct Desk {
    cache: Cache,
    common: Arc<Common>,
}

impl Desk {
    /// Whether a record may start. While no epoch is halted none has to be asked.
    #[inline(always)]
    fn may_run<T>(&self, entry: &Entry<T>) -> bool {
        !self.common.registry.any_halted() || self.runs(entry)
    }

    #[cold]
    fn runs<T>(&self, entry: &Entry<T>) -> bool {
        self.cache.get(entry.epoch()).is_some_and(|epoch| !epoch.halted())
    }

    #[inline(always)]
    fn done<T>(&self, entry: &Entry<T>) {
        if let Some(epoch) = self.cache.get(entry.epoch()) {
            epoch.finish(&entry.place(), Mark::Publish);
        }
    }

    /// Marks the entries of a range; neighbours are mostly of one epoch, which is looked up once.
    #[inline]
    fn all_done<T>(&self, run: &Run<'_, Entry<T>>, from: u32, to: u32) {
        let mut entries = run.range(from, to).peekable();
        while let Some(entry) = entries.peek() {
            let slot = entry.epoch();
            let Some(epoch) = self.cache.get(slot) else { return };
            while let Some(entry) = entries.next_if(|entry| entry.epoch() == slot) {
                epoch.finish(&entry.place(), Mark::Publish);
            }
        }
    }

    /// The epoch halts before the flag says "failed": no later record of the key, which is in this
    /// lane, can start.
    #[cold]
    fn failed<T>(&self, entry: &Entry<T>, reason: &str) {
        if let Some(epoch) = self.cache.get(entry.epoch()) {
            self.common.registry.halt(epoch);
            let place = entry.place();
            let offset = epoch.offset_of(&place);
            epoch.fail(&place);
            self.common.failed.push(Failed {
                epoch: entry.epoch(),
                offset,
                reason: reason.to_owned(),
            });
        }
    }
}

/// How a run of entries is handed to the user's code.
pub(crate) trait Process<T>: Send + Sync + 'static {
    /// Records one call wants to have, if so many are there.
    fn least(&self) -> u32;
    fn process(&self, run: &Run<'_, Entry<T>>, desk: &Desk);
}

/// One call per record.
#[derive(Debug)]
pub(crate) struct Each<F, R> {
    pub(crate) handler: F,
    pub(crate) returns: PhantomData<fn() -> R>,
}

impl<T, F, R> Process<T> for Each<F, R>
where
    F: Fn(&T) -> R + Send + Sync + 'static,
    R: IntoOutcome + 'static,
{
    fn least(&self) -> u32 {
        1
    }

    #[inline]
    fn process(&self, run: &Run<'_, Entry<T>>, desk: &Desk) {
        let mut index = 0;
        while index < run.len() {
            // One catch for the whole run, entered again only after a panic.
            let ended = catch_unwind(AssertUnwindSafe(|| {
                while index < run.len() {
                    let entry = run.get(index);
                    if desk.may_run(entry) {
                        match (self.handler)(&entry.payload).into_outcome() {
                            Outcome::Done => desk.done(entry),
                            Outcome::Failed(reason) => desk.failed(entry, &reason),
                        }
                    }
                    index += 1;
                }
            }));
            if let Err(panic) = ended {
                desk.failed(run.get(index), &panic_text(&*panic));
                index += 1;
            }
        }
    }
}

/// One call per batch.
#[derive(Debug)]
pub(crate) struct Batches<F, R> {
    pub(crate) handler: F,
    pub(crate) most: u32,
    pub(crate) returns: PhantomData<fn() -> R>,
}

impl<T, F, R> Process<T> for Batches<F, R>
where
    F: Fn(&Batch<'_, T>) -> R + Send + Sync + 'static,
    R: IntoOutcome + 'static,
{
    fn least(&self) -> u32 {
        self.most
    }

    #[inline]
    fn process(&self, run: &Run<'_, Entry<T>>, desk: &Desk) {
        let mut from = 0;
        while from < run.len() {
            if !desk.may_run(run.get(from)) {
                from += 1;
                continue;
            }
            let mut to = run.len().min(from + self.most);
            if desk.common.registry.any_halted() {
                to = (from + 1..to).find(|at| !desk.may_run(run.get(*at))).unwrap_or(to);
            }
            let batch = Batch::new(run, from, to);
            let ended = catch_unwind(AssertUnwindSafe(|| (self.handler)(&batch).into_outcome()));
            match ended {
                Ok(Outcome::Done) => desk.all_done(run, from, to),
                Ok(Outcome::Failed(reason)) => {
                    (from..to).for_each(|index| desk.failed(run.get(index), &reason));
                }
                Err(panic) => {
                    let reason = panic_text(&*panic);
                    (from..to).for_each(|index| desk.failed(run.get(index), &reason));
                }
            }
            from = to;
        }
    }
}

/// The text of a caught panic.
fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&'static str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    match text {
        Some(text) => format!("the handler panicked: {text}"),
        None => "the handler panicked".to_owned(),
    }
}

/// A worker thread's life: until the lane is stopped and empty.
pub(crate) fn work<T, P: Process<T>>(mut lane: LaneRx<Entry<T>>, process: &P, common: Arc<Common>) {
    let spin = common.spin;
    let least = process.least();
    let mut desk = Desk { cache: Cache::new(), common };
    loop {
        if let Some(run) = lane.claim(least) {
            desk.cache.refresh(&desk.common.registry);
            process.process(&run, &desk);
            continue;
        }
        // Dry: the dispatcher may be napping on the thought that this lane is busy.
        desk.common.waker.wake();
        if lane.stopped() {
            // `stopped` acquires what was flushed before; only an empty lane ends the worker.
            if lane.is_empty() {
                return;
            }
            continue;
        }
        if !look_for_work(&lane, spin) && lane.doze() {
            // Once only: the flush that wakes us takes the sleep's announcement back, and what it
            // brought may be recalled before we run. Then the sleep must be announced again.
            std::thread::park();
        }
    }
}

/// Spins, then yields; whether something has arrived.
fn look_for_work<E>(lane: &LaneRx<E>, spin: Spin) -> bool {
    for _ in 0..spin.pauses {
        if !lane.is_empty() {
            return true;
        }
        std::hint::spin_loop();
    }
    for _ in 0..spin.yields {
        if !lane.is_empty() {
            return true;
        }
        std::thread::yield_now();
    }
    !lane.is_empty()
}
