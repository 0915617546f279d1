//! Sources: casts and strides in one pass, isolation, and extractors that break their word.

use half::{bf16, f16};
use weightsync_engine::{
    Dtype, Error, Expect, Extracted, Layout, Result, SafetensorsFile, SendOptions, SenderSetup,
    TensorData, TensorRef, Tensors, Version, WaitFor, WeightExtractor,
};

use crate::{pair, pair_by, send_to, soon, weights};

fn floats() -> Tensors {
    let mut weights = Tensors::new();
    let values = [
        0.1_f32,
        -0.0,
        65504.0,
        1e-9,
        f32::INFINITY,
        -3.140_625,
        1.0 / 3.0,
        2.0,
    ];
    weights.insert("f32", [2, 4], values).unwrap();
    weights.insert("f64", [2], [0.1_f64, -1e300]).unwrap();
    weights.insert("ids", [3], [i64::MAX, -1, 7]).unwrap();
    weights.insert("mask", [3], [1_u8, 0, 255]).unwrap();
    weights
}

#[test]
fn floats_are_cast_in_the_pass_and_integers_are_not() {
    let source = floats();
    let values = source.slice::<f32>("f32").unwrap();
    for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32, Dtype::F64] {
        let setup = SenderSetup::new("policy", &source)
            .unwrap()
            .cast(dtype)
            .unwrap();
        assert_eq!(setup.layout().unwrap().tensor("f32").unwrap().dtype, dtype);
        let (mut sender, mut receiver) = pair_by(setup, &source);
        let snapshot = send_to(&mut sender, &source, &mut receiver);
        match dtype {
            Dtype::BF16 => {
                let cast: Vec<_> = values
                    .iter()
                    .map(|&value| bf16::from_f32(value).to_bits())
                    .collect();
                let got: Vec<_> = snapshot
                    .slice::<bf16>("f32")
                    .unwrap()
                    .iter()
                    .map(|value| value.to_bits())
                    .collect();
                assert_eq!(got, cast);
            }
            Dtype::F16 => {
                let cast: Vec<_> = values
                    .iter()
                    .map(|&value| f16::from_f32(value).to_bits())
                    .collect();
                let got: Vec<_> = snapshot
                    .slice::<f16>("f32")
                    .unwrap()
                    .iter()
                    .map(|value| value.to_bits())
                    .collect();
                assert_eq!(got, cast);
            }
            Dtype::F32 => {
                assert_eq!(snapshot.slice::<f32>("f32").unwrap(), values);
                assert_eq!(
                    snapshot.slice::<f32>("f64").unwrap(),
                    [0.1_f32, f32::NEG_INFINITY]
                );
            }
            _ => {
                assert!(
                    snapshot
                        .slice::<f64>("f32")
                        .unwrap()
                        .iter()
                        .copied()
                        .eq(values.iter().map(|&value| f64::from(value)))
                );
                assert_eq!(snapshot.slice::<f64>("f64").unwrap(), [0.1, -1e300]);
            }
        }
        assert_eq!(snapshot.slice::<i64>("ids").unwrap(), [i64::MAX, -1, 7]);
        assert_eq!(snapshot.slice::<u8>("mask").unwrap(), [1, 0, 255]);
    }
    let error = SenderSetup::new("policy", &source)
        .unwrap()
        .cast(Dtype::I32)
        .unwrap_err();
    assert!(error.to_string().contains("not to I32"), "{error}");
}

#[test]
fn a_file_is_cast_on_its_way_too() {
    let (sender, _receiver) = pair(&floats());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    sender.snapshot().unwrap().save_safetensors(&path).unwrap();
    let file = SafetensorsFile::open(&path).unwrap();
    let setup = SenderSetup::new("policy", &file)
        .unwrap()
        .cast(Dtype::F16)
        .unwrap()
        .checksums(true);
    let (_sender, mut receiver) = pair_by(setup, &file);
    let snapshot = receiver.latest().unwrap().unwrap();
    assert_eq!(
        snapshot.slice::<f16>("f64").unwrap(),
        [f16::from_f64(0.1), f16::NEG_INFINITY]
    );
    assert_eq!(snapshot.slice::<u8>("mask").unwrap(), [1, 0, 255]);
    assert!(snapshot.verify_checksums().unwrap());
}

/// A matrix of 2 x 3 that a trainer keeps transposed, and a view of every second element.
struct Views {
    memory: Vec<f32>,
}

impl WeightExtractor for Views {
    fn layout(&self) -> Result<Layout> {
        Ok(Layout::new([
            ("transposed".into(), Dtype::F32, vec![3, 2]),
            ("every.second".into(), Dtype::F32, vec![3]),
            ("repeated".into(), Dtype::F32, vec![2, 2]),
        ])?)
    }

    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        let bytes: Vec<u8> = self
            .memory
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        let view = |name, shape, strides: &[i64], offset| {
            let tensor = TensorRef::strided(Dtype::F32, shape, strides, offset, &bytes).unwrap();
            Extracted {
                name,
                data: TensorData::InMemory(tensor),
            }
        };
        take(&[
            view("transposed", &[3, 2], &[1, 3], 0),
            view("every.second", &[3], &[2], 1),
            view("repeated", &[2, 2], &[0, -1], 5),
        ])
    }
}

