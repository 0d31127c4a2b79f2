//! Batches on real threads: what they hold, how long they wait, how they end; order modes.

use parking_lot::Mutex;
use plimsoll_engine::{
    Attempt, Batch, BatchOf, BatchOutcome, Builder, DeadLetter, EpochId, Executor, Exhausted,
    Handler, OrderBy, Outcome, Retry, Route, Waiter,
};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
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
    fn new(builder: Builder, handler: Handler<Record>) -> Self {
        let waiter = Waiter::new();
        let mut executor = builder.start(waiter.waker(), handler).unwrap();
        let epoch = executor.open(0, 200_000).unwrap();
        Driver { executor, waiter, epoch, next: 0, began: Instant::now() }
    }

    fn offer(&mut self, records: impl IntoIterator<Item = (u64, Route)>) {
        let records = records
            .into_iter()
            .zip(self.next..)
            .map(|((key, route), offset)| (offset, route, (key, offset)));
        self.next += i64::from(self.executor.offer_all(self.epoch, records).unwrap());
    }

    fn offer_keys(&mut self, keys: impl IntoIterator<Item = u64>) {
        self.offer(keys.into_iter().map(|key| (key, Route::Ordered(hash(key)))));
    }

    /// Passes until `done`, at most a minute.
    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Executor<Record>) -> bool) {
        loop {
            self.executor.pass(self.began.elapsed());
            self.executor.flush();
            if done(&mut self.executor) {
                return;
            }
            assert!(self.began.elapsed() < Duration::from_secs(60), "no end: {what}");
            self.waiter.wait(Duration::from_micros(200), || false);
        }
    }

    fn until_all_finished(&mut self) {
        let (epoch, next) = (self.epoch, self.next);
        self.until("all finished", |executor| {
            assert_eq!(executor.take_failure(), None);
            executor.progress(epoch).unwrap().watermark == next
        });
    }
}

fn quick(attempts: u32) -> Retry {
    Retry::times(attempts).first(Duration::from_millis(1)).cap(Duration::from_millis(2))
}

/// With a linger of an hour nothing but a full batch and the end of intake can have handed it over.
#[test]
fn a_full_batch_and_a_drain_do_not_wait_for_the_linger() {
    let sizes = Arc::new(Mutex::new(Vec::new()));
    let handler = Handler::batches({
        let sizes = Arc::clone(&sizes);
        move |batch: &Batch<'_, Record>| sizes.lock().push(batch.len())
    });
    let builder = Executor::builder().workers(1).batch(100).linger(Duration::from_secs(3_600));
    let mut driver = Driver::new(builder, handler);
    // Often enough for batches to lie around the end of the lane.
    for round in 1..=200 {
        driver.offer_keys((0..250).map(|key| key % 100));
        // Not the watermark: those that wait for a full batch need not be the last ones.
        let full = round * 250 / 100 * 100;
        let handled = || sizes.lock().iter().sum::<usize>();
        driver.until("the full batches", |_| handled() == full);
    }
    assert!(sizes.lock().iter().all(|size| *size == 100), "{:?}", sizes.lock());
    driver.offer_keys([1; 7]);
    assert!(driver.executor.next_due().unwrap() > Duration::from_secs(3_000));
    driver.executor.stop_intake(driver.epoch);
    driver.until_all_finished();
    assert_eq!(sizes.lock()[500..], [7]);
}

