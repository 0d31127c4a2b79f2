//! What can go wrong while brokers are started and driven.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// What has to be installed before a broker can start; part of several messages.
pub(crate) const NEEDED: &str = "install a JDK 17 or newer and Maven 3.8 or newer";

/// An operation of the test kit that failed.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The `java` program could not be started.
    JavaMissing {
        /// The program that was tried.
        program: PathBuf,
        /// Why it could not be started.
        source: io::Error,
    },
    /// The `java` program is older than Kafka needs.
    JavaTooOld {
        /// The program that was asked.
        program: PathBuf,
        /// The version it named.
        version: String,
    },
    /// The `java` program ran, but did not tell its version.
    JavaUnusable {
        /// The program that was asked.
        program: PathBuf,
        /// What it printed.
        output: String,
    },
    /// The `mvn` program could not be started, and the jars of Kafka are not in the cache yet.
    MavenMissing {
        /// The program that was tried.
        program: PathBuf,
        /// Why it could not be started.
        source: io::Error,
    },
    /// Maven ran and could not fetch the jars of Kafka.
    Download {
        /// The end of what Maven printed.
        output: String,
    },
    /// No directory for the cache is known.
    NoCache,
    /// The builder was given a value that the test kit cannot work with.
    Setting {
        /// The setting or broker property.
        name: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The operating system refused something.
    Io {
        /// What was being done.
        action: String,
        /// What the operating system said.
        source: io::Error,
    },
    /// The storage directory of a broker could not be formatted.
    Format {
        /// The end of what the storage tool printed.
        output: String,
    },
    /// A broker or controller did not get ready.
    Start {
        /// Which one, for example `broker 1`.
        node: String,
        /// What was waited for, or how it ended.
        reason: String,
        /// The end of its log.
        log: String,
    },
    /// A broker did not end within the limit.
    Stop {
        /// Which one.
        node: String,
        /// How long it was waited for.
        limit: Duration,
        /// The end of its log.
        log: String,
    },
    /// There is no broker of this index.
    NoSuchBroker {
        /// The index that was asked for, from 0.
        broker: usize,
        /// How many brokers there are.
        brokers: usize,
    },
    /// The operation needs a running broker.
    NotRunning {
        /// The broker, or all of them.
        node: String,
    },
    /// The brokers were started without proxies.
    NoProxy,
    /// A request to the brokers failed.
    Request {
        /// What was asked for, for example ``create topic `orders` ``.
        request: String,
        /// What the client library said.
        source: rdkafka::error::KafkaError,
    },
    /// A broker refused a request, or no broker answered it in time.
    Refused {
        /// What was asked for, for example ``describe group `readers` ``.
        request: String,
        /// What the broker said, or what went wrong last.
        reason: String,
    },
    /// A state was waited for and did not come.
    Timeout {
        /// The state.
        what: String,
        /// How long it was waited for.
        limit: Duration,
    },
    /// A command line tool of Kafka failed.
    Tool {
        /// The class that was run.
        class: String,
        /// How it ended.
        status: String,
        /// The end of what it printed.
        output: String,
    },
}

impl Error {
    pub(crate) fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }

    pub(crate) fn request(
        request: impl Into<String>,
    ) -> impl FnOnce(rdkafka::error::KafkaError) -> Self {
        let request = request.into();
        move |source| Self::Request { request, source }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::JavaMissing { program, source } => write!(
                f,
                "cannot run `{}` ({source}): {NEEDED}, or set JAVA_HOME",
                program.display()
            ),
            Self::JavaTooOld { program, version } => write!(
                f,
                "`{}` is Java {version}, too old for Kafka: {NEEDED}, or set JAVA_HOME",
                program.display()
            ),
            Self::JavaUnusable { program, output } => write!(
                f,
                "`{}` does not tell its version: {NEEDED}, or set JAVA_HOME; it printed:\n{output}",
                program.display()
            ),
            Self::MavenMissing { program, source } => write!(
                f,
                "cannot run `{}` ({source}), which is to fetch the jars of Kafka: {NEEDED}",
                program.display()
            ),
            Self::Download { output } => {
                write!(f, "Maven could not fetch the jars of Kafka:\n{output}")
            }
            Self::NoCache => write!(
                f,
                "no directory for the jars of Kafka: set PLIMSOLL_KAFKA_CACHE, XDG_CACHE_HOME or HOME"
            ),
            Self::Setting { name, reason } => write!(f, "setting `{name}`: {reason}"),
            Self::Io { action, source } => write!(f, "cannot {action}: {source}"),
            Self::Format { output } => {
                write!(f, "cannot format the storage of a broker:\n{output}")
            }
            Self::Start { node, reason, log } => {
                write!(f, "{node} did not get ready: {reason}; the end of its log:\n{log}")
            }
            Self::Stop { node, limit, log } => {
                write!(f, "{node} did not end within {limit:?}; the end of its log:\n{log}")
            }
            Self::NoSuchBroker { broker, brokers } => {
                write!(f, "no broker {broker}: there are {brokers}, counted from 0")
            }
            Self::NotRunning { node } => write!(f, "{node} is not running"),
            Self::NoProxy => {
                write!(f, "the brokers have no proxies: start them with `proxied(true)`")
            }
            Self::Request { request, source } => write!(f, "cannot {request}: {source}"),
            Self::Refused { request, reason } => write!(f, "cannot {request}: {reason}"),
            Self::Timeout { what, limit } => write!(f, "{what}: not within {limit:?}"),
            Self::Tool { class, status, output } => {
                write!(f, "tool {class} failed ({status}):\n{output}")
            }
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::JavaMissing { source, .. }
            | Self::MavenMissing { source, .. }
            | Self::Io { source, .. } => Some(source),
            Self::Request { source, .. } => Some(source),
            _ => None,
        }
    }
}
