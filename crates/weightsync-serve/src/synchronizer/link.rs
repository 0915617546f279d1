//! How a party reaches the service: in this program, or over HTTP.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hyper::StatusCode;
use tokio::sync::watch;
use weightsync_core::synchronizer::Party;
use weightsync_engine::log_limiter::{self, LogLimiter};
use weightsync_engine::transport::{Backoff, Deadline, SILENT_SENDER, interrupt};
use weightsync_engine::{Error, Origin, Result};
use weightsync_link::access::Access;
use weightsync_link::address::{host_of, resolve, resolve_all};
use weightsync_mem::threads::LockExt as _;

use super::SyncError;
use super::service::{Caller, ServiceInput};
use super::wire::{Join, JoinAnswer, MAX_ANSWER, MAX_BODY, Reply, Request, RequestProblem};
use crate::http::{Ask, Bearer, Client, Encryption, Fault, HttpThread, Lines, To};

/// The paths of a service.
pub(super) const PARTIES: &str = "/v1/parties";
pub(super) const PARTY: &str = "/v1/parties/{party}";

/// How often a service sends a sign of life.
pub(super) const BEAT: Duration = Duration::from_secs(4);

/// How many of them may be missing while the connection is there. A service that does not get to run
/// is waited for: if it ends, or its host does, the connection ends. But the host that answers may be
/// a proxy's.
const MISSING: u32 = (SILENT_SENDER.as_secs() / BEAT.as_secs()) as u32;

/// How long an answer may take that waits for nothing.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long an attempt to join may take once the deadline has come.
const SHORTEST: Duration = Duration::from_millis(500);

/// How much later than asked an answer may be: as much later as it was to take, between these.
const LEAST_GRACE: Duration = Duration::from_secs(1);
const GRACE: Duration = Duration::from_secs(5);

/// The pauses between two attempts at a service that is away, at first and at most.
const PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Numbers the requests of this process.
static REQUESTS: AtomicU64 = AtomicU64::new(0);

pub(super) fn next_request() -> u64 {
    // Relaxed: only the numbers matter, and each is given out once.
    REQUESTS.fetch_add(1, Ordering::Relaxed) + 1
}

/// The way to a service.
#[derive(Clone, Debug)]
pub(super) enum ServiceLink {
    /// In the process that started it.
    Local(mpsc::Sender<ServiceInput>, Origin),
    Remote(Arc<RemoteService>),
}

/// A service in another process.
#[derive(Debug)]
pub(super) struct RemoteService {
    /// `HOST:PORT`, as it was given.
    name: String,
    access: Access,
    client: Mutex<Arc<Client>>,
    thread: Arc<HttpThread>,
}

impl RemoteService {
    /// The way to a service with this name, before any request.
    ///
    /// # Errors
    ///
    /// If there is no such address, or it may not be connected to.
    pub(super) fn new(name: &str, access: Access, thread: Arc<HttpThread>) -> Result<Self> {
        // A wrong name fails here, before a party tries to join.
        let at = resolve(name)?;
        access.may_dial(at).map_err(SyncError::from)?;
        Ok(Self {
            name: name.to_owned(),
            client: Mutex::new(client(at, name, &access)),
            access,
            thread,
        })
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.client().addr()
    }

    /// The same way, with other certificates.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub(super) fn with_access(&self, access: Access) -> Result<Self> {
        Self::new(&self.name, access, self.thread.clone())
    }

    fn client(&self) -> Arc<Client> {
        self.client.locked().clone()
    }

    /// Looks the name up again after an attempt at one of its addresses, and takes the next: the service
    /// may have moved, or listen at one of them only.
    fn look_up_again(&self, tried: SocketAddr) {
        // A literal address has only itself.
        if self.name.parse::<SocketAddr>().is_ok() {
            return;
        }
        // Where nobody answers, a look-up takes as long as the system likes.
        let (found, all) = mpsc::sync_channel(1);
        let name = self.name.clone();
        let look = move || drop(found.send(resolve_all(&name)));
        self.thread.runtime().spawn_blocking(look);
        let Ok(Ok(all)) = all.recv_timeout(SHORTEST) else {
            return; // the next attempt goes to the same address
        };
        let known = all.iter().position(|one| *one == tried);
        // The addresses in turn. One that is not in the list any more begins at the first.
        let next = all[known.map_or(0, |known| known + 1) % all.len()];
        let mut client = self.client.locked();
        // Another party of this program may have found it already.
        if client.addr() == tried && next != tried && self.access.may_dial(next).is_ok() {
            *client = self::client(next, &self.name, &self.access);
        }
    }
}

