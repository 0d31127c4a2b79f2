//! A flight: one record handed out whose end comes back from any thread.
//!
//! It has two halves, which end in any order and on any thread: the **report** says how the attempt ended,
//! the **guard** brings the record back. Each sends its own through a queue to the dispatcher, which takes
//! the flight as ended when it has both. So a guard that user code keeps delays its key; it cannot break
//! the order.
//!
//! A report of success marks the record in its epoch's ring itself, before it is sent, so the watermark
//! does not wait for the dispatcher. Whatever else becomes of a record, the dispatcher marks. A report is
//! consumed when it is sent, so a record is marked once; and the dispatcher leaves alone what was reported
//! as done, since its place may be another record's by then.

use crate::outcome::{IntoOutcome, Outcome};
use crate::pull::Gate;
use crate::retry::Attempt;
use crate::ring::{Mark, Place};
use crate::sync::{Arc, AtomicBool, Ends, Ordering};
use crate::wake::Waker;
use crate::window::Shared;
use crate::worker::{DeadLetter, panic_text};
use atomic_waker::AtomicWaker;
use std::fmt;
use std::future::{Future, poll_fn};
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::task::Poll;

/// The work of one record, for a runtime to poll to its end.
///
/// It never panics when polled. Dropped before its end it is a failed attempt.
pub type FlightFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A runtime, as far as the engine needs one: something that polls futures.
///
/// Implemented by every `Fn(FlightFuture)`, and with the feature `tokio` by `tokio::runtime::Handle`.
/// The engine cancels a future by waking it, so no way to abort one is asked for.
pub trait Spawn: Send + Sync {
    /// Takes a future and polls it to its end, later or on another thread. Called by the driving thread,
    /// for each attempt of each record: it must not wait.
    ///
    /// A future that is dropped, now or later, is a failed attempt of its record. One that is forgotten
    /// holds its key and the watermark for ever.
    fn spawn(&self, future: FlightFuture);
}

impl<F: Fn(FlightFuture) + Send + Sync> Spawn for F {
    fn spawn(&self, future: FlightFuture) {
        self(future);
    }
}

#[cfg(feature = "tokio")]
impl Spawn for tokio::runtime::Handle {
    fn spawn(&self, future: FlightFuture) {
        // The task is cancelled by waking it, so nobody needs its handle.
        drop(tokio::runtime::Handle::spawn(self, future));
    }
}

/// Half of an end of a flight, with its number.
#[derive(Debug)]
pub(crate) enum End<T> {
    Report(u32, Outcome),
    Payload(u32, T),
}

/// Where the halves of all ends arrive.
#[derive(Debug)]
pub(crate) struct Port<T> {
    pub(crate) ends: Ends<End<T>>,
    waker: Waker,
}

impl<T> Port<T> {
    pub(crate) fn new(waker: Waker) -> Self {
        Port { ends: Ends::new(), waker }
    }
}

/// What the two halves of a flight and the dispatcher share.
#[derive(Debug)]
pub(crate) struct Flight<T> {
    port: Arc<Port<T>>,
    number: u32,
    /// One half has been sent.
    half: AtomicBool,
    cancelled: AtomicBool,
    /// The task that polls the record's future, to be woken when it is cancelled.
    poller: AtomicWaker,
    /// The task that waits in `Task::cancelled`.
    waiter: AtomicWaker,
    ring: Arc<Shared>,
    place: Place,
}

impl<T> Flight<T> {
    fn send(&self, end: End<T>) {
        self.port.ends.push(end);
        // After the push, so that the second one, who wakes the dispatcher, knows of both. AcqRel: pairs
        // with itself; the first one's push happened before the second one's wake-up.
        if self.half.swap(true, Ordering::AcqRel) {
            self.port.waker.wake();
        }
    }

    /// The broken twin of `send`, which says that its half is there before it is, for the model that must
    /// fail.
    #[cfg(loom)]
    fn send_late(&self, end: End<T>) {
        let second = self.half.swap(true, Ordering::AcqRel);
        if second {
            self.port.waker.wake();
        }
        self.port.ends.push(end);
    }

