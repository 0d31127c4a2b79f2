//! Records that any thread takes and finishes.

use parking_lot::Mutex;
use plimsoll_engine::{
    Builder, Ended, EpochId, Executor, Exhausted, Outcome, Pulled, Puller, Retry, Route, Waiter,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A record: its key and its place among the records of the key.
type Record = (u64, u32);

const SOON: Duration = Duration::from_millis(20);
/// A wake-up that is lost shows as a test that does not end.
const LONG: Duration = Duration::from_secs(50);

fn hash(key: u64) -> u64 {
    (key + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

struct Driver {
    executor: Executor<Record>,
    puller: Puller<Record>,
    waiter: Waiter,
    epoch: EpochId,
    next: i64,
    began: Instant,
}

impl Driver {
    fn new(builder: Builder) -> Self {
        let waiter = Waiter::new();
        let (mut executor, puller) = builder.pull(waiter.waker()).unwrap();
        let epoch = executor.open(0, 100_000).unwrap();
        Driver { executor, puller, waiter, epoch, next: 0, began: Instant::now() }
    }

    fn offer(&mut self, records: impl IntoIterator<Item = Record>) {
        for (key, sequence) in records {
            let route = Route::Ordered(hash(key));
            self.executor.offer(self.epoch, self.next, route, (key, sequence)).unwrap();
            self.next += 1;
        }
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Executor<Record>) -> bool) {
        loop {
            self.executor.pass(self.began.elapsed());
            if done(&mut self.executor) {
                return;
            }
            assert!(self.began.elapsed() < Duration::from_secs(60), "no end: {what}");
            let executor = &self.executor;
            self.waiter.wait(Duration::from_millis(5), || executor.finished_something());
        }
    }

    fn until_all_finished(&mut self) {
        let (epoch, next) = (self.epoch, self.next);
        self.until("all finished", |executor| {
            executor.progress(epoch).unwrap().watermark == next && !executor.busy()
        });
    }

    fn pull(&mut self) -> Pulled<Record> {
        self.executor.pass(self.began.elapsed());
        self.puller.try_next().unwrap().expect("a record")
    }
}

fn quick(attempts: u32) -> Retry {
    Retry::times(attempts).first(Duration::ZERO).cap(Duration::ZERO)
}

#[test]
fn many_threads_pull_and_finish_in_the_order_of_each_key() {
    let mut driver = Driver::new(Executor::builder().concurrency(64).retry(quick(3)));
    let seen = Arc::new(Mutex::new(HashMap::<u64, (u32, bool)>::new()));
    let (finishers, finish) = std::sync::mpsc::channel::<Pulled<Record>>();
    let pullers: Vec<_> = (0..4)
        .map(|index| {
            let (puller, finishers) = (driver.puller.clone(), finishers.clone());
            let seen = Arc::clone(&seen);
            std::thread::spawn(move || -> Result<(), Ended> {
                loop {
                    let batch = if index % 2 == 0 {
                        puller.next_batch(5, LONG)?
                    } else {
                        puller.next(LONG)?.into_iter().collect()
                    };
                    for pulled in batch {
                        let mut seen = seen.lock();
                        let (due, busy) = seen.entry(pulled.0).or_default();
                        assert_eq!((*due, *busy), (pulled.1, false), "key {}", pulled.0);
                        *busy = true;
                        drop(seen);
                        // Another thread ends it.
                        finishers.send(pulled).unwrap();
                    }
                }
            })
        })
        .collect();
    drop(finishers);
    let finisher = std::thread::spawn({
        let seen = Arc::clone(&seen);
        move || {
            for pulled in finish {
                let fails = pulled.1.is_multiple_of(5) && pulled.attempt().number < 3;
                let mut seen = seen.lock();
                let (due, busy) = seen.get_mut(&pulled.0).unwrap();
                (*due, *busy) = (*due + u32::from(!fails), false);
                drop(seen);
                match (fails, pulled.attempt().number) {
                    (false, _) => pulled.finish(),
                    (true, 1) => pulled.fail("once"),
                    _ => drop(pulled),
                }
            }
        }
    });
    driver.offer((0..40).flat_map(|sequence| (0..100).map(move |key| (key, sequence))));
    driver.until_all_finished();
    assert_eq!(driver.executor.counts().failed_attempts, 1_600);
    driver.executor.stop();
    for puller in pullers {
        assert_eq!(puller.join().unwrap(), Err(Ended));
    }
    finisher.join().unwrap();
    assert!(seen.lock().values().all(|seen| *seen == (40, false)));
}

#[test]
fn waits_are_bounded_and_nothing_is_nothing() {
    let mut driver = Driver::new(Executor::builder());
    assert!(driver.puller.try_next().unwrap().is_none());
    let began = Instant::now();
    assert!(driver.puller.next(SOON).unwrap().is_none());
    assert!(driver.puller.next_batch(3, SOON).unwrap().is_empty());
    assert!(began.elapsed() >= 2 * SOON);
    // Without a wait: none is asked for, or some is there.
    assert!(driver.puller.next_batch(0, LONG).unwrap().is_empty());
    driver.offer([(1, 0), (2, 0), (1, 1)]);
    let batch = driver.puller.next_batch(9, LONG).unwrap();
    assert_eq!(batch.iter().map(|pulled| **pulled).collect::<Vec<_>>(), [(1, 0), (2, 0)]);
    assert_eq!(driver.executor.in_flight(), 2);
    // The next one of the key only after the end of the one before; a watermark without the dispatcher.
    assert!(driver.puller.try_next().unwrap().is_none());
    batch.into_iter().for_each(Pulled::finish);
    assert_eq!(driver.executor.progress(driver.epoch).unwrap().watermark, 2);
    assert_eq!(*driver.pull(), (1, 1));
}

#[test]
fn a_waiting_thread_is_woken_by_a_record_and_by_the_end() {
    let mut driver = Driver::new(Executor::builder());
    let wait = |puller: Puller<Record>| {
        std::thread::spawn(move || puller.next(LONG).map(|pulled| pulled.map(Pulled::finish)))
    };
    for _ in 0..50 {
        let waiting = wait(driver.puller.clone());
        driver.offer([(1, 0)]);
        assert_eq!(waiting.join().unwrap(), Ok(Some(())));
        driver.until_all_finished();
    }
    let waiting = wait(driver.puller.clone());
    let puller = driver.puller.clone();
    drop(driver);
    assert_eq!(waiting.join().unwrap(), Err(Ended));
    assert_eq!(puller.try_next().unwrap_err(), Ended);
    assert_eq!(puller.next_batch(1, LONG).unwrap_err(), Ended);
}

#[test]
fn what_was_offered_before_the_stop_is_still_handed_out() {
    let mut driver = Driver::new(Executor::builder());
    driver.offer([(1, 0), (2, 0)]);
    driver.executor.stop();
    driver.puller.next(LONG).unwrap().unwrap().finish();
    driver.puller.next(LONG).unwrap().unwrap().finish();
    assert_eq!(driver.puller.next(LONG).unwrap_err(), Ended);
    driver.until_all_finished();
}

#[test]
fn a_dropped_record_is_a_failed_attempt_and_a_forgotten_one_is_seen() {
    let retry = quick(2).then(Exhausted::Skip);
    let mut driver = Driver::new(Executor::builder().retry(retry));
    driver.offer([(1, 0), (1, 1)]);
    drop(driver.pull());
    let again = driver.pull();
    assert_eq!((*again, again.attempt().number), ((1, 0), 2));
    drop(again);
    let next = driver.pull();
    assert_eq!(*next, (1, 1));
    let skipped = driver.executor.take_skipped().unwrap();
    let reason = "the record was dropped without an outcome";
    assert_eq!((skipped.offset, skipped.reason.as_str()), (0, reason));
    std::mem::forget(next);
    driver.executor.pass(driver.began.elapsed());
    assert!(driver.executor.busy());
    assert_eq!(driver.executor.in_flight(), 1);
    assert_eq!(driver.executor.progress(driver.epoch).unwrap().unfinished, 1);
}

#[test]
fn dead_letters_are_handed_out_as_such_until_they_are_finished() {
    let mut driver = Driver::new(Executor::builder().retry(quick(2)));
    driver.offer([(1, 0), (1, 1)]);
    driver.pull().end(Outcome::DeadLetter("broken".to_owned()));
    for end in [Outcome::Failed("no".to_owned()), Outcome::DeadLetter("no".to_owned())] {
        let letter = driver.pull();
        let why = letter.dead_letter().unwrap();
        assert_eq!((*letter, why.reason.as_str(), why.attempts), ((1, 0), "broken", 1));
        letter.end(end);
    }
    driver.pull().finish();
    let next = driver.pull();
    assert_eq!((*next, next.dead_letter()), ((1, 1), None));
    next.finish();
    driver.until_all_finished();
    assert_eq!(driver.executor.counts().dead_lettered, 1);
}

#[test]
fn a_closed_epoch_hands_out_nothing_and_a_late_end_touches_nothing() {
    let mut driver = Driver::new(Executor::builder());
    driver.offer([(1, 0), (2, 0), (1, 1)]);
    let old = driver.pull();
    assert!(!old.is_cancelled());
    driver.executor.close(driver.epoch).unwrap();
    assert!(old.is_cancelled());
    driver.epoch = driver.executor.open(0, 100).unwrap();
    driver.next = 0;
    driver.offer([(1, 2), (3, 0)]);
    // The key waits for the old record's end, others do not; what nobody had taken is gone.
    let other = driver.pull();
    assert_eq!(*other, (3, 0));
    other.finish();
    driver.executor.pass(driver.began.elapsed());
    assert!(driver.puller.try_next().unwrap().is_none());
    old.finish();
    assert_eq!(driver.executor.progress(driver.epoch).unwrap().watermark, 0);
    let new = driver.pull();
    assert_eq!(*new, (1, 2));
    new.finish();
    driver.until_all_finished();
}

#[test]
fn records_outlive_the_executor() {
    let mut driver = Driver::new(Executor::builder());
    driver.offer([(1, 0)]);
    let pulled = driver.pull();
    drop(driver);
    assert!(pulled.is_cancelled());
    assert_eq!(*pulled, (1, 0));
    pulled.finish();
}

#[test]
fn records_without_an_order_go_to_whoever_is_free() {
    let mut driver = Driver::new(Executor::builder().concurrency(3).shards(1).retry(quick(2)));
    for offset in 0..9 {
        driver.executor.offer(driver.epoch, offset, Route::Free, (0, offset as u32)).unwrap();
    }
    driver.next = 9;
    // As many as may be in flight, although there is one shard.
    let mut held = driver.puller.next_batch(9, LONG).unwrap();
    assert_eq!(held.len(), 3);
    held.pop().unwrap().fail("once");
    while !held.is_empty() {
        held.into_iter().for_each(Pulled::finish);
        driver.executor.pass(driver.began.elapsed());
        held = driver.puller.next_batch(9, Duration::ZERO).unwrap();
        if held.is_empty() {
            driver.executor.pass(driver.began.elapsed());
            held = driver.puller.next_batch(9, Duration::ZERO).unwrap();
        }
    }
    driver.until_all_finished();
    assert_eq!(driver.executor.counts().failed_attempts, 1);
}
