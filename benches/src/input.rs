//! The workload: flight records keyed by aircraft, looped to any length.
//!
//! The key of a record is its `tailnum` (column 12 of the flights data). Aircraft fly in bursts and the placeholder
//! `NA` is far more frequent than any real aircraft, so the keys are as uneven as keys in production are.

use std::{
    collections::HashMap,
    fmt,
    fs::File,
    hash::BuildHasher,
    io::{self, Read},
    path::PathBuf,
};

use foldhash::quality::FixedState;
use lzma_rust2::XzReader;

/// Names a file (CSV in xz) with the flights of the whole year, to be used instead of the embedded January.
pub const FLIGHTS_VARIABLE: &str = "PLIMSOLL_FLIGHTS";

/// All flights of January 2013: 27,004 rows with 3,149 keys.
const JANUARY: &[u8] = include_bytes!("../../kafka-adapter/cli/data/flights-2013-01.csv.xz");
const KEY_COLUMN: &str = "tailnum";

/// One record as a contender gets it. Nothing in it has to be computed in the timed part of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Position in its partition, counted from 0 without gaps.
    pub offset: i64,
    /// Hash of the key. Records of one key must take effect in the order of their offsets.
    pub key_hash: u64,
    /// Partition, chosen by the low bits of the hash.
    pub partition: u32,
}

impl Record {
    /// The worker of this record in designs that tie keys to workers: `Split(record) % Num`.
    ///
    /// Uses other bits of the hash than the partition does. With the same bits, each partition would be tied to one
    /// worker.
    #[must_use]
    pub fn worker(&self, workers: usize) -> usize {
        // A 32-bit value fits in every usize this can run on.
        (self.key_hash >> 32) as usize % workers
    }
}

/// A sequence of records and where each partition ends.
///
/// They come as a client delivers them: in batches of one partition each. Only one lap over the flights is held: a list
/// of all records would be read from main memory, which costs as much per record as a design under test may.
#[derive(Clone, Debug)]
pub struct Input {
    /// The batches of a lap.
    lap: Vec<Fetched>,
    length: usize,
    ends: Vec<i64>,
}

/// Rows of one lap that come as one batch.
#[derive(Clone, Debug)]
struct Fetched {
    partition: u32,
    key_hashes: Vec<u64>,
}

/// One batch of records of one partition.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Their partition.
    pub partition: u32,
    /// Offset of the first one; the others follow without gaps.
    pub first: i64,
    /// Hashes of their keys.
    pub key_hashes: &'a [u64],
}

/// Rows whose records are batched together: what a client that is behind gets of all partitions in one go.
const FETCH: usize = 1_024;

/// Rows of a batch of [`Flights::dealt`]: as long as the batches of four partitions are on average otherwise.
pub const DEALT: usize = FETCH / 4;

impl Input {
    /// Rows of these hashes, from the start again until there are `records`, spread over `partitions` by key.
    ///
    /// # Panics
    /// If `partitions` is 0, or there are records but no hash.
    #[must_use]
    pub fn by_key(hashes: &[u64], records: usize, partitions: u32) -> Self {
        assert!(partitions > 0, "an input needs a partition");
        let lap = hashes
            .chunks(FETCH)
            .flat_map(|rows| {
                (0..partitions).map(|partition| Fetched {
                    partition,
                    key_hashes: rows
                        .iter()
                        .copied()
                        .filter(|hash| hash % u64::from(partitions) == u64::from(partition))
                        .collect(),
                })
            })
            .filter(|fetched| !fetched.key_hashes.is_empty())
            .collect();
        Self::looped(lap, records, partitions)
    }

    fn looped(lap: Vec<Fetched>, length: usize, partitions: u32) -> Self {
        let mut input = Self { lap, length, ends: vec![0; partitions as usize] };
        let mut ends = vec![0; partitions as usize];
        for batch in input.batches() {
            ends[batch.partition as usize] += batch.key_hashes.len() as i64;
        }
        assert_eq!(ends.iter().sum::<i64>(), length as i64, "records of no hash");
        input.ends = ends;
        input
    }

    /// The batches in order of arrival.
    pub fn batches(&self) -> impl Iterator<Item = Batch<'_>> {
        let mut next = vec![0; self.ends.len()];
        let mut left = self.length;
        self.lap.iter().cycle().map_while(move |fetched| {
            let count = fetched.key_hashes.len().min(left);
            left -= count;
            let next = &mut next[fetched.partition as usize];
            let first = *next;
            // A batch is at most FETCH long.
            *next += count as i64;
            let key_hashes = &fetched.key_hashes[..count];
            (count > 0).then_some(Batch { partition: fetched.partition, first, key_hashes })
        })
    }

    /// The records in order of arrival.
    pub fn iter(&self) -> impl Iterator<Item = Record> {
        self.batches().flat_map(|batch| {
            let Batch { partition, first, key_hashes } = batch;
            (first..).zip(key_hashes).map(move |(offset, &key_hash)| Record {
                offset,
                key_hash,
                partition,
            })
        })
    }

    /// Number of records.
    #[must_use]
    pub fn len(&self) -> usize {
        self.length
    }

    /// Whether there is no record.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Per partition the offset after its last record: the watermark of a run that finished everything.
    #[must_use]
    pub fn ends(&self) -> &[i64] {
        &self.ends
    }

    /// Number of partitions.
    #[must_use]
    pub fn partitions(&self) -> usize {
        self.ends.len()
    }
}

