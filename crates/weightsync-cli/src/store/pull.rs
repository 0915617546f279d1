//! `weightsync pull`: a version of a store becomes a checkpoint directory.

use std::error::Error;
use std::path::PathBuf;

use weightsync_core::{ModelId, Version};
use weightsync_store::{ModelVersion, Which};

use crate::SUCCESS;
use crate::output::print;
use crate::signals::Signals;
use crate::words::{bytes, shown};

/// What `pull` is asked for.
#[derive(clap::Args)]
pub struct PullArgs {
    /// The store
    #[arg(value_name = "STORE")]
    store: String,
    /// The directory: one that is not there, or empty, or that a pull wrote, which is then replaced
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// The version of the model [default: the newest that is whole]
    #[arg(long, value_name = "N", conflicts_with = "name")]
    version: Option<u64>,
    /// The version that has this name
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// The model [default: the only one of the store]
    #[arg(long, value_name = "NAME", value_parser = super::model)]
    model: Option<ModelId>,
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// Loads, and writes.
pub fn run(args: &PullArgs) -> Result<u8, Box<dyn Error>> {
    let signals = Signals::watch()?;
    super::ended(&signals, || pull(args))
}

fn pull(args: &PullArgs) -> Result<u8, Box<dyn Error>> {
    let which = match (args.version, &args.name) {
        (Some(version), _) => Which::Exactly(ModelVersion {
            model: args.model.clone(),
            version: Version(version),
        }),
        (None, Some(name)) => Which::Named(name.clone()),
        (None, None) => Which::Newest,
    };
    let store = super::open(&args.store)?;
    let pulled = store.pull(&which, args.model.as_ref(), &args.out)?;
    // Damage that was found on the way is told on standard error, also with `--json`.
    super::warn(&pulled.damage);
    let path = pulled.path.display().to_string();
    print(&match args.json {
        true => {
            let line = serde_json::json!({
                "model": pulled.model.as_str(),
                "version": pulled.version.0,
                "sequence": pulled.sequence,
                "digest": pulled.digest.to_string(),
                "bytes": pulled.bytes,
                "path": path,
            });
            format!("{line}\n")
        }
        false => format!(
            "{} {}: {} of weights written to {}\n",
            shown(pulled.model.as_str()),
            pulled.version,
            bytes(pulled.bytes),
            shown(&path),
        ),
    })?;
    Ok(SUCCESS)
}
