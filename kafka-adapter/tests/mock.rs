//! The consumer against librdkafka's mock cluster.

mod common;

use common::{Mock, Running, Seen, event_log, wait_until};
use parking_lot::Mutex;
use plimsoll_kafka::{
    Batch, Consumer, DoneMaps, Error, Event, Exhausted, MetadataFull, Record, Retry,
};
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[test]
fn every_record_is_handled_in_order_and_committed() {
    let mock = Mock::start();
    mock.topic("t", 4);
    mock.fill("t", 4, 5_000, 50);
    let seen = Seen::new();
    let running = Running::start(mock.consumer("g", "t").workers(4).each({
        let seen = Arc::clone(&seen);
        move |record: &Record| {
            seen.handle(record, || {
                if record.offset() % 97 == 0 {
                    std::thread::sleep(Duration::from_micros(300));
                }
            });
        }
    }));
    wait_until("20,000 records", || seen.count() >= 20_000);
    let report = running.stop().unwrap();
    seen.assert_complete(4, 5_000);
    assert_eq!(seen.count(), 20_000, "none twice");
    assert_eq!(report.handled, 20_000);
    assert!(report.commits >= 1);
    assert_eq!(report.partitions.len(), 4);
    for (partition, at_end) in report.partitions.iter().enumerate() {
        assert_eq!((&*at_end.topic, at_end.partition), ("t", partition as i32));
        assert_eq!((at_end.committed, at_end.finished, at_end.unfinished), (Some(5_000), 5_000, 0));
        assert_eq!(mock.committed("g", "t", partition as i32), Some(5_000));
    }
}

#[test]
fn batches_are_bounded_and_in_order() {
    let mock = Mock::start();
    mock.topic("t", 2);
    mock.fill("t", 2, 5_000, 10);
    let seen = Seen::new();
    let largest = Arc::new(AtomicU64::new(0));
    let running = Running::start(mock.consumer("g", "t").workers(2).batch(16).batches({
        let (seen, largest) = (Arc::clone(&seen), Arc::clone(&largest));
        move |batch: &Batch<'_>| {
            largest.fetch_max(batch.len() as u64, Ordering::Relaxed);
            batch.iter().for_each(|record| seen.handle(record, || ()));
        }
    }));
    wait_until("10,000 records", || seen.count() >= 10_000);
    running.stop().unwrap();
    seen.assert_complete(2, 5_000);
    let largest = largest.load(Ordering::Relaxed);
    assert!((2..=16).contains(&largest), "largest batch: {largest}");
}

#[test]
fn b13_last_plus_one_and_nothing_redelivered() {
    let mock = Mock::start();
    mock.topic("t", 2);
    mock.fill("t", 1, 10, 3); // partition 0 only; partition 1 gets a single record
    mock.send("t", 1, None, Some(b"single"));
    mock.flush();
    let seen = Seen::new();
    let start = || {
        let seen = Arc::clone(&seen);
        Running::start(
            mock.consumer("g", "t").each(move |record: &Record| seen.handle(record, || ())),
        )
    };
    let running = start();
    wait_until("11 records", || seen.count() == 11);
    running.stop().unwrap();
    assert_eq!(mock.committed("g", "t", 0), Some(10));
    assert_eq!(mock.committed("g", "t", 1), Some(1));
    // A second life reads nothing again, and has nothing to commit.
    let (log, on_event) = event_log();
    let running = Running::start(mock.consumer("g", "t").on_event(on_event).each({
        let seen = Arc::clone(&seen);
        move |record: &Record| seen.handle(record, || ())
    }));
    wait_until("the assignment", || {
        log.lock().iter().any(|event| matches!(event, Event::Assigned { .. }))
    });
    std::thread::sleep(Duration::from_secs(1));
    let report = running.stop().unwrap();
    assert_eq!((seen.count(), report.commits, report.handled), (11, 0, 0));
    let log = log.lock();
    assert!(!log.iter().any(|event| matches!(event, Event::CommitFailed { .. })), "{log:?}");
    assert_eq!(mock.committed("g", "t", 0), Some(10));
}

