//! Relays of one host.

use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use weightsync::{Error, Expect, InitInfo, Remedy, Sender, SenderSetup, Tensors};

use super::local::{Whose, names};
use super::*;
use crate::error::NetError;
use crate::scheme::{Distributed, Share};
use crate::status::Status;

/// More than anything here takes.
pub(crate) const LONG: Duration = Duration::from_secs(20);

/// A trainer whose workers do not read its memory.
pub(crate) fn trainer() -> (Sender, InitInfo) {
    let mut weights = Tensors::new();
    weights.insert("bias", [2], vec![0.5_f32, 1.5]).unwrap();
    let scheme = Distributed::new().share(Share::Relay);
    let setup = SenderSetup::new("policy", &weights).unwrap();
    let setup = setup.scheme(scheme).unwrap();
    let info = setup.init_info();
    let sender = setup.connect(&weights, Expect::Count(0), LONG).unwrap();
    (sender, info)
}

/// A relay of this host; it has joined.
pub(crate) fn relay(info: &InitInfo) -> (RelayStop, thread::JoinHandle<()>) {
    let relay = Relay::of(info);
    let stop = relay.stopper();
    let (joined, has_joined) = std::sync::mpsc::channel();
    let running = thread::spawn(move || {
        let tell = move |news| {
            if matches!(news, RelayNews::Joined { .. }) {
                let _ = joined.send(());
            }
        };
        relay.run(tell).unwrap();
    });
    has_joined.recv_timeout(LONG).unwrap();
    (stop, running)
}

/// What an error of this crate is, and what to do about it.
fn net_error(error: &Error) -> (&NetError, Remedy) {
    let Error::Transport { source, remedy } = error else {
        panic!("{error}");
    };
    (
        source.downcast_ref().expect("an error of this crate"),
        *remedy,
    )
}

#[test]
fn no_name_tells_another() {
    let secret = [5; 16];
    let mut all = BTreeSet::new();
    for whose in [Whose::Sender, Whose::Host] {
        for name in names(&secret, "10.0.0.1:7070", whose) {
            let digest = name.strip_prefix("weightsync/net/").unwrap();
            let is_hex = digest.bytes().all(|byte| byte.is_ascii_hexdigit());
            assert!(is_hex && digest.len() == 32, "{name}");
            // Half of it says nothing of the other half of the names either.
            all.insert(digest[..16].to_owned());
        }
    }
    assert_eq!(all.len(), 16);
}

#[test]
fn names_that_others_keep_hold_up_no_relay() {
    let (_sender, info) = trainer();
    let at = info.endpoint();
    let mut kept = Vec::new();
    for name in &names(at.secret(), at.address(), Whose::Host)[..7] {
        let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = rustix::net::socket(kind.0, kind.1, None).unwrap();
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        rustix::net::bind(&socket, &address).unwrap();
        kept.push(socket);
    }
    let begun = Instant::now();
    let (stop, running) = relay(&info);
    let took = begun.elapsed();
    stop.stop();
    running.join().unwrap();
    assert!(took < Duration::from_secs(2), "{took:?}");
}

#[test]
fn a_host_has_one_relay() {
    let (_sender, info) = trainer();
    let (stop, running) = relay(&info);
    let second = Relay::of(&info).run(|_| {}).unwrap_err();
    let (error, remedy) = net_error(&second);
    assert!(matches!(error, NetError::AnotherRelay { .. }), "{error}");
    assert_eq!(remedy, Remedy::GiveUp);
    stop.stop();
    running.join().unwrap();
    // And the next one, once it has gone.
    let (stop, running) = relay(&info);
    stop.stop();
    running.join().unwrap();
}

#[test]
fn who_asks_how_things_are_is_told_why_there_is_no_answer() {
    let (_sender, info) = trainer();
    let at = info.endpoint();
    let another = [9; 16];
    let error = Status::ask(at.address(), &another, LONG).unwrap_err();
    let (error, remedy) = net_error(&error);
    assert!(matches!(error, NetError::Hello { .. }), "{error}");
    assert_eq!(remedy, Remedy::GiveUp);
    // A relay's port.
    let options = AgentOptions {
        root: at.address().into(),
        secret: *at.secret(),
        seen: Epoch::default(),
        connections: 1,
        place: Place::Own(format!("weightsync/test/asked/{}", std::process::id())),
        serves: true,
    };
    let agent = Agent::start(options, LONG).unwrap();
    let port = agent.serves.unwrap().to_string();
    let error = Status::ask(&port, at.secret(), LONG).unwrap_err();
    let (error, remedy) = net_error(&error);
    assert!(matches!(error, NetError::NoAnswer { .. }), "{error}");
    assert_eq!(remedy, Remedy::GiveUp);
}
