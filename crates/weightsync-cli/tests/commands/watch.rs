//! `weightsync watch` as a user meets it: the real binary over real stores.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, ChildStderr, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::io::ioctl_fionbio;
use rustix::process::{Pid, Signal, kill_process};
use weightsync_store::Store;

use crate::store::{Dir, numbered, text};

#[test]
fn watch_runs_for_each_version_and_keeps_two() {
    let dir = Dir::new();
    let mut writer = dir.writer("store");
    // {} in each kind of quotation, in a directory whose name is several words for a shell.
    let out = "it's $(touch x) \"out\"";
    let command = "printf '%s\\n' \"ran $WEIGHTSYNC_VERSION $WEIGHTSYNC_MODEL $WEIGHTSYNC_DIGEST\"; \
                   printf '%s\\n' {} \"{}\" '{}' \"$WEIGHTSYNC_CHECKPOINT\"; \
                   test $WEIGHTSYNC_VERSION != 2";
    let mut watch = dir.watch(&["store", "--out", out, "--exec", command]);
    for step in 1..=4_u64 {
        let saved = writer
            .save_weights("policy", &numbered(step as f32))
            .unwrap();
        let digest = Store::open(dir.at("store").to_str().unwrap()).unwrap();
        let digest = digest.versions().unwrap().versions.pop().unwrap().models[0].digest;
        assert_eq!(saved.versions[0].1.0, step);
        assert_eq!(watch.line(), format!("ran {step} policy {digest}"));
        let path = dir.at(out).join(format!("v{step}"));
        for _ in 0..4 {
            assert_eq!(watch.line(), path.display().to_string());
        }
        let said = watch.said();
        match step {
            2 => assert!(
                said.contains("policy v2: the command failed: exit status: 1"),
                "{said}"
            ),
            _ => assert_eq!(
                said,
                format!("weightsync: policy v{step}: the command succeeded")
            ),
        }
        let bytes = &dir.checkpoint(path.to_str().unwrap())["norm"].2;
        assert_eq!(bytes[..4], (step as f32).to_le_bytes());
        // A command that failed leaves the ones before it alone.
        let kept = match step {
            1 => vec!["v1"],
            2 => vec!["v1", "v2"],
            // It has been replaced.
            3 => vec!["v1", "v3"],
            _ => vec!["v3", "v4"],
        };
        assert_eq!(dir.names(out), kept);
    }
    watch.signal(Signal::TERM);
    assert_eq!(watch.end(), (Some(128 + 15), String::new()));
    assert_eq!(dir.names(out), ["v3", "v4"]);
    assert!(!dir.at("x").exists());
}

#[test]
fn watch_takes_the_newest_of_several() {
    let dir = Dir::new();
    let mut writer = dir.writer("store");
    let mut save = |value: f32| writer.save_weights("policy", &numbered(value)).unwrap();
    save(1.0);
    let fifo = dir.at("fifo");
    let made = Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let command = "echo ran $WEIGHTSYNC_VERSION; cat fifo";
    let mut watch = dir.watch(&["store", "--exec", command]);
    assert_eq!(watch.line(), "ran 1");
    save(2.0);
    save(3.0);
    fs::write(&fifo, "").unwrap();
    assert_eq!(watch.line(), "ran 3");
    watch.signal(Signal::INT);
    assert_eq!(watch.end().0, Some(130));
}

#[test]
fn watch_passes_over_damage_and_names_it() {
    let dir = Dir::new();
    let mut writer = dir.writer("store");
    writer.save_weights("policy", &numbered(1.0)).unwrap();
    writer.save_whole_next();
    writer.save_weights("policy", &numbered(2.0)).unwrap();
    let store = Store::open(dir.at("store").to_str().unwrap()).unwrap();
    let newest = store.versions().unwrap().versions.pop().unwrap();
    let weights = Path::new(&newest.models[0].directory).join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    let mut watch = dir.watch(&["store", "--exec", "echo ran $WEIGHTSYNC_VERSION"]);
    let said = watch.said();
    assert!(
        said.contains(&format!("{} is damaged", weights.display())),
        "{said}"
    );
    assert_eq!(watch.line(), "ran 1");
    // Named once, and not by the log as well.
    let pulled = dir.run(&["pull", "store", "--out", "out"]);
    let said = String::from_utf8(pulled.stderr).unwrap();
    assert_eq!(said.matches("is damaged").count(), 1, "{said}");
    writer.save_whole_next();
    writer.save_weights("policy", &numbered(3.0)).unwrap();
    assert_eq!(watch.line(), "ran 3");
    watch.signal(Signal::INT);
    assert_eq!(watch.end().0, Some(130));
}

