//! A lane as the dispatcher sees it: what is in it, what a record of it costs, how much more it takes.

use super::FREE;
use super::batching::Partial;
use super::parking::Hold;
use super::resize::Place;
use super::stall::Streak;
use crate::batch::Entry;
use crate::lane::{LaneTx, advance, distance};
use crate::sync::{Arc, Ordered64};
use crate::worker::Post;
use std::collections::VecDeque;
use std::thread::JoinHandle;
use std::time::Duration;

/// Slots of a lane.
pub(super) const LANE: u32 = 8_192;
/// Estimated work a lane may hold.
const DEPTH: Duration = Duration::from_millis(4);
/// Estimated backlog above which the next record goes to another lane.
const SPILL: Duration = Duration::from_micros(100);
/// Estimated work one claim should take.
const RUN: Duration = Duration::from_micros(2);
/// Most records one claim takes, unless a batch wants more.
const MOST_RUN: u32 = 64;
/// What a record is taken to cost before anything is known.
const FIRST_GUESS: Duration = Duration::from_micros(10);
/// The estimate forgets half of what it knows after so much busy time.
const MEMORY: Duration = Duration::from_millis(4);
/// After how many entries a lane is judged by how many of them came back unhandled, and the narrowest
/// it gets by that.
const JUDGED: u32 = 256;
const NARROWEST: u32 = 16;
/// A lane that has not moved for so long gives up what its worker has not claimed, if another
/// worker has nothing to do.
const STUCK: Duration = Duration::from_micros(300);
/// While records keep coming in, a worker that sleeps is woken when its lane holds so much
/// estimated work, or so many records. Else a cheap handler would be woken for every chunk, which
/// costs more than the chunk.
const WORTH_WAKING: Duration = Duration::from_micros(50);
const MANY: u32 = LANE / 4;

/// Hash of the entry at each position of a lane: the slots themselves may be the worker's. Written by
/// the dispatcher, as the slots are; a worker reads those of entries that it has claimed. So the flush
/// and the claim order a hash with its entry, and `done` and the reclaim order it with the next one.
/// Modelled by `lane_hashes` in `loom-tests`.
#[derive(Debug)]
pub struct Hashes<const LENGTH: usize = { LANE as usize }>([Ordered64; LENGTH]);

impl<const LENGTH: usize> Default for Hashes<LENGTH> {
    fn default() -> Self {
        Hashes(std::array::from_fn(|_| Ordered64::new(FREE as i64)))
    }
}

impl<const LENGTH: usize> Hashes<LENGTH> {
    /// The hash of the entry at a position.
    #[inline(always)]
    pub fn get(&self, position: u32) -> u64 {
        self.0[position as usize % LENGTH].get() as u64
    }

    /// Those from a position up to the end of the slots.
    #[inline(always)]
    pub(super) fn from(&self, position: u32) -> std::slice::Iter<'_, Ordered64> {
        self.0.get(position as usize % LENGTH..).unwrap_or_default().iter()
    }

    /// Sets it, before the entry is published.
    #[inline(always)]
    pub fn set(&self, position: u32, hash: u64) {
        self.0[position as usize % LENGTH].set(hash as i64);
    }
}

