//! A scenario as a script: processes, what they are told, and what they answer.

use std::any::Any;
use std::collections::{BTreeSet, VecDeque};
use std::ops::Deref;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use weightsync_engine::worker::{Event, Spawn, Workers};
use weightsync_engine::{InitInfo, OutcomeKind};

use super::command::{
    Answer, Command, Join, Payload, Publish, SendSettings, Sent, Status, TrainerCommand,
    TrainerSetup, Want, WorkerCommand,
};
use super::resource_census::{Census, TOKEN, describe, state};
use super::scale::{BRIEF, longest};
use super::shape::Seen;
use crate::Subject;

/// The process that leads, in every script. Worker number n is process n + 1.
pub(crate) const TRAINER: usize = 0;

/// Next to how many senders something runs at the same time.
const MAX_COMPANIONS: usize = 4;

/// The processes of one scenario. Dropping it ends them.
pub(crate) struct Script<'a> {
    subject: &'a Subject,
    workers: Group,
    census: Census,
    dir: TempDir,
    addresses: Vec<String>,
    /// What runs next to each of the last senders, by its address.
    companions: VecDeque<(String, Box<dyn Any>)>,
    info: Option<InitInfo>,
    /// What each process has said that nobody has asked for yet.
    answers: Vec<VecDeque<Answer>>,
    /// How many commands each process was sent, and how many it has received.
    commands: Vec<[u64; 2]>,
    /// Puppets whose death is no surprise.
    may_die: BTreeSet<usize>,
    dead: BTreeSet<usize>,
    asleep: BTreeSet<usize>,
}

impl<'a> Script<'a> {
    /// Starts a trainer and so many workers, which have been told nothing yet.
    pub(crate) fn new(subject: &'a Subject, workers: usize) -> Self {
        let token = format!("conformance-{}-{}", std::process::id(), subject.next());
        let census = Census::take(&token);
        let dir = tempfile::tempdir().expect("a temporary directory");
        let count = workers + 1;
        let group = Spawn::this_program()
            .expect("this program has a path")
            .count(count)
            .init_value(&subject.scheme)
            .expect("text has a postcard form")
            .env(TOKEN, token)
            .grace(longest());
        Self {
            subject,
            workers: Group(group.start().expect("the processes start")),
            census,
            dir,
            addresses: Vec::new(),
            companions: VecDeque::new(),
            info: None,
            commands: vec![[0; 2]; count],
            answers: (0..count).map(|_| VecDeque::new()).collect(),
            may_die: BTreeSet::new(),
            dead: BTreeSet::new(),
            asleep: BTreeSet::new(),
        }
    }

    /// Starts a trainer and so many workers that have joined it and hold its
    /// first version.
    pub(crate) fn open(subject: &'a Subject, lead: TrainerSetup, workers: u32) -> (Self, InitInfo) {
        let mut script = Self::new(subject, workers as usize);
        let info = script.prepare(lead);
        let all: Vec<u32> = (0..workers).collect();
        script.gather(&info, &all);
        for worker in all {
            assert_eq!(script.take(worker).word(), 1);
        }
        (script, info)
    }

    /// Has the trainer decide everything; the init info.
    pub(crate) fn prepare(&mut self, lead: TrainerSetup) -> InitInfo {
        let info = self.act(TrainerCommand::Prepare(lead)).info();
        self.is_at(&info);
        self.info = Some(info.clone());
        info
    }

    /// Has a worker join that feeds workers of its own; the init info for them.
    pub(crate) fn head(&mut self, worker: u32, info: &InitInfo) -> InitInfo {
        let own = self.deed(worker, WorkerCommand::Head(Box::new(Join::new(info))));
        let own = own.info();
        self.is_at(&own);
        own
    }

    /// There is a sender of this init info, or will be.
    fn is_at(&mut self, info: &InitInfo) {
        let address = address(info);
        self.addresses.push(address.clone());
        let known = self
            .companions
            .iter()
            .position(|(known, _)| *known == address);
        if let Some(known) = known.and_then(|known| self.companions.remove(known)) {
            self.companions.push_front(known);
            return;
        }
        // No scenario has as many at a time, and some have thousands in a row.
        self.companions.truncate(MAX_COMPANIONS - 1);
        let started = (self.subject.companion)(info);
        self.companions.push_front((address, started));
    }

