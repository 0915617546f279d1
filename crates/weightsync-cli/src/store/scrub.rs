//! `weightsync scrub --store`: checks everything that a store has.

use std::error::Error;
use std::fmt::Write;

use crate::output::print;
use crate::signals::Signals;
use crate::words::{counted, shown};
use crate::{FAILURE, SUCCESS};

/// The exit code where not everything could be compared.
pub const TROUBLE: u8 = 2;

/// What `scrub` is asked for.
#[derive(clap::Args)]
pub struct ScrubArgs {
    /// A store, in place of a running sender: every file, and the digest of every version
    #[arg(long, value_name = "STORE")]
    #[cfg_attr(feature = "net", arg(conflicts_with_all = ["sender", "info"]))]
    #[cfg_attr(not(feature = "net"), arg(required = true))]
    store: Option<String>,
    #[cfg(feature = "net")]
    #[command(flatten)]
    asked: crate::net::SenderArgs,
    /// As JSON
    #[cfg(not(feature = "net"))]
    #[arg(long)]
    json: bool,
}

/// Compares, and shows what came of it.
pub fn run(args: &ScrubArgs) -> Result<u8, Box<dyn Error>> {
    #[cfg(feature = "net")]
    let json = args.asked.json;
    #[cfg(not(feature = "net"))]
    let json = args.json;
    match &args.store {
        Some(store) => {
            let signals = Signals::watch()?;
            super::ended(&signals, || scrub(store, json))
        }
        #[cfg(feature = "net")]
        None => crate::net::scrub(&args.asked),
        #[cfg(not(feature = "net"))]
        None => Err("name a store: --store STORE".into()),
    }
}

fn scrub(address: &str, json: bool) -> Result<u8, Box<dyn Error>> {
    let found = super::open(address)?.scrub()?;
    // Most likely a wrong address: an empty store would pass every check.
    if found.versions == 0 && found.damage.is_empty() {
        return Err(format!("{address} has no version: check its address").into());
    }
    let mut text = String::new();
    if json {
        let damage = found.damage.iter();
        let damage = damage.map(|one| serde_json::json!({ "file": one.file, "what": one.what }));
        let line = serde_json::json!({
            "versions": found.versions,
            "sound": found.sound,
            "damage": damage.collect::<Vec<_>>(),
        });
        let _ = writeln!(text, "{line}");
    } else {
        for damage in &found.damage {
            let _ = writeln!(text, "{}", shown(&damage.to_string()));
        }
        let (sound, all) = (found.sound, counted(found.versions, "version"));
        let _ = match found.damage.is_empty() {
            true => writeln!(text, "all of {all} can be loaded"),
            false => writeln!(text, "{sound} of {all} can be loaded"),
        };
    }
    print(&text)?;
    Ok(match found.damage.is_empty() {
        true => SUCCESS,
        false => FAILURE,
    })
}
