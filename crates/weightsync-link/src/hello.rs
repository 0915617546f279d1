//! The handshake: both ends agree on a protocol, and prove that they have the same key.
//!
//! ```text
//! client                                   server
//! ClientHello (64)   ───────────────────▶
//!                    ◀───────────────────  ServerHello (64)
//! ClientProof (32)   ───────────────────▶
//!                    ◀───────────────────  ServerProof (33)
//! ```
//!
//! [`ClientHandshake`] and [`ServerHandshake`] take the bytes that arrive, in pieces of any size,
//! and return the bytes to send. They take no byte beyond the handshake, allocate next to nothing,
//! and have neither a clock nor random numbers. The caller ends a handshake that takes too long,
//! and brings the nonces.
//!
//! A server proves nothing to a client that has not proved itself first. A proof is worthless
//! in another handshake, because it covers both nonces.

mod handshake;

use std::fmt;

use weightsync_core::Remedy;

pub use self::handshake::{
    Agreed, ClientHandshake, HandshakeStep, Next, ServerHandshake, TurnsAway,
};

/// The newest protocol of this version.
pub const PROTOCOL: u16 = 1;

/// The oldest protocol that this version still speaks: the one before the newest.
pub const OLDEST: u16 = if PROTOCOL > 1 { PROTOCOL - 1 } else { 1 };

/// Bytes of a [`ClientHello`] and of a [`ServerHello`].
pub const HELLO_BYTES: usize = 64;

/// Bytes of a client's proof.
pub const CLIENT_PROOF_BYTES: usize = 32;

/// Bytes of a server's proof, including its verdict.
pub const SERVER_PROOF_BYTES: usize = 33;

/// Bytes of a nonce.
pub const NONCE_BYTES: usize = 32;

/// How both hellos begin. The line break shows whether a link changes line breaks.
const MAGIC: [u8; 8] = *b"wsLINK\r\n";

/// How many bytes of a stranger's data an error shows.
const SHOWN: usize = 16;

/// The protocols that one end speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocols {
    /// The oldest, from 1.
    pub oldest: u16,
    /// The newest, not below `oldest`.
    pub newest: u16,
}

impl Protocols {
    /// The protocols of this version.
    pub const OURS: Self = Self {
        oldest: OLDEST,
        newest: PROTOCOL,
    };

    /// The newest protocol that both ends speak, if there is one; the same from either side.
    ///
    /// ```
    /// use weightsync_link::hello::Protocols;
    ///
    /// let (old, new) = (Protocols { oldest: 1, newest: 2 }, Protocols { oldest: 2, newest: 3 });
    /// assert_eq!(old.common(new), Some(2));
    /// let newer = Protocols { oldest: 3, newest: 4 };
    /// assert_eq!(old.common(newer), None);
    /// ```
    pub fn common(self, other: Self) -> Option<u16> {
        let newest = self.newest.min(other.newest);
        (newest >= self.oldest.max(other.oldest)).then_some(newest)
    }

    fn decode(oldest: [u8; 2], newest: [u8; 2]) -> Result<Self, HelloError> {
        let (oldest, newest) = (u16::from_le_bytes(oldest), u16::from_le_bytes(newest));
        if oldest == 0 || newest < oldest {
            return Err(malformed(
                "protocols from 1, oldest to newest",
                format!("{oldest} to {newest}"),
            ));
        }
        Ok(Self { oldest, newest })
    }
}

impl fmt::Display for Protocols {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.oldest == self.newest {
            true => write!(f, "protocol {}", self.newest),
            false => write!(f, "protocols {} to {}", self.oldest, self.newest),
        }
    }
}

/// What a link is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LinkRole {
    /// An agent and its sender exchange messages.
    Control,
    /// A child fetches versions from its parent.
    Bulk,
    /// A client asks for the status.
    Status,
    /// A client asks for a scrub: all versions that agents hold are compared with the published
    /// ones.
    Scrub,
    /// A worker of a collector brings frames to its trainer.
    Collector,
}

impl LinkRole {
    /// The role's byte on the wire.
    pub fn code(self) -> u8 {
        match self {
            Self::Control => 1,
            Self::Bulk => 2,
            Self::Status => 3,
            Self::Scrub => 4,
            Self::Collector => 5,
        }
    }

    /// The role of a byte on the wire.
    pub fn from_code(code: u8) -> Option<Self> {
        use LinkRole::*;
        [Control, Bulk, Status, Scrub, Collector]
            .into_iter()
            .find(|role| role.code() == code)
    }
}