    /// Its epoch has halted or the executor is gone: nobody waits for what it does.
    pub(crate) fn cancel(&self) {
        // Release: pairs with `is_cancelled`; who looks after it was woken finds it.
        self.cancelled.store(true, Ordering::Release);
        self.poller.wake();
        self.waiter.wake();
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        // Acquire: pairs with `cancel`.
        self.cancelled.load(Ordering::Acquire)
    }
}

/// The two halves of a flight, and what the dispatcher keeps of it. `dropped` says why it has failed if
/// the report is dropped.
pub(crate) fn flight<T>(
    port: &Arc<Port<T>>,
    number: u32,
    ring: Arc<Shared>,
    place: Place,
    payload: T,
    attempt: Attempt,
    dropped: &'static str,
) -> (Task<T>, Report<T>, Arc<Flight<T>>) {
    let flight = Arc::new(Flight {
        port: Arc::clone(port),
        number,
        half: AtomicBool::new(false),
        cancelled: AtomicBool::new(false),
        poller: AtomicWaker::new(),
        waiter: AtomicWaker::new(),
        ring,
        place,
    });
    let task = Task { payload: Some(payload), flight: Arc::clone(&flight), attempt };
    (task, Report { flight: Arc::clone(&flight), open: true, dropped }, flight)
}

/// A record that an async handler works on.
///
/// It dereferences to the record, which it owns: no `T: Sync` is asked for to move it into the future. The
/// next record of its key starts only when the future has ended **and** this guard is dropped, wherever it
/// was moved to: keeping it delays the key.
#[derive(Debug)]
#[must_use = "the record is given back when this is dropped"]
pub struct Task<T> {
    /// Taken by the drop only.
    payload: Option<T>,
    flight: Arc<Flight<T>>,
    attempt: Attempt,
}

impl<T> Task<T> {
    /// Which attempt it is.
    pub fn attempt(&self) -> Attempt {
        self.attempt
    }

    /// Whether the record's epoch has halted or was closed, or the executor is gone: nobody waits for
    /// what becomes of it. The handler's own future is then dropped at its next await; this is for work
    /// that was moved elsewhere.
    pub fn is_cancelled(&self) -> bool {
        self.flight.is_cancelled()
    }

    /// Waits until [`is_cancelled`](Self::is_cancelled). For one task at a time: only the last one that
    /// polled it is woken.
    pub fn cancelled(&self) -> impl Future<Output = ()> + use<'_, T> {
        // Not `self`: that would ask for `T: Sync`.
        let flight = &*self.flight;
        poll_fn(move |context| {
            // Before the look, so that a cancellation after it finds the waker.
            flight.waiter.register(context.waker());
            if flight.is_cancelled() { Poll::Ready(()) } else { Poll::Pending }
        })
    }

    /// Gives the record back in the order of the broken twin.
    #[cfg(loom)]
    pub fn drop_late(mut self) {
        if let Some(payload) = self.payload.take() {
            self.flight.send_late(End::Payload(self.flight.number, payload));
        }
    }
}

impl<T> Deref for Task<T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &self.payload {
            Some(payload) => payload,
            None => unreachable!("only the drop takes it"),
        }
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        if let Some(payload) = self.payload.take() {
            self.flight.send(End::Payload(self.flight.number, payload));
        }
    }
}

/// The right, and the duty, to say how a flight ended. Dropped, it is a failed attempt.
#[derive(Debug)]
pub(crate) struct Report<T> {
    flight: Arc<Flight<T>>,
    open: bool,
    dropped: &'static str,
}

impl<T> Report<T> {
    pub(crate) fn end(mut self, outcome: Outcome) {
        self.open = false;
        if matches!(outcome, Outcome::Done) {
            // Before it is sent: the dispatcher may then free all that belongs to the record.
            self.flight.ring.finish(&self.flight.place, Mark::Publish);
        }
        self.flight.send(End::Report(self.flight.number, outcome));
    }

    pub(crate) fn is_halted(&self) -> bool {
        self.flight.ring.halted()
    }
}

impl<T> Drop for Report<T> {
    fn drop(&mut self) {
        if self.open {
            let reason = Outcome::Failed(self.dropped.to_owned());
            self.flight.send(End::Report(self.flight.number, reason));
        }
    }
}

