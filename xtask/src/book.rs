//! Checks the book and the other pages, without a program that builds it:
//!
//! - every chapter is in `SUMMARY.md`, once, and what is there exists;
//! - every relative link leads to a file, and to a heading of it if it names one; a chapter links
//!   only inside the book, since nothing else is there when it is built;
//! - every test that is named as a proof, in the notation ``test `FILE::NAME` ``, is a test in a
//!   file of that name.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

const CHAPTERS: &str = "docs/src";
const SUMMARY: &str = "docs/src/SUMMARY.md";
/// The chapter that names the proof of each promise.
const GUARANTEES: &str = "docs/src/guarantees.md";

/// Whether everything holds; prints what does not.
pub(crate) fn check(root: &Path) -> bool {
    let book = match Book::read(root) {
        Ok(book) => book,
        Err(fault) => {
            eprintln!("{fault}");
            return false;
        }
    };
    let faults = book.faults();
    faults.iter().for_each(|fault| eprintln!("{fault}"));
    let proofs: usize = book.pages.values().map(|text| proofs(text).count()).sum();
    println!("{} pages, {proofs} named tests, {} faults", book.pages.len(), faults.len());
    faults.is_empty()
}

/// Pages and code, by their path from the root.
struct Book {
    root: PathBuf,
    pages: BTreeMap<PathBuf, String>,
    code: BTreeMap<PathBuf, String>,
}

impl Book {
    fn read(root: &Path) -> Result<Self, String> {
        let mut book =
            Book { root: root.to_owned(), pages: BTreeMap::new(), code: BTreeMap::new() };
        book.gather(Path::new(""))?;
        for needed in [SUMMARY, GUARANTEES] {
            if !book.pages.contains_key(Path::new(needed)) {
                return Err(format!("there is no {needed}"));
            }
        }
        Ok(book)
    }

    fn gather(&mut self, folder: &Path) -> Result<(), String> {
        let full = self.root.join(folder);
        let failed = |error| format!("cannot read {}: {error}", full.display());
        for entry in full.read_dir().map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let path = folder.join(&name);
            // Not followed: a link may lead anywhere.
            let kind = entry.file_type().map_err(failed)?;
            // Hidden folders and what cargo and the book's builder make.
            let made = ["target", "docs/book"].iter().any(|made| path == Path::new(made));
            if kind.is_dir() && !made && !name.as_encoded_bytes().starts_with(b".") {
                self.gather(&path)?;
            }
            let into = match path.extension().and_then(|extension| extension.to_str()) {
                Some("md") if kind.is_file() => &mut self.pages,
                Some("rs") if kind.is_file() => &mut self.code,
                _ => continue,
            };
            let text = std::fs::read_to_string(self.root.join(&path))
                .map_err(|error| format!("cannot read {}: {error}", path.display()))?;
            into.insert(path, text);
        }
        Ok(())
    }

    fn faults(&self) -> Vec<String> {
        let mut faults = self.faults_of_the_summary();
        for (page, text) in &self.pages {
            let name = page.display();
            faults.extend(
                links(text)
                    .into_iter()
                    .filter_map(|link| self.fault_of_link(page, &link))
                    .chain(proofs(text).filter_map(|proof| self.fault_of_proof(&proof)))
                    .map(|fault| format!("{name}: {fault}")),
            );
        }
        if proofs(&self.pages[Path::new(GUARANTEES)]).next().is_none() {
            faults.push(format!("{GUARANTEES}: names no test as a proof"));
        }
        faults
    }

    fn faults_of_the_summary(&self) -> Vec<String> {
        let listed = links(&self.pages[Path::new(SUMMARY)]);
        let chapters = self.pages.keys().filter_map(|page| page.strip_prefix(CHAPTERS).ok());
        chapters
            .filter(|chapter| *chapter != Path::new("SUMMARY.md"))
            .filter_map(|chapter| {
                let times = listed.iter().filter(|link| Path::new(link) == chapter).count();
                (times != 1).then(|| {
                    format!("{SUMMARY}: lists {} {times} times, not once", chapter.display())
                })
            })
            .collect()
    }

    fn fault_of_link(&self, page: &Path, link: &str) -> Option<String> {
        let (file, heading) = match link.split_once('#') {
            Some((file, heading)) => (file, Some(heading)),
            None => (link, None),
        };
        let target = match file {
            "" => page.to_owned(),
            file => normal(&page.parent().unwrap_or(Path::new("")).join(file)),
        };
        if page.starts_with(CHAPTERS) && !target.starts_with(CHAPTERS) {
            return Some(format!("link to {link} leads out of the book"));
        }
        if !self.root.join(&target).exists() {
            return Some(format!("link to {link} leads nowhere"));
        }
        let heading = heading?;
        let there = self
            .pages
            .get(&target)
            .is_some_and(|text| headings(text).any(|found| anchor(found) == heading));
        (!there).then(|| format!("link to {link}: {} has no such heading", target.display()))
    }

    fn fault_of_proof(&self, proof: &str) -> Option<String> {
        let Some((file, test)) = proof.split_once("::") else {
            return Some(format!("test `{proof}` is not FILE::NAME"));
        };
        let named = |path: &Path| path.file_stem().is_some_and(|stem| stem == file);
        let found = self.code.iter().any(|(path, code)| named(path) && has_test(code, test));
        (!found).then(|| format!("no file {file}.rs has a test `{test}`"))
    }
}

