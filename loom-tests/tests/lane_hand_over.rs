//! A lane's slots: each has one owner at a time, and all its owner did is visible to the next.
#![cfg(loom)]

use loom::thread;
use plimsoll_engine::internals::{LaneRx, LaneTx, Order};
use plimsoll_loom_tests::{Bound, Effect, explore, lane};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;

/// An entry with a destructor, which relies on what the worker did.
struct Entry {
    number: u32,
    worked: bool,
    effect: Effect,
    destroyed: Rc<Cell<u32>>,
}

impl Entry {
    fn new(number: u32, destroyed: &Rc<Cell<u32>>) -> Self {
        let destroyed = Rc::clone(destroyed);
        Entry { number, worked: false, effect: Effect::new(), destroyed }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // A twin unwinds through here.
        if std::thread::panicking() {
            return;
        }
        if self.worked {
            self.effect.rely();
        }
        self.destroyed.set(self.destroyed.get() + 1);
    }
}

/// Claims at most `tries` times; in place, checks the order and works. Returns the next number.
fn work(rx: &mut LaneRx<Entry>, from: u32, tries: u32) -> u32 {
    let mut next = from;
    for _ in 0..tries {
        let Some(mut run) = rx.claim(1) else { continue };
        for index in 0..run.len() {
            assert_eq!(run.get(index).number, next, "out of order");
            let entry = run.get_mut(index);
            entry.effect.happen();
            entry.worked = true;
            next += 1;
        }
    }
    next
}

/// Takes back what is done, which in this model has been worked on, and pushes on.
fn push(tx: &mut LaneTx<Entry>, number: u32, destroyed: &Rc<Cell<u32>>) -> bool {
    tx.reclaim();
    let pushed = tx.push(Entry::new(number, destroyed)).is_ok();
    tx.flush();
    pushed
}

/// A lane of two slots; the third entry finds a slot only if the worker is done with one. Returns
/// how many the worker had handled, and how many had been taken back, when the threads met.
fn two_slots(order: Order) -> (u32, u32) {
    let destroyed = Rc::new(Cell::new(0));
    let (mut tx, mut rx) = lane(2, order);
    tx.set_run(2);
    let worker = thread::spawn(move || {
        let handled = work(&mut rx, 0, 2);
        (rx, handled)
    });
    let mut made = 0;
    for number in 0..3 {
        // An entry that is refused is handed back and destroyed like the others.
        made += 1;
        if !push(&mut tx, number, &destroyed) {
            break;
        }
    }
    let pushed = tx.end();
    let reclaimed = tx.reclaimed();
    let (mut rx, handled) = worker.join().unwrap();
    assert_eq!(work(&mut rx, handled, 3), pushed);
    tx.reclaim();
    assert_eq!(tx.pending(), 0);
    assert_eq!(destroyed.get(), made, "each entry is destroyed once");
    (handled, reclaimed)
}

