//! One end of the lifecycle, bound to Python.

use std::collections::BTreeMap;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use weightsync_engine::{
    Error, Members, Receiver, ReceiverSetup, Result, Run, SendOptions, SendSource, SenderSetup,
    Version, WeightExtractor,
};

use crate::background::Background;
use crate::errors::{LifecycleError, exception};
use crate::loader::{TargetArgument, set_of, targets_of};
use crate::options::{
    ExpectedWorkers, Number, Seconds, Send, Setup, WorkerNumber, pull_of, timeout_of,
};
use crate::report::{PendingSend, Report, WorkerStatus, versions_of};
use crate::snapshot::{SetSnapshot, Snapshot};
use crate::source::{Layout, TensorSource};
use crate::wait::{Turns, released};

/// What a worker needs to join: a plain value, that can be pickled, or written
/// as JSON. It carries the secret that lets a worker in.
#[pyclass(frozen, eq, module = "weightsync._native")]
#[derive(Clone, PartialEq)]
pub struct InitInfo(pub weightsync_engine::InitInfo);

#[pymethods]
impl InitInfo {
    /// Reads what `to_json` wrote.
    #[staticmethod]
    fn from_json(py: Python<'_>, text: &Bound<'_, PyString>) -> PyResult<Self> {
        // What is not UTF-8 is no such text either.
        let text = text.to_string_lossy();
        let info = serde_json::from_str(&text).map_err(|error| {
            // The text is a secret, so it is not repeated.
            let words = format!(
                "expected the text that `sender.init_info.to_json()` makes, got {} characters that are \
                 something else ({error})",
                text.chars().count()
            );
            exception(py, Error::BadInitInfo(words))
        })?;
        Ok(Self(info))
    }

    /// The value as text.
    fn to_json(&self) -> PyResult<String> {
        serde_json::to_string(&self.0).map_err(crate::source::wrong_weights)
    }

    /// The models the sender feeds.
    #[getter]
    fn models(&self) -> Vec<&str> {
        self.0.models().iter().map(|model| model.as_str()).collect()
    }

    /// The scheme: its word and settings.
    #[getter]
    fn scheme(&self) -> &str {
        self.0.scheme()
    }

    /// The address of the store that its versions lie in, if they do.
    #[getter]
    fn store(&self) -> Option<&str> {
        weightsync_store::StoreScheme::address_of(&self.0)
    }

    fn __reduce__<'py>(slf: Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        // Pickled as its text: nothing is executed when it is read.
        let read = slf.get_type().getattr("from_json")?;
        Ok((read, (slf.get().to_json()?,)))
    }

    fn __repr__(&self) -> String {
        format!(
            "<InitInfo of {} by {}>",
            self.models().join(", "),
            self.0.scheme()
        )
    }
}

/// One end of the lifecycle: `prepare_sender` and `connect_sender`, or the same
/// for receivers, and then the calls of that end. A call out of order is a
/// `LifecycleError`.
#[pyclass(frozen, module = "weightsync._native")]
pub struct Session {
    inner: Turns<weightsync_engine::Session>,
}

/// One model's weights in a send: its name, unless there is one model only.
type NamedSources = Vec<(Option<String>, Py<TensorSource>)>;

#[pymethods]
impl Session {
    /// An idle session of a scheme, such as `shared-mem`.
    #[new]
    fn new(py: Python<'_>, scheme: &str) -> PyResult<Self> {
        let scheme = scheme.parse();
        let scheme = scheme.map_err(|error| exception(py, error))?;
        Ok(Self::of(weightsync_engine::Session::new(scheme)))
    }

    /// Becomes a sender of these models. Nothing is communicated.
    fn prepare_sender(
        &self,
        py: Python<'_>,
        models: Vec<(String, Py<TensorSource>)>,
        setup: Setup,
    ) -> PyResult<InitInfo> {
        let chosen = setup.chosen()?;
        // Reads the run directory and the weights' layouts, which may take long.
        let prepared = released(py, || {
            let mut models = models.iter().map(|(name, source)| (name, source.get()));
            let (name, source) = models.next().ok_or(Error::EmptySet)?;
            let first = SenderSetup::new(name, source)?;
            let all =
                models.try_fold(first, |setup, (name, source)| setup.add_model(name, source))?;
            chosen.apply(all)
        })?;
        let info = prepared.init_info();
        self.with(py, "prepare_sender", |session| {
            session.prepare_sender(prepared)
        })?;
        Ok(InitInfo(info))
    }

