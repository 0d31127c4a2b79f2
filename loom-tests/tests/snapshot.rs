//! Snapshots: the watermark and what is done above it are from one moment.
#![cfg(loom)]

use loom::thread;
use plimsoll_engine::{Progress, Snapshot, Ticket, Watermark, Window};
use plimsoll_loom_tests::{Bound, Handled, explore};
use std::collections::BTreeSet;
use std::rc::Rc;

const START: i64 = 10;

/// A worker finishes the second of two records and then the first, another record is admitted behind
/// a gap, and a committer takes a snapshot meanwhile. Returns what it holds.
fn one_moment(
    finish: fn(Ticket),
    take: fn(&Watermark, &mut Snapshot) -> Progress,
) -> (i64, Vec<i64>) {
    let mut window = Window::open(START, 3).unwrap();
    let watermark = window.watermark();
    let handled = Handled::none_of(&[10, 15, 20]);
    let tickets = [10, 15].map(|offset| window.admit(offset).unwrap());
    let worker = thread::spawn({
        let handled = Rc::clone(&handled);
        move || {
            for ticket in tickets.into_iter().rev() {
                handled.handle(ticket.offset());
                finish(ticket);
            }
        }
    });
    let committer = thread::spawn({
        let handled = Rc::clone(&handled);
        move || {
            let mut snapshot = Snapshot::new();
            take(&watermark, &mut snapshot);
            handled.rely_below(snapshot.watermark(), START);
            for offset in snapshot.offsets() {
                assert!(offset >= snapshot.watermark(), "{offset} is listed below the watermark");
                handled.effect(offset).rely();
            }
            (snapshot.watermark(), snapshot.offsets().collect())
        }
    });
    let last = window.admit(20).unwrap();
    handled.handle(20);
    finish(last);
    worker.join().unwrap();
    let seen = committer.join().unwrap();
    let mut snapshot = Snapshot::new();
    window.watermark().snapshot(&mut snapshot);
    assert_eq!((snapshot.watermark(), snapshot.done().len()), (21, 0));
    seen
}

#[test]
fn a_snapshot_is_of_one_moment() {
    let seen = explore(Bound::Preemptions(4), || one_moment(Ticket::finish, Watermark::snapshot));
    let all = [(10, vec![]), (10, vec![15]), (10, vec![15, 20]), (10, vec![20])];
    let more = [(16, vec![]), (16, vec![20]), (21, vec![])];
    let expected: BTreeSet<_> = all.into_iter().chain(more).collect();
    assert!(seen.is_subset(&expected), "{seen:?}");
    for needed in [(10, vec![]), (10, vec![15, 20]), (16, vec![]), (21, vec![])] {
        assert!(seen.contains(&needed), "{needed:?}");
    }
}

#[test]
#[should_panic(expected = "is listed below the watermark")]
fn twin_a_snapshot_of_two_moments() {
    explore(Bound::Preemptions(4), || one_moment(Ticket::finish, Watermark::snapshot_in_two));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_finish_that_does_not_publish() {
    explore(Bound::Preemptions(4), || one_moment(Ticket::finish_weakly, Watermark::snapshot));
}
