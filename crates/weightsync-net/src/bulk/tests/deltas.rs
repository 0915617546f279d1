//! Deltas that are not what they should be.

use weightsync_core::delta::{BitPattern, Codec, Scratch, encode};
use weightsync_mem::{PartialSlot, Snapshot};

use super::*;
use crate::bulk::delta::{Coded, DeltaRing, SpanCoding};
use crate::bulk::{Delta, DeltaBase};
use crate::wire::image::{DeltaHead, SPAN};

/// A dtype with exponents, by which a thin delta notices a wrong base.
const DTYPE: Dtype = Dtype::F8_E5M2;

const BYTES: usize = BLOCKS as usize * BLOCK_BYTES as usize;

const NEXT: Item = Item {
    model: 0,
    version: Version(3),
};

/// Versions, which differ here and there.
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

/// The delta of a span from version 1 to version 3.
fn changes(span: usize) -> Vec<u8> {
    changes_of([1, 3], span)
}

/// The changes from one version to another.
fn changes_of(versions: [u64; 2], span: usize) -> Vec<u8> {
    coded(Codec::Fast, versions, span)
}

fn coded(codec: Codec, [from, to]: [u64; 2], span: usize) -> Vec<u8> {
    let at = span * SPAN as usize..BYTES.min((span + 1) * SPAN as usize);
    let (old, new) = (image(from), image(to));
    let (pattern, mut bytes) = (BitPattern::of(DTYPE), Vec::new());
    let scratch = &mut Scratch::new();
    let (old, new) = (&old[at.clone()], &new[at]);
    encode(pattern, codec, old, new, &mut bytes, scratch).unwrap();
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

/// Blocks of version 3.
fn blocks(indices: std::ops::Range<usize>) -> Vec<u8> {
    let (image, mut all) = (image(3), Vec::new());
    for index in indices {
        let bytes = &image[index * BLOCK_BYTES as usize..][..BLOCK_BYTES as usize];
        let head = BlockHead {
            model: 0,
            version: NEXT.version,
            index: index as u32,
            bytes: BLOCK_BYTES,
            crc: weightsync_simd::crc64(bytes),
            image_bytes: BYTES as u64,
        };
        all.extend_from_slice(&head.frame());
        all.extend_from_slice(bytes);
    }
    all
}

/// The outcome of a fetch of version 3 by a process that has version 1.
struct Fetched {
    end: FetchEnd,
    slot: Arc<PartialSlot>,
    base: Snapshot,
    recorded: Arc<Delta>,
    _relay: RelaySegment,
}

pub(super) fn relay(name: &str, slots: u8) -> RelaySegment {
    let listener = Listener::at(&format!("weightsync/test/{name}/{}", std::process::id()));
    let model = ModelDescription {
        layout: Layout::new([("w".to_owned(), DTYPE, vec![BYTES as u64])]).unwrap(),
        note: Vec::new(),
    };
    let options = SegmentOptions {
        slots,
        ..SegmentOptions::default()
    };
    RelaySegment::create(listener.unwrap(), SECRET, (RUN, 1), &[model], options).unwrap()
}

pub(super) fn whole(relay: &RelaySegment, version: Version, image: &[u8]) -> Snapshot {
    let slot = relay.partial_slot(0, version, BYTES).unwrap().unwrap();
    let mut piece = slot.take(0).unwrap();
    piece.copy_from_slice(image);
    piece.keep();
    slot.commit().unwrap()
}

/// Fetches what is missing from a parent that answers so.
fn fetch(slot: &Arc<PartialSlot>, base: Option<DeltaBase>, answer: Vec<u8>) -> FetchEnd {
    fetch_around(slot, base, answer, || {})
}

/// The same; `between` runs after the request and before the answer.
fn fetch_around(
    slot: &Arc<PartialSlot>,
    base: Option<DeltaBase>,
    answer: Vec<u8>,
    between: impl FnOnce(),
) -> FetchEnd {
    fetch_verified(slot, base, answer, between, None)
}

/// The same; what comes is compared with the digests of the sender at this address.
fn fetch_verified(
    slot: &Arc<PartialSlot>,
    base: Option<DeltaBase>,
    answer: Vec<u8>,
    between: impl FnOnce(),
    digests: Option<SocketAddr>,
) -> FetchEnd {
    let runtime = runtime();
    let (address, asked, go) = held_parent(&runtime, answer);
    let held = Arc::new(HeldVersion::arriving(slot.clone()));
    let connections = Connections::new(Credentials::plain(&SECRET), (RUN, 1), 1, digests);
    let (note, ends) = mpsc::channel();
    let version = slot.version();
    let item = Item { version, ..NEXT };
    let _fetch = BulkFetch::start(
        (item, Parent { agent: 2, address }),
        (&Arc::new(connections), 0),
        (slot.clone(), held, base),
        &Arc::new(BlockStore::of_relay()),
        &Arc::new(Threads::default()),
        move |end, _| {
            let _ = note.send(end);
        },
    );
    asked.recv_timeout(longest()).unwrap();
    between();
    go.notify_one();
    ends.recv_timeout(longest()).unwrap()
}

fn fetched(name: &str, answer: Vec<u8>, has_base: bool) -> Fetched {
    fetched_around(name, answer, has_base, |_| {})
}

fn fetched_around(
    name: &str,
    answer: Vec<u8>,
    has_base: bool,
    between: impl FnOnce(&Arc<PartialSlot>),
) -> Fetched {
    fetched_verified(name, answer, has_base, between, None)
}

fn fetched_verified(
    name: &str,
    answer: Vec<u8>,
    has_base: bool,
    between: impl FnOnce(&Arc<PartialSlot>),
    digests: Option<SocketAddr>,
) -> Fetched {
    let relay = relay(name, SegmentOptions::default().slots);
    let snapshot = whole(&relay, ITEM.version, &image(1));
    let slot = relay.partial_slot(0, NEXT.version, BLOCK_BYTES as usize);
    let slot = slot.unwrap().unwrap();
    let recorded = Arc::new(Delta::new(ITEM.version, NEXT.version, slot.layout()));
    let base = DeltaBase {
        snapshot: snapshot.clone(),
        recorded: recorded.clone(),
        passes_on: true,
        earlier: None,
    };
    let base = has_base.then_some(base);
    let end = fetch_verified(&slot, base, answer, || between(&slot), digests);
    Fetched {
        end,
        slot,
        base: snapshot,
        recorded,
        _relay: relay,
    }
}

#[test]
fn a_version_is_made_of_deltas_and_blocks() {
    let cases = [
        ("deltas", [span(0), span(1)].concat()),
        ("turned", [span(1), span(0)].concat()),
        ("mixed", [blocks(0..4), span(1)].concat()),
        ("other", [span(0), blocks(4..6)].concat()),
    ];
    for (name, answer) in cases {
        let came = fetched(name, [answer, end()].concat(), true);
        assert!(
            matches!(came.end, FetchEnd::Whole),
            "{name}: {:?}",
            came.end
        );
        let whole = came.slot.commit().unwrap();
        assert!(whole.bytes() == image(3), "{name}");
        assert!(came.base.bytes() == image(1), "{name}");
        assert!(!came.recorded.is_spoiled());
    }
}

#[test]
fn parent_is_not_blamed_for_a_span_taken_elsewhere() {
    let answer = [span(0), span(1), end()].concat();
    // Made here: the child does not wait long for an answer.
    let image = image(3);
    let came = fetched_around("taken", answer, true, |slot| {
        let mut first = slot.take(0).unwrap();
        let bytes = first.len();
        first.copy_from_slice(&image[..bytes]);
        first.keep();
    });
    assert!(matches!(came.end, FetchEnd::Partly), "{:?}", came.end);
    // The rest of the span is fetched again, as blocks.
    assert_eq!(came.slot.missing().collect::<Vec<_>>(), [1, 2, 3]);
    assert!(!came.recorded.is_spoiled());
}

#[test]
fn wrong_delta_is_refused_and_the_base_unchanged() {
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
    // The beginning of a fast delta of bytes, and then an invalid part.
    let none = [0x10, 0xff, 0xff];
    let cases = [
        // (name, what comes, spans that are there, whether what came is kept from others)
        ("version", with(|head| head.version = Version(4)), 0, false),
        ("base", with(|head| head.base = Version(2)), 0, false),
        ("model", with(|head| head.model = 1), 0, false),
        ("image", with(|head| head.image_bytes += 64), 0, false),
        ("index", with(|head| head.index = 1), 0, true),
        ("twice", [span(0), span(0)].concat(), 1, false),
        ("after", [blocks(0..1), span(0)].concat(), 0, false),
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
        assert_eq!(came.recorded.is_spoiled(), spoiled, "{name}");
        // Every block that is there is right.
        let there = (0..BLOCKS as usize).filter_map(|index| Some((index, came.slot.read(index)?)));
        let there: Vec<_> = there.collect();
        let single = usize::from(name == "after");
        assert_eq!(there.len(), 4 * spans + single, "{name}");
        for (index, bytes) in there {
            assert!(
                *bytes == image(3)[index * BLOCK_BYTES as usize..][..BLOCK_BYTES as usize],
                "{name}"
            );
        }
        assert!(came.slot.commit().is_err(), "{name}");
    }
}

#[test]
fn delta_of_another_base_is_refused_and_kept() {
    let span = SPAN as usize;
    let (old, new) = (vec![0xff; span], vec![1; span]);
    let (pattern, mut bytes) = (BitPattern::of(DTYPE), Vec::new());
    let scratch = &mut Scratch::new();
    encode(pattern, Codec::Thin, &old, &new, &mut bytes, scratch).unwrap();
    let answer = [frame(head(0, &bytes), &bytes), end()].concat();
    let came = fetched("unfit", answer, true);
    let FetchEnd::BaseMismatch(error) = &came.end else {
        panic!("{:?}", came.end);
    };
    let error = error.to_string();
    let words = "the delta of span 0 from v1 to v3 cannot be applied here: ";
    assert!(error.starts_with(words), "{error}");
    assert!(!came.recorded.is_spoiled());
    assert_eq!(came.slot.kept(), 0);
}

#[test]
fn child_without_a_base_rejects_deltas() {
    let came = fetched("baseless", [span(0), span(1), end()].concat(), false);
    assert!(matches!(came.end, FetchEnd::Broken(_)), "{:?}", came.end);
    assert_eq!(came.slot.kept(), 0);
}

/// By two deltas into the slot that has the version before the base; where somebody has
/// written there and not come to an end, in addition to the base, as ever.
#[test]
fn small_change_is_applied_in_the_older_buffer() {
    let relay = relay("in-place", 2);
    // The bytes that are left of the older version show where it was used.
    let marks = [3, SPAN as usize + 3];
    let marked = |version, marks: &[usize]| {
        let mut image = image(version);
        marks.iter().for_each(|mark| image[*mark] ^= 1);
        image
    };
    let first = whole(&relay, ITEM.version, &marked(1, &marks));
    let snapshot = whole(&relay, Version(2), &image(2));
    drop(first);
    let slot = relay.partial_slot(0, NEXT.version, BLOCK_BYTES as usize);
    let slot = slot.unwrap().unwrap();
    assert_eq!(slot.base(), Some(ITEM.version));

    let earlier = Arc::new(Delta::new(ITEM.version, Version(2), slot.layout()));
    for span in 0..2 {
        let bytes = changes_of([1, 2], span);
        let crc = weightsync_simd::crc64(&bytes);
        earlier.note(span, SpanCoding::Coded(Coded::new(bytes, crc)));
    }
    let base = || DeltaBase {
        snapshot: snapshot.clone(),
        recorded: Arc::new(Delta::new(Version(2), NEXT.version, slot.layout())),
        passes_on: false,
        earlier: Some(earlier.clone()),
    };
    let framed = |span: usize, bytes: &[u8]| {
        let base = Version(2);
        frame(
            DeltaHead {
                base,
                ..head(span, bytes)
            },
            bytes,
        )
    };
    let span = |index| framed(index, &changes_of([2, 3], index));
    // The first one has been put in when it turns out to be too long.
    let mut longer = changes_of([2, 3], 0);
    longer.push(0);
    let end = fetch(&slot, Some(base()), framed(0, &longer));
    assert!(matches!(end, FetchEnd::Broken(_)), "{end:?}");
    assert_eq!(slot.kept(), 0);
    let end_of_it = [span(0), span(1), super::end()].concat();
    let end = fetch(&slot, Some(base()), end_of_it);
    assert!(matches!(end, FetchEnd::Whole), "{end:?}");
    assert!(slot.commit().unwrap().bytes() == marked(3, &marks[1..]));
    assert!(snapshot.bytes() == image(2));
}

/// Relays above slow links get thin deltas, which need the base to be read.
#[test]
fn relay_folds_thin_deltas_for_a_child_behind() {
    let relay = relay("thin", 3);
    let ring = DeltaRing::default();
    let mut newest = whole(&relay, ITEM.version, &image(1));
    for version in [2, 3] {
        let base = newest.version();
        let slot = relay.partial_slot(0, Version(version), BLOCK_BYTES as usize);
        let slot = slot.unwrap().unwrap();
        let recorded = Arc::new(Delta::new(base, Version(version), slot.layout()));
        ring.put(0, recorded.clone(), BYTES as u64);
        let of = DeltaBase {
            snapshot: newest,
            recorded,
            passes_on: true,
            earlier: None,
        };
        let span = |index| {
            let bytes = coded(Codec::Thin, [base.0, version], index);
            assert_eq!(Codec::of(&bytes), Some(Codec::Thin));
            let version = Version(version);
            let head = DeltaHead {
                base,
                version,
                ..head(index, &bytes)
            };
            frame(head, &bytes)
        };
        let answer = [span(0), span(1), super::end()].concat();
        let end = fetch(&slot, Some(of), answer);
        assert!(matches!(end, FetchEnd::Whole), "{end:?}");
        newest = slot.commit().unwrap();
    }
    let delta = ring
        .find(NEXT, ITEM.version, None)
        .expect("they follow each other");
    let (mut made, scratch) = (image(1), &mut Scratch::new());
    for (index, image) in made.chunks_mut(SPAN as usize).enumerate() {
        assert!(delta.is_known(index));
        let Some(SpanCoding::Coded(folded)) = delta.span(index, newest.layout(), scratch) else {
            panic!("span {index} is sent whole");
        };
        let pattern = BitPattern::of(DTYPE);
        weightsync_core::delta::apply(pattern, folded.sent(), image, None, scratch).unwrap();
    }
    assert!(made == image(3));
}

/// A child that has lost its connection comes back, and nobody else has the version by then.
#[test]
fn sender_keeps_a_version_briefly_for_a_lost_child() {
    for somebody_has_an_older_one in [false, true] {
        let relay = relay("cut-off", 2);
        let versions = [1, 3].map(|version| whole(&relay, Version(version), &image(version)));
        let versions = Arc::new(std::sync::Mutex::new(versions.to_vec()));
        let there = versions.clone();
        let find = move |item: Item| {
            let there = there.lock().unwrap();
            there
                .iter()
                .find(|one| one.version() == item.version)
                .cloned()
        };
        let store = BlockStore::of_sender(Box::new(find));
        let older = store.get(ITEM).filter(|_| somebody_has_an_older_one);
        let held = store.get(NEXT).unwrap();
        // They have been replaced.
        versions.lock().unwrap().clear();
        store.broke_off(NEXT, held);
        assert!(store.get(NEXT).is_some());
        store.keep_oldest(0, Version(4));
        assert_eq!(store.get(NEXT).is_some(), !somebody_has_an_older_one);
        assert!(older.is_none_or(|held| !held.is_revoked()));
    }
}

#[test]
fn spoiled_version_is_no_longer_served() {
    let relay = relay("spoiled", 2);
    let sound = whole(&relay, Version(1), &image(1));
    let damaged = whole(&relay, Version(2), &image(3));
    let versions = [sound, damaged];
    let find = move |item: Item| {
        let found = versions.iter().find(|one| one.version() == item.version);
        found.cloned()
    };
    let store = BlockStore::of_sender(Box::new(find));
    let [first, second] = [1, 2].map(|version| Item {
        model: 0,
        version: Version(version),
    });
    let held = store.get(second).expect("it is there");
    store.spoil(second);
    assert!(held.is_revoked(), "also to those who get it now");
    assert!(store.get(second).is_none());
    assert!(store.get(first).is_some_and(|held| !held.is_revoked()));
}

#[test]
fn altered_delta_is_noticed_and_not_passed_on() {
    let runtime = runtime();
    let segment = relay("verify-delta-sender", 2);
    let published = whole(&segment, NEXT.version, &image(3));
    let find = move |_| Some(published.clone());
    let store = Arc::new(BlockStore::of_sender(Box::new(find)));
    let serving = Serving::new((RUN, 1), store, Arc::default(), |_| ());
    let digests = runtime.block_on(listen(serving));
    // The relay sends the changes to another version as those to this one.
    let lie = changes_of([1, 4], 1);
    let lie = frame(head(1, &lie), &lie);
    for (name, second, altered) in [("true", span(1), false), ("lie", lie, true)] {
        let answer = [span(0), second, end()].concat();
        let name = format!("verify-delta-{name}");
        let came = fetched_verified(&name, answer, true, |_| {}, Some(digests));
        match altered {
            true => assert!(
                matches!(came.end, FetchEnd::Altered { block: 4 }),
                "{:?}",
                came.end
            ),
            false => assert!(matches!(came.end, FetchEnd::Whole), "{:?}", came.end),
        }
        assert!(came.recorded.known(0).is_some());
        assert_eq!(came.recorded.known(1).is_some(), !altered);
        // The true delta may still come from elsewhere.
        assert!(!came.recorded.is_spoiled());
        assert_eq!(came.slot.read(4).is_some(), !altered);
    }
}
