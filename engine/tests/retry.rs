//! Failed records on real threads: tried again, passed over, buried, quarantined.

use parking_lot::Mutex;
use plimsoll_engine::{
    Attempt, Batch, BatchOutcome, Builder, DeadLetter, EpochId, Executor, Exhausted, Handler,
    Outcome, Retry, Route, Waiter,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A record: its key and its place among the records of the key.
type Record = (u64, u32);

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
        let epoch = executor.open(0, 100_000).unwrap();
        Driver { executor, waiter, epoch, next: 0, began: Instant::now() }
    }

    fn offer(&mut self, records: impl IntoIterator<Item = Record>) {
        let records = records.into_iter().zip(self.next..);
        let routed = records
            .map(|((key, sequence), offset)| (offset, Route::Ordered(hash(key)), (key, sequence)));
        self.next += i64::from(self.executor.offer_all(self.epoch, routed).unwrap());
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
        assert_eq!(self.executor.progress(epoch).unwrap().unfinished, 0);
    }
}

fn quick(attempts: u32) -> Retry {
    Retry::times(attempts).first(Duration::from_millis(1)).cap(Duration::from_millis(5))
}

#[test]
fn a_failed_record_comes_again_and_its_key_waits_while_others_go_on() {
    let log = Arc::new(Mutex::new(Vec::new()));
    let handler = Handler::each_attempt({
        let log = Arc::clone(&log);
        move |record: &Record, attempt: Attempt| {
            log.lock().push((*record, attempt.number));
            assert_eq!(attempt.first_failure.is_some(), attempt.number > 1);
            if *record == (7, 0) && attempt.number < 4 { Err("not yet") } else { Ok(()) }
        }
    });
    // Long enough for everything else to be done before the second attempt.
    let retry = Retry::times(9).first(Duration::from_millis(300)).factor(1.0);
    // One shard: other keys of the shard must not wait for the retries.
    let mut driver = Driver::new(Executor::builder().workers(2).shards(1).retry(retry), handler);
    driver.offer((0..100).flat_map(|sequence| (0..10).map(move |key| (key, sequence))));
    let others = |log: &[(Record, u32)]| log.iter().filter(|((key, _), _)| *key != 7).count();
    driver.until("the other keys", |_| others(&log.lock()) == 900);
    assert!(log.lock().iter().filter(|((key, _), _)| *key == 7).count() < 4, "the key waits");
    let parked: Vec<_> = driver.executor.parked().collect();
    assert_eq!(parked.len(), 1);
    assert_eq!(parked[0].hash, Some(hash(7)));
    assert!(driver.executor.next_due().is_some());
    driver.until_all_finished();
    let log = log.lock();
    for key in 0..10 {
        let seen: Vec<_> = log.iter().filter(|((of, _), _)| *of == key).collect();
        let sequences: Vec<u32> = seen.iter().map(|((_, sequence), _)| *sequence).collect();
        let expected: Vec<u32> =
            if key == 7 { [0; 3].into_iter().chain(0..100).collect() } else { (0..100).collect() };
        assert_eq!(sequences, expected, "key {key}");
    }
    assert_eq!(driver.executor.counts().failed_attempts, 3);
    assert_eq!(driver.executor.parked().count(), 0);
}

#[test]
fn a_panic_is_a_failed_attempt_and_the_worker_goes_on() {
    let handler = Handler::each_attempt(|record: &Record, attempt: Attempt| {
        assert!(!record.0.is_multiple_of(3) || attempt.number > 1, "planted");
    });
    let mut driver = Driver::new(Executor::builder().workers(1).retry(quick(2)), handler);
    driver.offer((0..300).map(|key| (key, 0)));
    driver.until_all_finished();
    assert_eq!(driver.executor.counts().failed_attempts, 100);
    assert_eq!(driver.executor.running_workers(), 1);
}

