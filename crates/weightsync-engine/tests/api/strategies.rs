//! State dicts, tensordicts, ties, extra state, mappings and paths, all the way
//! from a trainer to a worker's model.

use std::sync::{Arc, RwLock};
use std::thread;

use weightsync_engine::{
    Attributes, Dtype, Error, Expect, Extracted, Layout, Mapping, ModelTree, Models, Plain,
    ReceiverSetup, Registered, Result, SendOptions, Sender, SenderSetup, Set, SetLoader, Snapshot,
    StateDict, Strategy, TensorDict, TensorView, Tensors, Version, WeightExtractor, WeightLoader,
};

use crate::soon;

/// Sends `source` to a worker that loads it into `model`, then `again`.
fn deliver<E>(source: &E, again: &E, model: &mut (dyn WeightLoader + Send)) -> Sender
where
    E: WeightExtractor + Sync,
{
    let setup = SenderSetup::new("policy", source).unwrap();
    let info = setup.init_info();
    thread::scope(|scope| {
        let worker = scope.spawn(move || {
            let mut receiver = ReceiverSetup::new(info, 0)
                .connect_into(model, Some(soon()))
                .unwrap();
            let version = receiver.loading(model).recv_timeout(soon()).unwrap();
            assert_eq!(version, Some(Version(2)));
        });
        let mut sender = setup
            .connect(source, Expect::Count(1), Some(soon()))
            .unwrap();
        let report = sender.send(again).unwrap();
        worker.join().unwrap();
        assert!(report.all_applied(), "{report}");
        sender
    })
}

fn state_dict(value: f32, steps: i64) -> StateDict<'static> {
    let mut weights = StateDict::new();
    weights
        .insert("actor.0.weight", [2, 2], [value, 1.0, 2.0, 3.0])
        .unwrap();
    weights
        .insert("actor.norm.mean", [2], [value, 0.0])
        .unwrap();
    weights.mark_buffer("actor.norm.mean").unwrap();
    let state = Plain::from_iter([("steps", Plain::from(steps))]);
    weights.insert_extra_state("actor.norm", state).unwrap();
    weights
}

#[test]
fn either_format_loads_into_a_model_of_the_other() {
    let mut model = TensorDict::try_from(state_dict(0.0, 0)).unwrap();
    deliver(&state_dict(1.0, 1), &state_dict(5.0, 2), &mut model);
    assert_eq!(
        *model.flat().slice::<f32>("actor.0.weight").unwrap(),
        [5.0, 1.0, 2.0, 3.0]
    );
    let steps = Plain::from_iter([("steps", Plain::from(2))]);
    assert_eq!(model.flat().extra_state("actor.norm"), Some(&steps));

    let mut model = state_dict(0.0, 0);
    let source = |value| TensorDict::try_from(state_dict(value, 7)).unwrap();
    deliver(&source(1.0), &source(6.0), &mut model);
    assert_eq!(*model.slice::<f32>("actor.norm.mean").unwrap(), [6.0, 0.0]);
    assert_eq!(model.buffers().collect::<Vec<_>>(), ["actor.norm.mean"]);
}

#[test]
fn a_model_without_shapes_takes_the_senders() {
    let mut model = Tensors::new();
    let mut source = Tensors::new();
    source.insert("weight", [3], [1.0_f32, 2.0, 3.0]).unwrap();
    deliver(&source, &source, &mut model);
    assert_eq!(model.slice::<f32>("weight").unwrap(), [1.0, 2.0, 3.0]);
}

#[test]
fn worker_knows_format_buffers_and_extra_state() {
    let setup = SenderSetup::new("policy", &state_dict(1.0, 1)).unwrap();
    let info = setup.init_info();
    let worker = thread::spawn(move || {
        let mut receiver = ReceiverSetup::new(info, 0).connect(Some(soon())).unwrap();
        let snapshot = receiver.recv_timeout(soon()).unwrap().unwrap();
        let attributes: &Attributes = snapshot.attributes();
        assert_eq!(attributes.format(), Strategy::StateDict);
        assert_eq!(attributes.buffers(), ["actor.norm.mean"]);
        let lent = StateDict::from_views(snapshot.tensors(), attributes).unwrap();
        // It stays until the trainer has counted it.
        (receiver, lent.extra_state("actor.norm").cloned())
    });
    let _sender = setup
        .connect(&state_dict(1.0, 1), Expect::Count(1), Some(soon()))
        .unwrap();
    let steps = Plain::from_iter([("steps", Plain::from(1))]);
    assert_eq!(worker.join().unwrap().1, Some(steps));
}

