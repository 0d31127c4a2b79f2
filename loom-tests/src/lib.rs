//! What the models of the engine share: the explorer, witnesses that loom watches, a worker.
//!
//! The models are the tests of this package, one file per mechanism; the README lists them. They
//! need `RUSTFLAGS="--cfg loom"`, which swaps the engine's atomics, cells and locks for loom's.
//! Without it this library is empty and the only tests are those that compare the README's tables
//! with the test files.

#[cfg(loom)]
mod explore;
#[cfg(loom)]
mod witness;
#[cfg(loom)]
mod worker;

#[cfg(loom)]
pub use explore::{Bound, explore};
#[cfg(loom)]
pub use witness::{Effect, Handled, Spared};
#[cfg(loom)]
pub use worker::{Parking, Worker, lane};
