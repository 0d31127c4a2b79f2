//! Long runs on threads and real time, through the public interface alone: everything that can happen
//! to a record happens, at random, and each handler call is checked.
//!
//! A round has random settings and a random mix of failures, hangs, revokes and floods. A few seconds
//! long by default; `PLIMSOLL_STRESS_SECONDS` says how long, and `PLIMSOLL_STRESS_SEED` repeats the
//! choices of a run (not its schedule).

use plimsoll_engine::{
    Attempt, Batch, BatchOf, BatchOutcome, DeadLetter, EpochId, Executor, Exhausted, Handler,
    Outcome, Retry, Route, Snapshot, StallState, Waiter,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A small generator: the test needs variety, not quality.
#[derive(Debug, Clone)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn one_in(&mut self, chances: u64) -> bool {
        self.below(chances) == 0
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

/// What a record asks of its handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deed {
    Nothing,
    Spin(u32),
    Sleep(u32),
    /// So many attempts fail.
    Fail(u8),
    Panic,
    Skip,
    Bury,
}

const NO_KEY: u32 = u32::MAX;
const NONE: u64 = u64::MAX;

/// A record, which knows what must have happened before it.
#[derive(Debug)]
struct Record {
    partition: u32,
    key: u32,
    /// Epochs of all partitions are numbered through.
    epoch: u64,
    /// Rank in its epoch.
    rank: u64,
    /// Rank of the record of the same key before it in this epoch.
    before: u64,
    deed: Deed,
    attempts: AtomicU8,
    ledger: Arc<Ledger>,
}

/// Which records of an epoch are finished.
struct Ledger(Vec<AtomicU8>);

impl std::fmt::Debug for Ledger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ledger")
    }
}

impl Ledger {
    fn finish(&self, rank: u64) -> bool {
        self.0[rank as usize].fetch_add(1, Ordering::AcqRel) == 0
    }

    fn is_finished(&self, rank: u64) -> bool {
        self.0[rank as usize].load(Ordering::Acquire) == 1
    }
}

/// What is known of a key of a partition.
#[derive(Debug)]
struct Key {
    running: AtomicBool,
    epoch: AtomicU64,
    last: AtomicU64,
}

/// Checks handler calls. Faults are kept, since a panic would be taken for a failed attempt.
#[derive(Debug)]
struct Checker {
    keys: Vec<Vec<Key>>,
    calls: AtomicU64,
    fault: std::sync::Mutex<Option<String>>,
}

impl Checker {
    fn new(partitions: u32, keys: u32) -> Self {
        let key = || Key {
            running: AtomicBool::new(false),
            epoch: AtomicU64::new(0),
            last: AtomicU64::new(NONE),
        };
        let keys = (0..partitions).map(|_| (0..keys).map(|_| key()).collect()).collect();
        Checker { keys, calls: AtomicU64::new(0), fault: std::sync::Mutex::new(None) }
    }

    fn wrong(&self, what: impl FnOnce() -> String) {
        self.fault.lock().unwrap().get_or_insert_with(what);
    }

    fn assert_right(&self, settings: &str) {
        let fault = self.fault.lock().unwrap().clone();
        assert_eq!(fault, None, "{settings}");
    }

    fn key(&self, record: &Record) -> Option<&Key> {
        (record.key != NO_KEY).then(|| &self.keys[record.partition as usize][record.key as usize])
    }

