//! Registers workers, and watches the connections that show whether they live.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::response::Response;
use bytes::Bytes;
use hyper::StatusCode;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, sleep};
use weightsync_engine::{WorkerId, log_limiter};
use weightsync_mem::{Departure, ModelMask};

use super::caller;
use super::server::{SenderApp, wrong};
use super::workers::{ConnectionId, SharedSender, WorkerRegistration};
use crate::http::{
    Ask, Client, Encryption, Fault, Lines, LinesBody, Reachability, Stopping, To, problem, read,
};
use crate::rpc::wire::{
    Digits, FromSender, FromWorker, MAX_BODY, MAX_DEVICE, PROTOCOL, Register, RpcProblem, Welcome,
    addr_of, line, of_worker,
};
use crate::rpc::{BEAT, PROBE, PROBE_AGAIN, PROBE_BEHIND, SILENCE};

/// How long a worker that registers may take to answer itself.
const CALLED_BACK: Duration = Duration::from_secs(2);

/// How long the last messages of a worker that has disconnected may take on the other
/// connection.
const LAST_MESSAGES: Duration = Duration::from_millis(500);

pub(super) async fn register(State(app): State<SenderApp>, request: Request) -> Response {
    let register: Register = match read(request, MAX_BODY).await {
        Ok(register) => register,
        Err((status, error)) => return wrong(status, error),
    };
    // The checks that cost nothing come first. A number that a live worker has is refused before
    // the sender dials anything.
    let registration = match check(&app.shared, &register) {
        Ok(registration) => registration,
        Err(refusal) => return *refusal,
    };
    if let Err(taken) = may_come(&app.shared, &registration).await {
        return taken;
    }
    let encryption = Encryption {
        tls: app.shared.access.tls.clone(),
        to: To::Worker,
    };
    let client = Client::new(registration.addr, app.shared.bearer.clone(), encryption);
    // The worker must be reachable at its address, and must confirm the registration. Only then
    // does the sender tell it a name.
    let lines = match call_back(&app.shared, &client, &register).await {
        Ok(lines) => lines,
        Err(error) => {
            app.shared.complain(&error);
            return wrong(StatusCode::FAILED_DEPENDENCY, error);
        }
    };
    let shared = app.shared;
    // Random and secret, and new for each connection: it authenticates the worker's messages.
    let name = match Digits::random() {
        Ok(name) => name,
        Err(error) => return wrong(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()),
    };
    let (id, sequence) = match admit(&shared, &registration, name).await {
        Ok(admitted) => admitted,
        Err(refusal) => return refusal,
    };
    // Three tasks serve the connection: one reads the worker's signs of life, one calls it, and one
    // sends it signs of life.
    tokio::spawn(follow(shared.clone(), id, client.clone(), lines));
    tokio::spawn(caller::call(shared.clone(), id, name, client.clone()));
    let welcome = welcome(&shared, &register, name, sequence);
    let (lines, response) = LinesBody::answer(4);
    // The channel is new, so it has room.
    let _ = lines.try_send(line(&welcome));
    tokio::spawn(beat(shared, id, client, lines, app.stopping));
    response
}

/// Admits a worker under this name, once it may have its number. Returns its connection and the
/// sequence of its first call, or the refusal.
async fn admit(
    shared: &SharedSender,
    registration: &WorkerRegistration,
    name: Digits,
) -> Result<(ConnectionId, u64), Response> {
    loop {
        // Two workers may register with one number at the same time.
        let holder = may_come(shared, registration).await?;
        match shared.admit(registration, name, holder) {
            // Another registration came first. The loop checks the new holder in the same way.
            Ok(None) => {}
            Ok(Some(admitted)) => return Ok(admitted),
            Err(error) => return Err(wrong(StatusCode::CONFLICT, error.to_string())),
        }
    }
}

/// The first line to a worker that was admitted under this name.
fn welcome(shared: &SharedSender, register: &Register, name: Digits, sequence: u64) -> FromSender {
    let nonce = register.nonce.0;
    // The proof binds the worker's nonce to this name, so a recorded welcome proves nothing to
    // another registration.
    let proof = shared.proof.proof(nonce.as_bytes(), &name.to_string());
    FromSender::Welcome(Welcome {
        protocol: PROTOCOL,
        id: name,
        run: shared.run,
        pid: std::process::id(),
        models: shared.ids().cloned().collect(),
        sequence,
        proof: Some(Digits(proof)),
    })
}