#[test]
fn what_is_used_up_is_passed_over_and_counted() {
    let handler = Handler::each(|record: &Record| match record {
        (5, 1) => Outcome::Failed("broken".to_owned()),
        (6, _) => Outcome::Skip("not ours".to_owned()),
        _ => Outcome::Done,
    });
    let builder = Executor::builder().retry(quick(3).then(Exhausted::Skip));
    let mut driver = Driver::new(builder, handler);
    driver.offer((0..5).flat_map(|sequence| (0..10).map(move |key| (key, sequence))));
    driver.until_all_finished();
    let mut skipped: Vec<_> = std::iter::from_fn(|| driver.executor.take_skipped()).collect();
    skipped.sort_by_key(|skipped| skipped.offset);
    let named: Vec<_> = skipped.iter().map(|one| (one.offset, one.reason.as_str())).collect();
    let ours = "not ours";
    assert_eq!(named, [(6, ours), (15, "broken"), (16, ours), (26, ours), (36, ours), (46, ours)]);
    assert_eq!(driver.executor.counts().skipped, 6);
    assert_eq!(driver.executor.counts().failed_attempts, 3);
}

#[test]
fn what_is_used_up_halts_its_epoch_and_no_other() {
    let handler =
        Handler::each(|record: &Record| if *record == (1, 3) { Err("broken") } else { Ok(()) });
    let mut driver = Driver::new(Executor::builder().retry(quick(3)), handler);
    let other = driver.executor.open(0, 100).unwrap();
    driver.offer((0..6).map(|sequence| (1, sequence)));
    let mut failure = None;
    driver.until("the failure", |executor| {
        failure = executor.take_failure();
        failure.is_some()
    });
    let failure = failure.unwrap();
    assert_eq!((failure.epoch, failure.offset), (driver.epoch, 3));
    assert_eq!(failure.reason, "broken");
    let progress = driver.executor.progress(driver.epoch).unwrap();
    assert_eq!((progress.watermark, progress.failed), (3, Some(3)));
    for offset in 0..50 {
        driver.executor.offer(other, offset, Route::Ordered(hash(9)), (9, offset as u32)).unwrap();
    }
    driver.until("the other epoch", |executor| executor.progress(other).unwrap().watermark == 50);
    assert_eq!(driver.executor.progress(driver.epoch).unwrap().watermark, 3);
}

#[test]
fn dead_letters_are_finished_only_when_the_hook_has_taken_them() {
    let buried = Arc::new(Mutex::new(Vec::new()));
    let tries = Arc::new(AtomicU32::new(0));
    let handler = Handler::each(|record: &Record| match record {
        (1, 2) => Outcome::Failed("cannot be handled".to_owned()),
        (2, 2) => Outcome::DeadLetter("cannot be read".to_owned()),
        _ => Outcome::Done,
    })
    .dead_letter({
        let (buried, tries) = (Arc::clone(&buried), Arc::clone(&tries));
        move |record: &Record, letter: &DeadLetter| {
            if record.0 == 1 && tries.fetch_add(1, Ordering::Relaxed) < 5 {
                return Err("the topic is not there");
            }
            buried.lock().push((*record, letter.reason.clone(), letter.attempts));
            Ok(())
        }
    });
    let builder = Executor::builder().retry(quick(3).then(Exhausted::DeadLetter));
    let mut driver = Driver::new(builder, handler);
    driver.offer((0..9).flat_map(|sequence| (0..4).map(move |key| (key, sequence))));
    driver.until_all_finished();
    let mut buried = buried.lock().clone();
    buried.sort();
    let (handled, read) = ("cannot be handled".to_owned(), "cannot be read".to_owned());
    assert_eq!(buried, [((1, 2), handled, 3), ((2, 2), read, 1)]);
    assert_eq!(tries.load(Ordering::Relaxed), 6);
    let counts = driver.executor.counts();
    assert_eq!((counts.dead_lettered, counts.failed_attempts, counts.skipped), (2, 3 + 1 + 5, 0));
}

