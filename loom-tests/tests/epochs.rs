//! Epochs: what ends late in an old one touches nothing but the orphan.
#![cfg(loom)]

use loom::thread;
use plimsoll_engine::{Ticket, Window};
use plimsoll_loom_tests::{Bound, Handled, explore};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;

const START: i64 = 10;
const OFFSETS: [i64; 2] = [10, 15];
const SHOWS: &str = "a failure of the old epoch shows in the new one";

/// The tickets of the running handlers of an epoch, by offset.
type Running = Rc<RefCell<Vec<(i64, Option<Ticket>)>>>;

/// How the completion of a record finds what it has to mark.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Completion {
    /// By the ticket that came with it.
    ByTicket,
    /// The mistake: by its offset, in the epoch that its partition is in at that moment.
    ByOffset,
}

/// A partition is revoked while a handler runs, and assigned again from the same offset on. The
/// handler of the old epoch ends late, one way or another, while the new one's records are handled
/// and its watermark advances. Returns both watermarks as the reader saw them.
fn assigned_again(completion: Completion, end: fn(Ticket)) -> (i64, i64) {
    let mut old = Window::open(START, 2).unwrap();
    let late = OFFSETS.map(|offset| (offset, old.admit(offset).unwrap()));
    let mut new = Window::open(START, 2).unwrap();
    let handled = Handled::none_of(&OFFSETS);
    let running: Running = Rc::default();
    for offset in OFFSETS {
        running.borrow_mut().push((offset, Some(new.admit(offset).unwrap())));
    }
    let old_worker = thread::spawn({
        let running = Rc::clone(&running);
        move || {
            for (offset, ticket) in late {
                match completion {
                    Completion::ByTicket => end(ticket),
                    Completion::ByOffset => take(&running, offset).into_iter().for_each(end),
                }
            }
        }
    });
    let new_worker = thread::spawn({
        let handled = Rc::clone(&handled);
        move || {
            for offset in OFFSETS {
                handled.handle(offset);
                take(&running, offset).into_iter().for_each(Ticket::finish);
            }
        }
    });
    let seen = new.watermark().advance();
    handled.rely_below(seen.watermark, START);
    assert_eq!(seen.failed, None, "{SHOWS}");
    let orphan = old.watermark().advance();
    old_worker.join().unwrap();
    new_worker.join().unwrap();
    let last = new.watermark().advance();
    assert_eq!((last.watermark, last.failed, last.unfinished), (16, None, 0), "{SHOWS}");
    handled.rely_below(last.watermark, START);
    (orphan.watermark, seen.watermark)
}

fn take(running: &Running, offset: i64) -> Option<Ticket> {
    let mut running = running.borrow_mut();
    running.iter_mut().find(|(at, _)| *at == offset)?.1.take()
}

#[test]
fn late_completions_of_an_old_epoch() {
    let seen = explore(Bound::Exhaustive, || assigned_again(Completion::ByTicket, Ticket::finish));
    let each = [10, 11, 16];
    assert_eq!(seen, each.iter().flat_map(|a| each.map(|b| (*a, b))).collect());
}

#[test]
fn late_drops_of_an_old_epoch() {
    let seen = explore(Bound::Exhaustive, || assigned_again(Completion::ByTicket, drop));
    assert_eq!(seen, BTreeSet::from([(10, 10), (10, 11), (10, 16)]));
}

#[test]
#[should_panic(expected = "relied on what has not happened")]
fn twin_a_late_completion_by_offset() {
    explore(Bound::Exhaustive, || assigned_again(Completion::ByOffset, Ticket::finish));
}

#[test]
#[should_panic(expected = "a failure of the old epoch shows in the new one")]
fn twin_a_late_drop_by_offset() {
    explore(Bound::Exhaustive, || assigned_again(Completion::ByOffset, drop));
}
