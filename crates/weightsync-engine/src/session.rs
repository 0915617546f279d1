//! The lifecycle as one value: which call may follow which.

use std::fmt;
use std::time::{Duration, Instant};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};
use weightsync_core::{Version, WorkerId};

use crate::error::{Error, Result};
use crate::extract::WeightExtractor;
use crate::init_info::InitInfo;
use crate::load_set::SetLoader;
use crate::options::SendOptions;
use crate::pending::PendingSend;
use crate::receiver::{Joined, Receiver, ReceiverSetup};
use crate::report::Report;
use crate::scheme::{AnyScheme, MAX_TEXT};
use crate::send_source::SendSource;
use crate::sender::Sender;
use crate::set::SetSnapshot;
use crate::setup::{Expect, SenderSetup};
use crate::transport::deadline;

/// A sender or a receiver, for programs that decide at run time which, and for bindings to other
/// languages. In Rust, [`SenderSetup`] and [`ReceiverSetup`] give the same rules as types, and a
/// wrong order does not compile.
///
/// ```text
///              init_on_sender            connect_sender
///   idle ──┬──────────────────▶ prepared ──────────────▶ sending ──┐
///          │  init_on_receiver           connect_receiver          ├─▶ closed
///          └──────────────────▶ prepared ──────────────▶ receiving ┘
/// ```
///
/// A `connect_sender` that fails because workers are missing leaves the sender open for
/// them, and can be called again.
///
/// A call out of order changes nothing and returns an [`Error::WrongOrder`] that says what to do.
/// [`shutdown`](Self::shutdown) is allowed in every state, any number of times. After it,
/// `init_on_sender` or `init_on_receiver` starts again.
///
/// **A session is serialisable at any time**: its scheme and, once a sender was set up, its init
/// info. What is read back is an idle session that
/// [`init_on_receiver`](Self::init_on_receiver) can make a worker of. The scheme
/// is looked up where it is used, among those that the program there is built with.
///
/// ```
/// use weightsync::{Session, Tensors};
///
/// let mut weights = Tensors::new();
/// weights.insert("bias", [2], [0.5_f32, 1.5])?;
/// let mut trainer = Session::new("shared-mem".parse()?);
/// trainer.init_on_sender("policy", &weights)?;
/// let text = serde_json::to_string(&trainer)?;
///
/// let mut worker: Session = serde_json::from_str(&text)?;
/// worker.init_on_receiver(0)?;
/// let error = worker.receiver().unwrap_err();
/// assert!(error.to_string().contains("connect"), "{error}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Session {
    /// The scheme's word and settings.
    scheme: String,
    /// The scheme itself, where it was given as that.
    chosen: Option<AnyScheme>,
    /// What a worker needs, once a sender was set up, here or where the session
    /// came from.
    info: Option<InitInfo>,
    state: SessionState,
}

/// Where in its lifecycle a session is.
enum SessionState {
    Idle,
    PreparedSender(Box<SenderSetup>),
    /// Workers join, and not all that were expected have.
    Opened(Box<Sender>),
    Sending(Box<Sender>),
    PreparedReceiver(Box<ReceiverSetup>),
    Joined(Box<Joined>),
    Receiving(Box<Receiver>),
    Closed,
}

impl Session {
    /// An idle session of a scheme.
    pub fn new(scheme: AnyScheme) -> Self {
        Self {
            scheme: scheme.to_string(),
            chosen: Some(scheme),
            info: None,
            state: SessionState::Idle,
        }
    }

    /// A session that can become a worker of a sender.
    pub fn of(info: InitInfo) -> Self {
        Self {
            scheme: info.scheme().to_owned(),
            chosen: None,
            info: Some(info),
            state: SessionState::Idle,
        }
    }

    /// The scheme as text: its word and settings.
    pub fn scheme(&self) -> &str {
        &self.scheme
    }

