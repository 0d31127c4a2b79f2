//! The consumer against a real Apache Kafka, in processes of its own that come, go and are killed.

mod common;
mod recorder;

use common::{Running, Seen, wait_until};
use libtest_mimic::{Arguments, Trial};
use plimsoll_kafka::Record;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PARTITIONS: i32 = 4;
const KEYS: u64 = 37;

/// A process that runs `recorder::main`.
struct Recorder {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Recorder {
    fn start(
        brokers: &str,
        group: &str,
        topic: &str,
        file: &Path,
        time: u64,
        more: &[&str],
    ) -> Self {
        let program = std::env::current_exe().unwrap();
        let mut child = Command::new(&program)
            .args(["recorder", brokers, group, topic, file.to_str().unwrap(), &time.to_string()])
            .args(["session.timeout.ms=6000", "heartbeat.interval.ms=500"])
            .args(more)
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}", program.display()));
        let output = BufReader::new(child.stdout.take().unwrap());
        Recorder { child, output }
    }

    /// Waits for its first assignment.
    fn ready(mut self) -> Self {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        self
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }

    fn kill(mut self) {
        self.child.kill().unwrap(); // SIGKILL
        self.child.wait().unwrap();
    }

    /// SIGTERM, and the end within the drain budget.
    fn terminate(mut self) {
        self.signal("TERM");
        let began = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(began.elapsed() < Duration::from_secs(20), "no end after SIGTERM");
            std::thread::sleep(Duration::from_millis(10));
        };
        assert!(status.success(), "{status}");
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        // A failed test: nothing may stay behind. It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the recorders wrote down, in the order it took effect.
#[derive(Debug, Default)]
struct Written {
    /// Per partition: how often each offset took effect.
    times: Vec<BTreeMap<i64, u32>>,
}

impl Written {
    /// Reads the file and checks the order: each key's offsets take effect in order, where a repeat
    /// of what took effect before is allowed and a step over what did not is not.
    fn read(file: &Path, end: i64) -> Self {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let mut times = vec![BTreeMap::new(); PARTITIONS as usize];
        let mut last: BTreeMap<(i32, String), i64> = BTreeMap::new();
        for line in text.lines() {
            let mut fields = line.split(' ');
            let mut field = || fields.next().unwrap_or_else(|| panic!("torn line {line:?}"));
            let partition: i32 = field().parse().unwrap();
            let offset: i64 = field().parse().unwrap();
            let key = field().to_owned();
            assert!((0..end).contains(&offset), "{line:?} was never produced");
            *times[partition as usize].entry(offset).or_default() += 1;
            let last = last.entry((partition, key)).or_insert(-1);
            if offset > *last {
                // Keys take turns, so a key's offsets are KEYS apart.
                let expected = if *last < 0 { offset % KEYS as i64 } else { *last + KEYS as i64 };
                assert_eq!(offset, expected, "{line:?} took effect before {expected}");
                *last = offset;
            }
        }
        Written { times }
    }

    fn distinct(&self) -> usize {
        self.times.iter().map(BTreeMap::len).sum()
    }

    fn repeats(&self) -> u32 {
        self.times.iter().flat_map(BTreeMap::values).map(|times| times - 1).sum()
    }

