//! librdkafka behind the [`Client`] trait. All `unsafe` of this crate lives in this folder.

mod message;
mod mock;
mod queue;

pub use message::{Headers, Record};
pub use mock::hasten_first_rebalance;

use crate::client::{
    Client, Commit, CommitResult, Event, Found, Refusal, RefusalKind, Source, TopicPartition,
};
use crate::error::Error;
use parking_lot::Mutex;
use plimsoll_engine::{Waiter, Waker};
use queue::{Queue, Scratch, Signal};
use rdkafka::bindings::rd_kafka_resp_err_t as Code;
use rdkafka::client::ClientContext;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::base_consumer::BaseConsumer;
use rdkafka::consumer::{Consumer as _, ConsumerContext, RebalanceProtocol};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::topic_partition_list::TopicPartitionList;
use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Most events served in one go, so that a flood of them does not hold up the records.
const EVENTS: usize = 16;

/// What librdkafka calls back into, on the thread that polls.
#[derive(Debug)]
struct Context {
    /// Rebalances that the poller has not seen yet.
    rebalances: Mutex<Vec<Event>>,
    /// The client is going: nobody will confirm a rebalance any more.
    closing: AtomicBool,
}

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        match level {
            RDKafkaLogLevel::Emerg
            | RDKafkaLogLevel::Alert
            | RDKafkaLogLevel::Critical
            | RDKafkaLogLevel::Error => tracing::error!(facility, "{message}"),
            RDKafkaLogLevel::Warning => tracing::warn!(facility, "{message}"),
            RDKafkaLogLevel::Notice | RDKafkaLogLevel::Info => {
                tracing::info!(facility, "{message}")
            }
            RDKafkaLogLevel::Debug => tracing::debug!(facility, "{message}"),
        }
    }

    fn error(&self, error: KafkaError, reason: &str) {
        tracing::warn!(%error, "{reason}");
    }
}

impl ConsumerContext for Context {
    /// Only notes what is asked; the poller completes it when it is ready, and the partitions
    /// that stay keep flowing meanwhile.
    fn rebalance(&self, consumer: &BaseConsumer<Self>, code: Code, list: &mut TopicPartitionList) {
        let partitions = partitions_of(list);
        let assigned = code == Code::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS;
        // Relaxed: set by the thread that polls.
        if self.closing.load(Ordering::Relaxed) {
            // The poller has committed and gone. Refusing an assignment is the same as giving
            // up what there is.
            if let Err(error) = give_up(consumer, &partitions) {
                tracing::warn!("giving up the assignment while closing: {error}");
            }
            return;
        }
        self.rebalances.lock().push(if assigned {
            Event::Assign(partitions)
        } else {
            Event::Revoke { partitions, lost: consumer.assignment_lost() }
        });
    }
}

fn partitions_of(list: &TopicPartitionList) -> Vec<TopicPartition> {
    if list.count() == 0 {
        // rdkafka's accessor does not like empty lists.
        return Vec::new();
    }
    list.elements()
        .iter()
        .map(|element| TopicPartition {
            topic: Arc::from(element.topic()),
            partition: element.partition(),
        })
        .collect()
}

fn list_of(partitions: &[TopicPartition]) -> TopicPartitionList {
    let mut list = TopicPartitionList::with_capacity(partitions.len().max(1));
    for partition in partitions {
        list.add_partition(&partition.topic, partition.partition);
    }
    list
}

fn is_cooperative(consumer: &BaseConsumer<Context>) -> bool {
    matches!(consumer.rebalance_protocol(), RebalanceProtocol::Cooperative)
}

fn give_up(
    consumer: &BaseConsumer<Context>,
    partitions: &[TopicPartition],
) -> Result<(), KafkaError> {
    if is_cooperative(consumer) {
        consumer.incremental_unassign(&list_of(partitions))
    } else {
        consumer.unassign()
    }
}

fn client_error(error: impl std::fmt::Display) -> Error {
    Error::Client { reason: error.to_string() }
}

/// Splits a failed client construction into what the user can mend and what not.
fn creation_error(error: KafkaError) -> Error {
    match error {
        KafkaError::ClientConfig(_, reason, key, _) => Error::config(key, reason),
        other => client_error(other),
    }
}

/// An intake: a partition's own queue.
#[derive(Debug)]
struct Partition {
    queue: Queue,
}