    /// The rendez-vous of a sender: its first weights, the workers it waits for
    /// (a count or numbers), and how long, in seconds. While it waits, `watch` is called,
    /// and what that raises ends it. The first version has the number `version`, or 1.
    #[pyo3(signature = (weights, workers, timeout, watch = None, version = None))]
    fn connect_sender(
        &self,
        py: Python<'_>,
        weights: NamedSources,
        workers: ExpectedWorkers,
        timeout: Option<Seconds>,
        watch: Option<Py<PyAny>>,
        version: Option<Number>,
    ) -> PyResult<()> {
        // `weights` owns references, so the sources live until the send returns.
        let sent = Sent::of(&weights);
        let timeout = timeout_of(timeout);
        let first = version.map(|number| Version(number.0));
        let connect = |session: &mut weightsync_engine::Session, left| {
            session.connect_sender_at(&sent, first, workers.into(), left)
        };
        self.inner
            // `watch` lets a collector notice that a worker has died before it could join.
            .timed(py, "connect", timeout, watch.as_ref(), connect)
    }

    /// Waits, in seconds, until these workers are there and have loaded something.
    #[pyo3(signature = (workers, timeout))]
    fn wait_for(
        &self,
        py: Python<'_>,
        workers: ExpectedWorkers,
        timeout: Option<Seconds>,
    ) -> PyResult<()> {
        let timeout = timeout_of(timeout);
        let expect = workers.into();
        self.timed(py, "wait_for", timeout, |session, left| {
            session.sender()?.wait_for(&expect, left)
        })
    }

    /// Publishes the next version and waits for the workers; the report.
    fn send(&self, py: Python<'_>, weights: NamedSources, options: Send) -> PyResult<Report> {
        let (sent, (options, timeout)) = (Sent::of(&weights), options.options()?);
        self.timed(py, "send", timeout, |session, left| {
            session.send(&sent, &within(options, left))
        })
        .map(Report)
    }

    /// As `send`, but returns once the weights were read.
    fn send_async(
        &self,
        py: Python<'_>,
        weights: NamedSources,
        options: Send,
    ) -> PyResult<PendingSend> {
        // The timeout of the call and that of the send are one: what the wait for the turn has used
        // is gone.
        let (sent, (options, timeout)) = (Sent::of(&weights), options.options()?);
        self.timed(py, "send_async", timeout, |session, left| {
            session.send_async(&sent, &within(options, left))
        })
        .map(PendingSend)
    }

    /// Sends weights of one model, to each worker its own.
    fn send_each(
        &self,
        py: Python<'_>,
        weights: Vec<(WorkerNumber, Py<TensorSource>)>,
        options: Send,
    ) -> PyResult<Report> {
        let (options, timeout) = options.options()?;
        let each: Vec<(u32, &TensorSource)> = weights
            .iter()
            .map(|(worker, source)| (worker.0, source.get()))
            .collect();
        self.timed(py, "send_each", timeout, |session, left| {
            let each = each.iter().map(|(worker, source)| {
                let source: &dyn WeightExtractor = *source;
                (*worker, source)
            });
            session.sender()?.send_each(each, &within(options, left))
        })
        .map(Report)
    }

    /// Every connected worker, as the sender sees it.
    fn workers(&self, py: Python<'_>) -> PyResult<Vec<WorkerStatus>> {
        let workers = self.with(py, "workers", |session| Ok(session.sender()?.workers()))?;
        Ok(workers.into_iter().map(WorkerStatus).collect())
    }

