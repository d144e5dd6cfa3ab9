//! Runs the program and judges what came back.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// How the program is called: a path that only an integration test knows.
#[derive(Debug, Clone)]
pub struct Program(PathBuf);

/// What came back.
#[derive(Debug)]
pub struct Answer {
    /// The call, for messages.
    pub call: String,
    /// Exit code; `None` where a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Program {
    /// The program at that path.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// A command to be completed by the test.
    pub fn command<S: AsRef<std::ffi::OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(&self.0);
        command.args(arguments).env_remove("RUST_LOG");
        command
    }

    /// Runs it to its end, with the folder as working directory and nothing on standard input.
    pub fn run<S: AsRef<std::ffi::OsStr>>(&self, folder: &Path, arguments: &[S]) -> Answer {
        let mut command = self.command(arguments);
        let output = command
            .current_dir(folder)
            .stdin(Stdio::null())
            .output()
            .expect("the program under test starts");
        Answer::of(&command, &output)
    }
}

impl Answer {
    /// What a finished command left.
    pub fn of(command: &Command, output: &Output) -> Self {
        let arguments: Vec<_> = command
            .get_args()
            .map(|argument| argument.to_string_lossy().into_owned())
            .collect();
        Self {
            call: format!("infercluster {}", arguments.join(" ")),
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Demands exit code 0.
    #[track_caller]
    pub fn done(self) -> Self {
        assert_eq!(self.code, Some(0), "{self}");
        self
    }

    /// Demands a clean refusal: exit code 2, nothing on stdout, one message that holds every needle, and no
    /// sign of a panic.
    #[track_caller]
    pub fn refused(&self, needles: &[&str]) {
        assert_eq!(self.code, Some(2), "{self}");
        assert_eq!(self.stdout, "", "a refusal prints no result: {self}");
        assert_eq!(self.stderr.matches("error:").count(), 1, "one message: {self}");
        assert!(!self.stderr.contains("panicked"), "{self}");
        for needle in needles {
            assert!(
                self.stderr.contains(needle),
                "no `{needle}` in the message of {self}"
            );
        }
    }

    /// Standard output as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("no JSON ({error}): {self}"))
    }
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(
            f,
            "`{}` ended with {:?}\nstdout: {}\nstderr: {}",
            self.call, self.code, self.stdout, self.stderr
        )
    }
}
