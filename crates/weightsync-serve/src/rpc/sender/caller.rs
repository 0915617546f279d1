//! Calling a worker with what it should run: one at a time until it has it, and
//! each worker separately.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use weightsync::Version;

use super::state::{Retained, Shared};
use crate::http::{Ask, Client, Fault, Lines};
use crate::rpc::PATIENCE;
use crate::rpc::plan::{MailboxId, Order};
use crate::rpc::wire::{Applied, Call, Notified, cut, of_worker};

/// How long a call that did not come through is not made again.
const PAUSE: Duration = Duration::from_millis(200);

/// How often a wait for a worker's last line looks whether the worker is still there.
const LOOK: Duration = Duration::from_secs(5);

/// How many answers of a worker may wait for their last line. One that is as it should
/// be has two: what it is loading, and what is newest.
const OPEN: usize = 3;

/// Calls a worker with the newest there is for it, as long as it is here.
pub(super) async fn call(
    shared: Arc<Shared>,
    mailbox: MailboxId,
    client: Arc<Client>,
    bell: Arc<Notify>,
) {
    let mut open: VecDeque<JoinHandle<()>> = VecDeque::new();
    loop {
        let order = shared.lock().next_call(mailbox);
        let Some(order) = order else {
            if !shared.lock().is_here(mailbox) {
                return;
            }
            bell.notified().await;
            continue;
        };
        let sequence = order.sequence;
        match stage(&shared, mailbox, (&client, &bell), order).await {
            Ok(Some(lines)) => {
                open.retain(|answer| !answer.is_finished());
                if open.len() == OPEN
                    && let Some(oldest) = open.pop_front()
                {
                    // Its connection ends with it.
                    oldest.abort();
                }
                open.push_back(tokio::spawn(finish(shared.clone(), mailbox, lines)));
            }
            Ok(None) => {}
            Err(why) => {
                tracing::debug!(addr = %client.addr(), sequence, %why, "a call did not come through");
                shared.note(|plan| plan.call_failed(mailbox));
                sleep(PAUSE).await;
            }
        }
    }
}

/// Makes one call, and waits until the worker has all of it; what it says later comes
/// by the lines.
async fn stage(
    shared: &Shared,
    mailbox: MailboxId,
    (client, bell): (&Arc<Client>, &Notify),
    order: Order<Arc<Retained>>,
) -> Result<Option<Lines>, String> {
    // Held as long as the worker may fetch them.
    let kept: Vec<_> = order.set.iter().map(|(_, kept)| kept.clone()).collect();
    shared.fetches(mailbox, &kept);
    let call = Call {
        id: shared.name(mailbox),
        run: shared.run,
        sequence: order.sequence,
        url: shared.url.clone(),
        models: kept.iter().map(|kept| kept.part()).collect(),
    };
    let told = told(shared, mailbox, client, &call);
    let done = tokio::select! {
        told = told => told,
        // It is called again with what is newer.
        () = overtaken(shared, mailbox, bell, order.sequence) => Ok(None),
    };
    drop((kept, order));
    shared.fetches(mailbox, &[]);
    // A send may wait for the room.
    shared.note(|_| ());
    done
}

/// Waits until there is something newer for a worker that has not begun to fetch what
/// it was called with: it may be stopped.
async fn overtaken(shared: &Shared, mailbox: MailboxId, bell: &Notify, sequence: u64) {
    loop {
        bell.notified().await;
        let newer = shared.lock().sequence_for(mailbox) > sequence;
        if newer && !shared.has_begun(mailbox) {
            return;
        }
        if !shared.lock().is_here(mailbox) {
            return;
        }
    }
}

async fn told(
    shared: &Shared,
    mailbox: MailboxId,
    client: &Arc<Client>,
    call: &Call,
) -> Result<Option<Lines>, String> {
    let asked = client.ask(Ask::post(of_worker::WEIGHTS, call), PATIENCE);
    let reply = asked.await.map_err(|fault| fault.to_string())?;
    if reply.status != StatusCode::OK {
        return Err(format!("it answered {}", reply.status));
    }
    let mut lines = reply.lines();
    loop {
        match lines.next::<Notified>(LOOK).await {
            Ok(Some(Notified::Staged { sequence })) if sequence == call.sequence => {
                shared.note(|plan| plan.staged(mailbox, sequence));
                return Ok(Some(lines));
            }
            Ok(Some(told)) => {
                hear(shared, mailbox, told);
                return Ok(Some(lines));
            }
            Ok(None) => return Err("its answer ended".into()),
            // What it fetches may be large.
            Err(Fault::Silent { .. }) if shared.lock().is_here(mailbox) => {}
            Err(fault) => return Err(fault.to_string()),
        }
    }
}

/// Waits for the last line, and for the end after it.
async fn finish(shared: Arc<Shared>, mailbox: MailboxId, mut lines: Lines) {
    loop {
        match lines.next::<Notified>(LOOK).await {
            Ok(Some(told)) => hear(&shared, mailbox, told),
            Err(Fault::Silent { .. }) if shared.lock().is_here(mailbox) => {}
            Ok(None) | Err(_) => return,
        }
    }
}

fn hear(shared: &Shared, mailbox: MailboxId, told: Notified) {
    shared.note(|plan| match told {
        Notified::Staged { sequence } => plan.staged(mailbox, sequence),
        Notified::Taken { sequence } => plan.taken(mailbox, sequence),
        Notified::Applied(applied) => plan.applied(mailbox, applied.sequence, &numbers(&applied)),
        Notified::Refused { sequence, reason } => plan.refused(mailbox, sequence, cut(&reason)),
        Notified::PassedOver { .. } => {}
    });
}

pub(super) fn numbers(applied: &Applied) -> Vec<(usize, Version)> {
    let versions = applied.versions.iter();
    versions.map(|runs| (runs.model, runs.version)).collect()
}
