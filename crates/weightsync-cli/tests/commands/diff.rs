//! `weightsync diff` as a user meets it: the real binary over real files.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use half::{bf16, f16};
use rand::{Rng, RngExt, SeedableRng, rngs::SmallRng};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use weightsync_core::delta::{BitPattern, Codec, SPAN, Scratch, encode};

/// Name, dtype, shape, bytes.
type Tensor<'a> = (&'a str, Dtype, Vec<usize>, Vec<u8>);

#[test]
fn each_dtype_has_its_steps() {
    let null = Value::Null;
    let bf = |values: &[f32]| -> Vec<u8> {
        let bits = values.iter().map(|&value| bf16::from_f32(value));
        bits.flat_map(bf16::to_le_bytes).collect()
    };
    let half = |values: &[f32]| -> Vec<u8> {
        let bits = values.iter().map(|&value| f16::from_f32(value));
        bits.flat_map(f16::to_le_bytes).collect()
    };
    // Dtype and shape; the two versions; elements, changed, median, largest; NaNs.
    let cases = [
        (
            (Dtype::BF16, vec![2, 2]),
            bf(&[1.0, 2.0, 3.0, -4.0]),
            // One further, one back across a power of two, two in the other sign.
            words::<2>(&[0x3f81, 0x3fff, 0x4040, 0xc082]),
            (4, 3, json!(1), json!(2), [0; 3]),
        ),
        (
            (Dtype::BF16, vec![3]),
            bf(&[0.0, -0.0, 0.0]),
            bf(&[-0.0, 0.0, 0.0]),
            (3, 2, json!(1), json!(1), [0; 3]),
        ),
        (
            (Dtype::F32, vec![5]),
            words::<4>(&[0x7fc0_0000, 0x7fc0_0000, 0x3f80_0000, 0x7fc0_0001, 7]),
            words::<4>(&[0x7fc0_0001, 0x3f80_0000, 0xffff_ffff, 0x7fc0_0001, 5]),
            (5, 4, json!(2), json!(2), [1, 1, 1]),
        ),
        (
            (Dtype::F32, vec![1]),
            words::<4>(&[0x7fc0_0000]),
            words::<4>(&[0xffc0_0000]),
            (1, 1, null.clone(), null.clone(), [0, 0, 1]),
        ),
        (
            (Dtype::F16, vec![2]),
            half(&[1.0, -1.0]),
            half(&[2.0, -1.0]),
            (2, 1, json!(1024), json!(1024), [0; 3]),
        ),
        (
            (Dtype::F64, vec![1, 1]),
            1_f64.to_le_bytes().to_vec(),
            2_f64.to_le_bytes().to_vec(),
            (1, 1, json!(1_u64 << 52), json!(1_u64 << 52), [0; 3]),
        ),
        (
            (Dtype::F8_E4M3, vec![3]),
            vec![0x00, 0x7e, 0x38],
            vec![0x01, 0x7f, 0x38],
            (3, 2, json!(1), json!(1), [1, 0, 0]),
        ),
        (
            (Dtype::C64, vec![2]),
            words::<4>(&[0, 0x3f80_0000, 0, 0]),
            words::<4>(&[0, 0x3f80_0003, 0, 0]),
            (4, 1, json!(3), json!(3), [0; 3]),
        ),
        (
            (Dtype::I32, vec![3]),
            words::<4>(&[5, 0xffff_ffff, 0]),
            words::<4>(&[2, 1, 0]),
            (3, 2, json!(2), json!(3), [0; 3]),
        ),
        (
            (Dtype::U8, vec![2]),
            vec![255, 9],
            vec![1, 9],
            (2, 1, json!(254), json!(254), [0; 3]),
        ),
        (
            (Dtype::BOOL, vec![4]),
            vec![0, 1, 0, 1],
            vec![1, 1, 0, 0],
            (4, 2, json!(1), json!(1), [0; 3]),
        ),
        // Two numbers to a byte: bytes are counted, and have no steps.
        (
            (Dtype::F4, vec![4, 2]),
            vec![0x12, 0x34, 0x56, 0x78],
            vec![0x13, 0x34, 0x56, 0x78],
            (4, 1, null.clone(), null.clone(), [0; 3]),
        ),
        (
            (Dtype::F32, vec![0, 7]),
            vec![],
            vec![],
            (0, 0, null.clone(), null.clone(), [0; 3]),
        ),
        (
            (Dtype::I64, vec![]),
            (-1_i64).to_le_bytes().to_vec(),
            i64::MAX.to_le_bytes().to_vec(),
            (1, 1, json!(1_u64 << 63), json!(1_u64 << 63), [0; 3]),
        ),
    ];
    let names: Vec<String> = (0..cases.len()).map(|at| format!("t{at:02}")).collect();
    let (mut before, mut after) = (Vec::new(), Vec::new());
    for (name, ((dtype, shape), old, new, _)) in names.iter().zip(&cases) {
        before.push((&name[..], *dtype, shape.clone(), old.clone()));
        after.push((&name[..], *dtype, shape.clone(), new.clone()));
    }
    let dir = tempfile::tempdir().unwrap();
    let a = file(dir.path(), "a", &before);
    let b = file(dir.path(), "b", &after);
    let (rows, total) = json(&[&a, &b], 1);
    assert_eq!(rows.len(), cases.len());
    let mut changed = 0;
    for (name, ((dtype, shape), _, _, expected)) in names.iter().zip(&cases) {
        let row = &rows[&name[..]];
        let (elements, changes, median, largest, nans) = expected;
        assert_eq!(row["dtype"], dtype.to_string(), "{row}");
        assert_eq!(row["shape"], json!(shape), "{row}");
        assert_eq!(row["state"], if *changes > 0 { "changed" } else { "same" });
        assert_eq!(row["elements"], *elements, "{row}");
        assert_eq!(row["changed"], *changes, "{row}");
        assert_eq!(row["median_ulps"], *median, "{row}");
        assert_eq!(row["largest_ulps"], *largest, "{row}");
        let got = [&row["to_nan"], &row["from_nan"], &row["between_nans"]];
        assert_eq!(got.map(|count| count.as_u64().unwrap()), *nans, "{row}");
        let unit = match dtype {
            Dtype::F4 => "byte",
            Dtype::C64 => "part",
            _ => "element",
        };
        assert_eq!(row["unit"], unit, "{row}");
        changed += changes;
    }
    assert_eq!(total["changed"], changed);
    assert_eq!(total["largest_ulps"], json!(1_u64 << 63));
}

