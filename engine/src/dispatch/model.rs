//! The executor against a plain model: random steps, one at a time, on a virtual clock.
//!
//! There are no threads. A worker's turn is a step, and inside a handler call any other steps may
//! happen: the dispatcher passes, takes records in, recalls; other workers take turns; epochs close.
//! So every interleaving at the borders of handler calls can occur, and a failing seed repeats exactly.

use super::{BatchOf, Builder, EpochId, Executor, Rate, Route, StallState, shard_of};
use crate::batch::Batch;
use crate::error::Refused;
use crate::limits::Limits;
use crate::outcome::{BatchOutcome, Outcome};
use crate::retry::{Attempt, Exhausted, Retry};
use crate::snapshot::Snapshot;
use crate::wake::Waiter;
use crate::worker::{DeadLetter, Handler, Worker};
use proptest::prelude::*;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

const PARTITIONS: usize = 2;
const KEYS: u64 = 12;
/// Offered to the executor as a record without an order.
const NO_KEY: u64 = u64::MAX;

/// A record: which one it is.
type Id = usize;

#[derive(Debug, Clone, PartialEq)]
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
    /// A newer record of its key was handled in its stead.
    carried_by: Option<Id>,
}

#[derive(Debug)]
struct Epoch {
    id: EpochId,
    next: i64,
    records: Vec<Id>,
    open: bool,
    /// To where it was moved on.
    moved: i64,
    /// It may halt: a record of it asked for that, or used its attempts up.
    halts: bool,
}

struct World {
    executor: Executor<Id>,
    /// A worker that takes its turn is not there.
    workers: Vec<Option<Worker<Id>>>,
    records: Vec<Record>,
    epochs: Vec<Epoch>,
    /// The epoch of each partition.
    current: Vec<usize>,
    running: HashSet<u64>,
    /// Records in handler calls.
    handled: HashSet<Id>,
    now: Duration,
    random: u64,
    depth: u32,
    /// Nothing more is offered.
    finishing: bool,
    snapshot: Snapshot,
    settings: Settings,
    /// Handler calls, in all and for each key.
    calls: u64,
    calls_of: HashMap<u64, u64>,
    /// The first thing that was wrong in a handler call, where a panic would be caught.
    wrong: Option<String>,
}

#[derive(Debug, Clone, Copy)]
struct Settings {
    workers: usize,
    shards: usize,
    batch: usize,
    batches: bool,
    capacity: u32,
    /// Limits on bytes and offsets, too.
    limited: bool,
    attempts: u32,
    then: Exhausted,
    hook: bool,
    /// In a hundred records.
    failing: u64,
    extras: Extras,
}

/// How batches are put together, conflation, and rates (per second and burst).
#[derive(Debug, Clone, Copy)]
struct Extras {
    linger: Duration,
    of: BatchOf,
    bytes: Option<usize>,
    conflate: bool,
    rate: Option<(u32, u32)>,
    key_rate: Option<(u32, u32)>,
}

/// The size of a record.
fn bytes(id: Id) -> usize {
    id % 7
}

thread_local! {
    static WORLD: RefCell<Option<World>> = const { RefCell::new(None) };
}

