//! What the library logs while a command runs: lines of standard error.

use tracing::Subscriber;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;

/// The environment variable that says what is logged.
const VARIABLE: &str = "WEIGHTSYNC_LOG";

/// What takes the library's messages.
pub type Logger = Box<dyn Subscriber + Send + Sync>;

/// Writes a line to standard error for each warning and error, or for what `WEIGHTSYNC_LOG` says:
/// off, error, warn, info, debug or trace. A command that prints the damage of a store leaves it out
/// here, unless the variable is set.
///
/// # Errors
///
/// A message, if the variable is something else.
pub(crate) fn logger(prints_damage: bool) -> Result<Logger, String> {
    // An empty variable counts as none.
    let asked = std::env::var_os(VARIABLE).filter(|value| !value.is_empty());
    // Libraries below log what may be secret, such as the headers of requests.
    let own = match &asked {
        None => {
            let own = Targets::new().with_target("weightsync", LevelFilter::WARN);
            match prints_damage {
                // The command prints the damage itself, and once is enough.
                true => own.with_target(weightsync_store::DAMAGE_TARGET, LevelFilter::OFF),
                false => own,
            }
        }
        Some(value) => {
            let known = value.to_str().and_then(|value| value.parse().ok());
            let level: LevelFilter = known.ok_or_else(|| {
                let value = value.display();
                format!(
                    "{VARIABLE}: expected off, error, warn, info, debug or trace, got \"{value}\""
                )
            })?;
            // Also with the variable, only this library's own messages are shown.
            Targets::new().with_target("weightsync", level)
        }
    };
    // A standard error that nobody reads any more, or a full disk, must not end what logs.
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = lines.log_internal_errors(false);
    Ok(Box::new(
        tracing_subscriber::registry().with(lines).with(own),
    ))
}
