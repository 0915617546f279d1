//! A worker's end: it attaches to whatever there is on its host, or becomes the
//! host's agent itself; and when that goes, it looks again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use weightsync::transport::{
    Attached, Deadline, Endpoint, Handoff, Interrupter, Joining, ModelSpec, Pull,
    ReceiverTransport, interrupt,
};
use weightsync::{Error, MemoryError, Result, Run, SetSnapshot};
use weightsync_mem::{AttachOptions, Reader};

use crate::error::NetError;
use crate::relay::local::{self, Whose};
use crate::relay::{Agent, AgentOptions, Place, StartError, left};
use crate::scheme::{Distributed, Share};

/// How long one attempt to reach the sender may take.
const ATTEMPT: Duration = Duration::from_secs(3);

/// How long what lives at a name of this host has to answer before a worker looks
/// elsewhere.
const ANSWER: Duration = Duration::from_millis(1000);

/// A worker's end.
#[derive(Debug)]
pub(crate) struct NetReceiver {
    way: Way,
    inner: Option<Attached>,
    /// What it was handed, when it is between two segments.
    handoff: Handoff,
    models: Vec<ModelSpec>,
    run: Run,
    /// The agent that this worker is for its host.
    agent: Option<Agent>,
    call: Arc<Call>,
}

/// How a worker finds its sender.
#[derive(Debug)]
struct Way {
    scheme: Distributed,
    at: Endpoint,
    joining: Joining,
    instance: u64,
}

/// Ends waits from another thread, whichever segment they are in.
#[derive(Debug, Default)]
struct Call {
    due: AtomicBool,
    inner: Mutex<Option<Interrupter>>,
}

impl NetReceiver {
    pub(crate) fn join(
        scheme: &Distributed,
        at: &Endpoint,
        joining: &Joining,
        deadline: Deadline,
    ) -> Result<Self> {
        let way = Way {
            scheme: scheme.clone(),
            at: at.clone(),
            joining: joining.clone(),
            instance: random()?,
        };
        let call = Arc::new(Call::default());
        let found = way.find(&Handoff::default(), deadline, &|| false)?;
        let Some((inner, agent)) = found else {
            return Err(Error::Interrupted);
        };
        call.follow(&inner);
        Ok(Self {
            way,
            handoff: Handoff::default(),
            models: weightsync::transport::ReceiverTransport::models(&inner).to_vec(),
            run: weightsync::transport::ReceiverTransport::run(&inner),
            inner: Some(inner),
            agent,
            call,
        })
    }

    /// Calls the segment there is; if that was a relay's and the relay is gone,
    /// another, until the deadline. `None` if that or an interrupt comes first.
    fn with<T>(
        &mut self,
        deadline: Deadline,
        mut call: impl FnMut(&mut Attached) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        loop {
            let Some(inner) = &mut self.inner else {
                if !self.find_again(deadline)? {
                    return Ok(None);
                }
                continue;
            };
            match call(inner) {
                Err(Error::Memory(MemoryError::RelayGone)) => self.let_go(),
                other => return other,
            }
        }
    }

    fn let_go(&mut self) {
        if let Some(inner) = self.inner.take() {
            self.handoff = inner.handoff();
        }
        // It has ended, or serves nobody any more.
        self.agent = None;
    }

    /// Looks for another way to the sender. False if there was none in time.
    fn find_again(&mut self, deadline: Deadline) -> Result<bool> {
        let call = self.call.clone();
        let found = self
            .way
            .find(&self.handoff, deadline, &|| call.due.load(Ordering::SeqCst));
        let (mut inner, agent) = match found {
            Ok(Some(found)) => found,
            Ok(None) => {
                self.call.due.store(false, Ordering::SeqCst);
                return Ok(false);
            }
            // Nobody was there in time: that may be for a moment.
            Err(Error::NoSender { .. }) => return Ok(false),
            Err(Error::Memory(MemoryError::Fenced { .. })) => {
                return Err(Error::SenderDied { pid: None });
            }
            Err(error) => return Err(error),
        };
        if weightsync::transport::ReceiverTransport::run(&inner) != self.run {
            // Its sender's successor: the one above joins that anew.
            return Err(Error::SenderDied { pid: None });
        }
        inner.take_over(std::mem::take(&mut self.handoff))?;
        self.call.follow(&inner);
        self.inner = Some(inner);
        self.agent = agent;
        Ok(true)
    }
}

