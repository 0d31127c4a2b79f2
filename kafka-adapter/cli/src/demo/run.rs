//! One run from start to end: starts the threads, watches them, stops them, and adds up.

use std::panic;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::checker::{Checker, Follower, Progress};
use super::clock::Clock;
use super::cluster::{Cluster, Offsets};
use super::console::Console;
use super::consumer::{self, DRAIN_BUDGET};
use super::failure::Failure;
use super::input::Input;
use super::options::Options;
use super::plan::Plan;
use super::producer::{Appender, Signs};
use super::report::{FirstViolation, Report};
use super::signals::Signals;
use super::violation::Breach;

/// How often the run is looked at: what finishes out of order between two looks is not seen.
const LOOK: Duration = Duration::from_millis(1);

/// What counts of the time between two looks: a process that was suspended has not lost its patience.
const LONGEST_LOOK: Duration = Duration::from_millis(100);

/// How long the group may take to get its first partition: a broker holds back a new group's first assignment for three
/// seconds, and a slow machine may need several of them.
const FIRST_ASSIGNMENT: Duration = Duration::from_secs(60);

/// How long the consumer may take to leave, beyond its own budget for handlers.
const LEAVE: Duration = Duration::from_secs(20);

/// Why the watch ended.
enum Ending {
    /// All records were appended and committed over.
    Complete,
    /// A signal.
    Interrupted,
    /// Nothing moved for that long.
    Stalled(Duration),
    /// The consumer returned by itself.
    ConsumerReturned,
    /// The environment failed.
    Failed(Failure),
}

/// Does what `plimsoll demo` is for.
///
/// # Errors
///
/// Bad input or environment. A broken promise is no error here but stands in the report; if both happen, it is the report.
pub(crate) fn run(options: &Options) -> Result<Report, Failure> {
    let clock = Clock::start();
    let signals = Signals::listen()?;
    let input = Arc::new(Input::load(options.input.as_deref(), options.key_column())?);
    let plan = Plan::new(Arc::clone(&input), options.records, options.partitions);
    let checker = Arc::new(Checker::new(clock, input, &plan.counts()));
    let cluster = Cluster::start(options.brokers.as_deref(), options.partitions)?;
    let console = Console::new(plan.len());

    let run = Run { options, signals, plan, checker, clock, console };
    let (report, consumer_left) = run.on(&cluster);
    let left_over = if consumer_left { cluster.remove() } else { cluster.abandon() };
    for left_over in left_over {
        run.console.note(&left_over);
    }
    report
}

struct Run<'a> {
    options: &'a Options,
    signals: Signals,
    plan: Plan,
    checker: Arc<Checker>,
    clock: Clock,
    console: Console,
}

type Consumed = Result<plimsoll_kafka::Report, plimsoll_kafka::Error>;

