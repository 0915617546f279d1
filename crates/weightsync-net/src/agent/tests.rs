//! Relays of one host.

use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, sockopt};
use tokio::io::AsyncWriteExt;
use weightsync_conformance::scale::{longest, prompt_limit};
use weightsync_core::{Dtype, Layout};
use weightsync_engine::{Error, Expect, InitInfo, Remedy, Sender, SenderSetup, Tensors};
use weightsync_link::access::Token;
use weightsync_link::hello::LinkRole;
use weightsync_link::listen::accept_all;
use weightsync_link::message::Message;
use weightsync_link::stream::AsyncStream;
use weightsync_link::tls::TlsPeer;
use weightsync_link::{Link, LinkEnd, blocking};

use super::local::{NameOwner, names};
use super::*;
use crate::error::NetError;
use crate::scheme::{Distributed, Share};
use crate::scrub::Scrub;
use crate::status::{self, NOT_YET};
use crate::wire::message::{self, FromRoot, ToRoot, Welcome, model_messages};

/// A trainer whose workers do not read its memory.
pub(crate) fn trainer() -> (Sender, InitInfo) {
    let mut weights = Tensors::new();
    weights.insert("bias", [2], vec![0.5_f32, 1.5]).unwrap();
    let scheme = Distributed::new().share(Share::Relay);
    let setup = SenderSetup::new("policy", &weights).unwrap();
    let setup = setup.scheme(scheme).unwrap();
    let info = setup.init_info();
    let sender = setup
        .connect(&weights, Expect::Count(0), Some(longest()))
        .unwrap();
    (sender, info)
}

/// A relay of this host; it has joined.
pub(crate) fn relay(info: &InitInfo) -> (RelayStop, thread::JoinHandle<()>) {
    let relay = Relay::of(info);
    let stop = relay.stopper();
    let (joined, has_joined) = std::sync::mpsc::channel();
    let running = thread::spawn(move || {
        let notify = move |event| {
            if matches!(event, RelayEvent::Joined { .. }) {
                let _ = joined.send(());
            }
        };
        relay.run(notify).unwrap();
    });
    has_joined.recv_timeout(longest()).unwrap();
    (stop, running)
}

