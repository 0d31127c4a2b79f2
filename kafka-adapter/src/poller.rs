//! The poller: the one thread that owns the client, admits records, serves the lanes, and commits.
//!
//! Nothing here blocks while a record could move: a rebalance, a commit and the drain at the end
//! are states that the loop passes through while it goes on serving the partitions that stay.

use crate::assignment::{Open, Partition};
use crate::client::{Client, CommitResult, Event as Said, Intake, TopicPartition};
use crate::error::Error;
use crate::event::{Committed, Event, PartitionReport, Report};
use crate::fault::Planted;
use plimsoll_engine::{Executor, Failure, Progress, Refused, Rejected, Skipped};
use std::time::Duration;

/// Most records of one batch call.
const FETCH: u32 = 512;
/// The client's own queue is served at least this often, signal or not.
const SERVE: Duration = Duration::from_millis(10);
/// All partitions are looked at this often, against a lost signal.
const SWEEP: Duration = Duration::from_millis(100);
/// The shortest and the longest nap while records are in the lanes.
const NAP: Duration = Duration::from_micros(100);
const LONG_NAP: Duration = Duration::from_millis(5);
/// Looks for work before the first nap.
const SPINS: u32 = 20;
const YIELDS: u32 = 20;

/// How long things may take.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    pub(crate) window: u32,
    pub(crate) commit_interval: Duration,
    /// For admitted records to end, at a revoke and at the end.
    pub(crate) drain: Duration,
    /// For the last commit, at a revoke and at the end.
    pub(crate) commit: Duration,
}

/// How often the consumer was asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    GoOn,
    Drain,
    Now,
}

/// What the poller reports to and asks.
pub(crate) struct Hooks {
    pub(crate) on_event: Box<dyn Fn(&Event) + Send + Sync>,
    pub(crate) asked: Box<dyn Fn() -> Asked + Send>,
}

impl std::fmt::Debug for Hooks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hooks").finish_non_exhaustive()
    }
}

/// Partitions on their way out.
#[derive(Debug)]
struct Revoke {
    partitions: Vec<TopicPartition>,
    /// Records may end until then.
    drain_until: Duration,
    /// The last commit was sent; its answer is awaited until then.
    commit_until: Option<Duration>,
}

/// How far the end is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    /// Admitted records may end until then.
    Draining {
        until: Duration,
    },
    /// The last commit's answer is awaited until then.
    Committing {
        until: Duration,
    },
    Ended,
}

#[derive(Debug)]
pub(crate) struct Poller<C: Client> {
    client: C,
    executor: Executor<C::Record>,
    limits: Limits,
    hooks: Hooks,
    planted: Planted,
    partitions: Vec<Partition>,
    /// Where the next intake begins, so that all partitions get their turn.
    turn: usize,
    revoke: Option<Revoke>,
    /// What the commit in flight carries.
    in_flight: Vec<(TopicPartition, i64)>,
    next_commit: Duration,
    next_serve: Duration,
    next_sweep: Duration,
    phase: Phase,
    error: Option<Error>,
    report: Report,
    said: Vec<Said>,
    records: Vec<C::Record>,
    /// The executor wanted nothing at the last look.
    sated: bool,
    idle_turns: u32,
    nap: Duration,
}

impl<C: Client> Poller<C> {
    pub(crate) fn new(
        client: C,
        executor: Executor<C::Record>,
        limits: Limits,
        hooks: Hooks,
        planted: Planted,
    ) -> Self {
        let now = client.now();
        Poller {
            client,
            executor,
            hooks,
            planted,
            partitions: Vec::new(),
            turn: 0,
            revoke: None,
            in_flight: Vec::new(),
            next_commit: now + limits.commit_interval,
            next_serve: now,
            next_sweep: now + SWEEP,
            phase: Phase::Running,
            error: None,
            report: Report::default(),
            said: Vec::new(),
            records: Vec::new(),
            sated: false,
            idle_turns: 0,
            nap: NAP,
            limits,
        }
    }

    /// Runs until stopped or failed, drains, commits, leaves the group.
    pub(crate) fn run(mut self) -> Result<Report, Error> {
        while self.phase != Phase::Ended {
            let moved = self.turn();
            self.rest(moved);
        }
        self.finish()
    }

