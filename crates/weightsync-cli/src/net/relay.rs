//! `weightsync relay`: one per host, next to the workers.

use std::{error::Error, path::PathBuf, thread, time::Duration};

use weightsync_net::{Distributed, Relay};

use super::{KeyArgs, SenderCredentials};
use crate::SUCCESS;
use crate::output::print;
use crate::signals::Signals;

/// How often a signal is looked for.
const LOOK: Duration = Duration::from_millis(50);

/// What `relay` is asked for.
#[derive(clap::Args)]
pub struct RelayArgs {
    /// The sender, as HOST:PORT
    #[arg(long, value_name = "HOST:PORT", required_unless_present = "info")]
    join: Option<String>,
    #[command(flatten)]
    key: KeyArgs,
    /// Allow unencrypted connections to other machines
    #[arg(long)]
    insecure_plaintext: bool,
    /// Certificates of encrypted links: a folder, or a file such as relay.pem [default:
    /// WEIGHTSYNC_TLS_DIR]
    #[arg(long, value_name = "PATH")]
    tls: Option<PathBuf>,
    /// Connections by which versions are fetched [default: the sender's setting]
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=8))]
    connections: Option<u8>,
}

/// Runs a relay until a signal ends it.
pub fn run(args: &RelayArgs) -> Result<u8, Box<dyn Error>> {
    let mut relay = match args.key.credentials(args.join.as_deref())? {
        SenderCredentials::Token(address, token) => Relay::with_token(address, &token),
        SenderCredentials::Info(info) => {
            // Refuses an init info of another scheme, which no relay serves.
            Distributed::endpoint_of(&info)?;
            Relay::of(&info)
        }
    };
    if let Some(connections) = args.connections {
        relay = relay.connections(connections.into());
    }
    if args.insecure_plaintext {
        relay = relay.insecure_plaintext();
    }
    if let Some(path) = &args.tls {
        relay = relay.tls(path);
    }
    let signals = Signals::watch()?;
    let stop = relay.stopper();
    // The relay has a thread of its own, because this one looks for signals.
    thread::scope(|scope| {
        // Workers need the relay also where nobody reads its news any more.
        let running = scope.spawn(|| relay.run(|news| drop(print(&format!("{news}\n")))));
        // Ends also with the relay.
        while !running.is_finished() && signals.caught().is_none() {
            thread::sleep(LOOK);
        }
        stop.stop();
        match running.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })?;
    // A signal is the usual end of a relay, and its code says so.
    Ok(match signals.caught() {
        Some(signal) => 128 + signal,
        None => SUCCESS,
    })
}
