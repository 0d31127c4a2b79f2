//! The classic design: one linked list under a mutex. The yardstick.
//!
//! # What is ported
//! * A *consume loop* appends every record to one global list of nodes, under a mutex, and sends it to the bounded
//!   channel (`Chan`, 1,024 places) of worker `Split(record) % Num`. A full channel makes it wait.
//! * `Num` *merge workers* gather records until they have `Size` of them or it is time to flush, call `Do(batch)`, and
//!   send the marks of the batch on one done channel.
//! * A *commit loop* marks nodes done, pops the done head of the list under the mutex, and commits the last popped
//!   record of each partition. Here a commit is a store to an array of offsets, so no client is in the figures.
//!
//! Its faults are part of it. The list is global, so one unfinished record holds the commits of all partitions, and one
//! full channel holds the records of all workers.
//!
//! # What is better than in a literal port
//! A figure against a weak rival would be worth nothing, so everything that leaves the design what it is was taken:
//! * Nodes live in a slab and are reused through a free list, both guarded by the mutex that an append takes anyway:
//!   in the steady state a record allocates nothing, counts no reference and takes one lock.
//! * The done flags belong to the commit loop alone, outside the list, and marking needs no lock.
//! * Marks travel as one vector per flush, and the vectors go back to their worker.
//! * The commit loop takes all marks that wait before it takes the lock, and lets the consume loop in between when it
//!   has many nodes to pop.
//! * A job is 24 bytes by value, so a worker touches neither the list nor the input.
//! * With [`Flush::WhenChannelEmpty`] a worker flushes as soon as nothing waits, instead of holding a partial batch for
//!   up to 5 s. This is the yardstick; [`Flush::Ticker`] is there to show what the original costs in latency.
//! * After the last record the workers flush and the commit loop drains, which the original does not do.
//!
//! Not taken, since it would be another design: appending or sending several records at once.

use std::{
    sync::{
        Barrier,
        atomic::{AtomicI64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, bounded};
use crossbeam_queue::ArrayQueue;
use parking_lot::Mutex;

use crate::{
    contender::{Contender, Outcome, no_op},
    input::{Input, Record},
};

/// When a worker flushes a batch that is not full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// As soon as the worker's channel is empty.
    WhenChannelEmpty,
    /// At the ticks of a clock that each worker starts for itself. The original ticks every 5 s.
    Ticker(Duration),
}

/// The classic design with its settings.
#[derive(Clone, Copy, Debug)]
pub struct Classic {
    /// When a partial batch is flushed.
    pub flush: Flush,
    /// `Chan`: places in each worker's channel, at least 1.
    pub chan: usize,
}

impl Default for Classic {
    fn default() -> Self {
        Self { flush: Flush::WhenChannelEmpty, chan: 1_024 }
    }
}

impl Contender for Classic {
    fn name(&self) -> &'static str {
        "classic"
    }

    fn run(&self, input: &Input, workers: usize, batch: usize) -> Outcome {
        self.run_with(input, workers, batch, no_op, |_, _| ())
    }
}

/// What the consume loop sends to a worker: a record and its node. Flat, so that it has no padding.
#[derive(Clone, Copy)]
struct Job {
    offset: i64,
    key_hash: u64,
    partition: u32,
    node: u32,
}

/// The nodes of one finished batch. The vector goes back to its worker.
struct Marks {
    nodes: Vec<u32>,
    worker: usize,
}

