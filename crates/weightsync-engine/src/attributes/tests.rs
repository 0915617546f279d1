use weightsync_core::TensorRef;

use super::*;
use crate::tensors::Tensors;

fn ties(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs
        .iter()
        .map(|(alias, of)| ((*alias).to_owned(), (*of).to_owned()))
        .collect()
}

fn attributes(pairs: &[(&str, &str)]) -> Attributes {
    Attributes::default().with_ties(ties(pairs)).unwrap()
}

fn layout(names: &[&str]) -> Layout {
    Layout::new(
        names
            .iter()
            .map(|name| ((*name).to_owned(), Dtype::F32, vec![2])),
    )
    .unwrap()
}

fn names(layout: &Layout) -> Vec<&str> {
    layout
        .tensors()
        .iter()
        .map(|spec| spec.name.as_str())
        .collect()
}

/// The bytes that other builds read and write.
#[test]
fn their_encoding_is_this() {
    let all = Attributes::new(Strategy::TensorDict)
        .with_ties(ties(&[("head", "embed")]))
        .unwrap()
        .with_extra_state(vec!["x".into()])
        .with_buffers(vec!["mean".into(), "var".into()]);
    let bytes = all.encode().unwrap();
    assert_eq!(
        bytes,
        b"\x01\x01\x01\x04head\x05embed\x01\x01x\x02\x04mean\x03var"
    );
    assert_eq!(Attributes::decode(&bytes).unwrap(), all);
    assert_eq!(Attributes::default().encode().unwrap(), [1, 0, 0, 0, 0]);

    let long = vec![b'x'; layout::MAX_NAME_BYTES + 1];
    let with_name = |name: &[u8]| {
        let name = String::from_utf8(name.to_vec()).unwrap();
        Attributes::default()
            .with_buffers(vec![name])
            .encode()
            .unwrap()
    };
    let cases = [
        (vec![], "empty"),
        (vec![2, 0, 0, 0, 0], "does not read"),
        (vec![1, 2, 0, 0, 0], "not what a sender writes"),
        (vec![1, 0, 0, 0], "not what a sender writes"),
        (vec![1, 0, 0, 0, 0, 0], "after the end"),
        (with_name(b""), "no tensor can have"),
        (with_name(&long), "no tensor can have"),
        (b"\x01\0\x01\x01a\x01a\0\0".to_vec(), "lead back to it"),
        (vec![0; MAX_ENCODED_BYTES + 1], "16 MiB"),
    ];
    for (bytes, expected) in cases {
        let error = Attributes::decode(&bytes).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn ties_lead_straight_to_what_is_sent() {
    let chained = attributes(&[("c", "b"), ("b", "a"), ("d", "c")]);
    assert_eq!(chained.ties(), ties(&[("c", "a"), ("b", "a"), ("d", "a")]));
    let long: Vec<_> = (0..10_000)
        .map(|i| (format!("{}", i + 1), format!("{i}")))
        .collect();
    let long = Attributes::default().with_ties(long).unwrap();
    assert!(long.ties().iter().all(|(_, of)| of == "0"));
    let cases: [(&[(&str, &str)], &str); 4] = [
        (&[("a", "a")], "\"a\" lead back to it"),
        (&[("a", "b"), ("b", "a")], "\"a\" lead back to it"),
        (
            &[("x", "a"), ("a", "b"), ("b", "c"), ("c", "a")],
            "\"a\" lead back to it",
        ),
        (&[("a", "b"), ("a", "c")], "more than one"),
    ];
    for (pairs, expected) in cases {
        let error = Attributes::default()
            .with_ties(ties(pairs))
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn aliases_are_left_out_and_added_again() {
    let model = layout(&["embed", "mid", "head", "tail"]);
    let tied = attributes(&[("head", "embed"), ("tail", "embed")]);
    let sent = tied.sent_layout(&model).unwrap();
    assert_eq!(names(&sent), ["embed", "mid"]);
    let whole = tied.model_layout(&sent).unwrap();
    assert_eq!(whole, model);

    let bytes = [0; 8];
    let views: Vec<_> = sent
        .tensors()
        .iter()
        .map(|spec| TensorView::new(&spec.name, spec.dtype, &spec.shape, &bytes))
        .collect();
    let expanded = |own: Option<&Layout>| -> Vec<_> {
        tied.expand(&views, own)
            .iter()
            .map(TensorView::name)
            .collect::<Vec<_>>()
    };
    assert_eq!(expanded(None), ["embed", "head", "tail", "mid"]);
    // A model that keeps one of the names gets it under that one.
    for (own, seen) in [
        (&["embed", "mid"][..], &["embed", "mid"][..]),
        (&["mid", "tail"], &["tail", "mid"]),
        (&["mid"], &["embed", "mid"]),
    ] {
        let own = layout(own);
        assert_eq!(names(&tied.layout_for(&sent, &own).unwrap()), seen);
        assert_eq!(expanded(Some(&own)), seen);
    }

    let error = tied.sent_layout(&layout(&["embed", "head"])).unwrap_err();
    assert!(error.to_string().contains("no tensor \"tail\""), "{error}");
    assert!(tied.model_layout(&layout(&["mid"])).is_err());
    assert!(tied.model_layout(&model).is_err(), "an alias that was sent");
    let mut unlike = Tensors::new();
    unlike.insert("a", [1], [1.0_f32]).unwrap();
    unlike.insert("b", [2], [1.0_f32; 2]).unwrap();
    let unlike = attributes(&[("b", "a")])
        .sent_layout(&unlike.layout_now())
        .unwrap_err();
    assert!(
        unlike.to_string().contains("different dtypes or shapes"),
        "{unlike}"
    );
}

#[test]
fn room_for_extra_state_is_each_models_own() {
    let extra =
        |len| Layout::new([("a.__extra_state__".to_owned(), Dtype::U8, vec![len])]).unwrap();
    let seen = Attributes::default()
        .layout_for(&extra(256), &extra(512))
        .unwrap();
    assert_eq!(seen, extra(512));
    let plain = Layout::new([("a.state".to_owned(), Dtype::U8, vec![256])]).unwrap();
    let own = Layout::new([("a.state".to_owned(), Dtype::U8, vec![512])]).unwrap();
    assert_eq!(
        Attributes::default().layout_for(&plain, &own).unwrap(),
        plain
    );
}

#[test]
fn tensors_with_one_memory_are_found() {
    let data = [0_u8; 64];
    let tensor = |name, dtype, shape, strides: &[i64], offset| Extracted {
        name,
        data: TensorData::InMemory(
            TensorRef::strided(dtype, shape, strides, offset, &data).unwrap(),
        ),
    };
    let tensors = [
        tensor("a", Dtype::F32, &[2, 4], &[4, 1], 0),
        tensor("same", Dtype::F32, &[2, 4], &[4, 1], 0),
        tensor("turned", Dtype::F32, &[2, 4], &[1, 2], 0),
        tensor("other shape", Dtype::F32, &[4, 2], &[2, 1], 0),
        tensor("other dtype", Dtype::I32, &[2, 4], &[4, 1], 0),
        tensor("further on", Dtype::F32, &[2, 4], &[4, 1], 1),
        tensor("empty", Dtype::F32, &[0], &[1], 0),
        tensor("also empty", Dtype::F32, &[0], &[1], 0),
        tensor("turned too", Dtype::F32, &[2, 4], &[1, 2], 0),
    ];
    assert_eq!(
        find_ties(&tensors),
        ties(&[("same", "a"), ("turned too", "turned")])
    );
}

/// A model whose second tensor may be the first.
struct Tied {
    own: Tensors,
    tied: bool,
}

impl WeightExtractor for Tied {
    fn layout(&self) -> Result<Layout> {
        Ok(self.own.layout_now())
    }

    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        self.own.extract(take)
    }

    fn ties(&self) -> Result<Vec<(String, String)>> {
        Ok(if self.tied {
            ties(&[("head", "embed")])
        } else {
            Vec::new()
        })
    }
}

impl Tensors {
    fn layout_now(&self) -> Layout {
        WeightExtractor::layout(self).unwrap()
    }
}

#[test]
fn tied_tensor_is_lent_once_while_tied() {
    let mut own = Tensors::new();
    for name in ["embed", "mid", "head"] {
        own.insert(name, [1], [1.0_f32]).unwrap();
    }
    let mut model = Tied { own, tied: true };
    let attributes = model.attributes().unwrap();
    let lent = |model: &Tied| -> Result<Vec<String>> {
        let source = TiedOnce::new(model, &attributes);
        let mut lent = Vec::new();
        source.extract(&mut |tensors| {
            lent.extend(tensors.iter().map(|tensor| tensor.name.to_owned()));
            Ok(())
        })?;
        assert_eq!(names(&source.layout()?), lent);
        Ok(lent)
    };
    assert_eq!(lent(&model).unwrap(), ["embed", "mid"]);
    // One of its names is enough, whichever; it travels under the same.
    for (names, sent) in [
        (&["mid", "head"][..], &["mid", "embed"][..]),
        (&["embed"], &["embed"]),
        (&["mid"], &["mid"]),
    ] {
        let mut own = Tensors::new();
        for name in names {
            own.insert(name, [1], [1.0_f32]).unwrap();
        }
        for tied in [true, false] {
            let own = own.clone();
            assert_eq!(lent(&Tied { own, tied }).unwrap(), sent);
        }
    }
    model.tied = false;
    let error = lent(&model).unwrap_err().to_string();
    assert!(error.contains("was tied to \"embed\""), "{error}");

    // Without ties the source is passed on as it is.
    let none = Attributes::default();
    let layout = model.own.layout_now();
    let plain = TiedOnce::new(&model.own, &none);
    assert_eq!(
        plain
            .plain_bytes(&layout, CrateOnly(()))
            .map(|bytes| bytes.len()),
        Some(3)
    );
}

#[test]
fn every_serde_format_goes_through_the_same_checks() {
    let ties = vec![("head".to_owned(), "embed".to_owned())];
    let attributes = Attributes::default().with_ties(ties).unwrap();
    let json = serde_json::to_string(&attributes).unwrap();
    assert_eq!(
        serde_json::from_str::<Attributes>(&json).unwrap(),
        attributes
    );
    for (good, bad) in [("\"embed\"", "\"head\""), ("\"embed\"", "\"\"")] {
        let hostile = json.replace(good, bad);
        assert!(
            serde_json::from_str::<Attributes>(&hostile).is_err(),
            "{hostile}"
        );
    }
}
