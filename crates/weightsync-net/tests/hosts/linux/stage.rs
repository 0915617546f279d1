//! Hosts with processes on them, and what those have said.

mod actor;
mod begin;
mod proc;

pub(crate) use self::actor::Actor;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use weightsync_conformance::hosts::Hosts;
use weightsync_core::{RelayStatus, SenderStatus, WorkerRoute};
use weightsync_engine::InitInfo;
use weightsync_net::scrub::Scrub;

use super::attacks::Attack;
use super::messages::{
    Content, Crowd, Join, Lead, Notice, Order, ROLE, Role, Seen, Sent, Simulated,
};
use super::scale::longest;

/// How often what is not said but looked at is looked at.
const GLANCE: Duration = Duration::from_millis(20);

/// The host of the trainer.
pub(crate) const TRAINERS: usize = 0;

const PORT: u16 = 7070;

/// Bits a second.
pub(crate) const GIGABIT: u64 = 1_000_000_000;

/// A process that runs.
struct Process {
    child: Child,
    input: ChildStdin,
    host: usize,
    life: u64,
    /// A worker's last version.
    seen: Option<Seen>,
    /// How often a trainer has become ready, and a relay has joined.
    up: usize,
    /// How often it was told that its sender is gone.
    noticed_gone: usize,
}

/// Hosts, what runs on them, and what was said.
pub(crate) struct Stage {
    // First: nothing is said once it is gone.
    pub(crate) hosts: Hosts,
    run_dir: TempDir,
    /// Where the certificates are; without them links are plain.
    tls: Option<PathBuf>,
    bytes: usize,
    /// Whether workers ask for versions.
    pull: bool,
    /// How many hosts fetch from each.
    arity: usize,
    /// Whether hosts compare what relays send with the trainer's digests.
    verify: bool,
    content: Content,
    processes: BTreeMap<Actor, Process>,
    lives: u64,
    inbox: Receiver<(Actor, u64, Option<Notice>)>,
    report: Sender<(Actor, u64, Option<Notice>)>,
    info: Option<InitInfo>,
    /// The word of the newest version, and of every one by epoch and version.
    word: u64,
    words: BTreeMap<(u64, u64), u64>,
    epoch: u64,
    reports: BTreeMap<u64, (Instant, Sent)>,
    sending: u64,
    statuses: u64,
    status: Option<SenderStatus>,
    scrubbed: Option<Scrub>,
    begun: Instant,
    logs: Vec<(Actor, String)>,
    transcript: Vec<String>,
}

impl Stage {
    /// A trainer where the last one was; it is ready on return.
    pub(crate) fn start_trainer(&mut self) {
        self.word += 1;
        let lead = Lead {
            listen: self.root(),
            run_dir: self.run_dir.path().into(),
            tls: self.tls.clone(),
            bytes: self.bytes,
            pull: self.pull,
            arity: self.arity,
            verify: self.verify,
            word: self.word,
            content: self.content,
        };
        self.start(Actor::Trainer, TRAINERS, &Role::Trainer(lead));
        self.until("the trainer is ready", |stage| stage.is_up(Actor::Trainer));
    }

    /// Starts a relay on a host; it has joined on return.
    pub(crate) fn start_relay(&mut self, host: usize) {
        self.begin_relay(host);
        self.until("the relay has joined", |stage| {
            stage.is_up(Actor::Relay(host))
        });
    }

    pub(crate) fn begin_relay(&mut self, host: usize) {
        let role = Role::Relay(self.root(), self.tls.clone());
        self.start(Actor::Relay(host), host, &role);
    }

    /// Starts a worker on a host, and does not wait for it to join.
    pub(crate) fn begin_worker(&mut self, worker: u32, host: usize) {
        self.begin_worker_with(worker, host, longest());
    }

