//! Storage that says how many bytes of large files it moves.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::{Blob, Peer, Presence, Storage, Upload};
use crate::progress::Progress;

/// Any storage, with somebody who is told.
#[derive(Debug)]
pub(crate) struct Metered {
    storage: Arc<dyn Storage>,
    progress: Progress,
}

impl Metered {
    pub(crate) fn new(storage: Arc<dyn Storage>, progress: &Progress) -> Self {
        Self {
            storage,
            progress: progress.clone(),
        }
    }
}

impl Storage for Metered {
    fn upload(&self, path: &str) -> io::Result<Box<dyn Upload>> {
        let upload = self.storage.upload(path)?;
        let progress = self.progress.clone();
        Ok(Box::new(MeteredUpload { upload, progress }))
    }

    fn open(&self, path: &str) -> io::Result<Option<Box<dyn Blob>>> {
        let opened = self.storage.open(path)?;
        Ok(opened.map(|blob| -> Box<dyn Blob> {
            let progress = self.progress.clone();
            Box::new(MeteredBlob { blob, progress })
        }))
    }

    fn name(&self, path: &str) -> String {
        self.storage.name(path)
    }

    fn read(&self, path: &str) -> io::Result<Option<Vec<u8>>> {
        self.storage.read(path)
    }

    fn swap(&self, path: &str, old: Option<&[u8]>, new: &[u8]) -> io::Result<bool> {
        self.storage.swap(path, old, new)
    }

    fn put(&self, path: &str, bytes: &[u8]) -> io::Result<()> {
        self.storage.put(path, bytes)
    }

    fn settle(&self, path: &str) -> io::Result<()> {
        self.storage.settle(path)
    }

    fn list(&self, dir: &str) -> io::Result<Vec<String>> {
        self.storage.list(dir)
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        self.storage.remove(path)
    }

    fn announce(&self, path: &str, about: &[u8]) -> io::Result<Box<dyn Presence>> {
        self.storage.announce(path, about)
    }

    fn peer(&self, path: &str) -> io::Result<Option<Box<dyn Peer>>> {
        self.storage.peer(path)
    }

    fn tidy(&self) -> io::Result<()> {
        self.storage.tidy()
    }

    fn why_not_temporary(&self) -> io::Result<Option<String>> {
        self.storage.why_not_temporary()
    }

    fn clear_temporary(&self) -> io::Result<()> {
        self.storage.clear_temporary()
    }

    fn vacate(&self, empty: &dyn Fn() -> bool) -> io::Result<bool> {
        self.storage.vacate(empty)
    }

    fn notices_death(&self) -> bool {
        self.storage.notices_death()
    }

    fn codec(&self) -> weightsync_core::delta::Codec {
        self.storage.codec()
    }

    fn pauses(&self) -> (Duration, Duration) {
        self.storage.pauses()
    }
}

struct MeteredUpload {
    upload: Box<dyn Upload>,
    progress: Progress,
}

impl Upload for MeteredUpload {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.upload.write(bytes)?;
        self.progress.moved(bytes.len())
    }

    fn finish(self: Box<Self>) -> io::Result<()> {
        self.upload.finish()
    }
}

struct MeteredBlob {
    blob: Box<dyn Blob>,
    progress: Progress,
}

impl Blob for MeteredBlob {
    fn bytes(&self) -> u64 {
        self.blob.bytes()
    }

    fn read_at(&self, offset: u64, place: &mut [u8]) -> io::Result<()> {
        self.blob.read_at(offset, place)?;
        self.progress.moved(place.len())
    }
}
