//! A worker in a process.

use std::mem::take;
use std::time::{Duration, Instant};

use weightsync_engine::{
    AnyScheme, Error, Layout, ModelId, Pull, Receiver, ReceiverSetup, Result, SetLoader,
    SetSnapshot, TensorView, Tensors, Version, WaitStyle, WeightLoader,
};

use super::cascade::CascadeNode;
use super::command::{Answer, Join, LoadFault, Loaded, Want, WorkerCommand};
use super::fault::Fault;
use super::follower::{Follower, Own};
use super::process::{CommandPipe, Stop, die};
use super::resource_census::state;
use super::scale::longest;
use super::shape::{Seen, Shape, TENSORS, words_of};

type Done = Result<Answer, Stop>;

/// What was loaded.
type Loads = Vec<(ModelId, Version)>;

/// What a worker has.
pub(crate) struct Worker {
    number: u32,
    scheme: AnyScheme,
    receiver: Option<Receiver>,
    /// Has the receiver, where a thread receives.
    follower: Option<Follower>,
    /// What the last thread has loaded.
    followed: Own,
    /// Has it, where it is passed on.
    node: Option<CascadeNode>,
    held: Vec<SetSnapshot>,
    /// How many it holds at most.
    hoard: usize,
    own: Vec<(String, Tensors)>,
}

impl Worker {
    /// `scheme` is for workers of its own.
    pub(crate) fn new(number: u32, scheme: AnyScheme) -> Self {
        Self {
            number,
            scheme,
            receiver: None,
            follower: None,
            followed: Own::new(),
            node: None,
            held: Vec::new(),
            hoard: 1,
            own: Vec::new(),
        }
    }

