use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use serde_json::json;
use tempfile::TempDir;
use weightsync_core::{Epoch, Layout, Run, Version};
use weightsync_engine::Tensors;
use weightsync_engine::files::unique;
use weightsync_engine::safetensors_format::Shard;
use weightsync_engine::transport::interrupt::SLICE;

use super::*;
use crate::SaveOptions;
use crate::Writer;
use crate::anchor::INDEX;

fn weights(names: &[&str]) -> Tensors {
    let mut weights = Tensors::new();
    for (at, name) in names.iter().enumerate() {
        let values: Vec<f32> = (0..64).map(|one| (at * 100 + one) as f32).collect();
        weights.insert(name, [8, 8], values).unwrap();
    }
    weights
}

/// A safetensors file with such tensors.
fn file(path: &Path, names: &[&str]) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let run = Run {
        epoch: Epoch(1),
        id: [0; 16],
    };
    let snapshot = Snapshot::of("m", &weights(names), run, Version(1)).unwrap();
    snapshot.save_safetensors(path).unwrap();
}

fn index(dir: &Path, map: serde_json::Value) {
    fs::create_dir_all(dir).unwrap();
    let text = json!({ "metadata": {}, "weight_map": map }).to_string();
    fs::write(dir.join(INDEX), text).unwrap();
}

fn names(checkpoint: &Checkpoint) -> Vec<String> {
    let tensors = checkpoint.layout.tensors().iter();
    tensors.map(|tensor| tensor.name.clone()).collect()
}

#[track_caller]
fn refused(path: &Path, words: &[&str]) -> String {
    let error = Checkpoint::open(path).unwrap_err().to_string();
    for word in words {
        assert!(error.contains(word), "no {word:?} in: {error}");
    }
    error
}

#[test]
fn checkpoint_is_found_wherever_trainers_put_it() {
    let dir = TempDir::new().unwrap();
    let at = |path: &str| dir.path().join(path);
    file(&at("bare.safetensors"), &["a"]);
    file(&at("one/model.safetensors"), &["a", "b"]);
    // Other files of weights are not part of it then.
    file(&at("one/consolidated.safetensors"), &["a"]);
    file(&at("any/part2.safetensors"), &["b"]);
    file(&at("any/part1.safetensors"), &["a"]);
    file(&at("shards/x.safetensors"), &["b"]);
    file(&at("shards/y.safetensors"), &["a", "c"]);
    let map = json!({ "a": "y.safetensors", "b": "x.safetensors", "c": "y.safetensors" });
    index(&at("shards"), map);
    for step in [9, 10, 11] {
        let path = format!("run/global_step_{step}/actor/huggingface/model.safetensors");
        file(&at(&path), &[&format!("step{step}")]);
    }
    fs::create_dir_all(at("run/global_step_x")).unwrap();
    for (path, expected) in [
        ("bare.safetensors", vec!["a"]),
        ("one", vec!["a", "b"]),
        ("any", vec!["a", "b"]),
        ("shards", vec!["b", "a", "c"]),
        ("run", vec!["step11"]),
        ("run/global_step_9", vec!["step9"]),
    ] {
        let found = Checkpoint::open(at(path)).unwrap();
        assert_eq!(names(&found), expected, "{path}");
    }
    // The last one may not be whole yet. What makes no sense says nothing.
    for (said, expected) in [("10\n", "step10"), ("\u{0}", "step11")] {
        fs::write(at("run/latest_checkpointed_iteration.txt"), said).unwrap();
        let found = Checkpoint::open(at("run")).unwrap();
        assert_eq!(names(&found), [expected], "{said:?}");
    }
}

