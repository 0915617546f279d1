//! Weights through files in a directory: a scheme of one's own.
//!
//! ```text
//! DIR/weightsync-files.…/        the place of one sender; its user's alone
//!   lock                         locked by the sender that lives here
//!   sender                       who that is, and its models; locked while it lives
//!   <epoch>-<model>-<version>    the tensors of one version
//!   live                         which versions belong together, and their digests;
//!                                behind a checksum of its own
//!   workers/<worker>.<pid>.<n>/
//!     alive                      who that is; locked while it lives
//!     status                     what it has staged, applied and refused
//! ```
//!
//! Every file is written next to its place, and renamed into it once it is whole.
//! Renaming `live` is the swap: it makes all models of a publication live for all
//! workers. A worker looks at `live` every few milliseconds, and compares the
//! digest of what it reads. The kernel releases a lock when its process dies,
//! so an end knows of the other's death when it looks next, without guessing by a
//! clock. The last process to leave a place removes it; what killed processes left is
//! removed by the next sender.
//!
//! Not here, and [said so](Scheme::capabilities): sends to some workers, holding
//! workers, pull, every version.

mod receiver;
mod sender;
mod storage;

use std::path::Path;

use serde::{Deserialize, Serialize};
use weightsync_engine::transport::{
    Deadline, Endpoint, Joining, ModelSpec, Opening, ReceiverTransport, Registration, Scheme,
    SenderTransport, register,
};
use weightsync_engine::{
    AnyScheme, Capabilities, Digest, Error, ModelId, Remedy, Result, Run, Version,
};

/// The scheme `files:dir=DIR`.
#[derive(Clone, Debug)]
pub struct Files {
    dir: String,
}

impl Files {
    /// Weights through files in this directory, which is made if it is absent.
    ///
    /// # Errors
    ///
    /// [`Error::BadSetting`] unless it is an absolute path without a comma: it
    /// is part of a text, and the processes that read it run elsewhere.
    pub fn new(dir: &str) -> Result<Self> {
        if !dir.starts_with('/') || dir.contains(',') {
            return Err(Error::BadSetting {
                setting: "dir".into(),
                expected: "an absolute path without a comma".into(),
                got: dir.into(),
            });
        }
        Ok(Self { dir: dir.into() })
    }

    /// Removes what killed processes left, as every sender does before it begins.
    /// Returns the places that nobody lives in and that are there all the same.
    pub fn sweep(&self) -> Vec<String> {
        let left = storage::sweep_all(Path::new(&self.dir));
        left.iter()
            .map(|place| place.display().to_string())
            .collect()
    }
}

register! {
    Registration::new("files", |settings| {
        if let Some(other) = settings.keys().find(|key| *key != "dir") {
            return Err(Error::BadSetting {
                setting: other.clone(),
                expected: "a setting of files: dir=DIR".into(),
                got: other.clone(),
            });
        }
        let dir = settings.get("dir").map_or("", String::as_str);
        Ok(AnyScheme::new(Files::new(dir)?))
    })
}

impl Scheme for Files {
    fn name(&self) -> &str {
        "files"
    }

    fn settings(&self) -> Vec<(String, String)> {
        vec![("dir".into(), self.dir.clone())]
    }

    fn capabilities(&self) -> Capabilities {
        let mut can = Capabilities::NONE;
        can.weights = true;
        can.push = true;
        can.sets = true;
        can.loan = true;
        can.restarts = true;
        can.death = true;
        can.outlives = true;
        can
    }

    fn allocate_endpoint(&self, models: &[ModelId], run_dir: Option<&Path>) -> Result<Endpoint> {
        let fresh = Endpoint::fresh(models, run_dir)?;
        let address = format!("{}/{}", self.dir, storage::name(fresh.address()));
        Endpoint::new(address, *fresh.secret(), fresh.restarts())
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Box<dyn SenderTransport>> {
        sender::open(Path::new(&self.dir), opening)
    }

    fn join(
        &self,
        at: &Endpoint,
        joining: &Joining,
        deadline: Deadline,
    ) -> Result<Box<dyn ReceiverTransport>> {
        let receiver = receiver::FileReceiver::join(at, joining, deadline)?;
        Ok(Box::new(receiver))
    }
}

/// The file `sender`.
#[derive(Debug, Serialize, Deserialize)]
struct AboutSender {
    pid: u32,
    run: Run,
    secret: [u8; 16],
    models: Vec<ModelSpec>,
}

/// The file `live`.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Live {
    run: Run,
    sequence: u64,
    /// One for each model, in the set's order.
    versions: Vec<LiveVersion>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct LiveVersion {
    version: Version,
    digest: Digest,
}

impl Live {
    /// The file of one version of a model of this run.
    fn file_name(&self, model: usize, version: Version) -> String {
        format!("{}-{model}-{}", self.run.epoch.0, version.0)
    }
}

/// What can go wrong here and nowhere else.
#[derive(Debug, thiserror::Error)]
enum FilesError {
    #[error("another sender lives in {0}: end it first, or use another run directory")]
    InUse(String),
    #[error("{file} is damaged: it should have {expected}, and has {got}")]
    Damaged {
        file: String,
        expected: String,
        got: String,
    },
}

impl From<FilesError> for Error {
    fn from(error: FilesError) -> Self {
        let remedy = match error {
            FilesError::InUse(_) => Remedy::GiveUp,
            // The next version has a file of its own.
            FilesError::Damaged { .. } => Remedy::Retry,
        };
        let source = error.into();
        Self::Transport { source, remedy }
    }
}
