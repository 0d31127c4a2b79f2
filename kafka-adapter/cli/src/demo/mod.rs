//! `plimsoll demo`: real input through a broker and the library, every promise checked on the way.
//!
//! The way of a record: [`input`] -> [`plan`] -> [`producer`] -> broker -> [`consumer`] -> [`checker`] -> [`report`];
//! [`run`] starts and ends it all.

mod checker;
mod clock;
mod cluster;
mod console;
mod consumer;
mod failure;
mod input;
mod latency;
mod options;
mod plan;
mod producer;
mod report;
mod run;
mod signals;
mod violation;
mod work;

use std::process::ExitCode;

pub(crate) use options::Options;

/// Runs the demo, prints its result, and says how the process should end.
pub(crate) fn main(options: &Options) -> ExitCode {
    let result = run::run(options).and_then(|report| {
        report.print(options.json).map_err(failure::Failure::Output)?;
        Ok(report)
    });
    match result {
        Ok(report) if report.ok => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(1),
        Err(failure) => {
            console::note(&failure.to_string());
            ExitCode::from(2)
        }
    }
}
