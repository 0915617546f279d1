//! One publication: wait for room, write the weights, make them live in one step.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::Sender;
use crate::error::{Error, Result};
use crate::extract::WeightExtractor;
use crate::options::SendOptions;
use crate::pending::InFlight;
use crate::publish::{self, Prepared};
use crate::send_source::{Members, Resolved, resolve};
use crate::setup::{AsyncSendLimit, SenderSetup};
use crate::snapshot::Snapshot;
use crate::transport::{
    Deadline, Outstanding, SenderTransport, Source, Staging, Targets, interrupt,
};

/// How long one of several asynchronous sends is waited for before the others are
/// looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// How long the sender sleeps after such a wait.
const PAUSE: Duration = Duration::from_millis(1);

/// What a send carried.
#[derive(Default)]
struct Payload {
    /// Bytes of its tensors.
    bytes: u64,
    /// The tensors of a partial update.
    partial: Option<Vec<String>>,
    /// How long its source took to write it.
    writing: Duration,
}

impl Payload {
    /// Reads a model's weights, which `take` gets, and counts them. With a base they are a partial
    /// update of it.
    fn read(
        &mut self,
        prepared: &Prepared,
        weights: &dyn WeightExtractor,
        base: Option<&Snapshot>,
        take: &mut publish::Take<'_>,
    ) -> Result<()> {
        match base {
            None => {
                publish::whole(prepared, weights, take)?;
                self.bytes += prepared.layout.payload_bytes();
            }
            Some(base) => {
                let names = publish::partial(prepared, weights, base, take)?;
                let specs = names.iter().filter_map(|name| prepared.layout.tensor(name));
                self.bytes += specs.map(|spec| spec.range.len).sum::<u64>();
                self.partial.get_or_insert_default().extend(names);
            }
        }
        Ok(())
    }
}

impl Sender {
    /// Makes way for one more asynchronous send, or says that one is pending.
    pub(super) fn make_way(&mut self, until: Deadline) -> Result<()> {
        let (allowed, wait) = match self.setup.async_send_limit {
            AsyncSendLimit::Refuse => (1, false),
            AsyncSendLimit::Queue(bound) => (usize::from(bound.max(1)), true),
        };
        // Whether the last wait was cut short to look at the other sends.
        let mut was_short = false;
        loop {
            // Sends that are settled make way first.
            self.forget_settled()?;
            // With nothing under way the bound does not matter.
            let Some(oldest) = self.in_flight.first() else {
                return Ok(());
            };
            if self.in_flight.len() < allowed {
                return Ok(());
            }
            let left = weightsync_mem::left(until);
            // Sends are refused here, or the time for this one is over.
            if !wait || left.is_some_and(|left| left.is_zero()) {
                let versions = oldest.versions().to_vec();
                return Err(Error::SendPending { versions, allowed });
            }
            if was_short {
                // On a busy machine so short a wait only yields, and never asks whether the caller
                // interrupts it.
                interrupt::sleep(left.map_or(PAUSE, |left| left.min(PAUSE)))?;
                was_short = false;
                continue;
            }
            // Any of them makes way, and one at a time can be waited for.
            was_short = self.in_flight.len() > 1;
            let slice = match was_short {
                true => Some(left.map_or(LOOK_AGAIN, |left| left.min(LOOK_AGAIN))),
                false => left,
            };
            oldest.wait(slice)?;
        }
    }

    /// Keeps the asynchronous sends that are still on their way.
    fn forget_settled(&mut self) -> Result<()> {
        // A send that cannot be asked stays, and the caller gets the error.
        let mut failed = None;
        self.in_flight.retain(|one| match one.makes_way() {
            Ok(settled) => !settled,
            Err(error) => {
                failed = Some(error);
                true
            }
        });
        self.handles.retain(|one| one.strong_count() > 0);
        failed.map_or(Ok(()), Err)
    }

    /// Publishes in one step what is to be sent. The time in which the sources write their tensors
    /// is no wait, so the flight's deadline is later by that.
    pub(super) fn publish(
        &mut self,
        members: Members<'_>,
        options: &SendOptions,
        since: Instant,
        until: Deadline,
    ) -> Result<InFlight> {
        // Refused before anything is read or staged.
        if options.targets != Targets::All {
            self.need("a send to some workers", |can| can.subsets)?;
        }
        let models = &self.setup.models;
        // Which model each source is for.
        let resolved = resolve(members, options.model.as_deref(), models)?;
        if resolved.len() > 1 {
            self.need("several models at once", |can| can.sets)?;
        }
        let transport = &mut *self.transport;
        let (outstanding, payload) =
            stage_and_publish(&self.setup, transport, &resolved, options, until)?;
        let versions = outstanding.versions().iter();
        let versions =
            versions.map(|(index, version)| (models[*index].prepared.id.clone(), *version));
        let in_flight = InFlight {
            versions: versions.collect(),
            outstanding: vec![outstanding],
            bytes: payload.bytes,
            partial: payload.partial,
            since,
            copied: since.elapsed(),
            deadline: until.and_then(|at| at.checked_add(payload.writing)),
            settled: Mutex::new(Vec::new()),
            history: self.history.clone(),
        };
        Ok(in_flight.noted())
    }
}

