//! The versions that are held, and those of the store, as safetensors files.
//!
//! **Guarantee.** A version that is held is sent from where it lies. A version of the store is read a
//! piece at a time, when the client has taken the piece before. All downloads together need memory for
//! some pieces, and each for a frame, whatever the size of the version and however slow the client.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, ready};

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, ETAG, HeaderMap, HeaderName, HeaderValue, IF_NONE_MATCH};
use serde::Serialize;
use weightsync_engine::safetensors_format::Shard;
use weightsync_engine::{Digest, Layout, ModelId, Run, Snapshot, Version};
use weightsync_mem::threads::LockExt as _;
use weightsync_store::{Result as StoreResult, StoredWeights};

use super::server::{BlockingTurns, RouteState, refused};
use super::watching::look;
use crate::http::range;

pub(super) const VERSION: &str = "/v1/versions/{version}/";
pub(super) const FILE: &str = "/v1/versions/{version}/{file}";

/// The word for the newest version.
const LATEST: &str = "latest";

/// How a file's name ends.
const ENDING: &str = ".safetensors";

/// The header with the number of the version.
const NUMBER: HeaderName = HeaderName::from_static("weightsync-version");

/// How many bytes a connection gets at once: of a version that is held, and of the store. Those of the
/// store are copied, so that a slow client keeps no whole piece.
const PART: u64 = 1 << 20;
const COPIED: u64 = 256 << 10;

#[derive(Serialize)]
struct ListedVersion {
    version: Version,
    files: Vec<ListedFile>,
}

#[derive(Serialize)]
struct ListedFile {
    name: String,
    tensors: usize,
    bytes: u64,
}

/// The files of a version.
pub(super) async fn list(
    State(serving): State<Arc<RouteState>>,
    Path(version): Path<String>,
) -> Response {
    let models = match find(&serving, &version).await {
        Ok(models) => models,
        Err(refusal) => return *refusal,
    };
    let listed = |model: &VersionWeights| {
        let file = File::of(model.clone()).map_err(|refusal| refusal.to_string())?;
        Ok(ListedFile {
            name: format!("{}{ENDING}", model.model()),
            tensors: model.layout().tensors().len(),
            bytes: file.bytes,
        })
    };
    let files: Result<Vec<_>, String> = models.iter().map(listed).collect();
    match files {
        Ok(files) => Json(ListedVersion {
            version: models[0].version(),
            files,
        })
        .into_response(),
        Err(reason) => refused(StatusCode::UNPROCESSABLE_ENTITY, reason),
    }
}

/// One of them, or a range of its bytes.
pub(super) async fn file(
    State(serving): State<Arc<RouteState>>,
    Path((version, file)): Path<(String, String)>,
    request: HeaderMap,
) -> Response {
    let models = match find(&serving, &version).await {
        Ok(models) => models,
        Err(refusal) => return *refusal,
    };
    let model = match model_of(&models, &version, &file) {
        Ok(model) => model,
        Err(reason) => return refused(StatusCode::NOT_FOUND, reason),
    };
    let tag = tag_of(model);
    let mut headers = version_headers(model, &tag);
    // A client that has these bytes gets none, and nothing is read for it.
    let known = request
        .get(IF_NONE_MATCH)
        .and_then(|known| known.to_str().ok());
    if known.is_some_and(|known| known.split(',').any(|one| one.trim() == tag)) {
        return (StatusCode::NOT_MODIFIED, headers).into_response();
    }
    // Before the first byte goes out: a damaged version of the store is never sent in part.
    if let VersionWeights::Stored(stored) = model
        && let Err((status, reason)) = verify(stored, &serving.app.compares).await
    {
        return refused(status, reason);
    }
    let file = match File::of(model.clone()) {
        Ok(file) => file,
        Err(error) => return refused(StatusCode::UNPROCESSABLE_ENTITY, error.to_string()),
    };
    // The whole file is known from the layout, so ranges and lengths are exact before anything is
    // read.
    let all = file.bytes;
    let (status, part) = match range::asked(&request, all, Some(&tag)) {
        Ok(asked) => asked,
        Err(wrong) => {
            let (status, reason) = wrong.answer(&mut headers);
            return (headers, refused(status, reason)).into_response();
        }
    };
    let kind = HeaderValue::from_static("application/octet-stream");
    headers.insert(CONTENT_TYPE, kind);
    range::describe(&mut headers, status, &part, all);
    let body = FileBody::new(file, part, &serving.app.pieces);
    (status, headers, Body::new(body)).into_response()
}

