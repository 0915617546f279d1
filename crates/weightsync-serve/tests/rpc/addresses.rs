//! Where a sender listens, and who may.

use std::time::{Duration, Instant};

use weightsync_engine::transport::{FirstWeights, Scheme};
use weightsync_engine::{AnyScheme, Error, Expect, ModelId, ReceiverSetup, SenderSetup};
use weightsync_link::access::{Access, Token};
use weightsync_serve::Rpc;

use super::{BRIEF, at_connect, parts, receive, setup, soon, weights, worker};

#[test]
fn the_scheme_is_its_text() {
    for text in [
        "rpc",
        "rpc:initial=connect",
        "rpc:listen=localhost:7007",
        "rpc:initial=connect,listen=127.0.0.1:7007,advertise=10.0.0.1:0",
    ] {
        assert_eq!(text.parse::<AnyScheme>().expect(text).to_string(), text);
    }
    let same = "rpc:initial=send,listen=127.0.0.1:0".parse::<AnyScheme>();
    assert_eq!(same.expect("a scheme"), AnyScheme::new(Rpc::default()));
    for (text, hint) in [
        ("rpc:initial=now", "connect or send"),
        ("rpc:initial", "connect or send"),
        ("rpc:listen=7007", "HOST:PORT"),
        ("rpc:listen=:7007", "HOST:PORT"),
        ("rpc:listen=a:b", "HOST:PORT"),
        ("rpc:listen=a:70000", "HOST:PORT"),
        ("rpc:advertise=", "HOST:PORT"),
        ("rpc:fast", "initial=connect or send"),
        ("rpc:initial=send,initial=connect", "once"),
    ] {
        let error = text.parse::<AnyScheme>().expect_err(text).to_string();
        assert!(error.contains(hint), "{text}: {error}");
    }
    assert_eq!(Rpc::default().first_weights(), FirstWeights::AtFirstSend);
    assert_eq!(at_connect().first_weights(), FirstWeights::AtConnect);
}

#[test]
fn off_loopback_takes_a_token_and_the_permission() {
    let initial = weights(8, 1.0);
    let token = Token::new("a token of at least 16 bytes").expect("it is long enough");
    let mut access = Access::default();
    let open = |access: &Access| {
        let scheme = Rpc::default().listen("0.0.0.0:0").advertise("127.0.0.1:0");
        let setup = SenderSetup::new("policy", &initial).expect("a model");
        // Refused before the first call that communicates anything.
        let setup = setup.scheme(scheme.access(access.clone()))?;
        let sender = setup.connect(&initial, Expect::Count(0), Some(soon()));
        Ok::<_, Error>(sender.expect("a place that may be used"))
    };
    let error = open(&access).unwrap_err().to_string();
    assert!(error.contains("without a token"), "{error}");
    access.insecure_plaintext = true;
    assert!(open(&access).unwrap_err().to_string().contains("token"));
    access.insecure_plaintext = false;
    access.token = Some(token.clone());
    let error = open(&access).unwrap_err().to_string();
    assert!(error.contains("not encrypted"), "{error}");
    access.insecure_plaintext = true;
    let sender = open(&access).expect("both are there");
    // The init info's secret comes from the token.
    assert_eq!(parts(&sender.init_info()).1, token.secret());

    // A worker is not told where it may connect by an init info alone.
    let mut info = serde_json::to_value(sender.init_info()).expect("JSON");
    info["at"]["address"] = "192.0.2.1:9".into();
    let info = serde_json::from_value(info).expect("an init info");
    let error = worker(info, 0).unwrap_err().to_string();
    assert!(error.contains("not encrypted"), "{error}");
    // Nor are names looked up for it.
    for address in ["example.com:80", "nowhere", "127.0.0.1", "127.0.0.1:1 at x"] {
        let mut info = serde_json::to_value(sender.init_info()).expect("JSON");
        info["at"]["address"] = address.into();
        let info = serde_json::from_value(info).expect("an init info");
        let error = worker(info, 0).unwrap_err();
        assert!(matches!(error, Error::BadInitInfo(_)), "{address}: {error}");
    }
}

#[test]
fn worker_at_any_address_gets_the_public_one() {
    let models = [ModelId::new("policy").expect("a name")];
    let mut access = Access::default();
    access.token = Some(Token::new("a token of at least 16 bytes").expect("it is long enough"));
    access.insecure_plaintext = true;
    let scheme = Rpc::default().listen("0.0.0.0:0").access(access);
    match scheme.allocate_endpoint(&models, None) {
        Ok(at) => {
            let (found, listens) = at.address().split_once(" at ").expect("both");
            let found: std::net::SocketAddr = found.parse().expect("an address");
            let listens: std::net::SocketAddr = listens.parse().expect("an address");
            assert!(!found.ip().is_unspecified(), "{found}");
            assert!(listens.ip().is_unspecified(), "{listens}");
            assert_eq!(found.port(), listens.port());
        }
        // This machine has no way to others.
        Err(error) => assert!(error.to_string().contains("advertise="), "{error}"),
    }
}

