//! Limits log lines to one a minute for each cause, so that an attacker cannot fill the log.
//!
//! The input and the output of the limiter are plain values; the caller brings the time.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

/// How often one cause is logged.
const LOG_EVERY: Duration = Duration::from_secs(60);

/// How many causes are remembered.
const CAUSES: usize = 64;

/// When each cause was logged last.
#[derive(Debug, Default)]
pub struct LogLimiter {
    logged: HashMap<String, Logged>,
}

#[derive(Debug, Clone, Copy)]
struct Logged {
    at: Instant,
    held_back: u64,
}

impl LogLimiter {
    /// Whether to log a cause now, and how many lines were held back since the last one.
    pub fn logs(&mut self, cause: &str, now: Instant) -> Option<u64> {
        if let Some(logged) = self.logged.get_mut(cause) {
            // Counted, so that the next line says how many there were.
            if now.duration_since(logged.at) < LOG_EVERY {
                logged.held_back += 1;
                return None;
            }
            let held_back = std::mem::take(&mut logged.held_back);
            logged.at = now;
            return Some(held_back);
        }
        // The table stays small, also if an attacker makes up causes: old ones go first, and then
        // nothing new is logged.
        if self.logged.len() >= CAUSES {
            self.logged
                .retain(|_, logged| now.duration_since(logged.at) < LOG_EVERY);
            if self.logged.len() >= CAUSES {
                return None;
            }
        }
        let logged = Logged {
            at: now,
            held_back: 0,
        };
        self.logged.insert(cause.into(), logged);
        Some(0)
    }
}

/// Logs a warning, and how many similar ones were held back.
pub fn warn(held_back: u64, text: &str) {
    match held_back {
        0 => tracing::warn!("{text}"),
        more => tracing::warn!("{text} (and {more} like it before)"),
    }
}

/// Logs that a worker was refused, with the reason.
pub fn refused(reason: &str) {
    warn_rarely(&format!("a worker was refused: {reason}"));
}

/// Logs a warning, once a minute: what causes it may be tried again and again.
pub fn warn_rarely(text: &str) {
    static LOGGED: LazyLock<Mutex<LogLimiter>> = LazyLock::new(Mutex::default);
    // In a forked child the lock may be held for ever.
    let held_back = match LOGGED.try_lock() {
        Ok(mut logged) => logged.logs(text, Instant::now()),
        Err(_) => Some(0),
    };
    if let Some(held_back) = held_back {
        warn(held_back, text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_logged_once_a_minute() {
        let (mut log_limiter, start) = (LogLimiter::default(), Instant::now());
        assert_eq!(log_limiter.logs("wrong token", start), Some(0));
        for _ in 0..5 {
            assert_eq!(log_limiter.logs("wrong token", start), None);
        }
        assert_eq!(log_limiter.logs("slow", start), Some(0));
        assert_eq!(log_limiter.logs("wrong token", start + LOG_EVERY), Some(5));
        for cause in 0..1000 {
            let _ = log_limiter.logs(&cause.to_string(), start + LOG_EVERY);
        }
        assert!(log_limiter.logged.len() <= CAUSES);
    }
}
