//! The broker of a run, in this process or a real one, and the demo's topic and group on it.

use std::mem::ManuallyDrop;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rdkafka::ClientConfig;
use rdkafka::TopicPartitionList;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::producer::{BaseProducer, Producer};
use rdkafka::types::RDKafkaErrorCode;

use super::failure::Failure;

/// How long a broker may take to answer at all.
const REACH: Duration = Duration::from_secs(8);

/// How long a new topic may take until each partition has a leader, and a question about offsets to be answered.
const SETTLE: Duration = Duration::from_secs(10);

/// How long deleting the topic may take, and as long for the group.
const REMOVE: Duration = Duration::from_secs(8);

/// What a new group in this process waits for further members, instead of three seconds.
const FIRST_REBALANCE_MS: i32 = 100;

const NO_MOCK: &str = "the client has no broker inside";

/// Pause between two attempts.
const PAUSE: Duration = Duration::from_millis(100);

/// A broker with a topic that is the demo's own; both topic and group are deleted when this is dropped.
pub(crate) struct Cluster {
    brokers: String,
    topic: String,
    group: String,
    partitions: u32,
    kind: Kind,
}

enum Kind {
    /// The client inside which the broker lives.
    Mock(ManuallyDrop<BaseProducer>),
    Real {
        topic_exists: bool,
    },
}

/// Where a partition ends and what is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Offsets {
    pub(crate) end: i64,
    /// `None`: nothing was ever committed.
    pub(crate) committed: Option<i64>,
}

impl Cluster {
    /// Starts a broker in this process, or reaches the one at `brokers`, and creates the topic.
    ///
    /// # Errors
    ///
    /// [`Failure::Unreachable`] within ten seconds, [`Failure::Topic`], [`Failure::Client`].
    pub(crate) fn start(brokers: Option<&str>, partitions: u32) -> Result<Self, Failure> {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let unique = format!("plimsoll-demo-{}-{:x}", std::process::id(), since_epoch.as_nanos());
        let mut cluster = match brokers {
            None => {
                let (mock, brokers) = start_mock()?;
                Self::new(brokers, unique, partitions, Kind::Mock(ManuallyDrop::new(mock)))
            }
            Some(brokers) => Self::new(
                brokers.to_owned(),
                unique,
                partitions,
                Kind::Real { topic_exists: false },
            ),
        };
        cluster.create_topic()?;
        Ok(cluster)
    }

    fn new(brokers: String, unique: String, partitions: u32, kind: Kind) -> Self {
        Self { brokers, topic: unique.clone(), group: unique, partitions, kind }
    }

    /// Addresses for a client.
    pub(crate) fn brokers(&self) -> &str {
        &self.brokers
    }

    /// The demo's own topic.
    pub(crate) fn topic(&self) -> &str {
        &self.topic
    }

    /// The demo's own group.
    pub(crate) fn group(&self) -> &str {
        &self.group
    }

    /// Whether the broker is the one in this process.
    pub(crate) fn is_mock(&self) -> bool {
        matches!(self.kind, Kind::Mock(_))
    }

    fn create_topic(&mut self) -> Result<(), Failure> {
        let refused = |reason: String| Failure::Topic { topic: self.topic.clone(), reason };
        match &mut self.kind {
            Kind::Mock(mock) => {
                let mock =
                    mock.client().mock_cluster().ok_or_else(|| refused(NO_MOCK.to_owned()))?;
                let created = mock.create_topic(&self.topic, self.partitions as i32, 1);
                created.map_err(|error| refused(error.to_string()))
            }
            Kind::Real { topic_exists } => {
                let observer = observer(&self.brokers, &self.group)?;
                reach(&observer, &self.brokers)?;
                let admin = admin(&self.brokers)?;
                // -1: the broker's default.
                let topic =
                    NewTopic::new(&self.topic, self.partitions as i32, TopicReplication::Fixed(-1));
                // Even a request without an answer may have created it.
                *topic_exists = true;
                let created = pollster::block_on(admin.create_topics([&topic], &options(SETTLE)));
                let answer = created.map_err(|error| refused(error.to_string()))?;
                if let Some(Err((_, code))) = answer.first() {
                    return Err(refused(code.to_string()));
                }
                self.wait_for_leaders(&observer)
            }
        }
    }

