//! Checks the consumer's promises with bookkeeping of its own, which shares nothing with the engine's.
//!
//! - Each record is handled: once, or again only after its partition was assigned anew.
//! - Each key's records are handled in the order in which they were produced, one at a time. After a new assignment a
//!   key may go back to an earlier record, once, and from there runs on without a gap.
//! - Whenever a commit was acknowledged, the handler of each record below it had returned.
//!
//! Handlers, the poller and the demo's main thread call in at once; nothing here blocks a handler, but for a short lock
//! when a promise is broken and an almost uncontended one per latency.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::clock::Clock;
use super::input::Input;
use super::latency::{Latency, Quantiles};
use super::violation::{Breach, Holds, Violation, key_text};

/// All the bookkeeping of one run.
#[derive(Debug)]
pub(crate) struct Checker {
    clock: Clock,
    input: Arc<Input>,
    keys: Box<[Key]>,
    partitions: Box<[Partition]>,
    append_to_handler: Latency,
    handler_to_commit: Latency,
    commits: AtomicU64,
    first_append: AtomicU64,
    last_commit: AtomicU64,
    slowest: Mutex<Slowest>,
    slowest_time: AtomicU64,
    violations: AtomicU64,
    order_violations: AtomicU64,
    first_violation: Mutex<Option<Violation>>,
}

/// The two numbers are written only by the one handler that holds `busy`; should two hold it, that is found.
#[derive(Debug, Default)]
struct Key {
    busy: AtomicBool,
    /// Sequence that is due.
    next: AtomicU64,
    /// How often the key went back to an earlier record.
    rewinds: AtomicU32,
}

#[derive(Debug)]
struct Partition {
    records: Box<[Record]>,
    /// How often the partition was assigned.
    assigned: AtomicU32,
    /// Records that the broker acknowledged to the producer.
    appended: AtomicU64,
    /// Records whose handler returned at least once.
    finished: AtomicU64,
    /// Offset of the last acknowledged commit; -1 before the first.
    committed: AtomicI64,
}

#[derive(Debug, Default)]
struct Record {
    /// When its handler first returned; 0 before.
    finished: AtomicU64,
    /// How often it was handed to a handler.
    handed: AtomicU16,
}

/// The handler that took longest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Slowest {
    pub(crate) nanos: u64,
    pub(crate) partition: i32,
    pub(crate) offset: i64,
}

/// A record as a handler sees it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen<'a> {
    pub(crate) partition: i32,
    pub(crate) offset: i64,
    pub(crate) key: Option<&'a [u8]>,
    /// Rank among the records of its key.
    pub(crate) sequence: Option<u64>,
    /// When it was appended.
    pub(crate) sent: Option<u64>,
}

/// A handler that has begun; to be given back with [`Checker::leave`].
#[derive(Debug)]
#[must_use]
pub(crate) struct Running {
    partition: i32,
    offset: i64,
    key: Option<usize>,
    since: u64,
}

/// How far a run is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    pub(crate) appended: u64,
    pub(crate) finished: u64,
    /// Records covered by commits.
    pub(crate) committed: u64,
    /// Records finished above the first unfinished record of their partition.
    pub(crate) above_watermark: u64,
}

/// Follows the first unfinished record of each partition; one thread's own.
#[derive(Debug)]
pub(crate) struct Follower {
    unfinished: Vec<usize>,
}

impl Checker {
    /// `counts`: records of each partition.
    pub(crate) fn new(clock: Clock, input: Arc<Input>, counts: &[u64]) -> Self {
        let partition = |count: &u64| Partition {
            records: (0..*count).map(|_| Record::default()).collect(),
            assigned: AtomicU32::new(0),
            appended: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            committed: AtomicI64::new(-1),
        };
        Self {
            clock,
            keys: input.keys().iter().map(|_| Key::default()).collect(),
            partitions: counts.iter().map(partition).collect(),
            input,
            append_to_handler: Latency::new(),
            handler_to_commit: Latency::new(),
            commits: AtomicU64::new(0),
            first_append: AtomicU64::new(0),
            last_commit: AtomicU64::new(0),
            slowest: Mutex::default(),
            slowest_time: AtomicU64::new(0),
            violations: AtomicU64::new(0),
            order_violations: AtomicU64::new(0),
            first_violation: Mutex::default(),
        }
    }

