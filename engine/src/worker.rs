//! The worker: claims runs from its lane, calls the handler, marks the flags.
//!
//! A record whose attempt failed is handed back to the dispatcher, which decides what becomes of it.
//! Until it has, later records of the same key must not run: so the worker also hands back, unhandled,
//! whatever lies behind in its lane and is of the same **class** (a class is a few shards). The
//! dispatcher answers with a **fence**: failures it has seen, and the position from which on the lane
//! holds nothing any more that was sent before it knew of them.

mod grouped;

use crate::batch::{Back, Batch, Entry};
use crate::epoch::{Cache, Registry};
use crate::lane::{LaneRx, Run, advance, reached};
use crate::outcome::{BatchOutcome, IntoBatchOutcome, IntoOutcome, Outcome};
use crate::retry::Attempt;
use crate::ring::Mark;
use crate::sync::Arc;
use crate::wake::Waker;
use crossbeam_queue::SegQueue;
use parking_lot::Mutex;
use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

pub(crate) use grouped::{Grouping, Size, size_of};

/// The attempt of an entry that nothing else was said about.
const FIRST: Attempt = Attempt::FIRST;

/// What all workers of an executor share with the dispatcher.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) registry: Registry,
    /// Records that were passed over. Pushed to only when a handler asks for it.
    pub(crate) skipped: SegQueue<Passed>,
    pub(crate) waker: Waker,
    pub(crate) spin: Spin,
}

/// A record that was passed over, as the worker reports it.
#[derive(Debug)]
pub(crate) struct Passed {
    pub(crate) epoch: u16,
    pub(crate) offset: i64,
    pub(crate) reason: String,
}

/// What a tracked record is sent for.
#[derive(Debug, Clone)]
pub(crate) struct Errand {
    pub(crate) attempt: Attempt,
    /// To the dead-letter hook, for this reason.
    pub(crate) bury: Option<String>,
}

/// What one worker and the dispatcher tell each other beside the lane. Used only after failures.
#[derive(Debug, Default)]
pub(crate) struct Post {
    /// How each entry ended that is handed back as failed, in the order of the lane.
    pub(crate) reports: SegQueue<Outcome>,
    pub(crate) fences: SegQueue<Fence>,
    /// What tracked records are sent for, by position in the lane. Locked for those only.
    pub(crate) errands: Mutex<HashMap<u32, Errand>>,
}

/// The dispatcher has seen every failure before position `seen`; from position `from` on nothing in
/// the lane was sent before that.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fence {
    pub(crate) seen: u32,
    pub(crate) from: u32,
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

impl Spin {
    /// For the shortest wait: some tens of microseconds of looking before each sleep. A worker without
    /// work then costs CPU each time it runs dry, but none while it sleeps.
    pub fn latency() -> Self {
        Spin { pauses: 2_000, yields: 32 }
    }

    /// For the least CPU: a worker without work sleeps at once.
    pub fn cpu() -> Self {
        Spin { pauses: 0, yields: 0 }
    }
}

impl Default for Spin {
    fn default() -> Self {
        Spin { pauses: 20, yields: 8 }
    }
}

/// Why and after what a record is given to the dead-letter hook.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeadLetter {
    /// The last attempt's reason, or that its key is quarantined.
    pub reason: String,
    /// Attempts of the handler, 0 for a record of a quarantined key.
    pub attempts: u32,
    /// When the first of them failed, in the time of [`Executor::pass`](crate::Executor::pass).
    pub first_failure: Option<Duration>,
}

type Hook<T> = Box<dyn Fn(&T, &DeadLetter) -> Result<(), String> + Send + Sync>;

/// The user's code: a handler, and what takes the records it cannot handle.
pub struct Handler<T> {
    pub(crate) process: Box<dyn Process<T>>,
    pub(crate) hook: Option<Hook<T>>,
    pub(crate) size: Option<Size<T>>,
}

impl<T> fmt::Debug for Handler<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handler").field("dead_letter", &self.hook.is_some()).finish_non_exhaustive()
    }
}