    /// What a worker needs to join, once a sender was set up.
    pub fn init_info(&self) -> Option<&InitInfo> {
        self.info.as_ref()
    }

    /// Becomes a sender of this model, or of one more model. Nothing is communicated. A second call
    /// with the same name replaces the model's source and keeps all other settings.
    ///
    /// # Errors
    ///
    /// [`Error::WrongOrder`] once connected, [`Error::UnknownScheme`] for one
    /// that this program is not built with, and
    /// those of [`SenderSetup::new`] and [`SenderSetup::scheme`].
    pub fn init_on_sender(&mut self, model: &str, source: &dyn WeightExtractor) -> Result<()> {
        let setup = match &self.state {
            // A clone: if this fails, the session stays as it was.
            SessionState::PreparedSender(setup) if !setup.has(model) => {
                (**setup).clone().add_model(model, source)?
            }
            SessionState::PreparedSender(setup) => (**setup).clone().replacing(model, source)?,
            SessionState::Idle | SessionState::Closed => {
                SenderSetup::new(model, source)?.scheme(self.chosen_or_known()?)?
            }
            state => return Err(state.wrong("init_on_sender")),
        };
        self.prepare_sender(setup)
    }

    /// Becomes the sender that a setup describes. Nothing is communicated.
    ///
    /// # Errors
    ///
    /// [`Error::WrongOrder`] once connected.
    pub fn prepare_sender(&mut self, setup: SenderSetup) -> Result<()> {
        match &self.state {
            SessionState::Idle | SessionState::Closed | SessionState::PreparedSender(_) => {}
            state => return Err(state.wrong("init_on_sender")),
        }
        self.scheme = setup.scheme.to_string();
        self.chosen = Some(setup.scheme.clone());
        self.info = Some(setup.init_info());
        self.state = SessionState::PreparedSender(Box::new(setup));
        Ok(())
    }

    /// Becomes worker number `worker` of the sender whose session this was made
    /// from. Nothing is communicated.
    ///
    /// # Errors
    ///
    /// [`Error::WrongOrder`] without a sender to join, or once connected.
    pub fn init_on_receiver(&mut self, worker: impl Into<WorkerId>) -> Result<()> {
        let info = self.info.clone().ok_or(Error::WrongOrder {
            call: "init_on_receiver",
            state: "in a session that knows no sender",
            fix: "call init_on_sender where the trainer runs, and hand its session or init info over",
        })?;
        let setup = ReceiverSetup::new(info, worker);
        self.prepare_receiver(setup)
    }

    /// Becomes the worker that a setup describes. Nothing is communicated.
    ///
    /// # Errors
    ///
    /// [`Error::WrongOrder`] once connected.
    pub fn prepare_receiver(&mut self, setup: ReceiverSetup) -> Result<()> {
        match &self.state {
            SessionState::Idle | SessionState::Closed | SessionState::PreparedReceiver(_) => {}
            state => return Err(state.wrong("init_on_receiver")),
        }
        self.info = Some(setup.info().clone());
        self.state = SessionState::PreparedReceiver(Box::new(setup));
        Ok(())
    }

    /// Connects a sender: see [`SenderSetup::connect`]. After an error it can be called again, also
    /// with other expected workers: the sender and the workers that have joined stay. The first
    /// version is the one published by the first call: weights that have changed since go with the
    /// next send.
    ///
    /// # Errors
    ///
    /// [`Error::WrongOrder`], and those of [`SenderSetup::connect`].
    pub fn connect_sender(
        &mut self,
        weights: &(impl SendSource + ?Sized),
        expect: Expect,
        timeout: Option<Duration>,
    ) -> Result<()> {
        self.connect_sender_at(weights, None, expect, timeout)
    }

