use std::time::Duration;

use weightsync_core::{Dtype, Epoch, Run};
use weightsync_mem::{Listener, ModelDescription, RelaySegment, SegmentOptions};

use super::versions::CodingSample;
use super::*;
use crate::agent::Item;

const V: [Version; 5] = [Version(0), Version(1), Version(2), Version(3), Version(4)];

fn layout(bytes: u64) -> Layout {
    Layout::new([("w".to_owned(), Dtype::BF16, vec![bytes / 2])]).unwrap()
}

fn item(model: usize, version: Version) -> Item {
    Item { model, version }
}

/// A delta of one span of 64 KiB, in which everything at a place goes up by one.
fn step(from: usize, place: usize) -> Arc<Delta> {
    let delta = Delta::new(V[from], V[from + 1], &layout(64 << 10));
    let (old, mut new) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    new[2 * place] = 1;
    let (pattern, mut bytes) = (BitPattern::of(Dtype::BF16), Vec::new());
    let scratch = &mut Scratch::new();
    delta::encode(pattern, Codec::Fast, &old, &new, &mut bytes, scratch).unwrap();
    delta.note(0, SpanCoding::Coded(Coded::made(bytes, None, 1 << 20)));
    Arc::new(delta)
}

/// The result of the delta on zeros; nothing while it is not known, or dense.
fn applied(delta: &Delta) -> Option<Vec<usize>> {
    let (layout, mut scratch) = (layout(64 << 10), Scratch::new());
    let SpanCoding::Coded(coded) = delta.span(0, &layout, &mut scratch)? else {
        return None;
    };
    let bytes = coded.sent();
    assert_eq!(coded.crc(), weightsync_simd::crc64(bytes));
    let mut image = vec![0; 64 << 10];
    let pattern = BitPattern::of(Dtype::BF16);
    delta::apply(pattern, bytes, &mut image, None, &mut scratch).unwrap();
    let changed = image.iter().enumerate().filter(|(_, byte)| **byte != 0);
    Some(
        changed
            .map(|(at, byte)| at / 2 * 100 + usize::from(*byte))
            .collect(),
    )
}

#[test]
fn deltas_that_follow_each_other_are_found_as_one() {
    let ring = DeltaRing::default();
    for (from, place) in [(1, 5), (2, 5), (3, 7)] {
        ring.put(0, step(from, place), 1 << 20);
    }
    let cases = [
        (V[1], V[2], Some(vec![501])),
        (V[1], V[3], Some(vec![502])),
        (V[1], V[4], Some(vec![502, 701])),
        (V[2], V[4], Some(vec![501, 701])),
        (V[0], V[2], None),
    ];
    for (base, version, expected) in cases {
        // Found twice, it is the same one.
        for _ in 0..2 {
            let found = ring.find(item(0, version), base, None);
            let made = found.as_deref().and_then(applied);
            assert_eq!(made, expected, "{base} to {version}");
        }
    }
    assert!(
        ring.find(item(1, V[2]), V[1], None).is_none(),
        "another model"
    );
}

#[test]
fn fold_waits_for_its_parts_and_is_dense_if_one_is() {
    let ring = DeltaRing::default();
    let coming = Arc::new(Delta::new(V[2], V[3], &layout(64 << 10)));
    ring.put(0, step(1, 5), 1 << 20);
    ring.put(0, coming.clone(), 1 << 20);
    let both = ring.find(item(0, V[3]), V[1], None).unwrap();
    assert!(!both.is_known(0));
    assert!(
        both.span(0, &layout(64 << 10), &mut Scratch::new())
            .is_none()
    );
    coming.end();
    assert!(both.is_known(0));
    let span = both.span(0, &layout(64 << 10), &mut Scratch::new());
    assert!(matches!(span, Some(SpanCoding::Dense)));
    // A delta that was given up is not worth folding from the start.
    ring.put(0, step(3, 7), 1 << 20);
    assert!(ring.find(item(0, V[4]), V[2], None).is_none());
}

