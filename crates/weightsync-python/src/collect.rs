//! Links between collectors and their workers of other hosts, bound to Python.

use std::fs::OpenOptions;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rustix::process::{Signal, getpid, kill_process};
use weightsync_engine::transport::threads::LockExt as _;
use weightsync_engine::{Error, Origin};
use weightsync_link::access::Token;
use weightsync_net::Distributed;
use weightsync_net::collect::{
    CollectorLink, CollectorPort, JoinOptions, NoticeKind, Rows, WorkerSeat,
};

use crate::errors::{SettingError, ended, exception, forked};
use crate::options::{LONGEST, Seconds, timeout_of};
use crate::raw::{self, ByteSpan, RawAddress};
use crate::wait::released;

/// The port at which a collector's workers join.
#[pyclass(frozen, module = "weightsync._native")]
pub struct TrainerPort {
    held: Mutex<Option<Arc<CollectorPort>>>,
    #[pyo3(get)]
    address: String,
    /// What workers need to join, in hexadecimal digits.
    #[pyo3(get)]
    secret: String,
    /// Whether the secret is that of a token.
    #[pyo3(get)]
    has_token: bool,
}

#[pymethods]
impl TrainerPort {
    #[new]
    fn new(
        py: Python<'_>,
        listen: Option<String>,
        advertise: Option<String>,
        tls: Option<PathBuf>,
        insecure_plaintext_code: bool,
        workers: u32,
    ) -> PyResult<Self> {
        let mut scheme = Distributed::new();
        if let Some(listen) = listen {
            scheme = scheme.listen(listen);
        }
        if let Some(advertise) = advertise {
            scheme = scheme.advertise(advertise);
        }
        if let Some(tls) = tls {
            scheme = scheme.tls(tls);
        }
        let listen = || CollectorPort::listen(&scheme, workers, insecure_plaintext_code);
        let trainer = released(py, listen)?;
        Ok(Self {
            address: trainer.address().into(),
            secret: to_hex(trainer.secret()),
            has_token: trainer.has_token(),
            held: Mutex::new(Some(Arc::new(trainer))),
        })
    }

    /// Opens the place of a worker, which is started with these settings.
    fn open(
        &self,
        py: Python<'_>,
        worker: u32,
        // A reference of its own, so that `close` does not wait for this call.
        ticket: Option<u64>,
        settings: Vec<u8>,
    ) -> PyResult<WorkerPlace> {
        let trainer = self.lock().clone().ok_or_else(ended)?;
        let place = released(py, || trainer.open(worker, ticket, settings))?;
        Ok(WorkerPlace {
            place,
            origin: Origin::here(),
        })
    }

    /// Closes the port.
    fn close(&self, py: Python<'_>) {
        let trainer = self.lock().take();
        // The port's thread is joined without the lock.
        py.detach(|| drop(trainer));
    }
}

impl TrainerPort {
    /// Never held over a wait, nor over one for the interpreter's lock.
    fn lock(&self) -> MutexGuard<'_, Option<Arc<CollectorPort>>> {
        self.held.locked()
    }
}

/// A worker's place, for one life of it.
#[pyclass(frozen, module = "weightsync._native")]
pub struct WorkerPlace {
    place: WorkerSeat,
    origin: Origin,
}

