//! The jars of Kafka, fetched once by Maven into a cache outside the repository.
//!
//! The cache holds one directory for each Kafka version and content of the files shipped here. It appears by a rename,
//! complete, and what is slow to make is guarded by a lock between processes.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::error::Error;
use crate::java::Java;
use crate::text;

/// The version of Apache Kafka that is started.
pub const KAFKA_VERSION: &str = "4.1.0";

const POM: &str = include_str!("../kafka/pom.xml");
const LOGGING: &str = include_str!("../kafka/log4j2.properties");

/// Pinned: the plugin that a bare goal name resolves to depends on the Maven release.
const COPY: &str = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies";

/// Which features a new cluster starts with is written here by the storage tool. It depends on the Kafka version
/// alone, so it is made once and copied, which saves a JVM run of a second or two for each start.
const BOOTSTRAP: &str = "bootstrap.checkpoint";

/// After this time a class archive that could not be recorded is tried again.
const RETRY: Duration = Duration::from_secs(24 * 60 * 60);

/// An installed Kafka.
#[derive(Clone, Debug)]
pub(crate) struct Install {
    directory: PathBuf,
    java: Java,
    class_path: OsString,
}

/// What to do with the archive of loaded classes.
#[derive(Clone, Debug)]
pub(crate) enum Archive {
    /// Start from this one: it halves the time a broker takes to start.
    Use(PathBuf),
    /// Write one to this file at the end of the JVM.
    Write(PathBuf),
    /// Do without.
    None,
}

impl Install {
    /// The installed Kafka; fetches it first if this is the first time.
    pub(crate) fn ensure(
        java: Java,
        maven: Option<&Path>,
        cache: Option<&Path>,
    ) -> Result<Self, Error> {
        let cache = match cache {
            Some(cache) => std::path::absolute(cache),
            None => std::path::absolute(default_cache(|name| std::env::var_os(name))?),
        }
        .map_err(Error::io("find the current directory"))?;
        let name = name();
        let directory = cache.join(&name);
        if !directory.is_dir() {
            fs::create_dir_all(&cache).map_err(Error::io(format!("create {}", cache.display())))?;
            let _lock = lock(&cache.join(format!("{name}.lock")))?;
            // Another process may have been faster.
            if !directory.is_dir() {
                fetch(&java, maven, &cache, &name)?;
            }
        }
        let class_path = class_path(&directory.join("libs"))?;
        Ok(Self { directory, java, class_path })
    }

    /// The launcher of the JVM.
    pub(crate) fn program(&self) -> &Path {
        &self.java.program
    }

    /// The options that every JVM gets: they make the start quick rather than the steady state fast.
    pub(crate) fn options(&self, archive: &Archive) -> Vec<OsString> {
        let mut options: Vec<OsString> = [
            "-Xmx512m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-XX:-UsePerfData",
            "-XX:+ExitOnOutOfMemoryError",
            "-Djava.awt.headless=true",
            // What the JVM itself has to say must not get into the output of a tool.
            "-Xlog:disable",
            "-Xlog:all=error:stderr",
        ]
        .map(OsString::from)
        .into();
        let mut logging = OsString::from("-Dlog4j2.configurationFile=");
        logging.push(self.directory.join("log4j2.properties"));
        options.push(logging);
        let flag = match archive {
            Archive::Use(path) => Some(("-XX:SharedArchiveFile=", path)),
            Archive::Write(path) => Some(("-XX:ArchiveClassesAtExit=", path)),
            Archive::None => None,
        };
        if let Some((flag, path)) = flag {
            let mut option = OsString::from(flag);
            option.push(path);
            options.push(option);
        }
        options
    }

    /// The jars.
    pub(crate) fn class_path(&self) -> &OsString {
        &self.class_path
    }