    pub(crate) fn act(&mut self, deed: WorkerCommand, pipe: &CommandPipe<'_>) -> Done {
        match deed {
            WorkerCommand::Join(join) => self.join(&join, pipe),
            WorkerCommand::Receive(timeout) => {
                let receiver = self.receiver()?;
                let set = match timeout {
                    None => receiver.set().recv().map(Some),
                    Some(timeout) => receiver.set().recv_timeout(timeout),
                };
                let set = unless_interrupted(set)?;
                self.hold(set)
            }
            WorkerCommand::Pull(want, timeout) => {
                let set = self.pull(want, timeout)?;
                self.hold(set)
            }
            WorkerCommand::Latest => {
                let set = self.receiver()?.set().latest()?;
                self.hold(set)
            }
            WorkerCommand::Load {
                timeout,
                load_fault,
            } => self.load(load_fault, pipe, |receiver, models| {
                let mut loading = receiver.loading_set(models);
                unless_interrupted(match timeout {
                    None => loading.recv().map(Some),
                    Some(timeout) => loading.recv_timeout(timeout),
                })
            }),
            WorkerCommand::PullInto { want, load_fault } => {
                self.load(load_fault, pipe, |receiver, models| {
                    let first = receiver.models()[0].id.to_string();
                    receiver
                        .loading_set(models)
                        .pull(pull_of(want).model(&first).timeout(Some(longest())))
                })
            }
            WorkerCommand::ReadUntil { word, pulls } => self.read_until(word, pulls),
            WorkerCommand::Reread(times) => {
                let first = self.look()?;
                for _ in 1..times {
                    let again = self.look()?;
                    if again != first {
                        return Err(format!("what is held changed: {first:?}, {again:?}").into());
                    }
                }
                Ok(Answer::Held(first))
            }
            WorkerCommand::Keep(count) => {
                self.keep(count);
                Ok(Answer::Done)
            }
            WorkerCommand::Hoard(count) => {
                self.hoard = count;
                Ok(Answer::Done)
            }
            WorkerCommand::Digests => {
                let members = self.held.iter().flat_map(SetSnapshot::members);
                let digests = members.map(|member| {
                    let published = member.snapshot.published_digest();
                    (
                        member.snapshot.digest().to_string(),
                        published.map(|digest| digest.to_string()),
                    )
                });
                Ok(Answer::Digests(digests.collect()))
            }
            WorkerCommand::Checksums => {
                let members = self.held.iter().flat_map(SetSnapshot::members);
                let checked = members.map(|member| member.snapshot.verify_checksums());
                Ok(Answer::Checked(checked.collect::<Result<_>>()?))
            }
            WorkerCommand::Runs => {
                let receiver = self.receiver()?;
                let versions = receiver.versions().iter();
                Ok(Answer::Runs {
                    versions: versions
                        .map(|(id, version)| (id.as_str().to_owned(), version.0))
                        .collect(),
                    epoch: receiver.run().epoch.0,
                    whole: receiver.is_whole(),
                })
            }
            WorkerCommand::Interrupt(times) => {
                let interrupter = self.receiver()?.interrupter()?;
                (0..times).for_each(|_| interrupter.interrupt());
                Ok(Answer::Done)
            }
            WorkerCommand::ReceiveInterrupted => self.receive_interrupted(),
            WorkerCommand::Follow(when) => {
                let receiver = self.receiver.take().ok_or("no receiver")?;
                let own = take(&mut self.followed);
                self.follower = Some(Follower::start(receiver, own, when)?);
                Ok(Answer::Done)
            }
            WorkerCommand::Following => self.follower()?.look(),
            WorkerCommand::FollowTo { version, staged } => {
                self.follower()?.wait_for(version, staged)
            }
            WorkerCommand::FollowUntil(word) => self.follower()?.read_until(word),
            WorkerCommand::FollowToTheEnd => self.follower()?.wait_for_the_end(),
            WorkerCommand::SafePoint => self.follower()?.safe_point(),
            WorkerCommand::Unfollow => {
                let follower = self.follower.take().ok_or("no thread")?;
                let (receiver, own) = follower.stop()?;
                (self.receiver, self.followed) = (Some(receiver), own);
                Ok(Answer::Done)
            }
            WorkerCommand::Head(join) => {
                let (node, info) = CascadeNode::join(self.setup(&join)?, self.scheme.clone())?;
                self.node = Some(node);
                Ok(info)
            }
            WorkerCommand::Feed(workers) => self.turn(|node| node.feed(&workers)),
            WorkerCommand::PassOn => self.node.as_mut().ok_or("no cascade")?.pass_on(),
            WorkerCommand::PassOnByThread | WorkerCommand::PassOnByHand => {
                self.turn(CascadeNode::turn)
            }
            WorkerCommand::Fail(reason) => {
                let receiver = self.receiver.take().ok_or("no receiver")?;
                receiver.fail(&reason);
                Ok(Answer::Done)
            }
            WorkerCommand::Forget(workers) => {
                self.node.as_mut().ok_or("no cascade")?.forget(&workers)
            }
            WorkerCommand::Leave => {
                self.receiver = None;
                self.follower = None;
                self.followed.clear();
                self.node = None;
                Ok(Answer::Done)
            }
        }
    }

    fn follower(&self) -> Result<&Follower, Stop> {
        self.follower.as_ref().ok_or_else(|| "no thread".into())
    }

    fn turn(&mut self, turn: impl FnOnce(CascadeNode) -> Result<CascadeNode, Stop>) -> Done {
        let node = self.node.take().ok_or("no cascade")?;
        self.node = Some(turn(node)?);
        Ok(Answer::Done)
    }

    /// The process's main thread waits, so that another can see that it does.
    fn receive_interrupted(&mut self) -> Done {
        let interrupter = self.receiver()?.interrupter()?;
        let set = std::thread::scope(|scope| {
            scope.spawn(|| {
                let until = Instant::now() + longest();
                while state(std::process::id()) != Some('S') && Instant::now() < until {
                    std::thread::sleep(Duration::from_millis(1));
                }
                interrupter.interrupt();
            });
            let set = self.receiver()?.set().recv().map(Some);
            unless_interrupted(set).map_err(Stop::from)
        })?;
        self.hold(set)
    }

    fn setup(&self, join: &Join) -> Result<ReceiverSetup, Stop> {
        let mut setup = ReceiverSetup::new(join.info.clone(), self.number);
        if let Some(models) = &join.models {
            setup = setup.models(models);
        }
        if let Some(device) = &join.device {
            setup = setup.device(device);
        }
        if let Some(shape) = join.insists {
            setup = setup.model(&shape.make(0))?;
        }
        if join.sleeps {
            setup = setup.wait_style(WaitStyle::Sleep);
        }
        Ok(setup)
    }

