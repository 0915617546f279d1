use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;

use super::session::{Handshake, IncomingBytes, TlsSession};
use super::*;

/// A folder with certificates for these hosts.
fn pki(hosts: &[&str], days: u32) -> tempfile::TempDir {
    made_before(0, hosts, days)
}

/// The same, made so many days ago.
fn made_before(ago: i64, hosts: &[&str], days: u32) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let request = CertificateRequest {
        out: folder.path().join("pki"),
        hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
        days,
    };
    let begin = time::OffsetDateTime::now_utc() - time::Duration::days(ago);
    make::make_at(&request, begin).unwrap();
    folder
}

fn read(folder: &tempfile::TempDir, part: CertificateRole) -> Tls {
    Tls::read(folder.path().join("pki"), part).unwrap()
}

/// One end, and what it has to read.
struct End {
    session: TlsSession,
    incoming: IncomingBytes,
    /// Its handshake has failed: it hears nothing more.
    failed: bool,
}

impl End {
    fn new(session: io::Result<TlsSession>) -> Self {
        Self {
            session: session.unwrap(),
            incoming: IncomingBytes::default(),
            failed: false,
        }
    }

    fn hears(&mut self, bytes: &[u8]) {
        if self.failed || bytes.is_empty() {
            return;
        }
        let room = self.incoming.room(bytes.len());
        room[..bytes.len()].copy_from_slice(bytes);
        self.incoming.note_received(bytes.len());
    }

    fn shake(&mut self) -> Result<Handshake, rustls::Error> {
        let shaken = self.session.shake(&mut self.incoming);
        self.failed |= shaken.is_err();
        shaken
    }

    fn says(&mut self) -> Vec<u8> {
        std::mem::take(self.session.outgoing())
    }

    fn reads(&mut self, most: usize) -> Option<Vec<u8>> {
        let mut buffer = vec![0; most];
        let count = self
            .session
            .read(&mut buffer, &mut self.incoming)
            .unwrap()?;
        buffer.truncate(count);
        Some(buffer)
    }
}

/// What each end says of a handshake: how it went at the client, then at the server.
fn shaken(client: &mut End, server: &mut End) -> [Result<(), String>; 2] {
    let mut ends = [Ok(()), Ok(())];
    for _ in 0..4 {
        let steps = [client.shake(), {
            let said = client.says();
            server.hears(&said);
            server.shake()
        }];
        client.hears(&server.says());
        for (end, step) in ends.iter_mut().zip(steps) {
            if let (Err(error), Ok(())) = (step, &end) {
                *end = Err(explain(&error));
            }
        }
    }
    ends
}

fn between(client: &Tls, peer: TlsPeer<'_>, server: &Tls) -> (End, End, [Result<(), String>; 2]) {
    between_who(client, peer, server, ClientAuth::Certificate)
}

fn between_who(
    client: &Tls,
    peer: TlsPeer<'_>,
    server: &Tls,
    asks: ClientAuth,
) -> (End, End, [Result<(), String>; 2]) {
    let (mut client, mut server) = (End::new(client.dial(peer)), End::new(server.accept(asks)));
    let ends = shaken(&mut client, &mut server);
    (client, server, ends)
}

#[test]
fn certificates_of_one_authority_make_a_link() {
    let folder = pki(&["trainer", "10.0.0.7"], 30);
    let trainer = read(&folder, CertificateRole::Trainer);
    for (part, host) in [
        (CertificateRole::Worker, "trainer"),
        (CertificateRole::Relay, "10.0.0.7"),
    ] {
        let (mut client, mut server, ends) =
            between(&read(&folder, part), TlsPeer::Trainer(host), &trainer);
        assert_eq!(ends, [Ok(()), Ok(())]);
        let bytes: Vec<u8> = (0..100_000_u32).map(|at| (at / 7) as u8).collect();
        for _ in 0..3 {
            client.session.write(&bytes).unwrap();
            let sent = client.says();
            assert!(!sent.windows(64).any(|part| bytes.starts_with(part)));
            server.hears(&sent);
            let mut came = Vec::new();
            while let Some(part) = server.reads(3000) {
                came.extend(part);
            }
            assert!(came == bytes);
            std::mem::swap(&mut client, &mut server);
        }
        client.session.close();
        server.hears(&client.says());
        assert_eq!(server.reads(10), Some(Vec::new()));
    }
}

