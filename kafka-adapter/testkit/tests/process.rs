//! What happens around the test process: its death, and the absence of Java and Maven.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use plimsoll_testkit::{Error, Kafka};

const PROGRAM: &str = env!("CARGO_BIN_EXE_plimsoll-testkit");

/// A process that holds brokers.
struct Holder {
    child: Child,
    pids: Vec<u32>,
    directory: PathBuf,
}

impl Holder {
    fn start(arguments: &[&str]) -> Self {
        let mut child = Command::new(PROGRAM)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut pids = Vec::new();
        let mut bootstrap = None;
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        for line in lines.map_while(Result::ok) {
            match line.split_once(' ').unwrap() {
                ("bootstrap", addresses) => bootstrap = Some(addresses.to_owned()),
                ("pid", pid) => pids.push(pid.parse().unwrap()),
                ("directory", directory) => {
                    assert!(bootstrap.is_some());
                    assert!(!pids.is_empty());
                    return Self { child, pids, directory: directory.into() };
                }
                other => panic!("{other:?}"),
            }
        }
        panic!("the brokers did not start");
    }

    fn alive(&self) -> usize {
        let alive = |pid: &&u32| {
            Command::new("kill")
                .args(["-0", &pid.to_string()])
                .stderr(Stdio::null())
                .status()
                .unwrap()
                .success()
        };
        self.pids.iter().filter(alive).count()
    }

    fn assert_gone(&self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while self.alive() > 0 || self.directory.exists() {
            assert!(
                Instant::now() < deadline,
                "{} brokers are alive; directory exists: {}",
                self.alive(),
                self.directory.exists()
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

#[test]
fn brokers_die_with_a_process_that_is_killed() {
    let mut holder = Holder::start(&["--brokers", "2"]);
    assert_eq!(holder.alive(), 3, "two brokers and a controller");
    assert!(holder.directory.join("broker-1/data").is_dir());
    holder.child.kill().unwrap();
    holder.child.wait().unwrap();
    holder.assert_gone();
}

#[test]
fn brokers_die_with_a_process_that_ends() {
    let mut holder = Holder::start(&[]);
    assert_eq!(holder.alive(), 1);
    drop(holder.child.stdin.take());
    assert!(holder.child.wait().unwrap().success());
    assert_eq!(holder.alive(), 0);
    assert!(!holder.directory.exists());
}

/// The program run with nothing on its search path but `path`.
fn without_tools(path: &Path) -> String {
    let output = Command::new(PROGRAM)
        .env_clear()
        .env("PATH", path)
        .env("PLIMSOLL_KAFKA_CACHE", path.join("cache"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_missing_java_or_maven_is_named_with_what_to_install() {
    let what = "install a JDK 17 or newer and Maven 3.8 or newer";
    let path = tempfile::tempdir().unwrap();
    let message = without_tools(path.path());
    assert!(message.contains("cannot run `java`"), "{message}");
    assert!(message.contains(what), "{message}");

    let java = std::env::var_os("JAVA_HOME")
        .map_or_else(|| search("java"), |home| Path::new(&home).join("bin").join("java"));
    let java = std::fs::canonicalize(java).unwrap();
    std::os::unix::fs::symlink(java, path.path().join("java")).unwrap();
    let message = without_tools(path.path());
    assert!(message.contains("cannot run `mvn`"), "{message}");
    assert!(message.contains(what), "{message}");
}

/// Where the search path has `program`.
fn search(program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap();
    std::env::split_paths(&path)
        .map(|directory| directory.join(program))
        .find(|file| file.is_file())
        .unwrap()
}

#[test]
#[should_panic(expected = "cannot run `/nonexistent/java`")]
fn a_start_without_java_panics() {
    Kafka::builder().java("/nonexistent/java").start();
}

#[test]
fn a_start_without_java_is_a_typed_error() {
    let error = Kafka::builder().java("/nonexistent/java").try_start().unwrap_err();
    assert!(matches!(
        &error,
        Error::JavaMissing { program, .. } if program == Path::new("/nonexistent/java")
    ));
    let source = std::error::Error::source(&error).unwrap();
    assert!(source.is::<std::io::Error>());
}
