//! This project's engine: the window alone, and the whole pipeline with a handler that does nothing.

use std::{hint::black_box, time::Duration};

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use plimsoll_benches::{contender::run_checked, input::Flights, ours::Ours};
use plimsoll_engine::{Ticket, Window};

/// Records of one measured round of the window.
const ROUND: u32 = 1_024;
/// Records of one run of the pipeline.
const RECORDS: usize = 500_000;

/// Records of a round lie so far apart.
#[derive(Clone, Copy)]
enum Gaps {
    None,
    /// As in a compacted log: each record is a jump.
    Everywhere,
}

impl Gaps {
    fn step(self) -> i64 {
        match self {
            Gaps::None => 1,
            Gaps::Everywhere => 3,
        }
    }
}

/// A window whose records of one round are admitted.
struct Round {
    window: Window,
    next: i64,
    gaps: Gaps,
}

impl Round {
    fn new(gaps: Gaps) -> Self {
        Round { window: Window::open(0, ROUND).expect("a small window"), next: 0, gaps }
    }

    fn admit(&mut self) -> Vec<Ticket> {
        let mut tickets = Vec::with_capacity(ROUND as usize);
        for _ in 0..ROUND {
            self.next += self.gaps.step();
            tickets.push(self.window.admit(self.next).expect("the round before was passed"));
        }
        tickets
    }
}

fn window(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("window");
    group.throughput(Throughput::Elements(ROUND.into()));
    for (name, gaps) in [("contiguous", Gaps::None), ("gaps", Gaps::Everywhere)] {
        group.bench_function(BenchmarkId::new("admit", name), |bencher| {
            let mut round = Round::new(gaps);
            let watermark = round.window.watermark();
            bencher.iter_batched(
                || (),
                |()| {
                    for _ in 0..ROUND {
                        round.next += gaps.step();
                        let ticket = round.window.admit(round.next);
                        ticket.expect("the record before was passed").finish();
                    }
                    watermark.advance()
                },
                BatchSize::PerIteration,
            );
        });
        group.bench_function(BenchmarkId::new("scan", name), |bencher| {
            let mut round = Round::new(gaps);
            let watermark = round.window.watermark();
            bencher.iter_batched(
                || round.admit().into_iter().for_each(Ticket::finish),
                |()| black_box(watermark.advance()),
                BatchSize::PerIteration,
            );
        });
    }
    group.bench_function("mark", |bencher| {
        let mut round = Round::new(Gaps::None);
        let watermark = round.window.watermark();
        bencher.iter_batched(
            || {
                watermark.advance();
                round.admit()
            },
            |tickets| tickets.into_iter().rev().for_each(Ticket::finish),
            BatchSize::PerIteration,
        );
    });
    group.finish();
}

fn pipeline(criterion: &mut Criterion) {
    let input = Flights::load().expect("flights").input(RECORDS, 4);
    let mut group = criterion.benchmark_group("pipeline");
    group.sample_size(10).throughput(Throughput::Elements(input.len() as u64));
    for workers in [1, 2, 8] {
        for batch in [1, 64] {
            let id = BenchmarkId::from_parameter(format_args!("{workers}_workers/batch_{batch}"));
            group.bench_function(id, |bencher| {
                bencher.iter_custom(|runs| {
                    let run =
                        || run_checked(&Ours, &input, workers, batch).expect("a complete run");
                    Duration::from_secs_f64((0..runs).map(|_| run().seconds).sum())
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, window, pipeline);
criterion_main!(benches);
