//! The consumer: settings, checks, and the way into the poller.

use crate::error::Error;
use crate::event::{Event, Report};
use crate::fault::Planted;
use crate::native::{NativeClient, Record};
use crate::poller::{Asked, Hooks, Limits, Poller};
use crate::resume::{DoneMaps, MetadataFull, Settings};
use plimsoll_engine::{
    BatchOutcome, BuildError, Executor, IntoBatchOutcome, IntoOutcome, Outcome, Retry, Waiter,
    Waker,
};
use rdkafka::config::ClientConfig;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// Properties that the consumer must own, and where to say the same.
const OWNED: [(&str, &str); 5] = [
    ("bootstrap.servers", "use `brokers`"),
    ("metadata.broker.list", "use `brokers`"),
    ("group.id", "use `group`"),
    ("enable.auto.commit", "offsets are committed when their records are finished"),
    ("enable.auto.offset.store", "offsets are committed when their records are finished"),
];

/// The records of one call of a batch handler: at least one, at most the batch size.
///
/// Records of one key of one partition are in offset order; a batch may mix keys, partitions and
/// topics.
#[derive(Debug)]
pub struct Batch<'a>(&'a plimsoll_engine::Batch<'a, Record>);

impl<'a> Batch<'a> {
    /// Number of records.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Never true: a handler is not called without records.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The record at `index`.
    pub fn get(&self, index: usize) -> Option<&'a Record> {
        self.0.get(index)
    }

    /// The records, those of one key in offset order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &'a Record> + use<'a> {
        self.0.iter()
    }
}

/// Starts the workers with the user's handler inside.
type Start =
    Box<dyn FnOnce(plimsoll_engine::Builder, Waker) -> Result<Executor<Record>, BuildError> + Send>;

/// Settings of a [`Consumer`]; see [`Consumer::builder`].
#[must_use]
pub struct ConsumerBuilder {
    brokers: String,
    group: String,
    topics: Vec<String>,
    properties: BTreeMap<String, String>,
    engine: plimsoll_engine::Builder,
    window: usize,
    commit_interval: Duration,
    drain_budget: Duration,
    resume: Settings,
    startup_limit: Duration,
    signals: bool,
    on_event: Box<dyn Fn(&Event) + Send + Sync>,
    planted: Planted,
    start: Option<Start>,
}

impl fmt::Debug for ConsumerBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the properties: they may hold passwords.
        f.debug_struct("ConsumerBuilder")
            .field("brokers", &self.brokers)
            .field("group", &self.group)
            .field("topics", &self.topics)
            .finish_non_exhaustive()
    }
}

impl ConsumerBuilder {
    fn new() -> Self {
        ConsumerBuilder {
            brokers: String::new(),
            group: String::new(),
            topics: Vec::new(),
            properties: BTreeMap::new(),
            engine: Executor::builder().workers(default_workers()),
            window: 65_536,
            commit_interval: Duration::from_secs(1),
            drain_budget: Duration::from_secs(10),
            resume: Settings::default(),
            startup_limit: Duration::from_secs(30),
            signals: true,
            on_event: Box::new(|_| ()),
            planted: Planted::nothing(),
            start: None,
        }
    }

    /// The brokers to begin with: `host:port`, several separated by commas. Required.
    pub fn brokers(mut self, brokers: impl Into<String>) -> Self {
        self.brokers = brokers.into();
        self
    }

    /// The consumer group. Required.
    pub fn group(mut self, group: impl Into<String>) -> Self {
        self.group = group.into();
        self
    }

    /// A topic to read; may be called several times. At least one is required.
    pub fn topic(mut self, topic: impl Into<String>) -> Self {
        self.topics.push(topic.into());
        self
    }

    /// Topics to read.
    pub fn topics<T: Into<String>>(mut self, topics: impl IntoIterator<Item = T>) -> Self {
        self.topics.extend(topics.into_iter().map(Into::into));
        self
    }

    /// A librdkafka property, passed through. Those that the consumer must own are refused when it
    /// is built.
    ///
    /// Defaults that differ from librdkafka's: `auto.offset.reset=earliest`,
    /// `partition.assignment.strategy=cooperative-sticky`, `fetch.queue.backoff.ms=5`,
    /// `queued.max.messages.kbytes=16384` (per partition).
    pub fn set(mut self, property: impl Into<String>, value: impl Into<String>) -> Self {
        self.properties.insert(property.into(), value.into());
        self
    }

