//! Ends in a thread that drives an async runtime, where calls of tokio that block panic.

use weightsync_engine::{AnyScheme, Expect, ReceiverSetup, SendOptions, SenderSetup, WaitFor};
use weightsync_net::collect::CollectorPort;
use weightsync_net::{Distributed, Relay, RelayEvent};

use super::{receive, soon, weights};

fn in_runtime(work: impl FnOnce()) {
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_all().build().expect("a runtime");
    runtime.block_on(async { work() });
}

fn ends_live_and_end(scheme: &str) {
    let old = weights(8, 1.0);
    let setup = SenderSetup::new("policy", &old).expect("a model");
    let parsed: AnyScheme = scheme.parse().expect("a scheme");
    let setup = setup
        .scheme(parsed)
        .expect("a place")
        .send_timeout(Some(soon()));
    let info = setup.init_info();
    let mut sender = setup
        .connect(&old, Expect::Count(0), Some(soon()))
        .expect("a sender");
    let mut worker = ReceiverSetup::new(info.clone(), 0)
        .connect(Some(soon()))
        .expect("a worker");
    // The worker takes it after the call.
    let options = SendOptions::new().wait(WaitFor::Sent);
    let sent = sender.send_with(&weights(8, 2.0), &options);
    assert!(sent.is_ok(), "{scheme}: {sent:?}");
    // A worker with a copy of its own may have fetched the first version before.
    while receive(&mut worker) != 2.0 {}
    let status = info.status(soon()).expect("a status");
    assert_eq!(status.workers.len(), 1, "{scheme}");
    drop(worker);
    drop(sender);
}

#[test]
fn ends_of_every_scheme_live_and_end_inside_an_async_runtime() {
    let store = tempfile::tempdir().expect("a directory");
    let store = format!("store:{}", store.path().display());
    for scheme in [
        "shared-mem",
        "distributed",
        "distributed:share=none",
        "rpc",
        &store,
    ] {
        in_runtime(|| ends_live_and_end(scheme));
    }
}

#[test]
fn relay_and_port_end_inside_an_async_runtime() {
    let weights = weights(8, 1.0);
    let setup = SenderSetup::new("policy", &weights).expect("a model");
    let setup = setup.scheme(Distributed::default()).expect("a place");
    let relay = Relay::of(&setup.init_info());
    let sender = setup
        .connect(&weights, Expect::Count(0), Some(soon()))
        .expect("a sender");
    let stop = relay.stopper();
    let (joins, joined) = std::sync::mpsc::channel();
    let running = std::thread::spawn(move || {
        relay.run(|event| {
            if matches!(event, RelayEvent::Joined { .. }) {
                let _ = joins.send(());
            }
        })
    });
    joined.recv_timeout(soon()).expect("it joins");
    let port = CollectorPort::listen(&Distributed::default(), 1, false).expect("a port");
    in_runtime(|| {
        stop.stop();
        drop(port);
    });
    running.join().expect("no panic").expect("an end in order");
    drop(sender);
}