fn client(at: SocketAddr, name: &str, access: &Access) -> Arc<Client> {
    let secret = access.token.as_ref().map(|token| token.secret());
    let encryption = Encryption {
        tls: access.tls.clone(),
        // The certificate is for the name that the user gave, not for the address that it led to.
        to: To::Service(host_of(name).to_owned()),
    };
    Client::new(at, Bearer::to_synchronizer(secret.as_ref()), encryption)
}

/// A party's membership, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct PartyConnection {
    owner: Origin,
    link: ServiceLink,
    pub(super) joined: JoinAnswer,
    /// Of a remote one: whether the service is still there. Dropping it ends the membership.
    lifeline: Option<PartyLifeline>,
}

#[derive(Debug)]
struct PartyLifeline {
    /// Requests go where the party has joined.
    client: Arc<Client>,
    ended: watch::Receiver<bool>,
    task: tokio::task::AbortHandle,
    owner: Origin,
}

impl Drop for PartyLifeline {
    fn drop(&mut self) {
        // A forked child has no such task.
        if self.owner.is_here() {
            self.task.abort();
        }
    }
}

/// Why a party has no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unanswered {
    /// The service does not answer, or does not know the party: it joins again.
    #[error("{0}")]
    Away(String),
    /// There is no encrypted connection until somebody changes an end's certificates.
    #[error("{0}")]
    Untrusted(String),
    #[error(transparent)]
    Told(RequestProblem),
    #[error(transparent)]
    Engine(#[from] Error),
}

impl ServiceLink {
    /// Joins the service, and tries until the deadline if it is away. A party that was in also waits
    /// while certificates do not match: hosts get new ones one after another.
    pub(super) fn join(
        &self,
        join: &Join,
        mut warnings: Option<&mut LogLimiter>,
        until: Deadline,
    ) -> Result<PartyConnection, Unanswered> {
        let mut backoff = Backoff::new(PAUSE, LONGEST_PAUSE);
        loop {
            let left = || weightsync_mem::left(until);
            // A first attempt has some time also at a deadline that has passed. So a caller that
            // only looks finds a service that is there.
            let patience = left().map_or(PATIENCE, |left| left.clamp(SHORTEST, PATIENCE));
            // The address before the attempt: another party may change it meanwhile.
            let tried = match self {
                Self::Remote(remote) => Some(remote.addr()),
                Self::Local(..) => None,
            };
            let why = match self.try_join(join, patience) {
                Err(Unanswered::Away(why)) => why,
                // A party that joins for the first time is refused at once. It has no `warnings`.
                Err(Unanswered::Untrusted(why)) if let Some(warnings) = &mut warnings => {
                    if let Some(more) = warnings.logs("certificates", Instant::now()) {
                        let text = format!("{}: the synchronizer is away: {why}", join.name);
                        log_limiter::warn(more, &text);
                    }
                    why
                }
                joined => return joined,
            };
            // The host may have another address now.
            if let (Self::Remote(remote), Some(tried)) = (self, tried) {
                remote.look_up_again(tried);
            }
            let left = left();
            // A service of this program that has ended does not come back.
            if left.is_some_and(|left| left.is_zero()) || matches!(self, Self::Local(..)) {
                return Err(Unanswered::Away(why));
            }
            let pause = backoff.pause();
            interrupt::sleep(left.map_or(pause, |left| left.min(pause))).map_err(Error::from)?;
        }
    }

