use std::collections::BTreeSet;

use serde_json::{Value, json};
use weightsync_engine::Dtype;
use weightsync_engine::transport::ModelSpec;

use super::*;
use crate::OPENAPI;

fn openapi() -> Value {
    serde_json::from_str(OPENAPI).unwrap()
}

/// The parts of a schema that a value does not match, for the subset of JSON Schema that the file
/// uses.
fn faults(root: &Value, schema: &Value, value: &Value, at: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    let known = [
        "$ref",
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "enum",
        "const",
        "oneOf",
        "pattern",
        "minimum",
        "minLength",
        "maxLength",
        "description",
    ];
    for key in schema.as_object().unwrap().keys() {
        assert!(known.contains(&key.as_str()), "{key} is not looked at here");
    }
    if let Some(name) = schema["$ref"].as_str() {
        let target = root.pointer(name.trim_start_matches('#'));
        return faults(root, target.unwrap_or_else(|| panic!("{name}")), value, at);
    }
    let mut expect = |fine: bool, what: String| {
        if !fine {
            wrong.push(format!("{at}: {what} was expected, and is {value}"));
        }
    };
    if let Some(kind) = schema["type"].as_str() {
        let fits = match kind {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "integer" => value.is_u64() || value.is_i64(),
            other => panic!("{other} is not looked at here"),
        };
        expect(fits, kind.into());
    }
    if let Some(same) = schema.get("const") {
        expect(value == same, same.to_string());
    }
    if let Some(some) = schema["enum"].as_array() {
        expect(some.contains(value), format!("{some:?}"));
    }
    if let Some(least) = schema["minimum"].as_u64() {
        expect(value.as_u64() >= Some(least), format!("at least {least}"));
    }
    if let Some(text) = value.as_str() {
        let long = text.len() as u64;
        expect(
            schema["minLength"].as_u64().unwrap_or(0) <= long,
            "more".into(),
        );
        let most = schema["maxLength"].as_u64().unwrap_or(u64::MAX);
        expect(long <= most, "less".into());
        if let Some(pattern) = schema["pattern"].as_str() {
            expect(matches(pattern, text), pattern.into());
        }
    }
    if let Some(of) = schema["oneOf"].as_array() {
        let fits = |one: &&Value| faults(root, one, value, at).is_empty();
        expect(
            of.iter().filter(fits).count() == 1,
            "one of its forms".into(),
        );
    }
    if let Some(object) = value.as_object() {
        let nothing = json!({});
        let properties = schema.get("properties").unwrap_or(&nothing);
        for name in schema["required"].as_array().into_iter().flatten() {
            expect(
                object.contains_key(name.as_str().unwrap()),
                format!("{name}"),
            );
        }
        for (name, inner) in object {
            match properties.get(name) {
                Some(schema) => wrong.extend(faults(root, schema, inner, &format!("{at}/{name}"))),
                // A field that is sent and that nobody is told of.
                None if schema["type"] == "object" && schema["additionalProperties"] != true => {
                    wrong.push(format!("{at}/{name} is not described"));
                }
                None => {}
            }
        }
    }
    if let (Some(items), Some(values)) = (schema.get("items"), value.as_array()) {
        for (place, inner) in values.iter().enumerate() {
            wrong.extend(faults(root, items, inner, &format!("{at}/{place}")));
        }
    }
    wrong
}

/// The patterns that the file has.
fn matches(pattern: &str, text: &str) -> bool {
    let hex = |text: &str, len| {
        text.len() == len
            && text
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    };
    match pattern {
        "^https?://" => text.starts_with("http://") || text.starts_with("https://"),
        "^[0-9a-f]{32}$" => hex(text, 32),
        "^[0-9a-f]{16}$" => hex(text, 16),
        "^[0-9a-f]{64}$" => hex(text, 64),
        other => panic!("{other} is not looked at here"),
    }
}

fn assert_described(name: &str, value: impl Serialize) {
    let (root, value) = (openapi(), serde_json::to_value(value).unwrap());
    let schema = &root["components"]["schemas"][name];
    assert!(schema.is_object(), "{name} is not described");
    let faults = faults(&root, schema, &value, name);
    assert!(faults.is_empty(), "{faults:#?}");
}

