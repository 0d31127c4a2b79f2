//! Flights as the dispatcher sees them: records that are handed out one by one and end anywhere.
//!
//! At most one record of a shard is in flight, and the shard's next one departs only after the dispatcher
//! has taken both halves of the end of the one before: that is the order. Shards that may depart wait in
//! one queue, first come first served, while as many records fly as may. A record costs O(1), whatever the
//! number of shards.
//!
//! The lists of waiting records, parked keys, retries and quarantine are those of the lanes.

use super::{BuildError, Builder, Executor, FREE, is_free, shard_of};
use crate::batch::{Entry, Tag};
use crate::epoch::EpochId;
use crate::flight::{AsyncHandler, End, Flight, Launcher, Port, Spawn, Task, flight};
use crate::outcome::{IntoOutcome, Outcome};
use crate::pull::{Gate, Puller};
use crate::retry::Attempt;
use crate::ring::Mark;
use crate::shard::Waiting;
use crate::sync::Arc;
use crate::wake::Waker;
use crate::worker::{DeadLetter, Errand};
use std::collections::VecDeque;
use std::time::Duration;

/// In the queue of shards that may depart: the next record without an order.
const LOOSE: u32 = u32::MAX;
/// Positions of shards.
const LANDED: u32 = 0;
const FLYING: u32 = 1;

/// A record in flight.
#[derive(Debug)]
struct Flying<T> {
    hash: u64,
    tag: Tag,
    since: Duration,
    flight: Arc<Flight<T>>,
    report: Option<Outcome>,
    payload: Option<T>,
}

/// All flights. Only the dispatcher touches it.
#[derive(Debug)]
pub(super) struct Flights<T> {
    port: Arc<Port<T>>,
    launcher: Launcher<T>,
    concurrency: u32,
    /// By number. A number is used again only after both halves of its end were taken.
    table: Vec<Option<Flying<T>>>,
    free: Vec<u32>,
    /// Records in flight by the slot of their epoch.
    by_epoch: Vec<u32>,
    /// Records without an order that wait; each has its turn in the queue of shards.
    loose: VecDeque<(u64, Entry<T>)>,
}

impl<T> Flights<T> {
    pub(super) fn new(waker: Waker, launcher: Launcher<T>, concurrency: u32) -> Self {
        Flights {
            port: Arc::new(Port::new(waker)),
            launcher,
            concurrency,
            table: Vec::new(),
            free: Vec::new(),
            by_epoch: Vec::new(),
            loose: VecDeque::new(),
        }
    }

    fn flying(&self) -> u32 {
        // Never more than the concurrency, a `u32`.
        (self.table.len() - self.free.len()) as u32
    }

    pub(super) fn room(&self) -> u32 {
        self.concurrency - self.flying()
    }

    pub(super) fn busy(&self) -> bool {
        self.flying() > 0 || !self.loose.is_empty()
    }

    pub(super) fn has_ends(&self) -> bool {
        !self.port.ends.is_empty()
    }

    /// Whether a record of the epoch in this slot is in flight.
    pub(super) fn names(&self, slot: u16) -> bool {
        self.by_epoch.get(usize::from(slot)).is_some_and(|count| *count > 0)
    }

    /// Records in flight, with their hashes and when they departed.
    pub(super) fn aloft(&self) -> impl Iterator<Item = (u64, Tag, Duration)> {
        self.table.iter().flatten().map(|flying| (flying.hash, flying.tag, flying.since))
    }

    /// Records without an order that wait, with their hashes.
    pub(super) fn loose_records(&self) -> impl Iterator<Item = (u64, &Entry<T>)> {
        self.loose.iter().map(|(hash, entry)| (*hash, entry))
    }

    /// Notes half of an end; the flight, if that was its second.
    fn note(&mut self, end: End<T>) -> Option<(u64, Entry<T>, Outcome)> {
        let number = match end {
            End::Report(number, outcome) => {
                self.table.get_mut(number as usize)?.as_mut()?.report = Some(outcome);
                number
            }
            End::Payload(number, payload) => {
                self.table.get_mut(number as usize)?.as_mut()?.payload = Some(payload);
                number
            }
        };
        let ended = |flying: &mut Flying<T>| flying.report.is_some() && flying.payload.is_some();
        let Flying { hash, tag, report, payload, .. } =
            self.table.get_mut(number as usize)?.take_if(ended)?;
        self.free.push(number);
        let entry = Entry { payload: payload?, tag };
        if let Some(count) = self.by_epoch.get_mut(usize::from(entry.epoch())) {
            *count -= 1;
        }
        Some((hash, entry, report?))
    }

