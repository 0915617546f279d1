//! The worker's HTTP routes: the sender's calls, and the check whether the worker is there.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Query, Request, State};
use axum::response::Response;
use axum::routing::{get, post};
use bytes::Bytes;
use hyper::StatusCode;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::fetch::{self, FetchFailure};
use super::inbox::Inbox;
use super::joining::JoinedSender;
use crate::http::{LinesBody, Stopping, problem, read};
use crate::rpc::wire::{
    Call, FromWorker, Notified, Registering, RpcProblem, cut, line, max_set, of_worker,
};
use crate::rpc::{BEAT, PATIENCE};

#[derive(Clone)]
struct ReceiverApp {
    inbox: Arc<Inbox>,
    worker: u32,
    stopping: Stopping,
}

/// The routes of a worker.
pub(super) fn router(inbox: Arc<Inbox>, worker: u32, stopping: Stopping) -> Router {
    Router::new()
        .route(of_worker::LIFELINE, get(lifeline))
        .route(of_worker::WEIGHTS, post(weights))
        .with_state(ReceiverApp {
            inbox,
            worker,
            stopping,
        })
}

fn wrong(status: StatusCode, error: String) -> Response {
    let body = RpcProblem {
        error,
        ..RpcProblem::default()
    };
    problem(status, body)
}

/// Sends signs of life to the sender for as long as this worker lives.
async fn lifeline(
    State(mut app): State<ReceiverApp>,
    Query(registering): Query<Registering>,
) -> Response {
    // Otherwise a process that registers in this worker's name would be told the name of its
    // connection, and could speak for it.
    if !app.inbox.has_registered(registering.nonce) {
        let reason = "this worker has not made the registration with this nonce: another process \
                      has, or the worker has registered again since";
        return wrong(StatusCode::CONFLICT, reason.into());
    }
    let (lines, response) = LinesBody::answer(4);
    let here = FromWorker::Here {
        worker: app.worker,
        pid: std::process::id(),
    };
    // There is room for the first.
    let _ = lines.try_send(line(&here));
    tokio::spawn(async move {
        let mut beats = interval(BEAT);
        beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut count = 0;
        loop {
            tokio::select! {
                _ = beats.tick() => {
                    count += 1;
                    // A full buffer means that the sender does not read. It then has lines enough.
                    let _ = lines.try_send(line(&FromWorker::Beat(count)));
                }
                // The sender has disconnected, or its process has died. `joining::follow` finds out
                // which.
                () = lines.closed() => return,
                () = app.stopping.wait() => {
                    let _ = lines.send(line(&FromWorker::Left {})).await;
                    // The sender disconnects once it has noted that, so its next report shows it.
                    // The server that stops bounds this wait.
                    lines.closed().await;
                    return;
                }
            }
        }
    });
    response
}

async fn weights(State(app): State<ReceiverApp>, request: Request) -> Response {
    // A sender may call before the worker has read that it was let in.
    let Ok(Some(session)) = timeout(PATIENCE, app.inbox.session()).await else {
        let reason = "this worker has not joined yet".into();
        return wrong(StatusCode::CONFLICT, reason);
    };
    // The limit follows from the layouts, which this worker has checked. A call cannot make the
    // worker read more.
    let limit = max_set(session.models.iter().map(|model| &model.layout));
    let call: Call = match read(request, limit).await {
        Ok(call) => call,
        Err((status, error)) => return wrong(status, error),
    };
    // Another sender may listen at a reused address, and a call of an earlier connection may be
    // late.
    if call.id != session.id() || call.run != session.run {
        let reason = "this worker has joined another sender".into();
        return wrong(StatusCode::CONFLICT, reason);
    }
    let (lines, response) = LinesBody::answer(4);
    tokio::spawn(async move {
        // A disconnect cancels the fetch at its next wait. The bytes so far stay in the inbox.
        tokio::select! {
            () = take(&app.inbox, &session, call, &lines) => {}
            // The sender has disconnected, so nobody gets an answer.
            () = lines.closed() => {}
        }
    });
    response
}

/// Fetches the set of a call, stages it, and answers with the outcome.
async fn take(inbox: &Arc<Inbox>, session: &JoinedSender, call: Call, lines: &mpsc::Sender<Bytes>) {
    let sequence = call.sequence;
    // While this lives, the sender's end is not reported: a set that was sent before the end still
    // counts.
    let fetching = inbox.fetching();
    let fetched = fetch::set(session, inbox, sequence, &call.models).await;
    let mut answer = match fetched {
        // The set is visible to the worker's thread from here on.
        Ok(fetched) => inbox.stage(fetched),
        Err(failure) => {
            // The worker's thread may wait for this fetch before it reports the sender's end.
            drop(fetching);
            let outcome = match failure {
                FetchFailure::Replaced => Notified::PassedOver { sequence },
                // The connection has failed: the answer ends, and the sender calls again.
                FetchFailure::Fault(fault) => {
                    tracing::debug!(%fault, sequence, "a version was not fetched");
                    return;
                }
                failure => Notified::Refused {
                    sequence,
                    reason: cut(&failure.to_string()),
                },
            };
            let _ = lines.send(line(&outcome)).await;
            return;
        }
    };
    drop(fetching);
    let _ = lines.send(line(&Notified::Staged { sequence })).await;
    // The line for a taken set and the last line come this way. The channel closes with the last
    // one.
    while let Some(outcome) = answer.recv().await {
        let _ = lines.send(line(&outcome)).await;
    }
}
