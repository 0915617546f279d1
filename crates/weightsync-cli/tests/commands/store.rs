//! `weightsync push`, `pull`, `log`, `watch` and `scrub --store` as a user meets them: the real binary
//! over real stores.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Read},
    path::{Path, PathBuf},
    process::{Child, ChildStderr, ChildStdout, Command, Output, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};
use safetensors::SafeTensors;
use serde_json::Value;
use tempfile::TempDir;
use weightsync_engine::{AnyScheme, Expect, SenderSetup, Tensors};
use weightsync_store::{SaveOptions, Store, StoreScheme, Writer};

/// Each tensor of a checkpoint: its dtype, shape and bytes.
type Bytes = BTreeMap<String, (String, Vec<usize>, Vec<u8>)>;

#[test]
fn pushed_weights_are_pulled_byte_by_byte() {
    let dir = Dir::new();
    let model = model();
    dir.save("bare.safetensors", &model);
    dir.save_shards("sharded", &model);
    dir.write("sharded/config.json", b"{\"model_type\": \"qwen2\"}");
    dir.write("sharded/tokenizer.json", b"[]");
    dir.write("sharded/optimizer.pt", b"no part of the model");
    for source in ["bare.safetensors", "sharded"] {
        let store = format!("{source}.store");
        let pushed = dir.ok(&["push", source, "--to", &store]);
        assert!(pushed.starts_with("policy v1: "), "{pushed}");
        assert!(pushed.ends_with(" of weights, all of it\n"), "{pushed}");
        let out = format!("{source}.out");
        let pulled = dir.ok(&["pull", &store, "--out", &out]);
        assert!(pulled.starts_with("policy v1: "), "{pulled}");
        assert_eq!(dir.checkpoint(&out), dir.checkpoint("bare.safetensors"));
    }
    let mut names = dir.names("sharded.out");
    names.sort();
    let expected = [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "weightsync.json",
    ];
    assert_eq!(names, expected);
    let config = fs::read(dir.at("sharded.out/config.json")).unwrap();
    assert_eq!(config, b"{\"model_type\": \"qwen2\"}");
    // What was pulled is what is there.
    let again = dir.ok(&["push", "sharded.out", "--to", "bare.safetensors.store"]);
    assert!(
        again.contains("as config.json and others are not as before"),
        "{again}"
    );
}

#[test]
fn second_push_moves_little_and_says_so() {
    let dir = Dir::new();
    let mut model = model();
    dir.save("a.safetensors", &model);
    let first = dir.json(&["push", "a.safetensors", "--to", "store", "--model", "actor"]);
    assert_eq!(first["version"], 1);
    assert_eq!(first["changes"], Value::Null);
    let bytes = first["bytes"].as_u64().unwrap();
    assert!(first["stored_bytes"].as_u64().unwrap() >= bytes);

    let weight = model.slice_mut::<f32>("layers.0.weight").unwrap();
    let count = weight.len() / 100;
    for at in 0..count {
        let one = &mut weight[at * 97];
        *one = f32::from_bits(one.to_bits() + 1);
    }
    // In other files, and in another order.
    dir.save_shards("b", &model);
    let second = dir.json(&["push", "b", "--to", "store"]);
    assert_eq!(
        (&second["model"], &second["version"]),
        (&"actor".into(), &2.into())
    );
    assert_eq!(second["before"], 1);
    let stored = second["stored_bytes"].as_u64().unwrap();
    assert!(stored * 50 < bytes, "{stored} of {bytes}");
    let elements = bytes as f64 / 4.0;
    let changes = second["changes"].as_f64().unwrap();
    assert!(
        (changes - count as f64 / elements).abs() < 1e-6,
        "{changes}"
    );

    let weight = model.slice_mut::<f32>("layers.0.weight").unwrap();
    weight[0] += 1.0;
    dir.save("c.safetensors", &model);
    let third = dir.run(&["push", "c.safetensors", "--to", "store"]);
    let text = text(&third.stdout);
    assert!(text.starts_with("actor v3: "), "{text}");
    assert!(
        text.ends_with("<0.01 % of the elements changed since v2\n"),
        "{text}"
    );
    // No terminal, no progress.
    assert_eq!(third.stderr, b"");

    // The same weights are no version, whatever files they are in. They can get a name.
    dir.save_shards("d", &model);
    for source in ["c.safetensors", "d"] {
        let same = dir.ok(&["push", source, "--to", "store", "--name", "best"]);
        let expected = "actor v3 has these weights already: nothing was saved; it is named best\n";
        assert_eq!(same, expected);
    }
    let full = dir.json(&["push", "d", "--to", "store", "--full", "--keep", "1"]);
    assert_eq!(
        (&full["version"], &full["changes"]),
        (&4.into(), &Value::Null)
    );
    // The one that has a name stays.
    let log = dir.ok(&["log", "store", "--json"]);
    assert_eq!(versions(&log), [4, 3]);
    dir.ok(&["pull", "store", "--name", "best", "--out", "best"]);
    assert_eq!(dir.checkpoint("best"), dir.checkpoint("c.safetensors"));
    assert_eq!(
        dir.ok(&["scrub", "--store", "store"]),
        "all of 2 versions can be loaded\n"
    );
}

