//! One broker: topics, records, offsets and groups; its death and its return.

use std::time::{Duration, Instant};

use plimsoll_testkit::{Error, Kafka, Outgoing, shared};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::message::{BorrowedMessage, Headers, Message};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

fn consumer(bootstrap: &str, group: &str, settings: &[(&str, &str)]) -> BaseConsumer {
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", bootstrap)
        .set("group.id", group)
        .set("enable.auto.commit", "false")
        .set("auto.offset.reset", "earliest")
        .set("reconnect.backoff.max.ms", "500");
    for (name, value) in settings {
        config.set(*name, *value);
    }
    config.create().unwrap()
}

/// The next record; panics after 30 s.
fn next(consumer: &BaseConsumer) -> BorrowedMessage<'_> {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        // Errors along the way are those of brokers that come and go.
        if let Some(Ok(message)) = consumer.poll(Duration::from_millis(50)) {
            return message;
        }
        assert!(Instant::now() < deadline, "no record");
    }
}

fn text(message: &BorrowedMessage<'_>) -> String {
    String::from_utf8(message.payload().unwrap().to_vec()).unwrap()
}

#[test]
fn data_and_committed_offsets_survive_a_kill_and_a_stop() {
    let kafka = Kafka::start();
    kafka.create_topic("orders", 2);
    let offsets = kafka.produce("orders", (0..100).map(|n| (n % 2, "key", format!("{n}"))));
    let expected: Vec<i64> = (0..100).map(|n| n / 2).collect();
    assert_eq!(offsets, expected);

    let reader = consumer(&kafka.bootstrap(), "readers", &[]);
    reader.subscribe(&["orders"]).unwrap();
    for _ in 0..100 {
        let message = next(&reader);
        let number: i64 = text(&message).parse().unwrap();
        assert_eq!(i64::from(message.partition()), number % 2);
        assert_eq!(message.offset(), number / 2);
    }
    let mut list = TopicPartitionList::new();
    list.add_partition_offset("orders", 1, Offset::Offset(7)).unwrap();
    list.find_partition("orders", 1).unwrap().set_metadata("seven");
    reader.commit(&list, CommitMode::Sync).unwrap();

    let pids = kafka.pids();
    kafka.kill(0);
    assert!(!kafka.running(0));
    assert!(kafka.pids().is_empty());
    let error = kafka.cluster().watermarks("orders", 0).unwrap_err();
    assert!(matches!(error, Error::NotRunning { .. }), "{error}");

    kafka.restart(0);
    assert_ne!(kafka.pids(), pids);
    assert_eq!(kafka.end_offset("orders", 0), 50);
    assert_eq!(kafka.committed("readers", "orders", 0), None);
    assert_eq!(kafka.committed("readers", "orders", 1), Some(7));
    let committed = kafka.committed_with_metadata("readers", "orders", 1);
    assert_eq!(committed.unwrap().metadata, "seven");

    // A consumer of before the kill goes on with the broker of after it: the port is the same.
    kafka.produce("orders", [(0, "key", "later")]);
    let message = next(&reader);
    assert_eq!((text(&message).as_str(), message.offset()), ("later", 50));
    drop(message);

    kafka.stop(0);
    kafka.restart(0);
    assert_eq!(kafka.end_offset("orders", 0), 51);
    assert_eq!(kafka.committed("readers", "orders", 1), Some(7));
}

#[test]
fn topics_are_altered_grown_trimmed_and_deleted() {
    let kafka = shared();
    let configs = [("retention.ms", "600000"), ("segment.bytes", "2097152")];
    kafka.create_topic_with("altered", 1, 1, &configs);
    kafka.alter_topic_config("altered", &[("cleanup.policy", "compact")]);
    let config = |name| kafka.topic_config("altered", name);
    assert_eq!(config("cleanup.policy").as_deref(), Some("compact"));
    // What was not named stays.
    assert_eq!(config("retention.ms").as_deref(), Some("600000"));
    assert_eq!(config("segment.bytes").as_deref(), Some("2097152"));
    assert_eq!(config("no.such.config"), None);

    kafka.add_partitions("altered", 3);
    assert_eq!(kafka.end_offset("altered", 2), 0);

    kafka.create_topic("trimmed", 1);
    kafka.produce("trimmed", (0..10).map(|n| (0, "key", format!("{n}"))));
    kafka.delete_records("trimmed", 0, 4);
    assert_eq!(kafka.start_offset("trimmed", 0), 4);
    assert_eq!(kafka.end_offset("trimmed", 0), 10);

    kafka.delete_topic("trimmed");
    let error = kafka.cluster().watermarks("trimmed", 0).unwrap_err();
    assert!(error.to_string().contains("`trimmed`"), "{error}");
    kafka.create_topic("trimmed", 1);
    assert_eq!(kafka.end_offset("trimmed", 0), 0);
}