    /// One round over everything there is to do; whether anything moved.
    fn turn(&mut self) -> bool {
        let now = self.client.now();
        let mut moved = false;
        if self.client.has_events() || now >= self.next_serve {
            self.next_serve = now + SERVE;
            moved |= self.serve_client(now);
        }
        if now >= self.next_sweep {
            self.next_sweep = now + SWEEP;
            self.client.assume_ready();
        }
        moved |= self.executor.finished_something();
        self.executor.pass(now);
        while let Some(failure) = self.executor.take_failure() {
            self.note_failure(&failure);
        }
        while let Some(skipped) = self.executor.take_skipped() {
            self.note_skipped(&skipped);
        }
        if self.phase == Phase::Running {
            moved |= self.take_in();
        }
        if moved {
            // The next turn follows at once.
            self.executor.flush_more();
        } else {
            self.executor.flush();
        }
        self.step_revoke(now);
        if now >= self.next_commit {
            self.next_commit = now + self.limits.commit_interval;
            self.commit();
        }
        self.step_end(now);
        moved
    }

    /// Waits for something to do.
    fn rest(&mut self, moved: bool) {
        if moved {
            self.idle_turns = 0;
            self.nap = NAP;
            return;
        }
        self.idle_turns += 1;
        let busy = self.executor.busy();
        if busy && self.idle_turns <= SPINS {
            return std::hint::spin_loop();
        }
        if busy && self.idle_turns <= SPINS + YIELDS {
            return std::thread::yield_now();
        }
        let now = self.client.now();
        let due = self.executor.next_due().unwrap_or(Duration::MAX);
        let timers = self.next_sweep.min(self.next_commit).min(due).saturating_sub(now);
        let limit = if busy {
            // While the lanes are full there is nothing to add; a worker that runs dry wakes us.
            let nap = self.nap.max(self.executor.backlog() / 4).min(LONG_NAP);
            self.nap = (self.nap * 2).min(LONG_NAP);
            nap.min(timers)
        } else {
            timers
        };
        let (executor, client) = (&self.executor, &self.client);
        let open = self.phase == Phase::Running && !self.sated;
        let sources: &[Partition] = if open { &self.partitions } else { &[] };
        client.wait(limit, &mut || {
            executor.finished_something()
                || client.has_events()
                // A partition whose window is full stays ready without being of use.
                || sources.iter().any(|p| !p.leaving && !p.full && client.is_ready(p.source))
        });
    }

    fn tell(&self, event: &Event) {
        (self.hooks.on_event)(event);
    }

    fn warn(&self, message: String) {
        tracing::warn!("{message}");
        self.tell(&Event::Warning { message });
    }

    fn fail(&mut self, error: Error) {
        tracing::error!("{error}");
        // The first error is the one that counts; the others follow from it.
        self.error.get_or_insert(error);
    }

    fn note_failure(&mut self, failure: &Failure) {
        let of = |p: &&Partition| p.epoch.is_some_and(|epoch| epoch.id == failure.epoch);
        if let Some(partition) = self.partitions.iter().find(of) {
            let error = Error::Handler {
                topic: partition.name.topic.to_string(),
                partition: partition.name.partition,
                offset: failure.offset,
                reason: failure.reason.clone(),
            };
            self.fail(error);
        }
    }

    fn note_skipped(&self, skipped: &Skipped) {
        let of = |p: &&Partition| p.epoch.is_some_and(|epoch| epoch.id == skipped.epoch);
        if let Some(partition) = self.partitions.iter().find(of) {
            let Skipped { offset, reason, .. } = skipped;
            self.warn(format!("{} offset {offset} is skipped: {reason}", partition.name));
        }
    }

    // --- intake ---

    fn take_in(&mut self) -> bool {
        let mut moved = false;
        let count = self.partitions.len();
        self.sated = false;
        for step in 0..count {
            let demand = self.executor.demand();
            if demand == 0 {
                self.sated = true;
                break;
            }
            let index = (self.turn + step) % count;
            let partition = &mut self.partitions[index];
            if partition.leaving || !self.client.is_ready(partition.source) {
                continue;
            }
            let room = match partition.epoch {
                Some(epoch) => self.executor.room(epoch.id),
                None => self.limits.window,
            };
            partition.full = room == 0;
            if partition.full {
                continue;
            }
            let most = demand.min(room).min(FETCH);
            let source = partition.source;
            if let Err(error) = self.client.fetch(source, most as usize, &mut self.records) {
                let name = &self.partitions[index].name;
                self.warn(format!("{name}: {error}"));
            }
            moved |= !self.records.is_empty();
            self.admit_all(index);
        }
        self.turn = if count == 0 { 0 } else { (self.turn + 1) % count };
        moved
    }

    fn admit_all(&mut self, index: usize) {
        let mut records = std::mem::take(&mut self.records);
        if let Err(error) = self.admit_each(index, &mut records) {
            self.fail(error);
        }
        records.clear();
        self.records = records;
    }