#[test]
fn checkpoint_is_read_from_the_newest_of_a_store() {
    let dir = TempDir::new().unwrap();
    let store = Store::open(dir.path().join("store").to_str().unwrap()).unwrap();
    let options = SaveOptions {
        files: vec![("config.json".into(), b"{}".to_vec())],
        ..SaveOptions::default()
    };
    let mut writer = Writer::claim(&store, options).unwrap();
    writer.save_weights("m", &weights(&["a"])).unwrap();
    let mut newer = weights(&["a"]);
    newer.insert("b", [1], [7_f32]).unwrap();
    writer.save_weights("m", &newer).unwrap();

    let checkpoint = Checkpoint::open(dir.path().join("store")).unwrap();
    assert_eq!(names(&checkpoint), ["a", "b"]);
    let run = writer.run();
    let read = Snapshot::of("m", &checkpoint, run, Version(1)).unwrap();
    assert_eq!(read.slice::<f32>("b").unwrap(), [7.0]);
    assert_eq!(read.slice::<f32>("a").unwrap()[63], 63.0);
    assert_eq!(checkpoint.files(), [("config.json".into(), b"{}".to_vec())]);
}

#[test]
fn checkpoint_refuses_what_is_not_one_model() {
    let dir = TempDir::new().unwrap();
    let at = |path: &str| dir.path().join(path);
    file(&at("secret.safetensors"), &["s"]);
    for outside in [
        "../secret.safetensors",
        "/etc/passwd",
        "sub/x.safetensors",
        "",
        "..",
    ] {
        index(&at("outside"), json!({ "layer.w": outside }));
        refused(
            &at("outside"),
            &[INDEX, "layer.w", outside, "the name of a file"],
        );
    }
    index(&at("missing"), json!({ "layer.w": "gone.safetensors" }));
    refused(&at("missing"), &["layer.w", "gone.safetensors is missing"]);

    file(&at("twice/p1.safetensors"), &["a", "b"]);
    file(&at("twice/p2.safetensors"), &["b"]);
    refused(&at("twice"), &["\"b\"", "p1.safetensors", "p2.safetensors"]);

    let shard = at("other/p1.safetensors");
    file(&shard, &["a", "b"]);
    let map = json!({ "a": "p1.safetensors", "b": "p1.safetensors", "c": "p1.safetensors" });
    index(&at("other"), map);
    refused(
        &at("other"),
        &["\"c\"", "p1.safetensors", "does not have it"],
    );

    file(&at("swapped/p1.safetensors"), &["a"]);
    file(&at("swapped/p2.safetensors"), &["b"]);
    index(
        &at("swapped"),
        json!({ "a": "p2.safetensors", "b": "p1.safetensors" }),
    );
    refused(
        &at("swapped"),
        &["\"a\"", "p1.safetensors", "p2.safetensors"],
    );

    fs::write(at("other").join(INDEX), b"{\"weight_map\": [1, 2").unwrap();
    refused(&at("other"), &[INDEX, "not the index"]);
    fs::create_dir(at("empty")).unwrap();
    refused(&at("empty"), &["no safetensors file", "global_step_N"]);
    refused(&at("nowhere"), &["nowhere"]);

    // Cut short, and longer than anything that is.
    let whole = fs::read(&shard).unwrap();
    fs::write(&shard, &whole[..whole.len() - 1]).unwrap();
    refused(&shard, &["p1.safetensors", "cut"]);
    fs::write(&shard, u64::MAX.to_le_bytes()).unwrap();
    refused(&shard, &["p1.safetensors", "not a safetensors file"]);
    let none = Shard::cut(&Layout::new([]).unwrap(), 1, &HashMap::new()).unwrap();
    fs::write(&shard, &none[0].header).unwrap();
    refused(&shard, &["p1.safetensors", "no tensors"]);
}

#[test]
fn checkpoint_takes_tensors_that_its_index_does_not_list() {
    let dir = TempDir::new().unwrap();
    let at = |path: &str| dir.path().join(path);
    file(&at("one/p1.safetensors"), &["a", "extra"]);
    file(&at("one/p2.safetensors"), &["b"]);
    let map = json!({ "a": "p1.safetensors", "b": "p2.safetensors" });
    index(&at("one"), map.clone());
    assert_eq!(
        names(&Checkpoint::open(at("one")).unwrap()),
        ["a", "extra", "b"]
    );
    file(&at("one/p2.safetensors"), &["b", "extra"]);
    refused(
        &at("one"),
        &["\"extra\"", "p1.safetensors", "p2.safetensors"],
    );
}

