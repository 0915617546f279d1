//! Death, shutdown, wrong order, and what they leave behind.

use std::time::{Duration, Instant};

use weightsync_core::{Epoch, LayoutId, Version, WorkerId};
use weightsync_mem::{
    AttachOptions, CopyOptions, Error, Outcome, Reader, SegmentOptions, WaitStyle, Writer,
};

use crate::{RUN, SECRET, address, attach, check, layout, publish, slots, take, within, writer};

#[test]
fn a_reader_that_left_is_a_line_once() {
    let address = address();
    let mut writer = writer(&address, slots(2, 2));
    let reader = Reader::attach(&attach(&address, 0), within(20)).unwrap();
    let mut stays = Reader::attach(&attach(&address, 1), within(20)).unwrap();
    drop(reader);
    publish(&mut writer, 1, CopyOptions::default());
    take(&mut stays);
    assert!(
        writer
            .wait_readers(within(20), |readers, _| readers.len() == 1)
            .unwrap()
    );
    let lines = writer.wait_applied(Version(1), within(20)).unwrap();
    let outcome = |worker| {
        lines
            .iter()
            .find(|line| line.worker == WorkerId(worker))
            .map(|line| line.outcome.clone())
    };
    assert_eq!(outcome(1), Some(Outcome::Applied));
    // Its going may have been noticed before or after the list was made.
    assert!(
        matches!(outcome(0), None | Some(Outcome::Left)),
        "{lines:?}"
    );
    publish(&mut writer, 2, CopyOptions::default());
    take(&mut stays);
    writer.wait_applied(Version(2), within(20)).unwrap();
    publish(&mut writer, 3, CopyOptions::default());
    take(&mut stays);
    assert_eq!(
        writer.wait_applied(Version(3), within(20)).unwrap().len(),
        1
    );
}

#[test]
fn pins_outlive_the_reader_that_made_them() {
    let address = address();
    let mut writer = writer(&address, slots(2, 2));
    let mut reader = Reader::attach(&attach(&address, 0), within(20)).unwrap();
    publish(&mut writer, 1, CopyOptions::default());
    let held = take(&mut reader);
    drop(reader);
    // The same worker joins again while its old snapshot is still held.
    let mut again = Reader::attach(&attach(&address, 0), within(20)).unwrap();
    publish(&mut writer, 2, CopyOptions::default());
    drop(take(&mut again));
    assert!(matches!(
        writer.loan(within(0)).map(drop),
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
    let mut refuses = Reader::attach(&attach(&address, 0), within(20)).unwrap();
    let _sleeps = Reader::attach(&attach(&address, 1), within(20)).unwrap();
    publish(&mut writer, 1, CopyOptions::default());
    let snapshot = refuses.next(within(20)).unwrap().unwrap();
    refuses
        .refuse(snapshot.version(), "no room for embed.weight")
        .unwrap();
    let lines = writer
        .wait_applied(
            Version(1),
            Some(Instant::now() + Duration::from_millis(200)),
        )
        .unwrap();
    assert_eq!(lines.len(), 2);
    assert_eq!(
        lines[0].outcome,
        Outcome::Refused {
            reason: "no room for embed.weight".into()
        }
    );
    assert_eq!(
        (&lines[1].outcome, lines[1].applied),
        (&Outcome::Late, Version::NONE)
    );
}

#[test]
fn a_closed_sender_is_told_after_everything_it_sent() {
    let address = address();
    let mut writer = writer(&address, slots(2, 2));
    let mut reader = Reader::attach(&attach(&address, 0), within(20)).unwrap();
    publish(&mut writer, 1, CopyOptions::default());
    drop(writer);
    let last = take(&mut reader);
    assert!(matches!(reader.next(within(20)), Err(Error::SenderClosed)));
    check(&last);
    check(&reader.latest().unwrap().unwrap());
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
        let mut reader = Reader::attach(&options, within(20)).unwrap();
        let waiting = std::thread::spawn(move || reader.next(None).map(drop));
        drop(writer);
        assert!(matches!(waiting.join().unwrap(), Err(Error::SenderClosed)));
    }
}

#[test]
fn two_senders_cannot_share_a_name() {
    let address = address();
    let first = writer(&address, slots(2, 2));
    let second = Writer::create(&address, SECRET, RUN, &layout(), SegmentOptions::default());
    assert!(matches!(second, Err(Error::AddressInUse { .. })));
    drop(first);
    writer(&address, slots(2, 2));
}

#[test]
fn joining_on_wrong_terms_is_refused_in_words() {
    let address = address();
    let _writer = writer(&address, slots(2, 2));
    let _first = Reader::attach(&attach(&address, 0), within(20)).unwrap();
    let refused = |options: AttachOptions| {
        Reader::attach(&options, within(20))
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
        layout: Some(LayoutId([1; 32])),
        ..attach(&address, 1)
    });
    assert!(words.contains("layout"), "{words}");
    let wrong = AttachOptions {
        secret: [0; 16],
        ..attach(&address, 1)
    };
    let soon = Some(Instant::now() + Duration::from_millis(100));
    assert!(matches!(
        Reader::attach(&wrong, soon),
        Err(Error::NoSender { .. })
    ));
    let own = AttachOptions {
        layout: Some(layout().id()),
        seen: Epoch(5),
        ..attach(&address, 1)
    };
    Reader::attach(&own, within(20)).unwrap();
}

