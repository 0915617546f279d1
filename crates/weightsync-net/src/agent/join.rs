//! How an agent joins: it finds the sender, introduces itself, and learns the sender's models.

use std::fmt::Display;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::mpsc;
use weightsync_core::{Layout, Remedy, Run};
use weightsync_engine::log_limiter;
use weightsync_link::access::Access;
use weightsync_link::address::host_of;
use weightsync_link::hello::{HelloError, LinkRole};
use weightsync_link::message::MessageError;
use weightsync_link::stream::AsyncStream;
use weightsync_link::tls::TlsPeer;
use weightsync_link::{Credentials, DialError, Link, LinkEnd};
use weightsync_mem::ModelDescription;

use super::driver::DriverEvent;
use super::{AgentOptions, Item, Patience, StartError, Unreached};
use crate::wire::message::{FromRoot, ModelAssembler, RefusalRemedy, ToRoot, Welcome};

/// How long a sender may take for the next part of its welcome. Even over a link of 1 Mbit/s a part
/// takes less.
const NEXT: Duration = Duration::from_secs(10);

/// Messages of a link before the driver takes it over.
type Messages = mpsc::Receiver<(u64, Result<FromRoot, LinkEnd>)>;

/// What an agent has after it has joined.
pub(crate) struct JoinedAgent {
    pub(crate) link: Link<ToRoot>,
    pub(crate) root: SocketAddr,
    pub(crate) welcome: Welcome,
    pub(crate) models: Vec<ModelDescription>,
    /// The listener for other hosts, if the agent serves any.
    pub(crate) bulk: Option<TcpListener>,
}

/// What an agent tells the sender about itself when it reconnects.
#[derive(Debug, Default)]
pub(crate) struct Before {
    pub(crate) run: Option<Run>,
    pub(crate) holds: Vec<Item>,
}

/// Joins the sender.
pub(crate) async fn join(
    options: &AgentOptions,
    credentials: &Credentials,
    events: &mpsc::Sender<DriverEvent>,
    patience: Patience,
) -> Result<JoinedAgent, StartError> {
    let Patience {
        dial: within,
        until,
    } = patience;
    let dialled = tokio::time::timeout(within, dial(&options.root, credentials)).await;
    let (socket, root) = dialled.unwrap_or_else(|_| {
        let reason = format!("{} did not answer within {within:.1?}", options.root);
        Err(StartError::Unreachable(Unreached::Unknown, reason))
    })?;
    // Other hosts can reach this machine at the address that this link uses.
    let own = socket
        .socket()
        .local_addr()
        .map_err(StartError::os("asking a socket for its address"))?;
    let bulk = match options.serves {
        true => listen(own.ip(), &options.access).await?,
        false => None,
    };
    let port = bulk
        .as_ref()
        .and_then(|bulk| Some(bulk.local_addr().ok()?.port()));
    let before = (port, Before::default());
    let greeted = greet(socket, options, before, 0, events);
    let (link, welcome, models) = match until {
        None => greeted.await?,
        Some(until) => {
            let greeted = tokio::time::timeout_at(until.into(), greeted).await;
            greeted.unwrap_or_else(|_| {
                let reason = "it did not list its models in time".into();
                Err(StartError::Unreachable(Unreached::Unknown, reason))
            })?
        }
    };
    if welcome.run.epoch < options.seen {
        return Err(StartError::Fenced {
            seen: options.seen,
            got: welcome.run.epoch,
        });
    }
    Ok(JoinedAgent {
        link,
        root,
        welcome,
        models,
        bulk,
    })
}

/// Listens for other hosts that fetch, if that is allowed.
async fn listen(own: IpAddr, access: &Access) -> Result<Option<TcpListener>, StartError> {
    let any = SocketAddr::new(own, 0);
    access.may_listen(any).map_err(StartError::Access)?;
    // Without a port the agent serves no other host, and fetches all the same.
    Ok(TcpListener::bind(any).await.ok())
}

