//! What people write by hand: a channel per worker, and a set of the offsets in flight per partition.
//!
//! The consume loop puts each offset into the `BTreeSet` of its partition, under the partition's mutex, and sends the
//! record to the worker that the key hash names. A worker takes what waits, up to the batch size, calls the handler and
//! removes the offsets. The watermark of a partition is the least offset in flight, or the next offset if none is; a
//! committer looks every few milliseconds. Other than in the [classic](crate::classic) design a slow record holds its own
//! partition only, at the price of a search tree per partition.

use std::{
    collections::BTreeSet,
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use crossbeam_utils::CachePadded;
use parking_lot::Mutex;

use crate::{
    contender::{Contender, Outcome, no_op},
    input::{Input, Record},
};

/// The hand-written design with its settings.
#[derive(Clone, Copy, Debug)]
pub struct ChannelPerWorker {
    /// Places in each worker's channel, at least 1.
    pub channel: usize,
    /// Time between two looks of the committer.
    pub commit_interval: Duration,
}

impl Default for ChannelPerWorker {
    fn default() -> Self {
        Self { channel: 1_024, commit_interval: Duration::from_millis(5) }
    }
}

impl Contender for ChannelPerWorker {
    fn name(&self) -> &'static str {
        "channel per worker"
    }

    fn run(&self, input: &Input, workers: usize, batch: usize) -> Outcome {
        self.run_with(input, workers, batch, no_op, |_, _| ())
    }
}

/// Offsets of one partition.
#[derive(Default)]
struct Tracker {
    in_flight: BTreeSet<i64>,
    next: i64,
}

impl Tracker {
    fn admit(&mut self, offset: i64) {
        self.in_flight.insert(offset);
        self.next = offset + 1;
    }

    fn watermark(&self) -> i64 {
        self.in_flight.first().copied().unwrap_or(self.next)
    }
}

type Trackers = [CachePadded<Mutex<Tracker>>];

impl ChannelPerWorker {
    /// Runs with a handler and a function that is told of each commit: partition and next offset to read.
    ///
    /// The handler is called by several workers at once, never twice at once for one key. Commits come from one thread.
    ///
    /// # Panics
    /// If `workers`, `batch` or `self.channel` is 0, and if `handler` or `on_commit` panics.
    pub fn run_with(
        &self,
        input: &Input,
        workers: usize,
        batch: usize,
        handler: impl Fn(&[Record]) + Sync,
        on_commit: impl FnMut(u32, i64) + Send,
    ) -> Outcome {
        assert!(
            workers > 0 && batch > 0 && self.channel > 0,
            "workers, batch and channel need a size"
        );
        let trackers: Vec<CachePadded<Mutex<Tracker>>> =
            (0..input.partitions()).map(|_| CachePadded::default()).collect();
        let ready = Barrier::new(workers + 2);
        let (stop, stopped) = bounded::<()>(0);

        let (records, watermarks, seconds) = thread::scope(|scope| {
            let (trackers, handler, ready) = (&trackers, &handler, &ready);
            let mut senders = Vec::new();
            let mut working = Vec::new();
            for _ in 0..workers {
                let (sender, records) = bounded(self.channel);
                senders.push(sender);
                working.push(scope.spawn(move || {
                    ready.wait();
                    work_loop(&records, batch, handler, trackers)
                }));
            }
            let interval = self.commit_interval;
            let committing = scope.spawn(move || {
                ready.wait();
                commit_loop(trackers, interval, &stopped, on_commit)
            });

            ready.wait();
            let start = Instant::now();
            consume_loop(input.iter(), trackers, &senders);
            drop(senders);
            let records =
                working.into_iter().map(|worker| worker.join().expect("a worker panicked")).sum();
            drop(stop);
            let watermarks = committing.join().expect("the committer panicked");
            (records, watermarks, start.elapsed().as_secs_f64())
        });
        Outcome { seconds, records, watermarks }
    }
}

