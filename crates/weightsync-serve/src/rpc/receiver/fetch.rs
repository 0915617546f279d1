//! Fetches versions, checks them block by block, and resumes where a connection broke.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::StatusCode;
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use weightsync_engine::transport::{Deadline, Image, ModelSpec, VersionRequest};
use weightsync_engine::{Digest, Remedy, Run, Snapshot, Version};
use weightsync_simd::crc64;

use super::inbox::{FetchedSet, Inbox};
use super::joining::JoinedSender;
use crate::http::{Ask, Fault};
use crate::rpc::wire::{
    Asked, BLOCK_BYTES, Digits, MAX_BODY, Question, RpcProblem, SetPart, WantKind, max_set,
};
use crate::rpc::{PATIENCE, PROBE, SILENCE};

/// How often a version is requested again without any progress.
const TRIES: usize = 5;

/// The time between two attempts.
const PAUSE: Duration = Duration::from_millis(100);

/// Why a fetch failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchFailure {
    /// The sender has a newer version by now, or is another sender.
    #[error("the sender no longer has this version: receive again for the newest")]
    Replaced,
    #[error(
        "block {block} of model {model} {version} is damaged: expected CRC-64 \
         {expected:016x}, got {got:016x}; the worker keeps the version it has; send or receive again"
    )]
    Damaged {
        model: usize,
        version: Version,
        block: usize,
        expected: u64,
        got: u64,
    },
    #[error(
        "model {model} {version} is damaged: expected digest {expected}, got {got}; the worker keeps \
         the version it has; send or receive again"
    )]
    Digest {
        model: usize,
        version: Version,
        expected: Digest,
        got: Digest,
    },
    #[error(
        "the sender's {version} of model {model} does not match the layout of the worker's model: the \
         worker must connect again from the sender's init info"
    )]
    Foreign { model: usize, version: Version },
    #[error("{0}")]
    Fault(#[from] Fault),
    #[error("{0}")]
    Own(#[from] weightsync_engine::Error),
}

impl From<FetchFailure> for weightsync_engine::Error {
    fn from(failure: FetchFailure) -> Self {
        // An error of this end keeps its own type and remedy. The other failures become errors of
        // the transport.
        match failure {
            FetchFailure::Own(error) => error,
            failure => Self::Transport {
                remedy: match failure {
                    FetchFailure::Foreign { .. } => Remedy::Reconnect,
                    // The next version may arrive undamaged.
                    _ => Remedy::Retry,
                },
                source: failure.into(),
            },
        }
    }
}

/// Why a question has no answer.
#[derive(Debug)]
pub(super) enum NoAnswer {
    Unknown {
        known: Vec<Version>,
    },
    Gone,
    /// The answer exists, but this worker cannot have it.
    Failed(FetchFailure),
}

/// Fetches the versions that a worker does not have, all of them or none.
pub(super) async fn set(
    session: &JoinedSender,
    inbox: &Inbox,
    sequence: u64,
    parts: &[SetPart],
) -> Result<FetchedSet, FetchFailure> {
    let mut members = Vec::with_capacity(parts.len());
    for (spec, model) in session.models.iter().zip(&session.wanted) {
        // A model that was never sent is not in the set.
        let Some(part) = parts.iter().find(|part| part.model == *model) else {
            continue;
        };
        // An unchanged model does not travel again: the set names the version that this worker has.
        let snapshot = match inbox.held(*model, part.version) {
            Some(held) => held,
            None => version(session, inbox, spec, part).await?,
        };
        members.push((*model, snapshot));
    }
    Ok(FetchedSet { sequence, members })
}

/// Fetches one version.
async fn version(
    session: &JoinedSender,
    inbox: &Inbox,
    spec: &ModelSpec,
    part: &SetPart,
) -> Result<Snapshot, FetchFailure> {
    let (model, version) = (part.model, part.version);
    // Before there is room for it.
    if !part.is_of(&spec.layout) {
        return Err(FetchFailure::Foreign { model, version });
    }
    let mut filling = Filling::new(inbox, &session.run, spec, part);
    let (mut tries, mut most) = (0, filling.at());
    // `tries` counts attempts without progress. A slow, lossy link that makes progress is never
    // given up.
    while filling.checked() < part.bytes as usize {
        let Err(failure) = filling.more(session).await else {
            continue;
        };
        // Progress counts from the highest byte so far: a damaged block sets `at` back, and the
        // repetition is no progress.
        tries = match filling.at() > most {
            true => 0,
            false => tries + 1,
        };
        most = most.max(filling.at());
        // A version that is no longer kept cannot come back.
        if matches!(failure, FetchFailure::Replaced) || tries == TRIES {
            return Err(failure);
        }
        sleep(PAUSE).await;
    }
    let mut image = filling.take();
    // The gaps between tensors came from outside too. Every image has zeros there.
    image.clear_padding();
    let snapshot = Snapshot::received(spec, session.run, version, image)?;
    let Some(expected) = part.digest else {
        return Ok(snapshot);
    };
    // Next to the thread that says that this worker is here.
    let whole = snapshot.clone();
    match spawn_blocking(move || whole.digest()).await {
        Ok(got) if got == expected => Ok(snapshot.with_digest(expected)),
        Ok(got) => Err(FetchFailure::Digest {
            model,
            version,
            expected,
            got,
        }),
        // This end is ending.
        Err(_) => Err(FetchFailure::Replaced),
    }
}

/// The part of a version that has arrived.
#[derive(Debug)]
pub(super) struct Partial {
    run: Run,
    version: Version,
    image: Image,
    /// How many bytes are there.
    at: usize,
    /// How many of them are whole blocks that were compared with their checksums.
    checked: usize,
}

/// A version that is being fetched. If it is dropped before it is whole, its bytes are kept: a
/// later fetch of the same version continues from there.
struct Filling<'a> {
    inbox: &'a Inbox,
    part: &'a SetPart,
    /// `None` once it is whole.
    partial: Option<Partial>,
}

