//! The move-only token of one admitted record.

use crate::ring::{Mark, Place};
use crate::sync::Arc;
use crate::window::Shared;

/// The right, and the duty, to finish one admitted record.
///
/// [`finish`](Ticket::finish) consumes it, so that a record cannot be finished twice; it belongs to
/// its epoch's ring, so that a late ticket of a revoked epoch touches nothing but the orphan.
///
/// Dropping a ticket unfinished is a failure, never a success: the watermark stops below the record
/// and [`Progress::failed`](crate::Progress::failed) names it.
///
/// ```
/// use plimsoll_engine::Window;
///
/// let mut window = Window::open(0, 16)?;
/// drop(window.admit(0).unwrap());
/// let progress = window.watermark().advance();
/// assert_eq!((progress.watermark, progress.failed), (0, Some(0)));
/// # Ok::<(), plimsoll_engine::InvalidSetting>(())
/// ```
///
/// A ticket cannot be used after it was finished:
/// ```compile_fail
/// # use plimsoll_engine::Window;
/// # let mut window = Window::open(0, 16).unwrap();
/// let ticket = window.admit(0).unwrap();
/// ticket.finish();
/// ticket.finish(); // error: use of moved value
/// ```
#[must_use = "a ticket that is dropped unfinished is a failure: it holds the watermark"]
#[derive(Debug)]
pub struct Ticket {
    shared: Arc<Shared>,
    /// Taken by `finish`, or by the drop.
    place: Option<Place>,
    offset: i64,
}

impl Ticket {
    pub(crate) fn new(shared: Arc<Shared>, place: Place, offset: i64) -> Self {
        Ticket { shared, place: Some(place), offset }
    }

    /// Marks the record as done. Lock-free: one store, and a fence if the window was opened with a
    /// [waker](crate::Limits::waker). Everything the caller did before is visible
    /// to whoever reads a watermark above the record.
    pub fn finish(self) {
        self.finish_with(Mark::Publish);
    }

    /// The broken twin of [`finish`](Self::finish), for the model that must fail.
    #[cfg(loom)]
    pub fn finish_weakly(self) {
        self.finish_with(Mark::Weak);
    }

    /// The broken twin of a drop, for the model that must fail.
    #[cfg(loom)]
    pub fn drop_weakly(mut self) {
        if let Some(place) = self.place.take() {
            self.shared.fail_weakly(&place);
        }
    }

    #[inline]
    fn finish_with(mut self, order: Mark) {
        if let Some(place) = self.place.take() {
            self.shared.finish(&place, order);
            self.shared.tell();
        }
    }

    /// The broken twin of [`finish`](Self::finish) that wakes without a fence, for the model that must
    /// fail.
    #[cfg(loom)]
    pub fn finish_quietly(mut self) {
        if let Some(place) = self.place.take() {
            self.shared.finish(&place, Mark::Publish);
            self.shared.tell_weakly();
        }
    }

    /// The record's offset.
    pub fn offset(&self) -> i64 {
        self.offset
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(place) = self.place.take() {
            self.shared.fail(&place);
        }
    }
}
