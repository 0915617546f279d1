//! What the library logs while a command runs: lines of standard error.

use tracing::Subscriber;
use tracing_subscriber::filter::LevelFilter;

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
    let lines = tracing_subscriber::fmt().with_max_level(level);
    Ok(lines.with_writer(std::io::stderr).finish())
}