#[test]
fn half_a_checkpoint_is_refused_with_what_is_missing() {
    let dir = TempDir::new().unwrap();
    let at = |path: &str| dir.path().join(path);
    let split = |folder: &str, names: &[&str]| {
        for (number, name) in names.iter().enumerate() {
            file(&at(folder).join(name), &[&format!("t{number}")]);
        }
    };
    let of_three = [
        "model-00001-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
    ];
    split("gap", &of_three);
    refused(
        &at("gap"),
        &["model-00002-of-00003.safetensors", "missing", "one of 3"],
    );
    split("from0", &["m_0_of_2.safetensors"]);
    refused(&at("from0"), &["m_1_of_2.safetensors", "missing"]);
    split("from0", &["m_0_of_2.safetensors", "m_1_of_2.safetensors"]);
    assert_eq!(names(&Checkpoint::open(at("from0")).unwrap()), ["t0", "t1"]);
    split("many", &["m-1-of-18446744073709551615.safetensors"]);
    refused(&at("many"), &["m-2-of-", "and more"]);
    split(
        "mixed",
        &[
            "model-00001-of-00001.safetensors",
            "model-00001-of-00002.safetensors",
        ],
    );
    refused(&at("mixed"), &["-of-00001", "-of-00002", "two checkpoints"]);
    split(
        "both",
        &["model-00001-of-00001.safetensors", "model.safetensors"],
    );
    refused(
        &at("both"),
        &["model.safetensors", "-of-00001", "two checkpoints"],
    );
    // An index says what the checkpoint is, unless the file is there that comes before any index.
    index(
        &at("both"),
        json!({ "t0": "model-00001-of-00001.safetensors" }),
    );
    refused(
        &at("both"),
        &["model.safetensors", INDEX, "two checkpoints"],
    );
    fs::remove_file(at("both/model.safetensors")).unwrap();
    fs::write(at("both/other.safetensors.tmp"), b"").unwrap();
    assert_eq!(names(&Checkpoint::open(at("both")).unwrap()), ["t0"]);
    split(
        "llama",
        &["consolidated.00.safetensors", "consolidated.02.safetensors"],
    );
    refused(&at("llama"), &["consolidated.01.safetensors is missing"]);
    split("series", &["shard_0.safetensors", "shard_2.safetensors"]);
    refused(&at("series"), &["shard_1.safetensors is missing"]);
    split(
        "over",
        &[
            "m-1-of-2.safetensors",
            "m-2-of-2.safetensors",
            "m-3-of-2.safetensors",
        ],
    );
    refused(
        &at("over"),
        &["m-3-of-2.safetensors", "one more than the 2"],
    );

    // The index of another library, and two of them.
    let of_diffusers = "diffusion_pytorch_model.safetensors.index.json";
    split(
        "unet",
        &["diffusion_pytorch_model-00001-of-00002.safetensors"],
    );
    let map = json!({
        "t0": "diffusion_pytorch_model-00001-of-00002.safetensors",
        "t1": "diffusion_pytorch_model-00002-of-00002.safetensors",
    });
    let text = json!({ "weight_map": map }).to_string();
    fs::write(at("unet").join(of_diffusers), &text).unwrap();
    refused(
        &at("unet"),
        &["00002-of-00002.safetensors is missing", "\"t1\""],
    );
    fs::write(at("unet/other.safetensors.index.json"), &text).unwrap();
    refused(&at("unet"), &["two indexes", of_diffusers]);

    // An index whose link leads nowhere.
    split("link", &["model-00001-of-00001.safetensors"]);
    symlink("../blobs/gone", at("link").join(INDEX)).unwrap();
    refused(&at("link"), &[INDEX]);

    for unfinished in [
        "a.safetensors.incomplete",
        "model.safetensors.aria2",
        "0f3c.incomplete",
        "b.safetensors.tmp",
    ] {
        let folder = format!("unfinished/{unfinished}.d");
        split(&folder, &["a.safetensors"]);
        fs::write(at(&folder).join(unfinished), b"").unwrap();
        refused(&at(&folder), &[unfinished, "not written to its end"]);
    }

    // The newest step is not passed over for an older one.
    split(
        "run/global_step_1/actor/huggingface",
        &["model.safetensors"],
    );
    split("run/global_step_2/actor/huggingface", &of_three);
    refused(
        &at("run"),
        &["global_step_2", "model-00002-of-00003.safetensors"],
    );
    fs::write(at("run/latest_checkpointed_iteration.txt"), "30").unwrap();
    refused(&at("run"), &["global_step_30 is missing"]);
}