/// Why an attempt has failed whose future was dropped.
pub(crate) const CANCELLED: &str = "the future was cancelled";

/// The future of one attempt.
async fn fly<T, W>(begin: impl FnOnce(Task<T>) -> W, task: Task<T>, report: Report<T>)
where
    W: Future<Output: IntoOutcome>,
{
    let flight = Arc::clone(&report.flight);
    if flight.is_cancelled() {
        return;
    }
    let work = match catch_unwind(AssertUnwindSafe(|| begin(task))) {
        Ok(work) => work,
        Err(panic) => return report.end(Outcome::Failed(panic_text(&*panic))),
    };
    let mut work = pin!(work);
    let outcome = poll_fn(|context| {
        // Before the look, so that a cancellation after it finds the waker.
        flight.poller.register(context.waker());
        if flight.is_cancelled() {
            return Poll::Ready(None);
        }
        let polled = catch_unwind(AssertUnwindSafe(|| {
            work.as_mut().poll(context).map(IntoOutcome::into_outcome)
        }));
        match polled {
            Ok(polled) => polled.map(Some),
            Err(panic) => Poll::Ready(Some(Outcome::Failed(panic_text(&*panic)))),
        }
    })
    .await;
    if let Some(outcome) = outcome {
        report.end(outcome);
    }
}

type Make<T> = Box<dyn Fn(Task<T>, Report<T>) -> FlightFuture + Send + Sync>;
type MakeHook<T> = Box<dyn Fn(Task<T>, DeadLetter, Report<T>) -> FlightFuture + Send + Sync>;

/// A handler that returns a future, and what takes the records it cannot handle.
///
/// The future of a record is begun, polled and dropped by the runtime, not by the driving thread.
pub struct AsyncHandler<T> {
    pub(crate) make: Make<T>,
    pub(crate) hook: Option<MakeHook<T>>,
}

impl<T> fmt::Debug for AsyncHandler<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncHandler")
            .field("dead_letter", &self.hook.is_some())
            .finish_non_exhaustive()
    }
}

impl<T: Send + 'static> AsyncHandler<T> {
    /// Called for each attempt of each record. A panic is a failed attempt, and so is a future that is
    /// dropped before its end, by a runtime that shuts down, say: "the future was cancelled".
    pub fn new<F, W>(handler: F) -> Self
    where
        F: Fn(Task<T>) -> W + Send + Sync + 'static,
        W: Future<Output: IntoOutcome> + Send + 'static,
    {
        let handler = std::sync::Arc::new(handler);
        let make: Make<T> = Box::new(move |task, report| {
            let handler = std::sync::Arc::clone(&handler);
            Box::pin(fly(move |task| handler(task), task, report))
        });
        AsyncHandler { make, hook: None }
    }

    /// Called, on the runtime, for a record that goes to the dead letters. When it fails it is called
    /// again, after the delays of the [`Retry`](crate::Retry) policy and without end: the record is
    /// finished only when it has succeeded.
    pub fn dead_letter_async<F, W, E>(mut self, hook: F) -> Self
    where
        F: Fn(Task<T>, DeadLetter) -> W + Send + Sync + 'static,
        W: Future<Output = Result<(), E>> + Send + 'static,
        E: fmt::Display + 'static,
    {
        let hook = std::sync::Arc::new(hook);
        self.hook = Some(Box::new(move |task, letter, report| {
            let hook = std::sync::Arc::clone(&hook);
            Box::pin(fly(move |task| hook(task, letter), task, report))
        }));
        self
    }

    /// As [`dead_letter_async`](Self::dead_letter_async) with a function. It is called inside a future, so
    /// while it blocks, a thread of the runtime does.
    pub fn dead_letter<F, E>(self, hook: F) -> Self
    where
        F: Fn(&T, &DeadLetter) -> Result<(), E> + Send + Sync + 'static,
        E: fmt::Display + Send + 'static,
    {
        let hook = std::sync::Arc::new(hook);
        self.dead_letter_async(move |task, letter| {
            let hook = std::sync::Arc::clone(&hook);
            async move { hook(&task, &letter) }
        })
    }
}

