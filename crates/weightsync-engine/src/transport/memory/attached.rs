//! A worker's end of models in shared memory.

use std::sync::Arc;

use weightsync_core::{Run, Version};
use weightsync_mem::{Deadline, Delivery, Resume, SegmentReader, Taken, Want};

use crate::attributes::Attributes;
use crate::error::{Error, Result};
use crate::set::{Member, SetSnapshot};
use crate::snapshot::Snapshot;
use crate::transport::copies::KeptCopies;
use crate::transport::{Interrupter, Joining, ModelSpec, ReceiverTransport, VersionRequest};
/// A worker's end of models in shared memory.
#[derive(Debug)]
pub struct Attached {
    reader: SegmentReader,
    specs: Vec<ModelSpec>,
    attributes: Vec<Arc<Attributes>>,
    /// The index of each in the sender's set.
    indices: Vec<usize>,
    /// Of each model, if what is taken is copied and its slot given back.
    copies: Option<Vec<KeptCopies>>,
    /// What came last by a queue, which gives nothing twice. It costs a slot,
    /// unless it is a copy.
    last: Option<SetSnapshot>,
    /// What the worker said it runs, as the sender was told.
    applied: Option<Applied>,
}

/// A sequence number, and the versions by the sender's numbers of models.
type Applied = (u64, Vec<(usize, Version)>);

/// What a worker takes from one segment to another of the same run.
#[derive(Clone, Debug, Default)]
pub struct Handoff {
    resume: Resume,
    applied: Option<Applied>,
    last: Option<SetSnapshot>,
}

impl Handoff {
    /// Where its next reader goes on.
    pub fn resume(&self) -> Resume {
        self.resume
    }
}

impl Attached {
    /// A worker's end over a reader that has joined. A model that it cannot make
    /// anything of is refused there.
    ///
    /// # Errors
    ///
    /// [`Error::BadInitInfo`] if the sender has other models than the init info,
    /// [`Error::Attributes`].
    pub fn new(reader: SegmentReader, joining: &Joining, own_copy: bool) -> Result<Self> {
        // The reader has them in the sender's order.
        let mut models: Vec<_> = reader.models().iter().collect();
        models.sort_by_key(|(index, _)| joining.wanted.iter().position(|wanted| wanted == index));
        let indices = models.iter().map(|(index, _)| *index).collect();
        // The sender's own numbers index the names of the init info.
        let specs = models.into_iter().map(|(index, model)| {
            let id = joining.models.get(*index).ok_or_else(|| {
                Error::BadInitInfo(format!(
                    "it names {} models, and the sender has more",
                    joining.models.len()
                ))
            })?;
            Ok(ModelSpec {
                id: id.clone(),
                layout: model.layout.clone(),
                attributes: Attributes::decode(&model.note)?,
            })
        });
        let specs = specs.collect::<Result<Vec<_>>>();
        let specs = match specs {
            Ok(specs) => specs,
            Err(error) => {
                // The sender need not wait for a worker that can use none of its versions.
                reader.refuse(None, &error.to_string())?;
                return Err(error);
            }
        };
        let attributes = specs.iter().map(|spec| Arc::new(spec.attributes.clone()));
        let copies = || specs.iter().map(|_| KeptCopies::default()).collect();
        Ok(Self {
            attributes: attributes.collect(),
            indices,
            copies: own_copy.then(copies),
            specs,
            reader,
            last: None,
            applied: None,
        })
    }

    /// The reader below.
    pub fn reader(&self) -> &SegmentReader {
        &self.reader
    }

    /// What has something done once nothing more will come from this segment.
    pub fn end(&self) -> weightsync_mem::EndNotice {
        self.reader.end()
    }

    /// What the worker takes with it to another segment of the same run.
    pub fn handoff(&self) -> Handoff {
        Handoff {
            resume: self.reader.resume(),
            applied: self.applied.clone(),
            last: self.last.clone(),
        }
    }

    /// Goes on where the worker was at another segment, whose reader was given
    /// the [resume](Handoff::resume): says again what it runs.
    ///
    /// # Errors
    ///
    /// Only of the operating system.
    pub fn take_over(&mut self, handoff: Handoff) -> Result<()> {
        if let Some((sequence, versions)) = &handoff.applied {
            let versions = versions.iter().copied();
            self.reader.applied_versions(*sequence, versions)?;
        }
        self.applied = handoff.applied;
        self.last = handoff.last;
        Ok(())
    }