    fn join(&mut self, join: &Join, pipe: &CommandPipe<'_>) -> Done {
        let setup = self.setup(join)?;
        if join.own.is_empty() {
            self.receiver = Some(setup.connect(Some(join.deadline))?);
            return Ok(Answer::Done);
        }
        let own = join.own.iter();
        let own = own.map(|(id, shape)| {
            (
                id.clone(),
                shape.map_or_else(Tensors::new, |shape| shape.make(0)),
            )
        });
        self.own = own.collect();
        let mut places: Vec<_> = self
            .own
            .iter_mut()
            .map(|(id, tensors)| (&*id, Place::new(tensors, pipe)))
            .collect();
        let models = places
            .iter_mut()
            .fold(SetLoader::new(), |set, (id, place)| set.with(id, place));
        let mut models = models;
        self.receiver = Some(setup.connect_set_into(&mut models, Some(join.deadline))?);
        Ok(Answer::Done)
    }

    fn receiver(&mut self) -> Result<&mut Receiver, Stop> {
        self.receiver.as_mut().ok_or_else(|| "no receiver".into())
    }

    fn pull(&mut self, want: Want, timeout: Option<Duration>) -> Result<Option<SetSnapshot>, Stop> {
        let receiver = self.receiver()?;
        let first = receiver.models()[0].id.to_string();
        Ok(receiver
            .set()
            .pull(pull_of(want).model(&first).timeout(timeout))?)
    }

    fn hold(&mut self, set: Option<SetSnapshot>) -> Done {
        let Some(set) = set else {
            return Ok(Answer::Nothing);
        };
        let seen = Seen::of(&set)?;
        self.held.push(set);
        self.keep(self.hoard);
        Ok(Answer::Seen(seen))
    }

    fn keep(&mut self, count: usize) {
        let gone = self.held.len().saturating_sub(count);
        self.held.drain(..gone);
    }

    fn look(&self) -> Result<Vec<Seen>, String> {
        self.held.iter().map(Seen::of).collect()
    }

    fn load(
        &mut self,
        load_fault: Option<LoadFault>,
        pipe: &CommandPipe<'_>,
        into: impl FnOnce(&mut Receiver, &mut SetLoader<'_>) -> Result<Option<Loads>>,
    ) -> Done {
        let receiver = self.receiver.as_mut().ok_or("no receiver")?;
        let mut places: Vec<_> = self
            .own
            .iter_mut()
            .map(|(id, tensors)| (&*id, Place::new(tensors, pipe)))
            .collect();
        match load_fault {
            Some(LoadFault::Pause) => places.first_mut(),
            _ => places.last_mut(),
        }
        .ok_or("no model of its own")?
        .1
        .load_fault = load_fault;
        let mut models = places
            .iter_mut()
            .fold(SetLoader::new(), |set, (id, place)| set.with(id, place));
        let loaded = into(receiver, &mut models);
        drop(models);
        let loads = places.iter().map(|(_, place)| place.loads).sum();
        drop(places);
        let (versions, fault) = match loaded {
            Ok(None) => return Ok(Answer::Nothing),
            Ok(Some(versions)) => (Some(versions), None),
            Err(error) => (None, Some(Fault::from(&error))),
        };
        let numbers = |versions: &[(ModelId, Version)]| {
            versions.iter().map(|(_, version)| version.0).collect()
        };
        Ok(Answer::Loaded(Loaded {
            versions: versions.map(|versions| numbers(&versions)),
            fault,
            words: self
                .own
                .iter()
                .map(|(_, tensors)| words_of(tensors))
                .collect(),
            runs: numbers(receiver.versions()),
            whole: receiver.is_whole(),
            loads,
        }))
    }

    /// Checks every version until one of that number has come.
    fn read_until(&mut self, word: u64, pulls: bool) -> Done {
        let mut checks = 0;
        let mut last: Option<Seen> = None;
        let mut kept: Option<(SetSnapshot, Seen)> = None;
        let mut until = Instant::now() + longest();
        loop {
            let set = match pulls {
                true => self.pull(Want::Newest, Some(longest()))?,
                false => Some(self.receiver()?.set().recv()?),
            };
            let set = set.ok_or("nothing came")?;
            let seen = Seen::of(&set)?;
            let one = seen
                .members
                .iter()
                .all(|member| member.words == [seen.members[0].words[0]; 3]);
            if !one {
                return Err(format!("a mix of versions: {seen:?}").into());
            }
            if let Some(last) = &last {
                let grown = last
                    .versions()
                    .iter()
                    .zip(seen.versions())
                    .all(|(last, now)| match pulls {
                        true => now >= *last,
                        false => now > *last,
                    });
                if !grown || seen.run != last.run {
                    return Err(format!("{seen:?} came after {last:?}").into());
                }
            }
            checks += 1;
            // One is kept for a while, and looked at again.
            if checks % 5 == 0
                && let Some((set, before)) = kept.take()
                && Seen::of(&set)? != before
            {
                return Err(format!("{before:?} changed while it was held").into());
            }
            if kept.is_none() {
                kept = Some((set, seen.clone()));
            }
            if seen.members[0].words[0] == word {
                return Ok(Answer::Count(checks));
            }
            let news = |last: &Seen| last.versions() != seen.versions();
            if last.as_ref().is_none_or(news) {
                until = Instant::now() + longest();
            }
            last = Some(seen);
            if Instant::now() > until {
                return Err(format!("after {checks} checks {last:?} is the last").into());
            }
        }
    }
}

/// What came; an interrupted wait brought nothing.
fn unless_interrupted<T>(came: Result<Option<T>>) -> Result<Option<T>> {
    match came {
        Err(Error::Interrupted) => Ok(None),
        came => came,
    }
}

fn pull_of(want: Want) -> Pull {
    match want {
        Want::Newest => Pull::newest(),
        Want::AtLeast(version) => Pull::at_least(Version(version)),
        Want::Exactly(version) => Pull::version(Version(version)),
    }
}

/// A worker's own model, to which something may happen while it is loaded.
struct Place<'a> {
    tensors: &'a mut Tensors,
    pipe: &'a CommandPipe<'a>,
    load_fault: Option<LoadFault>,
    loads: u64,
}