    /// The init info of the trainer that was prepared last.
    pub(crate) fn info(&self) -> InitInfo {
        self.info.clone().expect("a trainer was prepared")
    }

    /// Connects the trainer with these workers; each joins as it is.
    pub(crate) fn gather(&mut self, info: &InitInfo, workers: &[u32]) {
        let joins = workers.iter().map(|worker| {
            let sleeps = worker % 2 == 1;
            (
                *worker,
                Join {
                    sleeps,
                    ..Join::new(info)
                },
            )
        });
        self.gather_by(joins.collect());
    }

    /// The same, each on terms of its own.
    pub(crate) fn gather_by(&mut self, joins: Vec<(u32, Join)>) {
        let expect: Vec<u32> = joins.iter().map(|(worker, _)| *worker).collect();
        self.dispatch(
            TRAINER,
            &Command::Trainer(TrainerCommand::Connect {
                expect: expect.clone(),
                deadline: longest(),
            }),
        );
        for (worker, join) in joins {
            self.tell_worker(worker, WorkerCommand::Join(Box::new(join)));
        }
        assert_eq!(self.answer(TRAINER), Answer::Done);
        for worker in expect {
            assert_eq!(self.answer_of(worker), Answer::Done);
        }
    }

    /// Has one more worker join.
    pub(crate) fn join(&mut self, worker: u32, join: Join) -> Answer {
        self.deed(worker, WorkerCommand::Join(Box::new(join)))
    }

