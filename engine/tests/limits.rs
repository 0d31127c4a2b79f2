//! Limits on bytes and offsets, the shared budget, restored done-maps and moves: of a window alone and
//! through the executor.

use plimsoll_engine::{Budget, Executor, Limits, Refused, Route, Snapshot, Ticket, Waiter, Window};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

#[test]
fn b53_limits_are_checked_when_a_window_is_opened() {
    let refused = |limits: Limits| Window::open_with(0, &limits).unwrap_err().to_string();
    assert!(refused(Limits::new(0)).contains("`window`"));
    assert!(refused(Limits::new(1).bytes(0)).contains("`bytes`"));
    assert!(refused(Limits::new(1).span(0)).contains("`span`"));
    assert!(Budget::new(0).unwrap_err().to_string().contains("`budget`"));
    let budget = Budget::new(u64::MAX).unwrap();
    let limits = Limits::new(2).bytes(u64::MAX).span(u64::MAX).budget(&budget);
    let mut window = Window::open_with(0, &limits).unwrap();
    window.admit_sized(0, u32::MAX).unwrap().finish();
    window.admit_sized(i64::MAX - 1, u32::MAX).unwrap().finish();
    assert_eq!(window.watermark().advance().watermark, i64::MAX);
    assert_eq!((window.held_bytes(), budget.used()), (0, 0));
    // A window that cannot be opened is none of the budget's.
    assert!(Window::open_with(-1, &limits).is_err());
    assert_eq!(budget.windows(), 1);
}

#[test]
fn a_batch_may_be_empty_cut_short_or_refused() {
    let mut window = Window::open(0, 3).unwrap();
    assert!(window.admit_batch(&[]).unwrap().is_empty());
    let tickets = window.admit_batch(&[0, 1, 2, 3]).unwrap();
    assert_eq!((tickets.len(), tickets.open()), (3, 0b111));
    assert_eq!(window.admit_batch(&[3]).unwrap_err(), Refused::Full { capacity: 3 });
    tickets.finish_all();
    let mut window = Window::open(0, 100).unwrap();
    let offsets: Vec<_> = (0..70).collect();
    let tickets = window.admit_batch(&offsets).unwrap();
    assert_eq!((tickets.len(), tickets.open()), (64, u64::MAX));
    drop(tickets);
    assert_eq!(window.watermark().advance().failed, Some(0));
}

#[test]
fn a_record_above_a_limit_is_admitted_alone() {
    let mut window = Window::open_with(0, &Limits::new(8).bytes(100).span(10)).unwrap();
    let watermark = window.watermark();
    let giant = window.admit_sized(0, 1_000).unwrap();
    let refused = window.admit_sized(1, 1).unwrap_err();
    assert_eq!(refused, Refused::Bytes { bytes: 1, held: 1_000, limit: 100 });
    giant.finish();
    assert!(window.admit_sized(1, 1).is_err(), "bytes come back with the watermark");
    watermark.advance();
    let small = window.admit_sized(1, 1).unwrap();
    assert!(window.admit_sized(2, 1_000).is_err(), "something else is held");
    let refused = window.admit_sized(12, 1).unwrap_err();
    assert_eq!(refused, Refused::Span { offset: 12, watermark: 1, span: 10 });
    small.finish();
    watermark.advance();
    // Behind a gap that is larger than the span.
    let far = window.admit_sized(1 << 40, 1_000).unwrap();
    far.finish();
    assert_eq!(watermark.advance().watermark, (1 << 40) + 1);
}

/// Many small records under a large limit: bytes come back in parts, a 64th of the limit late at most.
#[test]
fn bytes_come_back_in_parts_and_wholly_when_the_window_is_empty() {
    let budget = Budget::new(1 << 20).unwrap();
    let limits = Limits::new(100_000).bytes(1 << 16).budget(&budget);
    let mut window = Window::open_with(0, &limits).unwrap();
    let watermark = window.watermark();
    let mut held: VecDeque<(Ticket, u64)> = VecDeque::new();
    let mut bytes = 0;
    let mut refusals = 0;
    let mut offset = 0;
    for round in 0..50_000_u64 {
        let size = 1 + round * 7_919 % 97;
        match window.admit_sized(offset, size as u32) {
            Ok(ticket) => {
                held.push_back((ticket, size));
                bytes += size;
                offset += 1;
            }
            Err(Refused::Bytes { held, limit, .. }) => {
                refusals += 1;
                assert!(held + size > limit && held >= bytes);
            }
            Err(refused) => panic!("{refused}"),
        }
        if round % 1_000 > 900 {
            for (ticket, size) in held.drain(..held.len().min(9)) {
                ticket.finish();
                bytes -= size;
            }
            watermark.advance();
            assert!((bytes..=bytes + (1 << 10) + 97).contains(&window.held_bytes()));
            assert_eq!(window.held_bytes(), budget.used());
        }
    }
    assert!(refusals > 100, "the limit is met");
    held.drain(..).for_each(|(ticket, _)| ticket.finish());
    watermark.advance();
    assert_eq!((window.held_bytes(), budget.used()), (0, 0));
}

