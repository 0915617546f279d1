//! The agent of a host: it fetches each version once, shares it with the workers of the host,
//! and passes it on to the next host.
//!
//! An agent is a process of its own (`weightsync relay`), or a few threads of a worker whose
//! host has no relay.

mod engine;
mod join;
pub(crate) mod plan;
mod service;

use std::net::SocketAddr;
use std::sync::mpsc::RecvTimeoutError;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use weightsync_core::{Epoch, Run};
use weightsync_mem::{Ending, Listener, Origin};

use self::engine::{Engine, Event};
use self::join::{Joined, join};
pub use self::plan::Item;
pub(crate) use self::service::unreachable;
pub use self::service::{Relay, RelayEvent, RelayStop};
use crate::access::{Access, AccessError, Key};
use crate::wire::hello::HelloError;
use crate::wire::message::ToRoot;

/// How long tasks have to end, of which none waits.
const END: Duration = Duration::from_secs(1);

/// How often it is asked whether a joining is to go on.
const SLICE: Duration = Duration::from_millis(50);

/// How many events may wait for the engine.
const EVENTS: usize = 1024;

/// How an agent joins, and what it is.
#[derive(Clone, Debug)]
pub(crate) struct AgentOptions {
    /// Where the sender listens, as `host:port`.
    pub(crate) root: String,
    pub(crate) secret: [u8; 16],
    /// The highest epoch that was seen.
    pub(crate) seen: Epoch,
    /// Connections of one fetch.
    pub(crate) connections: usize,
    /// Where its workers find it.
    pub(crate) address: AgentAddress,
    /// Whether it passes versions on to other hosts.
    pub(crate) serves: bool,
    /// Which addresses it may use.
    pub(crate) access: Access,
    /// Where one of these names of this host is served, what it would fetch can be read
    /// there, and it does not start.
    pub(crate) nearer: Vec<String>,
}

/// Where the workers of an agent find it.
#[derive(Clone, Debug)]
pub(crate) enum AgentAddress {
    /// All of this host, at the first of its names that is free.
    Host,
    /// Only who knows the name.
    Own(String),
}

/// How long a joining may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// Until the sender is reached.
    pub(crate) dial: Duration,
    /// Until it has said all it says to who comes; as long as that takes without one.
    pub(crate) until: Option<Instant>,
}

impl From<Duration> for Patience {
    fn from(dial: Duration) -> Self {
        Self { dial, until: None }
    }
}

/// Why an agent did not start.
#[derive(Debug)]
pub(crate) enum StartError {
    /// The sender cannot be reached, at least not now.
    Unreachable(Reach, String),
    /// The sender, or what answers there, is not the one to talk to: trying again
    /// does not help.
    Refused(HelloError),
    /// The sender refused this host.
    Denied(String),
    /// A newer sender has been seen.
    Fenced {
        seen: Epoch,
        got: Epoch,
    },
    /// Another agent serves this host by now.
    Taken,
    /// What it would fetch can be read on this host.
    Nearer,
    /// It must not listen where others would reach it.
    Access(AccessError),
    /// The sender sent an invalid message.
    Broken(String),
    /// The system refused something.
    Os {
        action: &'static str,
        source: std::io::Error,
    },
    Memory(weightsync_mem::Error),
}

/// How it is that a sender cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// Nobody listens there.
    Refused,
    /// Somebody listens, and does not answer.
    Unanswered,
    /// It is told nothing more.
    Unknown,
}

/// A running agent. Dropped, it leaves: its workers look for another way.
#[derive(Debug)]
pub(crate) struct Agent {
    events: mpsc::Sender<Event>,
    thread: Option<JoinHandle<Ending>>,
    /// Where its workers find it.
    pub(crate) address: String,
    pub(crate) run: Run,
    /// Where it serves others.
    pub(crate) serves: Option<SocketAddr>,
    owner: Origin,
}