impl<T: Send + 'static> Handler<T> {
    /// Called for each record.
    pub fn each<F, R>(handler: F) -> Self
    where
        F: Fn(&T) -> R + Send + Sync + 'static,
        R: IntoOutcome + 'static,
    {
        Self::each_attempt(move |record, _| handler(record))
    }

    /// Called for each record, and told which attempt it is.
    pub fn each_attempt<F, R>(handler: F) -> Self
    where
        F: Fn(&T, Attempt) -> R + Send + Sync + 'static,
        R: IntoOutcome + 'static,
    {
        Handler {
            process: Box::new(Each { handler, returns: PhantomData }),
            hook: None,
            size: None,
        }
    }

    /// Called for up to [`Builder::batch`](crate::Builder::batch) records.
    pub fn batches<F, R>(handler: F) -> Self
    where
        F: Fn(&Batch<'_, T>) -> R + Send + Sync + 'static,
        R: IntoBatchOutcome + 'static,
    {
        Handler {
            process: Box::new(Batches { handler, returns: PhantomData }),
            hook: None,
            size: None,
        }
    }

    /// Bytes of a record, for [`Builder::batch_bytes`](crate::Builder::batch_bytes). Called on a
    /// worker, and with a [linger](crate::Builder::linger) also by the thread that drives the
    /// executor. A record for which it panics goes alone.
    pub fn record_bytes<F>(mut self, size: F) -> Self
    where
        F: Fn(&T) -> usize + Send + Sync + 'static,
    {
        self.size = Some(Box::new(size));
        self
    }

    /// Called, on a worker, for a record that goes to the dead letters. When it fails it is called
    /// again, after the delays of the [`Retry`](crate::Retry) policy and without end: the record is
    /// finished only when it has succeeded.
    pub fn dead_letter<F, E>(mut self, hook: F) -> Self
    where
        F: Fn(&T, &DeadLetter) -> Result<(), E> + Send + Sync + 'static,
        E: fmt::Display,
    {
        self.hook = Some(Box::new(move |record, letter| {
            hook(record, letter).map_err(|error| error.to_string())
        }));
        self
    }
}

/// Whether an entry may be handled now.
enum Gate {
    /// It was dealt with.
    Pass,
    Run(Errand),
}

/// A class whose entries the worker hands back.
#[derive(Debug)]
struct Bouncing {
    class: u32,
    /// Position of the entry that failed.
    since: u32,
    /// Up to where, once a fence has said so.
    until: Option<u32>,
}

/// Where a worker looks up epochs and leaves outcomes.
#[derive(Debug)]
pub(crate) struct Desk {
    cache: Cache,
    common: Arc<Common>,
    post: Arc<Post>,
    bouncing: Vec<Bouncing>,
    /// The classes of `bouncing`, a bit each.
    classes: u128,
    /// While the entries of a run are not handled in the order of the lane: how those ended that
    /// failed, by index.
    sorted: Option<Vec<(u32, Outcome)>>,
}

impl Desk {
    /// Whether each entry has to be looked at before it is handled.
    #[inline(always)]
    fn is_cautious(&self) -> bool {
        self.classes != 0 || self.common.registry.is_cautious()
    }

    fn bounces(&self, class: u32) -> bool {
        self.classes & 1 << class != 0
    }

    /// Whether an entry of a class is to be handed back at this position.
    fn bounces_at(&self, class: u32, position: u32) -> bool {
        let mut bouncing = self.bouncing.iter().filter(|bouncing| bouncing.class == class);
        self.bounces(class)
            && bouncing.any(|bouncing| !bouncing.until.is_some_and(|at| reached(position, at)))
    }

    fn is_halted<T>(&self, entry: &Entry<T>) -> bool {
        self.cache.get(entry.epoch()).is_none_or(|epoch| epoch.halted())
    }

    /// Forgets the classes whose last entry lies before `position`.
    fn heed_fences(&mut self, position: u32) {
        if self.classes == 0 {
            return;
        }
        while let Some(fence) = self.post.fences.pop() {
            for bouncing in &mut self.bouncing {
                // The nearer one counts: the dispatcher may have taken entries back since.
                let nearer = bouncing.until.is_none_or(|until| reached(until, fence.from));
                if nearer && reached(fence.seen, advance(bouncing.since, 1)) {
                    bouncing.until = Some(fence.from);
                }
            }
        }
        self.bouncing.retain(|bouncing| !bouncing.until.is_some_and(|at| reached(position, at)));
        self.classes = self.bouncing.iter().fold(0, |all, bouncing| all | 1 << bouncing.class);
    }

    #[cold]
    fn gate<T>(&mut self, run: &mut Run<'_, Entry<T>>, index: u32) -> Gate {
        self.heed_fences(run.position(index));
        self.gate_here(run, index)
    }

    fn gate_here<T>(&mut self, run: &mut Run<'_, Entry<T>>, index: u32) -> Gate {
        let position = run.position(index);
        let entry = run.get(index);
        let errand = entry.is_tracked().then(|| self.post.errands.lock().remove(&position));
        if self.is_halted(entry) {
            if entry.is_tracked() {
                hand_back(run, index, Back::Halted);
            }
            return Gate::Pass;
        }
        if self.bounces_at(entry.class(), position) {
            hand_back(run, index, Back::Bounced);
            return Gate::Pass;
        }
        let first = Errand { attempt: Attempt::FIRST, bury: None };
        Gate::Run(errand.flatten().unwrap_or(first))
    }

