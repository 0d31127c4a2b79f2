//! Shards: the ordering domains, and the lists of records that wait for theirs to move on.
//!
//! Only the dispatcher touches them, so everything here is plain sequential code.

/// "No lane", "no node".
pub(crate) const NONE: u32 = u32::MAX;

/// One ordering domain. Its records are in at most one lane at a time.
///
/// The first half is what the dispatcher checks for each record, the second what it writes.
#[derive(Debug, Clone)]
#[repr(C)]
pub(crate) struct Shard {
    /// The lane that holds, or last held, its records; with [`PARKED`].
    lane: u32,
    /// The list of waiting records, oldest first: younger than all in the lane.
    head: u32,
    /// Position in the lane after its last record there. The shard may change lane only when the
    /// lane's `done` has reached it.
    pub(crate) position: u32,
    tail: u32,
}

/// Some key of the shard is parked. Beside the lane, so that the check that a record may go straight
/// into it also finds this.
const PARKED: u32 = 1 << 31;

impl Shard {
    pub(crate) fn new() -> Self {
        Shard { lane: NONE & !PARKED, head: NONE, position: 0, tail: NONE }
    }

    /// Whether it has waiting records.
    #[inline(always)]
    pub(crate) fn waits(&self) -> bool {
        self.head != NONE
    }

    /// Nodes of its oldest and of its youngest waiting record, if it has any.
    pub(crate) fn head(&self) -> u32 {
        self.head
    }

    pub(crate) fn tail(&self) -> u32 {
        self.tail
    }

    /// Whether it is at home in the lane, without a parked key and without waiting records.
    #[inline(always)]
    pub(crate) fn goes_straight_to(&self, lane: u32) -> bool {
        self.lane == lane && self.head == NONE
    }

    #[inline(always)]
    pub(crate) fn lane(&self) -> usize {
        (self.lane & !PARKED) as usize
    }

    #[inline]
    pub(crate) fn set_lane(&mut self, lane: u32) {
        self.lane = self.lane & PARKED | lane;
    }

    #[inline]
    pub(crate) fn has_parked(&self) -> bool {
        self.lane & PARKED != 0
    }

    pub(crate) fn set_parked(&mut self, parked: bool) {
        self.lane = self.lane & !PARKED | if parked { PARKED } else { 0 };
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

/// The nodes of all lists. Freed nodes are used again, so that it allocates only when more records
/// wait than ever before; the windows bound how many that can be.
#[derive(Debug)]
pub(crate) struct Slab<E> {
    nodes: Vec<Node<E>>,
    free: u32,
    waiting: usize,
}

impl<E> Slab<E> {
    pub(crate) fn new() -> Self {
        Slab { nodes: Vec::new(), free: NONE, waiting: 0 }
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

    pub(crate) fn push(&mut self, shard: &mut Shard, waiting: Waiting<E>) {
        let index = self.node(waiting, NONE);
        if !shard.waits() {
            shard.head = index;
        } else {
            self.nodes[shard.tail as usize].next = index;
        }
        shard.tail = index;
    }

    /// Puts an entry before all others: it is older than they are.
    pub(crate) fn push_front(&mut self, shard: &mut Shard, waiting: Waiting<E>) {
        let index = self.node(waiting, shard.head);
        if !shard.waits() {
            shard.tail = index;
        }
        shard.head = index;
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

    pub(crate) fn pop(&mut self, shard: &mut Shard) -> Option<Waiting<E>> {
        if !shard.waits() {
            return None;
        }
        let index = shard.head;
        let node = &mut self.nodes[index as usize];
        let waiting = node.waiting.take();
        shard.head = node.next;
        node.next = self.free;
        self.free = index;
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

    fn pop(slab: &mut Slab<i32>, shard: &mut Shard) -> Option<i32> {
        slab.pop(shard).map(|waiting| waiting.entry)
    }

    #[test]
    fn what_is_put_in_front_comes_first() {
        let mut slab = Slab::new();
        let mut list = Shard::new();
        slab.push_front(&mut list, waiting(2));
        slab.push(&mut list, waiting(3));
        slab.push_front(&mut list, waiting(1));
        slab.push(&mut list, waiting(4));
        let taken: Vec<_> = std::iter::from_fn(|| pop(&mut slab, &mut list)).collect();
        assert_eq!(taken, [1, 2, 3, 4]);
    }

    #[test]
    fn lists_are_fifo_and_nodes_are_used_again() {
        let mut slab = Slab::new();
        let (mut odd, mut even) = (Shard::new(), Shard::new());
        for round in 0..3 {
            for value in 0..10 {
                slab.push(
                    if value % 2 == 0 { &mut even } else { &mut odd },
                    waiting(round * 10 + value),
                );
            }
            assert_eq!(slab.len(), 10);
            for value in [1, 3, 5, 7, 9] {
                assert_eq!(pop(&mut slab, &mut odd), Some(round * 10 + value));
            }
            for value in [0, 2, 4, 6, 8] {
                assert_eq!(pop(&mut slab, &mut even), Some(round * 10 + value));
            }
            assert_eq!((pop(&mut slab, &mut odd), pop(&mut slab, &mut even)), (None, None));
        }
        assert_eq!(slab.nodes.len(), 10);
    }
}
