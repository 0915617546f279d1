//! The versions that are held, as safetensors files.

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

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
use weightsync_engine::{Snapshot, Version};

use super::server::{Serving, refused};
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

/// How many bytes a connection gets at once.
const PART: u64 = 1 << 20;

#[derive(Serialize)]
struct Listed {
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
    State(serving): State<Arc<Serving>>,
    Path(version): Path<String>,
) -> Response {
    let models = match find(&serving, &version).await {
        Ok(models) => models,
        Err(refusal) => return *refusal,
    };
    let listed = |model: &Snapshot| {
        let file = File::of(model.clone()).map_err(|refusal| refusal.to_string())?;
        Ok(ListedFile {
            name: format!("{}{ENDING}", model.model()),
            tensors: model.layout().tensors().len(),
            bytes: file.bytes,
        })
    };
    let files: Result<Vec<_>, String> = models.iter().map(listed).collect();
    match files {
        Ok(files) => Json(Listed {
            version: models[0].version(),
            files,
        })
        .into_response(),
        Err(reason) => refused(StatusCode::UNPROCESSABLE_ENTITY, reason),
    }
}

/// One of them, or a range of its bytes.
pub(super) async fn file(
    State(serving): State<Arc<Serving>>,
    Path((version, file)): Path<(String, String)>,
    request: HeaderMap,
) -> Response {
    let models = match find(&serving, &version).await {
        Ok(models) => models,
        Err(refusal) => return *refusal,
    };
    let name = file.strip_suffix(ENDING);
    let Some(model) = models
        .iter()
        .find(|model| Some(model.model().as_str()) == name)
    else {
        let known: Vec<_> = models
            .iter()
            .map(|model| format!("{}{ENDING}", model.model()))
            .collect();
        let reason = format!(
            "{version} has no file {file:?}: it has {}",
            known.join(", ")
        );
        return refused(StatusCode::NOT_FOUND, reason);
    };
    let run = model.run().id.map(|byte| format!("{byte:02x}")).concat();
    let tag = format!("\"{}-{run}\"", model.version());
    let of_version = [
        (ETAG, HeaderValue::from_str(&tag)),
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
    let known = request
        .get(IF_NONE_MATCH)
        .and_then(|known| known.to_str().ok());
    if known.is_some_and(|known| known.split(',').any(|one| one.trim() == tag)) {
        return (StatusCode::NOT_MODIFIED, headers).into_response();
    }
    let file = match File::of(model.clone()) {
        Ok(file) => file,
        Err(error) => return refused(StatusCode::UNPROCESSABLE_ENTITY, error.to_string()),
    };
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
    let file = Arc::new(file);
    (status, headers, Body::new(FileBody { file, left: part })).into_response()
}

/// The models of a version that is held, or that the store has. There is at least one.
async fn find(serving: &Serving, version: &str) -> Result<Vec<Snapshot>, Box<Response>> {
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
    // It waits while a version is being passed on.
    let find = move || match (held.snapshots(number), shelf) {
        (Ok(models), _) if !models.is_empty() => Ok(models),
        (_, Some(shelf)) => shelf.snapshots(number),
        (absent, None) => absent,
    };
    let found = tokio::task::spawn_blocking(find).await;
    let absent = match found {
        Ok(Ok(models)) if !models.is_empty() => return Ok(models),
        Ok(Err(error)) => error.to_string(),
        _ => "this synchronizer has no versions: those of nccl, and of checkpoint without its store in the \
              settings, do not go through it"
            .into(),
    };
    Err(Box::new(refused(StatusCode::NOT_FOUND, absent)))
}

/// A version as a file. The version is kept while it is sent, and not copied.
struct File {
    snapshot: Snapshot,
    shard: Shard,
    header: Bytes,
    /// Where each tensor of the shard begins, and where it lies in the version.
    places: Vec<(u64, Range<usize>)>,
    bytes: u64,
}

impl File {
    fn of(snapshot: Snapshot) -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let metadata = [
            ("format", "pt".to_owned()),
            ("weightsync.version", snapshot.version().0.to_string()),
        ];
        let metadata = metadata
            .map(|(name, value)| (name.to_owned(), value))
            .into();
        let shards = Shard::cut(snapshot.layout(), u64::MAX, &metadata)?;
        let shard = shards.into_iter().next().ok_or("it has no tensors")?;
        let mut begins = shard.header.len() as u64;
        let mut places = Vec::with_capacity(shard.tensors.len());
        for index in &shard.tensors {
            let range = snapshot.layout().tensors()[*index].range;
            let place = range.offset as usize..(range.offset + range.len) as usize;
            places.push((begins, place));
            begins += range.len;
        }
        Ok(Self {
            header: shard.header.clone().into(),
            snapshot,
            shard,
            places,
            bytes: begins,
        })
    }

    /// Some bytes from an offset on, at most so many.
    fn piece(self: &Arc<Self>, from: u64, most: u64) -> Bytes {
        let header = self.shard.header.len() as u64;
        if from < header {
            let to = header.min(from + most);
            return self.header.slice(from as usize..to as usize);
        }
        // The last tensor that begins at or before it. Empty ones begin where the next does.
        let at = self.places.partition_point(|(begins, _)| *begins <= from) - 1;
        let (begins, place) = &self.places[at];
        let start = place.start + (from - begins) as usize;
        let range = start..place.end.min(start + most as usize);
        let file = self.clone();
        Bytes::from_owner(Piece { file, range })
    }
}

/// A part of a version.
struct Piece {
    file: Arc<File>,
    range: Range<usize>,
}

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.file.snapshot.bytes()[self.range.clone()]
    }
}

struct FileBody {
    file: Arc<File>,
    left: Range<u64>,
}

impl http_body::Body for FileBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if self.left.is_empty() {
            return Poll::Ready(None);
        }
        let most = PART.min(self.left.end - self.left.start);
        let piece = self.file.piece(self.left.start, most);
        self.left.start += piece.len() as u64;
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left.end - self.left.start)
    }

    fn is_end_stream(&self) -> bool {
        self.left.is_empty()
    }
}
