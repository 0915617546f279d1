//! Processes that mean a trainer no good.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use weightsync_core::{Epoch, Run};
use weightsync_link::access::{Key, Token};
use weightsync_link::frame::{self, FrameHeader, FrameKind, HEADER_BYTES};
use weightsync_link::hello::{ClientHandshake, HELLO_BYTES, LinkRole, Next, Protocols};
use weightsync_link::message::Message;
use weightsync_net::status;
use weightsync_net::wire::message::{
    BlockRange, FromRoot, ToChild, ToParent, ToRoot, WantedBlocks, Welcome,
};

use super::roles::token;
use super::scale::{Dice, longest};

/// The kinds of attacks.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum Attack {
    /// Random bytes.
    Noise,
    /// Handshakes that end in the middle.
    CutHandshakes,
    /// A byte of a handshake each 100 ms.
    SlowHandshakes,
    /// Connections on which nothing is said.
    HalfOpen,
    /// Handshakes by another token.
    WrongTokens,
    /// Messages of a process with the token, sent once more.
    Replays,
    /// After a handshake as it should be: frames that end in the middle, are too
    /// long, damaged, of another kind, or of nonsense.
    BadFrames,
    /// Fetches of more blocks than there can be, by one who is in.
    HugeFetches,
}

pub(crate) const ATTACKS: [Attack; 8] = [
    Attack::Noise,
    Attack::CutHandshakes,
    Attack::SlowHandshakes,
    Attack::HalfOpen,
    Attack::WrongTokens,
    Attack::Replays,
    Attack::BadFrames,
    Attack::HugeFetches,
];

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Tries it; fails where the trainer lets something in, or holds on to a connection.
pub(crate) fn attack(root: &str, attack: Attack, seed: u64) -> Outcome {
    let mut dice = Dice::new(seed);
    match attack {
        Attack::Noise => noise(root, &mut dice),
        Attack::CutHandshakes => cut_handshakes(root, &mut dice),
        Attack::SlowHandshakes => slow_handshakes(root, &mut dice),
        Attack::HalfOpen => half_open(root),
        Attack::WrongTokens => wrong_tokens(root, &mut dice),
        Attack::Replays => replays(root, &mut dice),
        Attack::BadFrames => bad_frames(root, &mut dice),
        Attack::HugeFetches => huge_fetches(root, &mut dice),
    }
}

fn noise(root: &str, dice: &mut Dice) -> Outcome {
    for _ in 0..200 {
        let mut socket = dial(root)?;
        let bytes = dice.bytes(1 + dice.clone().below(4096) as usize);
        // The sender may hang up before all is written.
        let _ = socket.write_all(&bytes);
        let _ = socket.shutdown(std::net::Shutdown::Write);
        is_closed(&mut socket)?;
    }
    Ok(())
}

fn cut_handshakes(root: &str, dice: &mut Dice) -> Outcome {
    for len in 0..=HELLO_BYTES {
        let (_, hello) = client(&token(), LinkRole::Control, dice);
        let mut socket = dial(root)?;
        let _ = socket.write_all(&hello[..len]);
        let _ = socket.shutdown(std::net::Shutdown::Write);
        is_closed(&mut socket)?;
    }
    Ok(())
}

