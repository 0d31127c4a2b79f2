//! Resuming without repeats, against librdkafka's mock cluster.

mod common;

use common::{Mock, PATIENCE, Running, Seen, event_log, wait_until};
use plimsoll_kafka::done_map::{DoneMap, Encoder};
use plimsoll_kafka::{ConsumerBuilder, DoneMaps, Event, MetadataFull, Record, Retry};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn plain_client(mock: &Mock) -> BaseConsumer {
    ClientConfig::new()
        .set("bootstrap.servers", mock.brokers())
        .set("group.id", "g")
        .create()
        .unwrap()
}

/// What another member has committed for partition 0.
fn commit(mock: &Mock, offset: i64, metadata: &str) {
    let client = plain_client(mock);
    let mut list = TopicPartitionList::new();
    let mut element = list.add_partition("t", 0);
    element.set_offset(Offset::Offset(offset)).unwrap();
    element.set_metadata(metadata);
    client.commit(&list, CommitMode::Sync).unwrap();
}

/// Offset and metadata as the broker has them for partition 0.
fn committed(mock: &Mock) -> Option<(i64, String)> {
    let client = plain_client(mock);
    let mut list = TopicPartitionList::new();
    list.add_partition("t", 0);
    // Read out and dropped before the client: a list that outlives it hangs its drop.
    let list = client.committed_offsets(list, PATIENCE).unwrap();
    let elements = list.elements();
    match elements[0].offset() {
        Offset::Offset(offset) => Some((offset, elements[0].metadata().to_owned())),
        _ => None,
    }
}

fn stored_map(mock: &Mock) -> DoneMap {
    let (offset, metadata) = committed(mock).unwrap_or_default();
    DoneMap::decode(offset, &metadata).unwrap()
}

/// One partition with records of different keys.
fn topic(records: u64) -> Mock {
    let mock = Mock::start();
    mock.topic("t", 1);
    mock.fill("t", 1, records, records);
    mock
}

fn watching(builder: ConsumerBuilder, seen: &Arc<Seen>) -> Running {
    let seen = Arc::clone(seen);
    Running::start(builder.each(move |record: &Record| seen.handle(record, || ())))
}

/// A consumer whose handler fails for the records that `fails` names, which then wait for their next
/// attempt for the rest of its life.
fn failing(builder: ConsumerBuilder, seen: &Arc<Seen>, fails: fn(i64) -> bool) -> Running {
    let seen = Arc::clone(seen);
    let builder = builder.retry(Retry::times(10).first(Duration::from_secs(3_600)));
    Running::start(builder.drain_budget(Duration::from_millis(300)).each(move |record: &Record| {
        if fails(record.offset()) {
            return Err("not now");
        }
        seen.handle(record, || ());
        Ok(())
    }))
}

fn irregular(offset: i64) -> bool {
    offset == 0
        || (offset.unsigned_abs().wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32).is_multiple_of(3)
}

/// The offsets of `0..end` that are not among those.
fn others(of: &[i64], end: i64) -> Vec<i64> {
    (0..end).filter(|offset| of.binary_search(offset).is_err()).collect()
}

