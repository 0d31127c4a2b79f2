//! The shared budget: windows take and give back at once, and the sum stays within the rule.
#![cfg(loom)]

use loom::thread;
use plimsoll_engine::internals::Flaw;
use plimsoll_engine::{Budget, Limits, Refused, Ticket, Window};
use plimsoll_loom_tests::{Bound, Spared, explore};
use std::collections::BTreeSet;

fn open(budget: &Budget) -> Spared<Window> {
    Spared::new(Window::open_with(0, &Limits::new(3).budget(budget)).unwrap())
}

/// Takes one more record of two bytes, if the budget has room, and checks the sum.
fn one_more(window: &mut Window, budget: &Budget) -> Option<Ticket> {
    let ticket = match window.admit_sized(1, 2) {
        Ok(ticket) => Some(ticket),
        Err(Refused::Budget { .. }) => None,
        Err(refused) => panic!("{refused}"),
    };
    assert!(budget.used() <= 6, "the share of a window is gone");
    ticket
}

/// Two windows hold their shares of 2 of 8 bytes. Both ask for 2 more at once: but the last 2 are
/// kept for whoever has not had his share, so there are 2 for one of them.
fn two_ask(flaw: Flaw) -> (bool, bool) {
    let budget = Budget::flawed(8, flaw);
    let [mut one, mut other] = [open(&budget), open(&budget)];
    let held = [one.admit_sized(0, 2).unwrap(), other.admit_sized(0, 2).unwrap()];
    let asking = thread::spawn({
        let budget = budget.clone();
        move || {
            let more = one_more(&mut other, &budget);
            (other, more)
        }
    });
    let own = one_more(&mut one, &budget);
    let (other, others) = asking.join().unwrap();
    let seen = (own.is_some(), others.is_some());
    assert_eq!(budget.used(), 6, "what one of them gets, and only one");
    drop((one, other));
    // Late tickets change nothing.
    drop((held, own, others));
    assert_eq!((budget.used(), budget.windows()), (0, 0));
    seen
}

/// A reader gives back, in two scans, while the window takes more and is dropped. Returns whether the second record
/// was taken, and what the reader found in use.
fn a_scan_beside(flaw: Flaw) -> (bool, u64) {
    let budget = Budget::flawed(4, flaw);
    let mut window = open(&budget);
    let watermark = window.watermark();
    let first = window.admit_sized(0, 3).unwrap();
    let reader = thread::spawn({
        let budget = budget.clone();
        move || {
            watermark.advance();
            watermark.advance();
            budget.used()
        }
    });
    first.finish();
    let second = window.admit_sized(1, 2);
    assert!(budget.used() <= 4, "more is in use than there is");
    let taken = second.is_ok();
    if let Ok(second) = second {
        window.admit_sized(2, 2).unwrap().finish();
        second.finish();
    }
    drop(window);
    let seen = reader.join().unwrap();
    assert_eq!((budget.used(), budget.windows()), (0, 0), "what a window held is free");
    (taken, seen)
}

#[test]
fn two_windows_ask_for_the_last_bytes() {
    let seen = explore(Bound::Preemptions(3), || two_ask(Flaw::None));
    assert_eq!(seen, BTreeSet::from([(true, false), (false, true)]));
}

#[test]
fn a_window_takes_and_ends_beside_a_scan() {
    let seen = explore(Bound::Preemptions(3), || a_scan_beside(Flaw::None));
    assert!(seen.contains(&(true, 0)) && seen.contains(&(false, 3)), "{seen:?}");
}

#[test]
#[should_panic(expected = "the share of a window is gone")]
fn twin_a_look_and_a_take_apart() {
    explore(Bound::Preemptions(3), || two_ask(Flaw::TwoSteps));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_note_that_is_not_published() {
    explore(Bound::Preemptions(3), || a_scan_beside(Flaw::MuteNotes));
}

#[test]
#[should_panic(expected = "more is in use than there is")]
fn twin_room_that_is_told_too_early() {
    explore(Bound::Preemptions(3), || a_scan_beside(Flaw::EarlyRoom));
}