fn slow_handshakes(root: &str, dice: &mut Dice) -> Outcome {
    let (_, hello) = client(&token(), LinkRole::Control, dice);
    let sockets: io::Result<Vec<_>> = (0..64).map(|_| dial(root)).collect();
    let mut sockets = sockets?;
    // Slowness is what this is about.
    for byte in hello.iter().take(40) {
        for socket in &mut sockets {
            let _ = socket.write_all(&[*byte]);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    sockets.iter_mut().try_for_each(is_closed)
}

fn half_open(root: &str) -> Outcome {
    let most = getrlimit(Resource::Nofile).maximum;
    let (current, maximum) = (most, most);
    setrlimit(Resource::Nofile, Rlimit { current, maximum })?;
    let sockets: io::Result<Vec<_>> = (0..2000).map(|_| dial(root)).collect();
    sockets?.iter_mut().try_for_each(is_closed)
}

fn wrong_tokens(root: &str, dice: &mut Dice) -> Outcome {
    for _ in 0..300 {
        let wrong = Token::new(dice.bytes(32))?;
        // The first are refused, the others hear nothing.
        if shake(dial(root)?, client(&wrong, LinkRole::Control, dice)).is_ok() {
            return Err("a wrong token was let in".into());
        }
    }
    Ok(())
}

fn replays(root: &str, dice: &mut Dice) -> Outcome {
    let (_, message) = shake(dial(root)?, client(&token(), LinkRole::Status, dice))?;
    for _ in 0..10 {
        let mut socket = dial(root)?;
        let _ = socket.write_all(&message);
        let mut answer = [0; HELLO_BYTES + 1];
        socket.read_exact(&mut answer)?;
        if answer[HELLO_BYTES] != 1 {
            return Err("what was said before was believed again".into());
        }
        is_closed(&mut socket)?;
    }
    Ok(())
}

fn bad_frames(root: &str, dice: &mut Dice) -> Outcome {
    for role in [
        LinkRole::Control,
        LinkRole::Bulk,
        LinkRole::Status,
        LinkRole::Scrub,
    ] {
        let kind = match role {
            LinkRole::Bulk => FrameKind::Bulk,
            _ => FrameKind::Control,
        };
        let mut whole = Vec::new();
        frame::encode(kind, &dice.bytes(300), &mut whole)?;
        let mut damaged = whole.clone();
        damaged[20] ^= 1;
        let mut huge = whole.clone();
        huge[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        let mut other = Vec::new();
        frame::encode(FrameKind::Block, &[0; 40], &mut other)?;
        let random = dice.bytes(1000);
        let cut = whole[..100].to_vec();
        for bytes in [whole, damaged, huge, other, random, cut] {
            let (mut socket, _) = shake(dial(root)?, client(&token(), role, dice))?;
            // Nothing more comes, and the connection stays open at this end.
            let _ = socket.write_all(&bytes);
            is_closed(&mut socket)
                .map_err(|error| format!("{role:?}, {} bytes: {error}", bytes.len()))?;
        }
    }
    Ok(())
}

fn huge_fetches(root: &str, dice: &mut Dice) -> Outcome {
    let run = run_of(root, dice)?;
    let (mut socket, _) = shake(dial(root)?, client(&token(), LinkRole::Bulk, dice))?;
    for _ in 0..50 {
        let status = status::ask(root, &token().secret(), None, Some(longest()))?;
        let fetch = ToParent::Fetch(WantedBlocks {
            run,
            agent: 0,
            model: 0,
            // The newest version now or a moment ago.
            version: status.models[0].version,
            base: None,
            ranges: vec![BlockRange {
                first: 0,
                count: u32::MAX,
            }],
        });
        socket.write_all(&fetch.frame()?)?;
        let answer = ToChild::decode(&read_frame(&mut socket, FrameKind::Bulk)?)?;
        if !matches!(answer, ToChild::Gone { .. }) {
            return Err(format!("it answers {answer:?}").into());
        }
    }
    Ok(())
}

/// The trainer's run, as an agent is told it.
fn run_of(root: &str, dice: &mut Dice) -> Result<Run, Box<dyn std::error::Error>> {
    let (mut socket, _) = shake(dial(root)?, client(&token(), LinkRole::Control, dice))?;
    let agent = ToRoot::Agent {
        name: "an attack".into(),
        host: [7; 16],
        pid: 1,
        bulk: None,
        seen: Epoch(0),
        holds: Vec::new(),
        run: None,
    };
    socket.write_all(&agent.frame()?)?;
    loop {
        let payload = read_frame(&mut socket, FrameKind::Control)?;
        if let FromRoot::Welcome(Welcome { run, .. }) = FromRoot::decode(&payload)? {
            return Ok(run);
        }
    }
}

pub(crate) fn read_frame(
    socket: &mut TcpStream,
    kind: FrameKind,
) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
    let mut header = [0; HEADER_BYTES];
    socket.read_exact(&mut header)?;
    let header = FrameHeader::decode(&header, &[kind])?;
    let mut payload = vec![0; header.len];
    socket.read_exact(&mut payload)?;
    header.check(&payload)?;
    Ok(payload)
}

/// A connection that was let in as it should be.
pub(crate) fn let_in(
    root: &str,
    token: &Token,
    role: LinkRole,
    seed: u64,
) -> io::Result<TcpStream> {
    let client = client(token, role, &mut Dice::new(seed));
    Ok(shake(dial(root)?, client)?.0)
}

fn dial(root: &str) -> io::Result<TcpStream> {
    let socket = TcpStream::connect(root)?;
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(longest() / 2))?;
    Ok(socket)
}

fn client(token: &Token, role: LinkRole, dice: &mut Dice) -> (ClientHandshake, [u8; HELLO_BYTES]) {
    let mut nonce = [0; 32];
    nonce.copy_from_slice(&dice.bytes(32));
    ClientHandshake::new(Key::new(&token.secret()), role, Protocols::OURS, nonce)
}

/// Makes a handshake; what was said for it.
fn shake(
    mut socket: TcpStream,
    (mut client, hello): (ClientHandshake, [u8; HELLO_BYTES]),
) -> io::Result<(TcpStream, Vec<u8>)> {
    let mut message = hello.to_vec();
    socket.write_all(&hello)?;
    let mut wanted = HELLO_BYTES;
    loop {
        let mut bytes = vec![0; wanted];
        socket.read_exact(&mut bytes)?;
        let step = client.feed(&mut &bytes[..]);
        message.extend(&step.send);
        socket.write_all(&step.send)?;
        match step.next {
            Next::Read(more) => wanted = more,
            Next::Done(_) => return Ok((socket, message)),
            Next::Close(error) => return Err(io::Error::other(error)),
        }
    }
}

/// Reads what the trainer says until it hangs up, as it must.
fn is_closed(socket: &mut TcpStream) -> Outcome {
    let until = Instant::now() + longest() / 2;
    let mut buffer = [0; 4096];
    loop {
        match socket.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
            Err(error) => return Err(error.into()),
            Ok(_) if Instant::now() > until => return Err("it goes on talking".into()),
            Ok(_) => {}
        }
    }
}