/// The world, for a moment: nothing that may call a handler happens in `f`.
fn with<R>(f: impl FnOnce(&mut World) -> R) -> R {
    WORLD.with_borrow_mut(|world| f(world.as_mut().expect("a world")))
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
        // Sometimes more than is asked for.
        let most =
            if self.below(4) == 0 { room } else { u64::from(self.executor.demand()).min(room) };
        for _ in 0..self.below(40).min(most) {
            if self.below(5) == 0 {
                self.epochs[epoch].next += self.below(1 << 30) as i64;
            }
            // The first keys are hot, and some records have none. Keys belong to a partition.
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
            let record = Record {
                epoch,
                offset,
                key,
                failures,
                ending,
                hook_failures,
                attempts: 0,
                hook_attempts: 0,
                finished: false,
                carried_by: None,
            };
            let index = self.records.len();
            self.epochs[epoch].records.push(index);
            self.records.push(record);
            let route = if key == NO_KEY { Route::Free } else { Route::Ordered(Self::hash(key)) };
            batch.push((offset, route, index));
        }
        let count = batch.len();
        let sized = batch.into_iter().map(|(at, route, id)| (at, (id % 40) as u32, route, id));
        match self.executor.offer_all_sized(id, sized) {
            Ok(admitted) => assert_eq!(admitted as usize, count),
            Err(rejected) => {
                let refused = rejected.refused;
                let limit = matches!(refused, Refused::Bytes { .. } | Refused::Span { .. });
                assert!(self.epochs[epoch].halts || self.settings.limited && limit, "{refused:?}");
                // Never admitted, so they do not count.
                let from = rejected.payload;
                let kept = self.epochs[epoch].records.iter().filter(|id| **id < from).copied();
                self.epochs[epoch].records = kept.collect();
            }
        }
    }

    /// Workers come or go.
    fn resize(&mut self) {
        let wanted = 1 + self.below(5) as usize;
        self.executor.retire_down_to(wanted);
        while self.executor.workers() < wanted {
            let (index, worker) = self.executor.add_worker().expect("memory");
            if index == self.workers.len() {
                self.workers.push(None);
            }
            assert!(self.workers[index].is_none(), "the place of a worker that is there");
            self.workers[index] = Some(worker);
        }
    }

    /// What is said to hold a watermark does, and is where it is said to be.
    fn check_stalls(&self) -> Result<(), String> {
        for stall in self.executor.stalls() {
            let Some(epoch) = self.epochs.iter().find(|epoch| epoch.id == stall.epoch) else {
                return Err(format!("of no epoch: {stall:?}"));
            };
            let at = epoch.records.iter().position(|id| self.records[*id].offset == stall.offset);
            let Some(at) = at else { return Err(format!("no record: {stall:?}")) };
            let id = epoch.records[at];
            let record = &self.records[id];
            let behind = (epoch.records.len() - at) as u64;
            let first = epoch.records.iter().position(|id| !self.records[*id].finished);
            if stall.finished_behind + stall.unfinished != behind || first.is_some_and(|f| f < at) {
                return Err(format!("{behind} from the record on, first {first:?}: {stall:?}"));
            }
            let handled = self.handled.contains(&id);
            let wrong = match stall.state {
                StallState::Running { .. } => false,
                StallState::Queued { .. }
                | StallState::Parked { .. }
                | StallState::BehindParked
                | StallState::Throttled => {
                    // A conflated record is finished when the dispatcher has the newer one back.
                    let finished = record.finished && !self.settings.extras.conflate;
                    handled || (finished && !epoch.halts)
                }
                StallState::Failed => handled || !epoch.halts,
                // Seen by the ring and not by the scan: not in this model, where nothing is at once.
                _ => !epoch.halts && !record.finished,
            };
            if wrong {
                return Err(format!("handled {handled}, {record:?}: {stall:?}"));
            }
            let hash = (record.key != NO_KEY).then(|| super::not_free(Self::hash(record.key)));
            let settled = matches!(stall.state, StallState::Failed | StallState::Ending);
            if !settled && stall.hash != hash {
                return Err(format!("not {hash:?}: {stall:?}"));
            }
            // A conflated record waits for the attempts of a newer one.
            let own = !self.settings.batches && !self.settings.extras.conflate;
            let counts = own && !stall.dead_letter && !settled;
            // One less while what the handler said is on its way.
            if counts && !(record.attempts..=record.attempts + 1).contains(&stall.attempt) {
                return Err(format!("after {} attempts: {stall:?}", record.attempts));
            }
        }
        Ok(())
    }

    /// The source says that there is nothing below an offset any more.
    fn move_on(&mut self) {
        if self.finishing {
            return;
        }
        let partition = self.below(PARTITIONS as u64) as usize;
        let gap = self.below(50) as i64;
        let epoch = &mut self.epochs[self.current[partition]];
        epoch.next += gap;
        match self.executor.move_to(epoch.id, epoch.next) {
            Ok(_) => epoch.moved = epoch.next,
            Err(refused) => assert!(epoch.halts, "{refused:?}"),
        }
    }

    /// A handler call for a record begins.
    fn begin(&mut self, id: Id, attempt: Option<Attempt>) {
        let mut wrong = self.carry(id).err();
        self.handled.insert(id);
        let record = &self.records[id];
        let epoch = &self.epochs[record.epoch];
        if record.finished {
            wrong = Some(format!("record {id} is handled again after it was finished"));
        }
        if let Some(attempt) = attempt
            && (attempt.number != record.attempts + 1
                || attempt.first_failure.is_some() != (record.attempts > 0))
        {
            wrong = Some(format!("{attempt:?} of record {id} after {}", record.attempts));
        }
        if record.key != NO_KEY {
            for earlier in epoch.records.iter().take_while(|earlier| **earlier < id) {
                let before = &self.records[*earlier];
                let waits = !before.finished && before.carried_by.is_none();
                if before.key == record.key && waits {
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

    fn end(&mut self, id: Id) {
        self.handled.remove(&id);
        self.running.remove(&self.records[id].key);
    }

    /// A record that is handled carries the earlier ones of its key, if that is asked for.
    fn carry(&mut self, id: Id) -> Result<(), String> {
        let record = &self.records[id];
        if record.carried_by.is_some() {
            return Err(format!("record {id} is handled after a newer one was in its stead"));
        }
        if !self.settings.extras.conflate || record.key == NO_KEY {
            return Ok(());
        }
        let key = record.key;
        for at in self.epochs[record.epoch].records.clone() {
            let earlier = &mut self.records[at];
            if at < id && earlier.key == key && !earlier.finished {
                if earlier.attempts > 0 && !self.settings.batches {
                    return Err(format!("record {id} overtakes record {at}, which has failed"));
                }
                earlier.carried_by = Some(id);
            }
        }
        Ok(())
    }

    /// What finished records carry may be finished.
    fn finish_carried(&mut self) {
        if !self.settings.extras.conflate {
            return;
        }
        // Newer ones come later.
        for id in (0..self.records.len()).rev() {
            if let Some(newer) = self.records[id].carried_by {
                self.records[id].finished |= self.records[newer].finished;
            }
        }
    }

    /// No more handler calls than the rates let pass. In batches, records that a failure of another
    /// has brought back are handled more often than they are counted.
    fn check_rates(&mut self, id: Id) {
        self.calls += 1;
        let key = self.records[id].key;
        let of_key = self.calls_of.entry(key).or_default();
        *of_key += 1;
        let extras = &self.settings.extras;
        let calls =
            [(extras.rate, self.calls), (extras.key_rate.filter(|_| key != NO_KEY), *of_key)];
        for (rate, calls) in calls {
            let Some((per_second, burst)) = rate.filter(|_| !self.settings.batches) else {
                continue;
            };
            let most = f64::from(burst) + f64::from(per_second) * self.now.as_secs_f64();
            if calls as f64 > most + 0.001 {
                let wrong = format!("{calls} calls after {:?} at {per_second}/s", self.now);
                self.wrong.get_or_insert(wrong);
            }
        }
    }

    /// A batch is what was asked for.
    fn check_batch(&mut self, ids: &[Id]) {
        let Settings { shards, batch, extras, .. } = self.settings;
        let key = |id: &Id| match (extras.of, self.records[*id].key) {
            (BatchOf::Mixed, _) => 0,
            (_, NO_KEY) => NO_KEY,
            (BatchOf::Shard, key) => u64::from(shard_of(Self::hash(key), shards)),
            (BatchOf::Key, key) => key,
        };
        let total: usize = ids.iter().map(|id| bytes(*id)).sum();
        let fits = ids.len() == 1 || extras.bytes.is_none_or(|most| total <= most);
        let alike = ids.iter().all(|id| key(id) == key(&ids[0]));
        if ids.is_empty() || ids.len() > batch || !fits || !alike {
            let keys: Vec<_> = ids.iter().map(key).collect();
            self.wrong.get_or_insert(format!("a batch of {keys:?}, {total} bytes"));
        }
    }

    /// How an attempt for a record ends.
    fn attempt(&mut self, id: Id) -> Outcome {
        let delay = self.below(3);
        let record = &mut self.records[id];
        record.attempts += 1;
        if record.attempts > record.failures {
            return match record.ending {
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
            };
        }
        if record.attempts == self.settings.attempts {
            match self.settings.then {
                // By the dispatcher, when it sees it; nothing of the key may run before.
                Exhausted::Skip => record.finished = true,
                Exhausted::DeadLetter | Exhausted::Quarantine if self.settings.hook => {}
                _ => self.epochs[record.epoch].halts = true,
            }
        }
        match delay {
            0 => Outcome::RetryAfter(Duration::ZERO, "again".to_owned()),
            1 => Outcome::RetryAfter(Duration::from_millis(30), "later".to_owned()),
            _ => Outcome::Failed("failed".to_owned()),
        }
    }

    fn hook(&mut self, id: Id, letter: &DeadLetter) -> Result<(), String> {
        let record = &mut self.records[id];
        if letter.attempts != record.attempts && !self.settings.batches {
            let wrong = format!("{letter:?} of record {id} after {}", record.attempts);
            self.wrong.get_or_insert(wrong);
        }
        record.hook_attempts += 1;
        if record.hook_attempts <= record.hook_failures {
            return Err("the hook failed".to_owned());
        }
        record.finished = true;
        Ok(())
    }

    /// Every watermark is where it may be.
    fn check(&mut self) {
        if self.wrong.is_some() {
            return;
        }
        if let Err(wrong) = self.try_check() {
            self.wrong = Some(wrong);
        }
    }

    fn try_check(&mut self) -> Result<(), String> {
        for epoch in &self.epochs {
            let Some(progress) = self.executor.progress(epoch.id) else {
                if epoch.open {
                    return Err("an open epoch is gone".to_owned());
                }
                continue;
            };
            self.executor.snapshot(epoch.id, &mut self.snapshot);
            let mut records = epoch.records.iter().map(|id| &self.records[*id]);
            for offset in self.snapshot.offsets() {
                let found = records.find(|record| record.offset == offset);
                if offset < progress.watermark || !found.is_some_and(|record| record.finished) {
                    return Err(format!("{offset} is listed as done: {found:?}"));
                }
            }
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
        let carried = self.records.iter().filter(|r| r.carried_by.is_some() && r.finished).count();
        if self.executor.counts().conflated > carried as u64 {
            return Err(format!("{:?}, but {carried} were", self.executor.counts()));
        }
        self.check_stalls()?;
        self.executor.check_holds()
    }

    fn reassign(&mut self, partition: usize) {
        let old = self.current[partition];
        self.executor.close(self.epochs[old].id).expect("it was open");
        self.epochs[old].open = false;
        self.open(partition);
    }

    fn open(&mut self, partition: usize) {
        let start = self.below(1_000) as i64;
        let mut limits = Limits::new(self.settings.capacity);
        if self.settings.limited {
            limits = limits.bytes(1 + self.below(300)).span(1 + self.below(1 << 31));
        }
        let id = self.executor.open_with(start, &limits).expect("a window");
        let epoch =
            Epoch { id, next: start, records: Vec::new(), open: true, moved: start, halts: false };
        self.current[partition] = self.epochs.len();
        self.epochs.push(epoch);
    }
}

/// One step, at most `depth` handler calls deep.
fn step() {
    let (choice, worker) = with(|world| {
        let workers = world.workers.len() as u64;
        (world.below(100), world.below(workers) as usize)
    });
    match choice {
        0..30 => {
            turn(worker);
        }
        30..55 => with(World::offer),
        55..75 => with(|world| {
            let (small, large) = (world.below(400), world.below(40));
            world.now += Duration::from_micros(small);
            if large == 0 {
                world.now += Duration::from_millis(70);
            }
            world.executor.pass(world.now);
            let lingers = world.executor.check_gather();
            world.wrong = world.wrong.take().or(lingers.err());
        }),
        75..94 => with(|world| world.executor.flush()),
        94..95 => with(World::resize),
        95..97 => with(|world| {
            let partition = world.below(PARTITIONS as u64) as usize;
            let halts = world.epochs[world.current[partition]].halts;
            if halts || world.below(10) == 0 {
                world.reassign(partition);
            }
        }),
        97..98 => with(|world| {
            let key = world.below(KEYS);
            world.executor.release(World::hash(key));
        }),
        98..99 => with(World::move_on),
        _ => {}
    }
    with(World::check);
}

/// A worker handles its next run, if there is one.
fn turn(index: usize) -> bool {
    // It is in the middle of a handler call already.
    let Some(mut worker) = with(|world| world.workers[index].take()) else { return false };
    let moved = worker.turn();
    // One that was asked to go ends.
    if moved || !worker.is_over() {
        with(|world| world.workers[index] = Some(worker));
    }
    moved
}

/// What happens elsewhere while a handler runs.
fn meanwhile() {
    let steps = with(|world| {
        world.depth += 1;
        if world.depth > 3 { 0 } else { world.below(6) }
    });
    for _ in 0..steps {
        step();
    }
    with(|world| world.depth -= 1);
}

fn each(id: &Id, attempt: Attempt) -> Outcome {
    with(|world| {
        world.check_rates(*id);
        world.begin(*id, Some(attempt));
    });
    meanwhile();
    with(|world| {
        world.end(*id);
        let outcome = world.attempt(*id);
        world.finish_carried();
        outcome
    })
}

fn batches(batch: &Batch<'_, Id>) -> BatchOutcome {
    let ids: Vec<Id> = batch.iter().copied().collect();
    let same = (0..=batch.len()).map_while(|index| batch.get(index).copied());
    assert!(batch.iter().len() == ids.len() && same.eq(ids.iter().copied()));
    let outcome = handle_batch(&ids);
    with(|world| {
        world.check_batch(&ids);
        world.finish_carried();
    });
    outcome
}

fn handle_batch(ids: &[Id]) -> BatchOutcome {
    // In a batch the records of a key are all begun; the first unfinished one is checked.
    let mut keys = HashSet::new();
    let first_of_key = |id: &&Id| {
        let key = with(|world| world.records[**id].key);
        key == NO_KEY || keys.insert(key)
    };
    let begun: Vec<Id> = ids.iter().filter(first_of_key).copied().collect();
    begun.iter().for_each(|id| with(|world| world.begin(*id, None)));
    meanwhile();
    with(|world| {
        begun.iter().for_each(|id| world.end(*id));
        let keeps_order = |outcomes: &[Outcome], ids: &[Id], world: &World| {
            let failed: HashSet<u64> = ids
                .iter()
                .zip(outcomes)
                .filter(|(_, how)| !matches!(how, Outcome::Done | Outcome::Skip(_)))
                .map(|(id, _)| world.records[*id].key)
                .collect();
            failed
        };
        match world.below(3) {
            // All or nothing.
            0 => {
                let fails = ids.iter().any(|id| {
                    let record = &world.records[*id];
                    record.attempts < record.failures
                });
                for id in ids {
                    let record = &mut world.records[*id];
                    record.attempts += 1;
                    record.finished = !fails;
                }
                if fails {
                    BatchOutcome::All(Outcome::Failed("the batch failed".to_owned()))
                } else {
                    BatchOutcome::All(Outcome::Done)
                }
            }
            // Up to the first failure.
            1 => {
                let mut done = 0;
                for id in ids {
                    match world.attempt(*id) {
                        Outcome::Done => done += 1,
                        outcome => return BatchOutcome::Prefix(done, outcome),
                    }
                }
                BatchOutcome::Prefix(done, Outcome::Done)
            }
            // Each for itself, but nothing of a key behind a failed one.
            _ => {
                let mut outcomes: Vec<Outcome> = Vec::new();
                for (at, id) in ids.iter().enumerate() {
                    let failed = keeps_order(&outcomes, &ids[..at], world);
                    let key = world.records[*id].key;
                    outcomes.push(if key != NO_KEY && failed.contains(&key) {
                        Outcome::Failed("behind a failed one".to_owned())
                    } else {
                        world.attempt(*id)
                    });
                }
                BatchOutcome::Each(outcomes)
            }
        }
    })
}

fn hook(id: &Id, letter: &DeadLetter) -> Result<(), String> {
    with(|world| world.begin(*id, None));
    meanwhile();
    with(|world| {
        world.end(*id);
        let result = world.hook(*id, letter);
        world.finish_carried();
        result
    })
}

fn run(settings: Settings, seed: u64, steps: u32) {
    let waiter = Waiter::new();
    let retry = Retry::times(settings.attempts)
        .first(Duration::from_millis(10))
        .cap(Duration::from_millis(100))
        .then(settings.then);
    let mut handler =
        if settings.batches { Handler::batches(batches) } else { Handler::each_attempt(each) };
    if settings.hook {
        handler = handler.dead_letter(hook);
    }
    let extras = settings.extras;
    handler = handler.record_bytes(|id: &Id| bytes(*id));
    let mut builder = Builder::default()
        .workers(settings.workers)
        .shards(settings.shards)
        .batch(settings.batch)
        .linger(extras.linger)
        .batch_of(extras.of)
        .conflate(extras.conflate)
        .retry(retry);
    if let Some(bytes) = extras.bytes {
        builder = builder.batch_bytes(bytes);
    }
    if let Some((per_second, burst)) = extras.rate {
        builder = builder.rate(Rate::per_second(per_second).burst(burst));
    }
    if let Some((per_second, burst)) = extras.key_rate {
        builder = builder.key_rate(Rate::per_second(per_second).burst(burst));
    }
    let (executor, workers) = builder.assemble(waiter.waker(), handler).expect("settings");
    let world = World {
        executor,
        workers: workers.into_iter().map(Some).collect(),
        records: Vec::new(),
        epochs: Vec::new(),
        current: vec![0; PARTITIONS],
        running: HashSet::new(),
        handled: HashSet::new(),
        now: Duration::ZERO,
        random: seed | 1,
        depth: 0,
        finishing: false,
        snapshot: Snapshot::new(),
        settings,
        calls: 0,
        calls_of: HashMap::new(),
        wrong: None,
    };
    WORLD.set(Some(world));
    with(|world| (0..PARTITIONS).for_each(|partition| world.open(partition)));
    for _ in 0..steps {
        step();
        with(|world| assert_eq!(world.wrong, None));
    }
    finish();
    WORLD.set(None);
}

/// Everything that was admitted to an epoch that is open and has not halted ends.
fn finish() {
    with(|world| world.finishing = true);
    for round in 0..40_000 {
        let parked = with(|world| {
            // Mostly too short for a retry, or each record would seem to take long.
            world.now += Duration::from_micros(if round % 8 == 0 { 50_000 } else { 5 });
            world.executor.pass(world.now);
            world.executor.flush();
            world.executor.parked().filter(|key| !key.quarantined || key.waiting > 0).count()
        });
        let mut moved = false;
        for worker in 0..with(|world| world.workers.len()) {
            while turn(worker) {
                moved = true;
            }
        }
        with(World::check);
        with(|world| assert_eq!(world.wrong, None));
        let busy = with(|world| world.executor.busy() || world.executor.next_due().is_some());
        if !moved && !busy && parked == 0 {
            break;
        }
        assert!(round < 39_999, "it does not come to rest: {parked} parked, busy {busy}");
    }
    with(|world| {
        for index in world.current.clone() {
            let epoch = &world.epochs[index];
            if epoch.halts {
                continue;
            }
            let unfinished: Vec<i64> = epoch
                .records
                .iter()
                .filter(|id| !world.records[**id].finished)
                .map(|id| world.records[*id].offset)
                .collect();
            assert_eq!(unfinished, Vec::<i64>::new(), "lost in epoch {index}");
            let progress = world.executor.progress(epoch.id).expect("open");
            let last = epoch.records.last().map(|id| world.records[*id].offset + 1);
            assert_eq!(progress.watermark, last.unwrap_or(epoch.moved).max(epoch.moved));
            assert_eq!(progress.unfinished, 0);
        }
        // What is closed leaves nothing behind.
        for index in world.current.clone() {
            world.executor.close(world.epochs[index].id).expect("open");
        }
        for _ in 0..3 {
            world.now += Duration::from_millis(50);
            world.executor.pass(world.now);
        }
        assert!(world.executor.epochs.iter().all(Option::is_none), "a slot is not freed");
        assert!(world.executor.lanes.iter().all(|lane| lane.post.errands.lock().is_empty()));
        assert!(!world.executor.common.registry.is_cautious());
        assert!(world.executor.lanes.iter().all(|lane| lane.holds.is_empty() && lane.held == 0));
        assert_eq!(world.executor.slab.len(), 0);
        world.executor.check_nothing_left();
        let left: HashMap<_, _> =
            world.executor.parked().filter(|key| !key.quarantined).map(|k| (k.hash, k)).collect();
        assert!(left.is_empty(), "{left:?}");
    });
}

fn settings() -> impl Strategy<Value = Settings> {
    let sizes = (1..5_usize, 1..9_usize, 1..9_usize, prop_oneof![1..5_u32, 20..400_u32]);
    let then = prop_oneof![
        Just(Exhausted::Halt),
        Just(Exhausted::Skip),
        Just(Exhausted::DeadLetter),
        Just(Exhausted::Quarantine)
    ];
    let failing = prop_oneof![Just(0), Just(5), Just(40), Just(90)];
    let limited = prop::bool::weighted(0.3);
    let last = (failing, limited, extras());
    (sizes, any::<bool>(), 1..5_u32, then, any::<bool>(), last).prop_map(
        |((workers, shards, batch, capacity), batches, attempts, then, hook, last)| {
            let (failing, limited, extras) = last;
            Settings {
                workers,
                shards,
                batch,
                batches,
                capacity,
                limited,
                // In batches a record may be behind another's failure, so the model does not count.
                attempts: if batches { u32::MAX } else { attempts },
                then,
                hook: hook || then.needs_hook(),
                failing,
                extras,
            }
        },
    )
}

/// Mostly what is the default, and each of the others alone and with others.
fn extras() -> impl Strategy<Value = Extras> {
    let linger = prop_oneof![
        3 => Just(Duration::ZERO),
        1 => (1..5_000_u64).prop_map(Duration::from_micros)
    ];
    let of =
        prop_oneof![3 => Just(BatchOf::Mixed), 1 => Just(BatchOf::Shard), 2 => Just(BatchOf::Key)];
    let bytes = prop_oneof![3 => Just(None), 1 => (1..20_usize).prop_map(Some)];
    let rate = || {
        let some = (prop_oneof![50..200_u32, 1_000..1_000_000_u32], 1..20_u32).prop_map(Some);
        prop_oneof![4 => Just(None), 1 => some]
    };
    let conflate = prop_oneof![3 => Just(false), 1 => Just(true)];
    (linger, of, bytes, conflate, rate(), rate()).prop_map(
        |(linger, of, bytes, conflate, rate, key_rate)| Extras {
            linger,
            of,
            bytes,
            conflate,
            rate,
            key_rate,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_500, ..ProptestConfig::default() })]

    #[test]
    fn the_executor_keeps_its_promises(settings in settings(), seed in any::<u64>(), steps in 1..400_u32) {
        run(settings, seed, steps);
    }
}
