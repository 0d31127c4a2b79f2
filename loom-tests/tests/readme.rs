//! The README's tables against the test files: every model and every twin is listed, with the bound
//! it is explored within and with what loom must say. Runs with and without `--cfg loom`.

use std::collections::BTreeMap;
use std::path::Path;

/// A test as a test file or a table has it.
#[derive(Debug, PartialEq, Eq)]
enum Listed {
    /// Must pass, explored within this bound.
    Model(String),
    /// Must fail, with this in its message.
    Twin(String),
}

type Tests = BTreeMap<String, Listed>;

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The text between two others.
fn between<'a>(text: &'a str, from: &str, to: &str) -> Option<&'a str> {
    text.split_once(from)?.1.split_once(to).map(|(inner, _)| inner)
}

fn tests_of(file: &str, source: &str) -> Vec<(String, Listed)> {
    source
        .split("#[test]\n")
        .skip(1)
        .map(|test| {
            let name = between(test, "fn ", "(").unwrap_or_else(|| panic!("{file}: a test, no fn"));
            let (attributes, body) = test.split_once("fn ").unwrap_or_default();
            let body = body.split("\n}\n").next().unwrap_or_default();
            let listed = match between(attributes, "should_panic(expected = \"", "\")]") {
                Some(message) => Listed::Twin(message.to_owned()),
                None => Listed::Model(bound(body)),
            };
            assert_eq!(matches!(listed, Listed::Twin(_)), name.starts_with("twin_"), "{name}");
            (format!("{file}::{name}"), listed)
        })
        .collect()
}

/// As the README words it.
fn bound(body: &str) -> String {
    match between(body, "Bound::Preemptions(", ")") {
        Some(most) => format!("{most} preemptions"),
        None if body.contains("Bound::Exhaustive") => "exhaustive".to_owned(),
        None => panic!("a model without a bound: {body}"),
    }
}

fn in_the_files(directory: &Path) -> Tests {
    let mut tests = Tests::new();
    for entry in directory.read_dir().unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        if file == "readme" || path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let source = read(&path);
        assert!(source.contains("#![cfg(loom)]\n"), "{file} is not for loom only");
        let found = tests_of(file, &source);
        assert!(!found.is_empty(), "{file} has no tests");
        tests.extend(found);
    }
    tests
}

/// Rows that begin with a test's name; the third column is the bound, or the message in backticks.
fn in_the_readme(readme: &str) -> Tests {
    let mut tests = Tests::new();
    for row in readme.lines().filter(|line| line.starts_with("| `")) {
        let columns: Vec<&str> = row.split('|').map(str::trim).collect();
        let name = columns[1].trim_matches('`').to_owned();
        let third = columns.get(3).copied().unwrap_or_default();
        let listed = match between(third, "`", "`") {
            Some(message) => Listed::Twin(message.to_owned()),
            None => Listed::Model(third.to_owned()),
        };
        assert!(tests.insert(name, listed).is_none(), "listed twice: {row}");
    }
    tests
}

#[test]
fn the_readme_lists_every_model_and_twin() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = in_the_files(&package.join("tests"));
    let readme = in_the_readme(&read(&package.join("README.md")));
    for (name, listed) in &files {
        assert_eq!(readme.get(name), Some(listed), "{name}: the README says otherwise");
    }
    for name in readme.keys() {
        assert!(files.contains_key(name), "{name} is in the README and in no test file");
    }
}
