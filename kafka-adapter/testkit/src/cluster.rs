//! Brokers: how they are set up, started, stopped and killed.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::Kafka;
use crate::client::KeptProducer;
use crate::error::Error;
use crate::install::{Archive, Install};
use crate::java::Java;
use crate::metadata::probe;
use crate::ports::Port;
use crate::process::{Signal, Supervised, Sweeper};
use crate::proxy::Proxy;
use crate::text;

/// How often a start is tried with other ports when a port turns out to be taken.
const ATTEMPTS: usize = 5;

/// How long a broker may take to end after a signal.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// The node id of the separate controller; brokers count from 0.
const CONTROLLER: u32 = 3000;

/// Properties by which the test kit finds its brokers again.
const OWN: &[&str] = &[
    "advertised.listeners",
    "controller.listener.names",
    "controller.quorum.bootstrap.servers",
    "controller.quorum.voters",
    "inter.broker.listener.name",
    "listener.security.protocol.map",
    "listeners",
    "log.dir",
    "log.dirs",
    "metadata.log.dir",
    "node.id",
    "process.roles",
];

/// Properties under which tests are quick and say what they mean; [`Builder::property`] goes over them.
const DEFAULTS: &[(&str, &str)] = &[
    // A misspelt topic is an error.
    ("auto.create.topics.enable", "false"),
    // The first member of a group does not wait for others.
    ("group.initial.rebalance.delay.ms", "0"),
    ("offsets.topic.num.partitions", "1"),
    ("transaction.state.log.num.partitions", "1"),
    ("transaction.state.log.min.isr", "1"),
    ("share.coordinator.state.topic.num.partitions", "1"),
    ("share.coordinator.state.topic.min.isr", "1"),
    // 128 MiB of heap, and a sixth of a second to clear them, by default.
    ("log.cleaner.dedupe.buffer.size", "4194304"),
    // Along with a shorter session: a dead broker is noticed after 2 or 3 s instead of 9 s.
    ("broker.heartbeat.interval.ms", "500"),
    ("num.network.threads", "2"),
    ("num.io.threads", "4"),
];

/// How Kafka is to be started; made by [`Kafka::builder`].
#[derive(Clone, Debug)]
#[must_use = "nothing is started before `start` or `try_start`"]
pub struct Builder {
    brokers: usize,
    properties: BTreeMap<String, String>,
    jvm_options: Vec<OsString>,
    proxied: bool,
    limit: Duration,
    java: Option<PathBuf>,
    maven: Option<PathBuf>,
    cache: Option<PathBuf>,
    #[cfg(test)]
    first_port: Option<u16>,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            brokers: 1,
            properties: BTreeMap::new(),
            jvm_options: Vec::new(),
            proxied: false,
            limit: Duration::from_secs(60),
            java: None,
            maven: None,
            cache: None,
            #[cfg(test)]
            first_port: None,
        }
    }
}

impl Builder {
    /// How many brokers; 1 unless set. One broker is its own controller. More than one get a controller process of
    /// their own, so that any of them can be killed, and all of them, without the cluster losing its metadata quorum.
    pub fn brokers(mut self, brokers: usize) -> Self {
        self.brokers = brokers;
        self
    }

    /// Sets a broker property, on all brokers, as in `server.properties`.
    ///
    /// Refused at the start are the properties of listeners, directories and roles, by which the brokers are reached.
    /// Refused is also `min.insync.replicas`, because Kafka 4.1 keeps its default in the cluster's metadata, where it
    /// goes over the property; set it per topic.
    pub fn property(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.properties.insert(name.into(), value.into());
        self
    }

    /// Adds an option of the JVMs of the brokers, after those of the test kit, so that it goes over them. Theirs are
    /// for a quick start: 512 MiB of heap, the serial collector and the first compiler alone. A benchmark may want
    /// `-Xmx2g`, `-XX:+UseParallelGC -XX:-UseSerialGC` or `-XX:TieredStopAtLevel=4`.
    pub fn jvm_option(mut self, option: impl Into<OsString>) -> Self {
        self.jvm_options.push(option.into());
        self
    }

    /// Puts a [`Proxy`] before each broker and has the brokers advertise it: what connects through
    /// [`Kafka::bootstrap`] stays behind the proxies. The brokers among each other and the requests of the test kit
    /// itself go past them.
    pub fn proxied(mut self, proxied: bool) -> Self {
        self.proxied = proxied;
        self
    }