/// The consumer, whose drop must not wait for a poller that is not there any more: it leaves the
/// group by itself.
struct Member(BaseConsumer<Context>);

impl Drop for Member {
    fn drop(&mut self) {
        // Relaxed: read by the thread that polls, which from now on is the dropping one.
        self.0.context().closing.store(true, Ordering::Relaxed);
    }
}

impl std::ops::Deref for Member {
    type Target = BaseConsumer<Context>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

/// The librdkafka client of one consumer.
pub(crate) struct NativeClient {
    // Fields drop in this order: the queues before the client they belong to.
    partitions: Vec<Option<Partition>>,
    answers: Queue,
    main: Arc<Signal>,
    consumer: Member,
    buffer: Scratch,
    waiter: Waiter,
    began: Instant,
    group: CString,
}

impl NativeClient {
    /// Creates the client; contacts nobody yet.
    pub(crate) fn new(config: &ClientConfig, waiter: Waiter) -> Result<Self, Error> {
        let context =
            Context { rebalances: Mutex::new(Vec::new()), closing: AtomicBool::new(false) };
        let mut consumer: BaseConsumer<Context> =
            config.create_with_context(context).map_err(creation_error)?;
        let group = CString::new(config.get("group.id").unwrap_or_default())
            .map_err(|_| Error::config("group", "has a NUL in it"))?;
        let main = Signal::new(waiter.waker());
        consumer.set_nonempty_callback({
            let main = Arc::clone(&main);
            move || main.set()
        });
        let signal = Signal::new(waiter.waker());
        // SAFETY: the client is live, and the queue is dropped before it (field order, `close`).
        let answers = unsafe { Queue::new(consumer.client().native_ptr(), signal) }
            .ok_or_else(|| client_error("no queue for the answers to commits"))?;
        Ok(NativeClient {
            partitions: Vec::new(),
            answers,
            main,
            consumer: Member(consumer),
            buffer: Scratch::default(),
            waiter,
            began: Instant::now(),
            group,
        })
    }

    pub(crate) fn waker(&self) -> Waker {
        self.waiter.waker()
    }

