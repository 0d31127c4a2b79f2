//! The command line of `plimsoll demo`.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use clap::builder::RangedU64ValueParser;

use super::work::Cost;

/// Most records of one run: the checker keeps about ten bytes for each.
const MOST_RECORDS: u64 = 100_000_000;

/// Produce a CSV file to Kafka, consume it in parallel, and check every promise by itself.
///
/// Without options: 27,004 flights that left New York in January 2013, on a broker inside this process. Each line is one
/// record, its key is the tail number. Handlers take from nothing to several milliseconds, so records finish out of order;
/// the demo checks that none is lost, that each key's records are handled in order, and that no commit passes an
/// unfinished record.
///
/// The first Ctrl-C (or SIGTERM) stops and drains, the second stops at once, the third kills.
/// Exit codes: 0 ok (also after Ctrl-C, if no promise was broken), 1 a promise was broken, 2 bad input or environment.
#[derive(Debug, Clone, Args)]
pub(crate) struct Options {
    /// CSV file with a header line, plain or compressed (.gz, .xz), instead of the built-in flights.
    #[arg(long, value_name = "FILE.csv[.gz|.xz]")]
    pub(crate) input: Option<PathBuf>,

    /// Column whose value is the record's key; a record with an empty value has no key [default: tailnum].
    #[arg(long, value_name = "COLUMN")]
    pub(crate) key: Option<String>,

    /// Records in total: repeats or cuts the input [default: the input, once].
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<u64>::new().range(1..=MOST_RECORDS))]
    pub(crate) records: Option<u64>,

    /// Use this cluster (comma-separated list); the demo makes a topic and a group of its own and deletes both.
    #[arg(long, value_name = "HOST:PORT", value_parser = parse_brokers)]
    pub(crate) brokers: Option<String>,

    /// Partitions of the demo's topic.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = RangedU64ValueParser::<u32>::new().range(1..=1_000))]
    pub(crate) partitions: u32,

    /// Threads that run handlers. More than cores by default, for a handler often waits.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = RangedU64ValueParser::<usize>::new().range(1..=1_024))]
    pub(crate) workers: usize,

    /// Give the handler batches of up to N records, which finish as a whole [default: one record at a time].
    #[arg(long, value_name = "N", value_parser = RangedU64ValueParser::<usize>::new().range(1..=4_096))]
    pub(crate) batch: Option<usize>,

    /// Most records of a partition that are admitted and not yet committed over.
    #[arg(long, value_name = "N", default_value_t = 65_536, value_parser = RangedU64ValueParser::<usize>::new().range(1..=16_777_216))]
    pub(crate) window: usize,

    /// Time of a handler in microseconds, fixed ("200") or drawn evenly from a range ("0..3000").
    /// Default: nine in ten free, the others tens of microseconds to 20 ms.
    #[arg(long, value_name = "US|FROM..TO")]
    pub(crate) handler_us: Option<HandlerTime>,

    /// Seed of the handlers' times.
    #[arg(long, value_name = "N", default_value_t = 2013)]
    pub(crate) seed: u64,

    /// Seconds without any progress after which the run ends as a broken promise
    /// [default: 20 and ten times the longest handler].
    #[arg(long, value_name = "SECONDS", value_parser = RangedU64ValueParser::<u64>::new().range(1..=86_400))]
    pub(crate) patience: Option<u64>,

    /// Print the result as one line of JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,

    /// Break a promise on purpose.
    #[cfg(feature = "planted-faults")]
    #[arg(long, hide = true, value_name = "FAULT")]
    pub(crate) plant: Option<Plant>,
}

impl Options {
    /// Column whose value is the key.
    pub(crate) fn key_column(&self) -> &str {
        self.key.as_deref().unwrap_or("tailnum")
    }

    /// What a handler costs.
    pub(crate) fn cost(&self) -> Cost {
        match self.handler_us {
            None => Cost::mixed(self.seed),
            Some(time) => Cost::even(self.seed, time.from, time.to),
        }
    }

    /// How long nothing may move.
    pub(crate) fn patience(&self) -> Duration {
        match self.patience {
            Some(seconds) => Duration::from_secs(seconds),
            None => Duration::from_secs(20) + 10 * self.cost().longest(),
        }
    }
}

/// Range of a handler's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HandlerTime {
    from: Duration,
    to: Duration,
}

impl FromStr for HandlerTime {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const MOST: u64 = 60_000_000;
        let number = |part: &str| match part.trim().parse::<u64>() {
            Ok(value) if value <= MOST => Ok(Duration::from_micros(value)),
            Ok(value) => Err(format!("{value} is more than {MOST} (one minute)")),
            Err(_) => Err(format!("`{part}` is not a whole number of microseconds")),
        };
        let (from, to) = match text.split_once("..") {
            Some((from, to)) => (number(from)?, number(to)?),
            None => (number(text)?, number(text)?),
        };
        if from > to {
            return Err(format!("the range `{text}` runs backwards"));
        }
        Ok(Self { from, to })
    }
}

fn parse_brokers(text: &str) -> Result<String, String> {
    let brokers: Vec<&str> = text.split(',').map(str::trim).collect();
    if brokers.iter().any(|broker| broker.is_empty()) {
        return Err("an empty address in the list".to_owned());
    }
    for broker in &brokers {
        // An address without a port is the client's default port, as everywhere in Kafka.
        if let Some((host, port)) = broker.rsplit_once(':')
            && !broker.ends_with(']')
            && (host.is_empty() || port.parse::<u16>().is_err())
        {
            return Err(format!("`{broker}` is not HOST:PORT"));
        }
    }
    Ok(brokers.join(","))
}

/// A fault to plant, see `plimsoll_kafka::Fault`.
#[cfg(feature = "planted-faults")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Plant {
    /// Commit one past the lowest unfinished record.
    CommitTooFar,
    /// Hand two records of one key to the handler in the wrong order.
    SwapKey,
    /// Count one record as finished without handling it.
    DropTicket,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handler_time_is_a_number_or_a_range() {
        let time = |text: &str| text.parse::<HandlerTime>();
        let us = Duration::from_micros;
        assert_eq!(time("200"), Ok(HandlerTime { from: us(200), to: us(200) }));
        assert_eq!(time("0..3000"), Ok(HandlerTime { from: us(0), to: us(3000) }));
        assert!(time("5..2").unwrap_err().contains("backwards"));
        assert!(time("x").unwrap_err().contains("`x`"));
        assert!(time("1..").unwrap_err().contains("``"));
        assert!(time("60000001").unwrap_err().contains("one minute"));
    }

    #[test]
    fn brokers_are_hosts_with_ports() {
        assert_eq!(parse_brokers("a:1, b:2").as_deref(), Ok("a:1,b:2"));
        assert_eq!(parse_brokers("kafka").as_deref(), Ok("kafka"));
        assert_eq!(parse_brokers("[::1]:9092").as_deref(), Ok("[::1]:9092"));
        assert_eq!(parse_brokers("[::1]").as_deref(), Ok("[::1]"));
        assert!(parse_brokers("").is_err());
        assert!(parse_brokers("a:1,,b:2").is_err());
        assert!(parse_brokers("a:port").unwrap_err().contains("a:port"));
        assert!(parse_brokers("a:99999").is_err());
        assert!(parse_brokers(":9092").is_err());
    }
}
