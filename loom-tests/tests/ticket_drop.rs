//! A ticket that is dropped unfinished: the watermark stops below its record and names it.
#![cfg(loom)]

use loom::thread;
use plimsoll_engine::{Ticket, Window};
use plimsoll_loom_tests::{Bound, Handled, explore};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;

const START: i64 = 10;

/// Three records: the first and the last are finished by one worker, that in the middle is lost by
/// another, which has begun its work. Returns the watermark and the failure that the reader saw,
/// `while_losing` or after the second worker has ended.
fn lost_between(while_losing: bool, lose: fn(Ticket)) -> (i64, Option<i64>) {
    let mut window = Window::open(START, 3).unwrap();
    let watermark = window.watermark();
    let handled = Handled::none_of(&[10, 15, 16]);
    let [first, lost, last] = [10, 15, 16].map(|offset| window.admit(offset).unwrap());
    let finisher = thread::spawn({
        let handled = Rc::clone(&handled);
        move || {
            handled.handle(16);
            last.finish();
            handled.handle(10);
            first.finish();
        }
    });
    let loser = thread::spawn({
        let handled = Rc::clone(&handled);
        move || {
            // The attempt had effects, and then it failed.
            handled.handle(15);
            lose(lost);
        }
    });
    let check = |watermark: i64, failed: Option<i64>| {
        assert!(watermark <= 11, "watermark {watermark} has passed the lost record");
        handled.rely_below(watermark, START);
        if let Some(failed) = failed {
            assert_eq!((watermark, failed), (11, 15));
            // Whoever learns of the failure may look at what the attempt left behind.
            handled.effect(15).rely();
        }
    };
    let seen = if while_losing {
        let seen = watermark.advance();
        check(seen.watermark, seen.failed);
        loser.join().unwrap();
        seen
    } else {
        loser.join().unwrap();
        watermark.advance()
    };
    check(seen.watermark, seen.failed);
    finisher.join().unwrap();
    let end = watermark.advance();
    check(end.watermark, end.failed);
    assert_eq!((end.watermark, end.failed, end.unfinished), (11, Some(15), 2));
    assert_eq!(watermark.get(), 11);
    (seen.watermark, seen.failed)
}

/// A handler that owns `ticket` panics.
fn unwind(ticket: impl Sized) {
    let ended = catch_unwind(AssertUnwindSafe(move || {
        let _held = ticket;
        // As a panic, but without its message.
        resume_unwind(Box::new("the handler panicked"));
    }));
    assert!(ended.is_err());
}

/// The mistake: a ticket whose drop counts as success.
struct Lenient(Option<Ticket>);

impl Drop for Lenient {
    fn drop(&mut self) {
        if let Some(ticket) = self.0.take() {
            ticket.finish();
        }
    }
}

#[test]
fn a_dropped_ticket_holds_the_watermark() {
    let seen = explore(Bound::Exhaustive, || lost_between(true, drop));
    assert_eq!(seen, BTreeSet::from([(10, None), (11, None), (11, Some(15))]));
}

/// loom must not switch to a thread that holds a lock while another one unwinds (the lock would
/// count as poisoned), so the reader waits until the unwinding is over.
#[test]
fn an_unwound_ticket_holds_the_watermark() {
    let seen = explore(Bound::Exhaustive, || lost_between(false, unwind));
    assert_eq!(seen, BTreeSet::from([(10, None), (11, Some(15))]));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_drop_that_does_not_publish() {
    explore(Bound::Exhaustive, || lost_between(true, Ticket::drop_weakly));
}

#[test]
#[should_panic(expected = "has passed the lost record")]
fn twin_a_drop_that_counts_as_success() {
    explore(Bound::Exhaustive, || lost_between(true, |ticket| drop(Lenient(Some(ticket)))));
}

#[test]
#[should_panic(expected = "has passed the lost record")]
fn twin_an_unwinding_that_counts_as_success() {
    explore(Bound::Exhaustive, || lost_between(false, |ticket| unwind(Lenient(Some(ticket)))));
}
