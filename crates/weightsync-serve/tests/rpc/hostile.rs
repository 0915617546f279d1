//! Clients that send nonsense, or nothing, cost the trainer and its workers nothing; nor does a
//! worker that speaks in the name of another one.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use weightsync_engine::{Receiver, Sender};

use super::foreign::{ask, bearer, body};
use super::greedy::Foreign;
use super::{at_connect, parts, receive, sender, soon, weights, worker};

fn pair() -> (Sender, Receiver, String, [u8; 16]) {
    let sender = sender(&weights(64, 1.0), at_connect());
    let mut receiver = worker(sender.init_info(), 0).expect("it joins");
    assert_eq!(receive(&mut receiver), 1.0);
    let (address, secret) = parts(&sender.init_info());
    (sender, receiver, address, secret)
}

/// A send goes through, in time.
fn still_serves(sender: &mut Sender, receiver: &mut Receiver, value: f32) {
    let begun = Instant::now();
    std::thread::scope(|scope| {
        let wait = scope.spawn(|| receive(receiver));
        let report = sender.send(&weights(64, value)).expect("it is sent");
        assert!(
            report.worker(0).is_some_and(|line| line.current),
            "{report}"
        );
        assert_eq!(wait.join().expect("no panic"), value);
    });
    assert!(begun.elapsed() < soon());
}

/// Whether the other end hangs up, and says no more than so many bytes before.
fn hangs_up(stream: &mut TcpStream, most: usize) -> bool {
    let timeout = stream.set_read_timeout(Some(soon()));
    timeout.expect("a timeout");
    let mut said = Vec::new();
    let end = stream.take(most as u64 + 1).read_to_end(&mut said);
    // A reset is a hang-up, too.
    let hung_up =
        end.is_ok() || end.is_err_and(|error| error.kind() != std::io::ErrorKind::WouldBlock);
    hung_up && said.len() <= most
}

