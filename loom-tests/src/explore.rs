//! Runs a model in every way loom knows, and says in how many.

use loom::model::Builder;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Most scheduling points of one execution. The models need far fewer: one that needs more spins.
const MOST_BRANCHES: usize = 2_000;

/// How much of the executions of a model is explored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bound {
    /// All that loom can tell apart.
    Exhaustive,
    /// Those in which at most so many times a thread is stopped that could have gone on.
    Preemptions(usize),
}

/// Runs `model` once per execution within `bound` and returns the different outcomes, so that a
/// test can say which must occur, not only which must not. Prints the number of executions.
///
/// # Panics
/// When any execution panics, when loom finds two accesses of a cell that are not ordered, or when
/// no thread can go on.
pub fn explore<T, F>(bound: Bound, model: F) -> BTreeSet<T>
where
    T: Ord + Send + 'static,
    F: Fn() -> T + Send + Sync + 'static,
{
    // Set here and not taken from the environment: a run that explores less must not look the same.
    let mut builder = Builder::new();
    builder.max_branches = MOST_BRANCHES;
    builder.max_permutations = None;
    builder.max_duration = None;
    builder.preemption_bound = match bound {
        Bound::Exhaustive => None,
        Bound::Preemptions(most) => Some(most),
    };
    let seen = Arc::new(Mutex::new((BTreeSet::new(), 0_u64)));
    let began = Instant::now();
    builder.check({
        let seen = Arc::clone(&seen);
        move || {
            let outcome = model();
            let mut seen = seen.lock().expect("no model runs while the lock is held");
            seen.0.insert(outcome);
            seen.1 += 1;
        }
    });
    let (outcomes, executions) =
        std::mem::take(&mut *seen.lock().expect("no model runs while the lock is held"));
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("a model");
    println!("{name}: {executions} executions, {bound:?}, {:.2?}", began.elapsed());
    outcomes
}
