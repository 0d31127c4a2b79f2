//! Epochs with limits on bytes and offsets, with a restored done-map, and with snapshots of their own.

use super::{Executor, Rejected, Route, Slot};
use crate::epoch::EpochId;
use crate::error::{InvalidSetting, Refused};
use crate::limits::Limits;
use crate::ring::Place;
use crate::snapshot::Snapshot;
use crate::window::{Progress, Window};
use std::ops::Range;

impl<T: Send + 'static> Executor<T> {
    /// As [`open`](Self::open), with limits on bytes and offsets, too.
    ///
    /// # Errors
    /// As [`open`](Self::open), and when another limit is 0.
    pub fn open_with(&mut self, start: i64, limits: &Limits) -> Result<EpochId, InvalidSetting> {
        self.restore(start, limits, &[])
    }

    /// As [`open_with`](Self::open_with), for an epoch of which an earlier life has finished the
    /// records `done`: when they are offered they are refused as [`Refused::Done`] and count as
    /// finished. See [`Window::restore`].
    ///
    /// # Errors
    /// As [`open_with`](Self::open_with).
    pub fn restore(
        &mut self,
        start: i64,
        limits: &Limits,
        done: &[Range<i64>],
    ) -> Result<EpochId, InvalidSetting> {
        self.adopt(Window::restore(start, limits, done)?)
    }

    /// As [`offer`](Self::offer), for an epoch whose bytes are limited; without such a limit `bytes`
    /// do not matter.
    ///
    /// # Errors
    /// [`Rejected`] hands the record back and names the limit. Before it names one of bytes or
    /// offsets, the watermarks that could make room are advanced.
    #[inline(always)]
    pub fn offer_sized(
        &mut self,
        id: EpochId,
        offset: i64,
        bytes: u32,
        route: Route,
        payload: T,
    ) -> Result<(), Rejected<T>> {
        let now = self.last_pass;
        let Some(slot) = self.accepting(id) else {
            return self.offer_at_gate(id, offset, bytes, route, payload);
        };
        Self::note_admission(slot, now);
        let place = match slot.window.admit_place_sized(offset, bytes) {
            Ok(place) => place,
            Err(refused) => match self.admit_again(id, offset, bytes, refused) {
                Ok(place) => place,
                Err(refused) => return Err(Rejected { payload, refused }),
            },
        };
        self.send(route, id.slot, &place, payload);
        Ok(())
    }

    /// As [`offer_all`](Self::offer_all), for records given with their bytes. As fast as that if the
    /// epoch has no limit but its capacity.
    ///
    /// # Errors
    /// As [`offer_all`](Self::offer_all).
    #[inline]
    pub fn offer_all_sized(
        &mut self,
        id: EpochId,
        records: impl IntoIterator<Item = (i64, u32, Route, T)>,
    ) -> Result<u32, Rejected<T>> {
        if !self.slot(id).is_some_and(|slot| slot.window.is_metered()) {
            let unsized_records = records.into_iter().map(|(at, _, route, load)| (at, route, load));
            return self.offer_all(id, unsized_records);
        }
        let mut count = 0;
        for (offset, bytes, route, payload) in records {
            self.offer_sized(id, offset, bytes, route, payload)?;
            count += 1;
        }
        Ok(count)
    }

    /// Once more, with what the newest watermarks give back.
    #[cold]
    pub(super) fn admit_again(
        &mut self,
        id: EpochId,
        offset: i64,
        bytes: u32,
        refused: Refused,
    ) -> Result<Place, Refused> {
        match refused {
            Refused::Bytes { .. } | Refused::Span { .. } => {
                self.progress(id);
            }
            Refused::Budget { .. } => {
                for slot in self.epochs.iter().flatten() {
                    if slot.window.is_metered() && !slot.closed {
                        slot.watermark.advance();
                    }
                }
            }
            _ => return Err(refused),
        }
        let slot = self.taking(id).ok_or(Refused::Closed)?;
        slot.window.admit_place_sized(offset, bytes)
    }

    /// Moves an epoch on to the source's real next offset, as [`Window::advance_to`] does: at once if
    /// all its records are finished, else as soon as they are.
    ///
    /// # Errors
    /// [`Refused::Backwards`]; [`Refused::Closed`] when the epoch takes no more records.
    pub fn move_to(&mut self, id: EpochId, next: i64) -> Result<Progress, Refused> {
        self.taking(id).ok_or(Refused::Closed)?.window.advance_to(next)
    }

    /// The slot of an epoch that takes records, straight or at the gate.
    fn taking(&mut self, id: EpochId) -> Option<&mut Slot> {
        self.slot_mut(id).filter(|slot| slot.accepts != 0 || slot.gated)
    }

    /// Advances the epoch's watermark and lists what is finished above it at the same moment; `None`
    /// for an epoch that is gone, and then `into` stays as it is.
    pub fn snapshot(&self, id: EpochId, into: &mut Snapshot) -> Option<Progress> {
        self.slot(id).map(|slot| slot.watermark.snapshot(into))
    }

    /// Bytes that the epoch holds; 0 if they are not limited, and for an epoch that is gone.
    pub fn held_bytes(&self, id: EpochId) -> u64 {
        self.slot(id).map_or(0, |slot| slot.window.held_bytes())
    }
}
