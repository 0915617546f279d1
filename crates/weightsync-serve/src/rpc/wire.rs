//! The JSON messages. `openapi.json` describes them for other languages, and a test compares it
//! with these types.

use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use weightsync_engine::transport::random;
use weightsync_engine::{Digest, Epoch, Layout, ModelId, Run, Version};
use weightsync_link::tls::Tls;

/// The protocol of both ends. A worker with another protocol is refused.
pub(crate) const PROTOCOL: u32 = 2;

/// How many bytes of a version have a checksum of their own.
pub(crate) const BLOCK_BYTES: u64 = 1 << 20;

/// The longest body of a registration and of a worker's message, in bytes.
pub(crate) const MAX_BODY: usize = 64 << 10;

/// The longest description of a model, in bytes.
pub(crate) const MAX_SPEC: usize = 256 << 20;

/// The longest reason, in bytes.
pub(crate) const MAX_REASON: usize = 4096;

/// The longest label of a device, in bytes.
pub(crate) const MAX_DEVICE: usize = 64;

/// The routes of a sender.
pub(crate) mod of_sender {
    pub(crate) const WORKERS: &str = "/v1/workers";
    pub(crate) const MESSAGES: &str = "/v1/workers/{id}/words";
    pub(crate) const SET: &str = "/v1/workers/{id}/set";
    pub(crate) const MODEL: &str = "/v1/models/{model}";
    pub(crate) const IMAGE: &str = "/v1/models/{model}/versions/{version}/image";
    pub(crate) const STATUS: &str = "/v1/status";
}

/// The routes of a worker.
pub(crate) mod of_worker {
    pub(crate) const LIFELINE: &str = "/v1/lifeline";
    pub(crate) const WEIGHTS: &str = "/v1/weights";
}

/// A worker's first message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Register {
    pub(crate) protocol: u32,
    pub(crate) worker: u32,
    pub(crate) pid: u32,
    pub(crate) device: String,
    /// The models that the worker takes.
    pub(crate) models: Vec<ModelId>,
    /// Where the sender calls the worker, as `http://ADDRESS:PORT`.
    pub(crate) url: String,
    /// The highest epoch that the worker has seen: an older sender refuses the worker.
    pub(crate) seen: Epoch,
    /// For a worker that was admitted before and whose connection broke: the run that it
    /// continues. Another sender refuses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) run: Option<Run>,
    /// New and random for each registration. The sender proves itself with it, and the worker
    /// tells its own registration from one that another process makes in its name.
    pub(crate) nonce: Digits,
    /// The worker sends [`WorkerMessage::Joined`] once its own rendez-vous is over. A sender that waits
    /// for workers counts it then; without this, it counts it at once.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) announces: bool,
}

/// A line of the answer to [`Register`], which lasts as long as both ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromSender {
    Welcome(Welcome),
    /// Counts; five a second.
    Beat(u64),
    /// The sender shuts down in order.
    Closed {},
}

/// The first line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Welcome {
    pub(crate) protocol: u32,
    /// The name of this connection from here on, which only this worker is told: all workers have
    /// the same bearer, so the name alone says which worker sends a message.
    pub(crate) id: Digits,
    pub(crate) run: Run,
    pub(crate) pid: u32,
    /// The models of the sender, in its order.
    pub(crate) models: Vec<ModelId>,
    /// The call that will come at once has this number; 0: none will.
    pub(crate) sequence: u64,
    /// Proof that the sender has the secret, made of the worker's nonce and of `id`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) proof: Option<Digits>,
}

/// The question of a lifeline: which registration the sender answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Registering {
    pub(crate) nonce: Digits,
}

/// A line of a worker's lifeline, which lasts as long as both ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromWorker {
    /// The first line.
    Here { worker: u32, pid: u32 },
    /// Counts; five a second.
    Beat(u64),
    /// The worker leaves in order.
    Left {},
}

/// One version of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SetPart {
    /// The model's place among the sender's.
    pub(crate) model: usize,
    pub(crate) version: Version,
    // The worker compares these two with its own layout and block size before it makes room.
    pub(crate) bytes: u64,
    pub(crate) chunk_bytes: u64,
    /// CRC-64/NVME of each block, as 16 hexadecimal digits.
    pub(crate) crc64: Vec<Crc>,
    /// The digest of the whole version, if the sender has computed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) digest: Option<Digest>,
}

/// A call to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Call {
    /// The name of the worker's connection.
    pub(crate) id: Digits,
    pub(crate) run: Run,
    pub(crate) sequence: u64,
    /// Where the versions are fetched, as `http://ADDRESS:PORT`.
    pub(crate) url: String,
    pub(crate) models: Vec<SetPart>,
}

/// A line of the answer to [`Call`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Notified {
    /// The worker has the whole set, and has checked it.
    Staged { sequence: u64 },
    /// The worker's program has the set, and has not reported the outcome yet.
    Taken { sequence: u64 },
    /// The last line: the worker runs the set.
    Applied(Applied),
    /// The last line: the worker cannot use the set.
    Refused { sequence: u64, reason: String },
    /// The last line: a newer set has replaced this one.
    PassedOver { sequence: u64 },
}

