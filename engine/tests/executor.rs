//! The executor on real threads: order, completeness, failures, fences.

use plimsoll_engine::{Batch, EpochId, Executor, Refused, Route, Waiter};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A record that knows its key and its place among the records of the key.
#[derive(Debug, Clone, Copy)]
struct Record {
    key: u32,
    sequence: u32,
}

/// Checks each handled record: exactly the next of its key, never two of a key at once.
#[derive(Debug)]
struct Checker {
    keys: Vec<(AtomicBool, AtomicU32)>,
    handled: AtomicU64,
    faults: AtomicU64,
}

impl Checker {
    fn new(keys: u32) -> Arc<Self> {
        let keys = (0..keys).map(|_| (AtomicBool::new(false), AtomicU32::new(0))).collect();
        Arc::new(Checker { keys, handled: AtomicU64::new(0), faults: AtomicU64::new(0) })
    }

    fn handle(&self, record: &Record, work: impl FnOnce()) {
        let (running, next) = &self.keys[record.key as usize];
        let overlap = running.swap(true, Ordering::AcqRel);
        let disorder = next.load(Ordering::Relaxed) != record.sequence;
        work();
        next.store(record.sequence + 1, Ordering::Relaxed);
        running.store(false, Ordering::Release);
        self.faults.fetch_add(u64::from(overlap || disorder), Ordering::Relaxed);
        self.handled.fetch_add(1, Ordering::Relaxed);
    }
}

fn hash(key: u32) -> u64 {
    (u64::from(key) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// A small generator: the tests need variety, not quality.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % bound
    }
}

/// Drives an executor over `total` records of `keys` keys in four epochs until all are passed.
/// Key decides partition. Panics after a minute.
fn drive(executor: &mut Executor<Record>, waiter: &Waiter, keys: u32, total: u64, gap: i64) {
    let began = Instant::now();
    let epochs: Vec<EpochId> = (0..4).map(|_| executor.open(10, 500).unwrap()).collect();
    let mut offsets = [10_i64; 4];
    let mut sequences = vec![0_u32; keys as usize];
    let mut random = Random(42);
    let mut next: Option<Record> = None;
    let mut offered = 0;
    loop {
        executor.pass(began.elapsed());
        assert_eq!(executor.take_failure(), None);
        let mut taken = 0;
        while offered < total && taken < executor.demand() {
            let record = *next.get_or_insert_with(|| {
                // Skewed: a tenth of the records belong to key 0.
                let key = if random.below(10) == 0 { 0 } else { random.below(u64::from(keys)) };
                Record { key: key as u32, sequence: sequences[key as usize] }
            });
            let partition = record.key as usize % 4;
            if executor.room(epochs[partition]) == 0 {
                break;
            }
            let route = Route::Ordered(hash(record.key));
            executor.offer(epochs[partition], offsets[partition], route, record).unwrap();
            sequences[record.key as usize] += 1;
            offsets[partition] += 1 + random.below(gap as u64 + 1) as i64;
            next = None;
            offered += 1;
            taken += 1;
        }
        executor.flush();
        let unfinished: u64 =
            epochs.iter().map(|epoch| executor.progress(*epoch).unwrap().unfinished).sum();
        if offered == total && unfinished == 0 {
            break;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{unfinished} unfinished: a hang");
        if taken == 0 {
            waiter.wait(Duration::from_micros(150), || false);
        }
    }
    for epoch in epochs {
        let last = executor.last_admitted(epoch);
        let progress = executor.close(epoch).unwrap();
        assert_eq!(last.map_or(10, |last| last + 1), progress.watermark);
        assert!(executor.progress(epoch).is_none());
    }
}

#[test]
fn records_of_a_key_are_handled_in_order_and_once() {
    for (workers, shards, cost) in [(1, 1, 1), (2, 1024, 0), (3, 7, 2_000), (8, 64, 20_000)] {
        let checker = Checker::new(100);
        let waiter = Waiter::new();
        let mut executor = Executor::builder()
            .workers(workers)
            .shards(shards)
            .each(waiter.waker(), {
                let checker = Arc::clone(&checker);
                move |record: &Record| {
                    checker.handle(record, || {
                        // Costs differ, so that completion is out of order.
                        let cost = cost * u64::from(record.sequence % 5);
                        let began = Instant::now();
                        while began.elapsed() < Duration::from_nanos(cost) {
                            std::hint::spin_loop();
                        }
                    });
                }
            })
            .unwrap();
        drive(&mut executor, &waiter, 100, 30_000, 3);
        assert_eq!(checker.faults.load(Ordering::Relaxed), 0, "{workers} workers");
        assert_eq!(checker.handled.load(Ordering::Relaxed), 30_000);
    }
}

#[test]
fn batches_hold_at_most_what_was_asked_and_keep_order() {
    for most in [1, 7, 128] {
        let checker = Checker::new(50);
        let waiter = Waiter::new();
        let largest = Arc::new(AtomicU64::new(0));
        let mut executor = Executor::builder()
            .workers(3)
            .batch(most)
            .batches(waiter.waker(), {
                let (checker, largest) = (Arc::clone(&checker), Arc::clone(&largest));
                move |batch: &Batch<'_, Record>| {
                    assert!(!batch.is_empty());
                    assert_eq!(batch.iter().len(), batch.len());
                    assert!(batch.get(batch.len()).is_none());
                    largest.fetch_max(batch.len() as u64, Ordering::Relaxed);
                    batch.iter().for_each(|record| checker.handle(record, || ()));
                }
            })
            .unwrap();
        drive(&mut executor, &waiter, 50, 20_000, 0);
        assert_eq!(checker.faults.load(Ordering::Relaxed), 0, "batches of {most}");
        assert_eq!(checker.handled.load(Ordering::Relaxed), 20_000);
        assert!((1..=most as u64).contains(&largest.load(Ordering::Relaxed)));
    }
}

