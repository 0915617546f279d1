//! Death, shutdown, wrong order, and what they leave behind.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use weightsync_core::{Epoch, Version, WorkerId};
use weightsync_mem::{
    AttachOptions, CopyOptions, Delivery, Error, Level, ModelDescription, Outcome, SegmentOptions,
    SegmentReader, SegmentWriter, Source, Targets, WaitStyle, Want,
};

use crate::{
    RUN, SECRET, address, attach, check, layout, model, only, publish, send_with, settle, slots,
    small, take, take_set, within, writer,
};

#[test]
fn a_reader_that_left_is_a_line_once() {
    let address = address();
    let mut writer = writer(&address, slots(2, 2));
    let reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    let mut stays = SegmentReader::attach(&attach(&address, 1), within(20)).unwrap();
    drop(reader);
    let publication = publish(&mut writer, 1, CopyOptions::default());
    take(&mut stays);
    assert!(
        writer
            .wait_readers(within(20), |there| there.workers.len() == 1)
            .unwrap()
    );
    let lines = settle(&writer, &publication);
    let outcome = |worker| {
        lines
            .iter()
            .find(|line| line.worker == WorkerId(worker))
            .map(|line| line.outcome.clone())
    };
    assert_eq!(outcome(1), Some(Outcome::Applied));
    // The departure may have been noticed before or after the list was made.
    assert!(
        matches!(outcome(0), None | Some(Outcome::Left)),
        "{lines:?}"
    );
    let publication = publish(&mut writer, 2, CopyOptions::default());
    take(&mut stays);
    settle(&writer, &publication);
    let publication = publish(&mut writer, 3, CopyOptions::default());
    take(&mut stays);
    assert_eq!(settle(&writer, &publication).len(), 1);
}

#[test]
fn pins_outlive_the_reader_that_made_them() {
    let address = address();
    let mut writer = writer(&address, slots(2, 2));
    let mut reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    publish(&mut writer, 1, CopyOptions::default());
    let held = take(&mut reader);
    drop(reader);
    // The same worker joins again while its old snapshot is still held.
    let mut again = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    publish(&mut writer, 2, CopyOptions::default());
    drop(take(&mut again));
    assert!(matches!(
        writer.stage(&[0], within(0)).map(drop),
        Err(Error::AllSlotsPinned { .. })
    ));
    check(&held);
    drop(held);
    publish(&mut writer, 3, CopyOptions::default());
    take(&mut again);
}

#[test]
fn late_and_refusing_readers_are_lines_too() {
    let address = address();
    let mut writer = writer(&address, slots(2, 2));
    let mut refuses = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    let _sleeps = SegmentReader::attach(&attach(&address, 1), within(20)).unwrap();
    let publication = publish(&mut writer, 1, CopyOptions::default());
    let taken = refuses.next(within(20)).unwrap().unwrap();
    refuses
        .refuse(Some(taken.sequence), "no room for embed.weight")
        .unwrap();
    let soon = Some(Instant::now() + Duration::from_millis(200));
    let lines = writer
        .waiter()
        .settle(&publication, Level::Applied, soon)
        .unwrap();
    assert_eq!(lines.len(), 2);
    assert_eq!(
        lines[0].outcome,
        Outcome::Refused {
            reason: "no room for embed.weight".into()
        }
    );
    assert_eq!(
        (&lines[1].outcome, &lines[1].versions[..]),
        (&Outcome::Late, &[Version::NONE][..])
    );
}

#[test]
fn sender_close_arrives_after_all_versions() {
    let address = address();
    let mut writer = writer(&address, slots(2, 2));
    let mut reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    publish(&mut writer, 1, CopyOptions::default());
    drop(writer);
    let last = take(&mut reader);
    assert!(matches!(reader.next(within(20)), Err(Error::SenderClosed)));
    check(&last);
    check(&only(reader.latest().unwrap().unwrap()));
}

#[test]
fn a_sleeping_reader_wakes_when_the_sender_closes() {
    for wait in [WaitStyle::Sleep, WaitStyle::YieldThenSleep] {
        let address = address();
        let writer = writer(&address, slots(2, 2));
        let options = AttachOptions {
            wait,
            ..attach(&address, 0)
        };
        let mut reader = SegmentReader::attach(&options, within(20)).unwrap();
        let waiting = std::thread::spawn(move || reader.next(None).map(drop));
        drop(writer);
        assert!(matches!(waiting.join().unwrap(), Err(Error::SenderClosed)));
    }
}