    fn admit_each(&mut self, index: usize, records: &mut Vec<C::Record>) -> Result<(), Error> {
        let Some(first) = records.first().map(Intake::offset) else { return Ok(()) };
        let planted = self.planted.swap(records);
        let router = self.partitions[index].router();
        let mut routed = records.drain(..).enumerate().map(|(at, record)| {
            let offset = planted.as_ref().map_or_else(|| record.offset(), |offsets| offsets[at]);
            (offset, router.route(record.key()), record)
        });
        loop {
            let partition = &mut self.partitions[index];
            let epoch = match partition.epoch {
                Some(epoch) => epoch,
                None => open(&mut self.executor, partition, first, self.limits.window)?,
            };
            match self.executor.offer_all(epoch.id, &mut routed) {
                Ok(_) => return Ok(()),
                Err(rejected) => self.admit_refused(index, rejected)?,
            }
        }
    }

    /// A record at or below the last one: the log was cut, or the client was reset. What is in
    /// flight belongs to a past that does not count any more; a new epoch begins.
    #[cold]
    fn admit_refused(&mut self, index: usize, rejected: Rejected<C::Record>) -> Result<(), Error> {
        let offset = rejected.payload.offset();
        let name = self.partitions[index].name.clone();
        match (rejected.refused, self.partitions[index].epoch) {
            (Refused::Duplicate { last, .. }, Some(old)) => {
                self.warn(format!("{name} went back from offset {last} to {offset}: a new epoch"));
                self.forget(index, old);
            }
            (Refused::Below { start, .. }, Some(old)) => {
                self.warn(format!("{name} went back from offset {start} to {offset}: a new epoch"));
                self.forget(index, old);
            }
            (Refused::Closed, _) => {
                // Halted by a failed record: what follows stays unread.
                return Ok(());
            }
            (refused, _) => {
                let reason = format!("{name} offset {offset} was not admitted: {refused}");
                return Err(Error::Client { reason });
            }
        }
        let partition = &mut self.partitions[index];
        let route = partition.router().route(rejected.payload.key());
        let epoch = open(&mut self.executor, partition, offset, self.limits.window)?;
        self.executor.offer(epoch.id, offset, route, rejected.payload).map_err(|rejected| {
            let reason = format!("{name} offset {offset} was not admitted: {}", rejected.refused);
            Error::Client { reason }
        })
    }

    /// Fences an epoch of a partition that stays.
    fn forget(&mut self, index: usize, old: Open) {
        if let Some(progress) = self.executor.close(old.id) {
            self.partitions[index].finished += progress.passed;
        }
        self.partitions[index].epoch = None;
    }

    // --- the client's events ---

    fn serve_client(&mut self, now: Duration) -> bool {
        let mut said = std::mem::take(&mut self.said);
        self.client.events(&mut said);
        let moved = !said.is_empty();
        for event in said.drain(..) {
            match event {
                Said::Assign(partitions) => self.assign(&partitions),
                Said::Revoke { partitions, lost: true } => self.lose(&partitions),
                Said::Revoke { partitions, lost: false } => self.begin_revoke(partitions, now),
                Said::CommitDone(results) => self.commit_done(&results),
                Said::Warning(message) => self.warn(message),
                Said::Fatal(error) => self.fail(error),
            }
        }
        self.said = said;
        moved
    }

    fn assign(&mut self, partitions: &[TopicPartition]) {
        for name in partitions {
            if self.index_of(name).is_some() {
                self.warn(format!("{name} was assigned twice"));
                continue;
            }
            match self.client.attach(name) {
                Ok(source) => self.partitions.push(Partition::new(name.clone(), source)),
                Err(error) => self.fail(error),
            }
        }
        if let Err(error) = self.client.confirm_assign(partitions) {
            self.fail(error);
        }
        self.tell(&Event::Assigned { partitions: names(partitions) });
    }

    fn index_of(&self, name: &TopicPartition) -> Option<usize> {
        self.partitions.iter().position(|partition| partition.name == *name)
    }

    fn lose(&mut self, partitions: &[TopicPartition]) {
        self.give_up(partitions);
        self.tell(&Event::Lost { partitions: names(partitions) });
    }

    fn begin_revoke(&mut self, mut partitions: Vec<TopicPartition>, now: Duration) {
        for name in &partitions {
            if let Some(index) = self.index_of(name) {
                let partition = &mut self.partitions[index];
                partition.leaving = true;
                if let Some(epoch) = partition.epoch {
                    self.executor.stop_intake(epoch.id);
                }
            }
        }
        if let Some(unfinished) = self.revoke.take() {
            partitions.extend(unfinished.partitions);
        }
        let drain_until = now + self.limits.drain;
        self.revoke = Some(Revoke { partitions, drain_until, commit_until: None });
        self.step_revoke(now);
    }

