//! The demo on a real Apache Kafka; it leaves nothing behind.

mod common;

use common::{assert_kept, demo};
use rdkafka::consumer::{BaseConsumer, Consumer};
use std::time::Duration;

#[test]
fn the_demo_keeps_every_promise_on_a_real_broker_and_leaves_nothing() {
    let kafka = plimsoll_testkit::Kafka::start();
    let brokers = kafka.bootstrap();
    let ended = demo(&["--json", "--brokers", &brokers]);
    assert_kept(&ended, 27_004);
    assert!(ended.json()["max_above_watermark"].as_u64().unwrap() > 100, "{}", ended.stdout);

    let client: BaseConsumer =
        rdkafka::ClientConfig::new().set("bootstrap.servers", &brokers).create().unwrap();
    let limit = Duration::from_secs(10);
    let metadata = client.fetch_metadata(None, limit).unwrap();
    let topics: Vec<&str> = metadata.topics().iter().map(|topic| topic.name()).collect();
    let left: Vec<_> = topics.iter().filter(|name| !name.starts_with("__")).collect();
    assert!(left.is_empty(), "topics left behind: {left:?}");
    let groups = client.fetch_group_list(None, limit).unwrap();
    let groups: Vec<&str> = groups.groups().iter().map(|group| group.name()).collect();
    assert!(groups.is_empty(), "groups left behind: {groups:?}");
}
