//! Connections: who joins and goes, what each is called with, and what it says.

use std::collections::BTreeMap;

use weightsync::transport::{GoneWorker, Lateness};
use weightsync::{Outcome, Version, WorkerId};

use super::{
    About, Answer, Life, MAX_GONE, MAX_KNOWN, Mailbox, MailboxId, Numbered, Order, Plan, Set, Want,
};

impl<V: Clone + Numbered> Plan<V> {
    /// A worker joins, in place of an earlier connection of its number.
    pub(crate) fn join(&mut self, about: About) -> MailboxId {
        self.last_mailbox += 1;
        let (id, worker) = (self.last_mailbox, about.worker);
        let set = self.desired.for_worker(worker).only(&about.wanted);
        let sequence = self.sequence;
        let mailbox = Mailbox {
            life: Life::Here,
            silent: false,
            desired: (!set.is_empty()).then_some(Order { sequence, set }),
            called: 0,
            staged: 0,
            taken: 0,
            applied: 0,
            runs: vec![Version::NONE; self.newest.len()],
            refused: None,
            rejected: None,
            late: Lateness::default(),
            asked: 0,
            joined: !about.announces,
            signs: 0,
            asking: BTreeMap::new(),
            watchers: 0,
            about,
        };
        self.mailboxes.insert(id, mailbox);
        if let Some(before) = self.current.insert(worker, id) {
            self.forget(before);
        }
        if let Some(before) = self.missing.remove(&worker) {
            self.forget(before);
        }
        self.rejected.retain(|(rejected, _)| *rejected != worker);
        id
    }

    /// The connection of another worker that has the number of one that comes. A worker
    /// that registers again comes from the same process and listens where it did.
    pub(crate) fn holder(&self, about: &About) -> Option<MailboxId> {
        let id = *self.current.get(&about.worker)?;
        let other = &self.mailboxes.get(&id)?.about;
        ((other.pid, other.addr) != (about.pid, about.addr)).then_some(id)
    }

    /// A worker's own rendez-vous is over.
    pub(crate) fn joined(&mut self, id: MailboxId) {
        if let Some(mailbox) = self.mailboxes.get_mut(&id) {
            mailbox.joined = true;
        }
    }

    /// A connection has ended.
    pub(crate) fn end(&mut self, id: MailboxId, life: Life) {
        let Some(mailbox) = self.mailboxes.get_mut(&id) else {
            return;
        };
        if mailbox.life == Life::Here {
            mailbox.life = life;
        }
        mailbox.desired = None;
        let worker = mailbox.about.worker;
        if self.current.get(&worker) == Some(&id) {
            self.current.remove(&worker);
            self.go_on_with_another(worker);
            if !self.current.contains_key(&worker) {
                self.remember(id);
            }
        }
        self.forget(id);
    }

    /// Remembers one that is gone, and by which no other connection goes on.
    fn remember(&mut self, id: MailboxId) {
        let Some((mailbox, how)) = self
            .mailboxes
            .get(&id)
            .and_then(|mailbox| Some((mailbox, mailbox.end()?)))
        else {
            return;
        };
        let worker = mailbox.about.worker;
        if how == Outcome::Left {
            let gone = GoneWorker {
                status: self.status(mailbox),
                how,
                joined: id,
            };
            if self.left.len() >= MAX_GONE {
                self.left.pop_first();
            }
            self.left.insert(worker, gone);
            return;
        }
        if !mailbox.belongs() {
            return;
        }
        if self.missing.len() >= MAX_GONE
            && let Some((_, oldest)) = self.missing.pop_first()
        {
            self.forget(oldest);
        }
        self.missing.insert(worker, id);
    }

    /// Misses these workers no more, until they come and go again.
    pub(crate) fn forget_missing(&mut self, workers: &[WorkerId]) {
        for worker in workers {
            if let Some(id) = self.missing.remove(worker) {
                self.forget(id);
            }
        }
    }