    /// Makes `storage` the formatted storage directory of the node `id` in a cluster.
    pub(crate) fn format(&self, storage: &Path, cluster: &str, id: u32) -> Result<(), Error> {
        let failed = || Error::io(format!("write {}", storage.display()));
        fs::create_dir_all(storage).map_err(failed())?;
        let directory = text::random_id();
        fs::write(
            storage.join("meta.properties"),
            format!("version=1\ncluster.id={cluster}\nnode.id={id}\ndirectory.id={directory}\n"),
        )
        .map_err(failed())?;
        fs::copy(self.directory.join(BOOTSTRAP), storage.join(BOOTSTRAP)).map_err(failed())?;
        Ok(())
    }

    /// The class archive of this Java build. If there is none yet, `record` is called with the file to have one JVM
    /// write; that this fails, as it does with virtual machines that do not know class archives, costs nothing but
    /// time, and is not tried again for a day.
    pub(crate) fn archive<F>(&self, record: F) -> Archive
    where
        F: FnOnce(&Path) -> Result<(), Error>,
    {
        let name = format!("classes-{:016x}", text::fingerprint(&[&self.java.build]));
        let archive = self.directory.join(format!("{name}.jsa"));
        let refused = self.directory.join(format!("{name}.refused"));
        let known = || {
            if archive.is_file() {
                Some(Archive::Use(archive.clone()))
            } else {
                let since = fs::metadata(&refused).ok()?.modified().ok()?.elapsed();
                since.is_ok_and(|since| since < RETRY).then_some(Archive::None)
            }
        };
        if let Some(known) = known() {
            return known;
        }
        // A cache that cannot be written to is no obstacle to starting a broker.
        let Ok(_lock) = lock(&self.directory.join(format!("{name}.lock"))) else {
            return Archive::None;
        };
        if let Some(known) = known() {
            return known;
        }
        let partial = self.directory.join(format!("{name}.partial"));
        // Left over from a process that was killed in the middle.
        let _ = fs::remove_file(&partial);
        let recorded = record(&partial).and_then(|()| {
            fs::rename(&partial, &archive)
                .map_err(Error::io(format!("create {}", archive.display())))
        });
        match recorded {
            Ok(()) => Archive::Use(archive),
            Err(error) => {
                let _ = fs::write(&refused, format!("{error}\n"));
                Archive::None
            }
        }
    }
}

/// The name of the directory in the cache.
fn name() -> String {
    let content = text::fingerprint(&[POM, LOGGING, COPY]);
    format!("kafka-{KAFKA_VERSION}-{content:016x}")
}

/// `PLIMSOLL_KAFKA_CACHE`, else the user's cache directory.
fn default_cache(variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, Error> {
    let set = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("PLIMSOLL_KAFKA_CACHE")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("plimsoll")))
        .or_else(|| Some(set("HOME")?.join(".cache").join("plimsoll")))
        .ok_or(Error::NoCache)
}

/// Holds the lock until the file is dropped.
fn lock(path: &Path) -> Result<File, Error> {
    let failed = || Error::io(format!("lock {}", path.display()));
    let file = File::options().create(true).append(true).open(path).map_err(failed())?;
    file.lock().map_err(failed())?;
    Ok(file)
}

/// Fetches and prepares everything in a temporary directory, then renames that to `name`. The caller holds the lock.
fn fetch(java: &Java, maven: Option<&Path>, cache: &Path, name: &str) -> Result<(), Error> {
    let prefix = format!("{name}.tmp-");
    remove_leftovers(cache, &prefix);
    let temporary = tempfile::Builder::new()
        .prefix(&prefix)
        .tempdir_in(cache)
        .map_err(Error::io(format!("create a directory in {}", cache.display())))?;
    let directory = temporary.path();
    let write = |file: &str, content: &str| {
        let path = directory.join(file);
        fs::write(&path, content).map_err(Error::io(format!("write {}", path.display())))
    };
    write("pom.xml", POM)?;
    write("log4j2.properties", LOGGING)?;

    let maven = maven.unwrap_or(Path::new("mvn"));
    let output = Command::new(maven)
        .args(["--batch-mode", "--quiet", "--strict-checksums", COPY])
        .args(["-DincludeScope=runtime", "-DoutputDirectory=libs"])
        .current_dir(directory)
        .stdin(Stdio::null())
        .output()
        .map_err(|source| Error::MavenMissing { program: maven.to_owned(), source })?;
    if !output.status.success() {
        let printed = [output.stdout, output.stderr].concat();
        let output = text::tail(&String::from_utf8_lossy(&printed), 40);
        return Err(Error::Download { output });
    }
    write_bootstrap(java, directory)?;

    // Moved away, there is nothing left to remove at the end of this function.
    let target = cache.join(name);
    fs::rename(directory, &target).map_err(Error::io(format!("create {}", target.display())))
}