/// A lane with what the dispatcher believes about it.
#[derive(Debug)]
pub(super) struct Lane<T> {
    pub(super) tx: LaneTx<Entry<T>>,
    pub(super) place: Place,
    /// `None` before it is started and after it has ended.
    pub(super) thread: Option<JoinHandle<()>>,
    pub(super) post: Arc<Post>,
    pub(super) hashes: Arc<Hashes>,
    /// What waits for a full batch.
    pub(super) partial: Partial,
    /// What the worker handed back, until the dispatcher has dealt with it.
    pub(super) handed_back: Vec<(u32, u64, Entry<T>)>,
    /// Entries that were handed back unhandled, oldest first.
    pub(super) holds: VecDeque<Hold<T>>,
    /// The classes of `holds`, a bit each.
    pub(super) held: u128,
    /// Which records lie in it.
    pub(super) streaks: VecDeque<Streak>,
    /// Shards with waiting records that are tied to this lane.
    pub(super) tied: VecDeque<u32>,
    /// How long it has not moved, ns.
    pub(super) stuck_ns: f64,
    /// Its worker slept when something was published, and was not woken yet.
    pub(super) owed: bool,
    /// For how long, ns: it does not stay so, whatever the driver does.
    pub(super) owed_ns: f64,
    /// Its worker was woken and has not finished anything since: that time says nothing.
    pub(super) waking: bool,
    /// Recalled: takes nothing until it moves, or its tail would go back and forth.
    pub(super) closed: bool,
    /// Most pending records while many come back unhandled: what lies behind a failed record in the lane
    /// goes through it in vain, so where much fails little should lie.
    pub(super) cap: u32,
    /// Entries that came back since the cap was set, and how many of them unhandled.
    pub(super) back: u32,
    pub(super) bounced: u32,
    /// Busy time and records it was spent on, decaying: their quotient is a record's cost.
    pub(super) busy_ns: f64,
    pub(super) busy_records: f64,
    /// Most pending records; 0 while closed.
    pub(super) limit: u32,
    /// Pending records from which on others are considered; at most `limit`.
    pub(super) easy: u32,
    /// As `easy`, but not bounded by the limit: below it a lane without room is waited for.
    pub(super) patience: u32,
}

impl<T> Lane<T> {
    pub(super) fn new(tx: LaneTx<Entry<T>>, post: Arc<Post>) -> Self {
        Lane {
            tx,
            place: Place::Active,
            thread: None,
            post,
            hashes: Arc::default(),
            partial: Partial::default(),
            handed_back: Vec::new(),
            holds: VecDeque::new(),
            held: 0,
            streaks: VecDeque::new(),
            tied: VecDeque::new(),
            stuck_ns: 0.0,
            owed: false,
            owed_ns: 0.0,
            waking: false,
            closed: false,
            cap: LANE,
            back: 0,
            bounced: 0,
            busy_ns: FIRST_GUESS.as_nanos() as f64,
            busy_records: 1.0,
            limit: 0,
            easy: 0,
            patience: 0,
        }
    }

    /// Pushes into a lane that has room; returns the position after the entry.
    #[inline(always)]
    pub(super) fn push(&mut self, hash: u64, entry: Entry<T>) -> u32 {
        self.hashes.set(self.tx.end(), hash);
        let (epoch, index, lap) = entry.tag.key();
        self.note(epoch, (index, lap), self.tx.end(), 1);
        let pushed = self.tx.push(entry).is_ok();
        // The limit is never above the number of slots, and callers look at the room first.
        debug_assert!(pushed, "a lane with room has a free slot");
        self.tx.end()
    }

    /// The position after each entry in a range, and its hash.
    pub(super) fn hashes_between(&self, from: u32, to: u32) -> impl Iterator<Item = (u32, u64)> {
        (0..distance(from, to)).map(move |step| {
            let position = advance(from, step);
            (advance(position, 1), self.hash_at(position))
        })
    }

    /// The hash of the entry at a position.
    pub(super) fn hash_at(&self, position: u32) -> u64 {
        self.hashes.get(position)
    }

    /// Records it has room for.
    #[inline(always)]
    pub(super) fn room(&self) -> u32 {
        self.limit.saturating_sub(self.tx.pending())
    }

    /// Whether it should be filled further, or waited for, before another lane is considered.
    #[inline(always)]
    pub(super) fn is_preferred(&self) -> bool {
        self.tx.pending() < self.patience
    }

    pub(super) fn close(&mut self) {
        self.closed = true;
        (self.limit, self.easy, self.patience) = (0, 0, 0);
    }

    pub(super) fn is_stuck(&self) -> bool {
        self.place == Place::Active
            && !self.closed
            && self.tx.in_flight() > 0
            && self.stuck_ns > STUCK.as_nanos() as f64
    }

    pub(super) fn cost_ns(&self) -> f64 {
        // Never zero: records may be finished faster than the clock ticks.
        (self.busy_ns / self.busy_records.max(f64::MIN_POSITIVE)).max(0.1)
    }