    /// Whether the broker still answers.
    ///
    /// # Errors
    ///
    /// [`Failure::Unreachable`] within some eight seconds.
    pub(crate) fn probe(&self) -> Result<(), Failure> {
        reach(&observer(&self.brokers, &self.group)?, &self.brokers)
    }

    fn wait_for_leaders(&self, observer: &BaseConsumer) -> Result<(), Failure> {
        let deadline = Instant::now() + SETTLE;
        loop {
            let metadata = observer.fetch_metadata(Some(&self.topic), left(deadline));
            let ready = metadata.is_ok_and(|metadata| {
                metadata.topics().first().is_some_and(|topic| {
                    topic.error().is_none()
                        && topic.partitions().len() == self.partitions as usize
                        && topic.partitions().iter().all(|partition| partition.leader() >= 0)
                })
            });
            if ready {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let reason =
                    format!("not every partition had a leader within {} s", SETTLE.as_secs());
                return Err(Failure::Topic { topic: self.topic.clone(), reason });
            }
            thread::sleep(PAUSE);
        }
    }

    /// Asks the broker for the end and the committed offset of each partition.
    ///
    /// # Errors
    ///
    /// [`Failure::Offsets`] within some ten seconds.
    pub(crate) fn offsets(&self) -> Result<Vec<Offsets>, Failure> {
        let failed = |reason: String| Failure::Offsets { topic: self.topic.clone(), reason };
        let observer = observer(&self.brokers, &self.group)?;
        let deadline = Instant::now() + SETTLE;
        let partitions = 0..self.partitions as i32;
        let committed: Vec<Option<i64>> = {
            let mut list = TopicPartitionList::new();
            partitions.clone().for_each(|partition| {
                list.add_partition(&self.topic, partition);
            });
            // The list must be gone before the client is: it keeps the client's partitions alive.
            let list = observer
                .committed_offsets(list, left(deadline))
                .map_err(|error| failed(error.to_string()))?;
            partitions
                .clone()
                .map(|partition| list.find_partition(&self.topic, partition)?.offset().to_raw())
                .map(|offset| offset.filter(|offset| *offset >= 0))
                .collect()
        };
        partitions
            .zip(committed)
            .map(|(partition, committed)| {
                let (_, end) = observer
                    .fetch_watermarks(&self.topic, partition, left(deadline))
                    .map_err(|error| failed(format!("partition {partition}: {error}")))?;
                Ok(Offsets { end, committed })
            })
            .collect()
    }

    /// Deletes topic and group and stops the broker, if it is ours. Says what could not be deleted.
    pub(crate) fn remove(mut self) -> Vec<String> {
        self.delete()
    }

    /// Leaves the broker of this process running: something in this process may still use it.
    pub(crate) fn abandon(mut self) -> Vec<String> {
        let left_over = self.delete_from_real();
        self.kind = Kind::Real { topic_exists: false };
        left_over
    }

    fn delete(&mut self) -> Vec<String> {
        let left_over = self.delete_from_real();
        if let Kind::Mock(mock) =
            std::mem::replace(&mut self.kind, Kind::Real { topic_exists: false })
        {
            drop(ManuallyDrop::into_inner(mock));
        }
        left_over
    }

