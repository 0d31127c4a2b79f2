//! JVMs that never outlive their owner.
//!
//! A JVM is started by a small shell script which holds the reading end of a pipe from this process. The pipe closes
//! when the handle is dropped, and also when this process is gone in any way, SIGKILL included; the script then kills
//! the JVM. Signals travel through the same pipe, so that they go to a process that is certainly still ours.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

const SUPERVISE: &str = include_str!("../kafka/supervise.sh");
const SWEEP: &str = include_str!("../kafka/sweep.sh");

/// How long a killed process may take to disappear.
const END: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug)]
pub(crate) enum Signal {
    Kill,
    Terminate,
    Stop,
    Continue,
}

impl Signal {
    fn name(self) -> &'static str {
        match self {
            Self::Kill => "KILL",
            Self::Terminate => "TERM",
            Self::Stop => "STOP",
            Self::Continue => "CONT",
        }
    }
}

/// A supervised process. Dropping it kills the process and waits for its end.
#[derive(Debug)]
pub(crate) struct Supervised {
    supervisor: Child,
    pid: u32,
    control: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Supervised {
    /// Starts `program` in `directory`, with its output appended to `log`.
    ///
    /// That the program cannot be executed shows as an early exit with status 126 or 127.
    pub(crate) fn start<A: AsRef<OsStr>>(
        program: &Path,
        arguments: impl IntoIterator<Item = A>,
        directory: &Path,
        log: &Path,
    ) -> io::Result<Self> {
        let mut supervisor = shell(SUPERVISE)
            .arg(log)
            .arg(program)
            .args(arguments)
            .current_dir(directory)
            .stdout(Stdio::piped())
            .spawn()?;
        let control = supervisor.stdin.take();
        let (Some(control), Some(answers)) = (control, supervisor.stdout.take()) else {
            return Err(io::Error::other("no pipe to the supervising shell"));
        };
        let mut answers = BufReader::new(answers);
        let mut line = String::new();
        answers.read_line(&mut line)?;
        let pid = line
            .trim()
            .parse()
            .map_err(|_| io::Error::other("the supervising shell named no process"));
        match pid {
            Ok(pid) => Ok(Self { supervisor, pid, control: Some(control), answers }),
            Err(error) => {
                drop(control);
                supervisor.kill()?;
                supervisor.wait()?;
                Err(error)
            }
        }
    }

    /// The process id of the supervised process.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Sends a signal; returns after it has been sent. `false` if the process has ended.
    pub(crate) fn signal(&mut self, signal: Signal) -> bool {
        let Some(control) = &mut self.control else {
            return false;
        };
        if writeln!(control, "{}", signal.name()).is_err() {
            return false;
        }
        let mut answer = String::new();
        // The end of the answers: the process ended before the signal was read.
        matches!(self.answers.read_line(&mut answer), Ok(1..)) && answer.trim() == "sent"
    }

    /// The exit status of the process if it has ended; 128 plus the signal's number if a signal ended it.
    pub(crate) fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.supervisor.try_wait()
    }

    /// Waits for the end of the process; `None` if it still runs after `limit`.
    pub(crate) fn wait(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        wait(&mut self.supervisor, limit)
    }

    /// Has the process killed, without waiting for its end. No signal can be sent after this.
    pub(crate) fn release(&mut self) {
        self.control = None;
    }
}

impl Drop for Supervised {
    fn drop(&mut self) {
        self.release();
        if !matches!(self.wait(END), Ok(Some(_))) {
            // The process is in the hands of the kernel (SIGKILL was sent): at least leave no zombie shell.
            let _ = self.supervisor.kill();
            let _ = self.supervisor.wait();
        }
    }
}

/// Removes a directory when this process is gone, however it ended.
#[derive(Debug)]
pub(crate) struct Sweeper {
    child: Child,
    control: Option<ChildStdin>,
}

impl Sweeper {
    pub(crate) fn start(directory: &Path) -> io::Result<Self> {
        let mut child = shell(SWEEP).arg(directory).stdout(Stdio::null()).spawn()?;
        let control = child.stdin.take();
        Ok(Self { child, control })
    }
}

impl Drop for Sweeper {
    fn drop(&mut self) {
        self.control = None;
        if !matches!(wait(&mut self.child, END), Ok(Some(_))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// A shell running `script`, in a process group of its own: an interrupt from the terminal must not reach it, because
/// what it has to do comes after the end of the process that the interrupt is meant for.
fn shell(script: &str) -> Command {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script, "sh"]).stdin(Stdio::piped()).stderr(Stdio::null()).process_group(0);
    command
}

fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper(directory: &Path) -> Supervised {
        Supervised::start(Path::new("sleep"), ["1000"], directory, &directory.join("log")).unwrap()
    }

    fn alive(pid: u32) -> bool {
        Command::new("kill")
            .args(["-0", &pid.to_string()])
            .stderr(Stdio::null())
            .status()
            .unwrap()
            .success()
    }

    #[test]
    fn dropping_the_handle_kills() {
        let dir = tempfile::tempdir().unwrap();
        let process = sleeper(dir.path());
        let pid = process.pid();
        assert!(alive(pid));
        drop(process);
        assert!(!alive(pid));
    }

    #[test]
    fn a_stopped_process_is_killed_too() {
        let dir = tempfile::tempdir().unwrap();
        let mut process = sleeper(dir.path());
        let pid = process.pid();
        assert!(process.signal(Signal::Stop));
        drop(process);
        assert!(!alive(pid));
    }

    #[test]
    fn signals_arrive_and_the_end_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let mut process = sleeper(dir.path());
        assert!(process.signal(Signal::Continue));
        assert!(process.ended().unwrap().is_none());
        assert!(process.signal(Signal::Terminate));
        let status = process.wait(END).unwrap().unwrap();
        assert_eq!(status.code(), Some(128 + 15));
        assert!(!process.signal(Signal::Kill));
    }

    #[test]
    fn output_goes_to_the_log_and_the_status_is_passed_on() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let script = ["-c", "echo out; echo err >&2; exit 3"];
        let mut process =
            Supervised::start(Path::new("/bin/sh"), script, dir.path(), &log).unwrap();
        assert_eq!(process.wait(END).unwrap().unwrap().code(), Some(3));
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "out\nerr\n");
        let mut missing =
            Supervised::start(Path::new("/nonexistent"), script, dir.path(), &log).unwrap();
        assert_eq!(missing.wait(END).unwrap().unwrap().code(), Some(127));
    }

    #[test]
    fn a_swept_directory_is_gone() {
        let dir = tempfile::tempdir().unwrap().keep();
        std::fs::write(dir.join("file"), "x").unwrap();
        let sweeper = Sweeper::start(&dir).unwrap();
        assert!(dir.exists());
        drop(sweeper);
        assert!(!dir.exists());
    }
}
