//! What bounds a window beside its capacity, and the meter of its bytes.
//!
//! Bytes are not kept per record. The admitting side sums them up and notes the sum whenever it has
//! grown by a 64th of the limit, together with the sequence up to which it counts; the scan gives back
//! what the notes say that it has passed, and everything when it has passed everything. So 128 notes
//! are enough for a window of any capacity, bytes come back at most a 64th of the limit late, and an
//! empty window holds none.

use crate::budget::Budget;
#[cfg(loom)]
use crate::budget::Flaw;
use crate::error::{InvalidSetting, Refused};
use crate::ring::boxed;
use crate::sync::{AtomicU64, Ordered64, Ordering};
use crate::wake::Waker;

/// Notes of a meter. Twice as many as can be open, as each but the last holds a grain.
#[cfg(not(loom))]
const NOTES: u32 = 128;
#[cfg(loom)]
const NOTES: u32 = 2;
/// Parts of the limit that one note holds at least.
const GRAINS: u64 = 64;

/// What bounds a window: records, bytes, the span of their offsets, and a budget that it shares with
/// other windows.
///
/// ```
/// use plimsoll_engine::{Limits, Refused, Window};
///
/// let mut window = Window::open_with(0, &Limits::new(1_024).bytes(1_000).span(50))?;
/// let first = window.admit_sized(0, 800).unwrap();
/// let refused = window.admit_sized(1, 300).unwrap_err();
/// assert_eq!(refused, Refused::Bytes { bytes: 300, held: 800, limit: 1_000 });
/// let refused = window.admit_sized(51, 100).unwrap_err();
/// assert_eq!(refused, Refused::Span { offset: 51, watermark: 0, span: 50 });
/// first.finish();
/// # Ok::<(), plimsoll_engine::InvalidSetting>(())
/// ```
#[derive(Debug, Clone)]
pub struct Limits {
    pub(crate) records: u32,
    pub(crate) bytes: Option<u64>,
    pub(crate) span: Option<u64>,
    pub(crate) budget: Option<Budget>,
    pub(crate) waker: Option<Waker>,
}

impl Limits {
    /// At most `records` admitted and not yet passed by the watermark; no other limit.
    pub fn new(records: u32) -> Self {
        Limits { records, bytes: None, span: None, budget: None, waker: None }
    }

    /// Most bytes of the records that are admitted and not yet passed. A record that is larger is
    /// admitted when no other bytes are held. Passed bytes count for up to a 64th of the limit longer
    /// than they are held, as long as the window is not empty.
    #[must_use]
    pub fn bytes(mut self, bytes: u64) -> Self {
        self.bytes = Some(bytes);
        self
    }

    /// How far an admitted offset may be above the watermark. A record that is further away, behind a
    /// gap, is admitted when the window is empty.
    #[must_use]
    pub fn span(mut self, offsets: u64) -> Self {
        self.span = Some(offsets);
        self
    }

    /// The budget from which the window's bytes are taken, too.
    #[must_use]
    pub fn budget(mut self, budget: &Budget) -> Self {
        self.budget = Some(budget.clone());
        self
    }

    /// Who is woken by tickets that end while it sleeps because its record was refused: see
    /// [`Window::wait_room`](crate::Window::wait_room). Each end then costs a fence. An executor wakes
    /// its own driver and does not need it.
    #[must_use]
    pub fn waker(mut self, waker: Waker) -> Self {
        self.waker = Some(waker);
        self
    }

    pub(crate) fn check(&self) -> Result<(), InvalidSetting> {
        if self.records == 0 {
            return Err(InvalidSetting::new("window", "must hold at least 1 record"));
        }
        if self.bytes == Some(0) {
            return Err(InvalidSetting::new("bytes", "must be at least 1"));
        }
        if self.span == Some(0) {
            return Err(InvalidSetting::new("span", "must be at least 1 offset"));
        }
        Ok(())
    }
}

/// The bytes of one window, as its two sides share them.
#[derive(Debug)]
pub(crate) struct Meter {
    limit: u64,
    budget: Option<Budget>,
    grain: u64,
    /// Sequence up to which a note counts, and the sum up to there.
    notes: Box<[(Ordered64, Ordered64)]>,
    /// Notes written. By the admitting side only.
    noted: AtomicU64,
    /// Notes read, which may be written again. Under the cursor's lock only.
    read: AtomicU64,
    /// Bytes of all records that are admitted. By the admitting side only.
    taken: AtomicU64,
    /// Bytes given back. Under the cursor's lock only.
    given: AtomicU64,
}

/// Where the reader of the notes stands.
#[derive(Debug, Default)]
pub(crate) struct Settled {
    notes: u64,
    given: u64,
    ended: bool,
}

/// The admitting side's sums.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    sum: u64,
    /// Sum of the last note.
    noted_sum: u64,
    noted: u64,
}

