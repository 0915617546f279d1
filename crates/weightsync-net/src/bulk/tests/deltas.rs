//! Deltas that are not what they should be.

use weightsync_core::delta::{Codec, Pattern, Scratch, encode};
use weightsync_mem::{Room, Snapshot};

use super::*;
use crate::bulk::{Base, Delta};
use crate::wire::frame::{DeltaHead, SPAN};

const BYTES: usize = CHUNKS as usize * CHUNK as usize;

const NEXT: Item = Item {
    model: 0,
    version: Version(3),
};

/// Version 1 and version 2, which differ here and there.
fn image(version: u64) -> Vec<u8> {
    let image = (0..BYTES).map(|at| ((at * 31) >> 3) as u8);
    image
        .enumerate()
        .map(|(at, byte)| match at % 5000 {
            17 => byte.wrapping_add(version as u8),
            _ => byte,
        })
        .collect()
}

/// The delta of a span from one version to the other.
fn changes(span: usize) -> Vec<u8> {
    let at = span * SPAN as usize..BYTES.min((span + 1) * SPAN as usize);
    let (old, new) = (image(1), image(2));
    let (pattern, mut bytes) = (Pattern::of(Dtype::U8), Vec::new());
    let scratch = &mut Scratch::new();
    let (old, new) = (&old[at.clone()], &new[at]);
    encode(pattern, Codec::Fast, old, new, &mut bytes, scratch).unwrap();
    bytes
}

fn head(span: usize, bytes: &[u8]) -> DeltaHead {
    DeltaHead {
        model: 0,
        version: NEXT.version,
        base: ITEM.version,
        index: span as u32,
        bytes: bytes.len() as u32,
        crc: weightsync_simd::crc64(bytes),
        image_bytes: BYTES as u64,
    }
}

fn frame(head: DeltaHead, bytes: &[u8]) -> Vec<u8> {
    [head.frame().as_ref(), bytes].concat()
}

fn span(index: usize) -> Vec<u8> {
    let bytes = changes(index);
    frame(head(index, &bytes), &bytes)
}

/// Chunks of version 2.
fn chunks(indices: std::ops::Range<usize>) -> Vec<u8> {
    let (image, mut all) = (image(2), Vec::new());
    for index in indices {
        let bytes = &image[index * CHUNK as usize..][..CHUNK as usize];
        let head = ChunkHead {
            model: 0,
            version: NEXT.version,
            index: index as u32,
            bytes: CHUNK,
            crc: weightsync_simd::crc64(bytes),
            image_bytes: BYTES as u64,
        };
        all.extend_from_slice(&head.frame());
        all.extend_from_slice(bytes);
    }
    all
}

/// What came of a fetch of version 2 by a process that has version 1.
struct Came {
    end: FetchEnd,
    room: Arc<Room>,
    base: Snapshot,
    kept: Arc<Delta>,
    _relay: Relay,
}

fn fetched(name: &str, answer: Vec<u8>, has_base: bool) -> Came {
    let runtime = runtime();
    let whole = answer.len();
    let address = runtime.block_on(parent(answer, whole, Duration::ZERO));
    let listener = Listener::at(&format!("weightsync/test/{name}/{}", std::process::id()));
    let model = ModelSpec {
        layout: Layout::new([("w".to_owned(), Dtype::U8, vec![BYTES as u64])]).unwrap(),
        note: Vec::new(),
    };
    let options = SegmentOptions::default();
    let relay = Relay::create(listener.unwrap(), SECRET, (RUN, 1), &[model], options).unwrap();
    let room = |item: Item, piece| relay.room(0, item.version, piece).unwrap().unwrap();
    let first = room(ITEM, BYTES);
    let mut piece = first.take(0).unwrap();
    piece.copy_from_slice(&image(1));
    piece.keep();
    let snapshot = first.commit().unwrap();
    let room = room(NEXT, CHUNK as usize);
    let held = Arc::new(Held::coming(room.clone()));
    let kept = Arc::new(Delta::new(ITEM.version, NEXT.version, room.layout()));
    let base = Base {
        snapshot: snapshot.clone(),
        kept: kept.clone(),
        passes_on: true,
        earlier: None,
    };
    let connections = Connections::new(Key::new(&SECRET), RUN, 1, 1);
    let (tell, ends) = mpsc::channel();
    let _fetch = Fetch::start(
        (NEXT, Parent { agent: 2, address }),
        (&Arc::new(connections), 0),
        (room.clone(), held, has_base.then_some(base)),
        &Arc::new(Store::of_relay()),
        &Arc::new(Threads::default()),
        move |end, _| {
            let _ = tell.send(end);
        },
    );
    let end = ends.recv_timeout(LONG).unwrap();
    Came {
        end,
        room,
        base: snapshot,
        kept,
        _relay: relay,
    }
}