#[test]
fn messages_match_their_openapi_schemas() {
    let id = Digits([0xef; 32].into());
    let run = Run {
        epoch: Epoch(3),
        id: [0xab; 16],
    };
    let model = || ModelId::new("policy").unwrap();
    let mut register = Register {
        protocol: PROTOCOL,
        worker: 7,
        pid: 1,
        device: "cpu".into(),
        models: vec![model()],
        url: url("127.0.0.1:7007".parse().unwrap(), None),
        seen: Epoch(0),
        run: None,
        nonce: Digits([0xcd; 32].into()),
        announces: false,
    };
    assert_described("Register", &register);
    register.run = Some(run);
    register.announces = true;
    assert_described("Register", &register);
    let welcome = |proof| Welcome {
        protocol: PROTOCOL,
        id,
        run,
        pid: 1,
        models: vec![model()],
        sequence: 0,
        proof,
    };
    for one in [
        FromSender::Welcome(welcome(None)),
        FromSender::Welcome(welcome(Some(Digits([0xcd; 32].into())))),
        FromSender::Beat(1),
        FromSender::Closed {},
    ] {
        assert_described("FromSender", one);
    }
    let here = FromWorker::Here { worker: 7, pid: 1 };
    for one in [here, FromWorker::Beat(1), FromWorker::Left {}] {
        assert_described("FromWorker", one);
    }
    let part = |digest| SetPart {
        model: 0,
        version: Version(1),
        bytes: 64,
        chunk_bytes: BLOCK_BYTES,
        crc64: vec![Crc(u64::MAX), Crc(1)],
        digest,
    };
    let models = || vec![part(None), part(Some(Digest([1; 16])))];
    assert_described(
        "Call",
        Call {
            id,
            run,
            sequence: 1,
            url: "http://127.0.0.1:1".into(),
            models: models(),
        },
    );
    assert_described(
        "Asked",
        Asked {
            sequence: 0,
            models: models(),
        },
    );
    let applied = || Applied {
        sequence: 1,
        versions: vec![Runs {
            model: 0,
            version: Version(1),
        }],
    };
    let reason = || "no room".to_owned();
    for one in [
        Notified::Staged { sequence: 1 },
        Notified::Taken { sequence: 1 },
        Notified::Applied(applied()),
        Notified::Refused {
            sequence: 1,
            reason: reason(),
        },
        Notified::PassedOver { sequence: 1 },
    ] {
        assert_described("Notified", one);
    }
    for one in [
        WorkerMessage::Joined {},
        WorkerMessage::Applied(applied()),
        WorkerMessage::Refused {
            sequence: 1,
            reason: reason(),
        },
        WorkerMessage::Rejected { reason: reason() },
    ] {
        assert_described("WorkerMessage", one);
    }
    let layout = Layout::new([("a".to_owned(), Dtype::BF16, vec![2, 3])]).unwrap();
    assert_described(
        "ModelSpec",
        ModelSpec {
            id: model(),
            layout,
            attributes: Default::default(),
        },
    );
    assert_described("Problem", RpcProblem::default());
    assert_described(
        "Problem",
        RpcProblem {
            error: reason(),
            known: vec![Version(3)],
            epoch: Some(Epoch(2)),
            taken_by: Some(7),
        },
    );
}

#[test]
fn the_routes_are_those_described() {
    let root = openapi();
    let described = |tag: &str| -> BTreeSet<(String, String)> {
        let paths = root["paths"].as_object().unwrap().iter();
        let each = paths.flat_map(|(path, methods)| {
            let methods = methods.as_object().unwrap().iter();
            let of_tag = methods.filter(|(_, what)| what["tags"] == json!([tag]));
            of_tag.map(|(method, _)| (method.clone(), path.clone()))
        });
        each.collect()
    };
    let routes = |routes: &[(&str, &str)]| -> BTreeSet<(String, String)> {
        let each = routes.iter();
        each.map(|(method, path)| ((*method).to_owned(), (*path).to_owned()))
            .collect()
    };
    let sender = routes(&[
        ("post", of_sender::WORKERS),
        ("post", of_sender::MESSAGES),
        ("get", of_sender::SET),
        ("get", of_sender::MODEL),
        ("get", of_sender::IMAGE),
        ("get", of_sender::STATUS),
    ]);
    let worker = routes(&[("get", of_worker::LIFELINE), ("post", of_worker::WEIGHTS)]);
    assert_eq!(described("sender"), sender);
    assert_eq!(described("worker"), worker);
    assert_eq!(
        root["paths"].as_object().unwrap().len(),
        sender.len() + worker.len()
    );
    // A question is its parameters.
    let question = Question {
        want: WantKind::Newest,
        model: Some(0),
        version: Some(0),
        wait_ms: Some(0),
    };
    let registering = Registering {
        nonce: Digits([0xcd; 32].into()),
    };
    for (path, value) in [
        (of_sender::SET, serde_json::to_value(question)),
        (of_worker::LIFELINE, serde_json::to_value(registering)),
    ] {
        let parameters = root["paths"][path]["get"]["parameters"].as_array();
        let parameters = parameters
            .unwrap()
            .iter()
            .filter(|one| one["in"] == "query");
        let names: BTreeSet<_> = parameters
            .map(|one| one["name"].as_str().unwrap())
            .collect();
        let value = value.unwrap();
        let fields: BTreeSet<_> = value
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        assert_eq!(names, fields);
    }
}

#[test]
fn checksums_and_urls_are_read_as_they_are_written() {
    for crc in [0, 1, u64::MAX, 0xae8b_1486_0a79_9888] {
        let text = serde_json::to_string(&Crc(crc)).unwrap();
        assert_eq!(text.len(), 18);
        assert_eq!(serde_json::from_str::<Crc>(&text).unwrap(), Crc(crc));
    }
    for wrong in [
        "\"\"",
        "\"+00000000000000a\"",
        "\"00\"",
        "1",
        "\"00000000000000000\"",
    ] {
        assert!(serde_json::from_str::<Crc>(wrong).is_err(), "{wrong}");
    }
    let digits = Digits([0x2f; 32].into());
    let text = serde_json::to_string(&digits).unwrap();
    assert_eq!(text, format!("\"{}\"", "2f".repeat(32)));
    assert_eq!(serde_json::from_str::<Digits>(&text).unwrap(), digits);
    for wrong in [
        "\"\"",
        "1",
        &text.replacen('f', "", 1),
        &text.replace('f', "g"),
    ] {
        assert!(serde_json::from_str::<Digits>(wrong).is_err(), "{wrong}");
    }
    for addr in ["127.0.0.1:80", "[::1]:65535"] {
        let addr: SocketAddr = addr.parse().unwrap();
        assert_eq!(addr_of(&url(addr, None)), Some((addr, false)));
        assert_eq!(addr_of(&format!("https://{addr}/")), Some((addr, true)));
    }
    for wrong in [
        "",
        "127.0.0.1:80",
        "ftp://127.0.0.1:80",
        "http://name:80",
        "http://1.2.3.4",
    ] {
        assert_eq!(addr_of(wrong), None, "{wrong}");
    }
    let long = "ß".repeat(MAX_REASON);
    assert_eq!(cut(&long).len(), MAX_REASON);
}