    /// Asks the brokers for each topic, until all have answered or `limit` has passed.
    pub(crate) fn look_up(
        &self,
        topics: &[String],
        brokers: &str,
        limit: Duration,
        stopped: impl Fn() -> bool,
    ) -> Result<(), Error> {
        let began = Instant::now();
        for topic in topics {
            loop {
                // In slices, so that a stop is not held up.
                let left = limit.saturating_sub(began.elapsed());
                let slice = left.clamp(Duration::from_millis(1), Duration::from_millis(500));
                let refusal = match self.consumer.fetch_metadata(Some(topic), slice) {
                    Ok(metadata) => match metadata.topics().first().and_then(|t| t.error()) {
                        None => break,
                        // A topic that was just created is unknown for a moment.
                        Some(Code::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART) => {
                            Error::TopicMissing { topic: topic.clone() }
                        }
                        Some(code) => Error::Topic {
                            topic: topic.clone(),
                            reason: RDKafkaErrorCode::from(code).to_string(),
                        },
                    },
                    Err(error) => Error::BrokerUnreachable {
                        brokers: brokers.to_owned(),
                        limit,
                        reason: error.to_string(),
                    },
                };
                if stopped() {
                    return Ok(());
                }
                let patience = match refusal {
                    Error::TopicMissing { .. } => limit.min(Duration::from_secs(2)),
                    _ => limit,
                };
                if began.elapsed() >= patience {
                    return Err(refusal);
                }
                tracing::info!("waiting: {refusal}");
                if !matches!(refusal, Error::BrokerUnreachable { .. }) {
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
        }
        Ok(())
    }

    /// Joins the group.
    pub(crate) fn subscribe(&self, topics: &[String]) -> Result<(), Error> {
        let topics: Vec<&str> = topics.iter().map(String::as_str).collect();
        self.consumer.subscribe(&topics).map_err(client_error)
    }

    fn serve_main(&mut self, out: &mut Vec<Event>) {
        self.main.clear();
        for served in 0..EVENTS {
            match self.consumer.poll(Duration::ZERO) {
                None => {}
                Some(Ok(message)) => {
                    // Its partition was cut off from this queue before it was assigned.
                    use rdkafka::message::Message as _;
                    out.push(Event::Fatal(client_error(format!(
                        "record {}/{} offset {} came by the wrong queue",
                        message.topic(),
                        message.partition(),
                        message.offset()
                    ))));
                }
                Some(Err(error)) => out.push(self.sort_error(error)),
            }
            let mut rebalances = self.consumer.context().rebalances.lock();
            let quiet = rebalances.is_empty();
            out.append(&mut rebalances);
            // Each poll serves one event, and nothing tells whether there was one; after the
            // first, look again only while something comes.
            if quiet && served > 0 {
                break;
            }
        }
    }

    fn sort_error(&self, error: KafkaError) -> Event {
        if let Some((code, reason)) = self.consumer.client().fatal_error() {
            return Event::Fatal(client_error(format!("{code}: {reason}")));
        }
        match error.rdkafka_error_code() {
            Some(
                RDKafkaErrorCode::GroupAuthorizationFailed
                | RDKafkaErrorCode::TopicAuthorizationFailed
                | RDKafkaErrorCode::ClusterAuthorizationFailed
                | RDKafkaErrorCode::SaslAuthenticationFailed,
            ) => Event::Fatal(client_error(error)),
            _ => Event::Warning(error.to_string()),
        }
    }

    fn serve_answers(&mut self, out: &mut Vec<Event>) {
        self.answers.signal().clear();
        while let Some(event) = self.answers.event() {
            if let Some(look_up) = event.look_up() {
                out.push(Event::Found { look_up, outcome: found(event.found()) });
                continue;
            }
            if !event.is_commit() {
                continue;
            }
            let whole = event.error();
            let results = event
                .elements()
                .into_iter()
                .map(|element| {
                    let code = match element.error {
                        Code::RD_KAFKA_RESP_ERR_NO_ERROR => whole,
                        own => own,
                    };
                    CommitResult {
                        partition: TopicPartition {
                            topic: Arc::from(element.topic),
                            partition: element.partition,
                        },
                        offset: element.offset,
                        outcome: commit_outcome(code),
                    }
                })
                .collect();
            out.push(Event::CommitDone(results));
        }
    }
}

fn commit_outcome(code: Code) -> Result<(), Refusal> {
    if code == Code::RD_KAFKA_RESP_ERR_NO_ERROR {
        return Ok(());
    }
    Err(refusal(code))
}

fn refusal(code: Code) -> Refusal {
    let kind = match code {
        Code::RD_KAFKA_RESP_ERR_GROUP_AUTHORIZATION_FAILED
        | Code::RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED
        | Code::RD_KAFKA_RESP_ERR_FENCED_INSTANCE_ID
        | Code::RD_KAFKA_RESP_ERR_INVALID_GROUP_ID
        | Code::RD_KAFKA_RESP_ERR__FATAL => RefusalKind::Fatal,
        Code::RD_KAFKA_RESP_ERR_OFFSET_METADATA_TOO_LARGE => RefusalKind::MetadataTooLarge,
        _ => RefusalKind::Passing,
    };
    Refusal { reason: RDKafkaErrorCode::from(code).to_string(), kind }
}

/// What a look-up found, or why not.
fn found(answer: Result<Vec<queue::CommittedElement>, Code>) -> Result<Vec<Found>, Refusal> {
    let found = |element: queue::CommittedElement| Found {
        partition: TopicPartition { topic: Arc::from(element.topic), partition: element.partition },
        committed: match element.error {
            // A negative offset says that there is none.
            Code::RD_KAFKA_RESP_ERR_NO_ERROR if element.offset < 0 => Ok(None),
            Code::RD_KAFKA_RESP_ERR_NO_ERROR => Ok(Some((element.offset, element.metadata))),
            code => Err(RDKafkaErrorCode::from(code).to_string()),
        },
    };
    answer.map(|elements| elements.into_iter().map(found).collect()).map_err(refusal)
}

impl Client for NativeClient {
    type Record = Record;

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn wait(&self, limit: Duration, ready: &mut dyn FnMut() -> bool) {
        self.waiter.wait(limit, ready);
    }

    fn has_events(&self) -> bool {
        self.main.is_set() || self.answers.signal().is_set()
    }

    fn events(&mut self, out: &mut Vec<Event>) {
        self.serve_main(out);
        self.serve_answers(out);
    }

    fn attach(&mut self, partition: &TopicPartition) -> Result<Source, Error> {
        let refused = |reason| client_error(format!("partition {partition}: {reason}"));
        let topic = CString::new(&*partition.topic).map_err(|_| refused("a NUL in the name"))?;
        let signal = Signal::new(self.waiter.waker());
        // SAFETY: the client is live, and the queue is dropped before it (field order, `close`).
        let queue = unsafe {
            let client = self.consumer.client().native_ptr();
            Queue::of_partition(client, &topic, partition.partition, signal)
        };
        let queue = queue.ok_or_else(|| refused("the client knows no such partition"))?;
        let free = self.partitions.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.partitions.push(None);
            self.partitions.len() - 1
        });
        self.partitions[index] = Some(Partition { queue });
        Ok(Source(index))
    }

