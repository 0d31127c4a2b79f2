//! The program `plimsoll`: consumes Kafka in parallel, in order per key, and checks that it did.
//!
//! Exit codes of every subcommand: 0 all is well, 1 a promise was broken, 2 bad input or environment.

mod demo;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

// librdkafka allocates for every record on one thread and frees on another; with `override` its C code, too, uses this
// allocator, which halves the cost of the client.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Ordered, parallel Kafka consumption.
#[derive(Debug, Parser)]
#[command(name = "plimsoll", version, arg_required_else_help = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::Options),
}

fn main() -> ExitCode {
    match Arguments::parse().command {
        Command::Demo(options) => demo::main(&options),
    }
}
