//! One fetch of a child, from its first turn to its end.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weightsync_core::Version;
use weightsync_core::delta::Scratch;

use super::super::store::{BlockState, Held};
use super::super::{IDLE, PATIENCE};
use super::{DeltaState, ON_ITS_WAY, REPLACED, Served, Serving, TURN, send, send_gone, write_both};
use crate::link::stream::Stream;
use crate::relay::Item;
use crate::wire::frame::{BLOCK, BlockHead, DeltaHead, SPAN_BLOCKS};
use crate::wire::message::{ToChild, Wanted};

/// A fetch that is served in one turn or several.
pub(super) struct Transfer {
    serving: Serving,
    fetch: Wanted,
    /// When its first turn began.
    since: Option<Instant>,
    /// When something was last sent to the child.
    last_sent: Instant,
    pub(super) held: Option<Arc<Held>>,
    /// How many of the requested blocks have been sent.
    done: usize,
}

/// How a turn ended.
enum End {
    /// The fetch has ended.
    Over,
    /// Other fetches wait: it is their turn.
    Turn,
}

impl Transfer {
    pub(super) fn new(serving: Serving, fetch: Wanted) -> Self {
        Self {
            serving,
            fetch,
            since: None,
            last_sent: Instant::now(),
            held: None,
            done: 0,
        }
    }

    fn item(&self) -> Item {
        let Wanted { model, version, .. } = self.fetch;
        Item {
            model: model.into(),
            version,
        }
    }

    /// Serves one turn. True if the fetch has ended, false if it is another fetch's turn.
    pub(super) fn serve_turn(&mut self, socket: &mut Stream) -> io::Result<bool> {
        let item = self.item();
        let Wanted { run, agent, .. } = self.fetch;
        if let Err(reason) = self.serving.has(run, item) {
            send_gone(socket, reason)?;
            return Ok(true);
        }
        if self.since.is_none() {
            self.since = Some(Instant::now());
            (self.serving.notify)(Served::Wanted { item });
        }
        let (mut bytes, begun) = (0, Instant::now());
        let end = self.serve(socket, &mut bytes);
        self.serving.note_rate(agent, bytes, begun.elapsed());
        // Between two turns the version stays held, so that the fetch can go on.
        if !matches!(end, Ok(End::Turn)) {
            self.since = None;
            if let Some(held) = self.held.take().filter(|_| end.is_err()) {
                self.serving.store.broke_off(item, held);
            }
            (self.serving.notify)(Served::Unwanted { item });
        }
        if bytes > 0 {
            (self.serving.notify)(Served::Sent { bytes });
        }
        if let Err(error) = &end {
            tracing::debug!("agent {agent} did not get all of {item:?}: {error}");
        }
        end.map(|end| matches!(end, End::Over))
    }

    /// Sends the requested blocks for one turn, and adds the bytes sent to `sent`.
    fn serve(&mut self, socket: &mut Stream, sent: &mut u64) -> io::Result<End> {
        let begun = Instant::now();
        let held = match self.held.clone() {
            Some(held) => held,
            None => match self.find(socket, begun)? {
                Ok(held) => held,
                Err(end) => return Ok(end),
            },
        };
        self.held = Some(held.clone());
        let Some(_going) = held.goes_by(socket.socket())? else {
            // Released before the child hears of it: a version that is held keeps a slot, and the
            // child may read slowly.
            self.held = None;
            drop(held);
            send_gone(socket, REPLACED)?;
            return Ok(End::Over);
        };
        let (item, serving) = (self.item(), self.serving.clone());
        let Wanted { agent, ranges, .. } = &self.fetch;
        // Ranges ascend and do not overlap. So the end of the last one bounds the work that
        // follows.
        let behind = ranges.last().and_then(|range| range.end());
        if behind.is_some_and(|behind| behind as usize > held.blocks()) {
            send_gone(socket, "the version has fewer blocks than were requested")?;
            return Ok(End::Over);
        }
        let indices = ranges.iter().flat_map(|range| {
            let first = range.first as usize;
            first..first + range.count as usize
        });
        let indices: Vec<usize> = indices.skip(self.done).collect();
        let mut delta = self.base().and_then(|base| {
            let deltas = serving.store.deltas();
            // The sender may be comparing the version now: a short wait can save sending it whole.
            let known = || !deltas.is_announced();
            serving.store.wait_until(known, IDLE);
            deltas.find(item, base, serving.rates().get(agent).copied())
        });
        let mut scratch = Scratch::new();
        let mut left = &indices[..];
        while let Some(&index) = left.first() {
            if begun.elapsed() >= TURN && serving.others_wait() {
                return Ok(End::Turn);
            }
            let deltas = serving.store.deltas();
            delta = delta.filter(|delta| !deltas.is_too_much(item.model, delta));
            let span = span_of(left, held.blocks());
            let whole = delta.as_ref().filter(|_| !span.is_empty());
            if let Some(delta) = whole {
                let index = index / SPAN_BLOCKS;
                match serving.look(delta, &held, index, &mut scratch) {
                    DeltaState::Ready(bytes, crc) => {
                        let head = DeltaHead {
                            model: item.model as u8,
                            version: item.version,
                            base: delta.base(),
                            index: index as u32,
                            bytes: bytes.len() as u32,
                            crc,
                            image_bytes: held.image_bytes(),
                        };
                        let late = Lateness::new(&serving, bytes.len());
                        write_both(socket, &head.frame(), bytes, || late.is_late())?;
                        *sent += (head.frame().len() + bytes.len()) as u64;
                        self.note_sent(span.len());
                        left = &left[span.len()..];
                        // Folding the span has made the delta larger.
                        if delta.is_folded() {
                            deltas.trim(item.model);
                        }
                        continue;
                    }
                    DeltaState::NotYet => {
                        self.send_idle(socket)?;
                        continue;
                    }
                    DeltaState::Gone => {
                        send_gone(socket, REPLACED)?;
                        return Ok(End::Over);
                    }
                    DeltaState::Dense => {}
                }
            }
            match serving.store.block(&held, index, IDLE) {
                BlockState::Ready(bytes, crc) => {
                    let head = BlockHead {
                        model: item.model as u8,
                        version: item.version,
                        index: index as u32,
                        bytes: bytes.len() as u32,
                        crc,
                        image_bytes: held.image_bytes(),
                    };
                    let late = Lateness::new(&serving, bytes.len());
                    write_both(socket, &head.frame(), bytes, || late.is_late())?;
                    *sent += bytes.len() as u64;
                    self.note_sent(1);
                    left = &left[1..];
                }
                BlockState::NotYet => self.send_idle(socket)?,
                BlockState::Gone => {
                    send_gone(socket, REPLACED)?;
                    return Ok(End::Over);
                }
            }
        }
        send(socket, &ToChild::End)?;
        Ok(End::Over)
    }