/// Runs `executor` until it is idle; panics after ten seconds.
fn settle<T: Send + 'static>(executor: &mut Executor<T>, waiter: &Waiter) {
    let began = Instant::now();
    loop {
        executor.pass(began.elapsed());
        if !executor.busy() {
            return;
        }
        assert!(began.elapsed() < Duration::from_secs(10), "still busy: a hang");
        waiter.wait(Duration::from_micros(150), || executor.finished_something());
    }
}

#[test]
fn a_failed_record_halts_its_partition_and_no_other() {
    for panics in [false, true] {
        let waiter = Waiter::new();
        let ran = Arc::new(parking_lot::Mutex::new(Vec::new()));
        let mut executor = Executor::builder()
            .workers(2)
            .each(waiter.waker(), {
                let ran = Arc::clone(&ran);
                move |&(partition, offset): &(u32, i64)| {
                    if (partition, offset) == (0, 4) {
                        assert!(!panics, "a planted panic");
                        return Err("a planted error");
                    }
                    ran.lock().push((partition, offset));
                    Ok(())
                }
            })
            .unwrap();
        let epochs = [executor.open(0, 100).unwrap(), executor.open(0, 100).unwrap()];
        for offset in 0..10 {
            for (partition, epoch) in epochs.iter().enumerate() {
                // One key per partition: all records behind the failed one are of its key.
                let route = Route::Ordered(hash(partition as u32));
                executor.offer(*epoch, offset, route, (partition as u32, offset)).unwrap();
            }
        }
        settle(&mut executor, &waiter);
        let failure = executor.take_failure().unwrap();
        assert_eq!((failure.epoch, failure.offset), (epochs[0], 4));
        assert!(failure.reason.contains("planted"), "{}", failure.reason);
        assert_eq!(executor.take_failure(), None);
        let halted = executor.progress(epochs[0]).unwrap();
        assert_eq!((halted.watermark, halted.failed, halted.unfinished), (4, Some(4), 6));
        assert_eq!(executor.progress(epochs[1]).unwrap().watermark, 10);
        let mut ran = ran.lock().clone();
        ran.sort_unstable();
        let expected: Vec<_> =
            (0..4).map(|offset| (0, offset)).chain((0..10).map(|offset| (1, offset))).collect();
        assert_eq!(ran, expected, "nothing of the key after the failed record may run");
        assert_eq!(executor.running_workers(), 2, "a panic must not end a worker");
    }
}

