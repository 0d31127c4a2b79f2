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
    /// The lane that holds, or last held, its records.
    pub(crate) lane: u32,
    /// The list of waiting records, oldest first: younger than all in the lane.
    head: u32,
    /// Position in the lane after its last record there. The shard may change lane only when the
    /// lane's `done` has reached it.
    pub(crate) position: u32,
    tail: u32,
}

impl Shard {
    pub(crate) fn new() -> Self {
        Shard { lane: NONE, head: NONE, position: 0, tail: NONE }
    }

    /// Whether it has waiting records.
    #[inline(always)]
    pub(crate) fn waits(&self) -> bool {
        self.head != NONE
    }
}

#[derive(Debug)]
struct Node<E> {
    entry: Option<E>,
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

    fn node(&mut self, entry: E, next: u32) -> u32 {
        self.waiting += 1;
        let node = Node { entry: Some(entry), next };
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

    pub(crate) fn push(&mut self, shard: &mut Shard, entry: E) {
        let index = self.node(entry, NONE);
        if !shard.waits() {
            shard.head = index;
        } else {
            self.nodes[shard.tail as usize].next = index;
        }
        shard.tail = index;
    }

    /// Puts an entry before all others: it is older than they are.
    pub(crate) fn push_front(&mut self, shard: &mut Shard, entry: E) {
        let index = self.node(entry, shard.head);
        if !shard.waits() {
            shard.tail = index;
        }
        shard.head = index;
    }

    pub(crate) fn pop(&mut self, shard: &mut Shard) -> Option<E> {
        if !shard.waits() {
            return None;
        }
        let index = shard.head;
        let node = &mut self.nodes[index as usize];
        let entry = node.entry.take();
        shard.head = node.next;
        node.next = self.free;
        self.free = index;
        self.waiting -= 1;
        entry
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_in_front_comes_first() {
        let mut slab = Slab::new();
        let mut list = Shard::new();
        slab.push_front(&mut list, 2);
        slab.push(&mut list, 3);
        slab.push_front(&mut list, 1);
        slab.push(&mut list, 4);
        let taken: Vec<_> = std::iter::from_fn(|| slab.pop(&mut list)).collect();
        assert_eq!(taken, [1, 2, 3, 4]);
    }

    #[test]
    fn lists_are_fifo_and_nodes_are_used_again() {
        let mut slab = Slab::new();
        let (mut odd, mut even) = (Shard::new(), Shard::new());
        for round in 0..3 {
            for value in 0..10 {
                slab.push(if value % 2 == 0 { &mut even } else { &mut odd }, round * 10 + value);
            }
            assert_eq!(slab.len(), 10);
            for value in [1, 3, 5, 7, 9] {
                assert_eq!(slab.pop(&mut odd), Some(round * 10 + value));
            }
            for value in [0, 2, 4, 6, 8] {
                assert_eq!(slab.pop(&mut even), Some(round * 10 + value));
            }
            assert_eq!((slab.pop(&mut odd), slab.pop(&mut even)), (None, None));
        }
        assert_eq!(slab.nodes.len(), 10);
    }
}
