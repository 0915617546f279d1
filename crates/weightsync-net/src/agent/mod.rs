//! The agent of a host: it fetches each version once, shares it with the workers of the host,
//! and passes it on to the next host.
//!
//! An agent is a process of its own (`weightsync relay`), or a few threads of a worker whose
//! host has no relay.

mod driver;
mod join;
pub(crate) mod local;
pub(crate) mod plan;
mod service;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::RecvTimeoutError;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use weightsync_core::{Epoch, Run};
use weightsync_link::Credentials;
use weightsync_link::access::{Access, AccessError, Key};
use weightsync_link::hello::HelloError;
use weightsync_mem::threads;
use weightsync_mem::{Backoff, Deadline, Ending, Listener, Origin, left};

use self::driver::{Driver, DriverEvent};
use self::join::{JoinedAgent, join};
pub use self::plan::Item;
pub(crate) use self::service::unreachable;
pub use self::service::{Relay, RelayEvent, RelayStop};
use crate::wire::message::ToRoot;

/// How long tasks get to end; none of them should wait.
const END: Duration = Duration::from_secs(1);

/// How often a join checks whether it should go on.
const SLICE: Duration = Duration::from_millis(50);

/// How many events may wait for the driver.
const EVENTS: usize = 1024;

/// What an agent is, and how it joins.
#[derive(Clone, Debug)]
pub(crate) struct AgentOptions {
    /// Where the sender listens, as `host:port`.
    pub(crate) root: String,
    pub(crate) secret: [u8; 16],
    /// The highest epoch that was seen.
    pub(crate) seen: Epoch,
    /// Connections of one fetch.
    pub(crate) connections: Option<usize>,
    /// The address at which its workers find it.
    pub(crate) address: AgentAddress,
    /// Whether it passes versions on to other hosts.
    pub(crate) serves: bool,
    /// Which addresses it may use.
    pub(crate) access: Access,
    /// If one of these names is served on this host, the agent does not start: its workers can read
    /// the versions there.
    pub(crate) nearer: Vec<String>,
}

/// The address at which the workers of an agent find it.
#[derive(Clone, Debug)]
pub(crate) enum AgentAddress {
    /// For all workers of this host, at the first free one of the host's names.
    Host,
    /// For workers that know the name.
    Own(String),
}

/// Time limits of a join.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// To reach the sender.
    pub(crate) dial: Duration,
    /// To receive the whole welcome; no limit without it.
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
    /// The sender cannot be reached now.
    Unreachable(Unreached, String),
    /// The sender, or the program that answers in its place, is the wrong peer: trying again does
    /// not help.
    Refused(HelloError),
    /// The sender refused this host.
    Denied(String),
    /// A newer sender has been seen.
    Fenced {
        seen: Epoch,
        got: Epoch,
    },
    /// Another agent already serves this host.
    Taken,
    /// This host's workers can read the versions in another segment on this host.
    Nearer,
    /// The agent must not listen at an address that other machines reach.
    Access(AccessError),
    /// The sender sent an invalid message.
    Broken(String),
    /// The system refused an operation.
    Os {
        action: &'static str,
        source: std::io::Error,
    },
    Memory(weightsync_mem::Error),
}

impl StartError {
    pub(crate) fn os(action: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Os { action, source }
    }
}

/// Why a sender cannot be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreached {
    /// Nothing listens there.
    Refused,
    /// A program listens there, and does not answer.
    Unanswered,
    /// The reason is not known.
    Unknown,
}

/// A running agent. Dropping it makes it leave: its workers look for another route.
#[derive(Debug)]
pub(crate) struct Agent {
    events: mpsc::Sender<DriverEvent>,
    thread: Option<JoinHandle<Ending>>,
    /// The address at which its workers find it.
    pub(crate) address: String,
    pub(crate) run: Run,
    /// The address at which it serves other hosts.
    pub(crate) serves: Option<SocketAddr>,
    travelled: Arc<AtomicU64>,
    owner: Origin,
}

