use proptest::prelude::*;

use super::*;

fn place(epoch: u64, sequence: u64) -> VersionKey {
    VersionKey {
        epoch: Epoch(epoch),
        sequence,
    }
}

fn manifest() -> StoreManifest {
    StoreManifest {
        place: place(2, 5),
        previous: Some(place(1, 4)),
        run: Run {
            epoch: Epoch(2),
            id: [7; 16],
        },
        by: By {
            host: "trainer".into(),
            pid: 42,
        },
        at: 1_700_000_000_000,
        names: [("best".into(), place(1, 2))].into(),
        models: vec![Stored {
            model: ModelId::new("policy").unwrap(),
            version: Version(9),
            digest: Digest([3; 16]),
            spec: Hash::of(b"spec"),
            changed: true,
            changes: Some([1000, 11]),
            anchor: Anchor {
                at: place(1, 4),
                files: vec![FileEntry {
                    name: "model.safetensors".into(),
                    bytes: 4096,
                    crc64: Crc(0xfedc_ba98_7654_3210),
                }],
            },
            deltas: vec![DeltaFile {
                at: place(2, 5),
                bytes: 40,
                crc64: Crc(1),
            }],
        }],
    }
}

fn head() -> Head {
    let run = Run {
        epoch: Epoch(3),
        id: [1; 16],
    };
    let first = PublishedRun {
        epoch: Epoch(1),
        last: 7,
        failed: [5].into(),
    };
    let mut head = Head {
        run,
        runs: vec![first, PublishedRun::none(run.epoch)],
        count: 5,
        names: BTreeMap::new(),
        dropped: BTreeSet::new(),
        versions: [(ModelId::new("policy").unwrap(), Version(9))].into(),
    };
    head.names.insert("best".into(), place(1, 2));
    head.dropped.insert(place(1, 1));
    head
}

#[test]
fn sealed_files_read_back() {
    let bytes = seal(&manifest());
    assert_eq!(
        unseal::<StoreManifest>("a file", &bytes).unwrap(),
        manifest()
    );
    let bytes = seal(&head());
    assert_eq!(unseal::<Head>("a file", &bytes).unwrap(), head());
}

/// The bytes that format 1 has. A change here is a change of the format.
#[test]
fn sealed_files_are_what_format_1_says() {
    let golden = include_str!("manifest.json");
    assert_eq!(
        String::from_utf8(seal(&manifest())).unwrap(),
        golden.trim_end()
    );
    let golden = include_str!("head.json");
    assert_eq!(String::from_utf8(seal(&head())).unwrap(), golden.trim_end());
}

#[test]
fn flipped_bits_are_found_wherever_they_are() {
    for bytes in [seal(&manifest()), seal(&head())] {
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut flipped = bytes.clone();
                flipped[at] ^= 1 << bit;
                let read = [
                    unseal::<StoreManifest>("it", &flipped).err(),
                    unseal::<Head>("it", &flipped).err(),
                ];
                for error in read {
                    let error = error.unwrap_or_else(|| panic!("bit {bit} of byte {at}"));
                    assert!(matches!(error, StoreError::Damaged(_)), "{error}");
                }
            }
        }
        for len in 0..bytes.len() {
            assert!(unseal::<StoreManifest>("it", &bytes[..len]).is_err());
        }
    }
}

#[test]
fn newer_formats_are_named() {
    let text = seal(&head());
    let text = str::from_utf8(&text).unwrap();
    let value = &text[text.find("\"value\":").unwrap() + 8..text.len() - 1];
    let whole = format!(
        r#"{{"format":9,"crc64":"{}","value":{value}}}"#,
        seal_of(9, value)
    );
    // Whatever it has in place of the fields of this one.
    for newer in [
        &whole,
        r#"{"format":2,"blake3":"x","value":[]}"#,
        r#"{"format":2}"#,
    ] {
        let error = unseal::<Head>("head.json", newer.as_bytes()).unwrap_err();
        assert!(
            matches!(error, StoreError::Format { .. }),
            "{newer}: {error}"
        );
        assert!(error.to_string().contains("newer weightsync"), "{error}");
    }
    // This is a file of this format, whose number is damaged.
    let spoilt = text.replacen("\"format\":1", "\"format\":12", 1);
    let error = unseal::<Head>("head.json", spoilt.as_bytes()).unwrap_err();
    assert!(matches!(error, StoreError::Damaged(_)), "{error}");
}