    /// Moves a revoke on: drain, then commit, then give up. The other partitions go on meanwhile.
    fn step_revoke(&mut self, now: Duration) {
        let Some(revoke) = &self.revoke else { return };
        let leaving: Vec<usize> =
            revoke.partitions.iter().filter_map(|name| self.index_of(name)).collect();
        if now < revoke.drain_until && !self.are_drained(&leaving) {
            return;
        }
        match revoke.commit_until {
            None => {
                if !self.in_flight.is_empty() && now < revoke.drain_until + self.limits.commit {
                    return;
                }
                let commit_until = now + self.limits.commit;
                self.commit();
                if let Some(revoke) = &mut self.revoke {
                    revoke.commit_until = Some(commit_until);
                }
                self.step_revoke(now);
            }
            Some(until) => {
                if !self.in_flight.is_empty() && now < until {
                    return;
                }
                if let Some(revoke) = self.revoke.take() {
                    self.give_up(&revoke.partitions);
                    self.tell(&Event::Revoked { partitions: names(&revoke.partitions) });
                }
            }
        }
    }

    fn are_drained(&self, indices: &[usize]) -> bool {
        !self.executor.busy()
            || indices.iter().all(|index| {
                let progress =
                    self.partitions[*index].epoch.and_then(|e| self.executor.progress(e.id));
                progress.is_none_or(|progress| progress.unfinished == 0)
            })
    }

    /// Fences partitions, lets go of them, and tells the client so.
    fn give_up(&mut self, partitions: &[TopicPartition]) {
        for name in partitions {
            let Some(index) = self.index_of(name) else { continue };
            if let Some(epoch) = self.partitions[index].epoch {
                self.forget(index, epoch);
            }
            let partition = self.partitions.swap_remove(index);
            self.report.handled += partition.finished;
            self.client.detach(partition.source);
        }
        if let Err(error) = self.client.confirm_revoke(partitions) {
            self.fail(error);
        }
    }

    // --- commits ---

    /// Sends the watermarks that moved, unless a commit is in flight.
    fn commit(&mut self) {
        if !self.in_flight.is_empty() {
            return;
        }
        let mut offsets = Vec::new();
        for partition in &mut self.partitions {
            let Some(epoch) = &mut partition.epoch else { continue };
            let Some(progress) = self.executor.progress(epoch.id) else { continue };
            let watermark = self.planted.watermark_of(&progress);
            if watermark > epoch.sent {
                epoch.sent = watermark;
                offsets.push((partition.name.clone(), watermark));
            }
        }
        if offsets.is_empty() {
            return;
        }
        match self.client.commit(&offsets) {
            Ok(()) => self.in_flight = offsets,
            Err(error) => {
                self.take_back(&offsets);
                self.tell(&Event::CommitFailed {
                    offsets: offsets.iter().map(|(name, offset)| told(name, *offset)).collect(),
                    reason: error.to_string(),
                });
            }
        }
    }

    /// Whether anything is finished that was not sent.
    fn is_behind(&self) -> bool {
        self.partitions
            .iter()
            .filter_map(|partition| partition.epoch)
            .any(|epoch| self.executor.progress(epoch.id).is_some_and(|p| p.watermark > epoch.sent))
    }

    /// What was not acknowledged is sent again at the next interval.
    fn take_back(&mut self, offsets: &[(TopicPartition, i64)]) {
        for (name, offset) in offsets {
            let Some(index) = self.index_of(name) else { continue };
            if let Some(epoch) = &mut self.partitions[index].epoch
                && epoch.sent == *offset
            {
                epoch.sent = offset - 1;
            }
        }
    }

