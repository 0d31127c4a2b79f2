//! Handlers that sleep, and how much of what is possible the engine makes of them.
//!
//! Every handler here checks the order of its key: that the record is the next one, and that no other record of the key
//! is being handled.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use plimsoll_engine::Retry;

use crate::{
    contender::{Outcome, WrongOutcome, check},
    input::Input,
    ours::{DriveError, Driver, Handle, WINDOW},
    tally::Tally,
};

/// Why a run says nothing.
#[derive(Debug)]
#[non_exhaustive]
pub enum SlowError {
    /// A handler failed, since a record was out of order, or the engine could not be set up.
    Drive(DriveError),
    /// Not all records were handled, or not all are below the watermarks.
    Wrong(WrongOutcome),
    /// The input has no record that could hang: each shares its key with one that would have to wait for it.
    NoLoneKey,
    /// The operating system refused the runtime's threads.
    Runtime(std::io::Error),
}

impl fmt::Display for SlowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drive(error) => error.fmt(f),
            Self::Wrong(outcome) => write!(f, "incomplete run of {outcome}"),
            Self::NoLoneKey => f.write_str("no record has a key of its own within a window"),
            Self::Runtime(_) => f.write_str("cannot start a runtime"),
        }
    }
}

impl std::error::Error for SlowError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Drive(error) => Some(error),
            Self::Wrong(outcome) => Some(outcome),
            Self::NoLoneKey => None,
            Self::Runtime(error) => Some(error),
        }
    }
}

impl From<DriveError> for SlowError {
    fn from(error: DriveError) -> Self {
        Self::Drive(error)
    }
}

impl From<WrongOutcome> for SlowError {
    fn from(outcome: WrongOutcome) -> Self {
        Self::Wrong(outcome)
    }
}

/// The length of a perfect schedule of records that have all arrived, given as pairs of key and cost.
///
/// Whenever a worker is free it starts, at no expense, the earliest record whose key has no record before it that is
/// unfinished. The result has the unit of the costs.
///
/// # Panics
/// If `workers` is 0.
#[must_use]
pub fn perfect(records: impl IntoIterator<Item = (u64, u64)>, workers: usize) -> u64 {
    assert!(workers > 0, "a schedule needs a worker");
    let mut costs = Vec::new();
    let mut next_of_key: Vec<Option<usize>> = Vec::new();
    // Of records that may start, the earliest; of running ones, the first to end.
    let (mut ready, mut running) = (BinaryHeap::new(), BinaryHeap::new());
    let mut last_of_key: HashMap<u64, usize> = HashMap::new();
    for (record, (key, cost)) in records.into_iter().enumerate() {
        costs.push(cost);
        next_of_key.push(None);
        match last_of_key.insert(key, record) {
            Some(before) => next_of_key[before] = Some(record),
            None => ready.push(Reverse(record)),
        }
    }
    let (mut now, mut free) = (0, workers);
    loop {
        while free > 0
            && let Some(Reverse(record)) = ready.pop()
        {
            free -= 1;
            running.push(Reverse((now + costs[record], record)));
        }
        let Some(Reverse((end, _))) = running.peek() else { return now };
        now = *end;
        // All that end now, before the next one is chosen.
        while let Some(&Reverse((end, record))) = running.peek()
            && end == now
        {
            running.pop();
            free += 1;
            ready.extend(next_of_key[record].map(Reverse));
        }
    }
}

/// Checks that records of a key are handled one after the other, in order.
#[derive(Debug)]
struct OrderCheck {
    /// Key and ordinal within the key of each record, by partition and offset.
    records: Vec<Vec<(u32, u32)>>,
    /// Per key twice the ordinal of its next record, one more while that is being handled.
    next: Vec<AtomicU64>,
}