    /// Whether an entry may be handled together with others, as far as the worker can tell.
    #[cold]
    fn is_plain<T>(&mut self, run: &Run<'_, Entry<T>>, index: u32) -> bool {
        self.heed_fences(run.position(index));
        self.is_plain_here(run, index)
    }

    fn is_plain_here<T>(&self, run: &Run<'_, Entry<T>>, index: u32) -> bool {
        let entry = run.get(index);
        let bounces = self.bounces_at(entry.class(), run.position(index));
        !entry.is_tracked() && !self.is_halted(entry) && !bounces
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
        let split = run.split(from, to);
        self.part_done(run, from, split);
        if split < to {
            self.part_done(run, split, to);
        }
    }

    #[inline]
    fn part_done<T>(&self, run: &Run<'_, Entry<T>>, from: u32, to: u32) {
        let mut entries = run.range(from, to);
        let mut next = entries.next();
        while let Some(first) = next {
            let Some(epoch) = self.cache.get(first.epoch()) else { return };
            next = epoch.finish_streak(first, &mut entries);
        }
    }

    /// Ends an entry that was handled, and is not simply done or is tracked.
    #[cold]
    fn settle<T>(&mut self, run: &mut Run<'_, Entry<T>>, index: u32, outcome: Outcome) {
        let entry = run.get(index);
        match outcome {
            Outcome::Done => {}
            Outcome::Skip(reason) => {
                if let Some(epoch) = self.cache.get(entry.epoch()) {
                    // Before it is marked: afterwards its place may be another's.
                    let offset = epoch.offset_of(&entry.place());
                    self.common.skipped.push(Passed { epoch: entry.epoch(), offset, reason });
                }
            }
            failed => return self.fail(run, index, failed),
        }
        self.done(entry);
        if entry.is_tracked() {
            hand_back(run, index, Back::Done);
        }
    }

    fn fail<T>(&mut self, run: &mut Run<'_, Entry<T>>, index: u32, how: Outcome) {
        let class = run.get(index).class();
        match &mut self.sorted {
            None => self.post.reports.push(how),
            Some(reports) => reports.push((index, how)),
        }
        hand_back(run, index, Back::Failed);
        self.bounce(run.position(index), class);
    }

    fn bounce(&mut self, since: u32, class: u32) {
        if !self.bounces_at(class, since) {
            // Another that ends before; this one goes on longer.
            self.bouncing.retain(|bouncing| bouncing.class != class);
            self.bouncing.push(Bouncing { class, since, until: None });
            self.classes |= 1 << class;
        }
    }

    /// Ends the entries of a batch.
    #[cold]
    fn settle_batch<T>(
        &mut self,
        run: &mut Run<'_, Entry<T>>,
        from: u32,
        to: u32,
        outcome: BatchOutcome,
    ) {
        for (index, how) in (from..to).zip(outcome.each()) {
            self.settle_in_batch(run, index, how);
        }
    }

    /// Ends an entry of a batch. Whatever failed before it in the batch is of the same class, or
    /// does not matter to it.
    fn settle_in_batch<T>(
        &mut self,
        run: &mut Run<'_, Entry<T>>,
        index: u32,
        how: Option<Outcome>,
    ) {
        let class = run.get(index).class();
        match how {
            Some(finished @ (Outcome::Done | Outcome::Skip(_))) => {
                self.settle(run, index, finished);
            }
            Some(failed) if !self.bounces_at(class, run.position(index)) => {
                self.fail(run, index, failed);
            }
            // Not handled, or failed behind a failed one, which may be of the same key.
            _ => {
                hand_back(run, index, Back::Bounced);
                self.bounce(run.position(index), class);
            }
        }
    }
}

fn hand_back<T>(run: &mut Run<'_, Entry<T>>, index: u32, why: Back) {
    run.get_mut(index).hand_back(why);
    run.hand_back(index);
}

/// The outcome of the dead-letter hook.
fn bury<T>(hook: Option<&Hook<T>>, record: &T, attempt: Attempt, reason: String) -> Outcome {
    let Some(hook) = hook else {
        // The dispatcher does not send one for that without a hook.
        return Outcome::Halt(reason);
    };
    let attempts = attempt.number - 1;
    let letter = DeadLetter { reason, attempts, first_failure: attempt.first_failure };
    match hook(record, &letter) {
        Ok(()) => Outcome::Done,
        Err(error) => Outcome::Failed(error),
    }
}

