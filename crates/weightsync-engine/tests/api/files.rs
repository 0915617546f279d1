//! Files that are not what they say: an error in words, no panic, no memory.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use weightsync_engine::{Error, Expect, SafetensorsFile, SenderSetup, Tensors, Version};

use crate::{pair, soon, weights};

/// A file with this header and so many bytes behind it.
fn file(dir: &Path, header: &str, data: usize) -> std::path::PathBuf {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.resize(bytes.len() + data, 0xa5);
    written(dir, &bytes)
}

fn written(dir: &Path, bytes: &[u8]) -> std::path::PathBuf {
    let path = dir.join("hostile.safetensors");
    fs::write(&path, bytes).unwrap();
    path
}

fn one(shape: &str, dtype: &str, offsets: &str) -> String {
    format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
}

#[test]
fn corrupt_files_are_refused_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let two = |first: &str, second: &str| {
        format!(
            r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{first}}},"b":{{"dtype":"U8","shape":[4],"data_offsets":{second}}}}}"#
        )
    };
    let cases: [(&str, String, usize); 16] = [
        (
            "a tensor longer than the file",
            one("[8]", "U8", "[0,8]"),
            4,
        ),
        ("bytes nobody describes", one("[8]", "U8", "[0,8]"), 9),
        ("an end before its beginning", one("[8]", "U8", "[8,0]"), 8),
        (
            "offsets that are not the shape's",
            one("[8]", "F32", "[0,8]"),
            8,
        ),
        (
            "a shape that overflows",
            one("[4294967296,4294967296,4294967296]", "F32", "[0,8]"),
            8,
        ),
        (
            "offsets that overflow",
            one("[8]", "U8", "[18446744073709551608,18446744073709551615]"),
            8,
        ),
        ("a negative shape", one("[-1]", "U8", "[0,8]"), 8),
        ("an unknown dtype", one("[8]", "F33", "[0,8]"), 8),
        ("half a byte", one("[3]", "F4", "[0,2]"), 2),
        ("tensors that overlap", two("[0,4]", "[2,6]"), 6),
        ("a hole between tensors", two("[0,4]", "[6,10]"), 10),
        ("the same place twice", two("[0,4]", "[0,4]"), 4),
        ("no object", "[]".into(), 0),
        ("no JSON", "{".repeat(200_000), 0),
        (
            "a name that is empty",
            r#"{"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#.into(),
            1,
        ),
        (
            "metadata that is no text",
            r#"{"__metadata__":{"a":[1]}}"#.into(),
            0,
        ),
    ];
    for (what, header, data) in cases {
        let path = file(dir.path(), &header, data);
        let error = SafetensorsFile::open(&path).expect_err(what);
        assert!(error.to_string().len() > 20, "{what}: {error}");
    }
}

#[test]
fn a_file_too_short_or_absent_is_refused_by_its_path() {
    let dir = tempfile::tempdir().unwrap();
    for bytes in [&b""[..], b"1234567", &[0; 8], &7u64.to_le_bytes()] {
        let path = written(dir.path(), bytes);
        let error = SafetensorsFile::open(&path).unwrap_err();
        assert!(
            matches!(&error, Error::File { path: at, .. } if *at == path),
            "{error}"
        );
        assert!(error.to_string().contains("hostile.safetensors"), "{error}");
    }
    assert!(matches!(
        SafetensorsFile::open(dir.path().join("absent")),
        Err(Error::File { .. })
    ));
    assert!(matches!(
        SafetensorsFile::open(dir.path()),
        Err(Error::File { .. })
    ));
}

#[test]
fn irregular_file_is_refused_without_a_wait() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    // Nobody writes to it, and nobody ever will.
    mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    for path in [Path::new("/dev/zero"), Path::new("/proc/self/fd"), &fifo] {
        let words = SafetensorsFile::open(path).unwrap_err().to_string();
        assert!(words.contains("not a regular file"), "{words}");
    }
    // It says that it is empty, whatever it holds.
    let words = SafetensorsFile::open("/proc/self/environ").unwrap_err();
    assert!(words.to_string().contains("shorter than 8"), "{words}");
}