#[test]
fn a_table_says_what_changed_and_what_a_delta_takes() {
    let dir = tempfile::tempdir().unwrap();
    let old = words::<2>(&[0x3f80; 1000]);
    let mut new = words::<2>(&[0x3f81; 3]);
    new.extend(words::<2>(&[0x3f7d, 0x7fc0]));
    new.extend(&old[new.len()..]);
    let a = file(
        dir.path(),
        "a",
        &[
            ("head.bias", Dtype::F32, vec![2], vec![0; 8]),
            ("head.weight", Dtype::BF16, vec![10, 100], old.clone()),
            ("in.a", Dtype::U8, vec![], vec![7]),
            ("shape", Dtype::U8, vec![1, 4], vec![0; 4]),
        ],
    );
    let b = file(
        dir.path(),
        "b",
        &[
            ("head.bias", Dtype::F32, vec![2], vec![0; 8]),
            ("head.weight", Dtype::BF16, vec![10, 100], new),
            ("in.b\u{1b}[2J", Dtype::U8, vec![], vec![7]),
            ("shape", Dtype::I8, vec![4, 1], vec![0; 4]),
        ],
    );
    let output = diff(&[&a, &b]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stderr), "");
    let expected = "\
tensor       dtype    shape      elements       changed     %  median ULPs  largest ULPs  NaN
head.bias    F32      2                 2             0     0            –             –    0
head.weight  BF16     10×100        1,000             5  0.50            1             3    1
in.a         U8       scalar            1     only in A
shape        U8 → I8  1×4 → 4×1         4  not compared
in.b?[2J     U8       scalar            1     only in B
total                 5 tensors     1,002             5  0.50            1             3    1

A and B differ: of 5 tensors 1 changed, 1 only in A, 1 only in B, 1 of another dtype or shape in B.
Steps in ULPs (of integers: differences): 1: 75.00 %, 3–4: 25.00 %.
Changes to NaN: 1, from NaN: 0, between NaNs of other bits: 0; they have no step.
";
    let stdout = text(&output.stdout);
    let (files, rest) = stdout.split_once("\n\n").unwrap();
    assert_eq!(files, format!("A  {}\nB  {}", a.display(), b.display()));
    let (table, delta) = rest.split_once("A delta takes ").unwrap();
    assert_eq!(table, expected);
    for words in [
        "by the codec fast, ",
        "by the codec thin, for 2.0 KiB dense.",
    ] {
        assert!(delta.contains(words), "{delta}");
    }
}

