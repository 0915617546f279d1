//! `weightsync push`, `pull`, `log`, `watch` and `scrub --store`: versions that last, as a person meets
//! them.

mod log;
mod pull;
mod push;
mod scrub;
mod watch;

use std::io;
use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressStyle};
use weightsync_core::ModelId;
use weightsync_store::{Damage, Store, Work};

use crate::signals::Signals;
use crate::words::{percent, shown};

pub use self::log::{Args as LogArgs, run as log};
pub use self::pull::{Args as PullArgs, run as pull};
pub use self::push::{Args as PushArgs, run as push};
pub use self::scrub::{Args as ScrubArgs, TROUBLE, run as scrub};
pub use self::watch::{Args as WatchArgs, run as watch};

/// A store whose calls show how far they are, and end when a signal comes.
fn open(address: &str, signals: &Signals) -> Result<Store, weightsync_store::StoreError> {
    let bar = Mutex::new(None);
    let signals = signals.clone();
    Ok(Store::open(address)?.with_progress(move |work| {
        if signals.caught().is_some() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let mut bar = bar
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        match work {
            Work::Reads(bytes) => *bar = Some(Shown::begin("reading", bytes)),
            Work::Writes(bytes) => *bar = Some(Shown::begin("writing", bytes)),
            Work::Moved(bytes) => {
                if let Some(Shown(bar)) = &*bar {
                    bar.inc(bytes);
                }
            }
            _ => {}
        }
        Ok(())
    }))
}

/// A bar that goes when it is of no more use. It is seen where errors go, if that is a terminal.
struct Shown(ProgressBar);

impl Shown {
    fn begin(what: &'static str, bytes: u64) -> Self {
        const LINE: &str =
            "{msg} {bar:30.cyan} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
        let bar = ProgressBar::new(bytes);
        let bar = match ProgressStyle::with_template(LINE) {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        };
        bar.set_message(what);
        Self(bar)
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Turns what a call came to into an exit code: what a signal ended has nothing to say.
fn ended<E: Into<Box<dyn std::error::Error>>>(
    done: Result<u8, E>,
    signals: &Signals,
) -> Result<u8, Box<dyn std::error::Error>> {
    match (done, signals.caught()) {
        (Err(_), Some(signal)) => Ok(128 + signal),
        (done, _) => done.map_err(Into::into),
    }
}

/// The name of a model, as an argument.
fn model(text: &str) -> Result<ModelId, String> {
    ModelId::new(text).map_err(|error| error.to_string())
}

/// A share of all, in percent.
fn share(share: f64) -> String {
    const ALL: u64 = 1 << 40;
    percent((share * ALL as f64) as u64, ALL)
}

/// Says what is damaged, where errors go.
fn warn(damage: &[Damage]) {
    for damage in damage {
        eprintln!("weightsync: {}", shown(&damage.to_string()));
    }
}