#[test]
fn watch_once_ends_as_its_command_does() {
    let dir = Dir::new();
    let mut writer = dir.writer("store");
    for (command, code) in [("true", 0), ("exit 7", 1), ("kill -9 $$", 1)] {
        // Those that come meanwhile are left out, and no version is waited for in vain.
        let mut watch = dir.watch(&["store", "--once", "--exec", command]);
        writer.save_weights("policy", &numbered(1.0)).unwrap();
        assert_eq!(watch.end().0, Some(code), "{command}");
    }
    let command = "echo ran $WEIGHTSYNC_VERSION";
    let newest = writer.version(&"policy".parse().unwrap());
    let once = dir.run(&["watch", "store", "--once", "--exec", command]);
    assert_eq!(text(&once.stdout), format!("ran {}\n", newest.0));
    assert_eq!(dir.names("tmp"), [""; 0]);
}

#[test]
fn watch_new_only_leaves_out_what_is_there() {
    let dir = Dir::new();
    let mut writer = dir.writer("store");
    writer.save_weights("policy", &numbered(1.0)).unwrap();
    let words = [
        "store",
        "--new-only",
        "--once",
        "--exec",
        "echo ran $WEIGHTSYNC_VERSION",
    ];
    let mut watch = dir.watch(&words);
    // Whenever it has looked at the store first, one of these comes later.
    let mut version = 1;
    while watch.child.try_wait().unwrap().is_none() {
        version += 1;
        writer
            .save_weights("policy", &numbered(version as f32))
            .unwrap();
    }
    let line = watch.line();
    let ran: u64 = line.strip_prefix("ran ").unwrap().parse().unwrap();
    assert!((2..=version).contains(&ran), "{line}");
}

#[test]
fn watch_new_only_tries_an_unreadable_store_again() {
    let dir = Dir::new();
    let mut writer = dir.writer("store");
    writer.save_weights("policy", &numbered(1.0)).unwrap();
    let (head, kept) = (dir.at("store/head.json"), dir.at("store/kept"));
    fs::rename(&head, &kept).unwrap();
    symlink(&head, &head).unwrap();
    let command = "echo ran $WEIGHTSYNC_VERSION";
    let mut watch = dir.watch(&["store", "--new-only", "--once", "--exec", command]);
    let said = watch.said();
    assert!(said.contains("head.json"), "{said}");
    fs::rename(&kept, &head).unwrap();
    let mut version = 1;
    while watch.child.try_wait().unwrap().is_none() {
        version += 1;
        let weights = numbered(version as f32);
        writer.save_weights("policy", &weights).unwrap();
        std::thread::sleep(Duration::from_millis(20));
    }
    let line = watch.line();
    let ran: u64 = line.strip_prefix("ran ").unwrap().parse().unwrap();
    assert!((2..=version).contains(&ran), "{line}");
}

#[test]
fn watch_leaves_no_process_and_no_directory() {
    let dir = Dir::new();
    // Before there is a store at all.
    let mut watch = dir.watch(&["store", "--exec", "echo ran"]);
    while dir.names("tmp").is_empty() {
        assert!(watch.child.try_wait().unwrap().is_none());
    }
    watch.signal(Signal::INT);
    assert_eq!(watch.end().0, Some(130));
    assert_eq!(dir.names("tmp"), [""; 0]);

    // The shell ends by the signal; what it has started does not, and has to be killed.
    dir.writer("store")
        .save_weights("policy", &numbered(1.0))
        .unwrap();
    let command = "(trap '' TERM; echo started; sleep 1000) & wait";
    let mut watch = dir.watch(&["store", "--exec", command]);
    assert_eq!(watch.line(), "started");
    assert_eq!(dir.names("tmp").len(), 1);
    watch.signal(Signal::INT);
    // Its output ends when all that were started are gone.
    assert_eq!(watch.end(), (Some(130), String::new()));
    assert_eq!(dir.names("tmp"), [""; 0]);
}

#[test]
fn watch_kills_its_command_at_a_second_signal() {
    let dir = Dir::new();
    dir.writer("store")
        .save_weights("policy", &numbered(1.0))
        .unwrap();
    // It says when the first signal has come, and would run for as long as it is let.
    let command = "trap 'echo stays' TERM; echo started; while :; do sleep 0.01; done";
    let mut watch = dir.watch(&["store", "--exec", command]);
    assert_eq!(watch.line(), "started");
    watch.signal(Signal::INT);
    assert_eq!(watch.line(), "stays");
    watch.signal(Signal::TERM);
    assert_eq!(watch.end(), (Some(130), String::new()));
    // It says so if it kills one for its time.
    let mut said = String::new();
    watch.stderr.read_to_string(&mut said).unwrap();
    assert!(!said.contains("did not end"), "{said}");
    assert_eq!(dir.names("tmp"), [""; 0]);
}