#[test]
fn a_failed_record_holds_the_commit_and_ends_the_consumer() {
    for panics in [false, true] {
        let mock = Mock::start();
        mock.topic("t", 2);
        mock.fill("t", 2, 100, 1);
        let seen = Seen::new();
        let running = Running::start(mock.consumer("g", "t").workers(2).each({
            let seen = Arc::clone(&seen);
            move |record: &Record| {
                if (record.partition(), record.offset()) == (1, 42) {
                    assert!(!panics, "planted panic");
                    return Err("planted error");
                }
                seen.handle(record, || ());
                Ok(())
            }
        }));
        match running.join().unwrap_err() {
            Error::Handler { topic, partition, offset, reason } => {
                assert_eq!((&*topic, partition, offset), ("t", 1, 42));
                assert!(reason.contains("planted"), "{reason}");
            }
            other => panic!("{other}"),
        }
        // One key: nothing behind the failed record was handled.
        assert_eq!(seen.distinct(1), (0..42).collect::<Vec<_>>());
        assert_eq!(mock.committed("g", "t", 1), Some(42));
        // The next life begins with the failed record and comes to the end.
        let running = Running::start(mock.consumer("g", "t").each({
            let seen = Arc::clone(&seen);
            move |record: &Record| seen.handle(record, || ())
        }));
        wait_until("all", || seen.total_distinct(2) == 200);
        running.stop().unwrap();
        seen.assert_complete(2, 100);
        assert_eq!(mock.committed("g", "t", 1), Some(100));
    }
}

/// A fifth of the records fails once or twice, one for good.
#[test]
fn failed_records_come_again_in_order_and_what_is_used_up_is_skipped_with_a_warning() {
    let mock = Mock::start();
    mock.topic("t", 2);
    mock.fill("t", 2, 300, 7);
    let seen = Seen::new();
    let attempts = Arc::new(Mutex::new(HashMap::<(i32, i64), u32>::new()));
    let warnings = Arc::new(Mutex::new(Vec::new()));
    let retry = Retry::times(3).first(Duration::from_millis(20)).then(Exhausted::Skip);
    let builder = mock.consumer("g", "t").workers(2).retry(retry).on_event({
        let warnings = Arc::clone(&warnings);
        move |event| {
            if let Event::Warning { message } = event {
                warnings.lock().push(message.clone());
            }
        }
    });
    let running = Running::start(builder.each({
        let (seen, attempts) = (Arc::clone(&seen), Arc::clone(&attempts));
        move |record: &Record| {
            let place = (record.partition(), record.offset());
            let mut attempts = attempts.lock();
            let attempt = attempts.entry(place).or_default();
            *attempt += 1;
            let fails = if place.1 % 5 == 0 { 1 + place.1 as u32 % 2 } else { 0 };
            if *attempt <= fails || place == (1, 142) {
                return Err("planted");
            }
            drop(attempts);
            seen.handle(record, || ());
            Ok(())
        }
    }));
    wait_until("all but one", || seen.total_distinct(2) == 599);
    let ends = || (mock.committed("g", "t", 0), mock.committed("g", "t", 1));
    wait_until("all committed", || ends() == (Some(300), Some(300)));
    running.stop().unwrap();
    assert_eq!(attempts.lock()[&(1, 142)], 3);
    // Each record was handled once, and those of a key in order, whatever failed in between.
    assert_eq!(seen.count(), 599);
    seen.assert_no_fault();
    let skips: Vec<_> = warnings.lock().clone();
    let skips: Vec<_> = skips.iter().filter(|warning| warning.contains("skipped")).collect();
    assert_eq!(skips.len(), 1, "{skips:?}");
    assert!(skips[0].contains("142") && skips[0].contains("planted"), "{skips:?}");
}

