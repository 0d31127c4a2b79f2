//! Keys whose record failed: parked, tried again, buried, quarantined.
//!
//! A failed record comes back through its lane with every later entry of its class that the worker
//! met. The record's key is **parked**: its later records wait behind it, here or in the shard's list,
//! and other keys of the shard go on. When its time has come the record goes to the front of its
//! shard's list as a **tracked** entry, so that it comes back whatever becomes of it, and its key is
//! released or parked again.
//!
//! # Why nothing overtakes
//! The entries that came back unhandled are kept with the lane (a [`Hold`]) until everything is back
//! that was sent before the dispatcher knew of the failure; until then nothing of their classes is
//! sent into that lane, and a shard with such entries does not leave it. Then they go to the front of
//! their lists at once, the last one first: older than all that waits there.

use super::lane::Lane;
use super::{Executor, FIRST_FREE, FREE, Failure, is_free, shard_of};
use crate::batch::{Back, Entry, class_of};
use crate::epoch::EpochId;
use crate::lane::reached;
use crate::outcome::Outcome;
use crate::retry::{Attempt, Exhausted};
use crate::ring::Mark;
use crate::worker::{Errand, Fence};
use std::cmp::Reverse;
use std::collections::hash_map::Entry::Vacant;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::time::Duration;

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// The record is here until its time has come; the number tells this time from earlier ones.
    Due(u64),
    /// The record is in a list or a lane.
    Sent,
    /// A quarantined key without records.
    Idle,
}

#[derive(Debug)]
pub(super) struct Parked<T> {
    state: State,
    record: Option<Entry<T>>,
    /// When its time comes.
    due: Duration,
    /// Later records of the key, oldest first.
    later: VecDeque<Entry<T>>,
    /// Failed attempts of the handler for the record, then of the hook.
    attempts: u32,
    hook_attempts: u32,
    first_failure: Option<Duration>,
    /// Why it goes to the dead-letter hook, if it does.
    bury: Option<String>,
    quarantined: bool,
}

impl<T> Parked<T> {
    fn new() -> Self {
        Parked {
            state: State::Idle,
            record: None,
            due: Duration::ZERO,
            later: VecDeque::new(),
            attempts: 0,
            hook_attempts: 0,
            first_failure: None,
            bury: None,
            quarantined: false,
        }
    }
}

impl<T> Parked<T> {
    /// Which attempt its record waits for or is in.
    pub(super) fn attempt(&self) -> u32 {
        self.attempts.saturating_add(1)
    }

    /// Whether its record goes to the dead-letter hook.
    pub(super) fn is_buried(&self) -> bool {
        self.bury.is_some()
    }

    /// Whether its record is in a list or a lane.
    pub(super) fn is_sent(&self) -> bool {
        self.state == State::Sent
    }
}

/// All parked keys. Only the dispatcher touches it.
#[derive(Debug)]
pub(super) struct Parking<T> {
    /// By hash. A record without an order gets a hash of its own, see `is_free`.
    keys: HashMap<u64, Parked<T>>,
    /// Parked keys of each shard that has any.
    shards: HashMap<u32, u32>,
    due: BinaryHeap<Reverse<(Duration, u64, u64)>>,
    serial: u64,
    /// Records without an order that were parked.
    free: u64,
    random: u64,
}

