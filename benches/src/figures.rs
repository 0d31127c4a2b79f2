//! The registry of figures, and how each is measured.
//!
//! A figure is one entry of [`REGISTRY`]: a name, an aim and a function. Figures without an aim give context to the
//! promised ones and are measured only when asked for.

use std::{
    cell::{OnceCell, RefCell},
    fmt,
};

use crate::{
    channel_per_worker::ChannelPerWorker,
    classic::Classic,
    contender::{Contender, WrongOutcome, run_checked},
    hop,
    input::{Flights, Input},
    measure::{Pairs, Summary, process_cpu_time, try_paired},
    ours::Ours,
};

/// All figures that can be measured.
pub static REGISTRY: &[Figure] = &[
    Figure {
        name: "engine.vs_classic",
        group: Group::Engine,
        unit: "ratio",
        aim: Some(Aim::AtLeast(7.0)),
        measure: |setup| ratio_to_classic(&Ours, setup),
    },
    Figure {
        name: "context.channel_per_worker_vs_classic",
        group: Group::Context,
        unit: "ratio",
        aim: None,
        measure: |setup| ratio_to_classic(&ChannelPerWorker::default(), setup),
    },
];

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
    /// The value is not a number that could be compared.
    NotFinite(f64),
}

impl fmt::Display for FigureError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wrong(outcome) => write!(f, "incomplete run of {outcome}"),
            Self::NotFinite(value) => write!(f, "the measured value is {value}"),
        }
    }
}

impl std::error::Error for FigureError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Wrong(outcome) => Some(outcome),
            Self::NotFinite(_) => None,
        }
    }
}

impl From<WrongOutcome> for FigureError {
    fn from(outcome: WrongOutcome) -> Self {
        Self::Wrong(outcome)
    }
}

/// What all figures of one run share.
#[derive(Debug)]
pub struct Setup {
    flights: Flights,
    rounds: usize,
    records: usize,
    input: OnceCell<Input>,
}

impl Setup {
    /// Records of a run without work in the handler: about six years of flights.
    pub const RECORDS: usize = 2_000_000;
    /// Partitions of the input.
    pub const PARTITIONS: u32 = 4;

    /// Measures with `rounds` pairs of runs of `records` records.
    #[must_use]
    pub fn new(flights: Flights, rounds: usize, records: usize) -> Self {
        Self { flights, rounds, records, input: OnceCell::new() }
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
/// 2 workers, batches of 64, 4 partitions; the classic design flushes when a channel is empty.
///
/// # Errors
/// If a run was incomplete.
pub fn ratio_to_classic(contender: &dyn Contender, setup: &Setup) -> Result<Measured, FigureError> {
    const WORKERS: usize = 2;
    const BATCH: usize = 64;
    let input = setup.input();
    let classic = Classic::default();
    let cpu: [RefCell<Vec<f64>>; 2] = Default::default();
    let run = |contender: &dyn Contender, cpu: &RefCell<Vec<f64>>| {
        let before = process_cpu_time();
        let outcome = run_checked(contender, input, WORKERS, BATCH)?;
        let used = process_cpu_time() - before;
        cpu.borrow_mut().push(used.as_secs_f64() * 1e9 / outcome.records as f64);
        Ok::<_, FigureError>(outcome.ns_per_record())
    };
    let Pairs { ratio, first, second, set_aside, disturbed } =
        try_paired(setup.rounds, || run(&classic, &cpu[0]), || run(contender, &cpu[1]))?;
    let [classic_cpu, contender_cpu] = cpu.map(|ns| Summary::of(&ns.into_inner()).median);
    Ok(Measured {
        value: ratio.median,
        note: format!(
            "median of {} pairs, {:.1} to {:.1} ({set_aside} more set aside, and {disturbed} of these kept, for time the \
             host took); {} {:.1} ns/record (CPU {:.1}), {} {:.1} (CPU {:.1})",
            setup.rounds,
            ratio.min,
            ratio.max,
            classic.name(),
            first.median,
            classic_cpu,
            contender.name(),
            second.median,
            contender_cpu,
        ),
    })
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
    use std::collections::HashSet;

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
        let measured = ratio_to_classic(&Times(1e6), &setup(3, 50_000)).unwrap();
        // The two runs of a pair differ by noise, but not by a factor of a hundred.
        assert!((1e4..1e8).contains(&measured.value), "{}: {}", measured.value, measured.note);
        assert!(measured.note.contains("median of 3 pairs"));
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
        let error = ratio_to_classic(&Lazy, &setup(1, 1_000)).unwrap_err();
        assert!(matches!(error, FigureError::Wrong(_)));
        assert!(error.to_string().contains("lazy"));
    }
}