impl OrderCheck {
    fn new(input: &Input) -> Self {
        let mut keys: HashMap<u64, (u32, u32)> = HashMap::new();
        let mut records = vec![Vec::new(); input.partitions()];
        for record in input.iter() {
            // Inputs have far fewer than 2^32 records.
            let new = keys.len() as u32;
            let (key, ordinal) = keys.entry(record.key_hash).or_insert((new, 0));
            records[record.partition as usize].push((*key, *ordinal));
            *ordinal += 1;
        }
        Self { records, next: keys.iter().map(|_| AtomicU64::new(0)).collect() }
    }

    /// Calls `work` as the handler of a record.
    fn around(&self, record: Handle, work: impl FnOnce()) -> Result<(), String> {
        let end = self.begin(record)?;
        work();
        end();
        Ok(())
    }

    /// The handling of a record begins; the result is to be called at its end.
    fn begin(&self, record: Handle) -> Result<impl FnOnce() + use<'_>, String> {
        let (key, ordinal) = self.records[record.partition()][record.offset()];
        let (next, due) = (&self.next[key as usize], 2 * u64::from(ordinal));
        // Relaxed: the engine must order the handlers of a key; a check that did would hide that it does not.
        let found = next.compare_exchange(due, due + 1, Ordering::Relaxed, Ordering::Relaxed);
        if let Err(found) = found {
            return Err(format!(
                "record {due} of key {key} handled at {found} (twice the ordinal)"
            ));
        }
        Ok(move || next.store(due + 2, Ordering::Relaxed))
    }
}

/// Takes `input` through the engine, one record a call, with its order checked.
fn run_checked(
    input: &Input,
    workers: usize,
    work: impl Fn(Handle) + Send + Sync + 'static,
) -> Result<Outcome, SlowError> {
    let handled = Arc::new(Tally::new(workers));
    let order = OrderCheck::new(input);
    let mut driver = Driver::each(workers, input.partitions(), {
        let handled = Arc::clone(&handled);
        move |record| {
            order.around(record, || work(record))?;
            handled.add(1);
            Ok::<_, String>(())
        }
    })?;
    let time = driver.drive(input.batches())?;
    let outcome = Outcome {
        seconds: time.as_secs_f64(),
        records: handled.total(),
        watermarks: driver.watermarks(),
    };
    Ok(check("ours", input, outcome)?)
}

/// A run with handlers that sleep, beside the perfect schedule of the same records.
#[derive(Clone, Copy, Debug)]
pub struct Sleeps {
    /// Length of the run in seconds.
    pub seconds: f64,
    /// Length of the perfect schedule in seconds, with the sleep as long as it was in the run.
    pub ideal_seconds: f64,
    /// Mean length of a sleep in seconds, as measured in the handlers: longer than asked for.
    pub sleep: f64,
    /// Records that slept.
    pub slept: u64,
}

impl Sleeps {
    /// How much of the ideal throughput was reached.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.ideal_seconds / self.seconds
    }
}

/// Which records sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// All of them.
    All,
    /// One of a hundred, by chance; the others do nothing.
    Percent,
}

impl Which {
    fn sleeps(self, partition: usize, offset: usize) -> bool {
        match self {
            Self::All => true,
            Self::Percent => {
                crate::input::mix((partition as u64) << 40 | offset as u64).is_multiple_of(100)
            }
        }
    }
}

/// Runs `input` with handlers that sleep for `sleep`.
///
/// The ideal is the perfect schedule of these keys on so many workers; it is never shorter than the work divided by the
/// workers, so the smaller of these two throughputs is the one that counts.
///
/// # Errors
/// If the run was incomplete or out of order.
pub fn sleeps(
    input: &Input,
    workers: usize,
    which: Which,
    sleep: Duration,
) -> Result<Sleeps, SlowError> {
    let slept = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
    let outcome = run_checked(input, workers, {
        let slept = Arc::clone(&slept);
        move |record| {
            if which.sleeps(record.partition(), record.offset()) {
                let start = Instant::now();
                thread::sleep(sleep);
                // Centuries of nanoseconds fit.
                slept.0.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
                slept.1.fetch_add(1, Ordering::Relaxed);
            }
        }
    })?;
    let (ns, slept) = (slept.0.load(Ordering::Relaxed), slept.1.load(Ordering::Relaxed));
    let mean = ns / slept.max(1);
    let costs = input.iter().map(|record| {
        let sleeps = which.sleeps(record.partition as usize, record.offset as usize);
        (record.key_hash, if sleeps { mean } else { 0 })
    });
    Ok(Sleeps {
        seconds: outcome.seconds,
        ideal_seconds: perfect(costs, workers) as f64 / 1e9,
        sleep: mean as f64 / 1e9,
        slept,
    })
}