fn consume_loop(
    records: impl Iterator<Item = Record>,
    trackers: &Trackers,
    workers: &[Sender<Record>],
) {
    for record in records {
        trackers[record.partition as usize].lock().admit(record.offset);
        if workers[record.worker(workers.len())].send(record).is_err() {
            // The worker panicked, which its join reports.
            return;
        }
    }
}

/// Returns how many records it has handled.
fn work_loop(
    records: &Receiver<Record>,
    batch: usize,
    handler: &impl Fn(&[Record]),
    trackers: &Trackers,
) -> u64 {
    let mut handled = 0;
    let mut taken = Vec::with_capacity(batch);
    while let Ok(first) = records.recv() {
        taken.push(first);
        taken.extend(records.try_iter().take(batch - 1));
        handler(&taken);
        handled += taken.len() as u64;
        for record in taken.drain(..) {
            trackers[record.partition as usize].lock().in_flight.remove(&record.offset);
        }
    }
    handled
}

/// Returns the last watermark of each partition.
fn commit_loop(
    trackers: &Trackers,
    interval: Duration,
    stopped: &Receiver<()>,
    mut on_commit: impl FnMut(u32, i64),
) -> Vec<i64> {
    let mut committed = vec![0; trackers.len()];
    loop {
        let last_look = stopped.recv_timeout(interval) == Err(RecvTimeoutError::Disconnected);
        for (partition, committed) in committed.iter_mut().enumerate() {
            let watermark = trackers[partition].lock().watermark();
            if watermark > *committed {
                *committed = watermark;
                // There are no more than u32::MAX partitions, as records name them by a u32.
                on_commit(partition as u32, watermark);
            }
        }
        if last_look {
            return committed;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::HashMap,
        sync::atomic::{AtomicBool, Ordering},
    };

    use super::*;
    use crate::{contender::run_checked, input::Flights};

    #[test]
    fn commits_are_contiguous_and_keys_stay_in_order() {
        let input = Flights::january().unwrap().input(4_000, 4);
        let mut expected: HashMap<u64, Vec<i64>> = HashMap::new();
        for record in input.iter() {
            expected.entry(record.key_hash).or_default().push(record.offset);
        }
        for (workers, batch, channel) in [(1, 1, 1), (2, 64, 1_024), (8, 3, 16)] {
            let done: Vec<Vec<AtomicBool>> = input
                .ends()
                .iter()
                .map(|&end| (0..end).map(|_| AtomicBool::new(false)).collect())
                .collect();
            let flag = |partition: u32, offset: i64| {
                &done[partition as usize][usize::try_from(offset).unwrap()]
            };
            let seen: Mutex<HashMap<u64, Vec<i64>>> = Mutex::default();
            let mut next = vec![0; 4];
            let design = ChannelPerWorker { channel, commit_interval: Duration::from_micros(200) };
            let outcome = design.run_with(
                &input,
                workers,
                batch,
                |records| {
                    assert!((1..=batch).contains(&records.len()));
                    for record in records {
                        if record.offset % 16 == 0 {
                            thread::sleep(Duration::from_micros(record.key_hash % 300));
                        }
                        seen.lock().entry(record.key_hash).or_default().push(record.offset);
                        flag(record.partition, record.offset).store(true, Ordering::Release);
                    }
                },
                |partition, offset| {
                    for offset in next[partition as usize]..offset {
                        let done = flag(partition, offset).load(Ordering::Acquire);
                        assert!(done, "unfinished record committed");
                    }
                    next[partition as usize] = offset;
                },
            );
            assert_eq!(outcome.records, 4_000);
            assert_eq!(outcome.watermarks, input.ends());
            assert_eq!(next, input.ends(), "not every commit was reported");
            assert_eq!(seen.into_inner(), expected, "order within a key");
        }
    }

    #[test]
    fn no_op_runs_reach_the_ends() {
        let input = Flights::january().unwrap().input(60_000, 4);
        for (workers, batch) in [(1, 1), (2, 64), (8, 1), (8, 64)] {
            run_checked(&ChannelPerWorker::default(), &input, workers, batch).unwrap();
        }
    }
}
