use weightsync_core::{Dtype, Error as CoreError, TensorRef};

use super::*;
use crate::error::Error;
use crate::plain::Plain;
use crate::tensors::Tensors;

/// Parameters, a buffer and extra state, of which one belongs to the root.
fn model() -> StateDict<'static> {
    let mut model = StateDict::new();
    model
        .insert("actor.0.weight", [2, 3], [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0])
        .unwrap();
    model.insert("scale", [], [7_i64]).unwrap();
    model.insert("actor.0.mean", [2], [0.5_f64, 0.25]).unwrap();
    model.mark_buffer("actor.0.mean").unwrap();
    model.insert_extra_state("", "root".into()).unwrap();
    model.insert_extra_state("actor.0", state(12)).unwrap();
    model.insert("none", [0, 4], [0.0_f32; 0]).unwrap();
    model
}

fn state(steps: i64) -> Plain {
    Plain::from_iter([
        ("steps", Plain::from(steps)),
        ("names", Plain::List(vec!["a".into()])),
    ])
}

fn assert_same(left: &StateDict<'_>, right: &StateDict<'_>) {
    assert!(left.names().eq(right.names()));
    assert!(left.buffers().eq(right.buffers()));
    for name in left.names() {
        let [left, right] = [left, right].map(|dict| {
            let tensor = dict.tensor(name).unwrap();
            let mut bytes = vec![0; tensor.bytes_as(tensor.dtype()).unwrap() as usize];
            tensor.write_into(&mut bytes, tensor.dtype()).unwrap();
            (tensor.dtype(), tensor.shape().to_vec(), bytes)
        });
        assert_eq!(left, right, "{name}");
    }
}

#[test]
fn words_are_those_of_the_field() {
    for (strategy, word) in [
        (Strategy::StateDict, "state_dict"),
        (Strategy::TensorDict, "tensordict"),
    ] {
        assert_eq!(strategy.to_string(), word);
        assert_eq!(word.parse::<Strategy>().unwrap(), strategy);
        assert_eq!(
            serde_json::to_string(&strategy).unwrap(),
            format!("{word:?}")
        );
        assert_eq!(
            serde_json::from_str::<Strategy>(&format!("{word:?}")).unwrap(),
            strategy
        );
    }
    let error = "pickle".parse::<Strategy>().unwrap_err();
    assert!(
        error.to_string().contains("state_dict and tensordict"),
        "{error}"
    );
}

#[test]
fn either_form_loads_into_either() {
    let source = model();
    for sent in [Strategy::StateDict, Strategy::TensorDict] {
        for kept in [Strategy::StateDict, Strategy::TensorDict] {
            let message = sent.extract(&source).unwrap();
            assert_eq!(message.attributes().unwrap().format(), sent);
            let mut own = match kept {
                Strategy::StateDict => Weights::StateDict(model()),
                Strategy::TensorDict => Weights::TensorDict(model().try_into().unwrap()),
            };
            let loader: &mut dyn WeightLoader = match &mut own {
                Weights::StateDict(flat) => {
                    flat.insert("actor.0.weight", [2, 3], [0.0_f32; 6]).unwrap();
                    // Larger than the sender's: its room is each model's own business.
                    flat.insert_extra_state("actor.0", "x".repeat(1000).into())
                        .unwrap();
                    flat
                }
                Weights::TensorDict(tree) => {
                    tree.insert("actor.0.weight", [2, 3], [0.0_f32; 6]).unwrap();
                    tree.insert_extra_state("actor.0", Plain::Null).unwrap();
                    tree
                }
            };
            message.apply_to(loader).unwrap();
            assert_same(own.flat(), &source);
            assert_eq!(own.flat().extra_state("actor.0"), Some(&state(12)));
            assert_eq!(own.flat().extra_state(""), Some(&"root".into()));
            assert_eq!(own.flat().buffers().collect::<Vec<_>>(), ["actor.0.mean"]);
        }
    }
}

