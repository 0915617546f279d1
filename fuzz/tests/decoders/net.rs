//! What travels between machines: handshakes, frames, blocks and messages. The valid encodings are
//! the golden files of weightsync-net.

use std::fmt::Debug;
use std::fs;
use std::path::Path;

use weightsync_fuzz::fuzz;
use weightsync_link::access::{Key, Token};
use weightsync_link::frame::{
    BLOCK_HEAD_BYTES, DELTA_HEAD_BYTES, Decoder, FrameKind, HEADER_BYTES, encode,
};
use weightsync_link::hello::{
    ClientHandshake, ClientHello, HELLO_BYTES, LinkRole, Next, Protocols, ServerHandshake,
    ServerHello,
};
use weightsync_link::message::Message;
use weightsync_net::wire::image::{BlockHead, DeltaHead, SPAN};
use weightsync_net::wire::message::{
    FromRoot, JsonReply, ModelAssembler, ToChild, ToParent, ToRoot, ToTrainer, ToWorker,
};

const ALL: &[FrameKind] = &[
    FrameKind::Control,
    FrameKind::Bulk,
    FrameKind::Block,
    FrameKind::Delta,
    FrameKind::Piece,
];

#[test]
fn net_hello() {
    let key = Key::new(b"0123456789abcdef");
    fuzz!("net_hello", golden("hello"), |bytes: &[u8]| {
        if let Some(hello) = bytes.first_chunk::<HELLO_BYTES>() {
            if let Ok(hello) = ClientHello::decode(hello) {
                assert_eq!(ClientHello::decode(&hello.encode()), Ok(hello));
            }
            if let Ok(hello) = ServerHello::decode(hello) {
                assert_eq!(ServerHello::decode(&hello.encode()), Ok(hello));
            }
        }
        // Whatever a stranger says, and however it is cut into pieces, it is not let in.
        let mut server = ServerHandshake::new(key.clone(), Protocols::OURS, None, [2; 32]);
        let (mut client, _) =
            ClientHandshake::new(key.clone(), LinkRole::Bulk, Protocols::OURS, [1; 32]);
        for mut piece in bytes.chunks(1 + bytes.len() / 3) {
            let mut rest = piece;
            while !piece.is_empty() {
                match server.feed(&mut piece).next {
                    Next::Read(missing) => assert!(missing > 0),
                    Next::Done(_) => panic!("a client without the key was let in"),
                    Next::Close(_) => break,
                }
            }
            while !rest.is_empty() {
                match client.feed(&mut rest).next {
                    Next::Read(missing) => assert!(missing > 0),
                    Next::Done(_) => panic!("a server without the key was believed"),
                    Next::Close(_) => break,
                }
            }
        }
        let _ = (server.hung_up(), client.hung_up());
    });
}

#[test]
fn net_frames() {
    let frames = ["to_root", "to_child", "frame"];
    let seeds = frames.iter().flat_map(|folder| golden(folder));
    fuzz!("net_frames", seeds, |bytes: &[u8]| {
        let whole = frames_of(bytes, bytes.len().max(1));
        assert_eq!(frames_of(bytes, 1), whole, "pieces make no difference");
        let mut again = Vec::new();
        for (kind, payload) in &whole {
            encode(*kind, payload, &mut again).expect("it came in a frame");
        }
        assert!(bytes.starts_with(&again), "a frame has one encoding");
    });
}

/// The frames at the beginning, from pieces of this length.
fn frames_of(bytes: &[u8], piece: usize) -> Vec<(FrameKind, Vec<u8>)> {
    let mut decoder = Decoder::new(ALL);
    let mut frames = Vec::new();
    for mut input in bytes.chunks(piece) {
        loop {
            match decoder.next(&mut input) {
                Ok(Some(frame)) => frames.push((frame.kind, frame.payload.to_vec())),
                Ok(None) => break,
                Err(_) => return frames,
            }
        }
    }
    frames
}

#[test]
fn net_chunk() {
    let seeds = heads(FrameKind::Block, BLOCK_HEAD_BYTES);
    fuzz!("net_chunk", seeds, |bytes: &[u8]| {
        if let Ok(head) = BlockHead::decode(bytes) {
            assert_eq!(head.frame()[HEADER_BYTES..], *bytes);
            assert!(head.model < 64 && !head.version.is_none() && head.bytes > 0);
            assert!(head.offset() + u64::from(head.bytes) <= head.image_bytes);
        }
    });
}