#[test]
fn b21_a_closed_window_gives_its_bytes_back_and_late_tickets_change_nothing() {
    let budget = Budget::new(1_000).unwrap();
    let limits = Limits::new(16).budget(&budget);
    for _ in 0..100 {
        let mut window = Window::open_with(0, &limits).unwrap();
        let watermark = window.watermark();
        let tickets: Vec<_> =
            (0..10).map(|offset| window.admit_sized(offset, 50).unwrap()).collect();
        assert_eq!((budget.used(), budget.windows()), (500, 1));
        drop(window);
        assert_eq!((budget.used(), budget.windows()), (0, 0));
        tickets.into_iter().for_each(Ticket::finish);
        assert_eq!(watermark.advance().watermark, 10);
        assert_eq!(budget.used(), 0);
    }
}

#[derive(Debug, Clone)]
enum Step {
    Admit(usize, u32),
    Finish(usize),
    Advance(usize),
    Reopen(usize),
}

const WINDOWS: usize = 4;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0..WINDOWS, 0..60_u32).prop_map(|(at, bytes)| Step::Admit(at, bytes)),
        1 => (0..WINDOWS, 0..300_u32).prop_map(|(at, bytes)| Step::Admit(at, bytes)),
        4 => (0..WINDOWS).prop_map(Step::Finish),
        3 => (0..WINDOWS).prop_map(Step::Advance),
        1 => (0..WINDOWS).prop_map(Step::Reopen),
    ];
    prop::collection::vec(step, 1..300)
}

proptest! {
    /// The rule of the budget, by its three sentences, on what the windows hold by their watermarks.
    #[test]
    fn the_budget_is_its_rule(total in 1..128_u64, steps in steps()) {
        let budget = Budget::new(total).unwrap();
        let limits = Limits::new(1_000).budget(&budget);
        let open = || Window::open_with(0, &limits).unwrap();
        let mut windows: Vec<_> = (0..WINDOWS).map(|_| open()).collect();
        // Bytes that each holds, record by record, and whether finished.
        let mut held: Vec<VecDeque<(u64, Option<Ticket>)>> =
            (0..WINDOWS).map(|_| VecDeque::new()).collect();
        let mut next = [0; WINDOWS];
        let share = total / 2 / WINDOWS as u64;
        let mut largest_alone = [0; WINDOWS];
        let sum = |held: &VecDeque<(u64, _)>| held.iter().map(|(bytes, _)| bytes).sum::<u64>();
        for step in steps {
            match step {
                Step::Admit(at, bytes) => {
                    let (own, used) = (sum(&held[at]), held.iter().map(sum).sum::<u64>());
                    let size = u64::from(bytes);
                    let allowed = own == 0
                        || own + size <= share
                        || used + size <= total - share * (WINDOWS as u64 - 1);
                    match windows[at].admit_sized(next[at], bytes) {
                        Ok(ticket) => {
                            prop_assert!(allowed);
                            if own == 0 {
                                largest_alone[at] = size.saturating_sub(share);
                            }
                            held[at].push_back((size, Some(ticket)));
                            next[at] += 1;
                        }
                        Err(refused) => {
                            let budget = total;
                            prop_assert!(!allowed);
                            prop_assert_eq!(refused, Refused::Budget { bytes: size, used, budget });
                        }
                    }
                }
                Step::Finish(at) => {
                    if let Some(ticket) = held[at].iter_mut().find_map(|(_, ticket)| ticket.take()) {
                        ticket.finish();
                    }
                }
                Step::Advance(at) => {
                    windows[at].watermark().advance();
                    while held[at].pop_front_if_done() {}
                }
                Step::Reopen(at) => {
                    windows[at] = open();
                    // The new one was there before the old one went: both count meanwhile.
                    next[at] = 0;
                    held[at].clear();
                }
            }
            let used = held.iter().map(sum).sum::<u64>();
            prop_assert_eq!((budget.used(), budget.windows()), (used, WINDOWS as u64));
            // What exceeds the budget are single records larger than a share.
            prop_assert!(used <= total + largest_alone.iter().sum::<u64>());
        }
    }
}

