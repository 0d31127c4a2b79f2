//! The window against a sequential model, and the cases of the field's fault reports.

use plimsoll_engine::{Limits, Refused, Snapshot, Ticket, Tickets, Window};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

/// How a record of the model stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Done,
    Failed,
}

/// What the model holds, in order.
#[derive(Debug)]
enum Held {
    Record {
        offset: i64,
        bytes: u32,
        state: State,
    },
    /// The epoch was moved on to here.
    Move(i64),
}

/// The model: which admitted offsets are unfinished, by the rules alone.
#[derive(Debug, Default)]
struct Model {
    start: i64,
    capacity: usize,
    bytes: Option<u64>,
    span: Option<u64>,
    restored: BTreeSet<i64>,
    /// Lowest offset that may be admitted.
    next: i64,
    last: Option<i64>,
    /// Admitted and not yet passed.
    held: VecDeque<Held>,
    watermark: i64,
}

impl Model {
    fn records(&self) -> impl Iterator<Item = (i64, u32, State)> + '_ {
        self.held.iter().filter_map(|held| match *held {
            Held::Record { offset, bytes, state } => Some((offset, bytes, state)),
            Held::Move(_) => None,
        })
    }

    fn admit(&mut self, offset: i64, bytes: u32) -> Result<(), Refused> {
        if !(0..i64::MAX).contains(&offset) {
            return Err(Refused::OutOfRange { offset });
        }
        if offset < self.start {
            return Err(Refused::Below { offset, start: self.start });
        }
        if offset < self.next {
            return Err(Refused::Duplicate { offset, last: self.next - 1 });
        }
        if self.restored.contains(&offset) {
            self.move_to(offset + 1);
            return Err(Refused::Done { offset });
        }
        let count = self.records().count();
        if count == self.capacity {
            return Err(Refused::Full { capacity: self.capacity as u32 });
        }
        let watermark = self.watermark;
        if let Some(span) = self.span.filter(|_| count > 0)
            && (offset - watermark) as u64 > span
        {
            return Err(Refused::Span { offset, watermark, span });
        }
        let held = self.records().map(|(_, bytes, _)| u64::from(bytes)).sum();
        if let Some(limit) = self.bytes.filter(|_| held > 0)
            && held + u64::from(bytes) > limit
        {
            return Err(Refused::Bytes { bytes: u64::from(bytes), held, limit });
        }
        (self.last, self.next) = (Some(offset), offset + 1);
        self.held.push_back(Held::Record { offset, bytes, state: State::Open });
        Ok(())
    }

    /// Only the last move counts, and only if what was admitted before it is all that is passed.
    fn move_to(&mut self, next: i64) {
        self.next = next;
        self.held.retain(|held| matches!(held, Held::Record { .. }));
        self.held.push_back(Held::Move(next));
        self.pass_moves();
    }

    fn pass_moves(&mut self) {
        while let Some(Held::Move(next)) = self.held.front() {
            self.watermark = *next;
            self.held.pop_front();
        }
    }

    fn advance_to(&mut self, next: i64) -> Result<(), Refused> {
        if next < self.next {
            return Err(Refused::Backwards { next, least: self.next });
        }
        if next > self.next {
            self.move_to(next);
        }
        self.advance();
        Ok(())
    }

    fn end(&mut self, ended: i64, to: State) {
        let found = self.held.iter_mut().find_map(|held| match held {
            Held::Record { offset, state, .. } if *offset == ended => Some(state),
            _ => None,
        });
        assert_eq!(std::mem::replace(found.unwrap(), to), State::Open);
    }

    fn advance(&mut self) -> i64 {
        while let Some(Held::Record { offset, state: State::Done, .. }) = self.held.front() {
            self.watermark = offset + 1;
            self.held.pop_front();
            self.pass_moves();
        }
        self.watermark
    }

    fn failed(&self) -> Option<i64> {
        self.records().next().filter(|(_, _, state)| *state == State::Failed).map(|first| first.0)
    }

    /// What a snapshot must list.
    fn done(&self) -> BTreeSet<i64> {
        let finished = self.records().filter(|(_, _, state)| *state == State::Done);
        let restored = self.restored.range(self.watermark..).copied();
        finished.map(|(offset, ..)| offset).chain(restored).collect()
    }
}

#[derive(Debug, Clone)]
enum Step {
    /// Offer the offset this far from the last admitted one, mostly a small gap; of so many bytes.
    Admit(i64, u32),
    /// Offer so many records at once, with these gaps, each of so many bytes.
    AdmitBatch(Vec<i64>, u32),
    /// Finish one of the open tickets.
    Finish(prop::sample::Index),
    /// Finish these of one of the batches; perhaps split them off before, and perhaps the rest is lost.
    FinishBatch(prop::sample::Index, u64, bool, bool),
    /// One of the open tickets is lost.
    Lose(prop::sample::Index),
    Advance,
    /// Move on, this far from the last admitted offset.
    AdvanceTo(i64),
    Snapshot,
    Room,
}