#[test]
fn batches_are_of_one_key_or_shard_and_keep_its_order() {
    for (of, bytes) in [
        (BatchOf::Mixed, Some(40)),
        (BatchOf::Shard, None),
        (BatchOf::Key, None),
        (BatchOf::Key, Some(25)),
    ] {
        let next = Arc::new(Mutex::new(HashMap::<u64, i64>::new()));
        let (largest, wrong) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicU64::new(0)));
        let handler = Handler::batches({
            let (next, largest, wrong) =
                (Arc::clone(&next), Arc::clone(&largest), Arc::clone(&wrong));
            move |batch: &Batch<'_, Record>| {
                let keys: HashSet<u64> = batch.iter().map(|record| record.0).collect();
                let bytes_of: usize = batch.iter().map(|record| record.0 as usize).sum();
                let fits = batch.len() == 1 || bytes.is_none_or(|most| bytes_of <= most);
                let alike = of != BatchOf::Key || keys.len() == 1;
                wrong.fetch_add(u64::from(!fits || !alike), Ordering::Relaxed);
                largest.fetch_max(batch.len(), Ordering::Relaxed);
                let mut next = next.lock();
                for (key, offset) in batch.iter() {
                    let last = next.insert(*key, *offset).unwrap_or(-1);
                    wrong.fetch_add(u64::from(last >= *offset), Ordering::Relaxed);
                }
            }
        });
        let handler = handler.record_bytes(|record: &Record| record.0 as usize);
        let mut builder = Executor::builder().workers(3).batch(32).shards(8).batch_of(of);
        if let Some(bytes) = bytes {
            builder = builder.batch_bytes(bytes);
        }
        let mut driver = Driver::new(builder, handler);
        driver.offer_keys((0..30_000).map(|number| if number % 2 == 0 { 1 } else { number % 20 }));
        driver.until_all_finished();
        assert_eq!(wrong.load(Ordering::Relaxed), 0, "{of:?}");
        let largest = largest.load(Ordering::Relaxed);
        assert!((2..=32).contains(&largest), "{of:?}: {largest}");
    }
}

/// Each kind of batch with each kind of outcome: every key's records take effect once and in order.
#[test]
fn every_kind_of_batch_may_end_in_parts() {
    for of in [BatchOf::Mixed, BatchOf::Shard, BatchOf::Key] {
        for ending in 0..3 {
            let done = Arc::new(Mutex::new(HashMap::<u64, Vec<i64>>::new()));
            let handler = Handler::batches({
                let done = Arc::clone(&done);
                move |batch: &Batch<'_, Record>| {
                    let fails = |record: &Record| record.1 % 11 == 3 && batch.attempt().number < 3;
                    let mut done = done.lock();
                    let mut finish =
                        |record: &Record| done.entry(record.0).or_default().push(record.1);
                    let Some(bad) = batch.iter().position(fails) else {
                        batch.iter().for_each(finish);
                        return BatchOutcome::All(Outcome::Done);
                    };
                    let failed = || Outcome::Failed("planted".to_owned());
                    match ending {
                        0 => BatchOutcome::All(failed()),
                        1 => {
                            batch.iter().take(bad).for_each(finish);
                            BatchOutcome::Prefix(bad, failed())
                        }
                        _ => {
                            let mut broken = HashSet::new();
                            let each = batch.iter().map(|record| {
                                if fails(record) || broken.contains(&record.0) {
                                    broken.insert(record.0);
                                    failed()
                                } else {
                                    finish(record);
                                    Outcome::Done
                                }
                            });
                            BatchOutcome::Each(each.collect())
                        }
                    }
                }
            });
            let builder = Executor::builder().workers(3).batch(16).shards(16).batch_of(of);
            let mut driver = Driver::new(builder.retry(quick(u32::MAX)), handler);
            driver.offer_keys((0..1_500).map(|number| number % 20));
            driver.until_all_finished();
            for (key, done) in done.lock().iter() {
                let expected: Vec<i64> = (0..75).map(|n| n * 20 + *key as i64).collect();
                assert_eq!(*done, expected, "{of:?}, ending {ending}, key {key}");
            }
        }
    }
}

#[test]
fn b27_null_keys_are_spread_and_an_empty_key_is_a_key() {
    const WORKERS: usize = 8;
    // 1,000 without a key, 50 of "k", 50 of the empty key.
    let null = u64::MAX;
    let order: Arc<Mutex<HashMap<u64, Vec<i64>>>> = Arc::default();
    let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let handler = Handler::each({
        let (order, inside, most) = (Arc::clone(&order), Arc::clone(&inside), Arc::clone(&most));
        move |record: &Record| {
            if record.0 == null {
                most.fetch_max(inside.fetch_add(1, Ordering::AcqRel) + 1, Ordering::AcqRel);
                std::thread::sleep(Duration::from_millis(2));
                inside.fetch_sub(1, Ordering::AcqRel);
            }
            order.lock().entry(record.0).or_default().push(record.1);
        }
    });
    let router = OrderBy::Key.router(7);
    let route = |key: u64| match key {
        0 => router.route(Some(b"")),
        1 => router.route(Some(b"k")),
        _ => router.route(None),
    };
    assert_ne!(route(0), route(1));
    let records = (0..1_100).map(|number| match number % 22 {
        5 => 0,
        15 => 1,
        _ => null,
    });
    let mut driver = Driver::new(Executor::builder().workers(WORKERS), handler);
    driver.offer(records.map(|key| (key, route(key))));
    driver.until_all_finished();
    let order = order.lock();
    assert_eq!(order[&null].len(), 1_000);
    for key in [0, 1] {
        assert_eq!(order[&key].len(), 50);
        assert!(order[&key].is_sorted(), "{:?}", order[&key]);
    }
    let most = most.load(Ordering::Acquire);
    assert!(most > WORKERS / 2, "records without a key use {most} workers");
    drop(order);
    // Closed while records without a key are queued.
    driver.offer((0..1_000).map(|_| (null, route(null))));
    driver.executor.pass(driver.began.elapsed());
    let progress = driver.executor.close(driver.epoch).unwrap();
    assert!(progress.unfinished > 0, "some are still queued");
    driver.until("nothing is left", |executor| !executor.busy());
    driver.executor.stop();
    driver.until("the workers", |executor| executor.running_workers() == 0);
}

