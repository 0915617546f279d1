//! `weightsync push`, `pull`, `log`, `watch` and `scrub --store`: versions that last, as a person meets
//! them.

mod log;
mod pull;
mod push;
mod scrub;
mod watch;

use std::sync::Mutex;

use indicatif::{ProgressBar, ProgressStyle};
use weightsync_core::ModelId;
use weightsync_engine::interruptible;
use weightsync_engine::transport::threads::LockExt as _;
use weightsync_store::{Damage, Store, Work};

use crate::signals::Signals;
use crate::words::{percent, shown};

pub use self::log::{LogArgs, run as log};
pub use self::pull::{PullArgs, run as pull};
pub use self::push::{PushArgs, run as push};
pub use self::scrub::{ScrubArgs, TROUBLE, run as scrub};
pub use self::watch::{WatchArgs, run as watch};

/// A store whose calls show how far they are.
fn open(address: &str) -> Result<Store, weightsync_store::StoreError> {
    let bar = Mutex::new(None);
    Ok(Store::open(address)?.with_progress(move |work| {
        let mut bar = bar.locked();
        match work {
            Work::Reads(bytes) => *bar = Shown::begin("reading", bytes),
            Work::Writes(bytes) => *bar = Shown::begin("writing", bytes),
            Work::Moved(bytes) => {
                // At its end it goes at once: what is printed next has its line.
                *bar = bar.take().filter(|Shown(bar)| {
                    bar.inc(bytes);
                    bar.length() > Some(bar.position())
                });
            }
            _ => {}
        }
        Ok(())
    }))
}

/// A bar that goes when it is of no more use. It is seen where errors go, if that is a terminal.
struct Shown(ProgressBar);

impl Shown {
    fn begin(what: &'static str, bytes: u64) -> Option<Self> {
        const LINE: &str =
            "{msg} {bar:30.cyan} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
        let bar = ProgressBar::new(bytes);
        let bar = match ProgressStyle::with_template(LINE) {
            Ok(style) => bar.with_style(style),
            Err(_) => bar,
        };
        bar.set_message(what);
        (bytes > 0).then_some(Self(bar))
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Makes a call that a signal ends, and turns what it came to into an exit code: what a signal ended has
/// nothing to say.
fn ended<E: Into<Box<dyn std::error::Error>>>(
    signals: &Signals,
    call: impl FnOnce() -> Result<u8, E>,
) -> Result<u8, Box<dyn std::error::Error>> {
    match (
        // Every wait of the library asks this, so a signal ends it soon.
        interruptible(|| signals.caught().is_some(), call),
        signals.caught(),
    ) {
        // The error is the interruption, about which there is nothing to say.
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
    // As a fraction of whole numbers, so that the rules of `percent` apply.
    const ALL: u64 = 1 << 40;
    percent((share * ALL as f64) as u64, ALL)
}

/// Says what is damaged, where errors go.
fn warn(damage: &[Damage]) {
    for damage in damage {
        eprintln!("weightsync: {}", shown(&damage.to_string()));
    }
}
