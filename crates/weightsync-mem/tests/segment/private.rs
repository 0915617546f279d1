//! Writing in place what nobody else is to see.

use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use weightsync_core::Version;
use weightsync_mem::{
    CopyOptions, Error, ModelDescription, PrivateMapping, SegmentReader, SegmentWriter, Snapshot,
};

use crate::faults::exit_code;
use crate::{
    RUN, SECRET, address, attach, check, model, pattern, publish, slots, small, take, within,
};

/// Two models: the thread that drops the last view sweeps the first, the watch the second.
fn models() -> [ModelDescription; 2] {
    let small = small(&address(), 1, slots(2, 2)).models()[0].clone();
    let both = [small, model()];
    assert!(both[0].layout.bytes() < 1 << 20 && both[1].layout.bytes() > 1 << 20);
    both
}

fn pair(model: &ModelDescription) -> (SegmentWriter, [SegmentReader; 2]) {
    let address = address();
    let models = std::slice::from_ref(model);
    let writer = SegmentWriter::create(&address, SECRET, RUN, models, slots(2, 2)).unwrap();
    let join = |worker| SegmentReader::attach(&attach(&address, worker), within(20)).unwrap();
    (writer, [join(0), join(1)])
}

#[test]
fn private_writes_last_until_the_last_view() {
    for model in models() {
        let (mut writer, [mut reader, mut other]) = pair(&model);
        for version in 1..=7 {
            publish(&mut writer, version, CopyOptions::default());
            let (snapshot, others) = (take(&mut reader), take(&mut other));
            let (view, told) = view(&snapshot);
            is_as_sent(&view);
            let written: Vec<usize> = (0..model.layout.len())
                .filter(|index| ((version * 11) >> index) & 1 == 1)
                .filter(|index| model.layout.tensors()[*index].range.len > 0)
                .collect();
            for index in &written {
                write(&view, *index);
            }
            check(&snapshot);
            check(&others);
            check(&writer.snapshot(0).unwrap().unwrap());
            // Another view here sees it, and holds it.
            let second = snapshot.private().unwrap();
            drop(view);
            for index in &written {
                assert_ne!(bytes(&second, *index), snapshot.tensor_bytes(*index));
            }
            drop(second);
            // A view of the same version does not wait for the watch.
            is_as_sent(&snapshot.private().unwrap());
            is_told(&told, &written);
        }
    }
}

#[test]
fn a_slot_is_swept_before_it_is_written_again() {
    for model in models() {
        let (mut writer, [mut reader, _]) = pair(&model);
        for version in 1..=20 {
            // Waits for the slot of the version before last.
            publish(&mut writer, version, CopyOptions::default());
            let view = take(&mut reader).private().unwrap();
            is_as_sent(&view);
            (0..model.layout.len()).for_each(|index| write(&view, index));
        }
    }
}

#[test]
fn view_outlives_both_ends() {
    for model in models() {
        let (mut writer, [mut reader, _]) = pair(&model);
        publish(&mut writer, 1, CopyOptions::default());
        let (view, told) = view(&take(&mut reader));
        publish(&mut writer, 2, CopyOptions::default());
        let full = writer.stage(&[0], within(0)).map(drop).unwrap_err();
        assert!(matches!(full, Error::AllSlotsPinned { .. }), "{full}");
        drop((writer, reader));
        is_as_sent(&view);
        write(&view, 0);
        check(view.snapshot());
        drop(view);
        is_told(&told, &[0]);
    }
}

#[test]
fn the_sender_can_write_in_a_snapshot_of_its_own() {
    for model in models() {
        let (mut writer, [mut reader, _]) = pair(&model);
        for version in 1..=3 {
            publish(&mut writer, version, CopyOptions::default());
            let (view, told) = view(&writer.snapshot(0).unwrap().unwrap());
            is_as_sent(&view);
            let last = model.layout.len() - 1;
            write(&view, last);
            check(&take(&mut reader));
            drop(view);
            is_told(&told, &[last]);
        }
    }
}

/// A process may lock its memory: then nothing that is mapped is dropped, or
/// every page is a copy from the start.
#[test]
fn slot_is_not_lent_again_while_private_pages_remain() {
    let [model, _] = models();
    let (mut writer, [mut reader, _]) = pair(&model);
    for version in 1..=5 {
        publish(&mut writer, version, CopyOptions::default());
        let view = take(&mut reader).private().unwrap();
        is_as_sent(&view);
        // SAFETY: the range is the view's, which outlives the call.
        let locked = unsafe { libc::mlock(view.as_ptr().cast(), view.len()) };
        assert_eq!(locked, 0, "{}", std::io::Error::last_os_error());
        write(&view, 0);
    }
}