impl Agent {
    /// Connects to the sender, hears what models there are, and starts; that is given
    /// up once it is not to go on.
    pub(crate) fn start(
        options: AgentOptions,
        patience: Patience,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<Self, StartError> {
        let (events, inbox) = mpsc::channel(EVENTS);
        let (started, start) = std::sync::mpsc::sync_channel(1);
        let (give_up, given_up) = oneshot::channel();
        let runtime = runtime("weightsync-link").map_err(|source| StartError::Os {
            action: "starting the relay's threads",
            source,
        })?;
        let own = events.clone();
        let work = move || {
            let ending =
                runtime.block_on(run(options, (patience, given_up), (own, inbox), started));
            // Tasks end with it; nothing of them waits.
            runtime.shutdown_timeout(END);
            ending
        };
        let thread = std::thread::Builder::new()
            .name("weightsync-relay".into())
            .spawn(work)
            .map_err(|source| StartError::Os {
                action: "starting the relay's thread",
                source,
            })?;
        let begun = loop {
            match start.recv_timeout(SLICE) {
                Err(RecvTimeoutError::Timeout) if goes_on() => {}
                Err(RecvTimeoutError::Timeout) => {
                    drop(give_up);
                    // It may have started just now.
                    break start.recv().ok();
                }
                begun => break begun.ok(),
            }
        };
        match begun {
            Some(Ok(Started {
                address,
                run,
                serves,
            })) => Ok(Self {
                events,
                thread: Some(thread),
                address,
                run,
                serves,
                owner: Origin::here(),
            }),
            Some(Err(error)) => {
                let _ = thread.join();
                Err(error)
            }
            None => {
                let _ = thread.join();
                Err(StartError::Broken("its thread ended".into()))
            }
        }
    }

    /// Waits until it ends without a shutdown; returns how.
    pub(crate) fn wait(mut self) -> Ending {
        let thread = self.thread.take();
        thread.map_or(Ending::Moved, |thread| {
            thread.join().unwrap_or(Ending::Moved)
        })
    }

    /// Whether a worker of this process can still attach to it.
    pub(crate) fn is_there(&self) -> bool {
        self.owner.is_here() && weightsync_mem::is_served(&self.address).unwrap_or(false)
    }

    /// What ends it from another thread.
    pub(crate) fn stopper(&self) -> Stopper {
        Stopper {
            events: self.events.clone(),
        }
    }
}

/// Ends an agent from another thread.
#[derive(Clone, Debug)]
pub(crate) struct Stopper {
    events: mpsc::Sender<Event>,
}

impl Stopper {
    pub(crate) fn stop(&self) {
        // One that has ended hears nothing.
        let _ = self.events.blocking_send(Event::Stop);
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // The threads are the parent's and do not exist in a forked child.
            if let Some(thread) = self.thread.take() {
                std::mem::forget(thread);
            }
            return;
        }
        if let Some(thread) = self.thread.take() {
            let _ = self.events.blocking_send(Event::Stop);
            // A panic there has been reported by the panic hook already.
            let _ = thread.join();
        }
    }
}

/// A runtime whose links are served by a thread of their own: what the engine does
/// may take a moment, and silence is told apart from that.
pub(crate) fn runtime(name: &str) -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(2)
        .thread_name(name)
        .enable_all()
        .build()
}

/// What an agent says once it runs.
struct Started {
    address: String,
    run: Run,
    serves: Option<SocketAddr>,
}

type Events = (mpsc::Sender<Event>, mpsc::Receiver<Event>);