#[test]
fn models_without_shapes_take_those_that_come() {
    let source = model();
    let message = Strategy::StateDict.extract(&source).unwrap();
    let (mut tensors, mut flat, mut tree) = (Tensors::new(), StateDict::new(), TensorDict::new());
    message.apply_to(&mut tensors).unwrap();
    message.apply_to(&mut flat).unwrap();
    message.apply_to(&mut tree).unwrap();
    assert_eq!(tensors.slice::<f64>("actor.0.mean").unwrap(), [0.5, 0.25]);
    assert_eq!(flat.extra_state("actor.0"), Some(&state(12)));
    assert_eq!(tree.flat().extra_state("actor.0"), Some(&state(12)));
    let layout = WeightExtractor::layout(&source).unwrap();
    for model in [&mut tensors as &mut dyn WeightLoader, &mut flat, &mut tree] {
        assert_eq!(model.layout().unwrap(), layout);
        assert!(
            !model.shape(&Layout::new([]).unwrap()).unwrap(),
            "it has shapes now"
        );
        assert_eq!(model.layout().unwrap(), layout);
    }
}

#[test]
fn a_name_is_a_tensor_or_a_level() {
    let mut flat = StateDict::new();
    flat.insert("a", [1], [1.0_f32]).unwrap();
    flat.insert("a.b", [1], [2.0_f32]).unwrap();
    let conflict = |error: Error, expected: &str| match error {
        Error::Layout(CoreError::PathConflict { name }) => assert_eq!(name, expected),
        error => panic!("{error}"),
    };
    conflict(TensorDict::try_from(flat.clone()).unwrap_err(), "a");
    // On its way a state dict is flat; a tree without shapes cannot take it.
    let layout = WeightExtractor::layout(&flat).unwrap();
    let mut tree = TensorDict::new();
    conflict(tree.shape(&layout).unwrap_err(), "a");

    tree.insert("a.b", [1], [2.0_f32]).unwrap();
    conflict(tree.insert("a", [1], [0.0_f32]).unwrap_err(), "a");
    conflict(tree.insert("a.b.c", [1], [0.0_f32]).unwrap_err(), "a.b");
    let mut part = TensorDict::new();
    part.insert("x", [1], [0.0_f32]).unwrap();
    conflict(tree.nest("a", part.clone()).unwrap_err(), "a");
    conflict(tree.nest("a.b.c", part.clone()).unwrap_err(), "a.b");
    let error = tree.insert("a..c", [1], [0.0_f32]).unwrap_err();
    assert!(
        matches!(error, Error::Layout(CoreError::InvalidPath { .. })),
        "{error}"
    );
    // A tensor that is refused leaves no name behind.
    let error = tree.insert("c.d", [2], [0.0_f32]).unwrap_err();
    assert!(matches!(error, Error::WrongLength { .. }), "{error}");
    assert_eq!(tree.entries().collect::<Vec<_>>(), [("a", false)]);

    tree.nest("a.sub", part).unwrap();
    assert_eq!(tree.flat().names().collect::<Vec<_>>(), ["a.b", "a.sub.x"]);
    let level = tree.level("a").unwrap();
    assert_eq!(
        level.entries().collect::<Vec<_>>(),
        [("b", true), ("sub", false)]
    );
    assert_eq!(*level.flat().slice::<f32>("b").unwrap(), [2.0]);
    assert!(tree.level("a.b").is_none());
    let back = StateDict::from(tree.clone());
    assert_same(TensorDict::try_from(back).unwrap().flat(), tree.flat());
}

#[test]
fn state_dict_never_writes_lent_memory() {
    let matrix = [1.0_f32, 2.0, 3.0, 4.0].map(f32::to_le_bytes).concat();
    let mut lent = StateDict::new();
    let turned = TensorRef::strided(Dtype::F32, &[2, 2], &[1, 2], 0, &matrix).unwrap();
    lent.lend("w", turned).unwrap();
    assert_eq!(*lent.slice::<f32>("w").unwrap(), [1.0, 3.0, 2.0, 4.0]);
    let mut own = lent.clone().into_owned().unwrap();
    own.insert("w", [2, 2], [9.0_f32; 4]).unwrap();
    Weights::StateDict(own).apply_to(&mut lent).unwrap();
    assert_eq!(*lent.slice::<f32>("w").unwrap(), [9.0; 4]);
    assert_eq!(matrix[..4], 1.0_f32.to_le_bytes());
}