#[test]
fn random_bytes_are_disconnected() {
    let (mut sender, mut receiver, address, _) = pair();
    let seed: u64 = std::env::var("WEIGHTSYNC_SOAK_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(7);
    println!("seed {seed}");
    let mut state = seed | 1;
    let mut roll = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..200_u32 {
        let mut stream = TcpStream::connect(&address).expect("it listens");
        let len = roll() % 4000;
        let bytes: Vec<u8> = (0..len).map(|_| (roll() >> 32) as u8).collect();
        let start: &[u8] = match round % 3 {
            0 => b"",
            1 => b"GET /v1/models/0 HTTP/1.1\r\n",
            _ => b"POST /v1/workers HTTP/1.1\r\nContent-Length: 18446744073709551615\r\n",
        };
        // The server may have hung up before all is written.
        let _ = stream
            .write_all(start)
            .and_then(|()| stream.write_all(&bytes));
        let _ = stream.shutdown(std::net::Shutdown::Write);
        assert!(hangs_up(&mut stream, 1024));
    }
    still_serves(&mut sender, &mut receiver, 2.0);
}

#[test]
fn lengths_and_values_from_outside_are_bounded() {
    let (mut sender, mut receiver, address, secret) = pair();
    let right = bearer(&secret, "sender");
    // More than is read, also if nothing of it comes.
    let mut stream = TcpStream::connect(&address).expect("it listens");
    write!(
        stream,
        "POST /v1/workers HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {right}\r\n\
         Content-Length: 1000000000000\r\n\r\n"
    )
    .expect("it reads");
    let piece = vec![b' '; 128 << 10];
    let _ = stream.write_all(&piece);
    let mut head = [0; 12];
    stream.set_read_timeout(Some(soon())).expect("a timeout");
    stream.read_exact(&mut head).expect("it answers");
    assert_eq!(&head[..], b"HTTP/1.1 413");
    // Heads, too.
    let mut stream = TcpStream::connect(&address).expect("it listens");
    let _ = write!(stream, "GET /v1/models/0 HTTP/1.1\r\nX: ")
        .and_then(|()| stream.write_all(&vec![b'x'; 1 << 20]));
    assert!(hangs_up(&mut stream, 1024));

    let register = |url: &str, models: serde_json::Value, device: String| {
        json!({"protocol": 2, "worker": 9, "pid": 1, "device": device, "models": models,
            "url": url, "seen": 0, "nonce": "ab".repeat(32)})
    };
    let policy = || json!(["policy"]);
    let here = "http://127.0.0.1:1";
    for (body, expected) in [
        (json!({}), "422"),
        (json!("policy"), "422"),
        (register(here, json!(["critic"]), "cpu".into()), "422"),
        (
            register(here, json!(["policy", "policy"]), "cpu".into()),
            "422",
        ),
        (register(here, policy(), "x".repeat(65)), "422"),
        (
            register("http://localhost:1", policy(), "cpu".into()),
            "422",
        ),
        (register("ftp://127.0.0.1:1", policy(), "cpu".into()), "422"),
        // No request may have the sender connect to another machine.
        (
            register("http://192.0.2.1:1", policy(), "cpu".into()),
            "403",
        ),
        (register(here, policy(), "cpu".into()), "424"),
        // Not even to the sender itself, which is no worker.
        (
            register(&format!("http://{address}"), policy(), "cpu".into()),
            "424",
        ),
    ] {
        let (head, _) = ask(&address, &right, "POST /v1/workers", &body.to_string());
        assert_eq!(&head[9..12], expected, "{body}");
    }
    let of_late = json!({"protocol": 2, "worker": 9, "pid": 1, "device": "cpu",
        "models": ["policy"], "url": here, "seen": 99, "nonce": "ab".repeat(32)});
    let (head, _) = ask(&address, &right, "POST /v1/workers", &of_late.to_string());
    assert_eq!(&head[9..12], "409");
    for path in [
        "/v1/models/9",
        "/v1/models/99999999999999999999",
        "/v1/models/-1",
        "/v1/models/0/versions/1/image",
        "/v1/models/0/versions/1/image?id=x",
        "/v1/workers/x/set?want=newest",
        "/v1/workers/0123456789abcdef-1/set?want=all",
        "/v2",
    ] {
        let (head, _) = ask(&address, &right, &format!("GET {path}"), "");
        assert_eq!(&head[9..10], "4", "{path}: {head}");
    }
    assert_eq!(sender.workers().len(), 1);
    still_serves(&mut sender, &mut receiver, 2.0);
}

/// The ports of this machine at which this process listens.
fn listening() -> Vec<String> {
    let fds = std::fs::read_dir("/proc/self/fd").expect("it is there");
    let sockets: Vec<_> = fds
        .filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok())
        .collect();
    let table = std::fs::read_to_string("/proc/self/net/tcp").expect("it is there");
    let ports = table.lines().filter_map(|line| {
        let columns: Vec<_> = line.split_whitespace().collect();
        let port = columns.get(1)?.strip_prefix("0100007F:")?;
        let inode = format!("socket:[{}]", columns.get(9)?);
        let is_own = sockets.iter().any(|socket| socket.to_str() == Some(&inode));
        let port = u16::from_str_radix(port, 16).ok()?;
        (is_own && columns[3] == "0A").then(|| format!("127.0.0.1:{port}"))
    });
    ports.collect()
}

#[test]
fn worker_cannot_speak_for_another_worker() {
    let (mut sender, mut receiver, address, secret) = pair();
    let mut listening = listening();
    listening.retain(|one| *one != address);
    let [at] = &listening[..] else {
        panic!("expected the worker's port alone, got {listening:?}");
    };
    let foreign = Foreign::join(&sender, 9);
    let (to_sender, to_worker) = (bearer(&secret, "sender"), bearer(&secret, "worker"));
    let run = &foreign.welcome["run"];
    // Names of what both have, and its own with another end.
    let known = &run["id"].as_str().expect("digits")[..16];
    let (own, last) = foreign.id().split_at(foreign.id().len() - 1);
    let other = if last == "0" { "1" } else { "0" };
    let mut guessed: Vec<_> = (0..4).map(|number| format!("{known}-{number}")).collect();
    guessed.push(format!("{own}{other}"));
    for id in guessed {
        let rejected = json!({"rejected": {"reason": "said by another worker"}}).to_string();
        let post = format!("POST /v1/workers/{id}/words");
        let (head, _) = ask(&address, &to_sender, &post, &rejected);
        assert_eq!(&head[9..12], "410", "{id}");
        let fetch = format!("GET /v1/models/0/versions/1/image?id={id}");
        let (head, _) = ask(&address, &to_sender, &fetch, "");
        assert_eq!(&head[9..12], "410", "{id}");
        // The other worker is called with a number after which nothing is newer.
        let call = json!({"id": id, "run": run, "sequence": u64::MAX,
            "url": format!("http://{address}"), "models": []});
        let (head, _) = ask(at, &to_worker, "POST /v1/weights", &call.to_string());
        assert!(["409", "422"].contains(&&head[9..12]), "{id}: {head}");
    }
    // A registration in its name, at its address.
    let register = json!({"protocol": 2, "worker": 0, "pid": std::process::id(), "device": "cpu",
        "models": ["policy"], "url": format!("http://{at}"), "seen": 0,
        "nonce": "ab".repeat(32)});
    let (head, _) = ask(
        &address,
        &to_sender,
        "POST /v1/workers",
        &register.to_string(),
    );
    assert_eq!(&head[9..12], "424");
    // A worker's own numbers end where the sender's do.
    for what in ["applied", "refused"] {
        let ahead = json!({what: {"sequence": u64::MAX, "reason": "", "versions": []}});
        let post = format!("POST /v1/workers/{}/words", foreign.id());
        let (head, mut answer) = ask(&address, &to_sender, &post, &ahead.to_string());
        assert_eq!(&head[9..12], "422", "{head}");
        let problem: serde_json::Value =
            serde_json::from_slice(&body(&head, &mut answer)).expect("JSON");
        let error = problem["error"].as_str().expect("a reason");
        assert!(error.contains(&u64::MAX.to_string()), "{error}");
    }
    drop(foreign);
    still_serves(&mut sender, &mut receiver, 2.0);
}