    /// Those who pull take what is there, and end.
    pub(super) fn stop(&self) {
        if let Launcher::Pull(gate) = &self.launcher {
            gate.close();
        }
    }

    /// The executor goes: nobody waits for the ends of what is in flight.
    pub(super) fn end(&self) {
        for flying in self.table.iter().flatten() {
            flying.flight.cancel();
        }
        self.stop();
        if let Launcher::Pull(gate) = &self.launcher {
            gate.drop_halted();
        }
    }
}

impl<T: Send + 'static> Executor<T> {
    /// Records that are in flight: handed to futures or to those who pull, and not known to have ended.
    /// Always 0 for an executor with workers.
    pub fn in_flight(&self) -> usize {
        self.flights.as_ref().map_or(0, |flights| flights.flying() as usize)
    }

    /// Whether a record may depart without a wait.
    fn may_depart(&self) -> bool {
        self.ready.is_empty() && self.flights.as_ref().is_some_and(|flights| flights.room() > 0)
    }

    pub(super) fn dispatch_flight(&mut self, index: u32, hash: u64, entry: Entry<T>) {
        let shard = &self.shards[index as usize];
        if !shard.waits() {
            if shard.has_parked() && self.is_parked(hash) {
                self.count_waiting(&entry);
                self.park_behind(hash, entry);
                return;
            }
            if shard.position == LANDED && self.may_depart() {
                self.shards[index as usize].position = FLYING;
                return self.depart(hash, entry);
            }
        }
        self.wait(index, hash, entry);
    }

    pub(super) fn dispatch_loose(&mut self, entry: Entry<T>) {
        if self.may_depart() {
            return self.depart(FREE, entry);
        }
        self.wait_anywhere(FREE, entry);
    }

    /// Lets a record without an order, already counted as waiting, wait for its turn.
    pub(super) fn wait_loose(&mut self, hash: u64, entry: Entry<T>) {
        if let Some(flights) = &mut self.flights {
            flights.loose.push_back((hash, entry));
            self.ready.push_back(LOOSE);
        }
    }

    /// A shard has begun to wait: it gets its turn, if it is not in flight.
    pub(super) fn queue_for_flight(&mut self, index: u32) {
        if self.shards[index as usize].position == LANDED {
            self.ready.push_back(index);
        }
    }

    /// Takes the ends of flights.
    pub(super) fn land(&mut self, now: Duration) {
        while let Some(flights) = &mut self.flights {
            let Some(end) = flights.port.ends.pop() else { return };
            if let Some((hash, entry, outcome)) = flights.note(end) {
                self.landed(hash, entry, outcome, now);
            }
        }
    }

    fn landed(&mut self, hash: u64, entry: Entry<T>, outcome: Outcome, now: Duration) {
        let buried = entry.is_tracked() && self.is_buried(hash);
        // Meanwhile the shard still counts as in flight, so that nothing puts it into the queue.
        match outcome {
            // Marked already.
            Outcome::Done => {
                self.counts.dead_lettered += u64::from(buried);
                self.ended(hash, entry);
            }
            Outcome::Skip(reason) => {
                if let Some(Some(slot)) = self.epochs.get(usize::from(entry.epoch())) {
                    let shared = slot.window.shared();
                    // Before it is marked: afterwards its place may be another's.
                    let offset = shared.offset_of(&entry.place());
                    shared.finish(&entry.place(), Mark::Publish);
                    let epoch = EpochId { slot: entry.epoch(), generation: slot.generation };
                    self.note_skipped(epoch, offset, reason);
                }
                self.ended(hash, entry);
            }
            // Again, but not at once.
            Outcome::DeadLetter(reason) if buried => {
                self.failed(hash, entry, Outcome::Failed(reason), now);
            }
            failed => self.failed(hash, entry, failed, now),
        }
        if !is_free(hash) {
            let index = shard_of(hash, self.shards.len());
            let shard = &mut self.shards[index as usize];
            shard.position = LANDED;
            if shard.waits() {
                self.ready.push_back(index);
            }
        }
    }

    fn ended(&mut self, hash: u64, entry: Entry<T>) {
        if entry.is_tracked() {
            self.drop_tracked(hash, entry);
        }
    }

    /// Lets waiting records depart.
    pub(super) fn serve_flights(&mut self) {
        while self.flights.as_ref().is_some_and(|flights| flights.room() > 0) {
            match self.ready.pop_front() {
                None => return,
                Some(LOOSE) => {
                    let loose = self.flights.as_mut().and_then(|flights| flights.loose.pop_front());
                    if let Some((hash, entry)) = loose {
                        self.depart_unless_halted(hash, entry);
                    }
                }
                Some(index) => self.serve_shard(index),
            }
        }
    }

    /// Lets a shard's next record depart.
    fn serve_shard(&mut self, index: u32) {
        // Already: what is put into the list meanwhile must not queue the shard.
        self.shards[index as usize].position = FLYING;
        loop {
            let shard = &mut self.shards[index as usize];
            let parked = shard.has_parked();
            let Some(Waiting { hash, entry }) = self.slab.pop(index, shard) else { break };
            if parked && !entry.is_tracked() && self.is_parked(hash) {
                self.park_behind(hash, entry);
            } else if self.depart_unless_halted(hash, entry) {
                return;
            }
        }
        self.shards[index as usize].position = LANDED;
    }

    /// A record that has waited departs, or is dropped.
    fn depart_unless_halted(&mut self, hash: u64, entry: Entry<T>) -> bool {
        self.uncount_waiting(&entry);
        if self.is_halted(&entry) {
            self.ended(hash, entry);
            return false;
        }
        self.depart(hash, entry);
        true
    }

    fn depart(&mut self, hash: u64, entry: Entry<T>) {
        let first = Errand { attempt: Attempt::FIRST, bury: None };
        let errand = if entry.is_tracked() { self.errand(hash) } else { None }.unwrap_or(first);
        let attempt = errand.attempt;
        let letter = errand.bury.map(|reason| DeadLetter {
            reason,
            attempts: attempt.number - 1,
            first_failure: attempt.first_failure,
        });
        let slot = usize::from(entry.epoch());
        let since = self.last_pass.unwrap_or_default();
        let (Some(Some(epoch)), Some(flights)) = (self.epochs.get(slot), &mut self.flights) else {
            return;
        };
        if flights.by_epoch.len() <= slot {
            flights.by_epoch.resize(slot + 1, 0);
        }
        flights.by_epoch[slot] += 1;
        let number = flights.free.pop().unwrap_or_else(|| {
            flights.table.push(None);
            // At most the concurrency, a `u32`.
            (flights.table.len() - 1) as u32
        });
        let (ring, place) = (Arc::clone(epoch.window.shared()), entry.place());
        let Entry { payload, tag } = entry;
        let dropped = flights.launcher.dropped();
        let (task, report, flight) =
            flight(&flights.port, number, ring, place, payload, attempt, dropped);
        flights.table[number as usize] =
            Some(Flying { hash, tag, since, flight, report: None, payload: None });
        flights.launcher.launch(task, report, letter);
    }

    /// Of the epoch in a slot nothing more is waited for.
    pub(super) fn cancel_flights(&mut self, slot: u16) {
        let Some(flights) = self.flights.as_ref().filter(|flights| flights.names(slot)) else {
            return;
        };
        for flying in flights.table.iter().flatten() {
            if flying.tag.epoch() == slot {
                flying.flight.cancel();
            }
        }
        if let Launcher::Pull(gate) = &flights.launcher {
            gate.drop_halted();
        }
    }
}

