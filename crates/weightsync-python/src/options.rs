//! Keyword arguments as the library's options.

use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use weightsync::{
    DigestPolicy, Dtype, Error, Expect, Pending, Pull, Schemes, SendOptions, SenderSetup, Version,
    WaitFor, WorkerId,
};

/// The longest timeout there is: more is none.
const LONGEST: f64 = 1e9;

/// A timeout in seconds; none without one.
pub fn timeout_of(seconds: Option<f64>) -> PyResult<Option<Duration>> {
    match seconds {
        None => Ok(None),
        Some(seconds) if seconds >= LONGEST => Ok(None),
        Some(seconds) => match Duration::try_from_secs_f64(seconds) {
            Ok(timeout) => Ok(Some(timeout)),
            Err(_) => Err(PyValueError::new_err(format!(
                "a timeout wants seconds from 0 on, or None, and got {seconds}"
            ))),
        },
    }
}

/// As [`timeout_of`], where "none" is a very long time.
pub fn deadline_of(seconds: Option<f64>) -> PyResult<Duration> {
    Ok(timeout_of(seconds)?.unwrap_or(Duration::from_secs(LONGEST as u64)))
}

/// Which workers `connect` waits for.
#[derive(FromPyObject)]
pub enum Workers {
    Count(usize),
    Numbers(Vec<u32>),
}

impl From<Workers> for Expect {
    fn from(workers: Workers) -> Self {
        match workers {
            Workers::Count(count) => Self::Count(count),
            Workers::Numbers(workers) => Self::Workers(workers.into_iter().map(WorkerId).collect()),
        }
    }
}

/// How a sender is set up, beside its models.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Setup {
    scheme: String,
    run_dir: Option<std::path::PathBuf>,
    cast: Option<String>,
    slots: Option<(u8, u8)>,
    history: u8,
    checksums: bool,
    digest_in_background: bool,
    copy_threads: usize,
    pending: Option<u8>,
    deadline: Option<f64>,
}

impl Setup {
    /// What it says, found to be possible; to be [applied](Chosen::apply) without
    /// the interpreter's lock, because a run directory may be waited for.
    pub fn chosen(self) -> PyResult<Chosen> {
        let cast = self.cast.as_deref();
        Ok(Chosen {
            deadline: deadline_of(self.deadline)?,
            cast: cast
                .map(|dtype| crate::source::dtype_of("cast", dtype))
                .transpose()?,
            setup: self,
        })
    }
}

/// A [`Setup`] whose values are possible.
pub struct Chosen {
    setup: Setup,
    deadline: Duration,
    cast: Option<Dtype>,
}

/// Every scheme there is.
pub fn schemes() -> Schemes {
    let mut schemes = weightsync_net::Distributed::among_schemes();
    weightsync_serve::Rpc::insert_into(&mut schemes);
    schemes
}

impl Chosen {
    pub fn apply(self, setup: SenderSetup) -> Result<SenderSetup, Error> {
        let Self {
            setup: chosen,
            deadline,
            cast,
        } = self;
        let mut setup = setup.scheme(schemes().parse(&chosen.scheme)?)?;
        if let Some(dir) = chosen.run_dir {
            setup = setup.run_dir(dir)?;
        }
        if let Some(dtype) = cast {
            setup = setup.cast(dtype)?;
        }
        if let Some((slots, most)) = chosen.slots {
            setup = setup.slots(slots, most);
        }
        if chosen.digest_in_background {
            setup = setup.digest(DigestPolicy::Background);
        }
        if let Some(bound) = chosen.pending {
            setup = setup.pending(Pending::Queue(bound));
        }
        Ok(setup
            .history(chosen.history)
            .checksums(chosen.checksums)
            .copy_threads(chosen.copy_threads)
            .deadline(deadline))
    }
}

/// How one send differs from the plain one.
#[derive(FromPyObject)]
pub struct Send(
    /// Which model.
    Option<String>,
    /// Which workers.
    Option<Vec<u32>>,
    /// How far it waits.
    Option<String>,
    /// How long, in seconds.
    Option<f64>,
    /// Whether it is a part.
    bool,
    /// The version's number.
    Option<u64>,
);

impl Send {
    pub fn options(self) -> PyResult<SendOptions> {
        let Self(model, workers, wait, timeout, partial, version) = self;
        let mut options = SendOptions::new().partial(partial);
        if let Some(model) = model {
            options = options.model(&model);
        }
        if let Some(workers) = workers {
            options = options.workers(workers);
        }
        if let Some(word) = wait {
            options = options.wait(level_of(&word)?);
        }
        if let Some(seconds) = timeout {
            options = options.deadline(deadline_of(Some(seconds))?);
        }
        if let Some(version) = version {
            options = options.version(Version(version));
        }
        Ok(options)
    }
}

fn level_of(word: &str) -> PyResult<WaitFor> {
    match word {
        "sent" => Ok(WaitFor::Sent),
        "staged" => Ok(WaitFor::Staged),
        "applied" => Ok(WaitFor::Applied),
        other => Err(PyValueError::new_err(format!(
            "wait wants \"sent\", \"staged\" or \"applied\", and got {other:?}"
        ))),
    }
}

/// What a worker asks for: nothing for the newest.
pub fn pull_of(exactly: Option<u64>, at_least: Option<u64>) -> PyResult<Pull> {
    match (exactly, at_least) {
        (None, None) => Ok(Pull::Newest),
        (Some(version), None) => Ok(Pull::Exactly(Version(version))),
        (None, Some(version)) => Ok(Pull::AtLeast(Version(version))),
        (Some(_), Some(_)) => Err(PyValueError::new_err(
            "a pull is of exactly one version, or at least of one: give version or at_least",
        )),
    }
}