fn gap() -> impl Strategy<Value = i64> {
    prop_oneof![
        8 => Just(1),
        3 => 2..6_i64,
        1 => Just(1 << 40),
        1 => -2..1_i64,
        1 => Just(i64::MAX),
    ]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let index = any::<prop::sample::Index>;
    let gaps = prop::collection::vec(prop_oneof![6 => Just(1), 1 => 2..4_i64], 1..70);
    let batch = (index(), any::<u64>(), any::<bool>(), prop::bool::weighted(0.02));
    let step = prop_oneof![
        8 => (gap(), 0..40_u32).prop_map(|(gap, bytes)| Step::Admit(gap, bytes)),
        2 => (gaps, 0..20_u32).prop_map(|(gaps, bytes)| Step::AdmitBatch(gaps, bytes)),
        8 => index().prop_map(Step::Finish),
        6 => batch.prop_map(|(at, mask, split, lose)| Step::FinishBatch(at, mask, split, lose)),
        2 => Just(Step::Advance),
        1 => gap().prop_map(Step::AdvanceTo),
        2 => Just(Step::Snapshot),
        2 => Just(Step::Room),
    ];
    // At most one is lost, late: behind it nothing moves.
    let lost = prop::option::weighted(0.2, index().prop_map(Step::Lose));
    (prop::collection::vec(step, 1..300), lost).prop_map(|(mut steps, lost)| {
        let at = steps.len() * 3 / 4;
        steps.splice(at..at, lost);
        steps
    })
}

#[derive(Debug)]
struct Limited {
    capacity: u32,
    bytes: Option<u64>,
    span: Option<u64>,
    /// Above the start.
    restored: Vec<Range<i64>>,
}