    fn try_join(&self, join: &Join, patience: Duration) -> Result<PartyConnection, Unanswered> {
        match self {
            Self::Local(inputs, owner) => {
                owner.check().map_err(Error::from)?;
                // Room for the one answer: the service never waits here.
                let (answered, answer) = mpsc::sync_channel(1);
                let service = inputs.clone();
                let answered = Box::new(move |joined: Result<JoinAnswer, _>| {
                    let joined = joined.map(|joined| UnclaimedParty(Some(joined), service));
                    drop(answered.send(joined));
                });
                let input = ServiceInput::Join(Box::new(join.clone()), Caller::Own, answered);
                inputs.send(input).map_err(|_| over())?;
                let joined = wait(&answer)?.map_err(of_problem)?.claim();
                Ok(PartyConnection {
                    owner: Origin::here(),
                    link: self.clone(),
                    joined,
                    lifeline: None,
                })
            }
            Self::Remote(remote) => {
                // In a forked child the runtime has no thread.
                remote.thread.owner().check().map_err(Error::from)?;
                let (answered, answer) = mpsc::sync_channel(1);
                let ask = Ask::post(PARTIES, join);
                let client = remote.client();
                let of_party = client.clone();
                // True once the membership is over. Requests that wait for an answer watch this.
                let (over, ended) = watch::channel(false);
                let task = remote.thread.runtime().spawn(async move {
                    follow(&client, ask, patience, |joined| drop(answered.send(joined))).await;
                    let _ = over.send(true);
                });
                let lifeline = PartyLifeline {
                    client: of_party,
                    ended,
                    task: task.abort_handle(),
                    owner: Origin::here(),
                };
                // An interruption drops the lifeline here, which ends the membership at the
                // service.
                let joined = wait(&answer)??;
                Ok(PartyConnection {
                    owner: Origin::here(),
                    link: self.clone(),
                    joined,
                    lifeline: Some(lifeline),
                })
            }
        }
    }
}

/// Joins, and reads signs of life for as long as there are any.
async fn follow(
    client: &Arc<Client>,
    ask: Ask,
    patience: Duration,
    answer: impl FnOnce(Result<JoinAnswer, Unanswered>),
) {
    let lines = async {
        let reply = client.ask(ask, patience).await.map_err(of_fault)?;
        match reply.status {
            StatusCode::OK => {}
            status => return Err(of_refusal(client.addr(), status, reply).await),
        }
        // The answer lasts as long as the membership.
        let mut lines = reply.lines();
        let joined = lines.next::<JoinAnswer>(PATIENCE).await.map_err(of_fault)?;
        let joined = joined.ok_or_else(|| Unanswered::Away("it ended its answer".into()))?;
        Ok((joined, lines))
    };
    match lines.await {
        Ok((joined, mut lines)) => {
            answer(Ok(joined));
            read_signs(&mut lines, BEAT, MISSING).await;
        }
        Err(lost) => answer(Err(lost)),
    }
}

/// Reads signs of life until the connection ends, or so many in a row are missing.
async fn read_signs(lines: &mut Lines, every: Duration, most: u32) {
    let mut missing = 0;
    while missing < most {
        missing = match lines.next::<serde::de::IgnoredAny>(every).await {
            Ok(Some(_)) => 0,
            Err(Fault::Silent { .. }) => missing + 1,
            Ok(None) | Err(_) => return,
        };
    }
}

