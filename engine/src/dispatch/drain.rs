//! The end: everything that was admitted runs out, or time does; then who did what is reported.

use super::Executor;
use super::stall::Stall;
use crate::epoch::EpochId;
use crate::wake::Waiter;
use std::time::Duration;

/// The longest sleep of a drain.
const NAP: Duration = Duration::from_millis(1);

/// Where an executor's epochs and workers stood.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Every epoch that was open, in no order.
    pub epochs: Vec<EpochReport>,
    /// Workers whose thread has not ended. Before [`Executor::stop`] these are all; after it, those
    /// that have not come back from a handler.
    pub running_workers: usize,
}

impl Report {
    /// Whether every admitted record is finished.
    pub fn is_drained(&self) -> bool {
        self.epochs.iter().all(|epoch| epoch.unfinished == 0)
    }
}

/// Where one epoch stood.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EpochReport {
    /// The epoch.
    pub epoch: EpochId,
    /// The offset to commit.
    pub watermark: i64,
    /// Records below it.
    pub finished: u64,
    /// Finished records above it: their effects will be repeated, unless what reads the source next
    /// knows of them.
    pub finished_above: u64,
    /// Records that were admitted and not finished.
    pub unfinished: u64,
    /// The first of them.
    pub first: Option<Stall>,
}

impl<T: Send + 'static> Executor<T> {
    /// Where all open epochs and the workers stand. Costs as much as [`stalls`](Self::stalls).
    pub fn report(&self) -> Report {
        let stalls = self.stalls();
        let mut epochs = Vec::new();
        for (index, slot) in self.epochs.iter().enumerate() {
            let Some(slot) = slot.as_ref().filter(|slot| !slot.closed) else { continue };
            // At most 2^16 epochs.
            let epoch = EpochId { slot: index as u16, generation: slot.generation };
            let progress = slot.watermark.advance();
            let first = stalls.iter().find(|stall| stall.epoch == epoch);
            // What ended between the two looks counts as finished.
            let first = first.filter(|_| progress.unfinished > 0).cloned();
            let finished_above = first.as_ref().map_or(0, |first| first.finished_behind);
            epochs.push(EpochReport {
                epoch,
                watermark: progress.watermark,
                finished: progress.passed,
                finished_above: finished_above.min(progress.unfinished),
                unfinished: progress.unfinished.saturating_sub(finished_above),
                first,
            });
        }
        Report { epochs, running_workers: self.running_workers() }
    }

    /// Whether nothing more will end before `deadline` by itself: nothing is queued or with a worker,
    /// and no parked record is due by then.
    pub fn is_quiet_until(&self, deadline: Duration) -> bool {
        !self.busy() && self.next_due().is_none_or(|due| due > deadline)
    }

    /// Ends the intake of all epochs and drives the executor until every admitted record is finished,
    /// until nothing more can end before the budget is used up (what is parked for longer is not tried
    /// early), or until that is so; then says where everything stands. The epochs stay open, so that
    /// their watermarks can still be read, and the workers stay.
    ///
    /// `clock` is the time of [`pass`](Self::pass); `waiter` is the one whose
    /// [`Waker`](crate::Waker) the executor was built with. With a budget of zero it only looks.
    pub fn drain(
        &mut self,
        waiter: &Waiter,
        mut clock: impl FnMut() -> Duration,
        budget: Duration,
    ) -> Report {
        let deadline = clock().saturating_add(budget);
        for id in self.open_epochs() {
            self.stop_intake(id);
        }
        loop {
            let now = clock();
            self.pass(now);
            self.flush();
            let drained = self
                .open_epochs()
                .into_iter()
                .all(|id| self.progress(id).is_none_or(|progress| progress.unfinished == 0));
            if drained || now >= deadline || self.is_quiet_until(deadline) {
                return self.report();
            }
            let due = self.next_due().unwrap_or(Duration::MAX).min(deadline);
            let limit = due.saturating_sub(now).min(NAP);
            waiter.wait(limit, || self.finished_something());
        }
    }

    /// [Drains](Self::drain), fences all epochs so that nothing starts any more, tells the workers to
    /// end, and gives those that are in a handler the rest of the budget, and at least 10 ms, to come
    /// back. It does not wait longer for a handler that does not return: its thread is left to itself,
    /// and what it does touches nothing. A budget of zero stops now.
    pub fn shutdown(
        mut self,
        waiter: &Waiter,
        mut clock: impl FnMut() -> Duration,
        budget: Duration,
    ) -> Report {
        let begun = clock();
        let mut report = self.drain(waiter, &mut clock, budget);
        for id in self.open_epochs() {
            self.close(id);
        }
        self.stop();
        let least = clock().saturating_add(Duration::from_millis(10));
        let deadline = begun.saturating_add(budget).max(least);
        loop {
            let now = clock();
            self.pass(now);
            report.running_workers = self.running_workers();
            if report.running_workers == 0 || now >= deadline {
                return report;
            }
            waiter.wait(deadline.saturating_sub(now).min(NAP), || false);
        }
    }

    fn open_epochs(&self) -> Vec<EpochId> {
        let open = |(index, slot): (usize, &Option<super::Slot>)| {
            let slot = slot.as_ref().filter(|slot| !slot.closed)?;
            // At most 2^16 epochs.
            Some(EpochId { slot: index as u16, generation: slot.generation })
        };
        self.epochs.iter().enumerate().filter_map(open).collect()
    }
}