#[test]
fn worker_is_called_by_the_trainer_alone() {
    let folder = pki(&["trainer"], 30);
    let worker = read(&folder, CertificateRole::Worker);
    let at = TlsPeer::Worker(Ipv4Addr::new(192, 0, 2, 9).into());
    for part in CertificateRole::ALL {
        let client = read(&folder, part);
        let (mut client, _, [shaken, server]) =
            between_who(&client, at, &worker, ClientAuth::Trainer);
        assert_eq!(shaken, Ok(()));
        if part == CertificateRole::Trainer {
            assert_eq!(server, Ok(()));
            continue;
        }
        let said = server.unwrap_err();
        assert!(said.contains("of no trainer"), "{part}: {said}");
        // The end that connects hears of it with the first answer.
        let read = client.session.read(&mut [0; 9], &mut client.incoming);
        let said = explain(&read.unwrap_err());
        assert!(said.contains("another host or part"), "{part}: {said}");
    }
}

#[test]
fn part_of_the_other_end_is_known() {
    let folder = pki(&["trainer"], 30);
    let trainer = read(&folder, CertificateRole::Trainer);
    for part in CertificateRole::ALL {
        for asks in [ClientAuth::Certificate, ClientAuth::IfAny] {
            let peer = TlsPeer::Trainer("trainer");
            let (client, server, ends) = between_who(&read(&folder, part), peer, &trainer, asks);
            assert_eq!(ends, [Ok(()), Ok(())]);
            assert_eq!(server.session.part(), Some(part));
            assert_eq!(client.session.part(), Some(CertificateRole::Trainer));
        }
    }
    // One of another authority is not taken for none.
    let stranger = read(&pki(&["trainer"], 30), CertificateRole::Trainer);
    let (mut client, mut server) = (
        End::new(stranger.dial(TlsPeer::Worker(Ipv4Addr::LOCALHOST.into()))),
        End::new(trainer.accept(ClientAuth::IfAny)),
    );
    assert!(shaken(&mut client, &mut server).iter().all(Result::is_err));
}

#[test]
fn address_is_checked_however_it_is_written() {
    let folder = pki(&["trainer", "10.0.0.7", "2001:db8::7"], 30);
    let (worker, trainer) = (
        read(&folder, CertificateRole::Worker),
        read(&folder, CertificateRole::Trainer),
    );
    let works = |name: &str| {
        let peer = TlsPeer::Trainer(crate::address::host_of(name));
        let ends = between(&worker, peer, &trainer).2;
        ends.iter().all(Result::is_ok)
    };
    for name in [
        "trainer:7070",
        "10.0.0.7:7070",
        "[2001:db8::7]:7070",
        "[2001:DB8:0::7]:1",
    ] {
        assert!(works(name), "{name}");
    }
    for name in ["10.0.0.8:7070", "[2001:db8::8]:7070", "trainer2:7070"] {
        assert!(!works(name), "{name}");
    }
}

#[test]
fn told_end_is_trusted_by_its_part_and_not_by_its_address() {
    let folder = pki(&["trainer"], 30);
    let address = Ipv4Addr::new(192, 0, 2, 9).into();
    let relay = read(&folder, CertificateRole::Relay);
    for part in CertificateRole::ALL {
        for (peer, expected) in [
            (TlsPeer::Sender(address), CertificateRole::Trainer),
            (TlsPeer::Relay(address), CertificateRole::Relay),
        ] {
            let (_, _, [at_client, _]) = between(&relay, peer, &read(&folder, part));
            assert_eq!(at_client.is_ok(), part == expected, "{part} at {peer:?}");
        }
    }
}

