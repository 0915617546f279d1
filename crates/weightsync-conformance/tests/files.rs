//! The suite, on a scheme that is not built in: that of the example.
//!
//! A scheme of your own has a test like this one.

use std::path::Path;
use std::process::ExitCode;
use std::{fs, io};

use weightsync_conformance::{Record, Subjects};

#[path = "../examples/files/scheme/mod.rs"]
mod scheme;

use scheme::Files;

fn main() -> ExitCode {
    // The same in every process of the suite: it is part of the tests' names.
    let dir = std::env::temp_dir().join("weightsync-files-conformance");
    let files = match Files::new(&dir.display().to_string()) {
        Ok(files) => files,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let subjects = Subjects::new()
        .with(&format!("files:dir={}", dir.display()))
        .residue(move || files.sweep())
        .corrupt(spoil);
    weightsync_conformance::main(&subjects)
}

/// Changes a byte of the file `live`, another for each version; what the error
/// has to name.
fn spoil(record: &Record) -> io::Result<String> {
    let path = Path::new(&record.address).join("live");
    let mut bytes = fs::read(&path)?;
    let at = record.version.0 as usize * 7 % bytes.len();
    bytes[at] ^= 1;
    fs::write(&path, bytes)?;
    Ok("live is damaged".into())
}