impl<T> Parking<T> {
    pub(super) fn new() -> Self {
        Parking {
            keys: HashMap::new(),
            shards: HashMap::new(),
            due: BinaryHeap::new(),
            serial: 0,
            free: 0,
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// A number in `0.0..1.0`: xorshift, good enough to spread retries.
    fn random(&mut self) -> f64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Whether a key's record is to be handled again before its later ones go anywhere.
    pub(super) fn is_waiting(&self, key: u64) -> bool {
        self.keys.get(&key).is_some_and(|parked| !parked.quarantined)
    }

    pub(super) fn is_quarantined(&self, key: u64) -> bool {
        self.keys.get(&key).is_some_and(|parked| parked.quarantined)
    }

    /// Whether what is due for a key at a time is an attempt of the handler.
    pub(super) fn attempts_next(&self, key: u64, serial: u64) -> bool {
        let parked = self.keys.get(&key);
        parked.is_some_and(|parked| parked.state == State::Due(serial) && parked.bury.is_none())
    }

    /// It is due later.
    pub(super) fn postpone(&mut self, key: u64, serial: u64, due: Duration) {
        self.due.push(Reverse((due, serial, key)));
    }

    pub(super) fn of(&self, hash: u64) -> Option<&Parked<T>> {
        self.keys.get(&hash)
    }

    /// Parked records with their hashes and times.
    pub(super) fn records(&self) -> impl Iterator<Item = (u64, &Entry<T>, Duration)> {
        self.keys.iter().filter_map(|(hash, parked)| {
            parked.record.as_ref().map(|entry| (*hash, entry, parked.due))
        })
    }

    /// Records behind parked ones, with their hashes.
    pub(super) fn later(&self) -> impl Iterator<Item = (u64, &Entry<T>)> {
        self.keys.iter().flat_map(|(hash, parked)| parked.later.iter().map(|entry| (*hash, entry)))
    }

    pub(super) fn next_due(&self) -> Option<Duration> {
        self.due.peek().map(|Reverse((due, ..))| *due)
    }
}

/// Entries that came back unhandled, until all are back that may precede later ones.
#[derive(Debug)]
pub(super) struct Hold<T> {
    /// Position up to which the lane must be done.
    until: u32,
    classes: u128,
    back: Vec<(u64, Entry<T>)>,
}

/// Whether entries of a lane are held.
pub(super) fn holds_any<T>(lane: &Lane<T>) -> bool {
    !lane.holds.is_empty()
}

impl<T> Hold<T> {
    pub(super) fn entries(&self) -> impl Iterator<Item = (u64, &Entry<T>)> {
        self.back.iter().map(|(hash, entry)| (*hash, entry))
    }
}

impl<T> Lane<T> {
    /// Whether nothing of the shard may go into this lane, in which it is.
    #[inline]
    pub(super) fn holds_back(&self, shard: u32) -> bool {
        self.held & 1 << class_of(shard) != 0
    }

    /// What was recalled is not in the lane any more, so nothing needs to be waited for behind `end`.
    /// Returns the hashes of the entries that are held, and up to where their shards stay in the lane.
    pub(super) fn shorten_holds(&mut self, end: u32) -> Vec<(u64, u32)> {
        let mut held = Vec::new();
        for hold in &mut self.holds {
            if !reached(end, hold.until) {
                hold.until = end;
            }
            held.extend(hold.back.iter().map(|(hash, _)| (*hash, hold.until)));
        }
        if self.held != 0 {
            self.post.fences.push(Fence { seen: self.tx.reclaimed(), from: end });
        }
        held
    }
}

/// A key that is quarantined or whose record failed and waits.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ParkedKey {
    /// The hash it was offered with; `None` for a record without an order.
    pub hash: Option<u64>,
    /// Failed attempts of its first record.
    pub attempts: u32,
    /// When the first of them failed, in the time of [`Executor::pass`].
    pub first_failure: Option<Duration>,
    /// Later records of the key that are known to wait behind it.
    pub waiting: usize,
    /// Whether its records go to the dead-letter hook until it is released.
    pub quarantined: bool,
}

impl<T: Send + 'static> Executor<T> {
    /// Keys that are parked after a failure or quarantined, in no order.
    pub fn parked(&self) -> impl Iterator<Item = ParkedKey> {
        self.parking.keys.iter().map(|(hash, parked)| ParkedKey {
            hash: (!is_free(*hash)).then_some(*hash),
            attempts: parked.attempts,
            first_failure: parked.first_failure,
            waiting: parked.later.len(),
            quarantined: parked.quarantined,
        })
    }

    /// Ends the quarantine of a key: its records go to the handler again, in order. Returns whether
    /// it was quarantined.
    pub fn release(&mut self, hash: u64) -> bool {
        let hash = super::not_free(hash);
        let Some(parked) = self.parking.keys.get_mut(&hash) else { return false };
        let was = std::mem::take(&mut parked.quarantined);
        if parked.state == State::Idle {
            self.unpark(hash);
        }
        was
    }

    /// When the next thing is due, in the time of [`pass`](Self::pass): a parked record, the end of
    /// the linger of a partial batch, or a record that its rate lets go. The driver should not sleep
    /// longer.
    pub fn next_due(&self) -> Option<Duration> {
        let due = [self.parking.next_due(), self.next_linger(), self.next_at_gate()];
        due.into_iter().flatten().min()
    }