#[test]
fn after_the_first_views_no_page_is_faulted_in() {
    let [_, model] = models();
    let (mut writer, [mut reader, _]) = pair(&model);
    for version in 1..=8 {
        publish(&mut writer, version, CopyOptions::default());
        let snapshot = take(&mut reader);
        let before = faults();
        let view = snapshot.private().unwrap();
        let all = (0..model.layout.len()).flat_map(|index| bytes(&view, index));
        std::hint::black_box(all.fold(0_u8, |sum, byte| sum ^ byte));
        let faults = faults() - before;
        // A slot is mapped when it has its first view.
        assert!(version <= 2 || faults < 20, "{faults} faults");
        is_as_sent(&view);
        if version % 3 == 0 {
            write(&view, 3);
        }
    }
}

#[test]
fn a_forked_child_has_no_view() {
    let (mut writer, [mut reader, _]) = pair(&models()[1]);
    publish(&mut writer, 1, CopyOptions::default());
    let snapshot = take(&mut reader);
    let (view, told) = view(&snapshot);
    write(&view, 0);
    std::panic::set_hook(Box::new(|_| ()));
    // SAFETY: the child makes calls that return at once, drops what it inherited,
    // and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let error = snapshot.private().err();
        let place = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| view.as_ptr()));
        let maps = std::fs::read_to_string("/proc/self/maps");
        let told = matches!(error, Some(Error::Forked { .. }))
            && place.is_err()
            && maps.is_ok_and(|maps| !maps.contains("memfd:weightsync"));
        drop((view, snapshot, reader, writer));
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(if told { 7 } else { 1 }) }
    }
    let _ = std::panic::take_hook();
    assert_eq!(exit_code(child), Some(7));
    assert_ne!(bytes(&view, 0), snapshot.tensor_bytes(0));
    drop((view, snapshot));
    is_told(&told, &[0]);
    for version in 2..=3 {
        publish(&mut writer, version, CopyOptions::default());
        is_as_sent(&take(&mut reader).private().unwrap());
    }
}

/// A view whose written tensors are reported at the other end.
fn view(snapshot: &Snapshot) -> (PrivateMapping, Receiver<Vec<usize>>) {
    let (tell, told) = mpsc::channel();
    let view = snapshot.private_with(move |written| tell.send(written.to_vec()).unwrap());
    (view.unwrap(), told)
}

/// Exactly these tensors were named, once; if there are none, nothing was.
fn is_told(told: &Receiver<Vec<usize>>, written: &[usize]) {
    let named = told.recv_timeout(Duration::from_secs(20));
    match written {
        [] => assert!(named.is_err(), "{named:?}"),
        _ => assert_eq!(named.unwrap(), written),
    }
    assert_eq!(told.recv_timeout(Duration::from_secs(20)).ok(), None);
}

fn is_as_sent(view: &PrivateMapping) {
    let snapshot = view.snapshot();
    let version: Version = snapshot.version();
    for (index, tensor) in view.layout().tensors().iter().enumerate() {
        let sent = pattern(snapshot.model(), version, tensor.range.len);
        assert!(bytes(view, index) == sent, "{} of {version}", tensor.name);
    }
}

fn write(view: &PrivateMapping, index: usize) {
    for byte in place(view, index) {
        *byte ^= 0x55;
    }
}

fn bytes(view: &PrivateMapping, index: usize) -> &[u8] {
    place(view, index)
}

/// A tensor's place. No test holds two of one tensor at a time.
#[allow(clippy::mut_from_ref)]
fn place(view: &PrivateMapping, index: usize) -> &mut [u8] {
    let range = view.layout().tensors()[index].range;
    assert!(range.offset + range.len <= view.len() as u64);
    // SAFETY: the offset is in the view's memory (asserted).
    let start = unsafe { view.as_ptr().add(range.offset as usize) };
    // SAFETY: so is the end; the memory lives as long as the view, and belongs to
    // this process's one thread that has views.
    unsafe { std::slice::from_raw_parts_mut(start, range.len as usize) }
}

/// Page faults of this thread.
fn faults() -> usize {
    // SAFETY: all zeros are a valid value of it.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: it is valid for a write.
    let got = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    assert_eq!(got, 0);
    usage.ru_minflt as usize
}