impl Way {
    /// Attaches to the trainer's segment if it is on this host, to that of the
    /// host's relay if there is one, or else becomes that. `None` if `over` says so.
    fn find(
        &self,
        handoff: &Handoff,
        deadline: Deadline,
        over: &dyn Fn() -> bool,
    ) -> Result<Option<(Attached, Option<Agent>)>> {
        let since = Instant::now();
        let mut failures = 0;
        loop {
            let mut silent = false;
            for name in self.names() {
                if !weightsync_mem::is_served(&name).unwrap_or(false) {
                    continue;
                }
                let patience = left(deadline, ANSWER);
                match self.attach(&name, handoff, Instant::now() + patience) {
                    Ok(attached) => return Ok(Some((attached, None))),
                    Err(Error::NoSender { .. }) => silent = true,
                    Err(error) => return Err(error),
                }
            }
            if let Some(agent) = self.become_agent(silent, deadline)? {
                let patience = deadline.map(|at| at.max(Instant::now() + ANSWER));
                let until = patience.unwrap_or(Instant::now() + ATTEMPT);
                match self.attach(&agent.address.clone(), handoff, until) {
                    Ok(attached) => return Ok(Some((attached, Some(agent)))),
                    // The sender went in between.
                    Err(Error::NoSender { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            if over() {
                return Ok(None);
            }
            if deadline.is_some_and(|at| Instant::now() >= at) {
                return Err(Error::NoSender {
                    address: self.at.address().into(),
                    waited: since.elapsed(),
                });
            }
            let pause = Duration::from_millis(5 << failures.min(4));
            failures += 1;
            interrupt::sleep(pause.min(left(deadline, pause)))?;
        }
    }

    /// The names at which this worker looks for others, in order.
    fn names(&self) -> Vec<String> {
        let names = |whose| local::names(self.at.secret(), self.at.address(), whose);
        match self.scheme.share {
            Share::All => {
                let mut all = names(Whose::Sender);
                all.extend(names(Whose::Host));
                all
            }
            Share::Workers => names(Whose::Host),
            Share::Nothing => Vec::new(),
        }
    }

    fn attach(&self, name: &str, handoff: &Handoff, until: Instant) -> Result<Attached> {
        let options = AttachOptions {
            address: name.into(),
            secret: *self.at.secret(),
            worker: self.joining.worker,
            seen: self.joining.seen,
            models: Some(self.joining.wanted.clone()),
            delivery: self.scheme.delivery(),
            device: self.joining.device.clone(),
            wait: self.joining.wait,
            instance: self.instance,
            resume: handoff.resume(),
        };
        let reader = Reader::attach(&options, Some(until))?;
        Attached::new(reader, &self.joining, self.scheme.own_copy)
    }

    /// Reaches the sender; `None` if it cannot be reached now, or another process
    /// of this host was quicker.
    fn become_agent(&self, beside: bool, deadline: Deadline) -> Result<Option<Agent>> {
        let place = match self.scheme.share {
            Share::Nothing => Place::Own(format!("weightsync/net/own/{:032x}", {
                let halves: [u64; 2] = [random()?, random()?];
                u128::from(halves[0]) << 64 | u128::from(halves[1])
            })),
            Share::All | Share::Workers => Place::Host { beside },
        };
        let address = || self.at.address().to_owned();
        let options = AgentOptions {
            root: address(),
            secret: *self.at.secret(),
            seen: self.joining.seen,
            connections: self.scheme.connections,
            place,
            slots: None,
        };
        self.may_dial()?;
        match Agent::start(options, left(deadline, ATTEMPT)) {
            Ok(agent) => Ok(Some(agent)),
            Err(StartError::Unreachable(..) | StartError::Taken) => Ok(None),
            Err(StartError::Fenced { seen, got }) => Err(MemoryError::Fenced { seen, got }.into()),
            Err(StartError::Memory(error)) => Err(error.into()),
            Err(StartError::Os { action, source }) => Err(Error::Os { action, source }),
            Err(StartError::Refused(source)) => Err(NetError::Hello {
                address: address(),
                source,
            }
            .into()),
            Err(StartError::Denied(reason)) => Err(NetError::Denied {
                address: address(),
                reason,
            }
            .into()),
            Err(StartError::Broken(reason)) => Err(NetError::Broken {
                address: address(),
                reason,
            }
            .into()),
        }
    }

    /// Whether a link to the sender is one that is wanted as it is.
    fn may_dial(&self) -> Result<()> {
        use std::net::ToSocketAddrs;
        let access = self.scheme.access()?;
        // A name that is not found is for the attempt to say.
        let addresses = self.at.address().to_socket_addrs();
        for address in addresses.into_iter().flatten() {
            access
                .may_dial_with_secret(address)
                .map_err(crate::error::transport)?;
        }
        Ok(())
    }
}

impl ReceiverTransport for NetReceiver {
    fn models(&self) -> &[ModelSpec] {
        &self.models
    }

    fn run(&self) -> Run {
        self.run
    }

    fn next(&mut self, deadline: Deadline) -> Result<Option<SetSnapshot>> {
        let next = self.with(deadline, |inner| inner.next(deadline));
        self.call.due.store(false, Ordering::SeqCst);
        next
    }

    fn latest(&mut self) -> Result<Option<SetSnapshot>> {
        self.with(Some(Instant::now()), |inner| inner.latest())
    }

    fn pull(
        &mut self,
        model: usize,
        pull: Pull,
        deadline: Deadline,
    ) -> Result<Option<SetSnapshot>> {
        self.with(deadline, |inner| inner.pull(model, pull, deadline))
    }

    fn interrupter(&self) -> Result<Interrupter> {
        let call = Arc::downgrade(&self.call);
        Ok(Interrupter::new(move || {
            if let Some(call) = call.upgrade() {
                call.due.store(true, Ordering::SeqCst);
                if let Some(inner) = &*call.inner() {
                    inner.interrupt();
                }
            }
        }))
    }

    fn applied(&mut self, set: &SetSnapshot) -> Result<()> {
        self.told(|inner| inner.applied(set))
    }

    fn refuse(&mut self, set: Option<&SetSnapshot>, reason: &str) -> Result<()> {
        self.told(|inner| inner.refuse(set, reason))
    }
}

impl NetReceiver {
    /// Tells the sender something; one that is gone needs no telling.
    fn told(&mut self, tell: impl FnOnce(&mut Attached) -> Result<()>) -> Result<()> {
        match &mut self.inner {
            Some(inner) => tell(inner),
            None => Ok(()),
        }
    }
}

impl Drop for NetReceiver {
    fn drop(&mut self) {
        // The worker leaves its segment before its agent leaves the sender.
        self.inner = None;
        self.agent = None;
    }
}

impl Call {
    fn follow(&self, inner: &Attached) {
        *self.inner() = inner.interrupter().ok();
    }

    fn inner(&self) -> MutexGuard<'_, Option<Interrupter>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn random() -> Result<u64> {
    let nonce = crate::link::nonce().map_err(|source| Error::Os {
        action: "getting random bytes",
        source,
    })?;
    let (first, _) = nonce.split_first_chunk().unwrap_or((&[0; 8], &[]));
    Ok(u64::from_le_bytes(*first))
}