#[test]
fn checkpoint_refuses_pickles_and_says_what_to_do() {
    let dir = TempDir::new().unwrap();
    let at = |path: &str| dir.path().join(path);
    let write = |path: &str, bytes: &[u8]| {
        fs::create_dir_all(at(path).parent().unwrap()).unwrap();
        fs::write(at(path), bytes).unwrap();
    };
    let zip = b"PK\x03\x04and so on";
    write("x.pt", zip);
    write("no-ending", b"\x80\x02}q\x00.");
    write("it's.ckpt", zip);
    for (path, into) in [
        ("x.pt", "x.safetensors"),
        ("no-ending", "no-ending.safetensors"),
        ("it's.ckpt", r"it'\''s.safetensors'"),
    ] {
        refused(
            &at(path),
            &[
                "pickled",
                "Only if you trust who wrote it",
                "torch.load",
                into,
                "weights_only=True",
            ],
        );
    }
    write("hf/pytorch_model.bin", zip);
    write("hf/config.json", b"{}");
    refused(
        &at("hf"),
        &["pytorch_model.bin", "save_pretrained", "hf-safetensors"],
    );
    write("ds/zero_to_fp32.py", b"");
    write("ds/global_step_1/mp_rank_00_model_states.pt", zip);
    refused(&at("ds/global_step_1"), &["mp_rank_00_model_states.pt"]);
    write("dcp/__0_0.distcp", zip);
    refused(&at("dcp"), &["__0_0.distcp", "dcp_to_torch"]);
    write("verl/global_step_3/actor/model_world_size_2_rank_0.pt", zip);
    write("verl/global_step_3/actor/huggingface/config.json", b"{}");
    refused(
        &at("verl"),
        &["model_world_size_2_rank_0.pt", "verl.model_merger", "actor"],
    );
    // An older step that could be read is not what was asked for.
    file(&at("verl/global_step_2/model.safetensors"), &["a"]);
    refused(&at("verl"), &["verl.model_merger"]);
    // One of them next to weights is no reason to refuse the weights.
    write("verl/global_step_2/training_args.bin", zip);
    let found = Checkpoint::open(at("verl/global_step_2")).unwrap();
    assert_eq!(found.files(), []);
    // What a safetensors file begins with is a number that may look like this.
    let names: Vec<_> = (0..9).map(|at| format!("tensor{at}")).collect();
    file(
        &at("x.bin"),
        &names.iter().map(String::as_str).collect::<Vec<_>>(),
    );
    Checkpoint::open(at("x.bin")).unwrap();
}

