//! The public API as a user calls it. Both ends are in one process here, each
//! with mappings of its own, as two processes have them; what takes processes
//! and SIGKILL is in the other test binaries.

mod background;
mod bind;
#[cfg(feature = "candle")]
mod candle;
mod cascade;
mod connect;
mod digest;
mod extract;
mod files;
mod gone;
mod init_info;
mod interrupt;
mod leaks;
mod loan;
#[path = "../../../weightsync-conformance/src/harness/patience.rs"]
mod patience;
mod pending;
mod refusals;
mod report;
mod round_trip;
mod run_dir;
mod session;
mod slots;
mod strategies;
mod targets;

use std::thread;
use std::time::{Duration, Instant};

use weightsync_engine::{
    Expect, Receiver, ReceiverSetup, Report, Result, Sender, SenderSetup, Snapshot, Tensors,
    WeightExtractor,
};

/// Long enough for a busy machine; nothing waits so long unless it is broken.
fn soon() -> Duration {
    patience::patience(10)
}
/// For a wait that is to end by its deadline.
const BRIEF: Duration = Duration::from_millis(60);

/// A small model with several dtypes, and lengths that are multiples of nothing.
fn weights() -> Tensors {
    let mut weights = Tensors::new();
    let matrix: Vec<f32> = (0..33 * 7).map(|i| i as f32 * 0.25 - 3.0).collect();
    weights.insert("layer.weight", [33, 7], matrix).unwrap();
    weights.insert("layer.bias", [7], [0.5_f32; 7]).unwrap();
    weights.insert("step", [], [41_i64]).unwrap();
    weights
}

/// Connects a sender with workers 0 to `count`; each has the first version.
fn connect(
    setup: SenderSetup,
    weights: &impl WeightExtractor,
    count: u32,
) -> (Sender, Vec<Receiver>) {
    let info = setup.init_info();
    let joining: Vec<_> = (0..count)
        .map(|worker| {
            let setup = ReceiverSetup::new(info.clone(), worker);
            thread::spawn(move || join(setup))
        })
        .collect();
    let sender = setup.connect(weights, Expect::Count(count as usize), Some(soon()));
    let receivers = joining.into_iter().map(|one| one.join().unwrap().unwrap());
    (sender.unwrap(), receivers.collect())
}

/// The sender learns of a worker's end by an event, which takes its time.
fn until_all_have_left(sender: &Sender) {
    let until = Instant::now() + soon();
    while !sender.workers().is_empty() {
        assert!(
            Instant::now() < until,
            "{:?} are still there",
            sender.workers()
        );
        thread::sleep(Duration::from_millis(1));
    }
}

/// As [`connect`], with one worker.
fn pair(weights: &impl WeightExtractor) -> (Sender, Receiver) {
    pair_by(SenderSetup::new("policy", weights).unwrap(), weights)
}

/// As [`pair`], on terms of one's own.
fn pair_by(setup: SenderSetup, weights: &impl WeightExtractor) -> (Sender, Receiver) {
    let (sender, receivers) = connect(setup, weights, 1);
    let [receiver] = <[Receiver; 1]>::try_from(receivers).unwrap();
    (sender, receiver)
}

/// Joins, and takes the first version.
fn join(setup: ReceiverSetup) -> Result<Receiver> {
    let mut receiver = setup.connect(Some(soon()))?;
    receiver.recv_timeout(soon())?.expect("the first version");
    Ok(receiver)
}

/// Sends while the worker does its part.
fn send<T: Send>(
    sender: &mut Sender,
    weights: &(impl WeightExtractor + Sync),
    at_worker: impl FnOnce() -> T + Send,
) -> (Result<Report>, T) {
    thread::scope(|scope| {
        let worker = scope.spawn(at_worker);
        let report = sender.send(weights);
        (report, worker.join().unwrap())
    })
}

/// Sends, and has the worker take it.
fn send_to(sender: &mut Sender, weights: &Tensors, receiver: &mut Receiver) -> Snapshot {
    let (report, snapshot) = send(sender, weights, || receiver.recv_timeout(soon()));
    let report = report.unwrap();
    assert!(report.all_applied(), "{report}");
    snapshot.unwrap().expect("a version")
}

/// The elements of every tensor, by name.
fn bytes_of(snapshot: &Snapshot) -> Vec<(String, Vec<u8>)> {
    let tensors = snapshot.tensors();
    tensors
        .map(|view| (view.name().to_owned(), view.bytes().to_vec()))
        .collect()
}
