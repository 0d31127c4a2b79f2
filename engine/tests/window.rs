//! The window against a sequential model, and the cases of the field's fault reports.

use plimsoll_engine::{Refused, Ticket, Window};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// The model: which admitted offsets are unfinished, by the rules alone.
#[derive(Debug, Default)]
struct Model {
    start: i64,
    capacity: usize,
    last: Option<i64>,
    /// Admitted and not yet passed, in order: whether finished.
    held: std::collections::VecDeque<(i64, bool)>,
    watermark: i64,
}

impl Model {
    fn admit(&mut self, offset: i64) -> Result<(), Refused> {
        if !(0..i64::MAX).contains(&offset) {
            return Err(Refused::OutOfRange { offset });
        }
        if offset < self.start {
            return Err(Refused::Below { offset, start: self.start });
        }
        if let Some(last) = self.last.filter(|last| offset <= *last) {
            return Err(Refused::Duplicate { offset, last });
        }
        if self.held.len() == self.capacity {
            return Err(Refused::Full { capacity: self.capacity as u32 });
        }
        self.last = Some(offset);
        self.held.push_back((offset, false));
        Ok(())
    }

    fn finish(&mut self, offset: i64) {
        self.held.iter_mut().find(|(held, _)| *held == offset).unwrap().1 = true;
    }

    fn advance(&mut self) -> i64 {
        while let Some((offset, true)) = self.held.front() {
            self.watermark = offset + 1;
            self.held.pop_front();
        }
        self.watermark
    }
}

#[derive(Debug, Clone)]
enum Step {
    /// Offer the offset this far from the last admitted one; mostly a small gap.
    Admit(i64),
    /// Finish one of the open tickets.
    Finish(prop::sample::Index),
    Advance,
    Room,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let gap = prop_oneof![
        8 => Just(1),
        3 => 2..6_i64,
        1 => Just(1 << 40),
        1 => -2..1_i64,
        1 => Just(i64::MAX),
    ];
    let step = prop_oneof![
        4 => gap.prop_map(Step::Admit),
        4 => any::<prop::sample::Index>().prop_map(Step::Finish),
        1 => Just(Step::Advance),
        1 => Just(Step::Room),
    ];
    prop::collection::vec(step, 1..400)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn the_window_is_its_model(
        capacity in 1..20_u32,
        start in prop_oneof![0..70_i64, Just(i64::MAX - 60)],
        steps in steps(),
    ) {
        let mut window = Window::open(start, capacity).unwrap();
        let watermark = window.watermark();
        let mut model =
            Model { start, capacity: capacity as usize, watermark: start, ..Model::default() };
        let mut open: BTreeMap<i64, Ticket> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Admit(gap) => {
                    let offset = window.last_admitted().unwrap_or(start - 1).saturating_add(gap);
                    let (ours, theirs) = (window.admit(offset), model.admit(offset));
                    prop_assert_eq!(ours.as_ref().map(|_| ()).map_err(|e| *e), theirs);
                    if let Ok(ticket) = ours {
                        prop_assert_eq!(ticket.offset(), offset);
                        open.insert(offset, ticket);
                    }
                }
                Step::Finish(index) if !open.is_empty() => {
                    let offset = *open.keys().nth(index.index(open.len())).unwrap();
                    open.remove(&offset).unwrap().finish();
                    model.finish(offset);
                }
                Step::Finish(_) => {}
                Step::Advance => {
                    let before = watermark.get();
                    let progress = watermark.advance();
                    prop_assert!(progress.watermark >= before);
                    prop_assert_eq!(progress.watermark, model.advance());
                    prop_assert_eq!(progress.unfinished, model.held.len() as u64);
                    prop_assert_eq!(progress.failed, None);
                    prop_assert_eq!(watermark.get(), progress.watermark);
                }
                Step::Room => {
                    let room = window.room();
                    // It may lag behind, but never promises what is not there.
                    prop_assert!(room as usize <= capacity as usize - model.held.len());
                    prop_assert_eq!(
                        window.fresh_room() as usize,
                        capacity as usize - model.held.len()
                    );
                }
            }
            // Never above the lowest unfinished record, at any moment.
            if let Some(lowest) = open.keys().next() {
                prop_assert!(watermark.get() <= *lowest);
            }
        }
        open.into_iter().for_each(|(offset, ticket)| {
            ticket.finish();
            model.finish(offset);
        });
        prop_assert_eq!(watermark.advance().watermark, model.advance());
    }
}

