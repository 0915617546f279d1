//! A relay that has the token and sends its children other bytes than the trainer published, with
//! the right checksums.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use weightsync_core::Epoch;
use weightsync_link::access::Key;
use weightsync_link::frame::FrameKind;
use weightsync_link::hello::{HELLO_BYTES, LinkRole, Next, Protocols, ServerHandshake};
use weightsync_link::message::Message;
use weightsync_net::status;
use weightsync_net::wire::image::{BLOCK_BYTES, BlockHead};
use weightsync_net::wire::message::{FromRoot, ToChild, ToParent, ToRoot};

use super::attacks::{let_in, read_frame};
use super::messages::{Content, Notice, emit};
use super::roles::token;
use super::scale::longest;
use super::stage::{Actor, Stage};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("lying_relay_is_named_and_passed_over", passed_over),
    ("verified_versions_go_down_encrypted_links", verified),
];

/// A name that no other process has.
const NAME: &str = "a host that lies";

const MIB: usize = 1 << 20;

fn passed_over() {
    for content in [
        Content::Words { every: 1 },
        Content::Weights {
            percent: 1.0,
            single: false,
            deltas: true,
        },
    ] {
        let mut stage = Stage::verified(4, 3 * MIB + 5000, content);
        stage.start_liar(1);
        stage.start_relay(2);
        let fetches = |status: &weightsync_core::SenderStatus| {
            let relay = status.relays.iter().find(|relay| relay.name != NAME);
            relay.map(|relay| relay.parent)
        };
        let status =
            stage.until_status("the relay has a parent", |status| fetches(status).is_some());
        let liar = status.relays.iter().find(|relay| relay.name == NAME);
        let liar = liar.expect("it has joined").agent;
        assert_eq!(fetches(&status), Some(liar), "{status:#?}");
        // The worker checks every byte of what it gets.
        stage.start_workers(2, &[20]);
        for _ in 0..3 {
            stage.send_everywhere();
        }
        let status = stage.status();
        let named = status.relays.iter().map(|one| (one.agent, one.altered_for));
        let named: Vec<_> = named.filter(|(_, altered)| *altered > 0).collect();
        assert_eq!(named, [(liar, 1)], "{status:#?}");
        assert_eq!(fetches(&status), Some(0), "{status:#?}");
        let warned: Vec<_> = stage.warnings(Actor::Trainer).map(str::to_owned).collect();
        let named = |line: &&String| line.contains(NAME) && line.contains("other than it was");
        assert_eq!(warned.iter().filter(named).count(), 1, "{warned:#?}");
        assert!(
            stage
                .warnings(Actor::Relay(2))
                .any(|line| line.contains("other than"))
        );
        // A relay that came later gets what the honest one passes on, and takes it.
        stage.start_relay(3);
        stage.start_workers(3, &[30]);
        for _ in 0..3 {
            stage.send_everywhere();
        }
        let served = stage
            .status()
            .relays
            .into_iter()
            .filter(|one| one.altered_for > 0);
        assert_eq!(served.count(), 1);
    }
}

/// Honest relays, and certificates: a chain of three hosts compares every block.
fn verified() {
    let content = Content::Weights {
        percent: 1.0,
        single: false,
        deltas: true,
    };
    let mut stage = Stage::verified_and_encrypted(4, 3 * MIB + 5000, content);
    for host in 1..4 {
        stage.start_relay(host);
        stage.start_workers(host, &[10 * host as u32]);
    }
    for _ in 0..4 {
        stage.send_everywhere();
    }
    let status = stage.status();
    assert!(
        status.relays.iter().all(|one| one.altered_for == 0),
        "{status:#?}"
    );
    // They do form a chain: two of them fetch from a relay.
    let behind = status.relays.iter().filter(|one| one.parent != 0);
    assert_eq!(behind.count(), 2, "{status:#?}");
}

/// Joins, and lies to those who fetch from it.
pub(crate) fn lie(root: &str) -> Result<(), Box<dyn std::error::Error>> {
    let status = status::ask(root, &token().secret(), None, Some(longest()))?;
    let bytes = status.models[0].bytes;
    let listener = TcpListener::bind("0.0.0.0:0")?;
    let port = listener.local_addr()?.port();
    let mut link = let_in(root, &token(), LinkRole::Control, 1)?;
    let agent = ToRoot::Agent {
        name: NAME.into(),
        host: [9; 16],
        pid: 1,
        bulk: Some(port),
        seen: Epoch(0),
        holds: Vec::new(),
        run: None,
    };
    link.write_all(&agent.frame()?)?;
    let mut speaks = link.try_clone()?;
    thread::spawn(move || {
        let ping = ToRoot::Ping.frame().expect("a message");
        while speaks.write_all(&ping).is_ok() {
            thread::sleep(Duration::from_millis(100));
        }
    });
    thread::spawn(move || {
        for child in listener.incoming().flatten() {
            thread::spawn(move || {
                if let Err(error) = serve(child, bytes) {
                    emit(&Notice::Log(format!("INFO a child is gone: {error}")));
                }
            });
        }
    });
    loop {
        let payload = read_frame(&mut link, FrameKind::Control)?;
        match FromRoot::decode(&payload)? {
            FromRoot::Welcome(_) => emit(&Notice::Joined),
            FromRoot::Goodbye => return Ok(()),
            _ => {}
        }
    }
}

fn serve(mut socket: TcpStream, bytes: u64) -> Result<(), Box<dyn std::error::Error>> {
    let mut server =
        ServerHandshake::new(Key::new(&token().secret()), Protocols::OURS, None, [5; 32]);
    let mut wanted = HELLO_BYTES;
    loop {
        let mut input = vec![0; wanted];
        socket.read_exact(&mut input)?;
        let step = server.feed(&mut &input[..]);
        socket.write_all(&step.send)?;
        match step.next {
            Next::Read(more) => wanted = more,
            Next::Done(_) => break,
            Next::Close(error) => return Err(error.into()),
        }
    }
    loop {
        let payload = read_frame(&mut socket, FrameKind::Bulk)?;
        let ToParent::Fetch(wanted) = ToParent::decode(&payload)? else {
            return Err("it is asked for digests".into());
        };
        let ranges = wanted.ranges.iter();
        for index in ranges.flat_map(|range| range.first..range.first + range.count) {
            let len = (bytes - u64::from(index) * u64::from(BLOCK_BYTES)).min(BLOCK_BYTES.into());
            let block = vec![0xa5; len as usize];
            let head = BlockHead {
                model: wanted.model,
                version: wanted.version,
                index,
                bytes: len as u32,
                crc: weightsync_simd::crc64(&block),
                image_bytes: bytes,
            };
            socket.write_all(&head.frame())?;
            socket.write_all(&block)?;
        }
        socket.write_all(&ToChild::End.frame()?)?;
    }
}