#[test]
fn a_failed_batch_fails_whole() {
    let waiter = Waiter::new();
    let mut executor = Executor::builder()
        .workers(1)
        .batch(8)
        .batches(waiter.waker(), |batch: &Batch<'_, i64>| {
            if batch.iter().any(|offset| *offset == 5) { Err("five") } else { Ok(()) }
        })
        .unwrap();
    let epoch = executor.open(0, 100).unwrap();
    for offset in 0..8 {
        executor.offer(epoch, offset, Route::Ordered(0), offset).unwrap();
    }
    settle(&mut executor, &waiter);
    let failure = executor.take_failure().unwrap();
    let progress = executor.progress(epoch).unwrap();
    assert_eq!(progress.failed, Some(progress.watermark));
    assert_eq!(failure.offset, progress.watermark);
    assert!(progress.watermark <= 5);
}

#[test]
fn what_is_refused_is_handed_back() {
    let waiter = Waiter::new();
    let gate = Arc::new(AtomicBool::new(false));
    let mut executor = Executor::builder()
        .workers(1)
        .each(waiter.waker(), {
            let gate = Arc::clone(&gate);
            move |_: &String| {
                while !gate.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        })
        .unwrap();
    let epoch = executor.open(5, 2).unwrap();
    let offer = |executor: &mut Executor<String>, offset| {
        executor.offer(epoch, offset, Route::Free, format!("record {offset}"))
    };
    offer(&mut executor, 6).unwrap();
    offer(&mut executor, 9).unwrap();
    for (offset, refused) in [
        (10, Refused::Full { capacity: 2 }),
        (9, Refused::Duplicate { offset: 9, last: 9 }),
        (5, Refused::Duplicate { offset: 5, last: 9 }),
        (4, Refused::Below { offset: 4, start: 5 }),
        (-1, Refused::OutOfRange { offset: -1 }),
        (i64::MAX, Refused::OutOfRange { offset: i64::MAX }),
    ] {
        let rejected = offer(&mut executor, offset).unwrap_err();
        assert_eq!(rejected.refused, refused);
        assert_eq!(rejected.payload, format!("record {offset}"));
    }
    gate.store(true, Ordering::Release);
    settle(&mut executor, &waiter);
    assert_eq!(executor.room(epoch), 2);
    offer(&mut executor, 10).unwrap();
    executor.stop_intake(epoch);
    assert_eq!(offer(&mut executor, 11).unwrap_err().refused, Refused::Closed);
    settle(&mut executor, &waiter);
    assert_eq!(executor.close(epoch).unwrap().watermark, 11);
    assert_eq!(offer(&mut executor, 11).unwrap_err().refused, Refused::Closed);
}

#[test]
fn a_closed_epoch_starts_nothing_and_a_late_completion_touches_nothing() {
    let waiter = Waiter::new();
    let gate = Arc::new(AtomicBool::new(false));
    let ran = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let mut executor = Executor::builder()
        .workers(1)
        .each(waiter.waker(), {
            let (gate, ran) = (Arc::clone(&gate), Arc::clone(&ran));
            move |&(epoch, offset): &(u32, i64)| {
                while !gate.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                ran.lock().push((epoch, offset));
            }
        })
        .unwrap();
    let first = executor.open(0, 10).unwrap();
    for offset in 0..5 {
        executor.offer(first, offset, Route::Ordered(7), (1, offset)).unwrap();
    }
    executor.flush();
    // Until the worker is inside the handler of offset 0.
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(executor.close(first).unwrap().watermark, 0);
    // The same partition comes back; its key's old handler is still running.
    let second = executor.open(0, 10).unwrap();
    assert_ne!(first, second);
    for offset in 0..5 {
        executor.offer(second, offset, Route::Ordered(7), (2, offset)).unwrap();
    }
    executor.flush();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(executor.progress(second).unwrap().watermark, 0);
    gate.store(true, Ordering::Release);
    settle(&mut executor, &waiter);
    assert_eq!(executor.progress(second).unwrap().watermark, 5);
    assert!(executor.progress(first).is_none());
    // The late one ended, the queued ones of the old epoch never started, the new ones follow.
    let ran = ran.lock().clone();
    assert_eq!(ran, [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4)]);
}

