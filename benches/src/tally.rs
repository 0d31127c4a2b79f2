//! A count of handled records that costs a handler no more than a variable of its thread would.

use std::{
    cell::Cell,
    fmt,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
};

use crossbeam_utils::CachePadded;

/// Adds up what the workers of one executor handle.
///
/// Each thread has a place of its own. The rivals count in variables of their worker loops; a counter that is shared, or
/// a locked instruction for each call, would be a good part of the cost of a handler call that does nothing.
pub struct Tally {
    places: Box<[CachePadded<AtomicU64>]>,
    taken: AtomicUsize,
}

impl fmt::Debug for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tally").field("total", &self.total()).finish_non_exhaustive()
    }
}

thread_local! {
    /// The place of this thread. A worker's thread serves one executor all its life, so there is one tally.
    static PLACE: Cell<usize> = const { Cell::new(usize::MAX) };
}

impl Tally {
    /// For so many threads, each of which must not add to any other tally.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Self {
            places: (0..threads).map(|_| CachePadded::default()).collect(),
            taken: AtomicUsize::new(0),
        }
    }

    /// Counts `records` more.
    ///
    /// # Panics
    /// If more threads call this than the tally is for.
    #[inline]
    pub fn add(&self, records: u64) {
        let mut place = PLACE.get();
        if place == usize::MAX {
            place = self.taken.fetch_add(1, Ordering::Relaxed);
            PLACE.set(place);
        }
        // Relaxed, and no addition in one step: only this thread writes here.
        let place = &self.places[place];
        place.store(place.load(Ordering::Relaxed) + records, Ordering::Relaxed);
    }

    /// All that was counted by what has happened before, as the handlers of records below a watermark have.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.places.iter().map(|place| place.load(Ordering::Relaxed)).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn the_total_is_that_of_all_threads() {
        let tally = Tally::new(4);
        thread::scope(|scope| {
            for thread in 1..=4 {
                let tally = &tally;
                scope.spawn(move || (0..1_000).for_each(|_| tally.add(thread)));
            }
        });
        assert_eq!(tally.total(), 10_000);
    }
}
