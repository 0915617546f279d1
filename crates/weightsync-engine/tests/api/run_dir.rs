//! Trainers that come one after the other, and the directory that tells them apart.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use rustix::fs::{CWD, FileType, mknodat};
use tempfile::TempDir;
use weightsync_engine::{
    Epoch, Error, Expect, Receiver, ReceiverSetup, Remedy, Sender, SenderSetup, Tensors, Version,
};

use crate::{BRIEF, pair_by, send, send_to, soon, weights};

fn setup(dir: &Path) -> SenderSetup {
    SenderSetup::new("policy", &weights())
        .unwrap()
        .run_dir(dir)
        .unwrap()
}

/// A directory for this user alone, whatever the umask.
fn own_dir() -> TempDir {
    let mode = fs::Permissions::from_mode(0o700);
    let dir = tempfile::Builder::new().permissions(mode).tempdir();
    dir.unwrap()
}

/// Writes a file by hand, as a careful person does.
fn put(path: &Path, text: impl AsRef<[u8]>) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
}

/// Starts a trainer while a worker does its part.
fn restart<T: Send>(dir: &Path, at_worker: impl FnOnce() -> T + Send) -> (Sender, T) {
    thread::scope(|scope| {
        let worker = scope.spawn(at_worker);
        let sender = setup(dir)
            .connect(&weights(), Expect::Count(1), Some(soon()))
            .unwrap();
        (sender, worker.join().unwrap())
    })
}

fn lost(receiver: &mut Receiver) {
    let error = receiver.recv().unwrap_err();
    assert!(matches!(error, Error::SenderClosed), "{error}");
}

#[test]
fn receiver_finds_the_next_trainer_automatically() {
    let dir = own_dir();
    let (mut first, mut receiver) = pair_by(setup(dir.path()), &weights());
    let info = first.init_info();
    send_to(&mut first, &weights(), &mut receiver);
    send_to(&mut first, &weights(), &mut receiver);
    let first_run = first.run();
    assert_eq!(
        (first_run.epoch, receiver.run(), receiver.version().unwrap()),
        (Epoch(1), first_run, Version(3))
    );
    drop(first);

    lost(&mut receiver);
    assert!(
        receiver.recv_timeout(BRIEF).unwrap().is_none(),
        "nobody is there yet"
    );
    assert_eq!(
        (receiver.run(), receiver.version().unwrap()),
        (first_run, Version(3)),
        "it still runs that"
    );

    let (mut second, snapshot) = restart(dir.path(), || receiver.recv().unwrap());
    assert_eq!(
        second.init_info(),
        info,
        "an init info holds for every trainer of the directory"
    );
    assert_eq!(second.run().epoch, Epoch(2));
    assert_ne!(second.run().id, first_run.id);
    assert_eq!(
        (snapshot.run(), snapshot.version()),
        (second.run(), Version(1))
    );
    assert_eq!(
        (receiver.run(), receiver.version().unwrap()),
        (second.run(), Version(1))
    );
    drop(snapshot);
    assert_eq!(
        send_to(&mut second, &weights(), &mut receiver).version(),
        Version(2)
    );
}

#[test]
fn new_run_is_claimed_after_its_first_load() {
    let dir = own_dir();
    let (mut first, mut receiver) = pair_by(setup(dir.path()), &weights());
    send_to(&mut first, &weights(), &mut receiver);
    let first_run = first.run();
    drop(first);
    lost(&mut receiver);

    let mut second = setup(dir.path())
        .connect(&weights(), Expect::Count(0), Some(soon()))
        .unwrap();
    let mut other = Tensors::new();
    receiver
        .loading(&mut other)
        .recv_timeout(soon())
        .unwrap_err();
    assert_eq!(
        (receiver.run(), receiver.version().unwrap()),
        (first_run, Version(2))
    );
    assert!(second.workers()[0].versions[0].is_none());

    let mut own = weights();
    let (report, loaded) = send(&mut second, &weights(), || {
        receiver.loading(&mut own).recv_timeout(soon())
    });
    assert!(report.unwrap().all_applied());
    assert_eq!(loaded.unwrap(), Some(Version(2)));
    assert_eq!(
        (receiver.run(), receiver.version().unwrap()),
        (second.run(), Version(2))
    );
}

