//! What people and programs see of a service: its status, events, metrics and page.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue,
};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::oneshot;
use tokio::time::{Instant, interval, sleep_until};

use super::events::EventRecord;
use super::link::BEAT;
use super::server::{RouteState, refused};
use super::service::{ServiceInput, ServiceStatus};
use crate::http::LinesBody;

/// The page for people.
const PAGE: &str = include_str!("page.html");

/// What the page may do: nothing of other servers.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; \
                      connect-src 'self'; img-src data:; frame-ancestors 'none'";

/// The header with which a reader of events continues.
const LAST_EVENT: HeaderName = HeaderName::from_static("last-event-id");

/// The least time between two messages that the status has changed.
const PAUSE: Duration = Duration::from_millis(250);

/// How many events wait for a slow reader.
const WAITING: usize = 64;

pub(super) async fn page() -> Response {
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, POLICY),
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers, PAGE).into_response()
}

pub(super) async fn look(serving: &RouteState) -> Result<ServiceStatus, Response> {
    // The service's thread makes the status between two inputs, so it is consistent.
    let (answered, answer) = oneshot::channel();
    let look = Box::new(move |status| drop(answered.send(status)));
    serving.app.tell(ServiceInput::Look(look));
    answer.await.map_err(|_| {
        let reason = "the synchronizer has been shut down".into();
        refused(StatusCode::SERVICE_UNAVAILABLE, reason)
    })
}

pub(super) async fn status(State(serving): State<Arc<RouteState>>) -> Response {
    match look(&serving).await {
        Ok(mut status) => {
            // Listing a store may take long. Only this request waits for it, and not the service.
            let stored = serving.app.stored().await;
            for one in &mut status.versions {
                one.held |= stored.contains(&one.version);
            }
            Json(status).into_response()
        }
        Err(refusal) => refusal,
    }
}

pub(super) async fn metrics(State(serving): State<Arc<RouteState>>) -> Response {
    match look(&serving).await {
        Ok(status) => {
            let kind = "text/plain; version=0.0.4; charset=utf-8";
            ([(CONTENT_TYPE, kind)], exposition(&status)).into_response()
        }
        Err(refusal) => refusal,
    }
}

/// The metrics in the text format of Prometheus.
fn exposition(status: &ServiceStatus) -> String {
    let mut text = String::new();
    // One closure for all: the format wants HELP and TYPE before a metric's values.
    let mut metric = |name: &str, kind: &str, help: &str, values: &[(String, u64)]| {
        let _ = writeln!(text, "# HELP weightsync_{name} {help}");
        let _ = writeln!(text, "# TYPE weightsync_{name} {kind}");
        for (labels, value) in values {
            let _ = writeln!(text, "weightsync_{name}{labels} {value}");
        }
    };
    let plain = |value: u64| [(String::new(), value)];
    let newest = plain(status.newest.0);
    metric(
        "newest_version",
        "gauge",
        "The newest version that can be had.",
        &newest,
    );
    let step = plain(status.newest_step);
    metric(
        "newest_version_step",
        "gauge",
        "The trainer's step that made it.",
        &step,
    );
    let there = plain(u64::from(status.trainer.is_some()));
    metric("trainers", "gauge", "1 while a trainer is there.", &there);
    let trainer = status.trainer.as_ref();
    let steps: Vec<_> = trainer
        .map(|one| (label("trainer", &one.name), one.step))
        .into_iter()
        .collect();
    metric(
        "trainer_step",
        "gauge",
        "Steps that the trainer has made.",
        &steps,
    );
    let explorers = plain(status.explorers.len() as u64);
    metric(
        "explorers",
        "gauge",
        "Explorers that are there.",
        &explorers,
    );
    let of_each = |value: fn(&super::service::ExplorerStatus) -> u64| -> Vec<_> {
        let explorers = status.explorers.iter();
        explorers
            .map(|one| (label("explorer", &one.line.name), value(one)))
            .collect()
    };
    let versions = of_each(|one| one.line.version.0);
    metric(
        "explorer_version",
        "gauge",
        "The version that an explorer runs.",
        &versions,
    );
    let steps = of_each(|one| one.line.step);
    metric(
        "explorer_step",
        "gauge",
        "Steps that an explorer has made.",
        &steps,
    );
    let behind = of_each(|one| one.versions_behind);
    metric(
        "explorer_versions_behind",
        "gauge",
        "How many versions are newer.",
        &behind,
    );
    let stale = of_each(|one| one.steps_behind);
    metric(
        "explorer_steps_behind",
        "gauge",
        "Steps that the trainer has made since.",
        &stale,
    );
    let published = plain(status.counts.published);
    metric(
        "versions_published_total",
        "counter",
        "Versions that were published.",
        &published,
    );
    let ended = status.counts.ended.iter();
    let syncs: Vec<_> = ended
        .map(|(ended, count)| (label("ended", ended), *count))
        .collect();
    metric(
        "syncs_total",
        "counter",
        "Syncs of explorers, by how they ended.",
        &syncs,
    );
    let saves = status.counts.saves.iter();
    let saves: Vec<_> = saves
        .map(|(ended, count)| (label("ended", ended), *count))
        .collect();
    metric(
        "saves_total",
        "counter",
        "Versions that were to be saved in the store, by how that ended.",
        &saves,
    );
    let requests = plain(status.counts.requests);
    metric(
        "requests_total",
        "counter",
        "Requests of parties.",
        &requests,
    );
    text
}