    /// Threads that run the handler; default: the number of cores.
    pub fn workers(mut self, workers: usize) -> Self {
        self.engine = self.engine.workers(workers);
        self
    }

    /// Most records of one call of a batch handler; default 64. A batch takes what is there.
    pub fn batch(mut self, batch: usize) -> Self {
        self.engine = self.engine.batch(batch);
        self
    }

    /// When a failed record is tried again, and what becomes of it after the last attempt; default
    /// [`Retry::never`], after which its partition halts and the consumer ends. While a record waits
    /// for its next attempt the later records of its key wait, too, and other keys go on; it holds the
    /// watermark, so at most a [window](Self::window) of records is handled beyond it.
    ///
    /// Of [`Exhausted`](crate::Exhausted), `Halt` and `Skip` can be had; skipped records are committed
    /// over, with a warning for each.
    pub fn retry(mut self, retry: Retry) -> Self {
        self.engine = self.engine.retry(retry);
        self
    }

    /// Most records of one partition that are admitted and not yet below the watermark;
    /// default 65,536. One unfinished record lets the others of its partition run on so far.
    /// Costs 13 bytes each for every partition that has delivered a record.
    pub fn window(mut self, records: usize) -> Self {
        self.window = records;
        self
    }

    /// How often watermarks are committed; default 1 s.
    pub fn commit_interval(mut self, interval: Duration) -> Self {
        self.commit_interval = interval;
        self
    }

    /// How long admitted records may take to end when a partition is revoked and when the consumer
    /// stops; default 10 s. Zero waits for nothing. What is not finished by then is not committed
    /// and is delivered again.
    pub fn drain_budget(mut self, budget: Duration) -> Self {
        self.drain_budget = budget;
        self
    }

    /// Whether a commit says what is finished above its offset, so that nobody handles it again;
    /// default [`DoneMaps::On`]. It goes into the metadata of the commit, which other tools may show.
    pub fn done_map(mut self, maps: DoneMaps) -> Self {
        self.resume.maps = maps;
        self
    }

    /// Most bytes of the metadata of a commit, 16 to 32,767; default 4,096, which is the default of the
    /// brokers' `offset.metadata.max.bytes`. If a broker takes less, the commit is sent again without
    /// metadata, and later ones are shorter.
    pub fn metadata_limit(mut self, bytes: usize) -> Self {
        self.resume.limit = bytes;
        self
    }

    /// What happens when a done-map would not fit into the metadata; default [`MetadataFull::Cut`].
    /// [`MetadataFull::SlowDown`] needs a [`metadata_limit`](Self::metadata_limit) of at least 256
    /// bytes.
    pub fn when_metadata_full(mut self, full: MetadataFull) -> Self {
        self.resume.full = full;
        self
    }

    /// Whether the metadata of the Confluent Parallel Consumer is read, too; default false. It has no
    /// check value, so turn this on only to take over a group that this consumer has written.
    pub fn resume_from_parallel_consumer(mut self, on: bool) -> Self {
        self.resume.parallel_consumer = on;
        self
    }

    /// How long [`run`](Consumer::run) looks for the brokers and the topics before it gives up
    /// with an error; default 30 s.
    pub fn startup_limit(mut self, limit: Duration) -> Self {
        self.startup_limit = limit;
        self
    }

    /// Whether SIGINT and SIGTERM stop the consumer: the first one drains, the second one stops
    /// now. Default true; the signals' default actions come back when `run` returns.
    pub fn signals(mut self, on: bool) -> Self {
        self.signals = on;
        self
    }

    /// Is told what happens. Called on the poller's thread, so it must be quick.
    pub fn on_event(mut self, told: impl Fn(&Event) + Send + Sync + 'static) -> Self {
        self.on_event = Box::new(told);
        self
    }

    /// Plants a fault.
    #[cfg(feature = "planted-faults")]
    #[doc(hidden)]
    pub fn plant(mut self, fault: crate::Fault) -> Self {
        self.planted = Planted::new(fault);
        self
    }

    /// The handler, for one record at a time.
    ///
    /// It runs on the workers: records of one key of one partition in offset order and never two
    /// at once, records without a key in any order. A record counts as finished when the handler
    /// returns `()` or `Ok(())`. An error or a panic is a failed attempt: see
    /// [`retry`](Self::retry). After the last one its partition halts and the consumer ends with
    /// [`Error::Handler`]; nothing is committed past the record.
    pub fn each<F, R>(mut self, handler: F) -> Self
    where
        F: Fn(&Record) -> R + Send + Sync + 'static,
        R: IntoOutcome + 'static,
    {
        let planted = self.planted.clone();
        self.start = Some(Box::new(move |engine, waker| {
            engine.each(waker, move |record: &Record| {
                if planted.drops() { Outcome::Done } else { handler(record).into_outcome() }
            })
        }));
        self
    }