    /// A handler call, or the hook's, begins for a record.
    fn begin(&self, record: &Record) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if record.ledger.is_finished(record.rank) {
            self.wrong(|| format!("handled after it was finished: {record:?}"));
        }
        let Some(key) = self.key(record) else { return };
        if key.running.swap(true, Ordering::AcqRel) {
            self.wrong(|| format!("two of a key at once: {record:?}"));
        }
        let epoch = key.epoch.load(Ordering::Relaxed);
        if epoch > record.epoch {
            self.wrong(|| format!("a record of an old epoch after {epoch}: {record:?}"));
        }
        let last = if epoch == record.epoch { key.last.load(Ordering::Relaxed) } else { NONE };
        if last != record.before {
            self.wrong(|| format!("after {last}: {record:?}"));
        }
    }

    /// It took effect, or was passed over.
    fn finish(&self, record: &Record) {
        if !record.ledger.finish(record.rank) {
            self.wrong(|| format!("finished twice: {record:?}"));
        }
        if let Some(key) = self.key(record) {
            key.epoch.store(record.epoch, Ordering::Relaxed);
            key.last.store(record.rank, Ordering::Relaxed);
        }
    }

    fn end(&self, record: &Record) {
        if let Some(key) = self.key(record) {
            key.running.store(false, Ordering::Release);
        }
    }

    fn handle(&self, record: &Record) -> Outcome {
        struct End<'a>(&'a Checker, &'a Record);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                self.0.end(self.1);
            }
        }
        self.begin(record);
        let _end = End(self, record);
        let attempt = record.attempts.fetch_add(1, Ordering::Relaxed) + 1;
        match record.deed {
            Deed::Nothing => {}
            Deed::Spin(rounds) => (0..rounds).for_each(|_| std::hint::spin_loop()),
            Deed::Sleep(micros) => std::thread::sleep(Duration::from_micros(u64::from(micros))),
            Deed::Fail(times) if attempt <= times => {
                return if attempt.is_multiple_of(2) {
                    Outcome::RetryAfter(Duration::from_micros(300), "again".to_owned())
                } else {
                    Outcome::Failed("failed".to_owned())
                };
            }
            Deed::Panic if attempt == 1 => std::panic::panic_any("a planned panic"),
            Deed::Skip => {
                self.finish(record);
                return Outcome::Skip("not wanted".to_owned());
            }
            Deed::Bury => return Outcome::DeadLetter("unreadable".to_owned()),
            Deed::Fail(_) | Deed::Panic => {}
        }
        self.finish(record);
        Outcome::Done
    }

    fn bury(&self, record: &Record, _: &DeadLetter) -> Result<(), String> {
        self.begin(record);
        let fails = record.attempts.fetch_add(1, Ordering::Relaxed).is_multiple_of(3);
        if !fails {
            self.finish(record);
        }
        self.end(record);
        if fails { Err("the hook failed".to_owned()) } else { Ok(()) }
    }
}

/// One epoch as its driver knows it.
struct Epoch {
    id: EpochId,
    number: u64,
    ledger: Arc<Ledger>,
    /// Offset of each record.
    offsets: Vec<i64>,
    /// Rank of each key's last record.
    last: Vec<u64>,
    next: i64,
    /// Records below the watermark, all of which were found finished.
    passed: usize,
}

impl Epoch {
    const MOST: usize = 60_000;

    fn is_full(&self) -> bool {
        self.offsets.len() == Self::MOST
    }
}

#[derive(Debug, Clone, Copy)]
struct Settings {
    workers: usize,
    shards: usize,
    batch: usize,
    batches: bool,
    window: u32,
    keys: u32,
    /// In a hundred thousand records.
    trouble: u64,
    sleeps: u64,
    revokes: bool,
    /// Workers come and go.
    resizes: bool,
    linger: Duration,
    of: BatchOf,
}

const PARTITIONS: u32 = 3;