/// The error of this crate inside, and its remedy.
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
    for owner in [NameOwner::Sender, NameOwner::Host] {
        for name in names(&secret, "10.0.0.1:7070", owner) {
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
    for name in &names(at.secret(), at.address(), NameOwner::Host)[..7] {
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
    assert!(took < prompt_limit(), "{took:?}");
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
fn status_request_gets_the_reason_for_no_answer() {
    let (_sender, info) = trainer();
    let at = info.endpoint();
    let another = [9; 16];
    let error = status::ask(at.address(), &another, None, Some(longest())).unwrap_err();
    let (error, remedy) = net_error(&error);
    assert!(matches!(error, NetError::Hello { .. }), "{error}");
    assert_eq!(remedy, Remedy::GiveUp);
    // A relay's port.
    let options = AgentOptions {
        root: at.address().into(),
        secret: *at.secret(),
        seen: Epoch::default(),
        connections: Some(1),
        address: AgentAddress::Own(format!("weightsync/test/asked/{}", std::process::id())),
        serves: true,
        access: Access::default(),
        nearer: Vec::new(),
    };
    let agent = Agent::start(options, longest().into(), || true).unwrap();
    let port = agent.serves.unwrap().to_string();
    let error = status::ask(&port, at.secret(), None, Some(longest())).unwrap_err();
    let (error, remedy) = net_error(&error);
    assert!(matches!(error, NetError::NoAnswer { .. }), "{error}");
    // A sender that is busy says no more.
    assert_eq!(remedy, Remedy::Retry);
}

#[test]
fn status_without_a_timeout_ends_with_its_connection() {
    let (_sender, info) = trainer();
    let at = info.endpoint();
    let status = status::ask(at.address(), at.secret(), None, None).unwrap();
    assert_eq!(status.pid, std::process::id());
    Scrub::ask(at.address(), at.secret(), None, None).unwrap();
    // A silent sender may take any time; a host that is gone is noticed by keep-alive.
    let address: SocketAddr = at.address().parse().unwrap();
    let credentials = Credentials::plain(at.secret());
    let socket = blocking::dial(
        address,
        &credentials,
        TlsPeer::Sender(address.ip()),
        LinkRole::Bulk,
        None,
    );
    let socket = socket.unwrap();
    assert_eq!(socket.socket().read_timeout().unwrap(), None);
    assert_eq!(socket.socket().write_timeout().unwrap(), None);
    assert!(sockopt::socket_keepalive(socket.socket()).unwrap());
    // A sender that says it is working, and then is gone.
    let runtime = runtime("test").unwrap();
    let listen = tokio::net::TcpListener::bind("127.0.0.1:0");
    let listener = runtime.block_on(listen).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let take = |mut socket: AsyncStream, _, _| {
        let working = message::JsonReply {
            json: NOT_YET.into(),
        };
        let frame = working.frame().unwrap();
        tokio::spawn(async move { socket.write_all(&frame).await });
    };
    runtime.spawn(accept_all(listener, credentials, || false, |_| {}, take));
    status::ask(&address, at.secret(), None, None).unwrap_err();
    Scrub::ask(&address, at.secret(), None, None).unwrap_err();
}

/// A sender that tells each relay that joins of a parent; what it was told after that.
async fn misleads(listener: tokio::net::TcpListener, credentials: Credentials) -> ToRoot {
    let (events, mut messages) = mpsc::channel::<Result<ToRoot, LinkEnd>>(64);
    let take = move |socket, _, _| {
        let link = Link::<FromRoot>::start::<ToRoot, _>(socket, &events, |what| what);
        link.send(&FromRoot::Welcome(Welcome {
            run: Run {
                epoch: Epoch(1),
                id: [7; 16],
            },
            agent: 1,
            address: "somewhere".into(),
            models: 1,
            slots: 2,
            max_slots: 4,
            pid: 1,
            settings: String::new(),
        }));
        let layout = Layout::new([("w".to_owned(), Dtype::U8, vec![8])]).unwrap();
        let (layout, note) = (layout.encode(), Vec::new());
        for message in model_messages(0, &layout, &note).unwrap() {
            link.send(&message);
        }
        link.send(&FromRoot::Parent {
            agent: 9,
            address: Some("192.0.2.1:9".into()),
        });
        // The connection stays open until the test ends.
        tokio::spawn(async move {
            std::future::pending::<()>().await;
            drop(link);
        });
    };
    tokio::spawn(accept_all(listener, credentials, || false, |_| {}, take));
    while let Some(what) = messages.recv().await {
        match what.unwrap() {
            ToRoot::Agent { .. } | ToRoot::Ping => {}
            message => return message,
        }
    }
    panic!("it has gone");
}

#[test]
fn an_agent_fetches_only_where_it_may() {
    let runtime = runtime("test").unwrap();
    let listen = tokio::net::TcpListener::bind("127.0.0.1:0");
    let listener = runtime.block_on(listen).unwrap();
    let options = AgentOptions {
        root: listener.local_addr().unwrap().to_string(),
        secret: [5; 16],
        seen: Epoch::default(),
        connections: Some(1),
        address: AgentAddress::Own(format!("weightsync/test/led/{}", std::process::id())),
        serves: false,
        access: Access::default(),
        nearer: Vec::new(),
    };
    let messages = runtime.spawn(misleads(listener, Credentials::plain(&options.secret)));
    let _agent = Agent::start(options, longest().into(), || true).unwrap();
    let messages = runtime.block_on(async { tokio::time::timeout(longest(), messages).await });
    let messages = messages.expect("it says something").unwrap();
    assert!(
        matches!(messages, ToRoot::ParentLost { parent: 9, .. }),
        "{messages:?}"
    );
}

#[test]
fn agent_does_not_start_on_the_senders_host() {
    let (_sender, info) = trainer();
    let at = info.endpoint();
    let own = format!("weightsync/test/nearer/{}", std::process::id());
    let options = AgentOptions {
        root: at.address().into(),
        secret: *at.secret(),
        address: AgentAddress::Own(own.clone()),
        nearer: names(at.secret(), at.address(), NameOwner::Sender),
        ..joining("")
    };
    let ended = Agent::start(options.clone(), longest().into(), || true).unwrap_err();
    assert!(matches!(ended, StartError::Nearer), "{ended:?}");
    assert!(!weightsync_mem::is_served(&own).unwrap());
    // The sender goes on; where nobody is at a name, there is no other way.
    let nearer = names(at.secret(), at.address(), NameOwner::Host);
    let agent = Agent::start(AgentOptions { nearer, ..options }, longest().into(), || {
        true
    });
    assert!(agent.is_ok(), "{agent:?}");
}

#[test]
fn an_agent_that_looks_for_its_sender_leaves_at_once() {
    let runtime = runtime("test").unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let options = joining(&address.to_string());
    let credentials = Credentials::plain(&options.secret);
    let own = listener.try_clone().unwrap();
    own.set_nonblocking(true).unwrap();
    let misleads = runtime.spawn(async move {
        let listener = tokio::net::TcpListener::from_std(own).unwrap();
        misleads(listener, credentials).await
    });
    let agent = Agent::start(options, longest().into(), || true).unwrap();
    runtime.block_on(misleads).unwrap();
    // Ends the tasks and the links. Later connections get no answer.
    drop(runtime);
    listener.set_nonblocking(false).unwrap();
    let (_silent, _) = listener.accept().unwrap();
    let begun = Instant::now();
    drop(agent);
    let took = begun.elapsed();
    assert!(took < prompt_limit(), "{took:?}");
}

/// Connections that a false sender has seen.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    Accepted,
    Left,
}

/// Listens there as a sender that says this to each client, and then a byte at a time.
pub(crate) fn drones(
    at: &str,
    secret: &[u8; 16],
    first: Vec<FromRoot>,
) -> (
    tokio::runtime::Runtime,
    String,
    std::sync::mpsc::Receiver<Seen>,
) {
    let runtime = runtime("test").unwrap();
    let listener = runtime.block_on(tokio::net::TcpListener::bind(at)).unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (sees, seen) = std::sync::mpsc::channel();
    let take = move |socket, _, _| {
        let (events, mut messages) = mpsc::channel::<Result<ToRoot, LinkEnd>>(64);
        let link = Link::<FromRoot>::start::<ToRoot, _>(socket, &events, |what| what);
        for word in &first {
            link.send(word);
        }
        let sees = sees.clone();
        let _ = sees.send(Seen::Accepted);
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    what = messages.recv() => if !matches!(what, Some(Ok(_))) {
                        let _ = sees.send(Seen::Left);
                        return;
                    },
                    () = tokio::time::sleep(Duration::from_millis(20)) => {
                        link.send(&FromRoot::Part { bytes: vec![0] });
                    }
                }
            }
        });
    };
    runtime.spawn(accept_all(
        listener,
        Credentials::plain(secret),
        || false,
        |_| {},
        take,
    ));
    (runtime, address, seen)
}