#[test]
fn options_out_of_range_are_named() {
    for (options, name) in [
        (slots(1, 2), "slots"),
        (slots(3, 2), "max_slots"),
        (slots(2, 65), "max_slots"),
    ] {
        let error = Writer::create(&address(), SECRET, RUN, &layout(), options).unwrap_err();
        assert!(
            matches!(error, Error::BadOption { option, .. } if option == name),
            "{error}"
        );
    }
}

#[test]
fn nothing_is_left_behind() {
    let round = || {
        let address = address();
        let mut writer = writer(&address, slots(2, 3));
        let mut reader = Reader::attach(&attach(&address, 0), within(20)).unwrap();
        let mut held = Vec::new();
        for version in 1..=3 {
            publish(
                &mut writer,
                version,
                CopyOptions {
                    threads: 2,
                    checksums: true,
                },
            );
            held.push(take(&mut reader));
        }
    };
    // Other tests run beside this one unless the runner gives each a process;
    // so what is counted is what carries this crate's names.
    round();
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
        (0..10).for_each(|_| round());
        assert_eq!((mine(), threads(), fds()), before);
    } else {
        (0..10).for_each(|_| round());
        assert!(mine().0 <= 64, "descriptors pile up: {:?}", mine());
    }
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

fn fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn a_forked_child_is_told_to_open_its_own_end() {
    let address = address();
    let mut writer = writer(&address, slots(2, 2));
    let mut reader = Reader::attach(&attach(&address, 0), within(20)).unwrap();
    publish(&mut writer, 1, CopyOptions::default());
    let held = take(&mut reader);
    // SAFETY: the child only makes calls that return at once, drops what it
    // inherited, and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let forked = |error: Option<Error>| matches!(error, Some(Error::Forked { .. }));
        let told = forked(reader.latest().err())
            && forked(reader.next(None).err())
            && forked(reader.applied(Version(1)).err())
            && forked(writer.loan(None).map(drop).err())
            && forked(writer.snapshot().err());
        drop((held, reader, writer));
        // SAFETY: ends the child without running the parent's exit handlers.
        unsafe { libc::_exit(if told { 7 } else { 1 }) }
    }
    let mut status = 0;
    // SAFETY: `status` is valid for a write, and `child` is this process's.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(
        (libc::WIFEXITED(status), libc::WEXITSTATUS(status)),
        (true, 7)
    );
    // The parent's ends work on, and the child's exit is nobody's death.
    check(&held);
    drop(held);
    publish(&mut writer, 2, CopyOptions::default());
    assert_eq!(take(&mut reader).version(), Version(2));
    assert_eq!(
        writer.wait_applied(Version(2), within(20)).unwrap().len(),
        1
    );
}