#[test]
fn budget_drops_the_oldest_but_keeps_each_newest() {
    let ring = DeltaRing::default();
    ring.put(1, step(1, 1), 1);
    for from in 1..4 {
        ring.put(0, step(from, 5), 1);
    }
    let there = |model, from: usize| ring.step(item(model, V[from + 1]), V[from]).is_some();
    assert!(there(1, 1) && there(0, 3), "the newest of each");
    assert!(!there(0, 1) && !there(0, 2));
    ring.forget(0);
    assert!(there(1, 1) && !there(0, 3));
}

/// A slow host may take long, and each of several may be at another one.
#[test]
fn deltas_on_their_way_take_no_more_than_those_kept() {
    let ring = DeltaRing::default();
    let sent = [1, 2, 3].map(|from| step(from, 5));
    let bound = sent[0].held();
    let [first, second, third] = sent;
    for delta in [&first, &second] {
        ring.put(0, delta.clone(), bound);
    }
    assert!(!ring.is_too_much(0, &first), "one is kept, and one sent");
    ring.put(0, third.clone(), bound);
    assert!(ring.is_too_much(0, &first) && ring.is_too_much(0, &second));
    assert!(!ring.is_too_much(0, &third), "it is kept");
    drop(first);
    assert!(!ring.is_too_much(0, &second));
}

#[test]
fn range_is_folded_when_that_is_faster_than_dense() {
    let ring = DeltaRing::default();
    // (bytes a second, steps, bytes of all of them, pays) for a model of 1 GiB
    let cases = [
        (None, 2, 1 << 20, true),
        (None, 2, 200 << 20, true),
        (None, 2, 400 << 20, false),
        (None, 40, 12 << 20, false),
        (Some(125_000_000), 2, 200 << 20, true),
        (Some(125_000_000), 40, 12 << 20, true),
        (Some(125_000_000), 400, 120 << 20, false),
        // A single delta is there already.
        (None, 1, 500 << 20, true),
    ];
    for (rate, steps, bytes, expected) in cases {
        ring.note_rate(rate.unwrap_or(0));
        assert_eq!(ring.rate(), rate);
        let pays = ring::pays_to_fold((steps, bytes), 1 << 30, ring.rate());
        assert_eq!(pays, expected, "{rate:?} {steps} {bytes}");
    }
}

#[test]
fn spoiled_version_is_no_base() {
    let ring = DeltaRing::default();
    ring.put(0, step(1, 5), 1 << 20);
    ring.put(1, step(1, 5), 1 << 20);
    // Made from it before that was known, and on its way now.
    let after = step(2, 5);
    ring.put(0, after.clone(), 1 << 20);
    let into = ring
        .find(item(0, V[2]), V[1], None)
        .expect("it was put there");
    ring.spoil(item(0, V[2]));
    assert!(after.is_spoiled() && !into.is_spoiled());
    assert!(ring.is_spoiled(item(0, V[2])) && !ring.is_spoiled(item(0, V[1])));
    assert!(ring.find(item(0, V[2]), V[1], None).is_none());
    assert!(
        ring.find(item(1, V[2]), V[1], None).is_some(),
        "another model"
    );
    // A delta that was begun before that was known, and is put here after it.
    let late = step(2, 5);
    ring.put(0, late.clone(), 1 << 20);
    assert!(late.is_spoiled() && ring.find(item(0, V[3]), V[2], None).is_none());
    // The next version goes as a delta again.
    ring.put(0, step(3, 5), 1 << 20);
    assert!(ring.find(item(0, V[4]), V[3], None).is_some());
}

#[test]
fn delta_slower_than_dense_is_not_used() {
    let ms = Duration::from_millis;
    // (took, coded, whole, rate, pays)
    let cases = [
        (ms(10), 1 << 20, 100 << 20, UNKNOWN, true),
        (ms(70), 1 << 20, 100 << 20, UNKNOWN, false),
        (ms(35), 1 << 20, 100 << 20, UNKNOWN, false),
        (ms(30), 1 << 20, 100 << 20, UNKNOWN, true),
        // Deltas this small are applied in place.
        (ms(90), 700 << 10, 100 << 20, UNKNOWN, true),
        (ms(100), 700 << 10, 100 << 20, UNKNOWN, false),
        (ms(70), 1 << 20, 100 << 20, 100 << 20, true),
        (ms(0), 100 << 20, 100 << 20, 1, false),
    ];
    for (took, coded, whole, rate, expected) in cases {
        let sample = CodingSample { took, coded, whole };
        assert_eq!(sample.pays(rate), expected, "{sample:?} {rate}");
    }
}