    /// A worker that has registered twice, as the first attempt was not answered in
    /// time, goes on by the connection that is left.
    fn go_on_with_another(&mut self, worker: WorkerId) {
        let set = self.desired.for_worker(worker);
        let mut others = self.mailboxes.iter_mut().rev();
        let other = others.find(|(_, mailbox)| {
            mailbox.about.worker == worker
                && mailbox.life == Life::Here
                && mailbox.rejected.is_none()
        });
        let Some((other, mailbox)) = other else {
            return;
        };
        let set = set.only(&mailbox.about.wanted);
        if !set.is_empty() {
            let sequence = self.sequence;
            mailbox.mean(Order { sequence, set });
        }
        self.current.insert(worker, *other);
    }

    /// Forgets a connection that has ended, once no publication has a line of it, nor
    /// any to come.
    pub(super) fn forget(&mut self, id: MailboxId) {
        let over = |mailbox: &Mailbox<V>| {
            let is_missing = self.missing.get(&mailbox.about.worker) == Some(&id);
            mailbox.life != Life::Here && mailbox.watchers == 0 && !is_missing
        };
        if self.mailboxes.get(&id).is_some_and(over) {
            self.mailboxes.remove(&id);
        }
    }

    /// Whether this is the connection of a worker that is here.
    pub(crate) fn is_here(&self, id: MailboxId) -> bool {
        let mailbox = self.mailboxes.get(&id);
        mailbox.is_some_and(|mailbox| mailbox.life == Life::Here)
    }

    /// Whether nothing is heard of a connection.
    pub(crate) fn is_silent(&self, id: MailboxId) -> bool {
        self.mailboxes
            .get(&id)
            .is_some_and(|mailbox| mailbox.silent)
    }

    pub(crate) fn about(&self, id: MailboxId) -> Option<&About> {
        self.mailboxes.get(&id).map(|mailbox| &mailbox.about)
    }

    /// The sequence of what a connection should have; 0 for nothing.
    pub(crate) fn sequence_for(&self, id: MailboxId) -> u64 {
        let desired = self
            .mailboxes
            .get(&id)
            .and_then(|mailbox| mailbox.desired.as_ref());
        desired.map_or(0, |order| order.sequence)
    }

    /// What to call a connection with next, if there is anything new for it.
    pub(crate) fn next_call(&mut self, id: MailboxId) -> Option<Order<V>> {
        let mailbox = self.mailboxes.get_mut(&id)?;
        if mailbox.life != Life::Here || mailbox.rejected.is_some() {
            return None;
        }
        let order = mailbox.desired.as_ref()?;
        if order.sequence <= mailbox.called {
            return None;
        }
        mailbox.called = order.sequence;
        Some(order.clone())
    }

    /// A call did not come through: the next one says the newest again.
    pub(crate) fn call_failed(&mut self, id: MailboxId) {
        if let Some(mailbox) = self.mailboxes.get_mut(&id) {
            mailbox.called = mailbox.called.min(mailbox.staged);
        }
    }

    /// A worker has all of it, and has checked it.
    pub(crate) fn staged(&mut self, id: MailboxId, sequence: u64) {
        if let Some(mailbox) = self.mailboxes.get_mut(&id) {
            let sequence = sequence.min(self.sequence);
            mailbox.staged = mailbox.staged.max(sequence);
        }
    }

    /// A worker's program has been handed it.
    pub(crate) fn taken(&mut self, id: MailboxId, sequence: u64) {
        self.staged(id, sequence);
        if let Some(mailbox) = self.mailboxes.get_mut(&id) {
            mailbox.taken = mailbox.taken.max(sequence.min(self.sequence));
        }
    }

    /// A worker runs these versions from here on; the sequence is that of the call
    /// that brought them, or 0.
    pub(crate) fn applied(&mut self, id: MailboxId, sequence: u64, versions: &[(usize, Version)]) {
        let newest = &self.newest;
        let Some(mailbox) = self.mailboxes.get_mut(&id) else {
            return;
        };
        let sequence = sequence.min(self.sequence);
        // What came by another way may have overtaken it.
        if sequence != 0 && sequence < mailbox.applied {
            return;
        }
        mailbox.applied = mailbox.applied.max(sequence);
        mailbox.staged = mailbox.staged.max(sequence);
        for (model, version) in versions {
            // No worker runs what was not sent.
            if mailbox.about.wanted.contains(model) && *version <= newest[*model] {
                mailbox.runs[*model] = *version;
            }
        }
    }

