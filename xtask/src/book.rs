//! Checks the book and the README: chapters are listed and exist, relative links lead somewhere, and
//! every test that is named as a proof exists.

use std::path::{Path, PathBuf};

/// Whether everything holds; prints what does not.
pub(crate) fn check(root: &Path) -> bool {
    let mut faults = Vec::new();
    let source = root.join("docs/src");
    let mut pages: Vec<PathBuf> = markdown(&source);
    let summary = read(&source.join("SUMMARY.md"), &mut faults);
    for page in &pages {
        let name = page.strip_prefix(&source).unwrap_or(page).display().to_string();
        if name != "SUMMARY.md" && !summary.contains(&format!("({name})")) {
            faults.push(format!("docs/src/{name} is not in SUMMARY.md"));
        }
    }
    pages.extend(
        ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "loom-tests/README.md"]
            .map(|p| root.join(p)),
    );
    let code = code(root);
    let mut named = 0;
    for page in &pages {
        let text = read(page, &mut faults);
        for link in links(&text) {
            let folder = page.parent().unwrap_or(root);
            if !folder.join(link).exists() {
                faults.push(format!("{}: link to {link} leads nowhere", page.display()));
            }
        }
        // A name may stand on the line after the word.
        let flowing = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for test in tests(&flowing) {
            named += 1;
            if !code.contains(&format!("fn {test}(")) {
                faults.push(format!("{}: there is no test {test}", page.display()));
            }
        }
    }
    if named == 0 {
        faults.push("no page names a test as a proof".to_owned());
    }
    for fault in &faults {
        eprintln!("{fault}");
    }
    println!("{} pages, {named} named tests, {} faults", pages.len(), faults.len());
    faults.is_empty()
}

fn read(path: &Path, faults: &mut Vec<String>) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| {
        faults.push(format!("{}: {error}", path.display()));
        String::new()
    })
}

fn files(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        if path.is_dir() && path.file_name().is_none_or(|name| name != "target") {
            files(&path, extension, found);
        } else if path.extension().is_some_and(|e| e == extension) {
            found.push(path);
        }
    }
    found.sort();
}

fn markdown(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    files(folder, "md", &mut found);
    found
}

/// All Rust code of the packages, to look up names in.
fn code(root: &Path) -> String {
    let mut found = Vec::new();
    for package in ["engine", "kafka-adapter", "benches", "loom-tests"] {
        files(&root.join(package), "rs", &mut found);
    }
    found.iter().filter_map(|path| std::fs::read_to_string(path).ok()).collect()
}

/// Targets of relative links, without their fragment.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](").skip(1).filter_map(|rest| {
        let target = rest.split(')').next()?.split('#').next()?;
        (!target.is_empty() && !target.contains("://")).then_some(target)
    })
}

/// Names in the notation `` test `name` ``.
fn tests(text: &str) -> impl Iterator<Item = &str> {
    text.split("test `").skip(1).filter_map(|rest| rest.split('`').next())
}

#[cfg(test)]
mod unit {
    use super::*;

    #[test]
    fn links_and_tests_are_found() {
        let text =
            "see [a](b.md#c), [web](https://x.y), [here](#top); test `it_works`, test `other`.";
        assert_eq!(links(text).collect::<Vec<_>>(), ["b.md"]);
        assert_eq!(tests(text).collect::<Vec<_>>(), ["it_works", "other"]);
    }

    #[test]
    fn a_book_that_is_not_there_is_a_fault() {
        assert!(!check(Path::new("/nowhere")));
    }
}