/// Without `..`, which must not lead above the root.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir if normal.pop() => {}
            other => normal.push(other),
        }
    }
    normal
}

/// Whether a file has a test of this name: marked as one, or given to a harness by its name.
fn has_test(code: &str, name: &str) -> bool {
    let defined = format!("fn {name}(");
    let listed = code.contains(&format!("\"{name}\""));
    code.match_indices(&defined).any(|(at, _)| {
        // The attributes stand on the lines above that of the function.
        let above = code[..at].split('\n').rev().skip(1).map(str::trim);
        listed
            || above
                .take_while(|line| !line.is_empty() && *line != "}")
                .any(|line| line == "#[test]")
    })
}

/// The text outside of fenced code, line by line.
fn unfenced(text: &str) -> impl Iterator<Item = &str> {
    let mut fenced = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    })
}

fn headings(text: &str) -> impl Iterator<Item = &str> {
    unfenced(text)
        .filter(|line| line.starts_with('#'))
        .map(|line| line.trim_start_matches('#').trim())
}

/// What a link to a heading is spelled like, by the rule that GitHub and mdBook share.
fn anchor(heading: &str) -> String {
    heading
        .chars()
        .filter_map(|c| match c {
            ' ' => Some('-'),
            '-' | '_' => Some(c),
            c if c.is_alphanumeric() => c.to_lowercase().next(),
            _ => None,
        })
        .collect()
}

/// Targets of links to files and headings of the project.
fn links(text: &str) -> Vec<String> {
    let flowing = unfenced(text).collect::<Vec<_>>().join("\n");
    // Without what stands between backticks: every second part.
    let prose: String = flowing.split('`').step_by(2).collect();
    prose
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')').map(|(target, _)| target.trim()))
        .filter(|target| !target.contains("://") && !target.starts_with("mailto:"))
        .map(str::to_owned)
        .collect()
}

