//! Synchronizers and their parties, bound to Python.

use std::num::NonZero;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use weightsync_engine::transport::Deadline;
use weightsync_engine::{Error, Remedy, Version};
use weightsync_serve::synchronizer::{
    Ended, Explorer, Fetch, Method, Need, NeedAnswer, PartyOptions, State, Style, StyleWords,
    SyncAnswer, SynchronizerOptions, Trainer, TrainerAnswer, method, method_word,
};

use crate::errors::Raised;
use crate::options::{Number, Seconds, StepCount, timeout_of};
use crate::raw::attached;
use crate::session::InitInfo;
use crate::wait::{Turns, released};

/// A style's word, interval, offset and lag.
type Words = (Option<String>, Option<u64>, Option<u64>, Option<u64>);

/// Whether a sync is needed, by whom it was asked for, the newest version, and whether the trainer has
/// stopped and the synchronizer has answered.
type NeedParts = (&'static str, Vec<String>, u64, bool, bool);

/// How a sync ended, the version, its step, versions and steps behind, why it failed, and seconds.
type SyncParts = (
    &'static str,
    u64,
    Option<u64>,
    u64,
    u64,
    Option<String>,
    f64,
);

/// An explorer: name, state, step, version, how its last sync ended, and why that failed.
type LineParts = (
    String,
    &'static str,
    u64,
    u64,
    Option<&'static str>,
    Option<String>,
);

/// How a trainer's sync ended, the version, its step, the explorers, why it failed, and seconds.
type TrainedParts = (&'static str, u64, u64, Vec<LineParts>, Option<String>, f64);

/// Decides when a trainer and its explorers synchronise.
#[pyclass(frozen, module = "weightsync._native")]
pub struct Synchronizer {
    inner: Turns<Option<weightsync_serve::synchronizer::Synchronizer>>,
}

#[pymethods]
impl Synchronizer {
    /// One of this program, which listens at an address if there is one.
    #[staticmethod]
    fn start(
        py: Python<'_>,
        method: Option<&str>,
        style: Words,
        history: u8,
        lasting: (Option<String>, Option<String>, Option<PathBuf>),
        listen: Option<&str>,
    ) -> PyResult<Self> {
        let (store, keep, run_dir) = lasting;
        released(py, || {
            let mut options = SynchronizerOptions::new()
                .method(method_of(method)?)
                .history(history)
                .store(store)
                .run_dir(run_dir);
            if let Some(keep) = keep {
                options = options.keep(keep.parse().map_err(Error::from)?);
            }
            if let Some(style) = style_of(&style)? {
                options = options.style(style);
            }
            let made = match listen {
                None => weightsync_serve::synchronizer::Synchronizer::local(options),
                Some(at) => weightsync_serve::synchronizer::Synchronizer::serve(options, at),
            };
            made.map(Self::of)
        })
    }

    /// One of another process.
    #[staticmethod]
    fn connect(py: Python<'_>, address: &str) -> PyResult<Self> {
        let connect = || weightsync_serve::synchronizer::Synchronizer::connect(address, None);
        released(py, || connect().map(Self::of))
    }

    /// Its address, if it has one.
    #[getter]
    fn address(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.inner.with(py, "address", |sync| {
            let address = sync.as_ref().and_then(|sync| sync.address());
            Ok(address.map(|address| address.to_string()))
        })
    }

    /// This machine's address towards it, if it is not of this machine alone.
    fn route(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let route = self.timed(py, "route", NO_WAIT, |sync, _| sync.route())?;
        Ok(route.map(|ip| std::net::SocketAddr::new(ip, 0).to_string()))
    }

    /// Joins as the trainer.
    fn trainer(
        &self,
        py: Python<'_>,
        party: (String, Words, Option<String>, StepCount),
        from: &InitInfo,
        timeout: Option<Seconds>,
        watch: Option<Py<PyAny>>,
    ) -> PyResult<SyncTrainer> {
        let (timeout, from) = (timeout_of(timeout), from.0.clone());
        let trainer = self.timed(py, "trainer", (timeout, watch), move |sync, left| {
            sync.trainer(options_of(party)?, from, left)
        })?;
        Ok(SyncTrainer {
            inner: Turns::new(Some(trainer), |trainer, why| {
                // Without a word if it is garbage: nothing may wait then.
                if let Some(trainer) = trainer.take().filter(|_| why != Some(DROPPED)) {
                    trainer.leave(why.map(str::to_owned));
                }
            }),
        })
    }

    /// Joins as an explorer.
    fn explorer(
        &self,
        py: Python<'_>,
        party: (String, Words, Option<String>, StepCount),
        eval_interval: Option<NonZero<u64>>,
        timeout: Option<Seconds>,
        watch: Option<Py<PyAny>>,
    ) -> PyResult<SyncExplorer> {
        let timeout = timeout_of(timeout);
        let explorer = self.timed(py, "explorer", (timeout, watch), move |sync, left| {
            let options = options_of(party)?.eval_interval(eval_interval);
            sync.explorer(options, left)
        })?;
        Ok(SyncExplorer {
            inner: Turns::new(Some(explorer), |explorer, why| {
                if let Some(explorer) = explorer.take().filter(|_| why != Some(DROPPED)) {
                    explorer.leave(why.map(str::to_owned));
                }
            }),
        })
    }

    /// Ends it; the parties of one of this program are told.
    fn shutdown(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.end(py, None)
    }
}

impl Synchronizer {
    fn of(sync: weightsync_serve::synchronizer::Synchronizer) -> Self {
        Self {
            inner: Turns::new(Some(sync), |sync, _| drop(sync.take())),
        }
    }

    fn timed<T: Send>(
        &self,
        py: Python<'_>,
        name: &'static str,
        (timeout, watch): Wait,
        call: impl FnOnce(
            &weightsync_serve::synchronizer::Synchronizer,
            Option<Duration>,
        ) -> Result<T, Error>
        + Send,
    ) -> PyResult<T> {
        // After a shutdown there is nothing to call: the wait counts as ended.
        let call = |sync: &mut Option<_>, left| match sync {
            Some(sync) => call(sync, left),
            None => Err(Error::Interrupted),
        };
        self.inner.timed(py, name, timeout, watch.as_ref(), call)
    }
}

/// A call's timeout, and what is called while it waits.
type Wait = (Option<Duration>, Option<Py<PyAny>>);

/// That of a call without a timeout.
const NO_WAIT: Wait = (None, None);

/// The trainer's membership.
#[pyclass(frozen, module = "weightsync._native")]
pub struct SyncTrainer {
    inner: Turns<Option<Trainer>>,
}

#[pymethods]
impl SyncTrainer {
    fn need(&self, py: Python<'_>, step: Option<StepCount>) -> PyResult<NeedParts> {
        self.with(py, "need_sync", NO_WAIT, |trainer, _| {
            trainer.need_sync(steps_of(step)).map(need_parts)
        })
    }

    fn wait_need(
        &self,
        py: Python<'_>,
        step: Option<StepCount>,
        timeout: Option<Seconds>,
        watch: Option<Py<PyAny>>,
    ) -> PyResult<NeedParts> {
        let timeout = timeout_of(timeout);
        self.with(py, "wait_need_sync", (timeout, watch), |trainer, left| {
            trainer.wait_need_sync(steps_of(step), left).map(need_parts)
        })
    }

    /// Publishes the first version with `publish(version)`.
    fn first(
        &self,
        py: Python<'_>,
        timeout: Option<Seconds>,
        publish: Py<PyAny>,
        watch: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        // What the callback raises is kept here, because it passes through the library as another
        // error.
        let (mut raised, timeout) = (None, timeout_of(timeout));
        let done = self.with(py, "first", (timeout, watch), |trainer, left| {
            trainer.first(left, |version| {
                // The callback takes the lock for its own time. The waits around it run without.
                called(&mut raised, |py| publish.call1(py, (version.0,)).map(drop))
            })
        });
        of_callback(done, raised)
    }

    /// Publishes the next version with `publish(version, seconds)`.
    fn sync(
        &self,
        py: Python<'_>,
        step: StepCount,
        timeout: Option<Seconds>,
        publish: Py<PyAny>,
        watch: Option<Py<PyAny>>,
    ) -> PyResult<TrainedParts> {
        let (mut raised, timeout) = (None, timeout_of(timeout));
        let done = self.with(py, "sync", (timeout, watch), |trainer, rest| {
            let published = trainer.sync(step.0, rest, |version, until| {
                called(&mut raised, |py| {
                    // The callback gets what is left of the timeout.
                    publish.call1(py, (version.0, left(until))).map(drop)
                })
            });
            published.map(trained_parts)
        });
        of_callback(done, raised)
    }

    /// How versions travel.
    fn method(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.with(py, "method", NO_WAIT, |trainer, _| {
            Ok(method_word(trainer.method()))
        })
    }

    /// The trainer's epoch.
    fn epoch(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, "epoch", NO_WAIT, |trainer, _| Ok(trainer.epoch()))
    }

    /// Leaves: in order, or for a reason.
    fn leave(&self, py: Python<'_>, reason: Option<String>) -> PyResult<()> {
        self.inner.end(py, reason)
    }
}

impl SyncTrainer {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        name: &'static str,
        (timeout, watch): Wait,
        call: impl FnOnce(&mut Trainer, Option<Duration>) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let call = |trainer: &mut Option<_>, left| match trainer {
            Some(trainer) => call(trainer, left),
            None => Err(Error::Interrupted),
        };
        self.inner.timed(py, name, timeout, watch.as_ref(), call)
    }
}

