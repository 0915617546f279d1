//! Joins a sender: tries until the sender is there, or until the deadline.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hyper::StatusCode;
use tokio::time::sleep;
use weightsync_engine::transport::{
    Backoff, Deadline, Endpoint, Joining, ModelSpec, SILENT_SENDER, interrupt, left, passed,
};
use weightsync_engine::{Epoch, Error, ModelId, Result, Run, log_limiter};
use weightsync_link::access::Access;
use weightsync_link::address::listen_error;
use weightsync_link::tls::ClientAuth;
use weightsync_mem::threads::LockExt as _;

use super::inbox::{Inbox, SenderEnd};
use super::{server, wait_for};
use crate::http::{
    Ask, Bearer, Client, Encryption, Fault, HttpReply, HttpThread, Limits, Lines, ProofKey, Server,
    To,
};
use crate::rpc::error::RpcError;
use crate::rpc::wire::{
    Digits, FromSender, MAX_BODY, MAX_SPEC, PROTOCOL, Question, Register, RpcProblem, Welcome,
    WorkerMessage, of_sender, url,
};
use crate::rpc::{Addresses, PATIENCE, PROBE, SILENCE, address};

/// The pause between two attempts at an absent sender, at first and at most.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// The longest pause for a sender that is there and has rejected this worker.
const LONGEST_TURNED_AWAY: Duration = Duration::from_secs(1);

/// How long an attempt may take once the deadline has come. So a caller that only checks
/// whether a sender is there finds it.
const ATTEMPT: Duration = Duration::from_millis(500);

/// A sender that was joined.
#[derive(Debug)]
pub(super) struct JoinedSender {
    /// The name of this worker's connection. It changes after a connection broke.
    id: Mutex<Digits>,
    /// Whether the connection is broken. If so, another sender may answer at this address.
    broken: AtomicBool,
    proof: ProofKey,
    pub(super) run: Run,
    pub(super) pid: u32,
    /// The models that this worker takes, in the order in which it named them, and their indices at
    /// the sender.
    pub(super) models: Vec<ModelSpec>,
    pub(super) wanted: Vec<usize>,
    pub(super) client: Arc<Client>,
    /// The sequence of the call that follows at once.
    sequence: u64,
}

impl JoinedSender {
    pub(super) fn id(&self) -> Digits {
        *self.id.locked()
    }

    fn renew(&self, new: Digits) {
        *self.id.locked() = new;
        self.broken.store(false, Ordering::Relaxed);
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    pub(super) fn index_of(&self, model: &ModelId) -> Option<usize> {
        let index = self.models.iter().position(|spec| spec.id == *model)?;
        Some(self.wanted[index])
    }

    pub(super) fn message(&self, message: &WorkerMessage) -> Ask {
        Ask::post(
            of_sender::MESSAGES.replace("{id}", &self.id().to_string()),
            message,
        )
    }

    pub(super) fn question(&self, question: &Question) -> Ask {
        let want = serde_json::to_value(question.want).unwrap_or_default();
        let want = want.as_str().unwrap_or_default();
        let mut path = of_sender::SET.replace("{id}", &self.id().to_string()) + "?want=" + want;
        let numbers = [
            ("model", question.model.map(|model| model as u64)),
            ("version", question.version),
            ("wait_ms", question.wait_ms),
        ];
        for (name, number) in numbers {
            if let Some(number) = number {
                path += &format!("&{name}={number}");
            }
        }
        Ask::get(path)
    }
}

/// How long a sender may be silent before its worker registers again.
const OUT_OF_REACH: Duration = Duration::from_secs(10);

/// Why an attempt has failed.
enum JoinFailure {
    /// Nothing listens there, as the machine's system reports.
    Absent(String),
    /// The sender does not know this worker's secret. The worker asks again only if another
    /// sender may follow at that address.
    Stranger,
    /// The server has not proved that it has the secret, so it is no sender. The text says what
    /// it sent instead.
    Wrong(&'static str),
    /// The server cannot be reached, disconnects, or does not answer as a sender does. It is
    /// unknown whether a sender is there.
    Silent(String),
    /// The sender refuses the worker for a reason that waiting does not change. Another sender
    /// may still replace this one.
    Denied(String),
    /// There is no encrypted connection. New certificates are read without a restart, and the
    /// handshake may have been cut, so the worker tries again.
    Untrusted(String),
    /// Another live worker has this worker's number.
    Taken(String),
    /// The sender has shut down while this worker was joining.
    Closed,
    /// A sender that this worker has seen has replaced this one.
    Fenced(Epoch),
}

impl From<Fault> for JoinFailure {
    fn from(fault: Fault) -> Self {
        // Only a refused connection shows that nothing listens.
        let reason = fault.to_string();
        match fault {
            Fault::Connect { source, .. } if source.kind() == ErrorKind::ConnectionRefused => {
                Self::Absent(reason)
            }
            Fault::Tls { .. } | Fault::NeedsTls { .. } => Self::Untrusted(reason),
            _ => Self::Silent(reason),
        }
    }
}

impl JoinFailure {
    /// Whether further attempts would fail in the same way.
    fn is_final(&self, at: &Endpoint) -> bool {
        match self {
            Self::Taken(_) => true,
            // Without a run directory no successor takes this address, so these answers stay what
            // they are.
            Self::Stranger | Self::Wrong(_) | Self::Closed => !at.restarts(),
            _ => false,
        }
    }

