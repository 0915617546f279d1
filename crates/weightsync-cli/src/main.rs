//! The `weightsync` command.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use weightsync_cli::Program;

fn main() -> ExitCode {
    match weightsync_cli::logger() {
        // Nothing else in this program sets one.
        Ok(logger) => drop(tracing::subscriber::set_global_default(logger)),
        Err(error) => {
            eprintln!("weightsync: {error}");
            return ExitCode::FAILURE;
        }
    }
    let arguments = std::env::args_os().skip(1);
    ExitCode::from(weightsync_cli::run(&Program::default(), arguments))
}