#[test]
fn second_trainer_of_a_live_run_is_refused() {
    let dir = own_dir();
    let (mut first, mut receiver) = pair_by(setup(dir.path()), &weights());
    let error = setup(dir.path())
        .connect(&weights(), Expect::Count(0), Some(soon()))
        .unwrap_err();
    assert!(matches!(error, Error::AddressInUse { .. }), "{error}");
    assert_eq!(error.remedy(), Remedy::GiveUp);
    assert_eq!(
        send_to(&mut first, &weights(), &mut receiver).version(),
        Version(2)
    );
    // Another model has an address of its own.
    let other = SenderSetup::new("critic", &weights())
        .unwrap()
        .run_dir(dir.path())
        .unwrap();
    other
        .connect(&weights(), Expect::Count(0), Some(soon()))
        .unwrap();
}

#[test]
fn run_of_the_same_epoch_is_refused_and_a_later_found() {
    let dir = own_dir();
    put(&dir.path().join("epoch"), "6");
    let (first, mut receiver) = pair_by(setup(dir.path()), &weights());
    let knew = first.run();
    drop(first);
    lost(&mut receiver);
    // Somebody puts an old copy of the directory back.
    put(&dir.path().join("epoch"), "6");
    thread::scope(|scope| {
        let worker = scope.spawn(|| receiver.recv_timeout(soon()).unwrap_err());
        let refused = setup(dir.path())
            .connect(&weights(), Expect::Count(1), Some(soon()))
            .unwrap_err();
        let error = worker.join().unwrap();
        let Error::ConflictingRun { knew: one, got } = error else {
            panic!("{error}")
        };
        assert_eq!((one, got.epoch), (knew, Epoch(7)));
        assert_eq!(error.remedy(), Remedy::Retry);
        let said = refused.to_string();
        assert!(said.contains("higher epoch"), "{said}");
    });
    assert_eq!(
        (receiver.run(), receiver.version().unwrap()),
        (knew, Version(1))
    );
    let (later, snapshot) = restart(dir.path(), || receiver.recv_timeout(soon()).unwrap());
    assert_eq!(
        (later.run().epoch, snapshot.unwrap().run()),
        (Epoch(8), later.run())
    );
}

#[test]
fn a_trainer_of_an_older_epoch_is_fenced_off() {
    let dir = own_dir();
    put(&dir.path().join("epoch"), "6");
    let (first, mut receiver) = pair_by(setup(dir.path()), &weights());
    assert_eq!(first.run().epoch, Epoch(7));
    drop(first);
    lost(&mut receiver);
    // Somebody puts an old copy of the directory back.
    put(&dir.path().join("epoch"), "3");
    let old = setup(dir.path())
        .connect(&weights(), Expect::Count(0), Some(soon()))
        .unwrap();
    assert_eq!(old.run().epoch, Epoch(4));
    for error in [
        receiver.recv_timeout(soon()).unwrap_err(),
        receiver.recv().unwrap_err(),
    ] {
        assert!(matches!(error, Error::Denied { .. }), "{error}");
        assert_eq!(
            error.to_string(),
            "the sender refused this worker: this run has epoch 4, but the worker has seen \
             epoch 7: a newer trainer has taken over"
        );
    }
    assert_eq!(
        (receiver.run().epoch, receiver.version().unwrap()),
        (Epoch(7), Version(1))
    );
    assert!(old.workers().is_empty());
    drop(old);
    // The true successor is found all the same.
    put(&dir.path().join("epoch"), "7");
    let (new, snapshot) = restart(dir.path(), || receiver.recv().unwrap());
    assert_eq!((new.run().epoch, snapshot.run()), (Epoch(8), new.run()));
}

#[test]
fn a_successor_with_another_model_is_refused_by_name() {
    let dir = own_dir();
    let (first, mut receiver) = pair_by(setup(dir.path()), &weights());
    drop(first);
    lost(&mut receiver);
    let mut other = weights();
    other.insert("layer.bias", [8], [0.0_f32; 8]).unwrap();
    let successor = SenderSetup::new("policy", &other)
        .unwrap()
        .run_dir(dir.path())
        .unwrap();
    let _second = successor
        .connect(&other, Expect::Count(0), Some(soon()))
        .unwrap();
    let error = receiver.recv_timeout(soon()).unwrap_err();
    assert!(
        matches!(&error, Error::WrongModel { mismatch, .. } if mismatch.shapes[0].name == "layer.bias"),
        "{error}"
    );
    assert_eq!(receiver.version().unwrap(), Version(1));
    assert_eq!(receiver.latest().unwrap().unwrap().version(), Version(1));
}

