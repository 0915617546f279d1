use weightsync_engine::{Epoch, Run, Snapshot, Version, WeightExtractor};

use super::{
    Batch, CollectorBuilder, Task,
    core::{FrameTally, RolloutPlan, Seeds},
    kind::Here,
    task::Roll,
};
use crate::Error;

/// A collector in the caller's own thread: no worker, no copy of frames.
///
/// **Guarantee.** A batch is collected, whole, by the weights that were given
/// last. As an iterator it yields [batches](Self::next_batch) until
/// [`total_frames`](CollectorBuilder::total_frames) have been handed out.
///
/// ```
/// use weightsync::Tensors;
/// use weightsync_rl::collector::{Sync, Task};
///
/// let mut weights = Tensors::new();
/// weights.insert("actor.0.weight", [2, 4], vec![0.0_f32; 8])?;
/// weights.insert("actor.0.bias", [2], vec![0.0_f32; 2])?;
/// let mut collector = Sync::builder(Task::CartPole)
///     .envs_per_worker(2)
///     .frames_per_batch(200)
///     .start(&weights)?;
/// let batch = collector.next_batch()?;
/// assert_eq!(batch.frames.shape, [2, 100]);
/// weights.slice_mut::<f32>("actor.0.bias")?[0] += 0.01; // in practice, training
/// collector.update_policy_weights(&weights)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Sync {
    plan: RolloutPlan,
    rollout: Box<dyn Roll>,
    weights: Snapshot,
    tally: FrameTally,
}

impl Sync {
    /// Settings to start from, for a task.
    pub fn builder(task: Task) -> CollectorBuilder<Here> {
        CollectorBuilder::new(task)
    }

    pub(super) fn start(
        settings: &CollectorBuilder<Here>,
        weights: &impl WeightExtractor,
    ) -> Result<Self, Error> {
        let plan = settings.plan()?;
        // Seeded like the first worker of the others: it sees the same frames.
        let seed = Seeds::new(settings.seed).next();
        Ok(Self {
            weights: read(&plan.task, weights, Version::FIRST)?,
            rollout: plan.task.rollout(plan.envs, seed, plan.options)?,
            plan,
            tally: settings.tally(),
        })
    }

    /// Collects the next batch.
    ///
    /// # Errors
    /// [`Error::NotFinite`] if the weights lead to frames that no policy can learn
    /// from; the next call begins new episodes. [`Error::Gym`] if an environment of
    /// Gymnasium has failed: its Python is ended, so the next calls fail too, and another
    /// collector has to be built. [`Error::NoProbability`] if the weights are to explore
    /// with none.
    pub fn next_batch(&mut self) -> Result<Batch, Error> {
        // Decided for a whole batch: all of its actions are of one kind.
        let weights = (!self.tally.begins_random()).then_some(&self.weights);
        let mut frames = self.rollout.part(weights, self.plan.steps)?;
        self.plan.shape(&mut frames);
        self.tally.frames += frames.len();
        Ok(Batch {
            frames,
            workers: Vec::new(),
            restarts: Vec::new(),
            abandoned: Vec::new(),
            dropped: 0,
        })
    }

    /// Takes a copy of weights for the batches to come, and returns the version
    /// they have from now on.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] and [`Error::TensorLen`] if the weights hold no
    /// policy for the task, [`Error::Weights`] if they cannot be read; the old
    /// version serves on.
    pub fn update_policy_weights(
        &mut self,
        weights: &impl WeightExtractor,
    ) -> Result<Version, Error> {
        let version = self.version().next();
        // The old snapshot drops only once the new one is whole.
        self.weights = read(&self.plan.task, weights, version)?;
        Ok(version)
    }

    /// The version given last.
    pub fn version(&self) -> Version {
        self.weights.version()
    }

    /// The weights given last, to save or to compare.
    pub fn snapshot(&self) -> &Snapshot {
        &self.weights
    }
}

impl Iterator for Sync {
    type Item = Result<Batch, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        (!self.tally.is_full()).then(|| self.next_batch())
    }
}

/// A copy of weights that hold a policy for the task.
fn read(task: &Task, weights: &impl WeightExtractor, version: Version) -> Result<Snapshot, Error> {
    /// There is nobody to tell apart.
    const RUN: Run = Run {
        epoch: Epoch(1),
        id: [0; 16],
    };
    // Checked before anything is copied.
    task.check(&weights.layout()?)?;
    Ok(Snapshot::of("policy", weights, RUN, version)?)
}
