//! The hashes beside a lane's slots: a worker that has claimed an entry reads the entry's own hash.
#![cfg(loom)]

use loom::thread;
use plimsoll_engine::internals::{Hashes, Order};
use plimsoll_loom_tests::{Bound, explore, lane};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Pushes an entry with its hash, if there is a slot.
macro_rules! push {
    ($tx:ident, $hashes:ident, $number:expr) => {{
        $tx.reclaim();
        if $tx.pending() < $tx.length() {
            $hashes.set($tx.end(), $number);
            assert!($tx.push($number).is_ok());
        }
        $tx.flush();
    }};
}

/// One slot, two entries: the second finds the slot only if the worker is done with the first.
/// Returns what the worker has read.
fn one_slot(order: Order) -> Vec<u64> {
    let hashes = Arc::new(Hashes::<1>::default());
    let (mut tx, mut rx) = lane(1, order);
    let worker = thread::spawn({
        let hashes = Arc::clone(&hashes);
        move || {
            let mut seen = Vec::new();
            for _ in 0..2 {
                if let Some(run) = rx.claim(1) {
                    assert_eq!(hashes.get(run.position(0)), *run.get(0), "another entry's hash");
                    seen.push(*run.get(0));
                }
            }
            seen
        }
    });
    push!(tx, hashes, 7_u64);
    push!(tx, hashes, 8_u64);
    worker.join().unwrap()
}

#[test]
fn a_slot_that_is_used_again() {
    let seen = explore(Bound::Exhaustive, || one_slot(Order::Right));
    assert_eq!(seen, BTreeSet::from([vec![], vec![7], vec![7, 8]]));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_flush_that_does_not_publish() {
    explore(Bound::Exhaustive, || one_slot(Order::WeakFlush));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_run_that_is_not_released() {
    explore(Bound::Exhaustive, || one_slot(Order::WeakDone));
}

/// An entry is recalled, and another one takes its position. Returns what the worker has read.
fn recalled(order: Order) -> Option<u64> {
    let hashes = Arc::new(Hashes::<1>::default());
    let (mut tx, mut rx) = lane(1, order);
    let worker = thread::spawn({
        let hashes = Arc::clone(&hashes);
        move || {
            let run = rx.claim(1)?;
            assert_eq!(hashes.get(run.position(0)), *run.get(0), "another entry's hash");
            Some(*run.get(0))
        }
    });
    push!(tx, hashes, 7_u64);
    if tx.recall(|_| ()) == 1 {
        push!(tx, hashes, 8_u64);
    }
    worker.join().unwrap()
}

#[test]
fn a_position_that_is_used_again_after_a_recall() {
    let seen = explore(Bound::Exhaustive, || recalled(Order::Right));
    assert_eq!(seen, BTreeSet::from([None, Some(7), Some(8)]));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_recall_that_does_not_look() {
    explore(Bound::Exhaustive, || recalled(Order::BlindRecall));
}
