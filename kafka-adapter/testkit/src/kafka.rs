//! The front for tests: every operation panics instead of returning an error.

use std::path::Path;
use std::sync::OnceLock;

use crate::client::Outgoing;
use crate::cluster::{Builder, Cluster};
use crate::error::Error;
use crate::group::{Committed, Member};
use crate::proxy::Proxy;

/// Running Kafka brokers. Dropping the handle kills them and removes their data.
///
/// Brokers are counted from 0, which is also their id in Kafka. All methods can be called from several threads.
///
/// # Panics
///
/// Each method panics with the message of the [`Error`] that the method of the same name of [`Cluster`] returns; see
/// [`cluster`](Self::cluster).
#[derive(Debug)]
pub struct Kafka {
    cluster: Cluster,
}

/// The value, or a panic with the error's message at the caller of the method.
#[track_caller]
pub(crate) fn expect<T>(result: Result<T, Error>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}

/// One broker for all tests of a process, started by whichever comes first.
///
/// It ends with the process. Tests that stop it, or that count on being alone, start their own.
///
/// # Panics
///
/// If the broker cannot be started.
#[track_caller]
pub fn shared() -> &'static Kafka {
    static SHARED: OnceLock<Kafka> = OnceLock::new();
    SHARED.get_or_init(Kafka::start)
}

impl Kafka {
    pub(crate) fn new(cluster: Cluster) -> Self {
        Self { cluster }
    }

    /// Says how Kafka is to be started.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Starts one broker; see [`Builder::start`].
    #[track_caller]
    pub fn start() -> Self {
        Self::builder().start()
    }

    /// Starts one broker; see [`Builder::try_start`].
    ///
    /// # Errors
    ///
    /// As [`Builder::try_start`].
    pub fn try_start() -> Result<Self, Error> {
        Self::builder().try_start()
    }

    /// The same operations, with errors instead of panics, for programs that are no tests.
    pub fn cluster(&self) -> &Cluster {
        &self.cluster
    }

    /// The addresses for clients, as `bootstrap.servers` wants them; those of the proxies if there are any.
    pub fn bootstrap(&self) -> String {
        self.cluster.bootstrap()
    }

    /// How many brokers there are, running or not.
    pub fn brokers(&self) -> usize {
        self.cluster.brokers()
    }

    /// The proxy before a broker, with [`Builder::proxied`].
    #[track_caller]
    pub fn proxy(&self, broker: usize) -> &Proxy {
        expect(self.cluster.proxy(broker))
    }

    /// Whether the process of a broker exists, paused or not.
    #[track_caller]
    pub fn running(&self, broker: usize) -> bool {
        expect(self.cluster.running(broker))
    }

    /// The process ids of all running JVMs, brokers and controller.
    pub fn pids(&self) -> Vec<u32> {
        self.cluster.pids()
    }

    /// The directory of the brokers' properties, data and logs; see [`Cluster::directory`].
    pub fn directory(&self) -> &Path {
        self.cluster.directory()
    }

    /// The log of a broker, from all its starts.
    #[track_caller]
    pub fn log(&self, broker: usize) -> String {
        expect(self.cluster.log(broker))
    }

    /// Kills a broker with SIGKILL and waits for its end.
    #[track_caller]
    pub fn kill(&self, broker: usize) {
        expect(self.cluster.kill(broker));
    }

    /// Stops a broker in order (SIGTERM) and waits for its end.
    #[track_caller]
    pub fn stop(&self, broker: usize) {
        expect(self.cluster.stop(broker));
    }

    /// Starts a broker again with the same data and ports and waits until it is ready; stops it first if it runs.
    #[track_caller]
    pub fn restart(&self, broker: usize) {
        expect(self.cluster.restart(broker));
    }

    /// Suspends a broker (SIGSTOP): its connections stay open and nothing moves.
    #[track_caller]
    pub fn pause(&self, broker: usize) {
        expect(self.cluster.pause(broker));
    }

    /// Lets a paused broker go on (SIGCONT).
    #[track_caller]
    pub fn resume(&self, broker: usize) {
        expect(self.cluster.resume(broker));
    }

    /// Creates a topic with a replica on each broker, three at most, and waits until every broker knows its leaders.
    #[track_caller]
    pub fn create_topic(&self, topic: &str, partitions: i32) {
        expect(self.cluster.create_topic(topic, partitions));
    }

