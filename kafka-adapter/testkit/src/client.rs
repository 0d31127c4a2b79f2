//! Requests to running brokers: topics, records, offsets.

use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use futures_executor::block_on;
use rdkafka::admin::{AdminClient, AdminOptions, NewPartitions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer};
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::message::{Header, Message, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, DeliveryResult, Producer, ProducerContext};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::cluster::Cluster;
use crate::error::Error;
use crate::text;

type Admin = AdminClient<DefaultClientContext>;

/// How long an operation is tried while brokers come and go.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

/// How long a single request may take.
const REQUEST: Duration = Duration::from_secs(10);

/// A record for [`Kafka::produce_records`](crate::Kafka::produce_records).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outgoing {
    partition: i32,
    key: Option<Vec<u8>>,
    value: Option<Vec<u8>>,
    headers: Vec<(String, Vec<u8>)>,
    timestamp: Option<i64>,
}

impl Outgoing {
    /// A record for this partition, without key, value and headers.
    pub fn to(partition: i32) -> Self {
        Self { partition, ..Self::default() }
    }

    /// Sets the key.
    #[must_use]
    pub fn key(mut self, key: impl Into<Vec<u8>>) -> Self {
        self.key = Some(key.into());
        self
    }

    /// Sets the value. A record with a key and without a value deletes the key from a compacted topic.
    #[must_use]
    pub fn value(mut self, value: impl Into<Vec<u8>>) -> Self {
        self.value = Some(value.into());
        self
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: impl Into<String>, value: impl Into<Vec<u8>>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Sets the timestamp, in milliseconds since 1970; the time of sending unless set.
    #[must_use]
    pub fn timestamp(mut self, milliseconds: i64) -> Self {
        self.timestamp = Some(milliseconds);
        self
    }
}

/// A producer that is kept: a new one takes half a second before it may send, because librdkafka asks for the id that
/// an idempotent producer needs only that often.
#[derive(Clone)]
pub(crate) struct KeptProducer(Arc<BaseProducer<Deliveries>>);

impl std::fmt::Debug for KeptProducer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeptProducer").finish_non_exhaustive()
    }
}

/// Takes the outcomes of records to the calls that sent them.
#[derive(Debug)]
pub(crate) struct Deliveries;

impl rdkafka::ClientContext for Deliveries {}

impl ProducerContext for Deliveries {
    type DeliveryOpaque = Box<Delivery>;

    fn delivery(&self, result: &DeliveryResult<'_>, delivery: Box<Delivery>) {
        let outcome = match result {
            Ok(message) => Ok(message.offset()),
            Err((error, _)) => Err(error.clone()),
        };
        // The call has given up if nobody listens.
        let _ = delivery.outcomes.send((delivery.record, outcome));
    }
}

/// What comes back with the outcome of a record.
#[derive(Debug)]
pub(crate) struct Delivery {
    /// The number of the record in its call.
    record: usize,
    outcomes: Sender<(usize, KafkaResult<i64>)>,
}

/// Errors that go away by themselves when a broker comes up, a leader is elected or a coordinator has loaded.
fn passes(error: &KafkaError) -> bool {
    use RDKafkaErrorCode::*;
    matches!(
        error.rdkafka_error_code(),
        Some(
            BrokerTransportFailure
                | AllBrokersDown
                | Resolve
                | OperationTimedOut
                | RequestTimedOut
                | NetworkException
                | BrokerNotAvailable
                | LeaderNotAvailable
                | NotLeaderForPartition
                | ReplicaNotAvailable
                | FencedLeaderEpoch
                | UnknownLeaderEpoch
                | OffsetNotAvailable
                | NotController
                | NotCoordinator
                | CoordinatorNotAvailable
                | CoordinatorLoadInProgress
        )
    )
}

fn config(addresses: &[SocketAddr]) -> ClientConfig {
    let addresses: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", addresses.join(","))
        .set("client.id", "plimsoll-testkit")
        .set("broker.address.family", "v4")
        .set("reconnect.backoff.ms", "20")
        .set("reconnect.backoff.max.ms", "500");
    config
}

fn options() -> AdminOptions {
    AdminOptions::new().request_timeout(Some(REQUEST)).operation_timeout(Some(REQUEST))
}

