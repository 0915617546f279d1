//! What stops a run, and what to do about it.

use std::fmt;
use std::io;

use crate::arrows::Violation;

/// Why a command of xtask ended early.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The command line asks for nothing xtask knows.
    Usage(String),
    /// `WEIGHTSYNC_SOAK` holds something other than a factor or `full`.
    Soak {
        /// What it holds.
        got: String,
    },
    /// The machine lacks something a step needs.
    Missing {
        /// What is missing.
        what: String,
        /// What brings it.
        fix: String,
    },
    /// A program could not be started, or a file could not be used.
    Io {
        /// What was being done.
        doing: String,
        /// What the system answered.
        source: io::Error,
    },
    /// Another program's output is not what it documents.
    Unreadable {
        /// Whose output, and which part of it.
        what: String,
    },
    /// A step ran and failed.
    Failed {
        /// The step.
        step: String,
        /// Its exit status; `None` when a signal ended it.
        code: Option<i32>,
        /// Whether the step ended with a summary that must stay the last thing printed.
        reported: bool,
    },
    /// Some steps of a run failed, and its last lines named them.
    Steps {
        /// Their number.
        failed: usize,
    },
    /// The crate graph has edges the design does not allow.
    Arrows(Vec<Violation>),
}

impl Error {
    /// Whether the failure has been printed already, by the program that found it.
    pub fn is_reported(&self) -> bool {
        matches!(
            self,
            Error::Failed { reported: true, .. } | Error::Steps { .. }
        )
    }

    /// The exit status to pass on: the failed step's own, 2 for a wrong command line, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Usage(_) => 2,
            Error::Failed {
                code: Some(code), ..
            } => u8::try_from(*code).unwrap_or(1).max(1),
            _ => 1,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Usage(text) => f.write_str(text),
            Error::Soak { got } => write!(
                f,
                "WEIGHTSYNC_SOAK is `{got}`: expected a factor above 0 such as `0.1` or `3`, or `full`"
            ),
            Error::Missing { what, fix } => write!(f, "{what} is missing\n  fix: {fix}"),
            Error::Io { doing, source } => write!(f, "{doing}: {source}"),
            Error::Unreadable { what } => write!(f, "cannot make sense of {what}"),
            Error::Failed {
                step,
                code: Some(code),
                ..
            } => {
                write!(f, "step `{step}` failed with exit status {code}")
            }
            Error::Failed {
                step, code: None, ..
            } => {
                write!(f, "step `{step}` was ended by a signal")
            }
            Error::Steps { failed } => write!(f, "{failed} steps failed"),
            Error::Arrows(violations) => {
                writeln!(f, "{} edge(s) the design does not allow:", violations.len())?;
                for violation in violations {
                    writeln!(f, "  {violation}")?;
                }
                write!(
                    f,
                    "  fix: drop the edge, or change the design and the table in xtask/src/arrows.rs together"
                )
            }
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}
