//! Flags and watermark: what a handler did is visible to whoever sees the watermark past its record.
#![cfg(loom)]

use loom::thread;
use plimsoll_engine::{Progress, Ticket, Watermark, Window};
use plimsoll_loom_tests::{Bound, Handled, explore};
use std::collections::BTreeSet;
use std::rc::Rc;

const START: i64 = 10;

/// Two workers finish a record each while the reader advances. Returns the watermark it saw.
fn two_workers(finish: fn(Ticket)) -> i64 {
    let mut window = Window::open(START, 2).unwrap();
    let watermark = window.watermark();
    let handled = Handled::none_of(&[10, 15]);
    let workers = [10, 15].map(|offset| {
        let (ticket, handled) = (window.admit(offset).unwrap(), Rc::clone(&handled));
        thread::spawn(move || {
            handled.handle(offset);
            finish(ticket);
        })
    });
    let seen = watermark.advance();
    handled.rely_below(seen.watermark, START);
    assert_eq!(seen.unfinished + seen.advanced, 2);
    for worker in workers {
        worker.join().unwrap();
    }
    let last = watermark.advance();
    assert_eq!((last.watermark, last.passed, last.unfinished), (16, 2, 0));
    seen.watermark
}

#[test]
fn effects_come_with_the_watermark() {
    let seen = explore(Bound::Exhaustive, || two_workers(Ticket::finish));
    // Not 16 only: the reader also came too early, and between the two.
    assert_eq!(seen, BTreeSet::from([10, 11, 16]));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_finish_that_does_not_publish() {
    explore(Bound::Exhaustive, || two_workers(Ticket::finish_weakly));
}

/// A worker finishes two records, the last one first; one thread advances; another reads the
/// published watermark only. Returns what that one saw.
fn bystander(advance: fn(&Watermark) -> Progress) -> i64 {
    let mut window = Window::open(START, 2).unwrap();
    let watermark = window.watermark();
    let handled = Handled::none_of(&[10, 15]);
    let first = window.admit(10).unwrap();
    let second = window.admit(15).unwrap();
    let worker = thread::spawn({
        let handled = Rc::clone(&handled);
        move || {
            handled.handle(15);
            second.finish();
            handled.handle(10);
            first.finish();
        }
    });
    let reader = thread::spawn({
        let watermark = watermark.clone();
        move || advance(&watermark).watermark
    });
    let seen = watermark.get();
    handled.rely_below(seen, START);
    worker.join().unwrap();
    assert!(seen <= reader.join().unwrap());
    seen
}

#[test]
fn effects_come_with_the_published_watermark() {
    let seen = explore(Bound::Exhaustive, || bystander(Watermark::advance));
    assert_eq!(seen, BTreeSet::from([10, 16]));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_watermark_that_does_not_publish() {
    explore(Bound::Exhaustive, || bystander(Watermark::advance_mutely));
}