/// A label with its value, in which the format's own characters are escaped.
fn label(name: &str, value: &str) -> String {
    let value = value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n");
    format!("{{{name}=\"{value}\"}}")
}

/// Everything that happens, as server-sent events.
pub(super) async fn events(State(serving): State<Arc<RouteState>>, request: HeaderMap) -> Response {
    // A reader keeps a task and a connection for as long as it likes, so their number is limited.
    let Ok(room) = serving.app.readers.clone().try_acquire_owned() else {
        let reason = "as many read events as may at a time: close one, or ask for /v1/status";
        return refused(StatusCode::SERVICE_UNAVAILABLE, reason.into());
    };
    // A browser that connects again names the last event it has seen, and gets those after it.
    let last = request
        .get(LAST_EVENT)
        .and_then(|last| last.to_str().ok()?.parse().ok());
    // Events up to now come from the list, later ones from the channel. None is missed between
    // them.
    let (kept, mut live) = serving.app.events.after(last.unwrap_or(0));
    let mut changes = serving.app.events.changes();
    let (lines, mut response) = LinesBody::answer(WAITING);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    let mut stopping = serving.stopping.clone();
    tokio::spawn(async move {
        // Released when the task ends, whatever ends it.
        let _room = room;
        for record in kept {
            if lines.send(message(&record)).await.is_err() {
                return;
            }
        }
        let mut beats = interval(BEAT);
        // When the reader is told that the status has changed.
        let mut due = None;
        loop {
            let next = tokio::select! {
                // While a message is due, further changes are covered by it.
                changed = changes.changed(), if due.is_none() => match changed {
                    Ok(()) => {
                        due = Some(Instant::now() + PAUSE);
                        continue;
                    }
                    Err(_) => return,
                },
                // The pause bounds how often the page asks for the status.
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    due = None;
                    Bytes::from_static(b"event: changed\ndata: {}\n\n")
                }
                record = live.recv() => match record {
                    Ok(record) => message(&record),
                    // A slow reader has lost events. It is told how many, and can ask for the
                    // status.
                    Err(RecvError::Lagged(missed)) => {
                        format!("event: missed\ndata: {{\"missed\":{missed}}}\n\n").into()
                    }
                    Err(RecvError::Closed) => return,
                },
                // A comment, which shows that the service is there.
                _ = beats.tick() => Bytes::from_static(b":\n\n"),
                () = lines.closed() => return,
                () = stopping.wait() => return,
            };
            // Waits for a slow reader. Events pile up in the channel meanwhile, up to its bound.
            if lines.send(next).await.is_err() {
                return;
            }
        }
    });
    response
}

fn message(record: &EventRecord) -> Bytes {
    let data = serde_json::to_string(record)
        .unwrap_or_else(|_| unreachable!("events are plain data with text keys"));
    format!("id: {}\ndata: {data}\n\n", record.number).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_escapes_what_the_format_reserves() {
        assert_eq!(label("a", "b\"c\\d\ne"), r#"{a="b\"c\\d\ne"}"#);
    }
}
