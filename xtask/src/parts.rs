//! The parts of the check.

use crate::suites::{Kind, Suites};
use crate::tools::Tool;
use crate::{Workspace, book};

/// A part of the check, which can be run alone.
pub(crate) struct Part {
    pub(crate) name: &'static str,
    pub(crate) what: &'static str,
    pub(crate) needs: &'static [Tool],
    /// Whether it passed.
    pub(crate) run: fn(&Workspace) -> bool,
}

/// In the order in which they run: what fails fast comes first.
pub(crate) const PARTS: [Part; 10] = [
    Part {
        name: "fmt",
        what: "formatting",
        needs: &[Tool::Rustfmt],
        run: |workspace| workspace.cargo(&["fmt", "--all", "--check"]),
    },
    Part {
        name: "book",
        what: "chapters, links and named tests of the book and the README",
        needs: &[],
        run: |workspace| book::check(&workspace.root),
    },
    Part {
        name: "clippy",
        what: "lints, warnings are errors, with and without planted faults and features",
        needs: &[Tool::Clippy, Tool::C, Tool::Cxx, Tool::Make],
        run: clippy,
    },
    Part {
        name: "docs",
        what: "rustdoc, warnings are errors",
        needs: BUILD,
        run: |workspace| {
            let strict = [("RUSTDOCFLAGS", "-D warnings")];
            workspace.cargo_with(&["doc", "--workspace", "--no-deps"], &strict)
        },
    },
    Part { name: "unit", what: "unit, model and doc tests: no broker", needs: BUILD, run: unit },
    Part {
        name: "stress",
        what: "the engine on threads for a minute; PLIMSOLL_STRESS_SECONDS says how long",
        needs: BUILD,
        run: stress,
    },
    Part {
        name: "mock",
        what: "tests against librdkafka's mock cluster, the demo among them",
        needs: BUILD,
        run: |workspace| run_suites(workspace, Kind::Mock, &["--workspace"]),
    },
    Part {
        name: "faults",
        what: "planted faults are found",
        needs: BUILD,
        run: |workspace| {
            let planted = ["--workspace", "--features", "plimsoll/planted-faults"];
            run_suites(workspace, Kind::Faults, &planted)
        },
    },
    Part {
        name: "loom",
        what: "models of the lock-free protocols, and their twins that must fail",
        needs: &[Tool::C],
        run: |workspace| {
            // A target directory of its own: other flags would rebuild everything else.
            let package = ["test", "-p", "plimsoll-loom-tests", "--release", "--no-fail-fast"];
            let arguments = [&package[..], &["--target-dir", "target/loom"]].concat();
            workspace.cargo_with(&arguments, &[("RUSTFLAGS", "--cfg loom")])
        },
    },
    Part {
        name: "real",
        what: "tests against a real Apache Kafka (needs a JDK 17+ and Maven 3.8+)",
        needs: &[Tool::C, Tool::Cxx, Tool::Make, Tool::Java, Tool::Maven],
        run: real,
    },
];

/// What librdkafka's build needs.
const BUILD: &[Tool] = &[Tool::C, Tool::Cxx, Tool::Make];

fn clippy(workspace: &Workspace) -> bool {
    let all = ["clippy", "--workspace", "--all-targets"];
    let strict = ["--", "-D", "warnings"];
    let planted = ["--features", "plimsoll/planted-faults"];
    workspace.cargo(&[&all[..], &strict].concat())
        && workspace.cargo(&[&all[..], &planted, &strict].concat())
        // The benches turn the engine's feature on for the whole workspace: once without it.
        && workspace.cargo(&["clippy", "-p", "plimsoll-engine", "--", "-D", "warnings"])
}

/// All of them, also when one kind fails.
fn unit(workspace: &Workspace) -> bool {
    // The unit tests of the testkit start brokers: they belong to `real`.
    let units = ["--workspace", "--exclude", "plimsoll-testkit", "--lib", "--bins"];
    let tests = run_suites(workspace, Kind::Model, &units);
    let docs = workspace.cargo(&["test", "--workspace", "--doc", "--no-fail-fast"]);
    tests && docs
}

/// The unit part runs it too, for a few seconds.
fn stress(workspace: &Workspace) -> bool {
    let test = ["test", "--workspace", "--test", "stress", "--", "--nocapture"];
    let asked = std::env::var("PLIMSOLL_STRESS_SECONDS");
    let seconds = asked.unwrap_or_else(|_| "60".to_owned());
    workspace.cargo_with(&test, &[("PLIMSOLL_STRESS_SECONDS", &seconds)])
}

fn real(workspace: &Workspace) -> bool {
    let tests = run_suites(workspace, Kind::Real, &["--workspace"]);
    // Not the testkit alone: another choice of packages is another choice of their dependencies'
    // features. With these four librdkafka is the one that was built before.
    let packages = ["plimsoll-testkit", "plimsoll-kafka", "plimsoll", "plimsoll-benches"];
    let packages = packages.map(|package| ["-p", package]).concat();
    let units =
        workspace.cargo(&[&["test", "--no-fail-fast", "--lib"][..], &packages[..]].concat());
    tests && units
}

/// Runs the integration tests of one kind, and what else `selection` names. `selection` is over the
/// whole workspace wherever that is possible, so that everything is built once.
fn run_suites(workspace: &Workspace, kind: Kind, selection: &[&str]) -> bool {
    let suites = match Suites::of(&workspace.root) {
        Ok(suites) => suites,
        Err(fault) => {
            eprintln!("{fault}");
            return false;
        }
    };
    let names = suites.of_kind(kind);
    if names.is_empty() {
        // Without a name cargo would run everything.
        eprintln!("no package has a test file of the kind {kind:?}");
        return false;
    }
    let chosen = names.iter().flat_map(|name| ["--test", name]);
    let arguments: Vec<&str> = ["test", "--no-fail-fast"]
        .into_iter()
        .chain(selection.iter().copied())
        .chain(chosen)
        .collect();
    workspace.cargo(&arguments)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_short() {
        for (index, part) in PARTS.iter().enumerate() {
            assert!((1..=8).contains(&part.name.len()), "{}", part.name);
            assert!(PARTS[..index].iter().all(|other| other.name != part.name), "{}", part.name);
        }
    }

    #[test]
    fn a_workspace_that_is_not_there_fails() {
        let nowhere = Workspace { root: "/nowhere".into() };
        assert!(PARTS.iter().all(|part| !(part.run)(&nowhere)));
    }
}
