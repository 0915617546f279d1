//! The decoders of a store's files, for the fuzz targets.

use weightsync_core::delta::{BitPattern, Codec, Scratch, apply, encode};
use weightsync_core::{Dtype, Layout};

use crate::delta_file::{self, DeltaIndex};
use crate::format::{Head, StoreManifest, Value, seal, sealed, unseal};

/// A head and a manifest, as they lie in their files.
pub fn valid() -> [Vec<u8>; 2] {
    [
        include_bytes!("format/head.json").to_vec(),
        include_bytes!("format/manifest.json").to_vec(),
    ]
}

/// The values of those, without a seal.
pub fn valid_values() -> [Vec<u8>; 2] {
    valid().map(|file| {
        let file = file.trim_ascii_end();
        let value = file.windows(8).position(|part| part == b"\"value\":");
        value.map_or(Vec::new(), |at| file[at + 8..file.len() - 1].to_vec())
    })
}

/// Reads bytes as a head and as a manifest: how many of the two they are.
pub fn files(bytes: &[u8]) -> usize {
    [reads::<Head>(bytes), reads::<StoreManifest>(bytes)]
        .iter()
        .filter(|reads| **reads)
        .count()
}

/// The same for bytes that have the right seal.
pub fn values(bytes: &[u8]) -> usize {
    let text = str::from_utf8(bytes).ok();
    let file = text.and_then(sealed);
    file.map_or(0, |file| files(&file))
}

fn reads<T: Value + PartialEq>(bytes: &[u8]) -> bool {
    let Ok(value) = unseal::<T>("a file", bytes) else {
        return false;
    };
    let again = unseal::<T>("a file", &seal(&value));
    assert!(again.is_ok_and(|again| again == value));
    true
}

/// What processes say of themselves, and what `pull` says of a directory: a text for each decoder.
#[cfg(feature = "objects")]
pub fn valid_words() -> [&'static [u8]; 5] {
    [
        br#"{"pid":1,"host":"a","run":{"epoch":1,"id":"00000000000000000000000000000000"},"secret":[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0],"models":[]}"#,
        br#"{"worker":1,"pid":1,"device":"cpu","run":{"epoch":1,"id":"00000000000000000000000000000000"},"wanted":[0]}"#,
        br#"{"staged":1,"applied":1,"versions":[1],"refused":[1,"why"],"asks":["policy",2],"rejected":null}"#,
        br#"{"store":"/s","model":"policy","version":1,"digest":"00000000000000000000000000000000","files":{"a":{"bytes":1,"modified":2}}}"#,
        b"{\"id\":\"0\",\"count\":1,\"left\":false,\"before\":[\"1\",true]}\nabout",
    ]
}

/// Reads bytes with each of these decoders, and with that of presences in object stores: how many read
/// them.
#[cfg(feature = "objects")]
pub fn words(bytes: &[u8]) -> usize {
    let presence = crate::storage::objects::is_presence(bytes);
    crate::scheme::reads(bytes) + usize::from(crate::checkpoint::is_mark(bytes) || presence)
}

/// A file with changes for each kind of element, after a byte that says which.
pub fn valid_deltas() -> Vec<Vec<u8>> {
    (0..KINDS.len())
        .flat_map(|kind| [1, 2, 40].map(|every| (kind, every)))
        .map(|(kind, every)| {
            let layout = layout(kind);
            let old = older(&layout);
            let mut new = old.clone();
            for byte in new.iter_mut().step_by(every) {
                *byte = byte.wrapping_mul(5).wrapping_add(1);
            }
            let made = delta_file::make(
                &layout,
                weightsync_core::delta::Codec::Fast,
                &old,
                &new,
                u64::MAX,
            );
            let made = made.unwrap_or_else(|| unreachable!("there is no limit"));
            [&[kind as u8][..], &made.bytes].concat()
        })
        .collect()
}

/// What reading needs, grown as far as it ever does: by deltas of all codecs.
pub fn scratch() -> Scratch {
    let mut scratch = Scratch::new();
    for kind in 0..KINDS.len() {
        let layout = layout(kind);
        let pattern = BitPattern::of_span(&layout, 0);
        let old = older(&layout);
        for &codec in Codec::ALL {
            let mut new = old.clone();
            for byte in new.iter_mut().step_by(2) {
                *byte = byte.wrapping_mul(5).wrapping_add(1);
            }
            let (mut delta, mut image) = (Vec::new(), old.clone());
            let made = encode(pattern, codec, &old, &new, &mut delta, &mut scratch);
            let put = apply(pattern, &delta, &mut image, None, &mut scratch);
            assert!(made.is_ok() && put.is_ok() && image == new);
        }
    }
    scratch
}

/// Reads a file with changes and applies them. Whether that is possible.
pub fn delta(bytes: &[u8], scratch: &mut Scratch) -> bool {
    let Some((kind, file)) = bytes.split_first() else {
        return false;
    };
    let layout = layout(usize::from(*kind) % KINDS.len());
    let header = file.len().min(DeltaIndex::header_bytes(&layout));
    let Ok(index) = DeltaIndex::read(&layout, &file[..header], file.len() as u64) else {
        return false;
    };
    let mut image = older(&layout);
    for span in 0..delta_file::spans(&layout) {
        let (at, len) = index.part(span);
        let part = &file[at as usize..][..len];
        let place = &mut image[delta_file::range_of(&layout, span)];
        if index.apply(&layout, span, part, place, scratch).is_err() {
            return false;
        }
    }
    true
}

const KINDS: [Dtype; 4] = [Dtype::BF16, Dtype::F32, Dtype::U8, Dtype::F64];

fn layout(kind: usize) -> Layout {
    let layout = Layout::new([("weight".to_owned(), KINDS[kind], vec![96])]);
    layout.unwrap_or_else(|error| unreachable!("a plain layout: {error}"))
}

fn older(layout: &Layout) -> Vec<u8> {
    (0..layout.bytes())
        .map(|at| ((at * 37) >> 2) as u8)
        .collect()
}
