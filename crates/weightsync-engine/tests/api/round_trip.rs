//! Every dtype, shape and name goes through shared memory and files bit by bit.

use std::collections::HashMap;
use std::fs;

use safetensors::SafeTensors;
use weightsync_engine::names::Tree;
use weightsync_engine::{Dtype, SafetensorsFile, SenderSetup, Tensors, Version};

use crate::{bytes_of, pair, pair_by, send, send_to, soon};

/// Bytes that look like nothing in particular: also NaNs and denormals.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(next).flatten().take(len).collect()
}

/// Each dtype as a vector, as a 0-d tensor where that fills whole bytes, and empty.
fn every_dtype(seed: u64) -> Tensors {
    let mut weights = Tensors::new();
    for &dtype in Dtype::ALL {
        let shapes: &[&[u64]] = &[&[], &[0], &[3, 0, 2], &[8, 5], &[1, 2, 4, 3]];
        for (index, shape) in shapes.iter().enumerate() {
            let Some(bits) = dtype.bits_of(shape).filter(|bits| bits % 8 == 0) else {
                continue;
            };
            let bytes = noise(
                bits as usize / 8,
                seed + u64::from(dtype.code()) * 8 + index as u64,
            );
            weights
                .insert_bytes(&format!("{dtype}.{index}"), dtype, *shape, &bytes)
                .unwrap();
        }
    }
    weights
}

fn bytes(weights: &Tensors) -> Vec<(String, Vec<u8>)> {
    weights
        .names()
        .map(|name| {
            (
                name.to_owned(),
                weights.tensor(name).unwrap().bytes().to_vec(),
            )
        })
        .collect()
}

#[test]
fn every_dtype_and_shape_arrives_bit_by_bit() {
    let first = every_dtype(1);
    assert_eq!(
        first.len(),
        Dtype::ALL.len() * 5 - 3,
        "sub-byte dtypes have no 0-d tensor"
    );
    let (mut sender, mut receiver) = pair(&first);
    let snapshot = receiver.latest().unwrap().unwrap();
    assert_eq!(bytes_of(&snapshot), bytes(&first));
    drop(snapshot);
    for seed in 2..5 {
        let next = every_dtype(seed);
        let snapshot = send_to(&mut sender, &next, &mut receiver);
        assert_eq!(bytes_of(&snapshot), bytes(&next));
    }
    let last = every_dtype(9);
    let mut own = Tensors::zeros(&receiver.models()[0].layout);
    let (report, loaded) = send(&mut sender, &last, || {
        receiver.loading(&mut own).recv_timeout(soon())
    });
    assert!(report.unwrap().all_applied());
    assert_eq!(loaded.unwrap(), Some(Version(5)));
    assert_eq!(bytes(&own), bytes(&last));
}

#[test]
fn saved_version_is_safetensors_with_its_digest() {
    let weights = every_dtype(7);
    let (mut sender, mut receiver) = pair(&weights);
    let weights = every_dtype(8);
    let snapshot = send_to(&mut sender, &weights, &mut receiver);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.safetensors");
    let digest = snapshot.save_safetensors(&path).unwrap();
    assert_eq!(digest, snapshot.digest());
    let names: Vec<_> = fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(names, ["policy.safetensors"], "nothing is left next to it");

    // As anybody else reads it.
    let file = fs::read(&path).unwrap();
    let theirs = SafeTensors::deserialize(&file).unwrap();
    assert_eq!(theirs.len(), weights.len());
    for name in weights.names() {
        let (own, their) = (weights.tensor(name).unwrap(), theirs.tensor(name).unwrap());
        assert_eq!(own.dtype().to_string(), their.dtype().to_string());
        assert!(
            own.shape()
                .iter()
                .copied()
                .eq(their.shape().iter().map(|&len| len as u64))
        );
        assert_eq!(own.bytes(), their.data(), "{name}");
    }
    let (_, metadata) = SafeTensors::read_metadata(&file).unwrap();
    let metadata = metadata.metadata().clone().unwrap();
    assert_eq!(metadata["weightsync.model"], "policy");
    assert_eq!(metadata["weightsync.version"], "2");
    assert_eq!(metadata["weightsync.digest"], digest.to_string());

    // And as a source of weights again.
    let checkpoint = SafetensorsFile::open(&path).unwrap();
    assert_eq!(checkpoint.metadata(), &metadata);
    let (_sender, mut receiver) = pair(&checkpoint);
    let again = receiver.latest().unwrap().unwrap();
    let sorted = |mut tensors: Vec<(String, Vec<u8>)>| {
        tensors.sort();
        tensors
    };
    assert_eq!(sorted(bytes_of(&again)), sorted(bytes(&weights)));
}

#[test]
fn saved_file_layout_is_stable_with_empty_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("empty.safetensors");
    let empty = |name: &str| {
        let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![0], &[]);
        (name.to_owned(), view.unwrap())
    };
    let names: Vec<_> = (0..20).map(|i| format!("e{i:02}")).collect();
    let file = safetensors::serialize(names.iter().map(|name| empty(name)), None::<HashMap<_, _>>);
    fs::write(&path, file.unwrap()).unwrap();
    for _ in 0..5 {
        let checkpoint = SafetensorsFile::open(&path).unwrap();
        let layout = weightsync_engine::WeightExtractor::layout(&checkpoint).unwrap();
        let got: Vec<_> = layout
            .tensors()
            .iter()
            .map(|tensor| tensor.name.clone())
            .collect();
        assert_eq!(got, names);
    }
}