    /// How long brokers may take to get ready, each time they are started; 60 s unless set.
    pub fn start_limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// The `java` program, instead of that of `JAVA_HOME` or the search path.
    pub fn java(mut self, program: impl Into<PathBuf>) -> Self {
        self.java = Some(program.into());
        self
    }

    /// The `mvn` program, instead of that of the search path.
    pub fn maven(mut self, program: impl Into<PathBuf>) -> Self {
        self.maven = Some(program.into());
        self
    }

    /// The directory for the jars, instead of the one described at [the crate](crate).
    pub fn cache(mut self, directory: impl Into<PathBuf>) -> Self {
        self.cache = Some(directory.into());
        self
    }

    /// Starts the brokers and waits until they are ready.
    ///
    /// # Panics
    ///
    /// If that fails, with the message of [`try_start`](Self::try_start)'s error.
    #[track_caller]
    pub fn start(self) -> Kafka {
        crate::kafka::expect(self.try_start())
    }

    /// Starts the brokers and waits until they are ready: until each of them knows all of them and can create a topic.
    ///
    /// # Errors
    ///
    /// If Java is missing or too old; if Maven is missing or fails, and the jars are not in the cache; if a property is
    /// refused; if a broker ends early or does not get ready within the limit, with the end of its log.
    pub fn try_start(self) -> Result<Kafka, Error> {
        self.check()?;
        let java = Java::find(self.java.as_deref())?;
        let install = Install::ensure(java, self.maven.as_deref(), self.cache.as_deref())?;
        let archive = install.archive(|file| record(&install, file));
        Cluster::start(&self, &install, &archive).map(Kafka::new)
    }

    fn check(&self) -> Result<(), Error> {
        let refuse = |name: &str, reason: &str| {
            Err(Error::Setting { name: name.into(), reason: reason.into() })
        };
        if self.brokers == 0 || self.brokers > CONTROLLER as usize {
            return refuse("brokers", "from 1 to 3000");
        }
        for name in self.properties.keys() {
            if OWN.contains(&name.as_str()) {
                return refuse(name, "is chosen by the test kit");
            }
            if name == "min.insync.replicas" {
                return refuse(name, "has no effect on a broker; set it per topic");
            }
            let letters = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
            if name.is_empty() || !name.chars().all(letters) {
                return refuse(name, "is no name of a broker property");
            }
        }
        Ok(())
    }

    fn port(&mut self) -> Result<Port, Error> {
        #[cfg(test)]
        if let Some(number) = self.first_port.take() {
            return Ok(Port::unchecked(number));
        }
        Port::pick().map_err(Error::io("find a free port"))
    }
}

/// Runs one broker through what tests do, so that the class archive has the classes for it.
fn record(install: &Install, file: &Path) -> Result<(), Error> {
    let cluster = Cluster::start(&Builder::default(), install, &Archive::Write(file.to_owned()))?;
    cluster.create_topic("classes", 1)?;
    cluster.produce("classes", [(0, "key", "value")])?;
    cluster.consume_once("classes", "classes")?;
    // The archive is written at an orderly end only.
    cluster.stop(0)
}

/// Running brokers, with operations that return errors. See [`Kafka`] for the same operations with panics.
#[derive(Debug)]
pub struct Cluster {
    // The order of the fields is the order in which they are dropped: the JVMs go before their directories.
    producer: Mutex<Option<KeptProducer>>,
    brokers: Vec<Node>,
    controller: Option<Node>,
    proxies: Vec<Proxy>,
    install: Install,
    archive: Archive,
    limit: Duration,
    scratch: Scratch,
}

/// The directory of everything that the brokers write.
#[derive(Debug)]
struct Scratch {
    path: PathBuf,
    // The directory is removed before its sweeper is let go, which then finds nothing to do.
    _directory: Option<TempDir>,
    _sweeper: Option<Sweeper>,
}

