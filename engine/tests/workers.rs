//! Workers that come and go, what holds a watermark, and the end, on threads.

use parking_lot::Mutex;
use plimsoll_engine::{
    BuildError, EpochId, Executor, Handler, OldHandler, Retry, Route, Spin, StallState, Waiter,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn ordered(key: u64) -> Route {
    Route::Ordered((key + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// An executor with what drives it.
struct Rig<T> {
    executor: Executor<T>,
    waiter: Waiter,
    began: Instant,
}

impl<T: Send + 'static> Rig<T> {
    fn new(builder: plimsoll_engine::Builder, handler: Handler<T>) -> Self {
        let waiter = Waiter::new();
        let executor = builder.start(waiter.waker(), handler).unwrap();
        Rig { executor, waiter, began: Instant::now() }
    }

    fn turn(&mut self) {
        self.executor.pass(self.began.elapsed());
        self.executor.flush();
        let executor = &self.executor;
        self.waiter.wait(Duration::from_micros(200), || executor.finished_something());
    }

    /// Goes on until `done`; a hang ends after a minute.
    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Executor<T>) -> bool) {
        let began = Instant::now();
        while !done(&mut self.executor) {
            assert!(began.elapsed() < Duration::from_secs(60), "a hang: {what}");
            self.turn();
        }
    }

    fn drained(&mut self, epoch: EpochId) {
        self.until("drain", |executor| executor.progress(epoch).unwrap().unfinished == 0);
    }

    fn clock(&self) -> impl FnMut() -> Duration + use<T> {
        let began = self.began;
        move || began.elapsed()
    }
}

/// A door that handlers wait at.
#[derive(Debug, Default)]
struct Door(AtomicBool);

impl Door {
    fn pass(&self) {
        while !self.0.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn open(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Opens the door whatever happens, so that a failed test ends.
struct Opens(Arc<Door>);

impl Drop for Opens {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// Calls that wait at a door if the record says so; all are noted.
fn at_door(door: &Arc<Door>, calls: &Arc<Mutex<Vec<i64>>>) -> Handler<(i64, bool)> {
    let (door, calls) = (Arc::clone(door), Arc::clone(calls));
    Handler::each(move |(offset, waits): &(i64, bool)| {
        if *waits {
            door.pass();
        }
        calls.lock().push(*offset);
    })
}

#[test]
fn workers_come_and_go_without_loss_of_order_or_work() {
    const KEYS: u64 = 40;
    let next: Arc<Mutex<HashMap<u64, u64>>> = Arc::default();
    let wrong = Arc::new(AtomicU64::new(0));
    let running: Arc<Vec<AtomicBool>> =
        Arc::new((0..KEYS).map(|_| AtomicBool::new(false)).collect());
    let handler = Handler::each({
        let (next, wrong, running) = (Arc::clone(&next), Arc::clone(&wrong), Arc::clone(&running));
        move |(key, sequence): &(u64, u64)| {
            let overlap = running[*key as usize].swap(true, Ordering::AcqRel);
            let expected = next.lock().get(key).copied().unwrap_or(0);
            if sequence % 16 == 0 {
                std::thread::sleep(Duration::from_micros(100));
            }
            next.lock().insert(*key, sequence + 1);
            wrong.fetch_add(u64::from(overlap || expected != *sequence), Ordering::Relaxed);
            running[*key as usize].store(false, Ordering::Release);
        }
    });
    let mut rig = Rig::new(Executor::builder().workers(1).shards(64), handler);
    let epoch = rig.executor.open(0, 5_000).unwrap();
    let mut offset = 0;
    let sizes = [3, 1, 8, 2, 40, 1, 5, 4];
    for (round, size) in sizes.iter().cycle().take(60).enumerate() {
        rig.executor.set_workers(*size).unwrap();
        assert_eq!(rig.executor.workers(), *size, "round {round}");
        let until = offset + 500;
        while offset < until {
            let room = rig.executor.room(epoch).min(rig.executor.demand());
            for _ in 0..room.min((until - offset) as u32) {
                let record = (offset as u64 % KEYS, offset as u64 / KEYS);
                rig.executor.offer(epoch, offset, ordered(record.0), record).unwrap();
                offset += 1;
            }
            rig.turn();
        }
    }
    rig.drained(epoch);
    assert_eq!(wrong.load(Ordering::Relaxed), 0);
    assert_eq!(rig.executor.progress(epoch).unwrap().watermark, offset);
    rig.until("those that were to go", |executor| {
        executor.running_workers() == executor.workers()
            && executor.worker_states().all(|state| !state.leaving)
    });
}

#[test]
fn a_worker_that_never_returns_is_visible_and_can_be_replaced() {
    let (door, calls) = (Arc::new(Door::default()), Arc::default());
    let _opens = Opens(Arc::clone(&door));
    let mut rig = Rig::new(Executor::builder().workers(1), at_door(&door, &calls));
    let epoch = rig.executor.open(0, 1_000).unwrap();
    rig.executor.offer(epoch, 0, ordered(0), (0, true)).unwrap();
    rig.until("it hangs", |executor| {
        executor
            .worker_states()
            .any(|state| state.taken == 1 && state.busy > Duration::from_secs(1))
    });
    for offset in 1..200 {
        rig.executor.offer(epoch, offset, ordered(offset as u64), (offset, false)).unwrap();
    }
    // One more, then one less: the one that hangs is the one to go.
    rig.executor.set_workers(2).unwrap();
    rig.executor.set_workers(1).unwrap();
    assert_eq!((rig.executor.workers(), rig.executor.running_workers()), (1, 2));
    let states: Vec<_> = rig.executor.worker_states().collect();
    assert!(states.iter().any(|state| state.leaving && state.taken == 1), "{states:?}");
    // The shard of the record that hangs waits, everything else is handled.
    rig.until("the others", |_| calls.lock().len() >= 190);
    assert_eq!(rig.executor.progress(epoch).unwrap().watermark, 0);
    door.open();
    rig.drained(epoch);
    rig.until("its end", |executor| executor.running_workers() == 1);
}

#[test]
fn an_epoch_may_be_closed_while_workers_come_and_go() {
    let (door, calls) = (Arc::new(Door::default()), Arc::default());
    let _opens = Opens(Arc::clone(&door));
    let mut rig = Rig::new(Executor::builder().workers(1), at_door(&door, &calls));
    let old = rig.executor.open(0, 100).unwrap();
    for offset in 0..50 {
        rig.executor.offer(old, offset, ordered(offset as u64), (offset, true)).unwrap();
    }
    rig.turn();
    rig.executor.close(old).unwrap();
    rig.executor.set_workers(2).unwrap();
    rig.turn();
    rig.executor.set_workers(1).unwrap();
    rig.executor.set_workers(3).unwrap();
    let new = rig.executor.open(0, 100).unwrap();
    for offset in 0..50 {
        rig.executor.offer(new, offset, ordered(offset as u64), (offset, false)).unwrap();
    }
    (0..20).for_each(|_| rig.turn());
    door.open();
    rig.drained(new);
    assert_eq!(rig.executor.progress(new).unwrap().watermark, 50);
}

#[test]
fn numbers_of_workers_are_checked() {
    let mut rig = Rig::new(Executor::builder(), Handler::each(|_: &i64| ()));
    for bad in [0, 4_097, usize::MAX] {
        let refused = rig.executor.set_workers(bad).unwrap_err();
        assert!(matches!(&refused, BuildError::Setting(s) if s.setting == "workers"), "{refused}");
        assert_eq!(rig.executor.workers(), 2);
    }
    rig.executor.stop();
    assert!(rig.executor.set_workers(3).unwrap_err().to_string().contains("stopped"));
}

#[test]
fn every_spin_works() {
    for spin in [Spin::latency(), Spin::cpu(), Spin::default()] {
        let mut rig = Rig::new(Executor::builder().spin(spin), Handler::each(|_: &i64| ()));
        let epoch = rig.executor.open(0, 64).unwrap();
        for offset in 0..1_000 {
            rig.until("room", |executor| executor.room(epoch) > 0);
            rig.executor.offer(epoch, offset, ordered(offset as u64), offset).unwrap();
        }
        rig.drained(epoch);
    }
}

#[test]
fn the_record_that_holds_a_watermark_is_named_with_its_state() {
    let door = Arc::new(Door::default());
    let _opens = Opens(Arc::clone(&door));
    let handler = Handler::each({
        let door = Arc::clone(&door);
        move |(offset, waits): &(i64, bool)| {
            if *waits {
                door.pass();
            }
            if *offset == 7 { Err("not this one") } else { Ok(()) }
        }
    });
    let retry =
        Retry::forever().first(Duration::from_secs(100)).cap(Duration::from_secs(100)).jitter(0.0);
    let mut rig = Rig::new(Executor::builder().workers(1).retry(retry), handler);
    let running = rig.executor.open(5, 100).unwrap();
    let parked = rig.executor.open(7, 100).unwrap();
    let idle = rig.executor.open(0, 100).unwrap();
    assert_eq!(rig.executor.stalls(), []);
    rig.turn();
    // Parked: its attempt fails, and those behind it are finished but the next one of its key.
    for (offset, key) in [(7, 1), (8, 2), (9, 2), (20, 1)] {
        rig.executor.offer(parked, offset, ordered(key), (offset, false)).unwrap();
    }
    rig.until("the failure", |executor| executor.counts().failed_attempts == 1);
    rig.until("those behind it", |executor| executor.stalls()[0].finished_behind == 2);
    let stall = rig.executor.stalls().remove(0);
    assert_eq!((stall.epoch, stall.offset, stall.attempt, stall.unfinished), (parked, 7, 2, 2));
    assert!(stall.hash.is_some() && stall.shard.is_some() && !stall.dead_letter, "{stall:?}");
    let StallState::Parked { until } = stall.state else { panic!("{stall:?}") };
    assert!(until > Duration::from_secs(99), "{stall:?}");
    // Running, and queued behind it in another epoch.
    rig.executor.offer(running, 5, Route::Free, (5, true)).unwrap();
    let first_of_running = |executor: &Executor<_>| {
        let stalls = executor.stalls();
        stalls.into_iter().find(|stall| stall.epoch == running)
    };
    rig.until("it runs", |executor| {
        let state = first_of_running(executor).unwrap().state;
        matches!(state, StallState::Running { worker: 0, busy } if busy > Duration::from_millis(20))
    });
    let stall = first_of_running(&rig.executor).unwrap();
    assert_eq!((stall.offset, stall.hash, stall.shard, stall.attempt), (5, None, None, 1));
    assert!(stall.age >= Duration::from_millis(20) && stall.age < Duration::from_secs(60));
    rig.executor.offer(idle, 3, ordered(9), (3, false)).unwrap();
    rig.turn();
    let queued = rig.executor.stalls().into_iter().find(|stall| stall.epoch == idle).unwrap();
    assert!(matches!(queued.state, StallState::Queued { .. }), "{queued:?}");
    door.open();
    rig.until("all but the parked one", |executor| executor.stalls().len() == 1);
}

#[test]
fn a_handler_that_outlives_its_epoch_is_told_of_once_and_its_key_waits() {
    let (door, calls) = (Arc::new(Door::default()), Arc::default());
    let _opens = Opens(Arc::clone(&door));
    let builder =
        Executor::builder().workers(2).old_handler(OldHandler::Report(Duration::from_millis(30)));
    let mut rig = Rig::new(builder, at_door(&door, &calls));
    let old = rig.executor.open(0, 100).unwrap();
    rig.executor.offer(old, 4, ordered(1), (4, true)).unwrap();
    rig.until("it runs", |executor| executor.worker_states().any(|state| state.taken == 1));
    rig.executor.close(old).unwrap();
    let new = rig.executor.open(0, 100).unwrap();
    rig.executor.offer(new, 4, ordered(1), (104, false)).unwrap();
    rig.executor.offer(new, 5, ordered(2), (105, false)).unwrap();
    let mut told = None;
    rig.until("the notice", |executor| {
        told = executor.take_overdue();
        told.is_some()
    });
    let told = told.unwrap();
    assert_eq!((told.epoch, told.offset), (old, 4));
    assert!(told.closed_for >= Duration::from_millis(30), "{told:?}");
    (0..20).for_each(|_| rig.turn());
    assert_eq!(rig.executor.take_overdue(), None, "once");
    let stall = rig.executor.stalls().remove(0);
    assert_eq!((stall.epoch, stall.offset, stall.finished_behind), (new, 4, 1));
    let behind = matches!(stall.state, StallState::Queued { behind_closed_epoch: true, .. });
    assert!(behind, "{stall:?}");
    door.open();
    rig.drained(new);
    assert_eq!(
        calls.lock().iter().filter(|offset| **offset != 105).collect::<Vec<_>>(),
        [&4, &104]
    );
}

#[test]
fn b28_everything_goes_on_beside_a_record_that_takes_long() {
    let (door, calls) = (Arc::new(Door::default()), Arc::default());
    let _opens = Opens(Arc::clone(&door));
    let mut rig = Rig::new(Executor::builder().workers(8), at_door(&door, &calls));
    let stuck = rig.executor.open(0, 500).unwrap();
    let other = rig.executor.open(0, 500).unwrap();
    let (mut next, mut beside) = (0, 0);
    rig.until("the window is full and the other partition has gone on", |executor| {
        if executor.room(stuck) > 0 {
            executor.offer(stuck, next, ordered(next as u64), (next, next == 0)).unwrap();
            next += 1;
        }
        if executor.room(other) > 0 && beside < 3_000 {
            // Few keys: one that shared the shard of the first record would wait for it.
            let key = 1_000_000 + beside as u64 % 20;
            executor.offer(other, beside, ordered(key), (beside, false)).unwrap();
            beside += 1;
        }
        next == 500 && executor.progress(other).unwrap().watermark == 3_000
    });
    let progress = rig.executor.progress(stuck).unwrap();
    assert_eq!((progress.watermark, progress.unfinished), (0, 500));
    assert_eq!(rig.executor.room(stuck), 0, "intake pauses");
    // Its shard's other records wait, too: 500 keys in 1,024 shards, so there are few.
    rig.until("the others", |executor| executor.stalls()[0].finished_behind >= 490);
    door.open();
    rig.drained(stuck);
    assert_eq!(rig.executor.progress(stuck).unwrap().watermark, 500);
    assert!(rig.executor.room(stuck) > 0, "intake goes on");
}

#[test]
fn b36_what_is_parked_beyond_the_budget_is_not_tried_early_and_not_waited_for() {
    let attempts = Arc::new(AtomicU64::new(0));
    let handler = Handler::each({
        let attempts = Arc::clone(&attempts);
        move |_: &i64| {
            attempts.fetch_add(1, Ordering::Relaxed);
            Err("not yet")
        }
    });
    let retry =
        Retry::forever().first(Duration::from_secs(100)).cap(Duration::from_secs(100)).jitter(0.0);
    let mut rig = Rig::new(Executor::builder().retry(retry), handler);
    let epoch = rig.executor.open(0, 10).unwrap();
    rig.executor.offer(epoch, 0, ordered(0), 0).unwrap();
    rig.until("the failure", |executor| executor.counts().failed_attempts == 1);
    let clock = rig.clock();
    let report = rig.executor.shutdown(&rig.waiter, clock, Duration::from_secs(5));
    assert!(rig.began.elapsed() < Duration::from_secs(50), "it waited for the retry");
    assert_eq!(attempts.load(Ordering::Relaxed), 1);
    assert!(!report.is_drained());
    assert_eq!(report.running_workers, 0);
    let [left] = &report.epochs[..] else { panic!("{report:?}") };
    assert_eq!((left.epoch, left.watermark, left.finished, left.unfinished), (epoch, 0, 0, 1));
    let first = left.first.as_ref().unwrap();
    assert!(matches!(first.state, StallState::Parked { .. }), "{first:?}");
}

#[test]
fn b39_a_head_that_waits_for_a_retry_fills_its_window_and_no_more() {
    let door = Arc::new(Door::default());
    let handler = Handler::each({
        let door = Arc::clone(&door);
        move |offset: &i64| {
            let fails = *offset == 0 && !door.0.load(Ordering::Acquire);
            if fails { Err("not yet") } else { Ok(()) }
        }
    });
    let retry = Retry::forever().first(Duration::from_millis(5)).cap(Duration::from_millis(10));
    let mut rig = Rig::new(Executor::builder().workers(14).retry(retry), handler);
    let epoch = rig.executor.open(0, 100).unwrap();
    let mut next = 0;
    let feed = |executor: &mut Executor<i64>, next: &mut i64| {
        while executor.room(epoch) > 0 && *next < 10_000 {
            executor.offer(epoch, *next, ordered(*next as u64), *next).unwrap();
            *next += 1;
        }
    };
    rig.until("the window is full and tried", |executor| {
        feed(executor, &mut next);
        executor.counts().failed_attempts >= 5 && executor.stalls()[0].finished_behind == 99
    });
    let stall = rig.executor.stalls().remove(0);
    assert_eq!((next, stall.offset, stall.unfinished), (100, 0, 1));
    assert!(stall.attempt >= 5 && stall.age > Duration::ZERO, "{stall:?}");
    door.open();
    rig.until("all 10,000", |executor| {
        feed(executor, &mut next);
        executor.progress(epoch).unwrap().watermark == 10_000
    });
}

#[test]
fn b39_keys_that_never_succeed_leave_other_partitions_alone() {
    let handler =
        Handler::each(|(key, _): &(u64, i64)| if *key < 40 { Err("never") } else { Ok(()) });
    let retry = Retry::forever().first(Duration::from_millis(1)).cap(Duration::from_millis(20));
    let mut rig = Rig::new(Executor::builder().workers(4).retry(retry), handler);
    let poisoned = rig.executor.open(0, 1_000).unwrap();
    let healthy = rig.executor.open(0, 1_000).unwrap();
    let (mut next, mut beside) = (0, 0);
    rig.until("the healthy partition", |executor| {
        while executor.room(poisoned) > 0 {
            // Every tenth record is of a key that never succeeds.
            let key = if next % 10 == 0 { next as u64 / 10 % 40 } else { 40 + next as u64 % 1_000 };
            executor.offer(poisoned, next, ordered(key), (key, next)).unwrap();
            next += 1;
        }
        while executor.room(healthy) > 0 && beside < 20_000 {
            let key = 5_000 + beside as u64 % 1_000;
            executor.offer(healthy, beside, ordered(key), (key, beside)).unwrap();
            beside += 1;
        }
        executor.progress(healthy).unwrap().watermark == 20_000
    });
    assert_eq!(rig.executor.progress(poisoned).unwrap().watermark, 0);
    assert_eq!(rig.executor.stalls()[0].epoch, poisoned, "the stall is visible");
    assert!(rig.executor.parked().count() >= 40);
}

#[test]
fn b41_a_handler_that_never_returns_does_not_keep_the_executor_from_ending() {
    let (door, calls) = (Arc::new(Door::default()), Arc::default());
    let _opens = Opens(Arc::clone(&door));
    let mut rig = Rig::new(Executor::builder().workers(2), at_door(&door, &calls));
    let epoch = rig.executor.open(0, 100).unwrap();
    for offset in 0..10 {
        rig.executor.offer(epoch, offset, ordered(offset as u64), (offset, offset == 3)).unwrap();
    }
    rig.until("the others", |executor| executor.stalls()[0].finished_behind == 6);
    let clock = rig.clock();
    let report = rig.executor.shutdown(&rig.waiter, clock, Duration::from_millis(300));
    assert_eq!(report.running_workers, 1);
    let [left] = &report.epochs[..] else { panic!("{report:?}") };
    assert_eq!((left.watermark, left.finished, left.finished_above, left.unfinished), (3, 3, 6, 1));
    let first = left.first.as_ref().unwrap();
    assert_eq!(first.offset, 3);
    assert!(matches!(first.state, StallState::Running { .. }), "{first:?}");
}

#[test]
fn b43_a_stop_now_starts_nothing_more() {
    let (door, calls) = (Arc::new(Door::default()), Arc::new(Mutex::new(Vec::new())));
    let _opens = Opens(Arc::clone(&door));
    let mut rig = Rig::new(Executor::builder().workers(1), at_door(&door, &calls));
    let epoch = rig.executor.open(0, 1_000).unwrap();
    for offset in 0..500 {
        rig.executor.offer(epoch, offset, ordered(0), (offset, true)).unwrap();
    }
    rig.until("the first", |executor| executor.worker_states().any(|state| state.taken > 0));
    let clock = rig.clock();
    let report = rig.executor.shutdown(&rig.waiter, clock, Duration::ZERO);
    assert_eq!((report.epochs[0].watermark, report.epochs[0].unfinished), (0, 500));
    door.open();
    let began = Instant::now();
    while calls.lock().is_empty() && began.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(*calls.lock(), [0], "only the one that ran");
}

#[test]
fn a_drain_lets_everything_that_was_admitted_end() {
    let (door, calls) = (Arc::new(Door::default()), Arc::new(Mutex::new(Vec::new())));
    door.open();
    let mut rig = Rig::new(Executor::builder(), at_door(&door, &calls));
    let epochs = [0, 1, 2].map(|_| rig.executor.open(0, 1_000).unwrap());
    for offset in 0..1_000 {
        for epoch in epochs {
            rig.executor.offer(epoch, offset, ordered(offset as u64), (offset, true)).unwrap();
        }
    }
    let clock = rig.clock();
    let report = rig.executor.drain(&rig.waiter, clock, Duration::from_secs(60));
    assert!(report.is_drained(), "{report:?}");
    assert_eq!(report.epochs.len(), 3);
    assert!(report.epochs.iter().all(|left| left.watermark == 1_000 && left.first.is_none()));
    assert_eq!(calls.lock().len(), 3_000);
    let refused = rig.executor.offer(epochs[0], 1_000, ordered(0), (0, false));
    assert!(refused.is_err(), "intake has ended");
    let clock = rig.clock();
    assert_eq!(
        rig.executor.shutdown(&rig.waiter, clock, Duration::from_secs(60)).running_workers,
        0
    );
}
