//! A synchronizer with certificates.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::json;
use weightsync_link::access::{Access, Token};
use weightsync_link::tls::{CertificateRequest, CertificateRole, Tls, make};
use weightsync_serve::synchronizer::{
    Method, PartyOptions, Synchronizer, SynchronizerOptions, authorization,
};

use crate::hostile::{info, join, post};
use crate::http::get;
use crate::world::{Exploring, Training, long, style};

fn pki(host: &str) -> tempfile::TempDir {
    pki_for(host, 2)
}

/// With certificates that hold for so many days from now.
fn pki_for(host: &str, days: u32) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let request = CertificateRequest {
        out: folder.path().to_owned(),
        hosts: vec![host.into()],
        days,
    };
    make(&request).unwrap();
    folder
}

/// Over loopback too, which is where tests are.
fn access(folder: &Path, part: CertificateRole) -> Access {
    let mut access = Access::default();
    access.token = Some(Token::new("a token of at least 16 bytes").unwrap());
    access.tls = Some(Tls::read(folder, part).unwrap().on_loopback());
    access
}

fn served(folder: &Path) -> Synchronizer {
    let options = SynchronizerOptions::new().style(style("fully_async", 1));
    let options = options.access(access(folder, CertificateRole::Trainer));
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
    let trainers = joined(CertificateRole::Trainer);
    let options = PartyOptions::new("trainer");
    let mut training = Training::join(&trainers, options, "distributed", 10);
    let explorers = joined(CertificateRole::Worker);
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
    let sync =
        Synchronizer::connect(&at, Some(access(old.path(), CertificateRole::Worker))).unwrap();
    let mut explorer = sync
        .explorer(PartyOptions::new("explorer"), long())
        .unwrap();
    drop(served);
    let options = SynchronizerOptions::new().style(style("fully_async", 1));
    let options = options.access(access(new.path(), CertificateRole::Trainer));
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
    let mut plain = access(folder.path(), CertificateRole::Worker);
    plain.tls = None;
    let error = join(&here, plain);
    assert!(error.contains("over HTTPS alone"), "{error}");
    let error = join(&here, access(other.path(), CertificateRole::Worker));
    assert!(error.contains("of another authority"), "{error}");
    let there = served(elsewhere.path());
    let error = join(&there, access(elsewhere.path(), CertificateRole::Worker));
    assert!(error.contains("is not for 127.0.0.1"), "{error}");
    // No certificate is renewed because somebody waits for it.
    let expired = pki_for("127.0.0.1", 0);
    let late = served(expired.path());
    let tls = Tls::read(expired.path(), CertificateRole::Trainer).unwrap();
    // They hold to the end of the second in which they were made.
    while SystemTime::now() < tls.expires() + Duration::from_secs(1) {
        thread::yield_now();
    }
    let error = join(&late, access(expired.path(), CertificateRole::Worker));
    assert!(error.contains("has expired"), "{error}");
}

/// A client that trusts the authority, with the certificate of a part or, as a browser, with none.
fn client(
    folder: &Path,
    part: Option<CertificateRole>,
    at: SocketAddr,
) -> StreamOwned<ClientConnection, TcpStream> {
    let mut roots = RootCertStore::empty();
    let authority = CertificateDer::from_pem_file(folder.join("ca.pem")).unwrap();
    roots.add(authority).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider);
    let config = config.with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots);
    let config = match part {
        None => config.with_no_client_auth(),
        Some(part) => {
            let file = folder.join(format!("{part}.pem"));
            let own = CertificateDer::from_pem_file(&file).unwrap();
            let key = PrivateKeyDer::from_pem_file(&file).unwrap();
            config.with_client_auth_cert(vec![own], key).unwrap()
        }
    };
    let name = ServerName::from(at.ip());
    let socket = TcpStream::connect(at).unwrap();
    socket.set_read_timeout(long()).unwrap();
    StreamOwned::new(
        ClientConnection::new(Arc::new(config), name).unwrap(),
        socket,
    )
}

#[test]
fn certificate_decides_what_a_client_may_be() {
    let folder = pki("127.0.0.1");
    let options = SynchronizerOptions::new().method(Method::Direct);
    let options = options.access(access(folder.path(), CertificateRole::Trainer));
    let served = Synchronizer::serve(options, "127.0.0.1:0").unwrap();
    let at = served.address().unwrap();
    let token = authorization(&access(folder.path(), CertificateRole::Worker)).unwrap();
    let token = format!("Authorization: {token}\r\n");
    let ask =
        |part, path: &str, body| post(client(folder.path(), part, at), at, path, &token, &body);
    let from = info("distributed");
    let (trainer, explorer) = (
        join("trainer", "t", Some(&from)),
        join("explorer", "e", None),
    );
    // The token alone lets a client read.
    let mut browser = client(folder.path(), None, at);
    write!(
        browser,
        "GET /v1/status HTTP/1.1\r\nHost: {at}\r\n{token}Connection: close\r\n\r\n"
    )
    .unwrap();
    let mut status = String::new();
    let _ = browser.read_to_string(&mut status);
    assert!(status.starts_with("HTTP/1.1 200"), "{status}");
    for wants in [&trainer, &explorer] {
        let refused = ask(None, "/v1/parties", wants.clone());
        let reason = refused.reason();
        assert!(reason.contains("lets a client read"), "{reason}");
    }
    for part in [CertificateRole::Worker, CertificateRole::Relay] {
        let refused = ask(Some(part), "/v1/parties", trainer.clone());
        let reason = refused.reason();
        let got = format!("got a {part}'s");
        assert!(
            reason.contains(&got) && reason.contains("trainer.pem"),
            "{reason}"
        );
        let joined = ask(Some(part), "/v1/parties", explorer.clone());
        assert_eq!(joined.status, 200, "{}", joined.said);
    }
    let joined = ask(Some(CertificateRole::Trainer), "/v1/parties", trainer);
    // Nor does anybody else speak for the trainer.
    let leave = json!({"leave": {"reason": "I say so"}});
    for part in [
        None,
        Some(CertificateRole::Worker),
        Some(CertificateRole::Relay),
    ] {
        let refused = ask(part, &joined.party(), leave.clone());
        assert!(
            refused.reason().contains("certificate"),
            "{}",
            refused.reason()
        );
    }
    let need = ask(
        Some(CertificateRole::Trainer),
        &joined.party(),
        json!({"need": {"step": 1}}),
    );
    assert_eq!(need.status, 200, "{}", need.said);
    let joined = ask(Some(CertificateRole::Trainer), "/v1/parties", explorer);
    let refused = ask(None, &joined.party(), leave);
    assert!(
        refused.reason().contains("lets a client read"),
        "{}",
        refused.reason()
    );
}