#[test]
fn push_keeps_config_of_the_newest_version() {
    let dir = Dir::new();
    let mut model = model();
    dir.save("a/model.safetensors", &model);
    dir.write("a/config.json", b"{}");
    dir.ok(&["push", "a", "--to", "store"]);
    model.slice_mut::<f32>("norm").unwrap()[0] = 7.0;
    dir.save("bare.safetensors", &model);
    // Also where it is written as a whole.
    for full in [None, Some("--full")] {
        let mut words = vec!["push", "bare.safetensors", "--to", "store"];
        words.extend(full);
        dir.ok(&words);
        dir.ok(&["pull", "store", "--out", "out"]);
        assert_eq!(fs::read(dir.at("out/config.json")).unwrap(), b"{}");
    }
    dir.save("a/model.safetensors", &model);
    dir.write("a/config.json", b"{\"new\": 1}");
    let pushed = dir.json(&["push", "a", "--to", "store"]);
    assert_eq!(pushed["saved"], true);
    assert_eq!(pushed["other_files"], serde_json::json!(["config.json"]));
    dir.ok(&["pull", "store", "--out", "out"]);
    assert_eq!(
        fs::read(dir.at("out/config.json")).unwrap(),
        b"{\"new\": 1}"
    );
}

#[test]
fn push_leaves_the_store_of_a_living_sender_alone() {
    let dir = Dir::new();
    let model = model();
    let scheme = StoreScheme::new(dir.at("store").to_str().unwrap()).unwrap();
    let setup = SenderSetup::new("policy", &model).unwrap();
    let setup = setup.scheme(AnyScheme::new(scheme)).unwrap();
    let mut sender = setup.connect(&model, Expect::Count(0), None).unwrap();
    let mut other = model.clone();
    other.slice_mut::<f32>("norm").unwrap()[0] = 7.0;
    dir.save("other.safetensors", &other);
    let words = format!("process {} on", std::process::id());
    dir.fails(&["push", "other.safetensors", "--to", "store"], &[&words]);
    // It was not fenced off.
    sender.send(&other).unwrap();
    drop(sender);
    let pushed = dir.ok(&["push", "other.safetensors", "--to", "store"]);
    assert!(pushed.contains("nothing was saved"), "{pushed}");
}

