//! Where a sender is found.

use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};
use weightsync_core::ModelId;

use crate::error::{Error, Result};
use crate::run_dir;

/// Where a sender is found, and what lets a worker in.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Wire", into = "Wire")]
pub struct Endpoint {
    address: String,
    secret: [u8; 16],
    restarts: bool,
}

impl Endpoint {
    /// The longest address, in bytes.
    pub const MAX_ADDRESS: usize = 1024;

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
        })
    }

    /// One for a new sender of these models: an address that no other sender
    /// has, and a secret. With a run directory both are the same for every
    /// sender of that directory and these models, and it may restart there.
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
            .finish_non_exhaustive()
    }
}

/// How it travels.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wire {
    address: String,
    secret: [u8; 16],
    restarts: bool,
}

impl From<Endpoint> for Wire {
    fn from(endpoint: Endpoint) -> Self {
        let Endpoint {
            address,
            secret,
            restarts,
        } = endpoint;
        Self {
            address,
            secret,
            restarts,
        }
    }
}

impl TryFrom<Wire> for Endpoint {
    type Error = Error;

    fn try_from(wire: Wire) -> Result<Self> {
        Self::new(wire.address, wire.secret, wire.restarts)
    }
}