#[test]
fn refused_requests_name_what_was_asked_for() {
    let cluster = shared().cluster();
    cluster.create_topic("twice", 1).unwrap();
    let refused = [
        (cluster.create_topic("twice", 1), "`twice`"),
        (cluster.create_topic("no spaces", 1), "`no spaces`"),
        (cluster.create_topic_with("wide", 1, 2, &[]), "`wide`"),
        (cluster.delete_topic("absent"), "`absent`"),
        (cluster.add_partitions("twice", 1), "`twice`"),
        (cluster.add_partitions("twice", -1), "`twice`"),
        (cluster.delete_records("twice", 0, 1), "`twice`"),
        (cluster.produce("twice", [(1, "key", "value")]).map(drop), "record 0 to topic `twice`"),
        (cluster.produce("absent", [(0, "key", "value")]).map(drop), "record 0 to topic `absent`"),
    ];
    for (number, (result, name)) in refused.into_iter().enumerate() {
        let Err(error) = result else { panic!("request {number} was not refused") };
        assert!(matches!(error, Error::Request { .. }), "{error:?}");
        assert!(error.to_string().contains(name), "{error}");
    }
    for (result, told) in [
        (cluster.alter_topic_config("twice", &[("no.such.config", "1")]), "no.such.config"),
        (cluster.alter_topic_config("absent", &[("retention.ms", "1")]), "`absent`"),
        (cluster.leader("twice", 1).map(drop), "`twice`"),
        (cluster.in_sync("absent", 0).map(drop), "`absent`"),
        (cluster.topic_config("absent", "retention.ms").map(drop), "`absent`"),
    ] {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{error:?}");
        assert!(error.to_string().contains(told), "{error}");
    }
    let error = cluster.kill(1).unwrap_err();
    assert!(matches!(error, Error::NoSuchBroker { broker: 1, brokers: 1 }));
    assert!(matches!(cluster.proxy(0), Err(Error::NoProxy)));
}

#[test]
fn records_arrive_as_they_were_given() {
    let kafka = shared();
    kafka.create_topic("records", 1);
    kafka.produce_records(
        "records",
        [
            Outgoing::to(0)
                .key("key")
                .value("value")
                .header("trace", "1")
                .header("trace", "2")
                .timestamp(1_700_000_000_000),
            Outgoing::to(0).key("deleted"),
            Outgoing::to(0),
        ],
    );
    let reader = consumer(&kafka.bootstrap(), "record-readers", &[]);
    reader.subscribe(&["records"]).unwrap();
    {
        let message = next(&reader);
        assert_eq!(message.key(), Some(&b"key"[..]));
        assert_eq!(message.payload(), Some(&b"value"[..]));
        assert_eq!(message.timestamp().to_millis(), Some(1_700_000_000_000));
        let headers: Vec<_> = message.headers().unwrap().iter().collect();
        assert_eq!(headers.len(), 2);
        assert_eq!(headers[1].key, "trace");
        assert_eq!(headers[1].value, Some(&b"2"[..]));
    }
    {
        let message = next(&reader);
        assert_eq!(message.key(), Some(&b"deleted"[..]));
        assert_eq!(message.payload(), None);
    }
    let message = next(&reader);
    assert_eq!((message.key(), message.payload()), (None, None));
    assert!(message.headers().is_none());
}

