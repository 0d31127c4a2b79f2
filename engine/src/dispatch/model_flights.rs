//! Flights against a plain model: random steps, one at a time, on a virtual clock.
//!
//! There are no threads and no runtime. A future's next poll is a step, and so is its drop, the end of a
//! guard that it left behind, a record that is pulled or ended, a pass, an offer, a halt, a revoke. So
//! every interleaving at await points can occur, and a failing seed repeats exactly.

use super::{Builder, EpochId, Executor, Route};
use crate::flight::{AsyncHandler, FlightFuture, Task};
use crate::outcome::Outcome;
use crate::pull::{Pulled, Puller};
use crate::retry::{Attempt, Exhausted, Retry};
use crate::wake::Waiter;
use crate::worker::DeadLetter;
use proptest::prelude::*;
use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::future::poll_fn;
use std::panic::resume_unwind;
use std::task::{Context, Poll};
use std::time::Duration;

const PARTITIONS: usize = 2;
const KEYS: u64 = 12;
/// Offered to the executor as a record without an order.
const NO_KEY: u64 = u64::MAX;

/// A record: which one it is.
type Id = usize;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Ending {
    Done,
    Skip,
    DeadLetter,
    Halt,
}

#[derive(Debug)]
struct Record {
    epoch: usize,
    offset: i64,
    key: u64,
    /// Attempts that fail before it ends.
    failures: u32,
    ending: Ending,
    /// Failures of the hook before it succeeds.
    hook_failures: u32,
    attempts: u32,
    hook_attempts: u32,
    finished: bool,
}

#[derive(Debug)]
struct Epoch {
    id: EpochId,
    next: i64,
    records: Vec<Id>,
    open: bool,
    /// It was halted from outside, or closed: nothing of it starts any more.
    stopped: bool,
    /// It may halt: a record of it asked for that, or used its attempts up.
    halts: bool,
}

#[derive(Debug, Clone, Copy)]
struct Settings {
    pull: bool,
    concurrency: usize,
    shards: usize,
    capacity: u32,
    attempts: u32,
    then: Exhausted,
    hook: bool,
    /// In a hundred records.
    failing: u64,
}

struct World {
    executor: Executor<Id>,
    puller: Option<Puller<Id>>,
    records: Vec<Record>,
    epochs: Vec<Epoch>,
    /// The epoch of each partition.
    current: Vec<usize>,
    /// Keys with a record that is being handled, or whose guard was not given back.
    running: HashSet<u64>,
    now: Duration,
    random: u64,
    /// Nothing more is offered, and nothing is dropped.
    finishing: bool,
    settings: Settings,
    /// The first thing that was wrong where a panic would be caught.
    wrong: Option<String>,
}

/// A future on the model's runtime.
struct Spawned {
    future: FlightFuture,
    id: Id,
    hook: bool,
}

thread_local! {
    static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
    static FUTURES: RefCell<Vec<Spawned>> = const { RefCell::new(Vec::new()) };
    /// Guards that outlive their futures.
    static KEPT: RefCell<Vec<(Token, Task<Id>)>> = const { RefCell::new(Vec::new()) };
    static PULLED: RefCell<Vec<(Token, Pulled<Id>)>> = const { RefCell::new(Vec::new()) };
    /// The record whose future is being made, and whether for the hook.
    static MAKING: Cell<(Id, bool)> = const { Cell::new((0, false)) };
    /// What the runtime refused, which drops it.
    static REFUSED: RefCell<Vec<(Id, bool)>> = const { RefCell::new(Vec::new()) };
    /// One of how many futures the runtime refuses; 0 for none.
    static REFUSES: Cell<usize> = const { Cell::new(0) };
}

/// The world, for a moment: nothing that may call a handler or drop a token happens in `f`.
fn with<R>(f: impl FnOnce(&mut World) -> R) -> R {
    WORLD.with_borrow_mut(|world| f(world.as_mut().expect("a world")))
}

/// A record is being handled.
struct Token(Id);

impl Drop for Token {
    fn drop(&mut self) {
        with(|world| {
            let key = world.records[self.0].key;
            world.running.remove(&key);
        });
    }
}

