//! Workers that follow a trainer through a store.

use std::fs;
use std::path::PathBuf;

use weightsync_conformance::scale::longest;
use weightsync_engine::{
    Expect, InitInfo, Receiver, ReceiverSetup, SendOptions, Sender, SenderSetup, WaitFor,
};
use weightsync_store::StoreScheme;

use crate::weights::{MODEL, number, weights};

const ELEMENTS: usize = 1 << 18;
const BYTES: u64 = 8 * ELEMENTS as u64;

fn send(dir: &std::path::Path) -> (Sender, InitInfo) {
    let scheme = StoreScheme::new(dir.to_str().expect("a plain path")).expect("a path");
    let first = weights(1, ELEMENTS);
    let setup = SenderSetup::new(MODEL, &first).expect("plain tensors");
    let setup = setup.scheme(scheme).expect("a scheme");
    let info = setup.init_info();
    let sender = setup.connect(&first, Expect::Count(0), Some(longest()));
    (sender.expect("an empty directory"), info)
}

/// Does not wait for the worker, which is this thread.
fn publish(sender: &mut Sender, number: u64) {
    let options = SendOptions::new().wait(WaitFor::Sent);
    let sent = sender.send_with(&weights(number, ELEMENTS), &options);
    sent.expect("room on the disk");
}

fn join(info: &InitInfo, worker: u32) -> Receiver {
    let setup = ReceiverSetup::new(info.clone(), worker);
    let mut receiver = setup.connect(Some(longest())).expect("the sender is there");
    // The weights that came with it.
    receiver.recv().expect("the first version");
    receiver
}

/// The number of the next version, and how many bytes were read for it.
fn next(receiver: &mut Receiver) -> (u64, u64) {
    let before = receiver.travelled().expect("it reads files");
    let snapshot = receiver.recv_timeout(longest()).expect("a version");
    let came = receiver.travelled().expect("it reads files") - before;
    (number(&snapshot.expect("in time")).expect("whole"), came)
}

pub fn worker_reads_what_changed() {
    let dir = tempfile::tempdir().expect("a directory");
    let (mut sender, info) = send(dir.path());
    let mut receiver = join(&info, 0);
    let mut whole = 0;
    for version in 2..100 {
        publish(&mut sender, version);
        let (got, came) = next(&mut receiver);
        assert_eq!(got, version);
        // Where a chain is long enough, a full version begins the next.
        match came >= BYTES {
            true => whole += 1,
            false => assert!(came < BYTES / 20, "v{version}: {came} of {BYTES} bytes"),
        }
    }
    assert!(whole <= 5, "{whole} versions were read whole");
}

pub fn follower_needs_no_file_that_it_has_read() {
    let dir = tempfile::tempdir().expect("a directory");
    let (mut sender, info) = send(dir.path());
    let mut follower = join(&info, 0);
    publish(&mut sender, 2);
    assert_eq!(next(&mut follower).0, 2);
    let full = full_version(dir.path());
    let mut bytes = fs::read(&full).expect("a full version");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&full, bytes).expect("a file");
    publish(&mut sender, 3);
    let (got, came) = next(&mut follower);
    assert_eq!(got, 3);
    assert!(came < BYTES / 20, "{came} of {BYTES} bytes");
    // One that has nothing of it is told which file is damaged.
    let setup = ReceiverSetup::new(info.clone(), 1);
    let joined = setup
        .connect(Some(longest()))
        .and_then(|mut late| late.recv_timeout(longest()));
    let error = joined.expect_err("it is damaged").to_string();
    assert!(error.contains(".safetensors"), "{error}");
}

/// The weights of the first version.
fn full_version(dir: &std::path::Path) -> PathBuf {
    let mut found = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(&dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            match path.is_dir() {
                true => dirs.push(path),
                false => found.push(path),
            }
        }
    }
    found.retain(|path| path.extension().is_some_and(|end| end == "safetensors"));
    found.pop().expect("a full version")
}
