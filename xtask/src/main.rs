//! The project's own commands: `cargo xtask check [PART ...]` and `cargo xtask list`.

mod book;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// What is checked, in this order: what fails fast comes first.
const PARTS: [(&str, &str); 9] = [
    ("fmt", "formatting"),
    ("book", "links and named tests of the book and the README"),
    ("clippy", "lints, warnings are errors"),
    ("docs", "rustdoc, warnings are errors"),
    ("unit", "unit, model and doc tests: no broker"),
    ("mock", "tests against librdkafka's mock cluster, the demo among them"),
    ("faults", "planted faults are found"),
    ("loom", "models of the lock-free protocols, and their twins that must fail"),
    ("real", "tests against a real Apache Kafka (needs a JDK 17+ and Maven 3.8+)"),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.split_first() {
        Some((command, parts)) if command == "check" => check(parts),
        Some((command, [])) if command == "list" => {
            for (part, what) in PARTS {
                println!("{part:8} {what}");
            }
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("usage: cargo xtask check [PART ...]   |   cargo xtask list");
            ExitCode::from(2)
        }
    }
}

fn check(wanted: &[String]) -> ExitCode {
    if let Some(unknown) = wanted.iter().find(|name| PARTS.iter().all(|(part, _)| part != name)) {
        eprintln!("there is no part `{unknown}`; `cargo xtask list` names them");
        return ExitCode::from(2);
    }
    let root = root();
    let wants = |part: &str| wanted.is_empty() || wanted.iter().any(|name| name == part);
    if let Err(missing) = tools(wants("real")) {
        eprintln!("{missing}");
        return ExitCode::from(2);
    }
    let mut results: Vec<(&str, bool, Duration)> = Vec::new();
    for (part, _) in PARTS.into_iter().filter(|(part, _)| wants(part)) {
        println!("\n==== {part}");
        let began = Instant::now();
        let passed = run(part, &root);
        results.push((part, passed, began.elapsed()));
    }
    println!();
    for (part, passed, time) in &results {
        let verdict = if *passed { "passed" } else { "FAILED" };
        println!("{part:8} {verdict}  {:>5.0} s", time.as_secs_f64());
    }
    let failed = results.iter().filter(|(_, passed, _)| !passed).count();
    println!("{} passed, {failed} failed", results.len() - failed);
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn root() -> PathBuf {
    // Where this package lies in the workspace.
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).to_owned()
}

/// Names what is missing before anything is built.
fn tools(with_kafka: bool) -> Result<(), String> {
    let needed = [
        ("cc", "a C compiler (Debian: apt-get install build-essential)", false),
        ("make", "make (Debian: apt-get install build-essential)", false),
        ("java", "a JDK 17 or newer (Debian: apt-get install openjdk-17-jdk-headless)", true),
        ("mvn", "Maven 3.8 or newer (Debian: apt-get install maven)", true),
    ];
    for (tool, install, of_kafka) in needed {
        if (with_kafka || !of_kafka) && Command::new(tool).arg("-version").output().is_err() {
            return Err(format!("`{tool}` is missing: install {install}"));
        }
    }
    Ok(())
}

fn run(part: &str, root: &Path) -> bool {
    match part {
        "fmt" => cargo(root, &["fmt", "--all", "--check"], &[]),
        "book" => book::check(root),
        "clippy" => {
            let lints = ["--", "-D", "warnings"];
            let all = ["clippy", "--workspace", "--all-targets"];
            cargo(root, &[&all[..], &lints].concat(), &[])
                && cargo(
                    root,
                    &[&all[..], &["--features", "plimsoll/planted-faults"], &lints].concat(),
                    &[],
                )
        }
        "docs" => {
            let flags = [("RUSTDOCFLAGS", "-D warnings")];
            cargo(root, &["doc", "--workspace", "--no-deps"], &flags)
        }
        "unit" => {
            tests(root, &["--lib", "--bins"], Kind::Model)
                && cargo(root, &["test", "--workspace", "--doc"], &[])
        }
        "mock" => tests(root, &[], Kind::Mock),
        "faults" => {
            let planted = ["--features", "plimsoll/planted-faults", "--test", "faults"];
            cargo(root, &[&["test", "--workspace"][..], &planted].concat(), &[])
        }
        "loom" => {
            let model = [("RUSTFLAGS", "--cfg loom")];
            let package = ["test", "--release", "-p", "plimsoll-loom-tests"];
            cargo(root, &[&package[..], &["--target-dir", "target/loom"]].concat(), &model)
        }
        "real" => tests(root, &[], Kind::Real),
        _ => false,
    }
}

/// What a test file needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Model,
    Mock,
    Real,
    /// Run by a part of its own.
    Apart,
}

/// By where a test file lies and how it is named.
fn kind_of(package: &str, test: &str) -> Kind {
    match (package, test) {
        (_, "faults") | ("loom-tests", _) => Kind::Apart,
        ("kafka-adapter/testkit", _) => Kind::Real,
        (_, test) if test.starts_with("real") => Kind::Real,
        ("kafka-adapter" | "kafka-adapter/cli", _) => Kind::Mock,
        _ => Kind::Model,
    }
}

/// Runs the test files of one kind. Always over the whole workspace: another selection of packages
/// is another selection of features, and another build of librdkafka.
fn tests(root: &Path, more: &[&str], kind: Kind) -> bool {
    let packages =
        ["engine", "kafka-adapter", "kafka-adapter/cli", "kafka-adapter/testkit", "benches"];
    let mut arguments =
        vec!["test".to_owned(), "--workspace".to_owned(), "--no-fail-fast".to_owned()];
    arguments.extend(more.iter().map(|&argument| argument.to_owned()));
    for package in packages {
        // A package without integration tests has no such folder.
        let Ok(files) = std::fs::read_dir(root.join(package).join("tests")) else { continue };
        let mut names: Vec<String> = files
            .filter_map(|file| {
                Some(file.ok()?.file_name().to_str()?.strip_suffix(".rs")?.to_owned())
            })
            .filter(|name| kind_of(package, name) == kind)
            .collect();
        names.sort();
        arguments.extend(names.into_iter().flat_map(|name| ["--test".to_owned(), name]));
    }
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    cargo(root, &arguments, &[])
}

fn cargo(root: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> bool {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    println!("cargo {}", arguments.join(" "));
    let mut command = Command::new(cargo);
    command.args(arguments).envs(environment.iter().copied()).current_dir(root);
    match command.status() {
        Ok(status) => status.success(),
        Err(error) => {
            eprintln!("cannot run cargo: {error}");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_files_are_sorted_by_what_they_need() {
        assert_eq!(kind_of("engine", "window"), Kind::Model);
        assert_eq!(kind_of("kafka-adapter", "mock"), Kind::Mock);
        assert_eq!(kind_of("kafka-adapter", "real_kafka"), Kind::Real);
        assert_eq!(kind_of("kafka-adapter/cli", "demo"), Kind::Mock);
        assert_eq!(kind_of("kafka-adapter/cli", "real_demo"), Kind::Real);
        assert_eq!(kind_of("kafka-adapter/cli", "faults"), Kind::Apart);
        assert_eq!(kind_of("kafka-adapter/testkit", "one_broker"), Kind::Real);
        assert_eq!(kind_of("loom-tests", "ring"), Kind::Apart);
    }

    #[test]
    fn every_part_is_run() {
        // A part without an arm would "fail" without doing anything.
        let root = Path::new("/nowhere");
        assert!(!run("no such part", root));
        assert!(PARTS.iter().all(|(part, what)| !part.is_empty() && !what.is_empty()));
    }
}
