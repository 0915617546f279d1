//! Workers that keep much open at their sender: answers that never end, and versions that they do
//! not read to the end.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Sender as Stop, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use weightsync_engine::{DigestPolicy, Error, Expect, SendOptions, Sender, WaitFor, WorkerId};
use weightsync_serve::Rpc;

use super::foreign::{LINES, ask, bearer, line, say, serve};
use super::{BRIEF, parts, sender, setup, soon, weights};

/// A worker of sockets alone, that says that it is here until it is dropped.
pub struct Foreign {
    pub welcome: Value,
    listener: TcpListener,
    to_worker: String,
    stop: Option<Stop<()>>,
    life: Option<JoinHandle<()>>,
    _registered: std::io::BufReader<TcpStream>,
}

impl Foreign {
    pub fn join(sender: &Sender, worker: u32) -> Self {
        let (address, secret) = parts(&sender.init_info());
        let to_worker = bearer(&secret, "worker");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let own = listener.local_addr().expect("an address");
        let theirs = (
            listener.try_clone().expect("a descriptor"),
            to_worker.clone(),
        );
        let (stop, stopped) = channel();
        let life = thread::spawn(move || {
            let (mut life, _) = theirs.0.accept().expect("the sender");
            serve(&life, &theirs.1);
            life.write_all(LINES.as_bytes()).expect("it reads");
            say(&mut life, &json!({"here": {"worker": worker, "pid": 1}}));
            while stopped.recv_timeout(BRIEF) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                say(&mut life, &json!({"beat": 1}));
            }
        });
        let register = json!({
            "protocol": 2, "worker": worker, "pid": 1, "device": "cpu",
            "models": ["policy"], "url": format!("http://{own}"), "seen": 0,
            "nonce": "ab".repeat(32),
        });
        let to_sender = bearer(&secret, "sender");
        let register = register.to_string();
        let (head, mut answer) = ask(&address, &to_sender, "POST /v1/workers", &register);
        assert!(head.starts_with("http/1.1 200"), "{head}");
        let welcome = line(&mut answer).expect("a line")["welcome"].clone();
        Self {
            welcome,
            listener,
            to_worker,
            stop: Some(stop),
            life: Some(life),
            _registered: answer,
        }
    }

    /// The name of its connection.
    pub fn id(&self) -> &str {
        self.welcome["id"].as_str().expect("a name")
    }

    /// Waits to be called, and says that it has what it was called with, and no more.
    fn called(&self) -> (TcpStream, Value) {
        let (mut called, _) = self.listener.accept().expect("the sender");
        let (_, call) = serve(&called, &self.to_worker);
        called.write_all(LINES.as_bytes()).expect("it reads");
        let staged = json!({"staged": {"sequence": call["sequence"]}});
        say(&mut called, &staged);
        (called, call)
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(life) = self.life.take() {
            let _ = life.join();
        }
    }
}

/// Whether the other end hangs up in that time; it says nothing.
fn hangs_up(stream: &mut TcpStream, within: Duration) -> bool {
    stream.set_read_timeout(Some(within)).expect("a timeout");
    match stream.read(&mut [0]) {
        Ok(read) => read == 0,
        // A reset is a hang-up, too.
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

#[test]
fn answers_without_a_last_line_do_not_add_up() {
    let initial = weights(8, 1.0);
    let mut sender = sender(&initial, Rpc::default());
    let foreign = Foreign::join(&sender, 5);
    let staged = SendOptions::new().wait(WaitFor::Staged);
    let mut answers: Vec<_> = (0..6)
        .map(|_| {
            thread::scope(|scope| {
                let send = scope.spawn(|| sender.send_with(&initial, &staged));
                let (answer, _) = foreign.called();
                let report = send.join().expect("no panic").expect("it is sent");
                assert!(report.all_reached(), "{report}");
                answer
            })
        })
        .collect();
    let (old, new) = answers.split_at_mut(3);
    assert!(old.iter_mut().all(|answer| hangs_up(answer, soon())));
    assert!(new.iter_mut().all(|answer| !hangs_up(answer, BRIEF)));
}

#[test]
fn no_send_waits_for_its_digest() {
    // Large enough for its digest to take a while, and for a call to take no time.
    let initial = weights(16 << 20, 1.0);
    let setup = setup(&initial, Rpc::default()).digest(DigestPolicy::Background);
    let mut sender = setup
        .connect(&initial, Expect::Count(0), Some(soon()))
        .expect("a sender");
    let foreign = Foreign::join(&sender, 5);
    let staged = SendOptions::new().wait(WaitFor::Staged);
    let mut comes_first = || {
        thread::scope(|scope| {
            let send = scope.spawn(|| sender.send_with(&initial, &staged));
            let (_answer, call) = foreign.called();
            assert_eq!(call["models"][0]["bytes"], 64 << 20);
            send.join().expect("no panic").expect("it is sent");
            call["models"][0]["digest"].is_null()
        })
    };
    // On a busy machine a digest may be done before its call. One that is waited for always is.
    assert!(
        (0..50).any(|_| comes_first()),
        "each call waited for its digest"
    );
}

#[test]
fn room_error_names_the_worker_that_holds_a_version() {
    // More than the queues between two sockets take.
    const FLOATS: usize = 4 << 20;
    let initial = weights(FLOATS, 1.0);
    let setup = setup(&initial, Rpc::default()).slots(2, 2);
    let mut sender = setup
        .connect(&initial, Expect::Count(0), Some(soon()))
        .expect("a sender");
    let (address, secret) = parts(&sender.init_info());
    let to_sender = bearer(&secret, "sender");
    let foreign = Foreign::join(&sender, 5);
    // The worker is not called, and asks for the set itself.
    sender.hold([5]).expect("no failure");
    let sent = SendOptions::new().wait(WaitFor::Sent);
    let unread: Vec<_> = (1..=2)
        .map(|version| {
            sender.send_with(&initial, &sent).expect("it is sent");
            let id = foreign.id();
            let fetch = format!("GET /v1/models/0/versions/{version}/image?id={id}");
            let (head, rest) = ask(&address, &to_sender, &fetch, "");
            assert!(head.starts_with("http/1.1 200"), "{head}");
            rest
        })
        .collect();
    let brief = sent.clone().timeout(Some(BRIEF));
    let error = sender.send_with(&initial, &brief).unwrap_err();
    let Error::AllSlotsPinned { holders, .. } = &error else {
        panic!("{error}");
    };
    assert!(!holders.is_empty(), "{error}");
    assert!(holders.iter().all(|one| one.worker == Some(WorkerId(5))));
    let mut versions: Vec<_> = holders.iter().flat_map(|one| &one.versions).collect();
    versions.sort();
    assert!(
        versions.iter().map(|version| version.0).eq(1..=2),
        "{error}"
    );
    drop(unread);
    let begun = Instant::now();
    sender.send_with(&initial, &sent).expect("there is room");
    assert!(begun.elapsed() < soon() / 2, "{:?}", begun.elapsed());
}
