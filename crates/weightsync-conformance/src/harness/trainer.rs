//! The trainer in a process.

use std::sync::{Arc, RwLock, RwLockWriteGuard};
use std::time::{Duration, Instant};
use std::{mem, thread};

use weightsync_engine::transport::threads::RwLockExt as _;
use weightsync_engine::{
    AnyScheme, AsyncSendLimit, Expect, Outcome, PendingSend, Registered, Report, SendOptions,
    SendSource, Sender, SenderSetup, Set, Tensors, Version, WaitFor, WeightExtractor,
};

use super::command::{
    Answer, Line, Payload, Publish, SendSettings, Sent, Stage, Status, TrainerCommand,
    TrainerSetup, Wait,
};
use super::process::{CommandPipe, Stop, die};
use super::scale::longest;
use super::script::address;
use super::shape::{Model, Seen, Shape, part, print_of, words_of};
use super::source::{FaultySource, Shared, SourceFault, Strided};
use crate::{Corrupt, Record};

type Done = Result<Answer, Stop>;

/// What a trainer has.
pub(crate) struct Trainer {
    scheme: AnyScheme,
    models: Vec<Own>,
    setup: Option<SenderSetup>,
    /// Waits for workers that were missing when it connected.
    opened: Option<Sender>,
    sender: Option<Sender>,
    pending: Vec<PendingSend>,
    corrupt: Option<Corrupt>,
}

/// A model of its own.
struct Own {
    id: String,
    shape: Shape,
    tensors: Arc<RwLock<Tensors>>,
}

impl Own {
    fn lock(&self) -> RwLockWriteGuard<'_, Tensors> {
        self.tensors.writing()
    }

    fn make(&self, word: u64) {
        match self.shape {
            Shape::Words(_) => Shape::fill(&mut self.lock(), word),
            shape => *self.lock() = shape.make(word),
        }
    }
}

impl Trainer {
    pub(crate) fn new(scheme: AnyScheme, corrupt: Option<Corrupt>) -> Self {
        Self {
            scheme,
            models: Vec::new(),
            setup: None,
            opened: None,
            sender: None,
            pending: Vec::new(),
            corrupt,
        }
    }

    pub(crate) fn act(&mut self, act: TrainerCommand, pipe: &CommandPipe<'_>) -> Done {
        match act {
            TrainerCommand::Prepare(lead) => self.prepare(&lead),
            TrainerCommand::Connect { expect, deadline } => self.connect(&expect, deadline),
            TrainerCommand::ConnectWith(what) => {
                let setup = self.setup.clone().ok_or("nothing is prepared")?;
                let sender = self.with_weights(&what, &SendSettings::default(), |weights| {
                    Ok(setup.connect(weights, Expect::Count(0), Some(longest()))?)
                })?;
                self.sender = Some(sender);
                Ok(Answer::Done)
            }
            TrainerCommand::Send(what, how) => self.send(&what, &how),
            TrainerCommand::SendAsync(what, how) => self.send_async(&what, &how),
            TrainerCommand::Await(place, timeout) => {
                let pending = self.pending.get(place).ok_or("no such send")?;
                let begun = Instant::now();
                Ok(Answer::Sent(sent_report(
                    &pending.wait(timeout)?,
                    begun.elapsed(),
                )))
            }
            TrainerCommand::Change(word) => {
                self.models.iter().for_each(|model| model.make(word));
                Ok(Answer::Done)
            }
            TrainerCommand::Scribble => self.scribble(pipe),
            TrainerCommand::Publish(publish) => self.publish(&publish),
            TrainerCommand::Hold(workers, hold) => {
                match hold {
                    true => self.sender()?.hold(workers)?,
                    false => self.sender()?.release(workers)?,
                }
                Ok(Answer::Done)
            }
            TrainerCommand::Forget(workers) => {
                self.sender()?.forget(workers)?;
                Ok(Answer::Done)
            }
            TrainerCommand::Status => Ok(Answer::Workers(self.status()?)),
            TrainerCommand::Look { model, version } => self.look(model.as_deref(), version),
            TrainerCommand::Source => match self.models.first() {
                Some(Own {
                    shape: Shape::Words(_),
                    ..
                }) => {
                    let words = self.models.iter().map(|model| words_of(&model.lock()));
                    Ok(Answer::Source(words.collect()))
                }
                Some(model) => Ok(Answer::Print(print_of(&model.lock()))),
                None => Err("no model".into()),
            },
            TrainerCommand::Digest => {
                let digest = self.sender()?.digest()?;
                Ok(Answer::Digests(vec![(digest.to_string(), None)]))
            }
            TrainerCommand::Corrupt(version) => self.corrupt(Version(version)),
            TrainerCommand::Close => {
                self.pending.clear();
                self.opened = None;
                if let Some(sender) = self.sender.take() {
                    sender.shutdown();
                }
                Ok(Answer::Done)
            }
        }
    }

