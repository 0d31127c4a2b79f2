//! The stop: all that was flushed before it is claimed before the worker ends.
#![cfg(loom)]

use loom::thread;
use plimsoll_engine::internals::{LaneTx, Order};
use plimsoll_loom_tests::{Bound, Parking, Worker, explore, lane};
use std::collections::BTreeSet;

/// Two entries, published at once or one by one, then the stop. Returns the lengths of the runs.
fn two_entries_and_stop(at_once: bool, how: Worker, stop: fn(&mut LaneTx<u32>)) -> Vec<u32> {
    let (mut tx, mut rx) = lane(2, Order::Right);
    tx.set_run(2);
    let parking = Parking::new();
    let worker = thread::spawn({
        let parking = parking.clone();
        move || {
            let mut runs = Vec::new();
            how.work(&mut rx, &parking, |run| {
                runs.push(run.len());
                true
            });
            assert!(rx.stopped());
            runs
        }
    });
    for number in 0..2 {
        tx.push(number).unwrap();
        if (number == 1 || !at_once) && tx.flush() {
            parking.unpark();
        }
    }
    stop(&mut tx);
    parking.unpark();
    let runs = worker.join().unwrap();
    assert_eq!(runs.iter().sum::<u32>(), 2, "the worker ended and left entries behind");
    assert_eq!(tx.reclaim(), 2);
    runs
}

#[test]
fn two_entries_at_once() {
    let runs =
        explore(Bound::Exhaustive, || two_entries_and_stop(true, Worker::RIGHT, LaneTx::stop));
    assert_eq!(runs, BTreeSet::from([vec![2]]));
}

#[test]
fn two_entries_one_by_one() {
    let runs =
        explore(Bound::Preemptions(5), || two_entries_and_stop(false, Worker::RIGHT, LaneTx::stop));
    assert_eq!(runs, BTreeSet::from([vec![1, 1], vec![2]]));
}

#[test]
#[should_panic(expected = "left entries behind")]
fn twin_a_stop_that_does_not_publish() {
    explore(Bound::Exhaustive, || two_entries_and_stop(true, Worker::RIGHT, LaneTx::stop_weakly));
}

#[test]
#[should_panic(expected = "left entries behind")]
fn twin_a_worker_that_does_not_look_again() {
    let worker = Worker { looks_after_stop: false, ..Worker::RIGHT };
    explore(Bound::Exhaustive, move || two_entries_and_stop(true, worker, LaneTx::stop));
}

/// The dispatcher goes without a word, which counts as a stop.
fn gone() -> u32 {
    let (mut tx, mut rx) = lane(2, Order::Right);
    let parking = Parking::new();
    let worker = thread::spawn({
        let parking = parking.clone();
        move || {
            let mut handled = 0;
            Worker::RIGHT.work(&mut rx, &parking, |run| {
                handled += run.len();
                true
            });
            handled
        }
    });
    tx.push(0).unwrap();
    tx.flush();
    drop(tx);
    parking.unpark();
    worker.join().unwrap()
}

#[test]
fn a_dispatcher_that_is_gone() {
    assert_eq!(explore(Bound::Exhaustive, gone), BTreeSet::from([1]));
}