    /// What the caller is told of a failure of the last attempt.
    fn into_error(self, at: &Endpoint, sender: SocketAddr, since: Instant, seen: Epoch) -> Error {
        match self {
            Self::Absent(why) | Self::Silent(why) => Error::NoSender {
                address: at.address().into(),
                waited: since.elapsed(),
                last: Some(why),
            },
            Self::Stranger => Error::Denied {
                reason: "the init info's secret is not its own".into(),
            },
            Self::Wrong(got) => RpcError::WrongSender { addr: sender, got }.into(),
            Self::Denied(reason) | Self::Untrusted(reason) | Self::Taken(reason) => {
                Error::Denied { reason }
            }
            Self::Closed => Error::SenderClosed,
            Self::Fenced(got) => Error::Fenced { seen, got },
        }
    }
}

/// Joins the sender of an endpoint, and starts the thread that serves its calls.
///
/// If the first set arrives in time, it is there when this function returns.
pub(super) fn join(
    inbox: &Arc<Inbox>,
    at: &Endpoint,
    joining: &Joining,
    access: &Access,
    deadline: Deadline,
) -> Result<(HttpThread, Arc<JoinedSender>)> {
    let since = Instant::now();
    let sender = Addresses::of(at)?.found;
    access
        .may_dial_with_secret(sender)
        .map_err(RpcError::from)?;
    // The server runs before the registration, because the sender calls back before it answers.
    let (thread, own) = serve_calls(inbox, at, joining, access, sender)?;
    let register = registration(joining, url(own, access.tls.as_ref()))?;
    let encryption = Encryption {
        tls: access.tls.clone(),
        to: To::Sender,
    };
    let client = Client::new(sender, Bearer::to_sender(at.secret()), encryption);
    let mut pauses = JoinPauses::new();
    let mut last = None;
    loop {
        // The last attempt may outlast the deadline a little. A caller with a deadline of zero then
        // still finds a sender that is there.
        let ends = Instant::now().checked_add(ATTEMPT).max(deadline);
        let begins_late = ends > deadline;
        let soon = deadline.and(ends);
        // A caller that waits for the sender's answer gives each step its own time, and can cancel.
        let until = soon.filter(|_| !joining.single_attempt);
        let proof = ProofKey::new(at.secret());
        let entering = enter(client.clone(), proof, register.clone(), inbox.clone());
        let not_in = match attempt(&thread, entering, until)? {
            Some(Ok(session)) => {
                // `connect` returns with the first weights if the sender has some to send at once.
                inbox.wait_for(session.sequence, soon)?;
                return Ok((thread, session));
            }
            Some(Err(not_in)) => not_in,
            // The reason of the attempt before says more if this one began at the deadline.
            None => {
                let last = last.filter(|_| begins_late);
                JoinFailure::Silent(last.unwrap_or_else(|| "it did not answer in time".into()))
            }
        };
        if not_in.is_final(at) || passed(deadline) {
            return Err(not_in.into_error(at, sender, since, joining.seen));
        }
        if let JoinFailure::Untrusted(why) = &not_in {
            log_limiter::warn_rarely(&format!("{why}; this worker tries again"));
        }
        let pause = pauses.after(&not_in);
        // Only the attempt just before the deadline lends its reason.
        last = match not_in {
            JoinFailure::Absent(why) | JoinFailure::Silent(why) => Some(why),
            _ => None,
        };
        // The caller's interrupt ends this pause early.
        interrupt::sleep(left(deadline).map_or(pause, |left| left.min(pause)))?;
    }
}

/// Starts the thread that serves the sender's calls. Returns its address with it.
///
/// # Errors
///
/// If this worker may not listen at its address, and those of the operating system.
fn serve_calls(
    inbox: &Arc<Inbox>,
    at: &Endpoint,
    joining: &Joining,
    access: &Access,
    sender: SocketAddr,
) -> Result<(HttpThread, SocketAddr)> {
    // Without a route to the sender this address does not matter: the sender cannot be reached at
    // all.
    let own = address::local_ip(sender).unwrap_or(Ipv4Addr::LOCALHOST.into());
    // Port 0: the system chooses a free one, and the registration tells the sender which.
    let own = SocketAddr::new(own, 0);
    access.may_listen(own).map_err(RpcError::from)?;
    let listener = TcpListener::bind(own);
    let listener = listener.and_then(|listener| Ok((listener.local_addr()?, listener)));
    let failed = |source| listen_error(own, source);
    let (own, listener) = listener.map_err(failed)?;
    let bearer = Bearer::to_worker(at.secret());
    let tls = access.tls.clone().map(|tls| (tls, ClientAuth::Trainer));
    let server = Server::new(listener, bearer, tls, Limits::default()).map_err(failed)?;
    let (theirs, worker) = (inbox.clone(), joining.worker.0);
    let thread = HttpThread::start("rpc-w", move |stopping| {
        let router = server::router(theirs, worker, stopping.clone());
        server.serve(router, stopping, |_| {})
    });
    Ok((thread.map_err(RpcError::Thread)?, own))
}

/// What this worker says of itself, with the URL at which the sender calls it.
///
/// # Errors
///
/// If the system gives no random bytes.
fn registration(joining: &Joining, url: String) -> Result<Register> {
    Ok(Register {
        protocol: PROTOCOL,
        worker: joining.worker.0,
        pid: std::process::id(),
        device: joining.device.clone(),
        models: joining
            .wanted
            .iter()
            .filter_map(|index| joining.models.get(*index).cloned())
            .collect(),
        url,
        seen: joining.seen,
        run: None,
        nonce: Digits::random()?,
        announces: true,
    })
}

/// Makes one attempt, on the thread that serves the calls. `None` if it lasts longer: it is aborted.
///
/// # Errors
///
/// The caller's interrupt.
fn attempt<T: Send + 'static>(
    thread: &HttpThread,
    entering: impl Future<Output = T> + Send + 'static,
    until: Deadline,
) -> Result<Option<T>> {
    let (done, wait) = sync_channel(1);
    let attempt = thread.runtime().spawn(async move {
        let _ = done.send(entering.await);
    });
    let entered = wait_for(&wait, until);
    // An attempt that goes on after its deadline could still register the worker, without a
    // receiver for it.
    if !matches!(entered, Ok(Some(_))) {
        attempt.abort();
    }
    entered
}

/// The pauses between attempts.
///
/// A sender that has refused the worker is asked less often than an absent one, which may start at
/// any moment.
struct JoinPauses {
    absent: Backoff,
    turned_away: Backoff,
}

impl JoinPauses {
    fn new() -> Self {
        Self {
            absent: Backoff::new(PAUSE, LONGEST_PAUSE),
            turned_away: Backoff::new(PAUSE, LONGEST_TURNED_AWAY),
        }
    }