#[test]
fn the_same_tensors_are_said_to_be_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let nan = words::<4>(&[0x7fc0_0001, 0x8000_0000]);
    let tensors = [
        ("x", Dtype::F32, vec![2], nan),
        ("y", Dtype::U8, vec![3], vec![1, 2, 3]),
    ];
    let a = file(dir.path(), "a", &tensors);
    let b = file(dir.path(), "b", &tensors);
    let noted = noted(dir.path(), "noted", &tensors, &[("step", "7")]);
    let (none, one) = (
        file(dir.path(), "0", &[]),
        file(dir.path(), "1", &tensors[1..]),
    );
    for (a, b, words) in [
        (&a, &a, "all 2 tensors are equal, bit by bit.\n"),
        (&a, &b, "all 2 tensors are equal, bit by bit.\n"),
        (&one, &one, "the tensor is equal, bit by bit.\n"),
        (&none, &none, "the same: neither has a tensor.\n"),
        (&a, &noted, "by bit.\nThe metadata differs in step.\n"),
    ] {
        let output = diff(&[a, b]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let stdout = text(&output.stdout);
        assert!(stdout.ends_with(words), "{stdout}");
    }
    let (rows, total) = json(&[&a, &noted], 0);
    assert_eq!(rows["x"]["state"], "same");
    assert_eq!(total["other_metadata"], json!(["step"]));
    assert_eq!(
        (&total["fast_bytes"], &total["dense_bytes"]),
        (&json!(0), &json!(11))
    );
}

#[test]
fn diff_names_tensors_missing_from_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let one = |name, dtype, shape: &[usize]| (name, dtype, shape.to_vec(), vec![0; 8]);
    let base = [one("x", Dtype::F32, &[2])];
    let a = file(dir.path(), "a", &base);
    for (tensors, name, state) in [
        (vec![], "x", "only_in_a"),
        (
            vec![base[0].clone(), one("y", Dtype::U8, &[8])],
            "y",
            "only_in_b",
        ),
        (vec![one("x", Dtype::F32, &[2, 1])], "x", "not_compared"),
        (vec![one("x", Dtype::I32, &[2])], "x", "not_compared"),
    ] {
        let b = file(dir.path(), "b", &tensors);
        let (rows, total) = json(&[&a, &b], 1);
        let row = &rows[name];
        assert_eq!(row["state"], state, "{row}");
        assert_eq!(total[state], 1, "{total}");
        assert!(row.get("changed").is_none(), "{row}");
        if state == "not_compared" {
            assert_eq!(row["dtype_in_b"], tensors[0].1.to_string());
            assert_eq!(row["shape_in_b"], json!(tensors[0].2));
        }
    }
}

#[test]
fn diff_counts_whole_tensors_and_codes_spans_as_sent() {
    let mut random = SmallRng::seed_from_u64(9);
    let mut head = vec![0; 100];
    random.fill_bytes(&mut head);
    let old: Vec<u16> = (0..5_000_000)
        .map(|_| random.random_range(0..0x7f80))
        .collect();
    let (mut new, mut steps) = (old.clone(), Vec::new());
    for at in (0..old.len()).step_by(97) {
        let step: i32 = random.random_range(-900..900);
        // By the numbers' values, 0x7f80 being the first that is a NaN's or infinity's.
        let to = (i32::from(old[at]) + step).clamp(0, 0x7f7f);
        new[at] = to as u16;
        steps.push(to.abs_diff(old[at].into()));
    }
    let tensors = |words: &[u16], head: Vec<u8>| {
        let words: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        [
            ("big", Dtype::BF16, vec![words.len() / 2], words),
            ("small", Dtype::U8, vec![100], head),
        ]
    };
    let (before, after) = (tensors(&old, head.clone()), tensors(&new, head));
    let dir = tempfile::tempdir().unwrap();
    let a = file(dir.path(), "a", &before);
    let b = file(dir.path(), "b", &after);
    let (rows, total) = json(&[&a, &b], 1);
    assert_eq!(rows["small"]["changed"], 0);
    steps.retain(|&step| step > 0);
    steps.sort_unstable();
    let big = &rows["big"];
    assert_eq!(big["changed"], steps.len());
    assert_eq!(big["largest_ulps"], *steps.last().unwrap());
    assert_eq!(big["median_ulps"], steps[steps.len().div_ceil(2) - 1]);
    let powers = total["steps"].as_array().unwrap();
    for power in powers {
        let (from, to) = (&power["from"], &power["to"]);
        let (from, to) = (from.as_u64().unwrap(), to.as_u64().unwrap());
        let within = steps
            .iter()
            .filter(|&&step| (from..=to).contains(&step.into()));
        assert_eq!(power["count"], within.count(), "{power}");
    }

    // The image that would be sent: both tensors, each at a multiple of 64.
    let image = |tensors: &[Tensor<'_>]| {
        let mut image = Vec::new();
        for tensor in tensors {
            image.extend(&tensor.3);
            image.resize(image.len().next_multiple_of(64), 0);
        }
        image
    };
    let (old, new) = (image(&before), image(&after));
    let pattern = BitPattern::of(weightsync_core::Dtype::BF16);
    for &codec in Codec::ALL {
        let (mut delta, mut scratch) = (Vec::new(), Scratch::new());
        let spans = old.chunks(SPAN as usize).zip(new.chunks(SPAN as usize));
        for (old, new) in spans {
            encode(pattern, codec, old, new, &mut delta, &mut scratch).unwrap();
        }
        let field = format!("{}_bytes", codec.as_str());
        assert_eq!(total[&field], delta.len());
    }
    assert_eq!(total["dense_bytes"], 10_000_100);
}

