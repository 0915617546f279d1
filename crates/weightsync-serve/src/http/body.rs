//! Bodies that are produced while they are sent, and bodies that are read whole.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http_body::Frame;
use http_body_util::{BodyExt, Limited};
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// How long a body may take to arrive.
const SLOW: Duration = Duration::from_secs(10);

/// A body of lines. The sending end learns when nobody reads the body any more.
pub(crate) struct LinesBody(mpsc::Receiver<Bytes>);

impl LinesBody {
    /// An answer with such a body, and the sender of its lines. At most `waiting` lines wait to be
    /// sent.
    pub(crate) fn answer(waiting: usize) -> (mpsc::Sender<Bytes>, Response) {
        let (lines, body) = mpsc::channel(waiting);
        let mut response = Response::new(Body::new(Self(body)));
        let kind = HeaderValue::from_static("application/x-ndjson");
        response.headers_mut().insert(CONTENT_TYPE, kind);
        (lines, response)
    }
}

impl http_body::Body for LinesBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        // `None` ends the body: every sender of the channel was dropped. When the client
        // disconnects, hyper drops this receiver, and the sending end's `closed` returns.
        let line = self.0.poll_recv(context);
        line.map(|line| line.map(|line| Ok(Frame::data(line))))
    }
}

/// A failure status and its reason.
pub(crate) fn problem(status: StatusCode, body: impl Serialize) -> Response {
    (status, Json(body)).into_response()
}

/// Reads the JSON value of a request of at most `limit` bytes; otherwise returns the status and the
/// reason.
pub(crate) async fn read<T: DeserializeOwned>(
    request: Request,
    limit: usize,
) -> Result<T, (StatusCode, String)> {
    // The limit counts bytes as they arrive, so a body without a length is bounded too.
    let body = Limited::new(request.into_body(), limit);
    // One clock for the whole body: a client that sends a byte at a time cannot hold the request
    // open.
    let bytes = match timeout(SLOW, body.collect()).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => {
            let words = format!("expected a body of at most {limit} bytes");
            return Err((StatusCode::PAYLOAD_TOO_LARGE, words));
        }
        Ok(Err(error)) => return Err((StatusCode::BAD_REQUEST, error.to_string())),
        Err(_) => {
            let words = format!("the body did not arrive within {SLOW:?}");
            return Err((StatusCode::REQUEST_TIMEOUT, words));
        }
    };
    serde_json::from_slice(&bytes)
        .map_err(|error| (StatusCode::UNPROCESSABLE_ENTITY, error.to_string()))
}