/// Introduces this agent and receives the welcome. `number` tells this link's events from those of
/// earlier links.
pub(crate) async fn greet(
    socket: AsyncStream,
    options: &AgentOptions,
    (bulk, before): (Option<u16>, Before),
    number: u64,
    events: &mpsc::Sender<DriverEvent>,
) -> Result<(Link<ToRoot>, Welcome, Vec<ModelDescription>), StartError> {
    // A channel of its own until the welcome is complete, so that no other events are mixed in.
    let (own, mut messages) = mpsc::channel(64);
    let forward = events.clone();
    let link = Link::<ToRoot>::start::<FromRoot, _>(socket, &own, move |what| (number, what));
    // From here on only the link has the channel. So the end of the link ends the task that
    // forwards.
    drop(own);
    link.send(&ToRoot::Agent {
        name: host_name(),
        host: host_id(),
        pid: std::process::id(),
        bulk,
        seen: options.seen,
        holds: before.holds.clone(),
        run: before.run,
    });
    let (welcome, models) = read_welcome(&mut messages, NEXT).await?;
    // From here on, messages go to the driver.
    tokio::spawn(async move {
        while let Some((number, what)) = messages.recv().await {
            if forward
                .send(DriverEvent::Root { number, what })
                .await
                .is_err()
            {
                return;
            }
        }
    });
    Ok((link, welcome, models))
}

async fn read_welcome(
    messages: &mut Messages,
    patience: Duration,
) -> Result<(Welcome, Vec<ModelDescription>), StartError> {
    let broken = |what: &str| StartError::Broken(what.into());
    let FromRoot::Welcome(welcome) = next(messages, patience).await? else {
        return Err(broken("expected a welcome first"));
    };
    let mut models = Vec::with_capacity(welcome.models.into());
    for expected in 0..welcome.models {
        let FromRoot::Model {
            index,
            layout_bytes,
            note_bytes,
        } = next(messages, patience).await?
        else {
            return Err(broken("expected a model"));
        };
        // Every later message names a model by this index.
        if index != expected {
            return Err(broken("the models did not come in order"));
        }
        let unusable = |error: MessageError| broken(&error.to_string());
        let mut assembler =
            ModelAssembler::new(index, layout_bytes, note_bytes).map_err(unusable)?;
        let model = loop {
            assembler = match assembler.finish() {
                Ok(model) => break model,
                Err(assembler) => assembler,
            };
            let FromRoot::Part { bytes } = next(messages, patience).await? else {
                return Err(broken("expected a part of a model"));
            };
            assembler.push(&bytes).map_err(unusable)?;
        };
        let layout = Layout::decode(&model.layout).map_err(|error| broken(&error.to_string()))?;
        models.push(ModelDescription {
            layout,
            note: model.note,
        });
    }
    Ok((welcome, models))
}

async fn next(messages: &mut Messages, patience: Duration) -> Result<FromRoot, StartError> {
    let received = tokio::time::timeout(patience, messages.recv()).await;
    let received = received.map_err(|_| {
        let reason = format!("it did not list its models within {patience:?}");
        StartError::Unreachable(Unreached::Unknown, reason)
    })?;
    match received {
        Some((_, Ok(FromRoot::Refused { reason, remedy }))) => Err(match remedy {
            RefusalRemedy::Fenced { seen, got } => StartError::Fenced { seen, got },
            // A successor may come, so the caller may try again.
            RefusalRemedy::Gone => StartError::Unreachable(Unreached::Unknown, reason),
            RefusalRemedy::Other => StartError::Denied(reason),
        }),
        Some((_, Ok(FromRoot::Goodbye))) => Err(StartError::Unreachable(
            Unreached::Unknown,
            "it is shutting down".into(),
        )),
        Some((_, Ok(message))) => Ok(message),
        Some((_, Err(end @ (LinkEnd::Frame(_) | LinkEnd::Message(_))))) => {
            Err(StartError::Broken(end.to_string()))
        }
        Some((_, Err(end))) => Err(StartError::Unreachable(Unreached::Unknown, end.to_string())),
        None => Err(StartError::Unreachable(
            Unreached::Unknown,
            "the link ended".into(),
        )),
    }
}