#[test]
fn in_place_and_back() {
    let seen = explore(Bound::Exhaustive, || two_slots(Order::Right));
    let third_slot = |(_, reclaimed): &(u32, u32)| *reclaimed > 0;
    assert!(seen.iter().any(third_slot) && !seen.iter().all(third_slot));
    let handled: BTreeSet<u32> = seen.iter().map(|(handled, _)| *handled).collect();
    assert_eq!(handled, BTreeSet::from([0, 1, 2, 3]));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_flush_that_does_not_publish() {
    explore(Bound::Exhaustive, || two_slots(Order::WeakFlush));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_run_that_is_not_released() {
    explore(Bound::Exhaustive, || two_slots(Order::WeakDone));
}

/// Entries without a destructor: taking them back touches no slot, only pushing again does. One
/// slot, three laps. Returns how many were pushed.
fn one_slot(order: Order) -> u32 {
    let (mut tx, mut rx) = lane(1, order);
    let worker = thread::spawn(move || {
        let mut seen = Vec::new();
        for _ in 0..3 {
            if let Some(mut run) = rx.claim(1) {
                *run.get_mut(0) += 100;
                seen.extend(run.range(0, 1).copied());
            }
        }
        (rx, seen)
    });
    for _ in 0..3 {
        let number = tx.end();
        tx.reclaim();
        let mut writer = tx.writer(2);
        let mut slots = writer.slots();
        let pushed = slots.next().map(|free| writer.fill(free, number)).is_some();
        assert_eq!((writer.written(), slots.len()), (u32::from(pushed), 0));
        drop((slots, writer));
        if pushed {
            tx.flush();
        }
    }
    let (mut rx, mut seen) = worker.join().unwrap();
    if let Some(run) = rx.claim(1) {
        seen.push(*run.get(0) + 100);
    }
    assert_eq!(seen, (100..100 + tx.end()).collect::<Vec<u32>>());
    tx.end()
}

#[test]
fn in_place_without_destructors() {
    let pushed = explore(Bound::Exhaustive, || one_slot(Order::Right));
    assert_eq!(pushed, BTreeSet::from([1, 2, 3]));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_flush_that_does_not_publish_without_destructors() {
    explore(Bound::Exhaustive, || one_slot(Order::WeakFlush));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_run_that_is_not_released_without_destructors() {
    explore(Bound::Exhaustive, || one_slot(Order::WeakDone));
}

/// The halves go at any moment, on their own threads, with entries in every part of the lane: what
/// was pushed is destroyed once. Returns how many were handled, and whether the worker saw the stop.
fn torn_down() -> (u32, bool) {
    let destroyed = Rc::new(Cell::new(0));
    let (mut tx, mut rx) = lane(4, Order::Right);
    let worker = thread::spawn(move || {
        let handled = work(&mut rx, 0, 2);
        (handled, rx.stopped())
    });
    for number in 0..2 {
        assert!(push(&mut tx, number, &destroyed));
    }
    // Pushed and never flushed.
    assert!(tx.push(Entry::new(2, &destroyed)).is_ok());
    drop(tx);
    let ended = worker.join().unwrap();
    assert_eq!(destroyed.get(), 3, "each entry is destroyed once");
    ended
}

#[test]
fn what_is_left_is_destroyed_once() {
    let seen = explore(Bound::Exhaustive, torn_down);
    let all = [0, 1, 2].iter().flat_map(|n| [(*n, false), (*n, true)]);
    assert_eq!(seen, all.collect());
}

/// An entry without a destructor that the worker may hand back.
#[derive(Clone, Copy)]
struct Returned {
    number: u32,
    back: bool,
}

/// The worker hands the second of three entries back, one or two at a time. Returns in how many
/// looks the dispatcher has taken the entries back before the worker had ended.
fn handed_back(order: Order) -> u32 {
    let (mut tx, mut rx) = lane(4, order);
    tx.set_run(2);
    for number in 0..3 {
        assert!(tx.push(Returned { number, back: false }).is_ok());
    }
    tx.flush();
    let worker = thread::spawn(move || {
        while let Some(mut run) = rx.claim(1) {
            for index in 0..run.len() {
                if run.get(index).number == 1 {
                    run.get_mut(index).back = true;
                    run.hand_back(index);
                }
            }
        }
        rx
    });
    let mut back = Vec::new();
    let mut take = |tx: &mut LaneTx<Returned>| {
        tx.reclaim_with(|position, entry: Returned| {
            assert_eq!(position, entry.number);
            if entry.back {
                back.push(entry.number);
            }
        }) > 0
    };
    let looks = u32::from(take(&mut tx)) + u32::from(take(&mut tx));
    worker.join().unwrap();
    take(&mut tx);
    assert_eq!(back, [1], "the entry was not handed back");
    looks
}

#[test]
fn what_is_handed_back_comes_back() {
    let looks = explore(Bound::Exhaustive, || handed_back(Order::Right));
    assert_eq!(looks, BTreeSet::from([0, 1, 2]));
}

#[test]
#[should_panic(expected = "was not handed back")]
fn twin_a_return_that_is_told_too_late() {
    explore(Bound::Exhaustive, || handed_back(Order::LateBack));
}