/// As [`sleeps`] of all records, with futures of which up to `concurrency` sleep at once on a tokio runtime with two
/// threads.
///
/// # Errors
/// If the run was incomplete or out of order, or there is no runtime.
pub fn sleeps_async(
    input: &Input,
    concurrency: usize,
    sleep: Duration,
) -> Result<Sleeps, SlowError> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_time()
        .build()
        .map_err(SlowError::Runtime)?;
    // Order, nanoseconds slept, records that did.
    let shared = Arc::new((OrderCheck::new(input), AtomicU64::new(0), AtomicU64::new(0)));
    let handler = {
        let shared = Arc::clone(&shared);
        move |record: Handle| {
            let shared = Arc::clone(&shared);
            async move {
                let (order, ns, slept) = &*shared;
                let end = order.begin(record)?;
                let start = Instant::now();
                tokio::time::sleep(sleep).await;
                // Centuries of nanoseconds fit.
                ns.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
                slept.fetch_add(1, Ordering::Relaxed);
                end();
                Ok::<_, String>(())
            }
        }
    };
    let spawner = runtime.handle().clone();
    let mut driver = Driver::futures(concurrency, input.partitions(), spawner, handler)?;
    let seconds = driver.drive(input.batches())?.as_secs_f64();
    let (_, ns, slept) = &*shared;
    let (ns, slept) = (ns.load(Ordering::Relaxed), slept.load(Ordering::Relaxed));
    check("ours", input, Outcome { seconds, records: slept, watermarks: driver.watermarks() })?;
    let mean = ns / slept.max(1);
    let costs = input.iter().map(|record| (record.key_hash, mean));
    Ok(Sleeps {
        seconds,
        ideal_seconds: perfect(costs, concurrency) as f64 / 1e9,
        sleep: mean as f64 / 1e9,
        slept,
    })
}