    fn prepare(&mut self, lead: &TrainerSetup) -> Done {
        let models = lead.models.iter().map(|(id, shape)| Own {
            id: id.clone(),
            shape: *shape,
            tensors: Arc::new(RwLock::new(shape.make(1))),
        });
        self.models = models.collect();
        let mut setup: Option<SenderSetup> = None;
        for model in &self.models {
            let source = Shared(model.tensors.clone());
            let next = match setup {
                None => SenderSetup::new(&model.id, &source)?.scheme(self.scheme.clone())?,
                Some(setup) => setup.add_model(&model.id, &source)?,
            };
            setup = Some(match lead.register {
                true => next.register(&model.id, source)?,
                false => next,
            });
        }
        let mut setup = setup.ok_or("no model")?;
        if let Some(dir) = &lead.run_dir {
            setup = setup.run_dir(dir)?;
        }
        if let Some(name) = &lead.cast {
            setup = setup.cast(name.parse().map_err(weightsync_engine::Error::from)?)?;
        }
        let pending = match lead.pending {
            0 => AsyncSendLimit::Refuse,
            bound => AsyncSendLimit::Queue(bound),
        };
        let setup = setup
            .slots(lead.slots.0, lead.slots.1)
            .history(lead.history)
            .checksums(lead.checksums)
            .async_send_limit(pending)
            .send_timeout(Some(longest()));
        let info = setup.init_info();
        self.setup = Some(setup);
        self.opened = None;
        Ok(Answer::Info(info))
    }

    fn connect(&mut self, expect: &[u32], deadline: Duration) -> Done {
        let setup = self.setup.clone().ok_or("nothing is prepared")?;
        let expect = Expect::workers(expect.iter().copied());
        let sources: Vec<_> = self
            .models
            .iter()
            .map(|model| Shared(model.tensors.clone()))
            .collect();
        let mut sender = match (self.opened.take(), &sources[..]) {
            (Some(opened), _) => opened,
            (None, [one]) => setup.open(one, Some(deadline))?,
            (None, _) => setup.open(&set_of(&self.models, &sources), Some(deadline))?,
        };
        match sender.wait_for(&expect, Some(deadline)) {
            Ok(()) => {
                self.sender = Some(sender);
                Ok(Answer::Done)
            }
            Err(error) => {
                self.opened = Some(sender);
                Err(error.into())
            }
        }
    }

    fn sender(&mut self) -> Result<&mut Sender, Stop> {
        self.sender.as_mut().ok_or_else(|| "no sender".into())
    }

    /// The model that a send is about.
    fn own(&self, how: &SendSettings) -> Result<&Own, Stop> {
        let found = match &how.model {
            None => self.models.first(),
            Some(id) => self.models.iter().find(|model| model.id == *id),
        };
        found.ok_or_else(|| "no such model".into())
    }

