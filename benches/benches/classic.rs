//! The rival designs with a handler that does nothing: time per record by workers and batch size.

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use plimsoll_benches::{
    channel_per_worker::ChannelPerWorker,
    classic::Classic,
    contender::{Contender, run_checked},
    input::{Flights, Input},
};

const RECORDS: usize = 500_000;

fn rivals(criterion: &mut Criterion) {
    let flights = Flights::load().expect("flights");
    let input = flights.input(RECORDS, 4);
    group(criterion, "classic", &Classic::default(), &input);
    group(criterion, "channel_per_worker", &ChannelPerWorker::default(), &input);
}

fn group(criterion: &mut Criterion, name: &str, contender: &dyn Contender, input: &Input) {
    let mut group = criterion.benchmark_group(name);
    group.sample_size(10).throughput(Throughput::Elements(input.len() as u64));
    for workers in [2, 8] {
        for batch in [1, 64] {
            let id = BenchmarkId::from_parameter(format_args!("{workers}_workers/batch_{batch}"));
            group.bench_function(id, |bencher| {
                bencher.iter_custom(|runs| {
                    let seconds: f64 = (0..runs)
                        .map(|_| {
                            run_checked(contender, input, workers, batch)
                                .expect("a complete run")
                                .seconds
                        })
                        .sum();
                    Duration::from_secs_f64(seconds)
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, rivals);
criterion_main!(benches);
