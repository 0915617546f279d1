//! A sender that may have few files open.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, setrlimit};
use weightsync_engine::{Error, Expect};
use weightsync_serve::Rpc;

use super::{parts, setup, soon, weights};

/// With which variable a copy of this program is that sender.
const FEW_FILES: &str = "WEIGHTSYNC_TEST_FEW_FILES";

/// As that copy: a sender that may have 64 files open, and prints what a wait for a worker
/// comes to, once its input has ended.
#[test]
fn as_a_sender_with_few_files() {
    if std::env::var_os(FEW_FILES).is_none() {
        return;
    }
    let few = Some(64);
    let limit = Rlimit {
        current: few,
        maximum: few,
    };
    setrlimit(Resource::Nofile, limit).expect("a lower limit");
    let weights = weights(8, 1.0);
    let setup = setup(&weights, Rpc::default());
    let (address, _) = parts(&setup.init_info());
    let mut sender = setup.open(&weights, Some(soon())).expect("a sender");
    println!("\nat {address}");
    let read = std::io::stdin().read_line(&mut String::new());
    read.expect("it ends");
    let since = Instant::now();
    let error = loop {
        let second = Some(Duration::from_secs(1));
        let waited = sender.wait_for(&Expect::Count(1), second);
        let error = waited.expect_err("nobody comes");
        if !matches!(error, Error::MissingWorkers { .. }) || since.elapsed() > soon() {
            break error;
        }
    };
    println!("says {error}");
}

#[test]
fn sender_out_of_files_does_not_blame_its_workers() {
    let mut sender = Command::new(std::env::current_exe().expect("a program"))
        .args([
            "--exact",
            "--nocapture",
            "files::as_a_sender_with_few_files",
        ])
        .env(FEW_FILES, "")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let lines = BufReader::new(sender.stdout.take().expect("a pipe")).lines();
    let mut lines = lines.map(|line| line.expect("text"));
    let mut after = |word: &str| {
        let found = lines.find_map(|line| Some(line.strip_prefix(word)?.to_owned()));
        found.unwrap_or_else(|| panic!("it does not say {word:?}"))
    };
    let address = after("at ");
    drop(sender.stdin.take());
    let told = AtomicBool::new(false);
    let error = thread::scope(|scope| {
        // The sender closes connections that say nothing. So new ones come all the while: its wait
        // may begin later than the first are closed.
        scope.spawn(|| {
            while !told.load(Ordering::Relaxed) {
                let clients: Vec<_> = (0..100).map(|_| TcpStream::connect(&address)).collect();
                if clients.iter().all(Result::is_err) {
                    break; // the sender has ended
                }
                thread::sleep(Duration::from_millis(100));
            }
        });
        let error = after("says ");
        told.store(true, Ordering::Relaxed);
        error
    });
    assert!(error.contains("limit of open files (64)"), "{error}");
    assert!(sender.wait().expect("it ends").success());
}