#[test]
fn net_delta() {
    let seeds = heads(FrameKind::Delta, DELTA_HEAD_BYTES);
    fuzz!("net_delta", seeds, |bytes: &[u8]| {
        if let Ok(head) = DeltaHead::decode(bytes) {
            assert_eq!(head.frame()[HEADER_BYTES..], *bytes);
            assert!(head.model < 64 && !head.base.is_none() && head.base < head.version);
            assert!(u64::from(head.index) * SPAN < head.image_bytes);
            assert!(u64::from(head.bytes) < SPAN);
        }
    });
}

/// The heads in golden frames of a kind.
fn heads(kind: FrameKind, bytes: usize) -> Vec<Vec<u8>> {
    let frames = golden("frame").into_iter();
    let of_kind = frames.filter(|frame| frame.len() > HEADER_BYTES && frame[4] == kind.code());
    of_kind
        .map(|frame| frame[HEADER_BYTES..][..bytes].to_vec())
        .collect()
}

#[test]
fn net_to_root() {
    fuzz!("net_to_root", payloads("to_root"), message::<ToRoot>);
}

#[test]
fn net_from_root() {
    fuzz!("net_from_root", payloads("from_root"), message::<FromRoot>);
}

#[test]
fn net_to_parent() {
    fuzz!("net_to_parent", payloads("to_parent"), message::<ToParent>);
}

#[test]
fn net_to_child() {
    fuzz!("net_to_child", payloads("to_child"), message::<ToChild>);
}

#[test]
fn net_to_trainer() {
    fuzz!(
        "net_to_trainer",
        payloads("to_trainer"),
        message::<ToTrainer>
    );
}

#[test]
fn net_to_worker() {
    fuzz!("net_to_worker", payloads("to_worker"), message::<ToWorker>);
}

#[test]
fn net_status() {
    fuzz!("net_status", payloads("status"), message::<JsonReply>);
}

/// What was accepted can be sent on, and says the same there.
fn message<M: Message + PartialEq + Debug>(bytes: &[u8]) {
    if let Ok(message) = M::decode(bytes) {
        let frame = message.frame().expect("it is within its bounds");
        assert_eq!(M::decode(&frame[HEADER_BYTES..]), Ok(message));
    }
}

/// Lengths, then the parts they speak of.
#[test]
fn net_model() {
    let seed = [
        &3_u64.to_le_bytes()[..],
        &2_u64.to_le_bytes(),
        b"\x03abc\x02de",
    ]
    .concat();
    fuzz!("net_model", [seed], |bytes: &[u8]| {
        let Some((lengths, mut rest)) = bytes.split_first_chunk::<16>() else {
            return;
        };
        let both = u128::from_le_bytes(*lengths);
        let Ok(mut model) = ModelAssembler::new(0, both as u64, (both >> 64) as u64) else {
            return;
        };
        while let Some((len, more)) = rest.split_first() {
            let (part, more) = more.split_at(more.len().min(usize::from(*len)));
            rest = more;
            let missing = model.missing();
            assert_eq!(model.push(part).is_ok(), part.len() <= missing);
        }
        if let Ok(model) = model.finish() {
            assert_eq!(model.layout.len() as u64, both as u64);
        }
    });
}

#[test]
fn net_token() {
    fuzz!(
        "net_token",
        [b" sixteen bytes ok\n".to_vec()],
        |bytes: &[u8]| {
            if let Ok(token) = Token::new(bytes) {
                assert_eq!(Token::new(bytes.trim_ascii()).ok(), Some(token));
            }
        }
    );
}

fn payloads(folder: &str) -> impl Iterator<Item = Vec<u8>> {
    golden(folder)
        .into_iter()
        .map(|frame| frame[HEADER_BYTES..].to_vec())
}

/// The golden files of a folder, as bytes.
fn golden(folder: &str) -> Vec<Vec<u8>> {
    let root = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../crates/weightsync-net/golden"
    );
    let folder = Path::new(root).join(folder);
    let entries = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("reading {}: {error}", folder.display()));
    let mut paths: Vec<_> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    paths.sort();
    let read = |path| {
        let text = fs::read_to_string(path).expect("a text");
        let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
        let byte = |pair: &[u8; 2]| {
            let nibble = |digit: u8| char::from(digit).to_digit(16).expect("a digit");
            (nibble(pair[0]) << 4 | nibble(pair[1])) as u8
        };
        digits.as_chunks::<2>().0.iter().map(byte).collect()
    };
    paths.iter().map(read).collect()
}
