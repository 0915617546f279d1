//! The files of a replay buffer's directory.
//!
//! | file | has |
//! |---|---|
//! | `schema.json` | the format, the capacity and the columns; written last |
//! | `header` | which frames are there ([`RingHeader`]) |
//! | `stamps` | a checksum per row, `U64` little-endian |
//! | `column-0`, `column-1`, … | the columns, a row behind the other |
//! | `lock` | nothing: it is locked as long as the buffer is open |

use std::{
    fs::{self, File, TryLockError},
    io::{self, Read, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use weightsync_engine::files::{OpenDir, PLAIN, replace};

use super::header::{HEADER_BYTES, HeaderWriter, RingHeader};
use crate::{
    Error,
    replay::{Column, Schema},
};

/// The version of all files' formats.
const FORMAT: u32 = 1;

/// More than any schema needs.
const LONGEST_SCHEMA: u64 = 1 << 20;

const SCHEMA: &str = "schema.json";

/// Which file, by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::replay) enum FileKind {
    Header,
    Stamps,
    Column(usize),
}

/// The open files. Reads and writes name their places, so threads share them.
pub(in crate::replay) struct Files {
    dir: PathBuf,
    header: File,
    stamps: File,
    pub(super) columns: Vec<File>,
    /// Dropped last, so nobody opens files that are still open here.
    _lock: File,
    /// What was done to the files, in order, for tests that do a part of it.
    #[cfg(test)]
    pub(super) log: std::sync::Mutex<Vec<Op>>,
}

/// A change to a file.
#[cfg(test)]
#[derive(Clone, Debug)]
pub(super) enum Op {
    Write(FileKind, u64, Vec<u8>),
    Sync(FileKind),
}

/// How a directory was found.
pub(in crate::replay) enum DirectoryContents {
    /// It had no buffer, and its files are all zeros now.
    New,
    /// Its files have so many whole rows each: all, unless one was cut.
    Rows(usize),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RingDescription {
    format: u32,
    capacity: u64,
    columns: Vec<Column>,
}

/// The columns and the capacity of the buffer in a directory; `None` where there
/// is no buffer.
pub(in crate::replay) fn schema_of(dir: &Path) -> Result<Option<(Schema, usize)>, Error> {
    let Some(found) = described(dir)? else {
        return Ok(None);
    };
    let capacity = usize::try_from(found.capacity).unwrap_or(usize::MAX);
    Ok(Some((Schema::new(found.columns)?, capacity)))
}

impl Files {
    /// Opens a directory's files, and makes them where there are none.
    pub fn open(
        dir: &Path,
        schema: &Schema,
        capacity: usize,
    ) -> Result<(Self, DirectoryContents), Error> {
        fs::create_dir_all(dir).map_err(failed("create", dir))?;
        // Locked first: two processes must not both find the directory empty and make a buffer.
        let lock = lock(dir)?;
        let found = described(dir)?;
        // Another schema would read rows at wrong places.
        if let Some(found) = &found {
            compare(dir, found, schema, capacity)?;
        }
        let is_new = found.is_none();
        // All files are opened relative to this directory, without following links.
        let at = OpenDir::open(dir).map_err(failed("open", dir))?;
        let file = |part: FileKind| open_file(&at, dir, part, is_new);
        if is_new {
            empty(dir, schema, file)?;
        }
        let mut rows = capacity;
        let mut open = |part: FileKind, row_bytes: usize| {
            let file = file(part)?;
            // The shortest file decides how many rows are whole.
            rows = rows.min(lengthen(&file, &path_of(dir, part), row_bytes, capacity)?);
            Ok(file)
        };
        let stamps = open(FileKind::Stamps, 8)?;
        let bytes = schema.all_frame_bytes().iter().enumerate();
        let columns = bytes
            .map(|(column, &bytes)| open(FileKind::Column(column), bytes))
            .collect::<Result<_, Error>>()?;
        let path = path_of(dir, FileKind::Header);
        let header = file(FileKind::Header)?;
        if is_new {
            let whole = header.set_len(HEADER_BYTES as u64);
            whole.map_err(failed("lengthen", &path))?;
        }
        let files = Self {
            dir: dir.to_owned(),
            header,
            stamps,
            columns,
            _lock: lock,
            #[cfg(test)]
            log: Default::default(),
        };
        let found = if is_new {
            DirectoryContents::New
        } else {
            DirectoryContents::Rows(rows)
        };
        Ok((files, found))
    }

    /// Makes a new directory's files last, and with them their buffer: from
    /// here on the directory has a schema.
    pub fn describe(&self, schema: &Schema, capacity: usize) -> Result<(), Error> {
        let parts = (0..self.columns.len()).map(FileKind::Column);
        for part in parts.chain([FileKind::Stamps, FileKind::Header]) {
            // Data, then the schema: once the schema is there, all files have their lengths and the
            // first header.
            let synced = self.file(part).sync_all();
            synced.map_err(self.failed("sync", part))?;
        }
        let description = RingDescription {
            format: FORMAT,
            capacity: capacity as u64,
            columns: schema.columns().to_vec(),
        };
        let path = self.dir.join(SCHEMA);
        let put = || {
            let bytes = serde_json::to_vec_pretty(&description)?;
            // Durable: the name appears only with its content on the disk.
            replace(&path, PLAIN, true, |file| file.write_all(&bytes))
        };
        put().map_err(failed("write", &path))
    }

    /// The whole header file.
    pub fn read_header(&self) -> Result<[u8; HEADER_BYTES], Error> {
        let mut bytes = [0; HEADER_BYTES];
        match self.header.read_exact_at(&mut bytes, 0) {
            // A file without its end was cut by something else than this program.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(self.damaged_header("it is cut"))
            }
            done => done
                .map_err(self.failed("read", FileKind::Header))
                .map(|()| bytes),
        }
    }

    /// The error of a header that says nothing.
    pub fn damaged_header(&self, reason: &str) -> Error {
        Error::ReplayBufferDamaged {
            path: path_of(&self.dir, FileKind::Header),
            reason: reason.to_owned(),
        }
    }

    /// The error of a flush after one that failed.
    pub fn flush_failed_before(&self, kind: io::ErrorKind) -> Error {
        failed("flush, as it failed before,", &self.dir)(kind.into())
    }

    pub fn read(&self, part: FileKind, offset: u64, out: &mut [u8]) -> Result<(), Error> {
        let read = self.file(part).read_exact_at(out, offset);
        read.map_err(self.failed("read", part))
    }

    pub fn write(&self, part: FileKind, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        #[cfg(test)]
        self.note(Op::Write(part, offset, bytes.to_vec()));
        let written = self.file(part).write_all_at(bytes, offset);
        written.map_err(self.failed("write", part))
    }

    /// Waits until what was written to a file is on the disk.
    pub fn sync(&self, part: FileKind) -> Result<(), Error> {
        // `sync_data` is enough: the lengths of files do not change after `open`.
        let synced = self.file(part).sync_data();
        synced.map_err(self.failed("sync", part))?;
        #[cfg(test)]
        self.note(Op::Sync(part));
        Ok(())
    }

    /// The same for all frames.
    pub fn sync_frames(&self) -> Result<(), Error> {
        let mut parts = (0..self.columns.len()).map(FileKind::Column);
        parts.try_for_each(|part| self.sync(part))?;
        self.sync(FileKind::Stamps)
    }

    fn file(&self, part: FileKind) -> &File {
        match part {
            FileKind::Header => &self.header,
            FileKind::Stamps => &self.stamps,
            FileKind::Column(column) => &self.columns[column],
        }
    }

    fn failed(&self, attempt: &'static str, part: FileKind) -> impl FnOnce(io::Error) -> Error {
        failed(attempt, &path_of(&self.dir, part))
    }

    #[cfg(test)]
    fn note(&self, op: Op) {
        self.log.lock().expect("no test panics with it").push(op);
    }
}

/// Where a directory has a file.
pub(super) fn path_of(dir: &Path, part: FileKind) -> PathBuf {
    match part {
        FileKind::Header => dir.join("header"),
        FileKind::Stamps => dir.join("stamps"),
        FileKind::Column(column) => dir.join(format!("column-{column}")),
    }
}

/// Opens a file of a directory, and makes it if the directory has no buffer.
fn open_file(at: &OpenDir, dir: &Path, part: FileKind, is_new: bool) -> Result<File, Error> {
    let path = path_of(dir, part);
    let name = path.file_name().unwrap_or_default();
    // Without a schema no buffer was ever finished here, so files may be missing. With one,
    // a missing file is damage.
    let file = match is_new {
        true => at.file_or_new(name),
        false => at.file_to_write(name),
    };
    file.map_err(failed("open", &path))
}

/// Empties the files of a directory that has no buffer.
///
/// # Errors
///
/// As [`refuse_data`]: then no file has changed. Those of the operating system.
fn empty(
    dir: &Path,
    schema: &Schema,
    file: impl Fn(FileKind) -> Result<File, Error>,
) -> Result<(), Error> {
    let parts = (0..schema.columns().len()).map(FileKind::Column);
    let parts: Vec<_> = parts.chain([FileKind::Stamps, FileKind::Header]).collect();
    let opened = parts
        .into_iter()
        .map(|part| Ok((file(part)?, path_of(dir, part))));
    let opened = opened.collect::<Result<Vec<_>, Error>>()?;
    // All before the first of them is emptied.
    opened
        .iter()
        .try_for_each(|(file, path)| refuse_data(file, path))?;
    for (file, path) in &opened {
        // What an unfinished attempt has left goes, so the files are all zeros.
        file.set_len(0).map_err(failed("empty", path))?;
    }
    Ok(())
}

/// Gives a file the length of all its rows. Returns how many whole rows it had.
fn lengthen(file: &File, path: &Path, row_bytes: usize, capacity: usize) -> Result<usize, Error> {
    let len = file.metadata().map_err(failed("look at", path))?.len();
    let row = row_bytes as u64;
    // The length is a promise that later writes rely on: a hole costs no disk until it is
    // written.
    if len < row * capacity as u64 {
        let whole = file.set_len(row * capacity as u64);
        whole.map_err(failed("lengthen", path))?;
    }
    Ok(usize::try_from(len / row).unwrap_or(usize::MAX))
}

fn failed(attempt: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::ReplayBufferFile {
        attempt,
        path,
        source,
    }
}

/// An error for a file with data in a directory without a schema: it is somebody else's. A buffer that
/// was never finished has written nothing but a header that says so.
fn refuse_data(file: &File, path: &Path) -> Result<(), Error> {
    let is_blank = || -> io::Result<bool> {
        // A file that is all a hole has no data to read.
        if let Err(Errno::NXIO) = seek(file, SeekFrom::Data(0)) {
            return Ok(true);
        }
        let mut header = [0; HEADER_BYTES];
        let len = file.metadata()?.len();
        // The first header may have been written without a schema after it.
        if len == HEADER_BYTES as u64 {
            file.read_exact_at(&mut header, 0)?;
            let said = HeaderWriter::read(&header, u64::MAX);
            if said.is_some_and(|(_, header)| header == RingHeader::default()) {
                return Ok(true);
            }
        }
        // A file system without holes stores the zeros.
        let (mut piece, mut at) = (vec![0; 1 << 20], 0);
        while at < len {
            let read = file.read_at(&mut piece, at)?;
            if read == 0 || piece[..read].iter().any(|byte| *byte != 0) {
                return Ok(read == 0);
            }
            at += read as u64;
        }
        Ok(true)
    };
    if is_blank().map_err(failed("read", path))? {
        return Ok(());
    }
    let what = "it has data, and there is no schema.json of a replay buffer next to it: name another \
                directory, or remove the file";
    let error = io::Error::new(io::ErrorKind::AlreadyExists, what);
    Err(failed("use", path)(error))
}

/// Keeps others out, in this process or another, until it is dropped.
fn lock(dir: &Path) -> Result<File, Error> {
    let path = dir.join("lock");
    let file = OpenDir::open(dir).and_then(|dir| dir.file_or_new("lock"));
    let file = file.map_err(failed("open", &path))?;
    // The lock is on the open file, so it ends with the process, however that ends.
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Error::ReplayBufferInUse {
            path: dir.to_owned(),
        }),
        Err(TryLockError::Error(error)) => Err(failed("lock", &path)(error)),
    }
}