async fn run(
    options: AgentOptions,
    (patience, given_up): (Patience, oneshot::Receiver<()>),
    (events, inbox): Events,
    started: std::sync::mpsc::SyncSender<Result<Started, StartError>>,
) -> Ending {
    let key = Key::new(&options.secret);
    let joined = tokio::select! {
        joined = join(&options, &key, &events, patience) => joined,
        _ = given_up => {
            let reason = "it was given up".into();
            Err(StartError::Unreachable(Reach::Unknown, reason))
        }
    };
    let is_served = |name: &String| weightsync_mem::is_served(name).unwrap_or(false);
    let joined = match joined {
        // Before it makes room for all of that.
        Ok(joined) if options.nearer.iter().any(is_served) => {
            joined.link.send(&ToRoot::Goodbye);
            joined.link.finish().await;
            Err(StartError::Nearer)
        }
        joined => joined,
    };
    let made = joined.and_then(|joined| {
        let (listener, address) = listen(&options, &joined)?;
        let run = joined.run;
        let engine = Engine::start(&options, key, joined, listener, events)?;
        let serves = engine.serves();
        let begun = Started {
            address,
            run,
            serves,
        };
        Ok((engine, begun))
    });
    match made {
        Ok((engine, begun)) => {
            let _ = started.send(Ok(begun));
            engine.run(inbox).await
        }
        Err(error) => {
            let _ = started.send(Err(error));
            Ending::Moved
        }
    }
}

/// A name for the workers of this host.
fn listen(options: &AgentOptions, joined: &Joined) -> Result<(Listener, String), StartError> {
    let names = match &options.address {
        AgentAddress::Own(name) => vec![name.clone()],
        AgentAddress::Host => local::names(&options.secret, &joined.address, local::Owner::Host),
    };
    let is_served = |name: &String| weightsync_mem::is_served(name).unwrap_or(false);
    if names.iter().any(is_served) {
        return Err(StartError::Taken);
    }
    match local::first_free(&names) {
        Ok(found) => Ok(found),
        // Another relay may have come just now.
        Err(_) if names.iter().any(is_served) => Err(StartError::Taken),
        Err(error) => Err(StartError::Memory(error)),
    }
}

/// The names at which processes of one host find each other.
pub(crate) mod local {
    use weightsync_mem::{Error, Listener};

    /// How many names there are. One that a forked child of a dead process keeps is
    /// passed over.
    const NAMES: u8 = 8;

    /// Whose they are.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Owner {
        /// The trainer's.
        Sender,
        /// A relay's.
        Host,
    }

    /// The names, in the order in which they are looked at: abstract socket names,
    /// which belong to the network namespace. Only who has the secret can make them;
    /// everybody on the host can read those in use, and none of the others from them.
    pub(crate) fn names(secret: &[u8; 16], address: &str, owner: Owner) -> Vec<String> {
        let mut hasher = blake3::Hasher::new_derive_key("weightsync-net 2026-11 local names");
        hasher.update(secret);
        hasher.update(match owner {
            Owner::Sender => b"sender",
            Owner::Host => b"host\0\0",
        });
        hasher.update(address.as_bytes());
        let names = 0..NAMES;
        names
            .map(|number| {
                let hex = hasher.clone().update(&[number]).finalize().to_hex();
                format!("weightsync/net/{}", &hex[..32])
            })
            .collect()
    }

    /// The first name that nobody keeps, of the system's other users neither.
    pub(crate) fn first_free(names: &[String]) -> Result<(Listener, String), Error> {
        let mut taken = Vec::new();
        for name in names {
            match Listener::at_free(name) {
                Ok(listener) => return Ok((listener, name.clone())),
                // Another lives there, or a forked child of one that died keeps it.
                Err(Error::AddressInUse { address }) => taken.push(address),
                Err(error) => return Err(error),
            }
        }
        Err(Error::AddressInUse {
            address: taken.join(", "),
        })
    }
}

/// When something that failed so often is tried again.
pub(crate) fn backoff(failures: u32) -> Duration {
    Duration::from_millis(20).saturating_mul(1 << failures.min(6))
}

/// The time left, at the least a moment.
pub(crate) fn left(until: Option<Instant>, most: Duration) -> Duration {
    let left = until.map_or(most, |at| at.saturating_duration_since(Instant::now()));
    left.clamp(Duration::from_millis(1), most)
}

#[cfg(test)]
pub(crate) mod tests;
