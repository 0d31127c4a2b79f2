//! The poller over a client that follows a script: what is hard to get from a broker.

// A list of one range is meant.
#![allow(clippy::single_range_in_vec_init)]

use crate::client::{
    Client, Commit, CommitResult, Event as Said, Found, Intake, Refusal, RefusalKind, Source,
    TopicPartition,
};
use crate::done_map::{DoneMap, Encoder};
use crate::error::Error;
use crate::event::{Event, Report};
use crate::fault::Planted;
use crate::poller::{Asked, Hooks, Limits, Poller};
use crate::resume::Settings;
use parking_lot::Mutex;
use plimsoll_engine::{Executor, Outcome, Waiter};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Debug)]
struct Record {
    partition: i32,
    offset: i64,
}

impl Intake for Record {
    fn offset(&self) -> i64 {
        self.offset
    }

    fn key(&self) -> Option<&[u8]> {
        None
    }
}

/// What comes of a look-up.
#[derive(Debug, Clone)]
enum Answer {
    Never,
    Refused(RefusalKind),
    Stored(i64, Vec<u8>),
}

/// What the script saw.
#[derive(Debug, Default)]
struct Log {
    handled: Vec<(i32, i64)>,
    commits: Vec<Commit>,
    events: Vec<Event>,
}

/// Each partition is assigned by itself, so that each has a look-up of its own.
struct Script {
    began: Instant,
    waiter: Waiter,
    answers: Vec<Answer>,
    queues: Vec<VecDeque<Record>>,
    said: Vec<Said>,
    refuse_metadata_above: usize,
    log: Arc<Mutex<Log>>,
}

fn partition(number: i32) -> TopicPartition {
    TopicPartition { topic: "t".into(), partition: number }
}

impl Client for Script {
    type Record = Record;

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn wait(&self, limit: Duration, ready: &mut dyn FnMut() -> bool) {
        self.waiter.wait(limit.min(Duration::from_millis(5)), ready);
    }

    fn has_events(&self) -> bool {
        !self.said.is_empty()
    }

    fn events(&mut self, out: &mut Vec<Said>) {
        out.append(&mut self.said);
    }

    fn attach(&mut self, partition: &TopicPartition) -> Result<Source, Error> {
        Ok(Source(partition.partition as usize))
    }

    fn detach(&mut self, _: Source) {}

    fn confirm_assign(&mut self, _: &[TopicPartition]) -> Result<(), Error> {
        Ok(())
    }

    fn confirm_revoke(&mut self, _: &[TopicPartition]) -> Result<(), Error> {
        Ok(())
    }

    fn is_ready(&self, source: Source) -> bool {
        !self.queues[source.0].is_empty()
    }

    fn assume_ready(&mut self) {}

    fn fetch(&mut self, source: Source, most: usize, out: &mut Vec<Record>) -> Result<(), Error> {
        let queue = &mut self.queues[source.0];
        out.extend(queue.drain(..most.min(queue.len())));
        Ok(())
    }

    fn commit(&mut self, commits: &[Commit]) -> Result<(), Error> {
        let mut log = self.log.lock();
        let results = commits.iter().map(|commit| {
            let outcome = if commit.metadata.len() > self.refuse_metadata_above {
                let kind = RefusalKind::MetadataTooLarge;
                Err(Refusal { reason: "too large".to_owned(), kind })
            } else {
                log.commits.push(commit.clone());
                Ok(())
            };
            CommitResult { partition: commit.partition.clone(), offset: commit.offset, outcome }
        });
        self.said.push(Said::CommitDone(results.collect()));
        Ok(())
    }

    fn look_up_committed(
        &mut self,
        look_up: usize,
        partitions: &[TopicPartition],
        _: Duration,
    ) -> Result<(), Error> {
        let [partition] = partitions else { panic!("{partitions:?}") };
        let outcome = match self.answers[partition.partition as usize].clone() {
            Answer::Never => return Ok(()),
            Answer::Refused(kind) => Err(Refusal { reason: "refused".to_owned(), kind }),
            Answer::Stored(offset, metadata) => {
                let committed = Ok(Some((offset, metadata)));
                Ok(vec![Found { partition: partition.clone(), committed }])
            }
        };
        self.said.push(Said::Found { look_up, outcome });
        Ok(())
    }

    fn close(self, _: Duration) -> bool {
        true
    }
}

