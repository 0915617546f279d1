//! Large files: uploaded in parts, read by ranges.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use object_store::path::Path;
use object_store::{
    Error, GetOptions, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMultipartOptions,
};
use weightsync_engine::transport::threads::LockExt as _;

use super::error::{found, io_error};
use super::runtime::{Pending, next};
use super::{Blob, ObjectClient, Upload};

/// Bytes of a part of an upload; all but the last have as many, which some stores ask for. S3 takes
/// 10,000 parts, so a file has 80 GB at most.
const PART: usize = 8 << 20;

/// How many parts are on their way at once. One connection rarely fills a link; more parts than this
/// only take memory.
const IN_FLIGHT: usize = 4;

/// How long the removal of an unfinished upload may take. What is left of it is no object, and goes by
/// a rule of the bucket.
const REMOVAL: Duration = Duration::from_secs(5);

/// A large file on its way: one request if it is small.
pub(super) struct Large {
    client: ObjectClient,
    key: Path,
    pending: Vec<u8>,
    bytes: u64,
    parts: Option<Box<dyn MultipartUpload>>,
    in_flight: VecDeque<Pending<Result<(), Error>>>,
}

impl Large {
    pub(super) fn new(client: ObjectClient, key: Path) -> Self {
        Self {
            client,
            key,
            pending: Vec::new(),
            bytes: 0,
            parts: None,
            in_flight: VecDeque::new(),
        }
    }

    /// Begins to send what is pending.
    fn send_part(&mut self) -> io::Result<()> {
        if self.parts.is_none() {
            let key = self.key.clone();
            let begun = self.client.ask(move |store| async move {
                let options = PutMultipartOptions::default();
                store.put_multipart_opts(&key, options).await
            })?;
            self.parts = Some(begun);
        }
        // Bounded, so that a slow store does not fill the memory with parts.
        while self.in_flight.len() >= IN_FLIGHT {
            self.wait_for_part()?;
        }
        let part = Bytes::from(std::mem::take(&mut self.pending));
        if let Some(parts) = &mut self.parts {
            let sending = parts.put_part(part.into());
            let sending = self.client.runtime.start_request(sending);
            self.in_flight.push_back(sending);
        }
        Ok(())
    }

    fn wait_for_part(&mut self) -> io::Result<()> {
        match self.in_flight.pop_front() {
            Some(part) => part.wait()?.map_err(io_error),
            None => Ok(()),
        }
    }
}

impl Upload for Large {
    fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            if self.pending.len() == PART {
                self.send_part()?;
            }
            if self.pending.is_empty() && self.parts.is_some() {
                self.pending.reserve_exact(PART);
            }
            let room = bytes.len().min(PART - self.pending.len());
            let (now, later) = bytes.split_at(room);
            self.pending.extend_from_slice(now);
            self.bytes += now.len() as u64;
            bytes = later;
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> io::Result<()> {
        let key = self.key.clone();
        // A small file is one request.
        if self.parts.is_none() {
            let bytes = Bytes::from(std::mem::take(&mut self.pending));
            let put = move |store: std::sync::Arc<dyn ObjectStore>| async move {
                store.put(&key, bytes.into()).await.map(drop)
            };
            return self.client.ask(put);
        }
        // The rest, which may be shorter: only the last part may be.
        self.send_part()?;
        while !self.in_flight.is_empty() {
            self.wait_for_part()?;
        }
        let Some(mut parts) = self.parts.take() else {
            return Ok(());
        };
        let bytes = self.bytes;
        let (parts, done) = self.client.runtime.run({
            let store = self.client.store.clone();
            async move {
                let Err(error) = parts.complete().await else {
                    return (parts, Ok(()));
                };
                // The answer may have got lost: a second request then finds no upload any more. No
                // other file has this name, so one of this length is this one.
                match store.head(&key).await {
                    Ok(there) if there.size == bytes => (parts, Ok(())),
                    _ => (parts, Err(error)),
                }
            }
        })?;
        if done.is_err() {
            // Dropped, it is aborted.
            self.parts = Some(parts);
        }
        done.map_err(io_error)
    }
}

impl Drop for Large {
    fn drop(&mut self) {
        // Requests on their way are ended. The parts that have arrived are removed.
        self.in_flight.clear();
        if let Some(mut parts) = self.parts.take() {
            let aborting = async move { parts.abort().await };
            let aborted = self.client.runtime.start_request(aborting);
            if let Some(Err(error)) = aborted.wait_at_most(REMOVAL) {
                let error = io_error(error);
                tracing::warn!("parts of {} are left in the store: {error}", self.key);
            }
        }
    }
}