/// The keys of a flights file in order of their rows.
#[derive(Clone, Debug)]
pub struct Flights {
    hashes: Vec<u64>,
    keys: usize,
    source: Source,
}

/// Where flights were read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The January that is embedded in this program.
    January,
    /// The file that [`FLIGHTS_VARIABLE`] names.
    File(PathBuf),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::January => write!(f, "embedded January"),
            Self::File(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Why a flights file could not be read.
#[derive(Debug)]
#[non_exhaustive]
pub enum InputError {
    /// The file could not be opened.
    Open(PathBuf, io::Error),
    /// The file is not xz, not CSV, or breaks off.
    Read(Source, csv::Error),
    /// The header line has no column for the key.
    NoKeyColumn(Source),
    /// The file has no row.
    Empty(Source),
}

impl fmt::Display for InputError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Open(path, error) => write!(f, "cannot open {}: {error}", path.display()),
            Self::Read(source, error) => write!(f, "cannot read flights from {source}: {error}"),
            Self::NoKeyColumn(source) => {
                write!(f, "flights from {source} have no column `{KEY_COLUMN}`")
            }
            Self::Empty(source) => write!(f, "flights from {source} have no row"),
        }
    }
}

impl std::error::Error for InputError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Open(_, error) => Some(error),
            Self::Read(_, error) => Some(error),
            Self::NoKeyColumn(_) | Self::Empty(_) => None,
        }
    }
}

impl Flights {
    /// Reads the file that [`FLIGHTS_VARIABLE`] names if there is one, otherwise the embedded January.
    ///
    /// # Errors
    /// If that file exists but cannot be read as flights.
    pub fn load() -> Result<Self, InputError> {
        match std::env::var_os(FLIGHTS_VARIABLE).map(PathBuf::from) {
            Some(path) if path.exists() => Self::from_file(path),
            _ => Self::january(),
        }
    }

    /// Reads the embedded January.
    ///
    /// # Errors
    /// If the embedded file is not what it should be.
    pub fn january() -> Result<Self, InputError> {
        Self::read(XzReader::new(JANUARY, true), Source::January)
    }

    /// Reads a CSV file compressed with xz.
    ///
    /// # Errors
    /// If the file cannot be opened, is not CSV in xz, or has no row or no key column.
    pub fn from_file(path: PathBuf) -> Result<Self, InputError> {
        match File::open(&path) {
            Ok(file) => {
                Self::read(XzReader::new(io::BufReader::new(file), true), Source::File(path))
            }
            Err(error) => Err(InputError::Open(path, error)),
        }
    }

    fn read(csv: impl Read, source: Source) -> Result<Self, InputError> {
        let mut reader = csv::Reader::from_reader(csv);
        let header = match reader.byte_headers() {
            Ok(header) => header,
            Err(error) => return Err(InputError::Read(source, error)),
        };
        let Some(column) = header.iter().position(|name| name == KEY_COLUMN.as_bytes()) else {
            return Err(InputError::NoKeyColumn(source));
        };
        let hasher = FixedState::default();
        let mut hashes = Vec::new();
        let mut hash_of: HashMap<Vec<u8>, u64> = HashMap::new();
        let mut row = csv::ByteRecord::new();
        loop {
            match reader.read_byte_record(&mut row) {
                // The reader refuses rows of another length than the header.
                Ok(true) => {
                    let key = &row[column];
                    let hash = match hash_of.get(key) {
                        Some(&hash) => hash,
                        None => {
                            let hash = hasher.hash_one(key);
                            hash_of.insert(key.to_vec(), hash);
                            hash
                        }
                    };
                    hashes.push(hash);
                }
                Ok(false) => break,
                Err(error) => return Err(InputError::Read(source, error)),
            }
        }
        if hashes.is_empty() {
            return Err(InputError::Empty(source));
        }
        Ok(Self { hashes, keys: hash_of.len(), source })
    }

    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.hashes.len()
    }

    /// Number of distinct keys.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.keys
    }

    /// Where the rows are from.
    #[must_use]
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// The first `records` rows, from the start again as often as needed, spread over `partitions` by key.
    ///
    /// # Panics
    /// If `partitions` is 0.
    #[must_use]
    pub fn input(&self, records: usize, partitions: u32) -> Input {
        Input::by_key(&self.hashes, records, partitions)
    }

    /// As [`input`](Self::input), but each batch has [`DEALT`] rows and goes to the next partition in turn.
    ///
    /// A lap has `batches` batches. The keys of each of them are keys of their own, as if there were so many partitions,
    /// so that inputs that differ in `partitions` alone have the same hashes in the same order.
    ///
    /// # Panics
    /// If `partitions` is 0.
    #[must_use]
    pub fn dealt(&self, records: usize, batches: u32, partitions: u32) -> Input {
        assert!(partitions > 0, "an input needs a partition");
        let mut rows = self.hashes.iter().cycle();
        let lap = (0..batches)
            .map(|batch| Fetched {
                partition: batch % partitions,
                key_hashes: rows
                    .by_ref()
                    .take(DEALT)
                    .map(|hash| mix(hash ^ u64::from(batch)))
                    .collect(),
            })
            .collect();
        Input::looped(lap, records, partitions)
    }
}