/// How a run of entries is handed to the user's code.
pub(crate) trait Process<T>: Send + Sync + 'static {
    /// Records one call wants to have, if so many are there, for a batch size.
    fn least(&self, batch: u32) -> u32;
    fn process(
        &self,
        run: &mut Run<'_, Entry<T>>,
        desk: &mut Desk,
        hook: Option<&Hook<T>>,
        batch: u32,
    );
    /// One call for the listed entries of a run.
    fn call(&self, run: &Run<'_, Entry<T>>, listed: &[u32], attempt: Attempt) -> BatchOutcome;
}

/// One call per record.
#[derive(Debug)]
struct Each<F, R> {
    handler: F,
    returns: PhantomData<fn() -> R>,
}

impl<T, F, R> Process<T> for Each<F, R>
where
    F: Fn(&T, Attempt) -> R + Send + Sync + 'static,
    R: IntoOutcome + 'static,
{
    fn least(&self, _: u32) -> u32 {
        1
    }

    fn call(&self, run: &Run<'_, Entry<T>>, listed: &[u32], attempt: Attempt) -> BatchOutcome {
        let each = listed
            .iter()
            .map(|index| (self.handler)(&run.get(*index).payload, attempt).into_outcome());
        BatchOutcome::Each(each.collect())
    }

    fn process(
        &self,
        run: &mut Run<'_, Entry<T>>,
        desk: &mut Desk,
        hook: Option<&Hook<T>>,
        _: u32,
    ) {
        let mut index = 0;
        while index < run.len() {
            // One catch for the whole run, entered again only after a panic.
            let ended = catch_unwind(AssertUnwindSafe(|| {
                while index < run.len() {
                    let mut errand = Errand { attempt: Attempt::FIRST, bury: None };
                    let cautious = desk.is_cautious();
                    if cautious {
                        match desk.gate(run, index) {
                            Gate::Pass => {
                                index += 1;
                                continue;
                            }
                            Gate::Run(what) => errand = what,
                        }
                    }
                    let record = &run.get(index).payload;
                    let outcome = match errand.bury {
                        None => (self.handler)(record, errand.attempt).into_outcome(),
                        Some(reason) => bury(hook, record, errand.attempt, reason),
                    };
                    if matches!(outcome, Outcome::Done) && !cautious {
                        desk.done(run.get(index));
                    } else {
                        desk.settle(run, index, outcome);
                    }
                    index += 1;
                }
            }));
            if let Err(panic) = ended {
                desk.settle(run, index, Outcome::Failed(panic_text(&*panic)));
                index += 1;
            }
        }
    }
}

/// One call per batch.
#[derive(Debug)]
struct Batches<F, R> {
    handler: F,
    returns: PhantomData<fn() -> R>,
}