fn all(window: &mut Window, offsets: &[i64]) -> BTreeMap<i64, Ticket> {
    offsets.iter().map(|offset| (*offset, window.admit(*offset).unwrap())).collect()
}

#[test]
fn b01_control_records_between_data() {
    let mut window = Window::open(0, 16).unwrap();
    let watermark = window.watermark();
    let mut tickets = all(&mut window, &[0, 2, 4, 6]);
    for (offset, low, high) in [(0, 1, 2), (2, 3, 4), (6, 3, 4), (4, 7, 7)] {
        tickets.remove(&offset).unwrap().finish();
        let now = watermark.advance().watermark;
        assert!((low..=high).contains(&now), "after {offset}: {now}");
    }
    assert_eq!(watermark.advance().unfinished, 0);
    assert_eq!(window.fresh_room(), 16);
}

#[test]
fn b03_gap_larger_than_the_ring() {
    let mut window = Window::open(0, 1_024).unwrap();
    let watermark = window.watermark();
    let first = window.admit(5).unwrap();
    let second = window.admit(5_000_000).unwrap();
    second.finish();
    assert_eq!(watermark.advance().watermark, 0);
    first.finish();
    assert_eq!(watermark.advance().watermark, 5_000_001);

    let mut window = Window::open(0, 1_024).unwrap();
    for offset in (0..10_000_000).step_by(10_000) {
        window.admit(offset).unwrap().finish();
    }
    assert_eq!(window.watermark().advance().watermark, 9_990_001);
}

#[test]
fn b05_first_record_far_above_the_start() {
    let mut window = Window::open(86_321, 16).unwrap();
    let ticket = window.admit(88_617).unwrap();
    assert_eq!(window.watermark().advance().watermark, 86_321);
    ticket.finish();
    assert_eq!(window.watermark().advance().watermark, 88_618);
}

#[test]
fn b09_duplicate_admit() {
    let mut window = Window::open(5, 16).unwrap();
    let watermark = window.watermark();
    let mut tickets = all(&mut window, &[5, 6, 7]);
    assert_eq!(window.admit(6).unwrap_err(), Refused::Duplicate { offset: 6, last: 7 });
    tickets.remove(&6).unwrap().finish();
    assert_eq!(watermark.advance().watermark, 5);
    tickets.remove(&5).unwrap().finish();
    assert_eq!(watermark.advance().watermark, 7);
    assert_eq!(window.admit(6).unwrap_err(), Refused::Duplicate { offset: 6, last: 7 });
    tickets.remove(&7).unwrap().finish();
    assert_eq!(watermark.advance().watermark, 8);
}

