//! When slots are made, with a sender and a reader of this process.

use std::sync::atomic::{AtomicU64, Ordering};

use weightsync_core::{Dtype, Epoch, Layout, Level, Run, Targets, WorkerId};

use super::*;
use crate::model::ModelDescription;
use crate::reader::{AttachOptions, SegmentReader};
use crate::wait::WaitStyle;
use crate::wire::Delivery;
use crate::writer::{SegmentOptions, SegmentWriter};

const HOUR: Duration = Duration::from_secs(3600);

fn soon() -> Deadline {
    Some(Instant::now() + Duration::from_secs(60))
}

/// A sender of a model that is large, and a worker.
fn pair(options: SegmentOptions) -> (SegmentWriter, SegmentReader) {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let number = LAST.fetch_add(1, Ordering::Relaxed);
    let address = format!("weightsync-grow-{}-{number}", std::process::id());
    let tensors = [("weight".to_owned(), Dtype::U8, vec![LARGE as u64])];
    let model = ModelDescription {
        layout: Layout::new(tensors).unwrap(),
        note: Vec::new(),
    };
    let run = Run {
        epoch: Epoch(1),
        id: [1; 16],
    };
    let writer = SegmentWriter::create(&address, [2; 16], run, &[model], options).unwrap();
    let attach = AttachOptions {
        address,
        secret: [2; 16],
        worker: WorkerId(0),
        seen: Epoch(0),
        wait: WaitStyle::Sleep,
        models: None,
        delivery: Delivery::Newest,
        device: String::new(),
        instance: 0,
        resume: Default::default(),
    };
    let reader = SegmentReader::attach(&attach, soon()).unwrap();
    (writer, reader)
}

fn send(writer: &mut SegmentWriter) -> crate::Publication {
    let staging = writer.stage(&[0], soon()).unwrap();
    staging.publish(&Targets::All).unwrap()
}

/// Until no slot is being made.
fn rest(writer: &SegmentWriter) {
    let shared = &writer.shared;
    let idle = || {
        let state = shared.state();
        let mut all = state.growth.iter();
        Ok(all.all(|one| one.making == Making::Nothing).then_some(()))
    };
    assert!(shared.wait_until(soon(), idle).unwrap().is_some());
}

#[test]
fn a_large_model_has_one_slot_until_it_is_sent() {
    let (mut writer, mut reader) = pair(SegmentOptions::default());
    let there = writer.wait_readers(soon(), |there| there.workers.len() == 1);
    assert!(there.unwrap());
    rest(&writer);
    assert_eq!(writer.slots(0), 1, "nothing was sent");
    let publication = send(&mut writer);
    let taken = reader.next(soon()).unwrap().unwrap();
    reader.applied(&taken).unwrap();
    let waiter = writer.waiter();
    waiter.settle(&publication, Level::Applied, soon()).unwrap();
    rest(&writer);
    assert_eq!(writer.slots(0), 2, "made ahead of the next send");
    assert_eq!(taken.members[0].snapshot.bytes().len(), LARGE);
}

#[test]
fn a_send_makes_the_slot_it_needs_in_any_case() {
    let (mut writer, _reader) = pair(SegmentOptions::default());
    send(&mut writer);
    let late = Some(Instant::now());
    let staging = writer
        .stage(&[0], late)
        .map(|staging| staging.publish(&Targets::All));
    assert_eq!(
        staging.unwrap().unwrap().versions,
        [(0, weightsync_core::Version(2))]
    );
    assert_eq!(writer.slots(0), 2);
}

#[test]
fn a_slot_is_waited_for_before_one_more_is_made() {
    let (mut writer, mut reader) = pair(SegmentOptions::default());
    send(&mut writer);
    let first = reader.next(soon()).unwrap();
    send(&mut writer);
    // The first is held, the second is what the worker is to run.
    writer.shared.state().growth[0].took = HOUR;
    let shared = writer.shared.clone();
    let sending = std::thread::spawn(move || {
        send(&mut writer);
        writer
    });
    // The sender sleeps: it has found no slot, and makes none.
    while !shared.header().sender.0.sleeping() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    drop(first);
    let writer = sending.join().unwrap();
    assert_eq!(writer.slots(0), 2);
}

#[test]
fn one_more_is_made_when_none_comes_back() {
    let (mut writer, mut reader) = pair(SegmentOptions::default());
    send(&mut writer);
    let first = reader.next(soon()).unwrap();
    (0..3).for_each(|_| drop(send(&mut writer)));
    assert_eq!(writer.slots(0), 3);
    drop(first);
}

#[test]
fn failed_growth_reaches_every_waiter() {
    let (mut writer, _reader) = pair(SegmentOptions::default());
    send(&mut writer);
    writer.shared.ends.store(true, Ordering::Relaxed);
    for _ in 0..2 {
        let error = writer.stage(&[0], soon()).map(drop).unwrap_err();
        assert!(matches!(error, Error::SenderClosed), "{error}");
    }
    writer.shared.ends.store(false, Ordering::Relaxed);
    send(&mut writer);
    assert_eq!(writer.slots(0), 2);
}
