//! What passed with which sources, in a file of the clone: heavy tests run again only where something
//! has changed.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use crate::error::Error;

/// A file of the clone with a line for each name: the name, and the mark of its sources when its
/// tests passed last.
pub struct Passed(pub &'static str);

impl Passed {
    /// Whether the tests of this name have passed with these sources.
    pub fn has(&self, root: &Path, name: &str, mark: &str) -> Result<bool, Error> {
        let lines = self.lines(root)?;
        Ok(lines.iter().any(|line| *line == format!("{name} {mark}")))
    }

    /// Writes down that they have passed.
    pub fn note(&self, root: &Path, name: &str, mark: &str) -> Result<(), Error> {
        let prefix = format!("{name} ");
        let mut lines = self.lines(root)?;
        lines.retain(|line| !line.starts_with(&prefix));
        lines.push(format!("{prefix}{mark}"));
        lines.sort();
        let path = root.join(self.0);
        fs::write(&path, lines.join("\n") + "\n").map_err(|source| Error::Io {
            doing: format!("writing {}", path.display()),
            source,
        })
    }

    fn lines(&self, root: &Path) -> Result<Vec<String>, Error> {
        let path = root.join(self.0);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(source) => Err(reading(&path, source)),
        }
    }
}

/// Stands for the content of these files and folders of the clone.
pub fn of(root: &Path, sources: impl Iterator<Item = String>) -> Result<String, Error> {
    let mut files = Vec::new();
    for one in sources {
        list(&root.join(one), &mut files)?;
    }
    files.sort();
    // Should another toolchain hash differently, the tests run once more.
    let mut hasher = DefaultHasher::new();
    for file in files {
        let content = fs::read(&file).map_err(|source| reading(&file, source))?;
        let name = file.strip_prefix(root).unwrap_or(&file);
        (name, content).hash(&mut hasher);
    }
    Ok(format!("{:016x}", hasher.finish()))
}

/// The files at a path, but for what Python has compiled.
fn list(path: &Path, files: &mut Vec<PathBuf>) -> Result<(), Error> {
    if path.is_dir() {
        let entries = fs::read_dir(path).map_err(|source| reading(path, source))?;
        for entry in entries {
            let entry = entry.map_err(|source| reading(path, source))?;
            if entry.file_name() != "__pycache__" {
                list(&entry.path(), files)?;
            }
        }
    } else {
        files.push(path.to_owned());
    }
    Ok(())
}

fn reading(path: &Path, source: std::io::Error) -> Error {
    Error::Io {
        doing: format!("reading {}", path.display()),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn note_keeps_one_line_for_each() {
        let root = tempfile::tempdir().expect("a folder");
        let path = root.path().join("passed.txt");
        fs::write(&path, "other 1\ntried 2\n").expect("a file");
        let passed = Passed("passed.txt");
        for mark in ["3", "4"] {
            assert!(!passed.has(root.path(), "tried", mark).expect("lines"));
            passed.note(root.path(), "tried", mark).expect("written");
            assert!(passed.has(root.path(), "tried", mark).expect("lines"));
            let text = fs::read_to_string(&path).expect("lines");
            assert_eq!(text, format!("other 1\ntried {mark}\n"));
        }
    }
}
