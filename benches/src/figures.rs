//! The registry of figures, and how each is measured.
//!
//! A figure is one entry of [`REGISTRY`]: a name, an aim and a function. Figures without an aim give context to the
//! promised ones and are measured only when asked for.

use std::{
    cell::{Cell, OnceCell, RefCell},
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use plimsoll_engine::Window;

use crate::{
    channel_per_worker::ChannelPerWorker,
    classic::Classic,
    contender::{Contender, Outcome, WrongOutcome, check, run_checked},
    handoff::{self, HandoffError, p99},
    hop,
    input::{DEALT, Flights, Input, even_keys},
    limit::Limit,
    measure::{
        Pairs, Summary, process_cpu_time, stolen_ticks, try_paired, try_paired_while, was_packed,
    },
    ours::{DriveError, Driver, Ours, counting_no_op},
    slow::{self, SlowError, Which},
    tally::Tally,
};

/// All figures that can be measured.
pub static REGISTRY: &[Figure] = &[
    Figure {
        name: "engine.vs_classic",
        group: Group::Engine,
        unit: "ratio",
        aim: Some(Aim::AtLeast(7.0)),
        measure: |setup| ratio_to_classic(&Ours, BATCH, setup),
    },
    Figure {
        name: "engine.vs_classic_batch1",
        group: Group::Engine,
        unit: "ratio",
        aim: Some(Aim::AtLeast(10.0)),
        measure: |setup| ratio_to_classic(&Ours, 1, setup),
    },
    Figure {
        name: "engine.vs_limit",
        group: Group::Engine,
        unit: "ratio",
        aim: Some(Aim::AtMost(6.0)),
        measure: |setup| {
            let input = setup.input();
            compare(Side("ours", &Ours, input), Side("bare hand-over", &Limit, input), BATCH, setup)
        },
    },
    Figure {
        name: "engine.vs_channel_per_worker",
        group: Group::Engine,
        unit: "ratio",
        aim: Some(Aim::AtLeast(10.0)),
        measure: |setup| {
            let (input, rival) = (setup.input(), ChannelPerWorker::default());
            compare(Side(rival.name(), &rival, input), Side("ours", &Ours, input), BATCH, setup)
        },
    },
    Figure {
        name: "engine.allocs_per_record",
        group: Group::Engine,
        unit: "allocations",
        // Printed as 0.000.
        aim: Some(Aim::AtMost(0.0005)),
        measure: allocations_per_record,
    },
    Figure {
        name: "engine.partitions_1000_vs_1",
        group: Group::Engine,
        unit: "ratio",
        aim: Some(Aim::AtMost(1.3)),
        measure: partitions,
    },
    Figure {
        name: "engine.keys_1m_vs_1k",
        group: Group::Engine,
        unit: "ratio",
        aim: Some(Aim::AtMost(1.5)),
        measure: keys,
    },
    Figure {
        name: "engine.window_bytes_per_slot",
        group: Group::Engine,
        unit: "bytes",
        aim: Some(Aim::AtMost(16.0)),
        measure: window_bytes,
    },
    Figure {
        name: "engine.idle_cpu_pct",
        group: Group::Engine,
        unit: "%",
        aim: Some(Aim::AtMost(0.5)),
        measure: idle_cpu,
    },
    Figure {
        name: "engine.handoff_p99_vs_channel",
        group: Group::Engine,
        unit: "ratio",
        aim: Some(Aim::AtMost(1.2)),
        measure: handoff_p99,
    },
    Figure {
        name: "engine.ideal_1ms_16_workers",
        group: Group::Engine,
        unit: "share",
        aim: Some(Aim::AtLeast(0.97)),
        // As long as the run of 400,000 on 100 workers, not as many.
        measure: |setup| share_of_ideal(16, 64_000, Which::All, LONG_ROUNDS, setup),
    },
    Figure {
        name: "engine.ideal_1ms_100_workers",
        group: Group::Engine,
        unit: "share",
        aim: Some(Aim::AtLeast(0.95)),
        measure: |setup| share_of_ideal(100, 400_000, Which::All, LONG_ROUNDS, setup),
    },
    Figure {
        name: "engine.slow_1pct_16_workers",
        group: Group::Engine,
        unit: "share",
        aim: Some(Aim::AtLeast(0.95)),
        measure: |setup| share_of_ideal(16, 400_000, Which::Percent, 3 * LONG_ROUNDS, setup),
    },
    Figure {
        name: "engine.ideal_async_10ms_1000",
        group: Group::Engine,
        unit: "share",
        aim: Some(Aim::AtLeast(0.9)),
        measure: |setup| {
            const RECORDS: usize = 400_000;
            let hashes = even_keys(1 << 20, 1_000_000);
            let input = Input::by_key(&hashes, RECORDS.min(setup.records), Setup::PARTITIONS);
            async_share_of_ideal(&input, setup)
        },
    },
    Figure {
        name: "engine.ideal_async_10ms_1000_flights",
        group: Group::Engine,
        unit: "share",
        aim: Some(Aim::AtLeast(0.9)),
        // Bound by the hottest key, so half of them take as long.
        measure: |setup| {
            const RECORDS: usize = 200_000;
            let input = setup.flights.input(RECORDS.min(setup.records), Setup::PARTITIONS);
            async_share_of_ideal(&input, setup)
        },
    },
    Figure {
        name: "engine.hang_others",
        group: Group::Engine,
        unit: "share",
        aim: Some(Aim::AtLeast(0.8)),
        measure: hang_others,
    },
    Figure {
        name: "engine.retry_storm",
        group: Group::Engine,
        unit: "share",
        aim: Some(Aim::AtLeast(0.8)),
        measure: retry_storm,
    },
    Figure {
        name: "context.channel_per_worker_vs_classic",
        group: Group::Context,
        unit: "ratio",
        aim: None,
        measure: |setup| ratio_to_classic(&ChannelPerWorker::default(), BATCH, setup),
    },
];

/// Workers of the runs without work in the handler.
const WORKERS: usize = 2;
/// Records of a call in these runs, unless the figure says otherwise.
const BATCH: usize = 64;

/// One promised or informative figure.
#[derive(Debug)]
pub struct Figure {
    /// Unique name, starting with the name of its group.
    pub name: &'static str,
    /// What it belongs to.
    pub group: Group,
    /// Unit of the value.
    pub unit: &'static str,
    /// What is promised, if anything.
    pub aim: Option<Aim>,
    /// Measures it.
    pub measure: fn(&Setup) -> Result<Measured, FigureError>,
}

/// Groups of figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// Promises about the engine alone.
    Engine,
    /// Promises about the engine behind a Kafka client.
    Kafka,
    /// No promise.
    Context,
}

