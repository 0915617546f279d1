//! Safetensors files as a source of weights.

use std::fs;

use weightsync_engine::{SafetensorsFile, WeightExtractor};
use weightsync_fuzz::fuzz;

#[test]
fn safetensors_file() {
    // A file in memory is written a hundred times as fast.
    let folder = tempfile::tempdir_in("/dev/shm")
        .or_else(|_| tempfile::tempdir())
        .expect("a folder for the file");
    let path = folder.path().join("model.safetensors");
    let open = |bytes: &[u8]| {
        fs::write(&path, bytes).expect("a small file");
        if let Ok(file) = SafetensorsFile::open(&path) {
            let layout = file.layout().expect("the layout read at opening");
            assert!(
                layout.payload_bytes() <= bytes.len() as u64,
                "more tensors than file"
            );
        }
    };
    fuzz!("safetensors_file", samples(), |bytes: &[u8]| {
        open(bytes);
        // A change of the header's length stops at the first eight bytes, so also with them right.
        open(&with_header_length(bytes));
    });
}

/// The file with its first eight bytes set to the length of its JSON header.
fn with_header_length(bytes: &[u8]) -> Vec<u8> {
    let mut file = bytes.to_vec();
    if let Some((length, rest)) = file.split_first_chunk_mut::<8>() {
        let end = rest
            .iter()
            .rposition(|byte| *byte == b'}')
            .map_or(0, |last| last as u64 + 1);
        *length = end.to_le_bytes();
    }
    file
}

fn samples() -> impl Iterator<Item = Vec<u8>> {
    [
        ("{}", 0),
        (r#"{"__metadata__":{"version":"7"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}"#, 24),
        (
            r#"{"b":{"dtype":"BF16","shape":[3],"data_offsets":[0,6]},"step":{"dtype":"I64","shape":[],"data_offsets":[6,14]},"none":{"dtype":"U8","shape":[0,9],"data_offsets":[14,14]}}"#,
            14,
        ),
    ]
    .into_iter()
    .map(|(header, data)| {
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(header.as_bytes());
        file.resize(file.len() + data, 0);
        file
    })
}