fn hash(partition: u32, key: u32) -> u64 {
    ((u64::from(partition) << 32) | (u64::from(key) + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

struct Driver {
    executor: Executor<Record>,
    checker: Arc<Checker>,
    epochs: Vec<Epoch>,
    random: Random,
    settings: Settings,
    began: Instant,
    opened: u64,
    snapshot: Snapshot,
}

impl Driver {
    fn open(&mut self) -> Epoch {
        self.opened += 1;
        let start = self.random.of(&[0, 7, 1 << 31, i64::MAX / 2]);
        let id = self.executor.open(start, self.settings.window).unwrap();
        Epoch {
            id,
            number: self.opened,
            ledger: Arc::new(Ledger((0..Epoch::MOST).map(|_| AtomicU8::new(0)).collect())),
            offsets: Vec::new(),
            last: vec![NONE; self.settings.keys as usize],
            next: start,
            passed: 0,
        }
    }

    fn record(&mut self, partition: usize) -> (i64, Route, Record) {
        let Settings { keys, trouble, sleeps, .. } = self.settings;
        let random = &mut self.random;
        let key = match random.below(20) {
            0 => NO_KEY,
            1..6 => 0,
            _ => random.below(u64::from(keys)) as u32,
        };
        let chance = random.below(100_000);
        let deed = if chance < trouble {
            match random.below(8) {
                0 => Deed::Panic,
                1 => Deed::Skip,
                2 => Deed::Bury,
                _ => Deed::Fail(1 + random.below(3) as u8),
            }
        } else if chance < trouble + sleeps {
            Deed::Sleep(random.below(1_500) as u32)
        } else if random.one_in(4) {
            Deed::Spin(random.below(300) as u32)
        } else {
            Deed::Nothing
        };
        let gap = if random.one_in(50) { random.below(1 << 40) as i64 } else { 0 };
        let epoch = &mut self.epochs[partition];
        let rank = epoch.offsets.len() as u64;
        let offset = epoch.next + gap;
        epoch.next = offset + 1;
        epoch.offsets.push(offset);
        let before = match key {
            NO_KEY => NONE,
            key => std::mem::replace(&mut epoch.last[key as usize], rank),
        };
        let record = Record {
            partition: partition as u32,
            key,
            epoch: epoch.number,
            rank,
            before,
            deed,
            attempts: AtomicU8::new(0),
            ledger: Arc::clone(&epoch.ledger),
        };
        let route = match key {
            NO_KEY => Route::Free,
            key => Route::Ordered(hash(partition as u32, key)),
        };
        (offset, route, record)
    }

    /// Offers what is wanted; whether anything was.
    fn offer(&mut self) -> bool {
        let mut any = false;
        for partition in 0..PARTITIONS as usize {
            let id = self.epochs[partition].id;
            let left = (Epoch::MOST - self.epochs[partition].offsets.len()) as u32;
            // Now and then more than is wanted: it waits in lists.
            let wanted = if self.random.one_in(50) { 300 } else { self.executor.demand() };
            let count = wanted.min(self.executor.room(id)).min(left);
            if count == 0 {
                continue;
            }
            any = true;
            if self.random.one_in(2) {
                let records: Vec<_> = (0..count).map(|_| self.record(partition)).collect();
                assert_eq!(self.executor.offer_all(id, records).unwrap(), count);
            } else {
                for _ in 0..count {
                    let (offset, route, record) = self.record(partition);
                    self.executor.offer(id, offset, route, record).unwrap();
                }
            }
        }
        any
    }

    /// Every record that a watermark has passed is finished.
    fn check(&mut self, partition: usize) -> bool {
        let epoch = &mut self.epochs[partition];
        let progress = self.executor.progress(epoch.id).unwrap();
        let passed = progress.passed as usize;
        for rank in epoch.passed..passed {
            assert!(epoch.ledger.is_finished(rank as u64), "rank {rank}: {:?}", self.settings);
        }
        epoch.passed = passed;
        if passed > 0 {
            assert_eq!(progress.watermark, epoch.offsets[passed - 1] + 1);
        }
        assert_eq!(progress.unfinished as usize, epoch.offsets.len() - passed);
        assert!(progress.unfinished <= u64::from(self.settings.window));
        progress.unfinished == 0
    }

    /// What is finished above the watermark is, and lies above it.
    fn check_snapshot(&mut self, partition: usize) {
        let epoch = &self.epochs[partition];
        let progress = self.executor.snapshot(epoch.id, &mut self.snapshot).unwrap();
        assert_eq!(self.snapshot.watermark(), progress.watermark);
        let mut count = 0;
        for range in self.snapshot.done() {
            assert!(range.start > progress.watermark, "{range:?} below {progress:?}");
            let ranks = epoch.offsets.partition_point(|offset| *offset < range.start)
                ..epoch.offsets.partition_point(|offset| *offset < range.end);
            for rank in ranks {
                assert!(epoch.ledger.is_finished(rank as u64), "rank {rank}: {:?}", self.settings);
                count += 1;
            }
        }
        assert!(count < progress.unfinished.max(1), "{count} of {progress:?}");
    }

    /// What holds the watermarks is named plausibly.
    fn check_stalls(&mut self) {
        for stall in self.executor.stalls() {
            let epoch = self.epochs.iter().find(|epoch| epoch.id == stall.epoch).unwrap();
            let rank = epoch.offsets.partition_point(|offset| *offset < stall.offset);
            assert_eq!(epoch.offsets.get(rank), Some(&stall.offset), "{stall:?}");
            assert!(rank >= epoch.passed, "{stall:?}");
            assert!(stall.state != StallState::Failed, "{stall:?}");
            let behind = (epoch.offsets.len() - rank) as u64;
            assert_eq!(stall.finished_behind + stall.unfinished, behind, "{stall:?}");
        }
        let taken: u64 = self.executor.worker_states().map(|state| u64::from(state.taken)).sum();
        assert!(taken <= u64::from(self.settings.window) * 100, "{taken} taken");
    }

    fn turn(&mut self, waiter: &Waiter, offers: bool) {
        if self.settings.resizes && self.random.one_in(300) {
            let workers = self.random.of(&[1, 2, 3, 5, 12, 30]);
            self.executor.set_workers(workers).unwrap();
            assert_eq!(self.executor.workers(), workers);
        }
        if self.random.one_in(200) {
            self.check_stalls();
            let partition = self.random.below(u64::from(PARTITIONS)) as usize;
            self.check_snapshot(partition);
        }
        self.executor.pass(self.began.elapsed());
        assert_eq!(self.executor.take_failure(), None, "{:?}", self.settings);
        while self.executor.take_skipped().is_some() {}
        let offered = offers && self.offer();
        if offered && self.random.one_in(2) {
            self.executor.flush_more();
        } else {
            self.executor.flush();
        }
        for partition in 0..PARTITIONS as usize {
            let drained = self.check(partition);
            let ends = self.epochs[partition].is_full() && drained;
            let revoked = self.settings.revokes && self.random.one_in(3_000);
            if offers && (ends || revoked) {
                self.executor.close(self.epochs[partition].id).unwrap();
                let next = self.open();
                self.epochs[partition] = next;
            }
        }
        if !offered {
            let executor = &self.executor;
            waiter.wait(Duration::from_micros(200), || executor.finished_something());
        }
    }
}

fn round(mut random: Random, length: Duration) -> u64 {
    let settings = Settings {
        workers: random.of(&[1, 2, 3, 8, 24]),
        shards: random.of(&[1, 5, 64, 1_024, 5_000]),
        batch: random.of(&[1, 3, 64, 500]),
        batches: random.one_in(2),
        window: random.of(&[1, 2, 63, 1_000, 20_000]),
        keys: random.of(&[1, 30, 4_000]),
        trouble: random.of(&[0, 20, 1_000, 20_000]),
        sleeps: random.of(&[0, 50, 3_000]),
        revokes: random.one_in(2),
        resizes: random.one_in(2),
        linger: random.of(&[Duration::ZERO, Duration::ZERO, Duration::from_micros(700)]),
        of: random.of(&[BatchOf::Mixed, BatchOf::Mixed, BatchOf::Key, BatchOf::Shard]),
    };
    let text = format!("{settings:?}");
    let checker = Arc::new(Checker::new(PARTITIONS, settings.keys));
    let retry = Retry::times(20)
        .first(Duration::from_micros(200))
        .cap(Duration::from_millis(5))
        .then(Exhausted::Halt);
    let handler = if settings.batches {
        let checker = Arc::clone(&checker);
        Handler::batches(move |batch: &Batch<'_, Record>| {
            for (at, record) in batch.iter().enumerate() {
                let handled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                    checker.handle(record)
                }));
                match handled.unwrap_or_else(|_| Outcome::Failed("it panicked".to_owned())) {
                    Outcome::Done => {}
                    // What lies behind it was not handled.
                    outcome => return BatchOutcome::Prefix(at, outcome),
                }
            }
            BatchOutcome::All(Outcome::Done)
        })
    } else {
        let checker = Arc::clone(&checker);
        Handler::each_attempt(move |record: &Record, _: Attempt| checker.handle(record))
    };
    let buries = Arc::clone(&checker);
    let handler = handler
        .dead_letter(move |record: &Record, letter: &DeadLetter| buries.bury(record, letter));
    let waiter = Waiter::new();
    let executor = Executor::builder()
        .workers(settings.workers)
        .shards(settings.shards)
        .batch(settings.batch)
        .linger(settings.linger)
        .batch_of(settings.of)
        .retry(retry)
        .start(waiter.waker(), handler)
        .unwrap();
    let mut driver = Driver {
        executor,
        checker,
        epochs: Vec::new(),
        random,
        settings,
        began: Instant::now(),
        opened: 0,
        snapshot: Snapshot::new(),
    };
    for _ in 0..PARTITIONS {
        let epoch = driver.open();
        driver.epochs.push(epoch);
    }
    while driver.began.elapsed() < length {
        driver.turn(&waiter, true);
        driver.checker.assert_right(&text);
    }
    // Everything that was admitted ends.
    let stopped = Instant::now();
    loop {
        driver.turn(&waiter, false);
        driver.checker.assert_right(&text);
        if (0..PARTITIONS as usize).all(|partition| driver.check(partition)) {
            break;
        }
        assert!(stopped.elapsed() < Duration::from_secs(60), "a hang: {text}");
    }
    driver.checker.calls.load(Ordering::Relaxed)
}

fn variable(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value} is not a number")))
}

#[test]
fn everything_at_random() {
    let seconds = variable("PLIMSOLL_STRESS_SECONDS").unwrap_or(3);
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let seed = variable("PLIMSOLL_STRESS_SEED").unwrap_or(clock.as_micros() as u64);
    println!("PLIMSOLL_STRESS_SEED={seed}");
    // A planned panic is no news.
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.payload().downcast_ref::<&str>() != Some(&"a planned panic") {
            usual(panic);
        }
    }));
    let mut random = Random(seed | 1);
    let began = Instant::now();
    let (mut rounds, mut calls) = (0_u64, 0);
    while began.elapsed() < Duration::from_secs(seconds) {
        let own = Random(random.next() | 1);
        calls += round(own, Duration::from_millis(700));
        rounds += 1;
    }
    assert!(calls > 1_000, "{calls} handler calls in {rounds} rounds");
    println!("{rounds} rounds, {calls} handler calls");
}