/// Writes each model into its room and makes all of them live in one step.
fn stage_and_publish(
    setup: &SenderSetup,
    transport: &mut dyn SenderTransport,
    resolved: &Resolved<'_>,
    options: &SendOptions,
    until: Deadline,
) -> Result<(Box<dyn Outstanding>, Payload)> {
    // 1. What a partial update keeps.
    let indices: Vec<usize> = resolved.iter().map(|(index, _)| *index).collect();
    let bases = bases(setup, transport, &indices, options)?;
    check_others(setup, resolved, options.partial)?;
    // 2. Each model is read once, into its room.
    let mut payload = Payload::default();
    let mut writing = Duration::ZERO;
    let mut transport = Some(transport);
    let mut staging: Option<Box<dyn Staging + '_>> = None;
    for (place, (index, weights)) in resolved.iter().enumerate() {
        let prepared = &setup.models[*index].prepared;
        let copy = setup.copy;
        let mut take = |sources: &[Source<'_>]| {
            // The room for all models, once the first is found to be right.
            if let Some(transport) = transport.take() {
                staging = Some(stage(transport, &indices, until)?);
            }
            match &mut staging {
                Some(staging) => {
                    let began = Instant::now();
                    let written = staging.write(*index, sources, copy);
                    writing += began.elapsed();
                    written
                }
                None => Ok(()),
            }
        };
        payload.read(prepared, *weights, bases.get(place), &mut take)?;
    }
    payload.writing = writing;
    // The rest of each version is copied, so its pin is of no more use.
    drop(bases);
    // 3. The numbers.
    let Some(mut staging) = staging else {
        return Err(Error::EmptySet);
    };
    number(&mut *staging, setup, &indices, options)?;
    if options.wait_late {
        staging.wait_for_late();
    }
    // 4. Live, for each worker in one step.
    Ok((staging.publish(&options.targets)?, payload))
}

/// What a partial update of these models keeps the rest of, in their order; nothing for whole
/// weights.
fn bases(
    setup: &SenderSetup,
    transport: &dyn SenderTransport,
    models: &[usize],
    options: &SendOptions,
) -> Result<Vec<Snapshot>> {
    // The rest of a partial update comes from the version that the targets run.
    let mut bases = Vec::new();
    if options.partial {
        for index in models {
            bases.push(base(setup, transport, *index, &options.targets)?);
        }
    }
    Ok(bases)
}

/// Compares all weights but the first with what was set up.
fn check_others(setup: &SenderSetup, resolved: &Resolved<'_>, partial: bool) -> Result<()> {
    // The first is compared when it is read; no other may be found wrong
    // only once there is room.
    for (index, weights) in &resolved[1..] {
        let prepared = &setup.models[*index].prepared;
        publish::check(prepared, *weights, partial)?;
    }
    Ok(())
}

/// Gives the staged models the numbers that the caller wants for them.
fn number(
    staging: &mut dyn Staging,
    setup: &SenderSetup,
    models: &[usize],
    options: &SendOptions,
) -> Result<()> {
    // One number for all models.
    if let Some(version) = options.version {
        for index in models {
            staging.number(*index, version)?;
        }
    }
    // Single models may have their own: a cascade passes on the trainer's numbers.
    for index in models {
        let id = &setup.models[*index].prepared.id;
        let mut numbers = options.numbers.iter();
        if let Some((_, version)) = numbers.find(|(model, _)| model == id) {
            staging.number(*index, *version)?;
        }
    }
    Ok(())
}

/// Room for new versions of some models.
///
/// # Errors
///
/// [`Error::VersionNotNewer`] if a model has no number left: that of a peer, or of a caller, may be the
/// highest there is.
pub(super) fn stage<'a>(
    transport: &'a mut dyn SenderTransport,
    models: &[usize],
    until: Deadline,
) -> Result<Box<dyn Staging + 'a>> {
    for model in models {
        let newest = transport.version(*model);
        if newest.next() == newest {
            return Err(Error::VersionNotNewer {
                newest,
                got: newest,
            });
        }
    }
    transport.stage(models, until)
}

/// The version that a partial update keeps the rest of.
pub(super) fn base(
    setup: &SenderSetup,
    transport: &dyn SenderTransport,
    model: usize,
    targets: &Targets,
) -> Result<Snapshot> {
    let base = transport.snapshot_for(model, targets);
    let base = base.map_err(|error| error.by(&setup.scheme))?;
    base.ok_or_else(|| Error::NothingToKeep {
        model: setup.models[model].prepared.id.clone(),
    })
}