    pub(super) fn backlog_ns(&self) -> f64 {
        f64::from(self.tx.pending()) * self.cost_ns()
    }

    /// Takes back what the worker has finished in the `elapsed` time since the last look.
    #[inline]
    pub(super) fn refresh(&mut self, elapsed_ns: f64, least: u32) {
        // What the worker cannot see does not keep it busy.
        let before = self.tx.in_flight();
        if self.owed {
            self.owed_ns += elapsed_ns;
            if self.owed_ns > WORTH_WAKING.as_nanos() as f64 {
                self.wake();
            }
        }
        if before > 0 {
            let (hashes, handed_back) = (&self.hashes, &mut self.handed_back);
            let finished = self.tx.reclaim_with(|position, entry| {
                if entry.back().is_some() {
                    handed_back.push((position, hashes.get(position), entry));
                }
            });
            self.trim_streaks();
            self.back += finished;
            if self.back >= JUDGED {
                self.set_cap(least);
            }
            self.learn(elapsed_ns, before, f64::from(finished));
        } else {
            self.stuck_ns = 0.0;
            self.closed = false;
        }
        self.set_limits(least);
    }

    /// Learns from what was `finished` of the `before` records in the elapsed time.
    pub(super) fn learn(&mut self, elapsed_ns: f64, before: u32, finished: f64) {
        if finished > 0.0 {
            self.stuck_ns = 0.0;
            self.closed = false;
            if std::mem::take(&mut self.waking) {
                return;
            }
        } else if self.owed {
            return;
        } else {
            self.stuck_ns += elapsed_ns;
        }
        if finished == f64::from(before) && elapsed_ns > finished * self.cost_ns() {
            // It ran dry at some moment in between: that says nothing unless it was fast.
            return;
        }
        self.busy_ns += elapsed_ns;
        self.busy_records += finished;
        if self.busy_ns > MEMORY.as_nanos() as f64 {
            self.busy_ns /= 2.0;
            self.busy_records /= 2.0;
        }
    }

    /// Halves the cap when a quarter of the entries came back unhandled, else doubles it.
    fn set_cap(&mut self, least: u32) {
        let wider = self.cap.saturating_mul(2).min(LANE);
        let narrower = (self.cap / 2).max((2 * least).max(NARROWEST));
        self.cap = if self.bounced > self.back / 4 { narrower.min(LANE) } else { wider };
        (self.back, self.bounced) = (0, 0);
    }

    pub(super) fn set_limits(&mut self, least: u32) {
        let cost = self.cost_ns();
        // Casts saturate.
        let records = |time: Duration| (time.as_nanos() as f64 / cost) as u32;
        self.limit = records(DEPTH).clamp((2 * least).max(3), LANE).min(self.cap);
        self.patience = records(SPILL).max(1);
        if self.closed {
            (self.limit, self.patience) = (0, 0);
        }
        // While something is held each record has to be looked at.
        self.easy = if self.held == 0 { self.limit.min(self.patience) } else { 0 };
        self.tx.set_run(records(RUN).clamp(1, MOST_RUN));
        if self.partial.batch > 0 {
            self.set_gather_limits();
        }
        if self.place != Place::Active {
            (self.limit, self.easy, self.patience) = (0, 0, 0);
        }
    }

    /// Publishes what was pushed. Wakes the worker if it sleeps; with `more` to come only if it is
    /// worth it already.
    #[inline]
    pub(super) fn flush(&mut self, more: bool) {
        self.owed |= self.tx.flush();
        if self.owed && (!more || self.is_worth_waking()) {
            self.wake();
        }
    }

    /// Tells the worker to end when the lane is empty.
    pub(super) fn stop(&mut self) {
        self.flush(false);
        self.tx.stop();
        self.unpark();
    }

    pub(super) fn unpark(&self) {
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    pub(super) fn is_worth_waking(&self) -> bool {
        self.tx.pending() >= MANY || self.backlog_ns() >= WORTH_WAKING.as_nanos() as f64
    }

    #[cold]
    pub(super) fn wake(&mut self) {
        self.owed = false;
        self.owed_ns = 0.0;
        self.waking = true;
        self.unpark();
    }
}