#[test]
fn two_senders_cannot_share_a_name() {
    let address = address();
    let first = writer(&address, slots(2, 2));
    let second =
        SegmentWriter::create(&address, SECRET, RUN, &[model()], SegmentOptions::default());
    assert!(matches!(second, Err(Error::AddressInUse { .. })));
    drop(first);
    writer(&address, slots(2, 2));
}

#[test]
fn joining_on_wrong_terms_is_refused_in_words() {
    let address = address();
    let writer = writer(&address, slots(2, 2));
    let _first = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    let refused = |options: AttachOptions| {
        SegmentReader::attach(&options, within(20))
            .unwrap_err()
            .to_string()
    };
    let words = refused(attach(&address, 0));
    assert!(words.contains("worker 0 is already connected"), "{words}");
    let words = refused(AttachOptions {
        seen: Epoch(6),
        ..attach(&address, 1)
    });
    assert!(
        words.contains("epoch 5") && words.contains("epoch 6"),
        "{words}"
    );
    let words = refused(AttachOptions {
        models: Some(vec![0, 1]),
        ..attach(&address, 1)
    });
    assert!(words.contains("models {0, 1}"), "{words}");
    let wrong = AttachOptions {
        secret: [0; 16],
        ..attach(&address, 1)
    };
    let soon = Some(Instant::now() + Duration::from_millis(100));
    assert!(matches!(
        SegmentReader::attach(&wrong, soon),
        Err(Error::NoSender { .. })
    ));
    let own = AttachOptions {
        models: Some(vec![0]),
        seen: Epoch(5),
        device: "cuda:7".into(),
        ..attach(&address, 1)
    };
    let reader = SegmentReader::attach(&own, within(20)).unwrap();
    assert_eq!(reader.models(), [(0, model())]);
    assert_eq!(writer.readers()[1].device, "cuda:7");
}

#[test]
fn options_out_of_range_are_named() {
    let history = SegmentOptions {
        history: 63,
        ..SegmentOptions::default()
    };
    let long = ModelDescription {
        note: vec![0; (16 << 20) + 1],
        ..model()
    };
    for (models, options, name) in [
        (vec![model()], slots(1, 2), "slots"),
        (vec![model()], slots(3, 2), "max_slots"),
        (vec![model()], slots(2, 65), "max_slots"),
        (vec![model()], history, "history"),
        (vec![], slots(2, 2), "models"),
        (vec![model(); 65], slots(2, 2), "models"),
        (vec![long], slots(2, 2), "a model's note"),
    ] {
        let error = SegmentWriter::create(&address(), SECRET, RUN, &models, options).unwrap_err();
        assert!(
            matches!(error, Error::BadOption { option, .. } if option == name),
            "{error}"
        );
    }
    let address = address();
    let mut writer = writer(&address, slots(2, 2));
    for models in [&[][..], &[1], &[0, 0]] {
        let error = writer.stage(models, within(0)).map(drop).unwrap_err();
        assert!(matches!(error, Error::BadOption { .. }), "{error}");
    }
    assert!(matches!(writer.snapshot(1), Err(Error::BadOption { .. })));
    let good = attach(&address, 0);
    for options in [
        AttachOptions {
            models: Some(vec![]),
            ..good.clone()
        },
        AttachOptions {
            models: Some(vec![64]),
            ..good.clone()
        },
        AttachOptions {
            delivery: Delivery::Every { bound: 0 },
            ..good.clone()
        },
        AttachOptions {
            delivery: Delivery::Every { bound: 33 },
            ..good.clone()
        },
        AttachOptions {
            device: "x".repeat(65),
            ..good.clone()
        },
    ] {
        let error = SegmentReader::attach(&options, within(0))
            .map(drop)
            .unwrap_err();
        assert!(
            matches!(error, Error::BadOption { .. }),
            "{options:?}: {error}"
        );
    }
}

