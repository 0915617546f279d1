//! Accepting connections: strangers are few, quick, and turned away when they fail
//! too often.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

use super::causes::{self, Causes};
use super::gate::Gate;
use super::{GreetError, greet};
use crate::access::Key;
use crate::wire::hello::{HelloError, Role};

/// How many connections may be proving themselves at once.
const STRANGERS: usize = 256;

/// A pause when the system has no descriptor for another connection.
const BREATHE: Duration = Duration::from_millis(50);

/// Accepts until it is dropped; `take` is given each connection that has proved
/// itself, and `busy` says whether there are as many as may be.
pub(crate) async fn accept_all(
    listener: TcpListener,
    key: Key,
    busy: impl Fn() -> bool + Send + Sync + 'static,
    take: impl Fn(TcpStream, SocketAddr, Role) + Send + Sync + 'static,
) {
    let gate = Arc::new(Mutex::new(Gate::default()));
    let causes = Arc::new(Mutex::new(Causes::default()));
    let take = Arc::new(take);
    let mut tasks = JoinSet::new();
    let mut strangers: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = tasks.join_next(), if !tasks.is_empty() => continue,
        };
        let (mut socket, from) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                log(&causes, "accept", || {
                    format!("no connection can be accepted: {error}")
                });
                tokio::time::sleep(BREATHE).await;
                continue;
            }
        };
        let lets_in = locked(&gate).lets_in(from.ip(), Instant::now());
        if !lets_in || socket.set_nodelay(true).is_err() {
            continue;
        }
        strangers.retain(|stranger| !stranger.is_finished());
        if strangers.len() >= STRANGERS
            && let Some(oldest) = strangers.pop_front()
        {
            // Silent connections must not keep honest ones out.
            oldest.abort();
            log(&causes, "strangers", || {
                format!(
                    "more than {STRANGERS} connections had not proved themselves: the oldest was dropped"
                )
            });
        }
        let (key, busy, take) = (key.clone(), busy(), take.clone());
        let (gate, causes) = (gate.clone(), causes.clone());
        strangers.push_back(tasks.spawn(async move {
            match greet(&mut socket, &key, busy).await {
                Ok(agreed) => take(socket, from, agreed.role),
                Err(error) => {
                    // Who was told that there is no room has done nothing wrong.
                    if !matches!(error, GreetError::Hello(HelloError::TurnedAway)) {
                        locked(&gate).failed(from.ip(), Instant::now());
                    }
                    let cause = cause(&error);
                    log(&causes, cause, || {
                        format!("a connection from {from} was not let in: {error}")
                    });
                }
            }
        }));
    }
}

fn cause(error: &GreetError) -> &'static str {
    match error {
        GreetError::Slow => "slow",
        GreetError::Failed(_) => "failed",
        GreetError::Hello(HelloError::WrongToken) => "wrong token",
        GreetError::Hello(HelloError::NotWeightsync { .. }) => "not weightsync",
        GreetError::Hello(_) => "hello",
    }
}

fn log(causes: &Mutex<Causes>, cause: &str, text: impl Fn() -> String) {
    if let Some(held_back) = locked(causes).logs(cause, Instant::now()) {
        causes::warn(held_back, &text());
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
