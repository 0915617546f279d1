//! Keyword arguments as the library's options.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBool;
use weightsync_engine::{
    AnyScheme, AsyncSendLimit, DigestPolicy, Dtype, Error, Expect, Pull, SendOptions, SenderSetup,
    Version, WaitFor, WorkerId,
};

use crate::errors::{SettingError, exception};

/// The longest timeout there is: more is none.
pub const LONGEST: f64 = 1e9;

/// A timeout in seconds.
#[derive(Clone, Copy)]
pub struct Seconds(f64);

impl<'a, 'py> FromPyObject<'a, 'py> for Seconds {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        // NaN is not at least 0, so it is refused too.
        let seconds = value.extract::<f64>().ok();
        let possible = seconds.filter(|seconds| *seconds >= 0.0);
        possible
            .map(Self)
            .ok_or_else(|| wants("timeout", "seconds from 0 on, or None", &value))
    }
}

/// The timeout; none without one.
pub fn timeout_of(seconds: Option<Seconds>) -> Option<Duration> {
    // Larger values would overflow a `Duration`. They mean no limit.
    let Seconds(seconds) = seconds.filter(|seconds| seconds.0 < LONGEST)?;
    Some(Duration::from_secs_f64(seconds))
}

/// A worker's number.
#[derive(Clone, Copy)]
pub struct WorkerNumber(pub u32);

impl<'a, 'py> FromPyObject<'a, 'py> for WorkerNumber {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        whole("a worker's number", "a whole number from 0 on", &value).map(Self)
    }
}

/// A version's number.
#[derive(Clone, Copy)]
pub struct Number(pub u64);

impl<'a, 'py> FromPyObject<'a, 'py> for Number {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        whole("version", "a whole number from 0 on", &value).map(Self)
    }
}

/// How many steps a party has made.
#[derive(Clone, Copy)]
pub struct StepCount(pub u64);

impl<'a, 'py> FromPyObject<'a, 'py> for StepCount {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        whole("step", "a whole number of steps from 0 on", &value).map(Self)
    }
}

/// Which workers `connect` waits for.
pub struct ExpectedWorkers(Expect);

impl<'a, 'py> FromPyObject<'a, 'py> for ExpectedWorkers {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        const POSSIBLE: &str = "a count from 0 on, or the workers' numbers";
        // A count first: a string or a list is no number, and goes on below.
        if let Ok(count) = whole("workers", POSSIBLE, &value) {
            return Ok(Self(Expect::Count(count)));
        }
        let refused = || wants("workers", POSSIBLE, &value);
        let named = value.try_iter().map_err(|_| refused())?;
        let mut workers: Vec<WorkerId> = Vec::new();
        for number in named {
            let number = whole("workers", POSSIBLE, &number?).map_err(|_| refused())?;
            // Named twice, the set would be smaller than the caller believes.
            if workers.contains(&WorkerId(number)) {
                let text = format!("workers names worker {number} twice: name each one once");
                return Err(SettingError::new_err(text));
            }
            workers.push(WorkerId(number));
        }
        Ok(Self(Expect::workers(workers)))
    }
}

impl From<ExpectedWorkers> for Expect {
    fn from(workers: ExpectedWorkers) -> Self {
        workers.0
    }
}

/// A whole number; `True` is none.
pub fn whole<'py, T: for<'a> FromPyObject<'a, 'py>>(
    name: &str,
    possible: &str,
    value: &Bound<'py, PyAny>,
) -> PyResult<T> {
    let number = value.extract::<T>().ok();
    // In Python `True` is the number 1, and as a setting a mistake.
    let number = number.filter(|_| !value.is_instance_of::<PyBool>());
    number.ok_or_else(|| wants(name, possible, value))
}

/// A value that no setting takes.
pub fn wants(name: &str, possible: &str, got: &Bound<'_, PyAny>) -> PyErr {
    let got = got.repr().map_or("what has no repr".into(), |text| {
        // 80 characters: the value may be a whole model.
        text.to_string_lossy().chars().take(80).collect::<String>()
    });
    SettingError::new_err(format!("{name}: expected {possible}, got {got}"))
}

/// How a sender is set up, in addition to its models.
pub struct Setup {
    scheme: String,
    run_dir: Option<std::path::PathBuf>,
    cast: Option<String>,
    slots: Option<(u8, u8)>,
    history: u8,
    checksums: bool,
    digest_in_background: bool,
    copy_threads: usize,
    async_send_limit: Option<u8>,
    deadline: Option<Seconds>,
}

impl<'a, 'py> FromPyObject<'a, 'py> for Setup {
    type Error = PyErr;

