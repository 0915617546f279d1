//! Parties that say what no party of this project says.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Value, json};
use weightsync::{InitInfo, SenderSetup};
use weightsync_serve::synchronizer::{Method, PartyOptions, Synchronizer, SynchronizerOptions};

use crate::world::{Exploring, Training, long, style, weights};

/// The first line of an answer, and how the request ended. A party that has joined is one for as long as
/// this lives.
pub(crate) struct Answer<S> {
    pub(crate) status: u16,
    pub(crate) said: Value,
    _stream: BufReader<S>,
}

impl<S> Answer<S> {
    /// Why it was refused.
    pub(crate) fn reason(&self) -> &str {
        assert_eq!(self.status, 409, "{}", self.said);
        self.said["refused"]["reason"].as_str().unwrap()
    }

    pub(crate) fn party(&self) -> String {
        assert_eq!(self.status, 200, "{}", self.said);
        format!("/v1/parties/{}", self.said["party"])
    }
}

/// Posts to a synchronizer.
pub(crate) fn post<S: Read + Write>(
    mut stream: S,
    at: SocketAddr,
    path: &str,
    headers: &str,
    body: &Value,
) -> Answer<S> {
    let body = body.to_string();
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nHost: {at}\r\n{headers}Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut stream = BufReader::new(stream);
    let mut line = || {
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "the answer ended");
        line.to_lowercase()
    };
    let status = line().split(' ').nth(1).unwrap().parse().unwrap();
    let mut length = None;
    loop {
        let line = line();
        if let Some(bytes) = line.strip_prefix("content-length: ") {
            length = Some(bytes.trim().parse().unwrap());
        }
        if line == "\r\n" {
            break;
        }
    }
    let mut said = Vec::new();
    match length {
        Some(length) => {
            said.resize(length, 0);
            stream.read_exact(&mut said).unwrap();
        }
        // A party's own goes on: the length of its first chunk, and then the chunk.
        None => {
            stream.read_until(b'\n', &mut said).unwrap();
            said.clear();
            stream.read_until(b'\n', &mut said).unwrap();
        }
    }
    Answer {
        status,
        said: serde_json::from_slice(&said).unwrap(),
        _stream: stream,
    }
}

fn asked(at: SocketAddr, path: &str, body: &Value) -> Answer<TcpStream> {
    let stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(long()).unwrap();
    post(stream, at, path, "", body)
}

/// What a party joins with.
pub(crate) fn join(role: &str, name: &str, from: Option<&Value>) -> Value {
    json!({
        "protocol": 1, "role": role, "name": name, "style": null, "method": null, "step": 0,
        "synced": 0, "version": 0, "version_step": 0, "lineage": 0, "worker": null, "epoch": null,
        "from": from,
    })
}

fn with(mut join: Value, key: &str, value: impl Into<Value>) -> Value {
    join[key] = value.into();
    join
}

/// The init info of a sender that nobody opens.
pub(crate) fn info(scheme: &str) -> Value {
    let setup = SenderSetup::new("policy", &weights(0)).unwrap();
    let setup = setup.scheme(
        "distributed"
            .parse::<weightsync::scheme::AnyScheme>()
            .unwrap(),
    );
    let info: InitInfo = setup.unwrap().init_info();
    with(serde_json::to_value(info).unwrap(), "scheme", scheme)
}

fn served(run_dir: &Path, method: Option<Method>) -> (Synchronizer, SocketAddr) {
    let options = SynchronizerOptions::new().style(style("fully_async", 1));
    let options = options.method(method).run_dir(run_dir.to_owned());
    let served = Synchronizer::serve(options, "127.0.0.1:0").unwrap();
    let at = served.address().unwrap();
    (served, at)
}

const FAR: &str = "18446744073709551615: expected at most";

#[test]
fn numbers_far_above_all_known_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (_served, at) = served(dir.path(), None);
    let from = info("distributed");
    let joins = |key: &str| with(join("trainer", "x", Some(&from)), key, u64::MAX);
    for key in ["epoch", "version"] {
        let refused = asked(at, "/v1/parties", &joins(key));
        assert!(refused.reason().contains(FAR), "{}", refused.reason());
    }
    let joined = asked(at, "/v1/parties", &join("trainer", "x", Some(&from)));
    let party = joined.party();
    let step = json!({"version": u64::MAX, "step": 1});
    let waits = with(step.clone(), "timeout_ms", 0);
    for request in [
        json!({"publishing": step}),
        json!({"published": waits}),
        json!({"meet": waits}),
    ] {
        let refused = asked(at, &party, &request);
        assert!(refused.reason().contains(FAR), "{}", refused.reason());
    }
    // Those that join later have numbers and epochs of their own.
    let sync = Synchronizer::connect(&at.to_string(), None).unwrap();
    let later = Training::join(&sync, PartyOptions::new("later"), "distributed", 13);
    assert_eq!(later.trainer.next_version().0, 2);
    let mut last = Training::join(&sync, PartyOptions::new("last"), "distributed", 13);
    assert!(last.trainer.epoch() > later.trainer.epoch());
    last.step = 14;
    assert!(last.sync(long()).is_synced());
    let record = std::fs::read_to_string(dir.path().join("synchronizer.json")).unwrap();
    assert!(!record.contains(&u64::MAX.to_string()), "{record}");
}

