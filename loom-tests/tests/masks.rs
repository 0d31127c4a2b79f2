//! Tickets of a batch: finished by masks on two threads, around the end of the ring.
#![cfg(loom)]

use loom::thread;
use plimsoll_engine::{Tickets, Window};
use plimsoll_loom_tests::{Bound, Handled, explore};
use std::collections::BTreeSet;
use std::rc::Rc;

/// The batch begins at the ring's last slot.
const START: i64 = 12;

/// Three records: one thread finishes the outer ones by a mask, another one ends that in the middle,
/// which was split off. Returns the watermark and the failure that the reader saw.
fn split_batch(finish: fn(&mut Tickets, u64) -> u64, end: fn(Tickets)) -> (i64, Option<i64>) {
    let mut window = Window::open(10, 3).unwrap();
    let watermark = window.watermark();
    window.admit_batch(&[10, 11]).unwrap().finish_all();
    watermark.advance();
    let handled = Handled::none_of(&[12, 13, 20]);
    let mut outer = window.admit_batch(&[12, 13, 20]).unwrap();
    assert_eq!(outer.len(), 3);
    let middle = outer.split_off(0b010);
    let finisher = thread::spawn({
        let handled = Rc::clone(&handled);
        move || {
            handled.handle(12);
            handled.handle(20);
            assert_eq!(finish(&mut outer, u64::MAX), 0b101);
            assert_eq!(outer.finish_mask(u64::MAX), 0, "twice");
        }
    });
    let ender = thread::spawn({
        let handled = Rc::clone(&handled);
        move || {
            handled.handle(13);
            end(middle);
        }
    });
    let seen = watermark.advance();
    handled.rely_below(seen.watermark, START);
    if let Some(failed) = seen.failed {
        handled.effect(failed).rely();
    }
    finisher.join().unwrap();
    ender.join().unwrap();
    let last = watermark.advance();
    handled.rely_below(last.watermark, START);
    if last.failed.is_some() || seen.failed.is_some() {
        assert_eq!((last.watermark, last.failed), (13, Some(13)));
    }
    (seen.watermark, seen.failed)
}

fn lose(tickets: Tickets) {
    drop(tickets);
}

/// Loses it, and must find that the watermark stays below.
fn lost(end: fn(Tickets)) -> (i64, Option<i64>) {
    let seen = split_batch(Tickets::finish_mask, end);
    assert!(seen.0 <= 13, "watermark {} has passed the lost record", seen.0);
    seen
}

#[test]
fn masks_from_two_threads() {
    let seen =
        explore(Bound::Exhaustive, || split_batch(Tickets::finish_mask, Tickets::finish_all));
    assert_eq!(seen, BTreeSet::from([12, 13, 14, 21].map(|at| (at, None))));
}

#[test]
fn what_is_not_finished_has_failed() {
    let seen = explore(Bound::Exhaustive, || lost(lose));
    assert_eq!(seen, BTreeSet::from([(12, None), (13, None), (13, Some(13))]));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_mask_that_does_not_publish() {
    explore(Bound::Exhaustive, || split_batch(Tickets::finish_mask_weakly, Tickets::finish_all));
}

#[test]
#[should_panic(expected = "has passed the lost record")]
fn twin_a_drop_that_counts_as_success() {
    explore(Bound::Exhaustive, || lost(Tickets::finish_all));
}