    /// An error with the model's name instead of its number.
    fn named(&self, error: weightsync_mem::Error) -> Error {
        Error::of_memory(error, |model| {
            let place = self.indices.iter().position(|index| *index == model);
            place.map(|place| self.specs[place].id.clone())
        })
    }

    fn lent(&mut self, taken: Taken) -> SetSnapshot {
        // A model that this worker did not want is left out.
        let members = taken.members.into_iter().filter_map(|member| {
            let place = self
                .indices
                .iter()
                .position(|index| *index == member.model)?;
            let snapshot = Snapshot::of_slot(
                self.specs[place].id.clone(),
                self.attributes[place].clone(),
                member.snapshot,
            );
            let snapshot = match &mut self.copies {
                // The slot comes free as soon as the copy is made.
                Some(copies) => copies[place].of(&snapshot),
                None => snapshot,
            };
            let changed = member.changed;
            Some((place, Member { snapshot, changed }))
        });
        let mut members: Vec<_> = members.collect();
        // In the order in which the worker named them.
        members.sort_by_key(|(place, _)| *place);
        let members = members.into_iter().map(|(_, member)| member);
        SetSnapshot::new(taken.sequence, members.collect())
    }
}

impl ReceiverTransport for Attached {
    fn models(&self) -> &[ModelSpec] {
        &self.specs
    }

    fn run(&self) -> Run {
        self.reader.run()
    }

    fn next(&mut self, deadline: Deadline) -> Result<Option<SetSnapshot>> {
        let taken = self
            .reader
            .next(deadline)
            .map_err(|error| self.named(error))?;
        let set = taken.map(|taken| self.lent(taken));
        // Kept for `latest`: a queue gives nothing twice.
        if let (Delivery::Every { .. }, Some(set)) = (self.reader.delivery(), &set) {
            self.last = Some(set.clone().had_before());
        }
        Ok(set)
    }

    fn latest(&mut self) -> Result<Option<SetSnapshot>> {
        let taken = self.reader.latest()?;
        Ok(match self.reader.delivery() {
            Delivery::Every { .. } => self.last.clone(),
            Delivery::Newest | Delivery::Asked => taken.map(|taken| self.lent(taken)),
        })
    }

    fn pull(
        &mut self,
        model: usize,
        pull: VersionRequest,
        deadline: Deadline,
    ) -> Result<Option<SetSnapshot>> {
        let model = self.indices[model];
        let want = match pull {
            VersionRequest::Newest => Want::Newest,
            VersionRequest::AtLeast(version) => Want::AtLeast { model, version },
            VersionRequest::Exactly(version) => Want::Exactly { model, version },
        };
        // One question at a time: a new one takes the place of the one before.
        self.reader.ask(want)?;
        let answer = self.reader.answer(deadline);
        // The sender may keep a slot for the answer, which this worker no longer takes.
        if let Ok(None) | Err(weightsync_mem::Error::Interrupted) = answer {
            self.reader.withdraw()?;
        }
        let taken = answer.map_err(|error| self.named(error))?;
        Ok(taken.map(|taken| self.lent(taken)))
    }

    fn interrupter(&self) -> Result<Interrupter> {
        let wait = self.reader.interrupter();
        Ok(Interrupter::new(move || wait.interrupt()))
    }

    fn applied(&mut self, set: &SetSnapshot) -> Result<()> {
        // By name: a set has only the models that have been sent.
        let versions = set.members().iter().filter_map(|member| {
            let of = |spec: &ModelSpec| spec.id == *member.snapshot.model();
            let place = self.specs.iter().position(of)?;
            Some((self.indices[place], member.snapshot.version()))
        });
        let versions: Vec<_> = versions.collect();
        self.reader
            .applied_versions(set.sequence(), versions.iter().copied())?;
        // The set of a pull may have a lower number. The number only grows.
        let before = self.applied.as_ref().map_or(0, |(sequence, _)| *sequence);
        self.applied = Some((set.sequence().max(before), versions));
        Ok(())
    }

    fn refuse(&mut self, set: Option<&SetSnapshot>, reason: &str) -> Result<()> {
        Ok(self.reader.refuse(set.map(SetSnapshot::sequence), reason)?)
    }
}
