//! Shards: the ordering domains, and the lists of records that wait for theirs to move on.
//!
//! Only the dispatcher touches them, so everything here is plain sequential code.

use crate::ring::boxed;

/// "No lane", "no node".
pub(crate) const NONE: u32 = u32::MAX;

/// One ordering domain. Its records are in at most one lane at a time.
///
/// 8 bytes, since the dispatcher looks at one for each record, mostly another one: the fewer bytes they
/// all have, the more of them are near. The list of waiting records is in the [`Slab`].
#[derive(Debug, Clone)]
pub(crate) struct Shard {
    /// The lane that holds, or last held, its records; with [`PARKED`] and [`WAITS`].
    lane: u32,
    /// Position in the lane after its last record there. The shard may change lane only when the
    /// lane's `done` has reached it.
    pub(crate) position: u32,
}

/// Some key of the shard is parked. Beside the lane, so that the check that a record may go straight
/// into it also finds this.
const PARKED: u32 = 1 << 31;
/// It has waiting records. Likewise.
const WAITS: u32 = 1 << 30;
const FLAGS: u32 = PARKED | WAITS;

impl Shard {
    pub(crate) fn new() -> Self {
        Shard { lane: NONE & !FLAGS, position: 0 }
    }

    /// Whether it has waiting records.
    #[inline(always)]
    pub(crate) fn waits(&self) -> bool {
        self.lane & WAITS != 0
    }

    /// Whether it is at home in the lane, without a parked key and without waiting records.
    #[inline(always)]
    pub(crate) fn goes_straight_to(&self, lane: u32) -> bool {
        self.lane == lane
    }

    #[inline(always)]
    pub(crate) fn lane(&self) -> usize {
        (self.lane & !FLAGS) as usize
    }

    #[inline]
    pub(crate) fn set_lane(&mut self, lane: u32) {
        self.lane = self.lane & FLAGS | lane;
    }

    #[inline]
    pub(crate) fn has_parked(&self) -> bool {
        self.lane & PARKED != 0
    }

    pub(crate) fn set_parked(&mut self, parked: bool) {
        self.lane = self.lane & !PARKED | if parked { PARKED } else { 0 };
    }

    fn set_waits(&mut self, waits: bool) {
        self.lane = self.lane & !WAITS | if waits { WAITS } else { 0 };
    }
}

/// A waiting record with its hash.
#[derive(Debug)]
pub(crate) struct Waiting<E> {
    pub(crate) hash: u64,
    pub(crate) entry: E,
}

#[derive(Debug)]
struct Node<E> {
    waiting: Option<Waiting<E>>,
    next: u32,
}

/// A list of waiting records, oldest first: younger than all of the shard in a lane.
#[derive(Debug, Clone, Copy)]
struct List {
    head: u32,
    tail: u32,
}

/// The lists of all shards, and their nodes. Freed nodes are used again, so that it allocates only when more records
/// wait than ever before; the windows bound how many that can be.
#[derive(Debug)]
pub(crate) struct Slab<E> {
    nodes: Vec<Node<E>>,
    free: u32,
    waiting: usize,
    /// By shard; meant only while it [waits](Shard::waits).
    lists: Box<[List]>,
}

impl<E> Slab<E> {
    /// For so many shards; `None` when the memory cannot be had.
    pub(crate) fn new(shards: u32) -> Option<Self> {
        let lists = boxed(shards, || List { head: NONE, tail: NONE })?;
        Some(Slab { nodes: Vec::new(), free: NONE, waiting: 0, lists })
    }

    /// The node of a shard's oldest waiting record, if it waits.
    pub(crate) fn head(&self, index: u32) -> u32 {
        self.lists[index as usize].head
    }