    /// The handler, for up to [`batch`](Self::batch) records at a time. As with
    /// [`each`](Self::each); a batch ends as a whole, or in parts if the handler returns a
    /// [`BatchOutcome`].
    pub fn batches<F, R>(mut self, handler: F) -> Self
    where
        F: Fn(&Batch<'_>) -> R + Send + Sync + 'static,
        R: IntoBatchOutcome + 'static,
    {
        let planted = self.planted.clone();
        self.start = Some(Box::new(move |engine, waker| {
            engine.batches(waker, move |batch: &plimsoll_engine::Batch<'_, Record>| {
                if planted.drops() {
                    return BatchOutcome::All(Outcome::Done);
                }
                handler(&Batch(batch)).into_batch_outcome()
            })
        }));
        self
    }

    /// Checks the settings and creates the client; contacts nobody yet.
    ///
    /// # Errors
    /// [`Error::Config`] names the setting.
    pub fn build(self) -> Result<Consumer, Error> {
        required("brokers", &self.brokers)?;
        required("group", &self.group)?;
        if self.topics.is_empty() {
            return Err(Error::config("topic", "is required"));
        }
        for topic in &self.topics {
            required("topic", topic)?;
            if topic.starts_with('^') || topic.contains('\0') {
                let reason = format!("{topic:?} is not the name of a topic");
                return Err(Error::config("topic", reason));
            }
        }
        self.engine.check()?;
        let window = match u32::try_from(self.window) {
            Ok(window @ 1..) => window,
            _ => {
                let reason = format!("{} is outside 1..={}", self.window, u32::MAX);
                return Err(Error::config("window", reason));
            }
        };
        if self.commit_interval.is_zero() {
            return Err(Error::config("commit_interval", "must not be zero"));
        }
        self.resume.check()?;
        let Some(start) = self.start else {
            return Err(Error::config("each", "a handler is required: `each` or `batches`"));
        };
        let client = NativeClient::new(
            &client_config(&self.brokers, &self.group, &self.properties)?,
            Waiter::new(),
        )?;
        Ok(Consumer {
            stops: Arc::new(AtomicU32::new(0)),
            client,
            brokers: self.brokers,
            topics: self.topics,
            engine: self.engine,
            limits: Limits {
                window,
                admission: plimsoll_engine::Limits::new(window),
                commit_interval: self.commit_interval,
                drain: self.drain_budget,
                commit: Duration::from_secs(5),
                look_up: Duration::from_secs(10),
            },
            resume: self.resume,
            startup_limit: self.startup_limit,
            signals: self.signals,
            on_event: self.on_event,
            planted: self.planted,
            start,
        })
    }
}

fn default_workers() -> usize {
    std::thread::available_parallelism().map_or(2, std::num::NonZero::get)
}

fn required(setting: &str, value: &str) -> Result<(), Error> {
    if value.trim().is_empty() { Err(Error::config(setting, "is required")) } else { Ok(()) }
}

fn client_config(
    brokers: &str,
    group: &str,
    properties: &BTreeMap<String, String>,
) -> Result<ClientConfig, Error> {
    for (owned, instead) in OWNED {
        if properties.contains_key(owned) {
            return Err(Error::config(owned, format!("cannot be set: {instead}")));
        }
    }
    let mut config = ClientConfig::new();
    config
        .set("bootstrap.servers", brokers)
        .set("group.id", group)
        .set("enable.auto.commit", "false")
        .set("enable.auto.offset.store", "false")
        .set("auto.offset.reset", "earliest")
        // The default of 1 s is a cliff: a partition whose prefetch was full sleeps so long.
        .set("fetch.queue.backoff.ms", "5")
        .set("queued.max.messages.kbytes", "16384");
    // The new protocol's brokers assign by themselves and refuse a strategy.
    if properties.get("group.protocol").is_none_or(|protocol| protocol == "classic") {
        config.set("partition.assignment.strategy", "cooperative-sticky");
    }
    for (property, value) in properties {
        config.set(property, value);
    }
    Ok(config)
}

