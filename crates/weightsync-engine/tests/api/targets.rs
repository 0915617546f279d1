//! Weights of their own for some workers.

use weightsync_engine::{
    AnyScheme, Error, Expect, Outcome, SendOptions, Sender, SenderSetup, Set, Tensors, Version,
    WeightExtractor,
};

use crate::soon;

fn number(value: f32) -> Tensors {
    let mut tensors = Tensors::new();
    tensors.insert("value", [2], [value; 2]).unwrap();
    tensors.insert("scale", [1], [value]).unwrap();
    tensors
}

fn part(name: &str, values: &[f32]) -> Tensors {
    let mut tensors = Tensors::new();
    tensors.insert(name, [values.len() as u64], values).unwrap();
    tensors
}

/// A sender that nobody has joined: its workers are absent.
fn sender() -> Sender {
    let one = number(1.0);
    let setup = SenderSetup::new("policy", &one).unwrap();
    setup.connect(&one, Expect::Count(0), Some(soon())).unwrap()
}

fn each<'a>(sources: &[(u32, &'a Tensors)]) -> Vec<(u32, &'a dyn WeightExtractor)> {
    let each = sources.iter();
    each.map(|(worker, source)| (*worker, *source as &dyn WeightExtractor))
        .collect()
}

#[test]
fn wrong_source_is_found_before_any_publication() {
    let mut sender = sender();
    let (good, better) = (number(2.0), number(3.0));
    let wrong = part("value", &[1.0]);
    let plain = SendOptions::new();
    let partial = SendOptions::new().partial(true);
    let mut refused = |sources: &[(u32, &Tensors)], options: &SendOptions| {
        let error = sender.send_each(each(sources), options).unwrap_err();
        assert_eq!(sender.version().unwrap(), Version(1), "{error}");
        error
    };
    let error = refused(&[(0, &good), (1, &wrong)], &plain);
    assert!(matches!(error, Error::WrongWeights { .. }), "{error}");
    let error = refused(&[(0, &good), (1, &wrong)], &partial);
    assert!(matches!(error, Error::WrongWeights { .. }), "{error}");
    let unknown = part("velue", &[1.0, 1.0]);
    let error = refused(&[(0, &good), (1, &unknown)], &partial);
    assert!(matches!(error, Error::NoSuchTensor { .. }), "{error}");
    let nothing = Tensors::new();
    let error = refused(&[(0, &good), (1, &nothing)], &partial);
    assert!(matches!(error, Error::EmptyUpdate { .. }), "{error}");
    let numbered = plain.clone().version(Version(9));
    let error = refused(&[(0, &good), (1, &better)], &numbered);
    assert!(
        matches!(
            error,
            Error::SameVersionTwice {
                version: Version(9),
                sources: 2
            }
        ),
        "{error}"
    );
    let error = refused(&[(0, &good), (1, &better), (0, &better)], &plain);
    assert!(matches!(error, Error::SameWorkerTwice { .. }), "{error}");
    let error = refused(&[(0, &good)], &plain.clone().model("critic"));
    assert!(matches!(error, Error::NoSuchModel { .. }), "{error}");
    let error = refused(&[], &plain);
    assert!(matches!(error, Error::EmptySet), "{error}");

    // Workers that have different things, the second time.
    sender.send_each(each(&[(2, &good)]), &plain).unwrap();
    let value = part("value", &[5.0, 5.0]);
    let both = [(0, &better), (1, &value), (2, &value)];
    let error = sender.send_each(each(&both), &partial).unwrap_err();
    assert!(
        matches!(&error, Error::Diverged { model, .. } if model.as_str() == "policy"),
        "{error}"
    );
    assert_eq!(sender.version().unwrap(), Version(2));
    // One source may have a number.
    let report = sender.send_each(each(&[(0, &good), (1, &good)]), &numbered);
    assert_eq!(report.unwrap().version().unwrap(), Version(9));
}

#[test]
fn a_report_of_parts_names_all_that_was_carried() {
    let mut sender = sender();
    let (value, both) = (part("value", &[5.0, 5.0]), number(6.0));
    let partial = SendOptions::new().partial(true);
    let report = sender.send_each(each(&[(0, &value), (1, &both)]), &partial);
    let report = report.unwrap();
    assert_eq!(report.partial.as_deref().unwrap(), ["value", "scale"]);
    assert_eq!(report.versions.len(), 2);
    for line in &report.workers {
        assert_eq!(line.outcome, Outcome::Absent);
        assert_eq!(line.versions.len(), 1, "there is one model");
    }
}

#[test]
fn send_by_device_without_workers_is_refused() {
    let mut sender = sender();
    let options = SendOptions::new();
    let report = sender.send_by_device(|device| unreachable!("{device}"), &options);
    let report = report.unwrap();
    assert!(!report.all_applied() && report.workers.is_empty());
    assert_eq!(report.versions, []);
    assert_eq!(report.to_string(), "nothing was sent: there is no worker");
    assert_eq!(sender.version().unwrap(), Version(1));

    // Where it can never be done it is not said to be done.
    let one = number(1.0);
    let setup = SenderSetup::new("policy", &one).unwrap();
    let setup = setup.scheme("none".parse::<AnyScheme>().unwrap()).unwrap();
    let mut none = setup.connect(&one, Expect::Count(0), Some(soon())).unwrap();
    let error = none.send_by_device(|_| &one, &options).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
}

#[test]
fn a_set_that_is_not_what_the_send_names_is_refused() {
    let one = number(1.0);
    let setup = SenderSetup::new("actor", &one).unwrap();
    let setup = setup.add_model("critic", &one).unwrap();
    let both = Set::new().with("actor", &one).with("critic", &one);
    let mut sender = setup
        .connect(&both, Expect::Count(0), Some(soon()))
        .unwrap();
    let options = SendOptions::new().model("critic");
    let error = sender.send_with(&both, &options).unwrap_err();
    assert!(matches!(error, Error::OtherModel { .. }), "{error}");
    let words = error.to_string();
    assert!(words.ends_with("its source is actor, critic"), "{words}");
    assert_eq!(sender.version_of("actor").unwrap(), Version(1));
    let critic = Set::new().with("critic", &one);
    let report = sender.send_with(&critic, &options).unwrap();
    assert_eq!(report.versions[0].0.as_str(), "critic");
}