impl Run<'_> {
    /// Second value: whether the consumer has left the cluster.
    fn on(&self, cluster: &Cluster) -> (Result<Report, Failure>, bool) {
        let signs = Arc::new(Signs::default());
        let started = self.start(cluster, &signs);
        let (consuming, handle, mut appending) = match started {
            Ok(started) => started,
            Err(failure) => return (Err(failure), true),
        };

        let mut highest = 0;
        let ending = self.watch(cluster, &signs, &consuming, &mut appending, &mut highest);
        signs.stop.store(true, Ordering::Release);
        handle.stop();
        if let Ending::Stalled(patience) = ending
            && let Some((partition, offset, state)) = self.checker.holder()
        {
            self.checker.report(
                partition,
                offset,
                Breach::Stalled { seconds: patience.as_secs(), state },
            );
        }
        let consumed = self.wait_for_leave(consuming, &handle);
        if let Some(appending) = appending
            && let Err(panicked) = appending.join()
        {
            panic::resume_unwind(panicked);
        }
        self.console.clear();
        let left = consumed.is_some();
        (self.conclude(cluster, ending, consumed, highest), left)
    }

    #[expect(clippy::type_complexity, reason = "three handles, used once")]
    fn start(
        &self,
        cluster: &Cluster,
        signs: &Arc<Signs>,
    ) -> Result<
        (JoinHandle<Consumed>, plimsoll_kafka::Handle, Option<JoinHandle<Result<(), Failure>>>),
        Failure,
    > {
        let consumer = consumer::build(self.options, cluster, &self.checker, signs, &self.console)?;
        let appender = Appender::new(
            cluster,
            self.plan.clone(),
            Arc::clone(&self.checker),
            self.clock,
            Arc::clone(signs),
        )?;
        let handle = consumer.handle();
        let thread = |name: &str| thread::Builder::new().name(name.to_owned());
        let appending =
            thread("demo-producer").spawn(|| appender.run()).map_err(Failure::Thread)?;
        match thread("demo-consumer").spawn(|| consumer.run()) {
            Ok(consuming) => Ok((consuming, handle, Some(appending))),
            Err(error) => {
                signs.stop.store(true, Ordering::Release);
                let _ = appending.join();
                Err(Failure::Thread(error))
            }
        }
    }

    /// Looks at the run until it ends. `appending` is taken when the producer has ended.
    fn watch(
        &self,
        cluster: &Cluster,
        signs: &Signs,
        consuming: &JoinHandle<Consumed>,
        appending: &mut Option<JoinHandle<Result<(), Failure>>>,
        highest: &mut u64,
    ) -> Ending {
        let patience = self.options.patience();
        let mut follower = Follower::new(self.plan.partitions());
        let mut last = Progress::default();
        let mut quiet = Duration::ZERO;
        let mut looked = Instant::now();
        loop {
            thread::sleep(LOOK);
            let begun = signs.begin.load(Ordering::Acquire);
            let progress = self.checker.progress(&mut follower);
            *highest = progress.above_watermark.max(*highest);
            self.console.show(&progress, begun);
            if self.signals.count() > 0 {
                return Ending::Interrupted;
            }
            if let Some(ended) = appending.take_if(|appending| appending.is_finished()) {
                match ended.join() {
                    Ok(Ok(())) => {}
                    Ok(Err(failure)) => return Ending::Failed(failure),
                    Err(panicked) => panic::resume_unwind(panicked),
                }
            }
            if consuming.is_finished() {
                return Ending::ConsumerReturned;
            }
            if appending.is_none()
                && progress.appended == self.plan.len()
                && progress.committed == progress.appended
            {
                return Ending::Complete;
            }
            let now = Instant::now();
            quiet += (now - looked).min(LONGEST_LOOK);
            looked = now;
            let moves =
                |progress: Progress| (progress.appended, progress.finished, progress.committed);
            if moves(progress) != moves(last) {
                quiet = Duration::ZERO;
            }
            last = progress;
            if !begun {
                if quiet >= FIRST_ASSIGNMENT {
                    let (topic, seconds) = (cluster.topic().to_owned(), FIRST_ASSIGNMENT.as_secs());
                    return Ending::Failed(Failure::NotAssigned { topic, seconds });
                }
                continue;
            }
            if quiet >= patience {
                // Without its broker nobody can keep a promise.
                return match cluster.probe() {
                    Ok(()) => Ending::Stalled(patience),
                    Err(failure) => Ending::Failed(failure),
                };
            }
        }
    }

    /// Waits until the consumer has returned; `None` if it does not. A further signal makes it give up its handlers.
    fn wait_for_leave(
        &self,
        consuming: JoinHandle<Consumed>,
        handle: &plimsoll_kafka::Handle,
    ) -> Option<thread::Result<Consumed>> {
        let deadline = Instant::now() + DRAIN_BUDGET + LEAVE;
        let mut hurried = false;
        while !consuming.is_finished() {
            if Instant::now() >= deadline {
                return None;
            }
            if !hurried && self.signals.count() > 1 {
                hurried = true;
                handle.stop();
            }
            thread::sleep(LOOK);
        }
        Some(consuming.join())
    }

    /// Checks what can only be checked at the end, and adds up.
    fn conclude(
        &self,
        cluster: &Cluster,
        ending: Ending,
        consumed: Option<thread::Result<Consumed>>,
        highest: u64,
    ) -> Result<Report, Failure> {
        let checker = &self.checker;
        // A consumer that has not left may still commit, a broker that failed need not be asked again.
        let ask = consumed.is_some() && !matches!(ending, Ending::Failed(_));
        let offsets = if ask { Some(cluster.offsets()) } else { None };
        let complete = matches!(ending, Ending::Complete);
        let interrupted = matches!(ending, Ending::Interrupted);
        let early = matches!(ending, Ending::ConsumerReturned);
        let mut failure = match ending {
            Ending::Failed(failure) => Some(failure),
            _ => None,
        };
        match consumed {
            None => {
                self.blame_holder(Breach::DidNotStop { seconds: (DRAIN_BUDGET + LEAVE).as_secs() });
            }
            Some(Err(panicked)) => {
                let reason = panicked.downcast::<String>().map_or_else(
                    |other| {
                        other
                            .downcast::<&str>()
                            .map_or_else(|_| String::new(), |text| (*text).to_owned())
                    },
                    |text| *text,
                );
                self.blame_holder(Breach::Ended { reason: format!("it panicked: {reason}") });
            }
            // The demo's own handler never fails.
            Some(Ok(Err(error @ plimsoll_kafka::Error::Handler { partition, offset, .. }))) => {
                checker.report(partition, offset, Breach::Ended { reason: error.to_string() });
            }
            Some(Ok(Err(error))) => failure = failure.or(Some(error.into())),
            Some(Ok(Ok(_))) if early => {
                self.blame_holder(Breach::Ended { reason: "nobody had told it to".to_owned() });
            }
            Some(Ok(Ok(_))) => {}
        }

        let lag = match offsets {
            Some(Ok(offsets)) => self.compare(&offsets, complete),
            Some(Err(unknown)) => {
                failure = failure.or(Some(unknown));
                self.lag_by_events()
            }
            None => self.lag_by_events(),
        };
        let lost = checker.count_lost(complete);
        let progress = checker.progress(&mut Follower::new(self.plan.partitions()));
        let seconds = checker.seconds();
        let (violations, order_violations) = checker.violations();
        let first_violation = checker.first_violation();
        match (failure, &first_violation) {
            (Some(failure), None) => return Err(failure),
            (Some(failure), Some(_)) => self.console.note(&failure.to_string()),
            (None, _) => {}
        }
        if let Some(violation) = &first_violation {
            self.console.note(&format!("broken promise: {violation}"));
        }
        Ok(Report {
            records: progress.appended,
            handled: progress.finished,
            lost,
            duplicates: checker.duplicates(),
            order_violations,
            max_above_watermark: highest,
            commits: checker.commits(),
            final_lag: lag,
            seconds,
            records_per_s: if seconds > 0.0 {
                (progress.committed as f64 / seconds).round()
            } else {
                0.0
            },
            append_to_handler_us: checker.append_to_handler(),
            handler_to_commit_us: checker.handler_to_commit(),
            ok: violations == 0,
            interrupted,
            first_violation: first_violation.as_ref().map(FirstViolation::from),
            violations,
            slowest: checker.slowest(),
            partitions: self.plan.partitions(),
        })
    }

    /// Reports at the record that holds the first watermark, or at the very first record if none does.
    fn blame_holder(&self, breach: Breach) {
        let (partition, offset) =
            self.checker.holder().map_or((0, 0), |(partition, offset, _)| (partition, offset));
        self.checker.report(partition, offset, breach);
    }

    /// Holds the broker's word against the events. Returns the lag.
    fn compare(&self, offsets: &[Offsets], complete: bool) -> u64 {
        let mut lag = 0;
        for (partition, Offsets { end, committed }) in (0i32..).zip(offsets) {
            // A commit that no event told of must be as true as the others.
            if let Some(committed) = committed {
                self.checker.committed(partition, *committed);
            }
            let committed = committed.unwrap_or(0);
            let behind = u64::try_from(end - committed).unwrap_or(0);
            if behind > 0 && lag == 0 && complete {
                self.checker.report(partition, committed, Breach::Lag { end: *end });
            }
            lag += behind;
        }
        lag
    }

    fn lag_by_events(&self) -> u64 {
        let appended = self.checker.appended_to();
        (0..)
            .zip(appended)
            .map(|(partition, end)| end.saturating_sub(self.checker.committed_over(partition)))
            .sum()
    }
}