/// The model that a file of a version has.
///
/// # Errors
///
/// The version has no such file.
fn model_of<'a>(
    models: &'a [VersionWeights],
    version: &str,
    file: &str,
) -> Result<&'a VersionWeights, String> {
    let name = file.strip_suffix(ENDING);
    let model = models
        .iter()
        .find(|model| Some(model.model().as_str()) == name);
    model.ok_or_else(|| {
        let known: Vec<_> = models
            .iter()
            .map(|model| format!("{}{ENDING}", model.model()))
            .collect();
        format!(
            "{version} has no file {file:?}: it has {}",
            known.join(", ")
        )
    })
}

/// The tag by which a client knows a file again.
fn tag_of(model: &VersionWeights) -> String {
    // The run is part of the tag: another run may give the same number to other weights.
    let run = model.run().id.map(|byte| format!("{byte:02x}")).concat();
    format!("\"{}-{run}\"", model.version())
}

/// The headers that say which version a file has.
fn version_headers(model: &VersionWeights, tag: &str) -> HeaderMap {
    let of_version = [
        (ETAG, HeaderValue::from_str(tag)),
        (
            NUMBER,
            HeaderValue::from_str(&model.version().0.to_string()),
        ),
    ];
    let mut headers = HeaderMap::new();
    for (name, value) in of_version {
        if let Ok(value) = value {
            headers.insert(name, value);
        }
    }
    headers
}

/// Checks that a version of the store is as it was saved.
///
/// # Errors
///
/// The version is damaged, or there was no turn to read it.
async fn verify(
    stored: &Arc<StoredWeights>,
    turns: &BlockingTurns,
) -> Result<(), (StatusCode, String)> {
    match compare(stored.clone(), turns).await {
        Some(Ok(())) => Ok(()),
        Some(Err(error)) => Err((StatusCode::NOT_FOUND, error.to_string())),
        None => {
            let reason = "the version could not be compared: ask again";
            Err((StatusCode::SERVICE_UNAVAILABLE, reason.into()))
        }
    }
}

/// Compares a version of the store with its digest, as long as somebody waits for that.
async fn compare(stored: Arc<StoredWeights>, turns: &BlockingTurns) -> Option<StoreResult<()>> {
    // The blocking call asks this between pieces. When the client disconnects, this future drops,
    // the count falls to zero, and the call ends.
    let waits = Arc::new(());
    let waiting = Arc::downgrade(&waits);
    let goes_on = move || waiting.strong_count() > 0;
    let compared = turns.take(move || stored.compare_while(&goes_on)).await;
    drop(waits);
    compared
}

/// The models of a version that is held, or that the store has. There is at least one.
async fn find(serving: &RouteState, version: &str) -> Result<Vec<VersionWeights>, Box<Response>> {
    let (held, shelf) = (serving.app.held.clone(), serving.app.shelf.clone());
    let number = match version {
        LATEST => look(serving).await.map_err(Box::new)?.newest,
        number => match number.trim_start_matches('v').parse() {
            Ok(number) => Version(number),
            Err(_) => {
                let reason =
                    format!("expected {LATEST} or the number of a version, got {version:?}");
                return Err(Box::new(refused(StatusCode::NOT_FOUND, reason)));
            }
        },
    };
    // It waits while a version is being passed on, and not for the store.
    let in_memory = serving.app.holds.take(move || held.snapshots(number)).await;
    // Memory first: it has the newest versions, and costs no read.
    let found = match (in_memory, shelf) {
        (Some(Ok(models)), _) if !models.is_empty() => {
            Some(Ok(models.into_iter().map(VersionWeights::Held).collect()))
        }
        // Memory keeps only the newest versions. The store has older ones.
        (Some(_), Some(shelf)) => {
            let looked = serving.app.looks.take(move || shelf.weights(number)).await;
            looked.map(|stored| Ok(stored?.into_iter().map(VersionWeights::Stored).collect()))
        }
        (Some(absent), None) => Some(absent.map(|_| Vec::new())),
        (None, _) => None,
    };
    let found: Option<weightsync_engine::Result<Vec<_>>> = found;
    let absent = match found {
        Some(Ok(models)) if !models.is_empty() => return Ok(models),
        Some(Err(error)) => error.to_string(),
        _ => "this synchronizer has no versions: those of nccl, and of checkpoint without its store in the \
              settings, do not go through it"
            .into(),
    };
    Err(Box::new(refused(StatusCode::NOT_FOUND, absent)))
}