#[test]
fn checkpoint_takes_along_what_the_model_needs() {
    let dir = TempDir::new().unwrap();
    // As the cache of Hugging Face has it.
    let at = dir.path().join("models--m/snapshots/0123");
    let at = &*at;
    file(&at.join("model.safetensors"), &["a"]);
    let blob = dir.path().join("models--m/blobs/blob");
    fs::create_dir_all(blob.parent().unwrap()).unwrap();
    fs::write(&blob, b"of the cache").unwrap();
    let kept = [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "preprocessor_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "vocab.json",
    ];
    for name in kept {
        symlink("../../blobs/blob", at.join(name)).unwrap();
    }
    for other in [
        "optimizer.pt",
        "trainer_state.json",
        "model.py",
        ".hidden_config.json",
    ] {
        fs::write(at.join(other), b"x").unwrap();
    }
    fs::write(at.join("tokenizer.pkl"), b"x").unwrap();
    fs::create_dir(at.join("tokenizer_config.json")).unwrap();
    let status = std::process::Command::new("mkfifo")
        .arg(at.join("vocab.txt"))
        .status();
    assert!(status.unwrap().success());
    let found = Checkpoint::open(at).unwrap();
    let names: Vec<_> = found.files().iter().map(|(name, _)| &name[..]).collect();
    assert_eq!(names, kept);
    assert!(
        found
            .files()
            .iter()
            .all(|(_, bytes)| bytes == b"of the cache")
    );

    let long = fs::File::create(at.join("vocab.bpe")).unwrap();
    long.set_len(MAX_FILE + 1).unwrap();
    refused(at, &["vocab.bpe", "is longer than 67108864 bytes"]);
}

/// A directory that a pull may not touch.
#[test]
fn pull_replaces_only_what_a_pull_wrote() {
    let dir = TempDir::new().unwrap();
    let at = |path: &str| dir.path().join(path);
    let store = Store::open(at("store").to_str().unwrap()).unwrap();
    let mut writer = Writer::claim(&store, SaveOptions::default()).unwrap();
    writer.save_weights("m", &weights(&["a"])).unwrap();
    let pull = |out: &str| store.pull(&Which::Newest, None, &at(out));

    let first = pull("new/out").unwrap();
    assert_eq!(first.version, Version(1));
    writer.save_weights("m", &weights(&["b", "a"])).unwrap();
    symlink(at("new/out"), at("link")).unwrap();
    assert_eq!(pull("link").unwrap().version, Version(2));
    let replaced = Checkpoint::open(at("new/out")).unwrap();
    assert_eq!(names(&replaced).len(), 2);
    fs::create_dir(at("empty")).unwrap();
    pull("empty").unwrap();

    fs::write(at("new/out/notes.txt"), b"mine").unwrap();
    let error = pull("new/out").unwrap_err().to_string();
    assert!(error.contains("notes.txt"), "{error}");
    fs::create_dir(at("mine")).unwrap();
    for mark in [None, Some(&b"{}"[..]), Some(b"\xff")] {
        fs::write(at("mine/file"), b"x").unwrap();
        if let Some(mark) = mark {
            fs::write(at("mine/weightsync.json"), mark).unwrap();
        }
        let error = pull("mine").unwrap_err();
        assert!(matches!(error, StoreError::Occupied { .. }), "{error}");
    }
    let error = store.pull(&Which::Newest, None, Path::new("/proc"));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("mounted there"), "{error}");
    let error = pull("mine/file").unwrap_err().to_string();
    assert!(error.contains("not a directory"), "{error}");
    let error = pull("store").unwrap_err();
    assert!(matches!(error, StoreError::Occupied { .. }), "{error}");
    assert_eq!(fs::read_dir(at("new")).unwrap().count(), 1);
    assert_eq!(fs::read_dir(at("mine")).unwrap().count(), 2);
}

