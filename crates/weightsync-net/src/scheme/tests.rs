use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, setrlimit};
use weightsync_conformance::scale::longest;
use weightsync_engine::{Expect, SenderSetup, Tensors};
use weightsync_link::access::TOKEN_FILE_VARIABLE;
use weightsync_link::address::host_and_port;

use super::*;
use crate::Relay;

fn place(scheme: &Distributed) -> Result<Endpoint> {
    scheme.allocate_endpoint(&["policy".parse()?], None)
}

#[test]
fn agents_are_told_all_but_where_the_sender_is_reached() {
    let text = "every=4,deltas=always,verify=blake3,connections=3";
    let reach = "listen=10.0.0.1:7000,advertise=trainer:7000,tls=/certs,insecure-plaintext";
    let scheme = Distributed::told_by_sender(&format!("{reach},{text}")).unwrap();
    assert_eq!(scheme.told_to_agents(), text);
    let told = Distributed::told_by_sender(text).unwrap();
    assert_eq!((told.connections, told.verify), (3, Verify::Blake3));
    assert_eq!(Distributed::default().told_to_agents(), "");
    Distributed::told_by_sender("verify=blake3,of-tomorrow=1").unwrap_err();
}

#[test]
fn every_setting_comes_back_from_its_text() {
    let cases = [
        ("arity", "7"),
        ("connections", "3"),
        ("deltas", "always"),
        ("deltas", "never"),
        ("every", "4"),
        ("insecure-plaintext", ""),
        ("listen", "127.0.0.1:0"),
        ("own-copy", ""),
        ("pull", ""),
        ("share", "none"),
        ("share", "relay"),
        ("verify", "blake3"),
    ];
    for (key, value) in cases {
        let settings = BTreeMap::from([(key.to_owned(), value.to_owned())]);
        let scheme = Distributed::parse(&settings).unwrap();
        assert_eq!(BTreeMap::from_iter(scheme.settings()), settings);
    }
    // Defaults do not appear in the text.
    for (key, value) in [("deltas", "auto"), ("share", "all"), ("arity", "1")] {
        let settings = BTreeMap::from([(key.to_owned(), value.to_owned())]);
        assert_eq!(Distributed::parse(&settings).unwrap().settings(), []);
    }
    let settings = BTreeMap::from([("deltas".to_owned(), "sometimes".to_owned())]);
    let error = Distributed::parse(&settings).unwrap_err().to_string();
    assert!(error.contains("auto, always or never"), "{error}");
}

#[test]
fn listen_and_reach_addresses_are_host_and_port() {
    for key in ["listen", "advertise"] {
        for wrong in [
            "127.0.0.1",
            "myhost",
            ":7070",
            "host:",
            "host:70000",
            "::1:80",
            "",
        ] {
            let settings = BTreeMap::from([(key.to_owned(), wrong.to_owned())]);
            let parsed = Distributed::parse(&settings);
            let built = place(&match key {
                "listen" => Distributed::new().listen(wrong),
                _ => Distributed::new().advertise(wrong),
            });
            for error in [parsed.unwrap_err(), built.unwrap_err()] {
                let Error::BadSetting {
                    setting, expected, ..
                } = &error
                else {
                    panic!("{key}={wrong}: {error}");
                };
                assert_eq!(setting, key);
                assert!(expected.starts_with("HOST:PORT"), "{expected}");
            }
        }
    }
}

#[test]
fn an_advertised_port_of_0_is_the_one_it_listens_at() {
    let scheme = Distributed::new().advertise("10.0.0.1:0");
    let at = place(&scheme).unwrap();
    let (host, port) = host_and_port("advertise", at.address()).unwrap();
    assert_eq!(host, "10.0.0.1");
    let bound = scheme.allocated()[at.address()].address;
    assert_eq!(port, bound.port());
    let said = place(&Distributed::new().advertise("[::1]:9")).unwrap();
    assert_eq!(said.address(), "[::1]:9");
}
#[test]
fn a_port_file_that_is_none_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let models = ["policy".parse().unwrap()];
    let place = || Distributed::new().allocate_endpoint(&models, Some(dir.path()));
    place().unwrap();
    let files = std::fs::read_dir(dir.path()).unwrap().flatten();
    let mut files = files.map(|entry| entry.path());
    let is_ports = |path: &std::path::PathBuf| path.to_string_lossy().contains("port");
    let file = files.find(is_ports).unwrap();
    std::fs::write(file, "seven").unwrap();
    let error = place().unwrap_err().to_string();
    assert!(error.contains("is no port"), "{error}");
}

