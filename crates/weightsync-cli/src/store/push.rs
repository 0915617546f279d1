//! `weightsync push`: a checkpoint becomes the next version of a store.

use std::error::Error;
use std::path::PathBuf;

use serde::Serialize;
use weightsync_core::ModelId;
use weightsync_store::{Checkpoint, Keep, PushOptions, Pushed, Store};

use crate::SUCCESS;
use crate::output::print;
use crate::signals::Signals;
use crate::words::{bytes, percent, shown};

/// What `push` is asked for.
#[derive(clap::Args)]
pub struct PushArgs {
    /// A safetensors file, or a checkpoint directory
    #[arg(value_name = "SOURCE")]
    source: PathBuf,
    /// The store: a directory, which is made if it is not there
    #[arg(long, value_name = "STORE")]
    to: String,
    /// The model [default: the only one of the store, or `policy`]
    #[arg(long, value_name = "NAME", value_parser = super::model)]
    model: Option<ModelId>,
    /// A name for the version, which keeps it; it is taken from a version that had it before
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Versions that the store keeps: all, 8, or 8+every:100. Newest, named and used ones stay
    #[arg(long, value_name = "WHICH", default_value = "all")]
    keep: Keep,
    /// Save all bytes, whatever changed
    #[arg(long)]
    full: bool,
    /// Take files that links of the checkpoint lead to, wherever they are
    #[arg(long)]
    follow_links: bool,
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// Saves, and says what that took.
pub fn run(args: &PushArgs) -> Result<u8, Box<dyn Error>> {
    let signals = Signals::watch()?;
    super::ended(&signals, || push(args))
}

fn push(args: &PushArgs) -> Result<u8, Box<dyn Error>> {
    let store: Store = super::open(&args.to)?;
    // A link may lead out of the checkpoint, so they are followed only on request.
    let checkpoint = match args.follow_links {
        true => Checkpoint::open_following_links(&args.source)?,
        false => Checkpoint::open(&args.source)?,
    };
    let mut options = PushOptions::default();
    options.model.clone_from(&args.model);
    options.name.clone_from(&args.name);
    options.keep = args.keep;
    options.whole = args.full;
    let pushed = store.push(checkpoint, &options)?;
    // Damage of the store does not stop the save, and is said before the result.
    super::warn(&pushed.damage);
    print(&match args.json {
        true => json(&pushed, args.name.as_deref())?,
        false => text(&pushed, args.name.as_deref()),
    })?;
    Ok(SUCCESS)
}

/// What was saved, for people to read.
fn text(pushed: &Pushed, name: Option<&str>) -> String {
    let mut text = format!("{} {}", shown(pushed.model.as_str()), pushed.version);
    match (&pushed.saved, pushed.before) {
        (None, _) => text += " has these weights already: nothing was saved",
        (Some(saved), before) => {
            let written = bytes(saved.stored_bytes);
            let all = bytes(pushed.bytes);
            match (saved.changes, before) {
                (Some(changes), Some(before)) => {
                    let part = percent(saved.stored_bytes, pushed.bytes);
                    let changes = super::share(changes);
                    text += &format!(
                        ": {written} written for {all} of weights ({part} %); {changes} % of the \
                         elements changed since {before}"
                    );
                }
                _ => text += &format!(": {written} written for {all} of weights, all of it"),
            }
        }
    }
    match &pushed.other_files[..] {
        [] => {}
        [one] => text += &format!(", as {} is another than before", shown(one)),
        [one, ..] => text += &format!(", as {} and others are not as before", shown(one)),
    }
    if let Some(name) = name {
        text += &format!("; it is named {name}");
    }
    text + "\n"
}

#[derive(Serialize)]
struct PushLine<'a> {
    model: &'a str,
    version: u64,
    digest: String,
    bytes: u64,
    saved: bool,
    sequence: Option<u64>,
    stored_bytes: u64,
    changes: Option<f64>,
    before: Option<u64>,
    other_files: &'a [String],
    name: Option<&'a str>,
}

fn json(pushed: &Pushed, name: Option<&str>) -> serde_json::Result<String> {
    let saved = pushed.saved.as_ref();
    let line = PushLine {
        model: pushed.model.as_str(),
        version: pushed.version.0,
        digest: pushed.digest.to_string(),
        bytes: pushed.bytes,
        saved: saved.is_some(),
        sequence: saved.map(|saved| saved.sequence),
        stored_bytes: saved.map_or(0, |saved| saved.stored_bytes),
        changes: saved.map_or(Some(0.0), |saved| saved.changes),
        before: pushed.before.map(|before| before.0),
        other_files: &pushed.other_files,
        name,
    };
    Ok(serde_json::to_string(&line)? + "\n")
}
