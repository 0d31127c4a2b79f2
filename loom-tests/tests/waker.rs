//! Waiter and waker: either the sleeper sees the work or the waker sees the sleeper.
#![cfg(loom)]

use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use plimsoll_engine::{Limits, Refused, Ticket, Waiter, Waker, Window};
use plimsoll_loom_tests::{Bound, Spared, explore};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

/// Wakes without a deadline in the model.
const LIMIT: Duration = Duration::from_millis(1);

/// Another thread makes `pieces` of work, waking the driving thread for each; the driving thread
/// sleeps while there is nothing new. Only wake-ups end a sleep: one that is lost is a deadlock.
/// Returns how often it slept, or was about to.
fn work_arrives(
    pieces: u32,
    wait: fn(&Waiter, Duration, &dyn Fn() -> bool),
    wake: fn(&Waker),
) -> u32 {
    let waiter = Spared::new(Waiter::new());
    let waker = Spared::new(waiter.waker());
    let made = Rc::new(AtomicU32::new(0));
    let maker = thread::spawn({
        let made = Rc::clone(&made);
        move || {
            for _ in 0..pieces {
                // Relaxed: the order is the waker's affair.
                made.fetch_add(1, Ordering::Relaxed);
                wake(&waker);
            }
        }
    });
    let (mut seen, mut waits) = (0, 0);
    while seen < pieces {
        wait(&waiter, LIMIT, &|| made.load(Ordering::Relaxed) != seen);
        waits += 1;
        seen = made.load(Ordering::Relaxed);
    }
    maker.join().unwrap();
    waits
}

fn wait(waiter: &Waiter, limit: Duration, ready: &dyn Fn() -> bool) {
    waiter.wait(limit, ready);
}

fn wait_weakly(waiter: &Waiter, limit: Duration, ready: &dyn Fn() -> bool) {
    waiter.wait_weakly(limit, ready);
}

#[test]
fn no_wake_up_is_lost() {
    let waits = explore(Bound::Exhaustive, || work_arrives(1, wait, Waker::wake));
    // More than once: loom's parker wakes up without a reason once per execution.
    assert_eq!(waits, BTreeSet::from([1, 2]));
}

/// The second time the waiter's announcement of the first may still be there, or the waker's token.
#[test]
fn no_second_wake_up_is_lost() {
    let waits = explore(Bound::Exhaustive, || work_arrives(2, wait, Waker::wake));
    assert!(waits.contains(&1) && waits.contains(&2), "{waits:?}");
}

#[test]
#[should_panic(expected = "deadlock")]
fn twin_a_waker_without_a_fence() {
    explore(Bound::Exhaustive, || work_arrives(1, wait, Waker::wake_weakly));
}

#[test]
#[should_panic(expected = "deadlock")]
fn twin_a_waiter_without_a_fence() {
    explore(Bound::Exhaustive, || work_arrives(1, wait_weakly, Waker::wake));
}

/// A window of one record is full; another thread ends that record. The driving thread, whose next
/// record was refused, sleeps until there is room. Returns how often it slept, or was about to.
fn room_comes(wait: fn(&Window, &Waiter, Duration) -> bool, finish: fn(Ticket)) -> u32 {
    let waiter = Spared::new(Waiter::new());
    let limits = Limits::new(1).waker(waiter.waker());
    let mut window = Spared::new(Window::open_with(0, &limits).unwrap());
    let first = window.admit(0).unwrap();
    let handler = thread::spawn(move || finish(first));
    let mut waits = 0;
    let second = loop {
        match window.admit(1) {
            Ok(ticket) => break ticket,
            Err(refused) => assert_eq!(refused, Refused::Full { capacity: 1 }),
        }
        wait(&window, &waiter, LIMIT);
        waits += 1;
    };
    second.finish();
    handler.join().unwrap();
    waits
}

#[test]
fn who_was_refused_is_woken() {
    let waits = explore(Bound::Exhaustive, || room_comes(Window::wait_room, Ticket::finish));
    assert!(waits.contains(&1), "{waits:?}");
}

#[test]
#[should_panic(expected = "deadlock")]
fn twin_a_ticket_that_wakes_without_a_fence() {
    explore(Bound::Exhaustive, || room_comes(Window::wait_room, Ticket::finish_quietly));
}

#[test]
#[should_panic(expected = "deadlock")]
fn twin_a_refused_thread_without_a_fence() {
    explore(Bound::Exhaustive, || room_comes(Window::wait_room_weakly, Ticket::finish));
}
