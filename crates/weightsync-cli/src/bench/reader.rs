//! A worker process of a benchmark: takes every version as it comes.

use std::error::Error;
use std::ffi::OsString;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use weightsync_engine::worker::Spawn;
use weightsync_engine::{InitInfo, Receiver, ReceiverSetup, SetSnapshot, WaitStyle, worker};

/// What a worker of a benchmark is told.
#[derive(Serialize, Deserialize)]
pub struct ReaderTask {
    /// What lets it join.
    pub info: InitInfo,
    /// Sleep in the kernel at once, instead of yielding first.
    pub sleeps: bool,
    /// How many workers this process stands for. Several are looked after in
    /// turn, by one thread.
    pub receivers: u32,
}

/// Worker processes of the program, which is started by these words, or else is the running one.
pub fn spawn(program: &[OsString]) -> Result<Spawn, worker::WorkerError> {
    let spawn = match program {
        [] => Spawn::this_program()?,
        [program, first @ ..] => Spawn::program(program).args(first),
    };
    Ok(spawn.args(["bench", "reader"]))
}

/// Descriptors that one receiver takes at most.
const FILES: u64 = 16;

/// Runs until the sender closes.
pub(super) fn run() -> Result<(), Box<dyn Error>> {
    let process =
        worker::current()?.ok_or("this subcommand is for worker processes of a benchmark")?;
    let task: ReaderTask = process.init_value()?;
    // Several receivers share one thread, which must not spin for one of them.
    let several = task.receivers > 1;
    let wait = match task.sleeps || several {
        true => WaitStyle::Sleep,
        false => WaitStyle::YieldThenSleep,
    };
    // Before the first joins: each takes descriptors for its slots.
    if several {
        allow_files(FILES * u64::from(task.receivers))?;
    }
    // Numbers follow each other across the processes.
    let first = process.index() as u32 * task.receivers;
    let receivers = (first..first + task.receivers).map(|worker| {
        let setup = ReceiverSetup::new(task.info.clone(), worker).wait_style(wait);
        let receiver = setup.connect(Some(Duration::from_secs(60)))?;
        Ok(BenchWorker {
            receiver,
            live: None,
        })
    });
    let mut workers = receivers.collect::<Result<Vec<_>, weightsync_engine::Error>>()?;
    let ended = match &mut workers[..] {
        // With one receiver the thread sleeps in `recv`, as a worker does.
        [one] => until_closed(|| {
            one.live = Some(one.receiver.set().recv()?);
            Ok(())
        }),
        // With several, none may hold the thread up, so each is only looked at.
        all => until_closed(|| {
            for one in all.iter_mut() {
                if let Some(next) = one.receiver.set().try_recv()? {
                    one.live = Some(next);
                }
            }
            std::thread::yield_now();
            Ok(())
        }),
    };
    Ok(ended?)
}

/// A worker holds the version in use until it has the next one, as a policy
/// would.
struct BenchWorker {
    receiver: Receiver,
    live: Option<SetSnapshot>,
}

fn until_closed(
    mut receive: impl FnMut() -> Result<(), weightsync_engine::Error>,
) -> Result<(), weightsync_engine::Error> {
    loop {
        match receive() {
            Ok(()) => {}
            // The sender ends the benchmark.
            Err(weightsync_engine::Error::SenderClosed) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

/// Lets this process have so many descriptors more than it might by default.
fn allow_files(more: u64) -> Result<(), Box<dyn Error>> {
    let limit = getrlimit(Resource::Nofile);
    let wanted = more + 1024;
    // Room for the process's own files as well.
    if limit.current.is_none_or(|current| current >= wanted) {
        return Ok(());
    }
    if limit.maximum.is_some_and(|most| most < wanted) {
        let most = limit.maximum.unwrap_or_default();
        return Err(format!("this takes {wanted} descriptors, and the limit is {most}").into());
    }
    let raised = Rlimit {
        current: Some(wanted),
        maximum: limit.maximum,
    };
    Ok(setrlimit(Resource::Nofile, raised)?)
}