    /// The sender's status as JSON.
    fn status(&self, py: Python<'_>) -> PyResult<String> {
        let status = self.with(py, "status", |session| Ok(session.sender()?.status()))?;
        serde_json::to_string(&status).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// Holds workers at their versions, or releases them.
    fn hold(&self, py: Python<'_>, workers: Vec<WorkerNumber>, hold: bool) -> PyResult<()> {
        self.with(py, "hold", |session| {
            let sender = session.sender()?;
            let workers = workers.into_iter().map(|worker| worker.0);
            match hold {
                true => sender.hold(workers),
                false => sender.release(workers),
            }
        })
    }

    /// The version of each model that was published last.
    fn sent_versions(&self, py: Python<'_>) -> PyResult<BTreeMap<String, u64>> {
        self.with(py, "versions", |session| {
            let sender = session.sender()?;
            let models: Vec<_> = sender.models().cloned().collect();
            let versions = models.into_iter().map(|model| {
                let version = sender.version_of(model.as_str())?;
                Ok((model.to_string(), version.0))
            });
            versions.collect()
        })
    }

    /// The sender's own view of a version: of what was sent to all last, or of an
    /// older one that is still kept.
    #[pyo3(signature = (model, version = None))]
    fn sent(&self, py: Python<'_>, model: &str, version: Option<Number>) -> PyResult<Snapshot> {
        let snapshot = self.with(py, "snapshot", |session| {
            let sender = session.sender()?;
            match version {
                None => sender.snapshot_of(model),
                Some(version) => sender.old_snapshot(model, weightsync_engine::Version(version.0)),
            }
        })?;
        Ok(Snapshot::new(snapshot.into()))
    }

    /// Publishes a snapshot's weights again, as a new version.
    fn send_again(&self, py: Python<'_>, snapshot: &Snapshot, options: Send) -> PyResult<Report> {
        let (options, timeout) = options.options()?;
        let weights = snapshot.held();
        let options = options.model(weights.model().as_str());
        self.timed(py, "send", timeout, |session, left| {
            session.send(weights, &within(options, left))
        })
        .map(Report)
    }

    /// Makes the digest of what was sent to all last, and stores it for workers.
    fn digest(&self, py: Python<'_>, model: &str) -> PyResult<String> {
        let digest = self.with(py, "digest", |session| session.sender()?.digest_of(model))?;
        Ok(digest.to_string())
    }

    /// Becomes a worker of the sender of an init info: some of its models, or
    /// all. Nothing is communicated.
    #[staticmethod]
    #[pyo3(signature = (info, worker, models, device))]
    fn prepare_receiver(
        py: Python<'_>,
        info: &InitInfo,
        worker: WorkerNumber,
        models: Option<Vec<String>>,
        device: &str,
    ) -> PyResult<Self> {
        let setup = ReceiverSetup::new(info.0.clone(), worker.0);
        let mut setup = setup.device(device);
        if let Some(models) = models {
            setup = setup.models(models);
        }
        let session = Self::of(weightsync_engine::Session::of(info.0.clone()));
        session.with(py, "prepare_receiver", |session| {
            session.prepare_receiver(setup)
        })?;
        Ok(session)
    }

    /// The rendez-vous of a worker. With targets (a model's name and an object
    /// with `layout`, `shape` and `load`) the initial weights are loaded.
    #[pyo3(signature = (targets, timeout))]
    fn connect_receiver(
        &self,
        py: Python<'_>,
        targets: Option<Vec<(String, TargetArgument)>>,
        timeout: Option<Seconds>,
    ) -> PyResult<()> {
        let timeout = timeout_of(timeout);
        let targets = targets.map(targets_of);
        self.timed(py, "connect", timeout, |session, left| match targets {
            None => session.connect_receiver(left),
            Some(mut targets) => session.connect_receiver_into(&mut set_of(&mut targets), left),
        })
    }

    /// Joins, and takes the initial weights without saying yet that this worker
    /// runs them: `load_joined` does.
    #[pyo3(signature = (timeout))]
    fn join_receiver(
        &self,
        py: Python<'_>,
        timeout: Option<Seconds>,
    ) -> PyResult<Option<SetSnapshot>> {
        let timeout = timeout_of(timeout);
        let first = self.timed(py, "connect", timeout, |session, left| {
            session.join_receiver(left)
        })?;
        Ok(first.map(SetSnapshot))
    }

    /// Loads the initial weights of a session that has joined.
    fn load_joined(&self, py: Python<'_>, targets: Vec<(String, TargetArgument)>) -> PyResult<()> {
        let mut targets = targets_of(targets);
        self.with(py, "connect", |session| {
            session.load_joined(&mut set_of(&mut targets))
        })
    }

    /// Waits for what this worker has not had yet; None if the timeout comes
    /// first. It counts as loaded.
    #[pyo3(signature = (timeout = None))]
    fn receive(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<Option<SetSnapshot>> {
        let timeout = timeout_of(timeout);
        let set = self.inner.polled(py, "receive", timeout, |session, left| {
            let receiver = receiving(session, "receive")?;
            // A receiver without models would wait for ever, so it only looks.
            match left {
                None if carries(receiver) => receiver.set().recv().map(Some),
                left => receiver.set().recv_timeout(left.unwrap_or_default()),
            }
        })?;
        Ok(set.map(SetSnapshot))
    }

    /// As `receive`, loading into the worker's own models; their versions.
    #[pyo3(signature = (targets, timeout = None))]
    fn receive_into(
        &self,
        py: Python<'_>,
        targets: Vec<(String, TargetArgument)>,
        timeout: Option<Seconds>,
    ) -> PyResult<Option<BTreeMap<String, u64>>> {
        let timeout = timeout_of(timeout);
        let mut targets = targets_of(targets);
        let versions = self.inner.polled(py, "receive", timeout, |session, left| {
            let receiver = receiving(session, "receive")?;
            let mut models = set_of(&mut targets);
            match left {
                None if carries(receiver) => receiver.loading_set(&mut models).recv().map(Some),
                left => {
                    let left = left.unwrap_or_default();
                    receiver.loading_set(&mut models).recv_timeout(left)
                }
            }
        })?;
        Ok(versions.map(|versions| versions_of(&versions)))
    }

    /// The newest set at once, even if this worker has had it.
    fn latest(&self, py: Python<'_>) -> PyResult<Option<SetSnapshot>> {
        let set = self.with(py, "latest", |session| session.receiver()?.set().latest())?;
        Ok(set.map(SetSnapshot))
    }

    /// Asks for a version of a model, and gets the set that has it.
    #[pyo3(signature = (model, version = None, at_least = None, timeout = None))]
    fn pull(
        &self,
        py: Python<'_>,
        model: &str,
        version: Option<Number>,
        at_least: Option<Number>,
        timeout: Option<Seconds>,
    ) -> PyResult<Option<SetSnapshot>> {
        let (pull, timeout) = (
            pull_of(version, at_least)?.model(model),
            timeout_of(timeout),
        );
        let set = self.inner.polled(py, "pull", timeout, |session, left| {
            receiving(session, "pull")?.set().pull(pull.timeout(left))
        })?;
        Ok(set.map(SetSnapshot))
    }

    /// As `pull`, loading into the worker's own models.
    #[pyo3(signature = (targets, model, version = None, at_least = None, timeout = None))]
    fn pull_into(
        &self,
        py: Python<'_>,
        targets: Vec<(String, TargetArgument)>,
        model: &str,
        version: Option<Number>,
        at_least: Option<Number>,
        timeout: Option<Seconds>,
    ) -> PyResult<Option<BTreeMap<String, u64>>> {
        let (pull, timeout) = (
            pull_of(version, at_least)?.model(model),
            timeout_of(timeout),
        );
        let mut targets = targets_of(targets);
        let versions = self.inner.polled(py, "pull", timeout, |session, left| {
            let mut models = set_of(&mut targets);
            receiving(session, "pull")?
                .loading_set(&mut models)
                .pull(pull.timeout(left))
        })?;
        Ok(versions.map(|versions| versions_of(&versions)))
    }

    /// The version of each model that this worker runs; 0 before the first.
    fn versions(&self, py: Python<'_>) -> PyResult<BTreeMap<String, u64>> {
        self.with(py, "versions", |session| {
            Ok(versions_of(session.receiver()?.versions()))
        })
    }

    /// The run of these versions.
    fn run(&self, py: Python<'_>) -> PyResult<(u64, String)> {
        self.with(py, "run", |session| Ok(run_of(session.receiver()?.run())))
    }

    /// Bytes of weights that this worker's process has moved; None if it reads memory.
    fn travelled(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.with(py, "travelled", |session| {
            Ok(session.receiver()?.travelled())
        })
    }

    /// The models that are received, with their tensors.
    fn models(&self, py: Python<'_>) -> PyResult<Vec<(String, Layout)>> {
        self.with(py, "models", |session| {
            let specs = session.receiver()?.models().iter();
            let models = specs.map(|one| (one.id.to_string(), Layout(one.layout.clone())));
            Ok(models.collect())
        })
    }

    /// Moves the receiver and the worker's models to a thread of their own, and closes this session.
    /// Models change whenever no thread has a permit, or, if `declared`, at safe points only.
    fn start_background(
        &self,
        py: Python<'_>,
        targets: Vec<(String, TargetArgument)>,
        declared: bool,
    ) -> PyResult<Background> {
        let targets = targets_of(targets);
        // The session is empty afterwards: the background thread owns the receiver alone.
        let receiver = self.with(
            py,
            "start_background",
            weightsync_engine::Session::take_receiver,
        )?;
        Background::start(py, receiver, targets, declared)
    }

    /// The end's scheme: its word and settings.
    #[getter]
    fn scheme(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, "scheme", |session| Ok(session.scheme().to_owned()))
    }

    /// What a worker needs, once a sender was prepared.
    #[getter]
    fn init_info(&self, py: Python<'_>) -> PyResult<Option<InitInfo>> {
        self.with(py, "init_info", |session| {
            Ok(session.init_info().cloned().map(InitInfo))
        })
    }

    /// Forgets workers that failed, died or were lost.
    fn forget(&self, py: Python<'_>, workers: Vec<WorkerNumber>) -> PyResult<()> {
        let workers: Vec<u32> = workers.into_iter().map(|worker| worker.0).collect();
        self.with(py, "forget", |session| session.sender()?.forget(workers))
    }

    /// Ends the sender or receiver, and any call that waits; any number of times. A receiver that
    /// ends with a reason has failed, and its sender is told the reason.
    #[pyo3(signature = (reason = None))]
    fn shutdown(&self, py: Python<'_>, reason: Option<String>) -> PyResult<()> {
        self.inner.end(py, reason)
    }

    /// What it does, in a few words, without a wait for a call that another thread makes.
    fn summary(&self) -> String {
        let text = self.inner.look(weightsync_engine::Session::summary);
        text.unwrap_or_else(|| "in a call".into())
    }

    fn __repr__(&self) -> String {
        // Without a wait: a debugger or a log may ask for this at any time.
        let text = self.inner.look(|session| {
            let (scheme, state) = (session.scheme(), session.state());
            format!("<Session of {scheme}: {state}>")
        });
        text.unwrap_or_else(|| "<Session: in a call>".into())
    }

    fn __reduce__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, PyTuple>> {
        // An end has descriptors, threads and mappings, which no pickle carries.
        Err(LifecycleError::new_err(format!(
            "{} is a live end and cannot be pickled: pass its init info instead",
            slf.repr()?
        )))
    }
}

/// The reason of a receiver that was dropped without a shutdown, as when an exception unwinds the
/// frames that own it.
pub const DROPPED: &str = "its receiver was dropped without shutdown()";

impl Drop for Session {
    fn drop(&mut self) {
        // Ends it as failed: its sender is told that the worker did not leave in order.
        self.inner.abandon(DROPPED);
    }
}

impl Session {
    pub fn of(session: weightsync_engine::Session) -> Self {
        Self {
            inner: Turns::new(session, |session, why| match why {
                None => session.shutdown(),
                Some(why) => session.fail(why),
            }),
        }
    }