    fn send(&mut self, what: &Payload, how: &SendSettings) -> Done {
        let options = options(how);
        let mut sender = self.sender.take().ok_or("no sender")?;
        let begun = Instant::now();
        let report = self.send_by(&mut sender, what, how, &options);
        let took = begun.elapsed();
        self.sender = Some(sender);
        let report = report?;
        if let Payload::Dying(_, Stage::Live) | Payload::DyingSet(_, Stage::Live) = what {
            die();
        }
        Ok(Answer::Sent(sent_report(&report, took)))
    }

    fn send_by(
        &self,
        sender: &mut Sender,
        what: &Payload,
        how: &SendSettings,
        options: &SendOptions,
    ) -> Result<Report, Stop> {
        match what {
            Payload::Each(words) => {
                let shape = self.own(how)?.shape;
                let sources = by_word(shape, words);
                let each = words
                    .iter()
                    .map(|(worker, word)| (*worker, at(&sources, *word)));
                Ok(sender.send_each(each, options)?)
            }
            Payload::Devices(words) => {
                let shape = self.own(how)?.shape;
                let sources = by_word(shape, words);
                let of = |device: &str| {
                    let found = words.iter().find(|(one, _)| one == device);
                    at(&sources, found.map_or(0, |(_, word)| *word))
                };
                Ok(sender.send_by_device(of, options)?)
            }
            Payload::Loan(word) => {
                let id = how
                    .model
                    .clone()
                    .unwrap_or_else(|| self.models[0].id.clone());
                let mut loan = sender.loan_of(&id)?;
                for place in loan.tensors_mut() {
                    for bytes in place.chunks_exact_mut(8) {
                        bytes.copy_from_slice(&word.to_le_bytes());
                    }
                }
                Ok(loan.publish_with(options)?)
            }
            Payload::Old(version) => {
                let id = how
                    .model
                    .clone()
                    .unwrap_or_else(|| self.models[0].id.clone());
                let old = sender.old_snapshot(&id, Version(*version))?;
                Ok(sender.send_with(&old, options)?)
            }
            _ => self.with_weights(what, how, |weights| Ok(sender.send_with(weights, options)?)),
        }
    }

    fn send_async(&mut self, what: &Payload, how: &SendSettings) -> Done {
        let options = options(how);
        let mut sender = self.sender.take().ok_or("no sender")?;
        let pending = self.with_weights(what, how, |weights| {
            Ok(sender.send_async(weights, &options)?)
        });
        self.sender = Some(sender);
        let pending = pending?;
        let versions = pending.versions().iter();
        let versions = versions
            .map(|(id, version)| (id.as_str().to_owned(), version.0))
            .collect();
        self.pending.push(pending);
        Ok(Answer::Began(versions))
    }

