//! Handlers that are futures, on tokio and on the simplest runtime there is.

use parking_lot::Mutex;
use plimsoll_engine::{
    AsyncHandler, Builder, DeadLetter, EpochId, Executor, Exhausted, FlightFuture, Outcome, Retry,
    Route, Spawn, Task, Waiter,
};
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::{Notify, Semaphore};

/// A record: its key and its place among the records of the key. Not `Sync`.
type Record = (u64, u32, Cell<()>);

fn hash(key: u64) -> u64 {
    (key + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn record(key: u64, sequence: u32) -> Record {
    (key, sequence, Cell::new(()))
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build().unwrap()
}

#[cfg(feature = "tokio")]
fn on(runtime: &Runtime) -> impl Spawn + use<> {
    runtime.handle().clone()
}

#[cfg(not(feature = "tokio"))]
fn on(runtime: &Runtime) -> impl Spawn + use<> {
    let handle = runtime.handle().clone();
    move |future: FlightFuture| drop(handle.spawn(future))
}

struct Driver {
    executor: Executor<Record>,
    waiter: Waiter,
    epoch: EpochId,
    next: i64,
    began: Instant,
}

impl Driver {
    fn new(builder: Builder, spawner: impl Spawn + 'static, handler: AsyncHandler<Record>) -> Self {
        let waiter = Waiter::new();
        let mut executor = builder.start_futures(waiter.waker(), spawner, handler).unwrap();
        let epoch = executor.open(0, 100_000).unwrap();
        Driver { executor, waiter, epoch, next: 0, began: Instant::now() }
    }

    fn offer(&mut self, records: impl IntoIterator<Item = (u64, u32)>) {
        for (key, sequence) in records {
            let route = Route::Ordered(hash(key));
            self.executor.offer(self.epoch, self.next, route, record(key, sequence)).unwrap();
            self.next += 1;
        }
    }

    /// Passes until `done`. Sleeps long, so that a lost wake-up is a test that does not end.
    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Executor<Record>) -> bool) {
        loop {
            self.executor.pass(self.began.elapsed());
            if done(&mut self.executor) {
                return;
            }
            assert!(self.began.elapsed() < Duration::from_secs(60), "no end: {what}");
            let due = self.executor.next_due();
            let nap = due.map_or(Duration::from_millis(500), |due| {
                due.saturating_sub(self.began.elapsed()).min(Duration::from_millis(500))
            });
            let executor = &self.executor;
            self.waiter.wait(nap, || executor.finished_something());
        }
    }

    fn until_all_finished(&mut self) {
        let (epoch, next) = (self.epoch, self.next);
        self.until("all finished", |executor| {
            assert_eq!(executor.take_failure(), None);
            executor.progress(epoch).unwrap().watermark == next && !executor.busy()
        });
    }
}

fn quick(attempts: u32) -> Retry {
    Retry::times(attempts).first(Duration::from_millis(1)).cap(Duration::from_millis(5))
}

/// Checks that records of a key come one after the other, in order.
#[derive(Default)]
struct Order {
    next: Mutex<HashMap<u64, (u32, bool)>>,
    running: AtomicU32,
    most: AtomicU32,
}

impl Order {
    fn begin(&self, key: u64, sequence: u32) {
        let mut next = self.next.lock();
        let (due, busy) = next.entry(key).or_default();
        assert_eq!((*due, *busy), (sequence, false), "key {key}");
        *busy = true;
        let running = self.running.fetch_add(1, Ordering::Relaxed) + 1;
        self.most.fetch_max(running, Ordering::Relaxed);
    }

    fn end(&self, key: u64, finished: bool) {
        self.running.fetch_sub(1, Ordering::Relaxed);
        let mut next = self.next.lock();
        let (due, busy) = next.get_mut(&key).unwrap();
        *due += u32::from(finished);
        *busy = false;
    }
}

fn ordered(order: &Arc<Order>, failing: bool) -> AsyncHandler<Record> {
    let order = Arc::clone(order);
    AsyncHandler::new(move |task: Task<Record>| {
        let order = Arc::clone(&order);
        async move {
            let (key, sequence) = (task.0, task.1);
            order.begin(key, sequence);
            for _ in 0..key % 4 {
                tokio::task::yield_now().await;
            }
            let fails = failing && sequence.is_multiple_of(3) && task.attempt().number == 1;
            order.end(key, !fails);
            if fails { Err("once") } else { Ok(()) }
        }
    })
}