impl<'a> Filling<'a> {
    fn new(inbox: &'a Inbox, run: &Run, spec: &ModelSpec, part: &'a SetPart) -> Self {
        let before = inbox.partial(part.model);
        let partial = match before {
            Some(same) if same.run == *run && same.version == part.version => same,
            before => {
                // If the fetch of another version broke off, at least its memory is used again.
                let spare = before.map(|partial| partial.image);
                let spare = spare.or_else(|| inbox.spare(part.model));
                let spare = spare.filter(|image| image.layout() == &spec.layout);
                Partial {
                    run: *run,
                    version: part.version,
                    image: spare.unwrap_or_else(|| Image::zeros(&spec.layout)),
                    at: 0,
                    checked: 0,
                }
            }
        };
        Self {
            inbox,
            part,
            partial: Some(partial),
        }
    }

    fn at(&self) -> usize {
        self.partial.as_ref().map_or(0, |partial| partial.at)
    }

    fn checked(&self) -> usize {
        self.partial.as_ref().map_or(0, |partial| partial.checked)
    }

    fn partial(&mut self) -> &mut Partial {
        let partial = self.partial.as_mut();
        partial.unwrap_or_else(|| unreachable!("it is taken last"))
    }

    /// The version, which is whole.
    fn take(mut self) -> Image {
        let partial = self.partial.take();
        let partial = partial.unwrap_or_else(|| unreachable!("it is taken once"));
        partial.image
    }