/// A stage with one script.
struct Stage {
    answers: Vec<Answer>,
    records: Vec<Range<i64>>,
    look_up: Duration,
    refuse_metadata_above: usize,
    /// Its handler fails for good.
    fails: Option<i64>,
    /// Of the epochs, in offsets.
    span: Option<u64>,
}

impl Stage {
    fn one(answer: Answer, records: Range<i64>) -> Self {
        Stage {
            answers: vec![answer],
            records: vec![records],
            look_up: Duration::from_millis(50),
            refuse_metadata_above: usize::MAX,
            fails: None,
            span: None,
        }
    }

    /// Runs until so many records are handled, and stops.
    fn run(self, handled: usize) -> (Result<Report, Error>, Log) {
        let log = Arc::new(Mutex::new(Log::default()));
        let queues = self.records.into_iter().zip(0..).map(|(offsets, partition)| {
            offsets.map(|offset| Record { partition, offset }).collect()
        });
        let script = Script {
            began: Instant::now(),
            waiter: Waiter::new(),
            said: (0..self.answers.len() as i32)
                .map(|number| Said::Assign(vec![partition(number)]))
                .collect(),
            answers: self.answers,
            queues: queues.collect(),
            refuse_metadata_above: self.refuse_metadata_above,
            log: Arc::clone(&log),
        };
        let executor = Executor::builder().workers(2).each(script.waiter.waker(), {
            let log = Arc::clone(&log);
            move |record: &Record| {
                if self.fails == Some(record.offset) {
                    return Outcome::Failed("planted".to_owned());
                }
                log.lock().handled.push((record.partition, record.offset));
                Outcome::Done
            }
        });
        let limits = Limits {
            window: 1_000,
            admission: self
                .span
                .iter()
                .fold(plimsoll_engine::Limits::new(1_000), |limits, span| limits.span(*span)),
            commit_interval: Duration::from_millis(5),
            drain: Duration::from_secs(5),
            commit: Duration::from_secs(5),
            look_up: self.look_up,
        };
        let (told, watched) = (Arc::clone(&log), Arc::clone(&log));
        let began = Instant::now();
        let hooks = Hooks {
            on_event: Box::new(move |event| told.lock().events.push(event.clone())),
            asked: Box::new(move || {
                let enough = watched.lock().handled.len() >= handled;
                let late = began.elapsed() > Duration::from_secs(60);
                if enough || late { Asked::Drain } else { Asked::GoOn }
            }),
        };
        let poller = Poller::new(
            script,
            executor.unwrap(),
            limits,
            Settings::default(),
            hooks,
            Planted::nothing(),
        );
        let report = poller.run();
        let mut log = std::mem::take(&mut *log.lock());
        log.handled.sort_unstable();
        (report, log)
    }
}

impl Log {
    fn handled(&self, partition: i32) -> Vec<i64> {
        self.handled.iter().filter(|(of, _)| *of == partition).map(|(_, offset)| *offset).collect()
    }

    fn warnings(&self) -> usize {
        self.events.iter().filter(|event| matches!(event, Event::Warning { .. })).count()
    }
}

fn text(committed: i64, ranges: &[Range<i64>]) -> Vec<u8> {
    let mut map = DoneMap::new(committed);
    ranges.iter().for_each(|range| map.push_range(range.clone()).unwrap());
    Encoder::new().encode(&map).as_bytes().to_vec()
}

#[test]
fn without_an_answer_everything_is_handled_after_the_deadline() {
    let (report, log) = Stage::one(Answer::Never, 500..600).run(100);
    assert_eq!(report.unwrap().resumed, 0);
    assert_eq!(log.handled(0), (500..600).collect::<Vec<_>>());
    assert_eq!(log.warnings(), 1, "{:?}", log.events);
}

#[test]
fn a_look_up_that_is_refused_for_good_is_told_once() {
    let mut stage = Stage::one(Answer::Refused(RefusalKind::Fatal), 500..600);
    stage.look_up = Duration::from_secs(3_600);
    let (report, log) = stage.run(100);
    assert_eq!(report.unwrap().handled, 100);
    assert_eq!(log.warnings(), 1, "{:?}", log.events);
}

#[test]
fn a_look_up_that_is_refused_again_and_again_ends_at_its_deadline() {
    let mut stage = Stage::one(Answer::Refused(RefusalKind::Passing), 500..600);
    stage.look_up = Duration::from_millis(500);
    let (report, log) = stage.run(100);
    assert_eq!(report.unwrap().handled, 100);
    assert_eq!(log.warnings(), 1, "{:?}", log.events);
}

