//! Another program at the sender's address, which is told the bearer and has not the secret.

use std::io::Write;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use serde_json::json;
use weightsync_engine::{Error, Expect, InitInfo, Pull, Receiver, Sender, Version};

use super::foreign::{LINES, bearer, crc64_nvme, proof, say, serve};
use super::proxy::Proxy;
use super::{BRIEF, at_connect, parts, receive, setup, soon, weights, worker};

/// A model of so many.
const FLOATS: usize = 64;

/// The impostor's answer to each worker that registers.
#[derive(Clone)]
enum Says {
    Welcome {
        proof: Option<String>,
    },
    /// Nothing yet, while it answers all other questions.
    Nothing,
}

/// Answers each client.
struct Impostor {
    addr: SocketAddr,
    state: Arc<State>,
    thread: Option<JoinHandle<()>>,
}

struct State {
    bearer: String,
    says: Says,
    open: Mutex<Vec<TcpStream>>,
    registered: AtomicU64,
    asked: AtomicU64,
    over: AtomicBool,
}

impl Impostor {
    fn new(info: &InitInfo, says: Says) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let (_, secret) = parts(info);
        let state = Arc::new(State {
            bearer: bearer(&secret, "sender"),
            says,
            open: Mutex::default(),
            registered: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            over: AtomicBool::new(false),
        });
        let (addr, theirs) = (listener.local_addr().expect("an address"), state.clone());
        let thread = thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if theirs.over.load(Ordering::SeqCst) {
                    return;
                }
                theirs.answer(stream);
            }
        });
        Self {
            addr,
            state,
            thread: Some(thread),
        }
    }
}

impl State {
    fn answer(&self, mut stream: TcpStream) {
        let (first, register) = serve(&stream, &self.bearer);
        if !first.starts_with("POST /v1/workers ") {
            let image = [7; 4 * FLOATS];
            let set = json!({"sequence": 9, "models": [{
                "model": 0, "version": 9, "bytes": image.len(), "chunk_bytes": 1 << 20,
                "crc64": [format!("{:016x}", crc64_nvme(&image))],
            }]});
            let set = set.to_string();
            let body = match first.contains("/image") {
                true => &image[..],
                false => set.as_bytes(),
            };
            let (head, length) = ("HTTP/1.1 200 OK\r\nConnection: close", body.len());
            let head = write!(stream, "{head}\r\nContent-Length: {length}\r\n\r\n");
            head.and_then(|()| stream.write_all(body))
                .expect("it reads");
            self.asked.fetch_add(1, Ordering::SeqCst);
            return;
        }
        self.registered.fetch_add(1, Ordering::SeqCst);
        let mut welcome = json!({
            "protocol": 2, "id": "ef".repeat(32), "pid": 1, "models": register["models"],
            "run": {"epoch": 99, "id": "0123456789abcdef0123456789abcdef"}, "sequence": 0,
        });
        let proof = match &self.says {
            Says::Welcome { proof } => proof,
            Says::Nothing => return self.open.lock().expect("no panic").push(stream),
        };
        if let Some(proof) = proof {
            welcome["proof"] = proof.as_str().into();
        }
        stream.write_all(LINES.as_bytes()).expect("it reads");
        say(&mut stream, &json!({"welcome": welcome}));
        let open = stream.try_clone().expect("a descriptor");
        self.open.lock().expect("no panic").push(open);
        // The impostor stays as long as a worker listens.
        let beat = b"c\r\n{\"beat\": 1}\n\r\n";
        thread::spawn(move || {
            while stream.write_all(beat).is_ok() {
                thread::sleep(BRIEF);
            }
        });
    }
}

impl Drop for Impostor {
    fn drop(&mut self) {
        self.state.over.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.addr);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        for stream in self.state.open.lock().expect("no panic").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

#[test]
fn sender_without_the_secret_is_not_followed() {
    let info = setup(&weights(8, 1.0), at_connect()).init_info();
    let (_, secret) = parts(&info);
    // A proof for another nonce, which the impostor may have heard.
    let heard = proof(&secret, &[7; 32], &"ef".repeat(32));
    for (gives, came) in [(None, "got none"), (Some(heard), "got another")] {
        let impostor = Impostor::new(&info, Says::Welcome { proof: gives });
        let mut there = serde_json::to_value(&info).expect("JSON");
        there["at"]["address"] = impostor.addr.to_string().into();
        let there = serde_json::from_value(there).expect("an init info");
        let error = worker(there, 0).unwrap_err().to_string();
        assert_eq!(impostor.state.registered.load(Ordering::SeqCst), 1);
        for words in [
            "not the sender",
            "a proof",
            "expected",
            came,
            "start the sender",
        ] {
            assert!(error.contains(words), "{words}: {error}");
        }
    }
}

/// A sender that its worker reaches by a proxy.
fn behind(proxy: &Proxy) -> (Sender, Receiver) {
    let initial = weights(FLOATS, 1.0);
    let setup = setup(&initial, at_connect().advertise(&proxy.addr.to_string()));
    let (address, _) = parts(&setup.init_info());
    let (_, listens) = address.split_once(" at ").expect("both");
    proxy.to(listens.parse().expect("an address"));
    let sender = setup
        .connect(&initial, Expect::Count(0), Some(soon()))
        .expect("a sender");
    let mut receiver = worker(sender.init_info(), 0).expect("it joins");
    assert_eq!(receive(&mut receiver), 1.0);
    (sender, receiver)
}

#[test]
fn impostor_at_a_sender_address_is_not_followed() {
    let proxy = Proxy::new();
    let (sender, mut receiver) = behind(&proxy);
    let impostor = Impostor::new(&sender.init_info(), Says::Welcome { proof: None });
    proxy.to(impostor.addr);
    proxy.cut();
    let error = receiver.recv_timeout(soon()).unwrap_err();
    assert!(matches!(error, Error::SenderDied { .. }), "{error}");
    assert_eq!(impostor.state.registered.load(Ordering::SeqCst), 1);
    let error = receiver
        .pull(Pull::newest().timeout(Some(soon())))
        .unwrap_err();
    assert!(matches!(error, Error::SenderDied { .. }), "{error}");
}

#[test]
fn impostor_answers_are_ignored_before_its_proof() {
    let proxy = Proxy::new();
    let (sender, mut receiver) = behind(&proxy);
    let impostor = Impostor::new(&sender.init_info(), Says::Nothing);
    proxy.to(impostor.addr);
    proxy.cut();
    while impostor.state.registered.load(Ordering::SeqCst) == 0 {
        thread::sleep(std::time::Duration::from_millis(1));
    }
    let got = receiver.pull(Pull::at_least(Version(9)).timeout(Some(4 * BRIEF)));
    assert!(got.expect("its sender may be there").is_none());
    assert!(impostor.state.asked.load(Ordering::SeqCst) >= 2);
    assert_eq!(receiver.version().unwrap(), Version::FIRST);
}
