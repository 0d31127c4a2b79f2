//! Resuming without repeats, on a real Apache Kafka, in processes that are killed and partitions that move.

mod common;

use common::{Running, Seen, event_log, wait_until};
use libtest_mimic::{Arguments, Trial};
use plimsoll_kafka::done_map::DoneMap;
use plimsoll_kafka::{Consumer, Event, Record, Retry};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const RECORDS: u64 = 20_000;
/// Its handler does not end in the first life.
const STUCK: i64 = 0;

/// `BROKERS GROUP TOPIC FILE LIFE`: handles records and appends the offset of each to the file.
fn child(arguments: &[String]) -> Result<(), Box<dyn std::error::Error>> {
    let [brokers, group, topic, file, life] = arguments else {
        return Err("BROKERS GROUP TOPIC FILE LIFE".into());
    };
    let file = std::fs::OpenOptions::new().create(true).append(true).open(file)?;
    let first = life == "first";
    let consumer = Consumer::builder()
        .brokers(brokers)
        .group(group)
        .topic(topic)
        .set("session.timeout.ms", "6000")
        .set("heartbeat.interval.ms", "500")
        .workers(4)
        .commit_interval(Duration::from_millis(100))
        .on_event(|event| {
            if !matches!(event, Event::Committed { .. }) {
                eprintln!("{event:?}");
            }
        })
        .each(move |record: &Record| {
            while first && record.offset() == STUCK {
                std::thread::park();
            }
            // One write, so that no line is torn by the kill.
            (&file).write_all(format!("{}\n", record.offset()).as_bytes())
        })
        .build()?;
    eprintln!("{:?}", consumer.run()?);
    Ok(())
}

/// Killed if the test fails.
struct Process(Child);

impl Process {
    fn start(brokers: &str, name: &str, file: &Path, life: &str) -> Self {
        let program = std::env::current_exe().unwrap();
        let child = Command::new(program)
            .args(["child", brokers, name, name, file.to_str().unwrap(), life])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Process(child)
    }

    /// SIGKILL.
    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn written(file: &Path) -> Vec<i64> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines().map(|line| line.parse().unwrap()).collect()
}

/// What the broker has for partition 0.
fn stored_map(brokers: &str, name: &str) -> Option<DoneMap> {
    let client: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", name)
        .create()
        .unwrap();
    let mut list = TopicPartitionList::new();
    list.add_partition(name, 0);
    // Read out and dropped before the client: a list that outlives it hangs its drop.
    let list = client.committed_offsets(list, common::PATIENCE).unwrap();
    let elements = list.elements();
    match elements[0].offset() {
        Offset::Offset(offset) => Some(DoneMap::decode(offset, elements[0].metadata()).unwrap()),
        _ => None,
    }
}

fn a_killed_process_repeats_next_to_nothing_above_its_stuck_record() {
    let name = "stuck-and-killed";
    let kafka = plimsoll_testkit::shared();
    kafka.create_topic(name, 1);
    let brokers = kafka.bootstrap();
    let folder = tempfile::tempdir().unwrap();
    let (first, second) = (folder.path().join("first"), folder.path().join("second"));
    // Each with a key of its own, so that only what its worker has claimed waits for the stuck one.
    kafka.produce(
        name,
        (0..RECORDS).map(|sequence| (0, format!("k{sequence}"), format!("value {sequence}"))),
    );
    let process = Process::start(&brokers, name, &first, "first");
    let most = RECORDS as usize * 9 / 10;
    wait_until("most records", || written(&first).len() >= most);
    wait_until("the commit of most", || {
        stored_map(&brokers, name).is_some_and(|map| map.len() >= most as u64)
    });
    process.kill();
    let map = stored_map(&brokers, name).unwrap();
    assert_eq!(map.committed(), STUCK, "nothing is committed past it");
    let before: BTreeSet<i64> = written(&first).into_iter().collect();
    assert!(!before.contains(&STUCK));
    for range in map.ranges() {
        let lost = range.clone().find(|offset| !before.contains(offset));
        assert_eq!(lost, None, "listed as finished, and it is not");
    }

    let process = Process::start(&brokers, name, &second, "second");
    wait_until("all committed", || kafka.committed(name, name, 0) == Some(RECORDS as i64));
    process.kill();
    let after = written(&second);
    let all: BTreeSet<i64> = before.iter().chain(&after).copied().collect();
    assert_eq!(all.len() as u64, RECORDS, "records were lost");
    let repeats = after.iter().filter(|offset| before.contains(offset)).count();
    eprintln!("{} finished before the kill, {repeats} of them repeated", before.len());
    assert!(repeats * 100 < before.len(), "{repeats} of {} were repeated", before.len());
}

