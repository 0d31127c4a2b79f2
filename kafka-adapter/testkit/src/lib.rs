//! Real Apache Kafka brokers for tests: started, stopped, killed, paused and restarted.
//!
//! ```no_run
//! let kafka = plimsoll_testkit::Kafka::start();
//! kafka.create_topic("orders", 4);
//! kafka.produce("orders", [(0, "key", "value")]);
//! kafka.kill(0);
//! kafka.restart(0);
//! assert_eq!(kafka.end_offset("orders", 0), 1);
//! ```
//!
//! [`Kafka::builder`] has more: several brokers, broker properties, a proxy before each broker. [`shared`] is one broker
//! for all tests of a process.
//!
//! # What has to be installed
//!
//! A JDK 17 or newer (that of `JAVA_HOME`, else the `java` of the search path), Maven 3.8 or newer for the first
//! start, and a POSIX shell. There is no need for root, a container or an installed Kafka. What is missing is named by
//! the panic or error; no test is skipped.
//!
//! # The cache
//!
//! The first start has Maven fetch Kafka, 54 MB, and records which classes a broker loads, which halves the time of
//! later starts. This goes to `$PLIMSOLL_KAFKA_CACHE`, else `$XDG_CACHE_HOME/plimsoll`, else `$HOME/.cache/plimsoll`,
//! and can be deleted at any time.
//!
//! # The end
//!
//! Brokers die with the handle. They die as well when the process ends without dropping it: by returning from `main`
//! with a handle in a static, by a panic, by SIGKILL. Their data is removed in each of these cases, unless the
//! environment variable `PLIMSOLL_KAFKA_KEEP` is set to something.

#[cfg(not(unix))]
compile_error!("the test kit controls its brokers by signals and a POSIX shell");

mod client;
mod cluster;
mod config;
mod error;
mod group;
mod install;
mod java;
mod kafka;
mod metadata;
mod ports;
mod process;
mod proxy;
mod text;
mod wire;

pub use client::Outgoing;
pub use cluster::{Builder, Cluster};
pub use error::Error;
pub use group::{Committed, Member};
pub use install::KAFKA_VERSION;
pub use kafka::{Kafka, shared};
pub use proxy::Proxy;