#[test]
fn huge_lengths_in_a_manifest_are_added_up() {
    let mut manifest = manifest();
    let stored = &mut manifest.models[0];
    let mut huge = stored.anchor.files[0].clone();
    huge.bytes = u64::MAX;
    huge.name = "model-2.safetensors".into();
    stored.anchor.files.push(huge);
    assert_eq!(stored.read_bytes(None), u64::MAX);
    assert_eq!(stored.written_bytes(), 40);
    stored.deltas.clear();
    assert_eq!(stored.written_bytes(), u64::MAX);
}

#[test]
fn places_sort_as_their_names_do() {
    let places = [
        place(1, 9),
        place(1, 10),
        place(2, 1),
        place(u64::MAX, u64::MAX),
    ];
    for pair in places.windows(2) {
        assert!(pair[0] < pair[1] && pair[0].to_string() < pair[1].to_string());
    }
    for place in places {
        assert_eq!(place.to_string().parse(), Ok(place));
        assert_eq!(
            VersionKey::of_manifest(&format!("{place}.json")),
            Some(place)
        );
    }
    for bad in [
        "",
        "1-1",
        "+0000000000000000001-00000000000000000001",
        "../x",
    ] {
        assert_eq!(bad.parse::<VersionKey>(), Err(()));
    }
}

#[test]
fn head_has_what_is_published_and_not_dropped() {
    let head = head();
    let has = |sequence| head.has(place(1, sequence));
    let published: Vec<_> = (0..10).filter(|one| has(*one)).collect();
    assert_eq!(published, [0, 2, 3, 4, 6, 7]);
    assert!(!head.has(place(3, 1)) && !head.has(place(2, 1)));
    assert_eq!(head.newest(), Some(place(1, 7)));
}

#[test]
fn manifests_with_dangerous_values_are_refused() {
    let long = "x".repeat(300);
    for name in [
        "",
        "..",
        ".",
        "a/b",
        "/etc/passwd",
        "../x",
        "a\\b",
        "a\nb",
        DELTA,
        &long,
    ] {
        let mut bad = manifest();
        bad.models[0].anchor.files[0].name = name.into();
        let error = unseal::<StoreManifest>("it", &seal(&bad)).unwrap_err();
        assert!(matches!(error, StoreError::Damaged(_)), "{name:?}: {error}");
    }
    let changes: [fn(&mut StoreManifest); 5] = [
        |bad| bad.models.clear(),
        |bad| bad.models.push(bad.models[0].clone()),
        |bad| bad.previous = Some(bad.place),
        |bad| bad.models[0].deltas[0].at = place(9, 9),
        |bad| bad.models[0].version = Version::NONE,
    ];
    for change in changes {
        let mut bad = manifest();
        change(&mut bad);
        assert!(
            unseal::<StoreManifest>("it", &seal(&bad)).is_err(),
            "{bad:?}"
        );
    }
}

#[test]
fn models_have_directories_of_their_own() {
    let long = "x".repeat(255);
    let names = [
        "policy",
        "Policy",
        "POLICY",
        "../policy",
        "/policy",
        "policy/",
        ".",
        "..",
        "a b",
        "é",
        "_policy",
        "con",
        "env.value_net",
        &long,
        &long[1..],
    ];
    let ids = names.map(|name| ModelId::new(name).unwrap());
    let dirs: BTreeSet<_> = ids.iter().map(directory_of).collect();
    assert_eq!(dirs.len(), names.len(), "{dirs:?}");
    for dir in &dirs {
        let lower = dir.to_lowercase();
        assert!(
            dir.len() <= 255 && !dir.contains('/') && !dir.starts_with('.'),
            "{dir}"
        );
        assert_eq!(
            dirs.iter()
                .filter(|other| other.to_lowercase() == lower)
                .count(),
            1
        );
    }
}

proptest! {
    #[test]
    fn decoders_survive_any_text(text in ".{0,200}") {
        let _ = unseal::<StoreManifest>("it", text.as_bytes());
        let _ = unseal::<Head>("it", text.as_bytes());
        let sealed = format!(r#"{{"format":1,"crc64":"{}","value":{text}}}"#, seal_of(1, &text));
        let _ = unseal::<StoreManifest>("it", sealed.as_bytes());
        let _ = unseal::<Head>("it", sealed.as_bytes());
    }
}
