//! What models can consist of.

use weightsync_engine::{Dtype, SenderSetup, Strategy, Tensors};

use crate::Subject;
use crate::harness::command::{Payload, SendSettings, TrainerCommand, TrainerSetup};
use crate::harness::script::Script;
use crate::harness::shape::{Model, Shape, print_of};

/// Every dtype there is, scalars, and tensors without elements.
pub(crate) fn every_dtype_arrives_bit_by_bit(subject: &Subject) {
    arrives(subject, Shape::Dtypes, 4);
}

/// So many names, and not one is lost or exchanged.
pub(crate) fn a_hundred_thousand_tensors_arrive(subject: &Subject) {
    arrives(subject, Shape::Many(100_000), 1);
}

/// A model may consist of nothing but tensors without elements.
pub(crate) fn a_model_without_elements_arrives(subject: &Subject) {
    arrives(subject, Shape::Many(0), 2);
}

/// What belongs to a model in addition to its tensors: a worker knows which of them are
/// one, which are buffers, what the extra state is, and the trainer's format.
pub(crate) fn ties_buffers_and_extra_state_arrive(subject: &Subject) {
    arrives_as(subject, Shape::Module, 3, |model| {
        let attributes = &model.attributes;
        assert_eq!(attributes.format(), Strategy::TensorDict);
        let tie = ("head.weight".to_owned(), "embed.weight".to_owned());
        assert_eq!(attributes.ties(), [tie]);
        assert_eq!(attributes.buffers(), ["norm.mean"]);
        assert_eq!(attributes.extra_state(), ["norm.__extra_state__"]);
    });
}

/// Each of so many versions is what the trainer has, at two workers.
fn arrives(subject: &Subject, shape: Shape, versions: u64) {
    arrives_as(subject, shape, versions, |_| ());
}

fn arrives_as(subject: &Subject, shape: Shape, versions: u64, check: impl Fn(&Model)) {
    let mut script = Script::new(subject, 2);
    let info = script.prepare(TrainerSetup::of(&[("policy", shape)]));
    script.gather(&info, &[0, 1]);
    let first = script.act(TrainerCommand::Source).print();
    assert_eq!(first, print_of(&shape.make(1)));
    for worker in 0..2 {
        let seen = script.take(worker);
        assert_eq!(seen.members[0].print, first);
        check(&seen.members[0]);
    }
    for word in 2..2 + versions {
        let (sent, seen) = script.deliver(Payload::Word(word), SendSettings::default(), &[0, 1]);
        script.assert_applied(&sent, &[0, 1]);
        let expected = print_of(&shape.make(word));
        assert!(
            seen.iter().all(|seen| seen.members[0].print == expected),
            "{seen:?}"
        );
        seen.iter().for_each(|seen| check(&seen.members[0]));
    }
    script.close();
}

/// Transposed, backwards, and a view of one element: row-major at the worker.
pub(crate) fn tensors_that_do_not_lie_in_order_arrive_in_order(subject: &Subject) {
    let mut script = Script::new(subject, 1);
    let info = script.prepare(TrainerSetup::of(&[("policy", Shape::Floats)]));
    script.gather(&info, &[0]);
    script.take(0);
    for word in 2..5 {
        let (_, seen) = script.deliver(Payload::Strided(word), SendSettings::default(), &[0]);
        assert_eq!(
            seen[0].members[0].print,
            print_of(&Shape::Floats.make(word))
        );
    }
    script.close();
}

/// In the one pass over the source; what is no float stays as it is.
pub(crate) fn floats_are_cast_on_their_way(subject: &Subject) {
    for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32, Dtype::F64] {
        let mut script = Script::new(subject, 1);
        let lead = TrainerSetup {
            cast: Some(dtype.to_string()),
            ..TrainerSetup::of(&[("policy", Shape::Floats)])
        };
        let info = script.prepare(lead);
        script.gather(&info, &[0]);
        script.take(0);
        for word in [2, 3] {
            for what in [Payload::Word(word), Payload::Strided(word)] {
                let (_, seen) = script.deliver(what, SendSettings::default(), &[0]);
                assert_eq!(
                    seen[0].members[0].print,
                    print_of(&cast(&Shape::Floats.make(word), dtype)),
                    "{dtype}"
                );
            }
        }
        script.close();
    }
}

/// The same tensors with every float cast, one by one.
fn cast(tensors: &Tensors, dtype: Dtype) -> Tensors {
    let setup = SenderSetup::new("policy", tensors).and_then(|setup| setup.cast(dtype));
    let mut places = Tensors::zeros(setup.expect("a model of floats").layout().unwrap());
    for name in tensors.names() {
        let view = tensors.tensor(name).expect("its own name");
        let source = weightsync_engine::TensorRef::new(view.dtype(), view.shape(), view.bytes())
            .expect("a tensor");
        let place = places.tensor(name).expect("the same name");
        let (to, shape) = (place.dtype(), place.shape().to_vec());
        let mut bytes = vec![0; place.bytes().len()];
        source
            .write_into(&mut bytes, to)
            .expect("a cast of floats, or none");
        places
            .insert_bytes(name, to, shape, &bytes)
            .expect("it fits");
    }
    places
}