/// What a directory says it has; none if no buffer was finished there.
fn described(dir: &Path) -> Result<Option<RingDescription>, Error> {
    let path = dir.join(SCHEMA);
    let mut text = Vec::new();
    match OpenDir::open(dir).and_then(|dir| dir.file(SCHEMA)) {
        // No schema means no buffer. Any other error must not be taken for an empty directory.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => {
            // Bounded: the file may be something else.
            let read = file.and_then(|file| file.take(LONGEST_SCHEMA).read_to_end(&mut text));
            read.map_err(failed("read", &path))?;
        }
    }
    let damaged = |reason: String| Error::ReplayBufferDamaged {
        path: path.clone(),
        reason,
    };
    let found: RingDescription =
        serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    if found.format != FORMAT {
        return Err(damaged(format!(
            "its format is {}, and this program reads format {FORMAT}",
            found.format
        )));
    }
    Ok(Some(found))
}

/// Refuses a buffer that is not the one asked for.
fn compare(
    dir: &Path,
    found: &RingDescription,
    schema: &Schema,
    capacity: usize,
) -> Result<(), Error> {
    let other = |expected: String, got: String| Error::OtherReplayBuffer {
        path: dir.to_owned(),
        expected,
        got,
    };
    let got = Schema::new(found.columns.clone())?;
    if let Some((expected, got)) = schema.difference(&got) {
        return Err(other(expected, got));
    }
    if found.capacity != capacity as u64 {
        return Err(other(
            format!("room for {capacity} frames"),
            format!("room for {} frames", found.capacity),
        ));
    }
    Ok(())
}