impl Builder {
    /// Starts an executor whose handler returns a future for each record, of which up to
    /// [`concurrency`](Self::concurrency) run at once on the runtime behind `spawner`. There are no
    /// worker threads, and [`workers`](Self::workers), [`batch`](Self::batch) and [`spin`](Self::spin) mean
    /// nothing.
    ///
    /// `waker` wakes the thread that will drive the executor: when a future has ended.
    ///
    /// ```
    /// use plimsoll_engine::{Executor, FlightFuture, Route, Task, Waiter};
    /// use std::time::Duration;
    ///
    /// // Any runtime will do; this one is a thread for each future.
    /// let spawner = |future: FlightFuture| {
    ///     std::thread::spawn(|| futures_executor::block_on(future));
    /// };
    /// let waiter = Waiter::new();
    /// let mut executor = Executor::builder().concurrency(8).futures(
    ///     waiter.waker(),
    ///     spawner,
    ///     |record: Task<u64>| async move { assert!(*record < 100) },
    /// )?;
    /// let epoch = executor.open(0, 100)?;
    /// for offset in 0..100 {
    ///     executor.offer(epoch, offset, Route::Free, offset as u64).unwrap();
    /// }
    /// let began = std::time::Instant::now();
    /// while executor.progress(epoch).unwrap().watermark < 100 {
    ///     executor.pass(began.elapsed());
    ///     waiter.wait(Duration::from_millis(100), || executor.finished_something());
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`each`](Self::each).
    pub fn futures<T, F, W>(
        self,
        waker: Waker,
        spawner: impl Spawn + 'static,
        handler: F,
    ) -> Result<Executor<T>, BuildError>
    where
        T: Send + 'static,
        F: Fn(Task<T>) -> W + Send + Sync + 'static,
        W: Future<Output: IntoOutcome> + Send + 'static,
    {
        self.start_futures(waker, spawner, AsyncHandler::new(handler))
    }

    /// As [`futures`](Self::futures), with a handler that may have a hook for dead letters.
    ///
    /// # Errors
    /// As [`each`](Self::each).
    pub fn start_futures<T: Send + 'static>(
        self,
        waker: Waker,
        spawner: impl Spawn + 'static,
        handler: AsyncHandler<T>,
    ) -> Result<Executor<T>, BuildError> {
        let launcher = Launcher::Futures { handler, spawner: Box::new(spawner) };
        Ok(self.assemble_flights(waker, launcher)?)
    }

    /// Starts an executor whose records any thread takes from the [`Puller`], and finishes on any thread:
    /// up to [`concurrency`](Self::concurrency) at once that are taken or ready to be. Dead letters are
    /// handed out too, see [`Pulled::dead_letter`](crate::Pulled::dead_letter).
    ///
    /// `waker` wakes the thread that will drive the executor: when a record has ended.
    ///
    /// # Errors
    /// As [`each`](Self::each).
    pub fn pull<T: Send + 'static>(
        self,
        waker: Waker,
    ) -> Result<(Executor<T>, Puller<T>), BuildError> {
        let gate = Arc::new(Gate::new());
        let executor = self.assemble_flights(waker, Launcher::Pull(Arc::clone(&gate)))?;
        Ok((executor, Puller::new(gate)))
    }
}

