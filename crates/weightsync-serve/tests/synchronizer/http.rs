//! What any HTTP client sees of a synchronizer.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

use weightsync_serve::synchronizer::{PartyOptions, Synchronizer, SynchronizerOptions};

use crate::world::{Exploring, Training, long, style};

pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Response {
    fn header(&self, name: &str) -> &str {
        let mut lines = self.head.lines();
        let line = lines.find_map(|line| {
            let (key, value) = line.split_once(':')?;
            key.eq_ignore_ascii_case(name).then_some(value.trim())
        });
        line.unwrap_or_else(|| panic!("no {name} in {}", self.head))
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

fn request(at: SocketAddr, path: &str, headers: &str) -> TcpStream {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(long()).unwrap();
    let host = if headers.contains("Host:") {
        String::new()
    } else {
        format!("Host: {at}\r\n")
    };
    write!(
        stream,
        "GET {path} HTTP/1.1\r\n{host}Connection: close\r\n{headers}\r\n"
    )
    .unwrap();
    stream
}

pub(crate) fn get(at: SocketAddr, path: &str, headers: &str) -> Response {
    let mut bytes = Vec::new();
    request(at, path, headers).read_to_end(&mut bytes).unwrap();
    let end = bytes
        .windows(4)
        .position(|four| four == b"\r\n\r\n")
        .unwrap();
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    Response {
        status: head.split(' ').nth(1).unwrap().parse().unwrap(),
        head,
        body: bytes.split_off(end + 4),
    }
}

/// A synchronizer that serves, and a trainer that has published the versions 1 to 3.
fn served(name: &str) -> (Synchronizer, SocketAddr, Training) {
    let options = SynchronizerOptions::new().style(style("fully_async", 1));
    let served = Synchronizer::serve(options, "127.0.0.1:0").unwrap();
    let at = served.address().unwrap();
    let sync = Synchronizer::connect(&at.to_string(), None).unwrap();
    let mut training = Training::join(&sync, PartyOptions::new(name), "distributed", 10);
    for step in [11, 12] {
        training.step = step;
        assert!(training.sync(long()).is_synced());
    }
    (served, at, training)
}

#[test]
fn versions_are_safetensors_files() {
    let (_served, at, _training) = served("trainer");
    let listed = get(at, "/v1/versions/latest/", "").json();
    assert_eq!(listed["version"], 3);
    assert_eq!(listed["files"][0]["name"], "policy.safetensors");
    let whole = get(at, "/v1/versions/latest/policy.safetensors", "");
    assert_eq!(whole.status, 200);
    assert_eq!(whole.header("weightsync-version"), "3");
    assert_eq!(listed["files"][0]["bytes"], whole.body.len());
    let file = safetensors::SafeTensors::deserialize(&whole.body).unwrap();
    let tensor = file.tensor("layer.weight").unwrap();
    let mut values = tensor.data().as_chunks::<4>().0.iter();
    assert!(values.all(|value| f32::from_le_bytes(*value) == 12.0));
    // The version before is kept, and the one before that is not.
    assert_eq!(get(at, "/v1/versions/2/policy.safetensors", "").status, 200);
    let gone = get(at, "/v1/versions/1/policy.safetensors", "");
    assert_eq!(gone.status, 404);
    for (path, word) in [
        (
            "/v1/versions/latest/other.safetensors",
            "policy.safetensors",
        ),
        ("/v1/versions/newest/policy.safetensors", "latest"),
    ] {
        let wrong = get(at, path, "");
        assert_eq!(wrong.status, 404);
        assert!(wrong.text().contains(word), "{}", wrong.text());
    }
}

#[test]
fn ranges_and_tags_are_answered() {
    let (_served, at, _training) = served("trainer");
    let path = "/v1/versions/3/policy.safetensors";
    let whole = get(at, path, "");
    let all = whole.body.len();
    for range in [0..8, 5..200, 100_000..1_200_000, all - 3..all] {
        let asked = format!("Range: bytes={}-{}\r\n", range.start, range.end - 1);
        let part = get(at, path, &asked);
        assert_eq!(part.status, 206);
        let said = format!("bytes {}-{}/{all}", range.start, range.end - 1);
        assert_eq!(part.header("content-range"), said);
        assert!(part.body == whole.body[range]);
    }
    let beyond = get(at, path, &format!("Range: bytes={all}-\r\n"));
    assert_eq!(beyond.status, 416);
    let tag = whole.header("etag");
    let known = get(
        at,
        "/v1/versions/latest/policy.safetensors",
        &format!("If-None-Match: {tag}\r\n"),
    );
    assert_eq!((known.status, known.body.len()), (304, 0));
    let other = get(
        at,
        "/v1/versions/2/policy.safetensors",
        &format!("If-None-Match: {tag}\r\n"),
    );
    assert_eq!(other.status, 200);
}

#[test]
fn status_and_metrics_tell_who_runs_what() {
    let (_served, at, mut training) = served("train\"er");
    let sync = Synchronizer::connect(&at.to_string(), None).unwrap();
    let mut explorer = Exploring::join(&sync, PartyOptions::new("e0"));
    assert!(explorer.sync(long()).is_synced());
    training.step = 14;
    assert!(training.sync(long()).is_synced());
    training.trainer.need_sync(Some(15)).unwrap();
    let status = get(at, "/v1/status", "").json();
    assert_eq!(
        (&status["newest"], &status["newest_step"]),
        (&4.into(), &14.into())
    );
    let line = &status["explorers"][0];
    assert_eq!(line["name"], "e0");
    assert_eq!(line["version"], 3);
    assert_eq!(
        (&line["versions_behind"], &line["steps_behind"]),
        (&1.into(), &3.into())
    );
    assert_eq!(status["versions"][0]["version"], 4);
    assert_eq!(status["versions"][0]["held"], true);
    let metrics = get(at, "/metrics", "");
    assert!(metrics.header("content-type").starts_with("text/plain"));
    for line in [
        "weightsync_newest_version 4",
        "weightsync_trainer_step{trainer=\"train\\\"er\"} 15",
        "weightsync_explorer_versions_behind{explorer=\"e0\"} 1",
        "weightsync_syncs_total{ended=\"synced\"} 1",
    ] {
        let text = metrics.text();
        assert!(text.lines().any(|one| one == line), "no {line} in {text}");
    }
    explorer.explorer.leave(None);
    let status = get(at, "/v1/status", "").json();
    assert_eq!(status["explorers"], serde_json::json!([]));
}

#[test]
fn events_are_streamed_from_where_a_reader_was() {
    let (_served, at, training) = served("trainer");
    let mut events = BufReader::new(request(at, "/events", "Last-Event-ID: 2\r\n")).lines();
    let mut next = || {
        loop {
            let line = events.next().unwrap().unwrap();
            // A change of the status is no event.
            let data = line.strip_prefix("data: ").filter(|data| *data != "{}");
            if let Some(data) = data {
                return serde_json::from_str::<serde_json::Value>(data).unwrap();
            }
        }
    };
    // The first two are its join and its first version.
    for version in [2, 3] {
        let event = next();
        assert_eq!(event["event"], "published");
        assert_eq!(event["version"], version);
    }
    training.trainer.leave(None);
    assert_eq!(next()["event"], "stopped");
}

#[test]
fn readers_of_events_hear_of_steps() {
    let (_served, at, mut training) = served("trainer");
    let mut events = BufReader::new(request(at, "/events", "")).lines();
    let mut read = |expected: &str| events.any(|line| line.unwrap() == expected);
    // A sign of life, which comes at once.
    assert!(read(":"));
    training.trainer.need_sync(Some(20)).unwrap();
    assert!(read("event: changed"));
}

#[test]
fn readers_of_events_are_limited() {
    let (_served, at, _training) = served("trainer");
    let mut readers = Vec::new();
    let first_line = |stream: TcpStream| {
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        (line, reader)
    };
    for _ in 0..256 {
        let (line, reader) = first_line(request(at, "/events", ""));
        assert!(line.contains("200"), "{line}");
        readers.push(reader);
    }
    let (line, _) = first_line(request(at, "/events", ""));
    assert!(line.contains("503"), "{line}");
    drop(readers.pop());
    // The server notices it a moment later.
    while !first_line(request(at, "/events", "")).0.contains("200") {}
}

#[test]
fn pages_of_other_servers_are_refused() {
    let (_served, at, _training) = served("trainer");
    assert_eq!(
        get(at, "/v1/status", "Host: localhost:7100\r\n").status,
        200
    );
    let page = get(at, "/", "");
    assert!(page.text().starts_with("<!doctype html>"), "{}", page.head);
    for headers in [
        "Host: weights.example:7100\r\n".to_owned(),
        "Origin: http://weights.example\r\n".to_owned(),
        format!("Origin: http://localhost:{}\r\n", at.port() - 1),
    ] {
        assert_eq!(get(at, "/v1/status", &headers).status, 403, "{headers}");
    }
    let own = format!("Origin: http://{at}\r\n");
    assert_eq!(get(at, "/v1/status", &own).status, 200);
}

/// How many descriptors this process may have.
fn descriptors() -> usize {
    let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"));
    let soft = line.unwrap().split_whitespace().next().unwrap();
    soft.parse().unwrap_or(usize::MAX)
}

#[test]
fn slow_and_huge_requests_harm_nobody() {
    let (_served, at, training) = served("trainer");
    let mut idle = Vec::new();
    // Both ends are in this process.
    for _ in 0..(descriptors() / 3).min(3000) {
        let mut stream = TcpStream::connect(at).unwrap();
        write!(stream, "GET /v1/st").unwrap();
        idle.push(stream);
    }
    assert_eq!(get(at, "/v1/status", "").status, 200);
    let huge = format!("Range: bytes=0-{}\r\n", "9".repeat(40));
    assert_eq!(
        get(at, "/v1/versions/3/policy.safetensors", &huge).status,
        416
    );
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(long()).unwrap();
    let head =
        format!("POST /v1/parties HTTP/1.1\r\nHost: {at}\r\nContent-Length: 99999999\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    // It may close before it has read all of it.
    let junk = vec![b' '; 1 << 20];
    let _ = stream.write_all(&junk);
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer:?}");
    drop(idle);
    training.trainer.leave(None);
}
