//! The collector of the demo, of either kind.

use std::time::Duration;

use weightsync_engine::{Report, Snapshot, Version, WeightExtractor, WorkerStatus};
use weightsync_rl::{
    Error,
    collector::{Batch, MultiAsync, MultiSync},
};

/// Workers that wait for each update, or that go on meanwhile.
pub enum DemoWorkers {
    Sync(MultiSync),
    Async(MultiAsync),
}

/// Evaluates an expression for the collector of either kind.
macro_rules! either {
    ($workers:expr, $collector:ident => $body:expr) => {
        match $workers {
            DemoWorkers::Sync($collector) => $body,
            DemoWorkers::Async($collector) => $body,
        }
    };
}

impl DemoWorkers {
    pub fn next_batch(&mut self) -> Result<Batch, Error> {
        either!(self, collector => collector.next_batch())
    }

    pub fn update_policy_weights(
        &mut self,
        weights: &impl WeightExtractor,
    ) -> Result<Report, Error> {
        either!(self, collector => collector.update_policy_weights(weights))
    }

    pub fn set_deadline(&mut self, deadline: Duration) {
        either!(self, collector => collector.set_deadline(deadline));
    }

    pub fn version(&self) -> Version {
        either!(self, collector => collector.version())
    }

    pub fn worker_versions(&self) -> Vec<WorkerStatus> {
        either!(self, collector => collector.worker_versions())
    }

    pub fn snapshot(&self) -> Result<Snapshot, Error> {
        either!(self, collector => collector.snapshot())
    }

    pub fn shutdown(self) {
        either!(self, collector => collector.shutdown());
    }
}
