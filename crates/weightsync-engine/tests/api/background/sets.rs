//! Several models, and loads that fail.

use super::*;

fn both(background: &Background<Agent>) -> (f32, f32) {
    let agent = background.read().unwrap();
    (value(&agent.actor), value(&agent.critic.tensors))
}

#[test]
fn a_set_is_loaded_whole_or_not_at_all() {
    for (agent, words) in [
        (agent(&[3.0], &[]), "does not like 3"),
        (agent(&[], &[3.0]), "panicked: not 3 again"),
    ] {
        let (mut sender, receiver) = two();
        let background = receiver
            .set_in_background(agent, loaders, SafePoints::Implied)
            .unwrap();
        assert_eq!(send_both(&mut sender, 2.0, 2.0), Outcome::Applied);
        assert_eq!(both(&background), (2.0, 2.0));

        let reason = reason(send_both(&mut sender, 3.0, 3.0));
        assert!(
            reason.contains(words) && reason.contains("went back"),
            "{reason}"
        );
        assert_eq!(both(&background), (2.0, 2.0));
        let status = background.status().unwrap();
        assert!(
            status.failure.as_ref().unwrap().contains(words),
            "{status:?}"
        );
        assert_eq!(status.versions[0].1, Version(2));

        // The next one has the whole of it, also what was sent in between.
        let critic = number(4.0);
        let options = SendOptions::new().model("critic");
        let report = sender.send_with(&critic, &options).unwrap();
        assert!(report.all_applied(), "{report}");
        assert_eq!(both(&background), (3.0, 4.0));
        assert_eq!(background.status().unwrap().failure, None);
    }
}

#[test]
fn models_that_are_not_whole_do_not_serve() {
    let (mut sender, receiver) = two();
    // Neither the new version nor the way back.
    let shy = agent(&[2.0], &[]);
    let background = receiver
        .set_in_background(shy, loaders, SafePoints::Implied)
        .unwrap();
    background.write().unwrap().critic.fails_at.push(1.0);
    let reason = reason(send_both(&mut sender, 2.0, 2.0));
    assert!(reason.contains("half loaded"), "{reason}");
    let error = background.read().map(drop).unwrap_err();
    assert!(matches!(error, Error::NotWhole { .. }), "{error}");

    assert_eq!(send_both(&mut sender, 3.0, 3.0), Outcome::Applied);
    assert_eq!(both(&background), (3.0, 3.0));
}

#[test]
fn failed_load_at_a_safe_point_shows_on_both_sides() {
    let (mut sender, receiver) = two();
    let background = receiver
        .set_in_background(agent(&[2.0], &[]), loaders, SafePoints::Declared)
        .unwrap();
    let two = number(2.0);
    let set = Set::new().with("actor", &two).with("critic", &two);
    let pending = sender.send_async(&set, &until(WaitFor::Applied)).unwrap();
    background
        .wait(Some(soon()), |status| !status.staged.is_empty())
        .unwrap();
    let error = background.safe_point().unwrap_err();
    assert!(matches!(error, Error::Load { .. }), "{error}");
    assert_eq!(both(&background), (1.0, 1.0));
    let report = pending.wait(Some(soon())).unwrap();
    assert!(
        reason(report.workers[0].outcome.clone()).contains("like 2"),
        "{report}"
    );
}

/// Without a background too: what was refused is not what the worker has.
#[test]
fn a_set_after_a_refused_one_is_loaded_whole() {
    let (mut sender, mut receiver) = two();
    let mut own = agent(&[2.0], &[]);
    let mut receive = |sends: &mut dyn FnMut()| {
        sends();
        let mut models = loaders(&mut own);
        let received = receiver.loading_set(&mut models).recv_timeout(soon());
        (received, value(&own.actor), value(&own.critic.tensors))
    };
    let sent = until(WaitFor::Sent);
    let (received, ..) = receive(&mut || {});
    received.unwrap();
    let (received, actor, critic) = receive(&mut || {
        let two = number(2.0);
        let set = Set::new().with("actor", &two).with("critic", &two);
        sender.send_with(&set, &sent).unwrap();
    });
    assert!(received.is_err());
    assert_eq!((actor, critic), (1.0, 1.0));
    let (received, actor, critic) = receive(&mut || {
        let options = sent.clone().model("critic");
        sender.send_with(&number(3.0), &options).unwrap();
    });
    received.unwrap();
    assert_eq!((actor, critic), (2.0, 3.0));
}

#[test]
fn a_loader_that_cannot_begin_is_an_error_at_once() {
    let (sender, receiver) = two();
    let error = receiver.set_in_background(agent(&[1.0], &[]), loaders, SafePoints::Implied);
    let error = error.unwrap_err();
    assert!(matches!(error, Error::Load { .. }), "{error}");
    drop(sender);
}