/// The first bytes of a link.
///
/// | bytes | |
/// |---|---|
/// | 0..8 | `wsLINK\r\n` |
/// | 8..10 | newest protocol |
/// | 10..12 | oldest protocol |
/// | 12 | role |
/// | 13..32 | zeros, not checked |
/// | 32..64 | nonce |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientHello {
    /// The protocols that the client speaks.
    pub protocols: Protocols,
    /// The [`LinkRole`]'s byte. An unknown one may belong to a newer protocol.
    pub role: u8,
    /// Random bytes, for this handshake alone.
    pub nonce: [u8; NONCE_BYTES],
}

impl ClientHello {
    /// The wire form.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&self.protocols.newest.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.protocols.oldest.to_le_bytes());
        bytes[12] = self.role;
        bytes[32..].copy_from_slice(&self.nonce);
        bytes
    }

    /// Decodes the wire form.
    ///
    /// # Errors
    ///
    /// [`HelloError::NotWeightsync`], and [`HelloError::Malformed`] for protocols that do not
    /// ascend.
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, HelloError> {
        check_magic(bytes)?;
        Ok(Self {
            // On the wire the newest protocol comes first.
            protocols: Protocols::decode([bytes[10], bytes[11]], [bytes[8], bytes[9]])?,
            role: bytes[12],
            nonce: nonce(bytes),
        })
    }
}

/// A server's verdict on a [`ClientHello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HelloVerdict {
    /// The handshake continues in this protocol.
    GoOn {
        /// The newest that both ends speak.
        protocol: u16,
    },
    /// There is no protocol that both ends speak.
    NoCommonProtocol,
    /// The server has no room for another control link.
    Busy,
    /// The server takes encrypted links alone.
    NeedsTls,
}

/// The answer to a [`ClientHello`].
///
/// | bytes | |
/// |---|---|
/// | 0..8 | `wsLINK\r\n` |
/// | 8..10 | the chosen protocol; 0 if there is none |
/// | 10 | verdict: 0 go on, 1 no common protocol, 2 busy, 3 to be encrypted |
/// | 11..28 | zeros, not checked |
/// | 28..30 | the server's oldest protocol |
/// | 30..32 | the server's newest protocol |
/// | 32..64 | nonce |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerHello {
    /// Whether the client may go on.
    pub verdict: HelloVerdict,
    /// The protocols that the server speaks.
    pub protocols: Protocols,
    /// Random bytes, for this handshake alone.
    pub nonce: [u8; NONCE_BYTES],
}

impl ServerHello {
    /// The wire form.
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        let (protocol, verdict) = match self.verdict {
            HelloVerdict::GoOn { protocol } => (protocol, 0),
            HelloVerdict::NoCommonProtocol => (0, 1),
            HelloVerdict::Busy => (0, 2),
            HelloVerdict::NeedsTls => (0, 3),
        };
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&protocol.to_le_bytes());
        bytes[10] = verdict;
        bytes[28..30].copy_from_slice(&self.protocols.oldest.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.protocols.newest.to_le_bytes());
        bytes[32..].copy_from_slice(&self.nonce);
        bytes
    }

    /// Decodes the wire form.
    ///
    /// # Errors
    ///
    /// [`HelloError::NotWeightsync`], and [`HelloError::Malformed`] for an impossible verdict or
    /// protocols that do not ascend.
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, HelloError> {
        check_magic(bytes)?;
        let protocol = u16::from_le_bytes([bytes[8], bytes[9]]);
        let verdict = match (bytes[10], protocol) {
            (0, 1..) => HelloVerdict::GoOn { protocol },
            (1, 0) => HelloVerdict::NoCommonProtocol,
            (2, 0) => HelloVerdict::Busy,
            (3, 0) => HelloVerdict::NeedsTls,
            (verdict, protocol) => {
                return Err(malformed(
                    "a verdict of 0 with a protocol, or of 1 to 3 without",
                    format!("verdict {verdict} with protocol {protocol}"),
                ));
            }
        };
        Ok(Self {
            verdict,
            protocols: Protocols::decode([bytes[28], bytes[29]], [bytes[30], bytes[31]])?,
            nonce: nonce(bytes),
        })
    }
}

fn nonce(hello: &[u8; HELLO_BYTES]) -> [u8; NONCE_BYTES] {
    let mut nonce = [0; NONCE_BYTES];
    nonce.copy_from_slice(&hello[32..]);
    nonce
}

fn check_magic(came: &[u8]) -> Result<(), HelloError> {
    match came.starts_with(&MAGIC) {
        true => Ok(()),
        false => Err(not_weightsync(came)),
    }
}

fn not_weightsync(came: &[u8]) -> HelloError {
    // Few bytes, and escaped: what a stranger sent ends up in logs and terminals.
    let first = &came[..came.len().min(SHOWN)];
    HelloError::NotWeightsync {
        first: first.escape_ascii().to_string(),
    }
}