    /// As [`connect_sender`](Self::connect_sender), and the first version has this number, for
    /// example the step that a trainer goes on from. Without one it is 1. With a scheme whose
    /// [first weights](crate::transport::FirstWeights) come with the first send the number has no
    /// effect: that send is numbered itself.
    ///
    /// # Errors
    ///
    /// Those of [`connect_sender`](Self::connect_sender).
    pub fn connect_sender_at(
        &mut self,
        weights: &(impl SendSource + ?Sized),
        first: Option<Version>,
        expect: Expect,
        timeout: Option<Duration>,
    ) -> Result<()> {
        let since = Instant::now();
        let until = deadline(timeout);
        match &self.state {
            SessionState::PreparedSender(setup) => {
                // A clone: after an error the session is prepared as before.
                let setup = (**setup).clone();
                let sender = match first {
                    Some(version) => setup.open_at(weights, version, timeout),
                    None => setup.open(weights, timeout),
                }?;
                self.state = SessionState::Opened(Box::new(sender));
            }
            // The first version is published. These weights are only compared, so that a mistake
            // shows now.
            SessionState::Opened(sender) => sender.check(weights.members())?,
            state => return Err(state.wrong("connect_sender")),
        }
        // Taken out, because the wait needs it whole. Every way out puts a state back.
        match std::mem::replace(&mut self.state, SessionState::Closed) {
            SessionState::Opened(mut sender) => {
                let connected = sender.wait_until(&expect, since, until);
                // The sender stays open if workers are missing, so that this can be called again:
                // the workers that have joined are kept.
                self.state = match connected {
                    Ok(()) => SessionState::Sending(sender),
                    Err(_) => SessionState::Opened(sender),
                };
                connected
            }
            _ => unreachable!("it was opened just now"),
        }
    }

    /// Connects a worker: see [`ReceiverSetup::connect`]. After an error the session is prepared as
    /// before, and can connect again.
    ///
    /// # Errors
    ///
    /// [`Error::WrongOrder`], and those of [`ReceiverSetup::connect`].
    pub fn connect_receiver(&mut self, timeout: Option<Duration>) -> Result<()> {
        // A clone of the setup connects, so that a failed call leaves the session prepared.
        let SessionState::PreparedReceiver(setup) = &self.state else {
            return Err(self.state.wrong("connect_receiver"));
        };
        let receiver = (**setup).clone().connect(timeout)?;
        self.state = SessionState::Receiving(Box::new(receiver));
        Ok(())
    }

    /// As [`connect_receiver`](Self::connect_receiver), loading into the
    /// worker's own models.
    ///
    /// # Errors
    ///
    /// [`Error::WrongOrder`], and those of [`ReceiverSetup::connect_set_into`].
    pub fn connect_receiver_into(
        &mut self,
        models: &mut SetLoader<'_>,
        timeout: Option<Duration>,
    ) -> Result<()> {
        let SessionState::PreparedReceiver(setup) = &self.state else {
            return Err(self.state.wrong("connect_receiver"));
        };
        let receiver = (**setup).clone().connect_set_into(models, timeout)?;
        self.state = SessionState::Receiving(Box::new(receiver));
        Ok(())
    }

    /// Joins as a worker, and takes the initial weights without loading them. The sender counts this
    /// worker once [`load_joined`](Self::load_joined) has loaded them. `None` with a scheme without
    /// weights. After an error the session is prepared as before.
    ///
    /// # Errors
    ///
    /// [`Error::WrongOrder`], and those of [`ReceiverSetup::join`].
    pub fn join_receiver(&mut self, timeout: Option<Duration>) -> Result<Option<SetSnapshot>> {
        let SessionState::PreparedReceiver(setup) = &self.state else {
            return Err(self.state.wrong("connect_receiver"));
        };
        let joined = (**setup).clone().join(timeout)?;
        let first = joined.first().cloned();
        self.state = SessionState::Joined(Box::new(joined));
        Ok(first)
    }

