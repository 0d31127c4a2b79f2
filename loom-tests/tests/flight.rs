//! The end of a flight: its two halves come from two threads, and a success is marked before it is sent.
#![cfg(loom)]

use loom::thread;
use plimsoll_engine::internals::{Air, Reporter};
use plimsoll_engine::{Task, Waiter, Window};
use plimsoll_loom_tests::{Bound, Effect, Handled, explore};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

const START: i64 = 10;

/// A record whose guard is dropped by one thread and whose success is reported by another, while the
/// dispatcher sleeps unless something is there. Returns how often it looked.
fn two_halves(drop_guard: fn(Task<u8>), report: fn(Reporter<u8>)) -> usize {
    let waiter = Waiter::new();
    let mut window = Window::open(START, 2).unwrap();
    let watermark = window.watermark();
    let handled = Handled::none_of(&[START]);
    let guarded = Rc::new(Effect::new());
    let (mut air, task, reporter) = Air::depart(&mut window, START, 7, waiter.waker());
    let guard = thread::spawn({
        let guarded = Rc::clone(&guarded);
        move || {
            guarded.happen();
            drop_guard(task);
        }
    });
    let future = thread::spawn({
        let handled = Rc::clone(&handled);
        move || {
            handled.handle(START);
            report(reporter);
        }
    });
    let mut looks = 0;
    let record = loop {
        looks += 1;
        if let Some(record) = air.land() {
            break record;
        }
        // Without a limit in the model: a lost wake-up is a deadlock.
        waiter.wait(Duration::MAX, || air.has_ends());
    };
    assert_eq!(record, 7);
    // The next record of the key may start: all that this one did is visible.
    guarded.rely();
    handled.effect(START).rely();
    let seen = watermark.advance().watermark;
    assert_eq!(seen, START + 1, "it has ended, and was not marked");
    guard.join().unwrap();
    future.join().unwrap();
    looks
}

/// A window of one place: its first record's success lets the second have the place while the end of the
/// first is still on its way. Returns whether that happened.
fn place_used_again(land: fn(&mut Air<u8>)) -> bool {
    let waiter = Waiter::new();
    let mut window = Window::open(START, 1).unwrap();
    let watermark = window.watermark();
    let (mut air, task, reporter) = Air::depart(&mut window, START, 7, waiter.waker());
    let first = thread::spawn(move || {
        reporter.done();
        drop(task);
    });
    watermark.advance();
    if window.room() == 0 {
        first.join().unwrap();
        land(&mut air);
        assert_eq!(watermark.advance().watermark, START + 1);
        return false;
    }
    let ticket = window.admit(START + 1).unwrap();
    let second = thread::spawn(move || ticket.finish());
    land(&mut air);
    first.join().unwrap();
    land(&mut air);
    second.join().unwrap();
    let end = watermark.advance();
    assert_eq!(end.watermark, START + 2, "the second record's mark is lost");
    true
}

#[test]
fn both_halves_and_one_wake_up() {
    let looks = explore(Bound::Preemptions(3), || two_halves(drop, Reporter::done));
    assert!(looks.contains(&1) && looks.contains(&2), "{looks:?}");
}

#[test]
fn a_place_is_used_again_while_its_end_travels() {
    let used = explore(Bound::Exhaustive, || {
        place_used_again(|air| {
            air.land();
        })
    });
    assert_eq!(used, BTreeSet::from([false, true]));
}

#[test]
#[should_panic(expected = "deadlock")]
fn twin_a_half_that_is_announced_before_it_is_sent() {
    explore(Bound::Preemptions(3), || two_halves(Task::drop_late, Reporter::done_late));
}

#[test]
#[should_panic(expected = "it has ended, and was not marked")]
fn twin_a_success_that_is_marked_after_it_is_sent() {
    explore(Bound::Preemptions(3), || two_halves(drop, Reporter::done_before_the_mark));
}

#[test]
#[should_panic(expected = "the second record's mark is lost")]
fn twin_a_dispatcher_that_marks_too() {
    explore(Bound::Exhaustive, || {
        place_used_again(|air| {
            if air.land().is_some() {
                air.mark_again();
            }
        })
    });
}