#[test]
fn a_quarantined_key_goes_to_the_hook_in_order_until_it_is_released() {
    let (handled, buried) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
    let handler = Handler::each({
        let handled = Arc::clone(&handled);
        move |record: &Record| {
            if *record == (3, 4) {
                return Err("poison");
            }
            handled.lock().push(*record);
            Ok(())
        }
    })
    .dead_letter({
        let buried = Arc::clone(&buried);
        move |record: &Record, letter: &DeadLetter| {
            buried.lock().push((record.1, letter.reason.clone()));
            Ok::<(), String>(())
        }
    });
    let builder = Executor::builder().workers(3).retry(quick(2).then(Exhausted::Quarantine));
    let mut driver = Driver::new(builder, handler);
    driver.offer((0..20).flat_map(|sequence| (0..6).map(move |key| (key, sequence))));
    driver.until_all_finished();
    let reasons: Vec<_> = buried.lock().iter().map(|(_, reason)| reason.clone()).collect();
    assert_eq!(reasons[0], "poison");
    assert!(reasons[1..].iter().all(|reason| reason == "its key is quarantined"));
    let order: Vec<u32> = buried.lock().iter().map(|(sequence, _)| *sequence).collect();
    assert_eq!(order, (4..20).collect::<Vec<_>>());
    let listed: Vec<_> = driver.executor.parked().collect();
    assert_eq!(listed.len(), 1);
    assert!(listed[0].quarantined && listed[0].hash == Some(hash(3)));
    assert!(!driver.executor.release(hash(4)), "never quarantined");
    assert!(driver.executor.release(hash(3)));
    driver.offer((20..30).map(|sequence| (3, sequence)));
    driver.until_all_finished();
    assert_eq!(driver.executor.parked().count(), 0);
    let of_three: Vec<u32> =
        handled.lock().iter().filter(|record| record.0 == 3).map(|record| record.1).collect();
    assert_eq!(of_three, (0..4).chain(20..30).collect::<Vec<_>>());
    assert_eq!(driver.executor.counts().dead_lettered, 16);
}

#[test]
fn dead_letters_without_a_hook_are_refused_when_built_or_halt() {
    let waiter = Waiter::new();
    for then in [Exhausted::DeadLetter, Exhausted::Quarantine] {
        let builder = Executor::builder().retry(quick(2).then(then));
        let error = builder.each(waiter.waker(), |_: &Record| ()).unwrap_err();
        assert!(error.to_string().contains("`retry`"), "{error}");
    }
    let error = Executor::builder().retry(Retry::times(0)).each(waiter.waker(), |_: &Record| ());
    assert!(error.unwrap_err().to_string().contains("at least 1 attempt"));
    let handler = Handler::each(|_: &Record| Outcome::DeadLetter("nobody takes it".to_owned()));
    let mut driver = Driver::new(Executor::builder(), handler);
    driver.offer([(0, 0)]);
    let mut failure = None;
    driver.until("the failure", |executor| {
        failure = executor.take_failure();
        failure.is_some()
    });
    assert_eq!(failure.unwrap().reason, "nobody takes it");
}

