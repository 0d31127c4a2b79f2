//! Records that any thread takes, and finishes on any thread.

use crate::flight::{Report, Task};
use crate::outcome::Outcome;
use crate::retry::Attempt;
use crate::sync::{Arc, AtomicBool, AtomicU32, Ends, Ordering, fence};
use crate::worker::DeadLetter;
use parking_lot::{Condvar, Mutex};
use std::fmt;
use std::ops::Deref;
use std::time::{Duration, Instant};

/// Why an attempt has failed whose record was dropped.
pub(crate) const DROPPED: &str = "the record was dropped without an outcome";

/// Between the dispatcher and those who pull.
#[derive(Debug)]
pub(crate) struct Gate<T> {
    /// Bounded by the executor's concurrency.
    waiting: Ends<Pulled<T>>,
    closed: AtomicBool,
    sleepers: AtomicU32,
    /// Taken only by who sleeps, and by who wakes one that does.
    sleep: Mutex<()>,
    woken: Condvar,
}

impl<T> Gate<T> {
    pub(crate) fn new() -> Self {
        Gate {
            waiting: Ends::new(),
            closed: AtomicBool::new(false),
            sleepers: AtomicU32::new(0),
            sleep: Mutex::new(()),
            woken: Condvar::new(),
        }
    }

    pub(crate) fn put(&self, task: Task<T>, report: Report<T>, letter: Option<DeadLetter>) {
        self.waiting.push(Pulled { task, report, letter });
        // SeqCst: pairs with the fence in `wait`; either the sleeper sees the record or we see the sleeper.
        fence(Ordering::SeqCst);
        // Relaxed: ordered by the fence.
        if self.sleepers.load(Ordering::Relaxed) > 0 {
            // The lock: who has looked for records and has not yet gone to sleep holds it.
            drop(self.sleep.lock());
            self.woken.notify_one();
        }
    }

    pub(crate) fn close(&self) {
        // Release: pairs with the Acquire in `Puller::look`; who sees it finds all that was put before.
        self.closed.store(true, Ordering::Release);
        drop(self.sleep.lock());
        self.woken.notify_all();
    }

    fn take(&self) -> Option<Pulled<T>> {
        loop {
            let pulled = self.waiting.pop()?;
            if !pulled.report.is_halted() {
                return Some(pulled);
            }
            // It must not start any more.
        }
    }

    /// Drops what nobody has taken of epochs that have halted.
    pub(crate) fn drop_halted(&self) {
        for _ in 0..self.waiting.len() {
            let Some(pulled) = self.waiting.pop() else { return };
            if !pulled.report.is_halted() {
                self.waiting.push(pulled);
            }
        }
    }
}

/// The executor takes no more records and has none left: it was stopped or is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended;

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the executor was stopped")
    }
}

impl std::error::Error for Ended {}

/// Takes records out of an executor, for threads that are not its workers. Cheap to clone; clones share
/// the records.
///
/// See [`Builder::pull`](crate::Builder::pull).
#[derive(Debug)]
pub struct Puller<T> {
    gate: Arc<Gate<T>>,
}

impl<T> Clone for Puller<T> {
    fn clone(&self) -> Self {
        Puller { gate: Arc::clone(&self.gate) }
    }
}

impl<T> Puller<T> {
    pub(crate) fn new(gate: Arc<Gate<T>>) -> Self {
        Puller { gate }
    }

    /// `None` when there is none now.
    fn look(&self) -> Result<Option<Pulled<T>>, Ended> {
        // Acquire: pairs with the Release in `Gate::close`. Read first: what is there afterwards is all.
        let closed = self.gate.closed.load(Ordering::Acquire);
        match self.gate.take() {
            None if closed => Err(Ended),
            taken => Ok(taken),
        }
    }

    /// The next record that may start; `None` when there is none now. Never waits.
    ///
    /// # Errors
    /// [`Ended`] when there will be none.
    pub fn try_next(&self) -> Result<Option<Pulled<T>>, Ended> {
        self.look()
    }