impl Classic {
    /// Runs with a handler (`Do`) and a function that is told of each commit: partition and next offset to read.
    ///
    /// The handler is called by several workers at once, never twice at once for one key. Commits come from one thread.
    ///
    /// # Panics
    /// If `workers`, `batch` or `self.chan` is 0, and if `handler` or `on_commit` panics.
    pub fn run_with(
        &self,
        input: &Input,
        workers: usize,
        batch: usize,
        handler: impl Fn(&[Record]) + Sync,
        on_commit: impl FnMut(u32, i64) + Send,
    ) -> Outcome {
        assert!(
            workers > 0 && batch > 0 && self.chan > 0,
            "workers, batch and channel need a size"
        );
        let list = Mutex::new(List::default());
        let (done_sender, done) = bounded(self.chan);
        let spare: Vec<_> = (0..workers).map(|_| ArrayQueue::new(self.chan)).collect();
        let committed: Vec<AtomicI64> =
            (0..input.partitions()).map(|_| AtomicI64::new(0)).collect();
        // Everything but the consume loop, which runs on this thread.
        let ready = Barrier::new(workers + 2);

        let mut senders = Vec::new();
        let (records, seconds) = thread::scope(|scope| {
            let (list, spare, committed) = (&list, &spare, &committed);
            let (handler, ready) = (&handler, &ready);
            let mut merging = Vec::new();
            for (worker, spare) in spare.iter().enumerate() {
                let (sender, jobs) = bounded(self.chan);
                senders.push(sender);
                let done = done_sender.clone();
                merging.push(scope.spawn(move || {
                    let gather = Gather::new(jobs, batch, self.flush);
                    ready.wait();
                    merge_loop(gather, handler, &done, spare, worker)
                }));
            }
            drop(done_sender);
            let committing = scope.spawn(move || {
                ready.wait();
                commit_loop(list, &done, spare, committed, on_commit);
            });

            ready.wait();
            let start = Instant::now();
            consume_loop(input.iter(), list, &senders);
            // Closes the channels: the workers flush and end, and the commit loop after them.
            senders.clear();
            let records = merging
                .into_iter()
                .map(|worker| worker.join().expect("a merge worker panicked"))
                .sum();
            committing.join().expect("the commit loop panicked");
            (records, start.elapsed().as_secs_f64())
        });
        Outcome {
            seconds,
            records,
            watermarks: committed.into_iter().map(AtomicI64::into_inner).collect(),
        }
    }
}

fn consume_loop(
    records: impl Iterator<Item = Record>,
    list: &Mutex<List>,
    workers: &[Sender<Job>],
) {
    for record in records {
        let node = list.lock().append(record.partition, record.offset);
        let job = Job {
            offset: record.offset,
            key_hash: record.key_hash,
            partition: record.partition,
            node,
        };
        if workers[record.worker(workers.len())].send(job).is_err() {
            // The worker panicked, which its join reports.
            return;
        }
    }
}

/// Returns how many records it has handled.
fn merge_loop(
    mut gather: Gather,
    handler: &impl Fn(&[Record]),
    done: &Sender<Marks>,
    spare: &ArrayQueue<Vec<u32>>,
    worker: usize,
) -> u64 {
    let mut records = Vec::with_capacity(gather.size);
    let mut handled = 0;
    loop {
        let mut nodes = spare.pop().unwrap_or_else(|| Vec::with_capacity(gather.size));
        if !gather.fill(&mut records, &mut nodes) {
            return handled;
        }
        handler(&records);
        handled += records.len() as u64;
        records.clear();
        if done.send(Marks { nodes, worker }).is_err() {
            // The commit loop panicked, which its join reports.
            return handled;
        }
    }
}

/// Gathers one batch after the other from a worker's channel.
struct Gather {
    jobs: Receiver<Job>,
    size: usize,
    flush: Flush,
    next_tick: Instant,
}

impl Gather {
    fn new(jobs: Receiver<Job>, size: usize, flush: Flush) -> Self {
        let mut gather = Self { jobs, size, flush, next_tick: Instant::now() };
        gather.wind_up();
        gather
    }

    fn wind_up(&mut self) {
        if let Flush::Ticker(period) = self.flush {
            self.next_tick = Instant::now() + period;
        }
    }

