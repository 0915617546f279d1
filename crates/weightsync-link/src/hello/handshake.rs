//! The two ends of a handshake: they take the bytes that arrive, and return the bytes to send.

use super::{
    CLIENT_PROOF_BYTES, ClientHello, HELLO_BYTES, HelloError, HelloVerdict, LinkRole, MAGIC,
    NONCE_BYTES, Protocols, SERVER_PROOF_BYTES, ServerHello, check_magic, malformed,
    not_weightsync,
};
use crate::access::{Key, Proof};

/// What both ends know once the handshake is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// The protocol of the link.
    pub protocol: u16,
    /// What the link is for.
    pub role: LinkRole,
}

/// What to do next in a handshake.
#[derive(Debug, PartialEq, Eq)]
#[must_use]
pub struct HandshakeStep {
    /// The bytes to send first; may be empty.
    pub send: Vec<u8>,
    /// What comes after that.
    pub next: Next,
}

/// How a handshake continues.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// Read at least this many bytes from the peer.
    Read(usize),
    /// The handshake is done: frames follow.
    Done(Agreed),
    /// The handshake failed: close the link.
    Close(HelloError),
}

impl HandshakeStep {
    fn close(error: HelloError) -> Self {
        Self::new(Vec::new(), Next::Close(error))
    }

    fn new(send: impl Into<Vec<u8>>, next: Next) -> Self {
        let send = send.into();
        Self { send, next }
    }
}

/// The end that connects.
#[derive(Debug)]
pub struct ClientHandshake {
    key: Key,
    role: LinkRole,
    ours: Protocols,
    hello: [u8; HELLO_BYTES],
    came: Vec<u8>,
    state: ClientState,
}

#[derive(Clone, Copy, Debug)]
enum ClientState {
    Hello,
    Proof { expected: Proof, protocol: u16 },
    Over,
}

impl ClientHandshake {
    /// A client, and the hello that it sends first. The nonce must be new and random.
    pub fn new(
        key: Key,
        role: LinkRole,
        ours: Protocols,
        nonce: [u8; NONCE_BYTES],
    ) -> (Self, [u8; HELLO_BYTES]) {
        let hello = ClientHello {
            protocols: ours,
            role: role.code(),
            nonce,
        }
        .encode();
        let client = Self {
            key,
            role,
            ours,
            hello,
            came: Vec::new(),
            state: ClientState::Hello,
        };
        (client, hello)
    }

    /// Takes the bytes of the handshake from the front of `input`; bytes left after it are frames.
    pub fn feed(&mut self, input: &mut &[u8]) -> HandshakeStep {
        match self.state {
            ClientState::Hello => match gather_hello(&mut self.came, input) {
                Ok(hello) => self.hello(hello),
                Err(step) => step,
            },
            ClientState::Proof { expected, protocol } => {
                match gather::<SERVER_PROOF_BYTES>(&mut self.came, input) {
                    Ok(proof) => self.proof(proof, expected, protocol),
                    Err(missing) => HandshakeStep::new([], Next::Read(missing)),
                }
            }
            ClientState::Over => HandshakeStep::close(HelloError::Over),
        }
    }

    /// The error if the peer hangs up now.
    pub fn hung_up(&self) -> HelloError {
        hung_up(&self.came, matches!(self.state, ClientState::Hello))
    }