/// Where flights depart to.
pub(crate) enum Launcher<T> {
    Futures { handler: AsyncHandler<T>, spawner: Box<dyn Spawn> },
    Pull(Arc<Gate<T>>),
}

impl<T> fmt::Debug for Launcher<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Launcher::Futures { handler, .. } => handler.fmt(f),
            Launcher::Pull(_) => f.write_str("Pull"),
        }
    }
}

impl<T> Launcher<T> {
    /// Whether dead letters are taken.
    pub(crate) fn buries(&self) -> bool {
        match self {
            Launcher::Futures { handler, .. } => handler.hook.is_some(),
            Launcher::Pull(_) => true,
        }
    }

    /// Why a flight has failed whose report was dropped.
    pub(crate) fn dropped(&self) -> &'static str {
        match self {
            Launcher::Futures { .. } => CANCELLED,
            Launcher::Pull(_) => crate::pull::DROPPED,
        }
    }

    pub(crate) fn launch(&self, task: Task<T>, report: Report<T>, letter: Option<DeadLetter>) {
        match self {
            Launcher::Futures { handler, spawner } => {
                let future = match (letter, &handler.hook) {
                    (None, _) => (handler.make)(task, report),
                    (Some(letter), Some(hook)) => hook(task, letter, report),
                    // The dispatcher does not send one for that without a hook.
                    (Some(letter), None) => return report.end(Outcome::Halt(letter.reason)),
                };
                // A panic of the runtime drops the future, which then has ended.
                let _ = catch_unwind(AssertUnwindSafe(|| spawner.spawn(future)));
            }
            Launcher::Pull(gate) => gate.put(task, report, letter),
        }
    }
}

/// One flight and its dispatcher, for the models in `loom-tests`.
#[cfg(loom)]
pub(crate) mod model {
    use super::*;
    use crate::window::Window;

    /// What the dispatcher keeps.
    #[derive(Debug)]
    pub struct Air<T> {
        port: Arc<Port<T>>,
        flight: Arc<Flight<T>>,
        reported: bool,
        payload: Option<T>,
    }

    impl<T> Air<T> {
        /// Admits a record and lets it depart.
        pub fn depart(
            window: &mut Window,
            offset: i64,
            payload: T,
            waker: Waker,
        ) -> (Self, Task<T>, Reporter<T>) {
            let place = window.admit_place(offset).expect("room");
            let port = Arc::new(Port::new(waker));
            let ring = Arc::clone(window.shared());
            let (task, report, flight) =
                flight(&port, 0, ring, place, payload, Attempt::FIRST, CANCELLED);
            let air = Air { port, flight, reported: false, payload: None };
            (air, task, Reporter(report))
        }

        /// Takes what has arrived; the record, when both halves have.
        pub fn land(&mut self) -> Option<T> {
            while let Some(end) = self.port.ends.pop() {
                match end {
                    End::Report(..) => self.reported = true,
                    End::Payload(_, payload) => self.payload = Some(payload),
                }
            }
            if self.reported { self.payload.take() } else { None }
        }

        /// Whether something has arrived.
        pub fn has_ends(&self) -> bool {
            !self.port.ends.is_empty()
        }

        /// Marks the record as done, which its report has done already: a mistake.
        pub fn mark_again(&self) {
            self.flight.ring.finish(&self.flight.place, Mark::Publish);
        }
    }

    /// The half that says how it ended.
    #[derive(Debug)]
    pub struct Reporter<T>(Report<T>);

    impl<T> Reporter<T> {
        /// It is done.
        pub fn done(self) {
            self.0.end(Outcome::Done);
        }

        /// The broken twin, which sends its half only after it has said that it is there.
        pub fn done_late(mut self) {
            self.0.open = false;
            let flight = &self.0.flight;
            flight.ring.finish(&flight.place, Mark::Publish);
            flight.send_late(End::Report(0, Outcome::Done));
        }

        /// The broken twin, which marks only after it was sent.
        pub fn done_before_the_mark(mut self) {
            self.0.open = false;
            let flight = &self.0.flight;
            flight.send(End::Report(0, Outcome::Done));
            flight.ring.finish(&flight.place, Mark::Publish);
        }
    }
}
