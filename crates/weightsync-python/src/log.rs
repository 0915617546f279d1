//! Passes the library's warnings and messages about joins to Python's `logging`, as the logger
//! `weightsync`. While the command runs they are lines of standard error.
//!
//! Any thread may log, also a thread that must not wait for the interpreter's lock. So messages are
//! queued. The main thread logs them as soon as it runs Python, or a thread that waits in a call and
//! looks for signals.

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::sync::{Mutex, OnceLock};

use pyo3::prelude::*;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use weightsync_cli::Logger;
use weightsync_engine::transport::threads::LockExt as _;

use crate::raw;

/// The most messages in the queue.
const MOST: usize = 256;

/// The queued messages, and the number of messages that found the queue full.
static QUEUE: Mutex<(VecDeque<(u8, String)>, u64)> = Mutex::new((VecDeque::new(), 0));

/// Where messages go while the command runs. It runs no Python until its end.
static COMMAND: OnceLock<Logger> = OnceLock::new();

/// From here on messages go there.
pub fn use_logger(logger: Logger) {
    let _ = COMMAND.set(logger);
    // Callsites remember whether the listener wanted their messages, so they have to ask again.
    tracing::callsite::rebuild_interest_cache();
}

/// Starts listening for messages.
pub fn begin() {
    // Fails on a second import of the module, which has its listener already.
    let _ = tracing::subscriber::set_global_default(LogListener);
}

struct LogListener;

impl Subscriber for LogListener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        match COMMAND.get() {
            Some(logger) => logger.enabled(metadata),
            None => *metadata.level() <= Level::INFO && metadata.target().starts_with("weightsync"),
        }
    }

    fn event(&self, event: &Event<'_>) {
        // The command's messages are lines of standard error and need no Python.
        if let Some(logger) = COMMAND.get() {
            return logger.event(event);
        }
        let mut text = Text::default();
        event.record(&mut text);
        let level = match *event.metadata().level() {
            Level::ERROR => 40,
            Level::WARN => 30,
            _ => 20,
        };
        // Held for a few instructions and never while Python runs: the thread may hold any other
        // lock.
        let mut queue = QUEUE.locked();
        // Bounded: the main thread may not come to Python for long.
        if queue.0.len() < MOST {
            queue.0.push_back((level, text.message + &text.fields));
        } else {
            queue.1 += 1;
        }
        drop(queue);
        // A request that is under way does no harm: the queue is emptied once.
        raw::soon(flush);
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// An event's message, and its other fields behind it.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to text does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " ({name}: {value:?})"),
        };
    }
}

/// Logs the queued records.
pub fn flush(py: Python<'_>) {
    // Taken out before Python runs: logging may call the library, which may log.
    let (texts, lost) = {
        let mut queue = QUEUE.locked();
        std::mem::take(&mut *queue)
    };
    if texts.is_empty() && lost == 0 {
        return;
    }
    let logged = || -> PyResult<()> {
        let logger = py
            .import("logging")?
            .call_method1("getLogger", ("weightsync",))?;
        for (level, text) in texts {
            logger.call_method1("log", (level, "%s", text))?;
        }
        if lost > 0 {
            logger.call_method1("warning", ("%d more messages had no room", lost))?;
        }
        Ok(())
    };
    // An error of a log handler must not end the call that happens to flush.
    if let Err(error) = logged() {
        error.write_unraisable(py, None);
    }
}
