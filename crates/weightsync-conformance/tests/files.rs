//! The suite, on a scheme that is not built in: that of the example.
//!
//! A scheme of your own has a test like this one.

use std::process::ExitCode;

use weightsync_conformance::Subjects;

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
    let subjects = Subjects::new(Files::among_schemes())
        .with(&format!("files:dir={}", dir.display()))
        .residue(move || files.sweep());
    weightsync_conformance::main(&subjects)
}
