//! Tokens from everywhere, and which addresses may be used.

use std::fs::{self, Permissions};

use super::*;

const TEXT: &str = "0123456789abcdef";

fn written(text: &[u8], mode: u32) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("token");
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
    (dir, path)
}

#[test]
fn a_token_is_the_same_from_everywhere() {
    let token = Token::new(TEXT).unwrap();
    let (_dir, path) = written(format!("\n {TEXT}\t\r\n").as_bytes(), 0o600);
    assert_eq!(Token::from_file(&path).unwrap(), token);
    let from = |token: Option<&str>, file: Option<&PathBuf>| {
        Token::from_variables(token.map(Into::into), file.map(Into::into))
    };
    assert_eq!(from(Some(TEXT), None).unwrap(), Some(token.clone()));
    assert_eq!(from(None, Some(&path)).unwrap(), Some(token));
    assert_eq!(from(None, None).unwrap(), None);
    let both = from(Some(TEXT), Some(&path));
    assert!(matches!(both, Err(AccessError::TwoTokens)), "{both:?}");
}

#[test]
fn a_token_of_no_use_is_refused_with_how_to_make_one() {
    let longest = "x".repeat(Token::MAX_BYTES);
    assert!(Token::new(&longest).is_ok());
    let wide = [&b" ".repeat(100)[..], longest.as_bytes()].concat();
    let (_dir, path) = written(&wide, 0o400);
    assert!(Token::from_file(path).is_ok());

    let too_long = format!("{longest}x");
    let (_dir, endless) = written(&b"x".repeat(100_000), 0o600);
    for refused in [
        Token::new(""),
        Token::new(" \n "),
        Token::new(&TEXT[1..]),
        Token::new(too_long),
        Token::from_file(endless),
        Token::from_variables(Some("".into()), None).map(Option::unwrap),
    ] {
        let error = refused.unwrap_err();
        assert!(matches!(error, AccessError::TokenLength { .. }));
        let words = error.to_string();
        assert!(
            words.contains("head -c 32 /dev/urandom | base64 > FILE"),
            "{words}"
        );
    }
}

#[test]
fn token_file_open_to_others_is_refused_with_a_chmod() {
    for mode in [0o640, 0o604, 0o620, 0o601, 0o777] {
        let (_dir, path) = written(TEXT.as_bytes(), mode);
        let error = Token::from_file(&path).unwrap_err();
        let AccessError::TokenFileOpen { mode: got, .. } = error else {
            panic!("{error}")
        };
        assert_eq!(got, mode);
        let words = error.to_string();
        assert!(
            words.contains(&format!("`chmod 600 {}`", path.display())),
            "{words}"
        );
    }
}

#[test]
fn token_path_must_be_a_regular_file() {
    let dir = tempfile::tempdir().unwrap();
    let mut paths: Vec<PathBuf> = vec![
        "/dev/null".into(),
        dir.path().into(),
        dir.path().join("absent"),
    ];
    // Opening one waits for a writer, unless asked not to.
    #[cfg(not(target_vendor = "apple"))]
    {
        use rustix::fs::{CWD, FileType, Mode, mknodat};

        let fifo = dir.path().join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        paths.push(fifo);
    }
    for path in paths {
        let error = Token::from_file(&path).unwrap_err();
        assert!(matches!(error, AccessError::TokenFile { .. }), "{error}");
    }
}

#[test]
fn secrets_and_keys_are_what_they_were() {
    // Both are part of the protocol: ends of different builds must come to the same.
    let token = Token::new(TEXT).unwrap();
    assert_eq!(
        u128::from_be_bytes(token.secret()),
        0x1c1396fee054fbddee972adcdea4754f
    );
    let key = Key::new(&token.secret());
    let proof = key.proof(&[b"client", b"hello"]);
    assert_eq!(
        blake3::Hash::from(*proof.bytes()).to_hex().as_str(),
        "7d1dbfa871031d04d67691d43d42be14c47db7d3c49329e82fe0012b9fd769e8"
    );
    assert!(proof == key.proof(&[b"clienthello"]));
    assert!(proof == Proof::from_bytes(*proof.bytes()));
    let other = Key::new(&Token::new("another token, as long").unwrap().secret());
    assert!(proof != other.proof(&[b"client", b"hello"]));
}

#[test]
fn debug_output_hides_secrets() {
    let access = Access {
        token: Some(Token::new(TEXT).unwrap()),
        insecure_plaintext: false,
        ..Access::default()
    };
    let key = Key::new(b"0123456789abcdef");
    let shown = format!("{access:?} {key:?}");
    assert!(!shown.contains("0123") && !shown.contains("48"), "{shown}");
}