/// Two versions of a model of more than one span; the second differs in so
/// many elements.
fn versions(name: &str, every: usize) -> (RelaySegment, [Snapshot; 2]) {
    const BYTES: usize = 5 << 20;
    let listener = Listener::at(&format!("weightsync/test/{name}/{}", std::process::id()));
    let model = ModelDescription {
        layout: layout(BYTES as u64),
        note: Vec::new(),
    };
    let run = Run {
        epoch: Epoch(1),
        id: [7; 16],
    };
    let options = SegmentOptions::default();
    let relay =
        RelaySegment::create(listener.unwrap(), [3; 16], (run, 1), &[model], options).unwrap();
    let snapshots = [V[1], V[2]].map(|version| {
        let slot = relay.partial_slot(0, version, BYTES).unwrap().unwrap();
        let mut piece = slot.take(0).unwrap();
        for (at, element) in piece.chunks_exact_mut(2).enumerate() {
            let up = usize::from(version == V[2] && at % every == 0);
            let bits = (0x3c00 + at % 509 + up) as u16;
            element.copy_from_slice(&bits.to_le_bytes());
        }
        piece.keep();
        slot.commit().unwrap()
    });
    (relay, snapshots)
}

#[test]
fn parts_of_a_small_image_are_sampled_once_each_too() {
    let (_relay, [old, new]) = versions("sampled", 100);
    let versions = VersionPair {
        old: &old,
        new: &new,
    };
    let whole = new.bytes().len() as u64;
    // (parts, bytes of each, bytes that are sampled)
    let cases = [
        (2, GLANCE, 2 * GLANCE),
        (whole / GLANCE + 7, GLANCE, whole),
        (TRIALS, TRIAL, whole),
        (TRIALS, 3 << 20, whole),
    ];
    for (count, bytes, expected) in cases {
        let sample = versions.sample((count, bytes), Codec::Fast, &mut Scratch::new());
        assert_eq!(sample.whole, expected, "{count} of {bytes}");
    }
}

#[test]
fn delta_codec_fits_the_link() {
    // (one element in so many changes, bytes a second, what each span begins with)
    let cases = [
        ("dense", 100, u64::MAX / 4, None),
        ("thin", 100, 1, Some(0x20)),
        ("all", 1, 1, Some(0x20)),
    ];
    for (name, every, rate, begins) in cases {
        let (_relay, [old, new]) = versions(name, every);
        let delta = Delta::new(V[1], V[2], new.layout());
        let told = AtomicUsize::new(0);
        let tell = || {
            told.fetch_add(1, Ordering::Relaxed);
        };
        delta.make((&old, &new), Rate::Known(rate), tell, || false);
        assert!(told.into_inner() > 0);
        let mut scratch = Scratch::new();
        for (index, span) in old.bytes().chunks(SPAN as usize).enumerate() {
            let mut image = vec![0; span.len()];
            let pattern = BitPattern::of_span(old.layout(), index as u64 * SPAN);
            match delta.span(index, old.layout(), &mut scratch) {
                Some(SpanCoding::Coded(coded)) => {
                    assert_eq!(Some(coded.sent()[0] & !3), begins, "{name}");
                    let sent = coded.sent();
                    delta::apply_onto(pattern, sent, span, &mut image, &mut scratch).unwrap();
                    assert!(image == new.bytes()[index * SPAN as usize..][..span.len()]);
                }
                Some(SpanCoding::Dense) => assert_eq!(begins, None, "{name}"),
                None => panic!("{name}: a span is not known"),
            }
        }
        assert_eq!(delta.changes().is_some(), begins.is_some(), "{name}");
    }
}

#[test]
fn deltas_stay_within_their_bound_while_one_is_made() {
    let (_relay, [old, new]) = versions("bound", 1);
    let ring = DeltaRing::default();
    let make = |from: usize, bound: u64, changed: &(dyn Fn() + Sync)| {
        let delta = Arc::new(Delta::new(V[from], V[from + 1], new.layout()));
        ring.put(0, delta.clone(), bound);
        ring.make(0, &delta, (&old, &new), Rate::Any(None), changed, || false);
    };
    make(1, 1 << 30, &|| ());
    let bound = ring.held(0);
    let most = AtomicU64::new(0);
    make(2, bound, &|| {
        most.fetch_max(ring.held(0), Ordering::Relaxed);
    });
    assert!(ring.step(item(0, V[3]), V[2]).is_some());
    let most = most.into_inner();
    assert!(bound > 100_000 && most <= bound, "{most} of {bound}");
}

