//! What a scheme does not state, it refuses.

use std::thread;

use weightsync_engine::{
    AnyScheme, Error, Expect, Pull, ReceiverSetup, SafePoints, SendOptions, SenderSetup, Set,
};

use crate::Subject;
use crate::harness::scale::longest;
use crate::harness::shape::Shape;

/// Every call that is not offered is an error that names the scheme, and none of
/// them harms what is.
pub(crate) fn unstated_capabilities_are_refused(subject: &Subject) {
    let scheme: AnyScheme = subject.scheme.parse().expect("it was parsed before");
    let can = subject.can;
    let weights = Shape::Words(64).make(1);
    let setup =
        || SenderSetup::new("policy", &weights).and_then(|setup| setup.scheme(scheme.clone()));
    let refused = |what: &str, error: Error| {
        let text = error.to_string();
        assert!(matches!(error, Error::Unsupported { .. }), "{what}: {text}");
    };
    if !can.sets {
        let connected = setup()
            .and_then(|setup| setup.add_model("critic", &weights))
            .and_then(|setup| {
                let set = Set::new().with("policy", &weights).with("critic", &weights);
                setup.connect(&set, Expect::Count(0), Some(longest()))
            });
        refused(
            "several models at once",
            connected.expect_err("it has no sets"),
        );
    }
    if !can.restarts {
        let with_dir = setup().and_then(|setup| setup.run_dir("/nowhere"));
        refused("a run directory", with_dir.expect_err("it has no restarts"));
    }
    let setup = setup().expect("a model and a place");
    let info = setup.init_info();
    let mut sender = setup
        .connect(&weights, Expect::Count(0), Some(longest()))
        .expect("nobody is expected");
    if !can.subsets {
        let sent = sender.send_with(&weights, &SendOptions::new().workers([0]));
        refused("a send to some", sent.expect_err("it has no subsets"));
    }
    if !can.hold {
        refused("hold", sender.hold([0]).expect_err("it cannot hold"));
        refused("release", sender.release([0]).expect_err("it cannot hold"));
    }
    if !can.loan {
        refused("loan", sender.loan().expect_err("it lends nothing"));
    }
    if can.loan && !can.subsets {
        let loan = sender.loan().expect("it lends");
        let sent = loan.publish_with(&SendOptions::new().workers([0]));
        refused("a loan to some", sent.expect_err("it has no subsets"));
    }
    if !can.subsets {
        let sent = sender.send_by_device(|_| &weights, &SendOptions::new());
        refused("a send by device", sent.expect_err("it has no subsets"));
    }
    if subject.pulls() {
        let worker = ReceiverSetup::new(info.clone(), 1);
        let mut receiver = worker.connect(Some(longest())).expect("there is a sender");
        assert!(
            receiver.recv().is_ok(),
            "the initial weights were asked for"
        );
        // Nothing would ever come.
        refused("receive", receiver.recv().expect_err("it pulls"));
        let mut own = weights.clone();
        let into = receiver.loading(&mut own).recv();
        refused("receive into", into.expect_err("it pulls"));
    }
    if !can.weights {
        refused("snapshot", sender.snapshot().expect_err("it keeps nothing"));
    }
    if !can.pull {
        let worker = ReceiverSetup::new(info, 0);
        let mut receiver = thread::scope(|scope| {
            let joined = scope.spawn(|| worker.connect(Some(longest())));
            joined
                .join()
                .expect("it has not panicked")
                .expect("there is a sender")
        });
        refused(
            "pull",
            receiver
                .pull(Pull::newest().timeout(Some(longest())))
                .expect_err("it cannot be asked"),
        );
    }
    if can.weights && can.push && !subject.interrupts {
        let worker = ReceiverSetup::new(sender.init_info(), 0);
        let receiver = worker.connect(Some(longest())).expect("there is a sender");
        let background = receiver.in_background(weights.clone(), SafePoints::Implied);
        refused(
            "a background receiver",
            background.expect_err("no wait of it can be ended"),
        );
    }
    let report = sender.send_with(
        &weights,
        &SendOptions::new().wait(weightsync_engine::WaitFor::Sent),
    );
    assert!(report.is_ok(), "{report:?}");
}