impl Agent {
    /// Connects to the sender, receives its models, and starts. Gives up once `goes_on` says so.
    pub(crate) fn start(
        options: AgentOptions,
        patience: Patience,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<Self, StartError> {
        let (events, inbox) = mpsc::channel(EVENTS);
        // With room for the one message, so that the new thread never waits for its caller.
        let (started, start) = std::sync::mpsc::sync_channel(1);
        let (give_up, given_up) = oneshot::channel();
        let runtime =
            runtime("weightsync-link").map_err(StartError::os("starting the relay's threads"))?;
        let own = events.clone();
        let work = move || {
            let ending =
                runtime.block_on(run(options, (patience, given_up), (own, inbox), started));
            // Ends the tasks; none of them waits.
            runtime.shutdown_timeout(END);
            ending
        };
        let thread =
            threads::spawn("relay", work).map_err(StartError::os("starting the relay's thread"))?;
        let begun = loop {
            match start.recv_timeout(SLICE) {
                Err(RecvTimeoutError::Timeout) if goes_on() => {}
                Err(RecvTimeoutError::Timeout) => {
                    // The join in that thread sees the dropped end, and gives up.
                    drop(give_up);
                    // The agent may have started just now.
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
                travelled,
            })) => Ok(Self {
                events,
                thread: Some(thread),
                address,
                run,
                serves,
                travelled,
                owner: Origin::here(),
            }),
            Some(Err(error)) => {
                // The thread has reported its error, so it is about to end.
                let _ = thread.join();
                Err(error)
            }
            None => {
                let _ = thread.join();
                Err(StartError::Broken("its thread ended".into()))
            }
        }
    }

    /// Waits until the agent ends other than by [`stop`](Stopper::stop); returns how.
    pub(crate) fn wait(mut self) -> Ending {
        let thread = self.thread.take();
        thread.map_or(Ending::Moved, |thread| {
            thread.join().unwrap_or(Ending::Moved)
        })
    }

    /// How many bytes of versions it has fetched.
    pub(crate) fn travelled(&self) -> u64 {
        self.travelled.load(Ordering::Relaxed)
    }

    /// Whether a worker of this process can still attach to the agent.
    pub(crate) fn is_there(&self) -> bool {
        self.owner.is_here() && weightsync_mem::is_served(&self.address).unwrap_or(false)
    }

    /// Ends the agent from another thread.
    pub(crate) fn stopper(&self) -> Stopper {
        Stopper {
            events: self.events.clone(),
        }
    }
}

/// Ends an agent from another thread.
#[derive(Clone, Debug)]
pub(crate) struct Stopper {
    events: mpsc::Sender<DriverEvent>,
}

impl Stopper {
    pub(crate) fn stop(&self) {
        tell_to_end(&self.events, DriverEvent::Stop);
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // In a forked child the threads do not exist: they belong to the parent.
            if let Some(thread) = self.thread.take() {
                std::mem::forget(thread);
            }
            return;
        }
        if let Some(thread) = self.thread.take() {
            tell_to_end(&self.events, DriverEvent::Stop);
            // The panic hook has already reported a panic there.
            let _ = thread.join();
        }
    }
}

