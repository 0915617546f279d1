//! `weightsync bench` as a user meets it: the real binary with a small model.

use std::process::{Command, Output};

use serde_json::Value;

#[test]
fn a_table_names_what_was_measured() {
    let of = "4 tensors, 2 worker processes, 5 rounds";
    let several = "4 tensors of 3 models, 2 worker processes, 5 rounds";
    for (args, title) in [
        (&["shared-mem"][..], format!("shared-mem, 1 MiB in {of}")),
        (
            &["multi-process", "--every=4", "--models=3"],
            format!("multi-process:every=4, 1 MiB in {several}"),
        ),
    ] {
        let stdout = text(&succeeds(args));
        for word in [
            &title,
            "one memcpy",
            "send to live on all, median",
            "× memcpy",
            "memory of all processes",
        ] {
            assert!(stdout.contains(word), "no {word:?} in\n{stdout}");
        }
    }
}

#[test]
fn json_is_one_line_with_every_figure() {
    for (args, scheme, models) in [
        (&["shared-mem"][..], "shared-mem", 1),
        (&["shared-mem", "--loan"], "shared-mem", 1),
        (&["shared-mem", "--models=4"], "shared-mem", 4),
        (&["multi-process"], "multi-process", 1),
        (
            &["multi-process", "--own-copy", "--every=2", "--models=2"],
            "multi-process:every=2,own-copy",
            2,
        ),
    ] {
        let stdout = text(&succeeds(&[args, &["--json"]].concat()));
        assert_eq!(stdout.lines().count(), 1, "{stdout}");
        let figures: Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!(figures["scheme"], scheme);
        for (field, expected) in [
            ("bytes", 1 << 20),
            ("models", models),
            ("tensors", 4),
            ("readers", 2),
            ("rounds", 5),
        ] {
            assert_eq!(figures[field], expected, "{field}");
        }
        for field in [
            "memcpy_us",
            "applied_us",
            "applied_p99_us",
            "after_live_us",
            "ratio",
            "first_us",
            "memory_bytes",
            "source_bytes",
        ] {
            let figure = figures[field].as_f64();
            assert!(
                figure.is_some_and(|figure| figure > 0.0),
                "{field}: {figures}"
            );
        }
        let ratio =
            figures["applied_us"].as_f64().unwrap() / figures["memcpy_us"].as_f64().unwrap();
        assert!((figures["ratio"].as_f64().unwrap() / ratio - 1.0).abs() < 1e-6);
    }
}

#[test]
fn own_copies_take_memory_of_their_own() {
    let memory = |args: &[&str]| {
        let stdout = text(&succeeds(&[args, &["--size=16MiB", "--json"]].concat()));
        let figures: Value = serde_json::from_str(&stdout).unwrap();
        figures["memory_bytes"].as_u64().unwrap()
    };
    let (shared, own) = (
        memory(&["multi-process"]),
        memory(&["multi-process", "--own-copy"]),
    );
    // Two workers with one version each, at least.
    assert!(own >= shared + 2 * 15 * (1 << 20), "{own}, {shared}");
}

#[test]
fn bench_refuses_cases_it_cannot_measure() {
    for (args, words) in [
        (&["shared-mem", "--size=1.5GiB"][..], "is not a size"),
        (
            &["shared-mem", "--size=7B", "--tensors=4"],
            "at least one element",
        ),
        (
            &["shared-mem", "--models=5", "--tensors=4"],
            "4 tensors in 5 models",
        ),
        (&["shared-mem", "--models=0"], "0 is not in 1.."),
        (
            &["shared-mem", "--models=2", "--loan"],
            "a loan is of one model",
        ),
        (&["shared-mem", "--every=4"], "unexpected argument"),
        (&["multi-process", "--every=33"], "expected 1 to 32"),
    ] {
        let output = bench(args);
        assert!(!output.status.success(), "{args:?}");
        assert_eq!(text(&output.stdout), "");
        let stderr = text(&output.stderr);
        assert!(stderr.contains(words), "{stderr}");
        assert!(!stderr.contains("panicked"), "{stderr}");
    }
}

/// A small case: what `args` say is said last.
fn succeeds(args: &[&str]) -> Vec<u8> {
    let [scheme, more @ ..] = args else {
        panic!("which scheme?")
    };
    let mut small = vec![*scheme, "--tensors=4", "--readers=2", "--rounds=5"];
    if !more.iter().any(|arg| arg.starts_with("--size")) {
        small.push("--size=1MiB");
    }
    let output = bench(&[&small, more].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
    output.stdout
}

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_weightsync"))
        .arg("bench")
        .args(args)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
