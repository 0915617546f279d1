//! Both ends of a segment, each with mappings of its own, as two processes have
//! them (the tests with real processes and SIGKILL are in `weightsync`).

mod asking;
mod delivery;
mod faults;
mod files;
mod forks;
mod hostile;
#[path = "../../../weightsync-conformance/src/harness/patience.rs"]
mod patience;
mod private;
mod relay;
mod remote_readers;
mod sets;
mod swap;
mod waiters;

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use weightsync_core::{Dtype, Epoch, Layout, Run, Version, WorkerId};
use weightsync_mem::{
    AttachOptions, CopyOptions, Deadline, Delivery, Level, ModelDescription, Outcome, Publication,
    SegmentOptions, SegmentReader, SegmentWriter, Snapshot, Source, Taken, Targets, WaitStyle,
    WorkerReport,
};

const SECRET: [u8; 16] = *b"secret of tests!";
const RUN: Run = Run {
    epoch: Epoch(5),
    id: *b"a run of testing",
};

fn within(seconds: u64) -> Deadline {
    Some(Instant::now() + patience::patience(seconds))
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
        instance: 0,
        resume: weightsync_mem::Resume::default(),
    }
}

fn model() -> ModelDescription {
    ModelDescription {
        layout: layout(),
        note: b"a note".to_vec(),
    }
}

/// A segment of one model.
fn writer(address: &str, options: SegmentOptions) -> SegmentWriter {
    SegmentWriter::create(address, SECRET, RUN, &[model()], options).unwrap()
}

fn slots(slots: u8, max_slots: u8) -> SegmentOptions {
    SegmentOptions {
        slots,
        max_slots,
        ..SegmentOptions::default()
    }
}

/// A segment of some small models, each with a layout of its own.
fn small(address: &str, models: usize, options: SegmentOptions) -> SegmentWriter {
    let models: Vec<_> = (0..models)
        .map(|model| {
            let shape = vec![50 + model as u64, 3];
            let tensors = [("w", Dtype::BF16, shape), ("b", Dtype::I8, vec![7])];
            let tensors = tensors.map(|(name, dtype, shape)| (name.to_owned(), dtype, shape));
            ModelDescription {
                layout: Layout::new(tensors).unwrap(),
                note: vec![model as u8; model],
            }
        })
        .collect();
    SegmentWriter::create(address, SECRET, RUN, &models, options).unwrap()
}

/// Publishes the next version of the first model to all, every byte of it
/// derived from its number, which is to be `version`.
fn publish(writer: &mut SegmentWriter, version: u64, options: CopyOptions) -> Publication {
    let publication = send_with(writer, &[0], &Targets::All, options);
    assert_eq!(publication.versions, [(0, Version(version))]);
    publication
}

/// Publishes the next versions of some models, as one set.
fn send(writer: &mut SegmentWriter, models: &[usize], targets: &Targets) -> Publication {
    send_with(writer, models, targets, CopyOptions::default())
}

fn send_with(
    writer: &mut SegmentWriter,
    models: &[usize],
    targets: &Targets,
    options: CopyOptions,
) -> Publication {
    let mut next: Vec<_> = models
        .iter()
        .map(|model| (*model, writer.version(*model).next()))
        .collect();
    next.sort();
    let layouts: Vec<_> = next
        .iter()
        .map(|(model, _)| writer.models()[*model].layout.clone())
        .collect();
    let mut staging = writer.stage(models, within(20)).unwrap();
    for ((model, version), layout) in next.iter().zip(layouts) {
        let tensors: Vec<Vec<u8>> = layout
            .tensors()
            .iter()
            .map(|tensor| pattern(*model, *version, tensor.range.len))
            .collect();
        let sources: Vec<_> = tensors.iter().map(|bytes| Source::Bytes(bytes)).collect();
        staging.write(*model, &sources, options).unwrap();
    }
    let publication = staging.publish(targets).unwrap();
    assert_eq!(publication.versions, next);
    publication
}

fn workers(numbers: &[u32]) -> Targets {
    Targets::Workers(numbers.iter().copied().map(WorkerId).collect())
}

/// The lines of a publication once it is applied everywhere, within 20 s.
fn settle(writer: &SegmentWriter, publication: &Publication) -> Vec<WorkerReport> {
    let waiter = writer.waiter();
    waiter
        .settle(publication, Level::Applied, within(20))
        .unwrap()
}

fn pattern(model: usize, version: Version, len: u64) -> Vec<u8> {
    let seed = version.0.wrapping_mul(0x9e37) ^ (model as u64).wrapping_mul(0x5b);
    (0..len)
        .map(|i| (i.wrapping_mul(31) ^ seed) as u8)
        .collect()
}

/// Every tensor is that of the version the snapshot says it is.
fn check(snapshot: &Snapshot) {
    for (index, tensor) in snapshot.layout().tensors().iter().enumerate() {
        let expected = pattern(snapshot.model(), snapshot.version(), tensor.range.len);
        assert!(
            snapshot.tensor_bytes(index) == expected,
            "{} of {}",
            tensor.name,
            snapshot.version()
        );
    }
}

/// Takes the next set, of one model, checks it and reports it as applied.
fn take(reader: &mut SegmentReader) -> Snapshot {
    only(take_set(reader))
}

/// Takes the next set, checks it and reports it as applied.
fn take_set(reader: &mut SegmentReader) -> Taken {
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

/// Waits for the answer to what was asked, checks and applies it.
fn answered(reader: &mut SegmentReader) -> Taken {
    let taken = reader
        .answer(within(20))
        .unwrap()
        .expect("an answer within 20 s");
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

/// The model and version of each member of a set.
fn versions(taken: &Taken) -> Vec<(usize, u64)> {
    let members = taken.members.iter();
    members
        .map(|member| (member.model, member.snapshot.version().0))
        .collect()
}

/// The models of a set that are new in it.
fn changed(taken: &Taken) -> Vec<usize> {
    let members = taken.members.iter().filter(|member| member.changed);
    members.map(|member| member.model).collect()
}

/// Each line's worker and outcome.
fn outcomes(lines: &[WorkerReport]) -> Vec<(u32, Outcome)> {
    let lines = lines.iter();
    lines
        .map(|line| (line.worker.0, line.outcome.clone()))
        .collect()
}

/// There is nothing new for this reader.
fn nothing_new(reader: &mut SegmentReader) -> bool {
    reader.next(within(0)).unwrap().is_none()
}