/// What processes left that were killed while fetching.
fn remove_leftovers(cache: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(cache) else {
        return;
    };
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            // They only waste space.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Has the storage tool of Kafka write [`BOOTSTRAP`].
fn write_bootstrap(java: &Java, directory: &Path) -> Result<(), Error> {
    let storage = directory.join("format");
    let properties = directory.join("format.properties");
    fs::write(
        &properties,
        format!(
            "process.roles=broker,controller\n\
             node.id=0\n\
             controller.quorum.voters=0@127.0.0.1:9093\n\
             listeners=PLAINTEXT://127.0.0.1:9092,CONTROLLER://127.0.0.1:9093\n\
             controller.listener.names=CONTROLLER\n\
             log.dirs={}\n",
            text::escape_property(&storage.to_string_lossy())
        ),
    )
    .map_err(Error::io(format!("write {}", properties.display())))?;
    let output = Command::new(&java.program)
        .arg("-cp")
        .arg(class_path(&directory.join("libs"))?)
        .args(["kafka.tools.StorageTool", "format", "--cluster-id"])
        .arg(text::random_id())
        .arg("--config")
        .arg(&properties)
        .current_dir(directory)
        .stdin(Stdio::null())
        .output()
        .map_err(|source| Error::JavaMissing { program: java.program.clone(), source })?;
    if !output.status.success() {
        let printed = [output.stdout, output.stderr].concat();
        let output = text::tail(&String::from_utf8_lossy(&printed), 40);
        return Err(Error::Format { output });
    }
    let from = storage.join(BOOTSTRAP);
    fs::rename(&from, directory.join(BOOTSTRAP))
        .and_then(|()| fs::remove_dir_all(&storage))
        .and_then(|()| fs::remove_file(&properties))
        .map_err(Error::io(format!("move {}", from.display())))
}

/// The jars of a directory, in the order of their names: a class archive is only valid for the very same class path.
fn class_path(libs: &Path) -> Result<OsString, Error> {
    let failed = || Error::io(format!("read {}", libs.display()));
    let mut jars = fs::read_dir(libs)
        .and_then(|entries| {
            entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<PathBuf>>>()
        })
        .map_err(failed())?;
    jars.retain(|path| path.extension().is_some_and(|extension| extension == "jar"));
    jars.sort();
    std::env::join_paths(jars)
        .map_err(|error| failed()(std::io::Error::new(std::io::ErrorKind::InvalidInput, error)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::script;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn the_version_is_that_of_the_pom() {
        assert!(POM.contains(&format!("<kafka.version>{KAFKA_VERSION}</kafka.version>")));
    }

    #[test]
    fn the_cache_is_where_the_variables_say() {
        let with = |set: &[(&str, &str)]| {
            default_cache(|name| {
                let (_, value) = set.iter().find(|(key, _)| *key == name)?;
                Some(OsString::from(value))
            })
        };
        let home = ("HOME", "/home/a");
        let xdg = ("XDG_CACHE_HOME", "/var/a");
        let own = ("PLIMSOLL_KAFKA_CACHE", "/jars");
        assert_eq!(with(&[home, xdg, own]).unwrap(), Path::new("/jars"));
        assert_eq!(with(&[home, xdg]).unwrap(), Path::new("/var/a/plimsoll"));
        let in_home = Path::new("/home/a/.cache/plimsoll");
        assert_eq!(with(&[home]).unwrap(), in_home);
        assert_eq!(with(&[home, ("XDG_CACHE_HOME", "")]).unwrap(), in_home);
        assert!(matches!(with(&[]), Err(Error::NoCache)));
    }

    fn java() -> Java {
        Java { program: "/nonexistent/java".into(), build: "some build".into() }
    }

    #[test]
    fn a_missing_maven_is_named_and_leaves_nothing_behind() {
        let cache = tempfile::tempdir().unwrap();
        let maven = Path::new("/nonexistent/mvn");
        let error = Install::ensure(java(), Some(maven), Some(cache.path())).unwrap_err();
        assert!(matches!(error, Error::MavenMissing { .. }));
        let message = error.to_string();
        assert!(message.contains("/nonexistent/mvn"), "{message}");
        assert!(message.contains("install a JDK 17 or newer and Maven 3.8 or newer"), "{message}");
        let left: Vec<_> = fs::read_dir(cache.path()).unwrap().flatten().collect();
        assert!(left.iter().all(|entry| entry.file_type().unwrap().is_file()));
    }

    #[test]
    fn a_failing_maven_is_shown_with_what_it_printed() {
        let cache = tempfile::tempdir().unwrap();
        let error =
            Install::ensure(java(), Some(Path::new("false")), Some(cache.path())).unwrap_err();
        assert!(matches!(error, Error::Download { .. }));
    }

    #[test]
    fn several_at_once_fetch_once() {
        let dir = tempfile::tempdir().unwrap();
        let (maven, program) = (dir.path().join("mvn"), dir.path().join("java"));
        script(
            &maven,
            "echo run >> ../../runs; sleep 0.1; mkdir libs; touch libs/b.jar libs/a.jar libs/c.txt",
        );
        script(&program, "mkdir format; echo x > format/bootstrap.checkpoint");
        let cache = dir.path().join("cache");
        // What a process left that was killed while fetching.
        let leftover = cache.join(format!("{}.tmp-killed", name()));
        fs::create_dir_all(leftover.join("libs")).unwrap();
        let java = Java { program, build: "some build".into() };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let install =
                        Install::ensure(java.clone(), Some(&maven), Some(&cache)).unwrap();
                    let libs = cache.join(name()).join("libs");
                    let jars = [libs.join("a.jar"), libs.join("b.jar")];
                    let expected = std::env::join_paths(jars).unwrap();
                    assert_eq!(*install.class_path(), expected);
                });
            }
        });
        assert_eq!(fs::read_to_string(dir.path().join("runs")).unwrap(), "run\n");
        let mut left: Vec<_> = fs::read_dir(&cache)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, [name(), format!("{}.lock", name())]);
    }

    fn installed() -> (tempfile::TempDir, Install) {
        let dir = tempfile::tempdir().unwrap();
        let install =
            Install { directory: dir.path().to_owned(), java: java(), class_path: OsString::new() };
        (dir, install)
    }

    #[test]
    fn a_class_archive_is_recorded_once() {
        let (_dir, install) = installed();
        let recorded = AtomicUsize::new(0);
        // Several threads, each with a lock of its own, as several processes have.
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let archive = install.archive(|file| {
                        recorded.fetch_add(1, Ordering::SeqCst);
                        fs::write(file, "classes").map_err(Error::io("write"))
                    });
                    let Archive::Use(path) = archive else { panic!("{archive:?}") };
                    assert_eq!(fs::read_to_string(path).unwrap(), "classes");
                });
            }
        });
        assert_eq!(recorded.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn a_class_archive_that_cannot_be_had_is_not_tried_again() {
        let (_dir, install) = installed();
        for expected in [1, 0] {
            let mut tried = 0;
            let archive = install.archive(|_| {
                tried += 1;
                Err(Error::NoCache)
            });
            assert!(matches!(archive, Archive::None));
            assert_eq!(tried, expected);
        }
    }
}