/// What was attempted, and what was buried.
#[derive(Default)]
struct Log {
    attempts: Mutex<Vec<(i64, u32)>>,
    buried: Mutex<Vec<i64>>,
}

/// A handler for which some records always fail, one at a time or in batches.
fn failing(
    log: &Arc<Log>,
    batches: bool,
    fails: impl Fn(&Record, u32) -> bool + Send + Sync + 'static,
) -> Handler<Record> {
    let attempts = Arc::clone(log);
    let one = move |record: &Record, attempt: Attempt| {
        attempts.attempts.lock().push((record.1, attempt.number));
        if fails(record, attempt.number) {
            Outcome::Failed("always".to_owned())
        } else {
            Outcome::Done
        }
    };
    let handler = if batches {
        Handler::batches(move |batch: &Batch<'_, Record>| {
            // Up to the first failure.
            for (index, record) in batch.iter().enumerate() {
                let outcome = one(record, batch.attempt());
                if outcome != Outcome::Done {
                    return BatchOutcome::Prefix(index, outcome);
                }
            }
            BatchOutcome::All(Outcome::Done)
        })
    } else {
        Handler::each_attempt(one)
    };
    let buried = Arc::clone(log);
    handler.dead_letter(move |record: &Record, letter: &DeadLetter| {
        assert_eq!(letter.attempts, 3);
        buried.buried.lock().push(record.1);
        Ok::<(), String>(())
    })
}

#[test]
fn b30_b_two_records_of_one_key_fail_one_after_the_other() {
    for (batches, of) in [(false, BatchOf::Mixed), (true, BatchOf::Mixed), (true, BatchOf::Key)] {
        let log = Arc::new(Log::default());
        let retry = quick(3).then(Exhausted::DeadLetter);
        let builder = Executor::builder().workers(4).retry(retry).batch_of(of);
        let mut driver = Driver::new(builder, failing(&log, batches, |_, _| true));
        driver.offer_keys([5, 5]);
        driver.until_all_finished();
        let expected = [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)];
        assert_eq!(*log.attempts.lock(), expected, "batches {batches}");
        assert_eq!(*log.buried.lock(), [0, 1]);
        assert_eq!(driver.executor.counts().dead_lettered, 2);
    }
}

#[test]
fn b30_c_a_hundred_of_a_thousand_records_fail_and_none_is_lost() {
    for (batches, of) in [(false, BatchOf::Mixed), (true, BatchOf::Mixed), (true, BatchOf::Key)] {
        let log = Arc::new(Log::default());
        let fails = |record: &Record, _: u32| record.1 * 7 % 1_000 < 100;
        let retry = quick(3).then(Exhausted::DeadLetter);
        let builder = Executor::builder().workers(4).retry(retry).batch_of(of);
        let mut driver = Driver::new(builder, failing(&log, batches, fails));
        driver.offer_keys((0..1_000).map(|number| number % 300));
        driver.until_all_finished();
        assert_eq!(log.attempts.lock().len(), 900 + 300, "batches {batches}");
        let mut buried = log.buried.lock().clone();
        buried.sort_unstable();
        let expected: Vec<i64> = (0..1_000).filter(|offset| fails(&(0, *offset), 1)).collect();
        assert_eq!(buried, expected);
        assert_eq!(driver.executor.counts().failed_attempts, 300);
    }
}