#[test]
fn second_trainer_finds_the_first_at_another_port() {
    let dir = tempfile::tempdir().unwrap();
    let mut weights = Tensors::new();
    weights.insert("bias", [1], vec![0.5_f32]).unwrap();
    let connect = || {
        let setup = SenderSetup::new("policy", &weights).unwrap();
        let scheme = Distributed::new().advertise("192.0.2.1:9999");
        let setup = setup.scheme(scheme).unwrap().run_dir(dir.path()).unwrap();
        let at = setup.init_info().endpoint().address().to_owned();
        let waits = Duration::from_secs(20);
        (at, setup.connect(&weights, Expect::Count(0), Some(waits)))
    };
    let (at, first) = connect();
    let first = first.unwrap();
    let (same, second) = connect();
    assert_eq!((&*at, &same), ("192.0.2.1:9999", &at));
    let error = second.expect_err("there is one already");
    let is_in_use = matches!(error, Error::AddressInUse { .. });
    assert!(is_in_use, "{error}");
    first.shutdown();
    connect().1.unwrap();
}

/// As a copy of this program: a sender that may have 64 files open, and prints what a wait for
/// a worker comes to, once somebody has written a line.
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
    setrlimit(Resource::Nofile, limit).unwrap();
    let mut weights = Tensors::new();
    weights.insert("w", [2], vec![1.0_f32; 2]).unwrap();
    let setup = SenderSetup::new("policy", &weights).unwrap();
    let setup = setup.scheme(Distributed::new()).unwrap();
    let address = setup.init_info().endpoint().address().to_owned();
    let mut sender = setup.open(&weights, Some(longest())).unwrap();
    println!("\nat {address}");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let since = Instant::now();
    let error = loop {
        let second = Some(Duration::from_secs(1));
        let error = sender.wait_for(&Expect::Count(1), second).unwrap_err();
        if !matches!(error, Error::MissingWorkers { .. }) || since.elapsed() > longest() {
            break error;
        }
    };
    println!("says {error}");
}

/// With which variable a copy of this program is that sender.
const FEW_FILES: &str = "WEIGHTSYNC_TEST_FEW_FILES";

#[test]
fn sender_out_of_files_does_not_blame_its_workers() {
    let mut sender = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "--nocapture",
            "scheme::tests::as_a_sender_with_few_files",
        ])
        .env(FEW_FILES, "")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(sender.stdout.take().unwrap()).lines();
    let mut lines = lines.map(std::result::Result::unwrap);
    let mut after = |word: &str| {
        let found = lines.find_map(|line| Some(line.strip_prefix(word)?.to_owned()));
        found.unwrap_or_else(|| panic!("it does not say {word:?}"))
    };
    let address = after("at ");
    let clients: Vec<_> = (0..100)
        .map(|_| TcpStream::connect(&address).unwrap())
        .collect();
    drop(sender.stdin.take());
    let error = after("says ");
    assert!(error.contains("limit of open files (64)"), "{error}");
    drop(clients);
    assert!(sender.wait().unwrap().success());
}

/// Where a copy of this program is told that it is one.
const IS_A_COPY: &str = "WEIGHTSYNC_TEST_COPY";

#[test]
fn token_of_the_environment_is_read_only_when_needed() {
    if std::env::var_os(IS_A_COPY).is_none() {
        let name = "scheme::tests::token_of_the_environment_is_read_only_when_needed";
        let copy = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env(IS_A_COPY, "")
            .env(TOKEN_FILE_VARIABLE, "/nowhere/token")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&copy.stdout);
        assert!(said.contains("1 passed"), "{copy:?}");
        return;
    }
    let token = Token::new("sixteen bytes or more").unwrap();
    let trainer = Distributed::new();
    assert!(trainer.access().is_err());
    assert!(trainer.access_to_dial().is_ok());
    let access = trainer.token(token.clone()).access().unwrap();
    assert_eq!(access.token.as_ref(), Some(&token));
    let relay = |address: &str| Relay::of(&info_of(address)).access();
    assert!(relay("127.0.0.1:9").is_ok());
    assert!(relay("192.0.2.1:9").is_err());
    let relay = Relay::with_token("192.0.2.1:9", &token).access();
    assert_eq!(relay.unwrap().token, Some(token));
}

/// The init info of a trainer that is found there.
fn info_of(address: &str) -> InitInfo {
    let mut weights = Tensors::new();
    weights.insert("bias", [1], vec![0.5_f32]).unwrap();
    let info = SenderSetup::new("policy", &weights).unwrap().init_info();
    let mut info = serde_json::to_value(info).unwrap();
    info["at"]["address"] = address.into();
    serde_json::from_value(info).unwrap()
}
