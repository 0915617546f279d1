//! What people and programs see of a service: its status, events, metrics and page.

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
use prometheus::core::Collector;
use prometheus::{IntCounter, IntGauge, Opts, Registry, TextEncoder};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, interval, sleep_until};

use super::events::EventRecord;
use super::link::BEAT;
use super::server::{RouteState, refused};
use super::service::{ExplorerStatus, ServiceInput, ServiceStatus};
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
    let mut metrics = Metrics::default();
    metrics.gauge(
        "newest_version",
        "The newest version that can be had.",
        [(None, status.newest.0)],
    );
    metrics.gauge(
        "newest_version_step",
        "The trainer's step that made it.",
        [(None, status.newest_step)],
    );
    metrics.gauge(
        "trainers",
        "1 while a trainer is there.",
        [(None, u64::from(status.trainer.is_some()))],
    );
    let trainer = status.trainer.iter();
    metrics.gauge(
        "trainer_step",
        "Steps that the trainer has made.",
        trainer.map(|one| (Some(("trainer", &*one.name)), one.step)),
    );
    metrics.gauge(
        "explorers",
        "Explorers that are there.",
        [(None, status.explorers.len() as u64)],
    );
    describe_explorers(&mut metrics, status);
    metrics.counter(
        "versions_published_total",
        "Versions that were published.",
        [(None, status.counts.published)],
    );
    let ended = status.counts.ended.iter();
    metrics.counter(
        "syncs_total",
        "Syncs of explorers, by how they ended.",
        ended.map(|(how, count)| (Some(("ended", *how)), *count)),
    );
    let saves = status.counts.saves.iter();
    metrics.counter(
        "saves_total",
        "Versions that were to be saved in the store, by how that ended.",
        saves.map(|(how, count)| (Some(("ended", *how)), *count)),
    );
    metrics.counter(
        "requests_total",
        "Requests of parties.",
        [(None, status.counts.requests)],
    );
    metrics.text()
}

/// Adds the metrics of each explorer.
fn describe_explorers(metrics: &mut Metrics, status: &ServiceStatus) {
    type Value = fn(&ExplorerStatus) -> u64;
    let of_explorers: [(&str, &str, Value); 4] = [
        (
            "explorer_version",
            "The version that an explorer runs.",
            |one| one.line.version.0,
        ),
        ("explorer_step", "Steps that an explorer has made.", |one| {
            one.line.step
        }),
        (
            "explorer_versions_behind",
            "How many versions are newer.",
            |one| one.versions_behind,
        ),
        (
            "explorer_steps_behind",
            "Steps that the trainer has made since.",
            |one| one.steps_behind,
        ),
    ];
    for (name, help, value) in of_explorers {
        let explorers = status.explorers.iter();
        let values = explorers.map(|one| (Some(("explorer", &*one.line.name)), value(one)));
        metrics.gauge(name, help, values);
    }
}

/// A label's name and value.
type Label<'a> = Option<(&'a str, &'a str)>;

/// Metrics of one moment.
#[derive(Default)]
struct Metrics(Registry);

impl Metrics {
    fn gauge<'a>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Label<'a>, u64)>,
    ) {
        for (label, value) in values {
            let gauge = IntGauge::with_opts(described(name, help, label));
            // The library has whole numbers with a sign.
            let value = i64::try_from(value).unwrap_or(i64::MAX);
            self.register(gauge, |gauge| gauge.set(value));
        }
    }

    fn counter<'a>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (Label<'a>, u64)>,
    ) {
        for (label, value) in values {
            let counter = IntCounter::with_opts(described(name, help, label));
            self.register(counter, |counter| counter.inc_by(value));
        }
    }

    fn register<M: Collector + Clone + 'static>(
        &mut self,
        metric: prometheus::Result<M>,
        set: impl FnOnce(&M),
    ) {
        // Names and helps are written above. Of two parties of one name the first is shown: the
        // format has one value for each name and label.
        if let Ok(metric) = metric
            && self.0.register(Box::new(metric.clone())).is_ok()
        {
            set(&metric);
        }
    }

    fn text(&self) -> String {
        let text = TextEncoder::new().encode_to_string(&self.0.gather());
        text.unwrap_or_default()
    }
}

fn described(name: &str, help: &str, label: Label<'_>) -> Opts {
    let opts = Opts::new(name, help).namespace("weightsync");
    match label {
        Some((label, value)) => opts.const_label(label, value),
        None => opts,
    }
}

/// Everything that happens, as server-sent events.
pub(super) async fn events(State(serving): State<Arc<RouteState>>, request: HeaderMap) -> Response {
    // A reader keeps a task and a connection for as long as it likes, so their number is limited.
    let Ok(room) = serving.app.readers.clone().try_acquire_owned() else {
        let reason = "as many read events as may at a time: close one, or ask for /v1/status";
        return refused(StatusCode::SERVICE_UNAVAILABLE, reason.into());
    };
    // Events up to now come from the list, later ones from the channel. None is missed between
    // them.
    let (kept, mut live) = serving.app.events.after(last_seen(&request));
    let mut changes = serving.app.events.changes();
    let (lines, response) = event_stream();
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

/// The number of the last event that a reader has seen. 0 if it has seen none.
fn last_seen(request: &HeaderMap) -> u64 {
    // A browser that connects again names the last event it has seen, and gets those after it.
    let last = request
        .get(LAST_EVENT)
        .and_then(|last| last.to_str().ok()?.parse().ok());
    last.unwrap_or(0)
}

/// An answer that goes on, and what takes its messages.
fn event_stream() -> (mpsc::Sender<Bytes>, Response) {
    let (lines, mut response) = LinesBody::answer(WAITING);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    (lines, response)
}

fn message(record: &EventRecord) -> Bytes {
    let data = serde_json::to_string(record)
        .unwrap_or_else(|_| unreachable!("events are plain data with text keys"));
    format!("id: {}\ndata: {data}\n\n", record.number).into()
}