/// A trainer may save where it has its first weights from, and its files have the same names.
#[test]
fn pulled_file_that_was_changed_is_not_replaced() {
    let dir = TempDir::new().unwrap();
    let at = |path: &str| dir.path().join(path);
    let store = Store::open(at("store").to_str().unwrap()).unwrap();
    let options = SaveOptions {
        files: vec![("config.json".into(), b"{}".to_vec())],
        ..SaveOptions::default()
    };
    let mut writer = Writer::claim(&store, options).unwrap();
    writer.save_weights("m", &weights(&["a"])).unwrap();
    let model = ModelId::new("m").unwrap();
    let pull = || store.pull(&Which::Newest, None, &at("out"));
    for name in ["config.json", "model.safetensors"] {
        pull().unwrap();
        let file = at("out").join(name);
        // As long as before, so that the time alone tells.
        let mine = vec![b'x'; fs::read(&file).unwrap().len()];
        std::thread::sleep(std::time::Duration::from_millis(20));
        fs::write(&file, &mine).unwrap();
        let replaced = pull().unwrap_err();
        let removed = store.remove_pulled(&model, &at("out")).unwrap_err();
        for error in [replaced, removed] {
            let said = error.to_string();
            assert!(matches!(error, StoreError::Occupied { .. }), "{said}");
            assert!(
                said.contains(name) && said.contains("changed since"),
                "{said}"
            );
        }
        assert_eq!(fs::read(&file).unwrap(), mine);
        // One that is gone is no reason.
        fs::remove_file(&file).unwrap();
        pull().unwrap();
    }
    store.remove_pulled(&model, &at("out")).unwrap();
    assert!(!at("out").exists());
}

/// Stops each call at each of the moments when it says how far it is.
#[test]
fn calls_that_are_ended_leave_nothing() {
    let dir = TempDir::new().unwrap();
    let at = |path: &str| dir.path().join(path);
    file(&at("one/model.safetensors"), &["a", "b"]);
    fs::write(at("one/config.json"), b"{}").unwrap();
    let plain = Store::open(at("store").to_str().unwrap()).unwrap();
    let stopped_at = |most: usize| {
        let count = std::sync::atomic::AtomicUsize::new(0);
        plain.with_progress(move |_| {
            let before = count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            match before < most {
                true => Ok(()),
                false => Err(io::Error::new(io::ErrorKind::Interrupted, "as was asked")),
            }
        })
    };
    let options = PushOptions::default();
    let mut moments = 0;
    while let Err(error) = stopped_at(moments).push(Checkpoint::open(at("one")).unwrap(), &options)
    {
        assert!(error.to_string().contains("as was asked"), "{error}");
        assert_eq!(plain.versions().unwrap().versions.len(), 0);
        let data = fs::read_dir(at("store/data")).map_or(0, Iterator::count);
        assert_eq!(data, 0, "after {moments}");
        moments += 1;
    }
    assert!(moments > 4, "{moments}");
    assert_eq!(plain.versions().unwrap().versions.len(), 1);

    moments = 0;
    while let Err(error) = stopped_at(moments).pull(&Which::Newest, None, &at("out/ckpt")) {
        assert!(error.to_string().contains("as was asked"), "{error}");
        assert_eq!(
            fs::read_dir(at("out")).unwrap().count(),
            0,
            "after {moments}"
        );
        moments += 1;
    }
    assert!(moments > 4, "{moments}");
    assert_eq!(names(&Checkpoint::open(at("out/ckpt")).unwrap()).len(), 2);
}