/// The beginning of a welcome to which there is no end.
pub(crate) fn long_welcome() -> Vec<FromRoot> {
    let run = Run {
        epoch: Epoch(100),
        id: [7; 16],
    };
    let welcome = FromRoot::Welcome(Welcome {
        run,
        agent: 1,
        address: "somewhere".into(),
        models: 1,
        slots: 2,
        max_slots: 4,
        pid: 1,
        settings: String::new(),
    });
    let model = FromRoot::Model {
        index: 0,
        layout_bytes: 1 << 20,
        note_bytes: 0,
    };
    vec![welcome, model]
}

fn joining(root: &str) -> AgentOptions {
    AgentOptions {
        root: root.into(),
        secret: [5; 16],
        seen: Epoch::default(),
        connections: Some(1),
        address: AgentAddress::Own(format!("weightsync/test/joins/{}", std::process::id())),
        serves: false,
        access: Access::default(),
        nearer: Vec::new(),
    }
}

#[test]
fn join_ends_at_its_deadline_and_when_cancelled() {
    let (_runtime, root, seen) = drones("127.0.0.1:0", &[5; 16], long_welcome());
    let begun = Instant::now();
    let within = |until| Patience {
        dial: longest(),
        until,
    };
    let soon = within(Some(begun + Duration::from_millis(300)));
    let ended = Agent::start(joining(&root), soon, || true).unwrap_err();
    assert!(matches!(ended, StartError::Unreachable(..)), "{ended:?}");
    for expected in [Seen::Accepted, Seen::Left] {
        assert_eq!(seen.recv_timeout(longest()).unwrap(), expected);
    }
    let mut is_in = false;
    let goes_on = || {
        is_in |= seen.try_recv().is_ok();
        !is_in
    };
    let ended = Agent::start(joining(&root), within(None), goes_on).unwrap_err();
    assert!(matches!(ended, StartError::Unreachable(..)), "{ended:?}");
    assert_eq!(seen.recv_timeout(longest()).unwrap(), Seen::Left);
    assert!(begun.elapsed() < longest() / 2, "{:?}", begun.elapsed());
}