impl Group {
    /// The name by which the group is selected.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Kafka => "kafka",
            Self::Context => "context",
        }
    }
}

/// What is promised of a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Aim {
    /// The value or more.
    AtLeast(f64),
    /// The value or less.
    AtMost(f64),
}

impl Aim {
    /// Whether `value` keeps the promise.
    #[must_use]
    pub fn is_met_by(self, value: f64) -> bool {
        match self {
            Self::AtLeast(aim) => value >= aim,
            Self::AtMost(aim) => value <= aim,
        }
    }
}

impl fmt::Display for Aim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtLeast(aim) => write!(f, ">= {aim}"),
            Self::AtMost(aim) => write!(f, "<= {aim}"),
        }
    }
}

/// A measured value.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The value in the unit of its figure.
    pub value: f64,
    /// What is behind it: spread, absolute times, conditions.
    pub note: String,
}

/// Why a figure could not be measured.
#[derive(Debug)]
#[non_exhaustive]
pub enum FigureError {
    /// A run did not do all of the work.
    Wrong(WrongOutcome),
    /// A handler failed, or the engine could not be set up.
    Drive(DriveError),
    /// A run with slow handlers says nothing.
    Slow(SlowError),
    /// A run with one record at a time says nothing.
    Handoff(HandoffError),
    /// Nobody counts allocations in this program.
    NotCounted,
    /// The value is not a number that could be compared.
    NotFinite(f64),
}

impl fmt::Display for FigureError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wrong(outcome) => write!(f, "incomplete run of {outcome}"),
            Self::Drive(error) => error.fmt(f),
            Self::Slow(error) => error.fmt(f),
            Self::Handoff(error) => error.fmt(f),
            Self::NotCounted => f.write_str("this program has no allocator that counts"),
            Self::NotFinite(value) => write!(f, "the measured value is {value}"),
        }
    }
}