    /// Loads the initial weights of a session that has joined. After an error the
    /// session is closed: the sender was told.
    ///
    /// # Errors
    ///
    /// [`Error::WrongOrder`], and those of [`Joined::load`].
    pub fn load_joined(&mut self, models: &mut SetLoader<'_>) -> Result<()> {
        // Taken out: a load consumes it. The session stays closed if the load fails.
        match std::mem::replace(&mut self.state, SessionState::Closed) {
            SessionState::Joined(joined) => {
                self.state = SessionState::Receiving(Box::new(joined.load(models)?));
                Ok(())
            }
            other => {
                self.state = other;
                Err(self.state.wrong("load_joined"))
            }
        }
    }

    /// The receiver alone, for example to pass it to a thread, which loads the initial weights if
    /// the session has only joined. The session is closed then.
    ///
    /// # Errors
    ///
    /// [`Error::WrongOrder`].
    pub fn take_receiver(&mut self) -> Result<Receiver> {
        match std::mem::replace(&mut self.state, SessionState::Closed) {
            SessionState::Receiving(receiver) => Ok(*receiver),
            SessionState::Joined(joined) => Ok(joined.receiver),
            other => {
                self.state = other;
                Err(self.state.wrong("take_receiver"))
            }
        }
    }

    /// The same as [`state`](Self::state); of a sender that sends, what and to how many.
    pub fn summary(&self) -> String {
        let SessionState::Sending(sender) = &self.state else {
            return self.state().into();
        };
        let newest: Vec<_> = sender
            .newest()
            .map(|(_, version)| version.to_string())
            .collect();
        let count = sender.workers().len();
        let s = if count == 1 { "" } else { "s" };
        format!("{}, {count} worker{s}", newest.join(", "))
    }

    /// Where the session is in its lifecycle, in a word or two.
    pub fn state(&self) -> &'static str {
        match self.state {
            SessionState::Idle => "idle",
            SessionState::PreparedSender(_) => "prepared to send",
            SessionState::Opened(_) => "waiting for workers",
            SessionState::Sending(_) => "sending",
            SessionState::PreparedReceiver(_) => "prepared to receive",
            SessionState::Joined(_) => "joined",
            SessionState::Receiving(_) => "receiving",
            SessionState::Closed => "closed",
        }
    }

    /// The connected sender.
    ///
    /// # Errors
    ///
    /// [`Error::WrongOrder`].
    pub fn sender(&mut self) -> Result<&mut Sender> {
        self.sending("send")
    }

    /// The connected receiver.
    ///
    /// # Errors
    ///
    /// [`Error::WrongOrder`].
    pub fn receiver(&mut self) -> Result<&mut Receiver> {
        match &mut self.state {
            SessionState::Receiving(receiver) => Ok(receiver),
            state => Err(state.wrong("receive")),
        }
    }

    /// See [`Sender::send_with`].
    ///
    /// # Errors
    ///
    /// [`Error::WrongOrder`], and those of [`Sender::send_with`].
    pub fn send(
        &mut self,
        weights: &(impl SendSource + ?Sized),
        options: &SendOptions,
    ) -> Result<Report> {
        self.sending("send")?.send_with(weights, options)
    }

    /// See [`Sender::send_async`].
    ///
    /// # Errors
    ///
    /// [`Error::WrongOrder`], and those of [`Sender::send_async`].
    pub fn send_async(
        &mut self,
        weights: &(impl SendSource + ?Sized),
        options: &SendOptions,
    ) -> Result<PendingSend> {
        self.sending("send_async")?.send_async(weights, options)
    }

    /// Shuts down the sender or the receiver, and leaves nothing behind. A second call does
    /// nothing.
    pub fn shutdown(&mut self) {
        // A sender that was never opened still holds its endpoint, such as a port.
        if let SessionState::PreparedSender(setup) =
            std::mem::replace(&mut self.state, SessionState::Closed)
        {
            setup.give_up();
        }
    }

    /// Shuts down a worker that has failed, with the reason: see [`Receiver::fail`].
    pub fn fail(&mut self, reason: &str) {
        match std::mem::replace(&mut self.state, SessionState::Closed) {
            SessionState::Joined(joined) => joined.fail(reason),
            SessionState::Receiving(receiver) => receiver.fail(reason),
            state => {
                self.state = state;
                self.shutdown();
            }
        }
    }

    fn chosen_or_known(&self) -> Result<AnyScheme> {
        match &self.chosen {
            Some(scheme) => Ok(scheme.clone()),
            None => self.scheme.parse(),
        }
    }

    fn sending(&mut self, call: &'static str) -> Result<&mut Sender> {
        match &mut self.state {
            SessionState::Sending(sender) => Ok(sender),
            state => Err(state.wrong(call)),
        }
    }
}

