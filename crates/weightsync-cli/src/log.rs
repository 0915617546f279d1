//! What the library logs while a command runs: lines of standard error.

use tracing::Subscriber;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;

/// The environment variable that says what is logged.
const VARIABLE: &str = "WEIGHTSYNC_LOG";

/// Writes a line to standard error for each warning and error, or for what `WEIGHTSYNC_LOG` says:
/// off, error, warn, info, debug or trace.
///
/// # Errors
///
/// A message, if the variable is something else.
pub fn logger() -> Result<impl Subscriber + Send + Sync, String> {
    let level = match std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        None => LevelFilter::WARN,
        Some(value) => {
            let known = value.to_str().and_then(|value| value.parse().ok());
            known.ok_or_else(|| {
                let value = value.display();
                format!(
                    "{VARIABLE}: expected off, error, warn, info, debug or trace, got \"{value}\""
                )
            })?
        }
    };
    // A standard error that nobody reads any more, or a full disk, must not end what logs.
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let lines = lines.log_internal_errors(false);
    // Libraries below log what may be secret, such as the headers of requests.
    let own = Targets::new().with_target("weightsync", level);
    Ok(tracing_subscriber::registry().with(lines).with(own))
}
