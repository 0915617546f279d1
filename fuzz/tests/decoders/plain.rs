//! The data that travels in addition to tensors: extra state, and the attributes of a model.

use weightsync_engine::{Attributes, ExtraState, Mapping, ModelPath, Plain, Strategy};
use weightsync_fuzz::fuzz;

#[test]
fn plain() {
    let seeds = samples().map(|value| value.encode().expect("small"));
    fuzz!("plain", seeds, |bytes: &[u8]| {
        if let Ok(value) = Plain::decode(bytes) {
            let again = value.encode().expect("it was within bounds");
            assert_eq!(again, bytes, "a value has one encoding");
        }
    });
}

#[test]
fn plain_json() {
    let seeds = samples().map(|value| serde_json::to_vec(&value).expect("finite"));
    fuzz!("plain_json", seeds, |bytes: &[u8]| {
        if let Ok(value) = serde_json::from_slice::<Plain>(bytes) {
            value.encode().expect("it was within bounds");
        }
    });
}

#[test]
fn extra_state() {
    let seeds = samples().map(|value| ExtraState::new(value).expect("small").bytes().to_vec());
    fuzz!("extra_state", seeds, |bytes: &[u8]| {
        if let Ok(state) = ExtraState::from_bytes(bytes) {
            assert_eq!(state.bytes(), bytes);
            let again = ExtraState::with_capacity(state.value().clone(), bytes.len());
            assert_eq!(again.expect("it fitted").bytes(), bytes);
        }
    });
}

#[test]
fn attributes() {
    let tie = |alias: &str, of: &str| (alias.to_owned(), of.to_owned());
    let full = Attributes::new(Strategy::TensorDict)
        .with_ties(vec![tie("head", "embed"), tie("tail", "head")])
        .expect("they lead to one tensor")
        .with_extra_state(vec!["__extra_state__".into()])
        .with_buffers(vec!["norm.mean".into(), "norm.var".into()]);
    let seeds = [Attributes::default(), full].map(|one| one.encode().expect("small"));
    fuzz!("attributes", seeds, |bytes: &[u8]| {
        if let Ok(attributes) = Attributes::decode(bytes) {
            let again = attributes.encode().expect("it was within bounds");
            assert_eq!(Attributes::decode(&again), Ok(attributes));
        }
    });
}

#[test]
fn mapping_json() {
    let mapping = Mapping::new()
        .rename("a.*", "b.*")
        .and_then(|mapping| mapping.fuse(["b.q", "b.k"], "b.qk", 0))
        .and_then(|mapping| mapping.split("c", [("c.0", 1), ("c.1", 2)], 1))
        .and_then(|mapping| mapping.transpose("b.qk", [1, 0]))
        .and_then(|mapping| mapping.cast("*", weightsync_engine::Dtype::BF16))
        .and_then(|mapping| mapping.drop("step"))
        .expect("valid rules");
    let layouts: Vec<_> = crate::layout::samples().collect();
    let seed = serde_json::to_vec(&mapping).expect("plain data");
    fuzz!("mapping_json", [seed], |bytes: &[u8]| {
        if let Ok(mapping) = serde_json::from_slice::<Mapping>(bytes) {
            let again = serde_json::to_vec(&mapping).expect("plain data");
            assert_eq!(
                serde_json::from_slice::<Mapping>(&again).ok(),
                Some(mapping.clone())
            );
            for layout in &layouts[..3] {
                let run = mapping.dry_run(layout, layout);
                assert_eq!(run.problems.is_empty(), mapping.layout(layout).is_ok());
            }
        }
    });
}

#[test]
fn model_path() {
    let seeds = ["env.value_net", "transforms[0].net", "a[1][20]"].map(|path| path.into());
    fuzz!("model_path", seeds, |bytes: &[u8]| {
        if let Ok(text) = str::from_utf8(bytes)
            && let Ok(path) = text.parse::<ModelPath>()
        {
            assert_eq!(path.to_string(), text);
        }
    });
}

fn samples() -> impl Iterator<Item = Plain> {
    let list = [Plain::Null, true.into(), (-3_i64).into(), 2.5.into()];
    [
        Plain::Null,
        u64::MAX.into(),
        "text".into(),
        list.clone().into_iter().collect(),
        Plain::from_iter([("a", Plain::from(1)), ("b", list.into_iter().collect())]),
    ]
    .into_iter()
}
