//! Calls a worker with the set that it should run, one set at a time until the worker has it.
//! Each worker has its own task.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use weightsync_mem::Snapshot;
use weightsync_simd::crc64;

use super::workers::{ConnectionId, SharedSender, Uncounted};
use crate::http::{Ask, Client, Fault, Lines};
use crate::rpc::PATIENCE;
use crate::rpc::wire::{BLOCK_BYTES, Call, Crc, Digits, Notified, SetPart, cut, of_worker};

/// The pause before a failed call is repeated.
const PAUSE: Duration = Duration::from_millis(200);

/// How often a wait for a worker's last line looks whether the worker is still there.
const LOOK: Duration = Duration::from_secs(5);

/// The number of answers of a worker that may wait for their last line. A correct worker has
/// two: for the set that it loads, and for the newest.
const OPEN: usize = 3;

/// Calls a worker with its newest set, for as long as the worker is here. `name` is that of its
/// connection.
pub(super) async fn call(
    shared: Arc<SharedSender>,
    id: ConnectionId,
    name: Digits,
    client: Arc<Client>,
) {
    let Some(mut changes) = shared.changes(id) else {
        return;
    };
    let mut open: VecDeque<JoinHandle<()>> = VecDeque::new();
    while shared.is_here(id) {
        // Marked before the set is read: a change after the reading wakes the wait below.
        changes.mark_unchanged();
        let Some(weightsync_mem::NotifiedSet { sequence, members }) = shared.next_call(id) else {
            // The sender ends, so no set follows.
            if changes.changed().await.is_err() {
                return;
            }
            continue;
        };
        let call = Call {
            id: name,
            run: shared.run,
            sequence,
            url: shared.url.clone(),
            models: members.iter().map(part).collect(),
        };
        // From here on only the table holds the snapshots: when the connection is removed, its pins
        // go too.
        drop(members);
        let result = tokio::select! {
            sent = notify(&shared, id, &client, &call) => sent.map(Some),
            // The worker is called again with the newer set.
            () = overtaken(&shared, id, &mut changes, sequence) => Ok(None),
        };
        // The call is over, so its snapshots are not held any longer.
        shared.called(id, result.is_ok());
        match result {
            // The worker has the set or has refused it. Another task waits for the last line, so
            // that this loop can call with the next set meanwhile.
            Ok(Some(lines)) => {
                open.retain(|answer| !answer.is_finished());
                if open.len() == OPEN
                    && let Some(oldest) = open.pop_front()
                {
                    // The worker's connection ends with it.
                    oldest.abort();
                }
                open.push_back(tokio::spawn(finish(shared.clone(), id, lines)));
            }
            Ok(None) => {}
            Err(why) => {
                tracing::debug!(addr = %client.addr(), sequence, %why, "a call did not come through");
                // A worker that refuses connections would otherwise be called in a tight loop until
                // its lifeline ends.
                sleep(PAUSE).await;
            }
        }
    }
}

/// Describes a version for a call.
pub(super) fn part(snapshot: &Snapshot) -> SetPart {
    let bytes = snapshot.bytes();
    // The copy pass made these, for blocks of the same size.
    let sums = snapshot.block_sums().ok().flatten();
    // Without sums from the copy pass this reads the whole version on the serving thread.
    let sums = sums.unwrap_or_else(|| bytes.chunks(BLOCK_BYTES as usize).map(crc64).collect());
    SetPart {
        model: snapshot.model(),
        version: snapshot.version(),
        bytes: bytes.len() as u64,
        chunk_bytes: BLOCK_BYTES,
        crc64: sums.into_iter().map(Crc).collect(),
        digest: snapshot.published_digest(),
    }
}

/// Waits until a newer set exists for a worker that has not begun to fetch the set of its call:
/// the worker may be stopped.
async fn overtaken(
    shared: &SharedSender,
    id: ConnectionId,
    changes: &mut watch::Receiver<()>,
    sequence: u64,
) {
    while !shared.is_overtaken(id, sequence) && shared.is_here(id) {
        if changes.changed().await.is_err() {
            return;
        }
    }
}

async fn notify(
    shared: &SharedSender,
    id: ConnectionId,
    client: &Arc<Client>,
    call: &Call,
) -> Result<Lines, String> {
    // The patience is for the head only. The first line may take as long as the fetch takes.
    let asked = client.ask(Ask::post(of_worker::WEIGHTS, call), PATIENCE);
    let reply = asked.await.map_err(|fault| fault.to_string())?;
    if reply.status != StatusCode::OK {
        return Err(format!("it answered {}", reply.status));
    }
    let mut lines = reply.lines();
    loop {
        match lines.next::<Notified>(LOOK).await {
            Ok(Some(message)) => {
                // A number that was never given out ends the call as failed: the worker is called
                // again.
                on_message(shared, id, message).map_err(|uncounted| uncounted.to_string())?;
                return Ok(lines);
            }
            Ok(None) => return Err("its answer ended".into()),
            // The worker may be fetching a large version.
            Err(Fault::Silent { .. }) if shared.is_here(id) => {}
            Err(fault) => return Err(fault.to_string()),
        }
    }
}

/// Waits for the last line, and for the end after it.
async fn finish(shared: Arc<SharedSender>, id: ConnectionId, mut lines: Lines) {
    loop {
        match lines.next::<Notified>(LOOK).await {
            Ok(Some(message)) => {
                if let Err(uncounted) = on_message(&shared, id, message) {
                    tracing::debug!(%uncounted, "the answer to a call is not read on");
                    return;
                }
            }
            // Loading can take as long as it likes. The wait ends with the connection.
            Err(Fault::Silent { .. }) if shared.is_here(id) => {}
            Ok(None) | Err(_) => return,
        }
    }
}

fn on_message(shared: &SharedSender, id: ConnectionId, message: Notified) -> Result<(), Uncounted> {
    match message {
        // For the segment, taken means no more than staged: the outcome of the load follows.
        Notified::Staged { sequence } | Notified::Taken { sequence } => shared.staged(id, sequence),
        Notified::Applied(applied) => shared.applied(id, &applied),
        Notified::Refused { sequence, reason } => shared.refused(id, sequence, cut(&reason)),
        // The newer set that replaced this one has a call of its own.
        Notified::PassedOver { .. } => Ok(()),
    }
}