/// The versions that a worker runs from here on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Applied {
    /// The sequence of the call or the answer; 0 for an answer other than the newest set.
    pub(crate) sequence: u64,
    pub(crate) versions: Vec<Runs>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Runs {
    pub(crate) model: usize,
    pub(crate) version: Version,
}

/// A worker's unasked report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WorkerMessage {
    /// The worker has read the models' descriptions, and they fit its own.
    Joined {},
    Applied(Applied),
    Refused {
        sequence: u64,
        reason: String,
    },
    /// The worker can use nothing at all.
    Rejected {
        reason: String,
    },
}

/// The question for a set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Question {
    pub(crate) want: WantKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) model: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) version: Option<u64>,
    /// How long to wait for an answer at most; without it, without limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) wait_ms: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum WantKind {
    Newest,
    AtLeast,
    Exactly,
}

/// A set that was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Asked {
    /// 0 for a set other than the newest.
    pub(crate) sequence: u64,
    pub(crate) models: Vec<SetPart>,
}

/// The body of an answer that is no success.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RpcProblem {
    pub(crate) error: String,
    /// For a version that is not kept: the versions that are, newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) known: Vec<Version>,
    /// For a worker that has seen a later sender: this one's epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) epoch: Option<Epoch>,
    /// For a worker whose number another live worker has: that worker's process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) taken_by: Option<u32>,
}

/// A checksum, in JSON as 16 hexadecimal digits: a number would lose some.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Crc(pub(crate) u64);

impl From<Crc> for String {
    fn from(crc: Crc) -> Self {
        format!("{:016x}", crc.0)
    }
}

impl TryFrom<String> for Crc {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let digits = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let crc = u64::from_str_radix(&text, 16);
        match (digits, crc) {
            (true, Ok(crc)) => Ok(Self(crc)),
            _ => Err("a checksum has 16 hexadecimal digits".into()),
        }
    }
}

/// 32 bytes, in JSON as 64 hexadecimal digits. `==` takes the same time wherever they differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Digits(pub(crate) blake3::Hash);

impl Digits {
    /// Some that nobody can guess.
    ///
    /// # Errors
    ///
    /// Those of the system's source of random bytes.
    pub(crate) fn random() -> weightsync_engine::Result<Self> {
        let bytes: [u8; 32] = random()?;
        Ok(Self(bytes.into()))
    }
}

impl fmt::Display for Digits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.to_hex())
    }
}

impl From<Digits> for String {
    fn from(digits: Digits) -> Self {
        digits.to_string()
    }
}

impl TryFrom<String> for Digits {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let hash = blake3::Hash::from_hex(text);
        hash.map(Self)
            .map_err(|_| "expected 64 hexadecimal digits".into())
    }
}

impl SetPart {
    /// Whether it is of a version of this layout, block by block.
    pub(crate) fn is_of(&self, layout: &Layout) -> bool {
        let blocks = layout.bytes().div_ceil(BLOCK_BYTES);
        // The counts come from outside. They must match the layout before a block's index is taken
        // from them.
        self.bytes == layout.bytes()
            && self.chunk_bytes == BLOCK_BYTES
            && self.crc64.len() as u64 == blocks
            && !self.version.is_none()
    }
}

/// The most bytes of a set of such layouts.
pub(crate) fn max_set<'a>(layouts: impl Iterator<Item = &'a Layout>) -> usize {
    let parts = layouts.map(|layout| {
        let blocks = usize::try_from(layout.bytes().div_ceil(BLOCK_BYTES)).unwrap_or(usize::MAX);
        // A checksum takes 19 bytes: 16 digits in quotes, and a comma. The rest of a part is short.
        blocks.saturating_mul(20).saturating_add(512)
    });
    parts.fold(MAX_BODY, usize::saturating_add)
}

/// The base of a URL of an address, for an end with these certificates.
pub(crate) fn url(addr: SocketAddr, tls: Option<&Tls>) -> String {
    let scheme = match tls.is_some_and(|tls| tls.covers(addr)) {
        true => "https",
        false => "http",
    };
    format!("{scheme}://{addr}")
}

/// The address in such a URL, and whether connections to it are encrypted.
pub(crate) fn addr_of(url: &str) -> Option<(SocketAddr, bool)> {
    let (scheme, rest) = url.split_once("://")?;
    let is_encrypted = match scheme {
        "http" => false,
        "https" => true,
        _ => return None,
    };
    // Only a literal address parses, so no name that a peer has sent is resolved.
    let addr = rest.trim_end_matches('/').parse().ok()?;
    Some((addr, is_encrypted))
}

/// As much of a reason as travels.
pub(crate) fn cut(reason: &str) -> String {
    // Cut at a character boundary: the reason is UTF-8 and travels as JSON.
    reason[..reason.floor_char_boundary(MAX_REASON)].to_owned()
}

/// A line of JSON.
pub(crate) fn line(value: &impl Serialize) -> bytes::Bytes {
    let mut line = serde_json::to_vec(value)
        .unwrap_or_else(|_| unreachable!("lines are plain data with text keys"));
    line.push(b'\n');
    line.into()
}

#[cfg(test)]
mod tests;