fn limited() -> impl Strategy<Value = Limited> {
    // Below 128 bytes they are given back record by record.
    let bytes = prop::option::weighted(0.3, 1..128_u64);
    let span = prop::option::weighted(0.3, 1..30_u64);
    let ranges = prop::collection::vec((0..80_i64, 0..5_i64), 0..8);
    let restored = prop::option::weighted(0.3, ranges).prop_map(|ranges| {
        ranges.unwrap_or_default().into_iter().map(|(at, len)| at - 5..at - 5 + len).collect()
    });
    let capacity = prop_oneof![3 => 1..20_u32, 1 => 60..140_u32];
    (capacity, bytes, span, restored).prop_map(|(capacity, bytes, span, restored)| Limited {
        capacity,
        bytes,
        span,
        restored,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_024))]

    #[test]
    fn the_window_is_its_model(
        limited in limited(),
        start in prop_oneof![0..70_i64, Just(i64::MAX - 60)],
        steps in steps(),
    ) {
        let mut limits = Limits::new(limited.capacity);
        if let Some(bytes) = limited.bytes {
            limits = limits.bytes(bytes);
        }
        if let Some(span) = limited.span {
            limits = limits.span(span);
        }
        let place = |offset: i64| start.saturating_add(offset);
        let restored: Vec<_> =
            limited.restored.iter().map(|range| place(range.start)..place(range.end)).collect();
        let mut window = Window::restore(start, &limits, &restored).unwrap();
        let watermark = window.watermark();
        let mut model = Model {
            start,
            capacity: limited.capacity as usize,
            bytes: limited.bytes,
            span: limited.span,
            restored: restored.into_iter().flatten().filter(|at| *at >= start).collect(),
            next: start,
            watermark: start,
            ..Model::default()
        };
        let mut open: BTreeMap<i64, Ticket> = BTreeMap::new();
        let mut batches: Vec<(Tickets, Vec<i64>)> = Vec::new();
        let mut snapshot = Snapshot::new();
        for step in steps {
            match step {
                Step::Admit(gap, bytes) => {
                    let offset = (model.next - 1).saturating_add(gap);
                    let ours = window.admit_sized(offset, bytes);
                    let theirs = model.admit(offset, bytes);
                    prop_assert_eq!(ours.as_ref().map(|_| ()).map_err(|e| *e), theirs);
                    if let Ok(ticket) = ours {
                        prop_assert_eq!(ticket.offset(), offset);
                        open.insert(offset, ticket);
                    }
                }
                Step::AdmitBatch(gaps, bytes) => {
                    let mut offset = model.next - 1;
                    let records: Vec<_> = gaps
                        .into_iter()
                        .map(|gap| {
                            offset = offset.saturating_add(gap);
                            (offset, bytes)
                        })
                        .collect();
                    let ours = window.admit_batch_sized(&records);
                    let mut admitted = Vec::new();
                    let mut refused = None;
                    for (offset, bytes) in records.iter().take(Tickets::MOST) {
                        match model.admit(*offset, *bytes) {
                            Ok(()) => admitted.push(*offset),
                            Err(reason) => {
                                refused = Some(reason);
                                break;
                            }
                        }
                    }
                    match ours {
                        Ok(tickets) => {
                            prop_assert_eq!(tickets.len(), admitted.len());
                            prop_assert_eq!(tickets.open().count_ones() as usize, admitted.len());
                            batches.push((tickets, admitted));
                        }
                        Err(reason) => {
                            prop_assert!(admitted.is_empty());
                            prop_assert_eq!(Some(reason), refused);
                        }
                    }
                }
                Step::Finish(index) if !open.is_empty() => {
                    let offset = *open.keys().nth(index.index(open.len())).unwrap();
                    open.remove(&offset).unwrap().finish();
                    model.end(offset, State::Done);
                }
                Step::FinishBatch(index, mask, split, lose) if !batches.is_empty() => {
                    let at = index.index(batches.len());
                    let (mut tickets, offsets) = batches.swap_remove(at);
                    let expected = tickets.open() & mask;
                    let ended = |mask: u64| {
                        (0..offsets.len()).filter(move |bit| mask >> bit & 1 == 1)
                    };
                    if split {
                        let part = tickets.split_off(mask);
                        prop_assert_eq!((part.open(), part.open() & tickets.open()), (expected, 0));
                        part.finish_all();
                    } else {
                        prop_assert_eq!(tickets.finish_mask(mask), expected);
                    }
                    prop_assert_eq!(tickets.finish_mask(mask), 0, "only once");
                    ended(expected).for_each(|bit| model.end(offsets[bit], State::Done));
                    if lose {
                        let lost = tickets.open();
                        drop(tickets);
                        ended(lost).for_each(|bit| model.end(offsets[bit], State::Failed));
                    } else if tickets.open() != 0 {
                        batches.push((tickets, offsets));
                    }
                }
                Step::Lose(index) if !open.is_empty() => {
                    let offset = *open.keys().nth(index.index(open.len())).unwrap();
                    drop(open.remove(&offset));
                    model.end(offset, State::Failed);
                }
                Step::Finish(_) | Step::FinishBatch(..) | Step::Lose(_) => {}
                Step::Advance => {
                    let before = watermark.get();
                    let progress = watermark.advance();
                    prop_assert!(progress.watermark >= before);
                    prop_assert_eq!(progress.watermark, model.advance());
                    prop_assert_eq!(progress.unfinished, model.records().count() as u64);
                    prop_assert_eq!(progress.failed, model.failed());
                }
                Step::AdvanceTo(gap) => {
                    let next = (model.next - 1).saturating_add(gap);
                    let ours = window.advance_to(next).map(|progress| progress.watermark);
                    let theirs = model.advance_to(next).map(|()| model.watermark);
                    prop_assert_eq!(ours, theirs);
                }
                Step::Snapshot => {
                    let progress = watermark.snapshot(&mut snapshot);
                    prop_assert_eq!(snapshot.watermark(), model.advance());
                    prop_assert_eq!(progress.watermark, snapshot.watermark());
                    let listed: Vec<_> = snapshot.offsets().collect();
                    prop_assert_eq!(listed, model.done().into_iter().collect::<Vec<_>>());
                    let touch = snapshot.done().windows(2).any(|two| two[0].end >= two[1].start);
                    prop_assert!(!touch, "{:?}", snapshot.done());
                }
                Step::Room => {
                    let room = window.room() as usize;
                    let free = model.capacity - model.records().count();
                    // It may lag behind, but never promises what is not there.
                    prop_assert!(room <= free);
                    prop_assert_eq!(window.fresh_room() as usize, free);
                }
            }
            prop_assert_eq!(watermark.get(), model.watermark);
            prop_assert_eq!(window.last_admitted(), model.last);
            if limited.bytes.is_some() {
                let held: u64 = model.records().map(|(_, bytes, _)| u64::from(bytes)).sum();
                prop_assert_eq!(window.held_bytes(), held);
            }
            // Never above the lowest unfinished record, at any moment.
            if let Some(lowest) = open.keys().next() {
                prop_assert!(watermark.get() <= *lowest);
            }
        }
        open.into_iter().for_each(|(offset, ticket)| {
            ticket.finish();
            model.end(offset, State::Done);
        });
        for (tickets, offsets) in batches {
            let unfinished = tickets.open();
            tickets.finish_all();
            let bits = (0..offsets.len()).filter(|bit| unfinished >> bit & 1 == 1);
            bits.for_each(|bit| model.end(offsets[bit], State::Done));
        }
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