#[test]
fn outgrown_extra_state_is_refused_and_the_old_serves() {
    let mut source = state_dict(1.0, 1);
    let setup = SenderSetup::new("policy", &source).unwrap();
    let mut sender = setup
        .connect(&source, Expect::Count(0), Some(soon()))
        .unwrap();
    let long = Plain::from("x".repeat(100_000));
    let error = source
        .set_extra_state("actor.norm", long)
        .unwrap_err()
        .to_string();
    assert!(error.contains("actor.norm"), "{error}");
    assert_eq!(sender.send(&source).unwrap().version().unwrap(), Version(2));
}

/// Two names for one tensor.
struct Tied(Tensors);

impl WeightExtractor for Tied {
    fn layout(&self) -> Result<Layout> {
        let own = WeightExtractor::layout(&self.0)?;
        let head = own.tensors()[0].clone();
        let own = own
            .tensors()
            .iter()
            .map(|spec| (spec.name.clone(), spec.dtype, spec.shape.clone()));
        Ok(Layout::new(own.chain([(
            "head".to_owned(),
            head.dtype,
            head.shape,
        )]))?)
    }

    fn extract(&self, take: &mut dyn FnMut(&[Extracted<'_>]) -> Result<()>) -> Result<()> {
        self.0.extract(&mut |tensors| {
            let mut lent = tensors.to_vec();
            lent.push(Extracted {
                name: "head",
                data: tensors[0].data.clone(),
            });
            take(&lent)
        })
    }

    fn ties(&self) -> Result<Vec<(String, String)>> {
        Ok(vec![("head".into(), "embed".into())])
    }
}

fn embedding(value: f32) -> Tensors {
    let mut tensors = Tensors::new();
    tensors.insert("embed", [64], [value; 64]).unwrap();
    tensors.insert("bias", [1], [value]).unwrap();
    tensors
}

#[test]
fn tied_tensors_travel_once_under_every_name() {
    let mut model = Tensors::new();
    let (source, again) = (Tied(embedding(1.0)), Tied(embedding(2.0)));
    let sender = deliver(&source, &again, &mut model);
    assert_eq!(
        sender.layout().unwrap().len(),
        2,
        "{:?}",
        sender.layout().unwrap()
    );
    for name in ["embed", "head"] {
        assert_eq!(model.slice::<f32>(name).unwrap(), [2.0; 64], "{name}");
    }
    let snapshot = sender.snapshot().unwrap();
    assert_eq!(snapshot.slice::<f32>("head").unwrap(), [2.0; 64]);

    // A part names a tied tensor by whichever of its names.
    let mut sender = sender;
    let partial = SendOptions::new().partial(true);
    for (name, value) in [("bias", 3.0), ("embed", 4.0), ("head", 5.0)] {
        let len = if name == "bias" { 1 } else { 64 };
        let mut part = Tensors::new();
        part.insert(name, [len], vec![value; len as usize]).unwrap();
        let report = sender.send_with(&part, &partial).unwrap();
        assert_eq!(report.bytes, 4 * len, "{report}");
        let snapshot = sender.snapshot().unwrap();
        assert_eq!(snapshot.slice::<f32>(name).unwrap()[0], value, "{name}");
    }
    let snapshot = sender.snapshot().unwrap();
    assert_eq!(snapshot.slice::<f32>("embed").unwrap(), [5.0; 64]);
    // Both of them, and they are two.
    let mut part = Tensors::new();
    part.insert("embed", [64], [6.0_f32; 64]).unwrap();
    part.insert("head", [64], [7.0_f32; 64]).unwrap();
    let error = sender.send_with(&part, &partial).unwrap_err();
    assert!(error.to_string().contains("set up again"), "{error}");

    // A worker whose model has one of the two names.
    let mut half = Tensors::new();
    half.insert("head", [64], [0.0_f32; 64]).unwrap();
    half.insert("bias", [1], [0.0_f32]).unwrap();
    deliver(&source, &again, &mut half);
    assert_eq!(half.slice::<f32>("head").unwrap(), [2.0; 64]);
}

/// A version that came is as good a source as the trainer's model.
#[test]
fn a_snapshot_is_the_whole_model_it_is_of() {
    let source = state_dict(1.0, 1);
    let setup = SenderSetup::new("policy", &source).unwrap();
    let sender = setup
        .connect(&source, Expect::Count(0), Some(soon()))
        .unwrap();
    let snapshot = sender.snapshot().unwrap();
    let attributes = WeightExtractor::attributes(&snapshot).unwrap();
    assert_eq!(&attributes, snapshot.attributes());
    assert_eq!(attributes.buffers(), ["actor.norm.mean"]);

    let tied = Tied(embedding(2.0));
    let setup = SenderSetup::new("policy", &tied).unwrap();
    let sender = setup
        .connect(&tied, Expect::Count(0), Some(soon()))
        .unwrap();
    let snapshot = sender.snapshot().unwrap();
    // Also where it is cast, and so not copied as it lies.
    for cast in [None, Some(Dtype::F64)] {
        let mut setup = SenderSetup::new("again", &snapshot).unwrap();
        if let Some(dtype) = cast {
            setup = setup.cast(dtype).unwrap();
        }
        let mut sender = setup
            .connect(&snapshot, Expect::Count(0), Some(soon()))
            .unwrap();
        sender.send(&snapshot).unwrap();
        let again = sender.snapshot().unwrap();
        assert_eq!(again.layout().len(), 2, "{cast:?}");
        let head = again.tensor("head").unwrap();
        assert_eq!(head.dtype(), cast.unwrap_or(Dtype::F32));
        assert_eq!(head.shape(), [64]);
    }
}

#[test]
fn a_mapping_serves_on_either_side() {
    let mut source = Tensors::new();
    for (name, value) in [("q", 1.0_f32), ("k", 2.0), ("v", 3.0)] {
        source.insert(name, [2, 2], [value; 4]).unwrap();
    }
    source.insert("lm.bias", [2], [4.0_f32, 5.0]).unwrap();
    let mapping = Mapping::new()
        .fuse(["q", "k", "v"], "qkv", 0)
        .unwrap()
        .rename("lm.*", "head.*")
        .unwrap();
    let mut target = Tensors::new();
    target.insert("qkv", [6, 2], [0.0_f32; 12]).unwrap();
    target.insert("head.bias", [2], [0.0_f32; 2]).unwrap();
    let layout = |tensors: &Tensors| WeightExtractor::layout(tensors).unwrap();
    let dry = mapping.dry_run(&layout(&source), &layout(&target));
    assert!(dry.is_complete(), "{dry}");
    let expected = [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0];

    // At the trainer.
    let mut model = target.clone();
    let mapped = mapping.extract(&source);
    deliver(&mapped, &mapped, &mut model);
    assert_eq!(model.slice::<f32>("qkv").unwrap(), expected);

    // At the worker.
    let mut model = target.clone();
    deliver(&source, &source, &mut mapping.load(&mut model));
    assert_eq!(model.slice::<f32>("qkv").unwrap(), expected);
    assert_eq!(model.slice::<f32>("head.bias").unwrap(), [4.0, 5.0]);

    // A name that nothing matches is listed before anything is sent.
    target.insert("head.scale", [1], [1.0_f32]).unwrap();
    let dry = mapping.dry_run(&layout(&source), &layout(&target));
    assert!(
        !dry.is_complete() && dry.to_string().contains("head.scale"),
        "{dry}"
    );
}

/// Serves from the version itself.
#[derive(Default)]
struct Serving {
    bound: Option<Snapshot>,
}

impl WeightLoader for Serving {
    fn layout(&self) -> Result<Layout> {
        let parts = [("gate", Dtype::F32, 1), ("up", Dtype::BF16, 2)];
        let parts = parts.map(|(name, dtype, len)| (name.to_owned(), dtype, vec![len, 1]));
        Ok(Layout::new(parts)?)
    }

    fn bind(&mut self, snapshot: &Snapshot) -> Result<bool> {
        self.bound = Some(snapshot.clone());
        Ok(true)
    }

    fn load(&mut self, _: &[TensorView<'_>]) -> Result<()> {
        unreachable!("bind takes every snapshot")
    }
}

#[test]
fn mapping_makes_whole_versions_for_binding_models() {
    let mut source = Tensors::new();
    source
        .insert("gate_up", [3, 1], [1.0_f32, 2.0, 3.0])
        .unwrap();
    let mapping = Mapping::new()
        .split("gate_up", [("gate", 1), ("up", 2)], 0)
        .and_then(|mapping| mapping.cast("up", Dtype::BF16))
        .unwrap();
    let mut model = Serving::default();
    let sender = deliver(&source, &source, &mut mapping.load(&mut model).binding());
    let bound = model.bound.unwrap();
    assert!(bound.is_owned());
    assert_eq!((bound.version(), bound.run()), (Version(2), sender.run()));
    assert_eq!(bound.slice::<f32>("gate").unwrap(), [1.0]);
    assert_eq!(bound.tensor("up").unwrap().dtype(), Dtype::BF16);

    // The same, of a version at hand.
    let by_hand = sender.snapshot().unwrap().mapped(&mapping).unwrap();
    assert_eq!(by_hand.digest(), bound.digest());
    let wrong = Mapping::new().split("gate_up", [("gate", 1)], 0).unwrap();
    let error = sender.snapshot().unwrap().mapped(&wrong).unwrap_err();
    assert!(matches!(error, Error::Extract { .. }), "{error}");
}

#[test]
fn models_named_by_path_are_found_on_either_side() {
    let path = "env.transforms[0].net";
    let mut trainers = Models::new();
    trainers
        .register(path.parse().unwrap(), embedding(3.0))
        .unwrap();
    let source = trainers.extractor(&path.parse().unwrap()).unwrap();
    let setup = SenderSetup::new(path, &source).unwrap();
    let info = setup.init_info();
    let worker = thread::spawn(move || {
        let mut own = embedding(0.0);
        let mut tree = weightsync_engine::ModuleTree::new();
        tree.register(path.parse().unwrap(), &mut own).unwrap();
        let mut models = SetLoader::new().tree(&mut tree);
        let joined = ReceiverSetup::new(info.clone(), 0)
            .connect_set_into(&mut models, Some(soon()))
            .unwrap();
        // A worker that has no such model says what it has instead.
        let mut other = weightsync_engine::ModuleTree::new();
        other
            .register("env.value_net".parse().unwrap(), embedding(0.0))
            .unwrap();
        let mut models = SetLoader::new().tree(&mut other);
        let error = ReceiverSetup::new(info, 1)
            .connect_set_into(&mut models, Some(soon()))
            .unwrap_err();
        drop(tree);
        (joined, own.slice::<f32>("bias").unwrap().to_vec(), error)
    });
    let set = || Set::new().with_paths(&trainers, [path]).unwrap();
    let sender = setup
        .connect(&set(), Expect::Count(1), Some(soon()))
        .unwrap();
    let (_joined, bias, error) = worker.join().unwrap();
    assert_eq!(bias, [3.0]);
    assert!(
        matches!(error, Error::Path(_)) && error.to_string().contains("value_net"),
        "{error}"
    );
    drop(sender);
}

#[test]
fn a_registered_model_is_read_at_each_send() {
    let shared = Arc::new(RwLock::new(embedding(1.0)));
    let setup = SenderSetup::new("policy", &*shared).unwrap();
    let error = setup
        .clone()
        .connect(&Registered, Expect::Count(0), Some(soon()))
        .unwrap_err();
    assert!(matches!(error, Error::NotRegistered { .. }), "{error}");
    let mut another = Tensors::new();
    another.insert("bias", [2], [0.0_f32; 2]).unwrap();
    let error = setup.clone().register("policy", another).unwrap_err();
    let named = matches!(&error, Error::WrongWeights { model, .. } if model.as_str() == "policy");
    assert!(named, "{error}");
    let setup = setup.register("policy", shared.clone()).unwrap();
    let mut sender = setup
        .connect(&Registered, Expect::Count(0), Some(soon()))
        .unwrap();
    shared.write().unwrap().slice_mut::<f32>("bias").unwrap()[0] = 9.0;
    assert_eq!(
        sender.snapshot().unwrap().slice::<f32>("bias").unwrap(),
        [1.0],
        "nothing was sent"
    );
    sender.send(&Registered).unwrap();
    assert_eq!(
        sender.snapshot().unwrap().slice::<f32>("bias").unwrap(),
        [9.0]
    );
}