#[test]
fn a_relay_that_joins_stops_at_once() {
    let token = Token::new("sixteen bytes or more").unwrap();
    let (_runtime, root, seen) = drones("127.0.0.1:0", &token.secret(), long_welcome());
    let relay = Relay::with_token(root, &token);
    let stop = relay.stopper();
    let running = thread::spawn(move || relay.run(|event| panic!("{event}")));
    assert_eq!(seen.recv_timeout(longest()).unwrap(), Seen::Accepted);
    let begun = Instant::now();
    stop.stop();
    running.join().unwrap().unwrap();
    assert!(begun.elapsed() < prompt_limit(), "{:?}", begun.elapsed());
}

#[test]
fn joined_relay_outlasts_an_impostor_at_the_address() {
    let (sender, info) = trainer();
    let at = info.endpoint();
    let relay = Relay::of(&info);
    let stop = relay.stopper();
    let (sends, events) = std::sync::mpsc::channel();
    let running = thread::spawn(move || {
        relay.run(|event| {
            let _ = sends.send(event);
        })
    });
    let next = || events.recv_timeout(longest()).expect("it goes on");
    assert!(matches!(next(), RelayEvent::Joined { .. }));
    sender.shutdown();
    let (_runtime, ..) = drones(at.address(), &[9; 16], Vec::new());
    loop {
        match next() {
            RelayEvent::Looking { reason, .. } if reason.contains("refused the token") => break,
            RelayEvent::Looking { .. } | RelayEvent::Closed => {}
            event => panic!("{event}"),
        }
    }
    stop.stop();
    running.join().unwrap().unwrap();
}

/// A sender that says what cannot be may have one after it that does not.
#[test]
fn relay_searches_for_its_sender_after_any_failure() {
    let token = Token::new("sixteen bytes or more").unwrap();
    let (_runtime, root, seen) = drones("127.0.0.1:0", &token.secret(), Vec::new());
    let relay = Relay::with_token(root, &token);
    let stop = relay.stopper();
    let running = thread::spawn(move || {
        let mut events = Vec::new();
        let ran = relay.run(|event| events.push(event.to_string()));
        (events, ran)
    });
    for _ in 0..3 {
        for expected in [Seen::Accepted, Seen::Left] {
            assert_eq!(seen.recv_timeout(longest()).unwrap(), expected);
        }
    }
    stop.stop();
    let (events, ran) = running.join().unwrap();
    ran.unwrap();
    assert_eq!(events.len(), 1, "once: {events:#?}");
    assert!(events[0].contains("invalid message"), "{events:#?}");
}
