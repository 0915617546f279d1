//! Disks that are full or read-only: small file systems that a process mounts for itself alone.

use std::fs;
use std::path::Path;
use std::process::Command;

use weightsync_conformance::scale::longest;
use weightsync_engine::worker::{Event, Spawn};
use weightsync_store::{SaveOptions, Store, StoreError, Which, Writer};

use crate::Role;
use crate::weights::{MODEL, of, weights};

type Failure = Box<dyn std::error::Error>;

/// Elements of a version of 1 MiB.
const ELEMENTS: usize = 128 << 10;

/// Runs this binary where it may mount what nobody else sees.
fn isolate(role: &Role) {
    let program = std::env::current_exe().expect("this program");
    let spawn = Spawn::program("unshare").args(["-Urm".as_ref(), program.as_os_str()]);
    let workers = spawn
        .init_value(role)
        .expect("plain data")
        .start()
        .expect("unshare");
    match workers.recv_any(Some(longest())) {
        Some((_, Event::Exited(exit))) => {
            assert!(exit.is_success(), "{exit}: {}", exit.stderr_text())
        }
        other => panic!("{other:?}"),
    }
}

fn mount(options: &[&str], at: &Path) -> Result<(), Failure> {
    let done = Command::new("mount").args(options).arg(at).status()?;
    match done.success() {
        true => Ok(()),
        false => Err(format!("mount {options:?}: {done}").into()),
    }
}

pub fn full_disk_refuses_one_save() {
    isolate(&Role::Full);
}

pub fn read_only_store_is_read() {
    isolate(&Role::ReadOnly);
}

/// Every file and directory, but for leases.
fn everything(dir: &Path) -> Result<Vec<String>, Failure> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            all.extend(everything(&path)?);
        }
        all.push(path.display().to_string());
    }
    all.sort();
    Ok(all)
}

pub fn fill() -> Result<(), Failure> {
    let dir = tempfile::tempdir()?;
    mount(&["-t", "tmpfs", "-o", "size=5m", "tmpfs"], dir.path())?;
    let store = Store::open(dir.path().join("store").to_str().ok_or("a plain path")?)?;
    let mut options = SaveOptions::default();
    options.deltas = false;
    let mut writer = Writer::claim(&store, options)?;
    // What describes a small model is there already.
    writer.save_weights(MODEL, &weights(0, 16))?;
    let mut saved = 0;
    // Each kind of end: in the weights, and, with a file that leaves little room, anywhere else.
    for number in 1.. {
        let before = everything(&dir.path().join("store"))?;
        match writer.save_weights(MODEL, &weights(number, ELEMENTS)) {
            Ok(_) => saved = number,
            Err(error) => {
                assert!(matches!(error, StoreError::File { .. }), "{error}");
                assert!(error.to_string().contains("No space left"), "{error}");
                assert_eq!(everything(&dir.path().join("store"))?, before);
                break;
            }
        }
    }
    assert!(
        (2..5).contains(&saved),
        "{saved} versions of 1 MiB in 5 MiB"
    );
    let filler = dir.path().join("filler");
    let _ = fs::write(&filler, vec![1; 5 << 20]);
    let newest = of(&store.load(&Which::Newest)?)?;
    assert_eq!(newest.1, saved, "a full disk keeps nobody from reading");
    for left in (0..200).step_by(4) {
        // A little more room for each try: it ends in another file.
        fs::File::options()
            .write(true)
            .open(&filler)?
            .set_len((1 << 20) - (left << 12))?;
        let before = everything(&dir.path().join("store"))?;
        if let Err(error) = writer.save_weights(MODEL, &weights(1000 + left, 16)) {
            assert!(error.to_string().contains("No space left"), "{error}");
            assert_eq!(everything(&dir.path().join("store"))?, before);
        }
        store.load(&Which::Newest)?;
    }
    fs::remove_file(&filler)?;
    let mut options = SaveOptions::default();
    options.keep = "1".parse()?;
    writer.save_weights(MODEL, &weights(7, 16))?;
    let mut writer = Writer::claim(&store, options)?;
    writer.save_weights(MODEL, &weights(9, 16))?;
    assert_eq!(of(&store.load(&Which::Newest)?)?.1, 9);
    assert_eq!(store.versions()?.versions.len(), 1);
    Ok(())
}

pub fn only_read() -> Result<(), Failure> {
    let dir = tempfile::tempdir()?;
    mount(&["-t", "tmpfs", "tmpfs"], dir.path())?;
    let path = dir.path().join("store");
    let path = path.to_str().ok_or("a plain path")?;
    let store = Store::open(path)?;
    let mut writer = Writer::claim(&store, SaveOptions::default())?;
    for number in 1..4 {
        writer.save_weights(MODEL, &weights(number, ELEMENTS))?;
    }
    mount(&["-o", "remount,ro"], dir.path())?;
    let before = everything(dir.path())?;
    assert_eq!(of(&store.load(&Which::Newest)?)?.1, 3);
    assert_eq!(store.versions()?.versions.len(), 3);
    let errors = [
        Writer::claim(&store, SaveOptions::default()).map(drop),
        writer.save_weights(MODEL, &weights(4, ELEMENTS)).map(drop),
    ];
    for error in errors.map(|done| done.expect_err("nothing can be written")) {
        let text = error.to_string();
        assert!(text.contains(path) && text.contains("Read-only"), "{text}");
    }
    assert_eq!(everything(dir.path())?, before);
    Ok(())
}