#[cfg(all(test, not(loom)))]
impl<T: Send + 'static> Executor<T> {
    /// What the dispatcher counts is what is there, and a shard has its turn when it should.
    pub(super) fn check_flights(&self) -> Result<(), String> {
        let flights = self.flights.as_ref().ok_or("no flights")?;
        let mut by_epoch = vec![0; flights.by_epoch.len()];
        let mut flying = vec![0; self.shards.len()];
        for one in flights.table.iter().flatten() {
            by_epoch[usize::from(one.tag.epoch())] += 1;
            if !is_free(one.hash) {
                flying[shard_of(one.hash, self.shards.len()) as usize] += 1;
            }
        }
        if by_epoch != flights.by_epoch || flights.flying() > flights.concurrency {
            return Err(format!("{by_epoch:?} fly, {:?} counted", flights.by_epoch));
        }
        let mut turns = vec![0; self.shards.len()];
        let mut loose = 0;
        for index in &self.ready {
            match *index {
                LOOSE => loose += 1,
                index => turns[index as usize] += 1,
            }
        }
        if loose != flights.loose.len() {
            return Err(format!("{loose} turns of {} loose records", flights.loose.len()));
        }
        for (index, shard) in self.shards.iter().enumerate() {
            if flying[index] != shard.position
                || turns[index] != u32::from(shard.waits() && flying[index] == 0)
            {
                let (flying, turns) = (flying[index], turns[index]);
                return Err(format!("{shard:?} has {turns} turns and {flying} in flight"));
            }
        }
        Ok(())
    }

    pub(super) fn loose(&self) -> impl Iterator<Item = &Entry<T>> {
        self.flights.iter().flat_map(|flights| &flights.loose).map(|(_, entry)| entry)
    }
}
