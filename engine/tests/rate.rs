//! Rates on real threads, in a virtual time: the driver decides what time it is.

use parking_lot::Mutex;
use plimsoll_engine::{Builder, EpochId, Executor, Handler, Outcome, Rate, Retry, Route, Waiter};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn hash(key: u64) -> u64 {
    (key + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

struct Driver {
    executor: Executor<u64>,
    waiter: Waiter,
    epoch: EpochId,
    next: i64,
    now: Duration,
    began: Instant,
}

impl Driver {
    fn new(builder: Builder, handler: Handler<u64>) -> Self {
        let waiter = Waiter::new();
        let mut executor = builder.start(waiter.waker(), handler).unwrap();
        let epoch = executor.open(0, 100_000).unwrap();
        let now = Duration::ZERO;
        executor.pass(now);
        Driver { executor, waiter, epoch, next: 0, now, began: Instant::now() }
    }

    fn offer(&mut self, keys: impl IntoIterator<Item = u64>) {
        let records = keys.into_iter().zip(self.next..);
        let records = records.map(|(key, offset)| (offset, Route::Ordered(hash(key)), key));
        self.next += i64::from(self.executor.offer_all(self.epoch, records).unwrap());
    }

    /// Lets everything that may go at this time be handled.
    fn settle(&mut self) {
        let quiet = |executor: &Executor<u64>, now| {
            !executor.busy() && executor.next_due().is_none_or(|due| due > now)
        };
        loop {
            self.executor.pass(self.now);
            self.executor.flush();
            if quiet(&self.executor, self.now) {
                return;
            }
            assert!(self.began.elapsed() < Duration::from_secs(60), "it does not come to rest");
            self.waiter.wait(Duration::from_micros(100), || false);
        }
    }
}

#[test]
fn an_executor_keeps_its_rate_and_asks_for_no_more() {
    let handled = Arc::new(AtomicU64::new(0));
    let handler = Handler::each({
        let handled = Arc::clone(&handled);
        move |_: &u64| {
            handled.fetch_add(1, Ordering::AcqRel);
        }
    });
    let builder = Executor::builder().workers(4).rate(Rate::per_second(1_000).burst(100));
    let mut driver = Driver::new(builder, handler);
    // Offered all at once; and from then on only what is asked for.
    driver.offer(0..500);
    let mut offered = 500;
    for step in 0..100_u64 {
        driver.now = Duration::from_millis(step * 10);
        driver.settle();
        let may = 100 + step * 10;
        let expected = if step < 40 { may } else { may.min(offered) };
        assert_eq!(handled.load(Ordering::Acquire), expected.min(offered), "at {:?}", driver.now);
        let demand = u64::from(driver.executor.demand());
        assert_eq!(demand, may.saturating_sub(offered).min(100), "at {:?}", driver.now);
        driver.offer(0..demand);
        offered += demand;
    }
    driver.settle();
    assert_eq!(driver.executor.progress(driver.epoch).unwrap().watermark, offered as i64);
}

#[test]
fn a_hot_key_keeps_its_rate_and_its_order_while_others_go_on() {
    let seen: Arc<Mutex<HashMap<u64, u64>>> = Arc::default();
    let handler = Handler::each({
        let seen = Arc::clone(&seen);
        move |key: &u64| *seen.lock().entry(*key).or_default() += 1
    });
    let builder = Executor::builder().workers(4).shards(4);
    let builder = builder.key_rate(Rate::per_second(50).burst(3));
    let mut driver = Driver::new(builder, handler);
    driver.offer((0..2_000).map(|number| if number % 2 == 0 { 0 } else { number }));
    driver.settle();
    assert_eq!(seen.lock()[&0], 3);
    assert_eq!(seen.lock().len(), 1_001, "every other key");
    for step in 1..=50 {
        driver.now = Duration::from_millis(step * 20);
        driver.settle();
        assert_eq!(seen.lock()[&0], 3 + step, "at {:?}", driver.now);
    }
    // A longer time between two passes brings no more than the burst.
    driver.now = Duration::from_secs(5);
    driver.settle();
    assert_eq!(seen.lock()[&0], 56);
    // A revoke does not wait for rates.
    let progress = driver.executor.close(driver.epoch).unwrap();
    assert!(progress.unfinished > 900);
    driver.settle();
    assert!(!driver.executor.busy());
    assert_eq!(driver.executor.next_due(), None);
}

#[test]
fn attempts_count_and_do_not_starve_other_keys() {
    let (failed, good) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let handler = Handler::each({
        let (failed, good) = (Arc::clone(&failed), Arc::clone(&good));
        move |key: &u64| {
            if *key < 50 {
                failed.fetch_add(1, Ordering::AcqRel);
                return Outcome::Failed("always".to_owned());
            }
            good.fetch_add(1, Ordering::AcqRel);
            Outcome::Done
        }
    });
    let builder = Executor::builder().workers(2).retry(Retry::forever().first(Duration::ZERO));
    let mut driver = Driver::new(builder.rate(Rate::per_second(100).burst(10)), handler);
    // 50 keys whose records fail again and again, and 100 good ones behind them.
    driver.offer(0..150);
    for step in 0..=400_u64 {
        driver.now = Duration::from_millis(step * 10);
        driver.settle();
        let calls = failed.load(Ordering::Acquire) + good.load(Ordering::Acquire);
        assert_eq!(calls, 10 + step, "at {:?}", driver.now);
    }
    assert_eq!(good.load(Ordering::Acquire), 100, "they had their turn");
    driver.executor.halt(driver.epoch);
    driver.settle();
}

#[test]
fn rates_of_nothing_are_refused() {
    let waiter = Waiter::new();
    for (rate, name) in [(Rate::per_second(0), "0"), (Rate::per_second(5).burst(0), "burst of 0")] {
        for builder in [Executor::builder().rate(rate), Executor::builder().key_rate(rate)] {
            let error = builder.each(waiter.waker(), |_: &u64| ()).unwrap_err().to_string();
            assert!(error.contains("rate`") && error.contains(name), "{error}");
        }
    }
}