async fn of_refusal(
    addr: SocketAddr,
    status: StatusCode,
    reply: crate::http::HttpReply,
) -> Unanswered {
    match status {
        // A wrong token does not become right by waiting.
        StatusCode::UNAUTHORIZED => Unanswered::Told(RequestProblem::Refused {
            reason: format!(
                "the synchronizer at {addr} refuses the token: give every party the token that the \
                 synchronizer has (WEIGHTSYNC_TOKEN_FILE)"
            ),
        }),
        _ => match reply.json(MAX_BODY, PATIENCE).await {
            Ok(problem) => of_problem(problem),
            // A refusal of the service has a body that can be read. This one does not, so another
            // program answered.
            Err(_) => Unanswered::Told(RequestProblem::Refused {
                reason: format!(
                    "{addr} answered {status}, which is no answer of a synchronizer: is another program \
                     at this address?"
                ),
            }),
        },
    }
}

fn of_problem(problem: RequestProblem) -> Unanswered {
    match problem {
        // The service was started again, or has given this party up. The party joins again.
        RequestProblem::Unknown {} => Unanswered::Away(problem.to_string()),
        problem => Unanswered::Told(problem),
    }
}

fn of_fault(fault: Fault) -> Unanswered {
    match fault {
        // Certificates change only when somebody exchanges them, so the caller decides whether to
        // wait.
        Fault::Tls { is_final: true, .. } => Unanswered::Untrusted(fault.to_string()),
        Fault::NeedsTls { .. } => Unanswered::Told(RequestProblem::Refused {
            reason: fault.to_string(),
        }),
        // It is there, and asking again would get the same.
        Fault::TooLong { .. } | Fault::Json { .. } => Unanswered::Told(RequestProblem::Refused {
            reason: format!(
                "its answer cannot be read: {fault}; install the same weightsync on both"
            ),
        }),
        fault => Unanswered::Away(fault.to_string()),
    }
}

/// A party that has joined a service of this program. If the wait for it was interrupted, the party
/// leaves when its answer is dropped.
struct UnclaimedParty(Option<JoinAnswer>, mpsc::Sender<ServiceInput>);

impl UnclaimedParty {
    fn claim(mut self) -> JoinAnswer {
        self.0
            .take()
            .unwrap_or_else(|| unreachable!("it is claimed once"))
    }
}

impl Drop for UnclaimedParty {
    fn drop(&mut self) {
        if let Some(joined) = self.0.take() {
            // A service that has ended has no parties.
            let _ = self.1.send(ServiceInput::Gone(Party(joined.party)));
        }
    }
}

/// The service of this program has ended.
fn over() -> Unanswered {
    Unanswered::Told(RequestProblem::Refused {
        reason: "the synchronizer has been shut down".into(),
    })
}

impl PartyConnection {
    fn party(&self) -> Party {
        Party(self.joined.party)
    }

    /// Whether the service has been heard of lately.
    pub(super) fn is_alive(&self) -> bool {
        let lifeline = self.lifeline.as_ref();
        lifeline.is_none_or(|lifeline| !*lifeline.ended.borrow())
    }

    /// Asks, and waits for the answer for as long as the request says, or until the service is away.
    pub(super) fn ask(
        &self,
        request: Request,
        waits: Option<Duration>,
    ) -> Result<Reply, Unanswered> {
        match (&self.link, &self.lifeline) {
            (ServiceLink::Remote(remote), Some(lifeline)) => {
                let (answered, answer) = mpsc::sync_channel(1);
                let path = PARTY.replace("{party}", &self.joined.party.to_string());
                let ask = Ask::post(path, &request);
                let client = lifeline.client.clone();
                // The lifeline ends first when the service dies: the request does not wait for its
                // own timeout.
                let mut ended = lifeline.ended.clone();
                let task = remote.thread.runtime().spawn(async move {
                    let asked = post(&client, ask, waits);
                    let answer = tokio::select! {
                        answer = asked => answer,
                        _ = ended.wait_for(|ended| *ended) => {
                            Err(Unanswered::Away(format!("the synchronizer at {} is gone", client.addr())))
                        }
                    };
                    let _ = answered.send(answer);
                });
                let waited = wait(&answer);
                if waited.is_err() {
                    // Ends the request at the service, too.
                    task.abort();
                }
                waited?
            }
            (ServiceLink::Local(inputs, _), _) => {
                let (answered, answer) = mpsc::sync_channel(1);
                // The number lets the service find this request if the caller is interrupted.
                let number = next_request();
                let answered = Box::new(move |reply| drop(answered.send(reply)));
                let input = ServiceInput::Ask(self.party(), number, Caller::Own, request, answered);
                inputs.send(input).map_err(|_| over())?;
                let waited = wait(&answer);
                if waited.is_err() {
                    // Otherwise the service would answer a caller that is gone, and the sync would
                    // count.
                    let _ = inputs.send(ServiceInput::Withdrawn(self.party(), number));
                }
                waited?.map_err(of_problem)
            }
            (ServiceLink::Remote(_), None) => Err(over()),
        }
    }
}