    fn delete_from_real(&mut self) -> Vec<String> {
        let Kind::Real { topic_exists } = &mut self.kind else {
            return Vec::new();
        };
        if !std::mem::take(topic_exists) {
            return Vec::new();
        }
        let admin = match admin(&self.brokers) {
            Ok(admin) => admin,
            Err(failure) => {
                return vec![format!("topic and group {} were not deleted: {failure}", self.topic)];
            }
        };
        let deadline = Instant::now() + REMOVE;
        let mut left_over = Vec::new();
        // The group first: it refers to the topic. It counts as in use until the broker has noticed its member's leave.
        let group = retry(deadline, || {
            let answer =
                pollster::block_on(admin.delete_groups(&[&self.group], &options(left(deadline))));
            match answer.map(|mut groups| groups.pop()) {
                Ok(None | Some(Ok(_)) | Some(Err((_, RDKafkaErrorCode::GroupIdNotFound)))) => {
                    Ok(())
                }
                Ok(Some(Err((_, code)))) => Err(code.to_string()),
                Err(error) => Err(error.to_string()),
            }
        });
        if let Err(reason) = group {
            left_over.push(format!("group {} was not deleted: {reason}", self.group));
        }
        let deadline = Instant::now() + REMOVE;
        let topic = retry(deadline, || {
            let answer =
                pollster::block_on(admin.delete_topics(&[&self.topic], &options(left(deadline))));
            match answer.map(|mut topics| topics.pop()) {
                Ok(
                    None | Some(Ok(_)) | Some(Err((_, RDKafkaErrorCode::UnknownTopicOrPartition))),
                ) => Ok(()),
                Ok(Some(Err((_, code)))) => Err(code.to_string()),
                Err(error) => Err(error.to_string()),
            }
        });
        if let Err(reason) = topic {
            left_over.push(format!("topic {} was not deleted: {reason}", self.topic));
        }
        left_over
    }
}

impl Drop for Cluster {
    /// For the ways out that do not pass [`Cluster::remove`].
    fn drop(&mut self) {
        for left_over in self.delete() {
            eprintln!("plimsoll: {left_over}");
        }
    }
}

/// A broker that lives in a client of this process, and its address.
fn start_mock() -> Result<(BaseProducer, String), Failure> {
    let failed = |source| Failure::Client { what: "the broker in this process", source };
    let mut config = ClientConfig::new();
    let client: BaseProducer = config.set("test.mock.num.brokers", "1").create().map_err(failed)?;
    let brokers = match client.client().mock_cluster() {
        Some(mock) => mock.bootstrap_servers(),
        None => return Err(failed(KafkaError::ClientCreation(NO_MOCK.to_owned()))),
    };
    plimsoll_kafka::testing::hasten_first_rebalance(client.client(), FIRST_REBALANCE_MS);
    Ok((client, brokers))
}

fn reach(observer: &BaseConsumer, brokers: &str) -> Result<(), Failure> {
    match observer.fetch_metadata(None, REACH) {
        Ok(_) => Ok(()),
        Err(source) => Err(Failure::Unreachable {
            brokers: brokers.to_owned(),
            seconds: REACH.as_secs(),
            source,
        }),
    }
}

fn observer(brokers: &str, group: &str) -> Result<BaseConsumer, Failure> {
    ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", group)
        .set("enable.auto.commit", "false")
        .create()
        .map_err(|source| Failure::Client { what: "a client", source })
}

fn admin(brokers: &str) -> Result<AdminClient<DefaultClientContext>, Failure> {
    ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .create()
        .map_err(|source| Failure::Client { what: "an admin client", source })
}

fn options(timeout: Duration) -> AdminOptions {
    AdminOptions::new().request_timeout(Some(timeout)).operation_timeout(Some(timeout))
}

/// Time until the deadline, at least some.
fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now()).max(PAUSE)
}

fn retry(deadline: Instant, mut attempt: impl FnMut() -> Result<(), String>) -> Result<(), String> {
    loop {
        let result = attempt();
        if result.is_ok() || Instant::now() + PAUSE >= deadline {
            return result;
        }
        thread::sleep(PAUSE);
    }
}
