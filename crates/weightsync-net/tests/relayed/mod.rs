//! `relayed`: `distributed:share=relay` where there is a relay. It runs next to each
//! sender, in a process of its own, and each worker that joins waits until it has joined, so that
//! workers are readers of its segment from the beginning.

use std::any::Any;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs};

use weightsync_conformance::scale::patience;
use weightsync_engine::transport::{
    Capabilities, Deadline, Endpoint, Joining, Opening, ReceiverTransport, Registration, Scheme,
    SenderTransport, interrupt, register,
};
use weightsync_engine::{AnyScheme, InitInfo, ModelId, Result};
use weightsync_net::{Relay, RelayEvent};

const WORD: &str = "relayed";

/// The init info of a relay's sender, in the environment of the relay.
const ROLE: &str = "WEIGHTSYNC_TEST_RELAY_OF";

/// How long a relay may take; a sender that does not come is told of by the scheme.
fn longest() -> Duration {
    patience(5)
}

register! {
    Registration::new(WORD, |settings| {
        let settings = settings.iter().map(|(key, value)| match value.is_empty() {
            true => key.clone(),
            false => format!("{key}={value}"),
        });
        let settings: Vec<_> = settings.chain(["share=relay".into()]).collect();
        let scheme = format!("distributed:{}", settings.join(","));
        Ok(AnyScheme::new(Relayed(scheme.parse()?)))
    })
}

/// Starts the relay of a sender. Dropping what this returns kills it.
pub(crate) fn start(info: &InitInfo) -> Box<dyn Any> {
    if !info.scheme().starts_with(WORD) {
        return Box::new(());
    }
    let state = state_file(info.endpoint());
    fs::write(&state, "").expect("a temporary file");
    let program = env::current_exe().expect("this program has a path");
    let relay = Command::new(program)
        .env(
            ROLE,
            serde_json::to_string(info).expect("it has a JSON form"),
        )
        .stdin(Stdio::piped())
        .stdout(Stdio::inherit())
        .spawn();
    Box::new(Running {
        state_file: state,
        relay: relay.expect("this program starts"),
    })
}

/// The work of a relay's process; `None` in any other.
pub(crate) fn run() -> Option<ExitCode> {
    let info = env::var(ROLE).ok()?;
    let info: InitInfo = serde_json::from_str(&info).expect("an init info");
    // The process ends with the test, however that ends.
    std::thread::spawn(|| {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        std::process::exit(0);
    });
    let state = state_file(info.endpoint());
    let ran = Relay::of(&info).run(|news| match news {
        RelayEvent::Joined { .. } => record(&state, "here"),
        _ => record(&state, ""),
    });
    if let Err(error) = ran {
        let _ = writeln!(io::stderr(), "the relay: {error}");
    }
    Some(ExitCode::FAILURE)
}

/// Says whether the relay is there, unless it is not wanted any more.
fn record(state_file: &Path, what: &str) {
    if state_file.exists() {
        let _ = fs::write(state_file, what);
    }
}

/// Where it is said whether the relay is there: empty while it is not.
fn state_file(at: &Endpoint) -> PathBuf {
    env::temp_dir().join(format!("weightsync-relay-of-{}", at.address()))
}

struct Running {
    state_file: PathBuf,
    relay: Child,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.relay.kill();
        let _ = self.relay.wait();
        let _ = fs::remove_file(&self.state_file);
    }
}

/// [`Distributed`], in which who joins waits for the relay that is coming.
#[derive(Debug)]
struct Relayed(AnyScheme);

impl Relayed {
    fn scheme(&self) -> &dyn Scheme {
        self.0.scheme()
    }
}

impl Scheme for Relayed {
    fn name(&self) -> &str {
        WORD
    }

    fn settings(&self) -> Vec<(String, String)> {
        let mut settings = self.scheme().settings();
        settings.retain(|(key, _)| key != "share");
        settings
    }

    fn capabilities(&self) -> Capabilities {
        self.scheme().capabilities()
    }

    fn allocate_endpoint(&self, models: &[ModelId], run_dir: Option<&Path>) -> Result<Endpoint> {
        self.scheme().allocate_endpoint(models, run_dir)
    }

    fn release_endpoint(&self, at: &Endpoint) {
        self.scheme().release_endpoint(at);
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Box<dyn SenderTransport>> {
        self.scheme().open(opening)
    }

    fn join(
        &self,
        at: &Endpoint,
        joining: &Joining,
        deadline: Deadline,
    ) -> Result<Box<dyn ReceiverTransport>> {
        let state = state_file(at);
        let until = Instant::now() + longest();
        let until = deadline.map_or(until, |at| at.min(until));
        // Without a file nobody has started a relay.
        while fs::read(&state).is_ok_and(|said| said.is_empty()) && Instant::now() < until {
            interrupt::sleep(Duration::from_millis(1))?;
        }
        self.scheme().join(at, joining, deadline)
    }
}