#[test]
fn slots_of_closed_epochs_are_used_again() {
    let waiter = Waiter::new();
    let mut executor = Executor::builder().workers(2).each(waiter.waker(), |_: &u32| ()).unwrap();
    let mut ids = std::collections::HashSet::new();
    for _ in 0..200 {
        let epoch = executor.open(0, 8).unwrap();
        assert!(ids.insert(epoch), "an id names one epoch");
        for offset in 0..8 {
            executor.offer(epoch, offset, Route::Free, 0).unwrap();
        }
        settle(&mut executor, &waiter);
        assert_eq!(executor.close(epoch).unwrap().watermark, 8);
        executor.pass(Duration::ZERO);
    }
    let text = format!("{:?}", executor.open(0, 8).unwrap());
    assert!(text.contains("slot: 0") || text.contains("slot: 1"), "{text}");
}

#[test]
fn a_worker_that_never_returns_stops_neither_the_others_nor_the_end() {
    let waiter = Waiter::new();
    let mut executor = Executor::builder()
        .workers(2)
        .each(waiter.waker(), |record: &u32| {
            if *record == 0 {
                loop {
                    std::thread::park();
                }
            }
        })
        .unwrap();
    let epoch = executor.open(0, 10_000).unwrap();
    executor.offer(epoch, 0, Route::Ordered(hash(0)), 0).unwrap();
    let began = Instant::now();
    let mut offset = 1;
    while offset < 5_000 {
        executor.pass(began.elapsed());
        for _ in 0..executor.demand().min(5_000 - offset as u32) {
            executor.offer(epoch, offset, Route::Free, 1).unwrap();
            offset += 1;
        }
        executor.flush();
        assert!(began.elapsed() < Duration::from_secs(20), "stuck at offset {offset}");
        waiter.wait(Duration::from_micros(150), || false);
    }
    let progress = executor.progress(epoch).unwrap();
    assert_eq!((progress.watermark, progress.unfinished), (0, 5_000));
    executor.halt(epoch);
    executor.stop();
    let began = Instant::now();
    while executor.running_workers() > 1 {
        assert!(began.elapsed() < Duration::from_secs(10), "the other worker did not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(executor); // returns although a worker still runs
}

#[test]
fn settings_are_checked_when_built() {
    type Built = Result<Executor<u32>, plimsoll_engine::BuildError>;
    let waiter = Waiter::new();
    let each =
        |builder: plimsoll_engine::Builder| -> Built { builder.each(waiter.waker(), |_: &u32| ()) };
    let batches = |builder: plimsoll_engine::Builder| -> Built {
        builder.batches(waiter.waker(), |_: &Batch<'_, u32>| ())
    };
    for (built, setting) in [
        (each(Executor::builder().workers(0)), "workers"),
        (each(Executor::builder().workers(usize::MAX)), "workers"),
        (each(Executor::builder().shards(0)), "shards"),
        (each(Executor::builder().shards(usize::MAX)), "shards"),
        (batches(Executor::builder().batch(0)), "batch"),
        (batches(Executor::builder().batch(usize::MAX)), "batch"),
    ] {
        let error = built.unwrap_err().to_string();
        assert!(error.contains(&format!("`{setting}`")), "{error}");
    }
}

#[test]
fn what_lies_behind_a_hanging_record_is_given_to_others() {
    for keys in [1_u64, 40] {
        let waiter = Waiter::new();
        let gate = Arc::new(AtomicBool::new(false));
        let checker = Checker::new(50);
        let mut executor = Executor::builder()
            .workers(2)
            .shards(8)
            .each(waiter.waker(), {
                let (gate, checker) = (Arc::clone(&gate), Arc::clone(&checker));
                move |record: &Record| {
                    checker.handle(record, || {
                        while record.key == 49 && !gate.load(Ordering::Acquire) {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                    });
                }
            })
            .unwrap();
        let epoch = executor.open(0, 1_000).unwrap();
        let began = Instant::now();
        // Into one lane, before anything is known: the hanging one first, its shard's others and
        // free records behind it.
        let hanging = Record { key: 49, sequence: 0 };
        executor.offer(epoch, 0, Route::Ordered(hash(49)), hanging).unwrap();
        let mut sequences = [0; 50];
        let mut behind = 0;
        for offset in 1..300 {
            let key = (offset as u64 % keys) as u32;
            let record = Record { key, sequence: sequences[key as usize] };
            sequences[key as usize] += 1;
            behind += u64::from(hash(key) >> 61 == hash(49) >> 61);
            executor.offer(epoch, offset, Route::Ordered(hash(key)), record).unwrap();
        }
        // Eight shards: the high three bits choose. Those of the hanging one's shard must wait.
        while checker.handled.load(Ordering::Relaxed) < 299 - behind {
            executor.pass(began.elapsed());
            assert!(began.elapsed() < Duration::from_secs(10), "the rest is held hostage");
            waiter.wait(Duration::from_micros(150), || false);
        }
        std::thread::sleep(Duration::from_millis(5));
        executor.pass(began.elapsed());
        assert_eq!(checker.handled.load(Ordering::Relaxed), 299 - behind);
        gate.store(true, Ordering::Release);
        settle(&mut executor, &waiter);
        assert_eq!(executor.progress(epoch).unwrap().watermark, 300);
        assert_eq!(checker.faults.load(Ordering::Relaxed), 0);
    }
}

#[test]
fn random_hangs_and_recalls_keep_the_order() {
    for seed in 0..6 {
        let checker = Checker::new(100);
        let waiter = Waiter::new();
        let mut executor = Executor::builder()
            .workers(4)
            .shards(32)
            .each(waiter.waker(), {
                let checker = Arc::clone(&checker);
                move |record: &Record| {
                    checker.handle(record, || {
                        // Most are free, a few take long enough to be recalled behind.
                        let pick = hash(record.key ^ record.sequence << 8 ^ seed) >> 54;
                        if pick < 4 {
                            std::thread::sleep(Duration::from_millis(1 + pick));
                        }
                    });
                }
            })
            .unwrap();
        drive(&mut executor, &waiter, 100, 20_000, 1);
        assert_eq!(checker.faults.load(Ordering::Relaxed), 0, "seed {seed}");
        assert_eq!(checker.handled.load(Ordering::Relaxed), 20_000);
    }
}

/// Records with gaps, offered in batches of any length and single ones in between: as if they had
/// been offered one by one. The windows are small, so that batches end at the end of the ring, at
/// its limit, and at gaps.
#[test]
fn batches_of_offers_are_as_single_ones() {
    for (workers, capacity, gaps) in [(1, 1, 2), (2, 7, 0), (2, 500, 40), (3, 4_096, 3)] {
        let checker = Checker::new(100);
        let waiter = Waiter::new();
        let mut executor = Executor::builder()
            .workers(workers)
            .batch(16)
            .batches(waiter.waker(), {
                let checker = Arc::clone(&checker);
                move |batch: &Batch<'_, Record>| {
                    batch.iter().for_each(|record| checker.handle(record, || {}));
                }
            })
            .unwrap();
        let total = if capacity == 1 { 2_000 } else { 60_000 };
        let mut random = Random(u64::from(capacity));
        let epochs = [0, 1].map(|_| executor.open(5, capacity).unwrap());
        let mut next_offsets = [5_i64; 2];
        let mut sequences = [0_u32; 100];
        let (began, mut offered) = (Instant::now(), 0);
        while offered < total {
            executor.pass(began.elapsed());
            let at = random.below(2) as usize;
            let room = executor.demand().min(executor.room(epochs[at]));
            let length = u64::from(room).min(random.below(700)).min(total - offered);
            let next = &mut next_offsets[at];
            let single = random.below(4) == 0;
            let mut records = (0..length).map(|_| {
                let key = 2 * random.below(50) as u32 + at as u32;
                let sequence = sequences[key as usize];
                sequences[key as usize] += 1;
                if gaps > 0 && random.below(gaps) == 0 {
                    *next += random.below(1 << 40) as i64;
                }
                *next += 1;
                (*next - 1, Route::Ordered(hash(key)), Record { key, sequence })
            });
            if single && let Some((offset, route, record)) = records.next() {
                executor.offer(epochs[at], offset, route, record).unwrap();
                offered += 1;
            }
            offered += u64::from(executor.offer_all(epochs[at], records).unwrap());
            if *next > 5 {
                assert_eq!(executor.last_admitted(epochs[at]), Some(*next - 1));
            }
            executor.flush();
            assert!(began.elapsed() < Duration::from_secs(60), "{offered} of {total} offered");
        }
        for (epoch, next) in epochs.into_iter().zip(next_offsets) {
            until(&mut executor, &waiter, began, |executor| {
                executor.progress(epoch).unwrap().unfinished == 0
            });
            assert_eq!(executor.progress(epoch).unwrap().watermark, next);
        }
        assert_eq!(checker.faults.load(Ordering::Relaxed), 0, "capacity {capacity}");
        assert_eq!(checker.handled.load(Ordering::Relaxed), total);
    }
}

/// Passes until `done`, at most a minute.
fn until<T: Send + 'static>(
    executor: &mut Executor<T>,
    waiter: &Waiter,
    began: Instant,
    mut done: impl FnMut(&Executor<T>) -> bool,
) {
    while !done(executor) {
        assert!(began.elapsed() < Duration::from_secs(60), "a hang");
        executor.pass(began.elapsed());
        executor.flush();
        waiter.wait(Duration::from_micros(100), || false);
    }
}

#[test]
fn offers_that_are_refused_end_the_batch() {
    let waiter = Waiter::new();
    let mut executor = Executor::builder().each(waiter.waker(), |_: &i64| ()).unwrap();
    let epoch = executor.open(10, 4).unwrap();
    let records = |offsets: &[i64]| {
        let routed = |offset: &i64| (*offset, Route::Ordered(hash(*offset as u32)), *offset);
        offsets.iter().map(routed).collect::<Vec<_>>().into_iter()
    };
    // The last good one stays admitted, the refused one comes back, what follows stays where it is.
    let mut some = records(&[10, 11, 11, 12]);
    let rejected = executor.offer_all(epoch, &mut some).unwrap_err();
    assert_eq!(rejected.payload, 11);
    assert_eq!(rejected.refused, Refused::Duplicate { offset: 11, last: 11 });
    assert_eq!(some.next().map(|(offset, ..)| offset), Some(12));
    assert_eq!(executor.last_admitted(epoch), Some(11));
    // Never flushed, so nothing is finished: 10, 11, 20, 21 fill the window.
    let rejected = executor.offer_all(epoch, records(&[20, 21, 22, 23])).unwrap_err();
    assert_eq!((rejected.payload, rejected.refused), (22, Refused::Full { capacity: 4 }));
    assert_eq!(executor.last_admitted(epoch), Some(21));
    assert_eq!(executor.offer_all(epoch, records(&[])).unwrap(), 0);
    executor.stop_intake(epoch);
    let rejected = executor.offer_all(epoch, records(&[24])).unwrap_err();
    assert_eq!(rejected.refused, Refused::Closed);
    let began = Instant::now();
    until(&mut executor, &waiter, began, |executor| {
        executor.progress(epoch).unwrap().unfinished == 0
    });
    assert_eq!(executor.progress(epoch).unwrap().watermark, 22);
}

#[test]
fn the_end_of_the_offsets_is_reached_in_a_batch() {
    let waiter = Waiter::new();
    let mut executor = Executor::builder().each(waiter.waker(), |_: &i64| ()).unwrap();
    let start = i64::MAX - 3;
    let epoch = executor.open(start, 16).unwrap();
    let records = (0..4).map(|step| (start + step, Route::Ordered(0), step));
    let rejected = executor.offer_all(epoch, records).unwrap_err();
    assert_eq!(rejected.payload, 3);
    assert_eq!(rejected.refused, Refused::OutOfRange { offset: i64::MAX });
    let began = Instant::now();
    until(&mut executor, &waiter, began, |executor| {
        executor.progress(epoch).unwrap().unfinished == 0
    });
    assert_eq!(executor.progress(epoch).unwrap().watermark, i64::MAX);
}

#[test]
fn a_source_that_panics_leaves_what_it_yielded() {
    let waiter = Waiter::new();
    let mut executor = Executor::builder().each(waiter.waker(), |_: &i64| ()).unwrap();
    let epoch = executor.open(0, 16).unwrap();
    let records = (0..8).map(|offset| {
        assert!(offset < 3, "the source is broken");
        (offset, Route::Ordered(hash(offset as u32)), offset)
    });
    let offering = std::panic::AssertUnwindSafe(|| executor.offer_all(epoch, records));
    assert!(std::panic::catch_unwind(offering).is_err());
    assert_eq!((executor.last_admitted(epoch), executor.room(epoch)), (Some(2), 13));
    executor.offer(epoch, 3, Route::Ordered(hash(3)), 3).unwrap();
    let began = Instant::now();
    until(&mut executor, &waiter, began, |executor| {
        executor.progress(epoch).unwrap().unfinished == 0
    });
    assert_eq!(executor.progress(epoch).unwrap().watermark, 4);
}

/// The failing record's offset is found from its place, whatever lies between the offsets.
#[test]
fn a_failure_among_gaps_names_its_offset() {
    let mut random = Random(7);
    for round in 0..200 {
        let waiter = Waiter::new();
        let bad = random.below(40) as i64;
        let mut executor = Executor::builder()
            .workers(1)
            .each(
                waiter.waker(),
                move |index: &i64| {
                    if *index == bad { Err("refused") } else { Ok(()) }
                },
            )
            .unwrap();
        let start = random.below(1_000) as i64;
        let epoch = executor.open(start, 8).unwrap();
        let mut offset = start;
        let offsets: Vec<i64> = (0..40)
            .map(|_| {
                offset += if random.below(3) == 0 { random.below(1 << 40) as i64 } else { 0 };
                offset += 1;
                offset - 1
            })
            .collect();
        let (began, mut next, mut failure) = (Instant::now(), 0, None);
        while failure.is_none() {
            assert!(began.elapsed() < Duration::from_secs(60), "round {round}: a hang");
            executor.pass(began.elapsed());
            let room = (executor.room(epoch) as usize).min(offsets.len() - next);
            let records = (next..next + room)
                .map(|index| (offsets[index], Route::Ordered(hash(index as u32)), index as i64));
            match executor.offer_all(epoch, records) {
                Ok(count) => next += count as usize,
                Err(rejected) => assert_eq!(rejected.refused, Refused::Closed),
            }
            executor.flush();
            failure = executor.take_failure();
            std::thread::yield_now();
        }
        assert_eq!(failure.map(|failure| failure.offset), Some(offsets[bad as usize]));
        let progress = executor.progress(epoch).unwrap();
        assert_eq!(progress.failed, Some(offsets[bad as usize]));
        let before = bad.checked_sub(1).filter(|index| *index >= 0);
        let watermark = before.map_or(start, |index| offsets[index as usize] + 1);
        assert_eq!(progress.watermark, watermark, "round {round}");
    }
}
