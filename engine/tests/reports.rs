//! Fault reports from the field of ordered, parallel consumption, as cases of the executor: `bNN` is
//! the number of the report. Those of the window alone are in `window.rs`.

use parking_lot::Mutex;
use plimsoll_engine::{
    DeadLetter, EpochId, Executor, Exhausted, Handler, Outcome, Refused, Retry, Route, Waiter,
    Window,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn ordered(key: u64) -> Route {
    Route::Ordered((key + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// A small generator: the tests need variety, not quality.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % bound
    }
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

    fn watermark(&self, epoch: EpochId) -> i64 {
        self.executor.progress(epoch).unwrap().watermark
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

#[test]
fn b10_skipped_and_buried_records_leave_no_hole() {
    for then in [Exhausted::Skip, Exhausted::DeadLetter] {
        let buried = Arc::new(AtomicU64::new(0));
        let handler = Handler::each(
            |offset: &i64| {
                if *offset == 4 { Err("it fails for good") } else { Ok(()) }
            },
        );
        let handler = handler.dead_letter({
            let buried = Arc::clone(&buried);
            move |offset: &i64, letter: &DeadLetter| {
                assert_eq!((*offset, letter.attempts), (4, 3));
                buried.fetch_add(1, Ordering::Relaxed);
                Ok::<(), String>(())
            }
        });
        let retry = Retry::times(3).first(Duration::from_millis(1)).then(then);
        let mut rig = Rig::new(Executor::builder().retry(retry), handler);
        let epoch = rig.executor.open(0, 100).unwrap();
        for offset in 0..10 {
            rig.executor.offer(epoch, offset, ordered(offset as u64), offset).unwrap();
        }
        let expected = u64::from(then == Exhausted::DeadLetter);
        rig.drained(epoch);
        assert_eq!(rig.watermark(epoch), 10);
        assert!(rig.executor.room(epoch) > 0, "intake is open");
        // It is counted when the dispatcher has it back.
        rig.until("the count", |executor| {
            let counts = executor.counts();
            (counts.dead_lettered, counts.skipped) == (expected, 1 - expected)
        });
        assert_eq!(buried.load(Ordering::Relaxed), expected);
    }
}

#[test]
fn b10_filtered_records_leave_no_hole() {
    let mut window = Window::open(0, 10_000).unwrap();
    let watermark = window.watermark();
    let mut handled = Vec::new();
    for offset in 0..10_000 {
        let ticket = window.admit(offset).unwrap();
        // Filtered ones end at once, on the admitting thread.
        if offset % 2 == 1 { ticket.finish() } else { handled.push(ticket) }
    }
    let mut random = Random(10);
    while !handled.is_empty() {
        let at = random.below(handled.len() as u64) as usize;
        handled.swap_remove(at).finish();
        let lowest = handled.iter().map(|ticket| ticket.offset()).min();
        if handled.len() % 100 == 0 {
            assert_eq!(watermark.advance().watermark, lowest.unwrap_or(10_000));
        }
    }
    assert_eq!(watermark.get(), 10_000);
}

#[test]
fn b15_a_retry_at_the_front_holds_the_watermark_until_it_is_resolved() {
    let door = Arc::new(Door::default());
    let handler = Handler::each({
        let door = Arc::clone(&door);
        move |offset: &i64| {
            let fails = *offset == 50 && !door.0.load(Ordering::Acquire);
            if fails { Err("not yet") } else { Ok(()) }
        }
    });
    let retry = Retry::forever().first(Duration::from_millis(2)).cap(Duration::from_millis(5));
    let mut rig = Rig::new(Executor::builder().retry(retry), handler);
    let epoch = rig.executor.open(50, 100).unwrap();
    for offset in 50..78 {
        rig.executor.offer(epoch, offset, ordered(offset as u64), offset).unwrap();
    }
    rig.until("five attempts", |executor| executor.counts().failed_attempts >= 5);
    assert_eq!(rig.watermark(epoch), 50);
    door.open();
    rig.drained(epoch);
    assert_eq!(rig.watermark(epoch), 78);
}

/// Handlers of the first life wait at a door; all calls are noted.
fn two_lives(door: &Arc<Door>, calls: &Arc<Mutex<Vec<(u32, i64)>>>) -> Handler<(u32, i64)> {
    let (door, calls) = (Arc::clone(door), Arc::clone(calls));
    Handler::each(move |record: &(u32, i64)| {
        if record.0 == 1 {
            door.pass();
        }
        calls.lock().push(*record);
    })
}

#[test]
fn b20_a_new_epoch_starts_at_what_was_committed_and_old_completions_do_not_count() {
    let (door, calls) = (Arc::new(Door::default()), Arc::default());
    let mut rig = Rig::new(Executor::builder().workers(2), two_lives(&door, &calls));
    let first = rig.executor.open(0, 1_000).unwrap();
    for offset in 0..100 {
        rig.executor.offer(first, offset, ordered(offset as u64), (1, offset)).unwrap();
    }
    (0..5).for_each(|_| rig.turn());
    // Revoked; what was finished could not be committed, so the next epoch starts from 0 again.
    assert_eq!(rig.executor.close(first).unwrap().watermark, 0);
    let second = rig.executor.open(0, 1_000).unwrap();
    assert!(rig.executor.progress(first).is_none());
    let refused = rig.executor.offer(first, 100, ordered(100), (1, 100)).unwrap_err().refused;
    assert_eq!(refused, Refused::Closed);
    for offset in 0..100 {
        rig.executor.offer(second, offset, ordered(offset as u64), (2, offset)).unwrap();
    }
    (0..5).for_each(|_| rig.turn());
    assert_eq!(rig.watermark(second), 0, "the keys' old handlers still run");
    door.open();
    rig.drained(second);
    assert_eq!(rig.watermark(second), 100);
    let calls = calls.lock();
    assert_eq!(calls.iter().filter(|call| call.0 == 2).count(), 100);
    for old in calls.iter().filter(|call| call.0 == 1) {
        let at = |life| calls.iter().position(|call| *call == (life, old.1));
        assert!(at(1) < at(2), "offset {} began anew before its old handler had ended", old.1);
    }
}

#[test]
fn b21_a_record_that_is_left_from_an_old_epoch_does_not_block_the_fresh_one() {
    const BASE: i64 = 12_650_437_055;
    let (door, calls) = (Arc::new(Door::default()), Arc::default());
    let mut rig = Rig::new(Executor::builder().workers(1), two_lives(&door, &calls));
    let first = rig.executor.open(BASE, 10).unwrap();
    for offset in [BASE, BASE + 1] {
        rig.executor.offer(first, offset, ordered(7), (1, offset)).unwrap();
    }
    (0..5).for_each(|_| rig.turn());
    rig.executor.close(first).unwrap();
    let second = rig.executor.open(BASE, 10).unwrap();
    for offset in [BASE, BASE + 1, BASE + 2] {
        rig.executor.offer(second, offset, ordered(7), (2, offset)).unwrap();
    }
    door.open();
    rig.drained(second);
    assert_eq!(rig.watermark(second), BASE + 3);
    let calls = calls.lock();
    let fresh: Vec<i64> = calls.iter().filter(|call| call.0 == 2).map(|call| call.1).collect();
    assert_eq!(fresh, [BASE, BASE + 1, BASE + 2]);
    assert!(!calls.contains(&(1, BASE + 1)), "it had not started when its epoch was closed");
}

#[test]
fn b21_epochs_that_end_at_any_moment_leave_nothing_behind() {
    let handled: Arc<Mutex<HashMap<(u32, i64), u32>>> = Arc::default();
    let handler = Handler::each({
        let handled = Arc::clone(&handled);
        move |record: &(u32, i64)| *handled.lock().entry(*record).or_default() += 1
    });
    let mut rig = Rig::new(Executor::builder().workers(2).shards(16), handler);
    let mut random = Random(21);
    for round in 0..1_000_u32 {
        let first = rig.executor.open(0, 500).unwrap();
        let cut = random.below(500) as i64;
        for offset in 0..cut {
            rig.executor.offer(first, offset, ordered(offset as u64), (2 * round, offset)).unwrap();
            if random.below(50) == 0 {
                rig.executor.pass(rig.began.elapsed());
            }
        }
        rig.executor.close(first).unwrap();
        let second = rig.executor.open(0, 500).unwrap();
        for offset in 0..500 {
            let record = (2 * round + 1, offset);
            rig.executor.offer(second, offset, ordered(offset as u64), record).unwrap();
        }
        rig.drained(second);
        assert_eq!(rig.watermark(second), 500);
        rig.executor.close(second).unwrap();
        let mut handled = handled.lock();
        let fresh = handled.iter().filter(|(record, count)| record.0 % 2 == 1 && **count == 1);
        assert_eq!(fresh.count(), 500, "round {round}");
        assert!(handled.values().all(|count| *count == 1), "round {round}");
        handled.clear();
    }
    rig.until("rest", |executor| !executor.busy());
}

#[test]
fn b21_gauges_are_those_of_the_epoch() {
    let (door, calls) = (Arc::new(Door::default()), Arc::default());
    let mut rig = Rig::new(Executor::builder().workers(1).shards(4), two_lives(&door, &calls));
    for _ in 0..100 {
        let epoch = rig.executor.open(0, 50).unwrap();
        assert_eq!(rig.executor.progress(epoch).unwrap().unfinished, 0);
        for offset in 0..50 {
            rig.executor.offer(epoch, offset, ordered(offset as u64), (1, offset)).unwrap();
        }
        assert_eq!(rig.executor.room(epoch), 0);
        rig.turn();
        assert_eq!(rig.executor.close(epoch).unwrap().unfinished, 50);
        assert!(rig.executor.progress(epoch).is_none());
    }
    door.open();
    rig.until("rest", |executor| !executor.busy());
    let after = rig.executor.open(0, 50).unwrap();
    assert_eq!(rig.executor.room(after), 50, "intake is open");
}

#[test]
fn b28_a_hot_key_keeps_its_order_and_does_not_hold_up_the_others() {
    const HOT: u64 = 0;
    #[derive(Debug, Default)]
    struct Seen {
        hot: Vec<i64>,
        /// Of other keys, when the hot key's last record was handled.
        others_before_the_end: usize,
        others: usize,
    }
    let seen: Arc<Mutex<Seen>> = Arc::default();
    let running = Arc::new(AtomicBool::new(false));
    let handler = Handler::each({
        let seen = Arc::clone(&seen);
        move |(key, offset): &(u64, i64)| {
            if *key == HOT {
                assert!(!running.swap(true, Ordering::AcqRel), "two of a key at once");
                std::thread::sleep(Duration::from_micros(200));
                let mut seen = seen.lock();
                seen.hot.push(*offset);
                seen.others_before_the_end = seen.others;
                drop(seen);
                running.store(false, Ordering::Release);
            } else {
                std::thread::sleep(Duration::from_micros(50));
                seen.lock().others += 1;
            }
        }
    });
    let mut rig = Rig::new(Executor::builder().workers(8), handler);
    let epoch = rig.executor.open(0, 4_096).unwrap();
    let mut random = Random(28);
    let key_of = |random: &mut Random| match random.below(10) {
        9 => 1 + random.below(100),
        _ => HOT,
    };
    let mut next = 0;
    let mut key = key_of(&mut random);
    rig.until("10,000 records", |executor| {
        let wanted = executor.demand().min(executor.room(epoch));
        for _ in 0..wanted {
            if next < 10_000 {
                executor.offer(epoch, next, ordered(key), (key, next)).unwrap();
                key = key_of(&mut random);
                next += 1;
            }
        }
        next == 10_000 && executor.progress(epoch).unwrap().unfinished == 0
    });
    let seen = seen.lock();
    assert!(seen.hot.is_sorted(), "the hot key is out of order");
    assert_eq!(seen.hot.len() + seen.others, 10_000);
    // The hot key alone takes 2 s, all others together 10 ms: they must not be left for the end.
    let late = seen.others - seen.others_before_the_end;
    assert!(late < 100, "{late} of {} others came after the hot key", seen.others);
}

#[test]
fn b36_delays_neither_vanish_nor_overflow() {
    let (base, cap) = (Duration::from_millis(300), Duration::from_secs(60));
    for jitter in [0.0, 0.2, 1.0] {
        let retry = Retry::forever().first(base).cap(cap).jitter(jitter);
        let mut before = Duration::ZERO;
        for failed in (1..=200).chain([u32::MAX - 1, u32::MAX]) {
            for random in [0.0, 0.5, 0.999_999] {
                let delay = retry.delay(failed, random).expect("without end");
                assert!(!delay.is_zero() && delay <= cap, "{failed}: {delay:?}");
            }
            let longest = retry.delay(failed, 0.0).expect("without end");
            assert!(longest >= before, "{failed}: {longest:?} after {before:?}");
            before = longest;
        }
        assert_eq!(before, cap);
    }
}

/// Resident memory of this process, bytes.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux's /proc");
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("pages");
    pages * 4_096
}

#[test]
fn b52_a_thousand_partitions_cost_little_and_come_and_go() {
    let mut rig = Rig::new(Executor::builder(), Handler::each(|_: &i64| ()));
    let before = resident();
    for _ in 0..3 {
        let epochs: Vec<EpochId> =
            (0..1_000).map(|_| rig.executor.open(0, 1_024).unwrap()).collect();
        // One is active, the others idle.
        for offset in 0..20_000 {
            let active = epochs[500];
            rig.until("room", |executor| executor.room(active) > 0);
            rig.executor.offer(active, offset, ordered(offset as u64), offset).unwrap();
        }
        rig.drained(epochs[500]);
        let moved = epochs.iter().filter(|epoch| rig.watermark(**epoch) > 0).count();
        assert_eq!(moved, 1, "only one has something to commit");
        for epoch in &epochs {
            rig.executor.close(*epoch).unwrap();
        }
        rig.turn();
    }
    // Other tests of this process run at the same time, but none of them is large.
    let grown = resident().saturating_sub(before);
    assert!(grown <= 64 << 20, "{grown} bytes");
}

#[test]
fn b53_a_window_of_one_record_works_in_strict_order() {
    let seen: Arc<Mutex<Vec<i64>>> = Arc::default();
    let handler = Handler::each({
        let seen = Arc::clone(&seen);
        move |offset: &i64| seen.lock().push(*offset)
    });
    let mut rig = Rig::new(Executor::builder().workers(4), handler);
    let epoch = rig.executor.open(0, 1).unwrap();
    for offset in 0..1_000 {
        rig.until("room", |executor| executor.room(epoch) == 1);
        // Without an order: the window alone makes it strict.
        rig.executor.offer(epoch, offset, Route::Free, offset).unwrap();
        assert_eq!(rig.executor.room(epoch).min(1), rig.executor.room(epoch));
    }
    rig.drained(epoch);
    assert_eq!(rig.watermark(epoch), 1_000);
    assert!(seen.lock().iter().copied().eq(0..1_000));
}

#[test]
fn b53_records_may_be_offered_while_workers_are_starting() {
    for round in 0..2_000 {
        let next = Arc::new([AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0)]);
        let handler = Handler::each({
            let next = Arc::clone(&next);
            move |(key, sequence): &(usize, u64)| {
                if next[*key].fetch_add(1, Ordering::Relaxed) == *sequence {
                    Outcome::Done
                } else {
                    Outcome::Halt(format!("record {sequence} of key {key} is out of order"))
                }
            }
        });
        let mut rig = Rig::new(Executor::builder().workers(2).shards(8), handler);
        let epoch = rig.executor.open(0, 64).unwrap();
        for offset in 0..30 {
            let record = (offset as usize % 3, offset as u64 / 3);
            rig.executor.offer(epoch, offset, ordered(record.0 as u64), record).unwrap();
        }
        rig.executor.flush();
        rig.until("30 records", |executor| {
            assert_eq!(executor.take_failure(), None, "round {round}");
            executor.progress(epoch).unwrap().watermark == 30
        });
    }
}

#[test]
fn b53_gauges_stay_within_their_bounds_while_everything_moves() {
    const CAPACITY: u32 = 200;
    let mut window = Window::open(0, CAPACITY).unwrap();
    let over = Arc::new(AtomicBool::new(false));
    let (give, take) = std::sync::mpsc::channel::<plimsoll_engine::Ticket>();
    let take = Arc::new(Mutex::new(take));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let take = Arc::clone(&take);
            scope.spawn(move || {
                loop {
                    let next = take.lock().recv();
                    let Ok(ticket) = next else { return };
                    ticket.finish();
                }
            });
        }
        for _ in 0..4 {
            let (watermark, over) = (window.watermark(), Arc::clone(&over));
            scope.spawn(move || {
                let mut last = 0;
                while !over.load(Ordering::Relaxed) {
                    let progress = watermark.advance();
                    assert!(progress.unfinished <= u64::from(CAPACITY), "{progress:?}");
                    assert!(progress.watermark >= last, "{progress:?} after {last}");
                    assert_eq!(progress.watermark as u64, progress.passed);
                    last = progress.watermark;
                }
            });
        }
        for offset in 0..100_000 {
            while window.room() == 0 {
                std::thread::yield_now();
            }
            assert!(window.room() <= CAPACITY);
            give.send(window.admit(offset).unwrap()).unwrap();
        }
        drop(give);
        while window.watermark().advance().watermark < 100_000 {
            std::thread::yield_now();
        }
        over.store(true, Ordering::Relaxed);
    });
}