#[test]
fn other_partitions_go_on_during_a_look_up() {
    let mut stage = Stage::one(Answer::Never, 0..50);
    stage.answers.push(Answer::Stored(0, text(0, &[1..5])));
    stage.records.push(0..50);
    stage.look_up = Duration::from_secs(3_600);
    let (report, log) = stage.run(46);
    assert_eq!(log.handled(0), [0_i64; 0]);
    assert_eq!(log.handled(1), std::iter::once(0).chain(5..50).collect::<Vec<_>>());
    assert_eq!(report.unwrap().resumed, 4);
}

#[test]
fn marks_of_records_that_are_gone_are_not_awaited() {
    let stored = Answer::Stored(500, text(500, &[502..510, 600..610]));
    // 500..=504 are not there any more.
    let (report, log) = Stage::one(stored, 505..700).run(180);
    let expected: Vec<_> = (510..600).chain(610..700).collect();
    assert_eq!(log.handled(0), expected);
    let report = report.unwrap();
    assert_eq!((report.resumed, report.partitions[0].committed), (15, Some(700)));
}

#[test]
fn a_map_of_offsets_that_were_reset_is_ignored() {
    let stored = Answer::Stored(500, text(500, &[502..510]));
    let (report, log) = Stage::one(stored, 100..600).run(500);
    assert_eq!(log.handled(0), (100..600).collect::<Vec<_>>());
    assert_eq!(report.unwrap().resumed, 0);
    assert_eq!(log.warnings(), 1, "{:?}", log.events);
}

#[test]
fn bytes_that_are_no_text_are_ignored() {
    let stored = Answer::Stored(500, vec![b'~', b'1', 0xff, 0xfe]);
    let (report, log) = Stage::one(stored, 500..600).run(100);
    let report = report.unwrap();
    assert_eq!((report.handled, report.metadata_ignored), (100, 1));
    let ignored = |event: &&Event| matches!(event, Event::MetadataIgnored { .. });
    assert_eq!(log.events.iter().filter(ignored).count(), 1);
}

/// The poller sees room for records, and they are refused one by one.
#[test]
fn records_that_are_refused_for_lack_of_room_wait_and_none_is_lost() {
    for span in [1, 10, 50] {
        let mut stage = Stage::one(Answer::Stored(0, text(0, &[200..300])), 0..600);
        stage.span = Some(span);
        let (report, log) = stage.run(500);
        let report = report.unwrap();
        assert_eq!(log.handled(0), (0..200).chain(300..600).collect::<Vec<_>>());
        assert_eq!((report.resumed, report.partitions[0].committed), (100, Some(600)));
    }
}

/// The failed record ends the consumer, so the commit with the map is often the last one.
#[test]
fn the_last_commit_is_not_lost_when_its_metadata_is_refused() {
    for refuse_metadata_above in [0, 8, usize::MAX] {
        let mut stage = Stage::one(Answer::Stored(0, Vec::new()), 0..100);
        stage.fails = Some(20);
        stage.refuse_metadata_above = refuse_metadata_above;
        let (report, log) = stage.run(usize::MAX);
        assert!(matches!(report, Err(Error::Handler { offset: 20, .. })), "{report:?}");
        let last = log.commits.last().unwrap();
        // A record below the failed one may not have been started when its partition halted.
        let handled = log.handled(0);
        let first_open = (0..).find(|offset| handled.binary_search(offset).is_err()).unwrap();
        assert_eq!(last.offset, first_open);
        assert!(log.commits.iter().all(|commit| commit.metadata.len() <= refuse_metadata_above));
        let failed = |event: &Event| matches!(event, Event::CommitFailed { .. });
        assert!(!log.events.iter().any(failed), "{:?}", log.events);
        assert!(log.warnings() <= 1, "{:?}", log.events);
        if refuse_metadata_above == usize::MAX {
            // What the last commit lists is what was handled.
            let map = DoneMap::decode(last.offset, &last.metadata).unwrap();
            let above: Vec<_> = handled.into_iter().filter(|at| *at > first_open).collect();
            let listed: Vec<_> = map.ranges().iter().cloned().flatten().collect();
            assert_eq!(listed, above);
        }
    }
}
