//! The least that any design has to pay: 16-byte entries handed from one thread to another.
//!
//! One ring, chunks of 64 entries, two positions: no routing, no tracking, no waking. Each side looks at the other's
//! position only when its own copy of it says that there is no chunk, and neither takes a lock or a locked instruction.

use std::{
    sync::{
        Barrier,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Instant,
};

use crossbeam_utils::CachePadded;

use crate::{
    contender::{Contender, Outcome},
    input::Input,
};

/// Words of an entry.
const WORDS: usize = 2;
/// Entries of a chunk.
const CHUNK: usize = 64;
/// Chunks of the ring: 2 MB. With far fewer the two sides run close behind each other and wait for each other's lines,
/// which costs up to four times as much.
const RING: u64 = 2_048;
/// After so many looks in vain the other side is presumably not running, and needs this core.
const PATIENCE: u32 = 2_000;

/// The bare hand-over.
///
/// It tracks nothing, so its watermarks are the ends of the input if all entries arrived as they were sent, and 0
/// otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limit;

/// What both sides share.
struct Shared {
    words: Box<[AtomicU64]>,
    /// Chunks sent so far.
    sent: CachePadded<AtomicU64>,
    /// Chunks received so far.
    received: CachePadded<AtomicU64>,
}

impl Shared {
    fn new() -> Self {
        let words = RING as usize * CHUNK * WORDS;
        Self {
            words: (0..words).map(|_| AtomicU64::new(0)).collect(),
            sent: CachePadded::default(),
            received: CachePadded::default(),
        }
    }

    fn chunk(&self, number: u64) -> &[AtomicU64] {
        let from = (number % RING) as usize * CHUNK * WORDS;
        &self.words[from..from + CHUNK * WORDS]
    }

    /// Sends the entries `(0, 0)`, `(1, 2)`, `(2, 4)` and so on, the last chunk filled up with zeros.
    fn send(&self, entries: u64) {
        let mut received = 0;
        let mut next = 0;
        for number in 0..entries.div_ceil(CHUNK as u64) {
            if number - received == RING {
                received = wait(|| self.received.load(Ordering::Acquire), |it| number - it < RING);
            }
            let chunk = self.chunk(number);
            if entries - next >= CHUNK as u64 {
                for entry in chunk.chunks_exact(WORDS) {
                    // Relaxed: published by the store below.
                    entry[0].store(next, Ordering::Relaxed);
                    entry[1].store(2 * next, Ordering::Relaxed);
                    next += 1;
                }
            } else {
                for entry in chunk.chunks_exact(WORDS) {
                    let value = if next < entries { next } else { 0 };
                    entry[0].store(value, Ordering::Relaxed);
                    entry[1].store(2 * value, Ordering::Relaxed);
                    next += 1;
                }
            }
            // Release: pairs with the Acquire in `receive`; the chunk is written.
            self.sent.store(number + 1, Ordering::Release);
        }
    }

    /// Returns the sums of the first and of the second words.
    fn receive(&self, entries: u64) -> (u64, u64) {
        let mut sent = 0;
        let (mut first, mut second) = (0_u64, 0_u64);
        for number in 0..entries.div_ceil(CHUNK as u64) {
            if sent == number {
                sent = wait(|| self.sent.load(Ordering::Acquire), |it| it > number);
            }
            for entry in self.chunk(number).chunks_exact(WORDS) {
                // Relaxed: acquired by the wait above.
                first = first.wrapping_add(entry[0].load(Ordering::Relaxed));
                second = second.wrapping_add(entry[1].load(Ordering::Relaxed));
            }
            // Release: pairs with the Acquire in `send`; the chunk was read for the last time.
            self.received.store(number + 1, Ordering::Release);
        }
        (first, second)
    }
}

fn wait(mut position: impl FnMut() -> u64, enough: impl Fn(u64) -> bool) -> u64 {
    let mut looks = 0;
    loop {
        let now = position();
        if enough(now) {
            return now;
        }
        looks += 1;
        if looks == PATIENCE {
            looks = 0;
            thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}

impl Contender for Limit {
    fn name(&self) -> &'static str {
        "bare hand-over"
    }

    /// Hands over as many entries as `input` has records. There is one receiver, and chunks have 64 entries.
    fn run(&self, input: &Input, _workers: usize, _batch: usize) -> Outcome {
        let entries = input.len() as u64;
        let (shared, ready) = (Shared::new(), Barrier::new(2));
        let (seconds, sums) = thread::scope(|scope| {
            let receiving = scope.spawn(|| {
                ready.wait();
                shared.receive(entries)
            });
            ready.wait();
            let start = Instant::now();
            shared.send(entries);
            let sums = receiving.join().expect("receiving cannot panic");
            (start.elapsed().as_secs_f64(), sums)
        });
        let sum = entries * entries.saturating_sub(1) / 2;
        let whole = sums == (sum, 2 * sum);
        Outcome {
            seconds,
            records: entries,
            watermarks: input.ends().iter().map(|end| if whole { *end } else { 0 }).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{contender::run_checked, input::Flights};

    #[test]
    fn all_entries_arrive() {
        let january = Flights::january().unwrap();
        for records in [0, 1, 63, 64, 65, 64 * RING as usize + 1, 300_007] {
            run_checked(&Limit, &january.input(records, 4), 2, 64).unwrap();
        }
    }

    #[test]
    fn a_lost_entry_shows_in_the_sums() {
        let shared = Shared::new();
        shared.send(100);
        assert_eq!(shared.receive(100), (4_950, 9_900));
        let shared = Shared::new();
        shared.send(100);
        shared.words[2 * 70].store(0, Ordering::Relaxed);
        assert_eq!(shared.receive(100), (4_880, 9_900));
    }
}