impl Drop for SyncTrainer {
    fn drop(&mut self) {
        self.inner.abandon(DROPPED);
    }
}

/// An explorer's membership.
#[pyclass(frozen, module = "weightsync._native")]
pub struct SyncExplorer {
    inner: Turns<Option<Explorer>>,
}

#[pymethods]
impl SyncExplorer {
    fn need(&self, py: Python<'_>, step: Option<StepCount>) -> PyResult<NeedParts> {
        self.with(py, "need_sync", NO_WAIT, |explorer, _| {
            explorer.need_sync(steps_of(step)).map(need_parts)
        })
    }

    fn wait_need(
        &self,
        py: Python<'_>,
        step: Option<StepCount>,
        timeout: Option<Seconds>,
        watch: Option<Py<PyAny>>,
    ) -> PyResult<NeedParts> {
        let timeout = timeout_of(timeout);
        self.with(py, "wait_need_sync", (timeout, watch), |explorer, left| {
            explorer
                .wait_need_sync(steps_of(step), left)
                .map(need_parts)
        })
    }

    /// Loads a version with `load(version, info, worker, seconds)`, which returns the version that was
    /// loaded.
    fn sync(
        &self,
        py: Python<'_>,
        step: Option<StepCount>,
        timeout: Option<Seconds>,
        load: Py<PyAny>,
        watch: Option<Py<PyAny>>,
    ) -> PyResult<SyncParts> {
        let (mut raised, timeout) = (None, timeout_of(timeout));
        let done = self.with(py, "sync", (timeout, watch), |explorer, left| {
            let synced = explorer.sync(steps_of(step), left, |fetch| {
                called(&mut raised, |py| {
                    let (version, worker) = (fetch.version.0, fetch.worker);
                    let info = InitInfo(fetch.from.clone());
                    let given = (version, info, worker, seconds_of(fetch));
                    let loaded: Number = load.call1(py, given)?.extract(py)?;
                    Ok(Version(loaded.0))
                })
            });
            synced.map(sync_parts)
        });
        of_callback(done, raised)
    }