trait PopDone {
    fn pop_front_if_done(&mut self) -> bool;
}

impl PopDone for VecDeque<(u64, Option<Ticket>)> {
    fn pop_front_if_done(&mut self) -> bool {
        let done = matches!(self.front(), Some((_, None)));
        if done {
            self.pop_front();
        }
        done
    }
}

#[test]
fn the_budget_is_kept_on_many_threads_and_nobody_starves() {
    let budget = Budget::new(4_000).unwrap();
    let limits = Limits::new(64).budget(&budget);
    std::thread::scope(|scope| {
        let (limits, budget) = (&limits, &budget);
        let windows: Vec<_> = (0..4).map(|_| Window::open_with(0, limits).unwrap()).collect();
        for mut window in windows {
            scope.spawn(move || {
                let watermark = window.watermark();
                let mut held = VecDeque::new();
                for offset in 0..20_000 {
                    // Larger than a share; and at least one is always admitted.
                    loop {
                        match window.admit_sized(offset, 150) {
                            Ok(ticket) => break held.push_back(ticket),
                            Err(Refused::Budget { .. } | Refused::Full { .. }) => {
                                held.pop_front().map(Ticket::finish).expect("it holds something");
                                watermark.advance();
                            }
                            Err(refused) => panic!("{refused}"),
                        }
                    }
                    assert!(budget.used() <= 4_000);
                }
            });
        }
    });
    assert_eq!((budget.used(), budget.windows()), (0, 0));
}

/// The done-map says that offsets are finished which the log does not have any more.
#[test]
fn b05_restored_marks_of_records_that_are_gone_are_not_awaited() {
    let done = [86_330..86_400, 88_617..88_618, 90_000..90_010];
    let mut window = Window::restore(86_321, &Limits::new(16), &done).unwrap();
    let watermark = window.watermark();
    assert_eq!(window.admit(88_617).unwrap_err(), Refused::Done { offset: 88_617 });
    assert_eq!(watermark.advance().watermark, 88_618);
    let ticket = window.admit(88_618).unwrap();
    let mut snapshot = Snapshot::new();
    watermark.snapshot(&mut snapshot);
    assert_eq!(snapshot.watermark(), 88_618);
    assert_eq!(snapshot.done(), std::slice::from_ref(&(90_000..90_010)));
    window.admit(95_000).unwrap().finish();
    ticket.finish();
    assert_eq!(watermark.snapshot(&mut snapshot).watermark, 95_001);
    assert_eq!(snapshot.done(), []);
}

#[test]
fn b01_the_watermark_moves_over_the_markers_at_the_end() {
    let mut window = Window::open(0, 4).unwrap();
    let watermark = window.watermark();
    assert_eq!(window.advance_to(1 << 40).unwrap().watermark, 1 << 40);
    let ticket = window.admit((1 << 40) + 5).unwrap();
    assert_eq!(window.advance_to(1 << 41).unwrap().watermark, 1 << 40);
    let backwards = Refused::Backwards { next: 7, least: 1 << 41 };
    assert_eq!(window.advance_to(7).unwrap_err(), backwards);
    let below = (1 << 41) - 1;
    let duplicate = Refused::Duplicate { offset: below, last: below };
    assert_eq!(window.admit(below).unwrap_err(), duplicate);
    assert_eq!(window.last_admitted(), Some((1 << 40) + 5));
    ticket.finish();
    assert_eq!(watermark.advance().watermark, 1 << 41);
    window.admit(1 << 41).unwrap().finish();
    assert_eq!(watermark.advance().watermark, (1 << 41) + 1);
    assert_eq!(window.advance_to(i64::MAX).unwrap().watermark, i64::MAX);
    assert_eq!(window.advance_to(i64::MAX).unwrap().watermark, i64::MAX);
    assert!(window.admit(i64::MAX).is_err());
}

fn until(executor: &mut Executor<u64>, mut reached: impl FnMut(&mut Executor<u64>) -> bool) {
    let (waiter, began) = (Waiter::new(), Instant::now());
    while !reached(executor) {
        executor.pass(began.elapsed());
        executor.flush();
        waiter.wait(Duration::from_micros(50), || false);
        assert!(began.elapsed() < Duration::from_secs(60), "it hangs");
    }
}