    /// Waits for the next batch; `false` if there is none any more.
    fn fill(&mut self, records: &mut Vec<Record>, nodes: &mut Vec<u32>) -> bool {
        while nodes.len() < self.size {
            let job = match self.jobs.try_recv() {
                Ok(job) => job,
                Err(TryRecvError::Disconnected) => break,
                Err(TryRecvError::Empty) => match self.flush {
                    Flush::WhenChannelEmpty if !nodes.is_empty() => break,
                    Flush::WhenChannelEmpty => match self.jobs.recv() {
                        Ok(job) => job,
                        Err(_) => break,
                    },
                    Flush::Ticker(_) => match self.jobs.recv_deadline(self.next_tick) {
                        Ok(job) => job,
                        Err(RecvTimeoutError::Disconnected) => break,
                        Err(RecvTimeoutError::Timeout) => {
                            self.wind_up();
                            if nodes.is_empty() {
                                continue;
                            }
                            break;
                        }
                    },
                },
            };
            records.push(Record {
                offset: job.offset,
                key_hash: job.key_hash,
                partition: job.partition,
            });
            nodes.push(job.node);
        }
        !nodes.is_empty()
    }
}

/// How many nodes are popped before the consume loop may append again.
const POPS_PER_LOCK: usize = 256;

fn commit_loop(
    list: &Mutex<List>,
    done: &Receiver<Marks>,
    spare: &[ArrayQueue<Vec<u32>>],
    committed: &[AtomicI64],
    mut on_commit: impl FnMut(u32, i64),
) {
    let mut finished = Finished::default();
    let mut last: Vec<Option<i64>> = vec![None; committed.len()];
    while let Ok(first) = done.recv() {
        for Marks { mut nodes, worker } in
            std::iter::once(first).chain(done.try_iter().take(done.capacity().unwrap_or(0)))
        {
            nodes.drain(..).for_each(|node| finished.mark(node));
            // A queue that is full has vectors enough.
            let _ = spare[worker].push(nodes);
        }
        while list.lock().pop_finished(POPS_PER_LOCK, &mut finished, &mut last) {}
        for (partition, last) in last.iter_mut().enumerate() {
            if let Some(offset) = last.take() {
                committed[partition].store(offset + 1, Ordering::Release);
                // There are no more than u32::MAX partitions, as records name them by a u32.
                on_commit(partition as u32, offset + 1);
            }
        }
    }
}

/// Done flags by node. Nobody but the commit loop looks at them.
#[derive(Default)]
struct Finished(Vec<bool>);

impl Finished {
    fn mark(&mut self, node: u32) {
        let node = node as usize;
        if node >= self.0.len() {
            self.0.resize((node + 1).next_power_of_two(), false);
        }
        self.0[node] = true;
    }

    /// Whether the node was marked; takes the mark away.
    fn take(&mut self, node: u32) -> bool {
        self.0.get_mut(node as usize).is_some_and(std::mem::take)
    }
}

const NIL: u32 = u32::MAX;

struct Node {
    offset: i64,
    partition: u32,
    next: u32,
}

/// The global list, and the pool of its nodes.
struct List {
    nodes: Vec<Node>,
    head: u32,
    tail: u32,
    free: u32,
}

impl Default for List {
    fn default() -> Self {
        Self { nodes: Vec::new(), head: NIL, tail: NIL, free: NIL }
    }
}

impl List {
    /// Appends a record and returns its node.
    fn append(&mut self, partition: u32, offset: i64) -> u32 {
        let node = Node { offset, partition, next: NIL };
        let index = self.free;
        let index = if index == NIL {
            self.nodes.push(node);
            u32::try_from(self.nodes.len() - 1).expect("fewer than u32::MAX records are in flight")
        } else {
            let slot = &mut self.nodes[index as usize];
            self.free = slot.next;
            *slot = node;
            index
        };
        if self.tail == NIL {
            self.head = index;
        } else {
            self.nodes[self.tail as usize].next = index;
        }
        self.tail = index;
        index
    }