    /// Loads a version with `load(address)`, which gets the address of the store or None, and returns the
    /// version that was loaded.
    fn load(
        &self,
        py: Python<'_>,
        load: Py<PyAny>,
        watch: Option<Py<PyAny>>,
    ) -> PyResult<SyncParts> {
        let mut raised = None;
        let begun = Instant::now();
        let done = self.with(py, "load", (None, watch), |explorer, _| {
            // First, so that the callback knows where to read.
            let store = explorer.store()?;
            let loaded = called(&mut raised, |py| {
                let loaded: Number = load.call1(py, (store,))?.extract(py)?;
                Ok(Version(loaded.0))
            })?;
            let mut answer = explorer.loaded(loaded)?;
            answer.took = begun.elapsed();
            Ok(sync_parts(answer))
        });
        of_callback(done, raised)
    }

    /// The address of the store, if there is one.
    fn store(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.with(py, "store", NO_WAIT, |explorer, _| explorer.store())
    }

    /// Whether it is to evaluate after so many steps.
    fn need_eval(&self, py: Python<'_>, step: StepCount) -> PyResult<bool> {
        self.with(py, "need_eval", NO_WAIT, |explorer, _| {
            Ok(explorer.need_eval(step.0))
        })
    }

    fn pause(&self, py: Python<'_>, paused: bool) -> PyResult<()> {
        self.with(py, "pause", NO_WAIT, |explorer, _| explorer.pause(paused))
    }

    /// How versions travel.
    fn method(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.with(py, "method", NO_WAIT, |explorer, _| {
            Ok(method_word(explorer.method()))
        })
    }

    /// Leaves: in order, or for a reason.
    fn leave(&self, py: Python<'_>, reason: Option<String>) -> PyResult<()> {
        self.inner.end(py, reason)
    }
}

impl SyncExplorer {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        name: &'static str,
        (timeout, watch): Wait,
        call: impl FnOnce(&mut Explorer, Option<Duration>) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        let call = |explorer: &mut Option<_>, left| match explorer {
            Some(explorer) => call(explorer, left),
            None => Err(Error::Interrupted),
        };
        self.inner.timed(py, name, timeout, watch.as_ref(), call)
    }
}