    /// Makes a call, without the interpreter's lock.
    fn with<T: std::marker::Send>(
        &self,
        py: Python<'_>,
        name: &'static str,
        call: impl FnOnce(&mut weightsync_engine::Session) -> Result<T> + std::marker::Send,
    ) -> PyResult<T> {
        self.inner.with(py, name, call)
    }

    /// Makes a call with a timeout.
    fn timed<T: std::marker::Send>(
        &self,
        py: Python<'_>,
        name: &'static str,
        timeout: Option<Duration>,
        call: impl FnOnce(&mut weightsync_engine::Session, Option<Duration>) -> Result<T>
        + std::marker::Send,
    ) -> PyResult<T> {
        self.inner.timed(py, name, timeout, None, call)
    }
}

/// The options of a send whose turn has come, with what the wait for it has left of the timeout.
fn within(options: SendOptions, left: Option<Duration>) -> SendOptions {
    match left {
        // Without a timeout of its own a send has the sender's.
        None => options,
        left => options.timeout(left),
    }
}

/// The source of a send: one model, or several that flip together.
struct Sent<'a> {
    members: Vec<(Option<&'a str>, &'a TensorSource)>,
}

impl<'a> Sent<'a> {
    fn of(given: &'a NamedSources) -> Self {
        let members = given
            .iter()
            .map(|(name, source)| (name.as_deref(), source.get()));
        Self {
            members: members.collect(),
        }
    }
}

impl SendSource for Sent<'_> {
    fn members(&self) -> Members<'_> {
        match &self.members[..] {
            [(None, source)] => Members::One(*source),
            members => {
                let named = members.iter().map(|(name, source)| {
                    let source: &dyn WeightExtractor = *source;
                    (name.unwrap_or_default(), source)
                });
                Members::Set(named.collect())
            }
        }
    }
}

/// The connected receiver, for a call of this name.
fn receiving<'s>(
    session: &'s mut weightsync_engine::Session,
    call: &'static str,
) -> Result<&'s mut Receiver> {
    session.receiver().map_err(|error| match error {
        // The error names the call as Python has it.
        Error::WrongOrder { state, fix, .. } => Error::WrongOrder { call, state, fix },
        error => error,
    })
}

/// Whether the receiver's scheme carries weights. If not, a wait without a timeout would never end.
fn carries(receiver: &Receiver) -> bool {
    !receiver.models().is_empty()
}

/// A run as Python has it: its epoch, and its id in hexadecimal digits.
pub fn run_of(run: Run) -> (u64, String) {
    let id = run.id.iter().map(|byte| format!("{byte:02x}"));
    (run.epoch.0, id.collect())
}
