//! `weightsync push`, `pull`, `log` and `scrub --store` as a user meets them: the real binary
//! over real stores.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use safetensors::SafeTensors;
use serde_json::Value;
use tempfile::TempDir;
use weightsync_engine::{AnyScheme, Expect, SenderSetup, Tensors};
use weightsync_store::{SaveOptions, Store, StoreScheme, Writer};

/// Each tensor of a checkpoint: its dtype, shape and bytes.
pub type Bytes = BTreeMap<String, (String, Vec<usize>, Vec<u8>)>;

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
pub struct Dir(TempDir);

impl Dir {
    pub fn new() -> Self {
        let dir = Self(TempDir::new().unwrap());
        fs::create_dir(dir.at("tmp")).unwrap();
        dir
    }

    pub fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    pub fn names(&self, path: &str) -> Vec<String> {
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
    pub fn checkpoint(&self, path: &str) -> Bytes {
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

    pub fn writer(&self, store: &str) -> Writer {
        let store = Store::open(self.at(store).to_str().unwrap()).unwrap();
        Writer::claim(&store, SaveOptions::default()).unwrap()
    }

    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weightsync"));
        command
            .args(words)
            .current_dir(self.0.path())
            .env("TMPDIR", self.at("tmp"))
            .stdin(Stdio::null());
        command
    }

    pub fn run(&self, words: &[&str]) -> Output {
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
    pub fn fails(&self, words: &[&str], expected: &[&str]) {
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

pub fn numbered(value: f32) -> Tensors {
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

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}
