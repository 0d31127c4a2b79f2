//! Produces the plan's records, never far ahead of the commits.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::client::ClientContext;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, Message, OwnedHeaders};
use rdkafka::producer::{
    BaseProducer, BaseRecord, DeliveryResult, Producer, ProducerContext, PurgeConfig,
};

use super::checker::Checker;
use super::clock::Clock;
use super::cluster::Cluster;
use super::failure::Failure;
use super::plan::Plan;

/// Header with the record's rank among the records of its key: 8 bytes, big-endian.
pub(crate) const SEQUENCE: &str = "seq";

/// Header with the time of the append in nanoseconds since the demo's start: 8 bytes, big-endian.
pub(crate) const SENT: &str = "sent";

/// How many records of a partition may wait for their handler or be in it. It bounds how long a record waits, so that the
/// latencies tell of more than a long queue, and is far more than the workers take at once.
const MOST_UNFINISHED: u64 = 2_048;

/// How far a partition's last record may be ahead of its commit. The broker in this process forgets what exceeds 5 MB or
/// 100,000 batches of a partition, and after a rebalance all above the commit is read again.
const MOST_RECORDS_AHEAD: usize = 16_384;
const MOST_BYTES_AHEAD: usize = 2_500_000;

/// What a record costs beyond key and value, if it were alone in its batch.
const OVERHEAD: usize = 120;

/// How long a record may take to be appended.
const APPEND_LIMIT: Duration = Duration::from_secs(15);

/// Pause of a producer that waits.
const REST: Duration = Duration::from_millis(1);

/// How long records already handed to the client may still take after a stop.
const FLUSH_LIMIT: Duration = Duration::from_secs(3);

/// What the producer's thread shares with the others.
#[derive(Debug, Default)]
pub(crate) struct Signs {
    /// The consumer has partitions: records may come.
    pub(crate) begin: AtomicBool,
    /// No further records.
    pub(crate) stop: AtomicBool,
}

/// Tells the checker what was appended.
struct Deliveries {
    checker: Arc<Checker>,
    /// The first record that was not appended, and why.
    failure: OnceLock<(usize, KafkaError)>,
}

impl ClientContext for Deliveries {}

impl ProducerContext for Deliveries {
    /// Rank in the plan.
    type DeliveryOpaque = usize;

    fn delivery(&self, result: &DeliveryResult<'_>, record: usize) {
        match result {
            Ok(message) => self.checker.appended(message.partition(), message.offset()),
            Err((error, _)) => {
                let _ = self.failure.set((record, error.clone()));
            }
        }
    }
}

/// One run's producer, for a thread of its own.
pub(crate) struct Appender {
    producer: BaseProducer<Deliveries>,
    topic: String,
    plan: Plan,
    checker: Arc<Checker>,
    clock: Clock,
    signs: Arc<Signs>,
    ahead: Vec<Ahead>,
}

/// Records of one partition that no commit covers.
#[derive(Debug, Default)]
struct Ahead {
    sizes: VecDeque<usize>,
    bytes: usize,
    committed: u64,
    appended: u64,
    finished: u64,
}

impl Ahead {
    fn commit(&mut self, committed: u64) {
        while self.committed < committed
            && let Some(size) = self.sizes.pop_front()
        {
            self.bytes -= size;
            self.committed += 1;
        }
    }

    /// One record always may go.
    fn has_room(&self, size: usize) -> bool {
        self.sizes.is_empty()
            || self.appended - self.finished < MOST_UNFINISHED
                && self.sizes.len() < MOST_RECORDS_AHEAD
                && self.bytes + size <= MOST_BYTES_AHEAD
    }

    fn push(&mut self, size: usize) {
        self.sizes.push_back(size);
        self.bytes += size;
        self.appended += 1;
    }
}

impl Appender {
    /// # Errors
    ///
    /// [`Failure::Client`]
    pub(crate) fn new(
        cluster: &Cluster,
        plan: Plan,
        checker: Arc<Checker>,
        clock: Clock,
        signs: Arc<Signs>,
    ) -> Result<Self, Failure> {
        let deliveries = Deliveries { checker: Arc::clone(&checker), failure: OnceLock::new() };
        let producer = ClientConfig::new()
            .set("bootstrap.servers", cluster.brokers())
            // A retry must neither double nor reorder.
            .set("enable.idempotence", "true")
            .set("acks", "all")
            .set("linger.ms", "2")
            .set("message.timeout.ms", APPEND_LIMIT.as_millis().to_string())
            .create_with_context(deliveries)
            .map_err(|source| Failure::Client { what: "the producer", source })?;
        let ahead = (0..plan.partitions()).map(|_| Ahead::default()).collect();
        Ok(Self { producer, topic: cluster.topic().to_owned(), plan, checker, clock, signs, ahead })
    }