impl Drop for SyncExplorer {
    fn drop(&mut self) {
        self.inner.abandon(DROPPED);
    }
}

/// What the synchronizer is told of a party that was garbage-collected.
const DROPPED: &str = "it was dropped without shutdown()";

/// Calls Python, and keeps what it raises. A signal's exception ends the waits, too.
fn called<T>(
    raised: &mut Option<PyErr>,
    call: impl FnOnce(Python<'_>) -> PyResult<T>,
) -> Result<T, Error> {
    // The library calls this without the lock, in the thread of the call.
    let done = attached(|py| {
        call(py).map_err(|error| {
            // `KeyboardInterrupt` and `SystemExit` are no `Exception`: they end the waits and are
            // no failure of a version.
            let is_signal = !error.is_instance_of::<pyo3::exceptions::PyException>(py);
            // The package's exceptions say what a caller can do. The library decides by that
            // whether the party goes on.
            let remedy = error.value(py).getattr("remedy");
            let remedy: Option<String> = remedy.and_then(|remedy| remedy.extract()).ok();
            // Kept for the caller, who gets the exception itself.
            *raised = Some(error.clone_ref(py));
            match (is_signal, remedy.as_deref()) {
                (true, _) => Error::Interrupted,
                (false, remedy) => Error::Transport {
                    source: Raised::boxed(error),
                    remedy: match remedy {
                        Some("retry") => Remedy::Retry,
                        Some("reconnect") => Remedy::Reconnect,
                        _ => Remedy::GiveUp,
                    },
                },
            }
        })
    });
    // No interpreter any more: the call ends like an interrupted one.
    done.unwrap_or(Err(Error::Interrupted))
}

/// What the callback has raised, if the call failed by it.
fn of_callback<T>(done: PyResult<T>, raised: Option<PyErr>) -> PyResult<T> {
    match (done, raised) {
        // The library's error only carries what was raised.
        (Err(_), Some(raised)) => Err(raised),
        (done, _) => done,
    }
}

fn left(until: Deadline) -> Option<f64> {
    let left = weightsync_engine::transport::left(until);
    left.map(|left| left.as_secs_f64())
}

fn seconds_of(fetch: &Fetch) -> Option<f64> {
    left(fetch.until)
}

fn options_of(
    (name, style, method, step): (String, Words, Option<String>, StepCount),
) -> Result<PartyOptions, Error> {
    Ok(PartyOptions::new(&name)
        .style(style_of(&style)?)
        .method(method_of(method.as_deref())?)
        .step(step.0))
}

fn steps_of(steps: Option<StepCount>) -> Option<u64> {
    steps.map(|steps| steps.0)
}

fn method_of(word: Option<&str>) -> Result<Option<Method>, Error> {
    word.map(method).transpose()
}

fn style_of((word, interval, offset, lag): &Words) -> Result<Option<Style>, Error> {
    // Without any word the synchronizer's own style holds.
    let word = match (word, interval, offset, lag) {
        (None, None, None, None) => return Ok(None),
        (None, ..) => "fixed",
        (Some(word), ..) => word,
    };
    let words: StyleWords = word.parse()?;
    let words = words.interval(*interval).offset(*offset).lag(*lag);
    words.style().map(Some)
}

fn need_parts(answer: NeedAnswer) -> NeedParts {
    let need = match answer.need {
        Need::No => "no",
        Need::Yes => "yes",
        Need::Must => "must",
    };
    let (stopped, connected) = (answer.trainer_stopped, answer.connected);
    (need, answer.asked_by, answer.newest.0, stopped, connected)
}

fn sync_parts(answer: SyncAnswer) -> SyncParts {
    let behind = (answer.versions_behind, answer.steps_behind);
    let ended = answer.ended.word();
    (
        ended,
        answer.version.0,
        answer.step,
        behind.0,
        behind.1,
        answer.reason,
        answer.took.as_secs_f64(),
    )
}

fn trained_parts(answer: TrainerAnswer) -> TrainedParts {
    let lines = answer.explorers.into_iter().map(|line| {
        let state = match line.state {
            State::Stopped => "STOPPED",
            State::Running => "RUNNING",
            State::RequireSync => "REQUIRE_SYNC",
            State::WaitingSync => "WAITING_SYNC",
        };
        let ended = line.ended.map(Ended::word);
        (
            line.name,
            state,
            line.step,
            line.version.0,
            ended,
            line.reason,
        )
    });
    let (version, step) = (answer.version.0, answer.step);
    (
        answer.ended.word(),
        version,
        step,
        lines.collect(),
        answer.reason,
        answer.took.as_secs_f64(),
    )
}
