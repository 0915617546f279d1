//! A relay as a program runs it: it joins, serves, and joins again.

use std::fmt;
use std::io;
use std::mem::{Discriminant, discriminant};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use weightsync_core::{Epoch, Run};
use weightsync_engine::{InitInfo, Result};
use weightsync_link::access::{Access, Token};
use weightsync_link::address::told;
use weightsync_link::hello::HelloError;
use weightsync_link::tls::CertificateRole;
use weightsync_mem::threads::{CondvarExt as _, LockExt as _};
use weightsync_mem::{Backoff, Ending};

use super::{Agent, AgentAddress, AgentOptions, StartError, Stopper};
use crate::error::{NetError, transport};
use crate::status::check_asked;

/// How long one attempt to reach the sender may take.
const ATTEMPT: Duration = Duration::from_secs(3);

/// The pauses between two attempts, at first and at most.
const PAUSE: Duration = Duration::from_millis(40);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A relay: it fetches each version of a sender once for its host, shares it with
/// all workers there, and passes it on to the next host.
///
/// **Guarantee.** It needs nobody's help to come back: it looks for its sender until
/// it is stopped, whether that was not there yet, restarted, or was out of reach. Its
/// workers find it on their own, and look for another route when it goes.
///
/// ```no_run
/// use weightsync_link::access::Token;
/// use weightsync_net::Relay;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let token = Token::from_file("/etc/weightsync/token")?;
/// let relay = Relay::with_token("trainer:7070", &token).insecure_plaintext();
/// relay.run(|news| println!("{news}"))?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Relay {
    address: String,
    secret: [u8; 16],
    token: Option<Token>,
    insecure_plaintext: bool,
    tls: Option<PathBuf>,
    connections: Option<usize>,
    stop: Arc<Stop>,
}

/// Ends [`Relay::run`], from another thread.
#[derive(Clone, Debug)]
pub struct RelayStop(Arc<Stop>);

#[derive(Debug, Default)]
struct Stop {
    state: Mutex<StopState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct StopState {
    stopped: bool,
    agent: Option<Stopper>,
}

/// What a relay reports.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RelayEvent {
    /// The sender was not joined. Each kind of reason is reported once until the relay has joined.
    Looking {
        /// Where the relay looks for the sender.
        address: String,
        /// Why the attempt failed.
        reason: String,
    },
    /// The relay has joined the sender.
    Joined {
        /// The sender's run.
        run: Run,
        /// Where the relay serves the next host.
        serves: Option<SocketAddr>,
    },
    /// The sender has shut down.
    Closed,
    /// The sender has died.
    Died,
}

impl fmt::Display for RelayEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Looking { address, reason } => {
                write!(f, "looking for a sender at {address}: {reason}")
            }
            Self::Joined { run, serves } => {
                write!(f, "joined {run}")?;
                match serves {
                    Some(serves) => write!(f, ", serving the next host at {serves}"),
                    None => Ok(()),
                }
            }
            Self::Closed => f.write_str("the sender has shut down"),
            Self::Died => f.write_str("the sender has died"),
        }
    }
}

impl Relay {
    /// A relay for the sender at `address` (`host:port`), with that sender's token.
    pub fn with_token(address: impl Into<String>, token: &Token) -> Self {
        Self {
            token: Some(token.clone()),
            ..Self::new(address.into(), token.secret())
        }
    }

    /// A relay for the sender of an init info. To serve other machines it also needs a token, which
    /// it reads from the environment.
    pub fn of(info: &InitInfo) -> Self {
        let at = info.endpoint();
        Self::new(at.address().into(), *at.secret())
    }

    fn new(address: String, secret: [u8; 16]) -> Self {
        Self {
            address,
            secret,
            token: None,
            insecure_plaintext: false,
            tls: None,
            connections: None,
            stop: Arc::default(),
        }
    }

    /// Allows unencrypted connections to other machines.
    #[must_use]
    pub fn insecure_plaintext(mut self) -> Self {
        self.insecure_plaintext = true;
        self
    }

    /// Sets where the certificates are, instead of the environment's.
    #[must_use]
    pub fn tls(mut self, path: impl Into<PathBuf>) -> Self {
        self.tls = Some(path.into());
        self
    }

    /// Sets the number of connections of each fetch, 1 to 8, instead of the sender's setting.
    #[must_use]
    pub fn connections(mut self, connections: usize) -> Self {
        self.connections = Some(connections.clamp(1, 8));
        self
    }

    /// A handle that ends [`run`](Self::run).
    pub fn stopper(&self) -> RelayStop {
        RelayStop(self.stop.clone())
    }