#[test]
fn an_executor_keeps_the_limits_and_hands_records_back() {
    let waiter = Waiter::new();
    let gate = std::sync::Arc::new(parking_lot::Mutex::new(()));
    let held = gate.lock();
    let mut executor = Executor::builder()
        .workers(2)
        .each(waiter.waker(), {
            let gate = std::sync::Arc::clone(&gate);
            move |_: &u64| drop(gate.lock())
        })
        .unwrap();
    let budget = Budget::new(1_000).unwrap();
    let limits = Limits::new(64).bytes(500).span(20).budget(&budget);
    let one = executor.restore(0, &limits, std::slice::from_ref(&(3..4))).unwrap();
    let other = executor.open_with(0, &limits).unwrap();
    let route = |offset: i64| Route::Ordered((offset as u64) << 60);
    let sized = |from: i64, to: i64, bytes: u32| {
        (from..to).map(move |offset| (offset, bytes, route(offset), offset as u64))
    };
    assert_eq!(executor.offer_all_sized(one, sized(0, 3, 100)).unwrap(), 3);
    let rejected = executor.offer_all_sized(one, sized(3, 4, 100)).unwrap_err();
    assert_eq!((rejected.payload, rejected.refused), (3, Refused::Done { offset: 3 }));
    let rejected = executor.offer_sized(one, 4, 300, route(4), 4).unwrap_err();
    let refused = Refused::Bytes { bytes: 300, held: 300, limit: 500 };
    assert_eq!((rejected.payload, rejected.refused), (4, refused));
    let rejected = executor.offer(one, 21, route(21), 21).unwrap_err();
    assert_eq!(rejected.refused, Refused::Span { offset: 21, watermark: 0, span: 20 });
    assert_eq!(executor.offer_all_sized(other, sized(0, 5, 90)).unwrap(), 5);
    let rejected = executor.offer_sized(other, 5, 50, route(5), 5).unwrap_err();
    assert_eq!(rejected.refused, Refused::Budget { bytes: 50, used: 750, budget: 1_000 });
    assert_eq!(executor.move_to(one, 9).unwrap().watermark, 0);
    assert!(matches!(executor.move_to(one, 8), Err(Refused::Backwards { .. })));
    drop(held);
    until(&mut executor, |executor| executor.progress(one).unwrap().watermark == 9);
    // What was refused is admitted without anybody having looked at the other epoch's watermark.
    until(&mut executor, |executor| executor.offer_sized(other, 5, 50, route(5), 5).is_ok());
    until(&mut executor, |executor| executor.progress(other).unwrap().watermark == 6);
    assert_eq!((budget.used(), executor.held_bytes(other)), (0, 0));
    let mut snapshot = Snapshot::new();
    assert!(executor.snapshot(one, &mut snapshot).is_some());
    assert_eq!((snapshot.watermark(), snapshot.done()), (9, &[][..]));
    executor.close(one).unwrap();
    assert_eq!(executor.snapshot(one, &mut snapshot), None);
    assert_eq!(executor.move_to(one, 20), Err(Refused::Closed));
}

/// Epochs end while their records hang: their bytes are free at once.
#[test]
fn b21_an_epoch_that_is_closed_gives_its_bytes_back_while_its_records_run() {
    let waiter = Waiter::new();
    let gate = std::sync::Arc::new(parking_lot::Mutex::new(()));
    let held = gate.lock();
    let mut executor = Executor::builder()
        .workers(1)
        .each(waiter.waker(), {
            let gate = std::sync::Arc::clone(&gate);
            move |_: &u64| drop(gate.lock())
        })
        .unwrap();
    let budget = Budget::new(1_000).unwrap();
    for _ in 0..50 {
        let epoch = executor.open_with(0, &Limits::new(64).budget(&budget)).unwrap();
        for offset in 0..10 {
            executor.offer_sized(epoch, offset, 100, Route::Free, 0).unwrap();
        }
        executor.flush();
        assert_eq!((budget.used(), budget.windows()), (1_000, 1));
        executor.close(epoch).unwrap();
        assert_eq!((budget.used(), budget.windows()), (0, 0));
    }
    drop(held);
    until(&mut executor, |executor| !executor.busy());
    assert_eq!(budget.used(), 0);
}
