//! Which record goes where: known before the first one is produced, so that the checker knows what to expect.

use std::sync::Arc;

use super::input::Input;
use super::work::{fnv, mix};

/// The records of one run.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    input: Arc<Input>,
    records: u64,
    /// Partition of each key.
    places: Arc<[usize]>,
    partitions: usize,
}

/// One record of the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Planned {
    /// Row of the input.
    pub(crate) row: usize,
    /// Rank of its key; `None` without a key.
    pub(crate) key: Option<usize>,
    /// Where it goes.
    pub(crate) partition: usize,
}

impl Plan {
    /// `records` repeats or cuts the input.
    pub(crate) fn new(input: Arc<Input>, records: Option<u64>, partitions: u32) -> Self {
        let records = records.unwrap_or(input.len() as u64);
        let place = |key: &[u8]| (mix(fnv(key)) % u64::from(partitions)) as usize;
        let places = input.keys().iter().map(|key| place(key)).collect();
        Self { input, records, places, partitions: partitions as usize }
    }

    /// Number of records.
    pub(crate) fn len(&self) -> u64 {
        self.records
    }

    /// Number of partitions.
    pub(crate) fn partitions(&self) -> usize {
        self.partitions
    }

    /// The rows and keys.
    pub(crate) fn input(&self) -> &Arc<Input> {
        &self.input
    }

    /// The `index`-th record. A key's records all go to one partition; those without a key take turns.
    pub(crate) fn record(&self, index: u64) -> Planned {
        let row = (index % self.input.len() as u64) as usize;
        let key = self.input.key(row);
        let partition =
            key.map_or((index % self.partitions as u64) as usize, |key| self.places[key]);
        Planned { row, key, partition }
    }

    /// Number of records that each partition gets.
    pub(crate) fn counts(&self) -> Vec<u64> {
        let mut counts = vec![0; self.partitions];
        for index in 0..self.records {
            counts[self.record(index).partition] += 1;
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn plan(records: Option<u64>, partitions: u32) -> Plan {
        let input = Input::load(None, "tailnum").expect("built-in input");
        Plan::new(Arc::new(input), records, partitions)
    }

    #[test]
    fn a_key_stays_in_its_partition_and_the_load_is_spread() {
        let plan = plan(None, 4);
        let mut places = std::collections::HashMap::new();
        for index in 0..plan.len() {
            let record = plan.record(index);
            assert_eq!(record.row as u64, index);
            assert_eq!(*places.entry(record.key).or_insert(record.partition), record.partition);
        }
        let counts = plan.counts();
        assert_eq!(counts.iter().sum::<u64>(), 27_004);
        assert!(counts.iter().all(|count| (5_000..9_000).contains(count)), "{counts:?}");
    }

    #[test]
    fn records_repeat_or_cut_the_input() {
        let longer = plan(Some(60_000), 4);
        assert_eq!(longer.counts().iter().sum::<u64>(), 60_000);
        assert_eq!(longer.record(27_004), longer.record(0));
        assert_eq!(plan(Some(5), 4).counts().iter().sum::<u64>(), 5);
    }

    #[test]
    fn records_without_a_key_take_turns() {
        let file = tempfile::NamedTempFile::with_suffix(".csv").expect("temporary file");
        std::fs::write(file.path(), "k,v\n,1\n,2\n,3\n").expect("temporary file");
        let input = Input::load(Some(Path::new(file.path())), "k").expect("good input");
        assert_eq!(Plan::new(Arc::new(input), Some(9), 3).counts(), [3, 3, 3]);
    }
}
