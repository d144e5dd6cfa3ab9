//! Failures as people read them: what was asked, what was found, and what to do about it.

use std::fmt;

/// A failure with a known remedy.
#[derive(Debug)]
struct Fixable {
    source: anyhow::Error,
    fix: String,
}

impl fmt::Display for Fixable {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&chain(&self.source))
    }
}

impl std::error::Error for Fixable {}

/// Adds the remedy to a failure.
pub(crate) trait WithFix<T> {
    /// Names what the user can do; shown on a line of its own.
    fn fix(self, fix: impl Into<String>) -> anyhow::Result<T>;
}

impl<T, E: Into<anyhow::Error>> WithFix<T> for Result<T, E> {
    fn fix(self, fix: impl Into<String>) -> anyhow::Result<T> {
        self.map_err(|error| {
            anyhow::Error::new(Fixable {
                source: error.into(),
                fix: fix.into(),
            })
        })
    }
}

/// The whole message: one line of what is wrong with its causes, and the remedy where one is known.
pub(crate) fn message(error: &anyhow::Error) -> String {
    let text = chain(error);
    let fix = error.chain().find_map(|cause| cause.downcast_ref::<Fixable>());
    match fix {
        Some(fixable) => format!("error: {text}\nfix: {}", fixable.fix),
        None => format!("error: {text}"),
    }
}

/// An error and its causes, outermost first; a cause that an outer message already quotes is said once.
fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

/// Whether the reader of stdout went away, as `| head` does.
pub(crate) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.is::<ClosedPipe>())
}

/// Nobody reads stdout any more. A type of its own, since a socket to a worker can break as well and that is
/// a failure.
#[derive(Debug, thiserror::Error)]
#[error("nobody reads the output any more")]
pub(crate) struct ClosedPipe;

#[cfg(test)]
mod tests {
    use anyhow::{Context as _, anyhow};

    use super::*;

    #[test]
    fn a_message_has_causes_and_one_remedy() {
        let failed: anyhow::Result<()> = Err(anyhow!("no such file"));
        let error = failed
            .fix("name a file that exists")
            .context("layout")
            .unwrap_err();
        assert_eq!(
            message(&error),
            "error: layout: no such file\nfix: name a file that exists"
        );
    }

    #[test]
    fn a_cause_that_is_quoted_is_said_once() {
        let error = anyhow!("connection refused").context("worker 3: connection refused");
        assert_eq!(message(&error), "error: worker 3: connection refused");
    }
}