    pub(super) fn is_halted(&self, entry: &Entry<T>) -> bool {
        self.epochs[usize::from(entry.epoch())]
            .as_ref()
            .is_none_or(|slot| slot.window.shared().halted())
    }

    /// Whether a record of this hash has to wait behind a parked one.
    pub(super) fn is_parked(&self, hash: u64) -> bool {
        !is_free(hash) && self.parking.keys.contains_key(&hash)
    }

    /// Whether the key's record goes to the dead-letter hook.
    pub(super) fn is_buried(&self, hash: u64) -> bool {
        self.parking.keys.get(&hash).is_some_and(|key| key.bury.is_some())
    }

    /// Puts a record behind the parked one of its key.
    pub(super) fn park_behind(&mut self, hash: u64, entry: Entry<T>) {
        let Some(parked) = self.parking.keys.get_mut(&hash) else { return };
        let older = if parked.quarantined { None } else { parked.later.pop_back() };
        if let Some(older) = older
            && !self.conflates(&entry, &older)
            && let Some(parked) = self.parking.keys.get_mut(&hash)
        {
            parked.later.push_back(older);
        }
        let Some(parked) = self.parking.keys.get_mut(&hash) else { return };
        parked.later.push_back(entry);
        if parked.state == State::Idle {
            self.next_of_quarantined(hash);
        }
    }

    /// Puts an entry that was in a lane before those that came after its key was parked; hands it
    /// back if its key is not parked or it is the parked record itself.
    pub(super) fn park_in_front(&mut self, hash: u64, entry: Entry<T>) -> Option<Entry<T>> {
        if is_free(hash) || entry.is_tracked() {
            return Some(entry);
        }
        let Some(parked) = self.parking.keys.get_mut(&hash) else { return Some(entry) };
        let newer = if parked.quarantined { None } else { parked.later.pop_front() };
        let carried = newer.as_ref().is_some_and(|newer| self.conflates(newer, &entry));
        if let Some(parked) = self.parking.keys.get_mut(&hash) {
            newer.into_iter().for_each(|newer| parked.later.push_front(newer));
            if !carried {
                parked.later.push_front(entry);
            }
        }
        None
    }

    /// Deals with what came back through a lane.
    #[cold]
    pub(super) fn take_back(&mut self, index: usize, now: Duration) {
        let mut handed = std::mem::take(&mut self.lanes[index].handed_back);
        let end = self.lanes[index].tx.end();
        let mut failures = false;
        for (position, hash, mut entry) in handed.drain(..) {
            self.let_go(index, position);
            let Some(why) = entry.back() else { continue };
            if entry.is_tracked() && self.carrier_back(hash, &mut entry, why) {
                continue;
            }
            let shard = self.shard_for(hash, &entry);
            let class = 1 << class_of(shard);
            if matches!(why, Back::Failed | Back::Bounced) && self.lanes[index].held & class == 0 {
                self.lanes[index].hold(class, end);
                failures = true;
            }
            match why {
                Back::Failed => {
                    let report = self.lanes[index].post.reports.pop();
                    let report = report.unwrap_or_else(|| Outcome::Failed(String::new()));
                    self.failed(hash, entry, report, now);
                }
                Back::Bounced => self.bounced(index, class, shard, hash, entry),
                Back::Done | Back::Halted => {
                    let buried = self.is_buried(hash);
                    self.counts.dead_lettered += u64::from(buried && why == Back::Done);
                    self.drop_tracked(hash, entry);
                }
            }
        }
        self.lanes[index].handed_back = handed;
        let lane = &self.lanes[index];
        if failures {
            lane.post.fences.push(Fence { seen: lane.tx.reclaimed(), from: end });
        }
        let reclaimed = lane.tx.reclaimed();
        self.let_go(index, reclaimed);
    }

    /// The shard whose class and list an entry uses.
    pub(super) fn shard_for(&self, hash: u64, entry: &Entry<T>) -> u32 {
        if is_free(hash) {
            return entry.place().index() % self.shards.len() as u32;
        }
        shard_of(hash, self.shards.len())
    }