#[test]
fn records_of_a_key_are_in_order_and_at_most_so_many_run() {
    let runtime = runtime();
    for (concurrency, shards) in [(1, 64), (7, 1), (50, 256), (1_000, 65_536)] {
        let order = Arc::new(Order::default());
        let builder = Executor::builder().concurrency(concurrency).shards(shards).retry(quick(2));
        let mut driver = Driver::new(builder, on(&runtime), ordered(&order, true));
        driver.offer((0..20).flat_map(|sequence| (0..100).map(move |key| (key, sequence))));
        driver.until_all_finished();
        assert!(order.most.load(Ordering::Relaxed) as usize <= concurrency.min(shards));
        assert!(order.next.lock().values().all(|next| *next == (20, false)));
        assert_eq!(driver.executor.counts().failed_attempts, 700);
        assert_eq!(driver.executor.in_flight(), 0);
    }
}

#[test]
fn any_runtime_will_do() {
    // A thread for each future, which polls it and sleeps: no runtime at all.
    let spawner = |future: FlightFuture| {
        std::thread::spawn(|| futures_executor::block_on(future));
    };
    let order = Arc::new(Order::default());
    let handler = AsyncHandler::new({
        let order = Arc::clone(&order);
        move |task: Task<Record>| {
            let order = Arc::clone(&order);
            async move {
                order.begin(task.0, task.1);
                order.end(task.0, true);
            }
        }
    });
    let mut driver = Driver::new(Executor::builder().concurrency(8), spawner, handler);
    driver.offer((0..10).flat_map(|sequence| (0..20).map(move |key| (key, sequence))));
    driver.until_all_finished();
    assert!(order.next.lock().values().all(|next| *next == (10, false)));
}

#[test]
fn concurrency_is_reached() {
    let (runtime, gate) = (runtime(), Arc::new(Semaphore::new(0)));
    let handler = AsyncHandler::new({
        let gate = Arc::clone(&gate);
        move |_: Task<Record>| {
            let gate = Arc::clone(&gate);
            async move { gate.acquire().await.unwrap().forget() }
        }
    });
    let builder = Executor::builder().concurrency(300);
    let mut driver = Driver::new(builder, on(&runtime), handler);
    assert_eq!(driver.executor.demand(), 300);
    driver.offer((0..600).map(|key| (key, 0)));
    assert_eq!((driver.executor.in_flight(), driver.executor.demand()), (300, 0));
    gate.add_permits(600);
    driver.until_all_finished();
    assert_eq!(driver.executor.demand(), 300);
}

#[test]
fn a_guard_that_is_kept_delays_its_key_and_not_the_watermark() {
    let runtime = runtime();
    let kept = Arc::new(Mutex::new(Vec::new()));
    let begun = Arc::new(AtomicU32::new(0));
    let handler = AsyncHandler::new({
        let (kept, begun) = (Arc::clone(&kept), Arc::clone(&begun));
        move |task: Task<Record>| {
            begun.fetch_add(1, Ordering::Relaxed);
            if task.1 == 0 {
                kept.lock().push(task);
            }
            async {}
        }
    });
    let mut driver = Driver::new(Executor::builder(), on(&runtime), handler);
    driver.offer([(1, 0), (1, 1), (2, 1), (3, 1)]);
    let epoch = driver.epoch;
    driver.until("the others", |executor| {
        executor.progress(epoch).unwrap().watermark == 1 && executor.in_flight() == 1
    });
    // The second record of the key waits for the guard.
    assert_eq!(begun.load(Ordering::Relaxed), 3);
    assert_eq!(driver.executor.progress(epoch).unwrap().unfinished, 3);
    let guard = kept.lock().pop().unwrap();
    assert_eq!((guard.0, guard.1, guard.is_cancelled()), (1, 0, false));
    drop(guard);
    driver.until_all_finished();
    assert_eq!(begun.load(Ordering::Relaxed), 4);
}

#[test]
fn panics_errors_and_dropped_futures_are_failed_attempts() {
    let runtime = runtime();
    let log = Arc::new(Mutex::new(Vec::new()));
    let handler = AsyncHandler::new({
        let log = Arc::clone(&log);
        move |task: Task<Record>| {
            let log = Arc::clone(&log);
            assert!((task.0, task.attempt().number) != (0, 1), "planted, before the future");
            async move {
                let number = task.attempt().number;
                assert_eq!(task.attempt().first_failure.is_some(), number > 1);
                tokio::task::yield_now().await;
                log.lock().push((task.0, number));
                match (task.0, number) {
                    (1, 1) => panic!("planted"),
                    (2, 1) => Err("an error"),
                    _ => Ok(()),
                }
            }
        }
    });
    // A runtime that drops the first future it is given, without polling it, and panics at the second.
    let given = AtomicU32::new(0);
    let inner = on(&runtime);
    let spawner = move |future: FlightFuture| match given.fetch_add(1, Ordering::Relaxed) {
        0 => drop(future),
        1 => panic!("planted, in the runtime"),
        _ => inner.spawn(future),
    };
    let mut driver = Driver::new(Executor::builder().retry(quick(9)), spawner, handler);
    driver.offer([(8, 0), (9, 0), (0, 0), (1, 0), (2, 0), (3, 0)]);
    driver.until_all_finished();
    let mut log = std::mem::take(&mut *log.lock());
    log.sort_unstable();
    assert_eq!(log, [(0, 2), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (8, 2), (9, 2)]);
    assert_eq!(driver.executor.counts().failed_attempts, 5);
}