    /// The same of a worker whose `connect` calls take no longer than that.
    pub(crate) fn begin_worker_with(&mut self, worker: u32, host: usize, patience: Duration) {
        let info = self.info.clone().expect("a trainer has said how to join");
        let role = Role::Worker(Join {
            worker,
            info,
            patience,
        });
        let who = Actor::Worker(worker);
        self.start(who, host, &role);
        self.until("the worker's program runs", |stage| stage.is_up(who));
    }

    /// Starts workers on a host; they have the newest version on return.
    pub(crate) fn start_workers(&mut self, host: usize, workers: &[u32]) {
        for worker in workers {
            self.begin_worker(*worker, host);
        }
        self.until("the workers have the newest version", |stage| {
            workers.iter().all(|worker| stage.has_newest(*worker))
        });
    }

    /// Starts so many workers in one process on a host; they are in on return.
    pub(crate) fn start_crowd(&mut self, (crowd, host): (usize, usize), first: u32, count: u32) {
        let info = self.info.clone().expect("a trainer has said how to join");
        let role = Role::Crowd(Crowd { first, count, info });
        self.gather((crowd, host), &role, count);
    }

    /// The same of workers that are only said to be there.
    pub(crate) fn simulate(&mut self, agents: u32, workers: u32) {
        let root = self.root();
        let role = Role::Simulated(Simulated {
            root,
            agents,
            workers,
        });
        self.gather((0, TRAINERS), &role, agents * workers);
    }

    fn gather(&mut self, (crowd, host): (usize, usize), role: &Role, count: u32) {
        let who = Actor::Crowd(crowd);
        self.start(who, host, role);
        let mut before = 0;
        while before < count as usize {
            // Many take a while, but there are always some that come.
            self.until("more of a crowd are in", |stage| {
                stage.processes[&who].up > before
            });
            before = self.processes[&who].up;
        }
    }

    /// Starts an attack from a host.
    pub(crate) fn begin_attack(&mut self, host: usize, attack: Attack, seed: u64) {
        let role = Role::Attacker(self.root(), attack, seed);
        self.start(Actor::Attacker(host), host, &role);
    }

    /// Starts a relay that lies on a host; it has joined on return.
    pub(crate) fn start_liar(&mut self, host: usize) {
        let (who, role) = (Actor::Attacker(host), Role::Liar(self.root()));
        self.start(who, host, &role);
        self.until("the liar has joined", |stage| stage.is_up(who));
    }

    /// How many attacks are still going on.
    pub(crate) fn attacks_left(&self) -> usize {
        let mut attacks = self.processes.iter();
        let going_on =
            |(who, one): &(&Actor, &Process)| matches!(who, Actor::Attacker(_)) && one.up == 0;
        attacks.by_ref().filter(going_on).count()
    }

    /// Warnings of a process's crate under test.
    pub(crate) fn warnings(&self, who: Actor) -> impl Iterator<Item = &str> {
        self.logged(who, "WARN ")
    }

    /// Errors of a process's crate under test.
    pub(crate) fn errors(&self, who: Actor) -> impl Iterator<Item = &str> {
        self.logged(who, "ERROR ")
    }

    fn logged(&self, who: Actor, level: &'static str) -> impl Iterator<Item = &str> {
        let logs = self.logs.iter().filter(move |(of, _)| *of == who);
        logs.filter_map(move |(_, line)| line.strip_prefix(level))
    }

