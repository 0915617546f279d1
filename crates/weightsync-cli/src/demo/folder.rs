//! The folder the demo leaves its results in: a bad place is told before the
//! training, and nothing is made before there is something to put in it, so
//! that also a killed demo leaves nothing.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use rustix::fs::{Access, access};
use weightsync_engine::files::{PLAIN, replace};

const DEFAULT: &str = "weightsync-demo";
/// How many older demos are stepped around.
const MAX_TRIES: u32 = 1000;

/// Where a folder can be made, as far as can be told without making it.
pub struct FolderChoice {
    /// `None` for a new one in the current directory.
    named: Option<PathBuf>,
}

impl FolderChoice {
    /// Whether the folder named, or a new one in the current directory, could
    /// be written to now.
    pub fn check(named: Option<&Path>) -> io::Result<Self> {
        // Of a path without a parent, that is the current directory.
        let mut ancestors = named.into_iter().flat_map(Path::ancestors);
        let nearest = ancestors
            .find(|path| path.as_os_str().is_empty() || path.symlink_metadata().is_ok())
            .filter(|path| !path.as_os_str().is_empty())
            .unwrap_or(Path::new("."));
        let is_dir = fs::metadata(nearest).map(|found| found.is_dir());
        match is_dir.map_err(|error| in_words(nearest, &error))? {
            true => access(nearest, Access::WRITE_OK | Access::EXEC_OK)
                .map_err(|error| in_words(nearest, &error.into()))?,
            false => return Err(in_words(nearest, &io::ErrorKind::NotADirectory.into())),
        }
        let named = named.map(Path::to_owned);
        Ok(Self { named })
    }

    /// Makes the folder, if it is not there.
    pub fn create(self) -> io::Result<Folder> {
        let Some(path) = self.named else {
            return create_fresh();
        };
        // A folder that was there before is never removed.
        let remove = !path.exists();
        fs::create_dir_all(&path).map_err(|error| in_words(&path, &error))?;
        Ok(Folder { path, remove })
    }
}

/// A folder that is gone again if nothing came of it.
pub struct Folder {
    path: PathBuf,
    /// Made here, and empty as far as is known.
    remove: bool,
}

impl Folder {
    /// Where a file of that name lies.
    pub fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Writes a file, whole or not at all.
    pub fn write(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let path = self.path(name);
        let written = replace(&path, PLAIN, false, |file| file.write_all(content));
        written.map_err(|error| in_words(&path, &error))
    }

    /// Lets the folder stay.
    pub fn keep(mut self) {
        self.remove = false;
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.remove {
            // Fails, as it should, if the folder is not empty.
            let _ = fs::remove_dir(&self.path);
        }
    }
}

fn create_fresh() -> io::Result<Folder> {
    for number in 1..=MAX_TRIES {
        let path = match number {
            1 => PathBuf::from(DEFAULT),
            _ => PathBuf::from(format!("{DEFAULT}-{number}")),
        };
        // Creating tells whether it exists: to look first would be a race with another demo.
        match fs::create_dir(&path) {
            Ok(()) => return Ok(Folder { path, remove: true }),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(in_words(&path, &error)),
        }
    }
    Err(io::Error::other(format!(
        "{DEFAULT} to {DEFAULT}-{MAX_TRIES} exist: name a folder with --out"
    )))
}

fn in_words(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
