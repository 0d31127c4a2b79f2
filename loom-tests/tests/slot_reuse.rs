//! Slot reuse: a slot is written again only after the scan has read it for the last time, and a
//! flag of an earlier lap is never taken for one of this lap.
#![cfg(loom)]

use loom::thread;
use plimsoll_engine::{Progress, Refused, Ticket, Watermark, Window};
use plimsoll_loom_tests::{Bound, Handled, explore};
use std::collections::BTreeSet;
use std::rc::Rc;

const START: i64 = 10;
/// None is the next after the one before, so that each takes a place among the jumps, too.
const OFFSETS: [i64; 4] = [12, 15, 20, 31];

type Advance = fn(&Watermark) -> Progress;
type Admit = fn(&mut Window, i64) -> Result<Ticket, Refused>;

/// A reader that advances `times` times and relies on each watermark.
fn reader(
    watermark: Watermark,
    handled: Rc<Handled>,
    advance: Advance,
    times: usize,
) -> thread::JoinHandle<()> {
    thread::spawn(move || {
        let mut before = START;
        for _ in 0..times {
            let progress = advance(&watermark);
            assert!(progress.watermark >= before, "the watermark went down");
            assert_eq!(progress.failed, None);
            handled.rely_below(progress.watermark, START);
            before = progress.watermark;
        }
    })
}

/// Admits, handles and finishes up to `most` records, `tries` times at most; returns how many.
fn admit_and_finish(
    window: &mut Window,
    handled: &Handled,
    admit: Admit,
    from: usize,
    tries: usize,
) -> usize {
    let mut next = from;
    for _ in 0..tries {
        if next == OFFSETS.len() || window.fresh_room() == 0 {
            continue;
        }
        let ticket = admit(window, OFFSETS[next]).unwrap();
        assert_eq!(ticket.offset(), OFFSETS[next]);
        handled.handle(OFFSETS[next]);
        ticket.finish();
        next += 1;
    }
    next
}

/// One thread admits and finishes, several laps around `capacity` slots; another advances.
fn laps(capacity: u32, tries: usize, times: usize, advance: Advance) -> usize {
    laps_admitting(Window::admit, capacity, tries, times, advance)
}

fn laps_admitting(
    admit: Admit,
    capacity: u32,
    tries: usize,
    times: usize,
    advance: Advance,
) -> usize {
    let mut window = Window::open(START, capacity).unwrap();
    let watermark = window.watermark();
    let handled = Handled::none_of(&OFFSETS);
    let reader = reader(watermark.clone(), Rc::clone(&handled), advance, times);
    let admitted = admit_and_finish(&mut window, &handled, admit, 0, tries);
    reader.join().unwrap();
    let last = watermark.advance();
    assert_eq!(last.watermark, OFFSETS[admitted - 1] + 1);
    assert_eq!((last.passed, last.unfinished), (admitted as u64, 0));
    admitted
}

#[test]
fn one_slot() {
    let admitted = explore(Bound::Exhaustive, || laps(1, 3, 3, Watermark::advance));
    assert_eq!(admitted, BTreeSet::from([1, 2, 3]));
}

#[test]
fn two_slots() {
    let admitted = explore(Bound::Exhaustive, || laps(2, 3, 2, Watermark::advance));
    assert_eq!(admitted, BTreeSet::from([2, 3]));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_one_slot_given_back_without_release() {
    explore(Bound::Exhaustive, || laps(1, 3, 3, Watermark::advance_weakly));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_two_slots_given_back_without_release() {
    explore(Bound::Exhaustive, || laps(2, 3, 2, Watermark::advance_weakly));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_slot_given_back_too_early() {
    explore(Bound::Exhaustive, || laps(1, 3, 3, Watermark::advance_early));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_jump_that_is_not_published() {
    explore(Bound::Exhaustive, || {
        laps_admitting(Window::admit_weakly, 2, 3, 2, Watermark::advance)
    });
}

/// As `laps`, but the first record is finished by a worker, so that the scan of one lap may meet
/// flags of two, set in any order. `admit` is asked without looking at the room first.
fn laps_with_worker(finish: fn(Ticket), advance: Advance) -> usize {
    let mut window = Window::open(START, 2).unwrap();
    let watermark = window.watermark();
    let handled = Handled::none_of(&OFFSETS);
    let first = window.admit(OFFSETS[0]).unwrap();
    let worker = thread::spawn({
        let handled = Rc::clone(&handled);
        move || {
            handled.handle(OFFSETS[0]);
            finish(first);
        }
    });
    let reader = reader(watermark.clone(), Rc::clone(&handled), advance, 2);
    let mut admitted = 1;
    for offset in &OFFSETS[1..3] {
        match window.admit(*offset) {
            Ok(ticket) => {
                handled.handle(*offset);
                ticket.finish();
                admitted += 1;
            }
            Err(refused) => assert_eq!(refused, Refused::Full { capacity: 2 }),
        }
    }
    worker.join().unwrap();
    reader.join().unwrap();
    let last = watermark.advance();
    assert_eq!((last.watermark, last.unfinished), (OFFSETS[admitted - 1] + 1, 0));
    admitted
}

#[test]
fn two_slots_and_a_worker() {
    let admitted =
        explore(Bound::Preemptions(4), || laps_with_worker(Ticket::finish, Watermark::advance));
    assert_eq!(admitted, BTreeSet::from([2, 3]));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_worker_that_does_not_publish() {
    explore(Bound::Preemptions(4), || laps_with_worker(Ticket::finish_weakly, Watermark::advance));
}

#[test]
#[should_panic(expected = "Causality violation")]
fn twin_a_slot_and_a_worker_given_back_without_release() {
    explore(Bound::Preemptions(4), || laps_with_worker(Ticket::finish, Watermark::advance_weakly));
}