#[test]
fn diff_draws_ten_thousand_tensors_with_long_names() {
    let dir = tempfile::tempdir().unwrap();
    let name = |at: usize| match at {
        0 => format!("<begin> & {}.end", "long.".repeat(800)),
        at => format!("layers.{at:04}.weight"),
    };
    let names: Vec<String> = (0..10_000).map(name).collect();
    let tensors = |changes: bool| {
        let all = names.iter().enumerate().map(|(at, name)| {
            let mut words = [0x3f80_u64; 100];
            // Of the first more than of the last.
            let changed = if changes { (10_000 - at) / 100 } else { 0 };
            words[..changed].fill(0x3f83);
            (&name[..], Dtype::BF16, vec![100], self::words::<2>(&words))
        });
        all.collect::<Vec<_>>()
    };
    let a = file(dir.path(), "a", &tensors(false));
    let b = file(dir.path(), "b", &tensors(true));
    let svg = dir.path().join("diff.svg");
    let output = diff(&[&a, &b, Path::new("--svg"), &svg]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(text(&output.stderr), format!("wrote {}\n", svg.display()));
    let stdout = text(&output.stdout);
    let table: Vec<&str> = stdout.lines().skip(3).take(10_002).collect();
    assert!(table[1].starts_with("<begin> & long."), "{}", table[1]);
    assert!(table[1].contains('…') && table[1].contains("long..end"));
    assert!(table[10_000].starts_with("layers.9999.weight"));
    assert!(table[10_001].starts_with("total"));
    let widest = table.iter().map(|line| line.chars().count()).max();
    assert!(widest < Some(160), "{widest:?}");

    let svg = fs::read_to_string(svg).unwrap();
    assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
    for words in [
        "&lt;begin&gt; &amp; long.",
        "and 9,940 more",
        "49.51 % of 1,000,000 elements in 10,000 tensors changed",
        "Changed elements, by tensor",
        "Steps in ULPs",
        "\n3–4\n",
        "100 % (495,100)",
    ] {
        assert!(svg.contains(words), "no {words:?}");
    }
    // The ground, a bar for each tensor that is drawn, and one for each class of steps.
    assert_eq!(svg.matches("<rect").count(), 1 + 60 + 3);
    let order: Vec<_> = (1..60).map(|at| svg.find(&names[at]).unwrap()).collect();
    assert!(order.is_sorted(), "{order:?}");
}

#[test]
fn diff_exits_quietly_when_its_pipe_closes() {
    let dir = tempfile::tempdir().unwrap();
    let names: Vec<String> = (0..3000).map(|at| format!("tensor {at}")).collect();
    let tensors = names
        .iter()
        .map(|name| (&name[..], Dtype::U8, vec![1], vec![0]));
    let a = file(dir.path(), "a", &tensors.collect::<Vec<_>>());
    let b = file(dir.path(), "b", &[]);
    let mut child = Command::new(env!("CARGO_BIN_EXE_weightsync"))
        .arg("diff")
        .args([a, b])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(text(&output.stderr), "");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn diff_refuses_files_it_cannot_compare() {
    let dir = tempfile::tempdir().unwrap();
    let place = |name: &str| dir.path().join(name);
    let good = file(
        dir.path(),
        "good",
        &[("x", Dtype::U8, vec![64], vec![1; 64])],
    );
    let other = file(
        dir.path(),
        "other",
        &[("x", Dtype::U8, vec![64], vec![2; 64])],
    );
    let whole = fs::read(&good).unwrap();
    for (name, bytes) in [
        ("empty", &b""[..]),
        ("pickle", b"PK\x03\x04 and more of an archive"),
        ("header", &whole[..20]),
        ("cut", &whole[..whole.len() - 1]),
        ("longer", &[&whole[..], b"!"].concat()),
    ] {
        fs::write(place(name), bytes).unwrap();
    }
    let svg = PathBuf::from("--svg");
    for (args, words) in [
        (
            vec![place("absent"), good.clone()],
            ["absent", "check the path"],
        ),
        (
            vec![good.clone(), place("absent")],
            ["absent", "check the path"],
        ),
        (
            vec![good.clone(), dir.path().into()],
            ["not a regular file", "one by one"],
        ),
        (
            vec![good.clone(), place("empty")],
            ["empty: it is shorter", "whole safetensors"],
        ),
        (
            vec![good.clone(), place("pickle")],
            ["pickle: it says", "in that format first"],
        ),
        (
            vec![good.clone(), place("header")],
            ["header: it says", "copy it again"],
        ),
        (
            vec![place("cut"), good.clone()],
            ["cut: its header describes 64", "but 63"],
        ),
        (
            vec![place("longer"), good.clone()],
            ["longer: its header", "but 65"],
        ),
        (vec![good.clone()], ["required", "Usage"]),
        (
            vec![good.clone(), other.clone(), svg.clone(), good.clone()],
            ["good is one of the files", "name another file"],
        ),
    ] {
        let args: Vec<&Path> = args.iter().map(PathBuf::as_path).collect();
        let output = diff(&args);
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
        assert_eq!(text(&output.stdout), "", "{args:?}");
        assert!(!stderr.contains("panicked"), "{stderr}");
        for words in words {
            assert!(stderr.contains(words), "no {words:?} in {stderr}");
        }
    }
    assert_eq!(fs::read(&good).unwrap(), whole, "not overwritten");

    // What was found is told before the picture fails.
    let output = diff(&[&good, &other, &svg, &good.join("diff.svg")]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stdout).contains("A and B differ"));
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("good/diff.svg: Not a directory"),
        "{stderr}"
    );
}