#[test]
fn connections_that_say_nothing_are_in_nobodys_way() {
    let (mut sender, mut receiver, address, _) = pair();
    // A thousand that say nothing, and some that never end to say who they are.
    let mut silent: Vec<_> = (0..1000)
        .map(|_| TcpStream::connect(&address).expect("it listens"))
        .collect();
    for stream in silent.iter_mut().step_by(3) {
        let _ = stream.write_all(b"GET /v1/models/0 HTTP/1.1\r\nHost:");
    }
    still_serves(&mut sender, &mut receiver, 2.0);
    let mut other = worker(sender.init_info(), 1).expect("there is room for one that is right");
    assert_eq!(receive(&mut other), 2.0);
    drop(other);
    let begun = Instant::now();
    for stream in &mut silent {
        assert!(hangs_up(stream, 1024));
    }
    assert!(begun.elapsed() < soon(), "{:?}", begun.elapsed());
    still_serves(&mut sender, &mut receiver, 3.0);
}

#[test]
fn known_connections_are_bounded_by_descriptors() {
    let most = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: most.maximum,
        ..most
    };
    setrlimit(Resource::Nofile, raised).expect("up to its own limit");
    let (mut sender, mut receiver, address, secret) = pair();
    let right = bearer(&secret, "sender");
    // Both ends of each are here. As 600 workers have, where that many can be made.
    let count = most.maximum.map_or(1300, |most| (most / 4).min(1300));
    let known: Vec<_> = (0..count)
        .map(|_| ask(&address, &right, "GET /v1/models/0", ""))
        .collect();
    assert!(known.iter().all(|(head, _)| &head[9..12] == "200"));
    still_serves(&mut sender, &mut receiver, 2.0);
    let mut other = worker(sender.init_info(), 1).expect("there is room for one more");
    assert_eq!(receive(&mut other), 2.0);
}

#[test]
fn worker_that_breaks_its_promise_is_late_or_dead() {
    let (mut sender, mut receiver, address, secret) = pair();
    let right = bearer(&secret, "sender");
    // This worker sends nonsense on its lifeline without end.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let own = listener.local_addr().expect("an address");
    let liar = std::thread::spawn(move || {
        let (mut life, _) = listener.accept().expect("the sender");
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            life.read_exact(&mut byte).expect("a request");
            request.extend(byte);
        }
        let head = "HTTP/1.1 200 OK\r\n\r\n{\"here\":{\"worker\":9,\"pid\":1}}\n";
        life.write_all(head.as_bytes()).expect("it reads");
        let nonsense = vec![b'x'; 64 << 10];
        // Until the sender has had enough of it.
        while life.write_all(&nonsense).is_ok() {}
    });
    let register = json!({"protocol": 2, "worker": 9, "pid": 1, "device": "cpu",
        "models": ["policy"], "url": format!("http://{own}"), "seen": 0,
        "nonce": "ab".repeat(32)});
    let (head, _answer) = ask(&address, &right, "POST /v1/workers", &register.to_string());
    assert_eq!(&head[9..12], "200");
    liar.join().expect("no panic");
    still_serves(&mut sender, &mut receiver, 2.0);
    let begun = Instant::now();
    while sender.workers().len() > 1 {
        assert!(begun.elapsed() < soon(), "{:?}", sender.workers());
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}
