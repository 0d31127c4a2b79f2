//! The result of a run, as a table or as one line of JSON.

use std::io::{self, Write};
use std::time::Duration;

use comfy_table::{Table, presets};
use indicatif::HumanCount;
use serde::Serialize;

use super::checker::Slowest;
use super::latency::Quantiles;
use super::violation::Violation;

/// What the demo found.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    /// Records appended.
    pub(crate) records: u64,
    /// Distinct records handled.
    pub(crate) handled: u64,
    /// Records never handled: of all after a whole run, else of those that commits have passed.
    pub(crate) lost: u64,
    /// Times that a record was handled again.
    pub(crate) duplicates: u64,
    pub(crate) order_violations: u64,
    /// Most records seen finished above the first unfinished record of their partition, at one time.
    pub(crate) max_above_watermark: u64,
    /// Commits that the broker acknowledged.
    pub(crate) commits: u64,
    /// Records between the committed offset and the end, by the broker's word.
    pub(crate) final_lag: u64,
    /// From the first append to the last acknowledged commit.
    pub(crate) seconds: f64,
    pub(crate) records_per_s: f64,
    pub(crate) append_to_handler_us: Quantiles,
    pub(crate) handler_to_commit_us: Quantiles,
    pub(crate) ok: bool,
    /// Stopped by a signal before the end.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) interrupted: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) first_violation: Option<FirstViolation>,
    #[serde(skip)]
    pub(crate) violations: u64,
    #[serde(skip)]
    pub(crate) slowest: Slowest,
    #[serde(skip)]
    pub(crate) partitions: usize,
}

/// A violation, for machines.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct FirstViolation {
    kind: &'static str,
    partition: i32,
    offset: i64,
    message: String,
}

impl From<&Violation> for FirstViolation {
    fn from(violation: &Violation) -> Self {
        Self {
            kind: violation.breach.kind(),
            partition: violation.partition,
            offset: violation.offset,
            message: violation.to_string(),
        }
    }
}

impl Report {
    /// Prints to standard output.
    ///
    /// # Errors
    ///
    /// If standard output cannot be written to; that its reader has gone is none.
    pub(crate) fn print(&self, json: bool) -> io::Result<()> {
        let text = if json { serde_json::to_string(self)? } else { self.table() };
        match writeln!(io::stdout().lock(), "{text}") {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            result => result,
        }
    }

    fn table(&self) -> String {
        let count = |count: u64| HumanCount(count).to_string();
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        let mut row = |name: &str, value: String| {
            table.add_row([name.to_owned(), value]);
        };
        row(
            "records",
            format!(
                "{}, {} handled, in {:.2} s",
                count(self.records),
                count(self.handled),
                self.seconds
            ),
        );
        row("records/s", count(self.records_per_s as u64));
        row("most finished above the watermark", count(self.max_above_watermark));
        row("commits", count(self.commits));
        row("append to handler", quantiles(&self.append_to_handler_us));
        row("handler to committed", quantiles(&self.handler_to_commit_us));
        row("lost, duplicates", format!("{}, {}", count(self.lost), count(self.duplicates)));
        row("order violations", count(self.order_violations));
        row("final lag", count(self.final_lag));
        row("verdict", self.verdict());
        format!("{}\n\n{}", table.trim_fmt(), self.classic())
    }

    fn verdict(&self) -> String {
        match (&self.first_violation, self.interrupted) {
            (None, false) => "ok".to_owned(),
            (None, true) => {
                "ok so far: stopped by a signal, what had been taken was drained".to_owned()
            }
            (Some(_), _) if self.violations == 1 => "BROKEN: 1 violation".to_owned(),
            (Some(_), _) => format!("BROKEN: {} violations", count_of(self.violations)),
        }
    }