    fn hello(&mut self, bytes: [u8; HELLO_BYTES]) -> HandshakeStep {
        // The handshake is over, unless all that follows holds.
        self.state = ClientState::Over;
        let server = match ServerHello::decode(&bytes) {
            Ok(server) => server,
            Err(error) => return HandshakeStep::close(error),
        };
        let (ours, theirs) = (self.ours, server.protocols);
        let protocol = match server.verdict {
            HelloVerdict::Busy => return HandshakeStep::close(HelloError::Busy),
            HelloVerdict::NeedsTls => return HandshakeStep::close(HelloError::NeedsTls),
            HelloVerdict::NoCommonProtocol => {
                return HandshakeStep::close(HelloError::NoCommonProtocol { ours, theirs });
            }
            HelloVerdict::GoOn { protocol } => protocol,
        };
        // This end checks the choice: the server that made it has not proved itself yet.
        if ours.common(theirs) != Some(protocol) {
            return HandshakeStep::close(malformed(
                "the newest protocol that both ends speak",
                format!("protocol {protocol} of {ours} here and {theirs} there"),
            ));
        }
        // Both proofs cover both hellos, and with them both nonces. So they hold in this handshake
        // alone.
        let proof = client_proof(&self.key, &self.hello, &bytes);
        let expected = server_proof(&self.key, &self.hello, &bytes, proof);
        self.state = ClientState::Proof { expected, protocol };
        HandshakeStep::new(proof.bytes().as_slice(), Next::Read(SERVER_PROOF_BYTES))
    }

    fn proof(
        &mut self,
        bytes: [u8; SERVER_PROOF_BYTES],
        expected: Proof,
        protocol: u16,
    ) -> HandshakeStep {
        self.state = ClientState::Over;
        let [verdict, proof @ ..] = bytes;
        let role = self.role;
        match verdict {
            0 if Proof::from_bytes(proof) == expected => {
                HandshakeStep::new([], Next::Done(Agreed { protocol, role }))
            }
            // It claims to have accepted the proof, and does not have the key.
            0 => HandshakeStep::close(HelloError::WrongServer),
            1 => HandshakeStep::close(HelloError::TokenRefused),
            other => HandshakeStep::close(malformed("a verdict of 0 or 1", other.to_string())),
        }
    }
}

/// The end that listens.
#[derive(Debug)]
pub struct ServerHandshake {
    key: Key,
    ours: Protocols,
    turns_away: Option<TurnsAway>,
    nonce: [u8; NONCE_BYTES],
    came: Vec<u8>,
    state: ServerState,
}

/// Why a server turns clients away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TurnsAway {
    /// It has no room for another control link. Other roles belong to agents that are already in, so
    /// they are accepted.
    Busy,
    /// The connection is plain, and the server takes encrypted ones alone.
    Plain,
}

#[derive(Clone, Copy, Debug)]
enum ServerState {
    Hello,
    Proof {
        expected: Proof,
        answer: Proof,
        agreed: Agreed,
    },
    Over,
}

impl ServerHandshake {
    /// A server for one client. The nonce must be new and random.
    pub fn new(
        key: Key,
        ours: Protocols,
        turns_away: Option<TurnsAway>,
        nonce: [u8; NONCE_BYTES],
    ) -> Self {
        Self {
            key,
            ours,
            turns_away,
            nonce,
            came: Vec::new(),
            state: ServerState::Hello,
        }
    }

    /// Takes the bytes of the handshake from the front of `input`; bytes left after it are frames.
    pub fn feed(&mut self, input: &mut &[u8]) -> HandshakeStep {
        match self.state {
            ServerState::Hello => match gather_hello(&mut self.came, input) {
                Ok(hello) => self.hello(hello),
                Err(step) => step,
            },
            ServerState::Proof {
                expected,
                answer,
                agreed,
            } => match gather::<CLIENT_PROOF_BYTES>(&mut self.came, input) {
                Ok(proof) => {
                    self.state = ServerState::Over;
                    judge(Proof::from_bytes(proof) == expected, answer, agreed)
                }
                Err(missing) => HandshakeStep::new([], Next::Read(missing)),
            },
            ServerState::Over => HandshakeStep::close(HelloError::Over),
        }
    }

    /// The error if the peer hangs up now.
    pub fn hung_up(&self) -> HelloError {
        hung_up(&self.came, matches!(self.state, ServerState::Hello))
    }

