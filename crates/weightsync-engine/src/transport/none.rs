//! A transport that carries nothing: the scheme `none`.

use std::path::Path;

use weightsync_core::{ModelId, Run, Version, WorkerId, WorkerReport, WorkerStatus};

use crate::error::{Error, Result};
use crate::set::SetSnapshot;
use crate::transport::{
    Attendance, Capabilities, CopyOptions, Deadline, Endpoint, Interrupter, Joining, Level,
    ModelSpec, Opening, Outstanding, ReceiverTransport, Scheme, SenderTransport, Source, Staging,
    Targets,
};

/// No synchronisation: the trainer and its workers go through the same calls,
/// and no weight ever moves.
///
/// For a model that never changes, and to measure a program without its
/// synchronisation. Sends check the weights, count versions and wait for nobody;
/// a worker's connect returns at once, with whatever weights it has, and its
/// receive returns nothing at once, whatever the timeout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoSync;

impl Scheme for NoSync {
    fn name(&self) -> &str {
        "none"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            sets: true,
            ..Capabilities::NONE
        }
    }

    fn allocate_endpoint(&self, _: &[ModelId], _: Option<&Path>) -> Result<Endpoint> {
        // An address must not be empty. Nobody looks for a sender at this one.
        Endpoint::new("nowhere", [0; 16], false)
    }

    fn open(&self, opening: &Opening<'_>) -> Result<Box<dyn SenderTransport>> {
        Ok(Box::new(NoSender {
            versions: vec![Version::NONE; opening.models.len()],
        }))
    }

    fn join(
        &self,
        _: &Endpoint,
        joining: &Joining,
        _: Deadline,
    ) -> Result<Box<dyn ReceiverTransport>> {
        Ok(Box::new(NoReceiver {
            run: Run {
                // The lowest epoch that is not taken for that of a replaced sender.
                epoch: joining.seen,
                id: [0; 16],
            },
        }))
    }
}

#[derive(Debug)]
struct NoSender {
    versions: Vec<Version>,
}

impl SenderTransport for NoSender {
    fn stage(&mut self, models: &[usize], _: Deadline) -> Result<Box<dyn Staging + '_>> {
        let numbers = models
            .iter()
            .map(|model| (*model, self.versions[*model].next()));
        Ok(Box::new(Unseen {
            numbers: numbers.collect(),
            sent: self,
        }))
    }

    fn version(&self, model: usize) -> Version {
        self.versions[model]
    }

    fn workers(&self) -> Vec<WorkerStatus> {
        Vec::new()
    }

    /// There is nobody to wait for, so nobody is waited for.
    fn wait_workers(
        &mut self,
        _: Deadline,
        _: &mut dyn FnMut(&Attendance) -> bool,
    ) -> Result<bool> {
        Ok(true)
    }

    fn take_rejected(&mut self) -> Vec<(WorkerId, String)> {
        Vec::new()
    }
}

#[derive(Debug)]
struct Unseen<'a> {
    sent: &'a mut NoSender,
    numbers: Vec<(usize, Version)>,
}

impl Staging for Unseen<'_> {
    fn tensors_mut(&mut self, _: usize) -> Vec<&mut [u8]> {
        // A loan is refused before it comes to this (`Capabilities::loan`).
        Vec::new()
    }

    fn tensor_mut(&mut self, _: usize, _: usize) -> &mut [u8] {
        &mut []
    }

    fn write(&mut self, _: usize, _: &[Source<'_>], _: CopyOptions) -> Result<()> {
        Ok(())
    }

    fn number(&mut self, model: usize, version: Version) -> Result<()> {
        let newest = self.sent.versions[model];
        // Refused as any other scheme refuses it.
        if version <= newest {
            return Err(Error::VersionNotNewer {
                newest,
                got: version,
            });
        }
        for (_, number) in self.numbers.iter_mut().filter(|(one, _)| *one == model) {
            *number = version;
        }
        Ok(())
    }

    fn wait_for_late(&mut self) {}

    fn publish(self: Box<Self>, _: &Targets) -> Result<Box<dyn Outstanding>> {
        let Self { sent, numbers } = *self;
        for (model, version) in &numbers {
            sent.versions[*model] = *version;
        }
        Ok(Box::new(NoWorkers { versions: numbers }))
    }
}

#[derive(Debug)]
struct NoWorkers {
    versions: Vec<(usize, Version)>,
}

impl Outstanding for NoWorkers {
    fn versions(&self) -> &[(usize, Version)] {
        &self.versions
    }

    fn settle(&self, _: Level, _: Deadline) -> Result<Vec<WorkerReport>> {
        Ok(Vec::new())
    }

    fn late(&self, _: Level) -> Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct NoReceiver {
    run: Run,
}

impl ReceiverTransport for NoReceiver {
    fn models(&self) -> &[ModelSpec] {
        &[]
    }

    fn run(&self) -> Run {
        self.run
    }

    /// Nothing ever comes, so nothing is waited for.
    fn next(&mut self, _: Deadline) -> Result<Option<SetSnapshot>> {
        Ok(None)
    }

    fn latest(&mut self) -> Result<Option<SetSnapshot>> {
        Ok(None)
    }

    /// There is no wait to end.
    fn interrupter(&self) -> Result<Interrupter> {
        Ok(Interrupter::new(|| {}))
    }

    fn applied(&mut self, _: &SetSnapshot) -> Result<()> {
        Ok(())
    }

    fn refuse(&mut self, _: Option<&SetSnapshot>, _: &str) -> Result<()> {
        Ok(())
    }
}
