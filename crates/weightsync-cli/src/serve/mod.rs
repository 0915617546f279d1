//! `weightsync serve` and `weightsync config`: a synchronizer as a process of its own.

mod settings;
mod trinity;

use std::path::PathBuf;
use std::{error::Error, fs, panic, process};

use weightsync_serve::synchronizer::{self, Synchronizer};

use self::settings::Settings;
use crate::SUCCESS;
use crate::output::print;
use crate::signals::Signals;

/// What `serve` is asked for.
#[derive(clap::Args)]
pub struct ServeArgs {
    /// File with settings, in TOML: the names of the options below, with underscores
    #[arg(long, value_name = "FILE", env = "WEIGHTSYNC_SERVE_CONFIG")]
    config: Option<PathBuf>,
    /// Print the value of the header `Authorization` that requests need, and end
    #[arg(long)]
    print_authorization: bool,
    #[command(flatten)]
    settings: Settings,
}

/// Serves until a signal ends it.
pub fn run(args: ServeArgs) -> Result<u8, Box<dyn Error>> {
    // Flags and variables come before the file.
    let settings = match &args.config {
        Some(file) => args.settings.over(settings::read(file)?),
        None => args.settings,
    };
    if args.print_authorization {
        // Without certificates, so it works on a machine that has none.
        let value = synchronizer::authorization(&settings.access_without_tls()?);
        let value = value.ok_or(
            "no token is set, so requests need no header: it is for addresses of other machines",
        )?;
        print(&format!("{value}\n"))?;
        return Ok(SUCCESS);
    }
    let access = settings.access()?;
    let tls = access.tls.clone();
    // A thread that panics would leave parties without answers. Whatever started this process starts it
    // again, and parties join again.
    let hook = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        hook(info);
        process::exit(101);
    }));
    // Before serving: a signal during the start ends it in order.
    let signals = Signals::watch()?;
    let served = Synchronizer::serve(settings.options()?.access(access), settings.address())?;
    let at = served.address();
    // Certificates may leave loopback addresses out, so the address decides about the scheme.
    let is_encrypted = at.zip(tls).is_some_and(|(at, tls)| tls.covers(at));
    let scheme = if is_encrypted { "https" } else { "http" };
    let at = at.map(|at| at.to_string()).unwrap_or_default();
    // Parties need the synchronizer also where nobody reads its words.
    let _ = print(&format!(
        "the synchronizer is at {at}; its page is {scheme}://{at}/\n"
    ));
    let signal = signals.wait();
    // Parties are told, and threads joined, before the process ends.
    drop(served);
    Ok(128 + signal)
}

/// What `config` is asked for.
#[derive(clap::Args)]
pub struct ConfigArgs {
    #[command(subcommand)]
    action: ConfigAction,
}

#[derive(clap::Subcommand)]
enum ConfigAction {
    /// Check a file of settings for `serve`, and print them with their defaults
    Check {
        /// The file
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// Translate the `synchronizer:` block of a Trinity-RFT configuration
    ///
    /// The settings are printed in TOML. What has no counterpart is a comment.
    FromTrinity {
        /// The configuration, in YAML
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}

/// Checks or translates a file.
pub fn config(args: &ConfigArgs) -> Result<u8, Box<dyn Error>> {
    match &args.action {
        ConfigAction::Check { file } => {
            // Reading finds wrong keys and types, and checking finds settings that do not fit each
            // other.
            let settings = settings::read(file)?;
            settings.check()?;
            print(&settings.text()?)?;
        }
        ConfigAction::FromTrinity { file } => {
            let text = fs::read_to_string(file);
            let text =
                text.map_err(|error| format!("{} cannot be read: {error}", file.display()))?;
            let translated = trinity::translate(&text);
            print(&translated.map_err(|error| format!("{}: {error}", file.display()))?)?;
        }
    }
    Ok(SUCCESS)
}