#[test]
fn a_load_that_fails_changes_nothing() {
    let mut own = model();
    let mut bytes = crate::plain::ExtraState::new(Plain::Null)
        .unwrap()
        .bytes()
        .to_vec();
    bytes[8] = 99;
    let scale = 8_i64.to_le_bytes();
    let views = |last| [TensorView::new("scale", Dtype::I64, &[], &scale), last];
    let cases = [
        TensorView::new("__extra_state__", Dtype::U8, &[256], &bytes),
        TensorView::new("actor.0.mean", Dtype::F64, &[1], &scale),
        TensorView::new("actor.0.mean", Dtype::I64, &[2], &bytes[..16]),
        TensorView::new("unknown", Dtype::F64, &[1], &scale),
    ];
    for last in cases {
        let error = own.load(&views(last)).unwrap_err();
        assert!(
            matches!(error, Error::Load { .. } | Error::NoSuchTensor { .. }),
            "{error}"
        );
        assert_same(&own, &model());
    }
    own.load(&[TensorView::new("scale", Dtype::I64, &[], &scale)])
        .unwrap();
    assert_eq!(*own.slice::<i64>("scale").unwrap(), [8]);
}

#[test]
fn a_model_with_other_tensors_is_refused_by_name() {
    let message = Strategy::TensorDict.extract(&model()).unwrap();
    let mut other = model();
    other.insert("extra", [1], [1.0_f32]).unwrap();
    let error = message.apply_to(&mut other).unwrap_err();
    assert!(
        error.to_string().contains("1 missing: \"extra\""),
        "{error}"
    );
}

#[test]
fn extra_state_keeps_the_layout_while_it_fits() {
    let mut weights = model();
    let layout = WeightExtractor::layout(&weights).unwrap();
    weights
        .set_extra_state("actor.0", "y".repeat(100).into())
        .unwrap();
    assert_eq!(WeightExtractor::layout(&weights).unwrap(), layout);
    let error = weights
        .set_extra_state("actor.0", "y".repeat(1000).into())
        .unwrap_err();
    assert!(error.to_string().contains("connect again"), "{error}");
    assert_eq!(
        weights.extra_state("actor.0"),
        Some(&"y".repeat(100).into())
    );
    assert!(weights.set_extra_state("critic", Plain::Null).is_err());

    // Weights that are made again for each send take the room of the first.
    let mut again = model();
    again
        .insert_extra_state("actor.0", "z".repeat(200).into())
        .unwrap();
    assert_ne!(WeightExtractor::layout(&again).unwrap(), layout);
    again.fit_extra_states(&layout).unwrap();
    assert_eq!(WeightExtractor::layout(&again).unwrap(), layout);
    again
        .insert_extra_state("actor.0", "z".repeat(900).into())
        .unwrap();
    assert!(again.fit_extra_states(&layout).is_err());
    let error = weights
        .insert("actor.__extra_state__", [3], [1_u8, 2, 3])
        .unwrap_err();
    assert!(
        error.to_string().contains("kept for extra state"),
        "{error}"
    );
}

#[test]
fn tied_tensors_load_under_any_of_their_names() {
    let data = [1.5_f32, 2.5].map(f32::to_le_bytes).concat();
    let tensor = TensorRef::new(Dtype::F32, &[2], &data).unwrap();
    let mut tied = StateDict::new();
    tied.lend("embed", tensor.clone()).unwrap();
    tied.lend("head", tensor).unwrap();
    let message = Weights::StateDict(tied);
    assert_eq!(
        message.ties().unwrap(),
        [("head".to_owned(), "embed".to_owned())]
    );
    for names in [&["embed"][..], &["head"], &["embed", "head"]] {
        let mut model = Tensors::new();
        for name in names {
            model.insert(name, [2], [0.0_f32; 2]).unwrap();
        }
        message.apply_to(&mut model).unwrap();
        for name in names {
            assert_eq!(model.slice::<f32>(name).unwrap(), [1.5, 2.5]);
        }
    }
}