#[test]
fn reasons_name_what_happened() {
    let runtime = runtime();
    let handler = AsyncHandler::new(|task: Task<Record>| async move {
        match task.0 {
            0 => panic!("planted"),
            1 => Err("an error"),
            // Dropped by the runtime's shutdown.
            _ => std::future::pending().await,
        }
    });
    let retry = Retry::never().then(Exhausted::Skip);
    let builder = Executor::builder().retry(retry);
    let mut driver = Driver::new(builder, on(&runtime), handler);
    driver.offer([(0, 0), (1, 0), (2, 0)]);
    driver.until("the first two", |executor| executor.counts().skipped == 2);
    runtime.shutdown_background();
    driver.until_all_finished();
    let skipped = std::iter::from_fn(|| driver.executor.take_skipped());
    let mut reasons: Vec<_> = skipped.map(|skipped| (skipped.offset, skipped.reason)).collect();
    reasons.sort_unstable();
    let expected = ["the handler panicked: planted", "an error", "the future was cancelled"];
    assert_eq!(reasons, (0..).zip(expected.map(str::to_owned)).collect::<Vec<_>>());
}

#[test]
fn every_outcome_is_heeded() {
    let runtime = runtime();
    let buried = Arc::new(Mutex::new(Vec::new()));
    let handler = AsyncHandler::new(|task: Task<Record>| async move {
        match (task.0, task.attempt().number) {
            (0, _) => Outcome::Skip("not ours".to_owned()),
            (1, 1) => Outcome::RetryAfter(Duration::ZERO, "again".to_owned()),
            (2, _) => Outcome::DeadLetter("broken".to_owned()),
            (3, _) => Outcome::Failed("always".to_owned()),
            _ => Outcome::Done,
        }
    })
    .dead_letter_async({
        let (buried, failed) = (Arc::clone(&buried), Arc::new(AtomicBool::new(false)));
        move |task: Task<Record>, letter: DeadLetter| {
            let (buried, failed) = (Arc::clone(&buried), Arc::clone(&failed));
            async move {
                tokio::task::yield_now().await;
                if !failed.swap(true, Ordering::Relaxed) {
                    return Err("the hook failed once");
                }
                buried.lock().push((task.0, task.1, letter.attempts, letter.reason));
                Ok(())
            }
        }
    });
    let builder = Executor::builder().retry(quick(2).then(Exhausted::Quarantine));
    let mut driver = Driver::new(builder, on(&runtime), handler);
    driver.offer((0..3).flat_map(|sequence| (0..6).map(move |key| (key, sequence))));
    driver.until_all_finished();
    assert_eq!((driver.executor.counts().skipped, driver.executor.counts().dead_lettered), (3, 6));
    let mut buried = std::mem::take(&mut *buried.lock());
    buried.sort_unstable();
    let of = |key, sequence, attempts, reason: &str| (key, sequence, attempts, reason.to_owned());
    let quarantined = "its key is quarantined";
    let expected = [
        of(2, 0, 1, "broken"),
        of(2, 1, 1, "broken"),
        of(2, 2, 1, "broken"),
        of(3, 0, 2, "always"),
        of(3, 1, 0, quarantined),
        of(3, 2, 0, quarantined),
    ];
    assert_eq!(buried, expected);
    assert!(driver.executor.release(hash(3)));
}

#[test]
fn a_hook_that_is_a_function_buries_too() {
    let runtime = runtime();
    let buried = Arc::new(AtomicU64::new(0));
    let handler = AsyncHandler::new(|_: Task<Record>| async { Err("never") }).dead_letter({
        let buried = Arc::clone(&buried);
        move |record: &Record, _: &DeadLetter| {
            buried.fetch_add(record.0, Ordering::Relaxed);
            Ok::<(), String>(())
        }
    });
    let builder = Executor::builder().retry(quick(2).then(Exhausted::DeadLetter));
    let mut driver = Driver::new(builder, on(&runtime), handler);
    driver.offer([(3, 0), (4, 0)]);
    driver.until_all_finished();
    assert_eq!(buried.load(Ordering::Relaxed), 7);
}

