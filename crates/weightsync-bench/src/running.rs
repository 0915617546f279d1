//! Programs of others that a benchmark runs.

use std::error::Error;
use std::io;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use super::peer::Lines;

/// A program whose output is read. Dropped, it is killed.
pub struct Running {
    name: String,
    child: Child,
    output: Lines,
}

impl Running {
    /// Starts it; the package of a program that is missing has the program's name.
    pub fn start(command: &mut Command) -> Result<Self, Box<dyn Error>> {
        let program = Path::new(command.get_program());
        let name = program.file_name().unwrap_or(program.as_os_str());
        let name = name.display().to_string();
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => {
                    format!("{name} is not installed\n  fix: apt install {name}")
                }
                _ => format!("starting {name}: {error}"),
            })?;
        let output = child.stdout.take().ok_or("a program without its pipe")?;
        Ok(Self {
            name,
            child,
            output: Lines::new(output),
        })
    }

    /// Until a line has these words.
    pub fn wait_for(&mut self, words: &str, until: Instant) -> Result<(), Box<dyn Error>> {
        let mut last = String::new();
        while let Some(line) = self.output.next(until)? {
            if line.contains(words) {
                return Ok(());
            }
            last = line;
        }
        Err(format!("{} ended before `{words}`: {last}", self.name).into())
    }

    /// All it says until its end, which must be a success.
    pub fn rest(&mut self, until: Instant) -> Result<String, Box<dyn Error>> {
        let mut text = String::new();
        while let Some(line) = self.output.next(until)? {
            text += &line;
            text.push('\n');
        }
        // Its output has ended, so it is about to.
        let status = self.child.wait()?;
        match status.success() {
            true => Ok(text),
            false => Err(format!("{} ended: {status}\n{text}", self.name).into()),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