/// A model's weights.
#[derive(Clone, Debug)]
enum VersionWeights {
    /// They are kept while they are sent, and not copied.
    Held(Snapshot),
    /// Their files are kept while they are sent.
    Stored(Arc<StoredWeights>),
}

impl VersionWeights {
    fn model(&self) -> &ModelId {
        match self {
            Self::Held(snapshot) => snapshot.model(),
            Self::Stored(stored) => &stored.spec().id,
        }
    }

    fn version(&self) -> Version {
        match self {
            Self::Held(snapshot) => snapshot.version(),
            Self::Stored(stored) => stored.version(),
        }
    }

    fn run(&self) -> Run {
        match self {
            Self::Held(snapshot) => snapshot.run(),
            Self::Stored(stored) => stored.run(),
        }
    }

    fn layout(&self) -> &Layout {
        match self {
            Self::Held(snapshot) => snapshot.layout(),
            Self::Stored(stored) => &stored.spec().layout,
        }
    }
}

/// A version as a file.
struct File {
    weights: VersionWeights,
    shard: Shard,
    header: Bytes,
    /// Where each tensor of the shard begins, and where it lies in the version.
    places: Vec<(u64, Range<usize>)>,
    bytes: u64,
}

impl File {
    fn of(weights: VersionWeights) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        // One shard of any length: a download is one file, unlike an anchor in the store.
        let layout = weights.layout();
        let metadata = [
            ("format", "pt".to_owned()),
            ("weightsync.version", weights.version().0.to_string()),
        ];
        let metadata = metadata
            .map(|(name, value)| (name.to_owned(), value))
            .into();
        let shards = Shard::cut(layout, u64::MAX, &metadata)?;
        let shard = shards.into_iter().next().ok_or("it has no tensors")?;
        // The file is the header and then the tensors, without the gaps that the layout has between
        // them.
        let mut begins = shard.header.len() as u64;
        let mut places = Vec::with_capacity(shard.tensors.len());
        for index in &shard.tensors {
            let range = layout.tensors()[*index].range;
            let place = range.offset as usize..(range.offset + range.len) as usize;
            places.push((begins, place));
            begins += range.len;
        }
        Ok(Self {
            header: shard.header.clone().into(),
            weights,
            shard,
            places,
            bytes: begins,
        })
    }

    /// Where some bytes from an offset on lie, at most so many.
    fn place(&self, from: u64, most: u64) -> FilePlace {
        // The header has its own memory. A frame never crosses from it into the image.
        let header = self.shard.header.len() as u64;
        if from < header {
            let to = header.min(from + most);
            return FilePlace::Header(from as usize..to as usize);
        }
        // The last tensor that begins at or before it. Empty ones begin where the next does.
        let at = self.places.partition_point(|(begins, _)| *begins <= from) - 1;
        let (begins, place) = &self.places[at];
        // From here the frame ends with the tensor, because a gap may follow in the image.
        let start = place.start + (from - begins) as usize;
        FilePlace::Image(start..place.end.min(start + most as usize))
    }
}

/// Where bytes of a file lie.
enum FilePlace {
    Header(Range<usize>),
    Image(Range<usize>),
}

/// A part of a version that is held.
struct HeldBytes {
    snapshot: Snapshot,
    range: Range<usize>,
}

impl AsRef<[u8]> for HeldBytes {
    fn as_ref(&self) -> &[u8] {
        &self.snapshot.bytes()[self.range.clone()]
    }
}

/// The pieces of the store that downloads read. Those that were asked for last are kept, so many at most.
/// A download that finds its piece gone reads it again.
#[derive(Clone)]
pub(super) struct Pieces {
    reads: BlockingTurns,
    kept: Arc<Mutex<VecDeque<CachedPiece>>>,
    most: usize,
}

/// A piece, by the digest of its version and its number.
struct CachedPiece {
    of: (Digest, usize),
    bytes: Bytes,
}

impl Pieces {
    pub(super) fn new(reads: BlockingTurns, most: usize) -> Self {
        Self {
            reads,
            kept: Arc::default(),
            most,
        }
    }