#[test]
fn a_slow_record_holds_only_its_own_partition() {
    let mock = Mock::start();
    mock.topic("t", 2);
    mock.fill("t", 2, 200, 20);
    let gate = Arc::new(AtomicBool::new(false));
    let seen = Seen::new();
    let running = Running::start(mock.consumer("g", "t").workers(3).each({
        let (seen, gate) = (Arc::clone(&seen), Arc::clone(&gate));
        move |record: &Record| {
            seen.handle(record, || {
                while (record.partition(), record.offset()) == (0, 7)
                    && !gate.load(Ordering::Acquire)
                {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }
    }));
    wait_until("partition 1 committed", || mock.committed("g", "t", 1) == Some(200));
    // Of partition 0 everything but the slow record's key may be done; the commit stays below it.
    wait_until("partition 0 around the slow record", || seen.distinct(0).len() >= 190);
    wait_until("partition 0 committed below it", || mock.committed("g", "t", 0) == Some(7));
    gate.store(true, Ordering::Release);
    wait_until("partition 0 committed", || mock.committed("g", "t", 0) == Some(200));
    running.stop().unwrap();
    seen.assert_complete(2, 200);
}

#[test]
fn the_window_bounds_what_runs_ahead() {
    let mock = Mock::start();
    mock.topic("t", 1);
    mock.fill("t", 1, 2_000, 100);
    let gate = Arc::new(AtomicBool::new(false));
    let seen = Seen::new();
    let running = Running::start(mock.consumer("g", "t").workers(2).window(100).each({
        let (seen, gate) = (Arc::clone(&seen), Arc::clone(&gate));
        move |record: &Record| {
            seen.handle(record, || {
                while record.offset() == 0 && !gate.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
        }
    }));
    wait_until("99 records", || seen.count() == 99);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(seen.distinct(0), (1..100).collect::<Vec<_>>());
    let opened = Instant::now();
    gate.store(true, Ordering::Release);
    wait_until("all", || seen.count() == 2_000);
    assert!(opened.elapsed() < Duration::from_secs(30), "intake resumed late");
    running.stop().unwrap();
    seen.assert_complete(1, 2_000);
    assert_eq!(mock.committed("g", "t", 0), Some(2_000));
}

#[test]
fn b41_a_stuck_handler_does_not_hold_the_end() {
    let mock = Mock::start();
    mock.topic("t", 1);
    mock.fill("t", 1, 10, 10);
    let seen = Seen::new();
    let builder = mock.consumer("g", "t").workers(4).drain_budget(Duration::from_secs(1));
    let running = Running::start(builder.each({
        let seen = Arc::clone(&seen);
        move |record: &Record| {
            seen.handle(record, || {
                while record.offset() == 3 {
                    std::thread::park();
                }
            });
        }
    }));
    wait_until("nine records", || seen.count() == 9);
    let asked = Instant::now();
    let report = running.stop().unwrap();
    assert!(asked.elapsed() < Duration::from_secs(15), "took {:?}", asked.elapsed());
    assert_eq!(report.partitions[0].committed, Some(3));
    assert_eq!((report.partitions[0].finished, report.partitions[0].unfinished), (3, 7));
    assert_eq!(mock.committed("g", "t", 0), Some(3));
    // The next life handles the stuck record; what was finished above it is in the commit.
    let again = Seen::new();
    let running = Running::start(mock.consumer("g", "t").each({
        let again = Arc::clone(&again);
        move |record: &Record| again.handle(record, || ())
    }));
    wait_until("the rest", || mock.committed("g", "t", 0) == Some(10));
    running.stop().unwrap();
    assert_eq!(again.distinct(0), [3]);
}

#[test]
fn b43_the_second_stop_is_now() {
    let mock = Mock::start();
    mock.topic("t", 1);
    mock.fill("t", 1, 10, 10);
    let seen = Seen::new();
    let builder = mock.consumer("g", "t").workers(1).drain_budget(Duration::from_secs(30));
    let running = Running::start(builder.each({
        let seen = Arc::clone(&seen);
        move |record: &Record| {
            seen.handle(record, || {
                while record.offset() == 5 {
                    std::thread::park();
                }
            });
        }
    }));
    wait_until("five records", || seen.count() == 5);
    running.handle.stop();
    std::thread::sleep(Duration::from_millis(500));
    let again = Instant::now();
    let report = running.stop().unwrap();
    assert!(again.elapsed() < Duration::from_secs(15), "took {:?}", again.elapsed());
    assert_eq!(report.partitions[0].committed, Some(5));
}

#[test]
fn b18_refused_commits_are_sent_again() {
    for code in [
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_REBALANCE_IN_PROGRESS,
        RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_COORDINATOR,
    ] {
        let mock = Mock::start();
        mock.topic("t", 1);
        mock.fill("t", 1, 1_000, 10);
        mock.cluster().request_errors(RDKafkaApiKey::OffsetCommit, &[code, code, code]);
        let (log, on_event) = event_log();
        let seen = Seen::new();
        let running = Running::start(mock.consumer("g", "t").on_event(on_event).each({
            let seen = Arc::clone(&seen);
            move |record: &Record| seen.handle(record, || ())
        }));
        wait_until("the commit", || mock.committed("g", "t", 0) == Some(1_000));
        running.stop().unwrap();
        seen.assert_complete(1, 1_000);
        let log = log.lock();
        let failed = log.iter().filter(|event| matches!(event, Event::CommitFailed { .. })).count();
        // librdkafka itself tries NOT_COORDINATOR again.
        assert!(failed <= 3, "{failed} failed commits: {log:?}");
        if code == RDKafkaRespErr::RD_KAFKA_RESP_ERR_REBALANCE_IN_PROGRESS {
            assert!(failed >= 1, "{log:?}");
        }
    }
}

#[test]
fn b18_an_authorisation_error_is_fatal() {
    let mock = Mock::start();
    mock.topic("t", 1);
    mock.fill("t", 1, 10, 1);
    let code = RDKafkaRespErr::RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED;
    mock.cluster().request_errors(RDKafkaApiKey::OffsetCommit, &[code; 20]);
    let running = Running::start(mock.consumer("g", "t").each(|_: &Record| ()));
    match running.join().unwrap_err() {
        Error::Commit { topic, partition, offset, .. } => {
            assert_eq!((&*topic, partition), ("t", 0));
            assert!((1..=10).contains(&offset));
        }
        other => panic!("{other}"),
    }
}

fn rebalance(strategy: &str) {
    let mock = Mock::start();
    mock.topic("t", 4);
    let seen = Seen::new();
    let member = |log: &Arc<Mutex<Vec<Event>>>| {
        let seen = Arc::clone(&seen);
        let log = Arc::clone(log);
        Running::start(
            mock.consumer("g", "t")
                .set("partition.assignment.strategy", strategy)
                .workers(2)
                .on_event(move |event| log.lock().push(event.clone()))
                .each(move |record: &Record| {
                    seen.handle(record, || std::thread::sleep(Duration::from_micros(500)));
                }),
        )
    };
    let logs = [Arc::default(), Arc::default()];
    let first = member(&logs[0]);
    wait_until("the first assignment", || !logs[0].lock().is_empty());
    let produce = |rounds: std::ops::Range<u64>| {
        for round in rounds {
            for partition in 0..4 {
                let key = format!("k{}", round % 20);
                mock.send("t", partition, Some(key.as_bytes()), Some(b"v"));
            }
        }
        mock.flush();
    };
    produce(0..1_000);
    let second = member(&logs[1]);
    wait_until("partitions of the second member", || {
        let holds = |event: &Event| matches!(event, Event::Assigned { partitions } if !partitions.is_empty());
        logs[1].lock().iter().any(holds)
    });
    produce(1_000..1_500);
    wait_until("6,000 records", || seen.total_distinct(4) == 6_000);
    second.stop().unwrap();
    produce(1_500..1_600);
    wait_until("6,400 records", || seen.total_distinct(4) == 6_400);
    first.stop().unwrap();
    seen.assert_complete(4, 1_600);
    let given_up =
        |event: &Event| matches!(event, Event::Revoked { partitions } if !partitions.is_empty());
    assert!(logs[0].lock().iter().any(given_up), "{:?}", logs[0].lock());
    for partition in 0..4 {
        assert_eq!(mock.committed("g", "t", partition), Some(1_600));
    }
    // The mock's coordinator, unlike Kafka's, takes no commit while members give up partitions.
    let refused = logs[0].lock().iter().any(|event| matches!(event, Event::CommitFailed { .. }));
    if !refused {
        // What was finished was committed before it was given up: nothing ran twice.
        assert_eq!(seen.count(), 6_400);
    }
}

#[test]
fn partitions_move_between_members_cooperatively() {
    rebalance("cooperative-sticky");
}

#[test]
fn partitions_move_between_members_eagerly() {
    rebalance("range");
}

#[test]
fn b25_a_revoke_waits_for_running_records_within_the_budget() {
    let mock = Mock::start();
    mock.topic("t", 2);
    let seen = Seen::new();
    let gate = Arc::new(AtomicBool::new(false));
    let (log, on_event) = event_log();
    let first = Running::start(
        mock.consumer("g", "t")
            .workers(4)
            .drain_budget(Duration::from_secs(1))
            .on_event(on_event)
            .each({
                let (seen, gate) = (Arc::clone(&seen), Arc::clone(&gate));
                move |record: &Record| {
                    seen.handle(record, || {
                        while record.offset() == 2 && !gate.load(Ordering::Acquire) {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                    });
                }
            }),
    );
    wait_until("the first assignment", || !log.lock().is_empty());
    mock.fill("t", 2, 6, 6);
    wait_until("five records of each", || seen.count() == 10);
    // Before the second one joins: in a rebalance the mock takes no commit.
    let committed = |partition| mock.committed("g", "t", partition) == Some(2);
    wait_until("their commit", || committed(0) && committed(1));
    // The second member's handler must see the stuck record again, since it was not finished.
    let again = Seen::new();
    let second = Running::start(mock.consumer("g", "t").each({
        let again = Arc::clone(&again);
        move |record: &Record| again.handle(record, || ())
    }));
    // Those above it come again, too, if the last commit that the mock took did not list them.
    wait_until("the moved partition's tail", || again.count() >= 1);
    let moved = i32::from(!again.distinct(1).is_empty());
    assert_eq!(again.distinct(moved).first(), Some(&2));
    wait_until("the moved partition", || mock.committed("g", "t", moved) == Some(6));
    // The late end of the old handler changes nothing, neither there nor here.
    gate.store(true, Ordering::Release);
    let kept = 1 - moved;
    wait_until("the kept partition", || mock.committed("g", "t", kept) == Some(6));
    first.stop().unwrap();
    second.stop().unwrap();
    assert_eq!(mock.committed("g", "t", moved), Some(6));
    assert_eq!(seen.distinct(kept), [0, 1, 2, 3, 4, 5]);
}

#[test]
fn keys_values_and_headers_are_read_in_place() {
    use rdkafka::message::{Header, OwnedHeaders};
    use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
    let mock = Mock::start();
    mock.topic("t", 1);
    let producer: BaseProducer =
        rdkafka::ClientConfig::new().set("bootstrap.servers", mock.brokers()).create().unwrap();
    let headers = OwnedHeaders::new()
        .insert(Header { key: "a", value: Some("1") })
        .insert(Header { key: "a", value: Some("2") })
        .insert(Header { key: "bin", value: Some(&[0xff_u8, 0xfe][..]) })
        .insert(Header { key: "nul", value: None::<&str> });
    let record = BaseRecord::to("t").key(&[0_u8, 0xff][..]).payload("value").headers(headers);
    producer.send(record.timestamp(1_700_000_000_123)).map_err(|(error, _)| error).unwrap();
    producer.flush(common::PATIENCE).unwrap();
    mock.send("t", 0, None, None); // no key, a tombstone
    mock.flush();
    mock.send("t", 0, Some(b""), Some(b"")); // empty key, empty value
    mock.flush();
    type Copy = (Option<Vec<u8>>, Option<Vec<u8>>, Option<i64>, Vec<(String, Option<Vec<u8>>)>);
    let copies: Arc<Mutex<Vec<Copy>>> = Arc::default();
    let running = Running::start(mock.consumer("g", "t").workers(1).each({
        let copies = Arc::clone(&copies);
        move |record: &Record| {
            assert_eq!((record.topic(), record.partition()), ("t", 0));
            let headers: Vec<_> = record
                .headers()
                .map(|(name, value)| (name.to_owned(), value.map(<[u8]>::to_vec)))
                .collect();
            assert_eq!(record.header("missing"), None);
            if record.offset() == 0 {
                assert_eq!(record.header("a"), Some(&b"2"[..]));
                assert_eq!(record.header("nul"), None);
            }
            let key = record.key().map(<[u8]>::to_vec);
            let payload = record.payload().map(<[u8]>::to_vec);
            copies.lock().push((key, payload, record.timestamp(), headers));
        }
    }));
    wait_until("three records", || copies.lock().len() == 3);
    running.stop().unwrap();
    let mut copies = copies.lock();
    copies.sort();
    let header = |name: &str, value: Option<&[u8]>| (name.to_owned(), value.map(<[u8]>::to_vec));
    assert_eq!((&copies[0].0, &copies[0].1), (&None, &None));
    assert_eq!((&copies[1].0, &copies[1].1), (&Some(vec![]), &Some(vec![])));
    assert!(copies[1].3.is_empty());
    assert_eq!(
        copies[2],
        (
            Some(vec![0, 0xff]),
            Some(b"value".to_vec()),
            Some(1_700_000_000_123),
            vec![
                header("a", Some(b"1")),
                header("a", Some(b"2")),
                header("bin", Some(&[0xff, 0xfe])),
                header("nul", None)
            ]
        )
    );
}

#[test]
fn b48_an_unreachable_broker_and_a_missing_topic_are_errors_within_the_limit() {
    // A port that was free a moment ago: nobody listens.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let brokers = format!("127.0.0.1:{port}");
    let limit = Duration::from_secs(2);
    let began = Instant::now();
    let builder = common::consumer(&brokers, "g", "t").startup_limit(limit);
    match Running::start(builder.each(|_: &Record| ())).join().unwrap_err() {
        Error::BrokerUnreachable { brokers: named, .. } => assert_eq!(named, brokers),
        other => panic!("{other}"),
    }
    assert!(began.elapsed() < Duration::from_secs(30), "took {:?}", began.elapsed());

    // A missing topic is an error long before the limit, however slow the broker is.
    let limit = Duration::from_secs(300);
    let mock = Mock::start();
    mock.topic("exists", 1);
    let code = RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART;
    mock.cluster().topic_error("missing", code).unwrap();
    let builder = mock.consumer("g", "exists").topic("missing").startup_limit(limit);
    match Running::start(builder.each(|_: &Record| ())).join().unwrap_err() {
        Error::TopicMissing { topic } => assert_eq!(topic, "missing"),
        other => panic!("{other}"),
    }
}

#[test]
fn a_consumer_stops_while_it_looks_for_the_broker() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let builder = common::consumer(&format!("127.0.0.1:{port}"), "g", "t");
    let running = Running::start(builder.each(|_: &Record| ()));
    std::thread::sleep(Duration::from_millis(300));
    let asked = Instant::now();
    running.stop().unwrap();
    assert!(asked.elapsed() < Duration::from_secs(30), "took {:?}", asked.elapsed());
}

#[test]
fn b53_settings_are_checked_when_built() {
    let good =
        || Consumer::builder().brokers("127.0.0.1:1").group("g").topic("t").each(|_: &Record| ());
    good().build().unwrap(); // and dropped without being run
    for (builder, named) in [
        (good().brokers(" "), "brokers"),
        (good().group(""), "group"),
        (good().topic(""), "topic"),
        (Consumer::builder().brokers("b:1").group("g").each(|_: &Record| ()), "topic"),
        (Consumer::builder().brokers("b:1").group("g").topic("t"), "each"),
        (good().workers(0), "workers"),
        (good().workers(usize::MAX), "workers"),
        (good().batch(0), "batch"),
        (good().batch(usize::MAX), "batch"),
        (good().window(0), "window"),
        (good().window(usize::MAX), "window"),
        (good().commit_interval(Duration::ZERO), "commit_interval"),
        (good().metadata_limit(15), "metadata_limit"),
        (good().metadata_limit(32_768), "metadata_limit"),
        (good().metadata_limit(255).when_metadata_full(MetadataFull::SlowDown), "metadata_limit"),
        (
            good().done_map(DoneMaps::Off).resume_from_parallel_consumer(true),
            "resume_from_parallel_consumer",
        ),
        (good().set("enable.auto.commit", "true"), "enable.auto.commit"),
        (good().set("group.id", "other"), "group.id"),
        (good().set("no.such.property", "1"), "no.such.property"),
        (good().set("session.timeout.ms", "soon"), "session.timeout.ms"),
    ] {
        match builder.build().unwrap_err() {
            Error::Config { setting, .. } => assert_eq!(setting, named),
            other => panic!("{named}: {other}"),
        }
    }
    good().drain_budget(Duration::ZERO).build().unwrap();
}

#[test]
fn several_consumers_work_side_by_side() {
    let mock = Mock::start();
    mock.topic("t", 2);
    mock.fill("t", 2, 1_000, 10);
    let seen = [Seen::new(), Seen::new(), Seen::new()];
    let running: Vec<_> = seen
        .iter()
        .enumerate()
        .map(|(group, seen)| {
            let seen = Arc::clone(seen);
            let builder = mock.consumer(&format!("g{group}"), "t");
            Running::start(builder.each(move |record: &Record| seen.handle(record, || ())))
        })
        .collect();
    for seen in &seen {
        wait_until("all of each", || seen.count() == 2_000);
        seen.assert_complete(2, 1_000);
    }
    running.into_iter().for_each(|running| drop(running.stop().unwrap()));
}
