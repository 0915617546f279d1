//! The versions that readers see.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Instant;

use weightsync_core::{Dtype, Layout, Version, WorkerId};
use weightsync_mem::{
    AttachOptions, CHECKSUM_BLOCK, CopyOptions, Error, ModelDescription, Outcome, SegmentReader,
    SegmentWriter, Source, Targets, WaitStyle,
};

use crate::{
    RUN, SECRET, address, attach, check, only, pattern, publish, settle, slots, take, within,
    writer,
};

#[test]
fn versions_arrive_whole_and_are_acknowledged() {
    let address = address();
    let mut writer = writer(&address, slots(2, 2));
    let mut readers: Vec<_> = (0..3)
        .map(|w| SegmentReader::attach(&attach(&address, w), within(20)).unwrap())
        .collect();
    assert!(readers[0].latest().unwrap().is_none());
    for version in 1..=20 {
        let publication = publish(&mut writer, version, CopyOptions::default());
        for reader in &mut readers {
            assert_eq!(take(reader).version(), Version(version));
        }
        let lines = settle(&writer, &publication);
        assert_eq!(lines.len(), 3);
        for (worker, line) in lines.iter().enumerate() {
            assert_eq!(line.worker, WorkerId(worker as u32));
            assert_eq!(
                (&line.outcome, &line.versions[..]),
                (&Outcome::Applied, &[Version(version)][..])
            );
            assert_eq!(line.pid, std::process::id());
        }
    }
}

#[test]
fn the_newest_version_is_what_comes() {
    let address = address();
    let mut writer = writer(&address, slots(3, 3));
    let mut reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    for version in 1..=3 {
        publish(&mut writer, version, CopyOptions::default());
    }
    assert_eq!(take(&mut reader).version(), Version(3));
    assert!(
        reader.next(within(0)).unwrap().is_none(),
        "nothing newer, and no error"
    );
    assert_eq!(
        only(reader.latest().unwrap().unwrap()).version(),
        Version(3)
    );
}

#[test]
fn a_held_snapshot_does_not_change() {
    let address = address();
    let mut writer = writer(&address, slots(3, 3));
    let mut reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    publish(&mut writer, 1, CopyOptions::default());
    let held = take(&mut reader);
    let digest = held.digest();
    for version in 2..30 {
        publish(&mut writer, version, CopyOptions::default());
        drop(take(&mut reader));
    }
    check(&held);
    assert_eq!((held.version(), held.digest()), (Version(1), digest));
    let other_reference = held.clone();
    drop((held, reader, writer));
    check(&other_reference);
}

