//! Ctrl-C and SIGTERM: the first stops and drains, the second stops at once, the third kills.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals as Incoming;

use super::failure::Failure;

/// How often the process was told to stop.
#[derive(Debug, Clone)]
pub(crate) struct Signals {
    count: Arc<AtomicU32>,
}

impl Signals {
    /// Listens from now on, on a thread that lives as long as the process.
    ///
    /// # Errors
    ///
    /// [`Failure::Signals`], [`Failure::Thread`]
    pub(crate) fn listen() -> Result<Self, Failure> {
        let mut incoming = Incoming::new([SIGINT, SIGTERM]).map_err(Failure::Signals)?;
        let signals = Self { count: Arc::default() };
        let count = Arc::clone(&signals.count);
        let listen = move || {
            for signal in incoming.forever() {
                if count.fetch_add(1, Ordering::AcqRel) >= 2 {
                    signal_hook::low_level::exit(128 + signal);
                }
            }
        };
        thread::Builder::new()
            .name("demo-signals".to_owned())
            .spawn(listen)
            .map_err(Failure::Thread)?;
        Ok(signals)
    }

    /// Signals so far.
    pub(crate) fn count(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }
}