    /// What the classic design would have done with the same input: facts of its structure, no measured figure.
    fn classic(&self) -> String {
        let Slowest { nanos, partition, offset } = self.slowest;
        let slowest = time(Duration::from_nanos(nanos));
        format!(
            "The classic design (one list under one mutex for all partitions) commits nothing past the slowest record of \
             any partition:\nhere a handler of {slowest} (partition {partition}, offset {offset}) would have held the \
             commits of all {} partitions. Its partial\nbatches wait for a 5 s ticker, and a full worker's channel stops \
             intake for all. Measured side by side:\n`cargo run --release -p plimsoll-benches --bin scoreboard`.",
            self.partitions
        )
    }
}

fn count_of(count: u64) -> String {
    HumanCount(count).to_string()
}

fn quantiles(quantiles: &Quantiles) -> String {
    let time = |micros: f64| time(Duration::from_nanos((micros * 1_000.0) as u64));
    format!(
        "p50 {}, p99 {}, p99.9 {}, max {}",
        time(quantiles.p50),
        time(quantiles.p99),
        time(quantiles.p999),
        time(quantiles.max)
    )
}

/// Three digits, in the unit that suits.
fn time(time: Duration) -> String {
    let (value, unit) = match time.as_nanos() {
        0..1_000_000 => (time.as_secs_f64() * 1e6, "us"),
        1_000_000..1_000_000_000 => (time.as_secs_f64() * 1e3, "ms"),
        _ => (time.as_secs_f64(), "s"),
    };
    let digits = match value {
        100.0.. => 0,
        10.0.. => 1,
        _ => 2,
    };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::super::violation::Breach;
    use super::*;

    fn report() -> Report {
        let quantiles = Quantiles { p50: 12.5, p99: 1_234.0, p999: 20_000.0, max: 2_500_000.0 };
        Report {
            records: 27_004,
            handled: 27_004,
            lost: 0,
            duplicates: 0,
            order_violations: 0,
            max_above_watermark: 1_234,
            commits: 17,
            final_lag: 0,
            seconds: 1.5,
            records_per_s: 18_002.6,
            append_to_handler_us: quantiles,
            handler_to_commit_us: quantiles,
            ok: true,
            interrupted: false,
            first_violation: None,
            violations: 0,
            slowest: Slowest { nanos: 19_900_000, partition: 2, offset: 77 },
            partitions: 4,
        }
    }

    #[test]
    fn json_is_one_line_with_the_promised_fields_in_order() {
        let line = serde_json::to_string(&report()).expect("plain data");
        let quantiles = r#"{"p50":12.5,"p99":1234.0,"p999":20000.0,"max":2500000.0}"#;
        let expected = format!(
            r#"{{"records":27004,"handled":27004,"lost":0,"duplicates":0,"order_violations":0,"max_above_watermark":1234,"commits":17,"final_lag":0,"seconds":1.5,"records_per_s":18002.6,"append_to_handler_us":{quantiles},"handler_to_commit_us":{quantiles},"ok":true}}"#
        );
        assert_eq!(line, expected);
    }

    #[test]
    fn a_violation_stands_in_json_and_table() {
        let violation = Violation { partition: 3, offset: 9, breach: Breach::Lost };
        let report = Report {
            ok: false,
            violations: 2,
            first_violation: Some(FirstViolation::from(&violation)),
            ..report()
        };
        let line = serde_json::to_string(&report).expect("plain data");
        let expected = r#""ok":false,"first_violation":{"kind":"lost","partition":3,"offset":9,"message":"partition 3, offset 9: never handled: lost"}}"#;
        assert!(line.ends_with(expected), "{line}");
        assert!(report.table().contains("BROKEN: 2 violations"));
    }

    #[test]
    fn the_table_reads_well() {
        let table = report().table();
        for part in [
            "27,004, 27,004 handled, in 1.50 s",
            "18,002",
            "1,234",
            "p50 12.5 us, p99 1.23 ms, p99.9 20.0 ms, max 2.50 s",
            "ok",
            "a handler of 19.9 ms (partition 2, offset 77) would have held the commits of all 4 partitions",
        ] {
            assert!(table.contains(part), "`{part}` in\n{table}");
        }
    }
}
