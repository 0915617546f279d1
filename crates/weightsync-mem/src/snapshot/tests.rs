//! Damage that verification detects, and writes that the memory itself refuses. The sender's own
//! mapping is used to damage bytes that no public call can.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use weightsync_core::record::RECORD_WORDS;
use weightsync_core::{Dtype, Epoch, Targets, WorkerId};

use super::*;
use crate::map::{MemoryMap, OwnedFile};
use crate::spans::{CHECKSUM_BLOCK, SlotShape, Spans};
use crate::wire::SenderMessage;
use crate::{
    AttachOptions, CopyOptions, Delivery, ModelDescription, SegmentOptions, SegmentReader,
    SegmentWriter, Source, WaitStyle,
};

fn soon() -> crate::Deadline {
    Some(Instant::now() + Duration::from_secs(20))
}

/// A tensor of several spans, one that ends in the middle of a line, small ones
/// in a span together.
fn layout() -> Layout {
    let lens = [(1 << 20) + 77, 9 << 20, 100, 0, 9000];
    Layout::new(lens.map(|len| (format!("t{len}"), Dtype::U8, vec![len]))).unwrap()
}

fn pair(slots: u8) -> (SegmentWriter, SegmentReader) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let address = format!("weightsync-test/snapshot/{}/{number}", std::process::id());
    let run = Run {
        epoch: Epoch(1),
        id: [3; 16],
    };
    let options = SegmentOptions {
        slots,
        max_slots: slots,
        ..SegmentOptions::default()
    };
    let model = ModelDescription {
        layout: layout(),
        note: Vec::new(),
    };
    let writer = SegmentWriter::create(&address, [9; 16], run, &[model], options).unwrap();
    let options = AttachOptions {
        address,
        secret: [9; 16],
        worker: WorkerId(0),
        seen: Epoch(0),
        wait: WaitStyle::Sleep,
        models: None,
        delivery: Delivery::Newest,
        device: String::new(),
        instance: 0,
        resume: crate::Resume::default(),
    };
    (writer, SegmentReader::attach(&options, soon()).unwrap())
}

fn publish(writer: &mut SegmentWriter, version: u64) {
    let bytes: Vec<Vec<u8>> = layout()
        .tensors()
        .iter()
        .map(|spec| vec![version as u8; spec.range.len as usize])
        .collect();
    let sources: Vec<_> = bytes.iter().map(|bytes| Source::Bytes(bytes)).collect();
    let mut staging = writer.stage(&[0], soon()).unwrap();
    staging
        .write(
            0,
            &sources,
            CopyOptions {
                threads: 2,
                checksums: true,
            },
        )
        .unwrap();
    let publication = staging.publish(&Targets::All).unwrap();
    assert_eq!(publication.versions, [(0, Version(version))]);
}

fn next(reader: &mut SegmentReader) -> Snapshot {
    let mut taken = reader.next(soon()).unwrap().unwrap();
    taken.members.remove(0).snapshot
}

/// Flips a bit of a slot behind everybody's back.
fn spoil(writer: &SegmentWriter, slot: u8, at: usize) {
    let map = writer.shared.state().slots[0][usize::from(slot)]
        .map
        .clone();
    assert!(at < map.len());
    // SAFETY: the address is inside the sender's writable mapping (asserted).
    let byte = unsafe { map.as_ptr().add(at) };
    // SAFETY: nobody else looks at the byte meanwhile.
    unsafe { *byte ^= 0x10 };
}

#[test]
fn every_byte_is_under_a_checksum() {
    let (mut writer, mut reader) = pair(2);
    publish(&mut writer, 1);
    let snapshot = next(&mut reader);
    assert!(snapshot.verify_checksums().unwrap());
    let slot = snapshot.pin.slot;
    let (spans, shape) = (Spans::new(&layout()), SlotShape::of(&layout()));
    for span in spans.all() {
        for at in [span.image.start, span.image.end - 1] {
            spoil(&writer, slot, at);
            let error = snapshot.verify_checksums().unwrap_err();
            let Error::ChecksumMismatch {
                version: Version(1),
                block,
            } = error
            else {
                panic!("{error}")
            };
            assert_eq!(block, at / CHECKSUM_BLOCK, "byte {at}");
            spoil(&writer, slot, at);
        }
    }
    for at in [
        shape.table_offset(),
        shape.table_offset() + shape.table_bytes() - 1,
    ] {
        spoil(&writer, slot, at);
        let error = snapshot.verify_checksums().unwrap_err();
        assert!(matches!(error, Error::CorruptCommit { .. }), "{error}");
        spoil(&writer, slot, at);
    }
    assert!(snapshot.verify_checksums().unwrap());
}