fn malformed(expected: &'static str, got: String) -> HelloError {
    HelloError::Malformed { expected, got }
}

/// Why a handshake failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HelloError {
    /// The peer does not speak this protocol at all.
    #[error(
        "the other end is not weightsync: it began with \"{first}\"; check the address and the port"
    )]
    NotWeightsync {
        /// The first bytes of the peer, as printable text; at most 16 bytes.
        first: String,
    },
    /// The two ends have no protocol in common.
    #[error("the other end speaks {theirs}, this one {ours}: {}", who_is_older(*ours, *theirs))]
    NoCommonProtocol {
        /// The protocols of this end.
        ours: Protocols,
        /// The protocols of the peer.
        theirs: Protocols,
    },
    /// The peer has no room for another link.
    #[error("the other end has reached its limit of links; try again later")]
    Busy,
    /// This end has no room for another link, and has told the peer so.
    #[error("this end has reached its limit of links; the other end was told to try again later")]
    TurnedAway,
    /// The peer did not accept this end's proof.
    #[error(
        "the other end refused the token: give both the same (WEIGHTSYNC_TOKEN_FILE, or \
         WEIGHTSYNC_TOKEN), or the init info of the sender that runs there now"
    )]
    TokenRefused,
    /// The client has another token.
    #[error(
        "the other end has another token, or the init info of another sender: give both the same \
         token (WEIGHTSYNC_TOKEN_FILE, or WEIGHTSYNC_TOKEN), or the init info of this sender"
    )]
    WrongToken,
    /// The server accepted this end, but did not prove that it has the token itself.
    #[error(
        "the program there does not have the token that it claims to have: another program has \
         taken the address; nothing was sent to it"
    )]
    WrongServer,
    /// A field with an impossible value.
    #[error("the handshake is damaged: expected {expected}, got {got}")]
    Malformed {
        /// The accepted values.
        expected: &'static str,
        /// The value.
        got: String,
    },
    /// The peer hung up during the handshake.
    #[error(
        "the other end closed the connection during the handshake, {got} bytes into its next \
         message; is it \
         shutting down, or does it refuse this machine?"
    )]
    HungUp {
        /// How many bytes of the next message had arrived.
        got: usize,
    },
    /// The peer takes encrypted links alone.
    #[error(
        "the other end takes encrypted links alone: give this end a certificate of its authority \
         (tls=, or WEIGHTSYNC_TLS_DIR)"
    )]
    NeedsTls,
    /// This end takes encrypted links alone, and has told the peer so.
    #[error("the other end began without TLS; it was told to bring a certificate")]
    WithoutTls,
    /// The peer speaks TLS, and this end has no certificate.
    #[error(
        "the other end speaks TLS, and this end has no certificate: give it one of the same \
         authority (tls=, or WEIGHTSYNC_TLS_DIR)"
    )]
    NoCertificate,
    /// The peer hung up during the handshake of TLS.
    #[error(
        "the other end closed the connection during the TLS handshake: has it no certificate, or is \
         it shutting down?"
    )]
    TlsHungUp,
    /// The handshake of TLS failed.
    #[error("{what}")]
    Tls {
        /// What went wrong, and what to do.
        what: String,
        /// Whether a new certificate mends it, which is read without a restart.
        is_of_time: bool,
    },
    /// The handshake had already ended.
    #[error("the handshake was over already")]
    Over,
}

impl HelloError {
    /// An error of the handshake of TLS.
    pub(crate) fn tls(error: &rustls::Error) -> Self {
        use rustls::{AlertDescription, CertificateError as Of, Error};
        // One end finds the other's certificate expired, and the other is told so by an alert.
        let is_of_time = matches!(
            error,
            Error::InvalidCertificate(
                Of::Expired
                    | Of::ExpiredContext { .. }
                    | Of::NotValidYet
                    | Of::NotValidYetContext { .. }
            ) | Error::AlertReceived(AlertDescription::CertificateExpired)
        );
        Self::Tls {
            what: crate::tls::explain(error),
            is_of_time,
        }
    }

    /// What to do: connect again, later, or change something first.
    pub fn remedy(&self) -> Remedy {
        match self {
            // These may pass: an end restarts or has room again, a certificate is renewed, bytes
            // were damaged.
            Self::Busy
            | Self::TurnedAway
            | Self::HungUp { .. }
            | Self::TlsHungUp
            | Self::Tls {
                is_of_time: true, ..
            }
            | Self::Malformed { .. } => Remedy::Retry,
            _ => Remedy::GiveUp,
        }
    }
}

fn who_is_older(ours: Protocols, theirs: Protocols) -> &'static str {
    match ours.newest < theirs.oldest {
        true => "install a newer weightsync here, or an older one there",
        false => "install a newer weightsync there, or an older one here",
    }
}
