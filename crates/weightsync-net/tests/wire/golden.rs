//! The bytes of the protocol, in `golden/`, as hexadecimal text.
//!
//! A change of them is a change of the protocol, whose number, or that of the messages' format, has
//! to change with them. `WEIGHTSYNC_GOLDEN=write cargo test -p weightsync-net the_bytes_are` writes
//! them again.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use weightsync_link::frame::{
    BLOCK_HEAD_BYTES, DELTA_HEAD_BYTES, FrameHeader, FrameKind, HEADER_BYTES,
};
use weightsync_link::hello::{ClientHello, HelloVerdict, LinkRole, Protocols, ServerHello};
use weightsync_link::message::Message;
use weightsync_net::wire::image::{BlockHead, DeltaHead};

use crate::samples;

/// Every file there should be, and its bytes.
pub fn all() -> BTreeMap<String, Vec<u8>> {
    let [client_hello, server_hello, client_proof, server_proof] = samples::handshake();
    let mut all: BTreeMap<String, Vec<u8>> = [
        ("client_hello", client_hello),
        ("server_hello", server_hello),
        ("client_proof", client_proof),
        ("server_proof", server_proof),
    ]
    .into_iter()
    .chain(samples::refusals())
    .map(|(name, bytes)| (format!("hello/{name}"), bytes))
    .collect();
    let ping = frame(&samples::to_root()[16].1);
    all.insert("frame/header".into(), ping[..HEADER_BYTES].into());
    let block = [&samples::block().frame(), samples::BLOCK_DATA].concat();
    // The file keeps its first name: a rename would look like a change of the wire.
    all.insert("frame/chunk".into(), block);
    let delta = [&samples::delta().frame()[..], samples::DELTA_DATA].concat();
    all.insert("frame/delta".into(), delta);
    all.insert("status/status".into(), frame(&samples::status()));
    add(&mut all, "to_root", &samples::to_root());
    add(&mut all, "from_root", &samples::from_root());
    add(&mut all, "to_parent", &samples::to_parent());
    add(&mut all, "to_child", &samples::to_child());
    add(&mut all, "to_trainer", &samples::to_trainer());
    add(&mut all, "to_worker", &samples::to_worker());
    all
}

/// The frames of one kind of messages, by the names of their files.
pub fn frames<M: Message>(samples: &[(&'static str, M)]) -> Vec<(&'static str, Vec<u8>)> {
    let frames = samples.iter();
    frames
        .map(|(name, message)| (*name, frame(message)))
        .collect()
}

fn add<M: Message>(
    all: &mut BTreeMap<String, Vec<u8>>,
    folder: &str,
    samples: &[(&'static str, M)],
) {
    for (name, frame) in frames(samples) {
        all.insert(format!("{folder}/{name}"), frame);
    }
}

fn frame(message: &impl Message) -> Vec<u8> {
    message.frame().expect("a sample is within its bounds")
}

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden")
}

fn path(name: &str) -> PathBuf {
    folder().join(format!("{name}.hex"))
}

fn to_hex(bytes: &[u8]) -> String {
    let lines = bytes.chunks(32).map(|line| {
        let digits: String = line.iter().map(|byte| format!("{byte:02x}")).collect();
        digits + "\n"
    });
    lines.collect()
}

/// The bytes of a golden file.
fn read(name: &str) -> Vec<u8> {
    let path = path(name);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| {
        panic!(
            "reading {}: {error}; is it new? WEIGHTSYNC_GOLDEN=write makes it",
            path.display()
        )
    });
    let digits: Vec<u8> = text
        .bytes()
        .filter(|byte| !byte.is_ascii_whitespace())
        .collect();
    let (pairs, rest) = digits.as_chunks::<2>();
    assert!(rest.is_empty(), "{name}: half a byte");
    let byte = |pair: &[u8; 2]| {
        let pair = std::str::from_utf8(pair).expect("digits");
        u8::from_str_radix(pair, 16).expect("hexadecimal digits")
    };
    pairs.iter().map(byte).collect()
}

#[test]
fn the_bytes_are_what_they_were() {
    let all = all();
    if std::env::var_os("WEIGHTSYNC_GOLDEN").is_some_and(|value| value == "write") {
        for (name, bytes) in &all {
            let path = path(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("it can be made");
            fs::write(path, to_hex(bytes)).expect("it can be written");
        }
    }
    for (name, bytes) in &all {
        assert_eq!(to_hex(&read(name)), to_hex(bytes), "{name}");
    }
    // A message that is gone leaves no file behind.
    let mut there = 0;
    for entry in fs::read_dir(folder()).expect("golden files") {
        let files = fs::read_dir(entry.expect("a folder").path()).expect("a folder");
        there += files.count();
    }
    assert_eq!(there, all.len(), "files in {}", folder().display());
}

#[test]
fn golden_messages_say_what_they_said() {
    fn check<M: Message + PartialEq + std::fmt::Debug>(folder: &str, samples: Vec<(&str, M)>) {
        for (name, message) in samples {
            let bytes = read(&format!("{folder}/{name}"));
            let (header, payload) = bytes.split_first_chunk().expect("a header");
            let header = FrameHeader::decode(header, &[M::KIND]).expect("a header");
            header.check(payload).expect("its checksum");
            assert_eq!(M::decode(payload), Ok(message), "{folder}/{name}");
        }
    }
    check("to_root", samples::to_root());
    check("from_root", samples::from_root());
    check("to_parent", samples::to_parent());
    check("to_child", samples::to_child());
    check("to_trainer", samples::to_trainer());
    check("to_worker", samples::to_worker());
    check("status", vec![("status", samples::status())]);
}

#[test]
fn golden_hellos_and_blocks_decode_to_the_samples() {
    let bytes = read("hello/client_hello");
    let hello = ClientHello::decode(bytes[..].try_into().expect("64 bytes")).expect("a hello");
    assert_eq!(
        hello.protocols,
        Protocols {
            oldest: 1,
            newest: 1
        }
    );
    assert_eq!(LinkRole::from_code(hello.role), Some(LinkRole::Control));
    assert_eq!(hello.nonce, [0xc1; 32]);
    for (name, verdict) in [
        ("server_hello", HelloVerdict::GoOn { protocol: 1 }),
        ("server_hello_no_protocol", HelloVerdict::NoCommonProtocol),
        ("server_hello_busy", HelloVerdict::Busy),
    ] {
        let bytes = read(&format!("hello/{name}"));
        let hello = ServerHello::decode(bytes[..].try_into().expect("64 bytes"));
        let hello = hello.expect("a hello");
        assert_eq!((hello.verdict, hello.nonce), (verdict, [0x5e; 32]));
    }
    let bytes = read("frame/chunk");
    let (header, rest) = bytes.split_first_chunk().expect("a header");
    let (head, data) = rest.split_at(BLOCK_HEAD_BYTES);
    let header = FrameHeader::decode(header, &[FrameKind::Block]).expect("a header");
    header.check(head).expect("its checksum");
    let head = BlockHead::decode(head).expect("a block");
    assert_eq!(head, samples::block());
    head.check(data).expect("its checksum");
    let bytes = read("frame/delta");
    let (header, rest) = bytes.split_first_chunk().expect("a header");
    let (head, data) = rest.split_at(DELTA_HEAD_BYTES);
    let header = FrameHeader::decode(header, &[FrameKind::Delta]).expect("a header");
    header.check(head).expect("its checksum");
    let head = DeltaHead::decode(head).expect("a delta");
    assert_eq!(head, samples::delta());
    head.check(data).expect("its checksum");
}