#[test]
fn full_segment_error_names_the_holders() {
    let address = address();
    let mut writer = writer(&address, slots(2, 2));
    let mut reader = SegmentReader::attach(&attach(&address, 7), within(20)).unwrap();
    publish(&mut writer, 1, CopyOptions::default());
    let held = take(&mut reader);
    publish(&mut writer, 2, CopyOptions::default());
    let error = writer.stage(&[0], within(0)).map(drop).unwrap_err();
    let Error::AllSlotsPinned {
        model: 0,
        slots: 2,
        holders,
        ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(holders.len(), 1);
    assert_eq!(
        (holders[0].worker, &holders[0].versions[..]),
        (Some(WorkerId(7)), &[Version(1)][..])
    );
    let words = error.to_string();
    assert!(
        words.contains("worker 7") && words.contains("holds v1"),
        "{words}"
    );
    // Given back, it is free at once, also for a sender that sleeps on it.
    let waiting = std::thread::spawn(move || {
        publish(&mut writer, 3, CopyOptions::default());
        writer
    });
    drop(held);
    let writer = waiting.join().unwrap();
    assert_eq!(take(&mut reader).version(), Version(3));
    drop(writer);
}

#[test]
fn a_segment_grows_instead_where_it_may() {
    let address = address();
    let mut writer = writer(&address, slots(2, 4));
    let mut reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    let mut held = Vec::new();
    for version in 1..=4 {
        publish(&mut writer, version, CopyOptions::default());
        held.push(take(&mut reader));
    }
    assert_eq!(writer.slots(0), 4);
    assert!(matches!(
        writer.stage(&[0], within(0)).map(drop),
        Err(Error::AllSlotsPinned { slots: 4, .. })
    ));
    // A reader that joins now gets all four.
    let mut late = SegmentReader::attach(&attach(&address, 1), within(20)).unwrap();
    assert_eq!(take(&mut late).version(), Version(4));
    held.iter().for_each(check);
}

#[test]
fn abandoned_staging_is_never_visible() {
    let address = address();
    let mut writer = writer(&address, slots(2, 2));
    let mut reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    publish(&mut writer, 1, CopyOptions::default());
    let mut abandoned = writer.stage(&[0], within(20)).unwrap();
    abandoned
        .tensors_mut(0)
        .into_iter()
        .for_each(|place| place.fill(0xee));
    drop(abandoned);
    assert_eq!(take(&mut reader).version(), Version(1));
    let mut staging = writer.stage(&[0], within(20)).unwrap();
    let lens: Vec<_> = staging
        .layout(0)
        .tensors()
        .iter()
        .map(|tensor| tensor.range.len)
        .collect();
    for (index, len) in lens.into_iter().enumerate() {
        staging
            .tensor_mut(0, index)
            .copy_from_slice(&pattern(0, Version(2), len));
    }
    let publication = staging.publish(&Targets::All).unwrap();
    assert_eq!(publication.versions, [(0, Version(2))]);
    assert_eq!(take(&mut reader).version(), Version(2));
    assert_eq!(writer.version(0), Version(2));
}

#[test]
fn checksums_cover_every_byte_with_any_threads() {
    let address = address();
    let mut writer = writer(&address, slots(2, 2));
    let mut reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    for (version, threads) in [(1, 1), (2, 2), (3, 5)] {
        publish(
            &mut writer,
            version,
            CopyOptions {
                threads,
                checksums: true,
            },
        );
        let snapshot = take(&mut reader);
        assert!(snapshot.verify_checksums().unwrap());
        let blocks = snapshot.bytes().chunks(CHECKSUM_BLOCK);
        let blocks: Vec<u64> = blocks.map(weightsync_simd::crc64).collect();
        assert_eq!(snapshot.block_sums().unwrap(), Some(blocks));
    }
    publish(&mut writer, 4, CopyOptions::default());
    let snapshot = take(&mut reader);
    assert!(!snapshot.verify_checksums().unwrap(), "none were asked for");
    assert_eq!(snapshot.block_sums().unwrap(), None);
}

/// Tensors that cross the ends of blocks, some of them filled by a function, on any
/// number of threads.
#[test]
fn checksums_cover_image_blocks_with_any_content() {
    let block = CHECKSUM_BLOCK as u64;
    for lens in [
        vec![block - 1, 5, 0, 2 * block + 100, 63, 1, 3 * block],
        vec![1000; 3000],
        vec![block, 0],
        vec![4 * block + 7],
    ] {
        let tensors = lens.iter().enumerate();
        let tensors = tensors.map(|(at, len)| (format!("t{at}"), Dtype::U8, vec![*len]));
        let model = ModelDescription {
            layout: Layout::new(tensors).unwrap(),
            note: Vec::new(),
        };
        let mut writer =
            SegmentWriter::create(&address(), SECRET, RUN, &[model], slots(2, 2)).unwrap();
        for (version, threads) in [(1, 1), (2, 2), (3, 5)] {
            let bytes = lens.iter().map(|len| pattern(0, Version(version), *len));
            let bytes: Vec<Vec<u8>> = bytes.collect();
            let fills = bytes.iter().map(|bytes| {
                move |to: &mut [u8]| {
                    to.copy_from_slice(bytes);
                    Ok(())
                }
            });
            let fills: Vec<_> = fills.collect();
            let sources = bytes.iter().zip(&fills).enumerate();
            let sources = sources.map(|(at, (bytes, fill))| match at % 2 {
                0 => Source::Fill(fill),
                _ => Source::Bytes(bytes),
            });
            let options = CopyOptions {
                threads,
                checksums: true,
            };
            let mut staging = writer.stage(&[0], within(20)).unwrap();
            let sources: Vec<_> = sources.collect();
            staging.write(0, &sources, options).unwrap();
            staging.publish(&Targets::All).unwrap();
            let snapshot = writer.snapshot(0).unwrap().unwrap();
            check(&snapshot);
            let blocks = snapshot.bytes().chunks(CHECKSUM_BLOCK);
            let blocks: Vec<u64> = blocks.map(weightsync_simd::crc64).collect();
            assert_eq!(
                snapshot.block_sums().unwrap(),
                Some(blocks),
                "{threads} threads"
            );
        }
    }
}

#[test]
fn the_digest_comes_when_it_is_made() {
    let address = address();
    let mut writer = writer(&address, slots(2, 2));
    assert!(writer.snapshot(0).unwrap().is_none());
    let mut reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    publish(&mut writer, 1, CopyOptions::default());
    let snapshot = take(&mut reader);
    assert_eq!(snapshot.published_digest(), None);
    let own = writer.snapshot(0).unwrap().unwrap();
    let digest = own.digest_unless(|| false).unwrap();
    assert!(own.publish_digest(digest));
    assert!(
        !snapshot.publish_digest(digest),
        "a reader's snapshot cannot"
    );
    assert_eq!(own.digest_unless(|| true), None);
    drop(own);
    assert_eq!(snapshot.published_digest(), Some(digest));
    assert_eq!(snapshot.digest(), digest);
    publish(&mut writer, 2, CopyOptions::default());
    let next = take(&mut reader);
    assert_eq!(
        next.published_digest(),
        None,
        "a recycled record forgets it"
    );
    assert_ne!(next.digest(), digest);
}

/// An interrupt that finds the reader about to look, asleep, or between two
/// waits ends one wait; what was sent comes all the same.
#[test]
fn an_interrupt_ends_one_wait_and_loses_nothing() {
    const ROUNDS: u32 = 300;
    for style in [WaitStyle::Sleep, WaitStyle::YieldThenSleep] {
        let address = address();
        let mut writer = writer(&address, slots(3, 3));
        let options = AttachOptions {
            wait: style,
            ..attach(&address, 0)
        };
        let mut reader = SegmentReader::attach(&options, within(20)).unwrap();
        let interrupter = reader.interrupter();
        let ended = Arc::new(AtomicU32::new(0));
        let waiter = thread::spawn({
            let ended = ended.clone();
            move || loop {
                match reader.next(within(20)).unwrap() {
                    Some(taken) => return only(taken).version(),
                    None => ended.fetch_add(1, Ordering::SeqCst),
                };
            }
        });
        for round in 0..ROUNDS {
            interrupter.interrupt();
            let patience = within(10);
            while ended.load(Ordering::SeqCst) <= round {
                assert!(
                    Some(Instant::now()) < patience,
                    "interrupt {round} was lost"
                );
                thread::yield_now();
            }
        }
        publish(&mut writer, 1, CopyOptions::default());
        assert_eq!(waiter.join().unwrap(), Version(1));
        assert_eq!(ended.load(Ordering::SeqCst), ROUNDS);
        // The reader is gone.
        interrupter.interrupt();
    }
}
