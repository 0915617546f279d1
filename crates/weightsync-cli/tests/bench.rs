//! `weightsync bench` as a user meets it: the real binary with a small model.

use std::process::{Command, Output};

use serde_json::Value;

#[test]
fn a_table_names_what_was_measured() {
    let stdout = text(&succeeds(&[]));
    for word in [
        "shared-mem, 1 MiB in 4 tensors, 2 worker processes, 5 rounds",
        "one memcpy",
        "send to live on all, median",
        "× memcpy",
        "memory of all processes",
    ] {
        assert!(stdout.contains(word), "no {word:?} in\n{stdout}");
    }
}

#[test]
fn json_is_one_line_with_every_figure() {
    let stdout = text(&succeeds(&["--json"]));
    assert_eq!(stdout.lines().count(), 1, "{stdout}");
    let figures: Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!(figures["scheme"], "shared-mem");
    for (field, expected) in [
        ("bytes", 1 << 20),
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
    let ratio = figures["applied_us"].as_f64().unwrap() / figures["memcpy_us"].as_f64().unwrap();
    assert!((figures["ratio"].as_f64().unwrap() / ratio - 1.0).abs() < 1e-6);
}

#[test]
fn a_wrong_size_is_refused_in_words() {
    for (size, words) in [("1.5GiB", "is no size"), ("7B", "at least one element")] {
        let output = bench(&["--size", size, "--tensors", "4"]);
        assert!(!output.status.success(), "{size}");
        assert_eq!(text(&output.stdout), "");
        let stderr = text(&output.stderr);
        assert!(stderr.contains(words), "{stderr}");
        assert!(!stderr.contains("panicked"), "{stderr}");
    }
}

/// A peer whose every send takes nine seconds, and that has no multi-process.
const PEER: &str = "case \"$*\" in *multi-process*) echo no such scheme >&2; exit 1 ;; esac\n\
    echo '{\"first_s\": 9}'\n\
    while read -r word count && [ \"$word\" = round ]; do\n\
    times=9; while [ \"$count\" -gt 1 ]; do times=\"$times, 9\"; count=$((count - 1)); done\n\
    echo \"{\\\"sends_s\\\": [$times], \\\"memcpys_s\\\": [$times]}\"\n\
    done\n";

#[test]
fn a_peer_that_fails_takes_no_other_rows_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("peer.sh");
    std::fs::write(&script, PEER).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_weightsync"))
        .args(["bench", "peers", "--json", "--python", "sh"])
        .args(["--only", " 16 KiB, N = 2", "--script"])
        .arg(&script)
        .output()
        .unwrap();
    let stderr = text(&output.stderr);
    assert!(!output.status.success(), "{stderr}");
    for words in [
        "no such scheme",
        "no figures for multi-process 16 KiB, N = 2",
    ] {
        assert!(stderr.contains(words), "no {words:?} in\n{stderr}");
    }
    let rows: Vec<Value> = text(&output.stdout)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let cases: Vec<&str> = rows.iter().filter_map(|row| row["case"].as_str()).collect();
    let expected = [
        "shared-mem 16 KiB, N = 2, against TorchRL's",
        "shared-mem 16 KiB, N = 2, against memcpy",
        "shared-mem 16 KiB, N = 2, TorchRL's against memcpy",
    ];
    assert_eq!(cases, expected);
    assert_eq!(
        (&rows[0]["unit"], &rows[0]["baseline"]),
        (&"µs".into(), &9e6.into())
    );
    let ratio = rows[0]["ratio"].as_f64().unwrap();
    let expected = rows[0]["value"].as_f64().unwrap() / 9e6;
    assert!((ratio / expected - 1.0).abs() < 1e-6, "{ratio}, {expected}");
    assert_eq!(
        (&rows[0]["target"], &rows[0]["met"]),
        (&0.1.into(), &(ratio <= 0.1).into())
    );
    assert_eq!(
        (&rows[2]["value"], &rows[2]["ratio"]),
        (&9e6.into(), &1.0.into())
    );
}

fn succeeds(more: &[&str]) -> Vec<u8> {
    let small = [
        "--size",
        "1MiB",
        "--tensors",
        "4",
        "--readers",
        "2",
        "--rounds",
        "5",
    ];
    let output = bench(&[&small, more].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "");
    output.stdout
}

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_weightsync"))
        .args(["bench", "shared-mem"])
        .args(args)
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
