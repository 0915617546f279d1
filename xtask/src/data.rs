//! Data that benchmarks measure and that takes minutes to make.
//!
//! It lies in the cache, outside every clone, under a name that says which program made it: the same
//! sources make the same data. It is made next to its place and renamed when it is complete.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::places::{self, Places};
use crate::python;
use crate::step;

/// Versions of models that were really trained: some 1.2 GB.
pub const VERSIONS: Data = Data {
    name: "versions",
    program: "bench/delta",
};

/// Data and what makes it.
#[derive(Debug, Clone, Copy)]
pub struct Data {
    name: &'static str,
    /// A folder of Python, in the clone. It is given the folder to fill.
    program: &'static str,
}

impl Data {
    /// The folder with the data: made before, or made now (minutes) by the Python of an environment
    /// that has what the program needs.
    pub fn provide(&self, places: &Places, python: &Path) -> Result<PathBuf, Error> {
        let all = places.data();
        let key = key(&places.root().join(self.program))?;
        let _lock = places::lock(&all)?;
        self.provide_in(&all, &key, |making| {
            let mut command = python::command(places, python);
            command.arg(self.program).arg(making);
            command.env("PYTHONDONTWRITEBYTECODE", "1");
            // The other output is for figures.
            command.stdout(io::stderr());
            step::run(&format!("{} of real models", self.name), &mut command).map(drop)
        })
    }

    fn provide_in(
        &self,
        all: &Path,
        key: &str,
        make: impl FnOnce(&Path) -> Result<(), Error>,
    ) -> Result<PathBuf, Error> {
        let home = all.join(format!("{}-{key}", self.name));
        if home.is_dir() {
            eprintln!("{}: {}", self.name, home.display());
            return Ok(home);
        }
        let making = all.join(format!("{}.making", self.name));
        // What a killed run left.
        python::clear(&making)?;
        eprintln!("(once: some minutes)");
        let made = make(&making).and_then(|()| places::rename(&making, &home));
        if let Err(error) = made {
            // The reason is the failure before it.
            let _ = fs::remove_dir_all(&making);
            return Err(Error::Missing {
                what: format!("the data `{}` ({error})", self.name),
                fix: format!("see what {} says above, and run this again", self.program),
            });
        }
        Ok(home)
    }
}

/// Differs when a source of the program does.
fn key(program: &Path) -> Result<String, Error> {
    let io = |source: io::Error| Error::Io {
        doing: format!("reading {}", program.display()),
        source,
    };
    let entries = fs::read_dir(program).map_err(io)?;
    let mut sources = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<Vec<PathBuf>, io::Error>>()
        .map_err(io)?;
    sources.retain(|path| path.extension().is_some_and(|end| end == "py"));
    sources.sort();
    // Should another toolchain hash differently, the data is made once more.
    let mut hasher = DefaultHasher::new();
    for source in &sources {
        source.file_name().hash(&mut hasher);
        fs::read(source).map_err(io)?.hash(&mut hasher);
    }
    Ok(format!("{:016x}", hasher.finish()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(making: &Path) -> Result<(), Error> {
        fs::create_dir(making).expect("nothing is there before");
        fs::write(making.join("all"), "all").expect("written");
        Ok(())
    }

    #[test]
    fn data_is_made_once_for_its_sources() {
        let cache = tempfile::tempdir().expect("a folder");
        let made = VERSIONS.provide_in(cache.path(), "1", fill).expect("made");
        assert!(made.join("all").is_file());
        let found = VERSIONS.provide_in(cache.path(), "1", |_| panic!("made twice"));
        assert_eq!(found.expect("found"), made);
        let other = VERSIONS.provide_in(cache.path(), "2", fill).expect("made");
        assert_ne!(other, made);
    }

    #[test]
    fn half_installed_environment_is_never_used() {
        let cache = tempfile::tempdir().expect("a folder");
        let half = |making: &Path| {
            fill(making)?;
            Err(Error::Usage("no memory".into()))
        };
        let text = VERSIONS.provide_in(cache.path(), "1", half);
        let text = text.expect_err("it failed").to_string();
        assert!(
            text.contains("no memory") && text.contains("fix: "),
            "{text}"
        );
        // What a killed run leaves.
        fs::create_dir(cache.path().join("versions.making")).expect("a leftover");
        VERSIONS.provide_in(cache.path(), "1", fill).expect("made");
        assert_eq!(fs::read_dir(cache.path()).expect("the cache").count(), 1);
    }

    #[test]
    fn the_key_is_that_of_the_sources_alone() {
        let program = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            fs::write(program.path().join(name), text).expect("written");
            key(program.path()).expect("readable")
        };
        let first = write("__main__.py", "one");
        assert_eq!(write("notes.txt", "any"), first);
        let other = write("__main__.py", "two");
        assert_ne!(other, first);
        assert_ne!(write("more.py", ""), other);
        assert_eq!(
            key(&program.path().join("absent")).map_err(|error| error.exit_code()),
            Err(1)
        );
    }
}
