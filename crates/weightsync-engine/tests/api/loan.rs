//! Writing a version where workers will read it.

use std::thread;

use weightsync_engine::{DigestPolicy, Error, SendOptions, SenderSetup, Version, WaitFor};

use crate::{pair, pair_by, send_to, soon, weights};

#[test]
fn a_loan_is_written_by_name_and_published() {
    let (mut sender, mut receiver) = pair(&weights());
    let snapshot = thread::scope(|scope| {
        let worker = scope.spawn(|| receiver.recv_timeout(soon()).unwrap().unwrap());
        let mut loan = sender.loan().unwrap();
        let names: Vec<_> = loan
            .layout()
            .tensors()
            .iter()
            .map(|tensor| tensor.name.clone())
            .collect();
        for name in &names {
            loan.tensor_mut(name).unwrap().fill(1);
        }
        loan.tensor_mut("step")
            .unwrap()
            .copy_from_slice(&42_i64.to_le_bytes());
        let words = loan.tensor_mut("stop").unwrap_err().to_string();
        assert!(
            words.contains("\"stop\"") && words.contains("\"step\""),
            "{words}"
        );
        let report = loan.publish().unwrap();
        assert!(
            report.all_applied() && report.version().unwrap() == Version(2),
            "{report}"
        );
        worker.join().unwrap()
    });
    assert_eq!(snapshot.slice::<i64>("step").unwrap(), [42]);
    assert!(
        snapshot
            .tensor("layer.weight")
            .unwrap()
            .bytes()
            .iter()
            .all(|&byte| byte == 1)
    );
}

#[test]
fn several_threads_write_one_loan() {
    let (mut sender, mut receiver) = pair(&weights());
    let snapshot = thread::scope(|scope| {
        let worker = scope.spawn(|| receiver.recv_timeout(soon()).unwrap().unwrap());
        let mut loan = sender.loan().unwrap();
        let places = loan.tensors_mut();
        assert_eq!(places.len(), 3);
        thread::scope(|scope| {
            for (index, place) in places.into_iter().enumerate() {
                scope.spawn(move || place.fill(index as u8 + 10));
            }
        });
        assert!(loan.publish().unwrap().all_applied());
        worker.join().unwrap()
    });
    for (index, tensor) in snapshot.tensors().enumerate() {
        assert_eq!(tensor.bytes().len(), [33 * 7 * 4, 7 * 4, 8][index]);
        assert!(tensor.bytes().iter().all(|&byte| byte == index as u8 + 10));
    }
}

#[test]
fn a_loan_that_is_dropped_publishes_nothing() {
    let (mut sender, mut receiver) = pair(&weights());
    for _ in 0..5 {
        let mut loan = sender.loan().unwrap();
        loan.tensors_mut()
            .into_iter()
            .for_each(|place| place.fill(0xff));
    }
    assert_eq!(sender.version().unwrap(), Version(1));
    let snapshot = receiver.latest().unwrap().unwrap();
    assert_eq!(
        (snapshot.version(), snapshot.slice::<i64>("step").unwrap()),
        (Version(1), &[41][..])
    );
    drop(snapshot);
    let snapshot = send_to(&mut sender, &weights(), &mut receiver);
    assert_eq!(snapshot.version(), Version(2));
    assert_eq!(snapshot.slice::<f32>("layer.bias").unwrap(), [0.5; 7]);
}

#[test]
fn a_loan_is_whole_and_of_its_own_model() {
    let (mut sender, mut receiver) = pair(&weights());
    let mut refused = |options: &SendOptions| {
        let mut loan = sender.loan().unwrap();
        loan.tensors_mut()
            .into_iter()
            .for_each(|place| place.fill(9));
        let error = loan.publish_with(options).unwrap_err();
        assert_eq!(sender.version().unwrap(), Version(1), "{error}");
        error
    };
    let error = refused(&SendOptions::new().partial(true));
    assert!(matches!(&error, Error::WholeLoan { model } if model.as_str() == "policy"));
    let error = refused(&SendOptions::new().model("critic"));
    assert!(matches!(error, Error::OtherModel { .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "the send names \"critic\", but its source is policy"
    );
    let mut loan = sender.loan().unwrap();
    loan.tensors_mut()
        .into_iter()
        .for_each(|place| place.fill(1));
    let options = SendOptions::new().model("policy").wait(WaitFor::Sent);
    assert_eq!(
        loan.publish_with(&options).unwrap().version().unwrap(),
        Version(2)
    );
    let got = receiver.recv_timeout(soon()).unwrap().unwrap();
    assert_eq!(got.version(), Version(2));
}

#[test]
fn a_loan_waits_for_a_slot_no_longer_than_a_send() {
    let setup = SenderSetup::new("policy", &weights())
        .unwrap()
        .slots(2, 2)
        .send_timeout(Some(crate::BRIEF));
    let (mut sender, mut receiver) = pair_by(setup, &weights());
    let _first = receiver.latest().unwrap();
    let _second = send_to(&mut sender, &weights(), &mut receiver);
    let error = sender.loan().unwrap_err();
    assert!(matches!(error, Error::AllSlotsPinned { .. }), "{error}");
}

#[test]
fn loaned_version_gets_a_background_digest() {
    let setup = SenderSetup::new("policy", &weights())
        .unwrap()
        .digest(DigestPolicy::Background);
    let (mut sender, mut receiver) = pair_by(setup, &weights());
    let snapshot = thread::scope(|scope| {
        let worker = scope.spawn(|| receiver.recv_timeout(soon()).unwrap().unwrap());
        let mut loan = sender.loan().unwrap();
        loan.tensors_mut()
            .into_iter()
            .for_each(|place| place.fill(3));
        loan.publish().unwrap();
        worker.join().unwrap()
    });
    assert_eq!(crate::digest::published(&snapshot), snapshot.digest());
}
