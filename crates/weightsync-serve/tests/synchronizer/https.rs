//! A synchronizer with certificates.

use std::path::Path;
use std::time::Duration;

use weightsync_net::tls::{Part, Request, Tls, make};
use weightsync_net::{Access, Token};
use weightsync_serve::synchronizer::{PartyOptions, Synchronizer, SynchronizerOptions};

use crate::http::get;
use crate::world::{Exploring, Training, long, style};

fn pki(host: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let request = Request {
        out: folder.path().to_owned(),
        hosts: vec![host.into()],
        days: 2,
    };
    make(&request).unwrap();
    folder
}

/// Over loopback too, which is where tests are.
fn access(folder: &Path, part: Part) -> Access {
    let mut access = Access::default();
    access.token = Some(Token::new("a token of at least 16 bytes").unwrap());
    access.tls = Some(Tls::read(folder, part).unwrap().on_loopback());
    access
}

fn served(folder: &Path) -> Synchronizer {
    let options = SynchronizerOptions::new().style(style("fully_async", 1));
    let options = options.access(access(folder, Part::Trainer));
    Synchronizer::serve(options, "127.0.0.1:0").unwrap()
}

#[test]
fn parties_meet_over_https() {
    let folder = pki("127.0.0.1");
    let served = served(folder.path());
    let at = served.address().unwrap();
    let joined = |part| {
        let access = access(folder.path(), part);
        Synchronizer::connect(&at.to_string(), Some(access)).unwrap()
    };
    let trainers = joined(Part::Trainer);
    let options = PartyOptions::new("trainer");
    let mut training = Training::join(&trainers, options, "distributed", 10);
    let explorers = joined(Part::Worker);
    let mut exploring = Exploring::join(&explorers, PartyOptions::new("explorer"));
    training.step = 11;
    assert!(training.sync(long()).is_synced());
    assert!(exploring.sync(long()).is_synced());
    // Without TLS nothing is answered, with the token or without it.
    let plain = get(at, "/", "");
    assert_eq!(plain.status, 426);
    assert!(plain.text().contains("HTTPS"), "{}", plain.text());
}

/// The synchronizer's host has got them, and the party's has not.
#[test]
fn a_party_waits_for_new_certificates() {
    let (old, new) = (pki("127.0.0.1"), pki("127.0.0.1"));
    let mut served = served(old.path());
    let at = served.address().unwrap().to_string();
    let sync = Synchronizer::connect(&at, Some(access(old.path(), Part::Worker))).unwrap();
    let mut explorer = sync
        .explorer(PartyOptions::new("explorer"), long())
        .unwrap();
    drop(served);
    let options = SynchronizerOptions::new().style(style("fully_async", 1));
    let options = options.access(access(new.path(), Part::Trainer));
    served = Synchronizer::serve(options, &at).unwrap();
    let soon = Some(Duration::from_secs(1));
    let answer = explorer.wait_need_sync(None, soon).unwrap();
    assert!(!answer.connected, "{answer:?}");
    for file in ["worker.pem", "ca.pem"] {
        std::fs::copy(new.path().join(file), old.path().join(file)).unwrap();
    }
    while !explorer.wait_need_sync(None, soon).unwrap().connected {}
    drop(served);
}

#[test]
fn a_party_names_what_is_wrong_with_its_certificates() {
    let (folder, other, elsewhere) = (pki("127.0.0.1"), pki("127.0.0.1"), pki("trainer"));
    let join = |served: &Synchronizer, access: Access| {
        let at = served.address().unwrap().to_string();
        let sync = Synchronizer::connect(&at, Some(access)).unwrap();
        let joined = sync.explorer(PartyOptions::new("explorer"), long());
        joined.unwrap_err().to_string()
    };
    let here = served(folder.path());
    let mut plain = access(folder.path(), Part::Worker);
    plain.tls = None;
    let error = join(&here, plain);
    assert!(error.contains("over HTTPS alone"), "{error}");
    let error = join(&here, access(other.path(), Part::Worker));
    assert!(error.contains("of another authority"), "{error}");
    let there = served(elsewhere.path());
    let error = join(&there, access(elsewhere.path(), Part::Worker));
    assert!(error.contains("is not for 127.0.0.1"), "{error}");
}