/// A number that only the sender's own words have.
#[test]
fn version_far_above_all_known_is_not_passed_on() {
    let dir = tempfile::tempdir().unwrap();
    let (_served, at) = served(dir.path(), Some(Method::Memory));
    let sync = Synchronizer::connect(&at.to_string(), None).unwrap();
    let mut training = Training::join(&sync, PartyOptions::new("trainer"), "distributed", 0);
    training.step = 1;
    let sender = &mut training.sender;
    let far = |_, _| {
        let options = weightsync::SendOptions::new().version(weightsync::Version(u64::MAX));
        let options = options.wait(weightsync::WaitFor::Sent);
        sender.send_with(&weights(1), &options).map(drop)
    };
    let answer = training.trainer.sync(1, long(), far).unwrap();
    let reason = answer.reason.unwrap();
    assert!(reason.contains(FAR), "{reason}");
    let mut next = Training::join(&sync, PartyOptions::new("next"), "distributed", 1);
    next.step = 2;
    assert_eq!(next.sync(long()).version.0, 4);
}

#[test]
fn explorer_with_a_version_that_nobody_gave_changes_no_number() {
    let dir = tempfile::tempdir().unwrap();
    let (_served, at) = served(dir.path(), None);
    let sync = Synchronizer::connect(&at.to_string(), None).unwrap();
    let mut training = Training::join(&sync, PartyOptions::new("trainer"), "distributed", 0);
    let first = asked(at, "/v1/parties", &join("explorer", "e0", None));
    let knows = with(join("explorer", "e1", None), "version", u64::MAX);
    let knows = with(knows, "lineage", first.said["lineage"].clone());
    let joined = asked(at, "/v1/parties", &knows);
    // It has none, so it needs the newest. Nor has it one because it says that it has loaded that.
    let loaded = json!({"loaded": {"version": u64::MAX}});
    for says in [json!({"cancel": {}}), loaded] {
        let said = asked(at, &joined.party(), &says);
        assert_eq!(said.status, 200, "{}", said.said);
        let need = asked(at, &joined.party(), &json!({"need": {"step": null}}));
        assert_eq!(need.said["need"]["need"], "must", "{}", need.said);
    }
    training.step = 1;
    assert_eq!(training.sync(long()).version.0, 2);
    let later = Training::join(&sync, PartyOptions::new("later"), "distributed", 1);
    assert_eq!(later.trainer.next_version().0, 4);
}

#[test]
fn explorer_cannot_publish_what_a_trainer_has_only_announced() {
    let dir = tempfile::tempdir().unwrap();
    let (_served, at) = served(dir.path(), Some(Method::Memory));
    let sync = Synchronizer::connect(&at.to_string(), None).unwrap();
    let from = info("distributed");
    let trainer = asked(at, "/v1/parties", &join("trainer", "x", Some(&from)));
    let announced = json!({"publishing": {"version": 1, "step": 1}});
    assert_eq!(asked(at, &trainer.party(), &announced).status, 200);
    let explorer = asked(at, "/v1/parties", &join("explorer", "e0", None));
    let loaded = json!({"loaded": {"version": 1}});
    assert_eq!(asked(at, &explorer.party(), &loaded).status, 200);
    let mut other = Exploring::join(&sync, PartyOptions::new("e1"));
    assert!(!other.explorer.need_sync(Some(1)).unwrap().is_needed());
}

#[test]
fn init_info_of_another_method_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let store = format!("store:{}", dir.path().join("store").display());
    for (method, scheme, expected) in [
        (Method::Memory, &*store, "brings them from the trainer"),
        (Method::Direct, &*store, "brings them from the trainer"),
        (Method::Memory, "none", "brings weights"),
        (Method::Direct, "none", "brings weights"),
        (Method::Memory, "shared-mem", "in another process"),
        (
            Method::Memory,
            "multi-process:every=2",
            "in another process",
        ),
        (Method::Memory, "elsewhere", "elsewhere"),
        (Method::Memory, "distributed:arity=0", "arity"),
        (
            Method::Checkpoint,
            "distributed",
            "give the trainer the store",
        ),
    ] {
        let run_dir = tempfile::tempdir().unwrap();
        let (_served, at) = served(run_dir.path(), Some(method));
        let refused = asked(
            at,
            "/v1/parties",
            &join("trainer", "x", Some(&info(scheme))),
        );
        let reason = refused.reason();
        assert!(reason.contains(expected), "{method:?}, {scheme}: {reason}");
    }
    assert!(!dir.path().join("store").exists(), "it was made");
    // A scheme that explorers may know, and shared memory of another program.
    for scheme in ["elsewhere", "shared-mem"] {
        let run_dir = tempfile::tempdir().unwrap();
        let (_served, at) = served(run_dir.path(), Some(Method::Direct));
        let joined = asked(
            at,
            "/v1/parties",
            &join("trainer", "x", Some(&info(scheme))),
        );
        assert_eq!(joined.status, 200, "{}", joined.said);
    }
}

#[test]
fn file_that_an_init_info_names_is_not_looked_at() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("a-key-of-somebody.pem");
    std::fs::write(&file, "-----BEGIN PRIVATE KEY-----").unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
    let (_served, at) = served(&dir.path().join("run"), Some(Method::Memory));
    for word in ["distributed", "rpc"] {
        let mut from = info(&format!("{word}:tls={}", file.display()));
        // Of no machine.
        from["at"]["address"] = "192.0.2.1:7070".into();
        let joined = asked(at, "/v1/parties", &join("trainer", word, Some(&from)));
        let published = json!({"published": {"version": 1, "step": 1, "timeout_ms": null}});
        let answer = asked(at, &joined.party(), &published);
        let reason = answer.said["trained"]["reason"].as_str().unwrap();
        assert!(reason.contains("192.0.2.1"), "{reason}");
        assert!(
            !reason.contains("a-key") && !reason.contains("644"),
            "{reason}"
        );
    }
}