/// Names in the notation ``test `FILE::NAME` ``; several with commas between them.
fn proofs(text: &str) -> impl Iterator<Item = String> + '_ {
    // A name may stand on the line after the word.
    let flowing = unfenced(text).collect::<Vec<_>>().join(" ");
    let words: Vec<String> = flowing.split_whitespace().map(str::to_owned).collect();
    let mut open = false;
    words.into_iter().filter_map(move |word| {
        let bare = word.trim_matches(['(', ')', '|', ',', '.', ';', ':', '*']);
        let name = bare.strip_prefix('`').and_then(|rest| rest.strip_suffix('`'));
        let proof = name.filter(|_| open).map(str::to_owned);
        open = match name {
            Some(_) => open && word.ends_with(','),
            None => bare.eq_ignore_ascii_case("test") || bare.eq_ignore_ascii_case("tests"),
        };
        proof
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Folder;

    #[test]
    fn links_are_found_outside_of_code() {
        let text = "see [a](b.md#c) and [`b`](d.md), [web](https://x.y), [here](#top), `x[i](no)`\n\
                    ```rust\nlet x = y[0](z);\n```\n[last](e.md)";
        assert_eq!(links(text), ["b.md#c", "d.md", "#top", "e.md"]);
    }

    #[test]
    fn proofs_are_found_also_on_the_next_line_and_in_tables() {
        let text = "Shown by test\n`a::b`, and by tests `a::c`, `a::d`; not by `e`.\n\
                    | x | test `f::g` |\n```\ntest `h::i`\n```\nA test of `j`, the test `k`";
        assert_eq!(proofs(text).collect::<Vec<_>>(), ["a::b", "a::c", "a::d", "f::g", "k"]);
    }

    #[test]
    fn a_test_is_marked_or_given_to_a_harness() {
        let code = "fn helper() {}\n\n#[test]\n#[should_panic(expected = \"x\")]\nfn marked() {}\n\n\
                    fn listed() {}\n\nfn main() { run(&[(\"listed\", listed)]) }\n\n\
                    proptest! {\n    #[test]\n    fn model(x in 0..1) {}\n}\n";
        for (name, is) in [("marked", true), ("listed", true), ("model", true), ("helper", false)] {
            assert_eq!(has_test(code, name), is, "{name}");
        }
        assert!(!has_test(code, "absent"));
    }

    #[test]
    fn headings_have_anchors() {
        assert_eq!(anchor("Bad input, `named`: a_b"), "bad-input-named-a_b");
        let text = "# One\n```sh\n# not one\n```\n## Two words\n";
        assert_eq!(headings(text).map(anchor).collect::<Vec<_>>(), ["one", "two-words"]);
    }

    fn book() -> Folder {
        let folder = Folder::new(&format!("book-{:?}", std::thread::current().id()));
        folder.file("README.md", "[guarantees](docs/src/guarantees.md#order)\n");
        folder.file(SUMMARY, "- [Guarantees](guarantees.md)\n");
        folder.file(GUARANTEES, "# Guarantees\n\n## Order\n\nKept: test `window::it_holds`.\n");
        folder.file("engine/tests/window.rs", "#[test]\nfn it_holds() {}\n\nfn not_one() {}\n");
        folder
    }

    fn faults(folder: &Folder) -> Vec<String> {
        Book::read(folder.path()).unwrap_or_else(|fault| panic!("{fault}")).faults()
    }

    #[test]
    fn a_good_book_has_no_faults() {
        let folder = book();
        assert_eq!(faults(&folder), Vec::<String>::new());
        assert!(check(folder.path()));
    }

    #[test]
    fn each_fault_is_named() {
        for (page, text, fault) in [
            ("README.md", "[x](docs/src/absent.md)", "leads nowhere"),
            ("README.md", "[x](docs/src/guarantees.md#disorder)", "no such heading"),
            ("docs/src/more.md", "# More", "lists more.md 0 times"),
            (SUMMARY, "[a](guarantees.md) [b](guarantees.md)", "lists guarantees.md 2 times"),
            (GUARANTEES, "[x](../../README.md)", "leads out of the book"),
            (GUARANTEES, "# Guarantees\n\n## Order\n", "names no test as a proof"),
            (GUARANTEES, "## Order\ntest `window::gone`", "no file window.rs has a test `gone`"),
            (GUARANTEES, "## Order\ntest `window::not_one`", "has a test `not_one`"),
            (GUARANTEES, "## Order\ntest `ring::it_holds`", "no file ring.rs has"),
            (GUARANTEES, "## Order\ntest `it_holds`", "is not FILE::NAME"),
        ] {
            let folder = book();
            folder.file(page, text);
            let found = faults(&folder);
            assert!(found.iter().any(|found| found.contains(fault)), "{page}: {text}: {found:?}");
            assert!(!check(folder.path()));
        }
    }

    #[test]
    fn a_book_that_is_not_there_is_a_fault() {
        assert!(!check(Path::new("/nowhere")));
        let folder = book();
        std::fs::remove_file(folder.path().join(GUARANTEES)).unwrap();
        assert!(!check(folder.path()));
    }
}
