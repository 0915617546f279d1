//! Certificates: requests of both directions go over HTTPS, and what is wrong is said at both ends.

use std::fmt;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use tracing::field::Field;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use weightsync_engine::{Error, Expect, InitInfo, Receiver, ReceiverSetup, Result, Sender};
use weightsync_link::access::Access;
use weightsync_link::tls::{CertificateRequest, CertificateRole, Tls, make};

use super::links::staged;
use super::{at_connect, parts, receive, setup, soon, weights};

const FLOATS: usize = 1 << 20;

/// How long a worker tries that will be refused.
const REFUSED: Duration = Duration::from_secs(2);

/// New certificates of a new authority, in place of those that are there.
fn make_in(folder: &Path) {
    for part in ["ca", "trainer", "relay", "worker"] {
        let _ = std::fs::remove_file(folder.join(format!("{part}.pem")));
    }
    let request = CertificateRequest {
        out: folder.to_owned(),
        hosts: vec!["trainer".into()],
        days: 2,
    };
    make(&request).expect("certificates");
}

fn pki() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    make_in(folder.path());
    folder
}

/// Over loopback too, which is where tests are.
fn access(folder: &Path, part: CertificateRole) -> Access {
    let mut access = Access::default();
    let tls = Tls::read(folder, part).expect("certificates");
    access.tls = Some(tls.on_loopback());
    access
}

fn sender(access: Access) -> Sender {
    let initial = weights(FLOATS, 1.0);
    let setup = setup(&initial, at_connect().access(access));
    let sender = setup.connect(&initial, Expect::Count(0), Some(soon()));
    sender.expect("a sender")
}

fn worker(info: InitInfo, access: Access, patience: Duration) -> Result<Receiver> {
    let scheme = at_connect().access(access);
    let setup = ReceiverSetup::new(info, 0).scheme(scheme);
    setup.connect(Some(patience))
}

/// What this process logs.
struct Lines;

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

impl Lines {
    /// Of a worker that tries this address again.
    fn of(address: &str) -> Vec<String> {
        let mut lines = LINES.lock().expect("the lines").clone();
        lines.retain(|line| line.contains(address) && line.contains("tries again"));
        lines
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = String::new();
        event.record(&mut |_: &Field, value: &dyn fmt::Debug| {
            text = format!("{value:?}");
        });
        LINES.lock().expect("the lines").push(text);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

#[test]
fn versions_go_over_https_with_certificates() {
    let folder = pki();
    let mut sender = sender(access(folder.path(), CertificateRole::Trainer));
    let info = sender.init_info();
    let worker = worker(info, access(folder.path(), CertificateRole::Worker), soon());
    let mut worker = worker.expect("it joins");
    assert_eq!(receive(&mut worker), 1.0);
    for value in [2.0, 3.0] {
        let report = sender
            .send_with(&weights(FLOATS, value), &staged())
            .expect("it is sent");
        assert!(report.all_reached(), "{report}");
        assert_eq!(receive(&mut worker), value);
    }
}

#[test]
fn a_plain_request_is_told_to_use_https() {
    let folder = pki();
    let sender = sender(access(folder.path(), CertificateRole::Trainer));
    let (address, _) = parts(&sender.init_info());
    let mut plain = TcpStream::connect(&address).expect("it listens");
    let request = "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n";
    plain.write_all(request.as_bytes()).expect("it is sent");
    let mut answer = String::new();
    plain.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 426 "), "{answer}");
    assert!(answer.contains("HTTPS"), "{answer}");
}

#[test]
fn a_wrong_certificate_is_said_in_one_line() {
    // The first of this process: no other test needs one.
    tracing::subscriber::set_global_default(Lines).expect("there is no other");
    let (folder, other) = (pki(), pki());
    let trainer = || access(folder.path(), CertificateRole::Trainer);
    let plain = Access::default;
    for (of_sender, of_worker, said) in [
        (trainer(), plain(), "over HTTPS alone"),
        (
            trainer(),
            access(other.path(), CertificateRole::Worker),
            "of another authority",
        ),
        (
            plain(),
            access(folder.path(), CertificateRole::Worker),
            "has it no certificate",
        ),
        // A worker poses as the trainer.
        (
            access(&folder.path().join("worker.pem"), CertificateRole::Trainer),
            access(folder.path(), CertificateRole::Worker),
            "of no trainer",
        ),
    ] {
        let sender = sender(of_sender);
        let (address, _) = parts(&sender.init_info());
        let error = worker(sender.init_info(), of_worker, REFUSED).unwrap_err();
        assert!(matches!(error, Error::Denied { .. }), "{error:?}");
        // It tries for as long as it is told to, which may be for ever, and so says why at once.
        let logged = Lines::of(&address);
        assert!(
            matches!(&logged[..], [line] if line.contains(said)),
            "{said}: {logged:?}"
        );
        let error = error.to_string();
        assert!(error.contains(said), "{said}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn new_certificates_are_read_without_a_restart() {
    let folder = pki();
    let mut sender = sender(access(folder.path(), CertificateRole::Trainer));
    let of_worker = access(folder.path(), CertificateRole::Worker);
    let first = worker(sender.init_info(), of_worker.clone(), soon());
    drop(first.expect("it joins"));
    make_in(folder.path());
    let second = worker(sender.init_info(), of_worker, soon());
    let mut second = second.expect("it joins");
    assert_eq!(receive(&mut second), 1.0);
    let report = sender
        .send_with(&weights(FLOATS, 2.0), &staged())
        .expect("it is sent");
    assert!(report.all_reached(), "{report}");
    assert_eq!(receive(&mut second), 2.0);
}