impl<T, F, R> Process<T> for Batches<F, R>
where
    F: Fn(&Batch<'_, T>) -> R + Send + Sync + 'static,
    R: IntoBatchOutcome + 'static,
{
    fn least(&self, batch: u32) -> u32 {
        batch
    }

    fn call(&self, run: &Run<'_, Entry<T>>, listed: &[u32], attempt: Attempt) -> BatchOutcome {
        (self.handler)(&Batch::listed(run, listed, attempt)).into_batch_outcome()
    }

    fn process(
        &self,
        run: &mut Run<'_, Entry<T>>,
        desk: &mut Desk,
        hook: Option<&Hook<T>>,
        most: u32,
    ) {
        let mut from = 0;
        while from < run.len() {
            if desk.is_cautious() {
                from = self.process_carefully(run, from, desk, hook, most);
                continue;
            }
            // One catch for many calls, entered again only after a panic.
            let ended = catch_unwind(AssertUnwindSafe(|| {
                while from < run.len() && !desk.is_cautious() {
                    let to = run.len().min(from + most);
                    let batch = Batch::new(run, from, to, FIRST);
                    let outcome = (self.handler)(&batch).into_batch_outcome();
                    if !matches!(outcome, BatchOutcome::All(Outcome::Done)) {
                        desk.settle_batch(run, from, to, outcome);
                    } else {
                        // Nothing in it needs a destructor, and for small batches its call counts.
                        std::mem::forget(outcome);
                        if to == from + 1 {
                            desk.done(run.get(from));
                        } else {
                            desk.all_done(run, from, to);
                        }
                    }
                    from = to;
                }
            }));
            if let Err(panic) = ended {
                let to = run.len().min(from + most);
                let failed = Outcome::Failed(panic_text(&*panic));
                desk.settle_batch(run, from, to, BatchOutcome::All(failed));
                from = to;
            }
        }
    }
}

impl<F, R> Batches<F, R> {
    /// One call, after a look at each entry. Returns the index after the last one.
    #[cold]
    fn process_carefully<T>(
        &self,
        run: &mut Run<'_, Entry<T>>,
        from: u32,
        desk: &mut Desk,
        hook: Option<&Hook<T>>,
        most: u32,
    ) -> u32
    where
        F: Fn(&Batch<'_, T>) -> R + Send + Sync + 'static,
        R: IntoBatchOutcome + 'static,
    {
        let errand = match desk.gate(run, from) {
            Gate::Pass => return from + 1,
            Gate::Run(what) => what,
        };
        let mut to = run.len().min(from + most);
        if run.get(from).is_tracked() {
            // Alone: its attempt is not that of the others.
            to = from + 1;
        }
        to = (from + 1..to).find(|at| !desk.is_plain(run, *at)).unwrap_or(to);
        let ended = catch_unwind(AssertUnwindSafe(|| match errand.bury {
            None => (self.handler)(&Batch::new(run, from, to, errand.attempt)).into_batch_outcome(),
            Some(reason) => {
                let outcome = bury(hook, &run.get(from).payload, errand.attempt, reason);
                BatchOutcome::All(outcome)
            }
        }));
        let outcome =
            ended.unwrap_or_else(|panic| BatchOutcome::All(Outcome::Failed(panic_text(&*panic))));
        desk.settle_batch(run, from, to, outcome);
        to
    }
}

/// The text of a caught panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&'static str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    match text {
        Some(text) => format!("the handler panicked: {text}"),
        None => "the handler panicked".to_owned(),
    }
}

/// A worker without its thread.
#[derive(Debug)]
pub(crate) struct Worker<T> {
    lane: LaneRx<Entry<T>>,
    desk: Desk,
    handler: Arc<Handler<T>>,
    batch: u32,
    /// How batches are put together, when not simply of neighbours.
    grouping: Option<Grouping>,
    /// Whether a batch may go around the end of the lane's slots.
    around: bool,
}

impl<T: Send + 'static> Worker<T> {
    pub(crate) fn new(
        lane: LaneRx<Entry<T>>,
        handler: Arc<Handler<T>>,
        common: Arc<Common>,
        post: Arc<Post>,
        batch: u32,
    ) -> Self {
        let (cache, bouncing) = (Cache::new(), Vec::new());
        let desk = Desk { cache, common, post, bouncing, classes: 0, sorted: None };
        Worker { lane, desk, handler, batch, grouping: None, around: false }
    }

    /// Batches that are put together in a way of their own; `around`: and that are handed over whole.
    pub(crate) fn group(mut self, grouping: Option<Grouping>, around: bool) -> Self {
        (self.grouping, self.around) = (grouping, around);
        self
    }

    /// Whether it has ended: its lane is stopped and empty.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn is_over(&self) -> bool {
        self.lane.stopped() && self.lane.is_empty()
    }

    /// Handles the next run; `false` when there is none.
    #[inline]
    pub(crate) fn turn(&mut self) -> bool {
        let process = &*self.handler.process;
        let least = process.least(self.batch);
        let claimed =
            if self.around { self.lane.claim_around(least) } else { self.lane.claim(least) };
        let Some(mut run) = claimed else { return false };
        self.desk.cache.refresh(&self.desk.common.registry);
        if let Some(grouping) = &mut self.grouping {
            grouping.process(&mut run, &mut self.desk, &self.handler, self.batch);
            return true;
        }
        process.process(&mut run, &mut self.desk, self.handler.hook.as_ref(), self.batch);
        true
    }

    /// A worker thread's life: until the lane is stopped and empty.
    pub(crate) fn work(mut self) {
        let spin = self.desk.common.spin;
        loop {
            if self.turn() {
                // A driver whose record was refused may have room now.
                self.desk.common.waker.wake_refused();
                continue;
            }
            // Dry: the dispatcher may be napping on the thought that this lane is busy.
            self.desk.common.waker.wake();
            if self.lane.stopped() {
                // `stopped` acquires what was flushed before; only an empty lane ends the worker.
                if self.lane.is_empty() {
                    return;
                }
                continue;
            }
            if !look_for_work(&self.lane, spin) && self.lane.doze() {
                // Once only: the flush that wakes us takes the sleep's announcement back, and what
                // it brought may be recalled before we run. Then the sleep must be announced again.
                std::thread::park();
            }
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
