//! Which integration tests there are, and what they need.
//!
//! Told by where a test file lies and how it is named, so that a new one is run without a word here.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// What a test file needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// No broker.
    Model,
    /// librdkafka's mock cluster, in the process.
    Mock,
    /// A real Apache Kafka.
    Real,
    /// The feature `planted-faults`.
    Faults,
    /// `--cfg loom`.
    Loom,
}

fn kind_of(package: &str, test: &str) -> Kind {
    match package {
        "loom-tests" => Kind::Loom,
        "kafka-adapter/testkit" => Kind::Real,
        _ if test.starts_with("real") => Kind::Real,
        _ if test.starts_with("faults") => Kind::Faults,
        "kafka-adapter" | "kafka-adapter/cli" => Kind::Mock,
        _ => Kind::Model,
    }
}

/// The integration tests of the workspace: name and kind.
#[derive(Debug)]
pub(crate) struct Suites(BTreeMap<String, Kind>);

/// Why the integration tests cannot be sorted.
#[derive(Debug)]
pub(crate) enum Fault {
    /// A file or folder cannot be read.
    Unreadable(PathBuf, std::io::Error),
    /// The manifest of the workspace names no members.
    NoMembers(PathBuf),
    /// Cargo cannot run one of them without the other.
    SameName { test: String, kinds: [Kind; 2] },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Unreadable(path, error) => write!(f, "cannot read {}: {error}", path.display()),
            Fault::NoMembers(path) => write!(f, "{} names no members", path.display()),
            Fault::SameName { test, kinds: [one, other] } => write!(
                f,
                "two packages have tests/{test}, of the kinds {one:?} and {other:?}: rename one"
            ),
        }
    }
}

impl Suites {
    pub(crate) fn of(root: &Path) -> Result<Self, Fault> {
        let manifest = root.join("Cargo.toml");
        let text = std::fs::read_to_string(&manifest)
            .map_err(|error| Fault::Unreadable(manifest.clone(), error))?;
        let members = members(&text);
        if members.is_empty() {
            return Err(Fault::NoMembers(manifest));
        }
        let mut suites = BTreeMap::new();
        for package in members {
            let folder = root.join(package).join("tests");
            for test in tests_in(&folder).map_err(|error| Fault::Unreadable(folder, error))? {
                let kind = kind_of(package, &test);
                match suites.insert(test.clone(), kind) {
                    Some(other) if other != kind => {
                        return Err(Fault::SameName { test, kinds: [other, kind] });
                    }
                    _ => {}
                }
            }
        }
        Ok(Suites(suites))
    }

    pub(crate) fn of_kind(&self, kind: Kind) -> Vec<&str> {
        self.0.iter().filter(|(_, other)| **other == kind).map(|(test, _)| &**test).collect()
    }
}

/// The members that the manifest of a workspace names.
fn members(manifest: &str) -> Vec<&str> {
    let list = manifest.split_once("\nmembers = [").and_then(|(_, rest)| rest.split_once(']'));
    // Between quotation marks: every second part.
    list.map_or_else(Vec::new, |(list, _)| list.split('"').skip(1).step_by(2).collect())
}

/// The test targets in a package's folder: files, and folders with a `main.rs`. There need not be a
/// folder.
fn tests_in(folder: &Path) -> std::io::Result<Vec<String>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let mut tests = Vec::new();
    for entry in folder.read_dir()? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "rs")
            || path.join("main.rs").is_file()
        {
            tests.extend(path.file_stem().and_then(|stem| stem.to_str()).map(str::to_owned));
        }
    }
    Ok(tests)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Workspace;
    use crate::scratch::Folder;

    #[test]
    fn kinds_follow_place_and_name() {
        for (package, test, kind) in [
            ("engine", "window", Kind::Model),
            ("benches", "scoreboard", Kind::Model),
            ("kafka-adapter", "mock", Kind::Mock),
            ("kafka-adapter", "mock_errors", Kind::Mock),
            ("kafka-adapter", "real_kafka", Kind::Real),
            ("kafka-adapter/cli", "demo", Kind::Mock),
            ("kafka-adapter/cli", "real_demo", Kind::Real),
            ("kafka-adapter/cli", "faults", Kind::Faults),
            ("kafka-adapter/testkit", "one_broker", Kind::Real),
            ("loom-tests", "ring", Kind::Loom),
        ] {
            assert_eq!(kind_of(package, test), kind, "{package}/tests/{test}.rs");
        }
    }

    #[test]
    fn members_are_read_from_the_manifest() {
        let manifest = "[workspace]\nmembers = [\n    \"a\",\n    \"b/c\",\n]\nexclude = [\"d\"]\n";
        assert_eq!(members(manifest), ["a", "b/c"]);
        assert_eq!(members("[package]\n"), [""; 0]);
    }

    #[test]
    fn this_workspace_has_tests_of_every_kind() {
        let suites = Suites::of(&Workspace::find().root).unwrap_or_else(|fault| panic!("{fault}"));
        for kind in [Kind::Model, Kind::Mock, Kind::Real, Kind::Faults, Kind::Loom] {
            assert!(!suites.of_kind(kind).is_empty(), "{kind:?}");
        }
        assert!(suites.of_kind(Kind::Model).contains(&"window"));
        assert!(!suites.0.contains_key("common"), "a folder of helpers is no test");
    }

    #[test]
    fn one_name_of_two_kinds_is_refused() {
        let folder = Folder::new("suites");
        folder.file("Cargo.toml", "[workspace]\nmembers = [\"engine\", \"kafka-adapter\"]\n");
        folder.file("engine/tests/window.rs", "");
        folder.file("engine/tests/many/main.rs", "");
        folder.file("engine/tests/common/mod.rs", "");
        let suites = Suites::of(folder.path()).unwrap();
        assert_eq!(suites.of_kind(Kind::Model), ["many", "window"]);
        folder.file("kafka-adapter/tests/window.rs", "");
        let fault = Suites::of(folder.path()).unwrap_err();
        assert!(matches!(&fault, Fault::SameName { test, .. } if test == "window"), "{fault}");
    }

    #[test]
    fn what_is_not_there_is_named() {
        let fault = Suites::of(Path::new("/nowhere")).unwrap_err();
        assert!(fault.to_string().contains("/nowhere/Cargo.toml"), "{fault}");
    }
}