    /// The first record goes out now.
    pub(crate) fn begins(&self) {
        let _ = self.first_append.compare_exchange(
            0,
            self.clock.now(),
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
    }

    /// The broker acknowledged a record to the producer.
    pub(crate) fn appended(&self, partition: i32, offset: i64) {
        match self.record(partition, offset) {
            Some((partition, _)) => {
                partition.appended.fetch_add(1, Ordering::Relaxed);
            }
            None => self.report(
                partition,
                offset,
                Breach::Foreign { what: "the topic has records of someone else" },
            ),
        }
    }

    /// The partition was assigned to this process.
    pub(crate) fn assigned(&self, partition: i32) {
        if let Some(partition) = self.partition(partition) {
            partition.assigned.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// A handler begins.
    pub(crate) fn enter(&self, seen: Seen<'_>) -> Running {
        let now = self.clock.now();
        let Seen { partition, offset, .. } = seen;
        let mut running = Running { partition, offset, key: None, since: now };
        let Some((place, record)) = self.record(partition, offset) else {
            self.report(partition, offset, Breach::Foreign { what: "no such offset was produced" });
            return running;
        };
        match seen.sent {
            Some(sent) if sent <= now => self.append_to_handler.record(now - sent),
            _ => self.report(partition, offset, Breach::Foreign { what: "no valid `sent` header" }),
        }
        let before = u32::from(record.handed.fetch_add(1, Ordering::SeqCst));
        let assigned = place.assigned.load(Ordering::SeqCst);
        if before > 0 && before >= assigned {
            self.report(partition, offset, Breach::Repeat);
        }

        let (Some(key), Some(sequence)) = (seen.key, seen.sequence) else {
            if seen.key.is_some() || seen.sequence.is_some() {
                self.report(
                    partition,
                    offset,
                    Breach::Foreign { what: "a key and a `seq` header belong together" },
                );
            }
            return running;
        };
        let Some(rank) = self.input.keys().get_index_of(key) else {
            self.report(partition, offset, Breach::Foreign { what: "no such key was produced" });
            return running;
        };
        running.key = Some(rank);
        let state = &self.keys[rank];
        if state.busy.swap(true, Ordering::AcqRel) {
            self.report(partition, offset, Breach::Overlap { key: key_text(key) });
        }
        let due = state.next.load(Ordering::Relaxed);
        let again = before > 0 && sequence < due;
        if again && state.rewinds.fetch_add(1, Ordering::Relaxed) + 1 < assigned {
            state.next.store(sequence + 1, Ordering::Relaxed);
        } else {
            if sequence != due {
                let breach = Breach::Order { key: key_text(key), expected: due, found: sequence };
                self.report(partition, offset, breach);
            }
            // After a disorder go on from the highest, so that one swap is not counted for every later record.
            state.next.store(due.max(sequence.saturating_add(1)), Ordering::Relaxed);
        }
        running
    }

    /// A handler returns.
    pub(crate) fn leave(&self, running: Running) {
        let Running { partition, offset, key, since } = running;
        if let Some(key) = key {
            self.keys[key].busy.store(false, Ordering::Release);
        }
        let now = self.clock.now();
        let nanos = now - since;
        if nanos > self.slowest_time.load(Ordering::Relaxed) {
            let mut slowest = self.slowest.lock().unwrap_or_else(PoisonError::into_inner);
            if nanos > slowest.nanos {
                *slowest = Slowest { nanos, partition, offset };
                self.slowest_time.store(nanos, Ordering::Relaxed);
            }
        }
        if let Some((partition, record)) = self.record(partition, offset)
            && record
                .finished
                .compare_exchange(0, now, Ordering::Release, Ordering::Relaxed)
                .is_ok()
        {
            partition.finished.fetch_add(1, Ordering::Release);
        }
    }

    /// The broker acknowledged a commit, whatever it contains.
    pub(crate) fn commit(&self) {
        self.commits.fetch_add(1, Ordering::Relaxed);
    }

    /// The broker acknowledged this offset. Commits of one partition must be told by one thread at a time.
    pub(crate) fn committed(&self, partition: i32, offset: i64) {
        let now = self.clock.now();
        let Some(place) = self.partition(partition) else {
            return self.report(
                partition,
                offset,
                Breach::Foreign { what: "a commit for no partition of the topic" },
            );
        };
        let before = place.committed.load(Ordering::Relaxed);
        if offset < before {
            return self.report(partition, offset, Breach::WentBack { before });
        }
        if offset == before {
            return;
        }
        let end = place.records.len();
        let from = usize::try_from(before).unwrap_or(0).min(end);
        let to = usize::try_from(offset).unwrap_or(0);
        let covered = &place.records[from..to.min(end)];
        let mut unfinished = None;
        self.handler_to_commit.record_all(covered.iter().enumerate().filter_map(
            |(index, record)| {
                let finished = record.finished.load(Ordering::Acquire);
                if finished == 0 {
                    unfinished.get_or_insert(from + index);
                    return None;
                }
                Some(now.saturating_sub(finished))
            },
        ));
        if let Some(index) = unfinished {
            self.report(partition, index as i64, Breach::Watermark { committed: offset });
        }
        if to > end {
            self.report(partition, end as i64, Breach::BeyondEnd { committed: offset });
        }
        place.committed.store(offset, Ordering::Release);
        self.last_commit.store(now, Ordering::Relaxed);
    }

    /// Records of a partition that commits have passed.
    pub(crate) fn committed_over(&self, partition: usize) -> u64 {
        u64::try_from(self.partitions[partition].committed.load(Ordering::Acquire)).unwrap_or(0)
    }

    /// Records of a partition whose handler has returned.
    pub(crate) fn finished_in(&self, partition: usize) -> u64 {
        self.partitions[partition].finished.load(Ordering::Relaxed)
    }

    /// A promise is broken.
    pub(crate) fn report(&self, partition: i32, offset: i64, breach: Breach) {
        self.violations.fetch_add(1, Ordering::Relaxed);
        if breach.is_of_order() {
            self.order_violations.fetch_add(1, Ordering::Relaxed);
        }
        let mut first = self.first_violation.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert(Violation { partition, offset, breach });
    }

    /// Looks how far all is.
    pub(crate) fn progress(&self, follower: &mut Follower) -> Progress {
        let mut progress = Progress::default();
        for (partition, unfinished) in self.partitions.iter().zip(&mut follower.unfinished) {
            // Before the scan: what finishes meanwhile is then missed, never counted as above although it is not.
            let finished = partition.finished.load(Ordering::Acquire);
            let rest = &partition.records[*unfinished..];
            *unfinished += rest
                .iter()
                .take_while(|record| record.finished.load(Ordering::Acquire) != 0)
                .count();
            progress.appended += partition.appended.load(Ordering::Relaxed);
            progress.finished += finished;
            progress.above_watermark += finished.saturating_sub(*unfinished as u64);
            let committed = u64::try_from(partition.committed.load(Ordering::Acquire)).unwrap_or(0);
            progress.committed += committed.min(partition.records.len() as u64);
        }
        progress
    }

    /// The first record that keeps a commit from its partition's end, with what it waits for. `None`: all is committed.
    pub(crate) fn holder(&self) -> Option<(i32, i64, Holds)> {
        (0i32..).zip(&self.partitions).find_map(|(number, partition)| {
            let appended =
                usize::try_from(partition.appended.load(Ordering::Relaxed)).unwrap_or(usize::MAX);
            let committed =
                usize::try_from(partition.committed.load(Ordering::Acquire)).unwrap_or(0);
            if committed >= appended {
                return None;
            }
            let open = &partition.records[committed..appended.min(partition.records.len())];
            let unfinished =
                open.iter().position(|record| record.finished.load(Ordering::Acquire) == 0);
            let holds = match unfinished {
                None => Holds::NotCommitted,
                Some(index) if open[index].handed.load(Ordering::Relaxed) == 0 => Holds::NotHanded,
                Some(_) => Holds::Running,
            };
            Some((number, (committed + unfinished.unwrap_or(0)) as i64, holds))
        })
    }

    /// Reports the first record that no handler finished, and counts all. With `all` each record that was appended must
    /// have been handled, without it those that commits have passed.
    pub(crate) fn count_lost(&self, all: bool) -> u64 {
        let mut lost = 0;
        for (number, partition) in (0i32..).zip(&self.partitions) {
            let committed = u64::try_from(partition.committed.load(Ordering::Acquire)).unwrap_or(0);
            let bound = if all { partition.appended.load(Ordering::Relaxed) } else { committed };
            let bound = usize::try_from(bound).unwrap_or(usize::MAX).min(partition.records.len());
            for (offset, record) in partition.records[..bound].iter().enumerate() {
                if record.finished.load(Ordering::Acquire) == 0 {
                    if lost == 0 {
                        self.report(number, offset as i64, Breach::Lost);
                    }
                    lost += 1;
                }
            }
        }
        lost
    }

    /// How often records were handled beyond their first time.
    pub(crate) fn duplicates(&self) -> u64 {
        let again =
            |record: &Record| u64::from(record.handed.load(Ordering::Relaxed).saturating_sub(1));
        self.partitions.iter().flat_map(|partition| &partition.records).map(again).sum()
    }

    /// Records appended to each partition.
    pub(crate) fn appended_to(&self) -> Vec<u64> {
        self.partitions.iter().map(|partition| partition.appended.load(Ordering::Relaxed)).collect()
    }

    /// All broken promises, and those of order among them.
    pub(crate) fn violations(&self) -> (u64, u64) {
        (self.violations.load(Ordering::Relaxed), self.order_violations.load(Ordering::Relaxed))
    }

    /// The first broken promise.
    pub(crate) fn first_violation(&self) -> Option<Violation> {
        self.first_violation.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Commits that the broker acknowledged.
    pub(crate) fn commits(&self) -> u64 {
        self.commits.load(Ordering::Relaxed)
    }

    /// The handler that took longest.
    pub(crate) fn slowest(&self) -> Slowest {
        *self.slowest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From the producer's call to the handler's begin.
    pub(crate) fn append_to_handler(&self) -> Quantiles {
        self.append_to_handler.quantiles()
    }

    /// From the handler's return to the acknowledged commit.
    pub(crate) fn handler_to_commit(&self) -> Quantiles {
        self.handler_to_commit.quantiles()
    }

    /// From the first append to the last acknowledged commit.
    pub(crate) fn seconds(&self) -> f64 {
        let (first, last) =
            (self.first_append.load(Ordering::Relaxed), self.last_commit.load(Ordering::Relaxed));
        if first == 0 { 0.0 } else { last.saturating_sub(first) as f64 / 1e9 }
    }

    fn partition(&self, partition: i32) -> Option<&Partition> {
        self.partitions.get(usize::try_from(partition).ok()?)
    }

    fn record(&self, partition: i32, offset: i64) -> Option<(&Partition, &Record)> {
        let partition = self.partition(partition)?;
        let record = partition.records.get(usize::try_from(offset).ok()?)?;
        Some((partition, record))
    }
}

impl Follower {
    /// For as many partitions.
    pub(crate) fn new(partitions: usize) -> Self {
        Self { unfinished: vec![0; partitions] }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Two partitions of 100 records; keys `a` and `b`.
    fn checker() -> Checker {
        let file = tempfile::NamedTempFile::with_suffix(".csv").expect("temporary file");
        std::fs::write(file.path(), "k\na\nb\n").expect("temporary file");
        let input = Input::load(Some(Path::new(file.path())), "k").expect("good input");
        let checker = Checker::new(Clock::start(), Arc::new(input), &[100, 100]);
        for partition in [0, 1] {
            checker.assigned(partition);
            (0..100).for_each(|offset| checker.appended(partition, offset));
        }
        checker
    }

    fn seen(key: &'static str, partition: i32, offset: i64, sequence: u64) -> Seen<'static> {
        Seen {
            partition,
            offset,
            key: Some(key.as_bytes()),
            sequence: Some(sequence),
            sent: Some(1),
        }
    }

    fn without_key(partition: i32, offset: i64) -> Seen<'static> {
        Seen { partition, offset, key: None, sequence: None, sent: Some(1) }
    }

    fn handle(checker: &Checker, seen: Seen<'_>) {
        checker.leave(checker.enter(seen));
    }

    /// Key `a` alone on partition 0: sequence is offset.
    fn handle_a(checker: &Checker, offsets: impl IntoIterator<Item = i64>) {
        for offset in offsets {
            handle(checker, seen("a", 0, offset, offset as u64));
        }
    }

    #[track_caller]
    fn assert_clean(checker: &Checker) {
        assert_eq!(checker.first_violation(), None);
        assert_eq!(checker.violations(), (0, 0));
    }

    #[track_caller]
    fn assert_first(checker: &Checker, partition: i32, offset: i64, kind: &str) -> Violation {
        let violation = checker.first_violation().expect("a violation");
        assert_eq!(
            (violation.partition, violation.offset, violation.breach.kind()),
            (partition, offset, kind)
        );
        let place = format!("partition {partition}, offset {offset}: ");
        assert!(violation.to_string().starts_with(&place), "{violation}");
        violation
    }

    #[test]
    fn out_of_order_across_keys_is_no_violation() {
        let checker = checker();
        let slow = checker.enter(seen("a", 0, 0, 0));
        for offset in 1..10 {
            handle(&checker, seen("b", 0, offset, offset as u64 - 1));
        }
        let mut follower = Follower::new(2);
        assert_eq!(
            checker.progress(&mut follower),
            Progress { appended: 200, finished: 9, committed: 0, above_watermark: 9 }
        );
        assert_eq!(checker.holder(), Some((0, 0, Holds::Running)));
        checker.leave(slow);
        checker.committed(0, 10);
        checker.committed(0, 10);
        let progress = Progress { appended: 200, finished: 10, committed: 10, above_watermark: 0 };
        assert_eq!(checker.progress(&mut follower), progress);
        assert_eq!(checker.duplicates(), 0);
        assert_clean(&checker);
    }

    #[test]
    fn a_swap_within_a_key_is_found() {
        let checker = checker();
        handle_a(&checker, [0, 1, 3, 2, 4, 5]);
        let violation = assert_first(&checker, 0, 3, "order");
        assert_eq!(violation.breach, Breach::Order { key: "a".to_owned(), expected: 2, found: 3 });
        assert_eq!(checker.violations(), (2, 2), "the swap alone, not all that follows");
    }

    #[test]
    fn a_gap_within_a_key_is_found() {
        let checker = checker();
        handle_a(&checker, [0, 1, 3]);
        assert_first(&checker, 0, 3, "order");
    }

    #[test]
    fn records_without_a_key_have_no_order() {
        let checker = checker();
        let running: Vec<_> =
            [5, 3, 4, 0].map(|offset| checker.enter(without_key(1, offset))).into();
        running.into_iter().for_each(|running| checker.leave(running));
        assert_clean(&checker);
    }

    #[test]
    fn two_records_of_a_key_at_once_are_found() {
        let checker = checker();
        let first = checker.enter(seen("a", 0, 0, 0));
        let second = checker.enter(seen("a", 0, 1, 1));
        checker.leave(first);
        checker.leave(second);
        assert_first(&checker, 0, 1, "overlap");
        assert_eq!(checker.violations(), (1, 1));
    }

    #[test]
    fn a_commit_past_an_unfinished_record_is_found() {
        let checker = checker();
        handle_a(&checker, 0..3);
        let running = checker.enter(seen("a", 0, 3, 3));
        checker.committed(0, 3);
        assert_clean(&checker);
        checker.committed(0, 4);
        checker.leave(running);
        let violation = assert_first(&checker, 0, 3, "watermark");
        assert_eq!(violation.breach, Breach::Watermark { committed: 4 });
    }

    #[test]
    fn a_record_dropped_as_if_finished_is_found_by_its_commit_and_as_lost() {
        let checker = checker();
        for offset in (0..10).filter(|offset| *offset != 6) {
            handle(&checker, without_key(1, offset));
        }
        checker.committed(1, 10);
        assert_first(&checker, 1, 6, "watermark");
        assert_eq!(checker.count_lost(false), 1);
        assert_eq!(checker.count_lost(true), 191);
    }

    #[test]
    fn lost_names_the_first_record() {
        let checker = checker();
        handle_a(&checker, 0..100);
        (0..100)
            .filter(|offset| *offset != 42)
            .for_each(|offset| handle(&checker, without_key(1, offset)));
        assert_clean(&checker);
        assert_eq!(checker.count_lost(true), 1);
        assert_first(&checker, 1, 42, "lost");
    }

    #[test]
    fn a_commit_beyond_the_end_or_backwards_is_found() {
        let beyond = checker();
        handle_a(&beyond, 0..100);
        beyond.committed(0, 101);
        assert_first(&beyond, 0, 100, "beyond_end");

        let backwards = checker();
        handle_a(&backwards, 0..10);
        backwards.committed(0, 8);
        backwards.committed(0, 7);
        let violation = assert_first(&backwards, 0, 7, "went_back");
        assert_eq!(violation.breach, Breach::WentBack { before: 8 });
    }

    #[test]
    fn redelivery_after_a_new_assignment_is_no_violation() {
        let checker = checker();
        handle_a(&checker, 0..10);
        checker.committed(0, 4);
        checker.assigned(0);
        // Old handlers still end, then all comes again from the commit on.
        handle_a(&checker, [10, 11]);
        handle_a(&checker, 4..20);
        checker.committed(0, 20);
        checker.assigned(0);
        handle_a(&checker, 20..30);
        checker.assigned(0);
        handle_a(&checker, 20..100);
        checker.committed(0, 100);
        assert_clean(&checker);
        assert_eq!(checker.duplicates(), 8 + 10);
        assert_eq!(checker.progress(&mut Follower::new(2)).finished, 100);
    }

    #[test]
    fn redelivery_of_the_unfinished_alone_is_no_violation() {
        let checker = checker();
        handle_a(&checker, 0..10);
        checker.assigned(0);
        handle_a(&checker, 10..12);
        assert_clean(&checker);
    }

    #[test]
    fn redelivery_with_a_gap_is_found() {
        let checker = checker();
        handle_a(&checker, 0..10);
        checker.assigned(0);
        handle_a(&checker, [4, 6]);
        assert_first(&checker, 0, 6, "order");
    }

    #[test]
    fn redelivery_backwards_is_found() {
        let checker = checker();
        handle_a(&checker, 0..10);
        checker.assigned(0);
        handle_a(&checker, [6, 5, 4]);
        assert_first(&checker, 0, 5, "order");
    }

    #[test]
    fn a_repeat_without_a_new_assignment_is_found() {
        let keyed = checker();
        handle_a(&keyed, [0, 1, 1]);
        assert_first(&keyed, 0, 1, "repeat");

        let keyless = checker();
        (0..2).for_each(|_| handle(&keyless, without_key(0, 7)));
        assert_first(&keyless, 0, 7, "repeat");
        assert_eq!(keyless.duplicates(), 1);

        // Another partition's assignment is no excuse.
        let other = checker();
        other.assigned(1);
        (0..2).for_each(|_| handle(&other, without_key(0, 7)));
        assert_first(&other, 0, 7, "repeat");
    }

    #[test]
    fn records_that_were_never_produced_are_found() {
        for strange in [
            without_key(2, 0),
            without_key(-1, 0),
            without_key(0, 100),
            without_key(0, -1),
            seen("c", 0, 0, 0),
            Seen { sequence: None, ..seen("a", 0, 0, 0) },
            Seen { key: None, ..seen("a", 0, 0, 0) },
            Seen { sent: None, ..seen("a", 0, 0, 0) },
            Seen { sent: Some(u64::MAX), ..seen("a", 0, 0, 0) },
        ] {
            let checker = checker();
            handle(&checker, strange);
            assert_first(&checker, strange.partition, strange.offset, "foreign");
        }
        let checker = checker();
        checker.appended(0, 100);
        assert_first(&checker, 0, 100, "foreign");
        let checker = self::checker();
        checker.committed(7, 1);
        assert_first(&checker, 7, 1, "foreign");
    }

    #[test]
    fn the_holder_of_a_watermark_is_named_with_its_state() {
        let checker = checker();
        handle_a(&checker, 0..5);
        handle_a(&checker, 6..8);
        checker.committed(0, 5);
        assert_eq!(checker.holder(), Some((0, 5, Holds::NotHanded)));
        let running = checker.enter(seen("a", 0, 5, 5));
        assert_eq!(checker.holder(), Some((0, 5, Holds::Running)));
        checker.leave(running);
        handle_a(&checker, 8..100);
        assert_eq!(checker.holder(), Some((0, 5, Holds::NotCommitted)));
        checker.committed(0, 100);
        assert_eq!(checker.holder(), Some((1, 0, Holds::NotHanded)));
    }

    #[test]
    fn the_slowest_handler_is_remembered() {
        let checker = checker();
        handle(&checker, without_key(0, 1));
        let slow = checker.enter(without_key(1, 3));
        std::thread::sleep(std::time::Duration::from_millis(20));
        checker.leave(slow);
        handle(&checker, without_key(0, 2));
        let slowest = checker.slowest();
        assert_eq!((slowest.partition, slowest.offset), (1, 3));
        assert!(slowest.nanos >= 20_000_000);
    }

    #[test]
    fn many_threads_at_once_raise_no_false_alarm() {
        let checker = checker();
        std::thread::scope(|scope| {
            let checker = &checker;
            scope.spawn(move || (0..100).for_each(|n| handle(checker, seen("a", 0, n, n as u64))));
            scope.spawn(move || (0..100).for_each(|n| handle(checker, seen("b", 1, n, n as u64))));
            scope.spawn(move || {
                let mut follower = Follower::new(2);
                loop {
                    let progress = checker.progress(&mut follower);
                    assert!(progress.above_watermark == 0, "each thread finishes in order");
                    for (partition, finished) in (0..).zip(&follower.unfinished) {
                        checker.committed(partition, *finished as i64);
                    }
                    if progress.committed == 200 {
                        break;
                    }
                }
            });
        });
        assert_eq!(checker.holder(), None);
        assert_clean(&checker);
    }
}