impl Scratch {
    fn create() -> Result<Self, Error> {
        let directory = tempfile::Builder::new()
            .prefix("plimsoll-kafka-")
            .tempdir()
            .map_err(Error::io("create a temporary directory"))?;
        let keep = std::env::var_os("PLIMSOLL_KAFKA_KEEP").is_some_and(|value| !value.is_empty());
        if keep {
            let path = directory.keep();
            eprintln!("keeping the directory of the brokers: {}", path.display());
            return Ok(Self { path, _directory: None, _sweeper: None });
        }
        let sweeper = Sweeper::start(directory.path()).map_err(Error::io("run /bin/sh"))?;
        Ok(Self {
            path: directory.path().to_owned(),
            _directory: Some(directory),
            _sweeper: Some(sweeper),
        })
    }
}

/// A broker or controller.
#[derive(Debug)]
struct Node {
    name: String,
    directory: PathBuf,
    log: PathBuf,
    properties: PathBuf,
    jvm_options: Vec<OsString>,
    ports: Ports,
    state: Mutex<NodeState>,
}

#[derive(Debug, Default)]
struct NodeState {
    jvm: Option<Supervised>,
    paused: bool,
}

/// The listeners of a node; each of them is held for as long as the node exists, running or not.
#[derive(Debug)]
struct Ports {
    /// For clients, behind the proxy if there is one.
    client: Option<Port>,
    /// For the other brokers and the test kit.
    internal: Option<Port>,
    controller: Option<Port>,
}

impl Node {
    fn state(&self) -> MutexGuard<'_, NodeState> {
        self.state.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    fn launch(&self, install: &Install, archive: &Archive) -> Result<(), Error> {
        let mut arguments = install.options(archive);
        let mut crash = OsString::from("-XX:ErrorFile=");
        crash.push(self.directory.join("crash.log"));
        arguments.push(crash);
        arguments.extend(self.jvm_options.iter().cloned());
        arguments.push("-cp".into());
        arguments.push(install.class_path().clone());
        arguments.push("kafka.Kafka".into());
        arguments.push(self.properties.clone().into());
        let jvm = Supervised::start(install.program(), arguments, &self.directory, &self.log)
            .map_err(Error::io(format!("start {}", self.name)))?;
        *self.state() = NodeState { jvm: Some(jvm), paused: false };
        Ok(())
    }

    fn running(&self) -> bool {
        let mut state = self.state();
        match &mut state.jvm {
            Some(jvm) => matches!(jvm.ended(), Ok(None)),
            None => false,
        }
    }

    /// An error if the process has ended.
    fn check(&self) -> Result<(), Error> {
        let mut state = self.state();
        let ended = match &mut state.jvm {
            Some(jvm) => {
                jvm.ended().map_err(Error::io(format!("ask for the state of {}", self.name)))?
            }
            None => return Err(self.not_running()),
        };
        match ended {
            Some(status) => Err(self.not_ready(format!("it ended, {status}"))),
            None => Ok(()),
        }
    }

    fn not_running(&self) -> Error {
        Error::NotRunning { node: self.name.clone() }
    }

    fn not_ready(&self, reason: String) -> Error {
        Error::Start { node: self.name.clone(), reason, log: text::tail_of_file(&self.log, 40) }
    }

    fn signal(&self, signal: Signal) -> Result<(), Error> {
        let mut state = self.state();
        let sent = match &mut state.jvm {
            Some(jvm) => matches!(jvm.ended(), Ok(None)) && jvm.signal(signal),
            None => false,
        };
        if !sent {
            return Err(self.not_running());
        }
        match signal {
            Signal::Stop => state.paused = true,
            Signal::Continue => state.paused = false,
            Signal::Kill | Signal::Terminate => {}
        }
        Ok(())
    }

