//! The `weightsync` command.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use weightsync_cli::Program;

fn main() -> ExitCode {
    let arguments = std::env::args_os().skip(1);
    ExitCode::from(weightsync_cli::run(&Program::default(), arguments))
}