#[test]
fn two_authorities_are_trusted_while_one_replaces_the_other() {
    let (old, new) = (pki(&["trainer"], 30), pki(&["trainer"], 30));
    let at = |of: &tempfile::TempDir, name: &str| of.path().join("pki").join(name);
    let (old_worker, new_worker) = (
        read(&old, CertificateRole::Worker),
        read(&new, CertificateRole::Worker),
    );
    let trainer = read(&old, CertificateRole::Trainer);
    let both = |of: &tempfile::TempDir, other: &tempfile::TempDir, name: &str| {
        let [own, more] = [at(of, name), at(other, "ca.pem")].map(std::fs::read_to_string);
        std::fs::write(at(of, name), own.unwrap() + &more.unwrap()).unwrap();
    };
    let works = |worker: &Tls| between(worker, TlsPeer::Trainer("trainer"), &trainer).2;
    assert!(works(&new_worker).iter().all(Result::is_err));
    both(&old, &new, "trainer.pem");
    both(&new, &old, "worker.pem");
    for worker in [&old_worker, &new_worker] {
        assert_eq!(works(worker), [Ok(()), Ok(())]);
    }
}

#[test]
fn certificate_without_hosts_is_explained() {
    let expected = ServerName::try_from("trainer").unwrap().to_owned();
    let presented = vec![r#"DnsName("weightsync-trainer")"#.into()];
    let error = rustls::CertificateError::NotValidForNameContext {
        expected,
        presented,
    };
    let said = explain(&rustls::Error::InvalidCertificate(error));
    assert!(
        said.contains("for no host") && said.contains("--hosts trainer"),
        "{said}"
    );
}

#[test]
fn wrong_certificates_are_explained_at_both_ends() {
    let (ours, theirs) = (pki(&["trainer"], 30), pki(&["trainer"], 30));
    let old = made_before(2, &["trainer"], 1);
    let trainer = read(&ours, CertificateRole::Trainer);
    let worker = read(&ours, CertificateRole::Worker);
    let cases = [
        (
            &read(&theirs, CertificateRole::Worker),
            "trainer",
            &trainer,
            "another authority",
            "another authority",
        ),
        (
            &worker,
            "elsewhere",
            &trainer,
            "not for elsewhere, but for trainer:",
            "another host or part",
        ),
        (
            &worker,
            "trainer",
            &read(&ours, CertificateRole::Relay),
            "is of no trainer",
            "another host or part",
        ),
    ];
    for (client, host, server, at_client, at_server) in cases {
        let (_, _, ends) = between(client, TlsPeer::Trainer(host), server);
        for (end, words) in ends.into_iter().zip([at_client, at_server]) {
            let said = end.unwrap_err();
            assert!(said.contains(words), "{said}");
        }
    }
    // Both are of one authority, and too old.
    let (_, _, [at_client, at_server]) = between(
        &read(&old, CertificateRole::Worker),
        TlsPeer::Trainer("trainer"),
        &read(&old, CertificateRole::Trainer),
    );
    assert!(
        at_client
            .unwrap_err()
            .contains("other end's certificate has expired")
    );
    assert!(
        at_server
            .unwrap_err()
            .contains("this end's certificate has expired")
    );
}

#[test]
fn plain_peer_is_explained() {
    let folder = pki(&["trainer"], 30);
    let mut client =
        End::new(read(&folder, CertificateRole::Worker).dial(TlsPeer::Trainer("trainer")));
    assert_eq!(client.shake().unwrap(), Handshake::Reads);
    client.hears(b"wsLINK\r\n and more that is no TLS at all");
    let said = explain(&client.shake().unwrap_err());
    assert!(said.contains("does not speak TLS"), "{said}");
}

#[test]
fn damaged_bytes_end_the_link() {
    let folder = pki(&["trainer"], 30);
    let (worker, trainer) = (
        read(&folder, CertificateRole::Worker),
        read(&folder, CertificateRole::Trainer),
    );
    let (mut client, mut server, _) = between(&worker, TlsPeer::Trainer("trainer"), &trainer);
    client.session.write(b"weights").unwrap();
    let mut sent = client.says();
    *sent.last_mut().unwrap() ^= 1;
    server.hears(&sent);
    let mut buffer = [0; 10];
    server
        .session
        .read(&mut buffer, &mut server.incoming)
        .unwrap_err();
}

#[test]
fn new_files_are_used_without_a_restart() {
    let folder = pki(&["trainer"], 30);
    let (worker, trainer) = (
        read(&folder, CertificateRole::Worker),
        read(&folder, CertificateRole::Trainer),
    );
    let works = || between(&worker, TlsPeer::Trainer("trainer"), &trainer).2;
    assert_eq!(works(), [Ok(()), Ok(())]);
    let new = pki(&["trainer"], 60);
    for file in ["trainer.pem", "worker.pem"] {
        let [from, to] = [&new, &folder].map(|of| of.path().join("pki").join(file));
        std::fs::rename(from, to).unwrap();
    }
    assert_eq!(works(), [Ok(()), Ok(())]);
    let later = SystemTime::now() + Duration::from_secs(40 * 24 * 3600);
    assert!(trainer.expires() > later);
    // Files that cannot be used change nothing.
    std::fs::write(folder.path().join("pki/trainer.pem"), "half").unwrap();
    assert_eq!(works(), [Ok(()), Ok(())]);
    // A file that first comes open to others is read once its mode is right.
    let newer = pki(&["trainer"], 90);
    let [from, to] = [&newer, &folder].map(|of| of.path().join("pki/trainer.pem"));
    std::fs::set_permissions(&from, PermissionsExt::from_mode(0o604)).unwrap();
    std::fs::rename(from, &to).unwrap();
    let before = trainer.expires();
    drop(trainer.accept(ClientAuth::Certificate));
    assert_eq!(trainer.expires(), before);
    std::fs::set_permissions(&to, PermissionsExt::from_mode(0o600)).unwrap();
    drop(trainer.accept(ClientAuth::Certificate));
    assert!(trainer.expires() > before);
}

#[test]
fn files_that_are_no_certificates_are_named() {
    let folder = pki(&["trainer"], 30);
    let at = |name: &str| folder.path().join("pki").join(name);
    let said = |path: &Path| {
        Tls::read(path, CertificateRole::Relay)
            .unwrap_err()
            .to_string()
    };
    assert!(said(folder.path()).contains("expected relay.pem, or tls.crt"));
    assert!(said(&at("nothing.pem")).contains("nothing.pem failed"));
    assert!(
        said(&at("ca.pem")).contains("private key"),
        "{}",
        said(&at("ca.pem"))
    );
    std::fs::set_permissions(at("relay.pem"), PermissionsExt::from_mode(0o604)).unwrap();
    assert!(said(&at("relay.pem")).contains("mode 604"));
    let modes = ["trainer.pem", "worker.pem"].map(|name| {
        let mode = std::fs::metadata(at(name)).unwrap().permissions().mode();
        mode & 0o777
    });
    assert_eq!(modes, [0o600; 2]);
    let again = make(&CertificateRequest {
        out: folder.path().join("pki"),
        hosts: vec!["trainer".into()],
        days: 1,
    });
    assert!(again.unwrap_err().to_string().contains("is there already"));
    // A part's name in other letters is that name.
    for hosts in [&[][..], &["not a name"], &["Weightsync-Worker."]] {
        let out = folder.path().join("other");
        let request = CertificateRequest {
            out: out.clone(),
            hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
            days: 1,
        };
        make(&request).unwrap_err();
        assert!(!out.exists());
    }
}

#[test]
fn secret_of_kubernetes_is_read() {
    let folder = pki(&["trainer"], 30);
    let secret = folder.path().join("secret");
    std::fs::create_dir(&secret).unwrap();
    let text = std::fs::read_to_string(folder.path().join("pki/relay.pem")).unwrap();
    let key = text.find("-----BEGIN PRIVATE").unwrap();
    let authority = text.rfind("-----BEGIN CERTIFICATE").unwrap();
    for (name, part) in [
        ("tls.crt", &text[..key]),
        ("tls.key", &text[key..authority]),
        ("ca.crt", &text[authority..]),
    ] {
        std::fs::write(secret.join(name), part).unwrap();
        let mode = PermissionsExt::from_mode(0o640);
        std::fs::set_permissions(secret.join(name), mode).unwrap();
    }
    let relay = Tls::read(&secret, CertificateRole::Relay).unwrap();
    let trainer = read(&folder, CertificateRole::Trainer);
    let (_, _, ends) = between(&relay, TlsPeer::Trainer("trainer"), &trainer);
    assert_eq!(ends, [Ok(()), Ok(())]);
}

/// An authority of a cluster may make certificates of servers alone.
#[test]
fn certificate_of_a_server_alone_is_explained() {
    let refused = rustls::AlertDescription::UnsupportedCertificate;
    let said = explain(&rustls::Error::AlertReceived(refused));
    assert!(said.contains("`server auth` and `client auth`"), "{said}");
}