#[test]
fn a_spoilt_commit_record_is_not_believed() {
    let (mut writer, mut reader) = pair(2);
    publish(&mut writer, 1);
    let held = next(&mut reader);
    let page = writer.shared.models[0].model.clone();
    let record = page.page().read_commit(held.pin.slot).unwrap();
    let slot = held.pin.slot;
    let refuses = |reader: &mut SegmentReader, record: &CommitRecord| {
        // The sender writes it; only its mapping of the header can.
        page.page().write_commit(slot, record);
        let error = reader.latest().map(drop).unwrap_err();
        assert!(matches!(error, Error::CorruptCommit { .. }), "{error}");
    };
    let other = Run {
        epoch: Epoch(1),
        id: [4; 16],
    };
    refuses(
        &mut reader,
        &CommitRecord {
            run: other,
            ..record
        },
    );
    refuses(
        &mut reader,
        &CommitRecord {
            layout: weightsync_core::LayoutId([1; 32]),
            ..record
        },
    );
    refuses(
        &mut reader,
        &CommitRecord {
            bytes: record.bytes + 64,
            ..record
        },
    );
    refuses(
        &mut reader,
        &CommitRecord {
            version: Version(2),
            ..record
        },
    );
    refuses(
        &mut reader,
        &CommitRecord {
            checksum_block: 5,
            ..record
        },
    );
    for word in 0..RECORD_WORDS {
        page.page().write_commit(slot, &record);
        page.page().spoil_commit(slot, word);
        let error = reader.latest().map(drop).unwrap_err();
        assert!(
            matches!(error, Error::CorruptCommit { .. }),
            "word {word}: {error}"
        );
    }
    // The one held before stays as it was, and the next version is fine.
    assert_eq!(held.tensor_bytes(2), [1; 100]);
    publish(&mut writer, 2);
    assert_eq!(next(&mut reader).version(), Version(2));
}

#[test]
fn nobody_but_its_owner_can_write_shared_memory() {
    let file = OwnedFile::new("weightsync-test", 8192).unwrap();
    let (all, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: the kernel picks the place; the mapping is expected to fail.
    let writable =
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), 8192, all, shared, &file.fd, 0) };
    assert_eq!(writable.unwrap_err(), Errno::PERM);
    assert_eq!(
        rustix::io::pwrite(&file.fd, b"x", 0).unwrap_err(),
        Errno::PERM
    );
    assert_eq!(rustix::fs::ftruncate(&file.fd, 0).unwrap_err(), Errno::PERM);
    assert_eq!(
        rustix::fs::ftruncate(&file.fd, 1 << 20).unwrap_err(),
        Errno::PERM
    );
    let map = MemoryMap::of_peer(file.fd.as_fd(), 8192).unwrap();
    let flags = MprotectFlags::READ | MprotectFlags::WRITE;
    // SAFETY: the range is the mapping made above; the call is expected to fail.
    let made_writable = unsafe { rustix::mm::mprotect(map.as_ptr().cast(), 8192, flags) };
    assert_eq!(made_writable.unwrap_err(), Errno::ACCESS);
    // An unsealed file is not mapped at all.
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING | rustix::fs::MemfdFlags::CLOEXEC;
    let open = rustix::fs::memfd_create("weightsync-test", flags).unwrap();
    rustix::fs::ftruncate(&open, 8192).unwrap();
    assert!(matches!(
        MemoryMap::of_peer(open.as_fd(), 8192),
        Err(Error::Protocol { .. })
    ));
    assert!(matches!(
        MemoryMap::of_peer(file.fd.as_fd(), 8193),
        Err(Error::Protocol { .. })
    ));
}

#[test]
fn a_reader_that_breaks_the_protocol_keeps_its_pins() {
    for junk in [
        &b"nonsense"[..],
        b"",
        &SenderMessage::Slot { model: 0, index: 1 }.encode(),
    ] {
        let (mut writer, mut reader) = pair(2);
        publish(&mut writer, 1);
        let held = next(&mut reader);
        held.pin.book.socket().unwrap().send(junk, &[]).unwrap();
        let told = writer.wait_readers(soon(), |there| there.rejected == [WorkerId(0)]);
        assert!(told.unwrap(), "the breach was not noticed");
        publish(&mut writer, 2);
        // Slot 1 is live, slot 0 is held: there is nothing to write.
        let error = writer
            .stage(&[0], Some(Instant::now()))
            .map(drop)
            .unwrap_err();
        assert!(matches!(error, Error::AllSlotsPinned { .. }), "{error}");
        assert_eq!(held.tensor_bytes(2), [1; 100]);
        drop(held);
        publish(&mut writer, 3);
    }
}

#[test]
fn a_digest_under_way_is_given_up_inside_a_tensor() {
    let (mut writer, _reader) = pair(2);
    publish(&mut writer, 1);
    let own = writer.snapshot(0).unwrap().unwrap();
    let asked = std::cell::Cell::new(0);
    let count = || {
        asked.set(asked.get() + 1);
        false
    };
    assert_eq!(own.digest_unless(count), Some(own.digest()));
    assert!(asked.get() > layout().len(), "asked {} times", asked.get());
    assert_eq!(own.digest_unless(|| true), None);
}
