//! Resuming without repeats, on a real Apache Kafka, in a process that is killed.

mod common;

use common::wait_until;
use libtest_mimic::{Arguments, Trial};
use plimsoll_kafka::done_map::DoneMap;
use plimsoll_kafka::{Consumer, Event, Record};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
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

/// Runs the test, or, called as `child ...`, is the process that it starts and kills.
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
    let test = a_killed_process_repeats_next_to_nothing_above_its_stuck_record;
    let trial =
        Trial::test("a_killed_process_repeats_next_to_nothing_above_its_stuck_record", move || {
            test();
            Ok(())
        });
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit_code()
}
