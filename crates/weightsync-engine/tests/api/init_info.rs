//! What a worker needs to join: a plain value that crosses any boundary.

use proptest::prelude::*;
use serde_json::{Value, json};
use weightsync_engine::{Expect, InitInfo, ReceiverSetup, SenderSetup};

use crate::{join, soon, weights};

fn info() -> InitInfo {
    SenderSetup::new("policy", &weights()).unwrap().init_info()
}

#[test]
fn init_info_crosses_text_and_bytes_and_joins_often() {
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let info = setup.init_info();
    let text = serde_json::to_string(&info).unwrap();
    let bytes = postcard::to_stdvec(&info).unwrap();
    let sender = setup
        .connect(&weights(), Expect::Count(0), Some(soon()))
        .unwrap();
    assert_eq!(sender.init_info(), info);
    let from_text: InitInfo = serde_json::from_str(&text).unwrap();
    let from_bytes: InitInfo = postcard::from_bytes(&bytes).unwrap();
    assert_eq!(
        (&from_text, &from_bytes, from_text.models()[0].as_str()),
        (&info, &info, "policy")
    );
    let _workers = [(0, &from_text), (1, &from_bytes), (2, &from_text)]
        .map(|(worker, info)| join(ReceiverSetup::new(info.clone(), worker)).unwrap());
    assert_eq!(sender.workers().len(), 3);
}

#[test]
fn two_setups_have_nothing_in_common() {
    assert_ne!(info(), info());
}

#[test]
fn changed_init_info_is_refused_with_the_reason() {
    let good = serde_json::to_value(info()).unwrap();
    let changed = |field: &str, value: Value| {
        let mut changed = good.clone();
        match field.split_once('.') {
            Some((outer, inner)) => changed[outer][inner] = value,
            None => changed[field] = value,
        }
        serde_json::from_value::<InitInfo>(changed).map_err(|error| error.to_string())
    };
    assert!(
        changed("at.restarts", json!(true)).is_ok(),
        "the way it is changed works"
    );
    let long = "x".repeat(1025);
    for (field, value, words) in [
        ("format", json!(2), "format 2, this version reads 3"),
        ("at.address", json!(""), "has 0 bytes"),
        ("at.address", json!(long), "has 1025 bytes"),
        ("at.address", json!(7), "expected a string"),
        ("at.lookup", json!("runs/seven/address"), "absolute"),
        (
            "at.lookup",
            json!(format!("/{}", "x".repeat(4096))),
            "has 4097 bytes",
        ),
        ("scheme", json!(""), "has 0 bytes"),
        ("scheme", json!(long), "has 1025 bytes"),
        ("models", json!([]), "names 0 models"),
        ("models", json!(vec!["x"; 65]), "names 65 models"),
        ("models", json!(["a", "b", "a"]), "names a twice"),
        ("models", json!([""]), "model id"),
        ("models", json!(["x".repeat(256)]), "limit of 255"),
        ("at.secret", json!([1, 2, 3]), "16"),
        ("at.secret", json!("secret"), "expected"),
        ("pickle", json!("gASVAAAA"), "unknown field `pickle`"),
        ("at.pickle", json!("gASVAAAA"), "unknown field `pickle`"),
    ] {
        let refused = changed(field, value).unwrap_err();
        assert!(refused.contains(words), "{field}: {refused:?}");
    }
    for field in ["format", "models", "scheme", "at"] {
        let mut less = good.clone();
        less.as_object_mut().unwrap().remove(field);
        let refused = serde_json::from_value::<InitInfo>(less)
            .unwrap_err()
            .to_string();
        assert!(refused.contains(field), "{refused}");
    }
}

#[test]
fn unknown_scheme_error_lists_the_known_ones() {
    let mut other = serde_json::to_value(info()).unwrap();
    other["scheme"] = json!("carrier-pigeon");
    // It may be passed on by a process that does not know the scheme.
    let other: InitInfo = serde_json::from_value(other).unwrap();
    assert_eq!(other.scheme(), "carrier-pigeon");
    let error = ReceiverSetup::new(other, 0)
        .connect(Some(soon()))
        .unwrap_err();
    let words = error.to_string();
    assert!(
        words.contains("carrier-pigeon") && words.contains("shared-mem"),
        "{words}"
    );
}

#[test]
fn a_wrong_secret_does_not_get_in() {
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let mut stolen = serde_json::to_value(setup.init_info()).unwrap();
    stolen["at"]["secret"][3] = json!(stolen["at"]["secret"][3].as_u64().unwrap() ^ 1);
    let stolen: InitInfo = serde_json::from_value(stolen).unwrap();
    let sender = setup
        .connect(&weights(), Expect::Count(0), Some(soon()))
        .unwrap();
    ReceiverSetup::new(stolen, 0)
        .connect(Some(crate::BRIEF))
        .unwrap_err();
    assert!(sender.workers().is_empty());
}

#[test]
fn no_debug_output_shows_the_secret() {
    let mut setup = SenderSetup::new("policy", &weights()).unwrap();
    let value = serde_json::to_value(setup.init_info()).unwrap();
    let secret: Vec<u64> = serde_json::from_value(value["at"]["secret"].clone()).unwrap();
    let secret = format!("{secret:?}");
    let mut shown = vec![format!("{:?}", setup.init_info()), format!("{setup:?}")];
    setup = setup.checksums(true);
    let receiving = ReceiverSetup::new(setup.init_info(), 0);
    shown.push(format!("{receiving:?}"));
    let sender = setup
        .connect(&weights(), Expect::Count(0), Some(soon()))
        .unwrap();
    shown.push(format!("{:?}", join(receiving).unwrap()));
    shown.push(format!("{sender:?}"));
    for text in shown {
        assert!(text.contains("policy") && !text.contains(&secret), "{text}");
    }
}

proptest! {
    #[test]
    fn random_bytes_are_an_init_info_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(info) = postcard::from_bytes::<InitInfo>(&bytes) {
            let again: InitInfo = postcard::from_bytes(&postcard::to_stdvec(&info).unwrap()).unwrap();
            prop_assert_eq!(again, info);
        }
        let _ = serde_json::from_slice::<InitInfo>(&bytes);
    }

    #[test]
    fn a_damaged_one_is_an_init_info_or_an_error(at in any::<prop::sample::Index>(), byte: u8) {
        let mut bytes = postcard::to_stdvec(&info()).unwrap();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(info) = postcard::from_bytes::<InitInfo>(&bytes) {
            prop_assert!(!info.models()[0].as_str().is_empty());
        }
    }
}