    /// Appends all records and waits until the broker has them, or until told to stop.
    ///
    /// # Errors
    ///
    /// [`Failure::Append`] names the first record that was not appended.
    pub(crate) fn run(mut self) -> Result<(), Failure> {
        while !self.signs.begin.load(Ordering::Acquire) && !self.stopped() {
            thread::sleep(REST);
        }
        let mut sequences = vec![0; self.plan.input().keys().len()];
        self.checker.begins();
        for index in 0..self.plan.len() {
            if self.stopped() {
                break;
            }
            self.append(index, &mut sequences)?;
            if index % 32 == 0 {
                self.poll()?;
            }
        }
        while self.producer.in_flight_count() > 0 && !self.stopped() {
            self.poll_and_rest()?;
        }
        if self.stopped() {
            self.abort();
        }
        self.failed()
    }

    fn append(&mut self, index: u64, sequences: &mut [u64]) -> Result<(), Failure> {
        let place = self.plan.record(index);
        let input = Arc::clone(self.plan.input());
        let value = input.value(place.row);
        let key = place.key.map(|key| &*input.keys()[key]);
        let size = value.len() + key.map_or(0, <[u8]>::len) + OVERHEAD;
        while !self.has_room(place.partition, size) {
            if self.stopped() {
                return Ok(());
            }
            self.poll_and_rest()?;
        }
        let sequence = place.key.map(|key| sequences[key].to_be_bytes());
        loop {
            let sent = self.clock.now().to_be_bytes();
            let headers =
                OwnedHeaders::new_with_capacity(2).insert(Header { key: SENT, value: Some(&sent) });
            let headers = match &sequence {
                Some(sequence) => headers.insert(Header { key: SEQUENCE, value: Some(sequence) }),
                None => headers,
            };
            let mut record = BaseRecord::with_opaque_to(&self.topic, index as usize)
                .partition(place.partition as i32)
                .payload(value)
                .headers(headers);
            if let Some(key) = key {
                record = record.key(key);
            }
            match self.producer.send::<[u8], [u8]>(record) {
                Ok(()) => break,
                // The client's own queue is full: it empties by itself, or fails by its time limit.
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), _)) => {
                    if self.stopped() {
                        return Ok(());
                    }
                    self.poll_and_rest()?;
                }
                Err((error, _)) => {
                    return Err(Failure::Append { record: index, reason: error.to_string() });
                }
            }
        }
        if let Some(key) = place.key {
            sequences[key] += 1;
        }
        self.ahead[place.partition].push(size);
        Ok(())
    }

    fn has_room(&mut self, partition: usize, size: usize) -> bool {
        let ahead = &mut self.ahead[partition];
        if ahead.has_room(size) {
            return true;
        }
        ahead.commit(self.checker.committed_over(partition));
        ahead.finished = self.checker.finished_in(partition);
        ahead.has_room(size)
    }

    fn stopped(&self) -> bool {
        self.signs.stop.load(Ordering::Acquire)
    }

    /// Serves the client's delivery reports.
    fn poll(&self) -> Result<(), Failure> {
        self.producer.poll(Duration::ZERO);
        self.failed()
    }

    /// The same, then rests. The client's own wait would spin through its last millisecond.
    fn poll_and_rest(&self) -> Result<(), Failure> {
        self.poll()?;
        thread::sleep(REST);
        Ok(())
    }

    fn failed(&self) -> Result<(), Failure> {
        // A stop gives up what is on its way: that is no failure.
        if self.stopped() {
            return Ok(());
        }
        match self.producer.context().failure.get() {
            Some((record, error)) => {
                Err(Failure::Append { record: *record as u64, reason: error.to_string() })
            }
            None => Ok(()),
        }
    }

    /// Lets what is on its way arrive, but not for long.
    fn abort(&mut self) {
        let deadline = Instant::now() + FLUSH_LIMIT;
        while self.producer.in_flight_count() > 0 && Instant::now() < deadline {
            self.producer.poll(Duration::ZERO);
            thread::sleep(REST);
        }
        if self.producer.in_flight_count() > 0 {
            self.producer.purge(PurgeConfig::default().queue().inflight());
            self.producer.poll(Duration::from_millis(100));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_runs_ahead_by_a_bounded_number_of_records() {
        let mut ahead = Ahead::default();
        for _ in 0..MOST_RECORDS_AHEAD {
            assert!(ahead.has_room(100));
            ahead.push(100);
            ahead.finished += 1;
        }
        assert!(!ahead.has_room(100));
        ahead.commit(1);
        assert!(ahead.has_room(100));
        ahead.push(100);
        ahead.finished += 1;
        assert!(!ahead.has_room(100));
        ahead.commit(u64::MAX);
        assert_eq!((ahead.bytes, ahead.sizes.len()), (0, 0));
    }

    #[test]
    fn a_partition_runs_ahead_of_its_handlers_by_a_bounded_number_of_records() {
        let mut ahead = Ahead::default();
        for _ in 0..MOST_UNFINISHED {
            assert!(ahead.has_room(100));
            ahead.push(100);
        }
        assert!(!ahead.has_room(100));
        ahead.finished = 1;
        assert!(ahead.has_room(100));
    }

    #[test]
    fn a_partition_runs_ahead_by_a_bounded_number_of_bytes() {
        let mut ahead = Ahead::default();
        ahead.push(MOST_BYTES_AHEAD - 100);
        assert!(ahead.has_room(100));
        assert!(!ahead.has_room(101));
        ahead.commit(1);
        assert!(ahead.has_room(MOST_BYTES_AHEAD + 1), "one record always may go");
    }
}