    /// A worker cannot use the set of this sequence.
    pub(crate) fn refused(&mut self, id: MailboxId, sequence: u64, reason: String) {
        if let Some(mailbox) = self.mailboxes.get_mut(&id)
            && mailbox
                .refused
                .as_ref()
                .is_none_or(|(before, _)| *before <= sequence)
        {
            mailbox.refused = Some((sequence, reason));
        }
    }

    /// A worker can use nothing at all.
    pub(crate) fn rejected(&mut self, id: MailboxId, reason: String) {
        let Some(mailbox) = self.mailboxes.get_mut(&id) else {
            return;
        };
        let worker = mailbox.about.worker;
        mailbox.desired = None;
        mailbox.rejected = Some(reason.clone());
        if self.current.get(&worker) == Some(&id) {
            self.rejected.push((worker, reason));
        }
    }

    /// Whether anything was heard of a connection lately; true if that is news.
    pub(crate) fn silent(&mut self, id: MailboxId, silent: bool) -> bool {
        let Some(mailbox) = self.mailboxes.get_mut(&id) else {
            return false;
        };
        mailbox.signs += u64::from(!silent);
        std::mem::replace(&mut mailbox.silent, silent) != silent
    }

    /// How many signs of life a connection has given; `None` if it has ended, or nothing
    /// is heard of it.
    pub(crate) fn signs(&self, id: MailboxId) -> Option<u64> {
        let mailbox = self.mailboxes.get(&id)?;
        (mailbox.life == Life::Here && !mailbox.silent).then_some(mailbox.signs)
    }

    /// What a worker that asks for a set gets. After [`Answer::Later`] it is one that
    /// waits, until there is such a set or [`asks_no_more`](Self::asks_no_more).
    pub(crate) fn ask(&mut self, id: MailboxId, want: Want) -> Answer<V> {
        let answer = self.answer(id, want);
        if let Answer::Later(_) = answer
            && let Some(mailbox) = self.mailboxes.get_mut(&id)
        {
            self.last_question += 1;
            mailbox.asked = self.last_question;
            mailbox.asking.insert(self.last_question, want);
            return Answer::Later(self.last_question);
        }
        answer
    }

    /// The same without asking, for one that waits already.
    pub(crate) fn answer(&self, id: MailboxId, want: Want) -> Answer<V> {
        let Some(mailbox) = self.mailboxes.get(&id) else {
            return Answer::Gone;
        };
        let wanted = &mailbox.about.wanted;
        let allowed = match want {
            Want::Newest => true,
            Want::AtLeast(model, _) | Want::Exactly(model, _) => wanted.contains(&model),
        };
        if mailbox.life != Life::Here || mailbox.rejected.is_some() || !allowed {
            return Answer::Gone;
        }
        let worker = mailbox.about.worker;
        let sets = || {
            let sets = self.desired.askable(worker);
            sets.map(|set| set.only(wanted)).enumerate()
        };
        let order = |(place, set): (usize, Set<V>)| {
            let newest = mailbox.desired.as_ref().filter(|_| place == 0);
            let sequence = newest.map_or(0, |order| order.sequence);
            Answer::Set(Order { sequence, set })
        };
        match want {
            Want::Newest => sets().next().filter(|(_, set)| !set.is_empty()),
            Want::AtLeast(model, least) => {
                let newest = sets().next();
                newest.filter(|(_, set)| set.version(model) >= least)
            }
            Want::Exactly(model, exact) => {
                let found = sets().find(|(_, set)| set.version(model) == exact);
                if found.is_none() {
                    let versions = sets().map(|(_, set)| set.version(model));
                    let mut known: Vec<_> = versions.filter(|one| !one.is_none()).collect();
                    known.sort_unstable_by(|a, b| b.cmp(a));
                    known.dedup();
                    known.truncate(MAX_KNOWN);
                    return Answer::Unknown { known };
                }
                found
            }
        }
        .map_or(Answer::Later(0), order)
    }

    /// A question that waited does not any more.
    pub(crate) fn asks_no_more(&mut self, id: MailboxId, question: u64) {
        if let Some(mailbox) = self.mailboxes.get_mut(&id) {
            mailbox.asking.remove(&question);
        }
    }
}