    /// A piece that is kept; it counts as the one that was asked for last.
    fn again(&self, of: (Digest, usize)) -> Option<Bytes> {
        let mut kept = self.kept();
        let at = kept.iter().position(|piece| piece.of == of)?;
        let piece = kept.remove(at)?;
        let bytes = piece.bytes.clone();
        kept.push_back(piece);
        Some(bytes)
    }

    /// Reads a piece when it has its turn, and keeps it.
    async fn read(self, stored: Arc<StoredWeights>, number: usize) -> io::Result<Bytes> {
        // The digest names the bytes, so versions with equal weights share pieces.
        let of = (stored.digest(), number);
        let read = self.reads.take(move || stored.piece(number)).await;
        let bytes = match read {
            Some(Ok(piece)) => Bytes::from(piece),
            Some(Err(error)) => {
                // The client finds that its file ends early.
                tracing::warn!("a download is ended: {error}");
                return Err(io::Error::other(error));
            }
            None => return Err(io::Error::other("the synchronizer has been shut down")),
        };
        // Another download may have read it meanwhile.
        if self.again(of).is_none() {
            let mut kept = self.kept();
            let piece = CachedPiece {
                of,
                bytes: bytes.clone(),
            };
            kept.push_back(piece);
            if kept.len() > self.most {
                kept.pop_front();
            }
        }
        Ok(bytes)
    }

    fn kept(&self) -> MutexGuard<'_, VecDeque<CachedPiece>> {
        self.kept.locked()
    }
}

/// A part of a file, on its way to a client.
struct FileBody {
    file: File,
    left: Range<u64>,
    pieces: Pieces,
    /// The piece that is being read.
    reading: Option<Pin<Box<Reading>>>,
}

// Kept across polls: the read goes on while the client takes nothing.
type Reading = dyn Future<Output = io::Result<Bytes>> + Send;

impl FileBody {
    fn new(file: File, left: Range<u64>, pieces: &Pieces) -> Self {
        Self {
            file,
            left,
            pieces: pieces.clone(),
            reading: None,
        }
    }

    /// The bytes of an image from `range.start` on, as far as they are in one piece of the store.
    fn poll_stored(
        &mut self,
        stored: &Arc<StoredWeights>,
        range: Range<usize>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<Bytes>> {
        let of_piece = StoredWeights::PIECE as usize;
        let number = range.start / of_piece;
        let piece = match (
            &mut self.reading,
            self.pieces.again((stored.digest(), number)),
        ) {
            (None, Some(piece)) => piece,
            // A read that has begun is finished first, also if another download has brought the
            // piece meanwhile.
            (reading, _) => {
                let pieces = &self.pieces;
                let read = || Box::pin(pieces.clone().read(stored.clone(), number)) as _;
                let reading = reading.get_or_insert_with(read);
                let read = ready!(reading.as_mut().poll(context));
                self.reading = None;
                read?
            }
        };
        let start = range.start % of_piece;
        // The range may go beyond the piece. The next frame then begins in the next one.
        let end = of_piece.min(start + range.len());
        // A copy: a slow client would otherwise keep the whole piece.
        Poll::Ready(Ok(Bytes::copy_from_slice(&piece[start..end])))
    }
}

impl http_body::Body for FileBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if self.left.is_empty() {
            return Poll::Ready(None);
        }
        // A frame of memory only lends its bytes, so it may be larger than one that copies them.
        let most = match &self.file.weights {
            VersionWeights::Held(_) => PART,
            VersionWeights::Stored(_) => COPIED,
        };
        let most = most.min(self.left.end - self.left.start);
        let bytes = match self.file.place(self.left.start, most) {
            FilePlace::Header(range) => self.file.header.slice(range),
            FilePlace::Image(range) => match self.file.weights.clone() {
                VersionWeights::Held(snapshot) => Bytes::from_owner(HeldBytes { snapshot, range }),
                VersionWeights::Stored(stored) => {
                    match ready!(self.poll_stored(&stored, range, context)) {
                        Ok(bytes) => bytes,
                        // The head has gone out already. The connection ends before the promised
                        // length, which the client notices.
                        Err(error) => return Poll::Ready(Some(Err(error))),
                    }
                }
            },
        };
        self.left.start += bytes.len() as u64;
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left.end - self.left.start)
    }

    fn is_end_stream(&self) -> bool {
        self.left.is_empty()
    }
}

#[cfg(test)]
mod tests;
