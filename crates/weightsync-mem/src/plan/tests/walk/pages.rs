//! The shared pages: what the steps make of them, and whether they say what they must.

use super::*;

impl World {
    /// Does what the steps say, as long as nothing in use is written. A reader may
    /// pin what its mailbox was on at any moment before it is taken off it, so that
    /// counts as in use to the last step.
    pub(super) fn carry_out(&mut self, steps: &[PageChange]) {
        let mailboxes = self.readers.values();
        let notified = mailboxes.flat_map(|reader| {
            let answer = reader.answer.iter().map(|(_, live)| live);
            reader.live.iter().chain(&reader.queue).chain(answer)
        });
        let notified = notified.fold(SlotSet::default(), |all, live| all.with(live.record));
        for step in steps {
            match *step {
                PageChange::Write { record } => {
                    assert!(!notified.contains(record), "written where a pin may be");
                    for reader in self.readers.values() {
                        let pinned = reader.pinned.iter().map(|(live, ..)| live);
                        let answer = reader.answer.iter().map(|(_, live)| live);
                        let notified = reader.live.iter().chain(&reader.queue);
                        let mut used = pinned.chain(answer).chain(notified);
                        assert!(
                            used.all(|live| live.record != record),
                            "written while in use"
                        );
                    }
                    self.records[usize::from(record)] = Some(self.plan.record(record));
                }
                PageChange::Flip { key, live } => {
                    self.notify(key, live);
                    let reader = self.reader(key);
                    assert!(live.sequence > reader.notified);
                    reader.notified = live.sequence;
                    reader.live = Some(live);
                }
                PageChange::Push { key, live } => {
                    self.notify(key, live);
                    let reader = self.reader(key);
                    assert!(live.sequence > reader.notified);
                    let Delivery::Every { bound } = reader.delivery else {
                        panic!("a push for a reader without a queue")
                    };
                    reader.notified = live.sequence;
                    reader.queue.push_back(live);
                    assert!(reader.queue.len() <= bound.into());
                    let came = |(sequence, _): &mut (u64, Versions)| *sequence == live.sequence;
                    reader.waiting.pop_front_if(came);
                }
                PageChange::Answer {
                    key,
                    live,
                    question,
                } => {
                    self.notify(key, live);
                    let reader = self.reader(key);
                    assert!(live.sequence > reader.answer_notified);
                    assert_eq!(question, reader.question, "it has asked again");
                    reader.answer_notified = live.sequence;
                    reader.answer = Some((question, live));
                }
                PageChange::Clear { key } => {
                    let reader = self.reader(key);
                    let (question, _) = reader.answer.take().unwrap();
                    assert!(question <= reader.through, "it needs it");
                    reader.answered = None;
                }
            }
        }
    }

    fn notify(&mut self, key: Key, live: Live) {
        let set = *self.plan.set(live.record);
        self.reader(key).claims.note_named(live.record, &set);
    }

    /// Checks that each mailbox shows the set that it must.
    pub(super) fn check(&mut self) {
        self.plan.check_counts();
        for (key, reader) in &self.readers {
            if self.key(key.0.0) != Some(*key) {
                continue;
            }
            let shown: Vec<_> = match reader.delivery {
                Delivery::Every { .. } => reader.queue.iter().collect(),
                Delivery::Newest | Delivery::Asked => reader.live.iter().collect(),
            };
            let shown = shown
                .iter()
                .map(|live| only(&self.read(**live), reader.models));
            let waiting = reader.waiting.iter().map(|(_, set)| set.clone());
            let shown: VecDeque<_> = shown.chain(waiting).collect();
            assert_eq!(shown, reader.expected, "{key:?}");
            let answer = reader.answer.map(|(_, live)| self.read(live));
            let answer = answer.map(|set| only(&set, reader.models));
            assert_eq!(answer, reader.answered, "{key:?}");
            let waits = |(sequence, _): &(u64, _)| self.plan.waits(*key, *sequence);
            assert!(reader.waiting.iter().all(waits));
        }
        for model in 0..MODELS {
            let slots = self.written[model].len();
            // One of the slots is live, another is being written.
            let apart = self.most_needed[model].saturating_sub(2);
            let bound = self.most_needed[model].max(apart + usize::from(MAX_SLOTS));
            assert!(slots <= bound, "{slots} slots, {bound} needed");
            assert_eq!(usize::from(self.plan.slots(model)), slots);
            assert_eq!(self.plan.version(model).0, self.issued[model]);
            // Every version that is meant for somebody is still there.
            for version in self.needed(model) {
                let slot = self.plan.find(model, Version(version)).unwrap();
                assert_eq!(self.written[model][usize::from(slot)], version);
            }
        }
        // A snapshot is one version for as long as it is held.
        for reader in self.readers.values() {
            for (model, slot, version) in &reader.snapshots {
                assert_eq!(self.written[*model][usize::from(*slot)], *version);
            }
        }
    }

    pub(super) fn read(&self, live: Live) -> Versions {
        let record = self.records[usize::from(live.record)].unwrap();
        assert!(record.sequence <= live.sequence);
        let members = record.set.iter();
        members
            .map(|(model, placed)| (model, placed.version.0))
            .collect()
    }
}