#[test]
fn one_stuck_record_and_what_was_unfinished_is_all_that_runs_again() {
    let mock = topic(5_000);
    let (first, second) = (Seen::new(), Seen::new());
    let gate = Arc::new(AtomicBool::new(false));
    let builder = mock.consumer("g", "t").workers(4).drain_budget(Duration::from_secs(1));
    let running = Running::start(builder.each({
        let (first, gate) = (Arc::clone(&first), Arc::clone(&gate));
        move |record: &Record| {
            first.handle(record, || {
                while record.offset() == 0 && !gate.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }
    }));
    wait_until("most records", || first.count() >= 4_500);
    // Long before the end the broker knows.
    wait_until("their commit", || committed(&mock).is_some() && stored_map(&mock).len() >= 4_500);
    let report = running.stop().unwrap();
    let finished = first.distinct(0);
    assert_eq!(report.partitions[0].committed, Some(0));
    gate.store(true, Ordering::Release);

    let (log, on_event) = event_log();
    let running = watching(mock.consumer("g", "t").on_event(on_event), &second);
    wait_until("the rest", || mock.committed("g", "t", 0) == Some(5_000));
    let report = running.stop().unwrap();
    assert_eq!(second.distinct(0), others(&finished, 5_000));
    assert_eq!(second.count() + finished.len(), 5_000, "none twice");
    assert_eq!(report.resumed, finished.len() as u64);
    assert_eq!(
        (report.handled, report.partitions[0].resumed),
        (second.count() as u64, report.resumed)
    );
    assert_eq!(committed(&mock), Some((5_000, String::new())));
    let resumed = Event::Resumed {
        topic: "t".to_owned(),
        partition: 0,
        offset: 0,
        finished: finished.len() as u64,
    };
    assert_eq!(log.lock().iter().filter(|event| **event == resumed).count(), 1);
}

#[test]
fn without_done_maps_nothing_is_written_and_nothing_is_read() {
    let mock = topic(200);
    let (first, second) = (Seen::new(), Seen::new());
    let off = mock.consumer("g", "t").done_map(DoneMaps::Off);
    let running = failing(off, &first, |offset| offset == 10);
    wait_until("all others", || first.count() == 199);
    running.stop().unwrap();
    assert_eq!(committed(&mock), Some((10, String::new())));
    // A group of its own: the mock lets only members commit where there have been any.
    let mock = topic(200);
    let mut map = DoneMap::new(10);
    map.push_range(11..200).unwrap();
    commit(&mock, 10, Encoder::new().encode(&map));
    let running = watching(mock.consumer("g", "t").done_map(DoneMaps::Off), &second);
    wait_until("the rest", || mock.committed("g", "t", 0) == Some(200));
    assert_eq!(running.stop().unwrap().resumed, 0);
    assert_eq!(second.distinct(0), (10..200).collect::<Vec<_>>());
}

#[test]
fn b47_useless_metadata_is_told_once_and_overwritten() {
    let map = |committed: i64| {
        let mut map = DoneMap::new(committed);
        for at in 0..30 {
            map.push_range(committed + 2 + 3 * at..committed + 4 + 3 * at).unwrap();
        }
        Encoder::new().encode(&map).to_owned()
    };
    let own = map(500);
    let other_base = map(400);
    let unknown_version = own.replacen("~1", "~2", 1);
    let random: String = (0..100_u64)
        .map(|at| char::from(1 + (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 57) as u8 % 127))
        .collect();
    for (name, text) in [
        ("nothing", ""),
        ("random", &*random),
        ("Kafka Streams", "AQAA"),
        ("4,096 bytes", &*"x".repeat(4_096)),
        ("4,096 bytes of ours", &*format!("~1{}", "!".repeat(4_094))),
        ("unknown version", &*unknown_version),
        ("cut in half", &own[..own.len() / 2]),
        ("other base", &*other_base),
    ] {
        for parallel_consumer in [false, true] {
            let mock = topic(600);
            commit(&mock, 500, text);
            let seen = Seen::new();
            let (log, on_event) = event_log();
            let builder = mock.consumer("g", "t").on_event(on_event);
            let builder = builder.resume_from_parallel_consumer(parallel_consumer);
            let running = watching(builder, &seen);
            wait_until(name, || mock.committed("g", "t", 0) == Some(600));
            let report = running.stop().unwrap();
            assert_eq!(seen.distinct(0), (500..600).collect::<Vec<_>>(), "{name}");
            assert_eq!(committed(&mock), Some((600, String::new())), "{name}");
            let ignored =
                |event: &&Event| matches!(event, Event::MetadataIgnored { offset: 500, .. });
            let told = log.lock().iter().filter(ignored).count();
            let expected = usize::from(!text.is_empty());
            assert_eq!((told, report.metadata_ignored), (expected, expected as u64), "{name}");
        }
    }
}

#[test]
fn b47_a_cut_map_repeats_only_what_was_cut() {
    const END: i64 = 2_000;
    let mock = topic(END as u64);
    let (first, second) = (Seen::new(), Seen::new());
    let finished = (0..END).filter(|offset| !irregular(*offset)).count();
    let running = failing(mock.consumer("g", "t").metadata_limit(100), &first, irregular);
    wait_until("what does not fail", || first.count() == finished);
    let report = running.stop().unwrap();
    assert!(report.metadata_cut > 0, "{report:?}");
    let (offset, metadata) = committed(&mock).unwrap();
    assert_eq!(offset, 0);
    assert!((60..=100).contains(&metadata.len()), "{} bytes", metadata.len());
    let map = DoneMap::decode(offset, &metadata).unwrap();
    assert!((100..finished as u64).contains(&map.len()), "{}", map.len());
    // Cut at its far end.
    assert!((0..map.end()).all(|offset| map.contains(offset) != irregular(offset)));

    let running = watching(mock.consumer("g", "t"), &second);
    wait_until("the rest", || mock.committed("g", "t", 0) == Some(END));
    let report = running.stop().unwrap();
    let expected: Vec<_> = (0..END).filter(|offset| !map.contains(*offset)).collect();
    assert_eq!(second.distinct(0), expected);
    assert_eq!((report.resumed, report.metadata_cut), (map.len(), 0));
}

#[test]
fn intake_slows_down_instead_of_a_cut() {
    const END: i64 = 20_000;
    let mock = topic(END as u64);
    let (first, second) = (Seen::new(), Seen::new());
    let (log, on_event) = event_log();
    let slow = || {
        let builder = mock.consumer("g", "t").metadata_limit(512);
        builder.when_metadata_full(MetadataFull::SlowDown)
    };
    let running = failing(slow().on_event(on_event), &first, irregular);
    let paused = |event: &Event| matches!(event, Event::Warning { message } if message.contains("slows down"));
    wait_until("the pause", || log.lock().iter().any(paused));
    std::thread::sleep(Duration::from_millis(500));
    let report = running.stop().unwrap();
    // It went as far as the text has room for, not to the end; and nothing was cut.
    let finished = first.distinct(0);
    assert!((500..10_000).contains(&finished.len()), "{}", finished.len());
    assert_eq!(report.metadata_cut, 0);
    let (offset, metadata) = committed(&mock).unwrap();
    let map = DoneMap::decode(offset, &metadata).unwrap();
    assert!(metadata.len() <= 512, "{}", metadata.len());
    assert_eq!(map.len(), finished.len() as u64);
    assert_eq!(log.lock().iter().filter(|event| paused(event)).count(), 1);

    // What was unfinished ends, and intake goes on to the end.
    let running = watching(slow(), &second);
    wait_until("the rest", || mock.committed("g", "t", 0) == Some(END));
    let report = running.stop().unwrap();
    assert_eq!(report.resumed, finished.len() as u64);
    assert_eq!(second.distinct(0), others(&finished, END));
    assert_eq!(report.metadata_cut, 0);
}

#[test]
fn a_group_of_the_parallel_consumer_is_taken_over() {
    // Written by the encoders of that library: 500, 501 and 505 of 500..=509 are unfinished; every
    // second one from the committed offset on.
    let alternating = (500..541).filter(|offset| offset % 2 == 0);
    for (text, end, expected) in [
        ("bAAK3AMA", 520, [500, 501, 505].into_iter().chain(510..520).collect::<Vec<_>>()),
        ("cyi1L/0AWDkAAAAAAArcAwA=", 510, vec![500, 501, 505]),
        ("ZQAAAAIAAAADAAAAAQAAAAQ=", 510, vec![500, 501, 505]),
        ("bAApqqqqqqoAAA==", 541, alternating.collect()),
    ] {
        let mock = topic(end);
        commit(&mock, 500, text);
        let seen = Seen::new();
        let builder = mock.consumer("g", "t").resume_from_parallel_consumer(true);
        let running = watching(builder, &seen);
        wait_until(text, || mock.committed("g", "t", 0) == Some(end as i64));
        let report = running.stop().unwrap();
        assert_eq!(seen.distinct(0), expected, "{text}");
        assert_eq!(report.resumed, end - 500 - expected.len() as u64, "{text}");
        assert_eq!(committed(&mock), Some((end as i64, String::new())));
    }
}

#[test]
fn a_commit_whose_metadata_is_refused_is_sent_again_without() {
    let mock = topic(100);
    let seen = Seen::new();
    let (log, on_event) = event_log();
    let gate = Arc::new(AtomicBool::new(false));
    let running = Running::start(mock.consumer("g", "t").workers(2).on_event(on_event).each({
        let (seen, gate) = (Arc::clone(&seen), Arc::clone(&gate));
        move |record: &Record| {
            seen.handle(record, || {
                while record.offset() == 10 && !gate.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }
    }));
    wait_until("a map", || committed(&mock).is_some() && !stored_map(&mock).is_empty());
    let code = RDKafkaRespErr::RD_KAFKA_RESP_ERR_OFFSET_METADATA_TOO_LARGE;
    mock.cluster().request_errors(RDKafkaApiKey::OffsetCommit, &[code]);
    for sequence in 0..100 {
        mock.send("t", 0, Some(format!("more{sequence}").as_bytes()), Some(b"v"));
    }
    mock.flush();
    wait_until("a commit without", || committed(&mock) == Some((10, String::new())));
    gate.store(true, Ordering::Release);
    wait_until("the last commit", || mock.committed("g", "t", 0) == Some(200));
    let report = running.stop().unwrap();
    assert_eq!(report.metadata_refused, 1);
    let log = log.lock();
    let told = |event: &&Event| matches!(event, Event::Warning { message } if message.contains("bytes of metadata"));
    assert_eq!(log.iter().filter(told).count(), 1, "{log:?}");
    assert!(!log.iter().any(|event| matches!(event, Event::CommitFailed { .. })), "{log:?}");
}

#[test]
fn a_look_up_that_is_refused_for_a_while_is_tried_again() {
    let mock = topic(520);
    let mut map = DoneMap::new(500);
    map.push_range(501..510).unwrap();
    commit(&mock, 500, Encoder::new().encode(&map));
    let code = RDKafkaRespErr::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS;
    mock.cluster().request_errors(RDKafkaApiKey::OffsetFetch, &[code; 6]);
    let seen = Seen::new();
    let running = watching(mock.consumer("g", "t"), &seen);
    wait_until("the rest", || mock.committed("g", "t", 0) == Some(520));
    assert_eq!(running.stop().unwrap().resumed, 9);
    let expected: Vec<_> = std::iter::once(500).chain(510..520).collect();
    assert_eq!(seen.distinct(0), expected);
}

/// The client ends though the answer does not come, also while it is on its way.
#[test]
fn a_consumer_ends_while_it_looks_up() {
    let mock = topic(10);
    let seen = Seen::new();
    let (log, on_event) = event_log();
    let code = RDKafkaRespErr::RD_KAFKA_RESP_ERR_COORDINATOR_LOAD_IN_PROGRESS;
    mock.cluster().request_errors(RDKafkaApiKey::OffsetFetch, &[code; 1_000]);
    let running = watching(mock.consumer("g", "t").on_event(on_event), &seen);
    wait_until("the assignment", || !log.lock().is_empty());
    // From the next attempt on the answers come too late.
    mock.cluster().broker_round_trip_time(1, Duration::from_secs(40)).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let asked = Instant::now();
    let report = running.stop().unwrap();
    assert!(asked.elapsed() < Duration::from_secs(20), "took {:?}", asked.elapsed());
    assert_eq!((seen.count(), report.commits), (0, 0));
}