    /// Keeps an entry that was not handled until the hold of its class ends.
    fn bounced(&mut self, index: usize, class: u128, shard: u32, hash: u64, entry: Entry<T>) {
        self.count_waiting(&entry);
        self.lanes[index].bounced += 1;
        let holds = &mut self.lanes[index].holds;
        let Some(hold) = holds.iter_mut().find(|hold| hold.classes & class != 0) else { return };
        hold.back.push((hash, entry));
        let until = hold.until;
        if !is_free(hash) {
            // It stays in this lane so long.
            self.shards[shard as usize].position = until;
        }
    }

    /// Ends the holds up to a position that the lane is done with.
    pub(super) fn let_go(&mut self, index: usize, position: u32) {
        while self.lanes[index].holds.front().is_some_and(|hold| reached(position, hold.until)) {
            let Some(hold) = self.lanes[index].holds.pop_front() else { return };
            self.lanes[index].held &= !hold.classes;
            let mut behind = Vec::new();
            for (hash, mut entry) in hold.back.into_iter().rev() {
                let tracked = entry.is_tracked();
                let shard = self.shard_for(hash, &entry);
                entry.send_again(class_of(shard), tracked);
                match self.park_in_front(hash, entry) {
                    Some(entry) => self.put_in_front(shard, hash, entry),
                    None => behind.push(hash),
                }
            }
            for key in behind {
                if self.parking.keys.get(&key).is_some_and(|parked| parked.state == State::Idle) {
                    self.next_of_quarantined(key);
                }
            }
        }
    }

    /// Puts an entry, already counted as waiting, before all others of its shard.
    fn put_in_front(&mut self, shard: u32, hash: u64, entry: Entry<T>) {
        if self.flights.is_some() && is_free(hash) {
            return self.wait_loose(hash, entry);
        }
        let first = !self.shards[shard as usize].waits();
        self.list(shard, hash, entry, true);
        if first {
            self.queue_shard(shard);
        }
    }

    /// A record ended without being finished.
    pub(super) fn failed(&mut self, hash: u64, entry: Entry<T>, report: Outcome, now: Duration) {
        let mut key = hash;
        if hash == FREE {
            // One of its own, among those that are not a user's.
            self.parking.free = (self.parking.free + 1) % (FREE - FIRST_FREE);
            key = FIRST_FREE + self.parking.free;
        }
        if entry.is_tracked() {
            self.back_from_errand(key);
        }
        if self.is_halted(&entry) {
            drop(entry);
            return self.unpark(key);
        }
        if let Vacant(place) = self.parking.keys.entry(key) {
            place.insert(Parked::new());
            if !is_free(key) {
                let shard = shard_of(key, self.shards.len());
                *self.parking.shards.entry(shard).or_default() += 1;
                self.shards[shard as usize].set_parked(true);
            }
        }
        let random = self.parking.random();
        let Some(parked) = self.parking.keys.get_mut(&key) else { return };
        parked.first_failure.get_or_insert(now);
        self.counts.failed_attempts += 1;
        let (hook, retry) = (self.handler.hook.is_some(), &self.retry);
        enum Next {
            At(Duration),
            Skip(String),
            Halt(String),
        }
        let bury_if_possible = |parked: &mut Parked<T>, reason: String| {
            if !hook {
                return Next::Halt(reason);
            }
            parked.bury = Some(reason);
            Next::At(now)
        };
        let next = match report {
            // The hook failed.
            Outcome::Failed(_) | Outcome::RetryAfter(..) if parked.bury.is_some() => {
                parked.hook_attempts = parked.hook_attempts.saturating_add(1);
                Next::At(now.saturating_add(retry.backoff(parked.hook_attempts, random)))
            }
            Outcome::Halt(reason) => Next::Halt(reason),
            Outcome::DeadLetter(reason) => {
                parked.attempts = parked.attempts.saturating_add(1);
                bury_if_possible(parked, reason)
            }
            Outcome::Failed(reason) | Outcome::RetryAfter(_, reason)
                if retry.delay(parked.attempts.saturating_add(1), random).is_none() =>
            {
                parked.attempts = parked.attempts.saturating_add(1);
                match retry.then {
                    Exhausted::Halt => Next::Halt(reason),
                    Exhausted::Skip => Next::Skip(reason),
                    Exhausted::DeadLetter => bury_if_possible(parked, reason),
                    Exhausted::Quarantine => {
                        parked.quarantined = !is_free(key);
                        bury_if_possible(parked, reason)
                    }
                }
            }
            Outcome::RetryAfter(delay, _) => {
                parked.attempts = parked.attempts.saturating_add(1);
                Next::At(now.saturating_add(delay))
            }
            _ => {
                parked.attempts = parked.attempts.saturating_add(1);
                let delay = retry.delay(parked.attempts, random).unwrap_or_default();
                Next::At(now.saturating_add(delay))
            }
        };
        match next {
            Next::At(due) => self.park(key, entry, due),
            Next::Skip(reason) => {
                if let Some(slot) = &self.epochs[usize::from(entry.epoch())] {
                    let shared = slot.window.shared();
                    let offset = shared.offset_of(&entry.place());
                    shared.finish(&entry.place(), Mark::Publish);
                    let epoch = EpochId { slot: entry.epoch(), generation: slot.generation };
                    self.note_skipped(epoch, offset, reason);
                }
                self.finish_carried(&entry);
                drop(entry);
                self.unpark(key);
            }
            Next::Halt(reason) => {
                if let Some(slot) = &self.epochs[usize::from(entry.epoch())] {
                    let shared = slot.window.shared();
                    let offset = shared.offset_of(&entry.place());
                    let epoch = EpochId { slot: entry.epoch(), generation: slot.generation };
                    shared.fail(&entry.place());
                    if !slot.closed {
                        self.failures.push_back(Failure { epoch, offset, reason });
                    }
                    self.halt(epoch);
                }
                drop(entry);
                self.unpark(key);
            }
        }
    }