impl std::error::Error for FigureError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Wrong(outcome) => Some(outcome),
            Self::Drive(error) => Some(error),
            Self::Slow(error) => Some(error),
            Self::Handoff(error) => Some(error),
            Self::NotCounted | Self::NotFinite(_) => None,
        }
    }
}

impl From<WrongOutcome> for FigureError {
    fn from(outcome: WrongOutcome) -> Self {
        Self::Wrong(outcome)
    }
}

impl From<DriveError> for FigureError {
    fn from(error: DriveError) -> Self {
        Self::Drive(error)
    }
}

impl From<SlowError> for FigureError {
    fn from(error: SlowError) -> Self {
        Self::Slow(error)
    }
}

impl From<HandoffError> for FigureError {
    fn from(error: HandoffError) -> Self {
        Self::Handoff(error)
    }
}

/// What this program has asked of its allocator so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocated {
    /// Calls that gave memory out, the resizing ones included.
    pub calls: usize,
    /// Bytes given out and not given back.
    pub bytes: usize,
}

/// What all figures of one run share.
#[derive(Debug)]
pub struct Setup {
    flights: Flights,
    rounds: usize,
    records: usize,
    allocated: Option<fn() -> Allocated>,
    input: OnceCell<Input>,
}

impl Setup {
    /// Records of a run without work in the handler: about six years of flights.
    pub const RECORDS: usize = 2_000_000;
    /// Partitions of the input.
    pub const PARTITIONS: u32 = 4;

    /// Measures with `rounds` pairs of runs of `records` records; fewer of both where the handlers are slow.
    #[must_use]
    pub fn new(flights: Flights, rounds: usize, records: usize) -> Self {
        Self { flights, rounds, records, allocated: None, input: OnceCell::new() }
    }

    /// With a count of allocations. Without it some figures cannot be measured.
    #[must_use]
    pub fn counting(mut self, allocated: fn() -> Allocated) -> Self {
        self.allocated = Some(allocated);
        self
    }

    fn input(&self) -> &Input {
        self.input.get_or_init(|| self.flights.input(self.records, Self::PARTITIONS))
    }
}

impl Figure {
    /// Measures this figure, and the line-hop latency before and after it, which goes into the note.
    ///
    /// # Errors
    /// If a run was incomplete or the value is no finite number.
    pub fn run(&self, setup: &Setup) -> Result<Measured, FigureError> {
        let before = hop::one_way_ns();
        let Measured { value, note } = (self.measure)(setup)?;
        let after = hop::one_way_ns();
        if !value.is_finite() {
            return Err(FigureError::NotFinite(value));
        }
        let hop = match (before, after) {
            (Some(before), Some(after)) => {
                format!("line hop {before:.0} ns before, {after:.0} after")
            }
            _ => "one core".to_owned(),
        };
        Ok(Measured { value, note: format!("{note}; {hop}") })
    }
}

/// How many times faster than the classic design `contender` is, with a handler that does nothing.
///
/// 2 workers, 4 partitions; the classic design flushes when a channel is empty.
///
/// # Errors
/// If a run was incomplete.
pub fn ratio_to_classic(
    contender: &dyn Contender,
    batch: usize,
    setup: &Setup,
) -> Result<Measured, FigureError> {
    let (classic, input) = (Classic::default(), setup.input());
    let (rival, contender) =
        (Side(classic.name(), &classic, input), Side(contender.name(), contender, input));
    compare(rival, contender, batch, setup)
}

/// One side of a comparison: what the note calls it, what runs, and over what.
struct Side<'a>(&'a str, &'a dyn Contender, &'a Input);

