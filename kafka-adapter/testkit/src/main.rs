//! Runs Apache Kafka brokers until the end of standard input:
//! `plimsoll-testkit [--brokers N] [--proxied] [--property NAME=VALUE]...`
//!
//! Prints a line `bootstrap ADDRESSES`, one `pid PID` for each JVM and one `directory PATH`.

use std::io::{Read, Write};
use std::process::ExitCode;

use plimsoll_testkit::{Builder, Kafka};

const USAGE: &str = "usage: plimsoll-testkit [--brokers N] [--proxied] [--property NAME=VALUE]...";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let kafka = parse(std::env::args().skip(1))?.try_start().map_err(|error| error.to_string())?;
    let mut lines = format!("bootstrap {}\n", kafka.bootstrap());
    for pid in kafka.pids() {
        lines += &format!("pid {pid}\n");
    }
    lines += &format!("directory {}\n", kafka.directory().display());
    let mut output = std::io::stdout().lock();
    output
        .write_all(lines.as_bytes())
        .and_then(|()| output.flush())
        .and_then(|()| std::io::stdin().lock().read_to_end(&mut Vec::new()))
        .map_err(|error| error.to_string())?;
    Ok(())
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Builder, String> {
    let mut builder = Kafka::builder();
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| USAGE.to_owned());
        builder = match argument.as_str() {
            "--brokers" => {
                let value = value()?;
                let brokers = value
                    .parse()
                    .map_err(|_| format!("--brokers {value}: not a number\n{USAGE}"))?;
                builder.brokers(brokers)
            }
            "--property" => {
                let value = value()?;
                let (name, value) = value
                    .split_once('=')
                    .ok_or_else(|| format!("--property {value}: not NAME=VALUE\n{USAGE}"))?;
                builder.property(name, value)
            }
            "--proxied" => builder.proxied(true),
            _ => return Err(USAGE.to_owned()),
        };
    }
    Ok(builder)
}