#[test]
fn the_directory_is_for_this_user_alone() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("seven");
    setup(&dir)
        .connect(&weights(), Expect::Count(0), Some(soon()))
        .unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&dir), 0o700);
    assert_eq!(
        (mode(&dir.join("key")), mode(&dir.join("epoch"))),
        (0o600, 0o600)
    );
    assert_eq!(fs::read_to_string(dir.join("epoch")).unwrap(), "1\n");
    assert_eq!(fs::read(dir.join("key")).unwrap().len(), 32);
    let told = told_in(&dir);
    assert_eq!(mode(&told), 0o600);
    assert!(fs::read_to_string(&told).unwrap().ends_with("/policy\n"));
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 3);
}

/// The file in which the senders of a directory say where they are.
fn told_in(dir: &Path) -> PathBuf {
    let files = fs::read_dir(dir).unwrap().map(|file| file.unwrap().path());
    let is_it = |file: &PathBuf| {
        let name = file.file_name().unwrap().to_string_lossy();
        name.starts_with("address-")
    };
    files.into_iter().find(is_it).expect("a sender was there")
}

#[test]
fn trainers_have_own_addresses_that_workers_look_up() {
    let dir = own_dir();
    let info = setup(dir.path()).init_info();
    let mut before = Vec::new();
    for _ in 0..3 {
        let (_sender, mut receiver) = pair_by(setup(dir.path()), &weights());
        let told = fs::read_to_string(told_in(dir.path())).unwrap();
        assert!(!before.contains(&told), "{told}");
        before.push(told);
        assert!(receiver.latest().unwrap().is_some());
    }
    // What a trainer that was killed, or somebody else, left there is nobody's address.
    let told = told_in(dir.path());
    let name = told.file_name().unwrap().to_str().unwrap();
    let unfinished = format!(".{name}.weightsync-1-0-0123456789abcdef");
    put(&told.with_file_name(unfinished), "half an addr");
    for left in [
        &b""[..],
        b"\xff\xfe",
        b"weightsync/0/policy",
        b"/etc/passwd",
        &[b'w'; 1 << 20],
    ] {
        put(&told, left);
        let error = ReceiverSetup::new(info.clone(), 0)
            .connect(Some(BRIEF))
            .unwrap_err();
        let said = error.to_string();
        assert!(matches!(error, Error::NoSender { .. }), "{said}");
        assert!(said.contains(told.to_str().unwrap()), "{said}");
        pair_by(setup(dir.path()), &weights());
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    // Who could have written it could lead workers astray.
    fs::set_permissions(&told, fs::Permissions::from_mode(0o620)).unwrap();
    let error = ReceiverSetup::new(info, 0)
        .connect(Some(BRIEF))
        .unwrap_err();
    assert!(error.to_string().contains("chmod 600"), "{error}");
}

#[test]
fn of_trainers_that_come_at_once_one_serves() {
    let dir = own_dir();
    for _ in 0..10 {
        let connect = || setup(dir.path()).connect(&weights(), Expect::Count(0), Some(soon()));
        let senders: Vec<_> = thread::scope(|scope| {
            let all: Vec<_> = (0..4).map(|_| scope.spawn(connect)).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let (serving, refused): (Vec<_>, Vec<_>) = senders.into_iter().partition(Result::is_ok);
        assert_eq!((serving.len(), refused.len()), (1, 3));
        for error in refused.into_iter().filter_map(Result::err) {
            let is_taken = matches!(error, Error::AddressInUse { .. });
            assert!(is_taken, "{error}");
        }
    }
}

#[test]
fn a_counter_written_by_hand_is_counted_on_from() {
    let dir = own_dir();
    for (text, epoch) in [
        ("", 1),
        ("41", 42),
        ("  0099\n\n", 100),
        ("9", 10),
        ("99999\n", 100_000),
    ] {
        put(&dir.path().join("epoch"), text);
        for epoch in epoch..epoch + 3 {
            let sender = setup(dir.path())
                .connect(&weights(), Expect::Count(0), Some(soon()))
                .unwrap();
            assert_eq!(sender.run().epoch, Epoch(epoch), "{text:?}");
        }
    }
}

#[test]
fn corrupt_files_are_refused_in_words_and_left_alone() {
    let dir = own_dir();
    let good = setup(dir.path());
    let epoch = dir.path().join("epoch");
    let long = "7".repeat(1 << 20);
    for (text, words) in [
        (&b"seven"[..], "\"seven\" is not a number"),
        (b"-1", "is not a number"),
        (b"18446744073709551615", "no epoch is left"),
        (b"\xff\xfe", "UTF-8"),
        (long.as_bytes(), "is not a number"),
    ] {
        put(&epoch, text);
        let error = good
            .clone()
            .connect(&weights(), Expect::Count(0), Some(soon()))
            .unwrap_err();
        let said = error.to_string();
        assert!(
            matches!(&error, Error::File { path, .. } if *path == epoch),
            "{said}"
        );
        assert!(said.contains(words) && said.len() < 400, "{said}");
        assert_eq!(fs::read(&epoch).unwrap(), text);
    }
    let key = dir.path().join("key");
    for len in [31, 33, 5000] {
        fs::write(&key, vec![1; len]).unwrap();
        let error = SenderSetup::new("policy", &weights())
            .unwrap()
            .run_dir(dir.path())
            .unwrap_err();
        assert!(
            error.to_string().contains("it is not 32 bytes long"),
            "{error}"
        );
    }
    let error = SenderSetup::new("policy", &weights())
        .unwrap()
        .run_dir(&key)
        .unwrap_err();
    assert!(
        matches!(error, Error::File { .. }),
        "a file where the directory should be: {error}"
    );
}

/// What a run directory is refused with.
fn refused(dir: &Path) -> String {
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let error = setup
        .run_dir(dir)
        .and_then(|setup| setup.connect(&weights(), Expect::Count(0), Some(soon())))
        .unwrap_err();
    assert!(matches!(error, Error::File { .. }), "{error}");
    error.to_string()
}

#[test]
fn a_directory_or_file_open_to_others_is_not_trusted() {
    let dir = own_dir();
    setup(dir.path());
    let cases = [
        (dir.path().to_owned(), 0o770, 0o755, "chmod 700"),
        (dir.path().to_owned(), 0o703, 0o700, "chmod 700"),
        (dir.path().join("key"), 0o640, 0o600, "chmod 600"),
        (dir.path().join("key"), 0o604, 0o600, "chmod 600"),
        (dir.path().join("epoch"), 0o620, 0o644, "chmod 600"),
    ];
    for (path, open, closed, words) in cases {
        let set = |mode| fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        if !path.exists() {
            put(&path, "1");
        }
        set(open);
        let said = refused(dir.path());
        let words = format!("{words} {}", path.display());
        assert!(said.contains(&words), "{said}");
        set(closed);
        setup(dir.path())
            .connect(&weights(), Expect::Count(0), Some(soon()))
            .unwrap();
    }
    // The superuser alone can read what is another user's.
    if rustix::process::geteuid().is_root() {
        std::os::unix::fs::chown(dir.path(), Some(4711), None).unwrap();
        let said = refused(dir.path());
        assert!(said.contains("belongs to user 4711"), "{said}");
    }
}

#[test]
fn neither_links_nor_fifos_are_followed() {
    for name in ["key", "epoch"] {
        let dir = own_dir();
        let (other, path) = (dir.path().join("other"), dir.path().join(name));
        fs::write(&other, [1; 32]).unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        let said = refused(dir.path());
        assert!(said.contains("symbolic link"), "{said}");
        assert_eq!(fs::read(&other).unwrap(), [1; 32]);

        fs::remove_file(&path).unwrap();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        mknodat(CWD, &path, FileType::Fifo, mode, 0).unwrap();
        let said = refused(dir.path());
        assert!(said.contains("not a regular file"), "{said}");
    }
}

#[test]
fn held_lock_ends_the_wait_at_its_deadline() {
    let dir = own_dir();
    let setup = setup(dir.path());
    let epoch = dir.path().join("epoch");
    put(&epoch, "");
    let held = fs::File::open(&epoch).unwrap();
    held.lock().unwrap();
    let connect = |timeout| {
        let setup = setup.clone();
        setup.connect(&weights(), Expect::Count(0), Some(timeout))
    };
    let since = Instant::now();
    let error = connect(BRIEF).unwrap_err();
    assert!(since.elapsed() >= BRIEF);
    assert!(
        matches!(&error, Error::FileLocked { path, .. } if *path == epoch),
        "{error}"
    );
    assert_eq!(error.remedy(), Remedy::Retry);
    drop(held);
    connect(soon()).unwrap();
}