#[test]
fn closed_segment_leaves_nothing_behind() {
    let round = || {
        let address = address();
        let mut writer = small(&address, 2, slots(2, 3));
        let options = AttachOptions {
            delivery: Delivery::Every { bound: 2 },
            models: Some(vec![1]),
            ..attach(&address, 1)
        };
        let mut every = SegmentReader::attach(&options, within(20)).unwrap();
        let mut reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
        let (mut held, mut views) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            let options = CopyOptions {
                threads: 2,
                checksums: true,
            };
            let publication = send_with(&mut writer, &[0, 1], &Targets::All, options);
            held.push(take_set(&mut reader));
            held.push(take_set(&mut every));
            let snapshot = &held[held.len() - 2].members[0].snapshot;
            views.push((snapshot.private().unwrap(), snapshot.private().unwrap()));
            settle(&writer, &publication);
        }
        // A waiter may be kept; the memory of the weights is not kept with it.
        let waiter = writer.waiter();
        drop((writer, reader, every, held, views));
        waiter
    };
    // Other tests run next to this one unless the runner gives each a process;
    // so what is counted is what carries this crate's names.
    drop(round());
    let mine = || {
        let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let memory = links
            .filter_map(|entry| std::fs::read_link(entry.path()).ok())
            .filter(|link| link.to_string_lossy().contains("memfd:weightsync"))
            .count();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        (memory, maps.matches("memfd:weightsync").count())
    };
    if std::env::var_os("NEXTEST").is_some() {
        let before = (mine(), threads(), fds());
        (0..10).for_each(|_| drop(round()));
        assert_eq!((mine(), threads(), fds()), before);
    } else {
        (0..10).for_each(|_| drop(round()));
        assert!(mine().0 <= 200, "descriptors pile up: {:?}", mine());
    }
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

fn fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn forked_child_must_open_its_own_end() {
    let address = address();
    let mut writer = writer(&address, slots(2, 2));
    let mut reader = SegmentReader::attach(&attach(&address, 0), within(20)).unwrap();
    let first = publish(&mut writer, 1, CopyOptions::default());
    let held = take_set(&mut reader);
    let waiter = writer.waiter();
    // SAFETY: the child only makes calls that return at once, drops what it
    // inherited, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let forked = |error: Option<Error>| matches!(error, Some(Error::Forked { .. }));
        let told = forked(reader.latest().err())
            && forked(reader.next(None).err())
            && forked(reader.applied(&held).err())
            && forked(reader.ask(Want::Newest).err())
            && forked(writer.stage(&[0], None).map(drop).err())
            && forked(writer.snapshot(0).err())
            && forked(writer.hold(&[WorkerId(0)]).err())
            && forked(waiter.settle(&first, Level::Applied, None).err());
        drop((held, reader, writer, waiter));
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(if told { 7 } else { 1 }) }
    }
    assert_eq!(exit_code(child), Some(7));
    // The parent's ends work on, and the child's exit is nobody's death.
    check(&only(held));
    let publication = publish(&mut writer, 2, CopyOptions::default());
    assert_eq!(take(&mut reader).version(), Version(2));
    assert_eq!(settle(&writer, &publication).len(), 1);
}

#[test]
fn staged_version_stays_with_the_parent_after_fork() {
    let address = address();
    let mut writer = writer(&address, slots(2, 3));
    publish(&mut writer, 1, CopyOptions::default());
    let own = writer.snapshot(0).unwrap().unwrap();
    let tensors: Vec<_> = layout()
        .tensors()
        .iter()
        .map(|tensor| vec![0; tensor.range.len as usize])
        .collect();
    let sources: Vec<_> = tensors.iter().map(|bytes| Source::Bytes(bytes)).collect();
    let digest = own.digest();
    let mut staging = writer.stage(&[0], within(20)).unwrap();
    // SAFETY: the child only makes calls that return or panic at once, and
    // leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        std::panic::set_hook(Box::new(|_| ()));
        let panics = |call: &mut dyn FnMut()| {
            let panic = catch_unwind(AssertUnwindSafe(call)).err();
            let words = panic.and_then(|words| words.downcast::<String>().ok());
            words.is_some_and(|words| words.contains("forked child"))
        };
        let written = staging.write(0, &sources, CopyOptions::default());
        let told = matches!(written, Err(Error::Forked { .. }))
            && panics(&mut || drop(staging.tensor_mut(0, 0).to_vec()))
            && panics(&mut || drop(staging.tensors_mut(0)))
            && !own.publish_digest(digest);
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(if told { 7 } else { 1 }) }
    }
    assert_eq!(exit_code(child), Some(7));
    staging.write(0, &sources, CopyOptions::default()).unwrap();
    staging.publish(&Targets::All).unwrap();
    assert!(own.publish_digest(digest));
}

/// How a child ended, unless by a signal.
pub(crate) fn exit_code(child: libc::pid_t) -> Option<i32> {
    let mut status = 0;
    // SAFETY: `status` is valid for a write, and `child` is this process's.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    libc::WIFEXITED(status).then(|| libc::WEXITSTATUS(status))
}