    fn start(&mut self, who: Actor, host: usize, role: &Role) {
        self.lives += 1;
        let life = self.lives;
        let program = std::env::current_exe().expect("this program");
        let role = serde_json::to_string(role).expect("plain data");
        let mut command = self.hosts.command(host, program);
        let mut child = spawn(&mut command, &role);
        let input = child.stdin.take().expect("it was asked for");
        let output = child.stdout.take().expect("it was asked for");
        let report = self.report.clone();
        thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                let Ok(line) = line else { break };
                let message = serde_json::from_str(&line)
                    .unwrap_or_else(|error| Notice::Failed(format!("said `{line}`: {error}")));
                if report.send((who, life, Some(message))).is_err() {
                    return;
                }
            }
            let _ = report.send((who, life, None));
        });
        self.record(&format!("{who} starts on host {host} as {}", child.id()));
        let process = Process {
            child,
            input,
            host,
            life,
            seen: None,
            up: 0,
            noticed_gone: 0,
        };
        let before = self.processes.insert(who, process);
        assert!(before.is_none(), "{who} runs already");
    }

    /// Kills a process by SIGKILL. When that was done.
    pub(crate) fn kill(&mut self, who: Actor) -> Instant {
        let mut process = self.processes.remove(&who).expect("it runs");
        let at = Instant::now();
        process.child.kill().expect("it can be killed");
        process.child.wait().expect("it has ended");
        self.record(&format!("{who} was killed"));
        at
    }

    /// Stops a process without killing it.
    pub(crate) fn pause(&mut self, who: Actor) {
        self.signal(who, Signal::STOP);
        self.record(&format!("{who} was stopped"));
    }

    /// Lets a stopped process go on.
    pub(crate) fn resume(&mut self, who: Actor) {
        self.signal(who, Signal::CONT);
        self.record(&format!("{who} goes on"));
    }

    fn signal(&self, who: Actor, signal: Signal) {
        let pid = Pid::from_child(&self.processes[&who].child);
        kill_process(pid, signal).expect("it can be signalled");
    }

    /// Sends a version to everybody, and waits for the report.
    pub(crate) fn send(&mut self) -> Sent {
        let word = self.begin_send();
        self.report(word)
    }

    /// The same, where nothing is in its way: everybody has it, and says so.
    pub(crate) fn send_everywhere(&mut self) -> Sent {
        let sent = self.send();
        for worker in self.workers() {
            assert_eq!(sent.outcome(worker), "Applied", "{worker}: {sent:?}");
        }
        self.until_all_newest();
        sent
    }

    /// Begins a send to everybody; the word of its version.
    pub(crate) fn begin_send(&mut self) -> u64 {
        self.begin_send_within(longest())
    }

    pub(crate) fn begin_send_within(&mut self, deadline: Duration) -> u64 {
        self.word += 1;
        let word = self.word;
        self.order(Order::Send { word, deadline });
        self.until("the trainer sends", |stage| stage.sending == word);
        word
    }

    /// Sends a version without waiting for anybody.
    pub(crate) fn publish(&mut self) -> u64 {
        self.word += 1;
        let word = self.word;
        self.order(Order::Publish { word });
        self.report(word);
        word
    }

    /// The sends to come say nothing of a worker that is gone.
    pub(crate) fn forget(&mut self, worker: u32) {
        self.order(Order::Forget { worker });
    }

    /// The report of a send.
    pub(crate) fn report(&mut self, word: u64) -> Sent {
        self.report_at(word).1
    }

    /// The same, and when it came.
    pub(crate) fn report_at(&mut self, word: u64) -> (Instant, Sent) {
        self.until("the send is over", |stage| {
            stage.reports.contains_key(&word)
        });
        self.reports[&word].clone()
    }

    pub(crate) fn is_over(&self, word: u64) -> bool {
        self.reports.contains_key(&word)
    }

    /// How the trainer says things are.
    pub(crate) fn status(&mut self) -> SenderStatus {
        let before = self.statuses;
        self.order(Order::Status);
        self.until("the trainer says how things are", |stage| {
            stage.statuses > before
        });
        self.status.clone().expect("it has said so")
    }

    /// Whether hosts hold what was published.
    pub(crate) fn scrub(&mut self) -> Scrub {
        self.scrubbed = None;
        self.order(Order::Scrub);
        self.until("hosts are scrubbed", |stage| stage.scrubbed.is_some());
        self.scrubbed.take().expect("it is there")
    }

    /// Asks for the status until it is as it should be.
    pub(crate) fn until_status(
        &mut self,
        what: &str,
        mut done: impl FnMut(&SenderStatus) -> bool,
    ) -> SenderStatus {
        let until = Instant::now() + longest();
        loop {
            let status = self.status();
            if done(&status) {
                return status;
            }
            if Instant::now() > until {
                self.fail(&format!("never came true: {what}; {status:#?}"));
            }
            // Something is heard of, or a moment passes.
            self.receive(GLANCE);
        }
    }

    /// Waits until everybody has the newest version.
    pub(crate) fn until_all_newest(&mut self) {
        self.until("every worker has the newest version", |stage| {
            stage.workers().all(|worker| stage.has_newest(worker))
        });
    }

    /// Waits until something is true; how long it took.
    pub(crate) fn until(&mut self, what: &str, mut done: impl FnMut(&Self) -> bool) -> Duration {
        let begun = Instant::now();
        while !done(self) {
            if begun.elapsed() > longest() {
                self.fail(&format!("never came true: {what}"));
            }
            self.receive(GLANCE);
        }
        begun.elapsed()
    }

    /// Takes in what is said for so long, which is how long a fault lasts.
    pub(crate) fn listen(&mut self, until: Instant) {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.receive(left);
        }
    }

    pub(crate) fn workers(&self) -> impl Iterator<Item = u32> {
        self.processes.keys().filter_map(|who| match who {
            Actor::Worker(worker) => Some(*worker),
            _ => None,
        })
    }

    pub(crate) fn processes(&self) -> Vec<(Actor, usize)> {
        let processes = self.processes.iter();
        processes.map(|(who, one)| (*who, one.host)).collect()
    }

    /// The word of the newest version.
    pub(crate) fn newest(&self) -> u64 {
        self.word
    }

    pub(crate) fn has_newest(&self, worker: u32) -> bool {
        self.seen(worker).is_some_and(|seen| seen.word == self.word)
    }

    pub(crate) fn seen(&self, worker: u32) -> Option<Seen> {
        self.processes.get(&Actor::Worker(worker))?.seen
    }

    /// How often a process was told that its sender is gone.
    pub(crate) fn noticed_gone(&self, who: Actor) -> usize {
        self.processes.get(&who).map_or(0, |one| one.noticed_gone)
    }

    pub(crate) fn pid(&self, who: Actor) -> u32 {
        self.processes[&who].child.id()
    }

    /// Limits the links of some hosts to so many bits a second.
    pub(crate) fn rate(&self, hosts: impl IntoIterator<Item = usize>, rate: u64) {
        for host in hosts {
            let set = self.hosts.rate(host, rate);
            set.unwrap_or_else(|error| panic!("{error}"));
        }
    }

    /// Waits until so many bytes more have come to a process's host.
    pub(crate) fn until_came(&mut self, who: Actor, bytes: u64) {
        let before = self.came_to(who);
        let took = self.until("bytes come", |stage| stage.came_to(who) >= before + bytes);
        self.note(&format!("{bytes} bytes came to {who} in {took:?}"));
    }

    /// Where the trainer listens.
    pub(crate) fn root(&self) -> String {
        format!("{}:{PORT}", self.hosts.address(TRAINERS))
    }

    pub(crate) fn note(&mut self, what: &str) {
        println!("{:8.3} {what}", self.begun.elapsed().as_secs_f64());
        self.record(what);
    }

    pub(crate) fn fail(&self, why: &str) -> ! {
        const PART: usize = 250;
        let (first, rest) = self.transcript.split_at(self.transcript.len().min(PART));
        let left_out = rest.len().saturating_sub(PART);
        for line in first.iter().chain(&rest[left_out..]) {
            eprintln!("{line}");
        }
        panic!("{why} ({left_out} lines in between are left out)");
    }

    fn is_up(&self, who: Actor) -> bool {
        self.processes.get(&who).is_some_and(|one| one.up > 0)
    }

    fn order(&mut self, order: Order) {
        let line = serde_json::to_string(&order).expect("plain data");
        let trainer = self.processes.get_mut(&Actor::Trainer).expect("a trainer");
        writeln!(trainer.input, "{line}").expect("the trainer listens");
    }

    fn receive(&mut self, most: Duration) {
        match self.inbox.recv_timeout(most) {
            Ok((who, life, message)) => self.take_in(who, life, message),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => unreachable!("it is kept here"),
        }
    }

    fn take_in(&mut self, who: Actor, life: u64, message: Option<Notice>) {
        match &message {
            Some(Notice::Status(_)) => {}
            Some(Notice::Info(_)) => self.record(&format!("{who}: Info")),
            Some(message) => self.record(&format!("{who}: {message:?}")),
            None => self.record(&format!("{who} (life {life}) is at its end")),
        }
        let process = self.processes.get_mut(&who).filter(|one| one.life == life);
        let Some(process) = process else {
            // Last words of one that was killed.
            return;
        };
        match message {
            None => self.fail(&format!("{who} ended unasked")),
            Some(Notice::Failed(why)) => self.fail(&format!("{who}: {why}")),
            Some(Notice::Info(info)) => self.info = Some(info),
            Some(Notice::Ready { epoch }) => {
                process.up += 1;
                self.epoch = epoch;
                self.words.insert((epoch, 1), self.word);
            }
            Some(Notice::Joined | Notice::Attacked) => process.up += 1,
            Some(Notice::Together(count)) => process.up = count as usize,
            Some(Notice::Sending { word }) => self.sending = word,
            Some(Notice::Sent(sent)) => {
                self.words.insert((self.epoch, sent.version), sent.word);
                self.reports.insert(sent.word, (Instant::now(), sent));
            }
            Some(Notice::Status(status)) => {
                self.statuses += 1;
                self.status = Some(*status);
            }
            Some(Notice::Scrubbed(scrub)) => self.scrubbed = Some(*scrub),
            Some(Notice::SenderGone { .. }) => process.noticed_gone += 1,
            Some(Notice::Seen(seen)) => {
                let before = process.seen.replace(seen);
                if before.is_some_and(|before| before.word > seen.word) {
                    self.fail(&format!("{who} went back from {before:?} to {seen:?}"));
                }
                let label = (seen.epoch, seen.version);
                if self
                    .words
                    .get(&label)
                    .is_some_and(|word| *word != seen.word)
                {
                    self.fail(&format!("{who} has a version with a wrong label: {seen:?}"));
                }
            }
            Some(Notice::Log(line)) => self.logs.push((who, line)),
        }
    }

    fn record(&mut self, what: &str) {
        let line = format!("{:8.3} {what}", self.begun.elapsed().as_secs_f64());
        self.transcript.push(line);
    }
}

/// This binary, in a role.
pub(crate) fn spawn(command: &mut Command, role: &str) -> Child {
    command
        .env(ROLE, role)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this program starts")
}

/// The relays of a status from the sender down a chain; fails where it is none.
/// How many workers agents reach.
pub(crate) fn at_agents(status: &SenderStatus) -> usize {
    let relays = status.relays.iter();
    let at = relays.map(|relay| status.workers_by(WorkerRoute::Agent(relay.agent)).count());
    at.sum()
}

pub(crate) fn chain(status: &SenderStatus) -> Vec<&RelayStatus> {
    let mut chain: Vec<&RelayStatus> = Vec::new();
    loop {
        let parent = chain.last().map_or(0, |last| last.agent);
        let mut below = status.relays.iter().filter(|one| one.parent == parent);
        let Some(next) = below.next() else {
            assert_eq!(chain.len(), status.relays.len(), "no chain: {status:#?}");
            return chain;
        };
        assert!(below.next().is_none(), "two below {parent}: {status:#?}");
        chain.push(next);
    }
}