#[test]
fn a_version_is_made_of_deltas_and_chunks() {
    let cases = [
        ("deltas", [span(0), span(1)].concat()),
        ("turned", [span(1), span(0)].concat()),
        ("mixed", [chunks(0..4), span(1)].concat()),
        ("other", [span(0), chunks(4..6)].concat()),
    ];
    for (name, answer) in cases {
        let came = fetched(name, [answer, end()].concat(), true);
        assert!(
            matches!(came.end, FetchEnd::Whole),
            "{name}: {:?}",
            came.end
        );
        let whole = came.room.commit().unwrap();
        assert!(whole.bytes() == image(2), "{name}");
        assert!(came.base.bytes() == image(1), "{name}");
        assert!(!came.kept.is_spoiled());
    }
}

#[test]
fn a_delta_that_does_not_belong_there_is_refused_and_the_base_is_as_it_was() {
    let bytes = changes(0);
    let right = head(0, &bytes);
    let with = |change: fn(&mut DeltaHead)| {
        let mut wrong = right;
        change(&mut wrong);
        frame(wrong, &bytes)
    };
    let mut flipped = span(0);
    let last = flipped.len() - 1;
    flipped[last] ^= 4;
    let mut broken = bytes.clone();
    broken.push(0);
    // What begins a fast delta of bytes, and then a block that is none.
    let none = [0x10, 0xff, 0xff];
    let cases = [
        // (name, what comes, spans that are there, whether what came is kept from others)
        ("version", with(|head| head.version = Version(4)), 0, false),
        ("base", with(|head| head.base = Version(2)), 0, false),
        ("model", with(|head| head.model = 1), 0, false),
        ("image", with(|head| head.image_bytes += 64), 0, false),
        ("index", with(|head| head.index = 1), 0, true),
        ("twice", [span(0), span(0)].concat(), 1, false),
        ("after", [chunks(0..1), span(0)].concat(), 0, false),
        ("flipped", flipped, 0, false),
        ("cut", span(0)[..last - 5].to_vec(), 0, false),
        ("longer", frame(head(0, &broken), &broken), 0, true),
        ("none", frame(head(0, &none), &none), 0, true),
    ];
    for (name, answer, spans, spoiled) in cases {
        let came = fetched(name, [answer, end()].concat(), true);
        assert!(
            matches!(came.end, FetchEnd::Broken(_)),
            "{name}: {:?}",
            came.end
        );
        assert!(came.base.bytes() == image(1), "{name}");
        assert_eq!(came.kept.is_spoiled(), spoiled, "{name}");
        // What is there is right.
        let there = (0..CHUNKS as usize).filter_map(|index| Some((index, came.room.read(index)?)));
        let there: Vec<_> = there.collect();
        let single = usize::from(name == "after");
        assert_eq!(there.len(), 4 * spans + single, "{name}");
        for (index, bytes) in there {
            assert!(
                *bytes == image(2)[index * CHUNK as usize..][..CHUNK as usize],
                "{name}"
            );
        }
        assert!(came.room.commit().is_err(), "{name}");
    }
}

#[test]
fn who_has_no_base_takes_no_delta() {
    let came = fetched("baseless", [span(0), span(1), end()].concat(), false);
    assert!(matches!(came.end, FetchEnd::Broken(_)), "{:?}", came.end);
    assert_eq!(came.room.kept(), 0);
}