/// Checks whether a worker may have its number. It may not if another worker has it and is not
/// silent. Returns the connection of a silent one.
async fn may_come(
    shared: &SharedSender,
    registration: &WorkerRegistration,
) -> Result<Option<ConnectionId>, Response> {
    let Some(holder) = shared.holder(registration) else {
        return Ok(None);
    };
    // The holder is silent already, so it loses its number without a further wait.
    let Some(before) = shared.signs(holder) else {
        return Ok(Some(holder));
    };
    // The other worker sends a sign of life five times a second. A dead one has its connection
    // closed, or falls silent.
    let heard = loop {
        // The wait ends at the next sign of life, or once `follow` has noted a silence of 800 ms.
        sleep(BEAT / 4).await;
        match shared.signs(holder) {
            None => break false,
            Some(signs) if signs > before => break true,
            Some(_) => {}
        }
    };
    if !heard {
        return Ok(Some(holder));
    }
    let pid = shared
        .registration(holder)
        .map(|registration| registration.pid);
    let pid = pid.unwrap_or_default();
    let worker = registration.worker;
    let why = format!("{worker} is already connected (pid {pid}); give this one another number");
    log_limiter::refused(&why);
    let body = RpcProblem {
        error: why,
        taken_by: Some(pid),
        ..RpcProblem::default()
    };
    Err(problem(StatusCode::CONFLICT, body))
}

/// Checks a registration, if this sender can have such a worker.
fn check(shared: &SharedSender, register: &Register) -> Result<WorkerRegistration, Box<Response>> {
    if register.protocol != PROTOCOL {
        let reason = format!(
            "this sender speaks protocol {PROTOCOL}, the worker {}: install the same weightsync \
             on both",
            register.protocol
        );
        return refuse(StatusCode::CONFLICT, reason);
    }
    // A later sender has served this worker. Weights of an older run must not replace newer ones.
    if register.seen > shared.run.epoch {
        let problem_body = RpcProblem {
            error: format!(
                "this sender's {} is over: the worker has seen {}",
                shared.run.epoch, register.seen
            ),
            epoch: Some(shared.run.epoch),
            ..RpcProblem::default()
        };
        return Err(Box::new(problem(StatusCode::CONFLICT, problem_body)));
    }
    // The worker has joined before and keeps versions of that run. In another run, equal numbers
    // name other bytes.
    if register.run.is_some_and(|run| run != shared.run) {
        let reason = format!("this sender's is another run: {}", shared.run);
        return refuse(StatusCode::CONFLICT, reason);
    }
    if register.device.len() > MAX_DEVICE {
        let reason = format!("a device is named in at most {MAX_DEVICE} bytes");
        return refuse(StatusCode::UNPROCESSABLE_ENTITY, reason);
    }
    let mut wanted = ModelMask(0);
    for model in &register.models {
        match shared.ids().position(|id| id == model) {
            Some(place) if !wanted.contains(place) => wanted = wanted.or(ModelMask::of(&[place])),
            _ => {
                let reason = format!("this sender has no model {model}, or it is named twice");
                return refuse(StatusCode::UNPROCESSABLE_ENTITY, reason);
            }
        }
    }
    let addr = check_address(shared, &register.url)?;
    let registration = WorkerRegistration {
        worker: WorkerId(register.worker),
        pid: register.pid,
        addr,
        device: register.device.clone(),
        wanted,
        announces: register.announces,
    };
    Ok(registration)
}

/// Checks the URL at which a worker is to be called, and returns its address.
fn check_address(shared: &SharedSender, url: &str) -> Result<SocketAddr, Box<Response>> {
    let Some((addr, is_encrypted)) = addr_of(url) else {
        let reason =
            "a worker's url is expected: http://ADDRESS:PORT or https://ADDRESS:PORT".into();
        return refuse(StatusCode::UNPROCESSABLE_ENTITY, reason);
    };
    let tls = shared.access.tls.as_ref();
    // A mismatch would fail later as a handshake error at one end. Here both ends get the reason.
    if is_encrypted != tls.is_some_and(|tls| tls.covers(addr)) {
        let (has, lacks) = match is_encrypted {
            true => ("worker", "sender"),
            false => ("sender", "worker"),
        };
        let reason = format!(
            "the {has} has a certificate for links to other machines, and the {lacks} has none: give \
             both one of the same authority (tls=, or WEIGHTSYNC_TLS_DIR)"
        );
        return refuse(StatusCode::FORBIDDEN, reason);
    }
    // The address comes from the worker. The sender dials it only where its own access allows it to
    // send the secret's bearer.
    if let Err(error) = shared.access.may_dial_with_secret(addr) {
        return refuse(StatusCode::FORBIDDEN, error.to_string());
    }
    Ok(addr)
}

/// A refusal of a registration, with its reason.
fn refuse<T>(status: StatusCode, reason: String) -> Result<T, Box<Response>> {
    Err(Box::new(wrong(status, reason)))
}

