//! What the tests share: an embedded broker, and a checker of what a handler saw.
#![allow(dead_code, reason = "each test file uses its part")]

use parking_lot::Mutex;
use plimsoll_kafka::{Consumer, ConsumerBuilder, Event, Handle, Record, Report};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::producer::{BaseProducer, BaseRecord, DefaultProducerContext, Producer};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Long enough for a slow machine, short enough to see a hang.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// librdkafka's mock cluster, in this process.
pub(crate) struct Mock {
    producer: BaseProducer,
}

impl Mock {
    pub(crate) fn start() -> Self {
        let producer: BaseProducer = ClientConfig::new()
            .set("test.mock.num.brokers", "1")
            .set("linger.ms", "1")
            .create()
            .unwrap();
        assert!(plimsoll_kafka::testing::hasten_first_rebalance(producer.client(), 100));
        Mock { producer }
    }

    pub(crate) fn cluster(&self) -> rdkafka::mocking::MockCluster<'_, DefaultProducerContext> {
        self.producer.client().mock_cluster().unwrap()
    }

    pub(crate) fn brokers(&self) -> String {
        self.cluster().bootstrap_servers()
    }

    pub(crate) fn topic(&self, name: &str, partitions: i32) {
        self.cluster().create_topic(name, partitions, 1).unwrap();
    }

    /// Sends one record and does not wait.
    pub(crate) fn send(
        &self,
        topic: &str,
        partition: i32,
        key: Option<&[u8]>,
        value: Option<&[u8]>,
    ) {
        let mut record = BaseRecord::<[u8], [u8]>::to(topic).partition(partition);
        if let Some(key) = key {
            record = record.key(key);
        }
        if let Some(value) = value {
            record = record.payload(value);
        }
        self.producer.send(record).map_err(|(error, _)| error).unwrap();
    }

    /// Waits until everything sent is stored.
    pub(crate) fn flush(&self) {
        self.producer.flush(PATIENCE).unwrap();
    }

    /// `count` records into each partition: keys `k0`, `k1`, ... in turn, the value says which of
    /// its key it is.
    pub(crate) fn fill(&self, topic: &str, partitions: i32, count: u64, keys: u64) {
        for sequence in 0..count {
            for partition in 0..partitions {
                let key = format!("k{}", sequence % keys);
                let value = (sequence / keys).to_string();
                self.send(topic, partition, Some(key.as_bytes()), Some(value.as_bytes()));
            }
        }
        self.flush();
    }

    pub(crate) fn committed(&self, group: &str, topic: &str, partition: i32) -> Option<i64> {
        committed(&self.brokers(), group, topic, partition)
    }

    /// A consumer of this cluster with settings that suit tests.
    pub(crate) fn consumer(&self, group: &str, topic: &str) -> ConsumerBuilder {
        consumer(&self.brokers(), group, topic)
    }
}

pub(crate) fn consumer(brokers: &str, group: &str, topic: &str) -> ConsumerBuilder {
    Consumer::builder()
        .brokers(brokers)
        .group(group)
        .topic(topic)
        .set("session.timeout.ms", "6000")
        .set("heartbeat.interval.ms", "500")
        .commit_interval(Duration::from_millis(100))
        .drain_budget(Duration::from_secs(5))
        .signals(false)
}

/// What the broker has stored.
pub(crate) fn committed(brokers: &str, group: &str, topic: &str, partition: i32) -> Option<i64> {
    let reader: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", group)
        .create()
        .unwrap();
    let mut list = TopicPartitionList::new();
    list.add_partition(topic, partition);
    // Read out and dropped before the reader: a list that outlives its client hangs its drop.
    let list = reader.committed_offsets(list, PATIENCE).unwrap();
    match list.elements()[0].offset() {
        Offset::Offset(offset) => Some(offset),
        _ => None,
    }
}

/// Waits until `holds`, or panics with `what`.
pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A key of a partition.
type Key = (i32, Vec<u8>);