    /// Requests the missing bytes and stores them. Afterwards the version is whole, or there is
    /// an error.
    async fn more(&mut self, session: &JoinedSender) -> Result<(), FetchFailure> {
        let (model, version) = (self.part.model, self.part.version);
        let path = format!(
            "/v1/models/{model}/versions/{}/image?id={}",
            version.0,
            session.id()
        );
        let (from, addr) = (self.at(), session.client.addr());
        let ask = Ask {
            from: from as u64,
            ..Ask::get(path)
        };
        let mut reply = session.client.ask(ask, PATIENCE).await?;
        match (reply.status, from) {
            // Only these two answers fit the question: everything, or the rest.
            (StatusCode::OK, 0) | (StatusCode::PARTIAL_CONTENT, 1..) => {}
            // A proxy may drop the requested range.
            (StatusCode::OK, 1..) => {
                let partial = self.partial();
                (partial.at, partial.checked) = (0, 0);
            }
            // The sender keeps this version no longer, or another sender is at its address.
            (StatusCode::NOT_FOUND | StatusCode::GONE, _) => return Err(FetchFailure::Replaced),
            (status, _) => return Err(Fault::Status { addr, status }.into()),
        }
        // Each piece is stored at once: a later attempt continues after it.
        while let Some(bytes) = reply.next(PATIENCE).await? {
            self.inbox.note_received(bytes.len());
            let part = self.part;
            let partial = self.partial();
            let (at, image) = (partial.at, partial.image.bytes_mut());
            // More bytes than the version has: the peer's answer is not this version.
            let Some(target) = image.get_mut(at..at + bytes.len()) else {
                return Err(FetchFailure::Foreign { model, version });
            };
            target.copy_from_slice(&bytes);
            partial.at += bytes.len();
            // Each block is checked as it becomes whole, so damage is found before the rest is
            // fetched.
            partial.check(part)?;
        }
        // The body was read to its end, so the connection can carry another request.
        reply.keep();
        let (expected, got) = (self.part.bytes, self.at() as u64);
        match got < expected {
            true => Err(Fault::Short {
                addr,
                expected,
                got,
            }
            .into()),
            false => Ok(()),
        }
    }
}

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        // Also on cancellation: the task was aborted, or the sender disconnected.
        if let Some(partial) = self.partial.take() {
            self.inbox.keep_partial(self.part.model, partial);
        }
    }
}

impl Partial {
    /// Compares the blocks that are whole by now with their checksums. Damaged blocks are
    /// requested again.
    fn check(&mut self, part: &SetPart) -> Result<(), FetchFailure> {
        let all = self.image.bytes();
        // A block is compared once it is whole. The last one ends with the version, and may be
        // shorter.
        while self.checked < self.at {
            let end = (self.checked + BLOCK_BYTES as usize).min(all.len());
            if end > self.at {
                break;
            }
            let block = self.checked / BLOCK_BYTES as usize;
            let (expected, got) = (part.crc64[block].0, crc64(&all[self.checked..end]));
            if expected != got {
                // The damaged block is fetched again from its beginning. Everything before it
                // stays.
                self.at = self.checked;
                return Err(FetchFailure::Damaged {
                    model: part.model,
                    version: part.version,
                    block,
                    expected,
                    got,
                });
            }
            self.checked = end;
        }
        Ok(())
    }
}