#[test]
fn push_and_pull_refuse_what_they_cannot_do() {
    let dir = Dir::new();
    dir.save("a.safetensors", &model());
    dir.write("x.pt", b"PK\x03\x04 a pickle in a zip file");
    let convert = ["is pickled", "python -c", "torch.load", "x.safetensors"];
    dir.fails(&["push", "x.pt", "--to", "store"], &convert);
    dir.write(
        "out/model.safetensors.index.json",
        b"{\"weight_map\": {\"w\": \"../a.safetensors\"}}",
    );
    dir.fails(
        &["push", "out", "--to", "store"],
        &["\"w\"", "../a.safetensors"],
    );
    dir.fails(&["push", "nowhere", "--to", "store"], &["nowhere"]);
    dir.fails(
        &["push", "a.safetensors", "--to", "ftp://host/x"],
        &["ftp://host/x"],
    );
    let named = ["push", "a.safetensors", "--to", "store", "--name", "../x"];
    dir.fails(&named, &["cannot be named \"../x\""]);
    dir.save("own/model.safetensors", &model());
    for source in ["own", "own/model.safetensors"] {
        dir.fails(
            &["push", source, "--to", "own"],
            &["directory of the store"],
        );
    }
    // By a relative path, and where the steps of a trainer lie.
    let mut push = dir.command(&["push", "model.safetensors", "--to", "."]);
    let output = push.current_dir(dir.at("own")).output().unwrap();
    assert!(text(&output.stderr).contains("directory of the store"));
    assert_eq!(dir.names("own"), ["model.safetensors"]);
    dir.save("runs/global_step_1/model.safetensors", &model());
    dir.fails(
        &["push", "runs", "--to", "runs"],
        &["directory of the store"],
    );
    assert_eq!(dir.names("runs"), ["global_step_1"]);
    // Nothing of that has made a store.
    assert!(!dir.at("store").exists());
    dir.fails(&["pull", "store", "--out", "new"], &["no version"]);
    dir.fails(&["log", "store"], &["no version", "check its address"]);
    let scrub = dir.run(&["scrub", "--store", "store"]);
    assert_eq!(scrub.status.code(), Some(2), "{}", text(&scrub.stderr));

    dir.ok(&["push", "a.safetensors", "--to", "store"]);
    dir.ok(&[
        "push",
        "a.safetensors",
        "--to",
        "store",
        "--model",
        "critic",
    ]);
    for command in [
        vec!["pull", "store", "--out", "new"],
        vec!["push", "a.safetensors", "--to", "store"],
    ] {
        dir.fails(&command, &["several models", "critic, policy"]);
    }
    let version = [
        "pull",
        "store",
        "--out",
        "new",
        "--model",
        "policy",
        "--version",
        "9",
    ];
    dir.fails(&version, &["has no v9", "v1"]);
    let name = [
        "pull", "store", "--out", "new", "--model", "policy", "--name", "x",
    ];
    dir.fails(&name, &["no version", "named \"x\""]);
    let other = ["pull", "store", "--out", "new", "--model", "reward"];
    dir.fails(&other, &["no model \"reward\"", "critic, policy"]);
    let occupied = ["pull", "store", "--out", "out", "--model", "policy"];
    dir.fails(&occupied, &["is not replaced", "no pull wrote it"]);
    assert_eq!(dir.names("out"), ["model.safetensors.index.json"]);
    assert!(!dir.at("new").exists());
    // What the command does not know is another exit code.
    let unknown = dir.run(&["push", "a.safetensors", "--to", "store", "--keep", "0"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(
        text(&unknown.stderr).contains("keep=8"),
        "{}",
        text(&unknown.stderr)
    );
}

#[test]
fn log_shows_what_changed_and_what_is_damaged() {
    let dir = Dir::new();
    let mut model = model();
    for step in 1..=3 {
        dir.save("a.safetensors", &model);
        dir.ok(&["push", "a.safetensors", "--to", "store"]);
        model.slice_mut::<f32>("norm").unwrap()[0] = step as f32 + 7.0;
    }
    dir.ok(&["push", "a.safetensors", "--to", "store", "--name", "best"]);
    let log = dir.ok(&["log", "store"]);
    let lines: Vec<_> = log.lines().collect();
    assert_eq!(lines.len(), 4, "{log}");
    for (line, words) in lines.iter().zip([
        &[
            "version", "stored", "to read", "changed", "at", "by", "names",
        ][..],
        &["policy v3", "<0.01 %", " UTC  process ", "best"],
        &["policy v2", "<0.01 %"],
        &["policy v1", "MiB", "whole"],
    ]) {
        for word in words {
            assert!(line.contains(word), "no {word:?} in\n{log}");
        }
    }
    let newest = dir.ok(&["log", "store", "-n", "1"]);
    assert!(newest.ends_with("3 versions in all\n"), "{newest}");
    assert!(!newest.contains("v2"), "{newest}");

    let log = dir.ok(&["log", "store", "--json"]);
    assert_eq!(versions(&log), [3, 2, 1]);
    let first: Value = serde_json::from_str(log.lines().next().unwrap()).unwrap();
    assert_eq!(first["names"], serde_json::json!(["best"]));
    assert_eq!(first["models"][0]["deltas"], 2);
    let last: Value = serde_json::from_str(log.lines().last().unwrap()).unwrap();
    let directory = last["models"][0]["directory"].as_str().unwrap().to_owned();
    // Other programs can load it from there.
    assert!(dir.checkpoint(&directory).contains_key("norm"));

    // A manifest is read by `log`, weights by `scrub`.
    let manifests = dir.names("store/versions");
    let second = manifests
        .iter()
        .min_by_key(|name| (*name != &manifests[1], name.len()));
    let path = dir.at("store/versions").join(second.unwrap());
    let mut bytes = fs::read(&path).unwrap();
    bytes[40] ^= 1;
    fs::write(&path, bytes).unwrap();
    let weights = Path::new(&directory).join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    let log = dir.ok(&["log", "store"]);
    assert!(
        log.contains(&format!("{} is damaged", path.display())),
        "{log}"
    );
    assert!(!log.contains("in all"), "{log}");
    let log = dir.ok(&["log", "store", "--json"]);
    let damage: Value = serde_json::from_str(log.lines().last().unwrap()).unwrap();
    assert_eq!(damage["damage"]["file"], path.to_str().unwrap());
    let scrub = dir.run(&["scrub", "--store", "store", "--json"]);
    assert_eq!(scrub.status.code(), Some(1));
    let scrub: Value = serde_json::from_slice(&scrub.stdout).unwrap();
    assert_eq!(
        (&scrub["versions"], &scrub["sound"]),
        (&3.into(), &0.into()),
        "{scrub}"
    );
    assert_eq!(scrub["damage"].as_array().map(Vec::len), Some(2), "{scrub}");
}

#[test]
fn watch_runs_for_each_version_and_keeps_two() {
    let dir = Dir::new();
    let mut writer = dir.writer("store");
    // {} in each kind of quotation, in a directory whose name is several words for a shell.
    let out = "it's $(touch x) \"out\"";
    let command = "printf '%s\\n' \"ran $WEIGHTSYNC_VERSION $WEIGHTSYNC_MODEL $WEIGHTSYNC_DIGEST\"; \
                   printf '%s\\n' {} \"{}\" '{}' \"$WEIGHTSYNC_CHECKPOINT\"; \
                   test $WEIGHTSYNC_VERSION != 2";
    let mut watch = dir.watch(&["store", "--out", out, "--exec", command]);
    for step in 1..=4_u64 {
        let saved = writer
            .save_weights("policy", &numbered(step as f32))
            .unwrap();
        let digest = Store::open(dir.at("store").to_str().unwrap()).unwrap();
        let digest = digest.versions().unwrap().versions.pop().unwrap().models[0].digest;
        assert_eq!(saved.versions[0].1.0, step);
        assert_eq!(watch.line(), format!("ran {step} policy {digest}"));
        let path = dir.at(out).join(format!("v{step}"));
        for _ in 0..4 {
            assert_eq!(watch.line(), path.display().to_string());
        }
        let said = watch.said();
        match step {
            2 => assert!(
                said.contains("policy v2: the command failed: exit status: 1"),
                "{said}"
            ),
            _ => assert_eq!(
                said,
                format!("weightsync: policy v{step}: the command succeeded")
            ),
        }
        let bytes = &dir.checkpoint(path.to_str().unwrap())["norm"].2;
        assert_eq!(bytes[..4], (step as f32).to_le_bytes());
        // A command that failed leaves the ones before it alone.
        let kept = match step {
            1 => vec!["v1"],
            2 => vec!["v1", "v2"],
            // It has been replaced.
            3 => vec!["v1", "v3"],
            _ => vec!["v3", "v4"],
        };
        assert_eq!(dir.names(out), kept);
    }
    watch.signal(Signal::TERM);
    assert_eq!(watch.end(), (Some(128 + 15), String::new()));
    assert_eq!(dir.names(out), ["v3", "v4"]);
    assert!(!dir.at("x").exists());
}

#[test]
fn watch_takes_the_newest_of_several() {
    let dir = Dir::new();
    let mut writer = dir.writer("store");
    let mut save = |value: f32| writer.save_weights("policy", &numbered(value)).unwrap();
    save(1.0);
    let fifo = dir.at("fifo");
    let made = Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let command = "echo ran $WEIGHTSYNC_VERSION; cat fifo";
    let mut watch = dir.watch(&["store", "--exec", command]);
    assert_eq!(watch.line(), "ran 1");
    save(2.0);
    save(3.0);
    fs::write(&fifo, "").unwrap();
    assert_eq!(watch.line(), "ran 3");
    watch.signal(Signal::INT);
    assert_eq!(watch.end().0, Some(130));
}

#[test]
fn watch_passes_over_damage_and_names_it() {
    let dir = Dir::new();
    let mut writer = dir.writer("store");
    writer.save_weights("policy", &numbered(1.0)).unwrap();
    writer.save_whole_next();
    writer.save_weights("policy", &numbered(2.0)).unwrap();
    let store = Store::open(dir.at("store").to_str().unwrap()).unwrap();
    let newest = store.versions().unwrap().versions.pop().unwrap();
    let weights = Path::new(&newest.models[0].directory).join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    let mut watch = dir.watch(&["store", "--exec", "echo ran $WEIGHTSYNC_VERSION"]);
    let said = watch.said();
    assert!(
        said.contains(&format!("{} is damaged", weights.display())),
        "{said}"
    );
    assert_eq!(watch.line(), "ran 1");
    writer.save_whole_next();
    writer.save_weights("policy", &numbered(3.0)).unwrap();
    assert_eq!(watch.line(), "ran 3");
    watch.signal(Signal::INT);
    assert_eq!(watch.end().0, Some(130));
}

#[test]
fn watch_once_ends_as_its_command_does() {
    let dir = Dir::new();
    let mut writer = dir.writer("store");
    for (command, code) in [("true", 0), ("exit 7", 1), ("kill -9 $$", 1)] {
        // Those that come meanwhile are left out, and no version is waited for in vain.
        let mut watch = dir.watch(&["store", "--once", "--exec", command]);
        writer.save_weights("policy", &numbered(1.0)).unwrap();
        assert_eq!(watch.end().0, Some(code), "{command}");
    }
    let command = "echo ran $WEIGHTSYNC_VERSION";
    let newest = writer.version(&"policy".parse().unwrap());
    let once = dir.run(&["watch", "store", "--once", "--exec", command]);
    assert_eq!(text(&once.stdout), format!("ran {}\n", newest.0));
    assert_eq!(dir.names("tmp"), [""; 0]);
}

#[test]
fn watch_new_only_leaves_out_what_is_there() {
    let dir = Dir::new();
    let mut writer = dir.writer("store");
    writer.save_weights("policy", &numbered(1.0)).unwrap();
    let words = [
        "store",
        "--new-only",
        "--once",
        "--exec",
        "echo ran $WEIGHTSYNC_VERSION",
    ];
    let mut watch = dir.watch(&words);
    // Whenever it has looked at the store first, one of these comes later.
    let mut version = 1;
    while watch.child.try_wait().unwrap().is_none() {
        version += 1;
        writer
            .save_weights("policy", &numbered(version as f32))
            .unwrap();
    }
    let line = watch.line();
    let ran: u64 = line.strip_prefix("ran ").unwrap().parse().unwrap();
    assert!((2..=version).contains(&ran), "{line}");
}

#[test]
fn watch_leaves_no_process_and_no_directory() {
    let dir = Dir::new();
    // Before there is a store at all.
    let mut watch = dir.watch(&["store", "--exec", "echo ran"]);
    while dir.names("tmp").is_empty() {
        assert!(watch.child.try_wait().unwrap().is_none());
    }
    watch.signal(Signal::INT);
    assert_eq!(watch.end().0, Some(130));
    assert_eq!(dir.names("tmp"), [""; 0]);

    // The shell ends by the signal; what it has started does not, and has to be killed.
    dir.writer("store")
        .save_weights("policy", &numbered(1.0))
        .unwrap();
    let command = "(trap '' TERM; echo started; sleep 1000) & wait";
    let mut watch = dir.watch(&["store", "--exec", command]);
    assert_eq!(watch.line(), "started");
    assert_eq!(dir.names("tmp").len(), 1);
    watch.signal(Signal::INT);
    // Its output ends when all that were started are gone.
    assert_eq!(watch.end(), (Some(130), String::new()));
    assert_eq!(dir.names("tmp"), [""; 0]);
}

#[test]
fn watch_kills_its_command_at_a_second_signal() {
    let dir = Dir::new();
    dir.writer("store")
        .save_weights("policy", &numbered(1.0))
        .unwrap();
    // It says when the first signal has come, and would run for as long as it is let.
    let command = "trap 'echo stays' TERM; echo started; while :; do sleep 0.01; done";
    let mut watch = dir.watch(&["store", "--exec", command]);
    assert_eq!(watch.line(), "started");
    watch.signal(Signal::INT);
    assert_eq!(watch.line(), "stays");
    watch.signal(Signal::TERM);
    assert_eq!(watch.end(), (Some(130), String::new()));
    assert_eq!(dir.names("tmp"), [""; 0]);
}

#[test]
fn watch_leaves_the_directory_of_another_alone() {
    let dir = Dir::new();
    dir.writer("store")
        .save_weights("policy", &numbered(1.0))
        .unwrap();
    let mut watch = dir.watch(&["store", "--out", "out", "--exec", "echo ran"]);
    assert_eq!(watch.line(), "ran");
    let words = ["watch", "store", "--out", "out", "--exec", "true"];
    dir.fails(&words, &["out", "another watch", "--out"]);
    watch.signal(Signal::INT);
    assert_eq!(watch.end().0, Some(130));
    assert_eq!(dir.names("out"), ["v1"]);
}

#[test]
fn help_says_what_the_commands_of_a_store_do() {
    let dir = Dir::new();
    for (command, words) in [
        (
            "push",
            &[
                "--to <STORE>",
                "global_step_N",
                "pickled",
                "--keep",
                "nothing is saved",
            ][..],
        ),
        ("pull", &["--out <DIR>", "--version <N>", "in one step"]),
        ("log", &["-n <N>", "--json", "The newest is first"]),
        (
            "watch",
            &[
                "--exec <CMD>",
                "WEIGHTSYNC_VERSION",
                "WEIGHTSYNC_DIGEST",
                "Ctrl-C",
            ],
        ),
        ("scrub", &["--store <STORE>", "digest of every version"]),
    ] {
        let help = dir.ok(&[command, "--help"]);
        for word in words {
            assert!(help.contains(word), "no {word:?} in\n{help}");
        }
        assert!(dir.ok(&["--help"]).contains(command));
    }
}

/// A directory in which the command runs.
struct Dir(TempDir);

impl Dir {
    fn new() -> Self {
        let dir = Self(TempDir::new().unwrap());
        fs::create_dir(dir.at("tmp")).unwrap();
        dir
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.at(path)).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    fn write(&self, path: &str, bytes: &[u8]) {
        let path = self.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    /// Writes a safetensors file, as other programs do.
    fn save(&self, path: &str, model: &Tensors) {
        self.write_tensors(path, model, |_| true);
    }

    fn write_tensors(&self, path: &str, model: &Tensors, which: impl Fn(&str) -> bool) {
        let layout = weightsync_engine::WeightExtractor::layout(model).unwrap();
        let tensors = layout.tensors().iter().filter(|tensor| which(&tensor.name));
        let views = tensors.map(|tensor| {
            let shape = tensor.shape.iter().map(|&len| len as usize).collect();
            let values = model.slice::<f32>(&tensor.name).unwrap();
            let bytes: Vec<u8> = values.iter().flat_map(|one| one.to_le_bytes()).collect();
            (tensor.name.clone(), (shape, bytes))
        });
        let views: BTreeMap<String, (Vec<usize>, Vec<u8>)> = views.collect();
        let views = views.iter().map(|(name, (shape, bytes))| {
            let view =
                safetensors::tensor::TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes);
            (name, view.unwrap())
        });
        let bytes = safetensors::serialize(views, None).unwrap();
        self.write(path, &bytes);
    }

    /// The same in two files with an index; the last tensors come first.
    fn save_shards(&self, path: &str, model: &Tensors) {
        let files = [
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
        ];
        let file_of = |name: &str| files[usize::from(name < "layers.1")];
        for file in files {
            self.write_tensors(&format!("{path}/{file}"), model, |name| {
                file_of(name) == file
            });
        }
        let layout = weightsync_engine::WeightExtractor::layout(model).unwrap();
        let names = layout.tensors().iter().map(|tensor| &tensor.name);
        let map: BTreeMap<_, _> = names.map(|name| (name, file_of(name))).collect();
        let index = serde_json::json!({ "metadata": {}, "weight_map": map }).to_string();
        self.write(
            &format!("{path}/model.safetensors.index.json"),
            index.as_bytes(),
        );
    }

    /// Reads a file, or all of a directory, as other programs do.
    fn checkpoint(&self, path: &str) -> Bytes {
        let path = self.at(path);
        let paths = match path.is_dir() {
            true => {
                let entries = fs::read_dir(&path).unwrap();
                let paths = entries.map(|entry| entry.unwrap().path());
                let weights =
                    |path: &PathBuf| path.extension().is_some_and(|it| it == "safetensors");
                paths.filter(weights).collect()
            }
            false => vec![path],
        };
        let mut tensors = Bytes::new();
        for path in paths {
            let bytes = fs::read(path).unwrap();
            for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
                let view = (
                    view.dtype().to_string(),
                    view.shape().to_vec(),
                    view.data().to_vec(),
                );
                assert!(tensors.insert(name, view).is_none());
            }
        }
        tensors
    }

    fn writer(&self, store: &str) -> Writer {
        let store = Store::open(self.at(store).to_str().unwrap()).unwrap();
        Writer::claim(&store, SaveOptions::default()).unwrap()
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weightsync"));
        command
            .args(words)
            .current_dir(self.0.path())
            .env("TMPDIR", self.at("tmp"))
            .stdin(Stdio::null());
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().unwrap()
    }

    #[track_caller]
    fn ok(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(
            output.status.success(),
            "{words:?}: {}",
            text(&output.stderr)
        );
        text(&output.stdout)
    }

    #[track_caller]
    fn json(&self, words: &[&str]) -> Value {
        serde_json::from_str(&self.ok(&[words, &["--json"]].concat())).unwrap()
    }

    #[track_caller]
    fn fails(&self, words: &[&str], expected: &[&str]) {
        let output = self.run(words);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {said}");
        assert!(
            said.starts_with("weightsync: ") && said.lines().count() == 1,
            "{said}"
        );
        for word in expected {
            assert!(said.contains(word), "no {word:?} in: {said}");
        }
    }

    fn watch(&self, words: &[&str]) -> Watch {
        let mut child = self
            .command(&[&["watch"], words].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Watch {
            stdout: BufReader::new(child.stdout.take().unwrap()),
            stderr: BufReader::new(child.stderr.take().unwrap()),
            child,
        }
    }
}

/// A running `watch`.
struct Watch {
    child: Child,
    stdout: BufReader<ChildStdout>,
    stderr: BufReader<ChildStderr>,
}

impl Watch {
    /// The next line that the commands wrote.
    fn line(&mut self) -> String {
        read_line(&mut self.stdout)
    }

    /// The next line that `watch` itself wrote.
    fn said(&mut self) -> String {
        read_line(&mut self.stderr)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Its exit code, and what else it and the commands wrote to standard output.
    fn end(&mut self) -> (Option<i32>, String) {
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
        (self.child.wait().unwrap().code(), rest)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_line(from: &mut impl BufRead) -> String {
    let mut line = String::new();
    from.read_line(&mut line).unwrap();
    line.trim_end().into()
}

/// Somewhat more than a MiB of weights.
fn model() -> Tensors {
    let mut model = Tensors::new();
    for layer in 0..3 {
        let values: Vec<f32> = (0..1 << 17)
            .map(|at| (at as f32).sin() + layer as f32)
            .collect();
        let name = format!("layers.{layer}.weight");
        model.insert(&name, [256, 512], values).unwrap();
    }
    model.insert("norm", [3], [1_f32, 2.0, 3.0]).unwrap();
    model
}

fn numbered(value: f32) -> Tensors {
    let mut model = Tensors::new();
    model.insert("norm", [64], [value; 64]).unwrap();
    model
}

/// The versions of the first model, in the order of the lines.
fn versions(log: &str) -> Vec<u64> {
    let lines = log
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines
        .map(|line| line["models"][0]["version"].as_u64().unwrap())
        .collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}
