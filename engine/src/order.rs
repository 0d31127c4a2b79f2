//! Which records keep their order among each other.

use crate::dispatch::Route;
use foldhash::fast::FixedState;
use std::hash::BuildHasher;

/// What the order of records is kept by.
///
/// ```
/// use plimsoll_engine::{OrderBy, Route};
///
/// let by_key = OrderBy::Key.router(3);
/// assert_eq!(by_key.route(Some(b"k")), by_key.route(Some(b"k")));
/// assert_ne!(by_key.route(Some(b"k")), by_key.route(Some(b"")));
/// assert_eq!(by_key.route(None), Route::Free);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum OrderBy {
    /// Partition and key. A null key has no order and is spread over the workers; an empty key is a
    /// key like any other.
    #[default]
    Key,
    /// The partition: its records are handled one after the other, whatever their keys.
    Partition,
    /// Nothing.
    Unordered,
}

impl OrderBy {
    /// The routes of one partition's records. `partition` tells partitions apart: its number, or a
    /// hash of topic and number where there are several topics.
    pub fn router(self, partition: u64) -> Router {
        let whole = FixedState::with_seed(0).hash_one(partition);
        Router { order: self, hasher: FixedState::with_seed(partition), whole }
    }

    /// The route of one record; for many, [`router`](Self::router) prepares what they share.
    pub fn route(self, partition: u64, key: Option<&[u8]>) -> Route {
        self.router(partition).route(key)
    }
}

/// The routes of one partition's records.
#[derive(Debug, Clone)]
pub struct Router {
    order: OrderBy,
    hasher: FixedState,
    /// Stands for all of the partition.
    whole: u64,
}

impl Router {
    /// Where a record with this key goes. The same in every process and on every run of one build;
    /// not to be kept, since the hash may change with a release.
    #[inline]
    pub fn route(&self, key: Option<&[u8]>) -> Route {
        match (self.order, key) {
            (OrderBy::Key, Some(key)) => Route::Ordered(self.hasher.hash_one(key)),
            (OrderBy::Partition, _) => Route::Ordered(self.whole),
            (OrderBy::Key, None) | (OrderBy::Unordered, _) => Route::Free,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn hash(route: Route) -> u64 {
        match route {
            Route::Ordered(hash) => hash,
            Route::Free => panic!("no order"),
        }
    }

    #[test]
    fn each_mode_keeps_what_it_says() {
        let key = |partition: u64, key: &[u8]| hash(OrderBy::Key.route(partition, Some(key)));
        assert_eq!(key(1, b"a"), key(1, b"a"));
        assert_ne!(key(1, b"a"), key(2, b"a"), "partitions are not in order with each other");
        assert_ne!(key(1, b""), key(1, b"\0"), "an empty key is a key of its own");
        assert_eq!(OrderBy::Key.route(1, None), Route::Free);
        let whole = |partition: u64, key| hash(OrderBy::Partition.route(partition, key));
        assert_eq!(whole(1, None), whole(1, Some(b"a")));
        assert_ne!(whole(1, None), whole(2, None));
        assert_eq!(OrderBy::Unordered.route(1, Some(b"a")), Route::Free);
    }

    #[test]
    fn hashes_are_spread_over_all_their_bits() {
        // Partitions 0.. and short keys, as they are in practice.
        let partitions = (0..256_u64).map(|number| hash(OrderBy::Partition.route(number, None)));
        let keys = (0..256_u32).map(|key| hash(OrderBy::Key.route(0, Some(&key.to_be_bytes()))));
        for hashes in [partitions.collect::<Vec<_>>(), keys.collect()] {
            for shift in [0, 24, 56] {
                let bytes: HashSet<u64> = hashes.iter().map(|hash| hash >> shift & 0xff).collect();
                // 256 balls in 256 bins fill about 162.
                assert!(bytes.len() > 120, "{} of 256 at bit {shift}", bytes.len());
            }
            let different: HashSet<&u64> = hashes.iter().collect();
            assert_eq!(different.len(), 256);
        }
    }
}
