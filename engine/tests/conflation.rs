//! Conflation on real threads: the newest takes effect, and nothing is finished before it has.

use parking_lot::Mutex;
use plimsoll_engine::{
    Attempt, DeadLetter, EpochId, Executor, Exhausted, Handler, Outcome, Retry, Route, Waiter,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A record: its key and its offset.
type Record = (u64, i64);

fn hash(key: u64) -> u64 {
    (key + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

struct Driver {
    executor: Executor<Record>,
    waiter: Waiter,
    epoch: EpochId,
    next: i64,
    began: Instant,
}

impl Driver {
    fn new(retry: Retry, workers: usize, handler: Handler<Record>) -> Self {
        let waiter = Waiter::new();
        let builder = Executor::builder().workers(workers).shards(4).retry(retry).conflate(true);
        let mut executor = builder.start(waiter.waker(), handler).unwrap();
        let epoch = executor.open(0, 100_000).unwrap();
        Driver { executor, waiter, epoch, next: 0, began: Instant::now() }
    }

    fn offer(&mut self, keys: impl IntoIterator<Item = u64>) {
        let records = keys
            .into_iter()
            .zip(self.next..)
            .map(|(key, offset)| (offset, Route::Ordered(hash(key)), (key, offset)));
        self.next += i64::from(self.executor.offer_all(self.epoch, records).unwrap());
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Executor<Record>, EpochId) -> bool) {
        loop {
            self.executor.pass(self.began.elapsed());
            self.executor.flush();
            if done(&mut self.executor, self.epoch) {
                return;
            }
            assert!(self.began.elapsed() < Duration::from_secs(60), "no end: {what}");
            self.waiter.wait(Duration::from_micros(200), || false);
        }
    }

    fn until_all_finished(&mut self) {
        let next = self.next;
        self.until("all finished", |executor, epoch| {
            executor.progress(epoch).unwrap().watermark == next
        });
    }
}

#[test]
fn the_last_record_of_each_key_takes_effect_and_order_is_kept() {
    let seen: Arc<Mutex<HashMap<u64, Vec<i64>>>> = Arc::default();
    let handler = Handler::each({
        let seen = Arc::clone(&seen);
        move |record: &Record| {
            std::thread::sleep(Duration::from_micros(100));
            seen.lock().entry(record.0).or_default().push(record.1);
        }
    });
    let mut driver = Driver::new(Retry::never(), 3, handler);
    for _ in 0..10 {
        driver.offer((0..2_000).map(|number| number % 50));
        driver.executor.pass(driver.began.elapsed());
    }
    driver.until_all_finished();
    let seen = seen.lock();
    let handled: usize = seen.values().map(Vec::len).sum();
    for key in 0..50 {
        assert!(seen[&key].is_sorted());
        assert_eq!(seen[&key].last(), Some(&(19_950 + key as i64)), "the newest of key {key}");
    }
    assert_eq!(driver.executor.counts().conflated, 20_000 - handled as u64);
    assert!(handled < 20_000, "some were conflated");
}

/// While the newest fails, what it carries is unfinished; with it, however it ends well, they are.
#[test]
fn what_is_carried_is_finished_only_with_its_newest() {
    for then in [Exhausted::Skip, Exhausted::DeadLetter, Exhausted::Halt] {
        let (open, held) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(true)));
        let buried = Arc::new(Mutex::new(Vec::new()));
        let handler = Handler::each_attempt({
            let (open, held) = (Arc::clone(&open), Arc::clone(&held));
            move |record: &Record, _: Attempt| {
                if record.0 == 9 {
                    while held.load(Ordering::Acquire) {
                        std::thread::sleep(Duration::from_micros(100));
                    }
                    return Outcome::Done;
                }
                match (open.load(Ordering::Acquire), then) {
                    (false, _) => Outcome::RetryAfter(Duration::from_millis(1), "not yet".into()),
                    (true, Exhausted::Skip) => Outcome::Skip("enough".to_owned()),
                    (true, Exhausted::DeadLetter) => Outcome::DeadLetter("enough".to_owned()),
                    (true, _) => Outcome::Done,
                }
            }
        });
        let handler = handler.dead_letter({
            let buried = Arc::clone(&buried);
            move |record: &Record, _: &DeadLetter| {
                buried.lock().push(record.1);
                Ok::<(), String>(())
            }
        });
        let mut driver = Driver::new(Retry::forever(), 1, handler);
        // More than a lane holds of a record that takes long; behind them a key's records wait.
        driver.offer([9; 1_000]);
        driver.offer([1; 100]);
        held.store(false, Ordering::Release);
        driver.until("attempts of the newest", |executor, _| executor.counts().failed_attempts > 5);
        let progress = driver.executor.progress(driver.epoch).unwrap();
        assert_eq!(progress.watermark, 1_000, "nothing of the key is finished");
        open.store(true, Ordering::Release);
        driver.until_all_finished();
        let counts = driver.executor.counts();
        assert!(counts.conflated >= 99, "{counts:?}");
        let expected = if then == Exhausted::DeadLetter { vec![1_099] } else { Vec::new() };
        assert_eq!(*buried.lock(), expected);
    }
}

#[test]
fn of_a_quarantined_key_every_record_goes_to_the_hook() {
    let (held, buried) = (Arc::new(AtomicBool::new(true)), Arc::new(Mutex::new(Vec::new())));
    let handler = Handler::each({
        let held = Arc::clone(&held);
        move |record: &Record| {
            if record.0 == 1 {
                return Outcome::Failed("poison".to_owned());
            }
            while held.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_micros(100));
            }
            Outcome::Done
        }
    });
    let handler = handler.dead_letter({
        let buried = Arc::clone(&buried);
        move |record: &Record, _: &DeadLetter| {
            buried.lock().push(record.1);
            Ok::<(), String>(())
        }
    });
    let mut driver = Driver::new(Retry::never().then(Exhausted::Quarantine), 1, handler);
    driver.offer([1]);
    driver.until("the quarantine", |executor, _| executor.counts().dead_lettered == 1);
    driver.offer([9; 1_000]);
    // Its shard waits, so they do, too.
    driver.offer((0..200).map(|number| if number % 2 == 0 { 9 } else { 1 }));
    held.store(false, Ordering::Release);
    driver.until_all_finished();
    let expected: Vec<i64> = [0].into_iter().chain((0..100).map(|n| 1_002 + 2 * n)).collect();
    assert_eq!(*buried.lock(), expected);
    assert!(driver.executor.counts().conflated > 0, "of the other key");
}

/// A halt at the newest leaves everything it carries unfinished.
#[test]
fn a_halt_at_the_newest_holds_the_watermark_below_what_it_carries() {
    let held = Arc::new(AtomicBool::new(true));
    let handler = Handler::each({
        let held = Arc::clone(&held);
        move |record: &Record| {
            if record.0 == 9 {
                while held.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_micros(100));
                }
                return Outcome::Done;
            }
            Outcome::Halt("no further".to_owned())
        }
    });
    let mut driver = Driver::new(Retry::never(), 1, handler);
    driver.offer([9; 1_000]);
    driver.offer([1; 100]);
    held.store(false, Ordering::Release);
    let mut failure = None;
    driver.until("the failure", |executor, _| {
        failure = executor.take_failure();
        failure.is_some()
    });
    assert_eq!(failure.unwrap().offset, 1_099);
    let progress = driver.executor.close(driver.epoch).unwrap();
    assert_eq!(progress.watermark, 1_000);
    driver.until("nothing is left", |executor, _| !executor.busy());
}
