use std::fmt;

use rand::RngExt;

use super::EnvRng;
use crate::{
    Error,
    frames::{ActionKind, Actions},
    policy::{Choice, GaussianPolicy, MlpPolicy, Policy, check_len},
};

/// What an [`Env`](super::Env) takes for an action: `u32` where actions are
/// discrete, `[f32; N]` where they are `N` continuous quantities. There is no
/// other.
#[expect(private_bounds, reason = "the frames hold no other")]
pub trait Action: StoredAction {
    /// What chooses such actions.
    type Policy<'w>: Policy<Action = Self>;

    /// The policy that tensors hold, from `inputs` quantities on.
    ///
    /// # Errors
    /// As [`MlpPolicy::from_tensors`] and [`GaussianPolicy::from_tensors`].
    fn policy<'w>(
        inputs: usize,
        prefix: &str,
        tensor: impl Fn(&str) -> Option<&'w [f32]>,
    ) -> Result<Self::Policy<'w>, Error>;
}

impl Action for u32 {
    type Policy<'w> = MlpPolicy<'w>;

    fn policy<'w>(
        inputs: usize,
        prefix: &str,
        tensor: impl Fn(&str) -> Option<&'w [f32]>,
    ) -> Result<MlpPolicy<'w>, Error> {
        MlpPolicy::from_tensors(inputs, prefix, tensor)
    }
}

impl<const N: usize> Action for [f32; N] {
    type Policy<'w> = GaussianPolicy<'w, N>;

    fn policy<'w>(
        inputs: usize,
        prefix: &str,
        tensor: impl Fn(&str) -> Option<&'w [f32]>,
    ) -> Result<GaussianPolicy<'w, N>, Error> {
        GaussianPolicy::from_tensors(inputs, prefix, tensor)
    }
}

/// What collecting needs of an action.
pub(crate) trait StoredAction: Copy + fmt::Debug + Send + Sized + 'static {
    /// How frames hold it.
    const KIND: ActionKind;

    /// Draws an action evenly from `count` discrete ones, or from a range.
    fn even(count: usize, range: [f32; 2], rng: &mut EnvRng) -> Choice<Self>;

    /// Puts it into the frame `at`.
    fn store(self, at: usize, actions: &mut Actions);

    /// The action of the frame `at`; none if these actions are of another kind.
    fn load(at: usize, actions: &Actions) -> Option<Self>;

    /// Appends its bytes, little-endian.
    fn write(self, out: &mut Vec<u8>);
}

/// Whether tensors as long as `len` says hold a policy from `inputs` quantities to
/// `outputs` actions of a kind, or quantities of one.
pub(crate) fn check_policy(
    kind: ActionKind,
    inputs: usize,
    outputs: usize,
    prefix: &str,
    len: impl Fn(&str) -> Option<usize>,
) -> Result<(), Error> {
    let width = MlpPolicy::width(inputs, prefix, &len)?;
    check_len("the actor's last bias", width, outputs)?;
    if kind == ActionKind::Discrete {
        return Ok(());
    }
    // The layers alone do not tell how far actions are from their means.
    let name = format!("{prefix}.log_std");
    let Some(len) = len(&name) else {
        return Err(Error::MissingTensor { name });
    };
    check_len(&name, len, outputs)
}

impl StoredAction for u32 {
    const KIND: ActionKind = ActionKind::Discrete;

    fn even(count: usize, _: [f32; 2], rng: &mut EnvRng) -> Choice<Self> {
        Choice {
            action: rng.random_range(0..count as u32),
            log_prob: -(count as f32).ln(),
        }
    }

    fn store(self, at: usize, actions: &mut Actions) {
        if let Actions::Discrete(actions) = actions {
            actions[at] = self;
        }
    }

    fn load(at: usize, actions: &Actions) -> Option<Self> {
        actions.discrete()?.get(at).copied()
    }

    fn write(self, out: &mut Vec<u8>) {
        out.extend(self.to_le_bytes());
    }
}

impl<const N: usize> StoredAction for [f32; N] {
    const KIND: ActionKind = ActionKind::Continuous(N);

    fn even(_: usize, [low, high]: [f32; 2], rng: &mut EnvRng) -> Choice<Self> {
        Choice {
            action: std::array::from_fn(|_| rng.random_range(low..=high)),
            // The density of an even distribution is one over the volume.
            log_prob: -(N as f32) * (high - low).ln(),
        }
    }

    fn store(self, at: usize, actions: &mut Actions) {
        if let Actions::Continuous { values, .. } = actions {
            values[at * N..(at + 1) * N].copy_from_slice(&self);
        }
    }

    fn load(at: usize, actions: &Actions) -> Option<Self> {
        let (values, _) = actions.continuous().filter(|(_, len)| *len == N)?;
        values.as_chunks::<N>().0.get(at).copied()
    }

    fn write(self, out: &mut Vec<u8>) {
        out.extend(self.iter().flat_map(|quantity| quantity.to_le_bytes()));
    }
}
