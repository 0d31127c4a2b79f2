//! The project's own commands: `cargo xtask check [PART ...]` and `cargo xtask list`.
//!
//! Exit codes: 0 all parts passed, 1 a part failed, 2 wrong usage or a missing tool.

mod book;
mod parts;
#[cfg(test)]
mod scratch;
mod suites;
mod tools;

use parts::{PARTS, Part};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

const USAGE: &str = "usage: cargo xtask check [PART ...]   run all parts of the check, or these
       cargo xtask list               name the parts";

/// Wrong usage, or a tool that is not there.
const UNUSABLE: u8 = 2;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["check", ref names @ ..] => match chosen(names) {
            Ok(parts) => check(&parts),
            Err(unknown) => {
                eprintln!("there is no part `{unknown}`; `cargo xtask list` names them");
                ExitCode::from(UNUSABLE)
            }
        },
        ["list"] => {
            PARTS.iter().for_each(|part| println!("{:8} {}", part.name, part.what));
            ExitCode::SUCCESS
        }
        ["help" | "--help" | "-h"] => {
            println!("{USAGE}");
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("{USAGE}");
            ExitCode::from(UNUSABLE)
        }
    }
}

/// The named parts in the order in which they run, or all if none is named; else the name that no
/// part has.
fn chosen<'a>(names: &[&'a str]) -> Result<Vec<&'static Part>, &'a str> {
    match names.iter().find(|name| PARTS.iter().all(|part| part.name != **name)) {
        Some(unknown) => Err(unknown),
        None => {
            let wanted = |part: &&Part| names.is_empty() || names.contains(&part.name);
            Ok(PARTS.iter().filter(wanted).collect())
        }
    }
}

fn check(parts: &[&Part]) -> ExitCode {
    // What is missing is told before anything is built.
    for tool in tools::ALL.iter().filter(|tool| parts.iter().any(|part| part.needs.contains(tool)))
    {
        if let Err(missing) = tool.look() {
            eprintln!("{missing}");
            return ExitCode::from(UNUSABLE);
        }
    }
    let workspace = Workspace::find();
    let mut results = Vec::new();
    for part in parts {
        println!("\n==== {}: {}", part.name, part.what);
        let began = Instant::now();
        let passed = (part.run)(&workspace);
        results.push(Ended { part: part.name, passed, time: began.elapsed() });
    }
    print!("\n{}", table(&results));
    if results.iter().all(|ended| ended.passed) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// How a part ended.
struct Ended {
    part: &'static str,
    passed: bool,
    time: Duration,
}

fn table(results: &[Ended]) -> String {
    let line = |name: &str, verdict: &str, time: Duration| {
        format!("{name:8} {verdict:8} {:>6.0} s\n", time.as_secs_f64())
    };
    let verdict = |passed: bool| if passed { "passed" } else { "FAILED" };
    let mut text: String = results
        .iter()
        .map(|ended| line(ended.part, verdict(ended.passed), ended.time))
        .chain([line("total", "", results.iter().map(|ended| ended.time).sum())])
        .collect();
    let failed: Vec<&str> =
        results.iter().filter(|ended| !ended.passed).map(|ended| ended.part).collect();
    if !failed.is_empty() {
        text += &format!("failed: {}\n", failed.join(" "));
    }
    text
}

/// Where the project lies, and the cargo that builds it.
struct Workspace {
    root: PathBuf,
}

impl Workspace {
    fn find() -> Self {
        // Cargo says where this package lies now; what was compiled in may have been moved since.
        let package = std::env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        Workspace { root: package.parent().unwrap_or(Path::new(".")).to_owned() }
    }

    /// Runs cargo with its output passed through; whether it succeeded.
    fn cargo(&self, arguments: &[&str]) -> bool {
        self.cargo_with(arguments, &[])
    }

    /// As [`cargo`](Self::cargo), with flags added to those that an environment variable has.
    fn cargo_with(&self, arguments: &[&str], flags: &[(&str, &str)]) -> bool {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut command = Command::new(cargo);
        command.args(arguments).current_dir(&self.root);
        let mut line = String::new();
        for (variable, added) in flags {
            let value = match std::env::var(variable) {
                Ok(before) if !before.is_empty() => format!("{before} {added}"),
                _ => (*added).to_owned(),
            };
            line += &format!("{variable}='{value}' ");
            command.env(variable, value);
            // It would win over the variable.
            command.env_remove(format!("CARGO_ENCODED_{variable}"));
        }
        println!("{line}cargo {}", arguments.join(" "));
        match command.status() {
            Ok(status) => status.success(),
            Err(error) => {
                eprintln!("cannot run {}: {error}", command.get_program().display());
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_run_in_their_order_and_unknown_ones_are_named() {
        let names = |parts: Vec<&Part>| parts.iter().map(|part| part.name).collect::<Vec<_>>();
        assert_eq!(chosen(&["loom", "fmt", "loom"]).map(names), Ok(vec!["fmt", "loom"]));
        assert_eq!(chosen(&[]).map(|all| all.len()), Ok(PARTS.len()));
        assert!(matches!(chosen(&["fmt", "lint"]), Err("lint")));
    }

    #[test]
    fn the_table_names_what_failed() {
        let ended = |part, passed, seconds| Ended { part, passed, time: Duration::new(seconds, 0) };
        let table = table(&[ended("fmt", true, 1), ended("real", false, 120)]);
        let expected = "\
fmt      passed        1 s
real     FAILED      120 s
total                121 s
failed: real
";
        assert_eq!(table, expected);
        assert!(!super::table(&[ended("fmt", true, 1)]).contains("failed"));
    }

    #[test]
    fn a_cargo_that_fails_fails_the_part() {
        let workspace = Workspace::find();
        assert!(workspace.cargo(&["--version"]));
        assert!(!workspace.cargo(&["no-such-command"]));
        assert!(!Workspace { root: "/nowhere".into() }.cargo(&["--version"]));
    }
}