/// Connects to the first address of a name that answers.
pub(crate) async fn dial(
    name: &str,
    credentials: &Credentials,
) -> Result<(AsyncStream, SocketAddr), StartError> {
    let unreachable = |text| StartError::Unreachable(Unreached::Unknown, text);
    let addresses = tokio::net::lookup_host(name)
        .await
        .map_err(|error| unreachable(format!("{name} is not found: {error}")))?;
    let mut last = unreachable(format!("{name} has no address"));
    for address in addresses {
        let peer = TlsPeer::Trainer(host_of(name));
        let error = match weightsync_link::dial(address, credentials, peer, LinkRole::Control).await
        {
            Ok(socket) => return Ok((socket, address)),
            // All addresses of the name should lead to one sender, so the others are not tried.
            Err(DialError::Hello(error)) if is_final(&error) => {
                return Err(StartError::Refused(error));
            }
            Err(error) => {
                if let DialError::Hello(error @ HelloError::Tls { .. }) = &error {
                    note_untrusted(&address, error);
                }
                error
            }
        };
        let reach = match &error {
            DialError::Failed(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                Unreached::Refused
            }
            DialError::Unanswered => Unreached::Unanswered,
            _ => Unreached::Unknown,
        };
        last = StartError::Unreachable(reach, format!("{address}: {error}"));
    }
    Err(last)
}

/// Logs that certificates keep this end out, which tries again until they are others.
pub(crate) fn note_untrusted(address: &dyn Display, error: &HelloError) {
    log_limiter::warn_rarely(&format!(
        "no encrypted connection to {address}: {error}; this end tries again"
    ));
}

/// Whether waiting cannot turn the peer into the right sender.
fn is_final(error: &HelloError) -> bool {
    error.remedy() != Remedy::Retry
}

/// This machine's name, for people to read.
fn host_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

/// An id that all processes of this host share, and no other host has: from the machine's boot id
/// and its network namespace, to which local names belong.
#[cfg(all(target_os = "linux", not(portable)))]
pub(crate) fn host_id() -> [u8; 16] {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let mut hasher = blake3::Hasher::new_derive_key("weightsync-net 2026-11 host");
    hasher.update(&boot);
    hasher.update(space.as_os_str().as_encoded_bytes());
    let mut id = [0; 16];
    id.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    id
}

/// An id of this process alone: on other systems local names belong to a process.
#[cfg(any(not(target_os = "linux"), portable))]
pub(crate) fn host_id() -> [u8; 16] {
    static BASE: std::sync::OnceLock<[u8; 16]> = std::sync::OnceLock::new();
    // Without random bytes nothing else works: no secret could be made.
    let base = BASE.get_or_init(|| weightsync_engine::transport::random().unwrap_or_default());
    // A forked child has its parent's base.
    (u128::from_le_bytes(*base) ^ u128::from(std::process::id())).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn join_gives_up_on_a_silent_sender() {
        let (_kept, mut messages) = mpsc::channel(1);
        let patience = Duration::from_millis(20);
        let received = tokio::time::timeout(2 * NEXT, read_welcome(&mut messages, patience)).await;
        assert!(matches!(received, Ok(Err(StartError::Unreachable(..)))));
    }

    #[tokio::test]
    async fn agent_listens_off_loopback_only_with_a_token() {
        let access = |token, insecure_plaintext| {
            let mut access = Access::default();
            access.token = token;
            access.insecure_plaintext = insecure_plaintext;
            access
        };
        let token = || Some(weightsync_link::access::Token::new("sixteen bytes or more").unwrap());
        let own = Access::default();
        let loopback = listen([127, 0, 0, 1].into(), &own).await;
        assert!(loopback.unwrap().is_some());
        // An address that no machine has, so that binding to it fails; that is no error.
        let elsewhere = || [192, 0, 2, 1].into();
        for refused in [access(None, true), access(token(), false)] {
            let refused = listen(elsewhere(), &refused).await;
            assert!(matches!(refused, Err(StartError::Access(_))), "{refused:?}");
        }
        let fine = listen(elsewhere(), &access(token(), true)).await;
        assert!(fine.unwrap().is_none());
    }
}
