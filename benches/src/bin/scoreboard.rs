//! Measures every promised figure and prints it beside its aim.
//!
//! Exit code 0: measured, whether the aims are met or not; 1: a figure could not be measured; 2: wrong usage.

use std::{
    alloc::System,
    io::{self, Write},
    process::ExitCode,
};

use clap::{CommandFactory, Parser, error::ErrorKind};
use plimsoll_benches::{
    figures::{Allocated, Figure, Measured, REGISTRY, Setup, select},
    input::{FLIGHTS_VARIABLE, Flights},
};
use serde_json::Value;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

/// Counts for the figures of allocations. Each call costs two locked instructions more, which a rival that allocates pays
/// too.
#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

fn allocated() -> Allocated {
    let stats = ALLOCATOR.stats();
    Allocated {
        calls: stats.allocations + stats.reallocations,
        bytes: stats.bytes_allocated - stats.bytes_deallocated,
    }
}

/// Measure every promised figure and print it beside its aim.
///
/// Most figures are ratios of paired runs on this machine, each the median over the pairs. Keys are those of the flights of
/// January 2013, or of the file (CSV in xz) that the environment variable PLIMSOLL_FLIGHTS names.
#[derive(Parser)]
#[command(name = "scoreboard", version)]
struct Arguments {
    /// Print one JSON object per figure and nothing else on standard output
    #[arg(long)]
    json: bool,

    /// Measure only this figure or group (engine, kafka, context); may be given several times
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,

    /// Pairs of runs per figure; at most 7 where records go one at a time, and 3 to 9 runs where handlers sleep
    #[arg(long, value_name = "N", default_value_t = 25, value_parser = clap::value_parser!(u16).range(1..=999))]
    rounds: u16,

    /// List the figures and their aims without measuring
    #[arg(long, conflicts_with = "json")]
    list: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let figures = match select(REGISTRY, &arguments.only) {
        Ok(figures) => figures,
        // Prints like any other wrong argument, and exits with 2.
        Err(error) => Arguments::command().error(ErrorKind::InvalidValue, error).exit(),
    };
    match run(&arguments, &figures) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns whether all figures could be measured.
fn run(arguments: &Arguments, figures: &[&Figure]) -> Result<bool, Box<dyn std::error::Error>> {
    let mut out = io::stdout().lock();
    if arguments.list {
        // A list without names shows all there is, not only what is promised.
        let all: Vec<&Figure> = REGISTRY.iter().collect();
        let listed = if arguments.only.is_empty() { &all } else { figures };
        let rows = listed
            .iter()
            .map(|figure| [figure.name.to_owned(), figure.unit.to_owned(), aim_of(figure)]);
        print_table(&mut out, ["figure", "unit", "aim"], rows.collect())?;
        return Ok(true);
    }

    let flights = Flights::load()?;
    eprintln!(
        "input: {} records a run, looped from {} flights with {} keys ({}; {FLIGHTS_VARIABLE} names another file)",
        Setup::RECORDS,
        flights.rows(),
        flights.keys(),
        flights.source(),
    );
    let setup = Setup::new(flights, arguments.rounds.into(), Setup::RECORDS).counting(allocated);
    let mut rows = Vec::new();
    let mut complete = true;
    for figure in figures {
        let Measured { value, note } = match figure.run(&setup) {
            Ok(measured) => measured,
            Err(error) => {
                eprintln!("error: {}: {error}", figure.name);
                complete = false;
                continue;
            }
        };
        if arguments.json {
            writeln!(
                out,
                r#"{{"figure": {}, "value": {}, "unit": {}}}"#,
                Value::from(figure.name),
                Value::from((value * 1e3).round() / 1e3),
                Value::from(figure.unit),
            )?;
            out.flush()?;
            eprintln!("{}: {note}", figure.name);
        } else {
            rows.push([
                figure.name.to_owned(),
                format!("{value:.2}"),
                figure.unit.to_owned(),
                aim_of(figure),
                verdict(figure, value).to_owned(),
                note,
            ]);
        }
    }
    if !arguments.json {
        print_table(&mut out, ["figure", "value", "unit", "aim", "verdict", "note"], rows)?;
    }
    Ok(complete)
}

fn aim_of(figure: &Figure) -> String {
    figure.aim.map_or_else(|| "-".to_owned(), |aim| aim.to_string())
}

fn verdict(figure: &Figure, value: f64) -> &'static str {
    match figure.aim {
        None => "-",
        Some(aim) if aim.is_met_by(value) => "pass",
        Some(_) => "short",
    }
}

fn print_table<const N: usize>(
    out: &mut impl Write,
    head: [&str; N],
    rows: Vec<[String; N]>,
) -> io::Result<()> {
    let rows: Vec<[String; N]> = std::iter::once(head.map(str::to_owned)).chain(rows).collect();
    let mut widths = [0; N];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    for row in &rows {
        let line: Vec<String> =
            row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        writeln!(out, "{}", line.join("  ").trim_end())?;
    }
    Ok(())
}