    /// Pops finished nodes from the head, up to `limit`, and notes the last offset of each partition.
    ///
    /// Returns whether there may be more.
    fn pop_finished(
        &mut self,
        limit: usize,
        finished: &mut Finished,
        last: &mut [Option<i64>],
    ) -> bool {
        for _ in 0..limit {
            let index = self.head;
            if index == NIL || !finished.take(index) {
                return false;
            }
            let node = &mut self.nodes[index as usize];
            last[node.partition as usize] = Some(node.offset);
            self.head = node.next;
            node.next = self.free;
            self.free = index;
            if self.head == NIL {
                self.tail = NIL;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::HashMap,
        sync::{
            Condvar,
            atomic::{AtomicBool, AtomicUsize},
        },
    };

    use super::*;
    use crate::{contender::run_checked, input::Flights};

    fn input(records: usize) -> Input {
        Flights::january().unwrap().input(records, 4)
    }

    /// A delay that depends on the record alone: mostly none, sometimes up to 300 us.
    fn delay(record: &Record) {
        let mix = (record.key_hash ^ record.offset.unsigned_abs())
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            >> 32;
        if mix.is_multiple_of(16) {
            thread::sleep(Duration::from_micros(mix / 16 % 300));
        }
    }

    #[test]
    fn commits_are_contiguous_and_keys_stay_in_order() {
        let input = input(4_000);
        let mut expected: HashMap<u64, Vec<i64>> = HashMap::new();
        for record in input.iter() {
            expected.entry(record.key_hash).or_default().push(record.offset);
        }
        let settings = [
            (1, 1, 1, Flush::WhenChannelEmpty),
            (2, 64, 1_024, Flush::WhenChannelEmpty),
            (3, 7, 16, Flush::WhenChannelEmpty),
            (8, 1, 1_024, Flush::WhenChannelEmpty),
            (8, 64, 4, Flush::Ticker(Duration::from_millis(2))),
        ];
        for (workers, batch, chan, flush) in settings {
            let done: Vec<Vec<AtomicBool>> = input
                .ends()
                .iter()
                .map(|&end| (0..end).map(|_| AtomicBool::new(false)).collect())
                .collect();
            let seen: Mutex<HashMap<u64, Vec<i64>>> = Mutex::default();
            let handler = |records: &[Record]| {
                assert!((1..=batch).contains(&records.len()));
                for record in records {
                    seen.lock().entry(record.key_hash).or_default().push(record.offset);
                    delay(record);
                }
                for record in records {
                    let flag =
                        &done[record.partition as usize][usize::try_from(record.offset).unwrap()];
                    assert!(!flag.swap(true, Ordering::AcqRel), "handled twice");
                }
            };
            let mut next = vec![0; 4];
            let on_commit = |partition: u32, offset: i64| {
                let next = &mut next[partition as usize];
                assert!(offset > *next, "a commit went back or stood still");
                for offset in *next..offset {
                    let flag = &done[partition as usize][usize::try_from(offset).unwrap()];
                    assert!(flag.load(Ordering::Acquire), "unfinished record committed");
                }
                *next = offset;
            };
            let outcome =
                Classic { flush, chan }.run_with(&input, workers, batch, handler, on_commit);
            assert_eq!(outcome.records, 4_000);
            assert_eq!(outcome.watermarks, input.ends());
            assert_eq!(next, input.ends(), "not every commit was reported");
            assert_eq!(seen.into_inner(), expected, "order within a key");
        }
    }

    #[test]
    fn no_op_runs_reach_the_ends() {
        let input = input(60_000);
        for (workers, batch) in [(1, 1), (2, 64), (8, 1), (8, 64)] {
            run_checked(&Classic::default(), &input, workers, batch).unwrap();
        }
        run_checked(&Classic::default(), &self::input(0), 2, 64).unwrap();
    }

    #[test]
    fn one_slow_record_holds_the_commits_of_all_partitions() {
        let input = input(500);
        let handled = AtomicUsize::new(0);
        let (released, wake) = (std::sync::Mutex::new(false), Condvar::new());
        let commits_while_held = AtomicUsize::new(0);
        let first = input.iter().next().unwrap();
        let others = input.iter().filter(|record| record.worker(4) != first.worker(4)).count();
        assert!(others > 100);
        Classic::default().run_with(
            &input,
            4,
            1,
            |records| {
                if records[0] == first {
                    let mut released = released.lock().unwrap();
                    // Bounded, so that a wrong choice of workers fails instead of hanging.
                    let deadline = Instant::now() + Duration::from_secs(20);
                    while !*released && Instant::now() < deadline {
                        released = wake.wait_timeout(released, Duration::from_secs(1)).unwrap().0;
                    }
                    assert!(*released, "the other workers did not finish their records");
                } else if records[0].worker(4) != first.worker(4)
                    && handled.fetch_add(1, Ordering::AcqRel) + 1 == others
                {
                    // All that can be done is done. Leave the commit loop time for a wrong commit.
                    thread::sleep(Duration::from_millis(50));
                    *released.lock().unwrap() = true;
                    wake.notify_all();
                }
            },
            |_, _| {
                if !*released.lock().unwrap() {
                    commits_while_held.fetch_add(1, Ordering::AcqRel);
                }
            },
        );
        assert_eq!(handled.into_inner(), others);
        assert_eq!(commits_while_held.into_inner(), 0);
    }

    #[test]
    #[should_panic(expected = "a merge worker panicked")]
    fn a_panic_of_the_handler_ends_the_run() {
        Classic::default().run_with(&input(50_000), 2, 64, |_| panic!("handler"), |_, _| ());
    }

    fn job(node: u32) -> Job {
        Job { offset: 0, key_hash: 0, partition: 0, node }
    }

    #[test]
    fn partial_batches_go_when_the_channel_is_empty_or_at_the_tick() {
        let period = Duration::from_millis(40);
        for flush in [Flush::WhenChannelEmpty, Flush::Ticker(period)] {
            let (sender, jobs) = bounded(16);
            let start = Instant::now();
            let mut gather = Gather::new(jobs, 4, flush);
            let (release, released) = bounded::<()>(1);
            // Keeps the channel open, but not for ever, so that a missing flush fails instead of hanging.
            let feeding = thread::spawn(move || {
                (0..6).for_each(|node| sender.send(job(node)).unwrap());
                let in_time = released.recv_timeout(Duration::from_secs(20)).is_ok();
                sender.send(job(6)).unwrap();
                in_time
            });
            while gather.jobs.len() < 6 {
                thread::yield_now();
            }
            let mut next = || {
                let (mut records, mut nodes) = (Vec::new(), Vec::new());
                gather.fill(&mut records, &mut nodes).then_some(nodes)
            };
            assert_eq!(next(), Some(vec![0, 1, 2, 3]), "a full batch");
            // The channel stays open, so only the flush rule can end this batch.
            assert_eq!(next(), Some(vec![4, 5]), "a partial batch");
            if flush == Flush::Ticker(period) {
                assert!(start.elapsed() >= period, "flushed before the tick");
            }
            release.send(()).unwrap();
            assert!(feeding.join().unwrap(), "not flushed");
            assert_eq!(next(), Some(vec![6]), "the rest at the end");
            assert_eq!(next(), None);
        }
    }

    #[test]
    fn list_pops_in_order_and_reuses_its_nodes() {
        let mut list = List::default();
        let mut finished = Finished::default();
        let mut last = vec![None; 2];
        for lap in 0..100 {
            let nodes: Vec<u32> =
                (0..10).map(|i| list.append(i % 2, i64::from(lap * 10 + i))).collect();
            nodes[1..].iter().for_each(|&node| finished.mark(node));
            assert!(!list.pop_finished(100, &mut finished, &mut last));
            assert_eq!(last, [None, None], "the head is not done");
            finished.mark(nodes[0]);
            assert!(list.pop_finished(4, &mut finished, &mut last), "more to pop");
            assert_eq!(last, [2, 3].map(|i| Some(i64::from(lap * 10 + i))));
            assert!(!list.pop_finished(100, &mut finished, &mut last));
            assert_eq!(last, [8, 9].map(|i| Some(i64::from(lap * 10 + i))));
            last.fill(None);
        }
        assert_eq!(list.nodes.len(), 10, "the pool grew");
        assert_eq!((list.head, list.tail), (NIL, NIL));
    }
}