    /// The next record that may start; waits for it, at most `timeout`.
    ///
    /// # Errors
    /// [`Ended`] when there will be none; at once, also for threads that wait already.
    pub fn next(&self, timeout: Duration) -> Result<Option<Pulled<T>>, Ended> {
        match self.look()? {
            None if !timeout.is_zero() => self.wait(timeout),
            taken => Ok(taken),
        }
    }

    /// Up to `max` records that may start, no two of one key; waits for the first, at most `timeout`, and
    /// for no other.
    ///
    /// # Errors
    /// As [`next`](Self::next).
    pub fn next_batch(&self, max: usize, timeout: Duration) -> Result<Vec<Pulled<T>>, Ended> {
        let mut batch = Vec::new();
        if max == 0 {
            return Ok(batch);
        }
        batch.extend(self.next(timeout)?);
        while !batch.is_empty() && batch.len() < max {
            let Some(pulled) = self.gate.take() else { break };
            batch.push(pulled);
        }
        Ok(batch)
    }

    fn wait(&self, timeout: Duration) -> Result<Option<Pulled<T>>, Ended> {
        let gate = &*self.gate;
        // No deadline if it lies beyond all time: then in a year, and once more.
        let deadline = Instant::now().checked_add(timeout);
        let mut lock = gate.sleep.lock();
        // Relaxed: ordered by the fence.
        gate.sleepers.fetch_add(1, Ordering::Relaxed);
        let result = loop {
            // SeqCst: pairs with the fence in `Gate::put`.
            fence(Ordering::SeqCst);
            match self.look() {
                Ok(None) => {}
                found => break found,
            }
            let slept = match deadline {
                Some(deadline) => gate.woken.wait_until(&mut lock, deadline),
                None => gate.woken.wait_for(&mut lock, Duration::from_secs(365 * 86_400)),
            };
            if slept.timed_out() && deadline.is_some() {
                break self.look();
            }
        };
        // Relaxed: one too many costs a wake-up of nobody.
        gate.sleepers.fetch_sub(1, Ordering::Relaxed);
        result
    }
}

/// A record that was pulled. It dereferences to the record; the next one of its key can be pulled when
/// this one has ended.
///
/// Dropped without an outcome it is a failed attempt. Forgotten it stays unfinished, which
/// [`Progress::unfinished`](crate::Progress::unfinished) shows.
#[derive(Debug)]
#[must_use = "a record that is dropped without an outcome is a failed attempt"]
pub struct Pulled<T> {
    /// Before the report: the end of the flight is complete, and the dispatcher woken, by the latter.
    task: Task<T>,
    report: Report<T>,
    letter: Option<DeadLetter>,
}

impl<T> Pulled<T> {
    /// Which attempt it is.
    pub fn attempt(&self) -> Attempt {
        self.task.attempt()
    }

    /// Set when the record is not to be handled but to be put with the dead letters, for the reason given.
    /// Finishing it then says that this was done; whatever fails, it comes again.
    pub fn dead_letter(&self) -> Option<&DeadLetter> {
        self.letter.as_ref()
    }

    /// Whether its epoch has halted or was closed, or the executor is gone: nobody waits for its end.
    pub fn is_cancelled(&self) -> bool {
        self.task.is_cancelled()
    }

    /// It took effect: the watermark may pass it from now on, without the driving thread.
    pub fn finish(self) {
        self.end(Outcome::Done);
    }

    /// The attempt failed.
    pub fn fail(self, reason: impl Into<String>) {
        self.end(Outcome::Failed(reason.into()));
    }

    /// It ended in this way.
    pub fn end(self, outcome: Outcome) {
        let Pulled { task, report, .. } = self;
        report.end(outcome);
        drop(task);
    }
}

impl<T> Deref for Pulled<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.task
    }
}