    /// Lends what is to be sent.
    fn with_weights<T>(
        &self,
        what: &Payload,
        how: &SendSettings,
        send: impl FnOnce(&dyn SendSource) -> Result<T, Stop>,
    ) -> Result<T, Stop> {
        let faulty = |word: u64, fault| {
            let own = self.own(how)?;
            own.make(word);
            Ok::<_, Stop>((own.lock(), fault))
        };
        match what {
            Payload::Word(word) => {
                let own = self.own(how)?;
                own.make(*word);
                send(&Shared(own.tensors.clone()))
            }
            Payload::Dying(word, stage) => {
                let (tensors, fault) = faulty(*word, SourceFault::Dies(*stage))?;
                send(&FaultySource {
                    tensors: &tensors,
                    fault,
                })
            }
            Payload::Failing(word) => {
                let (tensors, fault) = faulty(*word, SourceFault::Fails)?;
                send(&FaultySource {
                    tensors: &tensors,
                    fault,
                })
            }
            Payload::Other(word) => send(&self.own(how)?.shape.make(*word)),
            Payload::Wrong(shape) => send(&shape.make(7)),
            Payload::Strided(word) => send(&Strided::of(&self.own(how)?.shape.make(*word))?),
            Payload::Part(words) => {
                let Shape::Words(total) = self.own(how)?.shape else {
                    return Err("a part of a model of words".into());
                };
                send(&part(total, words))
            }
            Payload::Registered(word) => {
                let wanted = self
                    .models
                    .iter()
                    .filter(|one| how.model.as_ref().is_none_or(|id| one.id == *id));
                wanted.for_each(|model| model.make(*word));
                send(&Registered)
            }
            Payload::Set(words) => {
                let sources = self.set(words);
                let set = sources
                    .iter()
                    .fold(Set::new(), |set, (id, tensors)| set.with(id, tensors));
                send(&set)
            }
            Payload::Mixed(word) => {
                let [first @ .., last] = &self.models[..] else {
                    return Err("no model".into());
                };
                let (shaped, wrong) = (
                    first.iter().map(|one| (&one.id, one.shape.make(*word))),
                    Shape::Floats.make(*word),
                );
                let shaped: Vec<_> = shaped.collect();
                let set = shaped
                    .iter()
                    .fold(Set::new(), |set, (id, tensors)| set.with(id, tensors));
                send(&set.with(&last.id, &wrong))
            }
            Payload::DyingSet(words, stage) => {
                let sources = self.set(words);
                let [first @ .., (last, tensors)] = &sources[..] else {
                    return Err("a set without models".into());
                };
                let faulty = FaultySource {
                    tensors,
                    fault: SourceFault::Dies(*stage),
                };
                let set = first
                    .iter()
                    .fold(Set::new(), |set, (id, tensors)| set.with(id, tensors));
                send(&set.with(last, &faulty))
            }
            Payload::Each(_) | Payload::Devices(_) | Payload::Loan(_) | Payload::Old(_) => {
                Err("not such a send".into())
            }
        }
    }

    /// Weights of these models; of words, where there is no such model.
    fn set(&self, words: &[(String, u64)]) -> Vec<(String, Tensors)> {
        let sources = words.iter().map(|(id, word)| {
            let known = self.models.iter().find(|model| model.id == *id);
            (
                id.clone(),
                known
                    .map_or(Shape::Words(8), |model| model.shape)
                    .make(*word),
            )
        });
        sources.collect()
    }

    fn publish(&mut self, publish: &Publish) -> Done {
        let mut sender = self.sender.take().ok_or("no sender")?;
        let sources: Vec<_> = self
            .models
            .iter()
            .map(|model| Shared(model.tensors.clone()))
            .collect();
        let set = set_of(&self.models, &sources);
        for place in 0..publish.count {
            self.models
                .iter()
                .for_each(|model| model.make(publish.from + place));
            let wait = match publish.fast && place % 16 != 15 {
                true => WaitFor::Sent,
                false => WaitFor::Applied,
            };
            let options = SendOptions::new().wait(wait);
            let report = match &sources[..] {
                [one] => sender.send_with(one, &options)?,
                _ => sender.send_with(&set, &options)?,
            };
            // Death is the only excuse.
            let excused = |outcome: &Outcome| matches!(outcome, Outcome::Died | Outcome::Left);
            if wait == WaitFor::Applied && report.failed().any(|line| !excused(&line.outcome)) {
                return Err(report.to_string().into());
            }
            if let Some((after, micros)) = publish.fuse
                && after == place
            {
                burn(Duration::from_micros(micros));
            }
        }
        self.sender = Some(sender);
        Ok(Answer::Count(publish.count))
    }

    fn scribble(&self, pipe: &CommandPipe<'_>) -> Done {
        let mut times = 0;
        loop {
            for model in &self.models {
                let mut tensors = model.lock();
                for name in super::shape::TENSORS {
                    for word in tensors.slice_mut::<u64>(name)? {
                        *word = word.wrapping_add(1);
                    }
                }
            }
            times += 1;
            // Any command is the end, and has no answer of its own.
            if pipe.has_next()? {
                return Ok(Answer::Count(times));
            }
        }
    }

