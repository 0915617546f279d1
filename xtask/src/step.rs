//! One step of a run: a command, what it is called, how long it took.

use std::io;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::orphans::Watch;

/// Runs a command to its end with its output passed through, between two lines that name the step
/// and its duration.
///
/// Fails with [`Error::Failed`] when the command does.
pub fn run(name: &str, command: &mut Command) -> Result<Duration, Error> {
    begin(name, command);
    let took = finish(name, command, false)?;
    eprintln!("── {name}: ok, {}", seconds(took));
    Ok(took)
}

/// Runs the last step, whose own summary is the last thing printed, also when it fails.
pub fn run_last(name: &str, command: &mut Command) -> Result<(), Error> {
    begin(name, command);
    finish(name, command, true).map(drop)
}

/// Runs tests, and ends every process that outlives the test which started it. What was ended is
/// returned, one line each, next to the outcome.
pub fn run_tests(name: &str, command: &mut Command) -> (Result<Duration, Error>, Vec<String>) {
    let watch = Watch::begin(command);
    begin(name, command);
    let begun = Instant::now();
    let outcome = match command.stdin(Stdio::null()).spawn().map_err(start(name)) {
        Err(error) => return (Err(error), watch.end()),
        Ok(mut child) => watch
            .until_it_ends(&mut child)
            .map_err(start(name))
            .and_then(|status| passed(name, status, true).map(|()| begun.elapsed())),
    };
    let ended = watch.end();
    match &outcome {
        Ok(took) => eprintln!("── {name}: ok, {}", seconds(*took)),
        Err(error) => eprintln!("── {error}"),
    }
    (outcome, ended)
}

/// A duration as the steps print it.
pub fn seconds(took: Duration) -> String {
    format!("{:.1} s", took.as_secs_f64())
}

/// A command's standard output as text; its standard error is passed through.
///
/// `name` is what errors call the command.
pub fn output(command: &mut Command, name: &str) -> Result<String, Error> {
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(start(name))?;
    if !output.status.success() {
        return Err(Error::Failed {
            step: name.into(),
            code: output.status.code(),
            reported: false,
        });
    }
    String::from_utf8(output.stdout).map_err(|_| Error::Unreadable {
        what: format!("`{name}`: its output is not UTF-8"),
    })
}

fn begin(name: &str, command: &Command) {
    let mut line = format!("── {name}:");
    for (key, value) in command.get_envs() {
        // The build directory is printed once, at the start of the run.
        if let Some(value) = value.filter(|_| key != "CARGO_TARGET_DIR") {
            line += &format!(" {}='{}'", key.display(), value.display());
        }
    }
    let program = std::path::Path::new(command.get_program());
    line += &format!(
        " {}",
        program.file_name().unwrap_or(program.as_os_str()).display()
    );
    for arg in command.get_args() {
        line += &format!(" {}", arg.display());
    }
    eprintln!("{line}");
}

fn finish(name: &str, command: &mut Command, reported: bool) -> Result<Duration, Error> {
    let begun = Instant::now();
    let status = command.stdin(Stdio::null()).status().map_err(start(name))?;
    passed(name, status, reported).map(|()| begun.elapsed())
}

fn passed(name: &str, status: ExitStatus, reported: bool) -> Result<(), Error> {
    match status.success() {
        true => Ok(()),
        false => Err(Error::Failed {
            step: name.into(),
            code: status.code(),
            reported,
        }),
    }
}

fn start(name: &str) -> impl FnOnce(io::Error) -> Error {
    let doing = format!("starting `{name}`");
    move |source| Error::Io { doing, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_step_keeps_its_exit_status() {
        let error = run("three", Command::new("sh").args(["-c", "exit 3"])).expect_err("exit 3");
        assert!(
            matches!(
                &error,
                Error::Failed {
                    code: Some(3),
                    reported: false,
                    ..
                }
            ),
            "{error:?}"
        );
        assert_eq!(error.exit_code(), 3);
        let last =
            run_last("last", Command::new("sh").args(["-c", "exit 100"])).expect_err("exit 100");
        assert!(last.is_reported(), "the last step's own summary stays last");
    }

    #[test]
    fn a_program_that_does_not_exist_is_named() {
        let error =
            run("absent", &mut Command::new("/nonexistent/program")).expect_err("no such file");
        assert!(error.to_string().contains("absent"), "{error}");
    }

    #[test]
    fn output_of_a_failed_command_is_not_used() {
        assert_eq!(
            output(Command::new("echo").arg("word"), "echo").expect("echo"),
            "word\n"
        );
        output(Command::new("sh").args(["-c", "echo word; exit 1"]), "sh").expect_err("exit 1");
    }
}
