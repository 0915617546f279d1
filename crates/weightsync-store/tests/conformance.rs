//! The suite, on the scheme `store` over a directory.

use std::process::ExitCode;
use std::{fs, io};

use weightsync_conformance::{Record, Subjects};
use weightsync_store::StoreScheme;

fn main() -> ExitCode {
    // The same in every process of the suite: it is part of the tests' names.
    let dir = std::env::temp_dir().join("weightsync-store-conformance");
    let text = dir.display().to_string();
    let scheme = match StoreScheme::new(&text) {
        Ok(scheme) => scheme,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let subjects = Subjects::new()
        .with(&format!("store:{text},keep=1,temporary"))
        .residue(move || {
            scheme
                .sweep()
                .unwrap_or_else(|error| vec![error.to_string()])
        })
        .corrupt(spoil);
    weightsync_conformance::main(&subjects)
}

/// Changes a byte of a file, another for each version; what the error has to name.
fn spoil(record: &Record) -> io::Result<String> {
    let root = std::path::Path::new(&record.address);
    let newest = |dir: &str| -> io::Result<std::path::PathBuf> {
        let entries = fs::read_dir(root.join(dir))?;
        let names: io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.path())).collect();
        names?
            .into_iter()
            .max()
            .ok_or_else(|| io::Error::other("nothing is there"))
    };
    let path = match record.version.0 % 3 {
        0 => root.join("head.json"),
        1 => newest("versions")?,
        _ => {
            let dir = newest("data")?.join("policy");
            let entries = fs::read_dir(dir)?;
            let names: io::Result<Vec<_>> = entries.map(|entry| Ok(entry?.path())).collect();
            names?
                .into_iter()
                .max()
                .ok_or_else(|| io::Error::other("nothing is there"))?
        }
    };
    let mut bytes = fs::read(&path)?;
    let at = record.version.0 as usize * 7 % bytes.len();
    bytes[at] ^= 1;
    fs::write(&path, bytes)?;
    Ok("is damaged".into())
}