#[test]
fn calls_end_when_their_thread_is_interrupted() {
    let dir = TempDir::new().unwrap();
    let at = |path: &str| dir.path().join(path);
    let store = Store::open(at("store").to_str().unwrap()).unwrap();
    let mut writer = Writer::claim(&store, SaveOptions::default()).unwrap();
    writer.save_weights("m", &weights(&["a"])).unwrap();
    writer.save_whole_next();
    file(&at("model.safetensors"), &["a", "b"]);
    let mut calls: [(&str, &mut dyn FnMut() -> Result<()>); 4] = [
        ("load", &mut || store.load(&Which::Newest).map(drop)),
        ("pull", &mut || {
            store.pull(&Which::Newest, None, &at("out")).map(drop)
        }),
        ("save", &mut || {
            writer.save_weights("m", &weights(&["a"])).map(drop)
        }),
        ("push", &mut || {
            let checkpoint = Checkpoint::open(at("model.safetensors"))?;
            store.push(checkpoint, &PushOptions::default()).map(drop)
        }),
    ];
    let lock = File::open(at("store/lock")).unwrap();
    for is_locked in [false, true] {
        if is_locked {
            // As by another process, which holds it for long.
            lock.lock().unwrap();
        }
        for (name, call) in &mut calls {
            let ended = weightsync_engine::interruptible(
                || true,
                || {
                    // Its first look is due then.
                    std::thread::sleep(SLICE);
                    call()
                },
            );
            let error = weightsync_engine::Error::from(ended.unwrap_err());
            let is_interrupted = matches!(error, weightsync_engine::Error::Interrupted);
            assert!(is_interrupted, "{name}: {error}");
        }
    }
    drop(lock);
    assert_eq!(store.versions().unwrap().versions.len(), 1);
    assert!(!at("out").exists());
    store.load(&Which::Newest).unwrap();
    // The push has not taken the store over.
    writer.save_weights("m", &weights(&["a"])).unwrap();
}

#[test]
fn checkpoint_refuses_links_that_lead_out_of_it() {
    let dir = TempDir::new().unwrap();
    let outside = TempDir::new().unwrap();
    let at = dir.path();
    fs::write(outside.path().join("id_ed25519"), b"a private key").unwrap();
    file(&outside.path().join("model.safetensors"), &["a"]);
    file(&at.join("model.safetensors"), &["a"]);
    // A link within the checkpoint is one of its files.
    fs::write(at.join("base.json"), b"{}").unwrap();
    symlink("base.json", at.join("config.json")).unwrap();
    assert_eq!(Checkpoint::open(at).unwrap().files().len(), 1);
    for (name, to) in [
        ("tokenizer.json", "id_ed25519"),
        ("model.safetensors", "model.safetensors"),
    ] {
        let _ = fs::remove_file(at.join(name));
        symlink(outside.path().join(to), at.join(name)).unwrap();
        let error = Checkpoint::open(at).unwrap_err().to_string();
        assert!(error.contains("--follow-links"), "{error}");
        assert!(error.contains(name), "{error}");
        Checkpoint::open_following_links(at).unwrap();
        // A file that is named itself is the user's own word.
        if name.starts_with("model") {
            Checkpoint::open(at.join(name)).unwrap();
        }
        fs::remove_file(at.join(name)).unwrap();
        file(&at.join("model.safetensors"), &["a"]);
    }
}

/// Somebody exchanges it for another one in between.
#[test]
fn file_is_opened_in_the_checkpoint_that_was_opened() {
    let dir = TempDir::new().unwrap();
    let at = |path: &str| dir.path().join(path);
    for (name, text) in [("own", "{}"), ("other", "a private key")] {
        fs::create_dir_all(at(name).join("below")).unwrap();
        fs::write(at(name).join("below/config.json"), text).unwrap();
    }
    let reach = Reach::of(&at("own")).unwrap();
    fs::rename(at("own"), at("own-before")).unwrap();
    fs::rename(at("other"), at("own")).unwrap();
    let read = read_small(&at("own/below/config.json"), 64, &reach).unwrap();
    assert_eq!(read, b"{}");
}