/// What a worker has said or done: of which kind, a text, a part's number, and when.
type Heard = (&'static str, String, u64, f64);

#[pymethods]
impl WorkerPlace {
    /// Readable while there is something to hear.
    fn fileno(&self) -> i32 {
        self.place.fd()
    }

    fn order(&self, json: String) -> PyResult<()> {
        self.here()?.order(json);
        Ok(())
    }

    /// Says where the bytes of a part belong: runs of an offset, bytes, a count and a stride, in
    /// the file of a descriptor.
    fn expect(
        &self,
        py: Python<'_>,
        part: u64,
        fd: i32,
        rows: Vec<(u64, u64, u64, u64)>,
    ) -> PyResult<()> {
        let place = self.here()?;
        // As another description of the same file, which outlives the descriptor.
        let path = format!("/proc/self/fd/{fd}");
        let file = OpenOptions::new().write(true).open(path);
        let os = |source| Error::Os {
            action: "opening the collector's memory again",
            source,
        };
        // Opened again, because the collector may close its descriptor while parts are still
        // written.
        let file = file.map_err(|error| exception(py, os(error)))?;
        let rows = rows.into_iter().map(|(offset, bytes, count, stride)| Rows {
            offset,
            bytes,
            count,
            stride,
        });
        let expected = place.expect(part, file, rows.collect());
        expected.map_err(|error| exception(py, error))
    }

    fn hear(&self) -> PyResult<Option<Heard>> {
        // Never waits: the descriptor says when there is something.
        let heard = self.here()?.hear();
        Ok(heard.map(|heard| {
            let (kind, text, part) = match heard.what {
                NoticeKind::Joined { from } => ("joined", from, 0),
                NoticeKind::Said { json } => ("said", json, 0),
                NoticeKind::Part { part } => ("part", String::new(), part),
                NoticeKind::Gone { reason } => ("gone", reason, 0),
            };
            (kind, text, part, heard.at)
        }))
    }

    fn leave(&self) -> PyResult<()> {
        self.here()?.leave();
        Ok(())
    }

    /// Waits until no worker is there; false at the timeout.
    fn wait(&self, py: Python<'_>, timeout: Seconds) -> PyResult<bool> {
        let place = self.here()?;
        let timeout = timeout_of(Some(timeout)).unwrap_or_default();
        released(py, || Ok(place.wait(timeout)))
    }

    /// Ends the link at once; nothing that the worker sent is written any more.
    fn cut(&self, py: Python<'_>) -> PyResult<()> {
        let place = self.here()?;
        py.detach(|| place.cut());
        Ok(())
    }
}

impl WorkerPlace {
    /// The place, in the process that it belongs to.
    fn here(&self) -> PyResult<&WorkerSeat> {
        match self.origin.is_here() {
            true => Ok(&self.place),
            false => Err(forked()),
        }
    }
}

/// A worker's end of the link to its trainer. Its process is killed if the trainer goes.
#[pyclass(frozen, module = "weightsync._native")]
pub struct TrainerLink {
    link: CollectorLink,
    origin: Origin,
    /// The worker's number.
    #[pyo3(get)]
    worker: u32,
    settings: Mutex<Vec<u8>>,
}

#[pymethods]
impl TrainerLink {
    /// Joins the trainer at an address. Without a secret it takes that of the token in the
    /// environment.
    #[new]
    fn new(
        py: Python<'_>,
        address: String,
        secret: Option<&str>,
        tls: Option<PathBuf>,
        insecure_plaintext_code: bool,
        place: (Option<u32>, Option<u64>),
        patience: Seconds,
    ) -> PyResult<Self> {
        let (worker, ticket) = place;
        // A worker that the collector starts gets the secret from it. One that is started by hand
        // has the token.
        let secret = match secret {
            Some(secret) => from_hex(secret)
                .ok_or_else(|| SettingError::new_err("the secret is 32 hexadecimal digits"))?,
            None => {
                let token = Token::from_env();
                let token = token.map_err(|error| SettingError::new_err(error.to_string()))?;
                let missing = "a worker that joins on its own needs the trainer's token: set \
                               WEIGHTSYNC_TOKEN_FILE, or WEIGHTSYNC_TOKEN";
                token
                    .ok_or_else(|| SettingError::new_err(missing))?
                    .secret()
            }
        };
        let joining = JoinOptions {
            address: address.clone(),
            secret,
            insecure_plaintext_code,
            tls,
            worker,
            ticket,
            // Without an end a worker would look for its trainer for ever.
            patience: timeout_of(Some(patience)).unwrap_or(Duration::from_secs_f64(LONGEST)),
        };
        // Called by the link's thread, and not by Python's.
        let gone = move |reason: String| {
            eprintln!(
                "weightsync: this worker ends, because its trainer at {address} is gone: {reason}"
            );
            // The worker may hang, with the interpreter's lock.
            let _ = kill_process(getpid(), Signal::KILL);
        };
        let joined = released(py, || CollectorLink::join(&joining, gone))?;
        Ok(Self {
            link: joined.link,
            origin: Origin::here(),
            worker: joined.worker,
            settings: Mutex::new(joined.settings),
        })
    }

    /// What the worker is started with; once.
    fn settings<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        // Taken out: once is enough, and the settings may be large.
        let mut settings = self.settings.locked();
        PyBytes::new(py, &std::mem::take(&mut *settings))
    }

    /// The next order; none once the trainer has ended.
    fn next(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let link = self.here()?;
        Ok(py.detach(|| link.next()))
    }

    fn say(&self, py: Python<'_>, json: String) -> PyResult<()> {
        let link = self.here()?;
        released(py, || link.say(json))
    }

    /// Sends a part: the addresses of its columns, and their bytes.
    #[expect(unsafe_code, reason = "it vouches for the addresses")]
    fn send_part(
        &self,
        py: Python<'_>,
        part: u64,
        columns: Vec<(RawAddress, usize)>,
    ) -> PyResult<()> {
        let link = self.here()?;
        let spans = columns.into_iter().map(|(address, len)| ByteSpan {
            address,
            before: 0,
            len,
        });
        let spans: Vec<ByteSpan> = spans.collect();
        let send = |columns: &[&[u8]]| link.send_part(part, columns);
        let sent = py.detach(|| {
            // SAFETY: the Python files make the promise of an address for each column.
            unsafe { raw::lend(&spans, send) }
        });
        let hollow = |_| SettingError::new_err("there is no memory at address 0");
        sent.map_err(hollow)?.map_err(|error| exception(py, error))
    }

    /// Ends the link in order, once the trainer has read everything.
    fn leave(&self, py: Python<'_>) -> PyResult<()> {
        let link = self.here()?;
        py.detach(|| link.leave());
        Ok(())
    }
}

impl TrainerLink {
    /// The link, in the process that it belongs to.
    fn here(&self) -> PyResult<&CollectorLink> {
        match self.origin.is_here() {
            true => Ok(&self.link),
            false => Err(forked()),
        }
    }
}

fn to_hex(secret: [u8; 16]) -> String {
    secret.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<[u8; 16]> {
    // A number may have a sign, too.
    let is_hex = text.len() == 32 && text.bytes().all(|one| one.is_ascii_hexdigit());
    let number = is_hex.then(|| u128::from_str_radix(text, 16).ok())?;
    number.map(u128::to_be_bytes)
}
