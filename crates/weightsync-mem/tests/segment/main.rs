//! Both ends of a segment, each with mappings of its own, as two processes have
//! them (the tests with real processes and SIGKILL are in `weightsync`).

mod faults;
mod hostile;
mod swap;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use weightsync_core::{Dtype, Epoch, Layout, Run, Version, WorkerId};
use weightsync_mem::{
    AttachOptions, CopyOptions, Deadline, Reader, SegmentOptions, Snapshot, Source, WaitStyle,
    Writer,
};

const SECRET: [u8; 16] = *b"secret of tests!";
const RUN: Run = Run {
    epoch: Epoch(5),
    id: *b"a run of testing",
};

fn within(seconds: u64) -> Deadline {
    Some(Instant::now() + Duration::from_secs(seconds))
}

/// A name no other test, thread or process uses.
fn address() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!(
        "weightsync-test/{}/{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    )
}

/// A few tensors whose lengths are not multiples of anything.
fn layout() -> Layout {
    let tensors = [
        ("embed.weight", Dtype::BF16, vec![1001, 33]),
        ("empty", Dtype::F32, vec![0, 7]),
        ("scale", Dtype::F64, vec![]),
        ("layers.0.weight", Dtype::F32, vec![700_001]),
        ("layers.0.bias", Dtype::I8, vec![13]),
    ];
    Layout::new(tensors.map(|(name, dtype, shape)| (name.to_owned(), dtype, shape))).unwrap()
}

fn attach(address: &str, worker: u32) -> AttachOptions {
    AttachOptions {
        address: address.into(),
        secret: SECRET,
        worker: WorkerId(worker),
        seen: Epoch(0),
        layout: None,
        wait: WaitStyle::default(),
    }
}

fn writer(address: &str, options: SegmentOptions) -> Writer {
    Writer::create(address, SECRET, RUN, &layout(), options).unwrap()
}

fn slots(slots: u8, max_slots: u8) -> SegmentOptions {
    SegmentOptions {
        slots,
        max_slots,
        ..SegmentOptions::default()
    }
}

/// Publishes a version whose every byte is derived from its number.
fn publish(writer: &mut Writer, version: u64, options: CopyOptions) {
    let layout = writer.layout().clone();
    let tensors: Vec<Vec<u8>> = layout
        .tensors()
        .iter()
        .map(|tensor| pattern(version, tensor.range.len))
        .collect();
    let sources: Vec<_> = tensors.iter().map(|bytes| Source::Bytes(bytes)).collect();
    let mut loan = writer.loan(within(20)).unwrap();
    loan.write(&sources, options).unwrap();
    loan.publish(Version(version)).unwrap();
}

fn pattern(version: u64, len: u64) -> Vec<u8> {
    (0..len)
        .map(|i| (i.wrapping_mul(31) ^ version.wrapping_mul(0x9e37)) as u8)
        .collect()
}

/// Every tensor is that of the version the snapshot says it is.
fn check(snapshot: &Snapshot) {
    for (index, tensor) in snapshot.layout().tensors().iter().enumerate() {
        let expected = pattern(snapshot.version().0, tensor.range.len);
        assert!(
            snapshot.tensor_bytes(index) == expected,
            "{} of {}",
            tensor.name,
            snapshot.version()
        );
    }
}

/// Takes the next version, checks it and reports it as applied.
fn take(reader: &mut Reader) -> Snapshot {
    let snapshot = reader
        .next(within(20))
        .unwrap()
        .expect("a version within 20 s");
    check(&snapshot);
    reader.applied(snapshot.version()).unwrap();
    snapshot
}