#[test]
fn wrong_secret_fails_at_once() {
    let (initial, expect) = (weights(8, 1.0), Expect::Count(0));
    let sender = setup(&initial, at_connect());
    let sender = sender
        .connect(&initial, expect, Some(soon()))
        .expect("a sender");
    let mut info = serde_json::to_value(sender.init_info()).expect("JSON");
    let join = |info: serde_json::Value, soon: Duration| {
        let info = serde_json::from_value(info).expect("an init info");
        let begun = Instant::now();
        let joining = ReceiverSetup::new(info, 0);
        (joining.connect(Some(soon)).unwrap_err(), begun.elapsed())
    };
    info["at"]["secret"] = vec![7; 16].into();
    let (error, took) = join(info.clone(), 4 * soon());
    assert!(error.to_string().contains("secret"), "{error}");
    assert!(took < soon(), "{took:?}");
    // Another sender may follow where one restarts: it is asked again, more and more seldom.
    info["at"]["restarts"] = true.into();
    let (error, took) = join(info, 4 * BRIEF);
    assert!(error.to_string().contains("secret"), "{error}");
    assert!(took >= 4 * BRIEF, "{took:?}");
}

#[test]
fn a_run_directory_keeps_the_port() {
    let dir = tempfile::tempdir().expect("a directory");
    let run = dir.path().join("run");
    let initial = weights(8, 1.0);
    let prepare = |value: f32| {
        let setup = setup(&weights(8, value), at_connect());
        setup.run_dir(&run).expect("it can be used")
    };
    let first = prepare(1.0);
    let info = first.init_info();
    let sender = first
        .connect(&initial, Expect::Count(0), Some(soon()))
        .expect("a sender");
    let mut receiver = worker(info.clone(), 0).expect("it joins");
    assert_eq!(receive(&mut receiver), 1.0);

    // A live sender is left alone.
    let second = prepare(2.0);
    assert_eq!(second.init_info(), info);
    let error = second
        .connect(&initial, Expect::Count(0), Some(soon()))
        .unwrap_err();
    assert!(matches!(error, Error::AddressInUse { .. }), "{error}");
    let port = std::fs::read_dir(&run).expect("it is there");
    let port = port.flatten().map(|entry| entry.file_name());
    let port: Vec<_> = port
        .filter(|name| name.to_string_lossy().starts_with("rpc-port-"))
        .collect();
    assert_eq!(port.len(), 1, "{port:?}");

    sender.shutdown();
    assert!(matches!(
        receiver.recv_timeout(soon()),
        Err(Error::SenderClosed)
    ));
    let next = prepare(2.0)
        .connect(&weights(8, 2.0), Expect::Count(0), Some(soon()))
        .expect("its place is free");
    assert_eq!(receive(&mut receiver), 2.0, "found automatically");
    assert_eq!(next.init_info(), info);

    // Another set of models has another place there.
    let other = SenderSetup::new("critic", &initial).expect("a model");
    let other = other.scheme(at_connect()).expect("a place");
    let other = other.run_dir(&run).expect("it can be used");
    assert_ne!(parts(&other.init_info()).0, parts(&info).0);

    // A file with other content is rejected.
    let file = run.join(&port[0]);
    std::fs::write(&file, "seven").expect("it is ours");
    let error = setup(&initial, at_connect()).run_dir(&run);
    let Err(error) = error else {
        panic!("it is no port");
    };
    let error = error.to_string();
    assert!(error.contains("is no port"), "{error}");
}

#[test]
fn a_place_is_final_before_anybody_listens() {
    let models = [ModelId::new("policy").expect("a name")];
    let scheme = Rpc::default();
    let places: Vec<_> = (0..50)
        .map(|_| scheme.allocate_endpoint(&models, None).expect("a place"))
        .collect();
    for (index, at) in places.iter().enumerate() {
        let others = places[..index].iter();
        assert!(others.clone().all(|other| other.secret() != at.secret()));
        assert!(!at.restarts());
        // Nothing listens there.
        assert!(std::net::TcpStream::connect(at.address()).is_err());
    }
    let told = Rpc::default().listen("127.0.0.1:0").advertise("10.1.2.3:0");
    let at = told.allocate_endpoint(&models, None).expect("a place");
    let (found, listens) = at.address().split_once(" at ").expect("both");
    let port = listens.strip_prefix("127.0.0.1:").expect("its own");
    assert_eq!(found, format!("10.1.2.3:{port}"));
}