    fn detach(&mut self, source: Source) {
        self.partitions[source.0] = None;
    }

    fn confirm_assign(&mut self, partitions: &[TopicPartition]) -> Result<(), Error> {
        let list = list_of(partitions);
        let result = if is_cooperative(&self.consumer) {
            self.consumer.incremental_assign(&list)
        } else {
            self.consumer.assign(&list)
        };
        result.map_err(client_error)
    }

    fn confirm_revoke(&mut self, partitions: &[TopicPartition]) -> Result<(), Error> {
        give_up(&self.consumer, partitions).map_err(client_error)
    }

    fn is_ready(&self, source: Source) -> bool {
        self.partitions[source.0].as_ref().is_some_and(|p| p.queue.signal().is_set())
    }

    fn assume_ready(&mut self) {
        self.partitions.iter().flatten().for_each(|p| p.queue.signal().assume());
    }

    fn fetch(&mut self, source: Source, most: usize, out: &mut Vec<Record>) -> Result<(), Error> {
        match &mut self.partitions[source.0] {
            None => Ok(()),
            Some(partition) => partition
                .queue
                .take(most, &mut self.buffer, out)
                .map_err(|(code, reason)| client_error(format!("{code:?}: {reason}"))),
        }
    }

    fn commit(&mut self, commits: &[Commit]) -> Result<(), Error> {
        let mut list = TopicPartitionList::with_capacity(commits.len());
        for Commit { partition, offset, metadata } in commits {
            let mut element = list.add_partition(&partition.topic, partition.partition);
            element.set_offset(rdkafka::Offset::Offset(*offset)).map_err(client_error)?;
            if !metadata.is_empty() {
                // Once for each element: a second time would leak the first text.
                element.set_metadata(metadata);
            }
        }
        // SAFETY: client, list and queue are live; librdkafka copies the list. No callback: the
        // answer comes as an event on the queue.
        let code = unsafe {
            rdkafka::bindings::rd_kafka_commit_queue(
                self.consumer.client().native_ptr(),
                list.ptr(),
                self.answers.as_ptr(),
                None,
                std::ptr::null_mut(),
            )
        };
        match code {
            Code::RD_KAFKA_RESP_ERR_NO_ERROR => Ok(()),
            code => Err(client_error(RDKafkaErrorCode::from(code))),
        }
    }

    fn look_up_committed(
        &mut self,
        look_up: usize,
        partitions: &[TopicPartition],
        limit: Duration,
    ) -> Result<(), Error> {
        let list = list_of(partitions);
        let limit_ms = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX).max(1);
        // SAFETY: client and queue are live, and the queue is dropped before the client (field order,
        // `close`); the list is ours.
        unsafe {
            queue::look_up(
                self.consumer.client().native_ptr(),
                &self.answers,
                look_up,
                &self.group,
                list.ptr(),
                limit_ms,
            )
        }
        .map_err(client_error)
    }

    fn close(self, limit: Duration) -> bool {
        let NativeClient { partitions, answers, consumer, .. } = self;
        // The queues first: the client's end waits for every reference to them.
        drop((partitions, answers));
        // On a plain thread, because the drop leaves the group, which may take as long as the
        // session if the broker is gone, and waits for records that a stuck handler holds.
        let (done, wait) = std::sync::mpsc::channel();
        let closer =
            std::thread::Builder::new().name("plimsoll-close".to_owned()).spawn(move || {
                drop(consumer);
                // The other end may have given up.
                let _ = done.send(());
            });
        closer.is_ok() && wait.recv_timeout(limit).is_ok()
    }
}

impl std::fmt::Debug for NativeClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NativeClient").field("partitions", &self.partitions).finish_non_exhaustive()
    }
}
