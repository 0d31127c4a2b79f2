//! The one place that knows whether the primitives are real or loom's models of them.
//!
//! Everything else in the crate takes its atomics, cells and locks from here, so that
//! `RUSTFLAGS="--cfg loom"` verifies the code that ships.

#[cfg(not(loom))]
mod real {
    /// A queue from any thread to any thread.
    pub(crate) use crossbeam_queue::SegQueue as Ends;
    pub(crate) use crossbeam_utils::sync::{Parker, Unparker};
    pub(crate) use parking_lot::Mutex;
    pub(crate) use std::sync::Arc;
    pub(crate) use std::sync::atomic::{
        AtomicBool, AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering, fence,
    };

    /// `std`'s cell with loom's access style, so that each access is a visible scope.
    #[derive(Debug)]
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        #[inline(always)]
        pub(crate) fn with<R>(&self, f: impl FnOnce(*const T) -> R) -> R {
            f(self.0.get())
        }

        #[inline(always)]
        pub(crate) fn with_mut<R>(&self, f: impl FnOnce(*mut T) -> R) -> R {
            f(self.0.get())
        }
    }

    /// A number that one side writes and another reads, ordered by an atomic beside it. Plain
    /// moves; the model also checks that the order is there.
    #[derive(Debug)]
    pub(crate) struct Ordered64(AtomicI64);

    impl Ordered64 {
        pub(crate) fn new(value: i64) -> Self {
            Self(AtomicI64::new(value))
        }

        #[inline(always)]
        pub(crate) fn get(&self) -> i64 {
            // Relaxed: the caller has synchronised with the writer.
            self.0.load(Ordering::Relaxed)
        }

        #[inline(always)]
        pub(crate) fn set(&self, value: i64) {
            // Relaxed: the caller publishes it with a Release of its own.
            self.0.store(value, Ordering::Relaxed);
        }
    }
}

#[cfg(loom)]
mod model {
    pub(crate) use loom::cell::UnsafeCell;
    pub(crate) use loom::sync::Arc;
    pub(crate) use loom::sync::atomic::{
        AtomicBool, AtomicI64, AtomicU8, AtomicU32, AtomicU64, Ordering, fence,
    };

    /// loom's mutex with `parking_lot`'s signatures.
    #[derive(Debug)]
    pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> loom::sync::MutexGuard<'_, T> {
            self.0.lock().unwrap()
        }

        pub(crate) fn try_lock(&self) -> Option<loom::sync::MutexGuard<'_, T>> {
            self.0.try_lock().ok()
        }
    }

    /// loom does not see what `crossbeam-queue` orders: a queue behind its mutex instead, which orders
    /// more.
    #[derive(Debug)]
    pub(crate) struct Ends<T>(Mutex<std::collections::VecDeque<T>>);

    impl<T> Ends<T> {
        pub(crate) fn new() -> Self {
            Ends(Mutex::new(std::collections::VecDeque::new()))
        }

        pub(crate) fn push(&self, end: T) {
            self.0.lock().push_back(end);
        }

        pub(crate) fn pop(&self) -> Option<T> {
            self.0.lock().pop_front()
        }

        pub(crate) fn len(&self) -> usize {
            self.0.lock().len()
        }

        pub(crate) fn is_empty(&self) -> bool {
            self.len() == 0
        }
    }

    /// A parker that has no time-out in the model: a lost wake-up is a deadlock, which loom reports.
    #[derive(Debug)]
    pub(crate) struct Parker(Unparker);

    #[derive(Debug, Clone)]
    pub(crate) struct Unparker(Arc<loom::sync::Notify>);

    impl Parker {
        pub(crate) fn new() -> Self {
            Parker(Unparker(Arc::new(loom::sync::Notify::new())))
        }

        pub(crate) fn unparker(&self) -> &Unparker {
            &self.0
        }

        pub(crate) fn park_timeout(&self, _: std::time::Duration) {
            self.0.0.wait();
        }
    }

    impl Unparker {
        pub(crate) fn unpark(&self) {
            self.0.notify();
        }
    }

    /// As the real one, with a tracked cell beside it: loom cannot reorder a load behind a later
    /// store, but it does see that a read and a write of the cell are not ordered.
    ///
    /// The cell is not `Sync`. The real lock around it is, and loom does not see it: it is never
    /// held across an operation at which loom switches threads.
    #[derive(Debug)]
    pub(crate) struct Ordered64(AtomicI64, parking_lot::Mutex<UnsafeCell<()>>);

    impl Ordered64 {
        pub(crate) fn new(value: i64) -> Self {
            Self(AtomicI64::new(value), parking_lot::Mutex::new(UnsafeCell::new(())))
        }

        pub(crate) fn get(&self) -> i64 {
            let value = self.0.load(Ordering::Relaxed);
            self.1.lock().with(|_| ());
            value
        }

        pub(crate) fn set(&self, value: i64) {
            self.0.store(value, Ordering::Relaxed);
            self.1.lock().with_mut(|_| ());
        }
    }
}

#[cfg(loom)]
pub(crate) use model::*;
#[cfg(not(loom))]
pub(crate) use real::*;
