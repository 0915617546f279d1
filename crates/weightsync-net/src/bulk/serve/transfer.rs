//! One fetch of a child, from its first turn to its end.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use weightsync_core::delta::Scratch;
use weightsync_link::stream::Stream;

use super::super::delta::Delta;
use super::super::store::{BlockState, HeldVersion};
use super::super::{IDLE, PATIENCE};
use super::{
    DeltaState, ON_ITS_WAY, REPLACED, ServeEvent, Serving, TURN, send, send_gone, write_both,
};
use crate::agent::Item;
use crate::wire::image::{BLOCK_BYTES, BlockHead, DeltaHead, SPAN_BLOCKS};
use crate::wire::message::{ToChild, WantedBlocks};

/// A fetch that is served in one turn or several.
pub(super) struct Transfer {
    serving: Serving,
    fetch: WantedBlocks,
    /// When its first turn began.
    since: Option<Instant>,
    /// When something was last sent to the child.
    last_sent: Instant,
    pub(super) held: Option<Arc<HeldVersion>>,
    /// How many of the requested blocks have been sent.
    done: usize,
}

/// How a turn ended.
enum TurnEnd {
    /// The fetch has ended.
    Over,
    /// Other fetches wait: it is their turn.
    Turn,
}

/// What came of trying to send the next blocks.
enum Step {
    Sent {
        blocks: usize,
        /// Bytes that count for the speed of the link.
        bytes: u64,
    },
    /// They are not here yet.
    NotYet,
    /// They will not come.
    Gone,
}

impl Transfer {
    pub(super) fn new(serving: Serving, fetch: WantedBlocks) -> Self {
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
        let WantedBlocks { model, version, .. } = self.fetch;
        Item {
            model: model.into(),
            version,
        }
    }

    /// Serves one turn. True if the fetch has ended, false if it is another fetch's turn.
    pub(super) fn serve_turn(&mut self, socket: &mut Stream) -> io::Result<bool> {
        let item = self.item();
        let WantedBlocks { run, agent, .. } = self.fetch;
        if let Err(reason) = self.serving.has(run, item) {
            send_gone(socket, reason)?;
            return Ok(true);
        }
        // Once for a whole fetch, however many turns it takes: one `Unwanted` answers it.
        if self.since.is_none() {
            self.since = Some(Instant::now());
            (self.serving.notify)(ServeEvent::Wanted { item });
        }
        let (mut bytes, begun) = (0, Instant::now());
        let end = self.serve(socket, &mut bytes);
        self.serving.note_rate(agent, bytes, begun.elapsed());
        // Between two turns the version stays held, so that the fetch can go on.
        if !matches!(end, Ok(TurnEnd::Turn)) {
            // When the transfer is dropped, it then reports nothing more.
            self.since = None;
            // The connection broke. The child may come back for the rest.
            if let Some(held) = self.held.take().filter(|_| end.is_err()) {
                self.serving.store.broke_off(item, held);
            }
            (self.serving.notify)(ServeEvent::Unwanted { item });
        }
        if bytes > 0 {
            (self.serving.notify)(ServeEvent::Sent { bytes });
        }
        if let Err(error) = &end {
            tracing::debug!("agent {agent} did not get all of {item:?}: {error}");
        }
        end.map(|end| matches!(end, TurnEnd::Over))
    }

    /// Sends the requested blocks for one turn, and adds the bytes sent to `sent`.
    fn serve(&mut self, socket: &mut Stream, sent: &mut u64) -> io::Result<TurnEnd> {
        let begun = Instant::now();
        let held = match self.hold(socket, begun)? {
            Ok(held) => held,
            Err(end) => return Ok(end),
        };
        let Some(_registered) = held.register(socket.socket())? else {
            // Released before the child hears of it: a version that is held keeps a slot, and the
            // child may read slowly.
            self.held = None;
            drop(held);
            send_gone(socket, REPLACED)?;
            return Ok(TurnEnd::Over);
        };
        let Some(indices) = self.blocks_left(&held) else {
            send_gone(socket, "the version has fewer blocks than were requested")?;
            return Ok(TurnEnd::Over);
        };
        let (item, serving) = (self.item(), self.serving.clone());
        let deltas = serving.store.deltas();
        let mut delta = self.find_delta();
        let mut scratch = Scratch::new();
        let mut left = &indices[..];
        while let Some(&index) = left.first() {
            if begun.elapsed() >= TURN && serving.others_wait() {
                return Ok(TurnEnd::Turn);
            }
            // The rest of a delta that takes too much memory goes as blocks.
            delta = delta.filter(|delta| !deltas.is_too_much(item.model, delta));
            let span = span_of(left, held.blocks());
            // A delta stands for a whole span, so the blocks of a part of one go as they are.
            let whole = delta.as_ref().filter(|_| !span.is_empty());
            let coded = match whole {
                Some(delta) => self.send_delta(socket, &held, (delta, span), &mut scratch)?,
                None => None,
            };
            let step = match coded {
                Some(step) => step,
                None => self.send_block(socket, &held, index)?,
            };
            match step {
                Step::Sent { blocks, bytes } => {
                    *sent += bytes;
                    self.last_sent = Instant::now();
                    self.done += blocks;
                    left = &left[blocks..];
                }
                Step::NotYet => self.send_idle(socket)?,
                Step::Gone => {
                    send_gone(socket, REPLACED)?;
                    return Ok(TurnEnd::Over);
                }
            }
        }
        send(socket, &ToChild::End)?;
        Ok(TurnEnd::Over)
    }

