//! A worker that knows nothing but `openapi.json`: sockets, JSON, and the two hashes
//! that it names.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use weightsync_engine::{Expect, Outcome, SendOptions, WaitFor};

use super::{parts, sender, setup, soon, weights};

/// The bearer of a direction, as the description says it.
pub fn bearer(secret: &[u8; 16], to: &str) -> String {
    let context = format!("weightsync-serve 2026-11 bearer of requests to a {to}");
    let key = blake3::derive_key(&context, secret);
    key.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The proof of a sender, as the description says it.
pub fn proof(secret: &[u8; 16], nonce: &[u8; 32], id: &str) -> String {
    let key = blake3::derive_key("weightsync-serve 2026-11 proof of a sender", secret);
    let of = [nonce, id.as_bytes()].concat();
    blake3::keyed_hash(&key, &of).to_hex().to_string()
}

/// One request on its own connection; returns the head of the answer, and the rest.
pub fn ask(address: &str, bearer: &str, line: &str, body: &str) -> (String, BufReader<TcpStream>) {
    let mut stream = TcpStream::connect(address).expect("somebody listens");
    stream.set_read_timeout(Some(soon())).expect("a timeout");
    let length = body.len();
    write!(
        stream,
        "{line} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {bearer}\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    )
    .expect("it reads");
    let mut answer = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        let read = answer.read_line(&mut head).expect("it answers");
        assert_ne!(read, 0, "{head}");
    }
    (head.to_ascii_lowercase(), answer)
}

/// The body of an answer with a length.
pub fn body(head: &str, answer: &mut BufReader<TcpStream>) -> Vec<u8> {
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length: "));
    let length = length.and_then(|length| length.trim().parse().ok());
    let mut body = vec![0; length.expect("a length")];
    answer.read_exact(&mut body).expect("all of it");
    body
}

/// The next line of a body in chunks; each chunk is a line here.
pub fn line(answer: &mut BufReader<TcpStream>) -> Option<Value> {
    let mut size = String::new();
    answer.read_line(&mut size).ok()?;
    let size = usize::from_str_radix(size.trim(), 16).ok()?;
    let mut chunk = vec![0; size + 2];
    answer.read_exact(&mut chunk).ok()?;
    serde_json::from_slice(&chunk).ok()
}

pub fn say(stream: &mut TcpStream, value: &Value) {
    let line = format!("{value}\n");
    write!(stream, "{:x}\r\n{line}\r\n", line.len()).expect("it reads");
}

/// A request that came: its first line, whether the bearer is right, and its body.
pub fn serve(stream: &TcpStream, bearer: &str) -> (String, Value) {
    let mut request = BufReader::new(stream);
    let (mut first, mut length) = (String::new(), 0);
    let mut is_right = false;
    request.read_line(&mut first).expect("a request");
    loop {
        let mut header = String::new();
        request.read_line(&mut header).expect("a header");
        let header = header.trim();
        match header.to_ascii_lowercase().split_once(": ") {
            Some(("content-length", value)) => length = value.parse().expect("a number"),
            Some(("authorization", value)) => is_right = value == format!("bearer {bearer}"),
            Some(_) => {}
            None => break,
        }
    }
    assert!(is_right, "{first}");
    let mut body = vec![0; length];
    request.read_exact(&mut body).expect("its body");
    (first, serde_json::from_slice(&body).unwrap_or_default())
}

/// As the description names it, a bit at a time.
pub fn crc64_nvme(bytes: &[u8]) -> u64 {
    let reflected = 0xad93_d235_94c9_3659_u64.reverse_bits();
    !bytes.iter().fold(u64::MAX, |crc, byte| {
        (0..8).fold(crc ^ u64::from(*byte), |crc, _| match crc & 1 {
            1 => crc >> 1 ^ reflected,
            _ => crc >> 1,
        })
    })
}

pub const LINES: &str = "HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\n\
                     Transfer-Encoding: chunked\r\n\r\n";

#[test]
fn a_worker_can_be_written_by_the_description_alone() {
    assert_eq!(crc64_nvme(b"123456789"), 0xae8b_1486_0a79_9888);
    let mut sender = sender(&weights(300_000, 1.0), weightsync_serve::Rpc::default());
    let (address, secret) = parts(&sender.init_info());
    let (to_sender, to_worker) = (bearer(&secret, "sender"), bearer(&secret, "worker"));

    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let own = listener.local_addr().expect("an address");
    // The worker runs what it refused only once the sender has said so.
    let (reported, is_reported) = std::sync::mpsc::channel::<()>();
    let foreign = std::thread::spawn({
        let (address, to_sender) = (address.clone(), to_sender.clone());
        move || {
            let register = json!({
                "protocol": 2, "worker": 5, "pid": 4242, "device": "tpu:0",
                "models": ["policy"], "url": format!("http://{own}"), "seen": 0,
                "nonce": "ab".repeat(32),
            });
            // The sender asks for the lifeline before it answers.
            let life = std::thread::spawn(move || {
                let (mut life, _) = listener.accept().expect("the sender");
                let (first, _) = serve(&life, &to_worker);
                let nonce = "ab".repeat(32);
                let asked = format!("GET /v1/lifeline?nonce={nonce} HTTP/1.1");
                assert_eq!(first.trim(), asked);
                life.write_all(LINES.as_bytes()).expect("it reads");
                say(&mut life, &json!({"here": {"worker": 5, "pid": 4242}}));
                (listener, life, to_worker)
            });
            let register = register.to_string();
            let (head, mut answer) = ask(&address, &to_sender, "POST /v1/workers", &register);
            assert!(head.starts_with("http/1.1 200"), "{head}");
            let welcome = line(&mut answer).expect("a line")["welcome"].clone();
            let (listener, mut life, to_worker) = life.join().expect("no panic");
            // A busy machine may take long between two calls: the sender would look
            // whether anybody is there.
            let stop = Arc::new(AtomicBool::new(false));
            let beats = std::thread::spawn({
                let (mut life, stop) = (life.try_clone().expect("a socket"), stop.clone());
                move || {
                    while !stop.load(Ordering::SeqCst) {
                        say(&mut life, &json!({"beat": 1}));
                        std::thread::sleep(Duration::from_millis(100));
                    }
                }
            });
            let id = welcome["id"].as_str().expect("a name").to_owned();
            assert_eq!(welcome["proof"], proof(&secret, &[0xab; 32], &id));
            assert_eq!(welcome["sequence"], 0, "nothing was sent yet");
            assert!(line(&mut answer).expect("a line")["beat"].is_u64());

            let (head, mut model) = ask(&address, &to_sender, "GET /v1/models/0", "");
            let spec: Value = serde_json::from_slice(&body(&head, &mut model)).expect("JSON");
            assert_eq!(spec["layout"][0]["name"], "layer.weight");
            assert_eq!(spec["layout"][0]["shape"], json!([300_000]));

            // The worker applies one call and refuses the other.
            for refuses in [false, true] {
                let (mut called, _) = listener.accept().expect("the sender");
                let (first, call) = serve(&called, &to_worker);
                assert_eq!(first.trim(), "POST /v1/weights HTTP/1.1");
                assert_eq!((&call["id"], &call["run"]), (&json!(id), &welcome["run"]));
                called.write_all(LINES.as_bytes()).expect("it reads");
                let part = &call["models"][0];
                let fetch = format!(
                    "GET /v1/models/0/versions/{}/image?id={id}",
                    part["version"]
                );
                let (head, mut image) = ask(&address, &to_sender, &fetch, "");
                let image = body(&head, &mut image);
                let blocks: Vec<_> = image.chunks(1 << 20).map(crc64_nvme).collect();
                let told = part["crc64"].as_array().expect("checksums").iter();
                let told = told.map(|crc| crc.as_str().expect("digits"));
                let told = told.map(|crc| u64::from_str_radix(crc, 16).expect("hexadecimal"));
                assert_eq!(blocks, told.collect::<Vec<_>>());
                assert_eq!(json!(image.len()), part["bytes"]);
                let value = f32::from_le_bytes([image[0], image[1], image[2], image[3]]);
                assert_eq!(
                    json!(value + 0.0),
                    json!(part["version"].as_f64().expect("a number") as f32 + 1.0)
                );
                let sequence = &call["sequence"];
                say(&mut called, &json!({"staged": {"sequence": sequence}}));
                let versions = json!([{"model": 0, "version": part["version"]}]);
                let told = match refuses {
                    false => json!({"applied": {"sequence": sequence, "versions": versions}}),
                    true => json!({"refused": {"sequence": sequence, "reason": "no TPU today"}}),
                };
                say(&mut called, &told);
                called.write_all(b"0\r\n\r\n").expect("it reads");
            }
            // The worker asks for a version that exists, and one that does not.
            let question = format!("GET /v1/workers/{id}/set?want=newest&wait_ms=1000");
            let (head, mut answer) = ask(&address, &to_sender, &question, "");
            let asked: Value = serde_json::from_slice(&body(&head, &mut answer)).expect("JSON");
            assert_eq!(asked["models"][0]["version"], 2);
            let question =
                format!("GET /v1/workers/{id}/set?want=exactly&model=0&version=9&wait_ms=1000");
            let (head, mut answer) = ask(&address, &to_sender, &question, "");
            assert!(head.starts_with("http/1.1 404"), "{head}");
            let problem: Value = serde_json::from_slice(&body(&head, &mut answer)).expect("JSON");
            assert_eq!(problem["known"], json!([2]));
            let question =
                format!("GET /v1/workers/{id}/set?want=at_least&model=0&version=9&wait_ms=10");
            let (head, _) = ask(&address, &to_sender, &question, "");
            assert!(head.starts_with("http/1.1 204"), "{head}");
            // And reports what it runs, unasked.
            is_reported.recv().expect("the sender's report");
            let words = json!({"applied": {"sequence": asked["sequence"],
                "versions": [{"model": 0, "version": 2}]}});
            let post = format!("POST /v1/workers/{id}/words");
            let (head, _) = ask(&address, &to_sender, &post, &words.to_string());
            assert!(head.starts_with("http/1.1 204"), "{head}");
            stop.store(true, Ordering::SeqCst);
            beats.join().expect("no panic");
            say(&mut life, &json!({"left": {}}));
            // The sender may have closed the connection at these words.
            let _ = life.write_all(b"0\r\n\r\n");
        }
    });
    let expect = Expect::workers([5]);
    sender.wait_for(&expect, Some(soon())).expect("it joins");
    assert_eq!(sender.workers()[0].device, "tpu:0");
    let report = sender.send(&weights(300_000, 2.0)).expect("it is sent");
    assert!(report.all_applied(), "{report}");
    let report = sender.send(&weights(300_000, 3.0)).expect("it is sent");
    let line = report.worker(5).expect("its line");
    let reason = "no TPU today".to_owned();
    assert_eq!(line.outcome, Outcome::Refused { reason });
    reported.send(()).expect("the worker waits");
    foreign.join().expect("no panic");
    // The worker runs the version after all, and has left.
    let report = sender.send_with(&weights(300_000, 4.0), &SendOptions::new());
    let report = report.expect("it is sent");
    let lines: Vec<_> = report.workers.iter().map(|line| &line.outcome).collect();
    assert!(lines.is_empty() || lines == [&Outcome::Left], "{report}");
}

/// Otherwise slow workers of a crowd would each cost a send its whole wait.
#[test]
fn send_with_level_sent_does_not_wait_for_the_fetch() {
    let initial = weights(8, 1.0);
    let mut sender = sender(&initial, weightsync_serve::Rpc::default());
    let (address, secret) = parts(&sender.init_info());
    let (to_sender, to_worker) = (bearer(&secret, "sender"), bearer(&secret, "worker"));
    let sent = SendOptions::new().wait(WaitFor::Sent);
    // The quickest of several, because the machine may be busy.
    let quickest = (0..3).map(|worker| {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let own = listener.local_addr().expect("an address");
        let to_worker = to_worker.clone();
        let life = std::thread::spawn(move || {
            let (mut life, _) = listener.accept().expect("the sender");
            serve(&life, &to_worker);
            life.write_all(LINES.as_bytes()).expect("it reads");
            say(&mut life, &json!({"here": {"worker": worker, "pid": 1}}));
            (listener, life)
        });
        let register = json!({
            "protocol": 2, "worker": worker, "pid": 1, "device": "cpu",
            "models": ["policy"], "url": format!("http://{own}"), "seen": 0,
            "nonce": "ab".repeat(32),
        });
        let register = register.to_string();
        let (head, answer) = ask(&address, &to_sender, "POST /v1/workers", &register);
        assert!(head.starts_with("http/1.1 200"), "{head}");
        // The worker is alive, and fetches nothing.
        let here = life.join().expect("no panic");
        let begun = Instant::now();
        let report = sender.send_with(&initial, &sent).expect("it is sent");
        let took = begun.elapsed();
        drop((here, answer, report));
        took
    });
    let quickest = quickest.min().expect("there are three");
    assert!(quickest < Duration::from_millis(400), "{quickest:?}");
}

#[test]
fn every_route_requires_the_token() {
    let initial = weights(8, 1.0);
    let setup = setup(&initial, super::at_connect());
    let info = setup.init_info();
    let mut sender = setup
        .connect(&initial, Expect::Count(0), Some(soon()))
        .expect("a sender");
    let (address, secret) = parts(&info);
    let right = bearer(&secret, "sender");
    let root: Value = serde_json::from_str(weightsync_serve::OPENAPI).expect("JSON");
    let paths = root["paths"].as_object().expect("paths");
    for (path, methods) in paths {
        for (method, what) in methods.as_object().expect("methods") {
            let path = path
                .replace("{id}", &"ef".repeat(32))
                .replace("{model}", "0")
                .replace("{version}", "1");
            let line = format!("{} {path}", method.to_uppercase());
            for wrong in ["", &right[1..], &bearer(&secret, "worker")] {
                let (head, _) = ask(&address, wrong, &line, "");
                assert!(head.starts_with("http/1.1 401"), "{line}: {head}");
                assert!(head.contains("connection: close"), "{head}");
                assert!(head.contains("content-length: 0"), "{head}");
            }
            // With it, each is answered as it is described, and only by whose it is.
            let (head, _) = ask(&address, &right, &line, "");
            let status = head[9..12].to_owned();
            let is_served = what["tags"][0] == "sender";
            assert_eq!(
                status != "404" || path.ends_with("/image"),
                is_served,
                "{line}: {head}"
            );
            if is_served && !path.ends_with("/image") && !path.ends_with("/set") {
                assert!(what["responses"][&status].is_object(), "{line}: {status}");
            }
            let other = ask(&address, &right, &format!("DELETE {path}"), "").0;
            assert!(other.starts_with("http/1.1 40"), "{other}");
        }
    }
    let sent = SendOptions::new().wait(WaitFor::Sent);
    assert!(sender.send_with(&initial, &sent).is_ok());
}