    /// Runs until it is stopped; `notify` is called for each event.
    ///
    /// # Errors
    ///
    /// [`NetError`] as an [`Error::Transport`](weightsync_engine::Error::Transport) if trying
    /// again would not help: a wrong token, another program at an address where the relay never
    /// found its sender, another relay on this host, or an address that the settings forbid.
    pub fn run(&self, mut notify: impl FnMut(RelayEvent)) -> Result<()> {
        check_asked(&self.address)?;
        // Other hosts are told where a relay is, which is next to its sender.
        told("the sender's address", &self.address)?;
        let mut seen = Epoch::default();
        let mut backoff = Backoff::new(PAUSE, LONGEST_PAUSE);
        let mut reported = Vec::new();
        let access = self.access()?;
        let goes_on = || !self.stop.state().stopped;
        while goes_on() {
            // For each attempt, because the name may have another address by now.
            self.may_dial(&access)?;
            let options = AgentOptions {
                root: self.address.clone(),
                secret: self.secret,
                seen,
                connections: self.connections,
                address: AgentAddress::Host,
                serves: true,
                access: access.clone(),
                nearer: Vec::new(),
            };
            let (kind, reason) = match Agent::start(options, ATTEMPT.into(), goes_on) {
                Ok(agent) => {
                    backoff.reset();
                    reported.clear();
                    // A sender with a lower epoch was replaced: the relay does not go back to it.
                    seen = agent.run.epoch;
                    let (run, serves) = (agent.run, agent.serves);
                    notify(RelayEvent::Joined { run, serves });
                    match self.serve(agent) {
                        Ending::Closed => notify(RelayEvent::Closed),
                        Ending::Died => notify(RelayEvent::Died),
                        Ending::Moved => {}
                    }
                    // Without a pause: a successor may be there already.
                    continue;
                }
                Err(_) if !goes_on() => break,
                Err(error) => self.passing(error, seen)?,
            };
            if !reported.contains(&kind) {
                reported.push(kind);
                let address = self.address.clone();
                notify(RelayEvent::Looking { address, reason });
            }
            self.stop.wait(backoff.pause());
        }
        Ok(())
    }

    /// The kind and the text of an error that may pass; otherwise the error for the caller.
    fn passing(
        &self,
        error: StartError,
        seen: Epoch,
    ) -> Result<(Discriminant<StartError>, String)> {
        let kind = discriminant(&error);
        let was_in = seen != Epoch::default();
        Ok(match error {
            StartError::Unreachable(_, reason) => (kind, reason),
            StartError::Fenced { seen, got } => {
                let reason = format!("the sender there has {got}, but {seen} was seen before");
                (kind, reason)
            }
            // The relay's workers are other processes.
            StartError::Memory(weightsync_mem::Error::NeedsLinux { .. }) => {
                return Err(error.into_error(self.address.clone()));
            }
            StartError::Denied(_)
            | StartError::Broken(_)
            | StartError::Os { .. }
            | StartError::Memory(_) => (kind, error.into_error(self.address.clone()).to_string()),
            // Another program has the sender's address for now.
            StartError::Refused(_) if was_in => {
                (kind, error.into_error(self.address.clone()).to_string())
            }
            StartError::Refused(_)
            | StartError::Taken
            | StartError::Nearer
            | StartError::Access(_) => {
                // Only a person can change this, so the program ends with the reason.
                return Err(error.into_error(self.address.clone()));
            }
        })
    }

    fn serve(&self, agent: Agent) -> Ending {
        let stopper = agent.stopper();
        // Under the lock: a stop comes before this, and is seen here, or after this, and finds the
        // agent.
        let mut state = self.stop.state();
        if state.stopped {
            drop(state);
            stopper.stop();
        } else {
            state.agent = Some(stopper);
            drop(state);
        }
        let ending = agent.wait();
        // A stop from here on ends the loop, and not this agent.
        self.stop.state().agent = None;
        ending
    }

    /// The access settings; the environment supplies those that were not set. If the sender listens
    /// only on loopback, no other machine fetches from here either, and no token is needed.
    pub(crate) fn access(&self) -> Result<Access> {
        use std::net::ToSocketAddrs;
        let addresses = self.address.to_socket_addrs();
        let mut addresses = addresses.into_iter().flatten().peekable();
        let is_known = addresses.peek().is_some();
        let is_here = is_known && addresses.all(|at| at.ip().to_canonical().is_loopback());
        let token = match &self.token {
            Some(token) => Some(token.clone()),
            None if is_here => None,
            None => Token::from_env().map_err(transport)?,
        };
        let mut access = Access::with_token(token).map_err(transport)?;
        access.insecure_plaintext |= self.insecure_plaintext;
        let tls = access.with_tls(CertificateRole::Relay, self.tls.as_deref());
        tls.map_err(transport)
    }

    fn may_dial(&self, access: &Access) -> Result<()> {
        use std::net::ToSocketAddrs;
        // A name that cannot be resolved is reported by the attempt to connect.
        for address in self.address.to_socket_addrs().into_iter().flatten() {
            access.may_dial_with_secret(address).map_err(transport)?;
        }
        Ok(())
    }
}

impl RelayStop {
    /// Ends the relay: its workers look for another route. May be called more than once.
    pub fn stop(&self) {
        let mut state = self.0.state();
        state.stopped = true;
        let agent = state.agent.take();
        drop(state);
        self.0.changed.notify_all();
        // Without the lock, because this may wait for room among the agent's events.
        if let Some(agent) = agent {
            agent.stop();
        }
    }
}

impl Stop {
    fn wait(&self, pause: Duration) {
        let state = self.state();
        if !state.stopped {
            drop(self.changed.wait_at_most(state, pause));
        }
    }

    fn state(&self) -> MutexGuard<'_, StopState> {
        self.state.locked()
    }
}

/// The error for a sender that does not answer a query of [`crate::status`].
pub(crate) fn unreachable(address: &str, error: &io::Error) -> weightsync_engine::Error {
    let address = address.to_owned();
    let hello = error
        .get_ref()
        .and_then(|of| of.downcast_ref::<HelloError>());
    match hello {
        Some(source) => NetError::Hello {
            address,
            source: source.clone(),
        },
        None if error.kind() == io::ErrorKind::UnexpectedEof => NetError::NoAnswer { address },
        None => NetError::Unreachable {
            address,
            reason: error.to_string(),
        },
    }
    .into()
}
