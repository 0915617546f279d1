//! Which files the names in a checkpoint may lead to.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use weightsync_engine::files::{self, OpenDir};

use super::unusable;
use crate::error::{Result, StoreError};

/// Which files the names in a checkpoint may lead to.
///
/// **Guarantee.** A file that [`open`](Self::open) returns lies within this reach, also if somebody
/// changes the checkpoint's links meanwhile.
#[derive(Debug)]
pub(super) enum Reach {
    /// Any: the user has named the file itself, or allows links.
    Anything,
    /// Those in these directories, which are open, and what their names were then.
    Within(Vec<(PathBuf, OpenDir)>),
}

impl Reach {
    /// The files of a checkpoint: of its directory, and of the directory that Hugging Face's cache has
    /// for it.
    pub(super) fn of(checkpoint: &Path) -> Result<Self> {
        let failed = || StoreError::file("opening", checkpoint.display().to_string());
        let dir = fs::canonicalize(checkpoint).map_err(failed())?;
        // models--NAME/snapshots/REVISION/config.json -> ../../blobs/HASH
        let mut above = dir.ancestors().skip(1);
        let blobs = above
            .find(|above| above.ends_with("snapshots"))
            .and_then(Path::parent)
            .map(|name| name.join("blobs"));
        let mut dirs = Vec::new();
        if let Some(blobs) = blobs
            && let Ok(opened) = OpenDir::open_no_link(&blobs)
        {
            dirs.push((blobs, opened));
        }
        let opened = OpenDir::open_no_link(&dir).map_err(failed())?;
        dirs.push((dir, opened));
        Ok(Self::Within(dirs))
    }

    /// Opens a file to read it.
    pub(super) fn open(&self, path: &Path) -> Result<File> {
        let failed = || StoreError::file("opening", path.display().to_string());
        let Self::Within(dirs) = self else {
            return files::open(path).map_err(failed());
        };
        // Where the name leads, through all its links.
        let found = fs::canonicalize(path).map_err(failed())?;
        let within = dirs
            .iter()
            .find_map(|(name, dir)| Some((dir, found.strip_prefix(name).ok()?)));
        let Some((dir, below)) = within else {
            let what = format!(
                "it is a link to {}, which is no part of the checkpoint: copy the file there, or allow \
                 links (push --follow-links) if you trust the maker of the checkpoint",
                found.display()
            );
            return Err(unusable(path, what));
        };
        // No link is left in these names. One that somebody puts there now is not followed.
        open_below(dir, below).map_err(failed())
    }
}

fn open_below(dir: &OpenDir, path: &Path) -> io::Result<File> {
    let mut dir = dir.try_clone()?;
    for name in path.parent().into_iter().flatten() {
        dir = dir.dir(name)?;
    }
    dir.file(path.file_name().unwrap_or_default())
}