#[test]
fn delta_is_made_whenever_always_is_set() {
    let (_relay, [old, new]) = versions("any", 100);
    let delta = Delta::new(V[1], V[2], new.layout());
    delta.make((&old, &new), Rate::Any(None), || (), || false);
    let changes = delta.changes().expect("all of it is known");
    let elements = old.bytes().len() / 2;
    assert_eq!(changes.elements, elements as u64);
    assert_eq!(changes.changed, elements.div_ceil(100) as u64);
    assert!(changes.bytes < 2 * changes.changed);
    delta.spoil();
    assert_eq!(delta.changes(), None);
    let span = delta.span(0, new.layout(), &mut Scratch::new());
    assert!(matches!(span, Some(SpanCoding::Dense)));
}

#[test]
fn stopped_delta_is_sent_dense() {
    let (_relay, [old, new]) = versions("stopped", 100);
    let delta = Delta::new(V[1], V[2], new.layout());
    let is_whole = |delta: &Delta| {
        let mut spans = (0..2).map(|index| delta.known(index));
        spans.all(|span| matches!(span, Some(SpanCoding::Dense)))
    };
    delta.make((&old, &new), Rate::Known(1), || (), || true);
    assert!(is_whole(&delta));
    // A delta that the next version stops is sent dense, too.
    let (delta, ring) = (
        Arc::new(Delta::new(V[1], V[2], new.layout())),
        DeltaRing::default(),
    );
    ring.put(0, delta.clone(), 1 << 20);
    ring.stop(0);
    delta.make((&old, &new), Rate::Known(1), || (), || false);
    assert!(is_whole(&delta));
}

#[test]
fn fewer_bytes_are_worth_time_where_a_link_waits() {
    let ms = Duration::from_millis;
    // (took, coded, rate, waits)
    let cases = [
        (ms(100), 1 << 20, 1 << 20, true),
        (ms(100), 1 << 20, 10 << 20, false),
        (ms(0), 0, 1, false),
    ];
    for (took, coded, rate, expected) in cases {
        let sample = CodingSample {
            took,
            coded,
            whole: 8 << 20,
        };
        assert_eq!(sample.waits_for_link(rate), expected, "{sample:?} {rate}");
    }
    // Made by two threads while others are sent.
    for (took, seconds) in [(ms(100), 1.0), (ms(3000), 1.5)] {
        let sample = CodingSample {
            took,
            coded: 1 << 20,
            whole: 8 << 20,
        };
        assert_eq!(sample.side_by_side(1 << 20), seconds);
    }
}

#[test]
fn delta_base_is_kept_until_its_maker_releases_it() {
    let ring = DeltaRing::default();
    assert!(!ring.is_making(0), "there is none");
    let first = step(1, 5);
    ring.put(0, first.clone(), 1 << 20);
    assert!(ring.is_making(0) && !ring.is_making(1));
    first.release();
    assert!(!ring.is_making(0));
    ring.put(0, step(2, 5), 1 << 20);
    assert!(ring.is_making(0));
}

#[test]
fn delta_is_sent_dense_after_a_panic() {
    let (_relay, [old, new]) = versions("panic", 100);
    let delta = Delta::new(V[1], V[2], new.layout());
    let (told, asked) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let tell = || {
        told.fetch_add(1, Ordering::Relaxed);
    };
    // Once it is decided that there is to be one.
    let panics = || match asked.fetch_add(1, Ordering::Relaxed) {
        0 => false,
        _ => panic!("as a kernel does that finds something wrong"),
    };
    let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        delta.make((&old, &new), Rate::Any(None), tell, panics);
    }));
    assert!(made.is_err());
    assert!(told.into_inner() > 0);
    let whole = |index| matches!(delta.known(index), Some(SpanCoding::Dense));
    assert!((0..old.bytes().len().div_ceil(SPAN as usize)).all(whole));
}
