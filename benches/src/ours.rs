//! This project's engine as a [`Contender`], with its default settings.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use plimsoll_engine::{Batch, Executor, Route, Waiter};

use crate::{
    contender::{Contender, Outcome},
    input::Input,
};

/// Records of one partition that may be admitted and not yet passed by its watermark: the default of the adapter.
const WINDOW: u32 = 16_384;
/// How often all watermarks are advanced, as a committer would.
const COMMIT: Duration = Duration::from_millis(1);
/// The longest sleep of the driving thread while records are in the lanes.
const NAP: Duration = Duration::from_micros(150);

/// What travels to the handler: of a pointer's size, as a client's message is. It says which record it is.
#[derive(Clone, Copy, Debug)]
struct Handle(u64);

impl Handle {
    #[inline]
    fn new(partition: u32, offset: i64) -> Self {
        // Offsets of a benchmark are far below 2^56.
        Self(u64::from(partition) << 56 | offset as u64)
    }
}

/// The executor, driven by the thread that admits.
#[derive(Clone, Copy, Debug, Default)]
pub struct Ours;

impl Contender for Ours {
    fn name(&self) -> &'static str {
        "ours"
    }

    fn run(&self, input: &Input, workers: usize, batch: usize) -> Outcome {
        assert!(workers > 0 && batch > 0, "{workers} workers, batch {batch}");
        let waiter = Waiter::new();
        let handled = Arc::new(AtomicU64::new(0));
        let builder = Executor::builder().workers(workers).batch(batch);
        // A no-op that the compiler cannot remove, and one addition per call to count.
        let mut executor = builder
            .batches(waiter.waker(), {
                let handled = Arc::clone(&handled);
                move |batch: &Batch<'_, Handle>| {
                    for record in batch.iter() {
                        std::hint::black_box(record.0);
                    }
                    handled.fetch_add(batch.len() as u64, Ordering::Relaxed);
                }
            })
            .expect("the settings of a benchmark are valid");
        let epochs: Vec<_> = (0..input.partitions())
            .map(|_| executor.open(0, WINDOW).expect("the settings of a benchmark are valid"))
            .collect();
        let began = Instant::now();
        let mut next_commit = COMMIT;
        let mut batches = input.batches();
        let mut pending = batches.next();
        loop {
            let now = began.elapsed();
            executor.pass(now);
            if now >= next_commit {
                next_commit = now + COMMIT;
                for epoch in &epochs {
                    executor.progress(*epoch);
                }
            }
            let mut taken = 0;
            if let Some(batch) = &mut pending {
                let epoch = epochs[batch.partition as usize];
                let most = executor.demand().min(executor.room(epoch)) as usize;
                taken = most.min(batch.key_hashes.len());
                let (now, later) = batch.key_hashes.split_at(taken);
                let records = (batch.first..).zip(now).map(|(offset, hash)| {
                    (offset, Route::Ordered(*hash), Handle::new(batch.partition, offset))
                });
                executor.offer_all(epoch, records).expect("there is room for all of them");
                // At most a batch's length.
                batch.first += taken as i64;
                batch.key_hashes = later;
                if later.is_empty() {
                    pending = batches.next();
                }
            }
            if taken > 0 {
                executor.flush_more();
                continue;
            }
            executor.flush();
            if pending.is_none() && !executor.busy() {
                break;
            }
            rest(&executor, &waiter);
        }
        let watermarks: Vec<i64> = epochs
            .iter()
            .filter_map(|epoch| executor.progress(*epoch))
            .map(|progress| progress.watermark)
            .collect();
        let seconds = began.elapsed().as_secs_f64();
        Outcome { seconds, records: handled.load(Ordering::Relaxed), watermarks }
    }
}

/// Looks for something to take back, then sleeps.
fn rest(executor: &Executor<Handle>, waiter: &Waiter) {
    for look in 0..60 {
        if executor.finished_something() {
            return;
        }
        if look < 20 {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
    waiter.wait(NAP, || executor.finished_something());
}