/// Time per record of the first side divided by that of the second, with a handler that does nothing.
fn compare(
    first: Side<'_>,
    second: Side<'_>,
    batch: usize,
    setup: &Setup,
) -> Result<Measured, FigureError> {
    let cpu: [RefCell<Vec<f64>>; 2] = Default::default();
    let packed = Cell::new(0);
    let run = |Side(_, contender, input): &Side<'_>, cpu: &RefCell<Vec<f64>>| {
        let before = process_cpu_time();
        let outcome = run_checked(*contender, input, WORKERS, batch)?;
        let used = process_cpu_time() - before;
        cpu.borrow_mut().push(used.as_secs_f64() * 1e9 / outcome.records as f64);
        // All sides keep two cores busy when they have them.
        let wall = Duration::try_from_secs_f64(outcome.seconds).unwrap_or_default();
        packed.set(packed.get() + u64::from(was_packed(used, wall)));
        Ok::<_, FigureError>(outcome.ns_per_record())
    };
    let pairs = try_paired_while(
        || stolen_ticks() + packed.get(),
        setup.rounds,
        || run(&first, &cpu[0]),
        || run(&second, &cpu[1]),
    )?;
    let cpu = cpu.map(|ns| Summary::of(&ns.into_inner()).median);
    Ok(Measured {
        value: pairs.ratio.median,
        note: format!(
            "{}; {} {:.2} ns/record (CPU with set-up {:.2}), {} {:.2} ({:.2})",
            about(&pairs, setup.rounds),
            first.0,
            pairs.first.median,
            cpu[0],
            second.0,
            pairs.second.median,
            cpu[1],
        ),
    })
}

fn about(pairs: &Pairs, rounds: usize) -> String {
    let Pairs { ratio, set_aside, disturbed, .. } = pairs;
    format!(
        "median of {rounds} pairs, {:.2} to {:.2} ({set_aside} more set aside, and {disturbed} of these kept, for time the \
         host took or a core left idle)",
        ratio.min, ratio.max,
    )
}

/// The batches of each partition alike, all in one partition or dealt to a thousand.
fn partitions(setup: &Setup) -> Result<Measured, FigureError> {
    const MANY: u32 = 1_000;
    let [many, one] =
        [MANY, 1].map(|partitions| setup.flights.dealt(setup.records, MANY, partitions));
    compare(Side("1,000 partitions", &Ours, &many), Side("1", &Ours, &one), BATCH, setup)
}

/// Laps of the same length, of a million keys and of a thousand, each equally frequent.
fn keys(setup: &Setup) -> Result<Measured, FigureError> {
    const LAP: u64 = 1 << 20;
    let [many, few] = [1_000_000, 1_000].map(|keys| {
        // Drawn by chance, so of the million keys 65 % are in a lap.
        Input::by_key(&even_keys(LAP, keys), setup.records, Setup::PARTITIONS)
    });
    compare(Side("1,000,000 keys", &Ours, &many), Side("1,000", &Ours, &few), BATCH, setup)
}

/// Allocations of all threads between the first quarter of a run and its end, by records.
fn allocations_per_record(setup: &Setup) -> Result<Measured, FigureError> {
    let allocated = setup.allocated.ok_or(FigureError::NotCounted)?;
    let input = setup.input();
    let handled = Arc::new(Tally::new(WORKERS));
    let no_op = counting_no_op(&handled);
    let mut driver = Driver::batches(WORKERS, BATCH, input.partitions(), no_op)?;
    let mut batches = input.batches();
    let warm_up = input.batches().count() / 4;
    driver.drive(batches.by_ref().take(warm_up))?;
    let warmed = handled.total();
    let before = allocated().calls;
    let seconds = driver.drive(batches)?.as_secs_f64();
    let calls = allocated().calls - before;
    let records = handled.total();
    check("ours", input, Outcome { seconds, records, watermarks: driver.watermarks() })?;
    Ok(Measured {
        value: calls as f64 / (records - warmed) as f64,
        note: format!(
            "{calls} allocations, {} records after {warmed} to warm up",
            records - warmed
        ),
    })
}

/// What opening a large window asks of the allocator, by its slots.
fn window_bytes(setup: &Setup) -> Result<Measured, FigureError> {
    const SLOTS: u32 = 1 << 20;
    let allocated = setup.allocated.ok_or(FigureError::NotCounted)?;
    let before = allocated().bytes;
    let window = Window::open(0, SLOTS).map_err(DriveError::from)?;
    let bytes = allocated().bytes - before;
    drop(window);
    let note = format!("{bytes} bytes for {SLOTS} slots");
    Ok(Measured { value: bytes as f64 / f64::from(SLOTS), note })
}

