//! A worker that feeds workers of its own.

use pyo3::prelude::*;
use weightsync_engine::{Error, ReceiverSetup};

use crate::options::{ExpectedWorkers, Seconds, Setup, WorkerNumber, timeout_of};
use crate::report::Report;
use crate::session::{DROPPED, InitInfo};
use crate::wait::{Turns, released};

/// A worker that passes on what it receives, under the same version numbers,
/// and acknowledges once its own workers have it.
#[pyclass(frozen, module = "weightsync._native")]
pub struct Cascade {
    state: Turns<CascadeStage>,
    /// Also while a call waits: what it waits for may be who needs this.
    info: InitInfo,
}

enum CascadeStage {
    Joined(Box<weightsync_engine::CascadeSetup>),
    Feeding(Box<weightsync_engine::Cascade>),
    Following(Box<weightsync_engine::CascadeInBackground>),
    Closed,
}

#[pymethods]
impl Cascade {
    /// Joins the trainer as a worker, and sets a sender up for sub-workers.
    #[staticmethod]
    #[pyo3(signature = (info, worker, setup, timeout))]
    fn join(
        py: Python<'_>,
        info: &InitInfo,
        worker: WorkerNumber,
        setup: Setup,
        timeout: Option<Seconds>,
    ) -> PyResult<Self> {
        let timeout = timeout_of(timeout);
        let receiver = ReceiverSetup::new(info.0.clone(), worker.0);
        let chosen = setup.chosen()?;
        // Both the joining and the setting up of the own sender may wait.
        let joined = released(py, || {
            let joined = weightsync_engine::Cascade::join(receiver, timeout)?;
            joined.configure(|own| chosen.apply(own))
        })?;
        Ok(Self {
            info: InitInfo(joined.init_info()),
            state: Turns::new(CascadeStage::Joined(Box::new(joined)), CascadeStage::close),
        })
    }

    /// What sub-workers need to join.
    #[getter]
    fn init_info(&self) -> InitInfo {
        self.info.clone()
    }

    /// The rendez-vous with the sub-workers; only then the trainer counts this
    /// worker.
    fn connect(
        &self,
        py: Python<'_>,
        workers: ExpectedWorkers,
        timeout: Option<Seconds>,
    ) -> PyResult<()> {
        let timeout = timeout_of(timeout);
        let connect =
            // The stage is taken out, because connecting consumes it. It stays `Closed` if that
            // fails.
            |state: &mut CascadeStage, left| match std::mem::replace(state, CascadeStage::Closed) {
                CascadeStage::Joined(setup) => {
                    *state = CascadeStage::Feeding(Box::new(setup.connect(workers.into(), left)?));
                    Ok(())
                }
                other => {
                    *state = other;
                    Err(state.wrong("connect"))
                }
            };
        self.state.timed(py, "connect", timeout, None, connect)
    }

    /// Waits for what comes next and passes it on; what became of it, or None.
    #[pyo3(signature = (timeout = None))]
    fn forward(&self, py: Python<'_>, timeout: Option<Seconds>) -> PyResult<Option<Report>> {
        let timeout = timeout_of(timeout);
        let forward = |state: &mut CascadeStage, left| match state {
            CascadeStage::Feeding(cascade) => {
                let forwarded = cascade.forward(left)?;
                Ok(forwarded.map(|forwarded| Report(forwarded.report)))
            }
            state => Err(state.wrong("forward")),
        };
        self.state.polled(py, "forward", timeout, forward)
    }

    /// Passes everything on from here on, in a thread of its own.
    fn start_background(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, "start_background", |state| {
            match std::mem::replace(state, CascadeStage::Closed) {
                CascadeStage::Feeding(cascade) => {
                    *state = CascadeStage::Following(Box::new(cascade.in_background()?));
                    Ok(())
                }
                other => {
                    *state = other;
                    Err(state.wrong("start_background"))
                }
            }
        })
    }

    /// What became of what was passed on last, in a thread of its own.
    #[getter]
    fn last(&self, py: Python<'_>) -> PyResult<Option<Report>> {
        self.with(py, "last", |state| match state {
            CascadeStage::Following(cascade) => {
                Ok(cascade.last()?.map(|forwarded| Report(forwarded.report)))
            }
            state => Err(state.wrong("last")),
        })
    }

    /// Forgets sub-workers that failed, died or were lost.
    fn forget(&self, py: Python<'_>, workers: Vec<WorkerNumber>) -> PyResult<()> {
        let workers: Vec<u32> = workers.into_iter().map(|worker| worker.0).collect();
        self.with(py, "forget", |state| match state {
            CascadeStage::Feeding(cascade) => cascade.forget(workers),
            state => Err(state.wrong("forget")),
        })
    }

    /// Ends both ends, and any call that waits; any number of times. One that ends for a
    /// reason has failed, and its trainer is told the reason.
    #[pyo3(signature = (reason = None))]
    fn shutdown(&self, py: Python<'_>, reason: Option<String>) -> PyResult<()> {
        self.state.end(py, reason)
    }

    fn __repr__(&self) -> String {
        let word = self.state.look(CascadeStage::word).unwrap_or("in a call");
        format!("<Cascade: {word}>")
    }
}

impl Drop for Cascade {
    fn drop(&mut self) {
        self.state.abandon(DROPPED);
    }
}

impl Cascade {
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        name: &'static str,
        call: impl FnOnce(&mut CascadeStage) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        self.state.with(py, name, call)
    }
}

impl CascadeStage {
    fn close(&mut self, why: Option<&str>) {
        match (std::mem::replace(self, Self::Closed), why) {
            // In order: dropping the stage ends both ends.
            (_, None) | (Self::Closed, _) => {}
            (Self::Joined(setup), Some(why)) => setup.fail(why),
            (Self::Feeding(cascade), Some(why)) => cascade.fail(why),
            // In a forked child there is nothing to end.
            (Self::Following(cascade), Some(why)) => drop(cascade.fail(why)),
        }
    }

    fn word(&self) -> &'static str {
        match self {
            Self::Joined(_) => "joined",
            Self::Feeding(_) => "connected",
            Self::Following(_) => "passes on in the background",
            Self::Closed => "closed",
        }
    }

    fn wrong(&self, call: &'static str) -> Error {
        let (state, fix) = match self {
            Self::Joined(_) => (
                "before connect",
                "call connect: it returns when the sub-workers are there",
            ),
            Self::Feeding(_) => (
                "on a connected cascade",
                "forward, or start it in the background",
            ),
            Self::Following(_) => (
                "while it passes on in the background",
                "shut it down to start again",
            ),
            Self::Closed => ("after shutdown", "join again"),
        };
        Error::WrongOrder { call, state, fix }
    }
}
