//! The readers' part: they pin and take, are held, ask and go.

use super::*;

impl World {
    pub(super) fn pin(&mut self, worker: u32) {
        let Some(key) = self.key(worker) else { return };
        let reader = &self.readers[&key];
        let open = |(question, _): &&(u64, Live)| *question > reader.through;
        let (live, answers) = match (reader.delivery, reader.answer.iter().find(open)) {
            (Delivery::Every { .. }, _) => (reader.queue.front().copied(), None),
            (_, Some((question, live))) => (Some(*live), Some(*question)),
            (_, None) => (reader.live, None),
        };
        if let (Some(live), None) = (live, &reader.pinned) {
            let set = self.read(live);
            self.reader(key).pinned = Some((live, set, answers));
        }
    }

    pub(super) fn finish(&mut self, worker: u32) {
        let Some(key) = self.key(worker) else { return };
        let Some((live, found, answers)) = self.reader(key).pinned.take() else {
            return;
        };
        let again = self.read(live);
        assert_eq!(again, found, "the record was written while it was pinned");
        let set = self.records[usize::from(live.record)].unwrap().set;
        let reader = self.readers.get_mut(&key).unwrap();
        if let Delivery::Every { .. } = reader.delivery {
            reader.queue.pop_front();
            reader.head += 1;
            assert_eq!(
                Some(only(&found, reader.models)),
                reader.expected.pop_front()
            );
        }
        reader.through = answers.map_or(reader.through, |one| one.max(reader.through));
        for (model, placed) in set.only(reader.models).iter() {
            let version = self.written[model][usize::from(placed.slot)];
            assert_eq!(version, placed.version.0, "the slot was written meanwhile");
            reader.snapshots.insert((model, placed.slot, version));
        }
    }

    pub(super) fn release(&mut self, worker: u32) {
        let Some(was) = self.held.remove(&worker) else {
            return;
        };
        let set = self.desired(worker);
        let Some(key) = self.key(worker) else { return };
        let reader = self.reader(key);
        let mine = reader.models;
        if reader.shut || only(&was, mine) == only(&set, mine) {
            return;
        }
        reader.meets(&set);
        match reader.delivery {
            Delivery::Newest => self.expect(key, &set),
            Delivery::Asked => {}
            Delivery::Every { bound } => {
                let set = only(&set, mine);
                // Waiting sets come first, as far as there is room.
                let places = usize::from(bound) - reader.queue.len();
                let waiting = reader.waiting.len().saturating_sub(places);
                if places > reader.waiting.len() {
                    reader.expected.push_back(set);
                } else {
                    // The newest comes in any case.
                    if waiting == usize::from(bound) {
                        reader.waiting.pop_back();
                        reader.expected.pop_back();
                    }
                    let mailbox = &self.plan.mailboxes[&key.0];
                    let sequence = mailbox.waiting.back().unwrap().sequence;
                    let reader = self.reader(key);
                    reader.waiting.push_back((sequence, set.clone()));
                    reader.expected.push_back(set);
                }
            }
        }
    }

    pub(super) fn ask(
        &mut self,
        worker: u32,
        kind: u8,
        model: usize,
        back: u64,
        pins: SlotSet,
        steps: &mut Vec<PageChange>,
    ) {
        let key = self.key(worker).unwrap_or((WorkerId(worker), 0));
        let exact = (self.issued[model] + 2).saturating_sub(back).max(1);
        let version = Version(exact);
        let want = match kind {
            0 => Want::Newest,
            1 => Want::AtLeast { model, version },
            _ => Want::Exactly { model, version },
        };
        let question = match self.readers.get_mut(&key) {
            Some(reader) => {
                reader.through = reader.question;
                reader.question += 1;
                reader.question
            }
            None => 1,
        };
        let answer = self.plan.ask(key, question, want, pins, steps);
        let Some(reader) = self.readers.get_mut(&key).filter(|reader| !reader.shut) else {
            assert_eq!(answer, Answer::Gone);
            return;
        };
        reader.wanted = None;
        let every = matches!(reader.delivery, Delivery::Every { .. });
        if every || kind > 0 && !reader.models.contains(model) {
            assert_eq!(answer, Answer::NotAllowed);
            return;
        }
        let mine = reader.models;
        let now = self.desired(worker);
        let earlier = match self.held.contains_key(&worker) {
            true => VecDeque::new(),
            false => self.history.clone(),
        };
        let version_of = |set: &Versions| set.get(&model).copied().unwrap_or(0);
        let found = match kind {
            0 => Some(&now).filter(|now| !only(now, mine).is_empty()),
            1 => Some(&now).filter(|now| version_of(now) >= exact),
            _ => std::iter::once(&now)
                .chain(&earlier)
                .find(|set| version_of(set) == exact),
        };
        match found {
            Some(set) => {
                assert_eq!(answer, Answer::Notified);
                let set = only(set, mine);
                self.reader(key).answered = Some(set);
            }
            None if kind < 2 => {
                assert_eq!(answer, Answer::Later);
                let least = if kind == 0 { 0 } else { exact };
                self.reader(key).wanted = Some((model, least));
            }
            None => {
                let sets = std::iter::once(&now).chain(&earlier);
                let known: BTreeSet<_> = sets.map(version_of).filter(|&one| one > 0).collect();
                let known = known.into_iter().rev().map(Version).collect();
                assert_eq!(answer, Answer::Unknown { known });
            }
        }
    }

    /// Its pins stay. An entry of its queue that it was about to take was taken back.
    pub(super) fn shut(&mut self, worker: u32) {
        let Some(key) = self.key(worker) else { return };
        assert_eq!(self.plan.shut(key).is_some(), !self.readers[&key].shut);
        let reader = self.reader(key);
        reader.shut = true;
        reader.live = None;
        reader.queue.clear();
        reader.waiting.clear();
        reader.expected.clear();
        reader.wanted = None;
        reader.answer = None;
        reader.answered = None;
        if let Delivery::Every { .. } = reader.delivery {
            reader.pinned = None;
        }
    }

    /// Its snapshots stay; it gets nothing more.
    pub(super) fn leave(&mut self, worker: u32) {
        if let Some(key) = self.key(worker) {
            assert!(self.plan.leave(key).is_some());
            let reader = self.reader(key);
            let snapshots = std::mem::take(&mut reader.snapshots);
            let claims = std::mem::replace(&mut reader.claims, Claims::new(ModelMask(0)));
            *reader = Reader::new(ModelMask(0), Delivery::Newest);
            reader.snapshots = snapshots;
            reader.claims = claims;
            reader.notified = u64::MAX;
        }
    }
}
