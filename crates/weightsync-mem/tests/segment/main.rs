//! Both ends of a segment, each with mappings of its own, as two processes have
//! them (the tests with real processes and SIGKILL are in `weightsync`).

mod faults;
mod hostile;
mod swap;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use weightsync_core::{Dtype, Epoch, Layout, Run, Version, WorkerId};
use weightsync_mem::{
    AttachOptions, CopyOptions, Deadline, Delivery, Level, ModelSpec, Publication, Reader,
    ReaderOutcome, SegmentOptions, Snapshot, Source, Taken, Targets, WaitStyle, Writer,
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
        wait: WaitStyle::default(),
        models: None,
        delivery: Delivery::Newest,
        device: String::new(),
    }
}

fn model() -> ModelSpec {
    ModelSpec {
        layout: layout(),
        note: b"a note".to_vec(),
    }
}

/// A segment of one model.
fn writer(address: &str, options: SegmentOptions) -> Writer {
    Writer::create(address, SECRET, RUN, &[model()], options).unwrap()
}

fn slots(slots: u8, max_slots: u8) -> SegmentOptions {
    SegmentOptions {
        slots,
        max_slots,
        ..SegmentOptions::default()
    }
}

/// Publishes the next version of the first model to all, every byte of it
/// derived from its number, which is to be `version`.
fn publish(writer: &mut Writer, version: u64, options: CopyOptions) -> Publication {
    let layout = writer.models()[0].layout.clone();
    let tensors: Vec<Vec<u8>> = layout
        .tensors()
        .iter()
        .map(|tensor| pattern(version, tensor.range.len))
        .collect();
    let sources: Vec<_> = tensors.iter().map(|bytes| Source::Bytes(bytes)).collect();
    let mut staging = writer.stage(&[0], within(20)).unwrap();
    staging.write(0, &sources, options).unwrap();
    let publication = staging.publish(&Targets::All).unwrap();
    assert_eq!(publication.versions, [(0, Version(version))]);
    publication
}

/// The lines of a publication once it is applied everywhere, within 20 s.
fn settle(writer: &Writer, publication: &Publication) -> Vec<ReaderOutcome> {
    let waiter = writer.waiter();
    waiter
        .settle(publication, Level::Applied, within(20))
        .unwrap()
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

/// Takes the next set, of one model, checks it and reports it as applied.
fn take(reader: &mut Reader) -> Snapshot {
    only(take_set(reader))
}

/// Takes the next set, checks it and reports it as applied.
fn take_set(reader: &mut Reader) -> Taken {
    let taken = reader
        .next(within(20))
        .unwrap()
        .expect("a version within 20 s");
    taken
        .members
        .iter()
        .for_each(|member| check(&member.snapshot));
    reader.applied(&taken).unwrap();
    taken
}

/// The only model of a set.
fn only(mut taken: Taken) -> Snapshot {
    assert_eq!(taken.members.len(), 1);
    taken.members.remove(0).snapshot
}
