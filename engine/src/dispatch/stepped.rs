//! Linger, kinds of batches, conflation and rates on a virtual clock, with workers that are stepped:
//! what happens when, exactly.

use super::{BatchOf, Builder, EpochId, Executor, Rate, Route};
use crate::batch::Batch;
use crate::outcome::{BatchOutcome, Outcome};
use crate::retry::Retry;
use crate::wake::Waiter;
use crate::worker::{Handler, Worker};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;

/// A record: its key and its number, which is also its offset.
type Record = (u64, usize);
/// When a batch was handed over, and its records.
type Log = Arc<Mutex<Vec<(u64, Vec<Record>)>>>;

const LINGER: u64 = 250;
/// A record without a key.
const NONE: u64 = u64::MAX;

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn hash(key: u64) -> u64 {
    (key + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// A driver that sleeps until the executor's next moment, and workers that are never slow.
struct Rig {
    executor: Executor<Record>,
    workers: Vec<Worker<Record>>,
    epoch: EpochId,
    next: usize,
    now: u64,
    clock: Arc<Mutex<u64>>,
    log: Log,
}

impl Rig {
    fn new(builder: Builder) -> Self {
        Self::with(builder, |_| BatchOutcome::All(Outcome::Done))
    }

    fn with(
        builder: Builder,
        ends: impl Fn(&Batch<'_, Record>) -> BatchOutcome + Send + Sync + 'static,
    ) -> Self {
        let (clock, log) = (Arc::new(Mutex::new(0)), Log::default());
        let handler = Handler::batches({
            let (clock, log) = (Arc::clone(&clock), Arc::clone(&log));
            move |batch: &Batch<'_, Record>| {
                log.lock().push((*clock.lock(), batch.iter().copied().collect()));
                ends(batch)
            }
        });
        let handler = handler.record_bytes(|record: &Record| record.1 % 10);
        let waiter = Waiter::new();
        let (mut executor, workers) = builder.assemble(waiter.waker(), handler).unwrap();
        let epoch = executor.open(0, 100_000).unwrap();
        Rig { executor, workers, epoch, next: 0, now: 0, clock, log }
    }

    fn pass(&mut self) {
        *self.clock.lock() = self.now;
        self.executor.pass(ms(self.now));
    }

    /// Lets the workers do what they see, until nothing moves.
    fn work(&mut self) {
        loop {
            self.executor.flush();
            let mut moved = false;
            for worker in &mut self.workers {
                while worker.turn() {
                    moved = true;
                }
            }
            if !moved {
                return;
            }
            self.pass();
        }
    }

    /// At most until `to`; wakes at the moments that the executor names, and at no others.
    fn until(&mut self, to: u64) {
        loop {
            let due = self.executor.next_due().map_or(u64::MAX, |due| due.as_millis() as u64);
            self.now = due.min(to).max(self.now);
            self.pass();
            self.work();
            if due > to {
                return;
            }
        }
    }

    fn arrive(&mut self, at: u64, keys: impl IntoIterator<Item = u64>) {
        self.until(at);
        for key in keys {
            let route = if key == NONE { Route::Free } else { Route::Ordered(hash(key)) };
            let offset = self.next as i64;
            self.executor.offer(self.epoch, offset, route, (key, self.next)).unwrap();
            self.next += 1;
        }
        self.work();
    }

    /// When each batch was handed over, and how large it was, in the order of time.
    fn batches(&self) -> Vec<(u64, usize)> {
        self.log.lock().iter().map(|(at, batch)| (*at, batch.len())).collect()
    }

    fn watermark(&self) -> i64 {
        self.executor.progress(self.epoch).unwrap().watermark
    }
}

fn lingering(workers: usize) -> Rig {
    Rig::new(Builder::default().workers(workers).batch(100).linger(ms(LINGER)))
}

/// Different keys.
fn keys(count: u64) -> impl Iterator<Item = u64> {
    0..count
}

#[test]
fn b45_a_one_record_is_handed_over_when_its_linger_is_over() {
    for workers in [1, 4] {
        let mut rig = lingering(workers);
        rig.arrive(1_000, keys(1));
        assert_eq!(rig.executor.next_due(), Some(ms(1_000 + LINGER)));
        rig.until(60_000);
        let [(at, 1)] = rig.batches()[..] else { panic!("{:?}", rig.batches()) };
        assert!((1_250..=1_300).contains(&at), "{at}");
        assert_eq!(rig.executor.next_due(), None);
        assert_eq!(rig.watermark(), 1);
    }
}

#[test]
fn b45_b_a_trickle_is_not_held_back_by_its_own_records() {
    for workers in [1, 4] {
        let mut rig = lingering(workers);
        (0..480).for_each(|number| rig.arrive(number * 125, [number % 7]));
        rig.until(61_000);
        let log = rig.log.lock();
        for (at, batch) in log.iter() {
            for (_, number) in batch {
                let waited = at - *number as u64 * 125;
                assert!(waited <= 300, "record {number} waited {waited} ms");
            }
        }
        assert_eq!(log.iter().map(|(_, batch)| batch.len()).sum::<usize>(), 480);
        assert!(log.len() <= 240, "{} batches: it does linger", log.len());
    }
}

#[test]
fn b45_c_a_burst_is_one_batch_when_the_linger_of_its_first_record_is_over() {
    for workers in [1, 4] {
        let mut rig = lingering(workers);
        rig.arrive(500, keys(37));
        rig.until(60_000);
        assert_eq!(rig.batches(), [(500 + LINGER, 37)]);
    }
}

/// Again and again, so that batches come to lie around the end of the lane's slots.
#[test]
fn b45_d_full_batches_are_handed_over_at_once() {
    for workers in [1, 4] {
        let mut rig = lingering(workers);
        for round in 0..200 {
            let at = round * 1_000;
            rig.log.lock().clear();
            rig.arrive(at, keys(250));
            rig.until(at + 900);
            assert_eq!(
                rig.batches(),
                [(at, 100), (at, 100), (at + LINGER, 50)],
                "round {round}, {workers} workers"
            );
        }
        assert_eq!(rig.watermark(), 50_000);
    }
}

#[test]
fn b45_e_the_linger_begins_with_the_first_record_after_a_silence() {
    for workers in [1, 4] {
        let mut rig = lingering(workers);
        (0..5).for_each(|number| rig.arrive(10_000 + number * 5, [number]));
        rig.until(60_000);
        assert_eq!(rig.batches(), [(10_000 + LINGER, 5)]);
    }
}

/// With `each` there is nothing to wait for, and without a linger a batch takes what is there.
#[test]
fn without_linger_nothing_waits() {
    let mut rig = Rig::new(Builder::default().workers(1).batch(100));
    rig.arrive(500, keys(37));
    assert_eq!(rig.batches(), [(500, 37)]);
    assert_eq!(rig.executor.next_due(), None);
    let waiter = Waiter::new();
    let builder = Builder::default().workers(1).linger(ms(LINGER));
    let handler = Handler::each(|_: &Record| ());
    let (mut executor, mut workers) = builder.assemble(waiter.waker(), handler).unwrap();
    let epoch = executor.open(0, 10).unwrap();
    executor.pass(ms(0));
    executor.offer(epoch, 0, Route::Free, (0, 0)).unwrap();
    executor.flush();
    assert!(workers[0].turn());
}

#[test]
fn the_end_of_intake_hands_a_partial_batch_over_at_once() {
    let ends: [fn(&mut Rig); 4] = [
        |rig| rig.executor.stop_intake(rig.epoch),
        |rig| rig.executor.stop(),
        |rig| {
            let other = rig.executor.open(0, 10).unwrap();
            rig.executor.halt(other);
        },
        |rig| {
            let other = rig.executor.open(0, 10).unwrap();
            rig.executor.close(other);
        },
    ];
    for (which, end) in ends.into_iter().enumerate() {
        let mut rig = lingering(2);
        rig.arrive(1_000, keys(5));
        assert!(rig.batches().is_empty());
        end(&mut rig);
        rig.workers.iter_mut().for_each(|worker| while worker.turn() {});
        assert_eq!(rig.batches(), [(1_000, 5)], "way {which}");
    }
    // What is halted itself is not handled, and does not linger either.
    let mut rig = lingering(1);
    rig.arrive(1_000, keys(5));
    rig.executor.close(rig.epoch);
    rig.work();
    assert!(rig.batches().is_empty());
    assert!(rig.executor.epochs.iter().all(Option::is_none), "its slot is free at once");
    assert_eq!(rig.executor.next_due(), None);
}

/// More than the lane takes: the rest of a drained epoch comes from lists, and does not linger.
#[test]
fn what_is_drained_from_lists_does_not_linger() {
    let mut rig = lingering(1);
    rig.until(1_000);
    for offset in 0..1_030 {
        rig.executor.offer(rig.epoch, offset, Route::Ordered(hash(1)), (1, 0)).unwrap();
    }
    assert!(rig.executor.slab.len() > 0, "some wait in the list");
    rig.executor.stop_intake(rig.epoch);
    rig.work();
    assert_eq!(rig.watermark(), 1_030);
    assert!(rig.batches().iter().all(|(at, _)| *at == 1_000));
}

/// A full batch in front of a worker that does not come to it goes to another one, and at once.
#[test]
fn what_is_recalled_does_not_linger_again() {
    let mut rig = Rig::new(Builder::default().workers(2).batch(2).linger(ms(LINGER)));
    rig.until(1_000);
    let busy = rig.workers.remove(0);
    rig.arrive(1_000, [1, 1, 2]);
    assert_eq!(rig.executor.lanes[0].tx.pending(), 3, "in front of the busy worker");
    assert!(rig.batches().is_empty());
    rig.until(1_001);
    assert_eq!(rig.batches(), [(1_001, 2), (1_001, 1)]);
    assert_eq!(rig.watermark(), 3);
    drop(busy);
}

/// A record that is tried again is due when it is due.
#[test]
fn a_retry_does_not_linger() {
    let builder = Builder::default().batch(100).linger(ms(LINGER));
    let retry = Retry::times(3).first(ms(10)).jitter(0.0);
    let mut rig = Rig::with(builder.retry(retry), |batch| {
        let fails = batch.attempt().number == 1;
        BatchOutcome::All(if fails { Outcome::Failed("first".to_owned()) } else { Outcome::Done })
    });
    rig.arrive(0, [1]);
    rig.until(5_000);
    assert_eq!(rig.batches(), [(250, 1), (260, 1)]);
}

#[test]
fn a_batch_that_is_full_by_bytes_does_not_linger() {
    // Numbers 0.. have 0, 1, 2, 3, ... 9 bytes, and again.
    let builder = Builder::default().workers(1).batch(100).linger(ms(LINGER)).batch_bytes(12);
    let mut rig = Rig::new(builder);
    rig.arrive(0, keys(10));
    rig.until(1_000);
    let log = rig.log.lock();
    let batches: Vec<(u64, Vec<usize>)> = log
        .iter()
        .map(|(at, batch)| (*at, batch.iter().map(|record| record.1).collect()))
        .collect();
    let expected =
        [(0, vec![0, 1, 2, 3, 4]), (0, vec![5, 6]), (0, vec![7]), (0, vec![8]), (LINGER, vec![9])];
    assert_eq!(batches, expected);
}

#[test]
fn a_record_larger_than_a_batch_goes_alone() {
    let mut rig = Rig::new(Builder::default().workers(1).batch_bytes(4));
    rig.arrive(0, keys(10));
    let sizes: Vec<usize> = rig.log.lock().iter().map(|(_, batch)| batch.len()).collect();
    // 0 1 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9
    assert_eq!(sizes, [3, 1, 1, 1, 1, 1, 1, 1]);
}

/// A run of one claim is put together anew: not only neighbours make up a batch.
#[test]
fn a_batch_of_one_key_takes_all_records_of_it_that_were_claimed() {
    let mut rig = Rig::new(Builder::default().workers(1).batch(60).batch_of(BatchOf::Key));
    rig.arrive(0, (0..60).map(|number| if number % 4 == 3 { NONE } else { number % 4 }));
    let mut seen = Vec::new();
    for (_, batch) in rig.log.lock().iter() {
        assert!(batch.iter().all(|record| record.0 == batch[0].0));
        assert!(batch.is_sorted());
        seen.push((batch[0].0, batch.len()));
    }
    assert_eq!(seen, [(0, 15), (1, 15), (2, 15), (NONE, 15)]);
}

#[test]
fn a_batch_of_one_shard_mixes_its_keys() {
    let builder = Builder::default().workers(1).shards(2).batch(64).batch_of(BatchOf::Shard);
    let mut rig = Rig::new(builder);
    rig.arrive(0, (0..64).map(|number| number % 16));
    let log = rig.log.lock();
    assert_eq!(log.len(), 2);
    for (_, batch) in log.iter() {
        assert!(batch.is_sorted_by_key(|record| record.1), "in the order of the lane");
        assert!(batch.iter().any(|record| record.0 != batch[0].0));
    }
}

/// A hot key does not take more than a batch at a time.
#[test]
fn a_hot_key_gets_full_batches_and_no_larger_ones() {
    let mut rig = Rig::new(Builder::default().workers(1).batch(16).batch_of(BatchOf::Key));
    rig.arrive(0, (0..320).map(|_| 7));
    assert_eq!(rig.batches(), [(0, 16); 20]);
}

/// Of each key the records behind its failed one wait for it; other keys of the run do not notice.
#[test]
fn keys_fail_each_for_itself_in_a_run() {
    // Prefix: the first two records of odd keys take effect, the third fails at first.
    let retry = Retry::times(3).first(ms(10)).jitter(0.0);
    let builder = Builder::default().workers(1).batch(64).batch_of(BatchOf::Key).retry(retry);
    let mut rig = Rig::with(builder, |batch| {
        let odd = batch.get(0).is_some_and(|record| record.0 % 2 == 1);
        if odd && batch.attempt().number == 1 && batch.len() > 2 {
            BatchOutcome::Prefix(2, Outcome::Failed("the third".to_owned()))
        } else {
            BatchOutcome::All(Outcome::Done)
        }
    });
    rig.arrive(0, (0..24).map(|number| number % 6));
    assert_eq!(rig.executor.counts().failed_attempts, 3);
    rig.until(1_000);
    assert_eq!(rig.watermark(), 24);
    for key in 0..6 {
        let log = rig.log.lock();
        let of_key = log.iter().filter(|(_, batch)| batch[0].0 == key);
        let seen: Vec<(u64, Vec<usize>)> =
            of_key.map(|(at, batch)| (*at, batch.iter().map(|r| r.1 / 6).collect())).collect();
        if key % 2 == 0 {
            assert_eq!(seen, [(0, vec![0, 1, 2, 3])]);
        } else {
            assert_eq!(seen[..2], [(0, vec![0, 1, 2, 3]), (10, vec![2])], "key {key}");
            assert_eq!(seen[2..], [(10, vec![3])]);
        }
    }
}

/// Each failure is that of its record, though the batches were not in the order of the lane.
#[test]
fn failures_of_a_run_are_told_apart() {
    let retry = Retry::times(3).first(ms(10));
    let builder = Builder::default().workers(1).batch(64).batch_of(BatchOf::Key).retry(retry);
    let mut rig = Rig::with(builder, |batch| {
        // Records 0, 1, 2 of keys 0, 1, 0: the last halts, the one before it fails.
        if batch.get(0) == Some(&(1, 1)) {
            BatchOutcome::All(Outcome::Failed("not yet".to_owned()))
        } else {
            BatchOutcome::Prefix(1, Outcome::Halt("no further".to_owned()))
        }
    });
    rig.arrive(0, [0, 1, 0]);
    let failure = rig.executor.take_failure().unwrap();
    assert_eq!((failure.offset, &*failure.reason), (2, "no further"));
    assert_eq!(rig.executor.counts().failed_attempts, 2);
}

/// One worker, one record in hand, its lane full: everything else waits in lists.
fn conflating() -> Rig {
    Rig::new(Builder::default().workers(1).batch(1).conflate(true))
}

#[test]
fn the_newest_of_several_waiting_records_is_handled_and_the_others_finish_with_it() {
    let mut rig = conflating();
    rig.until(0);
    let mut offset = 0;
    // Until the lane is full, then three keys in turn, 30 of each.
    while rig.executor.slab.len() == 0 {
        rig.executor.offer(rig.epoch, offset, Route::Ordered(hash(9)), (9, 0)).unwrap();
        offset += 1;
    }
    let before = offset;
    for number in 0..90 {
        let key = number as u64 % 3;
        rig.executor.offer(rig.epoch, offset, Route::Ordered(hash(key)), (key, number)).unwrap();
        offset += 1;
    }
    assert_eq!(rig.executor.slab.len(), 4, "one of each key");
    assert_eq!(rig.watermark(), 0);
    rig.work();
    let log = rig.log.lock();
    let seen: Vec<Record> = log.iter().map(|(_, batch)| batch[0]).filter(|r| r.0 != 9).collect();
    assert_eq!(seen.len(), 3);
    assert!((0..3).all(|key| seen.contains(&(key, 87 + key as usize))), "{seen:?}");
    assert_eq!(rig.watermark(), before + 90);
    assert_eq!(rig.executor.counts().conflated, 87);
    assert!(!rig.executor.common.registry.is_cautious());
}

/// Two epochs of one partition: each has its own newest record.
#[test]
fn records_of_different_epochs_are_not_conflated() {
    let mut rig = conflating();
    rig.until(0);
    let later = rig.executor.open(0, 1_000).unwrap();
    for epoch in [rig.epoch, later] {
        for offset in 0..1_000 {
            rig.executor.offer(epoch, offset, Route::Ordered(hash(1)), (1, 0)).unwrap();
        }
    }
    assert_eq!(rig.executor.slab.len(), 2);
    rig.work();
    for epoch in [rig.epoch, later] {
        assert_eq!(rig.executor.progress(epoch).unwrap().watermark, 1_000);
    }
}

#[test]
fn a_rate_lets_its_burst_go_and_then_one_record_an_interval() {
    let builder = Builder::default().workers(2).batch(1).rate(Rate::per_second(100).burst(5));
    let mut rig = Rig::new(builder);
    rig.until(1_000);
    assert_eq!(rig.executor.demand(), 5);
    rig.arrive(1_000, keys(15));
    assert_eq!(rig.executor.demand(), 0);
    rig.until(5_000);
    let at: Vec<u64> = rig.batches().iter().map(|(at, _)| *at).collect();
    let expected: Vec<u64> = (0..15_u64).map(|n| 1_000 + n.saturating_sub(4) * 10).collect();
    assert_eq!(at, expected);
    assert_eq!(rig.watermark(), 15);
}

#[test]
fn a_key_over_its_rate_waits_while_others_go_on() {
    let builder = Builder::default().workers(1).shards(1).batch(1);
    let mut rig = Rig::new(builder.key_rate(Rate::per_second(10).burst(2)));
    // One shard; the hot key's records come first, and records without a key have no rate.
    let others = (0..20).map(|number| if number < 10 { 1 + number % 5 } else { NONE });
    rig.arrive(0, (0..10).map(|_| 0).chain(others));
    assert_eq!(rig.log.lock().len(), 22, "two of the hot key and all others");
    assert_eq!(rig.executor.next_due(), Some(ms(100)));
    assert!(rig.executor.demand() > 0, "others may still come");
    rig.until(10_000);
    let log = rig.log.lock();
    let hot = log.iter().filter(|(_, batch)| batch[0].0 == 0);
    let hot: Vec<(u64, usize)> = hot.map(|(at, batch)| (*at, batch[0].1)).collect();
    let expected: Vec<(u64, usize)> =
        (0..10_u64).map(|n| (n.saturating_sub(1) * 100, n as usize)).collect();
    assert_eq!(hot, expected);
    drop(log);
    rig.until(20_000);
    rig.pass();
    assert_eq!(rig.executor.rates.as_ref().unwrap().remembered(), 0, "keys are forgotten");
}

#[test]
fn further_attempts_count() {
    for (all, each) in [(true, false), (false, true), (true, true)] {
        let rate = Rate::per_second(10).burst(1);
        let retry = Retry::times(9).first(Duration::ZERO);
        let mut builder = Builder::default().workers(1).batch(1).retry(retry);
        builder = if all { builder.rate(rate) } else { builder };
        builder = if each { builder.key_rate(rate) } else { builder };
        let mut rig = Rig::with(builder, |batch| {
            let fails = batch.attempt().number < 5;
            BatchOutcome::All(if fails { Outcome::Failed("no".to_owned()) } else { Outcome::Done })
        });
        rig.arrive(0, [3]);
        rig.until(10_000);
        let expected: Vec<(u64, usize)> = (0..5).map(|n| (n * 100, 1)).collect();
        assert_eq!(rig.batches(), expected, "all {all}, each {each}");
        assert_eq!(rig.watermark(), 1);
    }
}

/// Behind a parked record a key's later ones do not save up for a burst.
#[test]
fn a_parked_key_does_not_run_ahead_of_its_rate_afterwards() {
    let rate = Rate::per_second(10).burst(2);
    let retry = Retry::times(9).first(ms(5_000)).jitter(0.0);
    let builder = Builder::default().workers(1).batch(1).retry(retry).key_rate(rate);
    let mut rig = Rig::with(builder, |batch| {
        let fails = batch.get(0) == Some(&(3, 0)) && batch.attempt().number == 1;
        BatchOutcome::All(if fails { Outcome::Failed("no".to_owned()) } else { Outcome::Done })
    });
    rig.arrive(0, [3]);
    rig.arrive(1_000, [3; 10]);
    rig.until(20_000);
    // The second attempt and one more are the burst.
    let at: Vec<u64> = rig.batches().iter().map(|(at, _)| *at).collect();
    let expected: Vec<u64> =
        [0, 5_000].into_iter().chain((0..10).map(|n| 5_000 + n * 100)).collect();
    assert_eq!(at, expected);
    assert_eq!(rig.watermark(), 11);
}

/// A key that is over its rate, and whose records replace each other: the newest goes next.
#[test]
fn rate_and_conflation_together_handle_the_newest_in_each_interval() {
    let rate = Rate::per_second(10).burst(1);
    let mut rig = Rig::new(Builder::default().workers(1).batch(1).key_rate(rate).conflate(true));
    (0..100).for_each(|number| rig.arrive(number * 10, [3]));
    rig.until(5_000);
    let log = rig.log.lock();
    let seen: Vec<(u64, usize)> = log.iter().map(|(at, batch)| (*at, batch[0].1)).collect();
    assert!((10..=12).contains(&seen.len()), "{seen:?}");
    assert_eq!(seen.last().unwrap().1, 99);
    assert!(seen[1..seen.len() - 1].iter().all(|(at, number)| (*number as u64 + 1) * 10 == *at));
    assert_eq!(rig.watermark(), 100);
    assert_eq!(rig.executor.counts().conflated as usize, 100 - seen.len());
}

#[test]
fn settings_that_mean_nothing_are_refused() {
    let check = |builder: Builder, name| {
        let error = builder.check().unwrap_err();
        assert_eq!(error.setting, name);
        assert!(error.to_string().contains(name), "{error}");
    };
    check(Builder::default().linger(Duration::from_secs(3_601)), "linger");
    check(Builder::default().batch_bytes(0), "batch_bytes");
    check(Builder::default().rate(Rate::per_second(0)), "rate");
    check(Builder::default().rate(Rate::per_second(1_000_000_001)), "rate");
    check(Builder::default().rate(Rate::per_second(1).burst(0)), "rate");
    check(Builder::default().key_rate(Rate::per_second(0).burst(1)), "key_rate");
    check(Builder::default().key_rate(Rate::per_second(1).burst(u32::MAX)), "key_rate");
    Builder::default().linger(Duration::ZERO).check().unwrap();
    let waiter = Waiter::new();
    let unknown = Builder::default().batch_bytes(9).batches(waiter.waker(), |_: &Batch<'_, u8>| ());
    assert!(unknown.unwrap_err().to_string().contains("record_bytes"));
}