/// Tells a task to end, from any thread. Waits for its turn where the task's queue is full.
pub(crate) fn tell_to_end<T: Send>(events: &mpsc::Sender<T>, stop: T) {
    // A task that has ended receives nothing.
    let tell = |stop| drop(events.blocking_send(stop));
    if Handle::try_current().is_err() {
        return tell(stop);
    }
    // Without a thread: attempts have no place in the queue, but the task reads it until it ends.
    let mut stop = threads::run_apart("end", stop, tell);
    while let Some(one) = stop.take() {
        if let Err(TrySendError::Full(back)) = events.try_send(one) {
            stop = Some(back);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A runtime with a thread of its own for links: a driver that is busy for a moment must not look
/// like a silent host.
pub(crate) fn runtime(name: &str) -> std::io::Result<tokio::runtime::Runtime> {
    // The blocking threads compute handshakes of TLS, look up names, and join other threads when an
    // agent ends.
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(2)
        .thread_name(name)
        .enable_all()
        .build()
}

/// What an agent reports once it runs.
struct Started {
    address: String,
    run: Run,
    serves: Option<SocketAddr>,
    travelled: Arc<AtomicU64>,
}

type Events = (mpsc::Sender<DriverEvent>, mpsc::Receiver<DriverEvent>);

async fn run(
    options: AgentOptions,
    (patience, given_up): (Patience, oneshot::Receiver<()>),
    (events, inbox): Events,
    started: std::sync::mpsc::SyncSender<Result<Started, StartError>>,
) -> Ending {
    let credentials = Credentials {
        key: Key::new(&options.secret),
        tls: options.access.tls.clone(),
    };
    let joined = tokio::select! {
        joined = join(&options, &credentials, &events, patience) => joined,
        _ = given_up => {
            let reason = "it was given up".into();
            Err(StartError::Unreachable(Unreached::Unknown, reason))
        }
    };
    let is_served = |name: &String| weightsync_mem::is_served(name).unwrap_or(false);
    let joined = match joined {
        // Checked before it makes room for the models, which may be gigabytes.
        Ok(joined) if options.nearer.iter().any(is_served) => {
            // The sender then knows that no worker comes by this agent.
            joined.link.send(&ToRoot::Goodbye);
            joined.link.finish().await;
            Err(StartError::Nearer)
        }
        joined => joined,
    };
    let made = joined.and_then(|joined| {
        // The name first: a second relay of the host finds it taken before it makes room for the
        // models.
        let (listener, address) = listen(&options, &joined)?;
        let run = joined.welcome.run;
        let driver = Driver::start(&options, credentials, joined, listener, events)?;
        let (serves, travelled) = (driver.serves(), driver.travelled());
        let begun = Started {
            address,
            run,
            serves,
            travelled,
        };
        Ok((driver, begun))
    });
    match made {
        Ok((driver, begun)) => {
            // The caller waits for this, also after it has given up.
            let _ = started.send(Ok(begun));
            driver.run(inbox).await
        }
        Err(error) => {
            let _ = started.send(Err(error));
            Ending::Moved
        }
    }
}

/// Takes a name for the workers of this host.
fn listen(options: &AgentOptions, joined: &JoinedAgent) -> Result<(Listener, String), StartError> {
    let (names, listen): (_, local::Listen) = match &options.address {
        AgentAddress::Own(name) => (vec![name.clone()], Listener::at_least_here),
        AgentAddress::Host => {
            let names = local::names(
                &options.secret,
                &joined.welcome.address,
                local::NameOwner::Host,
            );
            (names, Listener::at_free)
        }
    };
    let is_served = |name: &String| weightsync_mem::is_served(name).unwrap_or(false);
    // Looked at before a name is taken. A name that only a forked child of a dead relay keeps does
    // not count: then the next name is free.
    if names.iter().any(is_served) {
        return Err(StartError::Taken);
    }
    match local::first_free(&names, listen) {
        Ok(found) => Ok(found),
        // Another relay may have started just now.
        Err(_) if names.iter().any(is_served) => Err(StartError::Taken),
        Err(error) => Err(StartError::Memory(error)),
    }
}

/// The pauses between attempts to reach another host, at first and at most.
pub(crate) const PAUSES: (Duration, Duration) =
    (Duration::from_millis(20), Duration::from_millis(1280));

/// The pauses between attempts to reach another host.
pub(crate) fn backoff() -> Backoff {
    Backoff::new(PAUSES.0, PAUSES.1)
}

/// The time left, but at least a moment: sockets take no timeout of zero.
pub(crate) fn left_of(until: Deadline, most: Duration) -> Duration {
    left(until)
        .unwrap_or(most)
        .clamp(Duration::from_millis(1), most)
}

#[cfg(test)]
pub(crate) mod tests;
