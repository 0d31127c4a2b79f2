//! Three brokers: what is replicated outlives any of them.

use std::time::{Duration, Instant};

use plimsoll_testkit::{Error, Kafka};

/// Waits for a state that comes with the brokers' own timers; panics after 30 s.
fn eventually(what: &str, mut reached: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !reached() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn two_brokers_of_three_carry_on_and_the_third_catches_up() {
    let kafka = Kafka::builder().brokers(3).start();
    assert_eq!(kafka.bootstrap().split(',').count(), 3);
    kafka.create_topic_with("orders", 1, 3, &[("min.insync.replicas", "2")]);
    assert_eq!(kafka.in_sync("orders", 0), [0, 1, 2]);
    kafka.produce("orders", (0..50).map(|n| (0, "key", format!("{n}"))));

    let leader = kafka.leader("orders", 0).unwrap();
    kafka.kill(leader);
    // Waits for the new leader by itself.
    kafka.produce("orders", (50..100).map(|n| (0, "key", format!("{n}"))));
    let successor = kafka.leader("orders", 0).unwrap();
    assert_ne!(successor, leader);
    assert_eq!(kafka.end_offset("orders", 0), 100);
    assert!(!kafka.in_sync("orders", 0).contains(&leader));
    // The coordinator of a group may have been on the dead broker.
    assert_eq!(kafka.committed("nobody", "orders", 0), None);
    assert_ne!(kafka.coordinator("nobody"), leader);

    // One replica is less than the topic asks for.
    let third = 3 - leader - successor;
    kafka.kill(third);
    eventually("the replicas in sync shrink", || kafka.in_sync("orders", 0) == [successor]);

    kafka.restart(leader);
    kafka.restart(third);
    eventually("the replicas catch up", || kafka.in_sync("orders", 0) == [0, 1, 2]);
    kafka.produce("orders", [(0, "key", "100")]);
    assert_eq!(kafka.end_offset("orders", 0), 101);

    // All of them at once: the controller is none of them.
    for broker in 0..3 {
        kafka.kill(broker);
    }
    let error = kafka.cluster().create_topic("none", 1).unwrap_err();
    assert!(matches!(error, Error::NotRunning { .. }), "{error}");
    for broker in 0..3 {
        kafka.restart(broker);
    }
    assert_eq!(kafka.end_offset("orders", 0), 101);
}