#[test]
fn a_length_that_lies_costs_no_memory() {
    let dir = tempfile::tempdir().unwrap();
    for length in [
        u64::MAX,
        u64::MAX - 8,
        1 << 40,
        100_000_001,
        99_999_999,
        4096,
    ] {
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend_from_slice(b"{}");
        let path = written(dir.path(), &bytes);
        let used = allocation_counter::measure(|| {
            let error = SafetensorsFile::open(&path).unwrap_err().to_string();
            assert!(error.contains(&length.to_string()), "{error}");
        });
        assert!(
            used.bytes_max < 16 << 10,
            "{length}: {} bytes",
            used.bytes_max
        );
    }
}

#[test]
fn file_cut_short_after_opening_publishes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let (mut sender, mut receiver) = pair(&weights());
    sender.snapshot().unwrap().save_safetensors(&path).unwrap();
    let checkpoint = SafetensorsFile::open(&path).unwrap();
    let whole = fs::metadata(&path).unwrap().len();
    fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(whole - 100)
        .unwrap();
    let error = sender.send(&checkpoint).unwrap_err();
    assert!(error.to_string().contains("model.safetensors"), "{error}");
    assert_eq!(sender.version().unwrap(), Version(1));
    assert_eq!(receiver.latest().unwrap().unwrap().version(), Version(1));
}

#[test]
fn parts_of_tensors_are_read_and_nothing_beyond_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = written(dir.path(), &valid());
    let checkpoint = SafetensorsFile::open(&path).unwrap();
    for (index, start, len, expected) in [
        (0, 0, 12, Some(1)),
        (0, 11, 1, Some(1)),
        (0, 12, 0, Some(1)),
        (1, 1, 3, Some(2)),
        (0, 11, 2, None),
        (1, 5, 0, None),
        (1, u64::MAX, 1, None),
        (2, 0, 0, None),
    ] {
        let mut place = vec![0; len];
        let read = checkpoint.read_at(index, start, &mut place);
        match expected {
            Some(byte) => assert!(read.is_ok() && place.iter().all(|&got| got == byte)),
            None => {
                let words = read.unwrap_err().to_string();
                assert!(words.contains("reading") && words.contains("hostile.safetensors"));
            }
        }
    }
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(20).unwrap();
    let error = checkpoint.read_at(0, 0, &mut [0; 12]).unwrap_err();
    assert!(matches!(error, Error::File { .. }), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Whatever is changed in a file, it opens and can be sent, or it is an error.
    #[test]
    fn a_damaged_file_opens_and_sends_or_is_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
        whole in any::<bool>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = valid();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if !whole {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(checkpoint) = SafetensorsFile::open(written(dir.path(), &bytes)) {
            let setup = SenderSetup::new("policy", &checkpoint).unwrap();
            setup.connect(&checkpoint, Expect::Count(0), Some(soon())).unwrap();
        }
    }

    #[test]
    fn random_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let dir = tempfile::tempdir().unwrap();
        prop_assert!(SafetensorsFile::open(written(dir.path(), &bytes)).is_err());
    }
}

fn valid() -> Vec<u8> {
    let view = safetensors::tensor::TensorView::new;
    let (a, b) = ([1; 12], [2; 4]);
    let tensors = [
        ("a", view(safetensors::Dtype::F32, vec![3], &a).unwrap()),
        ("b", view(safetensors::Dtype::BF16, vec![2, 1], &b).unwrap()),
    ];
    safetensors::serialize(tensors, None).unwrap()
}

#[test]
fn a_source_may_change_from_tensors_to_a_file() {
    let (mut sender, mut receiver) = pair(&weights());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    sender.snapshot().unwrap().save_safetensors(&path).unwrap();
    let zeros = Tensors::zeros(sender.layout().unwrap());
    crate::send_to(&mut sender, &zeros, &mut receiver);
    let checkpoint = SafetensorsFile::open(&path).unwrap();
    let (report, snapshot) =
        crate::send(&mut sender, &checkpoint, || receiver.recv_timeout(soon()));
    assert!(report.unwrap().all_applied());
    let snapshot = snapshot.unwrap().unwrap();
    assert_eq!(snapshot.version(), Version(3));
    assert_eq!(
        snapshot.slice::<f32>("layer.weight").unwrap(),
        weights().slice::<f32>("layer.weight").unwrap()
    );
}