    fn park(&mut self, key: u64, entry: Entry<T>, due: Duration) {
        self.count_waiting(&entry);
        self.parking.serial += 1;
        let serial = self.parking.serial;
        if let Some(parked) = self.parking.keys.get_mut(&key) {
            parked.state = State::Due(serial);
            parked.record = Some(entry);
            parked.due = due;
            self.parking.due.push(Reverse((due, serial, key)));
        }
    }

    /// Sends the parked records whose time has come.
    pub(super) fn send_due(&mut self, now: Duration) {
        while let Some(Reverse((due, serial, key))) = self.parking.due.peek().copied() {
            if due > now {
                return;
            }
            self.parking.due.pop();
            if self.rates.is_some() {
                self.line_up(key, serial, now);
            } else {
                self.send_parked(key, serial);
            }
        }
    }

    /// Sends a parked record, if it still waits for this time.
    pub(super) fn send_parked(&mut self, key: u64, serial: u64) {
        let Some(parked) = self.parking.keys.get_mut(&key) else { return };
        if parked.state != State::Due(serial) {
            return;
        }
        let Some(mut entry) = parked.record.take() else { return };
        parked.state = State::Sent;
        self.common.registry.add_caution();
        let hash = key;
        let shard = self.shard_for(hash, &entry);
        entry.send_again(class_of(shard), true);
        self.put_in_front(shard, hash, entry);
    }

    /// What the tracked record of a key is sent for.
    pub(super) fn errand(&self, hash: u64) -> Option<Errand> {
        let parked = self.parking.keys.get(&hash)?;
        let number = parked.attempts.saturating_add(1);
        let attempt = Attempt { number, first_failure: parked.first_failure };
        Some(Errand { attempt, bury: parked.bury.clone() })
    }

    /// Tells a lane's worker what the tracked record at `position` is sent for.
    pub(super) fn send_errand(&mut self, index: usize, position: u32, hash: u64) {
        let Some(errand) = self.errand(hash) else { return };
        self.lanes[index].post.errands.lock().insert(position, errand);
    }

    /// A tracked record is back.
    fn back_from_errand(&mut self, key: u64) {
        if let Some(parked) = self.parking.keys.get_mut(&key)
            && parked.state == State::Sent
        {
            parked.state = State::Idle;
            self.common.registry.drop_caution();
        }
    }

    /// A tracked record has ended.
    pub(super) fn drop_tracked(&mut self, hash: u64, entry: Entry<T>) {
        drop(entry);
        self.back_from_errand(hash);
        self.unpark(hash);
    }

