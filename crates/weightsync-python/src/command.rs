//! The `weightsync` command, run by the interpreter.

use std::ffi::OsString;

use pyo3::prelude::*;
use weightsync_cli::Program;

use crate::log;

/// Runs the command with the arguments after its name, and returns its exit status. `itself` starts
/// the command as a process of its own: a program and its first arguments.
///
/// The interpreter's lock is released throughout, and Python's handlers of signals do not run
/// meanwhile.
#[pyfunction]
pub fn command(py: Python<'_>, arguments: Vec<OsString>, itself: Vec<OsString>) -> u8 {
    let program = Program {
        itself,
        others: &[("doctor", "Say what this machine can do, and what to change")],
        log: Some(log::use_logger),
    };
    py.detach(|| weightsync_cli::run(&program, arguments))
}