    fn look(&mut self, model: Option<&str>, version: Option<u64>) -> Done {
        let id = model.map_or_else(|| self.models[0].id.clone(), str::to_owned);
        let sender = self.sender()?;
        let snapshot = match version {
            None => sender.snapshot_of(&id)?,
            Some(version) => sender.old_snapshot(&id, Version(version))?,
        };
        let member = Model::of(&snapshot, false)?;
        Ok(Answer::Seen(Seen {
            run: snapshot.run(),
            sequence: 0,
            members: vec![member],
        }))
    }

    fn corrupt(&mut self, version: Version) -> Done {
        let info = self.sender()?.init_info();
        let record = Record {
            scheme: self.scheme.to_string(),
            address: address(&info),
            model: info.models()[0].clone(),
            version,
        };
        let corrupt = self.corrupt.as_ref().ok_or("nothing damages records")?;
        let words = corrupt(&record).map_err(|error| format!("{record:?}: {error}"))?;
        Ok(Answer::Damaged(words))
    }

    fn status(&mut self) -> Result<Vec<Status>, Stop> {
        Ok(self
            .sender()?
            .status()
            .workers
            .iter()
            .map(Status::of)
            .collect())
    }
}

fn set_of<'a>(models: &'a [Own], sources: &'a [Shared]) -> Set<'a> {
    let members = models.iter().zip(sources);
    members.fold(Set::new(), |set, (model, source)| {
        set.with(&model.id, source)
    })
}

/// One source for each distinct number.
fn by_word<K>(shape: Shape, words: &[(K, u64)]) -> Vec<(u64, Tensors)> {
    let mut sources: Vec<(u64, Tensors)> = vec![(0, shape.make(0))];
    for (_, word) in words {
        if !sources.iter().any(|(one, _)| one == word) {
            sources.push((*word, shape.make(*word)));
        }
    }
    sources
}

fn at(sources: &[(u64, Tensors)], word: u64) -> &dyn WeightExtractor {
    let found = sources.iter().find(|(one, _)| *one == word);
    &found.unwrap_or(&sources[0]).1
}

fn options(how: &SendSettings) -> SendOptions {
    let mut options = SendOptions::new()
        .wait(match how.wait {
            Wait::Sent => WaitFor::Sent,
            Wait::Staged => WaitFor::Staged,
            Wait::Applied => WaitFor::Applied,
        })
        .timeout(Some(how.deadline))
        .partial(how.partial)
        .wait_late(how.wait_late);
    if let Some(model) = &how.model {
        options = options.model(model);
    }
    if let Some(workers) = &how.workers {
        options = options.workers(workers.iter().copied());
    }
    match how.version {
        Some(version) => options.version(Version(version)),
        None => options,
    }
}

pub(crate) fn sent_report(report: &Report, took: Duration) -> Sent {
    let lines = report.workers.iter().map(|line| {
        let outcome = line.outcome.kind();
        let reason = line.outcome.reason().unwrap_or_default().to_owned();
        Line {
            worker: line.worker.0,
            pid: line.pid,
            outcome,
            passed: line.late.is_some(),
            versions: line.versions.iter().map(|version| version.0).collect(),
            reason,
        }
    });
    let versions = report.versions.iter();
    Sent {
        versions: versions
            .map(|(id, version)| (id.as_str().to_owned(), version.0))
            .collect(),
        lines: lines.collect(),
        partial: report.partial.clone(),
        all_applied: report.all_applied(),
        text: report.to_string(),
        bytes: report.bytes,
        took,
    }
}

/// Kills this process so long from now, while it goes on: death comes from
/// within because it is to hit the microseconds around a publication.
fn burn(delay: Duration) {
    let at = Instant::now() + delay;
    mem::drop(thread::spawn(move || {
        while Instant::now() < at {
            thread::yield_now();
        }
        die();
    }));
}
