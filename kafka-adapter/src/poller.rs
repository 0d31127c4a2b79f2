//! The poller: the one thread that owns the client, admits records, serves the lanes, and commits.
//!
//! Nothing here blocks while a record could move: a rebalance, a commit and the drain at the end
//! are states that the loop passes through while it goes on serving the partitions that stay.

use crate::assignment::{Open, Partition};
use crate::client::{
    Client, Commit, CommitResult, Event as Said, Found, Intake, Refusal, RefusalKind,
    TopicPartition,
};
use crate::error::Error;
use crate::event::{Committed, Event, PartitionReport, Report};
use crate::fault::Planted;
use crate::resume::{self, Maps, Settings, Stored};
use plimsoll_engine::{self as engine, Executor, Failure, Progress, Refused, Rejected, Skipped};
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
/// Between two attempts to look up what was committed.
const LOOK_UP_AGAIN: Duration = Duration::from_millis(200);

/// How long things may take.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    pub(crate) window: u32,
    /// Of each epoch; its records are those of `window`.
    pub(crate) admission: engine::Limits,
    pub(crate) commit_interval: Duration,
    /// For admitted records to end, at a revoke and at the end.
    pub(crate) drain: Duration,
    /// For the last commit, at a revoke and at the end.
    pub(crate) commit: Duration,
    /// To look up what assigned partitions were committed with.
    pub(crate) look_up: Duration,
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
    /// The last commit's answer is awaited until then. It is sent when no other is in flight.
    Committing {
        until: Duration,
        sent: bool,
    },
    Ended,
}

/// Partitions that wait for what they were committed with.
#[derive(Debug)]
struct LookUp {
    number: usize,
    partitions: Vec<TopicPartition>,
    /// Then they go on without.
    until: Duration,
    /// It was refused, and is tried again then.
    again: Option<Duration>,
}

