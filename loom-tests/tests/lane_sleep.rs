//! A worker that runs dry and sleeps: no wake-up is lost.
#![cfg(loom)]

use loom::thread;
use plimsoll_engine::internals::{LaneTx, Order};
use plimsoll_loom_tests::{Bound, Effect, Parking, Worker, explore, lane};
use std::collections::BTreeSet;
use std::rc::Rc;

fn flush(tx: &mut LaneTx<u32>, parking: &Parking) -> bool {
    let asleep = tx.flush();
    if asleep {
        parking.unpark();
    }
    asleep
}

/// The dispatcher sends two entries one by one and does nothing else: only its wake-ups can keep
/// the worker going. Returns how many it was asked for.
fn two_flushes(order: Order, how: Worker) -> usize {
    let (mut tx, mut rx) = lane(2, order);
    let parking = Parking::new();
    let worker = thread::spawn({
        let parking = parking.clone();
        move || {
            let mut next = 0;
            how.work(&mut rx, &parking, |run| {
                for index in 0..run.len() {
                    assert_eq!(*run.get(index), next);
                    next += 1;
                }
                next < 2
            });
            assert_eq!(next, 2);
        }
    });
    let mut asleep = 0;
    for number in 0..2 {
        tx.push(number).unwrap();
        asleep += usize::from(flush(&mut tx, &parking));
    }
    worker.join().unwrap();
    asleep
}

#[test]
fn two_entries_one_by_one() {
    let asleep = explore(Bound::Exhaustive, || two_flushes(Order::Right, Worker::RIGHT));
    assert_eq!(asleep, BTreeSet::from([0, 1, 2]));
}

#[test]
#[should_panic(expected = "deadlock")]
fn twin_a_sleep_announced_blindly() {
    explore(Bound::Exhaustive, || two_flushes(Order::BlindSleep, Worker::RIGHT));
}

#[test]
#[should_panic(expected = "deadlock")]
fn twin_a_sleep_that_goes_on_unannounced() {
    let worker = Worker { announces_each_sleep: false, ..Worker::RIGHT };
    explore(Bound::Exhaustive, move || two_flushes(Order::Right, worker));
}

/// The dispatcher takes an entry back, if it can, and sends it again: the worker may be woken for
/// nothing, and must still wake up the second time. Returns whether it was recalled, and the
/// wake-ups.
fn recalled_and_sent_again(how: Worker) -> (bool, bool, bool) {
    let (mut tx, mut rx) = lane(1, Order::Right);
    let parking = Parking::new();
    let worker = thread::spawn({
        let parking = parking.clone();
        move || {
            how.work(&mut rx, &parking, |run| {
                assert_eq!((run.len(), *run.get(0)), (1, 7));
                false
            });
        }
    });
    tx.push(7).unwrap();
    let first = flush(&mut tx, &parking);
    let mut recalled = None;
    tx.recall(|entry| recalled = Some(entry));
    let mut second = false;
    if let Some(entry) = recalled {
        tx.push(entry).unwrap();
        second = flush(&mut tx, &parking);
    }
    worker.join().unwrap();
    (recalled.is_some(), first, second)
}

#[test]
fn a_recall_while_the_worker_wakes() {
    let seen = explore(Bound::Exhaustive, || recalled_and_sent_again(Worker::RIGHT));
    let recalled =
        [(true, false, false), (true, false, true), (true, true, false), (true, true, true)];
    let claimed = [(false, false, false), (false, true, false)];
    assert_eq!(seen, recalled.into_iter().chain(claimed).collect());
}

#[test]
#[should_panic(expected = "deadlock")]
fn twin_a_recall_while_the_worker_sleeps_on() {
    let worker = Worker { announces_each_sleep: false, ..Worker::RIGHT };
    explore(Bound::Exhaustive, move || recalled_and_sent_again(worker));
}

/// The dispatcher sends two entries and pays the wake-up that it owes only after the second.
/// Returns whether each flush found the worker asleep.
fn owed(remembers: bool) -> [bool; 2] {
    let (mut tx, mut rx) = lane(2, Order::Right);
    let parking = Parking::new();
    let worker = thread::spawn({
        let parking = parking.clone();
        move || {
            let mut handled = 0;
            Worker::RIGHT.work(&mut rx, &parking, |run| {
                handled += run.len();
                handled < 2
            });
        }
    });
    let found = [0, 1].map(|number| {
        tx.push(number).unwrap();
        tx.flush()
    });
    if found[1] || (remembers && found[0]) {
        parking.unpark();
    }
    worker.join().unwrap();
    found
}

#[test]
fn an_owed_wake_up() {
    let found = explore(Bound::Exhaustive, || owed(true));
    // Both only if the worker woke up by itself in between, which loom tries once.
    let all = [[false, false], [false, true], [true, false], [true, true]];
    assert_eq!(found, BTreeSet::from(all));
}

#[test]
#[should_panic(expected = "deadlock")]
fn twin_an_owed_wake_up_that_is_forgotten() {
    explore(Bound::Exhaustive, || owed(false));
}

/// Either the worker is refused its sleep or the flush finds it asleep; and then the dispatcher sees
/// what the worker did before. Returns whether it slept.
fn announced(order: Order) -> bool {
    let (mut tx, mut rx) = lane(1, order);
    let effect = Rc::new(Effect::new());
    let worker = thread::spawn({
        let effect = Rc::clone(&effect);
        move || {
            effect.happen();
            rx.doze()
        }
    });
    tx.push(0).unwrap();
    let found = tx.flush();
    if found {
        effect.rely();
    }
    assert_eq!(worker.join().unwrap(), found);
    found
}

#[test]
fn a_sleep_is_found_or_refused() {
    assert_eq!(explore(Bound::Exhaustive, || announced(Order::Right)), [false, true].into());
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_sleep_found_without_order() {
    explore(Bound::Exhaustive, || announced(Order::WeakFlush));
}