/// Asks for a set, and fetches it; `None` if there was none in time.
pub(super) async fn ask(
    session: Arc<JoinedSender>,
    inbox: Arc<Inbox>,
    model: usize,
    pull: VersionRequest,
    deadline: Deadline,
) -> Result<Option<FetchedSet>, NoAnswer> {
    loop {
        let left = weightsync_mem::left(deadline);
        let question = question(&session, model, pull, left);
        // Read before the question, to notice afterwards whether the connection was renewed
        // meanwhile.
        let id = session.id();
        match asked(&session, &question, left).await {
            Ok(Some(asked)) => {
                // If the sender ends right after its answer, its end is reported after this fetch.
                let _fetching = inbox.fetching();
                match set(&session, &inbox, asked.sequence, &asked.models).await {
                    // The server that answered while the sender was silent may be another.
                    Ok(_) if session.is_broken() => {}
                    Ok(fetched) => return Ok(Some(fetched)),
                    // The set was replaced during the fetch, or the connection has failed: ask
                    // again.
                    Err(failure @ (FetchFailure::Replaced | FetchFailure::Fault(_))) => {
                        tracing::debug!(%failure, "an answer was not fetched");
                    }
                    Err(failure) => return Err(NoAnswer::Failed(failure)),
                }
            }
            // The sender's clock said so: this end's decides.
            Ok(None) => {}
            Err(Some(NoAnswer::Gone)) => find_out(&session, &inbox, id).await?,
            Err(Some(no_answer)) => return Err(no_answer),
            Err(None) => {}
        }
        // Checked in every round, so a question without a deadline ends with its sender.
        if has_ended(&inbox) {
            return Err(NoAnswer::Gone);
        }
        if weightsync_mem::passed(deadline) {
            return Ok(None);
        }
        sleep(PAUSE).await;
    }
}

/// The question for a set, with the time that is left.
fn question(
    session: &JoinedSender,
    model: usize,
    pull: VersionRequest,
    left: Option<Duration>,
) -> Question {
    let (want, version) = match pull {
        VersionRequest::AtLeast(version) => (WantKind::AtLeast, Some(version.0)),
        VersionRequest::Exactly(version) => (WantKind::Exactly, Some(version.0)),
        _ => (WantKind::Newest, None),
    };
    Question {
        want,
        model: version.map(|_| session.wanted[model]),
        version,
        // The question carries the time that is left: a deadline means nothing on another host's
        // clock.
        wait_ms: left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
    }
}

/// Waits until this end knows why its sender does not know the connection `id`.
///
/// # Errors
///
/// [`NoAnswer::Gone`] if that takes too long.
async fn find_out(session: &JoinedSender, inbox: &Inbox, id: Digits) -> Result<(), NoAnswer> {
    // The sender may have given up a broken connection, which this end finds out a
    // little later.
    let until = Instant::now() + SILENCE + 2 * PROBE + PAUSE;
    let knows = || session.is_broken() || session.id() != id || has_ended(inbox);
    while !knows() {
        if Instant::now() >= until {
            return Err(NoAnswer::Gone);
        }
        sleep(PAUSE).await;
    }
    Ok(())
}

/// Whether it is known that the sender has gone.
fn has_ended(inbox: &Inbox) -> bool {
    let end = inbox.end_by(Some(Instant::now()));
    end.is_ok_and(|end| end.is_some())
}

/// Asks one question. An error without a text may be retried.
async fn asked(
    session: &JoinedSender,
    question: &Question,
    left: Option<Duration>,
) -> Result<Option<Asked>, Option<NoAnswer>> {
    // A question without a limit ends with its connection.
    const FOR_EVER: Duration = Duration::from_secs(1 << 32);
    // The sender keeps the time and answers by then. The patience ends a wait for a sender that has
    // disappeared.
    let patience = left.map_or(FOR_EVER, |left| left.saturating_add(PATIENCE));
    let ask = session.question(question);
    let reply = session.client.ask(ask, patience).await;
    let reply = reply.map_err(|_| None)?;
    match reply.status {
        StatusCode::OK => {
            let limit = max_set(session.models.iter().map(|model| &model.layout));
            let asked = reply.json(limit, PATIENCE).await;
            asked.map(Some).map_err(|_| None)
        }
        StatusCode::NO_CONTENT => {
            reply.keep();
            Ok(None)
        }
        StatusCode::NOT_FOUND => {
            let problem: Result<RpcProblem, _> = reply.json(MAX_BODY, PATIENCE).await;
            let known = problem.map_err(|_| None)?.known;
            Err(Some(NoAnswer::Unknown { known }))
        }
        // A proxy has answered.
        status if status.is_server_error() => Err(None),
        _ => Err(Some(NoAnswer::Gone)),
    }
}