/// Processor time of a thousand open windows, which have had records, and 4 workers, while none come.
fn idle_cpu(setup: &Setup) -> Result<Measured, FigureError> {
    const WINDOWS: u32 = 1_000;
    const WORKERS: usize = 4;
    const TIME: Duration = Duration::from_secs(2);
    let input = setup.flights.dealt(WINDOWS as usize * DEALT, WINDOWS, WINDOWS);
    let handled = Arc::new(Tally::new(WORKERS));
    let no_op = counting_no_op(&handled);
    let mut driver = Driver::batches(WORKERS, BATCH, input.partitions(), no_op)?;
    let seconds = driver.drive(input.batches())?.as_secs_f64();
    let (records, watermarks) = (handled.total(), driver.watermarks());
    check("ours", &input, Outcome { seconds, records, watermarks })?;
    // The workers look for more for a moment before they sleep.
    driver.idle(TIME / 20);
    let (began, before) = (Instant::now(), process_cpu_time());
    driver.idle(TIME);
    let (wall, used) = (began.elapsed(), process_cpu_time() - before);
    Ok(Measured {
        value: used.as_secs_f64() / wall.as_secs_f64() * 100.0,
        note: format!(
            "{:.2} ms in {:.2} s, of one core",
            used.as_secs_f64() * 1e3,
            wall.as_secs_f64()
        ),
    })
}

/// The 99th percentile from admission to handler by that of a channel, a sleeping thread on the other side.
fn handoff_p99(setup: &Setup) -> Result<Measured, FigureError> {
    const HAND_OVERS: usize = 2_000;
    const PAUSE: Duration = Duration::from_micros(200);
    let (rounds, count) = (setup.rounds.min(7), setup.records.min(HAND_OVERS));
    let medians: [RefCell<Vec<f64>>; 2] = Default::default();
    let p99_of = |latencies: Result<Vec<u64>, HandoffError>, medians: &RefCell<Vec<f64>>| {
        let latencies = latencies?;
        let ns: Vec<f64> = latencies.iter().map(|&ns| ns as f64).collect();
        medians.borrow_mut().push(Summary::of(&ns).median);
        Ok::<_, FigureError>(p99(latencies) as f64)
    };
    let pairs = try_paired(
        rounds,
        || p99_of(handoff::ours(count, PAUSE), &medians[0]),
        || p99_of(handoff::channel(count, PAUSE), &medians[1]),
    )?;
    let medians = medians.map(|ns| Summary::of(&ns.into_inner()).median / 1e3);
    Ok(Measured {
        value: pairs.ratio.median,
        note: format!(
            "{} of {count} hand-overs each; p99 (median) of ours {:.1} us ({:.1}), of a channel {:.1} us ({:.1})",
            about(&pairs, rounds),
            pairs.first.median / 1e3,
            medians[0],
            pairs.second.median / 1e3,
            medians[1],
        ),
    })
}

/// How often a run is measured that takes seconds: what the host takes meanwhile is little by comparison.
const LONG_ROUNDS: usize = 3;

/// Throughput by that of the perfect schedule, with handlers that sleep for 1 ms.
fn share_of_ideal(
    workers: usize,
    records: usize,
    which: Which,
    rounds: usize,
    setup: &Setup,
) -> Result<Measured, FigureError> {
    let input = setup.flights.input(records.min(setup.records), Setup::PARTITIONS);
    summed_up(&input, setup.rounds.min(rounds), || {
        slow::sleeps(&input, workers, which, Duration::from_millis(1))
    })
}

/// How much of the ideal a thousand futures reach that sleep for 10 ms.
fn async_share_of_ideal(input: &Input, setup: &Setup) -> Result<Measured, FigureError> {
    const CONCURRENCY: usize = 1_000;
    summed_up(input, setup.rounds.min(LONG_ROUNDS), || {
        slow::sleeps_async(input, CONCURRENCY, Duration::from_millis(10))
    })
}