impl SessionState {
    /// The error for a call that this state does not allow.
    fn wrong(&self, call: &'static str) -> Error {
        let of_sender = matches!(
            call,
            "init_on_sender" | "connect_sender" | "send" | "send_async"
        );
        let (state, fix) = match self {
            Self::Idle if of_sender => ("before init_on_sender", "call init_on_sender first"),
            Self::Idle => ("before init_on_receiver", "call init_on_receiver first"),
            Self::Closed => (
                "after shutdown",
                "start again with init_on_sender or init_on_receiver",
            ),
            Self::PreparedSender(_) if of_sender => (
                "before connect",
                "call connect_sender first: it returns when the workers are there",
            ),
            Self::PreparedReceiver(_) if !of_sender => (
                "before connect",
                "call connect_receiver first: it returns with the initial weights",
            ),
            Self::Opened(_) if of_sender => (
                "while workers are missing",
                "call connect_sender again: it goes on waiting for them",
            ),
            Self::Joined(_) if !of_sender => (
                "before its initial weights are loaded",
                "call load_joined first: the sender counts this worker then",
            ),
            Self::Sending(_) if of_sender => (
                "on a connected sender",
                "send, or shut it down to start again",
            ),
            Self::Receiving(_) if !of_sender => (
                "on a connected receiver",
                "receive, or shut it down to start again",
            ),
            Self::PreparedSender(_) | Self::Opened(_) | Self::Sending(_) => {
                ("on a sender", "it is the workers' half that does this")
            }
            Self::PreparedReceiver(_) | Self::Joined(_) | Self::Receiving(_) => {
                ("on a receiver", "it is the trainer's half that does this")
            }
        };
        Error::WrongOrder { call, state, fix }
    }
}

impl fmt::Debug for SessionState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Idle => "Idle",
            Self::PreparedSender(_) => "PreparedSender",
            Self::Opened(_) => "Opened",
            Self::Sending(_) => "Sending",
            Self::PreparedReceiver(_) => "PreparedReceiver",
            Self::Joined(_) => "Joined",
            Self::Receiving(_) => "Receiving",
            Self::Closed => "Closed",
        })
    }
}

/// The serialised form.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireSession {
    scheme: String,
    info: Option<InitInfo>,
}

impl Serialize for Session {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        // A scheme given as a value may have settings that no text has: this refuses it here.
        let scheme = match &self.chosen {
            Some(scheme) => scheme.text().map_err(ser::Error::custom)?,
            None => self.scheme.clone(),
        };
        let wire = WireSession {
            scheme,
            info: self.info.clone(),
        };
        wire.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Session {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let WireSession { scheme, info } = WireSession::deserialize(deserializer)?;
        // The text comes from another process.
        if scheme.is_empty() || scheme.len() > MAX_TEXT {
            let len = scheme.len();
            let words = format!("a scheme of {len} bytes, expected 1 to {MAX_TEXT}");
            return Err(de::Error::custom(words));
        }
        Ok(Self {
            scheme,
            chosen: None,
            info,
            state: SessionState::Idle,
        })
    }
}