#[test]
fn members_of_groups_of_both_protocols_are_listed() {
    let kafka = shared();
    kafka.create_topic("members", 3);
    assert!(kafka.group_members("nobody").is_empty());
    assert_eq!(kafka.coordinator("nobody"), 0);
    for (group, settings) in [
        ("classic", &[("client.id", "a"), ("group.protocol", "classic")]),
        ("new", &[("client.id", "b"), ("group.protocol", "consumer")]),
    ] {
        let reader = consumer(&kafka.bootstrap(), group, settings);
        reader.subscribe(&["members"]).unwrap();
        let deadline = Instant::now() + Duration::from_secs(30);
        let expected: Vec<(String, i32)> = (0..3).map(|p| ("members".into(), p)).collect();
        loop {
            reader.poll(Duration::from_millis(20));
            match &kafka.group_members(group)[..] {
                [member] if member.partitions == expected => {
                    assert_eq!(member.client_id, settings[0].1);
                    assert!(!member.id.is_empty());
                    break;
                }
                other => assert!(Instant::now() < deadline, "{other:?}"),
            }
        }
        drop(reader);
        assert!(kafka.group_members(group).is_empty());
    }
}

#[test]
fn a_paused_broker_answers_after_it_is_resumed() {
    let kafka = Kafka::start();
    kafka.create_topic("paused", 1);
    let reader = consumer(&kafka.bootstrap(), "pausers", &[]);
    let timeout = Duration::from_millis(500);
    reader.fetch_watermarks("paused", 0, timeout).unwrap();
    kafka.pause(0);
    assert!(kafka.running(0));
    assert!(reader.fetch_watermarks("paused", 0, timeout).is_err());
    let error = kafka.cluster().watermarks("paused", 0).unwrap_err();
    assert!(matches!(error, Error::NotRunning { .. }), "{error}");
    kafka.resume(0);
    kafka.produce("paused", [(0, "key", "value")]);
    assert_eq!(kafka.end_offset("paused", 0), 1);
}

#[test]
fn clients_are_cut_off_by_the_proxy_and_the_test_kit_is_not() {
    let kafka = Kafka::builder().proxied(true).start();
    assert_eq!(kafka.bootstrap(), kafka.proxy(0).address().to_string());
    kafka.create_topic("proxied", 1);
    kafka.produce("proxied", [(0, "key", "before")]);
    let reader = consumer(&kafka.bootstrap(), "proxied", &[]);
    reader.subscribe(&["proxied"]).unwrap();
    assert_eq!(text(&next(&reader)), "before");
    assert!(kafka.proxy(0).connections() > 0);

    kafka.proxy(0).cut();
    kafka.produce("proxied", [(0, "key", "during")]);
    let until = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until {
        assert!(!matches!(reader.poll(Duration::from_millis(50)), Some(Ok(_))));
    }
    kafka.proxy(0).heal();
    assert_eq!(text(&next(&reader)), "during");

    let delay = Duration::from_millis(300);
    kafka.proxy(0).delay(delay);
    let start = Instant::now();
    reader.fetch_watermarks("proxied", 0, Duration::from_secs(10)).unwrap();
    assert!(start.elapsed() >= 2 * delay, "{:?}", start.elapsed());
}

#[test]
fn tools_run_and_their_failure_is_an_error() {
    let kafka = shared();
    kafka.create_topic("tools", 1);
    kafka.produce("tools", [(0, "key", "value")]);
    let class = "org.apache.kafka.tools.GetOffsetShell";
    let bootstrap = kafka.bootstrap();
    let arguments = ["--bootstrap-server", &bootstrap, "--topic", "tools"];
    assert_eq!(kafka.tool(class, &arguments), "tools:0:1\n");
    let error = kafka.cluster().tool("no.such.Class", &[]).unwrap_err();
    assert!(error.to_string().contains("no.such.Class"), "{error}");
}

#[test]
fn broker_properties_take_effect() {
    let kafka = Kafka::builder().property("log.retention.hours", "5").start();
    kafka.create_topic("kept", 1);
    let retention = kafka.topic_config("kept", "retention.ms");
    assert_eq!(retention.as_deref(), Some("18000000"));
}