#[test]
fn a_halt_cancels_what_runs_and_starts_nothing_and_the_key_waits_across_epochs() {
    let (runtime, started) = (runtime(), Arc::new(Mutex::new(Vec::new())));
    let guards = Arc::new(Mutex::new(Vec::new()));
    let handler = AsyncHandler::new({
        let (started, guards) = (Arc::clone(&started), Arc::clone(&guards));
        move |task: Task<Record>| {
            started.lock().push((task.0, task.1));
            let guards = Arc::clone(&guards);
            async move {
                if task.1 == 0 {
                    guards.lock().push(task);
                    std::future::pending::<()>().await;
                }
            }
        }
    });
    let mut driver = Driver::new(Executor::builder(), on(&runtime), handler);
    driver.offer([(1, 0), (1, 1)]);
    driver.until("the first", |_| guards.lock().len() == 1);
    let old = driver.epoch;
    assert_eq!(driver.executor.close(old).unwrap().watermark, 0);
    driver.epoch = driver.executor.open(0, 100).unwrap();
    driver.next = 0;
    driver.offer([(1, 2), (2, 3)]);
    driver.until("the other key", |_| started.lock().contains(&(2, 3)));
    // The old future is gone or will be; its guard tells, and is still there.
    let guard = guards.lock().pop().unwrap();
    assert!(guard.is_cancelled());
    runtime.block_on(guard.cancelled());
    assert!(!started.lock().iter().any(|(key, sequence)| (*key, *sequence) == (1, 2)));
    drop(guard);
    driver.until_all_finished();
    // The second record of the old epoch never ran.
    let mut started = std::mem::take(&mut *started.lock());
    started.sort_unstable();
    assert_eq!(started, [(1, 0), (1, 2), (2, 3)]);
}

#[test]
fn a_record_that_halts_names_itself() {
    let runtime = runtime();
    let handler = AsyncHandler::new(|task: Task<Record>| async move {
        if task.1 == 2 { Outcome::Halt("stop".to_owned()) } else { Outcome::Done }
    });
    let mut driver = Driver::new(Executor::builder(), on(&runtime), handler);
    driver.offer((0..5).map(|sequence| (1, sequence)));
    let (mut failure, epoch) = (None, driver.epoch);
    driver.until("the failure", |executor| {
        failure = failure.take().or_else(|| executor.take_failure());
        failure.is_some() && !executor.busy()
    });
    let failure = failure.unwrap();
    assert_eq!((failure.offset, failure.reason.as_str()), (2, "stop"));
    assert_eq!(driver.executor.progress(epoch).unwrap().watermark, 2);
}

#[test]
fn dropping_the_executor_waits_for_nothing_and_ends_what_runs() {
    let (runtime, ended) = (runtime(), Arc::new(Notify::new()));
    struct Tell(Arc<Notify>);
    impl Drop for Tell {
        fn drop(&mut self) {
            self.0.notify_one();
        }
    }
    let begun = Arc::new(AtomicU32::new(0));
    let handler = AsyncHandler::new({
        let (ended, begun) = (Arc::clone(&ended), Arc::clone(&begun));
        move |_: Task<Record>| {
            let tell = Tell(Arc::clone(&ended));
            let begun = Arc::clone(&begun);
            async move {
                begun.fetch_add(1, Ordering::Relaxed);
                std::future::pending::<()>().await;
                drop(tell);
            }
        }
    });
    let mut driver = Driver::new(Executor::builder(), on(&runtime), handler);
    driver.offer([(1, 0)]);
    driver.until("it runs", |_| begun.load(Ordering::Relaxed) == 1);
    drop(driver);
    // Its future is dropped although it never ends by itself.
    runtime.block_on(ended.notified());
}

#[test]
fn settings_of_flights_are_checked() {
    let spawner = |_: FlightFuture| ();
    let build = |builder: Builder| {
        let handler = |_: Task<u64>| async {};
        builder.futures(Waiter::new().waker(), spawner, handler).map(|_| ())
    };
    for bad in [0, (1 << 20) + 1, usize::MAX] {
        let error = build(Executor::builder().concurrency(bad)).unwrap_err();
        assert!(error.to_string().contains("`concurrency`"), "{error}");
        assert!(error.to_string().contains(&bad.to_string()), "{error}");
    }
    let needs_hook = Executor::builder().retry(Retry::never().then(Exhausted::DeadLetter));
    assert!(build(needs_hook).unwrap_err().to_string().contains("hook"));
    build(Executor::builder().concurrency(1).shards(1)).unwrap();
}