    /// The pause after an attempt that has failed in this way.
    fn after(&mut self, failure: &JoinFailure) -> Duration {
        match failure {
            JoinFailure::Absent(_) | JoinFailure::Silent(_) | JoinFailure::Closed => {
                self.absent.pause()
            }
            JoinFailure::Stranger
            | JoinFailure::Wrong(_)
            | JoinFailure::Denied(_)
            | JoinFailure::Untrusted(_)
            | JoinFailure::Taken(_)
            | JoinFailure::Fenced(_) => self.turned_away.pause(),
        }
    }
}

/// Registers. Returns the sender's first line, and the lines that follow.
async fn register_at(
    client: &Arc<Client>,
    proof: &ProofKey,
    inbox: &Inbox,
    register: &Register,
) -> std::result::Result<(Welcome, Lines), JoinFailure> {
    let nonce = Digits::random().map_err(|error| JoinFailure::Silent(error.to_string()))?;
    let register = Register {
        nonce,
        ..register.clone()
    };
    // The sender asks for the lifeline before it answers.
    inbox.registers(nonce);
    let ask = Ask::post(of_sender::WORKERS, &register);
    let reply = client.ask(ask, PATIENCE).await?;
    match reply.status {
        StatusCode::OK => {}
        StatusCode::UNAUTHORIZED => {
            return Err(JoinFailure::Stranger);
        }
        _ => return Err(refusal(reply).await),
    }
    let mut lines = reply.lines();
    let first = lines.next::<FromSender>(PATIENCE).await?;
    let Some(FromSender::Welcome(welcome)) = first else {
        return Err(JoinFailure::Silent("it did not welcome this worker".into()));
    };
    // Checked before anything else in the message is used.
    let expected = proof.proof(nonce.0.as_bytes(), &welcome.id.to_string());
    match welcome.proof {
        Some(Digits(got)) if got == expected => {}
        Some(_) => return Err(JoinFailure::Wrong("another")),
        None => return Err(JoinFailure::Wrong("none")),
    }
    // The sender checks this too. The worker does not rely on it.
    if welcome.run.epoch < register.seen {
        return Err(JoinFailure::Fenced(welcome.run.epoch));
    }
    if welcome.protocol != PROTOCOL {
        return Err(JoinFailure::Denied("it speaks another protocol".into()));
    }
    Ok((welcome, lines))
}

/// Reads why a registration was refused.
async fn refusal(reply: HttpReply) -> JoinFailure {
    let status = reply.status;
    // A refusal carries its reason as JSON. Something else at this address or on the way
    // answers without one.
    let problem = reply.json::<RpcProblem>(MAX_BODY, PATIENCE).await;
    let Ok(problem) = problem else {
        return JoinFailure::Silent(format!("it answered {status}"));
    };
    // Other statuses come from something on the way that has no room now, or from a sender
    // that could not reach this worker or did not get the whole request in time.
    let is_word = matches!(
        status,
        StatusCode::BAD_REQUEST
            | StatusCode::FORBIDDEN
            | StatusCode::CONFLICT
            | StatusCode::PAYLOAD_TOO_LARGE
            | StatusCode::UNPROCESSABLE_ENTITY
    );
    // The fields of the problem say more than the status.
    match (problem.epoch, problem.taken_by) {
        (Some(epoch), _) => JoinFailure::Fenced(epoch),
        (None, Some(_)) => JoinFailure::Taken(problem.error),
        (None, None) if is_word => JoinFailure::Denied(problem.error),
        (None, None) => JoinFailure::Silent(problem.error),
    }
}

/// Registers, and reads the descriptions of the sender's models.
async fn enter(
    client: Arc<Client>,
    proof: ProofKey,
    mut register: Register,
    inbox: Arc<Inbox>,
) -> std::result::Result<Arc<JoinedSender>, JoinFailure> {
    let (welcome, mut lines) = register_at(&client, &proof, &inbox, &register).await?;
    // The sender may shut down while the worker reads descriptions. Its line of farewell ends the
    // wait at once.
    let (models, wanted) = tokio::select! {
        described = describe(&client, &welcome, &register.models) => described?,
        end = end_of(&mut lines) => return Err(end),
    };
    let session = Arc::new(JoinedSender {
        id: Mutex::new(welcome.id),
        broken: AtomicBool::new(false),
        proof,
        run: welcome.run,
        pid: welcome.pid,
        models,
        wanted,
        client,
        sequence: welcome.sequence,
    });
    // Calls that wait for the session in the route `weights` go on from here.
    inbox.welcome(session.clone());
    // A worker that comes back continues with this run only: its versions have that run's numbers.
    register.run = Some(session.run);
    // The worker continues where it was, so it reports nothing again.
    register.announces = false;
    tokio::spawn(follow(inbox, session.clone(), register, lines));
    Ok(session)
}

/// Waits for the end of a sender that is being joined.
async fn end_of(lines: &mut Lines) -> JoinFailure {
    loop {
        match lines.next::<FromSender>(PATIENCE).await {
            Ok(Some(FromSender::Closed {})) => return JoinFailure::Closed,
            Ok(Some(_)) => {}
            Ok(None) => return JoinFailure::Silent("it hung up".into()),
            Err(fault) => return fault.into(),
        }
    }
}

/// Reads the descriptions of these models, and their indices at the sender.
async fn describe(
    client: &Arc<Client>,
    welcome: &Welcome,
    ids: &[ModelId],
) -> std::result::Result<(Vec<ModelSpec>, Vec<usize>), JoinFailure> {
    let (mut models, mut wanted) = (Vec::new(), Vec::new());
    for id in ids {
        // The sender's order may differ from the worker's.
        let index = welcome.models.iter().position(|model| model == id);
        let index = index.ok_or_else(|| JoinFailure::Denied(format!("it has no model {id}")))?;
        let path = of_sender::MODEL.replace("{model}", &index.to_string());
        let reply = client.ask(Ask::get(path), PATIENCE).await?;
        if reply.status != StatusCode::OK {
            return Err(JoinFailure::Silent(format!("it answered {}", reply.status)));
        }
        let spec: ModelSpec = reply.json(MAX_SPEC, PATIENCE).await?;
        // The description must be that of the model that was asked for.
        if spec.id != *id {
            return Err(JoinFailure::Denied(format!(
                "it describes {} as {id}",
                spec.id
            )));
        }
        models.push(spec);
        wanted.push(index);
    }
    Ok((models, wanted))
}

/// Follows a sender to its end. If the connection breaks while the sender is still there, the
/// network failed, and the worker connects again.
async fn follow(
    inbox: Arc<Inbox>,
    session: Arc<JoinedSender>,
    register: Register,
    mut lines: Lines,
) {
    // When the silence began, and whether the sender was out of reach meanwhile.
    let (mut heard, mut lost) = (Instant::now(), false);
    let end = loop {
        match lines.next::<FromSender>(SILENCE).await {
            // The sender has said farewell. No connection is tried again.
            Ok(Some(FromSender::Closed {})) => break SenderEnd::Closed,
            Ok(Some(_)) => {
                (heard, lost) = (Instant::now(), false);
                continue;
            }
            // A stopped sender continues later. A sender that was out of reach may have given
            // this worker up. And a child that it has forked may keep its sockets open after
            // its death; then nothing else shows the death.
            Err(Fault::Silent { .. }) => {
                let reachable = session.client.is_reachable(PROBE).await;
                let is_back = std::mem::replace(&mut lost, !reachable) && reachable;
                if !is_back && heard.elapsed() < OUT_OF_REACH {
                    continue;
                }
            }
            Ok(None) | Err(_) => {}
        }
        // Before the registration: until it succeeds, answers may come from another server at that
        // address.
        session.broken.store(true, Ordering::Relaxed);
        // The sender keeps the worker's remote reader meanwhile, or makes a new one.
        match again(&session, &inbox, &register).await {
            Ok(new) => (lines, heard, lost) = (new, Instant::now(), false),
            Err(end) => break end,
        }
    };
    inbox.ended(end);
}

/// Registers again with the same sender, if it is there. A disconnect or an answer of a proxy
/// does not show that the sender is gone.
async fn again(
    session: &JoinedSender,
    inbox: &Inbox,
    register: &Register,
) -> std::result::Result<Lines, SenderEnd> {
    let since = Instant::now();
    let died = SenderEnd::Died { pid: session.pid };
    let mut backoff = Backoff::new(PAUSE, LONGEST_PAUSE);
    loop {
        // The registration carries the run, so a successor refuses it. For this receiver the old
        // sender is then dead.
        let why = match register_at(&session.client, &session.proof, inbox, register).await {
            Ok((welcome, lines)) => {
                session.renew(welcome.id);
                return Ok(lines);
            }
            Err(JoinFailure::Silent(why) | JoinFailure::Untrusted(why)) => why,
            Err(JoinFailure::Wrong(got)) => {
                let addr = session.client.addr();
                tracing::warn!("{}", RpcError::WrongSender { addr, got });
                return Err(died);
            }
            Err(JoinFailure::Taken(reason)) => return Err(SenderEnd::Denied { reason }),
            // The sender has ended, or another one is in its place.
            Err(_) => return Err(died),
        };
        // The sender may be stopped, or its machine suspended; it may continue later.
        if since.elapsed() > SILENT_SENDER {
            tracing::warn!(sender = %session.client.addr(), %why, "given up");
            return Err(died);
        }
        sleep(backoff.pause()).await;
    }
}