#[test]
fn a_batch_may_end_in_parts() {
    let failed = Arc::new(AtomicU64::new(0));
    for kind in 0..3 {
        let done = Arc::new(Mutex::new(HashMap::<u64, Vec<u32>>::new()));
        let handler = Handler::batches({
            let (done, failed) = (Arc::clone(&done), Arc::clone(&failed));
            move |batch: &Batch<'_, Record>| {
                // The attempt that decides: each tenth record of a key fails twice.
                let fails = |record: &Record| record.1 % 10 == 9 && batch.attempt().number < 3;
                let mut done = done.lock();
                let mut finish = |record: &Record| done.entry(record.0).or_default().push(record.1);
                let bad = batch.iter().position(fails);
                let reason = || Outcome::Failed("each tenth".to_owned());
                if bad.is_some() {
                    failed.fetch_add(1, Ordering::Relaxed);
                }
                match (kind, bad) {
                    (_, None) => {
                        batch.iter().for_each(finish);
                        BatchOutcome::All(Outcome::Done)
                    }
                    (0, Some(bad)) => {
                        batch.iter().take(bad).for_each(finish);
                        BatchOutcome::Prefix(bad, reason())
                    }
                    (1, Some(_)) => {
                        let mut broken = Vec::new();
                        let each = batch.iter().map(|record| {
                            if fails(record) || broken.contains(&record.0) {
                                broken.push(record.0);
                                reason()
                            } else {
                                finish(record);
                                Outcome::Done
                            }
                        });
                        BatchOutcome::Each(each.collect())
                    }
                    // All or nothing; what failed comes back alone and goes through then.
                    (_, Some(_)) => BatchOutcome::All(reason()),
                }
            }
        });
        let builder = Executor::builder().workers(3).batch(16).retry(quick(u32::MAX));
        let mut driver = Driver::new(builder, handler);
        driver.offer((0..60).flat_map(|sequence| (0..20).map(move |key| (key, sequence))));
        driver.until_all_finished();
        for (key, done) in done.lock().iter() {
            assert_eq!(*done, (0..60).collect::<Vec<_>>(), "kind {kind}, key {key}");
        }
        assert_eq!(done.lock().len(), 20);
    }
    assert!(failed.load(Ordering::Relaxed) > 0);
}

/// Ten thousand keys fail at once, and others go on.
#[test]
fn many_keys_can_be_parked() {
    let handler = Handler::each_attempt(|record: &Record, attempt: Attempt| {
        if record.1 == 0 && attempt.number == 1 { Err("first") } else { Ok(()) }
    });
    let retry = Retry::times(2).first(Duration::from_millis(50));
    let mut driver = Driver::new(Executor::builder().workers(2).retry(retry), handler);
    driver.offer((0..10_000).map(|key| (key, 0)));
    driver.until("all parked", |executor| executor.counts().failed_attempts == 10_000);
    driver.offer((0..10_000).map(|key| (key, 1)));
    driver.until_all_finished();
    assert_eq!(driver.executor.counts().failed_attempts, 10_000);
}

/// A tenth of the records fails twice; every key's order is checked by the handler.
#[test]
fn order_and_completeness_hold_in_a_storm_of_retries() {
    for (workers, shards) in [(1, 1), (2, 1_024), (4, 16)] {
        const KEYS: u64 = 200;
        let next: Arc<Vec<AtomicU32>> = Arc::new((0..KEYS).map(|_| AtomicU32::new(0)).collect());
        let wrong = Arc::new(AtomicU64::new(0));
        let handler = Handler::each_attempt({
            let (next, wrong) = (Arc::clone(&next), Arc::clone(&wrong));
            move |(key, sequence): &Record, attempt: Attempt| {
                let expected = &next[*key as usize];
                if expected.load(Ordering::Acquire) != *sequence {
                    wrong.fetch_add(1, Ordering::Relaxed);
                }
                let fails = hash(key * 1_000 + u64::from(*sequence)) >> 32;
                if fails.is_multiple_of(10) && attempt.number < 3 {
                    return Err("a tenth");
                }
                expected.store(sequence + 1, Ordering::Release);
                Ok(())
            }
        });
        let retry = Retry::times(3).first(Duration::from_micros(200)).cap(Duration::from_millis(1));
        let builder = Executor::builder().workers(workers).shards(shards).retry(retry);
        let mut driver = Driver::new(builder, handler);
        for from in (0..100).step_by(10) {
            driver.offer(
                (from..from + 10).flat_map(|sequence| (0..KEYS).map(move |key| (key, sequence))),
            );
            driver.executor.pass(driver.began.elapsed());
            driver.executor.flush_more();
        }
        driver.until_all_finished();
        assert_eq!(wrong.load(Ordering::Relaxed), 0, "{workers} workers, {shards} shards");
        assert!(next.iter().all(|next| next.load(Ordering::Relaxed) == 100));
    }
}