/// Bytes that are read at once for small reads: headers, and the parts of deltas, which lie one after
/// the other.
const WINDOW: u64 = 1 << 20;

/// Bytes that are read when a file is opened: its header, most often.
const HEADER: u64 = 64 << 10;

/// A large file that is read. Should another take its place, reading fails.
pub(super) struct Opened {
    client: ObjectClient,
    key: Path,
    meta: ObjectMeta,
    /// The last two pieces that were read for small reads: two threads read next to each other.
    windows: Mutex<VecDeque<(u64, Bytes)>>,
}

impl Opened {
    /// `None` if it is not there.
    pub(super) fn new(client: ObjectClient, key: Path) -> io::Result<Option<Self>> {
        let asked = key.clone();
        let opened = client.ask(move |store| async move {
            // The length and the first bytes by one request.
            let options = GetOptions::new().with_range(Some(0..HEADER));
            match store.get_opts(&asked, options).await {
                Ok(got) => {
                    let meta = got.meta.clone();
                    Ok(Some((meta, got.bytes().await?)))
                }
                Err(error) => match found::<()>(Err(error)) {
                    Ok(_) => Ok(None),
                    // An empty object has no range at all.
                    Err(error) => match store.head(&asked).await {
                        Ok(meta) if meta.size == 0 => Ok(Some((meta, Bytes::new()))),
                        _ => Err(error),
                    },
                },
            }
        })?;
        Ok(opened.map(|(meta, header)| Self {
            client,
            key,
            meta,
            windows: Mutex::new([(0, header)].into()),
        }))
    }

    /// Reads a range piece by piece.
    fn read(&self, offset: u64, len: u64, take: &mut dyn FnMut(&[u8])) -> io::Result<()> {
        let (key, store) = (self.key.clone(), self.client.store.clone());
        let mut options = GetOptions::new().with_range(Some(offset..offset + len));
        // Of the object that was opened, and no other that has taken its name.
        options.if_match = self.meta.e_tag.clone();
        let (sender, pieces) = channel();
        let request = async move {
            let got = store.get_opts(&key, options).await?;
            let mut stream = got.into_stream();
            let mut left = len;
            while let Some(piece) = stream.next().await {
                let mut piece = piece?;
                piece.truncate(usize::try_from(left).unwrap_or(usize::MAX));
                left -= piece.len() as u64;
                // Not more than the range: that bounds what waits here.
                if sender.send(piece).is_err() || left == 0 {
                    break;
                }
            }
            Ok(left)
        };
        let pending = self.client.runtime.start_request(request);
        while let Some(piece) = next(&pieces)? {
            take(&piece);
        }
        match pending.wait()? {
            Ok(0) => Ok(()),
            Ok(_) => Err(ErrorKind::UnexpectedEof.into()),
            Err(Error::Precondition { .. } | Error::NotModified { .. }) => Err(io::Error::other(
                "another file took its place while it was read",
            )),
            Err(error) => Err(io_error(error)),
        }
    }

    fn read_small(&self, offset: u64, place: &mut [u8]) -> io::Result<()> {
        // Held for the request: threads that need one window ask for it once.
        let mut windows = self.windows.locked();
        let end = offset + place.len() as u64;
        let has =
            |(start, bytes): &&(u64, Bytes)| *start <= offset && end <= *start + bytes.len() as u64;
        if windows.iter().find(has).is_none() {
            let len = WINDOW.max(place.len() as u64).min(self.meta.size - offset);
            let mut bytes = Vec::with_capacity(usize::try_from(len).unwrap_or(0));
            self.read(offset, len, &mut |piece| bytes.extend_from_slice(piece))?;
            // The last two windows are kept.
            windows.truncate(1);
            windows.push_front((offset, bytes.into()));
        }
        let Some((start, bytes)) = windows.iter().find(has) else {
            return Err(ErrorKind::UnexpectedEof.into());
        };
        let from = (offset - start) as usize;
        place.copy_from_slice(&bytes[from..from + place.len()]);
        Ok(())
    }
}

impl Blob for Opened {
    fn bytes(&self) -> u64 {
        self.meta.size
    }

    fn read_at(&self, offset: u64, place: &mut [u8]) -> io::Result<()> {
        let len = place.len() as u64;
        match offset.checked_add(len) {
            Some(end) if end <= self.meta.size => {}
            _ => return Err(ErrorKind::UnexpectedEof.into()),
        }
        if len == 0 {
            return Ok(());
        }
        // Small reads, as of headers, share a request.
        if len < WINDOW {
            return self.read_small(offset, place);
        }
        let mut at = 0;
        self.read(offset, len, &mut |piece| {
            place[at..at + piece.len()].copy_from_slice(piece);
            at += piece.len();
        })
    }
}