    fn commit_done(&mut self, results: &[CommitResult]) {
        let sent = std::mem::take(&mut self.in_flight);
        let mut taken = Vec::new();
        let mut refused: Vec<(TopicPartition, i64)> = Vec::new();
        let mut reason = String::new();
        for result in results {
            match &result.outcome {
                Ok(()) => taken.push(told(&result.partition, result.offset)),
                Err(refusal) => {
                    if refusal.fatal {
                        self.fail(Error::Commit {
                            topic: result.partition.topic.to_string(),
                            partition: result.partition.partition,
                            offset: result.offset,
                            reason: refusal.reason.clone(),
                        });
                    }
                    refused.push((result.partition.clone(), result.offset));
                    reason.clone_from(&refusal.reason);
                }
            }
        }
        // A partition without an answer was not committed.
        for (name, offset) in sent {
            if !results.iter().any(|result| result.partition == name) {
                refused.push((name, offset));
                reason = "no answer for this partition".to_owned();
            }
        }
        if !taken.is_empty() {
            self.report.commits += 1;
            for committed in &taken {
                let of = |p: &&mut Partition| {
                    *p.name.topic == *committed.topic && p.name.partition == committed.partition
                };
                if let Some(partition) = self.partitions.iter_mut().find(of) {
                    partition.committed = Some(committed.offset);
                }
            }
            self.tell(&Event::Committed { offsets: taken });
        }
        if !refused.is_empty() {
            self.take_back(&refused);
            let offsets = refused.iter().map(|(name, offset)| told(name, *offset)).collect();
            tracing::info!("commit refused: {reason}");
            self.tell(&Event::CommitFailed { offsets, reason });
        }
    }

    // --- the end ---

    fn step_end(&mut self, now: Duration) {
        let asked = (self.hooks.asked)();
        match self.phase {
            Phase::Running if self.error.is_some() || asked != Asked::GoOn => {
                self.phase = Phase::Draining { until: now + self.limits.drain };
            }
            Phase::Running | Phase::Ended => {}
            Phase::Draining { until } => {
                let all: Vec<usize> = (0..self.partitions.len()).collect();
                let drained = self.are_drained(&all);
                let settled = drained && self.in_flight.is_empty();
                if settled || now >= until || asked == Asked::Now {
                    self.commit();
                    let patience = if asked == Asked::Now {
                        self.limits.commit.min(Duration::from_secs(1))
                    } else {
                        self.limits.commit
                    };
                    self.phase = Phase::Committing { until: now + patience };
                }
            }
            Phase::Committing { until } => {
                // What was refused because of a rebalance is sent again at the next interval.
                let refused = matches!(self.error, Some(Error::Commit { .. }));
                let settled = self.in_flight.is_empty() && (refused || !self.is_behind());
                if settled || now >= until {
                    self.phase = Phase::Ended;
                }
            }
        }
    }

    fn finish(mut self) -> Result<Report, Error> {
        if let Some(revoke) = self.revoke.take() {
            self.give_up(&revoke.partitions);
        }
        for partition in std::mem::take(&mut self.partitions) {
            let last: Option<Progress> =
                partition.epoch.and_then(|epoch| self.executor.close(epoch.id));
            let admitted_finished = partition.finished + last.map_or(0, |progress| progress.passed);
            self.report.handled += admitted_finished;
            self.report.partitions.push(PartitionReport {
                topic: partition.name.topic.to_string(),
                partition: partition.name.partition,
                committed: partition.committed,
                finished: admitted_finished,
                unfinished: last.map_or(0, |progress| progress.unfinished),
            });
            self.client.detach(partition.source);
        }
        self.report
            .partitions
            .sort_by(|a, b| (&a.topic, a.partition).cmp(&(&b.topic, b.partition)));
        // What is queued is fenced; a worker ends as soon as the handler it is in returns.
        self.executor.stop();
        let patience = self.client.now() + Duration::from_millis(500);
        while self.executor.running_workers() > 0 && self.client.now() < patience {
            std::thread::sleep(Duration::from_millis(1));
        }
        let stuck = self.executor.running_workers();
        self.executor.pass(self.client.now());
        drop(self.executor);
        if stuck > 0 {
            tracing::warn!("{stuck} workers are still inside a handler");
        }
        // Records that a stuck handler holds keep the client from ending: do not wait for it.
        let limit = if stuck > 0 { Duration::from_millis(500) } else { self.limits.commit };
        if !self.client.close(limit) {
            tracing::warn!("the client did not end within {limit:?}; left to itself");
        }
        match self.error {
            Some(error) => Err(error),
            None => Ok(self.report),
        }
    }
}

fn open<T: Intake>(
    executor: &mut Executor<T>,
    partition: &mut Partition,
    start: i64,
    window: u32,
) -> Result<Open, Error> {
    let epoch = Open { id: executor.open(start, window)?, sent: start };
    partition.epoch = Some(epoch);
    Ok(epoch)
}

fn names(partitions: &[TopicPartition]) -> Vec<(String, i32)> {
    partitions.iter().map(|name| (name.topic.to_string(), name.partition)).collect()
}

fn told(name: &TopicPartition, offset: i64) -> Committed {
    Committed { topic: name.topic.to_string(), partition: name.partition, offset }
}
