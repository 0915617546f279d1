//! The sender's listener: agents, children that fetch, and clients that ask.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::sync::{Semaphore, mpsc, oneshot};
use weightsync_link::Credentials;
use weightsync_link::hello::LinkRole;
use weightsync_link::listen::accept_all;
use weightsync_link::message::Message;
use weightsync_link::stream::AsyncStream;
use weightsync_mem::RemoteReaders;

use super::coordinator::CoordinatorEvent;
use crate::bulk::Serving;
use crate::status::NOT_YET;
use crate::wire::message::JsonReply;

/// The most agents.
const MAX_AGENTS: usize = 16_384;

/// How many status queries are answered at once; others wait for their turn.
const ASKING: usize = 64;

/// How many scrubs may wait at once.
// For a scrub each host reads all that it holds, so few of them run at a time.
const SCRUBBING: usize = 4;

/// How often a client that waits for a scrub is notified that the answer is still to come.
const NOT_YET_EVERY: Duration = Duration::from_secs(1);

/// A scrub that has no answer after this time is disconnected.
const ANSWERED_WITHIN: Duration = Duration::from_secs(15 * 60);

/// Accepts connections.
pub(super) struct Listening {
    pub(super) credentials: Credentials,
    pub(super) events: mpsc::Sender<CoordinatorEvent>,
    pub(super) serving: Serving,
    pub(super) remote_readers: RemoteReaders,
    /// How many agents there are.
    pub(super) agents: Arc<AtomicUsize>,
}

impl Listening {
    pub(super) async fn accept(self, listener: tokio::net::TcpListener) {
        let Self {
            credentials,
            events,
            serving,
            remote_readers,
            agents,
        } = self;
        let asking = Arc::new(Semaphore::new(ASKING));
        let scrubbing = Arc::new(Semaphore::new(SCRUBBING));
        // Connections whose handshake is under way do not count yet, so there may be a few agents
        // more.
        let busy = move || agents.load(Ordering::Relaxed) >= MAX_AGENTS;
        let take = move |socket: AsyncStream, from: SocketAddr, role| match role {
            LinkRole::Control => {
                let events = events.clone();
                // `take` is not async. A task waits for room in the queue instead.
                tokio::spawn(async move {
                    let _ = events
                        .send(CoordinatorEvent::Connected { socket, from })
                        .await;
                });
            }
            // A task goes on when its handle is dropped. It ends with its connection, or with the
            // runtime.
            LinkRole::Bulk => drop(tokio::spawn(serving.clone().child(socket))),
            LinkRole::Status | LinkRole::Scrub => {
                let (event, turns): (fn(_) -> CoordinatorEvent, _) = match role {
                    LinkRole::Scrub => (CoordinatorEvent::Scrub, &scrubbing),
                    _ => (CoordinatorEvent::Status, &asking),
                };
                let (events, turns) = (events.clone(), turns.clone());
                drop(tokio::spawn(answer(socket, event, events, turns)));
            }
            // Its trainer listens elsewhere.
            LinkRole::Collector => {}
        };
        let failed = move |error: &_| remote_readers.note_failed_accept(error);
        accept_all(listener, credentials, busy, failed, take).await;
    }
}

/// Sends the coordinator this event, forwards its answer, and hangs up. A client without a turn or
/// without an answer in time is disconnected; it can ask again.
pub(super) async fn answer(
    mut socket: AsyncStream,
    event: impl FnOnce(oneshot::Sender<String>) -> CoordinatorEvent,
    events: mpsc::Sender<CoordinatorEvent>,
    asking: Arc<Semaphore>,
) {
    // The turn is held until the answer is out.
    let Ok(Ok(_turn)) = tokio::time::timeout(weightsync_link::HANDSHAKE, asking.acquire()).await
    else {
        return;
    };
    let (answer, mut answered) = oneshot::channel();
    // The coordinator has ended. The client sees the closed connection, and looks for a successor.
    if events.send(event(answer)).await.is_err() {
        return;
    }
    let begun = tokio::time::Instant::now();
    while begun.elapsed() < ANSWERED_WITHIN {
        let known = tokio::time::timeout(NOT_YET_EVERY, &mut answered).await;
        let (json, last) = match known {
            Ok(Ok(json)) => (json, true),
            // The coordinator ended before it answered.
            Ok(Err(_)) => return,
            // A sign of life, without which the client's timeout would end its wait.
            Err(_) => (NOT_YET.to_owned(), false),
        };
        let Ok(frame) = (JsonReply { json }).frame() else {
            return;
        };
        let write = async {
            socket.write_all(&frame).await?;
            match last {
                true => socket.shutdown().await,
                false => Ok(()),
            }
        };
        // With a deadline, because a client that reads nothing must not keep its turn.
        let written = tokio::time::timeout(weightsync_link::HANDSHAKE, write).await;
        if last || !matches!(written, Ok(Ok(()))) {
            return;
        }
    }
}
