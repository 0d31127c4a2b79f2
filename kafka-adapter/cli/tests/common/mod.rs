//! Runs the program and takes its answer apart.
#![allow(dead_code, reason = "each test file uses its part")]

use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Long enough for a slow machine, short enough to see a hang.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    /// From the look for its end to the end.
    pub(crate) took: Duration,
}

impl Ended {
    /// The one line of JSON.
    pub(crate) fn json(&self) -> serde_json::Value {
        assert_eq!(self.stdout.lines().count(), 1, "{}\n{}", self.stdout, self.stderr);
        serde_json::from_str(&self.stdout).unwrap()
    }

    /// Refused: exit code 2, the thing is named, nothing on standard output, no panic.
    pub(crate) fn assert_refused(&self, named: &[&str]) {
        assert_eq!(self.code, Some(2), "{}", self.stderr);
        assert_eq!(self.stdout, "");
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        for name in named {
            assert!(self.stderr.contains(name), "{name:?} is not named: {}", self.stderr);
        }
    }
}

pub(crate) fn start(arguments: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_plimsoll"))
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

pub(crate) fn end(mut child: Child) -> Ended {
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("no end within {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let took = began.elapsed();
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    Ended {
        took,
        code: status.code(),
        stdout: String::from_utf8(stdout).unwrap(),
        stderr: String::from_utf8(stderr).unwrap(),
    }
}

pub(crate) fn demo(arguments: &[&str]) -> Ended {
    end(start(&[&["demo"][..], arguments].concat()))
}

/// Every promise was kept, by the program's own account and by its figures.
pub(crate) fn assert_kept(ended: &Ended, records: u64) {
    let json = ended.json();
    assert_eq!(ended.code, Some(0), "{json}\n{}", ended.stderr);
    assert_eq!(json["ok"], true, "{json}");
    assert_eq!((&json["records"], &json["handled"]), (&records.into(), &records.into()), "{json}");
    for zero in ["lost", "order_violations", "final_lag"] {
        assert_eq!(json[zero], 0, "{zero}: {json}");
    }
    for number in ["duplicates", "max_above_watermark"] {
        assert!(json[number].is_number(), "{number}: {json}");
    }
    for positive in ["commits", "seconds", "records_per_s"] {
        assert!(json[positive].as_f64() > Some(0.0), "{positive}: {json}");
    }
    for absent in ["interrupted", "first_violation"] {
        assert!(json.get(absent).is_none(), "{absent}: {json}");
    }
    for latency in ["append_to_handler_us", "handler_to_commit_us"] {
        let figures = ["p50", "p99", "p999", "max"].map(|figure| json[latency][figure].as_f64());
        assert!(figures[0] > Some(0.0) && figures.is_sorted(), "{latency}: {json}");
    }
}