    fn assert_complete(&self, end: i64) {
        for (partition, times) in self.times.iter().enumerate() {
            let missing: Vec<i64> = (0..end).filter(|offset| !times.contains_key(offset)).collect();
            assert!(missing.is_empty(), "{missing:?}: partition {partition} lost records");
        }
    }
}

/// `from..to` of each partition; keys take turns.
fn produce(kafka: &plimsoll_testkit::Kafka, topic: &str, from: u64, to: u64) {
    kafka.produce(
        topic,
        (from..to).flat_map(|sequence| {
            (0..PARTITIONS).map(move |partition| {
                (partition, format!("k{}", sequence % KEYS), format!("value {sequence}"))
            })
        }),
    );
}

/// A topic, a group and a file for one test.
fn scene(name: &str) -> (&'static plimsoll_testkit::Kafka, String, tempfile::TempDir, PathBuf) {
    let kafka = plimsoll_testkit::shared();
    kafka.create_topic(name, PARTITIONS);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("handled");
    (kafka, kafka.bootstrap(), folder, file)
}

fn assert_all_committed(kafka: &plimsoll_testkit::Kafka, group: &str, topic: &str, end: i64) {
    for partition in 0..PARTITIONS {
        assert_eq!(kafka.committed(group, topic, partition), Some(end), "partition {partition}");
        assert_eq!(kafka.end_offset(topic, partition), end);
    }
}

fn a_member_joins_and_leaves(name: &str, properties: &[&str]) {
    let (kafka, brokers, _folder, file) = scene(name);
    let start = || Recorder::start(&brokers, name, name, &file, 1_000, properties);
    let first = start().ready();
    produce(kafka, name, 0, 1_000);
    let second = start();
    produce(kafka, name, 1_000, 1_500);
    let second = second.ready();
    produce(kafka, name, 1_500, 2_000);
    wait_until("3/4 of the records", || Written::read(&file, 2_000).distinct() >= 6_000);
    second.terminate();
    produce(kafka, name, 2_000, 2_200);
    wait_until("all records", || Written::read(&file, 2_200).distinct() == 8_800);
    first.terminate();
    Written::read(&file, 2_200).assert_complete(2_200);
    assert_all_committed(kafka, name, name, 2_200);
}

fn a_member_joins_and_leaves_cooperatively() {
    a_member_joins_and_leaves("cooperative", &[]);
}

fn a_member_joins_and_leaves_eagerly() {
    a_member_joins_and_leaves("eager", &["partition.assignment.strategy=range"]);
}

fn a_killed_process_loses_nothing() {
    let (kafka, brokers, _folder, file) = scene("killed");
    produce(kafka, "killed", 0, 3_000);
    let start = || Recorder::start(&brokers, "killed", "killed", &file, 2_000, &[]).ready();
    let mut committed = vec![0; PARTITIONS as usize];
    for life in 1..=3 {
        let recorder = start();
        wait_until("a part", || Written::read(&file, 3_000).distinct() >= life * 1_500);
        recorder.kill();
        let written = Written::read(&file, 3_000);
        for (partition, times) in written.times.iter().enumerate() {
            // Everything below what was committed had taken effect.
            let now = kafka.committed("killed", "killed", partition as i32).unwrap_or(0);
            assert!(now >= committed[partition], "the commit went back");
            let missing: Vec<i64> = (0..now).filter(|offset| !times.contains_key(offset)).collect();
            assert!(missing.is_empty(), "{missing:?}: partition {partition} committed up to {now}");
            committed[partition] = now;
        }
    }
    let last = start();
    wait_until("all records", || Written::read(&file, 3_000).distinct() == 12_000);
    last.terminate();
    let written = Written::read(&file, 3_000);
    written.assert_complete(3_000);
    assert!(written.repeats() > 0, "the kills hit nothing: the test shows nothing");
    assert_all_committed(kafka, "killed", "killed", 3_000);
}

fn a_broker_that_is_killed_and_comes_back_loses_nothing() {
    let kafka = plimsoll_testkit::Kafka::start();
    kafka.create_topic("restart", PARTITIONS);
    produce(&kafka, "restart", 0, 1_000);
    let seen = Seen::new();
    let brokers = kafka.bootstrap();
    let running =
        Running::start(common::consumer(&brokers, "restart", "restart").workers(2).each({
            let seen = Arc::clone(&seen);
            move |record: &Record| {
                seen.handle(record, || std::thread::sleep(Duration::from_micros(200)));
            }
        }));
    wait_until("a part", || seen.count() > 1_000);
    kafka.kill(0);
    std::thread::sleep(Duration::from_secs(1));
    kafka.restart(0);
    produce(&kafka, "restart", 1_000, 1_500);
    wait_until("all records", || seen.total_distinct(PARTITIONS) == 6_000);
    running.stop().unwrap();
    seen.assert_complete(PARTITIONS, 1_500);
    assert_all_committed(&kafka, "restart", "restart", 1_500);
}

fn a_missing_topic_is_named() {
    let kafka = plimsoll_testkit::shared();
    let builder = common::consumer(&kafka.bootstrap(), "g", "no-such-topic");
    let builder =
        builder.startup_limit(Duration::from_secs(300)).set("allow.auto.create.topics", "false");
    match Running::start(builder.each(|_: &Record| ())).join().unwrap_err() {
        plimsoll_kafka::Error::TopicMissing { topic } => assert_eq!(topic, "no-such-topic"),
        other => panic!("{other}"),
    }
}

/// Runs the tests, or, called as `recorder ...`, is the process that they start and kill.
fn main() -> std::process::ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some((first, rest)) = arguments.split_first()
        && first == "recorder"
    {
        return match recorder::main(rest) {
            Ok(()) => std::process::ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("recorder: {error}");
                std::process::ExitCode::FAILURE
            }
        };
    }
    let tests: [(&str, fn()); 5] = [
        ("a_member_joins_and_leaves_cooperatively", a_member_joins_and_leaves_cooperatively),
        ("a_member_joins_and_leaves_eagerly", a_member_joins_and_leaves_eagerly),
        ("a_killed_process_loses_nothing", a_killed_process_loses_nothing),
        (
            "a_broker_that_is_killed_and_comes_back_loses_nothing",
            a_broker_that_is_killed_and_comes_back_loses_nothing,
        ),
        ("a_missing_topic_is_named", a_missing_topic_is_named),
    ];
    let trials = tests.into_iter().map(|(name, test)| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    });
    let mut settings = Arguments::from_args();
    // Each starts processes of its own: two cores are busy with one of them.
    settings.test_threads = settings.test_threads.or(Some(1));
    libtest_mimic::run(&settings, trials.collect()).exit_code()
}