/// Reads topics of Kafka, runs a handler over their records on all cores, and commits what is
/// contiguous and done.
///
/// ```no_run
/// use plimsoll_kafka::{Consumer, Record};
///
/// let consumer = Consumer::builder()
///     .brokers("localhost:9092")
///     .group("billing")
///     .topic("orders")
///     .each(|record: &Record| println!("{:?}", record.payload()))
///     .build()?;
/// consumer.run()?; // until SIGINT or SIGTERM
/// # Ok::<(), plimsoll_kafka::Error>(())
/// ```
pub struct Consumer {
    client: NativeClient,
    brokers: String,
    topics: Vec<String>,
    engine: plimsoll_engine::Builder,
    limits: Limits,
    resume: Settings,
    startup_limit: Duration,
    signals: bool,
    on_event: Box<dyn Fn(&Event) + Send + Sync>,
    planted: Planted,
    start: Start,
    stops: Arc<AtomicU32>,
}

impl fmt::Debug for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("brokers", &self.brokers)
            .field("topics", &self.topics)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl Consumer {
    /// Settings, with their defaults.
    pub fn builder() -> ConsumerBuilder {
        ConsumerBuilder::new()
    }

    /// A handle to stop it from elsewhere.
    pub fn handle(&self) -> Handle {
        Handle { stops: Arc::clone(&self.stops), waker: self.client.waker() }
    }

    /// Joins the group and runs until it is stopped (by a [`Handle`] or a signal) or fails. Then it
    /// lets admitted records end within the drain budget, commits what is finished, and leaves the
    /// group. The calling thread becomes the poller.
    ///
    /// # Errors
    /// [`Error::BrokerUnreachable`], [`Error::TopicMissing`] and [`Error::Topic`] within the
    /// start-up limit; [`Error::Handler`] after a handler failed; [`Error::Commit`] and
    /// [`Error::Client`] when going on is impossible. Whatever was finished has been committed, as
    /// far as that was possible.
    pub fn run(self) -> Result<Report, Error> {
        let signals = if self.signals { Some(Signals::install()?) } else { None };
        let pending = signals.as_ref().map(|signals| Arc::clone(&signals.pending));
        let stops = self.stops;
        let asked = move || {
            // Acquire/Release: a signal is counted once.
            if pending.as_ref().is_some_and(|pending| pending.swap(false, Ordering::AcqRel)) {
                stops.fetch_add(1, Ordering::Relaxed);
            }
            match stops.load(Ordering::Relaxed) {
                0 => Asked::GoOn,
                1 => Asked::Drain,
                _ => Asked::Now,
            }
        };
        self.client
            .look_up(&self.topics, &self.brokers, self.startup_limit, || asked() != Asked::GoOn)?;
        self.client.subscribe(&self.topics)?;
        let executor = (self.start)(self.engine, self.client.waker())?;
        let hooks = Hooks { on_event: self.on_event, asked: Box::new(asked) };
        Poller::new(self.client, executor, self.limits, self.resume, hooks, self.planted).run()
    }
}

/// Stops a running [`Consumer`] from any thread.
#[derive(Debug, Clone)]
pub struct Handle {
    stops: Arc<AtomicU32>,
    waker: Waker,
}

impl Handle {
    /// The first call lets admitted records end within the drain budget, then commits and leaves.
    /// The second one stops now: what is not finished is not committed and is delivered again.
    pub fn stop(&self) {
        // Relaxed: the waker fences.
        self.stops.fetch_add(1, Ordering::Relaxed);
        self.waker.wake();
    }
}

/// SIGINT and SIGTERM as a flag; their default actions come back when it is dropped.
#[derive(Debug)]
struct Signals {
    pending: Arc<AtomicBool>,
    ended: Arc<AtomicBool>,
    ids: Vec<signal_hook::SigId>,
}

impl Signals {
    fn install() -> Result<Self, Error> {
        use signal_hook::consts::{SIGINT, SIGTERM};
        use signal_hook::flag::{register, register_conditional_default};
        let mut signals =
            Signals { pending: Arc::default(), ended: Arc::default(), ids: Vec::new() };
        for signal in [SIGINT, SIGTERM] {
            let refused = |source| Error::System { what: format!("signal {signal}"), source };
            register_conditional_default(signal, Arc::clone(&signals.ended)).map_err(refused)?;
            signals.ids.push(register(signal, Arc::clone(&signals.pending)).map_err(refused)?);
        }
        Ok(signals)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.ids.drain(..) {
            signal_hook::low_level::unregister(id);
        }
        // Relaxed: read by the signal handler at any later moment.
        self.ended.store(true, Ordering::Relaxed);
    }
}