fn summed_up(
    input: &Input,
    rounds: usize,
    run: impl Fn() -> Result<slow::Sleeps, SlowError>,
) -> Result<Measured, FigureError> {
    let (mut shares, mut sleeps) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let run = run()?;
        shares.push(run.share());
        sleeps.push(run);
    }
    let share = Summary::of(&shares);
    let summary = |of: fn(&slow::Sleeps) -> f64| {
        Summary::of(&sleeps.iter().map(of).collect::<Vec<_>>()).median
    };
    Ok(Measured {
        value: share.median,
        note: format!(
            "median of {} runs, {:.3} to {:.3}; {} records in {:.3} s, ideal {:.3} s with sleeps of {:.3} ms",
            shares.len(),
            share.min,
            share.max,
            input.len(),
            summary(|run| run.seconds),
            summary(|run| run.ideal_seconds),
            summary(|run| run.sleep * 1e3),
        ),
    })
}

/// How much of its partition's window is filled and handled while a record hangs for a second.
fn hang_others(setup: &Setup) -> Result<Measured, FigureError> {
    const RECORDS: usize = 200_000;
    const WORKERS: usize = 4;
    let input = setup.flights.input(RECORDS.min(setup.records), 1);
    let mut shares = Vec::new();
    for _ in 0..setup.rounds.min(LONG_ROUNDS) {
        let slow::Hang { others, most } = slow::hang(&input, WORKERS, Duration::from_secs(1))?;
        shares.push(others as f64 / most as f64);
    }
    let share = Summary::of(&shares);
    let note = format!("median of {} runs, {:.3} to {:.3}", shares.len(), share.min, share.max);
    Ok(Measured { value: share.median, note })
}

/// Throughput of the healthy keys while records of every tenth fail twice, against a run without failures.
fn retry_storm(setup: &Setup) -> Result<Measured, FigureError> {
    const RECORDS: usize = 32_000;
    const WORKERS: usize = 16;
    let records = RECORDS.min(setup.records);
    let input = Input::by_key(&even_keys(records as u64, 20_000), records, Setup::PARTITIONS);
    let mut shares = Vec::new();
    for _ in 0..setup.rounds.min(LONG_ROUNDS) {
        let calm = slow::storm(&input, WORKERS, false)?;
        shares.push(calm / slow::storm(&input, WORKERS, true)?);
    }
    let share = Summary::of(&shares);
    let note = format!(
        "median of {} pairs, {:.3} to {:.3}; handlers of 1 ms on {WORKERS} workers",
        shares.len(),
        share.min,
        share.max
    );
    Ok(Measured { value: share.median, note })
}

/// A name that is neither a figure nor a group that has figures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownFigure(String);

impl fmt::Display for UnknownFigure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no figure, and no group that has figures, is named `{}`", self.0)
    }
}

impl std::error::Error for UnknownFigure {}

