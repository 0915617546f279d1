//! The groups as `cargo xtask bench` runs them: the real binary with small cases.

use std::process::Command;

use serde_json::Value;

#[test]
fn comparisons_have_a_row_with_both_medians() {
    comparison_has_a_row("of 8 models, 16 KiB", None);
}

#[test]
fn row_of_simulated_workers_has_its_target() {
    comparison_has_a_row("simulated workers", Some(5.0));
}

fn comparison_has_a_row(only: &str, target: Option<f64>) {
    let output = bench(&["mem", "--json", "--only", only]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let stdout = text(&output.stdout);
    assert_eq!(stdout.lines().count(), 1, "{stdout}");
    let row: Value = serde_json::from_str(&stdout).unwrap();
    let (value, baseline) = (
        row["value"].as_f64().unwrap(),
        row["baseline"].as_f64().unwrap(),
    );
    assert!(value > 0.0 && baseline > 0.0, "{row}");
    assert_eq!(
        (&row["unit"], row["target"].as_f64()),
        (&"ms".into(), target)
    );
    let ratio = row["ratio"].as_f64().unwrap();
    assert!((ratio / (value / baseline) - 1.0).abs() < 1e-6, "{row}");
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
    let output = bench(&["peers", "--json", "--python", "sh"])
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

fn bench(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weightsync-bench"));
    command.args(args);
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn soak_checks_versions_of_every_scheme() {
    let output = bench(&["soak", "--hours", "0.002"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let stdout = text(&output.stdout);
    for scheme in [
        "shared-mem",
        "share=relay",
        "share=none",
        "rpc",
        "trainer",
        "Disk",
    ] {
        assert!(stdout.contains(scheme), "{scheme} in {stdout}");
    }
    assert!(!stdout.contains(" 0 by "), "{stdout}");
    assert!(stdout.contains("too short to compare"), "{stdout}");
}