    fn hello(&mut self, bytes: [u8; HELLO_BYTES]) -> HandshakeStep {
        // The handshake is over, unless all that follows holds.
        self.state = ServerState::Over;
        let client = match ClientHello::decode(&bytes) {
            Ok(client) => client,
            Err(error) => return HandshakeStep::close(error),
        };
        let (ours, theirs) = (self.ours, client.protocols);
        let answer = |verdict| {
            let hello = ServerHello {
                verdict,
                protocols: ours,
                nonce: self.nonce,
            };
            hello.encode()
        };
        let Some(protocol) = ours.common(theirs) else {
            let error = HelloError::NoCommonProtocol { ours, theirs };
            return HandshakeStep::new(answer(HelloVerdict::NoCommonProtocol), Next::Close(error));
        };
        // Checked only after the protocol: a newer one may have other roles.
        let Some(role) = LinkRole::from_code(client.role) else {
            return HandshakeStep::close(malformed("a role of 1 to 5", client.role.to_string()));
        };
        match self.turns_away {
            Some(TurnsAway::Busy) if role == LinkRole::Control => {
                return HandshakeStep::new(
                    answer(HelloVerdict::Busy),
                    Next::Close(HelloError::TurnedAway),
                );
            }
            Some(TurnsAway::Plain) => {
                return HandshakeStep::new(
                    answer(HelloVerdict::NeedsTls),
                    Next::Close(HelloError::WithoutTls),
                );
            }
            Some(TurnsAway::Busy) | None => {}
        }
        let hello = answer(HelloVerdict::GoOn { protocol });
        let expected = client_proof(&self.key, &bytes, &hello);
        self.state = ServerState::Proof {
            expected,
            answer: server_proof(&self.key, &bytes, &hello, expected),
            agreed: Agreed { protocol, role },
        };
        HandshakeStep::new(hello, Next::Read(CLIENT_PROOF_BYTES))
    }
}

fn judge(is_proved: bool, answer: Proof, agreed: Agreed) -> HandshakeStep {
    let mut reply = [0; SERVER_PROOF_BYTES];
    // Without a proof of its own: that is only for clients that have the key.
    if !is_proved {
        reply[0] = 1;
        return HandshakeStep::new(reply, Next::Close(HelloError::WrongToken));
    }
    reply[1..].copy_from_slice(answer.bytes());
    HandshakeStep::new(reply, Next::Done(agreed))
}

fn client_proof(key: &Key, client: &[u8; HELLO_BYTES], server: &[u8; HELLO_BYTES]) -> Proof {
    key.proof(&[b"client", client, server])
}

fn server_proof(
    key: &Key,
    client: &[u8; HELLO_BYTES],
    server: &[u8; HELLO_BYTES],
    proof: Proof,
) -> Proof {
    // One part longer than the client's proof, so neither can stand for the other.
    key.proof(&[b"server", client, server, proof.bytes()])
}

/// Collects `N` bytes, or returns how many are still missing.
fn gather<const N: usize>(came: &mut Vec<u8>, input: &mut &[u8]) -> Result<[u8; N], usize> {
    let missing = N.saturating_sub(came.len());
    let (now, rest) = input.split_at(missing.min(input.len()));
    came.extend_from_slice(now);
    *input = rest;
    let whole = <[u8; N]>::try_from(came.as_slice()).map_err(|_| N - came.len())?;
    came.clear();
    Ok(whole)
}

/// Collects a hello; a stranger is recognised as soon as its first bytes differ.
fn gather_hello(came: &mut Vec<u8>, input: &mut &[u8]) -> Result<[u8; HELLO_BYTES], HandshakeStep> {
    gather(came, input).map_err(|missing| match check_magic(came) {
        Err(error) if came.len() >= MAGIC.len() => HandshakeStep::close(error),
        _ => HandshakeStep::new([], Next::Read(missing)),
    })
}

fn hung_up(came: &[u8], in_hello: bool) -> HelloError {
    // A part of the magic, or more than that: either way the peer began as weightsync does.
    let is_ours = MAGIC.starts_with(came) || came.starts_with(&MAGIC);
    match in_hello && !is_ours {
        true => not_weightsync(came),
        false => HelloError::HungUp { got: came.len() },
    }
}