#[test]
fn strided_sources_arrive_contiguous_and_cast() {
    let source = Views {
        memory: (0..6_u8).map(f32::from).collect(),
    };
    let (_sender, mut receiver) = pair(&source);
    let snapshot = receiver.latest().unwrap().unwrap();
    assert_eq!(
        snapshot.slice::<f32>("transposed").unwrap(),
        [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    );
    assert_eq!(
        snapshot.slice::<f32>("every.second").unwrap(),
        [1.0, 3.0, 5.0]
    );
    assert_eq!(
        snapshot.slice::<f32>("repeated").unwrap(),
        [5.0, 4.0, 5.0, 4.0]
    );

    let setup = SenderSetup::new("policy", &source)
        .unwrap()
        .cast(Dtype::BF16)
        .unwrap();
    let (_sender, mut receiver) = pair_by(setup.copy_threads(2).checksums(true), &source);
    let snapshot = receiver.latest().unwrap().unwrap();
    let expected = [0.0, 3.0, 1.0, 4.0, 2.0, 5.0].map(bf16::from_f32);
    assert_eq!(snapshot.slice::<bf16>("transposed").unwrap(), expected);
    assert!(snapshot.verify_checksums().unwrap());
}

#[test]
fn a_change_in_place_is_seen_only_once_it_is_sent() {
    let mut source = weights();
    let (mut sender, mut receiver) = pair(&source);
    let first = receiver.latest().unwrap().unwrap();
    let digest = first.digest();
    source.slice_mut::<f32>("layer.weight").unwrap().fill(7.0);
    assert_eq!(first.digest(), digest);
    assert_eq!(receiver.latest().unwrap().unwrap().digest(), digest);
    assert!(
        receiver.recv_timeout(crate::BRIEF).unwrap().is_none(),
        "nothing was sent"
    );
    let second = send_to(&mut sender, &source, &mut receiver);
    assert_eq!(second.slice::<f32>("layer.weight").unwrap(), [7.0; 33 * 7]);
    assert_eq!(first.digest(), digest, "what is held does not change");
}

#[test]
fn a_snapshot_outlives_both_ends() {
    let (mut sender, mut receiver) = pair(&weights());
    let held = send_to(&mut sender, &weights(), &mut receiver);
    let digest = held.digest();
    drop((sender, receiver));
    assert_eq!(held.digest(), digest);
    assert_eq!(held.clone().slice::<i64>("step").unwrap(), [41]);
}

/// An extractor that does not do what the trait asks.
struct Unfaithful<'a> {
    own: &'a Tensors,
    lends: usize,
    fails_after: bool,
    hides_errors: bool,
}

impl WeightExtractor for Unfaithful<'_> {
    fn layout(&self) -> Result<Layout> {
        WeightExtractor::layout(self.own)
    }

    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        for _ in 0..self.lends {
            let lent = self.own.extract(take);
            if !self.hides_errors {
                lent?;
            }
        }
        if self.fails_after {
            return Err(Error::Extract {
                name: "layer.bias".into(),
                source: "the gather failed".into(),
            });
        }
        Ok(())
    }
}

#[test]
fn inconsistent_extractor_publishes_nothing() {
    let good = weights();
    let (mut sender, mut receiver) = pair(&good);
    let faithful = || Unfaithful {
        own: &good,
        lends: 1,
        fails_after: false,
        hides_errors: false,
    };
    let mut wrong = Tensors::new();
    wrong.insert("other", [1], [0_u8]).unwrap();
    let cases = [
        (
            "not at all",
            Unfaithful {
                lends: 0,
                ..faithful()
            },
        ),
        (
            "more than once",
            Unfaithful {
                lends: 2,
                ..faithful()
            },
        ),
        (
            "the gather failed",
            Unfaithful {
                fails_after: true,
                ..faithful()
            },
        ),
        (
            "not at all",
            Unfaithful {
                own: &wrong,
                hides_errors: true,
                ..faithful()
            },
        ),
    ];
    for (words, source) in cases {
        let error = sender
            .send_with(
                &source,
                &SendOptions::new().wait(WaitFor::Sent).timeout(Some(soon())),
            )
            .unwrap_err();
        assert!(matches!(error, Error::Extract { .. }), "{error}");
        assert!(error.to_string().contains(words), "{words}: {error}");
        assert_eq!(sender.version().unwrap(), Version(1));
    }
    assert_eq!(receiver.latest().unwrap().unwrap().version(), Version(1));
    assert_eq!(
        send_to(&mut sender, &good, &mut receiver).version(),
        Version(2)
    );

    let setup = SenderSetup::new("policy", &good).unwrap();
    let silent = Unfaithful {
        own: &good,
        lends: 0,
        fails_after: false,
        hides_errors: false,
    };
    let error = setup
        .connect(&silent, Expect::Count(0), Some(soon()))
        .unwrap_err();
    assert!(error.to_string().contains("not at all"), "{error}");
}
