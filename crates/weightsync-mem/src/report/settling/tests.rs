//! Each of many remote readers costs no more than each of few does: no step looks at all of them.

use weightsync_core::{Dtype, Epoch, Layout, Run, Targets, WorkerId};

use super::*;
use crate::model::ModelDescription;
use crate::set::ModelMask;
use crate::wire::Delivery;
use crate::{RemoteReader, RemoteReaderOptions, RemoteReaders, SegmentOptions, SegmentWriter};

fn sender(name: &str) -> SegmentWriter {
    let model = ModelDescription {
        layout: Layout::new([("bias".to_owned(), Dtype::F32, vec![3])]).unwrap(),
        note: Vec::new(),
    };
    let run = Run {
        epoch: Epoch(1),
        id: [7; 16],
    };
    let address = format!("weightsync-test/settling/{name}/{}", std::process::id());
    SegmentWriter::create(&address, [1; 16], run, &[model], SegmentOptions::default()).unwrap()
}

fn join(writer: &SegmentWriter, worker: u32, delivery: Delivery) -> RemoteReader {
    let options = RemoteReaderOptions {
        worker: WorkerId(worker),
        pid: 1,
        seen: Epoch(0),
        models: ModelMask::ALL,
        delivery,
        device: String::new(),
        location: Default::default(),
    };
    RemoteReaders::of(writer).join(options, |_| ()).unwrap()
}

fn load(remote_reader: &RemoteReader) {
    let notified = remote_reader.notifications().unwrap();
    let members = notified[0].members.iter();
    let versions = members.map(|one| (one.model(), one.version()));
    remote_reader.progress(notified[0].sequence, 0);
    remote_reader.applied(notified[0].sequence, versions);
}

#[test]
fn wait_looks_only_at_remote_readers_that_changed() {
    let mut writer = sender("changed");
    let remote_readers: Vec<_> = (0..5)
        .map(|worker| join(&writer, worker, Delivery::Newest))
        .collect();
    let staging = writer.stage(&[0], None).unwrap();
    let publication = staging.publish(&Targets::All).unwrap();
    let (shared, awaited) = (&writer.shared, publication.dispositions.clone());
    let mut settling = Settling::new(shared, &publication, Level::Applied, awaited);
    settling.note_settled();
    let listener = settling.listener.unwrap();
    remote_readers.iter().for_each(load);
    let changed = shared.state().take_changed(listener);
    let changed: Vec<Key> = changed.into_iter().collect();
    assert_eq!(changed.len(), 5);
    // Nothing says any more that they changed, so nothing looks at them.
    settling.note_settled();
    assert!(settling.lines.is_empty(), "{:?}", settling.lines);
    shared.state().mark_changed(changed[3]);
    settling.note_settled();
    assert_eq!(settling.lines.len(), 1);
    assert_eq!(settling.lines[0].worker, WorkerId(3));
    assert_eq!(settling.awaited.remote_readers.len(), 4);
}

#[test]
fn pages_of_remote_readers_are_read_only_with_queues() {
    let writer = sender("followed");
    let _newest: Vec<_> = (0..5)
        .map(|worker| join(&writer, worker, Delivery::Newest))
        .collect();
    let followed = || {
        let mut keys = Vec::new();
        let mut state = writer.shared.state();
        state.follow(|_, (worker, _), _| keys.push(worker));
        keys
    };
    assert_eq!(followed(), []);
    let queue = join(&writer, 7, Delivery::Every { bound: 1 });
    assert_eq!(followed(), [WorkerId(7)]);
    drop(queue);
    assert_eq!(followed(), []);
}