    /// The parked record has ended: its key's later records go on.
    fn unpark(&mut self, key: u64) {
        if let Some(rates) = &mut self.rates {
            rates.unpark(key);
        }
        let Some(parked) = self.parking.keys.get_mut(&key) else { return };
        if parked.quarantined {
            parked.state = State::Idle;
            return self.next_of_quarantined(key);
        }
        let Some(parked) = self.parking.keys.remove(&key) else { return };
        let hash = key;
        if is_free(hash) {
            return;
        }
        let shard = shard_of(hash, self.shards.len());
        if let Some(count) = self.parking.shards.get_mut(&shard) {
            *count -= 1;
            if *count == 0 {
                self.parking.shards.remove(&shard);
                self.shards[shard as usize].set_parked(false);
            }
        }
        for entry in parked.later.into_iter().rev() {
            self.put_in_front(shard, hash, entry);
        }
    }

    /// Sends the next record of a quarantined key to the hook.
    fn next_of_quarantined(&mut self, key: u64) {
        let Some(parked) = self.parking.keys.get_mut(&key) else { return };
        let Some(entry) = parked.later.pop_front() else { return };
        parked.attempts = 0;
        parked.hook_attempts = 0;
        parked.first_failure = None;
        parked.bury = Some("its key is quarantined".to_owned());
        self.uncount_waiting(&entry);
        self.park(key, entry, self.last_pass.unwrap_or_default());
    }

    /// Drops the parked records of an epoch that has halted.
    pub(super) fn forget_parked(&mut self, slot: u16) {
        if let Some(rates) = &mut self.rates {
            rates.forget(slot);
        }
        let keys: Vec<u64> = self.parking.keys.keys().copied().collect();
        for key in keys {
            let Some(parked) = self.parking.keys.get_mut(&key) else { continue };
            let mut dropped: Vec<Entry<T>> = Vec::new();
            let later = std::mem::take(&mut parked.later);
            for entry in later {
                if entry.epoch() == slot {
                    dropped.push(entry);
                } else {
                    parked.later.push_back(entry);
                }
            }
            let record = parked.record.take_if(|record| record.epoch() == slot);
            let ended = record.is_some();
            dropped.extend(record);
            for entry in &dropped {
                self.uncount_waiting(entry);
            }
            drop(dropped);
            if ended {
                self.unpark(key);
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
impl<T: Send + 'static> Executor<T> {
    /// A shard with entries that are held has not left their lane, and waiting records are counted.
    pub(super) fn check_holds(&self) -> Result<(), String> {
        for (index, lane) in self.lanes.iter().enumerate() {
            for hold in &lane.holds {
                for (hash, _) in hold.back.iter().filter(|(hash, _)| !is_free(*hash)) {
                    let shard = &self.shards[shard_of(*hash, self.shards.len()) as usize];
                    let left = reached(lane.tx.reclaimed(), shard.position);
                    if shard.lane() != index || left {
                        return Err(format!(
                            "{shard:?} has left lane {index} before {}",
                            hold.until
                        ));
                    }
                }
            }
        }
        let held = self.lanes.iter().flat_map(|lane| &lane.holds).flat_map(|hold| &hold.back);
        let parked = self.parking.keys.values();
        let parked = parked.flat_map(|parked| parked.record.iter().chain(&parked.later));
        let mut waiting = vec![0; self.epochs.len()];
        for entry in self
            .slab
            .all()
            .map(|waiting| &waiting.entry)
            .chain(held.map(|(_, entry)| entry))
            .chain(parked)
            .chain(self.loose())
        {
            waiting[usize::from(entry.epoch())] += 1;
        }
        for (slot, waiting) in self.epochs.iter().zip(waiting) {
            let counted = slot.as_ref().map_or(0, |slot| slot.waiting);
            if counted != waiting {
                return Err(format!("{counted} counted as waiting, {waiting} do"));
            }
        }
        Ok(())
    }
}

impl<T> Lane<T> {
    fn hold(&mut self, class: u128, end: u32) {
        self.held |= class;
        // From now on each record has to be looked at; `set_limits` ends that.
        self.easy = 0;
        match self.holds.back_mut() {
            // Of this same look at the lane.
            Some(hold) if hold.until == end => hold.classes |= class,
            _ => self.holds.push_back(Hold { until: end, classes: class, back: Vec::new() }),
        }
    }
}