    /// The requested blocks that were not sent yet; `None` if the version has fewer blocks.
    fn blocks_left(&self, held: &HeldVersion) -> Option<Vec<usize>> {
        let ranges = &self.fetch.ranges;
        // Ranges ascend and do not overlap. So the end of the last one bounds the work that
        // follows.
        let behind = ranges.last().and_then(|range| range.end());
        if behind.is_some_and(|behind| behind as usize > held.blocks()) {
            return None;
        }
        let indices = ranges.iter().flat_map(|range| {
            let first = range.first as usize;
            first..first + range.count as usize
        });
        // Blocks go out in the order of the request, so a number tells which are left.
        Some(indices.skip(self.done).collect())
    }

    /// The changes since the version that the child has, if they are known or about to be.
    fn find_delta(&self) -> Option<Arc<Delta>> {
        let base = self.fetch.base?;
        let store = &self.serving.store;
        // The sender may be comparing the version now: a short wait can save sending it whole.
        store.wait_until(|| !store.deltas().is_announced(), IDLE);
        let rate = self.serving.rates().get(&self.fetch.agent).copied();
        store.deltas().find(self.item(), base, rate)
    }

    /// Sends the delta of a whole span; `None` if the span goes as blocks.
    fn send_delta(
        &self,
        socket: &mut Stream,
        held: &HeldVersion,
        (delta, span): (&Delta, &[usize]),
        scratch: &mut Scratch,
    ) -> io::Result<Option<Step>> {
        let (item, index) = (self.item(), span[0] / SPAN_BLOCKS);
        let (bytes, crc) = match self.serving.delta_state(delta, held, index, scratch) {
            DeltaState::Ready(bytes, crc) => (bytes, crc),
            DeltaState::Dense => return Ok(None),
            DeltaState::NotYet => return Ok(Some(Step::NotYet)),
            DeltaState::Gone => return Ok(Some(Step::Gone)),
        };
        let head = DeltaHead {
            model: item.model as u8,
            version: item.version,
            base: delta.base(),
            index: index as u32,
            bytes: bytes.len() as u32,
            crc,
            image_bytes: held.image_bytes(),
        };
        let head = head.frame();
        self.write(socket, &head, bytes)?;
        // Folding the span has made the delta larger.
        if delta.is_folded() {
            self.serving.store.deltas().trim(item.model);
        }
        Ok(Some(Step::Sent {
            blocks: span.len(),
            bytes: (head.len() + bytes.len()) as u64,
        }))
    }

    fn send_block(
        &self,
        socket: &mut Stream,
        held: &HeldVersion,
        index: usize,
    ) -> io::Result<Step> {
        let item = self.item();
        let (bytes, crc) = match self.serving.store.block(held, index, IDLE) {
            BlockState::Ready(bytes, crc) => (bytes, crc),
            BlockState::NotYet => return Ok(Step::NotYet),
            BlockState::Gone => return Ok(Step::Gone),
        };
        let head = BlockHead {
            model: item.model as u8,
            version: item.version,
            index: index as u32,
            bytes: bytes.len() as u32,
            crc,
            image_bytes: held.image_bytes(),
        };
        self.write(socket, &head.frame(), bytes)?;
        Ok(Step::Sent {
            blocks: 1,
            bytes: bytes.len() as u64,
        })
    }

    /// Writes a block or delta, unless that takes too long while other fetches wait.
    fn write(&self, socket: &mut Stream, head: &[u8], bytes: &[u8]) -> io::Result<()> {
        let begun = Instant::now();
        let blocks = bytes.len().div_ceil(BLOCK_BYTES as usize).max(1) as u32;
        // While no other fetch waits, a slow child is in nobody's way.
        let is_late = || begun.elapsed() >= ON_ITS_WAY * blocks && self.serving.others_wait();
        write_both(socket, head, bytes, is_late)
    }

    /// The version, which stays held from now on, or how the turn ends without it.
    fn hold(
        &mut self,
        socket: &mut Stream,
        begun: Instant,
    ) -> io::Result<Result<Arc<HeldVersion>, TurnEnd>> {
        let held = match self.held.clone() {
            Some(held) => held,
            None => match self.find(socket, begun)? {
                Ok(held) => held,
                Err(end) => return Ok(Err(end)),
            },
        };
        self.held = Some(held.clone());
        Ok(Ok(held))
    }

    /// The version once part of it is here, or how the turn ends without it.
    fn find(
        &mut self,
        socket: &mut Stream,
        begun: Instant,
    ) -> io::Result<Result<Arc<HeldVersion>, TurnEnd>> {
        let (item, serving) = (self.item(), self.serving.clone());
        let store = &serving.store;
        // From the first turn on, so that the wait does not begin again with each turn.
        let since = self.since.unwrap_or(begun);
        loop {
            if let Some(held) = store.get(item) {
                return Ok(Ok(held));
            }
            let over = store.is_sender() || since.elapsed() > PATIENCE;
            if over || store.is_refused(item, since) {
                send_gone(socket, "it is no longer kept")?;
                return Ok(Err(TurnEnd::Over));
            }
            // A version that is not here yet must not keep a turn.
            if begun.elapsed() >= TURN && serving.others_wait() {
                return Ok(Err(TurnEnd::Turn));
            }
            store.wait_for(item, IDLE);
            self.send_idle(socket)?;
        }
    }

    /// Whether the version is no longer served.
    pub(super) fn is_revoked(&self) -> bool {
        self.held.as_ref().is_some_and(|held| held.is_revoked())
    }

    /// Ends once the version is no longer served.
    pub(super) async fn revoked(&self) {
        // The store wakes threads only, so this task looks from time to time.
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
        let spawned = self.serving.threads.spawn("serve", move || {
            notify(ServeEvent::Unwanted { item });
        });
        if let Err(error) = spawned {
            tracing::warn!("{item:?} still counts as wanted: {error}");
        }
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
