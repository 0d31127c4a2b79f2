//! Finds the Java runtime and asks for its version.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use crate::error::Error;
use crate::text;

/// The oldest Java that Kafka 4 brokers run on.
const OLDEST: u32 = 17;

/// A Java runtime that has been asked for its version.
#[derive(Clone, Debug)]
pub(crate) struct Java {
    /// The launcher.
    pub(crate) program: PathBuf,
    /// Differs between builds of the virtual machine: a class archive of one build is of no use to another.
    pub(crate) build: String,
}

impl Java {
    /// The launcher named explicitly, else that of `JAVA_HOME`, else the `java` of the search path.
    pub(crate) fn find(explicit: Option<&Path>) -> Result<Self, Error> {
        let program = match explicit {
            Some(program) => program.to_owned(),
            None => match std::env::var_os("JAVA_HOME") {
                Some(home) if !home.is_empty() => Path::new(&home).join("bin").join("java"),
                _ => PathBuf::from("java"),
            },
        };
        // A bare name is for the search path; anything else must not depend on the directory a broker runs in.
        let program = if program.components().count() > 1 {
            std::path::absolute(&program).map_err(Error::io("find the current directory"))?
        } else {
            program
        };
        // Asking takes a tenth of a second, and the answer does not change within a process.
        static KNOWN: Mutex<Option<HashMap<PathBuf, Java>>> = Mutex::new(None);
        let mut known = KNOWN.lock().unwrap_or_else(|poison| poison.into_inner());
        let known = known.get_or_insert_with(HashMap::new);
        if let Some(java) = known.get(&program) {
            return Ok(java.clone());
        }
        let java = Self::ask(program)?;
        known.insert(java.program.clone(), java.clone());
        Ok(java)
    }

    fn ask(program: PathBuf) -> Result<Self, Error> {
        let output = Command::new(&program)
            .args(["-XshowSettings:properties", "-version"])
            .stdin(Stdio::null())
            .output()
            .map_err(|source| Error::JavaMissing { program: program.clone(), source })?;
        let printed = String::from_utf8_lossy(&output.stderr);
        let Some(version) = property(&printed, "java.specification.version") else {
            let output = text::tail(&printed, 20);
            return Err(Error::JavaUnusable { program, output });
        };
        match major(version) {
            Some(major) if major >= OLDEST => {}
            Some(_) => {
                let version = version.to_owned();
                return Err(Error::JavaTooOld { program, version });
            }
            None => {
                let output = text::tail(&printed, 20);
                return Err(Error::JavaUnusable { program, output });
            }
        }
        let build = ["java.vm.name", "java.vm.version", "java.home", "os.arch"]
            .map(|name| property(&printed, name).unwrap_or_default())
            .join("|");
        Ok(Self { program, build })
    }
}

/// The value of one line `name = value`.
fn property<'a>(settings: &'a str, name: &str) -> Option<&'a str> {
    settings.lines().find_map(|line| {
        let (left, right) = line.split_once(" = ")?;
        (left.trim() == name).then(|| right.trim())
    })
}

/// `1.8` is Java 8, `17` is Java 17.
fn major(version: &str) -> Option<u32> {
    let mut parts = version.split('.');
    let first = parts.next()?.parse().ok()?;
    match (first, parts.next()) {
        (1, Some(second)) => second.parse().ok(),
        _ => Some(first),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An executable that prints `settings` the way `java` does.
    fn pretend(settings: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("java");
        text::script(&program, &format!("cat >&2 <<'end'\n{settings}\nend"));
        (dir, program)
    }

    #[test]
    fn versions_of_both_schemes_are_read() {
        assert_eq!(major("1.8"), Some(8));
        assert_eq!(major("17"), Some(17));
        assert_eq!(major("25"), Some(25));
        assert_eq!(major("next"), None);
    }

    #[test]
    fn an_old_java_is_named_with_its_version() {
        let (_dir, program) = pretend("    java.specification.version = 1.8\n");
        let error = Java::find(Some(&program)).unwrap_err();
        assert!(matches!(&error, Error::JavaTooOld { version, .. } if version == "1.8"));
        let message = error.to_string();
        assert!(message.contains("is Java 1.8"), "{message}");
        assert!(message.contains("install a JDK 17 or newer"), "{message}");
    }

    #[test]
    fn a_program_that_is_no_java_is_shown_with_what_it_printed() {
        let (_dir, program) = pretend("no Java runtime present, requesting install");
        let error = Java::find(Some(&program)).unwrap_err();
        assert!(matches!(error, Error::JavaUnusable { .. }));
        assert!(error.to_string().contains("requesting install"));
    }

    #[test]
    fn the_build_tells_virtual_machines_apart() {
        let (_one, first) = pretend("  java.specification.version = 17\n  java.vm.version = 17.1");
        let (_two, second) = pretend("  java.specification.version = 17\n  java.vm.version = 17.2");
        let first = Java::find(Some(&first)).unwrap().build;
        assert!(first.contains("17.1"), "{first}");
        assert_ne!(first, Java::find(Some(&second)).unwrap().build);
    }
}