    fn extract(given: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        fn of<'py, T: for<'a> FromPyObject<'a, 'py>>(
            given: &Bound<'py, PyAny>,
            name: &str,
            possible: &str,
        ) -> PyResult<T> {
            let value = given.get_item(name)?;
            value.extract().map_err(|_| wants(name, possible, &value))
        }
        const FEW: &str = "a whole number from 0 to 255";
        const SWITCH: &str = "True or False";
        Ok(Self {
            scheme: of(&given, "scheme", "the word of a scheme")?,
            run_dir: of(&given, "run_dir", "a directory, or None")?,
            cast: of(&given, "cast", "a dtype, or None")?,
            slots: of(
                &given,
                "slots",
                "(how many from the beginning, how many at most), or None",
            )?,
            history: of(&given, "history", FEW)?,
            checksums: of(&given, "checksums", SWITCH)?,
            digest_in_background: of(&given, "digest", SWITCH)?,
            copy_threads: of(&given, "copy_threads", "a whole number from 0 on")?,
            async_send_limit: of(
                &given,
                "async_send_limit",
                "a whole number from 0 to 255, or None",
            )?,
            deadline: given.get_item("deadline")?.extract()?,
        })
    }
}

impl Setup {
    /// Checks the values. [`CheckedSetup::apply`] then runs without the interpreter's lock, because
    /// a run directory may have to be waited for.
    pub fn chosen(self) -> PyResult<CheckedSetup> {
        let cast = self.cast.as_deref();
        Ok(CheckedSetup {
            cast: cast
                .map(|dtype| crate::source::dtype_of("cast", dtype))
                .transpose()?,
            setup: self,
        })
    }
}

/// A [`Setup`] whose values are possible.
pub struct CheckedSetup {
    setup: Setup,
    cast: Option<Dtype>,
}

impl CheckedSetup {
    pub fn apply(self, setup: SenderSetup) -> Result<SenderSetup, Error> {
        let Self {
            setup: chosen,
            cast,
        } = self;
        let mut setup = setup.scheme(chosen.scheme.parse::<AnyScheme>()?)?;
        if let Some(dir) = chosen.run_dir {
            // A run directory may have to be waited for, so this runs without the interpreter's
            // lock.
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
        if let Some(bound) = chosen.async_send_limit {
            setup = setup.async_send_limit(AsyncSendLimit::Queue(bound));
        }
        Ok(setup
            .history(chosen.history)
            .checksums(chosen.checksums)
            .copy_threads(chosen.copy_threads)
            .send_timeout(timeout_of(chosen.deadline)))
    }
}

/// How one send differs from the plain one.
pub struct Send {
    model: Option<String>,
    workers: Option<Vec<WorkerNumber>>,
    /// How far it waits.
    wait: Option<String>,
    timeout: Option<Seconds>,
    partial: bool,
    version: Option<Number>,
    /// Whether it waits for workers that are late already.
    wait_late: bool,
}

impl<'a, 'py> FromPyObject<'a, 'py> for Send {
    type Error = PyErr;

    /// Extracted from a tuple by hand: a derived implementation would name the wrong field without
    /// the reason.
    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        let (model, workers, wait, timeout, partial, version, wait_late) = value.extract()?;
        Ok(Self {
            model,
            workers,
            wait,
            timeout,
            partial,
            version,
            wait_late,
        })
    }
}

impl Send {
    /// The options, and the timeout, if it is not the sender's own.
    pub fn options(self) -> PyResult<(SendOptions, Option<Duration>)> {
        let Self {
            model,
            workers,
            wait,
            timeout,
            partial,
            version,
            wait_late,
        } = self;
        let mut options = SendOptions::new().partial(partial).wait_late(wait_late);
        if let Some(model) = model {
            options = options.model(&model);
        }
        if let Some(workers) = workers {
            options = options.workers(workers.into_iter().map(|worker| worker.0));
        }
        if let Some(word) = wait {
            options = options.wait(level_of(&word)?);
        }
        if let Some(seconds) = timeout {
            options = options.timeout(timeout_of(Some(seconds)));
        }
        if let Some(version) = version {
            options = options.version(Version(version.0));
        }
        // The timeout is returned as well, because the wait for the turn counts towards it.
        Ok((options, timeout_of(timeout)))
    }
}

/// The settings of a scheme: their names, the values they take, what they do, and their defaults.
#[pyfunction]
pub fn scheme_settings(py: Python<'_>, scheme: &str) -> PyResult<Vec<DeclaredSetting>> {
    let declared = AnyScheme::settings_of(scheme).map_err(|error| exception(py, error))?;
    let declared = declared.into_iter();
    Ok(declared
        .map(|one| (one.key, one.takes, one.about, one.default))
        .collect())
}

/// A setting's name, the values it takes, what it does, and its default.
type DeclaredSetting = (&'static str, &'static str, &'static str, Option<String>);

pub fn level_of(word: &str) -> PyResult<WaitFor> {
    word.parse().map_err(|_| {
        SettingError::new_err(format!(
            "wait: expected \"sent\", \"staged\" or \"applied\", got {word:?}"
        ))
    })
}

/// The version that a worker asks for; without arguments, the newest.
pub fn pull_of(exactly: Option<Number>, at_least: Option<Number>) -> PyResult<Pull> {
    match (exactly, at_least) {
        (None, None) => Ok(Pull::newest()),
        (Some(version), None) => Ok(Pull::version(Version(version.0))),
        (None, Some(version)) => Ok(Pull::at_least(Version(version.0))),
        (Some(_), Some(_)) => Err(SettingError::new_err(
            "a pull is of exactly one version, or at least of one: give version or at_least",
        )),
    }
}
