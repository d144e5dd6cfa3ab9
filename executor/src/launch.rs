//! Worker processes of this machine: started, watched, killed and reaped.
//!
//! Each child is started and waited for by a thread of its own. That thread lives as long as the child, since
//! the kernel's parent-death signal follows the *thread* that forked. A worker also ends when its coordinator's
//! connection does, so two independent lines keep it from becoming an orphan.

use std::ffi::OsString;
use std::io;
use std::net::SocketAddr;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use infercluster_spec::GpuId;

use crate::wire::Token;
use crate::wire::handshake::TOKEN_VARIABLE;

/// What asks a worker to keep its computing thread on one core.
const PIN_FLAG: &str = "--pin";

/// How a worker process is started: `program arguments.. --connect ADDRESS --gpu ID`, the token in its
/// environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerCommand {
    /// The program, usually this one.
    pub program: PathBuf,
    /// What stands before the options, usually `worker`.
    pub arguments: Vec<OsString>,
}

impl WorkerCommand {
    /// This very program in the role `worker`.
    pub fn this_program() -> io::Result<Self> {
        Ok(Self {
            program: std::env::current_exe()?,
            arguments: vec!["worker".into()],
        })
    }

    /// The same, each worker's computing thread kept on a core of its own where there are as many.
    pub fn pinned(mut self) -> Self {
        self.arguments.push(PIN_FLAG.into());
        self
    }

    /// Starts a worker for one device.
    pub fn start(&self, gpu: GpuId, coordinator: SocketAddr, token: &Token) -> io::Result<WorkerProcess> {
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .arg("--connect")
            .arg(coordinator.to_string())
            .arg("--gpu")
            .arg(gpu.0.to_string())
            .env(TOKEN_VARIABLE, token.to_secret_text())
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        die_with_parent(&mut command);
        WorkerProcess::start(command)
    }
}

/// A child process that is killed and reaped when this value goes.
#[derive(Debug)]
pub struct WorkerProcess {
    process: u32,
    watch: Arc<Watch>,
    warden: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Watch {
    /// `None` while the child runs or waits to be reaped: only then its number is surely its own.
    exit: Mutex<Option<ExitStatus>>,
    exited: Condvar,
}

impl WorkerProcess {
    fn start(mut command: Command) -> io::Result<Self> {
        let watch = Arc::new(Watch::default());
        let watched = Arc::clone(&watch);
        let (report, started) = mpsc::sync_channel(1);
        let warden =
            thread::Builder::new()
                .name("warden".to_owned())
                .spawn(move || match command.spawn() {
                    Ok(child) => {
                        // The receiver waits for exactly this message.
                        let _ = report.send(Ok(child.id()));
                        watched.until_exit(child);
                    }
                    Err(error) => {
                        let _ = report.send(Err(error));
                    }
                })?;
        let process = started
            .recv()
            .map_err(|_| io::Error::other("the thread that starts a worker ended"))??;
        Ok(Self {
            process,
            watch,
            warden: Some(warden),
        })
    }

    /// Its process number.
    pub fn process(&self) -> u32 {
        self.process
    }

    /// Kills it, if it still runs.
    pub fn kill(&self) {
        let exit = self.watch.exit.lock().unwrap_or_else(PoisonError::into_inner);
        if exit.is_none() {
            // SAFETY: `kill` has no memory effects. The child is not reaped while the lock is held and `exit` is
            // `None`, so the number cannot have passed to another process.
            unsafe {
                libc::kill(self.process as libc::pid_t, libc::SIGKILL);
            }
        }
    }

    /// How it ended, waiting at most so long for its end.
    pub fn wait(&self, limit: Duration) -> Option<ExitStatus> {
        let exit = self.watch.exit.lock().unwrap_or_else(PoisonError::into_inner);
        let (exit, _) = self
            .watch
            .exited
            .wait_timeout_while(exit, limit, |exit| exit.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        *exit
    }
}

impl Drop for WorkerProcess {
    fn drop(&mut self) {
        self.kill();
        if let Some(warden) = self.warden.take() {
            // A panic of the warden was already printed; the child is dead either way.
            let _ = warden.join();
        }
    }
}

impl Watch {
    /// Waits for the end without reaping, then reaps under the lock, so that [`WorkerProcess::kill`] never meets
    /// a number that was given away.
    fn until_exit(&self, mut child: Child) {
        // SAFETY: an all-zero `siginfo_t` is a valid value of this plain C struct, and the kernel fills it in.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        loop {
            // SAFETY: `info` outlives the call, and the number is that of a child of this process that nobody
            // else reaps.
            let result =
                unsafe { libc::waitid(libc::P_PID, child.id(), &mut info, libc::WEXITED | libc::WNOWAIT) };
            if result == 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                break;
            }
        }
        let mut exit = self.exit.lock().unwrap_or_else(PoisonError::into_inner);
        *exit = Some(child.wait().unwrap_or_else(|_| ExitStatus::from_raw(0)));
        self.exited.notify_all();
    }
}

/// Makes the kernel kill the child when the thread that starts it ends.
fn die_with_parent(command: &mut Command) {
    let parent = std::process::id();
    let in_child = move || {
        // SAFETY: `prctl` and `getppid` are async-signal-safe and touch no memory of this process.
        unsafe {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(io::Error::last_os_error());
            }
            // The parent may have died before the signal was asked for.
            if libc::getppid() as u32 != parent {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
        }
        Ok(())
    };
    // SAFETY: the closure calls async-signal-safe functions only and does not allocate.
    unsafe {
        command.pre_exec(in_child);
    }
}

/// How a process ended, for a message.
pub fn describe_exit(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was killed by signal {signal}"),
        (None, Some(code)) => format!("ended with exit code {code}"),
        (None, None) => "ended".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A shell in a worker's place: it gets the options as parameters.
    fn shell(script: &str) -> WorkerProcess {
        let command = WorkerCommand {
            program: "sh".into(),
            arguments: ["-c", script, "worker"].map(OsString::from).to_vec(),
        };
        let token = Token::random().unwrap();
        command
            .start(GpuId(2), "127.0.0.1:9".parse().unwrap(), &token)
            .unwrap()
    }

    fn is_there(process: u32) -> bool {
        Path::new(&format!("/proc/{process}")).exists()
    }

    #[test]
    fn a_dropped_worker_is_gone_and_reaped() {
        let worker = shell("exec sleep 1000");
        let process = worker.process();
        assert!(is_there(process));
        assert_eq!(worker.wait(Duration::from_millis(1)), None);
        drop(worker);
        assert!(!is_there(process));
    }

    #[test]
    fn a_killed_worker_says_so() {
        let worker = shell("exec sleep 1000");
        worker.kill();
        let status = worker.wait(Duration::from_secs(10)).unwrap();
        assert_eq!(describe_exit(status), "was killed by signal 9");
        worker.kill();
    }

    #[test]
    fn options_are_arguments_and_the_token_is_not() {
        let worker = shell(
            "test \"$*\" = '--connect 127.0.0.1:9 --gpu 2' && test ${#INFERCLUSTER_TOKEN} = 64 && exit 7",
        );
        let status = worker.wait(Duration::from_secs(10)).unwrap();
        assert_eq!(describe_exit(status), "ended with exit code 7");
    }

    #[test]
    fn a_missing_program_is_an_error() {
        let command = WorkerCommand {
            program: "/nonexistent/program".into(),
            arguments: Vec::new(),
        };
        let token = Token::random().unwrap();
        let error = command
            .start(GpuId(0), "127.0.0.1:9".parse().unwrap(), &token)
            .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
