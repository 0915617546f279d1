//! What a send costs in addition to the bytes, with very many workers: once with
//! workers that are simulated by a scheme of the benchmark's own, once with
//! real ones, many to a process.

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use weightsync_engine::transport::{
    Attendance, CopyOptions, Deadline, Endpoint, Image, Joining, Level, Opening, Outstanding,
    ReceiverTransport, Scheme, SenderTransport, Source, Staging, Targets,
};
use weightsync_engine::{
    AnyScheme, Capabilities, Expect, ModelId, Outcome, Sender, SharedMem, Version, WaitStyle,
    WorkerId, WorkerReport, WorkerStatus,
};

use super::local::{self, LocalArgs};
use super::numbers::Times;
use super::reader::{self, ReaderTask};

/// Times of the same send, measured in turns.
pub struct Pair {
    pub many: Times,
    pub one: Times,
}

/// Sends whose workers have all applied a version when it is published: what is
/// left is the work of the session, with one report for each worker. In turns
/// with sends to one such worker.
pub fn simulated(args: &LocalArgs, workers: usize, rounds: u32) -> Result<Pair, Box<dyn Error>> {
    let source = local::BenchModels::new(args)?;
    let connect = |workers| -> Result<Sender, weightsync_engine::Error> {
        let setup = source.setup()?.scheme(AnyScheme::new(Ready { workers }))?;
        setup.connect(
            &source,
            Expect::Count(workers),
            Some(Duration::from_secs(60)),
        )
    };
    let (mut many, mut one) = (connect(workers)?, connect(1)?);
    let mut pair = Pair {
        many: Times::default(),
        one: Times::default(),
    };
    for round in 0..rounds + 3 {
        for (sender, times) in [(&mut many, &mut pair.many), (&mut one, &mut pair.one)] {
            let began = Instant::now();
            let report = sender.send(&source)?;
            let took = began.elapsed();
            if !report.all_applied() {
                return Err(report.to_string().into());
            }
            // The first rounds warm caches.
            if round >= 3 {
                times.push(took);
            }
        }
    }
    Ok(pair)
}

/// How many files a process may have open on most systems, unless it raises its own limit.
pub const FILES: u64 = 1024;

/// Sends through shared memory to so many receivers, in a few processes that
/// look after theirs in turn. Every process begins with the default limit of open files.
pub fn crowd(args: &LocalArgs, receivers: u32, rounds: u32) -> Result<Times, Box<dyn Error>> {
    let most = getrlimit(Resource::Nofile).maximum;
    let limit = Rlimit {
        current: Some(most.map_or(FILES, |most| most.min(FILES))),
        maximum: most,
    };
    setrlimit(Resource::Nofile, limit)?;
    let processes = args.readers;
    let all = processes * receivers as usize;
    let source = local::BenchModels::new(args)?;
    let setup = source.setup()?.scheme(SharedMem::default())?;
    let setup = setup.wait_style(WaitStyle::YieldThenSleep);
    let task = ReaderTask {
        info: setup.init_info(),
        sleeps: false,
        receivers,
    };
    let spawn = reader::spawn(&args.program)?.count(processes);
    let workers = spawn.init_value(&task)?.start()?;
    let mut sender = setup.connect(&source, Expect::Count(all), Some(Duration::from_secs(120)))?;
    let mut times = Times::default();
    for round in 0..rounds + 3 {
        let report = sender.send(&source)?;
        if !report.all_applied() || report.workers.len() != all {
            return Err(report.to_string().into());
        }
        if round >= 3 {
            times.push(report.took);
        }
    }
    drop(sender);
    workers.shutdown(Some(Duration::from_secs(20)));
    Ok(times)
}

/// A scheme whose workers are always ready: weights are copied into memory of
/// this process, and every worker has applied them at once.
#[derive(Clone, Copy, Debug)]
struct Ready {
    workers: usize,
}

impl Scheme for Ready {
    fn name(&self) -> &str {
        "ready"
    }

    fn capabilities(&self) -> Capabilities {
        let mut can = Capabilities::NONE;
        can.weights = true;
        can
    }

    fn allocate_endpoint(
        &self,
        _: &[ModelId],
        _: Option<&Path>,
    ) -> weightsync_engine::Result<Endpoint> {
        Endpoint::new("nowhere", [0; 16], false)
    }

    fn open(&self, opening: &Opening<'_>) -> weightsync_engine::Result<Box<dyn SenderTransport>> {
        let models = opening.models.iter();
        Ok(Box::new(Memory {
            models: models
                .map(|model| (Version::NONE, Image::zeros(&model.layout)))
                .collect(),
            workers: self.workers,
        }))
    }