#[test]
fn watch_ends_at_a_second_signal_in_any_call() {
    let dir = Dir::new();
    // What it says of this goes to standard error, which nobody reads and is full.
    fs::create_dir_all(dir.at("store/head.json")).unwrap();
    let mut command = dir.command(&["watch", "store", "--exec", "true"]);
    let (reader, mut full) = std::io::pipe().unwrap();
    command.stderr(full.try_clone().unwrap());
    ioctl_fionbio(&full, true).unwrap();
    while full.write(&[0; 1]).is_ok() {}
    ioctl_fionbio(&full, false).unwrap();
    let mut watch = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let pid = Pid::from_child(&watch);
    // In the call that writes it. Every thread is asked: one may wait for another.
    let writes = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero()));
        tasks.unwrap().flatten().any(|task| {
            let call = fs::read_to_string(task.path().join("syscall"));
            call.unwrap_or_default().starts_with("1 0x2 ")
        })
    };
    while !writes() {
        assert!(watch.try_wait().unwrap().is_none());
        std::thread::sleep(Duration::from_millis(1));
    }
    kill_process(pid, Signal::INT).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(watch.wait().unwrap().code(), Some(128 + 15));
    drop(reader);
}

#[test]
fn watch_ignores_the_signals_that_nohup_ignores() {
    let dir = Dir::new();
    dir.writer("store")
        .save_weights("policy", &numbered(1.0))
        .unwrap();
    let plain = dir.command(&["watch", "store", "--exec", "echo started; sleep 1000"]);
    let mut nohup = Command::new("nohup");
    nohup
        .arg(plain.get_program())
        .args(plain.get_args())
        .current_dir(dir.at(""))
        .env("TMPDIR", dir.at("tmp"));
    let mut watch = Watch::start(&mut nohup);
    assert_eq!(watch.line(), "started");
    watch.signal(Signal::HUP);
    watch.signal(Signal::INT);
    // The first one that counts.
    assert_eq!(watch.end().0, Some(130));
}

#[test]
fn watch_leaves_the_directory_of_another_alone() {
    let dir = Dir::new();
    dir.writer("store")
        .save_weights("policy", &numbered(1.0))
        .unwrap();
    let mut watch = dir.watch(&["store", "--out", "out", "--exec", "echo ran"]);
    assert_eq!(watch.line(), "ran");
    let words = ["watch", "store", "--out", "out", "--exec", "true"];
    dir.fails(&words, &["out", "another watch", "--out"]);
    watch.signal(Signal::INT);
    assert_eq!(watch.end().0, Some(130));
    assert_eq!(dir.names("out"), ["v1"]);
}

#[test]
fn watch_leaves_what_was_pulled_from_another_store() {
    let dir = Dir::new();
    for (store, first, versions) in [("one", 0, 3), ("two", 10, 6)] {
        let mut writer = dir.writer(store);
        for step in 1..=versions {
            writer
                .save_weights("policy", &numbered((first + step) as f32))
                .unwrap();
        }
    }
    // A user's own pull, and one by a watch of another store.
    for words in [
        &["pull", "one", "--version", "2", "--out", "out/v2"][..],
        &["watch", "one", "--once", "--exec", "true", "--out", "out"],
        &["pull", "two", "--version", "4", "--out", "out/v4"],
        &["pull", "two", "--version", "5", "--out", "out/v5"],
        &["watch", "two", "--once", "--exec", "true", "--out", "out"],
    ] {
        let output = dir.run(words);
        assert!(
            output.status.success(),
            "{words:?}: {}",
            text(&output.stderr)
        );
    }
    assert_eq!(dir.names("out"), ["v2", "v3", "v5", "v6"]);
    // A version of the same number takes no other's place.
    let mut writer = dir.writer("three");
    for step in 1..=3 {
        writer
            .save_weights("policy", &numbered(20.0 + step as f32))
            .unwrap();
    }
    let words = ["watch", "three", "--once", "--exec", "true", "--out", "out"];
    dir.fails(
        &words,
        &["out/v3 is not replaced", "policy v3 of the store", "/one"],
    );
    let bytes = &dir.checkpoint("out/v3")["norm"].2;
    assert_eq!(bytes[..4], 3.0_f32.to_le_bytes());
}

impl Dir {
    fn watch(&self, words: &[&str]) -> Watch {
        Watch::start(&mut self.command(&[&["watch"], words].concat()))
    }
}

/// A running `watch`.
struct Watch {
    child: Child,
    stdout: BufReader<ChildStdout>,
    stderr: BufReader<ChildStderr>,
}

impl Watch {
    fn start(command: &mut Command) -> Self {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        Self {
            stdout: BufReader::new(child.stdout.take().unwrap()),
            stderr: BufReader::new(child.stderr.take().unwrap()),
            child,
        }
    }

    /// The next line that the commands wrote.
    fn line(&mut self) -> String {
        read_line(&mut self.stdout)
    }

    /// The next line that `watch` itself wrote.
    fn said(&mut self) -> String {
        read_line(&mut self.stderr)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Its exit code, and what else it and the commands wrote to standard output.
    fn end(&mut self) -> (Option<i32>, String) {
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
        (self.child.wait().unwrap().code(), rest)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_line(from: &mut impl BufRead) -> String {
    let mut line = String::new();
    from.read_line(&mut line).unwrap();
    line.trim_end().into()
}
