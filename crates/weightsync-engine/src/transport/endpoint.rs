//! Where a sender is found.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use weightsync_core::ModelId;

use crate::error::{Error, Result};
use crate::run_dir;

/// Where a sender is found, and what lets a worker in.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "WireEndpoint", into = "WireEndpoint")]
pub struct Endpoint {
    address: String,
    secret: [u8; 16],
    restarts: bool,
    lookup: Option<String>,
}

impl Endpoint {
    /// The longest address, in bytes.
    pub const MAX_ADDRESS: usize = 1024;

    /// The longest path of a file of the run directory, in bytes.
    const MAX_LOOKUP: usize = 4096;

    /// An endpoint at an address the scheme can make something of.
    ///
    /// `restarts` says that a sender that died may come back there.
    ///
    /// # Errors
    ///
    /// [`Error::BadInitInfo`] if the address is empty or longer than
    /// [`MAX_ADDRESS`](Self::MAX_ADDRESS).
    pub fn new(address: impl Into<String>, secret: [u8; 16], restarts: bool) -> Result<Self> {
        let address = address.into();
        if address.is_empty() || address.len() > Self::MAX_ADDRESS {
            return Err(Error::BadInitInfo(format!(
                "its address has {} bytes where 1 to {} are possible",
                address.len(),
                Self::MAX_ADDRESS
            )));
        }
        Ok(Self {
            address,
            secret,
            restarts,
            lookup: None,
        })
    }

    /// One for a new sender of these models: an address that no other sender
    /// has, and a secret. With a run directory both are the same for every
    /// sender of that directory and these models, and it may restart there. (The
    /// local schemes listen at another address each time, which such a sender says
    /// in the directory, and their workers look up.)
    ///
    /// The address is a name of at most 107 bytes, `/` and letters of the models'
    /// names among them. A scheme makes of it what it needs (a path, a port's
    /// entry in some table) with [`new`](Self::new).
    ///
    /// # Errors
    ///
    /// [`Error::File`] and [`Error::FileLocked`] of the run directory.
    pub fn fresh(models: &[ModelId], run_dir: Option<&Path>) -> Result<Self> {
        match run_dir {
            Some(dir) => run_dir::at(dir, models),
            None => run_dir::anonymous(models),
        }
    }

    /// The same, of senders that say in this file at which address each of them is.
    ///
    /// # Errors
    ///
    /// [`Error::File`] if the path is no text, [`Error::BadInitInfo`] if it is too
    /// long or not an absolute one.
    pub(crate) fn looked_up_in(self, file: PathBuf) -> Result<Self> {
        let text = file.into_os_string().into_string();
        let lookup = text.map_err(|path| Error::File {
            action: "putting into an init info",
            path: path.into(),
            source: "it is not UTF-8; choose a run directory of another name".into(),
        })?;
        // Workers run in other directories, and the text may come from another process.
        if lookup.len() > Self::MAX_LOOKUP || !Path::new(&lookup).is_absolute() {
            return Err(Error::BadInitInfo(format!(
                "its sender is to be looked up in a file whose path has {} bytes, expected an \
                 absolute path of at most {}",
                lookup.len(),
                Self::MAX_LOOKUP
            )));
        }
        let lookup = Some(lookup);
        Ok(Self { lookup, ..self })
    }

    /// The file in which each sender says where it is, if its address changes.
    pub(crate) fn lookup(&self) -> Option<&Path> {
        self.lookup.as_deref().map(Path::new)
    }

    /// The address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Proof that a worker holds the init info.
    pub fn secret(&self) -> &[u8; 16] {
        &self.secret
    }

    /// Whether a sender that died may come back there.
    pub fn restarts(&self) -> bool {
        self.restarts
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The secret stays out of logs.
        f.debug_struct("Endpoint")
            .field("address", &self.address)
            .field("restarts", &self.restarts)
            .field("lookup", &self.lookup)
            .finish_non_exhaustive()
    }
}

/// How it travels.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireEndpoint {
    address: String,
    secret: [u8; 16],
    restarts: bool,
    lookup: Option<String>,
}

impl From<Endpoint> for WireEndpoint {
    fn from(endpoint: Endpoint) -> Self {
        let Endpoint {
            address,
            secret,
            restarts,
            lookup,
        } = endpoint;
        Self {
            address,
            secret,
            restarts,
            lookup,
        }
    }
}

impl TryFrom<WireEndpoint> for Endpoint {
    type Error = Error;

    fn try_from(wire: WireEndpoint) -> Result<Self> {
        let endpoint = Self::new(wire.address, wire.secret, wire.restarts)?;
        match wire.lookup {
            None => Ok(endpoint),
            Some(file) => endpoint.looked_up_in(file.into()),
        }
    }
}