#[test]
fn a_save_holds_no_second_copy() {
    let mut weights = Tensors::new();
    for name in ["a", "b"] {
        weights
            .insert(name, [8 << 20], vec![7_u8; 8 << 20])
            .unwrap();
    }
    let (sender, _receiver) = pair(&weights);
    let dir = tempfile::tempdir().unwrap();
    let snapshot = sender.snapshot().unwrap();
    let used = allocation_counter::measure(|| {
        snapshot.save_safetensors(dir.path().join("x")).unwrap();
    });
    assert!(used.bytes_max < 3 << 20, "{} bytes", used.bytes_max);
    assert_eq!(fs::metadata(dir.path().join("x")).unwrap().len() >> 20, 16);
}

#[test]
fn reserved_tensor_name_is_refused_without_a_file() {
    let mut weights = Tensors::new();
    weights.insert("__metadata__", [1], [1.0_f32]).unwrap();
    let (sender, _receiver) = pair(&weights);
    let dir = tempfile::tempdir().unwrap();
    let error = sender
        .snapshot()
        .unwrap()
        .save_safetensors(dir.path().join("x"))
        .unwrap_err();
    assert!(error.to_string().contains("__metadata__"), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_save_that_fails_leaves_the_file_that_was_there() {
    let (sender, _receiver) = pair(&crate::weights());
    let dir = tempfile::tempdir().unwrap();
    // A directory cannot be replaced by a file.
    let path = dir.path().join("taken");
    fs::create_dir(&path).unwrap();
    let error = sender
        .snapshot()
        .unwrap()
        .save_safetensors(&path)
        .unwrap_err();
    assert!(
        matches!(error, weightsync_engine::Error::File { .. }),
        "{error}"
    );
    assert!(error.to_string().contains("taken"), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn dotted_and_nested_names_convert_both_ways() {
    let mut tree = Tree::new();
    tree.insert("actor.0.weight", 1.0_f32).unwrap();
    tree.insert("actor.0.bias", 2.0).unwrap();
    tree.insert("critic.größe.β", 3.0).unwrap();
    let dotted = tree.into_dotted();
    let mut weights = Tensors::new();
    for (name, value) in &dotted {
        weights.insert(name, [1], [*value]).unwrap();
    }
    // Names that are no path are names all the same.
    for name in ["a..b", " ", "with space/and slash", "\"quoted\"\n"] {
        weights.insert(name, [1], [4.0_f32]).unwrap();
    }
    let (_sender, mut receiver) = pair(&weights);
    let snapshot = receiver.latest().unwrap().unwrap();
    assert!(
        snapshot
            .tensors()
            .map(|tensor| tensor.name())
            .eq(weights.names())
    );
    let received = Tree::from_dotted(
        dotted
            .iter()
            .map(|(name, _)| (name, snapshot.slice::<f32>(name).unwrap()[0])),
    );
    assert_eq!(received.unwrap().leaf("critic.größe.β"), Some(&3.0));
}

#[test]
fn a_hundred_thousand_tensors_arrive() {
    let mut weights = Tensors::new();
    for index in 0..100_000_u32 {
        weights
            .insert(
                &format!("layers.{}.{}", index / 100, index % 100),
                [2],
                [index, !index],
            )
            .unwrap();
    }
    let (mut sender, mut receiver) = pair(&weights);
    weights.slice_mut::<u32>("layers.999.99").unwrap()[1] = 7;
    let snapshot = send_to(&mut sender, &weights, &mut receiver);
    assert_eq!(snapshot.layout().len(), 100_000);
    for (index, tensor) in snapshot.tensors().enumerate().take(99_999) {
        assert_eq!(
            *tensor.elements::<u32>().unwrap(),
            [index as u32, !(index as u32)]
        );
    }
    assert_eq!(snapshot.slice::<u32>("layers.999.99").unwrap(), [99_999, 7]);
}

#[test]
fn a_model_without_tensors_has_versions_too() {
    let empty = Tensors::new();
    let (mut sender, mut receiver) = pair_by(
        SenderSetup::new("policy", &empty).unwrap().checksums(true),
        &empty,
    );
    let snapshot = send_to(&mut sender, &empty, &mut receiver);
    assert_eq!(
        (snapshot.version(), snapshot.tensors().len()),
        (Version(2), 0)
    );
    assert!(snapshot.verify_checksums().unwrap());
    assert_eq!(snapshot.digest(), sender.digest().unwrap());
}

#[test]
fn a_tensor_is_asked_for_by_its_name_and_type() {
    let (_sender, mut receiver) = pair(&crate::weights());
    let snapshot = receiver.latest().unwrap().unwrap();
    let words = snapshot
        .slice::<f32>("layer.wieght")
        .unwrap_err()
        .to_string();
    assert_eq!(
        words,
        r#"the model has no tensor "layer.wieght"; it has "layer.weight", "layer.bias", "step""#
    );
    let words = snapshot.slice::<f64>("layer.bias").unwrap_err().to_string();
    assert_eq!(words, r#"tensor "layer.bias" is F32, not F64"#);
    let mut weights = Tensors::new();
    let words = weights
        .insert("w", [2, 2], [1.0_f32])
        .unwrap_err()
        .to_string();
    assert_eq!(
        words,
        r#"tensor "w" of F32 [2, 2] takes 16 bytes, but 4 were given"#
    );
    assert!(weights.insert_bytes("w", Dtype::F4, [3], &[0; 2]).is_err());
    assert!(
        weights
            .insert("w", [u64::MAX, u64::MAX], [1.0_f32])
            .is_err()
    );
    assert!(weights.is_empty());
}
