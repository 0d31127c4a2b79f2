//! Conflation: of the waiting records of one key only the newest is handled.
//!
//! It happens where the dispatcher keeps records that wait: in the lists of the shards, and behind a
//! parked record. There a key has at most one record of an epoch that conflation knows of: an older
//! one that comes beside it (recalled, or handed back by a worker), or that it finds there, is
//! **carried** by it. Only the place in the ring is kept of a carried record; it is marked when the
//! dispatcher knows that the carrier has ended well. So the watermark cannot pass it before.
//!
//! A carrier is sent as a tracked entry, so that it comes back whatever becomes of it. While it is on
//! its way nothing is added to what it carries.

use super::{Executor, is_free, shard_of};
use crate::batch::{Back, Entry, class_of};
use crate::ring::{Mark, Place};
use crate::shard::{Shard, Waiting};
use std::collections::{HashMap, HashSet};
use std::num::NonZeroU8;

/// A carrier: the slot of its epoch, and its slot and lap in the ring. The lap, because a record that
/// is finished may come back after its slot was used again.
pub(super) type Carrier = (u16, u32, NonZeroU8);

fn carrier<T>(entry: &Entry<T>) -> Carrier {
    let place = entry.place();
    (entry.epoch(), place.index, place.lap)
}

/// Who carries what. Only the dispatcher touches it.
#[derive(Debug)]
pub(super) struct Conflation {
    /// By hash: the node of the record in a list that carries older ones that come beside it.
    newest: HashMap<u64, u32>,
    carried: HashMap<Carrier, Vec<Place>>,
    /// Carriers in lanes that are not there for a parked key.
    sent: HashSet<Carrier>,
}

impl Conflation {
    pub(super) fn new() -> Self {
        Conflation { newest: HashMap::new(), carried: HashMap::new(), sent: HashSet::new() }
    }

    pub(super) fn carries<T>(&self, entry: &Entry<T>) -> bool {
        self.carried.contains_key(&carrier(entry))
    }

    /// Carried records and their carriers.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (Carrier, Carrier)> {
        self.carried.iter().flat_map(|(carrier, places)| {
            places.iter().map(|place| ((carrier.0, place.index(), place.lap), *carrier))
        })
    }

    /// The newer record carries the older one, and what that carried.
    pub(super) fn carry<T>(&mut self, newer: &Entry<T>, older: &Entry<T>) {
        let mut all = self.carried.remove(&carrier(older)).unwrap_or_default();
        all.push(older.place());
        let carried = self.carried.entry(carrier(newer)).or_default();
        if carried.len() < all.len() {
            std::mem::swap(carried, &mut all);
        }
        carried.append(&mut all);
    }

    #[cfg(all(test, not(loom)))]
    pub(super) fn is_empty(&self) -> bool {
        self.newest.is_empty() && self.carried.is_empty() && self.sent.is_empty()
    }
}

impl<T: Send + 'static> Executor<T> {
    /// Puts an entry into its shard's list, `front` or end; it is older or younger than all of its key
    /// there. Hands nothing on if it is carried, or takes the place of one that it carries.
    pub(super) fn list(&mut self, index: u32, hash: u64, entry: Entry<T>, front: bool) {
        let shard = &mut self.shards[index as usize];
        let Some(conflation) =
            self.conflation.as_mut().filter(|_| !is_free(hash) && !entry.is_tracked())
        else {
            push(&mut self.slab, index, shard, Waiting { hash, entry }, front);
            return;
        };
        // Nothing is lost of a quarantined key.
        let quarantined = self.parking.is_quarantined(hash);
        // The last one of the key in the list, so that what takes its place stays in order.
        let node = conflation.newest.get(&hash).copied();
        if let Some(there) = node.and_then(|node| self.slab.entry_mut(node))
            && there.epoch() == entry.epoch()
            && !quarantined
        {
            let slot = &mut self.epochs[usize::from(entry.epoch())];
            if let Some(slot) = slot {
                slot.waiting -= 1;
            }
            if front {
                conflation.carry(there, &entry);
            } else {
                let older = std::mem::replace(there, entry);
                conflation.carry(there, &older);
            }
            return;
        }
        let pushed = push(&mut self.slab, index, shard, Waiting { hash, entry }, front);
        // Of several epochs, the one at the end of the list: that is where more come.
        if !front || node.is_none() {
            conflation.newest.insert(hash, pushed);
        }
    }

    /// An entry has left its shard's list, from a node.
    pub(super) fn unlist(&mut self, hash: u64, node: u32) {
        if let Some(conflation) = &mut self.conflation
            && conflation.newest.get(&hash) == Some(&node)
        {
            conflation.newest.remove(&hash);
        }
    }

    /// Whether the older of two records behind a parked one is now carried by the newer.
    pub(super) fn conflates(&mut self, newer: &Entry<T>, older: &Entry<T>) -> bool {
        let Some(conflation) = &mut self.conflation else { return false };
        let same = newer.epoch() == older.epoch();
        if same {
            conflation.carry(newer, older);
            if let Some(slot) = &mut self.epochs[usize::from(older.epoch())] {
                slot.waiting -= 1;
            }
        }
        same
    }

    /// An entry goes into a lane: a carrier must come back.
    pub(super) fn send_carrier(&mut self, hash: u64, entry: &mut Entry<T>) {
        let Some(conflation) = &mut self.conflation else { return };
        let key = carrier(entry);
        if !entry.is_tracked() && conflation.carried.contains_key(&key) {
            conflation.sent.insert(key);
            entry.send_again(class_of(shard_of(hash, self.shards.len())), true);
            self.common.registry.add_caution();
        }
    }

    /// An entry comes out of a lane: if it was there as a carrier, it is not tracked any more.
    pub(super) fn untrack_carrier(&mut self, hash: u64, entry: &mut Entry<T>) -> bool {
        let Some(conflation) = &mut self.conflation else { return false };
        let was = conflation.sent.remove(&carrier(entry));
        if was {
            self.common.registry.drop_caution();
            entry.send_again(class_of(shard_of(hash, self.shards.len())), false);
        }
        was
    }

    /// A tracked entry was handed back. Whether that was all: it was a carrier and has ended.
    pub(super) fn carrier_back(&mut self, hash: u64, entry: &mut Entry<T>, why: Back) -> bool {
        if self.conflation.is_none() {
            return false;
        }
        if why == Back::Done {
            self.finish_carried(entry);
        }
        self.untrack_carrier(hash, entry) && matches!(why, Back::Done | Back::Halted)
    }

    /// A record has ended well: so have those it carries.
    pub(super) fn finish_carried(&mut self, entry: &Entry<T>) {
        let Some(conflation) = &mut self.conflation else { return };
        let Some(places) = conflation.carried.remove(&carrier(entry)) else { return };
        if let Some(slot) = &self.epochs[usize::from(entry.epoch())] {
            for place in &places {
                slot.window.shared().finish(place, Mark::Publish);
            }
            self.counts.conflated += places.len() as u64;
        }
    }

    /// An epoch's slot is free: nothing of it is carried any more.
    pub(super) fn forget_carried(conflation: &mut Option<Conflation>, slot: u16) {
        if let Some(conflation) = conflation {
            conflation.carried.retain(|carrier, _| carrier.0 != slot);
        }
    }
}

fn push<T>(
    slab: &mut crate::shard::Slab<Entry<T>>,
    index: u32,
    shard: &mut Shard,
    waiting: Waiting<Entry<T>>,
    front: bool,
) -> u32 {
    if front { slab.push_front(index, shard, waiting) } else { slab.push(index, shard, waiting) }
}
