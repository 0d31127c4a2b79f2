//! The consumer under test: the library, with a handler that takes time and tells the checker.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use plimsoll_kafka::{Batch, Consumer, Event, Record};

use super::checker::{Checker, Seen};
use super::cluster::Cluster;
use super::console::Console;
use super::failure::Failure;
use super::options::Options;
use super::producer::{SENT, SEQUENCE, Signs};
use super::work;

/// How long a stop may wait for running handlers.
pub(crate) const DRAIN_BUDGET: Duration = Duration::from_secs(5);

/// How long the consumer may take to reach its broker.
const STARTUP_LIMIT: Duration = Duration::from_secs(10);

/// Short, so that the latencies to the commit say something, and so that the producer need not wait for commits.
const COMMIT_INTERVAL: Duration = Duration::from_millis(20);

/// # Errors
///
/// [`Failure::Consumer`] with the library's own words.
pub(crate) fn build(
    options: &Options,
    cluster: &Cluster,
    checker: &Arc<Checker>,
    signs: &Arc<Signs>,
    console: &Console,
) -> Result<Consumer, Failure> {
    let mut builder = Consumer::builder()
        .brokers(cluster.brokers())
        .group(cluster.group())
        .topic(cluster.topic())
        .set("auto.offset.reset", "earliest")
        .workers(options.workers)
        .window(options.window)
        .commit_interval(COMMIT_INTERVAL)
        .drain_budget(DRAIN_BUDGET)
        .startup_limit(STARTUP_LIMIT)
        .signals(false);
    if cluster.is_mock() {
        // The broker in this process holds back an empty answer for the whole wait, even when a record arrives meanwhile.
        builder = builder.set("session.timeout.ms", "6000").set("fetch.wait.max.ms", "10");
    }
    #[cfg(feature = "planted-faults")]
    if let Some(plant) = options.plant {
        use super::options::Plant;
        use plimsoll_kafka::Fault;
        builder = builder.plant(match plant {
            Plant::CommitTooFar => Fault::CommitTooFar,
            Plant::SwapKey => Fault::SwapKey,
            Plant::DropTicket => Fault::DropTicket,
        });
    }

    let events = Events {
        topic: cluster.topic().to_owned(),
        checker: Arc::clone(checker),
        signs: Arc::clone(signs),
        console: console.clone(),
    };
    let (checker, cost) = (Arc::clone(checker), options.cost());
    let handle = move |record: &Record| {
        let sequence = record.header(SEQUENCE).and_then(number);
        let running = checker.enter(Seen {
            partition: record.partition(),
            offset: record.offset(),
            key: record.key(),
            sequence,
            sent: record.header(SENT).and_then(number),
        });
        let repetition = sequence.unwrap_or(record.offset() as u64);
        work::perform(cost.of(record.payload().unwrap_or_default(), repetition));
        checker.leave(running);
    };
    let builder = builder.on_event(move |event| events.take(event));
    let builder = match options.batch {
        None => builder.each(handle),
        Some(batch) => {
            builder.batch(batch).batches(move |batch: &Batch<'_>| batch.iter().for_each(&handle))
        }
    };
    Ok(builder.build()?)
}

fn number(header: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(header.try_into().ok()?))
}

/// Passes the consumer's events on to the checker.
struct Events {
    topic: String,
    checker: Arc<Checker>,
    signs: Arc<Signs>,
    console: Console,
}

impl Events {
    fn take(&self, event: &Event) {
        match event {
            Event::Assigned { partitions } => {
                let own = partitions.iter().filter(|(topic, _)| *topic == self.topic);
                for (_, partition) in own {
                    self.checker.assigned(*partition);
                    self.signs.begin.store(true, Ordering::Release);
                }
            }
            Event::Committed { offsets } => {
                self.checker.commit();
                for committed in offsets.iter().filter(|committed| committed.topic == self.topic) {
                    self.checker.committed(committed.partition, committed.offset);
                }
            }
            Event::CommitFailed { reason, .. } => {
                self.console.note_once(&format!("a commit failed: {reason}"))
            }
            Event::Warning { message } => self.console.note_once(message),
            // Nothing is promised about these, and `Event` may grow.
            _ => {}
        }
    }
}
