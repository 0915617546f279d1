//! Slots for the next versions: a free slot is lent, and a new one is made if none is free.
//!
//! Making a slot of a large model takes long ([`populate`](crate::populate)), so a thread makes
//! it while the sender goes on. Before the first send, a large model has one slot. The thread
//! makes the slots that the options ask for once the first version is out. It makes further
//! slots only when nothing else helps.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::limits;
use crate::model::ModelDescription;
use crate::plan::{Lend, Plan};
use crate::registry::{RegistryState, SharedRegistry};
use crate::slot::Slot;
use crate::staging::StagedSlot;
use crate::threads::{self, CondvarExt as _};
use crate::wait::Deadline;

/// Slots of this size or larger are made one by one, when needed. Smaller ones are made faster than
/// a thread starts.
const LARGE: usize = 16 << 20;

/// The state of a model's growth.
#[derive(Debug)]
pub(crate) struct Growth {
    making: Making,
    /// How long the last slot took to make. The sender waits as long for a pinned slot before it
    /// makes another: at worst that doubles the time, at best it saves a whole model's memory.
    took: Duration,
    /// When to make another slot, if none comes free before.
    due: Option<Instant>,
    /// A thread waits for the slot that is being made.
    wanted: bool,
    /// Why a slot that a thread waited for could not be made.
    failed: Option<Error>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Making {
    Nothing,
    Asked,
    Begun,
}

/// Why there is no slot to lend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shortage {
    /// A slot is being made.
    Making,
    /// A slot is made at this time, unless one comes free before.
    Until(Instant),
    /// The model may not grow further.
    Pinned,
    /// There are slots, but no free set record.
    Records,
}

/// After a failure, a slot that would only have saved time is tried again after this pause.
const AGAIN: Duration = Duration::from_millis(500);

/// Refuses models whose slots this process cannot have, before the system kills it for them.
pub(crate) fn check_room(models: &[ModelDescription], slots: u8) -> Result<(), Error> {
    let bytes = models.iter().map(|model| model.layout.bytes());
    let wanted = bytes
        .fold(0, u64::saturating_add)
        .saturating_mul(slots.into());
    match wanted < LARGE as u64 {
        true => Ok(()),
        false => limits::check_memory(wanted),
    }
}

/// Makes the slots that a model has before the first send: all, or only the first if they are
/// large.
pub(crate) fn first_slots(count: u8, bytes: usize) -> Result<(Vec<Arc<Slot>>, Growth), Error> {
    let count = if bytes < LARGE { count } else { 1 };
    let since = Instant::now();
    // The caller waits for these slots, so nothing stops them.
    let stop = AtomicBool::new(false);
    let slots = (0..count).map(|_| Slot::new(bytes, &stop).map(Arc::new));
    let slots = slots.collect::<Result<_, _>>()?;
    let growth = Growth {
        making: Making::Nothing,
        took: since.elapsed() / count.into(),
        due: None,
        wanted: false,
        failed: None,
    };
    Ok((slots, growth))
}

/// Starts the thread that makes slots. It ends when [`SharedRegistry::close`] is called.
pub(crate) fn start(shared: Arc<SharedRegistry>) -> Result<JoinHandle<()>, Error> {
    threads::spawn("slots", move || shared.make_slots()).map_err(|source| Error::Os {
        action: "starting the thread that makes slots",
        source,
    })
}

/// Lends slots for the models that have none yet, in order, as far as possible. Returns the reason
/// if a slot or a set record is missing; a waiting thread then tries again after a change.
pub(crate) fn lend(
    shared: &SharedRegistry,
    models: &[usize],
    parts: &mut Vec<StagedSlot>,
    max_slots: u8,
    deadline: Deadline,
) -> Result<Option<Shortage>, Error> {
    // The lock is held from the look at the pins to the loan. A pin that comes later is on a set
    // that some mailbox names, and no mailbox names a free slot.
    let mut state = shared.state();
    // Heads and records before data pins, and again after each change of a mailbox.
    let mut records = shared.observe(&mut state);
    while let Some(&model) = models.get(parts.len()) {
        // A slot is free if no set needs it, it is not being written, and no reader may be reading
        // it.
        let pinned = shared.pinned(&mut state, model, records);
        let mut decided = state.plan.lend(model, pinned, max_slots);
        // Answers that their workers no longer need are given up before memory is spent or time is
        // lost.
        if !matches!(decided, Lend::Slot(_))
            && shared.decide(&mut state, |plan, steps| plan.clear_taken(steps))
        {
            records = shared.observe(&mut state);
            let pinned = shared.pinned(&mut state, model, records);
            decided = state.plan.lend(model, pinned, max_slots);
        }
        let short = match decided {
            Lend::Slot(slot) => {
                // The next shortage has its own wait and its own failure.
                state.growth[model].due = None;
                state.growth[model].failed = None;
                let file = state.slots[model][usize::from(slot)].clone();
                parts.push(StagedSlot::new(model, slot, file));
                continue;
            }
            Lend::Grow { needed } => shared.grow(&mut state, model, needed, deadline)?,
            Lend::Wait => Shortage::Pinned,
        };
        // Delivering to queues frees slots later.
        shared.deliver(&mut state);
        return Ok(Some(short));
    }
    // Without a free record the publication could notify nobody, so the sender waits before it
    // writes.
    if !state.plan.has_record(records) && shared.decide(&mut state, Plan::clear_taken) {
        records = shared.observe(&mut state);
    }
    let has_record = state.plan.has_record(records);
    Ok((!has_record).then_some(Shortage::Records))
}