impl Drop for PartyConnection {
    fn drop(&mut self) {
        // The lock of the channel may be held for ever in a forked child.
        if let ServiceLink::Local(inputs, _) = &self.link
            && self.owner.is_here()
        {
            let _ = inputs.send(ServiceInput::Gone(self.party()));
        }
    }
}

/// Sends a request. `None` waits for as long as the service is there.
async fn post(
    client: &Arc<Client>,
    ask: Ask,
    waits: Option<Duration>,
) -> Result<Reply, Unanswered> {
    const LONG: Duration = Duration::from_secs(3600 * 24 * 365);
    let waits = waits.unwrap_or(LONG);
    // The service watches the time and answers at its end. The grace covers the way back.
    let patience = waits.saturating_add(waits.clamp(LEAST_GRACE, GRACE));
    // A year stands for no limit.
    let patience = patience.min(LONG);
    let reply = client.ask(ask, patience).await.map_err(of_fault)?;
    match reply.status {
        StatusCode::OK => reply.json(MAX_ANSWER, PATIENCE).await.map_err(of_fault),
        status => Err(of_refusal(client.addr(), status, reply).await),
    }
}

/// Waits for an answer, interruptibly.
fn wait<T>(answer: &mpsc::Receiver<T>) -> Result<T, Unanswered> {
    loop {
        // An answer that is there comes before an interruption: the service counts it as given.
        if let Ok(got) = answer.try_recv() {
            return Ok(got);
        }
        let pause = interrupt::at_most(None).map_err(Error::from)?;
        let got = match pause {
            None => answer.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(pause) => answer.recv_timeout(pause),
        };
        match got {
            Ok(got) => return Ok(got),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(over()),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[test]
    fn party_waits_for_signs_while_the_connection_is_open() {
        const LONG: Duration = Duration::from_secs(3600);
        const BRIEF: Duration = Duration::from_millis(10);
        let (said, heard) = mpsc::channel();
        let thread = HttpThread::start("test", move |_| async move {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let addr = listener.local_addr().unwrap();
            let service = tokio::spawn(async move {
                let (mut socket, _) = listener.accept().await.unwrap();
                let asked = socket.read(&mut [0; 4096]).await.unwrap();
                assert!(asked > 0, "nothing was asked");
                let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
                socket.write_all(head).await.unwrap();
                socket.write_all(b"2\r\n0\n\r\n").await.unwrap();
                socket
            });
            let encryption = Encryption {
                tls: None,
                to: To::Sender,
            };
            let client = Client::new(addr, Bearer::to_synchronizer(None), encryption);
            let reply = client.ask(Ask::get("/"), LONG).await.unwrap();
            let (mut lines, socket) = (reply.lines(), service.await.unwrap());
            // One sign came. A service that does not get to run sends no more for a while.
            let begun = Instant::now();
            read_signs(&mut lines, BRIEF, 7).await;
            let waited = begun.elapsed();
            // Its end is the end of the connection.
            drop(socket);
            read_signs(&mut lines, LONG, 1).await;
            let _ = said.send(waited);
        });
        let waited = heard.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(waited >= 7 * BRIEF, "{waited:?}");
        drop(thread);
    }
}