impl World {
    fn below(&mut self, bound: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 8) % bound
    }

    fn hash(key: u64) -> u64 {
        (key + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    fn offer(&mut self) {
        if self.finishing {
            return;
        }
        let partition = self.below(PARTITIONS as u64) as usize;
        let epoch = self.current[partition];
        let id = self.epochs[epoch].id;
        let mut batch = Vec::new();
        let room = u64::from(self.executor.room(id));
        let most =
            if self.below(4) == 0 { room } else { u64::from(self.executor.demand()).min(room) };
        for _ in 0..self.below(20).min(most) {
            if self.below(5) == 0 {
                self.epochs[epoch].next += self.below(1 << 30) as i64;
            }
            let key = match self.below(10) {
                0 => NO_KEY,
                1..=4 => partition as u64,
                _ => self.below(KEYS / 2) * 2 + partition as u64,
            };
            let fails = self.below(100) < self.settings.failing;
            let failures = if fails { self.below(4) as u32 } else { 0 };
            let ending = match self.below(if fails { 12 } else { 200 }) {
                0 => Ending::Skip,
                1 if self.settings.hook => Ending::DeadLetter,
                2 if self.below(6) == 0 => Ending::Halt,
                _ => Ending::Done,
            };
            let hook_failures = self.below(3) as u32;
            let offset = self.epochs[epoch].next;
            self.epochs[epoch].next += 1;
            let index = self.records.len();
            self.epochs[epoch].records.push(index);
            self.records.push(Record {
                epoch,
                offset,
                key,
                failures,
                ending,
                hook_failures,
                attempts: 0,
                hook_attempts: 0,
                finished: false,
            });
            let route = if key == NO_KEY { Route::Free } else { Route::Ordered(Self::hash(key)) };
            batch.push((offset, route, index));
        }
        let count = batch.len();
        match self.executor.offer_all(id, batch) {
            Ok(admitted) => assert_eq!(admitted as usize, count),
            Err(rejected) => {
                assert!(self.epochs[epoch].halts, "{:?}", rejected.refused);
                // Never admitted, so it does not count.
                let from = self.records.len() - count;
                self.epochs[epoch].records.retain(|id| *id < from);
            }
        }
    }

    /// The handling of a record begins.
    fn begin(&mut self, id: Id, attempt: Attempt, letter: Option<&DeadLetter>) {
        let record = &self.records[id];
        let epoch = &self.epochs[record.epoch];
        let mut wrong = None;
        if record.finished {
            wrong = Some(format!("record {id} is handled again after it was finished"));
        }
        if epoch.stopped {
            wrong = Some(format!("record {id} starts after its epoch has ended"));
        }
        let attempts = letter.map_or(attempt.number - 1, |letter| letter.attempts);
        let first_failure = letter.map_or(attempt.first_failure, |letter| letter.first_failure);
        if attempts != record.attempts || first_failure.is_none() && record.attempts > 0 {
            wrong = Some(format!("{attempt:?}, {letter:?} of {id} after {}", record.attempts));
        }
        if record.key != NO_KEY {
            for earlier in epoch.records.iter().take_while(|earlier| **earlier < id) {
                let before = &self.records[*earlier];
                if before.key == record.key && !before.finished {
                    wrong = Some(format!("record {id} overtakes record {earlier}"));
                }
            }
            if !self.running.insert(record.key) {
                wrong = Some(format!("record {id}: two of one key at once"));
            }
        }
        if let Some(wrong) = wrong {
            self.wrong.get_or_insert(wrong);
        }
    }

    /// An attempt of the handler has failed.
    fn failed(&mut self, id: Id) {
        let record = &mut self.records[id];
        record.attempts += 1;
        if record.attempts == self.settings.attempts {
            match self.settings.then {
                // By the dispatcher, when it sees it; nothing of the key may run before.
                Exhausted::Skip => record.finished = true,
                Exhausted::DeadLetter | Exhausted::Quarantine if self.settings.hook => {}
                _ => self.epochs[record.epoch].halts = true,
            }
        }
    }

    /// How an attempt for a record ends; `None` in a panic or a drop.
    fn attempt(&mut self, id: Id) -> Option<Outcome> {
        let how = self.below(4);
        let record = &mut self.records[id];
        if record.attempts < record.failures {
            self.failed(id);
            return match how {
                0 => Some(Outcome::RetryAfter(Duration::ZERO, "again".to_owned())),
                1 => Some(Outcome::RetryAfter(Duration::from_millis(30), "later".to_owned())),
                2 => Some(Outcome::Failed("failed".to_owned())),
                _ => None,
            };
        }
        record.attempts += 1;
        Some(match record.ending {
            Ending::Done => {
                record.finished = true;
                Outcome::Done
            }
            Ending::Skip => {
                record.finished = true;
                Outcome::Skip("not wanted".to_owned())
            }
            Ending::DeadLetter => Outcome::DeadLetter("cannot be read".to_owned()),
            Ending::Halt => {
                self.epochs[record.epoch].halts = true;
                Outcome::Halt("stop".to_owned())
            }
        })
    }

    fn hook(&mut self, id: Id) -> Result<(), String> {
        let record = &mut self.records[id];
        record.hook_attempts += 1;
        if record.hook_attempts <= record.hook_failures {
            return Err("the hook failed".to_owned());
        }
        record.finished = true;
        Ok(())
    }

    /// Every watermark is where it may be.
    fn try_check(&mut self) -> Result<(), String> {
        for epoch in &self.epochs {
            let Some(progress) = self.executor.progress(epoch.id) else {
                if epoch.open {
                    return Err("an open epoch is gone".to_owned());
                }
                continue;
            };
            let first = epoch.records.iter().map(|id| &self.records[*id]).find(|r| !r.finished);
            if let Some(first) = first.filter(|first| progress.watermark > first.offset) {
                let watermark = progress.watermark;
                return Err(format!("watermark {watermark} above unfinished {}", first.offset));
            }
        }
        while let Some(failure) = self.executor.take_failure() {
            let epoch = self.epochs.iter().find(|epoch| epoch.id == failure.epoch);
            if !epoch.is_some_and(|epoch| epoch.halts) {
                return Err(format!("{failure:?}"));
            }
        }
        while self.executor.take_skipped().is_some() {}
        self.executor.check_holds()?;
        self.executor.check_flights()
    }

    fn reassign(&mut self, partition: usize) {
        let old = self.current[partition];
        self.executor.close(self.epochs[old].id).expect("it was open");
        self.epochs[old].open = false;
        self.epochs[old].stopped = true;
        self.open(partition);
    }

    fn open(&mut self, partition: usize) {
        let start = self.below(1_000) as i64;
        let id = self.executor.open(start, self.settings.capacity).expect("a window");
        self.current[partition] = self.epochs.len();
        self.epochs.push(Epoch {
            id,
            next: start,
            records: Vec::new(),
            open: true,
            stopped: false,
            halts: false,
        });
    }
}

fn check() {
    for (id, hook) in REFUSED.take() {
        dropped(id, hook);
    }
    with(|world| {
        if world.wrong.is_none()
            && let Err(wrong) = world.try_check()
        {
            world.wrong = Some(wrong);
        }
        assert_eq!(world.wrong, None);
    });
}

/// A future or a pulled record went without an outcome.
fn dropped(id: Id, hook: bool) {
    if !hook {
        with(|world| world.failed(id));
    }
}

/// Takes one of a list at random.
fn any_of<E>(list: &'static std::thread::LocalKey<RefCell<Vec<E>>>) -> Option<E> {
    let count = list.with_borrow(|list| list.len());
    if count == 0 {
        return None;
    }
    let index = with(|world| world.below(count as u64) as usize);
    Some(list.with_borrow_mut(|list| list.swap_remove(index)))
}

fn poll() {
    let Some(mut spawned) = any_of(&FUTURES) else { return };
    let mut context = Context::from_waker(std::task::Waker::noop());
    if spawned.future.as_mut().poll(&mut context).is_pending() {
        FUTURES.with_borrow_mut(|futures| futures.push(spawned));
    }
}

fn take_pulled() {
    let (puller, max) = with(|world| (world.puller.clone(), world.below(3) as usize));
    let Some(puller) = puller else { return };
    let taken = match max {
        0 => puller.try_next().expect("it goes on").into_iter().collect(),
        max => puller.next_batch(max, Duration::ZERO).expect("it goes on"),
    };
    for pulled in taken {
        with(|world| world.begin(*pulled, pulled.attempt(), pulled.dead_letter()));
        PULLED.with_borrow_mut(|list| list.push((Token(*pulled), pulled)));
    }
}

fn end_pulled() {
    let Some((token, pulled)) = any_of(&PULLED) else { return };
    let id = *pulled;
    // Before the end: from then on the next one may start.
    drop(token);
    if with(|world| !world.finishing && world.below(12) == 0) {
        dropped(id, pulled.dead_letter().is_some());
        return drop(pulled);
    }
    if pulled.dead_letter().is_none() {
        return match with(|world| world.attempt(id)) {
            Some(Outcome::Done) => pulled.finish(),
            Some(Outcome::Failed(reason)) => pulled.fail(reason),
            Some(outcome) => pulled.end(outcome),
            None => drop(pulled),
        };
    }
    match with(|world| world.hook(id)) {
        Ok(()) => pulled.finish(),
        Err(reason) if id % 2 == 0 => pulled.end(Outcome::DeadLetter(reason)),
        Err(reason) => pulled.fail(reason),
    }
}

fn step() {
    match with(|world| world.below(100)) {
        0..40 => {
            poll();
            if with(|world| world.below(2) == 0) {
                take_pulled();
            } else {
                end_pulled();
            }
        }
        40..60 => with(World::offer),
        60..85 => with(|world| {
            let (small, large) = (world.below(400), world.below(20));
            world.now += Duration::from_micros(small);
            if large == 0 {
                world.now += Duration::from_millis(70);
            }
            world.executor.pass(world.now);
        }),
        85..91 => drop(any_of(&KEPT)),
        91..94 => {
            if let Some(spawned) = any_of(&FUTURES) {
                dropped(spawned.id, spawned.hook);
            }
        }
        94..97 => with(|world| {
            let partition = world.below(PARTITIONS as u64) as usize;
            let epoch = &mut world.epochs[world.current[partition]];
            let (id, halts) = (epoch.id, epoch.halts);
            match world.below(12) {
                0 => {
                    let epoch = &mut world.epochs[world.current[partition]];
                    (epoch.stopped, epoch.halts) = (true, true);
                    world.executor.halt(id);
                }
                1 => world.reassign(partition),
                _ if halts => world.reassign(partition),
                _ => {}
            }
        }),
        97..98 => with(|world| {
            let key = world.below(KEYS);
            world.executor.release(World::hash(key));
        }),
        _ => {}
    }
    check();
}

/// Whatever else may happen.
async fn breathe() {
    let mut steps = with(|world| world.below(4));
    poll_fn(|_| {
        steps = steps.saturating_sub(1);
        if steps == 0 { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Gives the guard back now or later.
fn give_back(token: Token, task: Task<Id>) {
    if with(|world| world.below(5) == 0) {
        KEPT.with_borrow_mut(|kept| kept.push((token, task)));
    }
}

async fn handle(task: Task<Id>) -> Outcome {
    let id = *task;
    with(|world| world.begin(id, task.attempt(), None));
    let token = Token(id);
    breathe().await;
    give_back(token, task);
    breathe().await;
    let Some(outcome) = with(|world| world.attempt(id)) else {
        // As a panic, but without its message.
        resume_unwind(Box::new("planted"));
    };
    outcome
}

async fn hook(task: Task<Id>, letter: DeadLetter) -> Result<(), String> {
    let id = *task;
    with(|world| world.begin(id, task.attempt(), Some(&letter)));
    let token = Token(id);
    breathe().await;
    let result = with(|world| world.hook(id));
    give_back(token, task);
    result
}

/// The model's runtime.
fn spawn(future: FlightFuture) {
    let (id, hook) = MAKING.get();
    let refuses = REFUSES.get();
    if refuses > 0 && id.is_multiple_of(refuses) {
        return REFUSED.with_borrow_mut(|refused| refused.push((id, hook)));
    }
    FUTURES.with_borrow_mut(|futures| futures.push(Spawned { future, id, hook }));
}

fn handler(settings: Settings) -> AsyncHandler<Id> {
    let mut handler = AsyncHandler::new(handle);
    let inner = handler.make;
    handler.make = Box::new(move |task, report| {
        MAKING.set((*task, false));
        inner(task, report)
    });
    if settings.hook {
        handler = handler.dead_letter_async(hook);
    }
    if let Some(inner) = handler.hook.take() {
        handler.hook = Some(Box::new(move |task, letter, report| {
            MAKING.set((*task, true));
            inner(task, letter, report)
        }));
    }
    handler
}

fn run(settings: Settings, seed: u64, steps: u32) {
    let waiter = Waiter::new();
    let retry = Retry::times(settings.attempts)
        .first(Duration::from_millis(10))
        .cap(Duration::from_millis(100))
        .then(settings.then);
    let builder =
        Builder::default().concurrency(settings.concurrency).shards(settings.shards).retry(retry);
    let (executor, puller) = if settings.pull {
        let (executor, puller) = builder.pull(waiter.waker()).expect("settings");
        (executor, Some(puller))
    } else {
        let executor = builder.start_futures(waiter.waker(), spawn, handler(settings));
        (executor.expect("settings"), None)
    };
    WORLD.set(Some(World {
        executor,
        puller,
        records: Vec::new(),
        epochs: Vec::new(),
        current: vec![0; PARTITIONS],
        running: HashSet::new(),
        now: Duration::ZERO,
        random: seed | 1,
        finishing: false,
        settings,
        wrong: None,
    }));
    // Another runtime in each fourth run.
    REFUSES.set(if seed.is_multiple_of(4) { 17 } else { 0 });
    with(|world| (0..PARTITIONS).for_each(|partition| world.open(partition)));
    for _ in 0..steps {
        step();
    }
    finish();
    WORLD.set(None);
}

/// Everything that was admitted to an epoch that is open and has not halted ends.
fn finish() {
    with(|world| world.finishing = true);
    REFUSES.set(0);
    for round in 0..40_000 {
        let parked = with(|world| {
            world.now += Duration::from_micros(if round % 8 == 0 { 50_000 } else { 5 });
            world.executor.pass(world.now);
            world.executor.parked().filter(|key| !key.quarantined || key.waiting > 0).count()
        });
        for _ in 0..FUTURES.with_borrow(Vec::len) {
            poll();
        }
        take_pulled();
        end_pulled();
        drop(any_of(&KEPT));
        check();
        let busy = with(|world| world.executor.busy() || world.executor.next_due().is_some());
        if !busy && parked == 0 {
            break;
        }
        assert!(round < 39_999, "it does not come to rest: {parked} parked, busy {busy}");
    }
    assert_eq!(FUTURES.with_borrow(Vec::len) + PULLED.with_borrow(Vec::len), 0);
    assert_eq!(KEPT.with_borrow(Vec::len), 0);
    with(|world| {
        for index in world.current.clone() {
            let epoch = &world.epochs[index];
            if !epoch.halts {
                let unfinished: Vec<i64> = epoch
                    .records
                    .iter()
                    .filter(|id| !world.records[**id].finished)
                    .map(|id| world.records[*id].offset)
                    .collect();
                assert_eq!(unfinished, Vec::<i64>::new(), "lost in epoch {index}");
                let progress = world.executor.progress(epoch.id).expect("open");
                let last = epoch.records.last().map(|id| world.records[*id].offset + 1);
                assert_eq!(progress.watermark, last.unwrap_or(progress.watermark));
                assert_eq!(progress.unfinished, 0);
            }
            world.executor.close(world.epochs[index].id).expect("open");
        }
        // What is closed leaves nothing behind.
        for _ in 0..3 {
            world.now += Duration::from_millis(50);
            world.executor.pass(world.now);
        }
        assert!(world.executor.epochs.iter().all(Option::is_none), "a slot is not freed");
        assert!(!world.executor.common.registry.is_cautious());
        assert_eq!((world.executor.in_flight(), world.executor.slab.len()), (0, 0));
        assert!(world.executor.ready.is_empty() && world.running.is_empty());
        let left: Vec<_> = world.executor.parked().filter(|key| !key.quarantined).collect();
        assert!(left.is_empty(), "{left:?}");
    });
}

fn settings() -> impl Strategy<Value = Settings> {
    let sizes =
        (prop_oneof![1..4_usize, 10..60_usize], 1..9_usize, prop_oneof![1..5_u32, 20..300_u32]);
    let then = prop_oneof![
        Just(Exhausted::Halt),
        Just(Exhausted::Skip),
        Just(Exhausted::DeadLetter),
        Just(Exhausted::Quarantine)
    ];
    let failing = prop_oneof![Just(0), Just(5), Just(40), Just(90)];
    (sizes, any::<bool>(), 1..5_u32, then, any::<bool>(), failing).prop_map(
        |((concurrency, shards, capacity), pull, attempts, then, hook, failing)| Settings {
            pull,
            concurrency,
            shards,
            capacity,
            attempts,
            then,
            // Those who pull get the dead letters in any case.
            hook: hook || pull || then.needs_hook(),
            failing,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn flights_keep_the_promises(settings in settings(), seed in any::<u64>(), steps in 1..500_u32) {
        run(settings, seed, steps);
    }
}