#[derive(Debug)]
pub(crate) struct Poller<C: Client> {
    client: C,
    executor: Executor<C::Record>,
    limits: Limits,
    hooks: Hooks,
    planted: Planted,
    partitions: Vec<Partition<C::Record>>,
    maps: Maps,
    look_ups: Vec<LookUp>,
    last_look_up: usize,
    /// Where the next intake begins, so that all partitions get their turn.
    turn: usize,
    revoke: Option<Revoke>,
    /// What the commit in flight carries.
    in_flight: Vec<Commit>,
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
        settings: Settings,
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
            maps: Maps::new(settings),
            look_ups: Vec::new(),
            last_look_up: 0,
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
        self.step_look_ups(now);
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
        let sources: &[Partition<C::Record>] = if open { &self.partitions } else { &[] };
        client.wait(limit, &mut || {
            executor.finished_something()
                || client.has_events()
                // A partition whose window is full stays ready without being of use.
                || sources.iter().any(|p| {
                    !p.leaving && !p.full && p.looking.is_none() && client.is_ready(p.source)
                })
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
        let of = |p: &&Partition<C::Record>| p.epoch.is_some_and(|epoch| epoch.id == failure.epoch);
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
        let of = |p: &&Partition<C::Record>| p.epoch.is_some_and(|epoch| epoch.id == skipped.epoch);
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
            if partition.leaving || partition.looking.is_some() {
                continue;
            }
            let holds = !partition.held.is_empty();
            if !holds && !self.client.is_ready(partition.source) {
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
            if holds {
                let held = std::mem::take(&mut partition.held);
                let count = held.len();
                self.records.extend(held);
                self.admit_all(index);
                moved |= self.partitions[index].held.len() < count;
                continue;
            }
            let mut most = demand.min(room).min(FETCH);
            if self.maps.slows_down() {
                most = most.min(self.metadata_room(index));
                if most == 0 {
                    continue;
                }
            }
            let source = self.partitions[index].source;
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
        let last = records.last().map_or(first, Intake::offset);
        // At most FETCH, or what was held of so many.
        let count = records.len() as u32;
        let done_before = self.partitions[index].resumed;
        let planted = self.planted.swap(records);
        let router = self.partitions[index].router();
        let mut routed = records.drain(..).enumerate().map(|(at, record)| {
            let offset = planted.as_ref().map_or_else(|| record.offset(), |offsets| offsets[at]);
            (offset, router.route(record.key()), record)
        });
        loop {
            let epoch = match self.partitions[index].epoch {
                Some(epoch) => epoch,
                None => self.open_first(index, first)?,
            };
            match self.executor.offer_all(epoch.id, &mut routed) {
                Ok(_) => break,
                Err(Rejected { refused: Refused::Done { .. }, .. }) => {
                    self.partitions[index].resumed += 1;
                }
                // No room, though there seemed to be: this one and what follows wait for it.
                Err(Rejected {
                    refused:
                        Refused::Full { .. }
                        | Refused::Bytes { .. }
                        | Refused::Span { .. }
                        | Refused::Budget { .. },
                    payload,
                }) => {
                    let rest = routed.map(|(_, _, record)| record);
                    let held: Vec<_> = std::iter::once(payload).chain(rest).collect();
                    let partition = &mut self.partitions[index];
                    partition.held = held;
                    partition.full = true;
                    // Too many rather than too few.
                    partition.brake.note(count, last);
                    return Ok(());
                }
                Err(rejected) => self.admit_refused(index, rejected)?,
            }
        }
        if self.maps.slows_down() {
            let partition = &mut self.partitions[index];
            // At most `count`.
            let done = (partition.resumed - done_before) as u32;
            partition.brake.note(count - done, last);
        }
        Ok(())
    }

    /// Records of a partition that may be fetched while its done-map has to stay whole.
    fn metadata_room(&mut self, index: usize) -> u32 {
        let partition = &mut self.partitions[index];
        let Some(epoch) = partition.epoch else {
            // With the first one the restored map is known to the brake.
            let restores = partition.stored.as_ref().is_some_and(|stored| !stored.map.is_empty());
            return if restores { 1 } else { u32::MAX };
        };
        let client = &self.client;
        let now = || client.now();
        let room = self.maps.allowance(&self.executor, epoch.id, &mut partition.brake, now);
        if room == 0 {
            partition.full = true;
            if !std::mem::replace(&mut partition.brake.told, true) {
                let name = partition.name.clone();
                self.warn(format!(
                    "{name}: intake slows down, because the metadata of a commit has no more room for \
                     what is finished above offset {}",
                    epoch.sent
                ));
            }
        }
        room
    }

    /// Opens the first epoch of a partition, at its committed offset if it was found, with what was
    /// finished above it.
    #[cold]
    fn open_first(&mut self, index: usize, first: i64) -> Result<Open, Error> {
        let partition = &mut self.partitions[index];
        let stored = partition.stored.take();
        // Delivered below what is committed: that was reset, and its marks belong to a past that does
        // not count any more. Above it: what lies between is not there any more.
        let (map, text) = match stored {
            Some(Stored { map, text }) if first >= map.committed() => (map, text),
            stored => {
                let epoch = open(&mut self.executor, partition, first, &self.limits.admission)?;
                if let Some(Stored { map, .. }) = stored.filter(|stored| !stored.map.is_empty()) {
                    let name = partition.name.clone();
                    self.warn(format!(
                        "{name} begins at offset {first}, below the committed {}: what was finished \
                         above that is handled again",
                        map.committed()
                    ));
                }
                return Ok(epoch);
            }
        };
        let start = map.committed();
        let id = self.executor.restore(start, &self.limits.admission, map.ranges())?;
        let epoch = Open { id, sent: start };
        partition.epoch = Some(epoch);
        partition.sent_metadata = text;
        partition.brake.end = map.end();
        if self.maps.slows_down() {
            partition.brake.restored = map.ranges().to_vec();
        }
        if !map.is_empty() {
            let event = Event::Resumed {
                topic: partition.name.topic.to_string(),
                partition: partition.name.partition,
                offset: start,
                finished: map.len(),
            };
            tracing::info!(
                "{}: {} offsets above {start} were finished in an earlier life",
                partition.name,
                map.len()
            );
            self.tell(&event);
        }
        Ok(epoch)
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
        let epoch = open(&mut self.executor, partition, offset, &self.limits.admission)?;
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
        let partition = &mut self.partitions[index];
        partition.epoch = None;
        partition.sent_metadata.clear();
        partition.brake = resume::Brake::default();
    }

    // --- the client's events ---

    fn serve_client(&mut self, now: Duration) -> bool {
        let mut said = std::mem::take(&mut self.said);
        self.client.events(&mut said);
        let moved = !said.is_empty();
        for event in said.drain(..) {
            match event {
                Said::Assign(partitions) => self.assign(&partitions, now),
                Said::Revoke { partitions, lost: true } => self.lose(&partitions),
                Said::Revoke { partitions, lost: false } => self.begin_revoke(partitions, now),
                Said::CommitDone(results) => self.commit_done(&results),
                Said::Found { look_up, outcome } => self.found(look_up, outcome, now),
                Said::Warning(message) => self.warn(message),
                Said::Fatal(error) => self.fail(error),
            }
        }
        self.said = said;
        moved
    }

    fn assign(&mut self, partitions: &[TopicPartition], now: Duration) {
        let mut fresh = Vec::new();
        for name in partitions {
            if self.index_of(name).is_some() {
                self.warn(format!("{name} was assigned twice"));
                continue;
            }
            match self.client.attach(name) {
                Ok(source) => {
                    fresh.push(name.clone());
                    self.partitions.push(Partition::new(name.clone(), source));
                }
                Err(error) => self.fail(error),
            }
        }
        if let Err(error) = self.client.confirm_assign(partitions) {
            self.fail(error);
        }
        // While librdkafka looks up the same to begin fetching.
        if self.maps.is_on() && !fresh.is_empty() {
            self.look_up(fresh, now + self.limits.look_up, now);
        }
        self.tell(&Event::Assigned { partitions: names(partitions) });
    }

    // --- what was committed before ---

    fn look_up(&mut self, partitions: Vec<TopicPartition>, until: Duration, now: Duration) {
        self.last_look_up += 1;
        let number = self.last_look_up;
        for name in &partitions {
            if let Some(index) = self.index_of(name) {
                self.partitions[index].looking = Some(number);
            }
        }
        let limit = until.saturating_sub(now);
        match self.client.look_up_committed(number, &partitions, limit) {
            Ok(()) => self.look_ups.push(LookUp { number, partitions, until, again: None }),
            Err(error) => self.go_on_without(number, &partitions, &error.to_string()),
        }
    }

    /// Tries again what was refused, and gives up what takes too long.
    fn step_look_ups(&mut self, now: Duration) {
        if self.look_ups.is_empty() {
            return;
        }
        for look_up in std::mem::take(&mut self.look_ups) {
            if now >= look_up.until {
                let reason = format!("no answer within {:?}", self.limits.look_up);
                self.go_on_without(look_up.number, &look_up.partitions, &reason);
            } else if look_up.again.is_some_and(|again| now >= again) {
                let mut partitions = look_up.partitions;
                partitions.retain(|name| {
                    let index = self.index_of(name);
                    index.is_some_and(|i| self.partitions[i].looking == Some(look_up.number))
                });
                if !partitions.is_empty() {
                    self.look_up(partitions, look_up.until, now);
                }
            } else {
                self.look_ups.push(look_up);
            }
        }
    }

    fn go_on_without(&mut self, number: usize, partitions: &[TopicPartition], reason: &str) {
        let mut waited = Vec::new();
        for name in partitions {
            let Some(index) = self.index_of(name) else { continue };
            if self.partitions[index].looking == Some(number) {
                self.partitions[index].looking = None;
                waited.push(name.to_string());
            }
        }
        if !waited.is_empty() {
            self.warn(format!(
                "{}: what is finished above the committed offset could not be looked up ({reason}); \
                 it is handled again",
                waited.join(", ")
            ));
        }
    }

    fn found(&mut self, number: usize, outcome: Result<Vec<Found>, Refusal>, now: Duration) {
        // Else it came too late.
        let Some(at) = self.look_ups.iter().position(|look_up| look_up.number == number) else {
            return;
        };
        match outcome {
            Ok(found) => {
                let look_up = self.look_ups.swap_remove(at);
                for found in found {
                    self.found_one(number, found);
                }
                self.go_on_without(number, &look_up.partitions, "no answer for this partition");
            }
            Err(refusal) if refusal.kind == RefusalKind::Passing => {
                tracing::info!("looking up committed offsets again: {}", refusal.reason);
                self.look_ups[at].again = Some(now + LOOK_UP_AGAIN);
            }
            Err(refusal) => {
                let look_up = self.look_ups.swap_remove(at);
                self.go_on_without(number, &look_up.partitions, &refusal.reason);
            }
        }
    }

    fn found_one(&mut self, number: usize, found: Found) {
        let Some(index) = self.index_of(&found.partition) else { return };
        if self.partitions[index].looking != Some(number) {
            return;
        }
        let (offset, metadata) = match found.committed {
            Ok(Some(committed)) => committed,
            Ok(None) => {
                self.partitions[index].looking = None;
                return;
            }
            Err(reason) => return self.go_on_without(number, &[found.partition], &reason),
        };
        self.partitions[index].looking = None;
        match resume::read(self.maps.settings(), offset, metadata) {
            Ok(stored) => self.partitions[index].stored = Some(stored),
            Err(unusable) => {
                self.report.metadata_ignored += 1;
                let name = found.partition;
                tracing::warn!(
                    "{name}: the metadata of the committed offset {offset} is ignored: {unusable}"
                );
                self.tell(&Event::MetadataIgnored {
                    topic: name.topic.to_string(),
                    partition: name.partition,
                    offset,
                    reason: unusable.to_string(),
                });
            }
        }
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
            self.report.resumed += partition.resumed;
            self.client.detach(partition.source);
        }
        if let Err(error) = self.client.confirm_revoke(partitions) {
            self.fail(error);
        }
    }

    // --- commits ---

    /// Sends the watermarks that moved, and what is finished above them if that has changed, unless a
    /// commit is in flight.
    fn commit(&mut self) {
        if !self.in_flight.is_empty() {
            return;
        }
        let mut commits = Vec::new();
        for partition in &mut self.partitions {
            let Some(epoch) = &mut partition.epoch else { continue };
            let commit = self.maps.commit_of(&self.executor, epoch.id, &self.planted);
            let Some((offset, metadata, cut)) = commit else { continue };
            if offset > epoch.sent || offset == epoch.sent && metadata != partition.sent_metadata {
                epoch.sent = offset;
                self.report.metadata_cut += u64::from(cut);
                metadata.clone_into(&mut partition.sent_metadata);
                commits.push(Commit {
                    partition: partition.name.clone(),
                    offset,
                    metadata: metadata.to_owned(),
                });
            }
        }
        self.send(commits);
    }

    fn send(&mut self, commits: Vec<Commit>) {
        if commits.is_empty() {
            return;
        }
        match self.client.commit(&commits) {
            Ok(()) => self.in_flight = commits,
            Err(error) => {
                let offsets: Vec<_> =
                    commits.into_iter().map(|commit| (commit.partition, commit.offset)).collect();
                self.take_back(&offsets);
                self.tell(&Event::CommitFailed {
                    offsets: offsets.iter().map(|(name, offset)| told(name, *offset)).collect(),
                    reason: error.to_string(),
                });
            }
        }
    }

    /// The broker takes no metadata of this length: the offsets go again without, at once, since this
    /// may be the last commit.
    #[cold]
    fn send_bare(&mut self, mut commits: Vec<Commit>) {
        if self.report.metadata_refused == 0 {
            let Some(Commit { partition, offset, metadata }) = commits.first() else { return };
            self.warn(format!(
                "{partition}: the broker takes no {} bytes of metadata with offset {offset}; it is \
                 committed without, and later metadata is shorter",
                metadata.len()
            ));
        }
        self.report.metadata_refused += commits.len() as u64;
        for commit in &mut commits {
            self.maps.shrink(commit.metadata.len());
            commit.metadata.clear();
            if let Some(index) = self.index_of(&commit.partition) {
                self.partitions[index].sent_metadata.clear();
            }
        }
        self.send(commits);
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
        let mut too_large = Vec::new();
        let mut reason = String::new();
        for result in results {
            match &result.outcome {
                Ok(()) => taken.push(told(&result.partition, result.offset)),
                Err(refusal) => {
                    let long = |commit: &&Commit| {
                        refusal.kind == RefusalKind::MetadataTooLarge
                            && commit.partition == result.partition
                            && !commit.metadata.is_empty()
                    };
                    if let Some(commit) = sent.iter().find(long) {
                        too_large.push(commit.clone());
                        continue;
                    }
                    if refusal.kind == RefusalKind::Fatal {
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
        for commit in sent {
            if !results.iter().any(|result| result.partition == commit.partition) {
                refused.push((commit.partition, commit.offset));
                reason = "no answer for this partition".to_owned();
            }
        }
        if !taken.is_empty() {
            self.report.commits += 1;
            for committed in &taken {
                let of = |p: &&mut Partition<C::Record>| {
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
        self.send_bare(too_large);
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
                    let sent = self.in_flight.is_empty();
                    self.commit();
                    let patience = if asked == Asked::Now {
                        self.limits.commit.min(Duration::from_secs(1))
                    } else {
                        self.limits.commit
                    };
                    self.phase = Phase::Committing { until: now + patience, sent };
                }
            }
            Phase::Committing { until, sent: false } if self.in_flight.is_empty() => {
                self.commit();
                self.phase = Phase::Committing { until, sent: true };
            }
            Phase::Committing { until, .. } => {
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
            self.report.resumed += partition.resumed;
            self.report.partitions.push(PartitionReport {
                topic: partition.name.topic.to_string(),
                partition: partition.name.partition,
                committed: partition.committed,
                finished: admitted_finished,
                resumed: partition.resumed,
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
    partition: &mut Partition<T>,
    start: i64,
    limits: &engine::Limits,
) -> Result<Open, Error> {
    let epoch = Open { id: executor.open_with(start, limits)?, sent: start };
    partition.epoch = Some(epoch);
    Ok(epoch)
}

fn names(partitions: &[TopicPartition]) -> Vec<(String, i32)> {
    partitions.iter().map(|name| (name.topic.to_string(), name.partition)).collect()
}

fn told(name: &TopicPartition, offset: i64) -> Committed {
    Committed { topic: name.topic.to_string(), partition: name.partition, offset }
}
