//! Accepts connections. Strangers are few, get little time, and seldom learn that they have
//! failed.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::task::{AbortHandle, JoinSet};
use weightsync_engine::log_limiter::{self, LogLimiter};
use weightsync_mem::threads::LockExt as _;

use crate::admission::{Admitted, Answers, ConnectionLimits, Doing};
use crate::hello::{HelloError, LinkRole};
use crate::link::{GreetError, greet};
use crate::secure::Credentials;
use crate::stream::AsyncStream;

/// A pause when the system has no descriptor for another connection.
const BREATHE: Duration = Duration::from_millis(50);

/// Accepts connections until dropped. `take` gets each one that has authenticated; `busy` says
/// whether there are too many control links; `failed` gets each error of an accept.
pub async fn accept_all(
    listener: TcpListener,
    credentials: Credentials,
    busy: impl Fn() -> bool + Send + Sync + 'static,
    failed: impl Fn(&io::Error) + Send + Sync + 'static,
    take: impl Fn(AsyncStream, SocketAddr, LinkRole) + Send + Sync + 'static,
) {
    let answers = Arc::new(Mutex::new(Answers::default()));
    let log_limiter = Arc::new(Mutex::new(LogLimiter::default()));
    let take = Arc::new(take);
    let mut tasks = JoinSet::new();
    // A listener may have no new link for weeks, and warns of its certificate all the same.
    if let Some(tls) = &credentials.tls {
        tasks.spawn(tls.clone().watch());
    }
    let mut strangers: Admitted<AbortHandle> = Admitted::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            // Tasks that have ended leave the set, which would grow with every connection.
            Some(_) = tasks.join_next(), if !tasks.is_empty() => continue,
        };
        let (socket, from) = match accepted {
            Ok(accepted) => accepted,
            // The process is probably out of descriptors.
            Err(_) if weightsync_mem::raise_files() => continue,
            Err(error) => {
                failed(&error);
                log(&log_limiter, "accept", || {
                    format!("cannot accept connections: {error}")
                });
                tokio::time::sleep(BREATHE).await;
                continue;
            }
        };
        if socket.set_nodelay(true).is_err() {
            continue;
        }
        let (credentials, busy, take) = (credentials.clone(), busy(), take.clone());
        let (answers, noted) = (answers.clone(), log_limiter.clone());
        // In a task of its own, so that a slow handshake holds up no other one.
        let stranger = tasks.spawn(async move {
            let answers = || answers.locked().gives(from.ip(), Instant::now());
            match greet((socket, from), &credentials, busy, answers).await {
                Ok((stream, agreed)) => take(stream, from, agreed.role),
                Err(error) => log_refusal(&noted, from, &error),
            }
        });
        enter(&mut strangers, from.ip(), stranger, &log_limiter);
    }
}

/// Counts a connection among those that have not proved themselves, and drops the oldest if there
/// are too many.
fn enter(
    strangers: &mut Admitted<AbortHandle>,
    from: IpAddr,
    stranger: AbortHandle,
    log_limiter: &Mutex<LogLimiter>,
) {
    // Those that proved themselves or failed make room first.
    strangers.retain(|stranger| !stranger.is_finished());
    let entered = strangers.enter(
        from,
        Doing::Unproved,
        &ConnectionLimits::STRANGERS,
        stranger,
    );
    if let Ok((_, Some(oldest))) = entered {
        // Silent connections must not keep honest ones out.
        oldest.abort();
        log(log_limiter, "strangers", || {
            "too many connections had not proved themselves: the oldest was dropped".into()
        });
    }
}

/// Logs why a connection was not accepted.
fn log_refusal(log_limiter: &Mutex<LogLimiter>, from: SocketAddr, error: &GreetError) {
    // A client that gives up an attempt and tries again looks like this.
    if error.is_hang_up() {
        tracing::debug!("{from} disconnected before it was accepted: {error}");
    } else {
        log(log_limiter, cause(error), || {
            format!("refused a connection from {from}: {error}")
        });
    }
}

fn cause(error: &GreetError) -> &'static str {
    match error {
        GreetError::Slow => "slow",
        GreetError::Failed(_) => "failed",
        GreetError::Hello(HelloError::WrongToken) => "wrong token",
        GreetError::Hello(HelloError::NotWeightsync { .. }) => "not weightsync",
        GreetError::Hello(
            HelloError::Tls { .. } | HelloError::WithoutTls | HelloError::NoCertificate,
        ) => "tls",
        GreetError::Hello(_) => "hello",
    }
}

fn log(log_limiter: &Mutex<LogLimiter>, cause: &str, text: impl Fn() -> String) {
    if let Some(held_back) = log_limiter.locked().logs(cause, Instant::now()) {
        log_limiter::warn(held_back, &text());
    }
}
