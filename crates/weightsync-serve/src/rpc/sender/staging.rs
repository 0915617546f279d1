//! Room for the next versions, and the step that makes them live.

use std::sync::Arc;
use std::time::Instant;

use weightsync::transport::{CopyOptions, Image, Outstanding, Source, Staging, Targets};
use weightsync::{DigestPolicy, Error, Result, Snapshot, Version};

use super::published::Published;
use super::{Retained, RpcSender};
use crate::rpc::plan::{MailboxId, Set};

/// Room in the trainer's memory.
#[derive(Debug)]
pub(super) struct Rooms<'a> {
    sender: &'a mut RpcSender,
    rooms: Vec<Room>,
    /// Those that were there when the send began: one that dies before it is live has
    /// a line all the same.
    before: Vec<MailboxId>,
    waits_for_late: bool,
}

#[derive(Debug)]
struct Room {
    model: usize,
    version: Version,
    /// `None` once it is published.
    image: Option<Image>,
}

impl<'a> Rooms<'a> {
    pub(super) fn new(sender: &'a mut RpcSender, models: &[usize]) -> Self {
        let mut rooms = Vec::with_capacity(models.len());
        for model in models {
            let image = sender.spare[*model].take();
            let zeros = || Image::zeros(&sender.shared.models[*model].layout);
            rooms.push(Room {
                model: *model,
                version: sender.shared.lock().newest(*model).next(),
                image: Some(image.unwrap_or_else(zeros)),
            });
        }
        let before = sender.shared.lock().watch_all();
        Self {
            before,
            sender,
            rooms,
            waits_for_late: false,
        }
    }

    fn room(&mut self, model: usize) -> &mut Room {
        let mut rooms = self.rooms.iter_mut();
        let found = rooms.find(|room| room.model == model);
        found.unwrap_or_else(|| panic!("model {model} was not staged"))
    }

    fn image(&mut self, model: usize) -> &mut Image {
        let image = self.room(model).image.as_mut();
        image.unwrap_or_else(|| unreachable!("publishing takes the rooms away"))
    }

    /// The versions as they are kept, and who had their places before.
    fn kept(&mut self) -> Result<Vec<Arc<Retained>>> {
        let shared = &self.sender.shared;
        let mut all = Vec::with_capacity(self.rooms.len());
        for room in &mut self.rooms {
            let Some(mut image) = room.image.take() else {
                continue;
            };
            image.clear_padding();
            let spec = &shared.models[room.model];
            let snapshot = Snapshot::received(spec, shared.run, room.version, image)?;
            all.push(Arc::new(Retained::new(room.model, snapshot)));
        }
        Ok(all)
    }
}

impl Staging for Rooms<'_> {
    fn tensors_mut(&mut self, model: usize) -> Vec<&mut [u8]> {
        self.image(model).tensors_mut()
    }

    fn tensor_mut(&mut self, model: usize, index: usize) -> &mut [u8] {
        self.tensors_mut(model).swap_remove(index)
    }

    fn write(&mut self, model: usize, sources: &[Source<'_>], _: CopyOptions) -> Result<()> {
        self.image(model).write(sources)
    }

    fn number(&mut self, model: usize, version: Version) -> Result<()> {
        let newest = self.sender.shared.lock().newest(model);
        if version <= newest {
            return Err(Error::VersionNotNewer {
                newest,
                got: version,
            });
        }
        self.room(model).version = version;
        Ok(())
    }

    fn wait_for_late(&mut self) {
        self.waits_for_late = true;
    }

    fn publish(mut self: Box<Self>, targets: &Targets) -> Result<Box<dyn Outstanding>> {
        self.sender.owner.check()?;
        let kept = self.kept()?;
        let mut update = Set::empty();
        for one in &kept {
            self.sender.shared.born(one);
            update.put(one.model, one.clone());
        }
        let shared = self.sender.shared.clone();
        let at = Instant::now();
        let (mut publication, replaced) = shared.note(|plan| {
            let replaced = kept.iter();
            let replaced: Vec<_> = replaced
                .filter_map(|one| plan.default_version(one.model).cloned())
                .collect();
            (plan.publish(&update, targets, &self.before), replaced)
        });
        publication.waits_for_late = self.waits_for_late;
        shared.ring();
        if self.sender.digests == DigestPolicy::Background {
            shared.digest_next(&kept);
        }
        drop((update, kept));
        self.sender.recycle(replaced);
        Ok(Box::new(Published::new(shared, publication, at)))
    }
}

impl Drop for Rooms<'_> {
    fn drop(&mut self) {
        if !self.sender.owner.is_here() {
            return;
        }
        let before = std::mem::take(&mut self.before);
        self.sender.shared.note(|plan| plan.unwatch(before));
        for room in &mut self.rooms {
            if let Some(image) = room.image.take() {
                self.sender.spare[room.model] = Some(image);
            }
        }
    }
}
