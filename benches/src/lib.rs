//! Benchmarks of the engine, the rival designs it is measured against, and the scoreboard of promised figures.
//!
//! Every design under test is a [`Contender`](contender::Contender) and gets the same [`Input`](input::Input): real
//! flight records, looped, with partition, offset and key hash computed beforehand. Figures are ratios of paired,
//! interleaved runs in one process ([`measure`]), printed together with the latency of a cache line between two cores
//! ([`hop`]), since that latency decides how fast any of them can be and differs between machines and moments.
//!
//! `cargo run --release -p plimsoll-benches --bin scoreboard` prints the promised figures;
//! `cargo bench -p plimsoll-benches` runs the criterion groups.

pub mod channel_per_worker;
pub mod classic;
pub mod contender;
pub mod figures;
pub mod handoff;
pub mod hop;
pub mod input;
pub mod limit;
pub mod measure;
pub mod ours;
pub mod slow;
pub mod tally;
