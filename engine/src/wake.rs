//! How the driving thread sleeps: until it is woken, or until a deadline.

use crate::sync::{Arc, AtomicU8, Ordering, Parker, Unparker, fence};
use std::time::Duration;

/// How the driving thread is.
const AWAKE: u8 = 0;
/// Asleep until there is something to do.
const NAPPING: u8 = 1;
/// Asleep because a window refused its record: also until records have ended.
const REFUSED: u8 = 2;

#[derive(Debug)]
struct Shared {
    napping: AtomicU8,
    unparker: Unparker,
}

/// The sleeping side: one per driving thread.
///
/// No wake-up is lost: the sleeper announces itself, fences, and looks once more; who makes work
/// fences and then looks whether somebody sleeps. One of the two sees the other.
#[derive(Debug)]
pub struct Waiter {
    parker: Parker,
    shared: Arc<Shared>,
}

/// The waking side: cheap to clone, callable from any thread. When nobody sleeps it costs one
/// fence and one load.
#[derive(Debug, Clone)]
pub struct Waker {
    shared: Arc<Shared>,
}

impl Default for Waiter {
    fn default() -> Self {
        Self::new()
    }
}

impl Waiter {
    /// A waiter for one thread.
    pub fn new() -> Self {
        let parker = Parker::new();
        let unparker = parker.unparker().clone();
        let shared = Arc::new(Shared { napping: AtomicU8::new(AWAKE), unparker });
        Waiter { parker, shared }
    }

    /// The waking side.
    pub fn waker(&self) -> Waker {
        Waker { shared: Arc::clone(&self.shared) }
    }

    /// Sleeps until a [`Waker`] wakes it or `limit` has passed. `ready` is asked once more after
    /// the sleep has been announced; when it says `true` the call returns at once.
    pub fn wait(&self, limit: Duration, ready: impl FnOnce() -> bool) {
        self.sleep(NAPPING, limit, ready);
    }

    /// As [`wait`](Self::wait), for a thread whose record was refused: records that end wake it, too.
    /// Otherwise they wake nobody, and a thread that sleeps in `wait` hears only of workers that have
    /// nothing left to do.
    pub fn wait_refused(&self, limit: Duration, ready: impl FnOnce() -> bool) {
        self.sleep(REFUSED, limit, ready);
    }

    fn sleep(&self, how: u8, limit: Duration, ready: impl FnOnce() -> bool) {
        // Relaxed: ordered by the fence.
        self.shared.napping.store(how, Ordering::Relaxed);
        // SeqCst: pairs with the fence in `wake`; either `ready` sees the work or `wake` sees us.
        fence(Ordering::SeqCst);
        if !ready() {
            self.parker.park_timeout(limit);
        }
        // Relaxed: a late `wake` costs at most one early return of the next `wait`.
        self.shared.napping.store(AWAKE, Ordering::Relaxed);
    }

    /// The broken twin of [`wait`](Self::wait), without the fence, for the model that must fail.
    #[cfg(loom)]
    pub fn wait_weakly(&self, limit: Duration, ready: impl FnOnce() -> bool) {
        self.sleep_weakly(NAPPING, limit, ready);
    }

    /// That of [`wait_refused`](Self::wait_refused).
    #[cfg(loom)]
    pub(crate) fn wait_refused_weakly(&self, limit: Duration, ready: impl FnOnce() -> bool) {
        self.sleep_weakly(REFUSED, limit, ready);
    }

    #[cfg(loom)]
    fn sleep_weakly(&self, how: u8, limit: Duration, ready: impl FnOnce() -> bool) {
        self.shared.napping.store(how, Ordering::Relaxed);
        if !ready() {
            self.parker.park_timeout(limit);
        }
        self.shared.napping.store(AWAKE, Ordering::Relaxed);
    }
}

impl Waker {
    /// Wakes the waiter if it sleeps. What the caller did before is visible to it.
    #[inline]
    pub fn wake(&self) {
        // SeqCst: pairs with the fence in `wait`.
        fence(Ordering::SeqCst);
        // Relaxed: ordered by the fence.
        if self.shared.napping.load(Ordering::Relaxed) != AWAKE {
            self.shared.unparker.unpark();
        }
    }

    /// Wakes the waiter if it sleeps in [`Waiter::wait_refused`]: records have ended.
    #[inline]
    pub fn wake_refused(&self) {
        // SeqCst: pairs with the fence in `Waiter::sleep`.
        fence(Ordering::SeqCst);
        // Relaxed: ordered by the fence.
        if self.shared.napping.load(Ordering::Relaxed) == REFUSED {
            self.shared.unparker.unpark();
        }
    }

    /// The broken twin of [`wake_refused`](Self::wake_refused), without the fence, for the model that
    /// must fail.
    #[cfg(loom)]
    pub(crate) fn wake_refused_weakly(&self) {
        if self.shared.napping.load(Ordering::Relaxed) == REFUSED {
            self.shared.unparker.unpark();
        }
    }

    /// The broken twin of [`wake`](Self::wake), without the fence, for the model that must fail.
    #[cfg(loom)]
    pub fn wake_weakly(&self) {
        if self.shared.napping.load(Ordering::Relaxed) != AWAKE {
            self.shared.unparker.unpark();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    #[test]
    fn no_wake_up_is_lost() {
        let waiter = Waiter::new();
        let waker = waiter.waker();
        let made = std::sync::Arc::new(AtomicU32::new(0));
        let maker = std::thread::spawn({
            let made = std::sync::Arc::clone(&made);
            move || {
                for _ in 0..20_000 {
                    made.fetch_add(1, Ordering::Relaxed);
                    waker.wake();
                }
            }
        });
        let mut seen = 0;
        while seen < 20_000 {
            // An hour: a lost wake-up shows as a hang, not as a slow test.
            waiter.wait(Duration::from_secs(3600), || made.load(Ordering::Relaxed) != seen);
            seen = made.load(Ordering::Relaxed);
        }
        maker.join().unwrap();
    }
}