#[test]
fn b10_a_dropped_ticket_is_a_failure() {
    let mut window = Window::open(0, 16).unwrap();
    let watermark = window.watermark();
    let mut tickets = all(&mut window, &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
    drop(tickets.remove(&4));
    tickets.into_values().for_each(Ticket::finish);
    let progress = watermark.advance();
    assert_eq!((progress.watermark, progress.failed, progress.unfinished), (4, Some(4), 6));
    assert_eq!(watermark.advance().watermark, 4, "it stays there");
}

#[test]
fn b11_base_drifts_on_a_word_boundary() {
    for start in [0, 1, 37, 63, 64, 65, 1_023, 1_025] {
        let mut window = Window::open(start, 1_024).unwrap();
        let watermark = window.watermark();
        let mut random = start as u64 + 1;
        let mut next = start;
        for _ in 0..400 {
            let mut tickets: Vec<_> = (0..500).map(|at| window.admit(next + at).unwrap()).collect();
            while !tickets.is_empty() {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let pick = (random >> 33) as usize % tickets.len();
                tickets.swap_remove(pick).finish();
            }
            next += 500;
            assert_eq!(watermark.advance().watermark, next);
        }
    }
}

#[test]
fn b15_completion_order_does_not_matter() {
    let mut window = Window::open(1, 16).unwrap();
    let watermark = window.watermark();
    let mut tickets = all(&mut window, &[1, 2, 3, 4]);
    let seen: Vec<_> = [1, 3, 4, 2]
        .into_iter()
        .map(|offset| {
            tickets.remove(&offset).unwrap().finish();
            watermark.advance().watermark
        })
        .collect();
    assert_eq!(seen, [2, 2, 2, 5]);
}

#[test]
fn b20_late_tickets_of_an_old_epoch_touch_nothing() {
    let mut first = Window::open(0, 128).unwrap();
    let mut old: Vec<_> = (0..100).map(|offset| first.admit(offset).unwrap()).collect();
    let late = old.split_off(50);
    old.into_iter().for_each(Ticket::finish);
    drop(first);
    let mut second = Window::open(0, 128).unwrap();
    let watermark = second.watermark();
    let mut new: Vec<_> = (0..100).map(|offset| second.admit(offset).unwrap()).collect();
    late.into_iter().for_each(Ticket::finish);
    assert_eq!(watermark.advance().watermark, 0);
    new.remove(0).finish();
    assert_eq!(watermark.advance().watermark, 1);
    new.into_iter().for_each(Ticket::finish);
}

#[test]
fn b53_capacities_and_offsets_at_the_edges() {
    assert!(Window::open(0, 0).unwrap_err().to_string().contains("`window`"));
    assert!(Window::open(-1, 1).unwrap_err().to_string().contains("`start`"));
    assert!(Window::open(i64::MAX, 1).is_err());

    let mut window = Window::open(0, 1).unwrap();
    let watermark = window.watermark();
    for offset in 0..1_000 {
        let ticket = window.admit(offset).unwrap();
        assert_eq!(window.admit(offset + 1).unwrap_err(), Refused::Full { capacity: 1 });
        ticket.finish();
        assert_eq!(watermark.advance().watermark, offset + 1);
    }

    for around in [1_i64 << 31, 1 << 32, i64::MAX - 101] {
        let mut window = Window::open(around - 100, 64).unwrap();
        let watermark = window.watermark();
        for offset in around - 100..around + 100 {
            window.admit(offset).unwrap().finish();
            assert_eq!(watermark.advance().watermark, offset + 1);
        }
    }
    let mut window = Window::open(i64::MAX - 1, 4).unwrap();
    window.admit(i64::MAX - 1).unwrap().finish();
    assert_eq!(window.watermark().advance().watermark, i64::MAX);
    assert!(window.admit(i64::MAX).is_err());
}

#[test]
fn tickets_finish_from_many_threads() {
    let mut window = Window::open(0, 256).unwrap();
    let watermark = window.watermark();
    let (send, receive) = std::sync::mpsc::channel::<Ticket>();
    let receive = parking_lot::Mutex::new(receive);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while let Ok(ticket) = { receive.lock().recv() } {
                    let offset = ticket.offset();
                    assert!(watermark.get() <= offset, "above an unfinished record");
                    ticket.finish();
                }
            });
        }
        let mut offset = 0;
        while offset < 50_000 {
            if window.room() == 0 {
                watermark.try_advance();
                continue;
            }
            send.send(window.admit(offset).unwrap()).unwrap();
            offset += 1;
        }
        drop(send);
    });
    assert_eq!(watermark.advance().watermark, 50_000);
}