/// What the handlers of one or several consumers saw.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Per partition: offsets in the order their handlers ended.
    offsets: Mutex<BTreeMap<i32, Vec<i64>>>,
    /// Per partition and key: offsets in the order their handlers began.
    keys: Mutex<BTreeMap<Key, Vec<i64>>>,
    /// Keys whose handler is running.
    running: Mutex<std::collections::BTreeSet<Key>>,
    faults: Mutex<Vec<String>>,
}

impl Seen {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// To be called by a handler, with its work.
    pub(crate) fn handle(&self, record: &Record, work: impl FnOnce()) {
        let key = record.key().map(|key| (record.partition(), key.to_vec()));
        if let Some(key) = &key {
            if !self.running.lock().insert(key.clone()) {
                self.fault(record, "two records of its key at once");
            }
            let mut keys = self.keys.lock();
            let before = keys.entry(key.clone()).or_default();
            if before.last().is_some_and(|last| *last >= record.offset()) {
                // A repeat is allowed only from a new delivery, which starts at or below what was
                // committed: then the record is one that was seen before.
                if !before.contains(&record.offset()) {
                    self.fault(record, "a late record of its key");
                }
            }
            before.push(record.offset());
        }
        work();
        if let Some(key) = &key {
            self.running.lock().remove(key);
        }
        self.offsets.lock().entry(record.partition()).or_default().push(record.offset());
    }

    fn fault(&self, record: &Record, what: &str) {
        self.faults.lock().push(format!("{record:?}: {what}"));
    }

    /// Records handled, repeats counted.
    pub(crate) fn count(&self) -> usize {
        self.offsets.lock().values().map(Vec::len).sum()
    }

    /// Distinct offsets of a partition, ascending.
    pub(crate) fn distinct(&self, partition: i32) -> Vec<i64> {
        let mut offsets = self.offsets.lock().get(&partition).cloned().unwrap_or_default();
        offsets.sort_unstable();
        offsets.dedup();
        offsets
    }

    pub(crate) fn total_distinct(&self, partitions: i32) -> usize {
        (0..partitions).map(|partition| self.distinct(partition).len()).sum()
    }

    /// Nothing of order was violated, and each partition has exactly the offsets `0..count`.
    pub(crate) fn assert_complete(&self, partitions: i32, count: i64) {
        assert_eq!(*self.faults.lock(), Vec::<String>::new());
        for partition in 0..partitions {
            assert_eq!(self.distinct(partition), (0..count).collect::<Vec<_>>(), "{partition}");
        }
    }

    pub(crate) fn assert_no_fault(&self) {
        assert_eq!(*self.faults.lock(), Vec::<String>::new());
    }
}

/// A consumer running on a thread of its own; stopped and joined when asked.
pub(crate) struct Running {
    pub(crate) handle: Handle,
    thread: Option<JoinHandle<Result<Report, plimsoll_kafka::Error>>>,
}

impl Running {
    pub(crate) fn start(builder: ConsumerBuilder) -> Self {
        let consumer = builder.build().unwrap();
        let handle = consumer.handle();
        Running { handle, thread: Some(std::thread::spawn(move || consumer.run())) }
    }

    /// Waits for the end without asking for it.
    pub(crate) fn join(mut self) -> Result<Report, plimsoll_kafka::Error> {
        let thread = self.thread.take().unwrap();
        wait_until("the end of the consumer", || thread.is_finished());
        thread.join().unwrap()
    }

    pub(crate) fn stop(self) -> Result<Report, plimsoll_kafka::Error> {
        self.handle.stop();
        self.join()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A failed test: end the consumer at once.
        self.handle.stop();
        self.handle.stop();
    }
}

/// A log of events, and the closure that fills it.
pub(crate) fn event_log() -> (Arc<Mutex<Vec<Event>>>, impl Fn(&Event) + Send + Sync + 'static) {
    let log = Arc::new(Mutex::new(Vec::new()));
    let filled = Arc::clone(&log);
    (log, move |event: &Event| filled.lock().push(event.clone()))
}