    /// A directory of this scenario alone.
    pub(crate) fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }

    /// Tells a process something without waiting for its answer.
    pub(crate) fn dispatch(&mut self, process: usize, command: &Command) {
        let frame = postcard::to_stdvec(command).expect("a command has a postcard form");
        self.workers
            .send(process, &frame, Some(longest()))
            .expect("it listens");
        // A command in the middle of another is its part.
        self.commands[process][0] += u64::from(!matches!(command, Command::GoOn));
    }

    pub(crate) fn tell_worker(&mut self, worker: u32, deed: WorkerCommand) {
        self.dispatch(worker as usize + 1, &Command::Worker(worker, deed));
    }

    /// The next answer of a process.
    pub(crate) fn answer(&mut self, process: usize) -> Answer {
        let answer = self.answer_or_death(process);
        answer.unwrap_or_else(|| panic!("process {process} died and was to answer"))
    }

    pub(crate) fn answer_of(&mut self, worker: u32) -> Answer {
        self.answer(worker as usize + 1)
    }

    /// The next answer of a process that may die instead.
    pub(crate) fn answer_or_death(&mut self, process: usize) -> Option<Answer> {
        loop {
            match self.answers[process].pop_front() {
                Some(Answer::Broken(text)) => panic!("process {process}: {text}"),
                Some(answer) => return Some(answer),
                None if self.dead.contains(&process) => return None,
                None => self.listen(),
            }
        }
    }

    /// Whether a process has said something that nobody has asked for; looks at
    /// what has come, and waits for nothing.
    pub(crate) fn has_said(&mut self, process: usize) -> bool {
        while let Some((from, event)) = self.workers.recv_any(Some(Duration::ZERO)) {
            self.on_event(from, event);
        }
        !self.answers[process].is_empty()
    }

    /// Tells the trainer something and waits for its answer.
    pub(crate) fn act(&mut self, act: TrainerCommand) -> Answer {
        self.dispatch(TRAINER, &Command::Trainer(act));
        self.answer(TRAINER)
    }

    /// Tells a worker something and waits for its answer.
    pub(crate) fn deed(&mut self, worker: u32, deed: WorkerCommand) -> Answer {
        self.tell_worker(worker, deed);
        self.answer_of(worker)
    }

    /// Has the trainer send, and waits for its report.
    pub(crate) fn send(&mut self, what: Payload, how: SendSettings) -> Sent {
        self.act(TrainerCommand::Send(what, how)).sent()
    }

    /// Has the trainer send so many versions at full speed; the first one is
    /// `from`: in parts; each is done before it counts as hanging, also
    /// where a version costs the time of a disk.
    pub(crate) fn send_fast(&mut self, from: u64, count: u64) {
        const PART: u64 = 50;
        for part in (0..count).step_by(PART as usize) {
            let publish = Publish {
                from: from + part,
                count: PART.min(count - part),
                fast: !self.subject.can.every_version,
                fuse: None,
            };
            let expected = Answer::Count(publish.count);
            assert_eq!(self.act(TrainerCommand::Publish(publish)), expected);
        }
    }

    /// Has the trainer send, and these workers take what comes; the report, and
    /// what each of them saw.
    pub(crate) fn deliver(
        &mut self,
        what: Payload,
        how: SendSettings,
        workers: &[u32],
    ) -> (Sent, Vec<Seen>) {
        if self.subject.pulls() {
            let sent = self.send(what, how);
            return (
                sent,
                workers.iter().map(|worker| self.take(*worker)).collect(),
            );
        }
        for worker in workers {
            self.tell_worker(*worker, WorkerCommand::Receive(None));
        }
        let sent = self.send(what, how);
        let seen = workers.iter().map(|worker| self.answer_of(*worker).seen());
        (sent, seen.collect())
    }

    /// Has the trainer send this number to all, and all of these workers take it.
    pub(crate) fn deliver_word(&mut self, word: u64, workers: &[u32]) {
        let (sent, seen) = self.deliver(Payload::Word(word), SendSettings::default(), workers);
        for seen in seen {
            assert_eq!(seen.word(), word);
        }
        self.assert_applied(&sent, workers);
    }

    /// Has a worker take what is there for it.
    pub(crate) fn take(&mut self, worker: u32) -> Seen {
        self.deed(worker, self.take_deed()).seen()
    }

    /// Has a worker look at the newest there is for it, new to it or not.
    pub(crate) fn newest(&mut self, worker: u32) -> Seen {
        match self.subject.pulls() {
            true => self.take(worker),
            false => self.deed(worker, WorkerCommand::Latest).seen(),
        }
    }

    /// Whether both ends look at the same memory, so that what one does the other sees
    /// at once.
    pub(crate) fn is_near(&self) -> bool {
        self.subject.can.outlives
    }

    /// Looks until the newest that a worker has is this: it may be on its way to one
    /// that is far from its sender.
    pub(crate) fn until_newest(&mut self, worker: u32, word: u64) -> Seen {
        if self.is_near() {
            let seen = self.newest(worker);
            assert_eq!(seen.word(), word, "{seen:?}");
            return seen;
        }
        let deadline = Instant::now() + longest();
        loop {
            let look = match self.subject.pulls() {
                true => Answer::Seen(self.take(worker)),
                false => self.deed(worker, WorkerCommand::Latest),
            };
            match look {
                Answer::Seen(seen) if seen.word() == word => return seen,
                other => assert!(Instant::now() < deadline, "{other:?}"),
            }
        }
    }

    /// There is nothing for a worker that holds this version of its first model
    /// but what it has had.
    pub(crate) fn assert_nothing_new(&mut self, worker: u32, version: u64) {
        let look = match self.subject.pulls() {
            true => WorkerCommand::Pull(Want::AtLeast(version + 1), Some(BRIEF)),
            false => WorkerCommand::Receive(Some(BRIEF)),
        };
        assert_eq!(self.deed(worker, look), Answer::Nothing);
    }

    /// How a worker takes what is there for it.
    pub(crate) fn take_deed(&self) -> WorkerCommand {
        match self.subject.pulls() {
            true => WorkerCommand::Pull(Want::Newest, Some(longest())),
            false => WorkerCommand::Receive(None),
        }
    }

    /// These workers have applied what was sent, and nobody else has a line, but
    /// for those that went since the report before. Where workers ask, all of
    /// them still do.
    pub(crate) fn assert_applied(&self, sent: &Sent, workers: &[u32]) {
        let mut outcomes = sent.outcomes();
        outcomes.retain(|(_, outcome)| {
            !matches!(
                outcome,
                OutcomeKind::Died
                    | OutcomeKind::Left
                    | OutcomeKind::Lost
                    | OutcomeKind::Failed
                    | OutcomeKind::Refused
            )
        });
        if self.subject.pulls() {
            assert!(
                outcomes
                    .iter()
                    .all(|(_, outcome)| *outcome == OutcomeKind::Asks),
                "{}",
                sent.text
            );
            return;
        }
        let expected = workers.iter().map(|worker| (*worker, OutcomeKind::Applied));
        assert_eq!(outcomes, expected.collect::<Vec<_>>(), "{}", sent.text);
    }

    /// The connected workers, as the sender sees them.
    pub(crate) fn status(&mut self) -> Vec<Status> {
        let mut workers = self.roster();
        workers.retain(|one| one.gone.is_none());
        workers
    }

    /// The same, with those that failed, died or were lost and are neither back nor forgotten.
    pub(crate) fn roster(&mut self) -> Vec<Status> {
        self.act(TrainerCommand::Status).workers()
    }

    /// Asks until the sender's view of its workers is as wanted.
    pub(crate) fn until_status(&mut self, wanted: impl Fn(&[Status]) -> bool) -> Vec<Status> {
        let deadline = Instant::now() + longest();
        loop {
            let status = self.status();
            if wanted(&status) {
                return status;
            }
            assert!(Instant::now() < deadline, "{status:?}");
        }
    }

    /// The sender's view of its workers is as wanted: at once, unless what they do has to
    /// come to it.
    pub(crate) fn assert_status(&mut self, wanted: impl Fn(&[Status]) -> bool) {
        if self.is_near() {
            let status = self.status();
            assert!(wanted(&status), "{status:?}");
        } else {
            self.until_status(wanted);
        }
    }

    /// Takes what comes until it is this, in order. Older ones may be on their way to a
    /// worker that is far from its sender; a near one is never given them.
    pub(crate) fn take_until(&mut self, worker: u32, take: &WorkerCommand, had: u64, word: u64) {
        self.take_from(had + 1, worker, take, word);
    }

    /// The same, where the first is this one or a later one.
    fn take_from(&mut self, first: u64, worker: u32, take: &WorkerCommand, word: u64) {
        let mut from = first;
        while from <= word {
            let seen = self.deed(worker, take.clone()).seen();
            let in_order = (from..=word).contains(&seen.word());
            assert!(in_order, "{seen:?}, and not one from {from} on");
            assert!(!self.is_near() || seen.word() == word, "{seen:?}");
            from = seen.word() + 1;
        }
    }

    pub(crate) fn pid(&self, process: usize) -> u32 {
        self.workers.pid(process).expect("it runs")
    }

    /// Has the trainer send this number to all, which have had `had`, and all of these workers
    /// take it. A worker that is far from its sender may have been given up: one that is back is
    /// given the version again that it had. It is the trainer's first send that waits for nobody.
    pub(crate) fn deliver_after(
        &mut self,
        had: u64,
        word: u64,
        how: SendSettings,
        workers: &[u32],
    ) {
        let send = TrainerCommand::SendAsync(Payload::Word(word), how);
        self.act(send).began();
        for worker in workers {
            let first = had + u64::from(self.is_near());
            self.take_from(first, *worker, &self.take_deed(), word);
        }
        let sent = self.act(TrainerCommand::Await(0, None)).sent();
        self.assert_applied(&sent, workers);
    }

    /// Kills a process, and waits until it is dead.
    pub(crate) fn kill(&mut self, process: usize) {
        self.may_die.insert(process);
        self.workers.kill(process).expect("it is there");
        self.until_dead(process);
    }

    /// Kills a process that has begun what it was told, so long afterwards.
    pub(crate) fn kill_at(&mut self, process: usize, moment: Duration) {
        self.may_die.insert(process);
        self.until_heard(process);
        let at = Instant::now() + moment;
        while Instant::now() < at {
            std::thread::yield_now();
        }
        self.kill(process);
    }

    /// Waits for the death of a process that was told to die.
    pub(crate) fn until_dead(&mut self, process: usize) {
        self.may_die.insert(process);
        while !self.dead.contains(&process) {
            self.listen();
        }
    }

    /// A process may die from here on.
    pub(crate) fn doom(&mut self, process: usize) {
        self.may_die.insert(process);
    }

    /// A fresh process in the place of a dead one.
    pub(crate) fn raise(&mut self, process: usize) {
        assert!(self.dead.remove(&process), "it is not dead");
        self.may_die.remove(&process);
        self.answers[process].clear();
        self.commands[process] = [0; 2];
        self.workers.restart(process, None).expect("it starts");
    }

    /// Stops a process where it is.
    pub(crate) fn stop(&mut self, process: usize) {
        self.signal(process, Signal::STOP);
        self.asleep.insert(process);
        self.until_state(process, 'T');
    }

    /// Lets it go on.
    pub(crate) fn wake(&mut self, process: usize) {
        self.signal(process, Signal::CONT);
        self.asleep.remove(&process);
    }

    /// Waits until a process has heard what it was told and waits in the kernel: it
    /// has nothing more to do without a new command.
    pub(crate) fn until_it_sleeps(&mut self, process: usize) {
        self.until_heard(process);
        self.until_state(process, 'S');
    }

    fn until_heard(&mut self, process: usize) {
        while self.commands[process][0] > self.commands[process][1] {
            self.listen();
        }
    }

    /// Ends everything in order; nothing may be left.
    pub(crate) fn close(self) {
        let Self {
            subject,
            workers,
            census,
            dir,
            addresses,
            companions,
            answers,
            may_die,
            asleep,
            ..
        } = self;
        assert!(asleep.is_empty(), "processes that cannot end");
        for (process, exit) in workers.shutdown(Some(longest())).into_iter().enumerate() {
            let excused = exit.is_success() || may_die.contains(&process);
            assert!(excused, "process {process} {exit}\n{}", exit.stderr_text());
        }
        for (process, answers) in answers.into_iter().enumerate() {
            assert!(
                answers.is_empty() || may_die.contains(&process),
                "process {process} also answered {answers:?}"
            );
        }
        drop((workers, companions));
        census.assert_nothing_left(&addresses);
        let residue = (subject.residue)();
        assert!(residue.is_empty(), "the scheme has left {residue:#?}");
        drop(dir);
    }

    /// Waits for one event.
    fn listen(&mut self) {
        match self.workers.recv_any(Some(longest())) {
            Some((from, event)) => self.on_event(from, event),
            None => panic!("nobody says anything: {:#?}", self.doings()),
        }
    }

    fn on_event(&mut self, from: usize, event: Event) {
        match event {
            Event::Frame(frame) => match postcard::from_bytes(&frame).expect("an answer") {
                Answer::Received => self.commands[from][1] += 1,
                answer => self.answers[from].push_back(answer),
            },
            Event::Exited(exit) => {
                let killed = exit.signal == Some(Signal::KILL.as_raw());
                let excused = killed && self.may_die.contains(&from);
                assert!(excused, "process {from} {exit}\n{}", exit.stderr_text());
                self.dead.insert(from);
            }
            other => panic!("process {from}: {other:?}"),
        }
    }

    /// What every process is doing.
    fn doings(&self) -> Vec<String> {
        let pids = (0..self.workers.len()).filter_map(|process| self.workers.pid(process));
        pids.map(describe).collect()
    }

    fn signal(&self, process: usize, signal: Signal) {
        let pid = Pid::from_raw(self.pid(process) as i32).expect("a process id");
        kill_process(pid, signal).expect("it is our child");
    }

    fn until_state(&self, process: usize, wanted: char) {
        let pid = self.pid(process);
        let deadline = Instant::now() + longest();
        while state(pid) != Some(wanted) {
            assert!(Instant::now() < deadline, "{}", describe(pid));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The processes. They are killed where a scenario fails: some of them may wait for
/// others, and nobody is left to tell them anything.
struct Group(Workers);

impl Deref for Group {
    type Target = Workers;

    fn deref(&self) -> &Workers {
        &self.0
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for process in 0..self.0.len() {
                // One that is gone already is as good.
                let _ = self.0.kill(process);
            }
        }
    }
}

/// Where an init info leads.
pub(crate) fn address(info: &InitInfo) -> String {
    let value = serde_json::to_value(info).expect("an init info has a JSON form");
    value["at"]["address"]
        .as_str()
        .expect("an address")
        .to_owned()
}
