//! What a worker needs to join.

use std::fmt;

use serde::{Deserialize, Serialize};
use weightsync_core::ModelId;

use crate::error::{Error, Result};

/// Everything a worker needs to join a sender: a plain value that crosses a
/// process, a pipe, a file or an environment variable with any serde format.
/// No live handle rides in it, and it can be used any number of times.
///
/// It carries the secret that lets a worker in: treat it like a password.
///
/// ```
/// use weightsync::{InitInfo, SenderSetup, Tensors};
///
/// let mut weights = Tensors::new();
/// weights.insert("bias", [2], vec![0.5_f32, 1.5])?;
/// let info = SenderSetup::new("policy", &weights)?.init_info();
/// let text = serde_json::to_string(&info)?;
/// assert_eq!(serde_json::from_str::<InitInfo>(&text)?, info);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Wire", into = "Wire")]
pub struct InitInfo {
    pub(crate) model: ModelId,
    pub(crate) address: String,
    pub(crate) secret: [u8; 16],
    /// Whether a sender that died may come back at the same address.
    pub(crate) restarts: bool,
}

impl InitInfo {
    /// The model the sender feeds.
    pub fn model(&self) -> &ModelId {
        &self.model
    }
}

impl fmt::Debug for InitInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The secret stays out of logs.
        f.debug_struct("InitInfo")
            .field("model", &self.model)
            .field("address", &self.address)
            .field("restarts", &self.restarts)
            .finish_non_exhaustive()
    }
}

/// The longest address: that of an abstract Unix socket, in bytes.
const MAX_ADDRESS: usize = 107;

const FORMAT: u8 = 1;

/// How it travels.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wire {
    format: u8,
    model: ModelId,
    address: String,
    secret: [u8; 16],
    restarts: bool,
}

impl From<InitInfo> for Wire {
    fn from(info: InitInfo) -> Self {
        let InitInfo {
            model,
            address,
            secret,
            restarts,
        } = info;
        Self {
            format: FORMAT,
            model,
            address,
            secret,
            restarts,
        }
    }
}

impl TryFrom<Wire> for InitInfo {
    type Error = Error;

    fn try_from(wire: Wire) -> Result<Self> {
        let Wire {
            format,
            model,
            address,
            secret,
            restarts,
        } = wire;
        if format != FORMAT {
            return Err(Error::BadInitInfo(format!(
                "it has format {format}, this version reads {FORMAT}; install the same weightsync on both ends"
            )));
        }
        if address.is_empty() || address.len() > MAX_ADDRESS {
            return Err(Error::BadInitInfo(format!(
                "its address has {} bytes where 1 to {MAX_ADDRESS} are possible",
                address.len()
            )));
        }
        Ok(Self {
            model,
            address,
            secret,
            restarts,
        })
    }
}