/// Runs `input` with handlers that sleep for a millisecond, where every tenth key is ill: its records fail twice, at
/// once, before they succeed. Returns how long it took until all records of the others were handled, in seconds.
///
/// # Errors
/// If the run was incomplete or out of order.
pub fn storm(input: &Input, workers: usize, ill: bool) -> Result<f64, SlowError> {
    let hashes: Vec<Vec<u64>> = {
        let mut hashes = vec![Vec::new(); input.partitions()];
        for record in input.iter() {
            hashes[record.partition as usize].push(record.key_hash);
        }
        hashes
    };
    let is_ill = move |record: Handle| {
        let hash = hashes[record.partition()][record.offset()];
        ill && crate::input::mix(hash).is_multiple_of(10)
    };
    // Order, attempts of each ill record, nanoseconds until the last healthy one, records that were handled.
    let attempts: Mutex<HashMap<(usize, usize), u32>> = Mutex::default();
    let shared = Arc::new((OrderCheck::new(input), attempts, AtomicU64::new(0), AtomicU64::new(0)));
    let began = Instant::now();
    let handler = {
        let shared = Arc::clone(&shared);
        move |record: Handle| {
            let (order, attempts, last, handled) = &*shared;
            let is_ill = is_ill(record);
            if is_ill {
                let key = (record.partition(), record.offset());
                let mut attempts = attempts.lock();
                let attempt = attempts.entry(key).or_default();
                *attempt += 1;
                if *attempt <= 2 {
                    return Err("it is ill".to_owned());
                }
            }
            let end = order.begin(record)?;
            thread::sleep(Duration::from_millis(1));
            end();
            if !is_ill {
                // Centuries of nanoseconds fit.
                last.fetch_max(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
            }
            handled.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
    };
    let retry = Retry::forever().first(Duration::from_millis(1)).cap(Duration::from_millis(10));
    let mut driver = Driver::retrying(workers, input.partitions(), retry, handler)?;
    let seconds = driver.drive(input.batches())?.as_secs_f64();
    let (_, _, last, handled) = &*shared;
    let records = handled.load(Ordering::Relaxed);
    check("ours", input, Outcome { seconds, records, watermarks: driver.watermarks() })?;
    Ok(last.load(Ordering::Relaxed) as f64 / 1e9)
}

/// What went on while one record hung.
#[derive(Clone, Copy, Debug)]
pub struct Hang {
    /// Later records of its partition that were handled before it ended.
    pub others: u64,
    /// The most that could have been: the window less the record itself.
    pub most: u64,
}

/// Lets one record in the middle of `input` hang for `hang`; the others do nothing.
///
/// All records of `input` have to be in one partition, so that the window that fills up is that of the hanging record.
/// When it starts the engine has seen only cheap records, and its lanes are as deep as they get.
///
/// # Errors
/// If the run was incomplete or out of order, or no record is fit to hang.
///
/// # Panics
/// If `input` has several partitions.
pub fn hang(input: &Input, workers: usize, hang: Duration) -> Result<Hang, SlowError> {
    assert_eq!(input.partitions(), 1, "partitions");
    let hashes: Vec<u64> = input.iter().map(|record| record.key_hash).collect();
    let window = WINDOW as usize;
    // With a key that does not come again while it hangs: the records of one that does would rightly wait.
    let hanging = (hashes.len() / 3..(hashes.len() + 1).saturating_sub(window))
        .find(|&at| !hashes[at + 1..at + window].contains(&hashes[at]))
        .ok_or(SlowError::NoLoneKey)?;
    let others = Arc::new((AtomicBool::new(false), AtomicU64::new(0)));
    run_checked(input, workers, {
        let others = Arc::clone(&others);
        move |record| {
            let (ended, others) = &*others;
            if record.offset() == hanging {
                thread::sleep(hang);
                ended.store(true, Ordering::Relaxed);
            } else if record.offset() > hanging && !ended.load(Ordering::Relaxed) {
                others.fetch_add(1, Ordering::Relaxed);
            }
        }
    })?;
    Ok(Hang { others: others.1.load(Ordering::Relaxed), most: u64::from(WINDOW) - 1 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::input::{Flights, even_keys};

    #[test]
    fn a_storm_of_retries_is_complete_and_in_order() {
        let input = Input::by_key(&even_keys(3_000, 500), 3_000, 4);
        for ill in [false, true] {
            assert!(storm(&input, 8, ill).unwrap() > 0.0);
        }
    }

    #[test]
    fn perfect_schedules_computed_by_hand() {
        for (records, workers, length) in [
            (&[][..], 3, 0),
            (&[(1, 5)], 3, 5),
            // Distinct keys: work by workers, rounded up to whole records.
            (&[(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)], 2, 3),
            // One key is serial, whatever the workers.
            (&[(1, 1), (1, 1), (1, 1), (2, 1)], 4, 3),
            // Arrival order is not the best order: key 1 comes last and is serial. 2, 3 | 1, 4 | 1 | 1.
            (&[(2, 1), (3, 1), (4, 1), (1, 1), (1, 1), (1, 1)], 2, 4),
            // A worker does not wait for a key: 1 and 2 | 1 and 3.
            (&[(1, 1), (1, 1), (2, 1), (3, 1)], 2, 2),
            // At 2 both workers come free, and the earlier record, which ends the wait of key 2, is first:
            // 1 (0-2), 2 (0-2) | 2 (2-5), 3 (2-3) | 4 (3-4).
            (&[(1, 2), (2, 2), (2, 3), (3, 1), (4, 1)], 2, 5),
            // Records without cost take no time, but wait for their key and for a worker.
            (&[(1, 0), (1, 4), (1, 0), (2, 0), (3, 4)], 1, 8),
            (&[(1, 0), (1, 4), (1, 0), (2, 0), (3, 4)], 2, 4),
        ] {
            assert_eq!(perfect(records.iter().copied(), workers), length, "{records:?}, {workers}");
        }
    }

    #[test]
    fn a_perfect_schedule_is_never_shorter_than_its_bounds() {
        let january = Flights::january().unwrap();
        for workers in [1, 16, 100] {
            let input = january.input(10_000, 4);
            let length = perfect(input.iter().map(|record| (record.key_hash, 7)), workers);
            let mut counts: HashMap<u64, u64> = HashMap::new();
            for record in input.iter() {
                *counts.entry(record.key_hash).or_default() += 7;
            }
            let serial = counts.values().max().unwrap();
            let even = 7 * 10_000_u64.div_ceil(workers as u64);
            assert!(length >= *serial.max(&even) && length <= serial + even, "{length}");
        }
    }

    #[test]
    fn disorder_is_noticed() {
        let input = Input::by_key(&[5, 5, 9], 3, 1);
        let [first, second, other] = [0, 1, 2].map(|offset| Handle::new(0, offset));
        let order = OrderCheck::new(&input);
        order.around(other, || ()).unwrap();
        order.around(second, || ()).unwrap_err();
        order.around(first, || drop(order.around(second, || ()).unwrap_err())).unwrap();
        order.around(first, || ()).unwrap_err();
        order.around(second, || ()).unwrap();
    }

    #[test]
    fn sleepers_sleep_and_the_share_is_one_of_the_ideal() {
        let input = Flights::january().unwrap().input(4_000, 4);
        let asked = Duration::from_micros(300);
        for (which, workers, slept) in [(Which::All, 16, 4_000..4_001), (Which::Percent, 3, 20..80)]
        {
            let run = sleeps(&input, workers, which, asked).unwrap();
            assert!(slept.contains(&run.slept), "{run:?}");
            assert!(run.sleep >= asked.as_secs_f64(), "{run:?}");
            let even = run.slept as f64 * run.sleep / workers as f64;
            assert!(run.ideal_seconds >= even * 0.99, "{run:?}");
            // Sleeps of unequal lengths may fit better than equal ones, but not by much.
            assert!(run.share() > 0.0 && run.share() < 1.3, "{run:?}");
        }
    }

    #[test]
    fn futures_sleep_and_the_share_is_one_of_the_ideal() {
        let input = Flights::january().unwrap().input(4_000, 4);
        let run = sleeps_async(&input, 100, Duration::from_millis(1)).unwrap();
        assert_eq!(run.slept, 4_000);
        assert!(run.sleep >= 0.001 && run.ideal_seconds >= 40.0 * run.sleep * 0.99, "{run:?}");
        assert!(run.share() > 0.0 && run.share() < 1.3, "{run:?}");
    }

    #[test]
    fn others_run_on_while_one_hangs() {
        let input = Input::by_key(&even_keys(60_000, 50_000), 60_000, 1);
        let run = hang(&input, 2, Duration::from_millis(300)).unwrap();
        assert_eq!(run.most, u64::from(WINDOW) - 1);
        assert!(run.others > 0 && run.others <= run.most, "{run:?}");
    }

    #[test]
    fn an_input_with_one_key_has_no_record_to_hang() {
        for input in [Input::by_key(&[1], 60_000, 1), Input::by_key(&even_keys(99, 99), 99, 1)] {
            assert!(matches!(hang(&input, 2, Duration::ZERO), Err(SlowError::NoLoneKey)));
        }
    }
}
