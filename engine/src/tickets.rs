//! Tickets of a batch of records, finished by masks.

use crate::ring::{Mark, Place};
use crate::sync::Arc;
use crate::window::Shared;

/// The right, and the duty, to finish up to 64 records that were admitted together.
///
/// Bit *i* of a mask stands for the *i*-th of them, whatever was split off. What is not finished when
/// this is dropped has failed, as with a [`Ticket`](crate::Ticket). Nothing can be finished twice: a
/// record that was finished or split off is not in here any more.
///
/// ```
/// use plimsoll_engine::Window;
///
/// let mut window = Window::open(0, 16)?;
/// let mut tickets = window.admit_batch(&[0, 1, 2, 5]).unwrap();
/// let elsewhere = tickets.split_off(0b1000);
/// assert_eq!(tickets.finish_mask(0b0011), 0b0011);
/// std::thread::spawn(move || elsewhere.finish_all()).join().unwrap();
/// assert_eq!(window.watermark().advance().watermark, 2);
/// assert_eq!(tickets.finish_mask(u64::MAX), 0b0100);
/// assert_eq!(window.watermark().advance().watermark, 6);
/// # Ok::<(), plimsoll_engine::InvalidSetting>(())
/// ```
///
/// They cannot be used after all of them were finished:
/// ```compile_fail
/// # use plimsoll_engine::Window;
/// # let mut window = Window::open(0, 16).unwrap();
/// let tickets = window.admit_batch(&[0, 1]).unwrap();
/// tickets.finish_all();
/// tickets.finish_all(); // error: use of moved value
/// ```
#[must_use = "tickets that are dropped unfinished are failures: they hold the watermark"]
#[derive(Debug)]
pub struct Tickets {
    shared: Arc<Shared>,
    /// The first one's.
    place: Place,
    /// How many there were when they were admitted.
    len: u32,
    open: u64,
}

impl Tickets {
    /// Most records of a batch.
    pub const MOST: usize = 64;

    /// For `len` places from `place` on, at most 64 and no more than the ring has.
    pub(crate) fn new(shared: Arc<Shared>, place: Place, len: u32) -> Self {
        let open = u64::MAX.checked_shr(u64::BITS - len).unwrap_or(0);
        Tickets { shared, place, len, open }
    }

    /// How many were admitted together: bits from this one on stand for nothing.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether none were: no offsets were given.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Those that are neither finished nor split off.
    pub fn open(&self) -> u64 {
        self.open
    }

    /// Marks records as done: those of the mask that are open. Returns which these were. One store for
    /// each, no lock. Everything the caller did before is visible to whoever reads a watermark above
    /// the record.
    pub fn finish_mask(&mut self, mask: u64) -> u64 {
        self.mark(mask, |shared, place| shared.finish(place, Mark::Publish))
    }

    /// Marks all that are open as done.
    pub fn finish_all(mut self) {
        self.finish_mask(u64::MAX);
    }

    /// The broken twin of [`finish_mask`](Self::finish_mask), for the model that must fail.
    #[cfg(loom)]
    pub fn finish_mask_weakly(&mut self, mask: u64) -> u64 {
        self.mark(mask, |shared, place| shared.finish(place, Mark::Weak))
    }

    /// Takes out the open ones of the mask, to be finished elsewhere. They keep their bits.
    pub fn split_off(&mut self, mask: u64) -> Tickets {
        let open = self.open & mask;
        self.open &= !mask;
        let place = self.place.copy();
        Tickets { shared: Arc::clone(&self.shared), place, len: self.len, open }
    }

    fn mark(&mut self, mask: u64, mark: impl Fn(&Shared, &Place)) -> u64 {
        let marked = self.open & mask;
        // Before the marks: none may come twice, whatever happens.
        self.open &= !mask;
        let capacity = self.shared.capacity();
        let mut left = marked;
        while left != 0 {
            let bit = left.trailing_zeros();
            left &= left - 1;
            mark(&self.shared, &self.place.plus(bit, capacity));
        }
        if marked != 0 {
            self.shared.tell();
        }
        marked
    }
}

impl Drop for Tickets {
    fn drop(&mut self) {
        self.mark(u64::MAX, Shared::fail);
    }
}