    /// Creates a topic with topic configs and waits until every broker knows its leaders.
    #[track_caller]
    pub fn create_topic_with(
        &self,
        topic: &str,
        partitions: i32,
        replication: i32,
        configs: &[(&str, &str)],
    ) {
        expect(self.cluster.create_topic_with(topic, partitions, replication, configs));
    }

    /// Deletes a topic and waits until no broker knows it any more.
    #[track_caller]
    pub fn delete_topic(&self, topic: &str) {
        expect(self.cluster.delete_topic(topic));
    }

    /// Sets configs of a topic; those not named stay as they are.
    #[track_caller]
    pub fn alter_topic_config(&self, topic: &str, configs: &[(&str, &str)]) {
        expect(self.cluster.alter_topic_config(topic, configs));
    }

    /// The value of a topic config, set or default; `None` if there is no such config.
    #[track_caller]
    pub fn topic_config(&self, topic: &str, name: &str) -> Option<String> {
        expect(self.cluster.topic_config(topic, name))
    }

    /// Raises the number of partitions of a topic to `partitions` and waits until every broker knows their leaders.
    #[track_caller]
    pub fn add_partitions(&self, topic: &str, partitions: i32) {
        expect(self.cluster.add_partitions(topic, partitions));
    }

    /// Deletes the records of a partition before an offset, so that the partition begins there.
    #[track_caller]
    pub fn delete_records(&self, topic: &str, partition: i32, before: i64) {
        expect(self.cluster.delete_records(topic, partition, before));
    }

    /// The first offset of a partition.
    #[track_caller]
    pub fn start_offset(&self, topic: &str, partition: i32) -> i64 {
        expect(self.cluster.watermarks(topic, partition)).0
    }

    /// The offset after the last one of a partition.
    #[track_caller]
    pub fn end_offset(&self, topic: &str, partition: i32) -> i64 {
        expect(self.cluster.watermarks(topic, partition)).1
    }

    /// The broker that leads a partition; `None` while there is none.
    #[track_caller]
    pub fn leader(&self, topic: &str, partition: i32) -> Option<usize> {
        expect(self.cluster.leader(topic, partition))
    }

    /// The brokers whose replicas of a partition are in sync, in ascending order.
    #[track_caller]
    pub fn in_sync(&self, topic: &str, partition: i32) -> Vec<usize> {
        expect(self.cluster.in_sync(topic, partition))
    }

    /// The next offset to read that a group has committed for a partition; `None` if nothing.
    #[track_caller]
    pub fn committed(&self, group: &str, topic: &str, partition: i32) -> Option<i64> {
        let committed = expect(self.cluster.committed(group, topic, partition));
        committed.map(|committed| committed.offset)
    }

    /// As [`committed`](Self::committed), along with what was committed as its metadata.
    #[track_caller]
    pub fn committed_with_metadata(
        &self,
        group: &str,
        topic: &str,
        partition: i32,
    ) -> Option<Committed> {
        expect(self.cluster.committed(group, topic, partition))
    }

    /// Sends records and waits until all replicas in sync have all of them. Returns their offsets in the given order.
    #[track_caller]
    pub fn produce<K, V>(
        &self,
        topic: &str,
        records: impl IntoIterator<Item = (i32, K, V)>,
    ) -> Vec<i64>
    where
        K: Into<Vec<u8>>,
        V: Into<Vec<u8>>,
    {
        expect(self.cluster.produce(topic, records))
    }

    /// As [`produce`](Self::produce), for records without key or value, or with headers or timestamps.
    #[track_caller]
    pub fn produce_records(
        &self,
        topic: &str,
        records: impl IntoIterator<Item = Outgoing>,
    ) -> Vec<i64> {
        expect(self.cluster.produce_records(topic, records))
    }

    /// The members of a group of either protocol, in the order of their ids; none if there is no such group.
    #[track_caller]
    pub fn group_members(&self, group: &str) -> Vec<Member> {
        expect(self.cluster.group_members(group))
    }

    /// The broker that coordinates a group.
    #[track_caller]
    pub fn coordinator(&self, group: &str) -> usize {
        expect(self.cluster.coordinator(group))
    }

    /// Runs a command line tool of Kafka and returns what it printed on standard output.
    #[track_caller]
    pub fn tool(&self, class: &str, arguments: &[&str]) -> String {
        expect(self.cluster.tool(class, arguments))
    }
}