/// The writer of the store may be somebody else.
#[test]
fn pull_writes_no_file_that_push_refuses() {
    let dir = TempDir::new().unwrap();
    let at = |path: &str| dir.path().join(path);
    let store = Store::open(at("store").to_str().unwrap()).unwrap();
    let hostile = [
        "modeling_evil.py",
        "MODELING.PY",
        "json.so",
        "config.json.pyc",
        "pytorch_model.bin",
        "Makefile",
        "-rf",
        "--use-compress-program=sh.json",
    ];
    let names = hostile.iter().chain(&["config.json", "README.md"]);
    let options = SaveOptions {
        files: names
            .map(|name| (name.to_string(), b"{}".to_vec()))
            .collect(),
        ..SaveOptions::default()
    };
    let count = options.files.len();
    let mut writer = Writer::claim(&store, options).unwrap();
    writer.save_weights("m", &weights(&["a"])).unwrap();
    assert_eq!(store.files(&Which::Newest, None).unwrap().len(), count);
    fs::set_permissions(at("store"), fs::Permissions::from_mode(0o700)).unwrap();
    store.pull(&Which::Newest, None, &at("out")).unwrap();
    let out = find::names(&at("out")).unwrap();
    assert_eq!(
        out,
        [
            "README.md",
            "config.json",
            "model.safetensors",
            super::pull::PULL_MARK
        ]
    );
    let mode = fs::metadata(at("out")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700, "others see no more than in the store");
    // 4 KiB of manifest ask for no more memory than a model's own files take.
    let storage = store.shared_storage();
    let catalog = crate::catalog::Catalog::read(&*storage).unwrap();
    let place = catalog.places[0];
    let mut hostile = crate::catalog::manifest(&*storage, place).unwrap().unwrap();
    hostile.models[0].anchor.files.last_mut().unwrap().bytes = 4 << 30;
    let sealed = crate::format::seal(&hostile);
    storage.put(&place.manifest(), &sealed).unwrap();
    let error = store.files(&Which::Newest, None).unwrap_err().to_string();
    assert!(error.contains("next to its weights"), "{error}");
}

#[test]
fn push_refuses_a_store_around_its_weights() {
    let dir = TempDir::new().unwrap();
    let at = |path: &str| dir.path().join(path);
    let model = at("runs/global_step_1/actor/huggingface/model.safetensors");
    file(&model, &["a"]);
    fs::create_dir(at("links")).unwrap();
    symlink(model, at("links/model.safetensors")).unwrap();
    let push = |source: &str, to: &str| {
        let store = Store::open(at(to).to_str().unwrap()).unwrap();
        let checkpoint = Checkpoint::open(at(source)).unwrap();
        store.push(checkpoint, &PushOptions::default())
    };
    for (source, own) in [
        ("runs", "runs"),
        ("runs", "runs/global_step_1"),
        ("runs", "runs/global_step_1/actor"),
        ("runs", "runs/global_step_1/actor/huggingface"),
        ("links/model.safetensors", "links"),
    ] {
        let error = push(source, own).unwrap_err().to_string();
        assert!(error.contains("directory of the store"), "{own}: {error}");
        assert_eq!(fs::read_dir(at(own)).unwrap().count(), 1, "{own}");
    }
    for other in ["runs/store", "runs/global_step_1"] {
        push("runs/global_step_1/actor", other).unwrap();
    }
}

/// One that died while it wrote, and one that writes now.
#[test]
fn pull_removes_what_killed_pulls_left() {
    let dir = TempDir::new().unwrap();
    let at = |path: &str| dir.path().join(path);
    let store = Store::open(at("store").to_str().unwrap()).unwrap();
    let mut writer = Writer::claim(&store, SaveOptions::default()).unwrap();
    writer.save_weights("m", &weights(&["a"])).unwrap();
    let (dead, living, other) = (
        at(&format!(".out.unfinished-{}", unique())),
        at(&format!(".out.unfinished-{}", unique())),
        at(&format!(".other.unfinished-{}", unique())),
    );
    let mine = at(".out.unfinished-notes");
    for path in [&dead, &living, &other, &mine] {
        fs::create_dir(path).unwrap();
        fs::write(path.join("model.safetensors"), b"half").unwrap();
    }
    let lock = File::open(&living).unwrap();
    lock.try_lock().unwrap();
    store.pull(&Which::Newest, None, &at("out")).unwrap();
    assert_eq!(
        (dead.exists(), living.exists(), other.exists()),
        (false, true, true)
    );
    assert!(mine.exists(), "no pull makes such a name");
}