/// The error of the first of several results.
fn first<T, S>(
    results: KafkaResult<Vec<Result<T, (S, RDKafkaErrorCode)>>>,
) -> KafkaResult<Option<T>> {
    match results?.into_iter().next() {
        Some(Ok(value)) => Ok(Some(value)),
        Some(Err((_, code))) => Err(KafkaError::AdminOp(code)),
        None => Ok(None),
    }
}

/// Whether a broker lets a client create a topic, without creating one.
pub(crate) fn can_create_topics(address: SocketAddr) -> KafkaResult<()> {
    let admin: Admin = config(&[address]).create()?;
    let topic = NewTopic::new("plimsoll-testkit-probe", 1, TopicReplication::Fixed(1));
    let only = options().validate_only(true).request_timeout(Some(Duration::from_secs(2)));
    first(block_on(admin.create_topics([&topic], &only))).map(drop)
}

impl Cluster {
    /// Tries a request until it works, fails for good, or the time is over. Each try has a client of its own, which
    /// knows nothing of brokers that were killed. The request is told whether it is tried for the first time.
    fn request<T>(
        &self,
        name: &str,
        mut request: impl FnMut(&Admin, bool) -> KafkaResult<T>,
    ) -> Result<T, Error> {
        let deadline = Instant::now() + LIMIT;
        let mut again = false;
        loop {
            let admin: Admin = config(&self.reachable()?).create().map_err(Error::request(name))?;
            match request(&admin, again) {
                Err(error) if passes(&error) && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(50));
                    again = true;
                }
                result => return result.map_err(Error::request(name)),
            }
        }
    }

    /// Creates a topic with a replica on each broker, three at most, and waits until every broker knows its leaders.
    ///
    /// # Errors
    ///
    /// As [`create_topic_with`](Self::create_topic_with).
    pub fn create_topic(&self, topic: &str, partitions: i32) -> Result<(), Error> {
        self.create_topic_with(topic, partitions, self.brokers().min(3) as i32, &[])
    }

    /// Creates a topic with topic configs and waits until every broker knows its leaders.
    ///
    /// # Errors
    ///
    /// If the brokers refuse, for example because the topic exists or there are not enough brokers.
    pub fn create_topic_with(
        &self,
        topic: &str,
        partitions: i32,
        replication: i32,
        configs: &[(&str, &str)],
    ) -> Result<(), Error> {
        let mut new = NewTopic::new(topic, partitions, TopicReplication::Fixed(replication));
        for (name, value) in configs {
            new = new.set(name, value);
        }
        self.request(&format!("create topic `{topic}`"), |admin, again| {
            match first(block_on(admin.create_topics([&new], &options()))) {
                // The first try worked, only its answer got lost.
                Err(KafkaError::AdminOp(RDKafkaErrorCode::TopicAlreadyExists)) if again => Ok(()),
                result => result.map(drop),
            }
        })?;
        self.wait_for_partitions(topic, partitions)
    }

    /// Deletes a topic and waits until no broker knows it any more.
    ///
    /// # Errors
    ///
    /// If the brokers refuse, for example because there is no such topic.
    pub fn delete_topic(&self, topic: &str) -> Result<(), Error> {
        // A topic of the same name that is created later is another one, with other sequence numbers.
        self.forget_producer();
        self.request(&format!("delete topic `{topic}`"), |admin, again| {
            match first(block_on(admin.delete_topics(&[topic], &options()))) {
                Err(KafkaError::AdminOp(
                    RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::UnknownTopic,
                )) if again => Ok(()),
                result => result.map(drop),
            }
        })?;
        self.wait_for_absence(topic)
    }

    /// Raises the number of partitions of a topic to `partitions` and waits until every broker knows their leaders.
    ///
    /// # Errors
    ///
    /// If the brokers refuse, for example because the topic has as many or more.
    pub fn add_partitions(&self, topic: &str, partitions: i32) -> Result<(), Error> {
        let name = format!("raise the partitions of topic `{topic}`");
        let Ok(count) = usize::try_from(partitions) else {
            let invalid = KafkaError::AdminOp(RDKafkaErrorCode::InvalidPartitions);
            return Err(Error::request(name)(invalid));
        };
        let new = NewPartitions::new(topic, count);
        self.request(&name, |admin, again| {
            match first(block_on(admin.create_partitions([&new], &options()))) {
                Err(KafkaError::AdminOp(RDKafkaErrorCode::InvalidPartitions)) if again => Ok(()),
                result => result.map(drop),
            }
        })?;
        self.wait_for_partitions(topic, partitions)
    }

    /// Deletes the records of a partition before an offset, so that the partition begins there.
    ///
    /// # Errors
    ///
    /// If the brokers refuse, for example because the offset is behind the end.
    pub fn delete_records(&self, topic: &str, partition: i32, before: i64) -> Result<(), Error> {
        let name = format!("delete records of partition {partition} of topic `{topic}`");
        self.request(&name, |admin, _| {
            let mut offsets = TopicPartitionList::with_capacity(1);
            offsets.add_partition_offset(topic, partition, Offset::Offset(before))?;
            let deleted = block_on(admin.delete_records(&offsets, &options()))?;
            for element in deleted.elements() {
                element.error()?;
            }
            Ok(())
        })
    }

    /// The first offset of a partition and the one after the last.
    ///
    /// # Errors
    ///
    /// If there is no such partition, or none of its replicas can be reached.
    pub fn watermarks(&self, topic: &str, partition: i32) -> Result<(i64, i64), Error> {
        let name = format!("get the offsets of partition {partition} of topic `{topic}`");
        let deadline = Instant::now() + LIMIT;
        loop {
            // Not with the producer of brokers that are all gone.
            self.reachable()?;
            let KeptProducer(producer) = self.producer()?;
            let client = producer.client();
            match client.fetch_watermarks(topic, partition, REQUEST) {
                Err(error) if passes(&error) && Instant::now() < deadline => {
                    self.forget_producer();
                    std::thread::sleep(Duration::from_millis(50));
                }
                result => return result.map_err(Error::request(name)),
            }
        }
    }

    /// Sends records and waits until all replicas in sync have all of them. Returns their offsets in the given order.
    ///
    /// # Errors
    ///
    /// If a record is refused or is not acknowledged within 30 s; others may have been written.
    pub fn produce<K, V>(
        &self,
        topic: &str,
        records: impl IntoIterator<Item = (i32, K, V)>,
    ) -> Result<Vec<i64>, Error>
    where
        K: Into<Vec<u8>>,
        V: Into<Vec<u8>>,
    {
        self.produce_records(
            topic,
            records
                .into_iter()
                .map(|(partition, key, value)| Outgoing::to(partition).key(key).value(value)),
        )
    }

    /// As [`produce`](Self::produce), for records without key or value, or with headers or timestamps.
    ///
    /// # Errors
    ///
    /// As [`produce`](Self::produce).
    pub fn produce_records(
        &self,
        topic: &str,
        records: impl IntoIterator<Item = Outgoing>,
    ) -> Result<Vec<i64>, Error> {
        let sent = self.send(topic, records);
        if sent.is_err() {
            // What is still in its queue must not be written later.
            self.forget_producer();
        }
        sent
    }

    fn send(
        &self,
        topic: &str,
        records: impl IntoIterator<Item = Outgoing>,
    ) -> Result<Vec<i64>, Error> {
        let name = |record: usize| format!("produce record {record} to topic `{topic}`");
        let KeptProducer(producer) = self.producer()?;
        let (outcomes, arrived) = channel();
        let mut offsets: Vec<Option<i64>> = Vec::new();
        let take = |offsets: &mut Vec<Option<i64>>| {
            while let Ok((record, outcome)) = arrived.try_recv() {
                match outcome {
                    Ok(offset) => offsets[record] = Some(offset),
                    Err(error) => return Err(Error::request(name(record))(error)),
                }
            }
            Ok(())
        };
        for (number, record) in records.into_iter().enumerate() {
            offsets.push(None);
            let delivery = Box::new(Delivery { record: number, outcomes: outcomes.clone() });
            let mut message =
                BaseRecord::with_opaque_to(topic, delivery).partition(record.partition);
            message.key = record.key.as_deref();
            message.payload = record.value.as_deref();
            message.timestamp = record.timestamp;
            if !record.headers.is_empty() {
                let mut headers = OwnedHeaders::new_with_capacity(record.headers.len());
                for (key, value) in &record.headers {
                    let value = Some(value);
                    headers = headers.insert(Header { key, value });
                }
                message.headers = Some(headers);
            }
            // With a full queue the record comes back to be sent again; the wait is bounded by `message.timeout.ms`.
            while let Err((error, back)) = producer.send(message) {
                if error.rdkafka_error_code() != Some(RDKafkaErrorCode::QueueFull) {
                    return Err(Error::request(name(number))(error));
                }
                producer.poll(Duration::from_millis(100));
                message = back;
            }
            if number % 1024 == 0 {
                producer.poll(Duration::ZERO);
                take(&mut offsets)?;
            }
        }
        // Each record has an outcome after its own timeout at the latest; twice that is for a client library that
        // hangs.
        let deadline = Instant::now() + 2 * LIMIT;
        loop {
            // Another thread may poll the outcomes of this call: short steps.
            producer.poll(Duration::from_millis(5));
            take(&mut offsets)?;
            if let Some(all) = offsets.iter().copied().collect() {
                return Ok(all);
            }
            if Instant::now() >= deadline {
                return Err(Error::Timeout {
                    what: format!("the outcome of records for topic `{topic}`"),
                    limit: 2 * LIMIT,
                });
            }
        }
    }

    /// The producer that is kept, or a new one.
    fn producer(&self) -> Result<KeptProducer, Error> {
        let mut kept = self.kept_producer();
        if let Some(producer) = &*kept {
            return Ok(producer.clone());
        }
        let producer = config(&self.reachable()?)
            .set("acks", "all")
            // A retry after a broken connection must not write a record twice.
            .set("enable.idempotence", "true")
            .set("linger.ms", "2")
            .set("message.timeout.ms", LIMIT.as_millis().to_string())
            // Topics are known to all brokers when `create_topic` returns: one that is not known is not on its way.
            .set("topic.metadata.propagation.max.ms", "1000")
            .create_with_context(Deliveries)
            .map_err(Error::request("create a producer"))?;
        let producer = KeptProducer(Arc::new(producer));
        *kept = Some(producer.clone());
        Ok(producer)
    }

    /// Makes the producer that is kept, so that it is ready when it is needed.
    pub(crate) fn prepare_producer(&self) -> Result<(), Error> {
        self.producer().map(drop)
    }

    /// Has a member of `group` read one record of a topic and commit it.
    pub(crate) fn consume_once(&self, group: &str, topic: &str) -> Result<(), Error> {
        let name = format!("consume topic `{topic}`");
        let consumer: BaseConsumer = config(&self.reachable()?)
            .set("group.id", group)
            .set("enable.auto.commit", "false")
            .set("auto.offset.reset", "earliest")
            .create()
            .map_err(Error::request(name.as_str()))?;
        consumer.subscribe(&[topic]).map_err(Error::request(name.as_str()))?;
        let deadline = Instant::now() + LIMIT;
        while Instant::now() < deadline {
            match consumer.poll(Duration::from_millis(100)) {
                Some(Ok(message)) => {
                    return consumer
                        .commit_message(&message, CommitMode::Sync)
                        .map_err(Error::request(name));
                }
                Some(Err(error)) if !passes(&error) => return Err(Error::request(name)(error)),
                _ => {}
            }
        }
        Err(Error::Timeout { what: name, limit: LIMIT })
    }

    /// Runs a command line tool of Kafka, for example `org.apache.kafka.tools.GetOffsetShell`, and returns what it
    /// printed on standard output. It takes about half a second.
    ///
    /// # Errors
    ///
    /// If the tool ends with a status other than 0.
    pub fn tool(&self, class: &str, arguments: &[&str]) -> Result<String, Error> {
        let (install, archive) = self.install();
        let output = Command::new(install.program())
            .args(install.options(archive))
            .arg("-cp")
            .arg(install.class_path())
            .arg(class)
            .args(arguments)
            .stdin(Stdio::null())
            .output()
            .map_err(Error::io(format!("run {}", install.program().display())))?;
        if !output.status.success() {
            let printed = [output.stdout, output.stderr].concat();
            return Err(Error::Tool {
                class: class.into(),
                status: output.status.to_string(),
                output: text::tail(&String::from_utf8_lossy(&printed), 40),
            });
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}
