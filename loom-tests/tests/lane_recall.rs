//! Recall against claim: an entry is claimed or recalled, never both and never neither.
#![cfg(loom)]

use loom::thread;
use plimsoll_engine::internals::Order;
use plimsoll_loom_tests::{Bound, explore, lane};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;

/// An entry that counts its destruction.
struct Entry(u32, Rc<Cell<u32>>);

impl Drop for Entry {
    fn drop(&mut self) {
        self.1.set(self.1.get() + 1);
    }
}

/// Two entries are flushed and one is not; the dispatcher recalls what it can and sends it again,
/// behind the same numbers. Returns what was recalled, last first.
fn sent_again(most: u32) -> Vec<u32> {
    let destroyed = Rc::new(Cell::new(0));
    let (mut tx, mut rx) = lane::<Entry>(4, Order::Right);
    tx.set_run(most);
    let worker = thread::spawn(move || {
        let mut seen = Vec::new();
        for _ in 0..2 {
            if let Some(run) = rx.claim(1) {
                seen.extend((0..run.len()).map(|index| run.get(index).0));
            }
        }
        (rx, seen)
    });
    for number in 0..3 {
        assert!(tx.push(Entry(number, Rc::clone(&destroyed))).is_ok());
        if number == 1 {
            tx.flush();
        }
    }
    let mut recalled = Vec::new();
    let count = tx.recall(|entry| recalled.push(entry));
    assert_eq!(count as usize, recalled.len());
    assert_eq!(tx.end() + count, 3, "what is not recalled has been claimed");
    let numbers = recalled.iter().map(|entry| entry.0).collect();
    for entry in recalled.into_iter().rev() {
        assert!(tx.push(entry).is_ok());
    }
    tx.flush();
    let (mut rx, mut seen) = worker.join().unwrap();
    while let Some(run) = rx.claim(1) {
        seen.extend((0..run.len()).map(|index| run.get(index).0));
    }
    assert_eq!(seen, [0, 1, 2], "each is handled once, in order");
    assert_eq!(destroyed.get(), 0);
    assert_eq!(tx.reclaim(), 3);
    assert_eq!(destroyed.get(), 3, "each entry is destroyed once");
    numbers
}

#[test]
fn one_at_a_time() {
    let recalled = explore(Bound::Exhaustive, || sent_again(1));
    assert_eq!(recalled, BTreeSet::from([vec![2, 1, 0], vec![2, 1], vec![2]]));
}

#[test]
fn two_at_a_time() {
    let recalled = explore(Bound::Exhaustive, || sent_again(2));
    assert_eq!(recalled, BTreeSet::from([vec![2, 1, 0], vec![2]]));
}

/// What is recalled is not sent again. Entries without a destructor, as the twin hands out copies.
/// Returns how many were recalled.
fn kept(order: Order) -> u32 {
    let (mut tx, mut rx) = lane(2, order);
    tx.set_run(2);
    let worker = thread::spawn(move || {
        let claimed = rx.claim(1);
        claimed.map_or_else(Vec::new, |mut run| {
            (0..run.len()).map(|index| *run.get_mut(index)).collect()
        })
    });
    for number in 0..2 {
        assert!(tx.push(number).is_ok());
    }
    tx.flush();
    let mut recalled = Vec::new();
    let count = tx.recall(|number| recalled.push(number));
    let mut all = worker.join().unwrap();
    all.extend(recalled.into_iter().rev());
    all.sort_unstable();
    assert_eq!(all, [0, 1], "each is claimed or recalled");
    count
}

#[test]
fn claimed_or_recalled() {
    let recalled = explore(Bound::Exhaustive, || kept(Order::Right));
    assert_eq!(recalled, BTreeSet::from([0, 2]));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_recall_that_does_not_look() {
    explore(Bound::Exhaustive, || kept(Order::BlindRecall));
}