impl<'a> Place<'a> {
    fn new(tensors: &'a mut Tensors, pipe: &'a CommandPipe<'a>) -> Self {
        Self {
            tensors,
            pipe,
            load_fault: None,
            loads: 0,
        }
    }

    /// Loads the first tensor and half of the second.
    fn half(&mut self, views: &[TensorView<'_>]) -> Result<()> {
        for view in views {
            let elements = view.elements::<u64>()?;
            let place = self.tensors.slice_mut::<u64>(view.name())?;
            let some = match view.name() {
                name if name == TENSORS[0] => elements.len(),
                _ => elements.len() / 2,
            };
            place[..some].copy_from_slice(&elements[..some]);
        }
        Ok(())
    }
}

impl WeightLoader for Place<'_> {
    fn layout(&self) -> Result<Layout> {
        WeightLoader::layout(self.tensors)
    }

    fn shape(&mut self, layout: &Layout) -> Result<bool> {
        let shapeless = self.tensors.is_empty();
        if shapeless {
            *self.tensors = Tensors::zeros(layout);
        }
        Ok(shapeless)
    }

    fn load(&mut self, views: &[TensorView<'_>]) -> Result<()> {
        self.loads += 1;
        let failed = |text: &str| Error::Load {
            name: TENSORS[1].into(),
            source: text.into(),
        };
        match self.load_fault {
            None => self.tensors.load(views),
            Some(LoadFault::Once) => {
                self.load_fault = None;
                self.half(views)?;
                Err(failed("this load was to fail once"))
            }
            Some(LoadFault::Always) => {
                self.half(views)?;
                Err(failed("this load was to fail for good"))
            }
            Some(LoadFault::Death) => {
                self.half(views)?;
                die()
            }
            Some(LoadFault::Pause) => {
                self.half(views)?;
                let sent = self
                    .pipe
                    .send(&Answer::Loading)
                    .and_then(|()| self.pipe.wait_for_next());
                sent.map_err(|error| failed(&error))?;
                self.tensors.load(views)
            }
        }
    }
}

/// The shapes of a worker's own models, from those of the trainer.
pub(crate) fn own(models: &[(String, Shape)]) -> Vec<(String, Option<Shape>)> {
    models
        .iter()
        .map(|(id, shape)| (id.clone(), Some(*shape)))
        .collect()
}
