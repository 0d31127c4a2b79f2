//! Several readers of one watermark: it never goes down, and never stands above an unfinished record.
#![cfg(loom)]

use loom::thread;
use plimsoll_engine::{Progress, Ticket, Watermark, Window};
use plimsoll_loom_tests::{Bound, Handled, explore};
use std::collections::BTreeSet;
use std::rc::Rc;

const START: i64 = 10;

/// A worker finishes two records; one reader advances, waiting for its turn; another advances if it
/// is free and takes the published watermark if not. Returns what they saw last, and whether the
/// lock was ever taken.
fn two_readers(finish: fn(Ticket), advance: fn(&Watermark) -> Progress) -> (i64, i64, bool) {
    let mut window = Window::open(START, 2).unwrap();
    let handled = Handled::none_of(&[10, 15]);
    let tickets = [10, 15].map(|offset| (offset, window.admit(offset).unwrap()));
    let worker = thread::spawn({
        let handled = Rc::clone(&handled);
        move || {
            for (offset, ticket) in tickets {
                handled.handle(offset);
                finish(ticket);
            }
        }
    });
    let reader = thread::spawn({
        let (watermark, handled) = (window.watermark(), Rc::clone(&handled));
        move || {
            let seen = advance(&watermark).watermark;
            handled.rely_below(seen, START);
            // What this thread has seen is not taken back by the other one.
            assert!(watermark.get() >= seen, "the watermark went down");
            seen
        }
    });
    let watermark = window.watermark();
    let mut seen = START;
    let mut taken = false;
    for _ in 0..2 {
        // The look before also gives loom a place to stop at that is not the lock itself: a thread
        // that stands before a lock when another one takes it is not let go on until it is free.
        let before = watermark.get();
        let progress = watermark.try_advance();
        taken |= progress.is_none();
        let now = progress.map_or_else(|| watermark.get(), |progress| progress.watermark);
        assert!(now >= before && before >= seen, "the watermark went down");
        handled.rely_below(now, START);
        seen = now;
    }
    worker.join().unwrap();
    let other = reader.join().unwrap();
    assert!(watermark.get() >= seen.max(other));
    assert_eq!(watermark.advance().watermark, 16);
    (other, seen, taken)
}

#[test]
fn two_readers_at_once() {
    let seen = explore(Bound::Preemptions(4), || two_readers(Ticket::finish, Watermark::advance));
    let each = [10, 11, 16];
    let pairs: BTreeSet<_> = seen.iter().map(|(other, own, _)| (*other, *own)).collect();
    assert_eq!(pairs, each.iter().flat_map(|a| each.map(|b| (*a, b))).collect());
    // Both ways were gone: the lock was free, and it was taken.
    assert!(seen.iter().any(|(_, _, taken)| *taken) && seen.iter().any(|(_, _, taken)| !taken));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_finish_that_does_not_publish() {
    explore(Bound::Preemptions(4), || two_readers(Ticket::finish_weakly, Watermark::advance));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_watermark_that_does_not_publish() {
    explore(Bound::Preemptions(4), || two_readers(Ticket::finish, Watermark::advance_mutely));
}
