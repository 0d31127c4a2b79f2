//! What a person sees while the demo runs: a progress line on a terminal, and notes.

use std::collections::HashSet;
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};

use indicatif::{HumanCount, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::checker::Progress;

/// Writes to standard error; the progress line only if that is a terminal.
#[derive(Debug, Clone)]
pub(crate) struct Console {
    bar: Option<ProgressBar>,
    said: Arc<Mutex<HashSet<String>>>,
}

impl Console {
    pub(crate) fn new(records: u64) -> Self {
        let bar = io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(
                Some(records),
                ProgressDrawTarget::stderr_with_hz(10),
            );
            let style = "{spinner} {bar:20} {human_pos}/{human_len} handled  {wide_msg}";
            bar.with_style(
                ProgressStyle::with_template(style)
                    .unwrap_or_else(|_| ProgressStyle::default_bar()),
            )
        });
        Self { bar, said: Arc::default() }
    }

    /// Shows how far the run is.
    pub(crate) fn show(&self, progress: &Progress, assigned: bool) {
        let Some(bar) = &self.bar else { return };
        bar.set_position(progress.finished);
        bar.set_message(if assigned {
            format!(
                "{} committed, {} above the watermark",
                HumanCount(progress.committed),
                HumanCount(progress.above_watermark)
            )
        } else {
            "waiting for the group's first assignment".to_owned()
        });
    }

    /// Takes the progress line away.
    pub(crate) fn clear(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// Tells what may come again and again, such as an error of a connection: the first time only.
    pub(crate) fn note_once(&self, text: &str) {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.insert(text.to_owned()) {
            self.note(text);
        }
    }

    /// Tells something besides.
    pub(crate) fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| note(text)),
            None => note(text),
        }
    }
}

/// Writes one line to standard error. There is nobody left to tell if that fails.
pub(crate) fn note(text: &str) {
    let _ = writeln!(io::stderr(), "plimsoll: {text}");
}