/// Hashes of `rows` records with about `keys` keys, each equally frequent, in no order.
#[must_use]
pub fn even_keys(rows: u64, keys: u64) -> Vec<u64> {
    (0..rows).map(|row| mix(mix(row) % keys)).collect()
}

/// Spreads a number over all bits, one to one (the finalizer of SplitMix64).
pub(crate) fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let number = (number ^ number >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let number = (number ^ number >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    number ^ number >> 31
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn january_has_its_rows_and_keys() {
        let january = Flights::january().unwrap();
        assert_eq!(january.rows(), 27_004);
        assert_eq!(january.keys(), 3_149);
        let hashes: HashSet<u64> = january.hashes.iter().copied().collect();
        assert_eq!(hashes.len(), january.keys(), "two keys share a hash");
    }

    #[test]
    fn offsets_are_dense_and_keys_stay_in_their_partition() {
        let january = Flights::january().unwrap();
        let input = january.input(2 * january.rows() + 5, 4);
        assert_eq!((input.len(), input.iter().count()), (54_013, 54_013));
        let mut next = vec![0; 4];
        for record in input.iter() {
            assert_eq!(u64::from(record.partition), record.key_hash % 4);
            assert_eq!(record.offset, next[record.partition as usize]);
            next[record.partition as usize] += 1;
        }
        assert_eq!(next, input.ends());
        assert_eq!(
            input.iter().next().unwrap().key_hash,
            input.iter().nth(january.rows()).unwrap().key_hash,
            "the second lap repeats the keys"
        );
        let uneven = input.ends().iter().any(|&end| end < 54_013 / 8);
        assert!(!uneven, "a partition is nearly empty: {:?}", input.ends());
    }

    #[test]
    fn dealt_batches_take_partitions_in_turn_and_differ_in_nothing_else() {
        let january = Flights::january().unwrap();
        // Three laps of 10 batches and a bit.
        let records = 31 * DEALT + 7;
        let (one, five) = (january.dealt(records, 10, 1), january.dealt(records, 10, 5));
        assert_eq!((one.partitions(), five.partitions(), five.len()), (1, 5, records));
        assert!(one.iter().map(|r| r.key_hash).eq(five.iter().map(|r| r.key_hash)));
        let parts: Vec<u32> = five.batches().map(|batch| batch.partition).collect();
        assert!(parts.iter().copied().eq((0..32).map(|batch| batch % 5)), "{parts:?}");
        let deal = DEALT as i64;
        assert_eq!(five.ends(), [7 * deal, 6 * deal + 7, 6 * deal, 6 * deal, 6 * deal]);
        assert_eq!(one.ends(), [records as i64]);
    }

    #[test]
    fn even_keys_are_so_many_and_even() {
        for (rows, keys) in [(100_000, 1_000), (100_000, 10)] {
            let mut counts = std::collections::HashMap::<u64, u64>::new();
            for hash in even_keys(rows, keys) {
                *counts.entry(hash).or_default() += 1;
            }
            assert_eq!(counts.len() as u64, keys);
            assert!(counts.values().all(|&count| count > rows / keys / 2));
        }
    }

    #[test]
    fn worker_choice_is_independent_of_the_partition() {
        let input = Flights::january().unwrap().input(27_004, 4);
        for partition in 0..4 {
            let workers: HashSet<usize> = input
                .iter()
                .filter(|record| record.partition == partition)
                .map(|record| record.worker(2))
                .collect();
            assert_eq!(workers.len(), 2, "partition {partition} is tied to a worker");
        }
    }

    #[test]
    fn faults_of_a_file_are_named() {
        let missing = Flights::from_file("no/such/flights.csv.xz".into()).unwrap_err();
        assert!(missing.to_string().contains("no/such/flights.csv.xz"));

        let error = |text: &'static str| {
            Flights::read(text.as_bytes(), Source::File("f.csv".into())).unwrap_err()
        };
        assert!(matches!(error("year,month\n2013,1\n"), InputError::NoKeyColumn(_)));
        assert!(matches!(error("year,tailnum\n"), InputError::Empty(_)));
        assert!(matches!(error("year,tailnum\n2013,N1\n2013\n"), InputError::Read(..)));

        let not_xz = Flights::read(XzReader::new(&b"plain text"[..], true), Source::January);
        assert!(matches!(not_xz, Err(InputError::Read(..))));
    }
}
