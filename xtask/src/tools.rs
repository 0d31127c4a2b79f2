//! The tools that must be installed, and what to install if they are not.

use std::ffi::OsString;
use std::fmt;
use std::path::Path;
use std::process::Command;

/// A tool that a part of the check needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tool {
    Rustfmt,
    Clippy,
    C,
    Cxx,
    Make,
    Java,
    Maven,
}

/// All tools, in the order in which they are looked for.
pub(crate) const ALL: [Tool; 7] =
    [Tool::Rustfmt, Tool::Clippy, Tool::C, Tool::Cxx, Tool::Make, Tool::Java, Tool::Maven];

/// A tool that cannot be used, with the remedy.
#[derive(Debug)]
pub(crate) struct Missing {
    program: OsString,
    why: Why,
    install: &'static str,
}

#[derive(Debug)]
enum Why {
    /// It could not be started.
    Absent(std::io::Error),
    /// It ended with an error when asked for its version.
    Broken,
    /// Its version, and the one that is needed.
    Old { version: (u32, u32), needed: (u32, u32) },
    /// What it says of its version cannot be read.
    Unclear(String),
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let program = self.program.display();
        match &self.why {
            Why::Absent(error) => write!(f, "cannot run `{program}` ({error})")?,
            Why::Broken => write!(f, "`{program}` does not tell its version")?,
            Why::Old { version: (major, minor), needed: (least, 0) } => {
                write!(f, "`{program}` is version {major}.{minor}, {least} is needed")?;
            }
            Why::Old { version: (major, minor), needed: (least, then) } => {
                write!(f, "`{program}` is version {major}.{minor}, {least}.{then} is needed")?;
            }
            Why::Unclear(said) => write!(f, "`{program}` does not tell its version, but: {said}")?,
        }
        write!(f, ": install {}", self.install)
    }
}

impl Tool {
    fn install(self) -> &'static str {
        match self {
            Tool::Rustfmt => "it with `rustup component add rustfmt`",
            Tool::Clippy => "it with `rustup component add clippy`",
            Tool::C => "a C compiler (Debian: apt-get install build-essential), or set CC",
            Tool::Cxx => "a C++ compiler (Debian: apt-get install build-essential), or set CXX",
            Tool::Make => "make (Debian: apt-get install build-essential)",
            Tool::Java => {
                "a JDK 17 or newer (Debian: apt-get install default-jdk-headless), or set JAVA_HOME"
            }
            Tool::Maven => "Maven 3.8 or newer (Debian: apt-get install maven)",
        }
    }

    /// Whether it can be used.
    pub(crate) fn look(self) -> Result<(), Missing> {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let or = |name: &str, program: &str| variable(name).unwrap_or_else(|| program.into());
        let cargo = or("CARGO", "cargo");
        match self {
            Tool::Rustfmt => self.answers(cargo, &["fmt", "--version"]),
            Tool::Clippy => self.answers(cargo, &["clippy", "--version"]),
            Tool::C => self.answers(or("CC", "cc"), &["--version"]),
            Tool::Cxx => self.answers(or("CXX", "c++"), &["--version"]),
            Tool::Make => self.answers("make".into(), &["--version"]),
            Tool::Java => {
                let program = variable("JAVA_HOME").map_or_else(
                    || "java".into(),
                    |home| Path::new(&home).join("bin").join("java").into_os_string(),
                );
                self.is_at_least(program, &["-version"], "version \"", (17, 0))
            }
            Tool::Maven => self.is_at_least("mvn".into(), &["-v"], "Apache Maven ", (3, 8)),
        }
    }

    fn missing(self, program: OsString, why: Why) -> Missing {
        Missing { program, why, install: self.install() }
    }

    /// What the program prints when asked so.
    fn ask(self, program: &OsString, arguments: &[&str]) -> Result<String, Missing> {
        // A compiler's variable may hold arguments, too.
        let words = program.to_string_lossy();
        let mut words = words.split_whitespace();
        let first = words.next().unwrap_or_default();
        let run = if Path::new(program).is_file() {
            Command::new(program).args(arguments).output()
        } else {
            Command::new(first).args(words).args(arguments).output()
        };
        match run {
            Err(error) => Err(self.missing(program.clone(), Why::Absent(error))),
            Ok(output) if !output.status.success() => {
                Err(self.missing(program.clone(), Why::Broken))
            }
            Ok(output) => {
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                Ok(text(&output.stdout) + &text(&output.stderr))
            }
        }
    }

    fn answers(self, program: OsString, arguments: &[&str]) -> Result<(), Missing> {
        self.ask(&program, arguments).map(drop)
    }

    /// As [`answers`](Self::answers), with a version that follows `before` in what it prints.
    fn is_at_least(
        self,
        program: OsString,
        arguments: &[&str],
        before: &str,
        needed: (u32, u32),
    ) -> Result<(), Missing> {
        let said = self.ask(&program, arguments)?;
        match said.split_once(before).and_then(|(_, rest)| version(rest)) {
            Some(version) if version >= needed => Ok(()),
            Some(version) => Err(self.missing(program, Why::Old { version, needed })),
            None => {
                let line = said.lines().next().unwrap_or_default().to_owned();
                Err(self.missing(program, Why::Unclear(line)))
            }
        }
    }
}

/// The first two numbers of a version at the beginning of a text: `17.0.15" ...`, `1.8.0_402`, `25`.
fn version(text: &str) -> Option<(u32, u32)> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let mut numbers = text[..end].split('.');
    let major = numbers.next()?.parse().ok()?;
    Some((major, numbers.next().and_then(|minor| minor.parse().ok()).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        assert_eq!(version("17.0.15\" 2025-04-15"), Some((17, 0)));
        assert_eq!(version("1.8.0_402\""), Some((1, 8)));
        assert_eq!(version("25-ea\""), Some((25, 0)));
        assert_eq!(version("3.8.7\u{1b}[m"), Some((3, 8)));
        assert_eq!(version("unknown"), None);
    }

    #[test]
    fn an_absent_program_is_named_with_what_to_install() {
        for tool in ALL {
            let missing = tool.answers("/nonexistent/tool".into(), &[]).unwrap_err().to_string();
            assert!(missing.contains("cannot run `/nonexistent/tool`"), "{missing}");
            assert!(missing.contains(&format!("install {}", tool.install())), "{missing}");
        }
    }

    #[test]
    fn an_old_or_mute_program_is_named_with_what_to_install() {
        let said =
            |text: &str| Tool::Java.is_at_least("echo".into(), &[text], "version \"", (17, 0));
        said("openjdk version \"17.0.15\" 2025-04-15").unwrap();
        let old = said("java version \"1.8.0_402\"").unwrap_err().to_string();
        assert!(old.starts_with("`echo` is version 1.8, 17 is needed: install a JDK 17"), "{old}");
        let mute = said("no Java runtime present").unwrap_err().to_string();
        assert!(mute.contains("but: no Java runtime present: install a JDK 17"), "{mute}");
        let broken = Tool::Make.answers("false".into(), &[]).unwrap_err().to_string();
        assert!(broken.starts_with("`false` does not tell its version: install make"), "{broken}");
        let maven =
            Tool::Maven.is_at_least("echo".into(), &["Apache Maven 3.6.3"], "Maven ", (3, 8));
        assert!(maven.unwrap_err().to_string().contains("is version 3.6, 3.8 is needed"));
    }

    #[test]
    fn a_compiler_may_come_with_arguments() {
        Tool::C.answers("echo -m64".into(), &["--version"]).unwrap();
    }
}