    /// The version once part of it is here, or how the turn ends without it.
    fn find(&mut self, socket: &mut Stream, begun: Instant) -> io::Result<Result<Arc<Held>, End>> {
        let (item, serving) = (self.item(), self.serving.clone());
        let store = &serving.store;
        let since = self.since.unwrap_or(begun);
        loop {
            if let Some(held) = store.get(item) {
                return Ok(Ok(held));
            }
            let over = store.is_sender() || since.elapsed() > PATIENCE;
            if over || store.is_refused(item, since) {
                send_gone(socket, "it is no longer kept")?;
                return Ok(Err(End::Over));
            }
            if begun.elapsed() >= TURN && serving.others_wait() {
                return Ok(Err(End::Turn));
            }
            store.wait_for(item, IDLE);
            self.send_idle(socket)?;
        }
    }

    /// The older version that the child has.
    fn base(&self) -> Option<Version> {
        self.fetch.base
    }

    /// Notes that this many more blocks were sent.
    fn note_sent(&mut self, blocks: usize) {
        self.last_sent = Instant::now();
        self.done += blocks;
    }

    /// Whether the version is no longer served.
    pub(super) fn is_revoked(&self) -> bool {
        self.held.as_ref().is_some_and(|held| held.is_revoked())
    }

    /// Ends once the version is no longer served.
    pub(super) async fn revoked(&self) {
        while !self.is_revoked() {
            tokio::time::sleep(IDLE).await;
        }
    }

    /// Sends `Idle` if nothing was sent for a while.
    fn send_idle(&mut self, socket: &mut Stream) -> io::Result<()> {
        if self.last_sent.elapsed() < IDLE {
            return Ok(());
        }
        self.last_sent = Instant::now();
        send(socket, &ToChild::Idle)
    }
}

impl Drop for Transfer {
    /// The child left while its fetch waited for a turn.
    fn drop(&mut self) {
        if self.since.is_none() {
            return;
        }
        let (notify, item) = (self.serving.notify.clone(), self.item());
        // Reporting may block, which no async task may do.
        let spawned = self.serving.threads.spawn("weightsync-serve", move || {
            notify(Served::Unwanted { item });
        });
        if let Err(error) = spawned {
            tracing::warn!("{item:?} still counts as wanted: {error}");
        }
    }
}

/// Decides whether to give up a block or delta that is being sent.
struct Lateness<'a> {
    serving: &'a Serving,
    begun: Instant,
    limit: Duration,
}

impl<'a> Lateness<'a> {
    /// Starts the clock for a block or delta of this many bytes.
    fn new(serving: &'a Serving, bytes: usize) -> Self {
        let blocks = bytes.div_ceil(BLOCK as usize).max(1) as u32;
        Self {
            serving,
            begun: Instant::now(),
            limit: ON_ITS_WAY * blocks,
        }
    }

    fn is_late(&self) -> bool {
        self.begun.elapsed() >= self.limit && self.serving.others_wait()
    }
}

/// The blocks of a whole span, if `left` begins with all of them; otherwise none.
fn span_of(left: &[usize], blocks: usize) -> &[usize] {
    let first = left.first().copied().unwrap_or_default();
    let count = SPAN_BLOCKS.min(blocks.saturating_sub(first));
    let begins = first.is_multiple_of(SPAN_BLOCKS) && left.len() >= count && count > 0;
    match begins && left[count - 1] == first + count - 1 {
        true => &left[..count],
        false => &[],
    }
}
