//! A worker process of a benchmark: takes every version as it comes.

use std::error::Error;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use weightsync::{InitInfo, ReceiverSetup, WaitStyle, worker};

/// What a worker of a benchmark is told.
#[derive(Serialize, Deserialize)]
pub struct Task {
    pub info: InitInfo,
    /// Sleep in the kernel at once, instead of yielding first.
    pub sleeps: bool,
}

/// Runs until the sender closes.
pub fn run() -> Result<(), Box<dyn Error>> {
    let process =
        worker::current()?.ok_or("this subcommand is for worker processes of a benchmark")?;
    let task: Task = process.init_value()?;
    let wait = if task.sleeps {
        WaitStyle::Sleep
    } else {
        WaitStyle::YieldThenSleep
    };
    let setup = ReceiverSetup::new(task.info, process.index() as u32).wait_style(wait);
    let mut receiver = setup.connect(Duration::from_secs(60))?;
    // The version in use is held until the next one is, as a policy would.
    let mut live = None;
    loop {
        match receiver.receive(None) {
            Ok(Some(snapshot)) => live = Some(snapshot),
            Ok(None) => {}
            Err(weightsync::Error::SenderClosed) => break,
            Err(error) => return Err(error.into()),
        }
    }
    drop(live);
    Ok(())
}
