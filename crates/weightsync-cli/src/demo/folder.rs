//! The folder the demo leaves its results in: made before the training, so that
//! a bad place is told at once, and gone again if nothing came of it.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process,
};

const DEFAULT: &str = "weightsync-demo";
/// How many older demos are stepped around.
const MAX_TRIES: u32 = 1000;

pub struct Folder {
    path: PathBuf,
    /// Made here, and empty as far as is known.
    remove: bool,
}

impl Folder {
    /// The folder named, or a new one in the current directory.
    pub fn create(named: Option<&Path>) -> io::Result<Self> {
        let Some(path) = named else {
            return Self::create_fresh();
        };
        let remove = !path.exists();
        fs::create_dir_all(path).map_err(|error| in_words(path, &error))?;
        let path = path.to_owned();
        Ok(Self { path, remove })
    }

    fn create_fresh() -> io::Result<Self> {
        for number in 1..=MAX_TRIES {
            let path = match number {
                1 => PathBuf::from(DEFAULT),
                _ => PathBuf::from(format!("{DEFAULT}-{number}")),
            };
            match fs::create_dir(&path) {
                Ok(()) => return Ok(Self { path, remove: true }),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(in_words(&path, &error)),
            }
        }
        Err(io::Error::other(format!(
            "{DEFAULT} to {DEFAULT}-{MAX_TRIES} exist: name a folder with --out"
        )))
    }

    /// Where a file of that name lies.
    pub fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes a file, whole or not at all.
    pub fn write(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let path = self.path(name);
        let unfinished = self.path(&format!(".{name}.{}", process::id()));
        let written = fs::write(&unfinished, content).and_then(|()| fs::rename(&unfinished, &path));
        written.map_err(|error| {
            // What is left of it is of no use, and the error matters more.
            let _ = fs::remove_file(&unfinished);
            in_words(&path, &error)
        })
    }

    /// Lets the folder stay.
    pub fn keep(mut self) {
        self.remove = false;
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.remove {
            // Fails, as it should, if somebody has put something there.
            let _ = fs::remove_dir(&self.path);
        }
    }
}

fn in_words(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
