//! A key changes lanes: its next handler, on another worker, starts after the one before has ended.
#![cfg(loom)]

use loom::thread;
use plimsoll_engine::internals::{LaneRx, Order};
use plimsoll_loom_tests::{Bound, Effect, Spared, explore, lane};
use std::collections::BTreeSet;
use std::rc::Rc;

/// What the handlers of a key leave behind, one record after the other. The next relies on it.
type Key = Rc<[Effect; 2]>;

fn worker(mut rx: Spared<LaneRx<usize>>, key: Key) -> thread::JoinHandle<bool> {
    thread::spawn(move || {
        let Some(run) = rx.claim(1) else { return false };
        let record = *run.get(0);
        for before in &key[..record] {
            before.rely();
        }
        key[record].happen();
        true
    })
}

/// The first record of a key is in one worker's lane; the second goes to another worker's, at once
/// if nobody `looks` whether the first one is done. Returns whether it could go, and was handled.
fn two_records_of_a_key(order: Order, looks: bool) -> (bool, bool) {
    let key: Key = Rc::default();
    let (mut first, rx) = lane(1, order);
    first.push(0).unwrap();
    first.flush();
    let one = worker(rx, Rc::clone(&key));
    let (mut second, rx) = lane(1, order);
    let other = worker(rx, key);
    let goes = !looks || first.reclaim() == 1;
    if goes {
        second.push(1).unwrap();
        second.flush();
    }
    assert!(one.join().unwrap());
    (goes, other.join().unwrap())
}

#[test]
fn one_after_the_other() {
    let seen = explore(Bound::Exhaustive, || two_records_of_a_key(Order::Right, true));
    assert_eq!(seen, BTreeSet::from([(false, false), (true, false), (true, true)]));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_run_that_is_not_released() {
    explore(Bound::Exhaustive, || two_records_of_a_key(Order::WeakDone, true));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_change_without_a_look() {
    explore(Bound::Exhaustive, || two_records_of_a_key(Order::Right, false));
}