#[test]
fn b30_d_all_reports_of_many_threads_are_collected() {
    let handler =
        Handler::each(|record: &Record| Outcome::Skip(format!("not wanted: {}", record.1)));
    let mut driver = Driver::new(Executor::builder().workers(8), handler);
    let mut collected = Vec::new();
    for _ in 0..100 {
        driver.offer_keys(0..1_000);
        driver.executor.pass(driver.began.elapsed());
        driver.executor.flush();
        collected.extend(std::iter::from_fn(|| driver.executor.take_skipped()));
    }
    driver.until_all_finished();
    collected.extend(std::iter::from_fn(|| driver.executor.take_skipped()));
    let offsets: HashSet<i64> = collected.iter().map(|skipped| skipped.offset).collect();
    assert_eq!((collected.len(), offsets.len()), (100_000, 100_000));
    assert!(
        collected.iter().all(|skipped| skipped.reason == format!("not wanted: {}", skipped.offset))
    );
    assert_eq!(driver.executor.counts().skipped, 100_000);
}

#[test]
fn b35_a_panic_is_a_failed_attempt_and_the_workers_go_on() {
    for batches in [false, true] {
        // Twice, then always; then every record.
        for (records, attempts, panics) in [(20, 2, 1), (20, u32::MAX, 1), (1_000, u32::MAX, 1_000)]
        {
            let calls = Arc::new(AtomicU32::new(0));
            let order: Arc<Mutex<HashMap<u64, Vec<i64>>>> = Arc::default();
            let planted = move |record: &Record, attempt: Attempt| {
                let bad = panics > 1 || record.1 == 7;
                assert!(!bad || attempt.number > attempts, "planted");
            };
            let note = {
                let (calls, order) = (Arc::clone(&calls), Arc::clone(&order));
                move |record: &Record| {
                    calls.fetch_add(1, Ordering::Relaxed);
                    order.lock().entry(record.0).or_default().push(record.1);
                }
            };
            let handler = if batches {
                Handler::batches(move |batch: &Batch<'_, Record>| {
                    batch.iter().for_each(|record| planted(record, batch.attempt()));
                    batch.iter().for_each(&note);
                })
            } else {
                Handler::each_attempt(move |record: &Record, attempt| {
                    planted(record, attempt);
                    note(record);
                })
            };
            let buried = Arc::new(Mutex::new(Vec::new()));
            let handler = handler.dead_letter({
                let buried = Arc::clone(&buried);
                move |record: &Record, letter: &DeadLetter| {
                    assert!(letter.reason.contains("planted"), "{letter:?}");
                    buried.lock().push(record.1);
                    Ok::<(), String>(())
                }
            });
            let retry = quick(3).then(Exhausted::DeadLetter);
            let builder = Executor::builder().workers(4).retry(retry);
            let mut driver = Driver::new(builder, handler);
            driver.offer_keys((0..records).map(|number| number % 5));
            driver.until_all_finished();
            assert_eq!(driver.executor.running_workers(), 4);
            // In a batch all records of the panicking call fail; then they come one by one.
            let expected = if attempts == 2 { 0 } else { panics as usize };
            assert_eq!(buried.lock().len(), expected, "{records} records, batches {batches}");
            assert_eq!(calls.load(Ordering::Relaxed) as usize, records as usize - expected);
            assert!(order.lock().values().all(|offsets| offsets.is_sorted()));
        }
    }
}

#[test]
fn order_by_partition_and_no_order() {
    for order_by in [OrderBy::Partition, OrderBy::Unordered] {
        let (inside, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let handler = Handler::each({
            let (inside, most, seen) = (Arc::clone(&inside), Arc::clone(&most), Arc::clone(&seen));
            move |record: &Record| {
                most.fetch_max(inside.fetch_add(1, Ordering::AcqRel) + 1, Ordering::AcqRel);
                std::thread::sleep(Duration::from_millis(1));
                seen.lock().push(record.1);
                inside.fetch_sub(1, Ordering::AcqRel);
            }
        });
        let router = order_by.router(0);
        let mut driver = Driver::new(Executor::builder().workers(4), handler);
        driver.offer((0..200).map(|key: u64| (key, router.route(Some(&key.to_be_bytes())))));
        driver.until_all_finished();
        match order_by {
            OrderBy::Partition => {
                assert_eq!(*seen.lock(), (0..200).collect::<Vec<_>>());
                assert_eq!(most.load(Ordering::Acquire), 1);
            }
            _ => assert!(most.load(Ordering::Acquire) > 1),
        }
    }
}