    fn join(
        &self,
        at: &Endpoint,
        _: &Joining,
        _: Deadline,
    ) -> weightsync_engine::Result<Box<dyn ReceiverTransport>> {
        Err(weightsync_engine::Error::Unsupported {
            what: "joining",
            scheme: at.address().into(),
        })
    }
}

/// The trainer's end, and all there is of the workers'.
#[derive(Debug)]
struct Memory {
    models: Vec<(Version, Image)>,
    workers: usize,
}

impl Memory {
    fn lines(&self, versions: &[(usize, Version)]) -> Vec<WorkerReport> {
        let versions: Vec<_> = versions.iter().map(|(_, version)| *version).collect();
        let line = |worker| WorkerReport {
            worker: WorkerId(worker as u32),
            pid: 0,
            outcome: Outcome::Applied,
            versions: versions.clone(),
            current: true,
            after: Duration::ZERO,
            late: None,
        };
        (0..self.workers).map(line).collect()
    }
}

impl SenderTransport for Memory {
    fn stage(
        &mut self,
        models: &[usize],
        _: Deadline,
    ) -> weightsync_engine::Result<Box<dyn Staging + '_>> {
        let versions = models.iter();
        let versions = versions.map(|model| (*model, self.models[*model].0.next()));
        Ok(Box::new(MemoryStaging {
            versions: versions.collect(),
            memory: self,
        }))
    }

    fn version(&self, model: usize) -> Version {
        self.models[model].0
    }

    fn workers(&self) -> Vec<WorkerStatus> {
        let status = |worker| {
            let mut status = WorkerStatus::new(WorkerId(worker as u32), 0, self.models.len());
            status.versions = self.models.iter().map(|(version, _)| *version).collect();
            status
        };
        (0..self.workers).map(status).collect()
    }

    fn wait_workers(
        &mut self,
        _: Deadline,
        enough: &mut dyn FnMut(&Attendance) -> bool,
    ) -> weightsync_engine::Result<bool> {
        let workers = self.workers();
        Ok(enough(&Attendance {
            workers,
            ..Attendance::default()
        }))
    }

    fn take_rejected(&mut self) -> Vec<(WorkerId, String)> {
        Vec::new()
    }
}

#[derive(Debug)]
struct MemoryStaging<'a> {
    memory: &'a mut Memory,
    versions: Vec<(usize, Version)>,
}

impl Staging for MemoryStaging<'_> {
    fn tensors_mut(&mut self, model: usize) -> Vec<&mut [u8]> {
        self.memory.models[model].1.tensors_mut()
    }

    fn tensor_mut(&mut self, model: usize, index: usize) -> &mut [u8] {
        self.tensors_mut(model).swap_remove(index)
    }

    fn write(
        &mut self,
        model: usize,
        sources: &[Source<'_>],
        _: CopyOptions,
    ) -> weightsync_engine::Result<()> {
        self.memory.models[model].1.write(sources)
    }

    fn number(&mut self, model: usize, version: Version) -> weightsync_engine::Result<()> {
        for (one, number) in &mut self.versions {
            if *one == model {
                *number = version;
            }
        }
        Ok(())
    }

    fn wait_for_late(&mut self) {}

    fn publish(self: Box<Self>, _: &Targets) -> weightsync_engine::Result<Box<dyn Outstanding>> {
        let Self { memory, versions } = *self;
        for (model, version) in &versions {
            memory.models[*model].0 = *version;
        }
        Ok(Box::new(Applied {
            lines: memory.lines(&versions),
            versions,
        }))
    }
}

#[derive(Debug)]
struct Applied {
    versions: Vec<(usize, Version)>,
    lines: Vec<WorkerReport>,
}

impl Outstanding for Applied {
    fn versions(&self) -> &[(usize, Version)] {
        &self.versions
    }

    fn settle(&self, _: Level, _: Deadline) -> weightsync_engine::Result<Vec<WorkerReport>> {
        Ok(self.lines.clone())
    }

    fn late(&self, _: Level) -> weightsync_engine::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numbers::Size;

    #[test]
    fn every_simulated_worker_has_a_line() {
        let args = LocalArgs {
            size: Size(64),
            tensors: 2,
            ..LocalArgs::plain()
        };
        let source = local::BenchModels::new(&args).unwrap();
        let setup = source
            .setup()
            .unwrap()
            .scheme(Ready { workers: 7 })
            .unwrap();
        let (expect, soon) = (Expect::Count(7), Duration::from_secs(60));
        let mut sender = setup.connect(&source, expect, Some(soon)).unwrap();
        let report = sender.send(&source).unwrap();
        assert!(report.all_applied(), "{report}");
        let lines: Vec<_> = report.workers.iter().map(|line| line.worker.0).collect();
        assert_eq!(lines, [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(report.workers[6].versions, [Version(2)]);
    }
}