    /// Sends a signal and waits for the end.
    fn end(&self, signal: Signal) -> Result<(), Error> {
        self.signal(signal)?;
        let deadline = Instant::now() + STOP_LIMIT;
        // Not held while waiting: whoever asks meanwhile which brokers run gets an answer.
        while self.running() {
            if Instant::now() >= deadline {
                return Err(Error::Stop {
                    node: self.name.clone(),
                    limit: STOP_LIMIT,
                    log: text::tail_of_file(&self.log, 40),
                });
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        *self.state() = NodeState::default();
        Ok(())
    }

    fn internal(&self) -> SocketAddr {
        self.ports.internal.as_ref().expect("every broker has an internal listener").address()
    }
}

impl Cluster {
    fn start(builder: &Builder, install: &Install, archive: &Archive) -> Result<Self, Error> {
        let mut builder = builder.clone();
        let mut attempt = 1;
        loop {
            let cluster = Self::prepare(&mut builder, install, archive)?;
            match cluster.launch() {
                Ok(()) => return Ok(cluster),
                Err(Error::Start { .. }) if attempt < ATTEMPTS && cluster.port_taken() => {
                    attempt += 1;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Writes everything that the JVMs need, without starting one.
    fn prepare(builder: &mut Builder, install: &Install, archive: &Archive) -> Result<Self, Error> {
        let scratch = Scratch::create()?;
        let id = text::random_id();
        let controller_port = builder.port()?;
        let voter = if builder.brokers == 1 { 0 } else { CONTROLLER };
        let quorum = format!("{voter}@{}", controller_port.address());
        let mut cluster = Self {
            producer: Mutex::default(),
            brokers: Vec::new(),
            controller: None,
            proxies: Vec::new(),
            install: install.clone(),
            archive: archive.clone(),
            limit: builder.limit,
            scratch,
        };
        let mut controller_port = Some(controller_port);
        if builder.brokers > 1 {
            let ports = Ports { client: None, internal: None, controller: controller_port.take() };
            let node = cluster.node(builder, &id, CONTROLLER, ports, &quorum, None)?;
            cluster.controller = Some(node);
        }
        for broker in 0..builder.brokers as u32 {
            let client = builder.port()?;
            let mut advertised = client.address();
            if builder.proxied {
                let proxy = Proxy::start(advertised).map_err(Error::io("start a proxy"))?;
                advertised = proxy.address();
                cluster.proxies.push(proxy);
            }
            let ports = Ports {
                client: Some(client),
                internal: Some(builder.port()?),
                controller: controller_port.take(),
            };
            let node = cluster.node(builder, &id, broker, ports, &quorum, Some(advertised))?;
            cluster.brokers.push(node);
        }
        Ok(cluster)
    }

    /// Writes the properties and the storage of one node.
    fn node(
        &self,
        builder: &Builder,
        cluster: &str,
        id: u32,
        ports: Ports,
        quorum: &str,
        advertised: Option<SocketAddr>,
    ) -> Result<Node, Error> {
        let name =
            if advertised.is_some() { format!("broker {id}") } else { "the controller".into() };
        let directory = self.scratch.path.join(name.replace(' ', "-"));
        let storage = directory.join("data");
        self.install.format(&storage, cluster, id)?;

        let mut listeners = Vec::new();
        for (listener, port) in [
            ("PLAINTEXT", &ports.client),
            ("INTERNAL", &ports.internal),
            ("CONTROLLER", &ports.controller),
        ] {
            if let Some(port) = port {
                listeners.push(format!("{listener}://{}", port.address()));
            }
        }
        let roles = match (&ports.client, &ports.controller) {
            (Some(_), Some(_)) => "broker,controller",
            (Some(_), None) => "broker",
            _ => "controller",
        };
        let replication = builder.brokers.min(3).to_string();
        let mut properties: BTreeMap<&str, String> =
            DEFAULTS.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        for name in [
            "default.replication.factor",
            "offsets.topic.replication.factor",
            "transaction.state.log.replication.factor",
            "share.coordinator.state.topic.replication.factor",
        ] {
            properties.insert(name, replication.clone());
        }
        // A single broker has nobody to take over from it: the time only delays its return after a kill.
        let session = if builder.brokers == 1 { "2000" } else { "3000" };
        properties.insert("broker.session.timeout.ms", session.into());
        for (name, value) in &builder.properties {
            properties.insert(name, value.clone());
        }
        properties.insert("process.roles", roles.into());
        properties.insert("node.id", id.to_string());
        properties.insert("controller.quorum.voters", quorum.into());
        properties.insert("controller.listener.names", "CONTROLLER".into());
        properties.insert("listeners", listeners.join(","));
        properties.insert(
            "listener.security.protocol.map",
            "PLAINTEXT:PLAINTEXT,INTERNAL:PLAINTEXT,CONTROLLER:PLAINTEXT".into(),
        );
        if let (Some(advertised), Some(internal)) = (advertised, &ports.internal) {
            properties.insert("inter.broker.listener.name", "INTERNAL".into());
            properties.insert(
                "advertised.listeners",
                format!("PLAINTEXT://{advertised},INTERNAL://{}", internal.address()),
            );
        }
        properties.insert("log.dirs", storage.to_string_lossy().into_owned());
        let lines: String = properties
            .iter()
            .map(|(name, value)| format!("{name}={}\n", text::escape_property(value)))
            .collect();
        let properties = directory.join("server.properties");
        std::fs::write(&properties, lines)
            .map_err(Error::io(format!("write {}", properties.display())))?;
        Ok(Node {
            name,
            log: directory.join("server.log"),
            properties,
            directory,
            jvm_options: builder.jvm_options.clone(),
            ports,
            state: Mutex::default(),
        })
    }

    /// Starts all nodes at once and waits until the cluster is ready.
    fn launch(&self) -> Result<(), Error> {
        let deadline = Instant::now() + self.limit;
        for node in self.nodes() {
            node.launch(&self.install, &self.archive)?;
        }
        let all: Vec<i32> = (0..self.brokers.len() as i32).collect();
        for node in &self.brokers {
            self.wait_until_ready(node, &all, deadline)?;
        }
        self.prepare_producer()
    }

    /// Whether a node could not listen.
    fn port_taken(&self) -> bool {
        self.nodes().any(|node| {
            text::tail_of_file(&node.log, usize::MAX).contains("Address already in use")
        })
    }

    /// Waits until the broker knows all of `known`, has a leader for each partition that it can lead, and gets a
    /// topic through the controller.
    fn wait_until_ready(&self, node: &Node, known: &[i32], deadline: Instant) -> Result<(), Error> {
        let address = node.internal();
        let mut last = "its port is closed".to_owned();
        let mut open = false;
        loop {
            // Whoever fails to start has the reason in its log; the others just wait.
            for other in self.nodes() {
                if known.len() > 1 || std::ptr::eq(other, node) {
                    other.check()?;
                }
            }
            if Instant::now() >= deadline {
                return Err(node.not_ready(format!("{last} after {:?}", self.limit)));
            }
            open = open || TcpStream::connect(address).is_ok();
            if open {
                match probe(address, known) {
                    Ok(()) => return Ok(()),
                    Err(reason) => last = reason,
                }
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.controller.iter().chain(&self.brokers)
    }

    fn broker(&self, broker: usize) -> Result<&Node, Error> {
        self.brokers.get(broker).ok_or(Error::NoSuchBroker { broker, brokers: self.brokers.len() })
    }

    /// How many brokers there are, running or not.
    pub fn brokers(&self) -> usize {
        self.brokers.len()
    }

    /// The addresses for clients, as `bootstrap.servers` wants them; those of the proxies if there are any.
    pub fn bootstrap(&self) -> String {
        let address = |broker: usize| match self.proxies.get(broker) {
            Some(proxy) => proxy.address(),
            None => self.brokers[broker]
                .ports
                .client
                .as_ref()
                .expect("every broker has a listener for clients")
                .address(),
        };
        let addresses: Vec<String> =
            (0..self.brokers.len()).map(|broker| address(broker).to_string()).collect();
        addresses.join(",")
    }

    /// The addresses past the proxies of the brokers that run and are not paused.
    pub(crate) fn reachable(&self) -> Result<Vec<SocketAddr>, Error> {
        let addresses: Vec<SocketAddr> = self
            .brokers
            .iter()
            .filter(|node| node.running() && !node.state().paused)
            .map(Node::internal)
            .collect();
        if addresses.is_empty() {
            return Err(Error::NotRunning { node: "every broker".into() });
        }
        Ok(addresses)
    }

    /// The proxy before a broker.
    ///
    /// # Errors
    ///
    /// If there is no such broker or no proxy.
    pub fn proxy(&self, broker: usize) -> Result<&Proxy, Error> {
        self.broker(broker)?;
        self.proxies.get(broker).ok_or(Error::NoProxy)
    }

    /// Whether the process of a broker exists, paused or not.
    ///
    /// # Errors
    ///
    /// If there is no such broker.
    pub fn running(&self, broker: usize) -> Result<bool, Error> {
        Ok(self.broker(broker)?.running())
    }

    /// The process ids of all running JVMs, brokers and controller.
    pub fn pids(&self) -> Vec<u32> {
        self.nodes()
            .filter(|node| node.running())
            .filter_map(|node| node.state().jvm.as_ref().map(Supervised::pid))
            .collect()
    }

    /// The directory of the brokers' properties, data and logs. It is removed with the handle, unless the environment
    /// variable `PLIMSOLL_KAFKA_KEEP` is set.
    pub fn directory(&self) -> &Path {
        &self.scratch.path
    }

    /// The log of a broker, from all its starts.
    ///
    /// # Errors
    ///
    /// If there is no such broker or the file cannot be read.
    pub fn log(&self, broker: usize) -> Result<String, Error> {
        let log = &self.broker(broker)?.log;
        let bytes = std::fs::read(log).map_err(Error::io(format!("read {}", log.display())))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Kills a broker with SIGKILL and waits for its end.
    ///
    /// # Errors
    ///
    /// If it does not run.
    pub fn kill(&self, broker: usize) -> Result<(), Error> {
        self.forget_producer();
        self.broker(broker)?.end(Signal::Kill)
    }

    /// Stops a broker in order (SIGTERM), so that it hands over its partitions, and waits for its end. A paused broker
    /// is resumed for it.
    ///
    /// # Errors
    ///
    /// If it does not run, or still runs after 60 s.
    pub fn stop(&self, broker: usize) -> Result<(), Error> {
        self.forget_producer();
        let node = self.broker(broker)?;
        if node.state().paused {
            node.signal(Signal::Continue)?;
        }
        node.end(Signal::Terminate)
    }

    /// Starts a broker again with the same data and ports and waits until it is ready; stops it first if it runs.
    ///
    /// # Errors
    ///
    /// As [`stop`](Self::stop); if the broker does not get ready within the limit.
    pub fn restart(&self, broker: usize) -> Result<(), Error> {
        let node = self.broker(broker)?;
        if node.running() {
            self.stop(broker)?;
        }
        node.launch(&self.install, &self.archive)?;
        self.wait_until_ready(node, &[broker as i32], Instant::now() + self.limit)?;
        // Of before, it may have given up on this broker for a while.
        self.forget_producer();
        self.prepare_producer()
    }

    /// Suspends a broker (SIGSTOP): its connections stay open and nothing moves. Returns when the signal is sent.
    ///
    /// # Errors
    ///
    /// If it does not run.
    pub fn pause(&self, broker: usize) -> Result<(), Error> {
        self.broker(broker)?.signal(Signal::Stop)
    }

    /// Lets a paused broker go on (SIGCONT), without waiting for anything.
    ///
    /// # Errors
    ///
    /// If it does not run.
    pub fn resume(&self, broker: usize) -> Result<(), Error> {
        self.broker(broker)?.signal(Signal::Continue)
    }

    pub(crate) fn kept_producer(&self) -> MutexGuard<'_, Option<KeptProducer>> {
        self.producer.lock().unwrap_or_else(|poison| poison.into_inner())
    }

    /// Has the next records sent by a new producer, which knows nothing of what was before.
    pub(crate) fn forget_producer(&self) {
        let producer = self.kept_producer().take();
        drop(producer);
    }

    pub(crate) fn install(&self) -> (&Install, &Archive) {
        (&self.install, &self.archive)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // All of them die at the same time; the fields' own drops wait for their ends.
        for node in self.nodes() {
            if let Some(jvm) = &mut node.state().jvm {
                jvm.release();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};

    #[test]
    fn a_taken_port_is_replaced() {
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut builder = Kafka::builder();
        builder.first_port = Some(taken.local_addr().unwrap().port());
        let kafka = builder.start();
        assert!(kafka.running(0));
        kafka.create_topic("a", 1);
    }

    #[test]
    fn properties_that_would_get_lost_are_refused() {
        for name in ["listeners", "node.id", "min.insync.replicas", "a b", ""] {
            let error = Kafka::builder().property(name, "1").try_start().unwrap_err();
            assert!(
                matches!(&error, Error::Setting { name: refused, .. } if refused == name),
                "{error}"
            );
        }
        let error = Kafka::builder().brokers(0).try_start().unwrap_err();
        assert!(matches!(error, Error::Setting { .. }), "{error}");
    }

    #[test]
    fn a_broker_that_does_not_start_is_shown_with_its_log() {
        let error = Kafka::builder().property("num.io.threads", "many").try_start().unwrap_err();
        let Error::Start { node, log, .. } = &error else { panic!("{error}") };
        assert_eq!(node, "broker 0");
        assert!(log.contains("num.io.threads"), "{log}");
        assert!(error.to_string().contains("num.io.threads"));
    }
}
