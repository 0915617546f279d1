//! The sender's part: room, and what a publication is to whom.

use weightsync_core::Targets;

use super::*;

impl World {
    pub(super) fn send(
        &mut self,
        models: ModelMask,
        workers: Option<u32>,
        steps: &mut Vec<PageChange>,
    ) {
        let mut written = Vec::new();
        for model in models.iter() {
            match self.lend(model) {
                Some(slot) => written.push((model, slot)),
                None => {
                    for (model, slot) in written {
                        self.plan.give_back(model, slot);
                    }
                    return;
                }
            }
        }
        let pins = self.observe();
        let targets = match workers {
            None => Targets::All,
            Some(workers) => Targets::Workers(ids(workers)),
        };
        let published = self.plan.publish(&written, &targets, pins, steps).unwrap();
        let mut update = Versions::new();
        for (model, slot) in written {
            self.issued[model] += 1;
            self.written[model][usize::from(slot)] = self.issued[model];
            update.insert(model, self.issued[model]);
        }
        let versions = published.versions.iter();
        let versions: Versions = versions
            .map(|(model, version)| (*model, version.0))
            .collect();
        assert_eq!(versions, update);
        self.note(&update, workers);
        let mut concerned = 0;
        for key in self.readers.keys().copied().collect::<Vec<_>>() {
            let worker = key.0.0;
            let named = workers.is_none_or(|workers| workers & 1 << worker != 0);
            let wants = models.and(self.reader(key).models) != ModelMask(0);
            if !named || !wants || self.key(worker) != Some(key) {
                let mut steps = steps.iter();
                assert!(
                    steps.all(|step| step_of(step) != Some(key)),
                    "{key:?} was not desired"
                );
                continue;
            }
            concerned += 1;
            let disposition = published
                .dispositions
                .iter()
                .find(|(one, _)| *one == key)
                .unwrap()
                .1;
            let set = self.desired(worker);
            if self.reader(key).shut {
                assert_eq!(disposition, Disposition::Shut);
                continue;
            }
            if self.held.contains_key(&worker) {
                assert_eq!(disposition, Disposition::Held);
                continue;
            }
            let reader = self.reader(key);
            reader.meets(&set);
            match reader.delivery {
                Delivery::Newest => {
                    assert_eq!(disposition, Disposition::Notified);
                    self.expect(key, &set);
                }
                Delivery::Asked => assert_eq!(disposition, Disposition::Asks),
                Delivery::Every { bound } => {
                    let waiting = reader.waiting.len();
                    let room = waiting == 0 && reader.queue.len() < bound.into();
                    let expected = match (room, waiting < bound.into()) {
                        (true, _) => Disposition::Notified,
                        (false, true) => Disposition::Waiting,
                        (false, false) => Disposition::Full,
                    };
                    assert_eq!(disposition, expected);
                    let set = only(&set, reader.models);
                    if disposition == Disposition::Waiting {
                        reader.waiting.push_back((published.sequence, set.clone()));
                    }
                    if disposition != Disposition::Full {
                        reader.expected.push_back(set);
                    }
                }
            }
        }
        assert_eq!(published.dispositions.len(), concerned);
    }

    fn lend(&mut self, model: usize) -> Option<u8> {
        let mut decided = self.look_for_slot(model);
        if !matches!(decided, Lend::Slot(_)) {
            let mut steps = Vec::new();
            if self.plan.clear_taken(&mut steps) {
                self.carry_out(&steps);
                decided = self.look_for_slot(model);
            }
        }
        let needed = self.needed(model).len() + 1;
        self.most_needed[model] = self.most_needed[model].max(needed);
        let slot = match decided {
            Lend::Slot(slot) => slot,
            Lend::Grow { needed: grows } => {
                let slots = self.written[model].len();
                assert_eq!(grows, slots < needed, "{slots} slots for {needed}");
                self.written[model].push(0);
                let new = self.plan.grown(model);
                assert_eq!(self.look_for_slot(model), Lend::Slot(new));
                new
            }
            Lend::Wait => {
                let slots = self.written[model].len();
                assert!(
                    slots >= MAX_SLOTS.into() && slots >= needed,
                    "waits in vain"
                );
                return None;
            }
        };
        let old = self.written[model][usize::from(slot)];
        assert!(!self.referred(model).contains(&old), "lent while in use");
        Some(slot)
    }

    pub(super) fn look_for_slot(&mut self, model: usize) -> Lend {
        let records = self.observe();
        let mut pins = SlotSet::default();
        for (key, reader) in &mut self.readers {
            let snapshots = reader.snapshots.iter().filter(|(one, ..)| *one == model);
            let held = snapshots.fold(SlotSet::default(), |all, (_, slot, _)| all.with(*slot));
            let by_record = self.plan.slots_of(reader.claims.records(), model);
            let named = self.plan.named_slots(*key, model).union(by_record);
            assert_eq!(reader.claims.pinned(model, held, named), held, "{key:?}");
            pins = pins.union(held);
        }
        let pinned = pins.union(self.plan.slots_of(records, model));
        self.plan.lend(model, pinned, MAX_SLOTS)
    }
}
