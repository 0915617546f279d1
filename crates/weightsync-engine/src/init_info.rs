//! What a worker needs to join.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use weightsync_core::{ModelId, SenderStatus};

use crate::error::{Error, Result};
use crate::scheme::{AnyScheme, MAX_TEXT};
use crate::transport::Endpoint;

/// Everything a worker needs to join a sender: a plain value that crosses a
/// process, a pipe, a file or an environment variable with any serde format.
/// It holds no live handle, and can be used any number of times.
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "WireInitInfo", into = "WireInitInfo")]
pub struct InitInfo {
    /// The scheme's word and settings. It is looked up where it is used, so that
    /// an init info can be passed on by a process that does not know the scheme.
    pub(crate) scheme: String,
    /// The models, in the set's order; at least one.
    pub(crate) models: Vec<ModelId>,
    pub(crate) at: Endpoint,
}

impl InitInfo {
    /// The init info of a sender of these models, for a scheme whose senders are all found at the same
    /// place, such as a store.
    ///
    /// # Errors
    ///
    /// If the scheme cannot allocate an address for the models.
    pub fn of(scheme: &AnyScheme, models: &[ModelId]) -> Result<Self> {
        Ok(Self {
            scheme: scheme.text()?,
            models: models.to_vec(),
            at: scheme.scheme().allocate_endpoint(models, None)?,
        })
    }

    /// Asks the sender for its [status](SenderStatus), from any process. Each wait takes at most
    /// `timeout`.
    ///
    /// # Errors
    ///
    /// [`Error::NoSender`] if nobody is there, [`Error::Unsupported`] for a scheme whose senders cannot
    /// be asked, and what the text of the scheme gives.
    pub fn status(&self, timeout: Duration) -> Result<SenderStatus> {
        let scheme: AnyScheme = self.scheme.parse()?;
        scheme.scheme().ask_status(&self.at, timeout)
    }

    /// The models the sender feeds, in the set's order.
    pub fn models(&self) -> &[ModelId] {
        &self.models
    }

    /// The scheme as text: its word and settings.
    pub fn scheme(&self) -> &str {
        &self.scheme
    }

    /// The address of the sender and the secret that lets a worker in: for programs that join
    /// without a [`ReceiverSetup`](crate::ReceiverSetup).
    pub fn endpoint(&self) -> &Endpoint {
        &self.at
    }
}

/// The most models of one sender.
const MAX_MODELS: usize = 64;

const FORMAT: u8 = 3;

/// The serialised form.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireInitInfo {
    format: u8,
    scheme: String,
    models: Vec<ModelId>,
    at: Endpoint,
}

impl From<InitInfo> for WireInitInfo {
    fn from(info: InitInfo) -> Self {
        let InitInfo { scheme, models, at } = info;
        Self {
            format: FORMAT,
            scheme,
            models,
            at,
        }
    }
}

impl TryFrom<WireInitInfo> for InitInfo {
    type Error = Error;

    fn try_from(wire: WireInitInfo) -> Result<Self> {
        let WireInitInfo {
            format,
            scheme,
            models,
            at,
        } = wire;
        // First of all: a later format may have other fields.
        if format != FORMAT {
            return Err(Error::BadInitInfo(format!(
                "it has format {format}, this version reads {FORMAT}; install the same weightsync on both ends"
            )));
        }
        if scheme.is_empty() || scheme.len() > MAX_TEXT {
            return Err(Error::BadInitInfo(format!(
                "its scheme has {} bytes, expected 1 to {MAX_TEXT}",
                scheme.len()
            )));
        }
        if models.is_empty() || models.len() > MAX_MODELS {
            return Err(Error::BadInitInfo(format!(
                "it names {} models, expected 1 to {MAX_MODELS}",
                models.len()
            )));
        }
        let twice = models
            .iter()
            .enumerate()
            .find(|(index, model)| models[..*index].contains(model));
        if let Some((_, model)) = twice {
            return Err(Error::BadInitInfo(format!("it names {model} twice")));
        }
        Ok(Self { scheme, models, at })
    }
}