impl Meter {
    /// `Ok(None)` when no bytes are limited; `Err(())` when the memory cannot be had.
    pub(crate) fn new(limits: &Limits) -> Result<Option<Self>, ()> {
        let budget = limits.budget.clone();
        let Some(most) = limits.bytes.into_iter().chain(budget.as_ref().map(Budget::bytes)).min()
        else {
            return Ok(None);
        };
        let notes = boxed(NOTES, || (Ordered64::new(0), Ordered64::new(0))).ok_or(())?;
        if let Some(budget) = &budget {
            budget.join();
        }
        Ok(Some(Meter {
            limit: limits.bytes.unwrap_or(u64::MAX),
            budget,
            grain: (most / GRAINS).max(1),
            notes,
            noted: AtomicU64::new(0),
            read: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            given: AtomicU64::new(0),
        }))
    }

    /// Bytes that are taken and not given back.
    pub(crate) fn held(&self, taken: &Taken) -> u64 {
        // Acquire: pairs with the Release in `settle`; what is read as given back is back in the
        // budget, so that taking it again does not count it twice.
        taken.sum - self.given.load(Ordering::Acquire)
    }

    /// Takes the bytes of a record that is about to be admitted.
    pub(crate) fn take(&self, taken: &Taken, bytes: u32) -> Result<(), Refused> {
        let (bytes, held) = (u64::from(bytes), self.held(taken));
        if held > 0 && held + bytes > self.limit {
            return Err(Refused::Bytes { bytes, held, limit: self.limit });
        }
        match &self.budget {
            Some(budget) if !budget.take(held, bytes) => {
                Err(Refused::Budget { bytes, used: budget.used(), budget: budget.bytes() })
            }
            _ => Ok(()),
        }
    }

    /// Notes the bytes of the record that was just admitted as the last of `admitted`.
    pub(crate) fn note(&self, taken: &mut Taken, bytes: u32, admitted: u64) {
        taken.sum += u64::from(bytes);
        // Release: pairs with the Acquire in `settle`; whoever sees these bytes also sees that their
        // record is admitted.
        self.taken.store(taken.sum, Ordering::Release);
        // Acquire: pairs with the Release in `settle`; the note was read for the last time.
        let free = taken.noted - self.read.load(Ordering::Acquire) < self.notes.len() as u64;
        if taken.sum - taken.noted_sum >= self.grain && free {
            let (end, sum) = self.at(taken.noted);
            end.set(admitted as i64);
            sum.set(taken.sum as i64);
            taken.noted_sum = taken.sum;
            taken.noted += 1;
            self.noted.store(taken.noted, self.noting());
        }
    }

    fn noting(&self) -> Ordering {
        #[cfg(loom)]
        if self.budget.as_ref().is_some_and(|budget| budget.has(Flaw::MuteNotes)) {
            return Ordering::Relaxed;
        }
        // Release: pairs with the Acquire in `settle`; the note is written.
        Ordering::Release
    }

    fn at(&self, note: u64) -> &(Ordered64, Ordered64) {
        &self.notes[(note % self.notes.len() as u64) as usize]
    }

    /// Gives back the bytes of what the scan has passed.
    pub(crate) fn settle(&self, settled: &mut Settled, passed: u64, admitted: &AtomicU64) {
        if settled.ended {
            return;
        }
        // Acquire: pairs with the Release in `note`; the notes are written.
        let noted = self.noted.load(Ordering::Acquire);
        let mut sum = settled.given;
        while settled.notes < noted {
            let note = self.at(settled.notes);
            if note.0.get() as u64 > passed {
                break;
            }
            // A note may come after everything was given back in the middle of it.
            sum = sum.max(note.1.get() as u64);
            settled.notes += 1;
        }
        // Release: pairs with the Acquire in `note`.
        self.read.store(settled.notes, Ordering::Release);
        // Acquire: pairs with the Release in `note`: the record of the last of these bytes is
        // admitted, and the next line sees that.
        let taken = self.taken.load(Ordering::Acquire);
        // Acquire: not needed beyond what the line above has ordered.
        if admitted.load(Ordering::Acquire) == passed {
            sum = sum.max(taken);
        }
        self.give(settled, sum);
    }

    fn give(&self, settled: &mut Settled, sum: u64) {
        if sum > settled.given {
            #[cfg(loom)]
            if self.budget.as_ref().is_some_and(|budget| budget.has(Flaw::EarlyRoom)) {
                self.given.store(sum, Ordering::Release);
            }
            if let Some(budget) = &self.budget {
                budget.give(sum - settled.given);
            }
            settled.given = sum;
            // Release: pairs with the Acquire in `held`; the budget has them back.
            self.given.store(sum, Ordering::Release);
        }
    }

    /// Gives everything back, and nothing from then on.
    pub(crate) fn end(&self, settled: &mut Settled, taken: &Taken) {
        if !settled.ended {
            self.give(settled, taken.sum);
            settled.ended = true;
            if let Some(budget) = &self.budget {
                budget.leave();
            }
        }
    }
}