impl SharedRegistry {
    /// Requests another slot of a model, at once if it is `needed` in any case.
    fn grow(
        &self,
        state: &mut RegistryState,
        model: usize,
        needed: bool,
        deadline: Deadline,
    ) -> Result<Shortage, Error> {
        let growth = &mut state.growth[model];
        // Taken: the thread that waited gets the error, and a later request is tried again.
        if let Some(error) = growth.failed.take() {
            if needed {
                return Err(error);
            }
            // A worker may still free a slot, so keep trying until then.
            growth.due = Some(Instant::now() + growth.took.max(AGAIN));
            return Ok(Shortage::Pinned);
        }
        if growth.making == Making::Nothing {
            let now = Instant::now();
            // Counted from the first shortage. The caller's deadline may come earlier, and then the
            // slot is requested in time.
            let due = *growth.due.get_or_insert(now + growth.took);
            let due = deadline.map_or(due, |deadline| deadline.min(due));
            if !needed && now < due {
                return Ok(Shortage::Until(due));
            }
            // One thread makes all slots, so one is woken.
            growth.making = Making::Asked;
            self.asked.notify_one();
        }
        // A thread waits for the slot, so a failure must reach that thread. A slot that is made
        // ahead may fail in silence.
        growth.wanted = true;
        Ok(Shortage::Making)
    }

    /// Requests the slots that the options ask for, for models that were published: the next
    /// version needs them.
    pub(crate) fn make_ahead(&self, state: &mut RegistryState) {
        for (model, growth) in state.growth.iter_mut().enumerate() {
            let short = state.plan.slots(model) < self.slots;
            if short && growth.making == Making::Nothing && !state.plan.version(model).is_none() {
                growth.making = Making::Asked;
                self.asked.notify_one();
            }
        }
    }

    /// Makes slots when they are requested.
    fn make_slots(&self) {
        let mut state = self.state();
        // The lock is held from this look until the wait below, and `close` takes it after it has
        // set the word. So the wake-up is not missed.
        while !self.is_closed() {
            let mut models = state.growth.iter();
            let asked = models.position(|growth| growth.making == Making::Asked);
            let Some(model) = asked else {
                state = self.asked.wait_at_most(state, None);
                continue;
            };
            state.growth[model].making = Making::Begun;
            // Making takes seconds for a large model. Sends, joins and reports go on meanwhile.
            drop(state);
            let since = Instant::now();
            let bytes = self.models[model].model.slot_bytes();
            let make = || {
                if bytes >= LARGE {
                    limits::check_memory(bytes as u64)?;
                }
                Slot::new(bytes, &self.ends)
            };
            let made = catch_unwind(AssertUnwindSafe(make));
            // Threads that wait for the slot must learn of a panic, too.
            let made = made.unwrap_or_else(|_| {
                let source = std::io::Error::other("it panicked");
                let action = "making a slot";
                Err(Error::Os { action, source })
            });
            state = self.state();
            let growth = &mut state.growth[model];
            growth.making = Making::Nothing;
            let wanted = std::mem::take(&mut growth.wanted);
            match made {
                // A sender that closes has dropped its slots under this lock, and takes no new one.
                Ok(slot) if !self.is_closed() => {
                    growth.took = since.elapsed();
                    self.add_slot(&mut state, model, Arc::new(slot));
                    self.make_ahead(&mut state);
                }
                Ok(_) => {}
                Err(error) if wanted => growth.failed = Some(error),
                // Tried again when a thread needs it.
                Err(_) => {}
            }
            drop(state);
            // Rung without the lock, which the threads that wake take at once.
            self.bells.ring();
            state = self.state();
        }
    }
}

#[cfg(test)]
mod tests;