/// The lowest bytes of numbers, little-endian.
fn words<const BYTES: usize>(words: &[u64]) -> Vec<u8> {
    let each = words.iter().map(|word| word.to_le_bytes());
    each.flat_map(|bytes| bytes.into_iter().take(BYTES))
        .collect()
}

fn file(dir: &Path, name: &str, tensors: &[Tensor<'_>]) -> PathBuf {
    noted(dir, name, tensors, &[])
}

/// With metadata.
fn noted(dir: &Path, name: &str, tensors: &[Tensor<'_>], notes: &[(&str, &str)]) -> PathBuf {
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
        let view = TensorView::new(*dtype, shape.clone(), bytes).unwrap();
        (*name, view)
    });
    let notes: HashMap<String, String> = notes
        .iter()
        .map(|&(key, value)| (key.to_owned(), value.to_owned()))
        .collect();
    let notes = (!notes.is_empty()).then_some(notes);
    let path = dir.join(name);
    fs::write(&path, safetensors::serialize(views, notes).unwrap()).unwrap();
    path
}

fn diff(args: &[&Path]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_weightsync"))
        .arg("diff")
        .args(args)
        .output()
        .unwrap()
}

/// The objects of the tensors by their names, and that of all.
fn json(args: &[&Path], code: i32) -> (HashMap<String, Value>, Value) {
    let output = diff(&[args, &[Path::new("--json")]].concat());
    assert_eq!(text(&output.stderr), "");
    assert_eq!(output.status.code(), Some(code));
    let stdout = text(&output.stdout);
    let lines = stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap());
    let mut lines: Vec<Value> = lines.collect();
    let total = lines.pop().unwrap()["total"].take();
    let named = lines.into_iter().map(|line| {
        let name = line["tensor"].as_str().unwrap().to_owned();
        (name, line)
    });
    (named.collect(), total)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