/// Calls a worker that registers, and keeps its lifeline. The worker answers its own registration
/// alone.
async fn call_back(
    shared: &SharedSender,
    client: &Arc<Client>,
    register: &Register,
) -> Result<Lines, String> {
    let failed = |why: String| format!("calling the worker back at {}: {why}", client.addr());
    let lifeline = format!("{}?nonce={}", of_worker::LIFELINE, register.nonce);
    let reply = client
        .ask(Ask::get(lifeline), CALLED_BACK)
        .await
        .map_err(|fault| {
            // The error may be this process's own lack of descriptors. `connect` then reports that
            // instead of a missing worker.
            if let Fault::Connect { source, .. } = &fault {
                shared.note_failed_accept(source);
            }
            failed(fault.to_string())
        })?;
    if reply.status != StatusCode::OK {
        return Err(failed(format!("it answered {}", reply.status)));
    }
    let mut lines = reply.lines();
    match lines.next::<FromWorker>(CALLED_BACK).await {
        Ok(Some(FromWorker::Here { worker, pid }))
            if (worker, pid) == (register.worker, register.pid) =>
        {
            Ok(lines)
        }
        // A process other than the one that registers listens at this address.
        Ok(_) => Err(failed("it is another worker".into())),
        Err(fault) => Err(failed(fault.to_string())),
    }
}

/// Reads a worker's lifeline to its end.
async fn follow(
    shared: Arc<SharedSender>,
    id: ConnectionId,
    client: Arc<Client>,
    mut lines: Lines,
) {
    let mut probed: Option<Instant> = None;
    // The loop also ends when the connection's number is gone, which a newer registration causes.
    let departure = loop {
        match lines.next::<FromWorker>(SILENCE).await {
            Ok(Some(FromWorker::Left {})) => break Departure::Left,
            Ok(Some(_)) => {
                probed = None;
                note_silence(&shared, id, false);
            }
            // A silence alone is no death. The system of the worker's host is asked whether the
            // worker's listener is there.
            Err(Fault::Silent { .. }) => {
                note_silence(&shared, id, true);
                // Asked seldom: each probe is a connection to the worker.
                if probed.is_none_or(|at| at.elapsed() >= PROBE_AGAIN) {
                    probed = Some(Instant::now());
                    // A version on its way can fill the queues of a slow link, so the probe gets
                    // more time there.
                    let patience = match shared.has_begun(id) {
                        true => PROBE_BEHIND,
                        false => PROBE,
                    };
                    match client.reach(patience).await {
                        // The process is stopped or starved. It is late and not dead.
                        Reachability::Here => {}
                        Reachability::Refused => break Departure::Died,
                        Reachability::Away => break Departure::Lost,
                    }
                }
            }
            // The lifeline has ended without a farewell.
            Ok(None) | Err(_) => break Departure::Died,
        }
        // A newer registration or another task has removed this connection, and has reported the
        // departure.
        if !shared.is_here(id) {
            return;
        }
    };
    shared.end(id, departure);
}

fn note_silence(shared: &SharedSender, id: ConnectionId, silent: bool) {
    if shared.note_silence(id, silent)
        && silent
        && let Some(WorkerRegistration { worker, pid, .. }) = shared.registration(id)
    {
        tracing::warn!(%worker, pid, "the worker does not answer; it may be stopped");
    }
}

/// Sends signs of life to a worker for as long as the sender lives.
async fn beat(
    shared: Arc<SharedSender>,
    id: ConnectionId,
    client: Arc<Client>,
    lines: mpsc::Sender<Bytes>,
    mut stopping: Stopping,
) {
    let mut beats = interval(BEAT);
    // After a suspension of this host one beat is enough. A burst would say nothing more.
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut count = 0;
    loop {
        tokio::select! {
            _ = beats.tick() => {
                if !shared.is_here(id) {
                    return;
                }
                count += 1;
                // A worker that does not read has enough lines in its buffer.
                let _ = lines.try_send(line(&FromSender::Beat(count)));
            }
            () = lines.closed() => {
                // A silent worker would not get it over another connection either.
                if !shared.is_silent(id) {
                    sleep(LAST_MESSAGES).await;
                }
                // A dead process has no listener either, so a refused connection shows its death.
                // If the listener is there, only this connection was lost, and the worker
                // registers again.
                let departure = match client.reach(PROBE).await {
                    Reachability::Refused => Departure::Died,
                    Reachability::Here | Reachability::Away => Departure::Lost,
                };
                return shared.end(id, departure);
            }
            () = stopping.wait() => {
                // This waits for room, unlike a beat: the line must arrive. The server's end bounds
                // the wait.
                let _ = lines.send(line(&FromSender::Closed {})).await;
                return;
            }
        }
    }
}