#[test]
fn loopback_is_always_fine_and_the_rest_wants_both() {
    let with = |token: bool, insecure_plaintext| Access {
        token: token.then(|| Token::new(TEXT).unwrap()),
        insecure_plaintext,
        ..Access::default()
    };
    let all = [(false, false), (false, true), (true, false), (true, true)];
    for addr in [
        "127.0.0.1:0",
        "127.8.8.8:7007",
        "[::1]:1",
        "[::ffff:127.0.0.1]:1",
    ] {
        let addr = addr.parse().unwrap();
        for (token, plaintext) in all {
            let access = with(token, plaintext);
            access.may_listen(addr).unwrap();
            access.may_dial(addr).unwrap();
            access.may_dial_with_secret(addr).unwrap();
        }
    }
    for addr in [
        "0.0.0.0:0",
        "[::]:7007",
        "10.0.0.1:1",
        "[fe80::1]:1",
        "[::ffff:10.0.0.1]:1",
        "[::ffff:0.0.0.0]:1",
        // The deprecated form of an IPv4 address is not loopback: nothing routes it there.
        "[::127.0.0.1]:1",
    ] {
        let addr = addr.parse().unwrap();
        for (token, plaintext) in all {
            let access = with(token, plaintext);
            for refused in [access.may_listen(addr), access.may_dial(addr)] {
                match (token, plaintext) {
                    (true, true) => refused.unwrap(),
                    (true, false) => {
                        assert!(matches!(refused, Err(AccessError::Plaintext { .. })));
                    }
                    (false, _) => {
                        assert!(matches!(refused, Err(AccessError::NoToken { .. })));
                    }
                }
            }
            assert_eq!(access.may_dial_with_secret(addr).is_ok(), plaintext);
        }
    }
}

#[test]
fn errors_say_how_to_go_on() {
    let addr = "192.0.2.7:7007".parse().unwrap();
    let mut access = Access::default();
    let words = access.may_listen(addr).unwrap_err().to_string();
    for part in [
        "listen at 192.0.2.7:7007",
        "urandom",
        "WEIGHTSYNC_TOKEN_FILE",
        "--insecure-plaintext",
    ] {
        assert!(words.contains(part), "{part} in {words}");
    }
    access.insecure_plaintext = true;
    let words = access.may_dial(addr).unwrap_err().to_string();
    assert!(words.contains("connect to") && !words.contains("--insecure-plaintext"));
    access.insecure_plaintext = false;
    access.token = Some(Token::new(TEXT).unwrap());
    let words = access.may_dial(addr).unwrap_err().to_string();
    for part in [
        "--insecure-plaintext",
        "WEIGHTSYNC_INSECURE_PLAINTEXT=1",
        "read and change the weights",
    ] {
        assert!(words.contains(part), "{part} in {words}");
    }
}

#[test]
fn permission_for_weights_allows_no_code() {
    let addr = "192.0.2.7:7007".parse().unwrap();
    let access = |token: bool| Access {
        token: token.then(|| Token::new(TEXT).unwrap()),
        insecure_plaintext: true,
        ..Access::default()
    };
    access(true).may_listen(addr).unwrap();
    for token in [true, false] {
        let code = access(token).carrying_code(false).unwrap();
        let words = code.may_listen(addr).unwrap_err().to_string();
        assert!(words.contains("--insecure-plaintext-code"), "{words}");
        assert!(!token || words.contains("run programs"), "{words}");
        assert!(code.may_dial_with_secret(addr).is_err());
        code.may_listen("127.0.0.1:1".parse().unwrap()).unwrap();
        let code = access(token).carrying_code(true).unwrap();
        assert!(code.may_dial_with_secret(addr).is_ok());
        assert_eq!(code.may_listen(addr).is_ok(), token);
    }
}

#[test]
fn paths_of_certificates_have_no_comma() {
    // A worker would read what follows as another setting.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a,b");
    let access = Access::default().with_tls(CertificateRole::Trainer, Some(&path));
    let words = access.unwrap_err().to_string();
    assert!(words.contains("a,b has a comma"), "{words}");
}

#[test]
fn plain_links_are_allowed_by_a_clear_word_only() {
    for (value, expected) in [
        (None, Some(false)),
        (Some(""), Some(false)),
        (Some("0"), Some(false)),
        (Some("1"), Some(true)),
        (Some("true"), None),
        (Some("no"), None),
    ] {
        let got = is_set(PLAINTEXT_VARIABLE, value.map(Into::into));
        assert_eq!(got.ok(), expected, "{value:?}");
    }
}
