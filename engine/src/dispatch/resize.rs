//! Workers come and go while the executor runs.
//!
//! A worker that is to go takes nothing new: what it has not claimed is recalled, and its lane is
//! stopped. Its shards move on as they always do, when what it has claimed is done, so no order can be
//! lost. When it has ended and nothing waits for it any more its place is **vacant**. The next worker
//! takes the place, with a lane whose positions go on where those of the old one ended: whatever is
//! remembered of a position in the old lane counts as reached in the new one.
//!
//! A worker that never returns keeps its place, and the shards of what it has claimed. Others go on.

use super::batching::BatchOf;
use super::builder::{BuildError, MOST_WORKERS, within};
use super::lane::{LANE, Lane};
use super::{Executor, parking};
use crate::error::InvalidSetting;
use crate::lane::{Order, lane_from};
use crate::sync::Arc;
use crate::worker::{Common, Grouping, Handler, Post, Worker};
use std::time::Duration;

/// A worker that has not finished anything for so long is the first to go.
const HANGS: Duration = Duration::from_secs(1);

/// Whether a lane has a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Active,
    /// Its worker is to go.
    Retiring,
    /// It has none.
    Vacant,
}

/// What each lane and its worker is made of.
#[derive(Debug)]
pub(super) struct Recipe {
    pub(super) name: String,
    pub(super) batch: u32,
    pub(super) least: u32,
    pub(super) gathers: bool,
    /// Kind and bytes of a batch, if it is put together in a way of its own.
    pub(super) groups: Option<(BatchOf, usize)>,
    pub(super) shards: usize,
}

impl Recipe {
    /// A lane whose first position is `from`, and its worker; `None` without the memory.
    pub(super) fn make<T: Send + 'static>(
        &self,
        handler: &Arc<Handler<T>>,
        common: &Arc<Common>,
        from: u32,
    ) -> Option<(Lane<T>, Worker<T>)> {
        let (tx, rx) = lane_from(LANE, Order::Right, from)?;
        let post = Arc::new(Post::default());
        let mut lane = Lane::new(tx, Arc::clone(&post));
        lane.partial.batch = if self.gathers { self.least } else { 0 };
        let grouping = self
            .groups
            .map(|(of, bytes)| Grouping::new(of, bytes, Arc::clone(&lane.hashes), self.shards));
        let worker = Worker::new(rx, Arc::clone(handler), Arc::clone(common), post, self.batch);
        lane.set_limits(self.least);
        Some((lane, worker.group(grouping, self.gathers)))
    }
}

impl<T: Send + 'static> Executor<T> {
    /// Workers that take records, 0 if there are futures or pulled records instead: those the executor was built with, or what
    /// [`set_workers`](Self::set_workers) made of it.
    pub fn workers(&self) -> usize {
        self.lanes.iter().filter(|lane| lane.place == Place::Active).count()
    }

    /// Changes the number of workers, at most 4,096, without loss of work or order.
    ///
    /// New ones begin at once. One that is to go finishes the records it has taken; the rest of its
    /// work goes to the others. This does not wait for it: a worker that never returns does not hold
    /// it up, and stays among [`running_workers`](Self::running_workers). Workers that have not
    /// finished anything for a second are the first to go, so a smaller number and the old one again
    /// replace those that hang. Together with those that do not come back there are at most 4,096.
    ///
    /// The memory of the most workers there were at a time is kept.
    ///
    /// # Errors
    /// [`BuildError`] when the number cannot be had, when the executor was
    /// [stopped](Self::stop) or has no workers but futures or pulled records, or when the operating system refuses a thread; then there are fewer
    /// than asked for, and the others work.
    pub fn set_workers(&mut self, workers: usize) -> Result<(), BuildError> {
        // At most 4,096.
        let wanted = within("workers", workers, MOST_WORKERS)? as usize;
        if self.stopped || self.flights.is_some() {
            let reason = match self.flights {
                None => "the executor was stopped",
                Some(_) => "futures and pulled records have none; see `concurrency`",
            };
            return Err(InvalidSetting::new("workers", reason).into());
        }
        self.retire_down_to(wanted);
        while self.workers() < wanted {
            let (index, worker) = self.add_worker()?;
            let name = format!("{}-worker-{index}", self.recipe.name);
            let spawned = std::thread::Builder::new().name(name).spawn(move || worker.work());
            match spawned {
                Ok(thread) => self.lanes[index].thread = Some(thread),
                Err(source) => {
                    self.lanes[index].place = Place::Vacant;
                    self.lanes[index].set_limits(self.least);
                    return Err(BuildError::Spawn { worker: index, source });
                }
            }
        }
        Ok(())
    }

    /// A further lane, in a vacant place if there is one, and its worker without a thread.
    pub(super) fn add_worker(&mut self) -> Result<(usize, Worker<T>), InvalidSetting> {
        self.vacate();
        let vacant = self.lanes.iter().position(|lane| lane.place == Place::Vacant);
        let from = vacant.map_or(0, |index| self.lanes[index].tx.end());
        let (lane, worker) = self
            .recipe
            .make(&self.handler, &self.common, from)
            .ok_or_else(|| InvalidSetting::new("workers", "no memory for so many"))?;
        let index = vacant.unwrap_or(self.lanes.len());
        if index >= MOST_WORKERS as usize {
            let leaving = self.retiring;
            let reason = format!("{leaving} that were to go have not come back from a handler");
            return Err(InvalidSetting::new("workers", reason));
        }
        match vacant {
            Some(index) => self.lanes[index] = lane,
            None => self.lanes.push(lane),
        }
        Ok((index, worker))
    }

    /// Asks workers to go until there are `wanted`: those first that have not finished anything for
    /// longest, if that is long, then the last ones.
    pub(super) fn retire_down_to(&mut self, wanted: usize) {
        let mut surplus = self.workers().saturating_sub(wanted);
        let hangs =
            |lane: &Lane<T>| lane.tx.pending() > 0 && lane.stuck_ns > HANGS.as_nanos() as f64;
        for hanging in [true, false] {
            for index in (0..self.lanes.len()).rev() {
                let lane = &self.lanes[index];
                if surplus > 0 && lane.place == Place::Active && (!hanging || hangs(lane)) {
                    surplus -= 1;
                    self.retire(index);
                }
            }
        }
    }

    fn retire(&mut self, index: usize) {
        self.lanes[index].place = Place::Retiring;
        self.retiring += 1;
        self.recall(index);
        let lane = &mut self.lanes[index];
        lane.set_limits(self.recipe.least);
        lane.stop();
    }

    /// Notes which places are vacant now.
    pub(super) fn vacate(&mut self) {
        if self.retiring == 0 {
            return;
        }
        for lane in &mut self.lanes {
            if lane.place == Place::Retiring && lane.is_over() {
                lane.place = Place::Vacant;
                self.retiring -= 1;
                // It has let go of the lane as the last thing it did. Not joined: what the user's
                // thread-local values do when they go may take its time.
                lane.thread = None;
            }
        }
    }
}

impl<T> Lane<T> {
    /// Whether its worker has ended and nothing waits for it any more.
    fn is_over(&self) -> bool {
        self.tx.is_abandoned()
            && self.tx.pending() == 0
            && self.handed_back.is_empty()
            && self.tied.is_empty()
            && !parking::holds_any(self)
    }
}
