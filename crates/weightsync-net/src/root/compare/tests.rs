use std::sync::mpsc;
use std::thread::JoinHandle;

use weightsync_conformance::scale::longest;
use weightsync_engine::{Expect, InitInfo, ReceiverSetup, Sender, SenderSetup, Snapshot, Tensors};

use crate::scheme::{Deltas, Distributed, Share};
use crate::status;

/// Tensors of several widths over more than two spans; the last span is short.
fn weights() -> Tensors {
    let mut weights = Tensors::new();
    let bf16 = vec![half::bf16::from_f32(0.02); 3_000_000];
    weights.insert("embed", [3000, 1000], bf16).unwrap();
    weights.insert("norm", [1001], vec![1.0_f32; 1001]).unwrap();
    weights
        .insert("head", [700, 1001], vec![0.25_f32; 700_700])
        .unwrap();
    weights.insert("steps", [3], vec![7_i64; 3]).unwrap();
    weights
}

/// A training step: so many elements change, those of each step others.
fn train(weights: &mut Tensors, step: usize, every: usize) {
    let embed = weights.slice_mut::<half::bf16>("embed").unwrap();
    for weight in embed.iter_mut().skip(step).step_by(every) {
        *weight = half::bf16::from_bits(weight.to_bits() ^ 1 << (step % 16));
    }
    let head = weights.slice_mut::<f32>("head").unwrap();
    for weight in head.iter_mut().skip(step).step_by(every) {
        *weight += 1e-6;
    }
    weights.slice_mut::<f32>("norm").unwrap()[step] = f32::NAN;
    weights.slice_mut::<i64>("steps").unwrap()[0] += 1;
}

fn bytes(tensors: &Tensors) -> Vec<Vec<u8>> {
    ["embed", "norm", "head", "steps"]
        .iter()
        .map(|name| tensors.tensor(name).unwrap().bytes().to_vec())
        .collect()
}

fn bytes_of(snapshot: &Snapshot) -> Vec<Vec<u8>> {
    ["embed", "norm", "head", "steps"]
        .iter()
        .map(|name| snapshot.tensor(name).unwrap().bytes().to_vec())
        .collect()
}

/// A version's number, and its tensors' bytes.
type Got = (u64, Vec<Vec<u8>>);

/// A worker that fetches for itself, and what it got.
fn worker(info: &InitInfo, number: u32) -> (JoinHandle<()>, mpsc::Receiver<Got>) {
    let (got, gets) = mpsc::channel();
    let info = info.clone();
    let work = move || {
        let setup = ReceiverSetup::new(info, number);
        let mut receiver = setup.connect(Some(longest())).unwrap();
        while let Ok(snapshot) = receiver.recv() {
            if got
                .send((snapshot.version().0, bytes_of(&snapshot)))
                .is_err()
            {
                return;
            }
        }
    };
    (std::thread::spawn(work), gets)
}

/// Bytes that each agent has fetched.
fn received(info: &InitInfo) -> u64 {
    let endpoint = info.endpoint();
    let status = status::ask(endpoint.address(), endpoint.secret(), None, Some(longest())).unwrap();
    status.relays.iter().map(|relay| relay.received).sum()
}

fn connect(weights: &Tensors) -> (InitInfo, impl FnOnce() -> Sender) {
    // How quick it is depends on the machine.
    let scheme = Distributed::new()
        .share(Share::Nothing)
        .deltas(Deltas::Always);
    let setup = SenderSetup::new("policy", weights).unwrap();
    let setup = setup.scheme(scheme).unwrap();
    let info = setup.init_info();
    let weights = weights.clone();
    (info, move || {
        setup
            .connect(&weights, Expect::Count(1), Some(longest()))
            .unwrap()
    })
}

#[test]
fn version_arrives_as_a_delta_bit_for_bit() {
    let mut weights = weights();
    let (info, connect) = connect(&weights);
    let (worker, gets) = worker(&info, 0);
    let mut sender = connect();
    let (first, got) = gets.recv_timeout(longest()).unwrap();
    assert!(first == 1 && got == bytes(&weights));
    let mut last = received(&info);
    for (step, every) in [100, 90, 1000, 3_000_000, 3, 100, 100]
        .into_iter()
        .enumerate()
    {
        train(&mut weights, step, every);
        let report = sender.send(&weights).unwrap();
        assert!(report.all_applied(), "{report}");
        let (version, got) = gets
            .iter()
            .find(|(version, _)| *version == report.version().unwrap().0)
            .unwrap();
        assert!(got == bytes(&weights), "version {version}");
        // The bytes received are reported at the latest when the version is whole.
        let all = received(&info);
        let came = all - last;
        last = all;
        let dense = 9_000_000;
        match every {
            90.. => assert!(came < dense / 20, "step {step}: {came} bytes"),
            _ => assert!(came < 2 * dense, "step {step}: {came} bytes"),
        }
    }
    sender.shutdown();
    worker.join().unwrap();
}