fn a_member_that_takes_a_partition_over_repeats_nothing_that_is_finished() {
    const EACH: i64 = 2_000;
    let name = "stuck-and-moved";
    let kafka = plimsoll_testkit::shared();
    kafka.create_topic(name, 2);
    let brokers = kafka.bootstrap();
    kafka.produce(
        name,
        (0..EACH).flat_map(|sequence| {
            (0..2).map(move |partition| (partition, format!("k{sequence}"), "value".to_owned()))
        }),
    );
    let gate = Arc::new(AtomicBool::new(false));
    let (first, second) = (Seen::new(), Seen::new());
    let builder = || {
        let builder = common::consumer(&brokers, name, name).workers(4);
        builder.drain_budget(Duration::from_secs(1))
    };
    let (log, on_event) = event_log();
    let member = Running::start(builder().on_event(on_event).each({
        let (first, gate) = (Arc::clone(&first), Arc::clone(&gate));
        move |record: &Record| {
            first.handle(record, || {
                while record.offset() == STUCK && !gate.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }
    }));
    wait_until("most records", || first.total_distinct(2) >= EACH as usize * 2 * 9 / 10);
    let other = Running::start(builder().each({
        let second = Arc::clone(&second);
        move |record: &Record| second.handle(record, || ())
    }));
    let end = |partition| kafka.committed(name, name, partition) == Some(EACH);
    wait_until("the moved partition", || end(0) || end(1));
    let moved = i32::from(end(1));
    let before = first.distinct(moved);
    let expected: Vec<_> =
        (0..EACH).filter(|offset| before.binary_search(offset).is_err()).collect();
    assert_eq!(second.distinct(moved), expected);
    assert_eq!(second.count(), expected.len(), "none twice");
    gate.store(true, Ordering::Release);
    wait_until("the kept partition", || end(1 - moved));
    member.stop().unwrap();
    let report = other.stop().unwrap();
    assert!(report.resumed >= before.len() as u64, "{report:?}");
    let failed = |event: &Event| matches!(event, Event::CommitFailed { .. });
    assert!(!log.lock().iter().any(failed), "{:?}", log.lock());
}

/// The broker takes 4,096 bytes.
fn b47_metadata_that_the_broker_refuses_costs_repeats_and_no_commit() {
    const END: i64 = 40_000;
    let name = "too-much-metadata";
    let kafka = plimsoll_testkit::shared();
    kafka.create_topic(name, 1);
    let brokers = kafka.bootstrap();
    kafka.produce(name, (0..END).map(|sequence| (0, format!("k{sequence}"), "value".to_owned())));
    // A third, without a pattern.
    let fails = |offset: i64| {
        offset == 0
            || (offset.unsigned_abs().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32).is_multiple_of(3)
    };
    let finished = (0..END).filter(|offset| !fails(*offset)).count();
    let (first, second) = (Seen::new(), Seen::new());
    let (log, on_event) = event_log();
    let builder = common::consumer(&brokers, name, name)
        .metadata_limit(32_767)
        .retry(Retry::times(10).first(Duration::from_secs(3_600)))
        .drain_budget(Duration::from_millis(300))
        .on_event(on_event);
    let running = Running::start(builder.each({
        let first = Arc::clone(&first);
        move |record: &Record| {
            if fails(record.offset()) {
                return Err("not now");
            }
            first.handle(record, || ());
            Ok(())
        }
    }));
    wait_until("what does not fail", || first.count() == finished);
    // Once the whole map was offered, also if it all went by within one interval.
    let told = |event: &Event| matches!(event, Event::Warning { message } if message.contains("bytes of metadata"));
    wait_until("the refusal", || log.lock().iter().any(told));
    let report = running.stop().unwrap();
    assert!(report.metadata_refused >= 1, "{report:?}");
    assert_eq!(log.lock().iter().filter(|event| told(event)).count(), 1);
    assert_eq!(report.partitions[0].committed, Some(0));
    let map = stored_map(&brokers, name).unwrap();
    assert!((1_000..finished as u64).contains(&map.len()), "{}", map.len());

    let running = Running::start(common::consumer(&brokers, name, name).each({
        let second = Arc::clone(&second);
        move |record: &Record| second.handle(record, || ())
    }));
    wait_until("the rest", || kafka.committed(name, name, 0) == Some(END));
    let report = running.stop().unwrap();
    let expected: Vec<_> = (0..END).filter(|offset| !map.contains(*offset)).collect();
    assert_eq!(second.distinct(0), expected);
    assert_eq!((report.resumed, report.metadata_refused), (map.len(), 0));
}

/// Runs the tests, or, called as `child ...`, is the process that one of them starts and kills.
fn main() -> std::process::ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some((first, rest)) = arguments.split_first()
        && first == "child"
    {
        return match child(rest) {
            Ok(()) => std::process::ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("child: {error}");
                std::process::ExitCode::FAILURE
            }
        };
    }
    let tests: [(&str, fn()); 3] = [
        (
            "b47_metadata_that_the_broker_refuses_costs_repeats_and_no_commit",
            b47_metadata_that_the_broker_refuses_costs_repeats_and_no_commit,
        ),
        (
            "a_killed_process_repeats_next_to_nothing_above_its_stuck_record",
            a_killed_process_repeats_next_to_nothing_above_its_stuck_record,
        ),
        (
            "a_member_that_takes_a_partition_over_repeats_nothing_that_is_finished",
            a_member_that_takes_a_partition_over_repeats_nothing_that_is_finished,
        ),
    ];
    let trials = tests.into_iter().map(|(name, test)| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    });
    let mut settings = Arguments::from_args();
    // Each needs the two cores.
    settings.test_threads = settings.test_threads.or(Some(1));
    libtest_mimic::run(&settings, trials.collect()).exit_code()
}