/// The figures that `only` names, singly or by group, in the order of `registry`; without names all promised ones.
///
/// # Errors
/// The first name that fits no figure.
pub fn select<'a>(
    registry: &'a [Figure],
    only: &[String],
) -> Result<Vec<&'a Figure>, UnknownFigure> {
    let fits = |figure: &Figure, name: &str| figure.name == name || figure.group.name() == name;
    if let Some(unknown) =
        only.iter().find(|name| !registry.iter().any(|figure| fits(figure, name)))
    {
        return Err(UnknownFigure(unknown.clone()));
    }
    Ok(registry
        .iter()
        .filter(|figure| {
            if only.is_empty() {
                figure.aim.is_some()
            } else {
                only.iter().any(|name| fits(figure, name))
            }
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use std::{
        collections::HashSet,
        sync::atomic::{AtomicU64, Ordering},
    };

    use super::*;
    use crate::contender::Outcome;

    fn setup(rounds: usize, records: usize) -> Setup {
        Setup::new(Flights::january().unwrap(), rounds, records)
    }

    #[test]
    fn names_are_unique_and_start_with_their_group() {
        let names: HashSet<&str> = REGISTRY.iter().map(|figure| figure.name).collect();
        assert_eq!(names.len(), REGISTRY.len());
        for figure in REGISTRY {
            let group = figure.name.split_once('.').map(|(group, _)| group);
            assert_eq!(group, Some(figure.group.name()), "{}", figure.name);
        }
    }

    const REGISTERED: [Figure; 3] = {
        const fn figure(name: &'static str, group: Group, aim: Option<Aim>) -> Figure {
            Figure {
                name,
                group,
                unit: "ratio",
                aim,
                measure: |_| Ok(Measured { value: f64::NAN, note: String::new() }),
            }
        }
        [
            figure("engine.a", Group::Engine, Some(Aim::AtLeast(2.0))),
            figure("kafka.b", Group::Kafka, Some(Aim::AtMost(2.0))),
            figure("context.c", Group::Context, None),
        ]
    };

    #[test]
    fn selection_by_group_name_and_default() {
        let selected = |only: &[&str]| {
            let only: Vec<String> = only.iter().map(|&name| name.to_owned()).collect();
            select(&REGISTERED, &only)
                .map(|figures| figures.iter().map(|figure| figure.name).collect::<Vec<_>>())
        };
        assert_eq!(selected(&[]).unwrap(), ["engine.a", "kafka.b"]);
        assert_eq!(selected(&["kafka"]).unwrap(), ["kafka.b"]);
        assert_eq!(selected(&["context.c", "engine"]).unwrap(), ["engine.a", "context.c"]);
        let error = selected(&["engine", "engine.z"]).unwrap_err();
        assert!(error.to_string().contains("`engine.z`"), "{error}");
    }

    #[test]
    fn aims_include_their_bound() {
        assert!(Aim::AtLeast(2.0).is_met_by(2.0) && !Aim::AtLeast(2.0).is_met_by(1.99));
        assert!(Aim::AtMost(2.0).is_met_by(2.0) && !Aim::AtMost(2.0).is_met_by(2.01));
    }

    #[test]
    fn a_value_that_is_no_number_is_refused() {
        let error = REGISTERED[0].run(&setup(1, 1)).unwrap_err();
        assert!(matches!(error, FigureError::NotFinite(_)));
    }

    #[test]
    fn the_ratio_is_that_of_the_times() {
        /// Does the work of the classic design and reports a fixed part of the time.
        struct Times(f64);
        impl Contender for Times {
            fn name(&self) -> &'static str {
                "times"
            }
            fn run(&self, input: &Input, workers: usize, batch: usize) -> Outcome {
                assert_eq!((workers, batch), (2, 64));
                let outcome = Classic::default().run(input, workers, batch);
                Outcome { seconds: outcome.seconds / self.0, ..outcome }
            }
        }
        let measured = ratio_to_classic(&Times(1e6), 64, &setup(3, 50_000)).unwrap();
        // The two runs of a pair differ by noise, but not by a factor of a hundred.
        assert!((1e4..1e8).contains(&measured.value), "{}: {}", measured.value, measured.note);
        assert!(measured.note.contains("median of 3 pairs"));
    }

    /// Counts nothing, but differs from call to call.
    fn pretended() -> Allocated {
        static CALLS: AtomicU64 = AtomicU64::new(0);
        let calls = CALLS.fetch_add(1, Ordering::Relaxed) as usize;
        Allocated { calls: 100 * calls, bytes: calls << 24 }
    }

    #[test]
    fn every_figure_is_measured_on_a_small_input() {
        let setup = setup(1, 60_000).counting(pretended);
        for figure in REGISTRY {
            let measured = figure.run(&setup).unwrap_or_else(|e| panic!("{}: {e}", figure.name));
            assert!(measured.value >= 0.0, "{}: {}", figure.name, measured.value);
            assert!(measured.note.contains("line hop") || measured.note.contains("one core"));
        }
    }

    #[test]
    fn without_a_count_of_allocations_there_is_no_figure_of_them() {
        for figure in [allocations_per_record, window_bytes] {
            let error = figure(&setup(1, 1_000)).unwrap_err();
            assert!(matches!(error, FigureError::NotCounted));
        }
    }

    #[test]
    fn an_incomplete_run_gives_no_figure() {
        struct Lazy;
        impl Contender for Lazy {
            fn name(&self) -> &'static str {
                "lazy"
            }
            fn run(&self, input: &Input, _: usize, _: usize) -> Outcome {
                Outcome {
                    seconds: 1e-9,
                    records: input.len() as u64,
                    watermarks: vec![0; input.partitions()],
                }
            }
        }
        let error = ratio_to_classic(&Lazy, 64, &setup(1, 1_000)).unwrap_err();
        assert!(matches!(error, FigureError::Wrong(_)));
        assert!(error.to_string().contains("lazy"));
    }
}