    /// Records in all lists.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.waiting
    }

    fn node(&mut self, waiting: Waiting<E>, next: u32) -> u32 {
        self.waiting += 1;
        let node = Node { waiting: Some(waiting), next };
        if self.free == NONE {
            self.nodes.push(node);
            // Records that wait are held in memory: there are fewer than 2^32.
            return (self.nodes.len() - 1) as u32;
        }
        let index = self.free;
        self.free = self.nodes[index as usize].next;
        self.nodes[index as usize] = node;
        index
    }

    /// Puts an entry behind all others of the shard with this index; returns its node.
    pub(crate) fn push(&mut self, index: u32, shard: &mut Shard, waiting: Waiting<E>) -> u32 {
        let node = self.node(waiting, NONE);
        let list = &mut self.lists[index as usize];
        if shard.waits() {
            self.nodes[list.tail as usize].next = node;
        } else {
            list.head = node;
            shard.set_waits(true);
        }
        list.tail = node;
        node
    }

    /// Puts an entry before all others: it is older than they are. Returns its node.
    pub(crate) fn push_front(&mut self, index: u32, shard: &mut Shard, waiting: Waiting<E>) -> u32 {
        let next = if shard.waits() { self.lists[index as usize].head } else { NONE };
        let node = self.node(waiting, next);
        let list = &mut self.lists[index as usize];
        if !shard.waits() {
            list.tail = node;
            shard.set_waits(true);
        }
        list.head = node;
        node
    }

    /// The entry of a node that is in a list.
    pub(crate) fn entry_mut(&mut self, node: u32) -> Option<&mut E> {
        let waiting = self.nodes.get_mut(node as usize)?.waiting.as_mut()?;
        Some(&mut waiting.entry)
    }

    /// All waiting records, in no order.
    pub(crate) fn all(&self) -> impl Iterator<Item = &Waiting<E>> {
        self.nodes.iter().filter_map(|node| node.waiting.as_ref())
    }

    pub(crate) fn pop(&mut self, index: u32, shard: &mut Shard) -> Option<Waiting<E>> {
        if !shard.waits() {
            return None;
        }
        let list = &mut self.lists[index as usize];
        let first = list.head;
        let node = &mut self.nodes[first as usize];
        let waiting = node.waiting.take();
        list.head = std::mem::replace(&mut node.next, self.free);
        shard.set_waits(list.head != NONE);
        self.free = first;
        self.waiting -= 1;
        waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(entry: i32) -> Waiting<i32> {
        Waiting { hash: 0, entry }
    }

    fn pop(slab: &mut Slab<i32>, index: u32, shard: &mut Shard) -> Option<i32> {
        slab.pop(index, shard).map(|waiting| waiting.entry)
    }

    #[test]
    fn what_is_put_in_front_comes_first() {
        let mut slab = Slab::new(2).unwrap();
        let mut list = Shard::new();
        slab.push_front(0, &mut list, waiting(2));
        slab.push(0, &mut list, waiting(3));
        slab.push_front(0, &mut list, waiting(1));
        slab.push(0, &mut list, waiting(4));
        let taken: Vec<_> = std::iter::from_fn(|| pop(&mut slab, 0, &mut list)).collect();
        assert_eq!(taken, [1, 2, 3, 4]);
    }

    #[test]
    fn lists_are_fifo_and_nodes_are_used_again() {
        let mut slab = Slab::new(2).unwrap();
        let (mut odd, mut even) = (Shard::new(), Shard::new());
        for round in 0..3 {
            for value in 0..10 {
                slab.push(
                    value as u32 % 2,
                    if value % 2 == 0 { &mut even } else { &mut odd },
                    waiting(round * 10 + value),
                );
            }
            assert_eq!(slab.len(), 10);
            for value in [1, 3, 5, 7, 9] {
                assert_eq!(pop(&mut slab, 1, &mut odd), Some(round * 10 + value));
            }
            for value in [0, 2, 4, 6, 8] {
                assert_eq!(pop(&mut slab, 0, &mut even), Some(round * 10 + value));
            }
            assert_eq!((pop(&mut slab, 1, &mut odd), pop(&mut slab, 0, &mut even)), (None, None));
        }
        assert_eq!(slab.nodes.len(), 10);
    }
}
