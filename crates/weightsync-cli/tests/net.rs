//! `weightsync relay`, `status` and `scrub` as a user meets them: the real binary,
//! between a trainer and a worker on loopback.

#[path = "../../weightsync-conformance/src/harness/patience.rs"]
mod patience;

use std::{
    fs::{self, Permissions},
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Child, ChildStdout, Command, Output, Stdio},
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime},
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use weightsync_engine::{
    AnyScheme, Expect, InitInfo, MultiProcess, NoSync, ReceiverSetup, SendOptions, Sender,
    SenderSetup, SharedMem, Tensors, Version,
};
use weightsync_link::access::Token;
use weightsync_link::tls::{CertificateRequest, CertificateRole, Tls, make};
use weightsync_net::{Deltas, Distributed, Share};
use weightsync_serve as _;
use weightsync_store::StoreScheme;

/// More than an unoptimised build on a busy machine needs.
fn longest() -> Duration {
    patience::patience(20)
}

/// The tables of docs/which-scheme.md are what the schemes declare.
#[test]
fn settings_in_the_documents_are_those_of_the_schemes() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/which-scheme.md");
    let page = fs::read_to_string(page).unwrap();
    let mut tables = String::new();
    for scheme in ["shared-mem", "multi-process", "distributed", "rpc", "store"] {
        tables += &format!("\n### `{scheme}`\n\n| setting | | default |\n|---|---|---|\n");
        for setting in AnyScheme::settings_of(scheme).unwrap() {
            let text = match setting.takes {
                "" => setting.key.to_owned(),
                takes => format!("{}={takes}", setting.key),
            };
            let default = setting.default.map(|value| format!("`{value}`"));
            let (about, default) = (setting.about, default.unwrap_or_default());
            tables += &format!("| `{text}` | {about} | {default} |\n");
        }
    }
    assert!(
        page.contains(&tables),
        "docs/which-scheme.md has no tables\n{tables}"
    );
}

#[test]
fn relay_serves_and_shows_in_status_until_ctrl_c() {
    let mut trainer = Trainer::start();
    let mut relay = Running::start(trainer.relay());
    let joined = relay.line_with("joined");
    assert!(joined.contains("serving the next host at"), "{joined}");
    let worker = trainer.worker(3);
    let versions = trainer.send();
    assert_eq!(versions, 2);

    // The worker reads what the relay has fetched, once.
    let newest = |status: &Value| {
        let relay = &status["relays"][0];
        status["workers"][0]["versions"] == serde_json::json!([versions])
            && status["workers"][0]["route"]["agent"] == relay["agent"]
            && relay["received"].as_u64() > Some(0)
    };
    let status = trainer.until_status(newest);
    assert_eq!(status["address"], trainer.address.as_str());
    assert_eq!(status["pid"], std::process::id());
    assert_eq!(status["models"][0]["name"], "policy");
    assert_eq!(status["models"][0]["version"], versions);
    assert_eq!(status["workers"].as_array().map(Vec::len), Some(1));
    assert_eq!(status["sends"], versions);
    assert!(status["up_seconds"].as_f64() > Some(0.0), "{status}");
    assert!(status["run"].is_string(), "{status}");
    let seen = &status["relays"][0];
    assert_eq!(status["relays"].as_array().map(Vec::len), Some(1));
    assert_eq!(seen["serves"], true);
    assert_eq!(seen["parent"], 0);
    assert_eq!(seen["pid"], relay.child.id());
    assert_eq!(status["served"], seen["received"]);
    let third = &status["workers"][0];
    assert_eq!(third["worker"], 3);
    assert_eq!(third["device"], "cpu");
    assert_eq!(third["host"], seen["name"]);
    assert_eq!(third["last"]["outcome"], "applied");

    // The same as a tree.
    let tree = trainer.status(&[]);
    assert_eq!(tree.status.code(), Some(0));
    let tree = text(&tree.stdout);
    let pid = relay.child.id();
    for word in [
        "1 relay, 1 worker",
        &format!("sender {} (pid ", trainer.address),
        &format!("pid {pid})  v{versions}, "),
        "   └─ worker 3 (pid ",
    ] {
        assert!(tree.contains(word), "no {word:?} in\n{tree}");
    }

    let help = weightsync(&["status", "--help"]).output();
    let help = text(&help.expect("it starts").stdout);
    assert!(help.contains("read the memory that is there"), "{help}");

    // Its worker finds another way; of the relay itself nothing is left.
    relay.signal(Signal::INT);
    assert_eq!(relay.end(), Some(130));
    let alone = |status: &Value| {
        let agents = status["relays"].as_array().expect("a list");
        let third = &status["workers"][0];
        agents.len() == 1
            && agents[0]["serves"] == false
            && third["worker"] == 3
            && third["route"]["agent"] == agents[0]["agent"]
    };
    trainer.until_status(alone);
    assert_eq!(trainer.send(), versions + 1);
    drop(trainer);
    assert_eq!(worker.join().expect("no panic"), versions + 1);
}

#[test]
fn scrub_finds_relay_damage_and_the_next_comes_whole() {
    let mut host = Host::start();
    let trainer = &mut host.trainer;
    trainer.send();
    let found = trainer.ask("scrub", &[]);
    assert_eq!(found.status.code(), Some(0), "{}", text(&found.stdout));
    let words = "all of 1 version that hosts hold is what was published\n";
    assert_eq!(text(&found.stdout), words);

    // Of what the second version is, which the test that reads the relay's knows.
    let version = trainer.send_with(|bias| bias.fill(7.25));
    damage(host.relay.child.id(), &[7.25; 1 << 10]);
    let found = trainer.ask("scrub", &["--json"]);
    assert_eq!(found.status.code(), Some(1), "{}", text(&found.stdout));
    let scrub: Value = serde_json::from_slice(&found.stdout).expect("JSON");
    assert_eq!(scrub["others"].as_array().map(Vec::len), Some(1), "{scrub}");
    let check = &scrub["others"][0];
    assert_eq!(check["pid"], host.relay.child.id());
    assert_eq!(check["version"], version);
    assert_eq!(check["workers"], serde_json::json!([3]));
    let differs = &check["verdict"]["differs"];
    assert!(differs["expected"].is_string() && differs["expected"] != differs["got"]);

    // It is not held any more, and what changes from here on is not made from it.
    let dropped = |status: &Value| status["relays"][0]["holds"] == serde_json::json!([]);
    trainer.until_status(dropped);
    trainer.stays_sound();
    host.end();
}

#[test]
fn scrub_runs_automatically_every_64th_version() {
    let mut host = Host::start();
    let trainer = &mut host.trainer;
    // No multiple of 64 is among its numbers.
    let mut versions = (0..64).map(|step| 10 * step + 5);
    let mut send = |trainer: &mut Trainer, change: fn(&mut [f32])| {
        trainer.number = versions.next();
        trainer.send_with(change)
    };
    // One float in a page that does not change.
    send(trainer, |bias| bias[100] = 7.25);
    for _ in 2..=62 {
        send(trainer, |bias| bias[0] += 1.0);
    }
    // What does not change: in every slot, whichever the next is made from.
    let all = trainer.weights.slice::<f32>("bias").expect("it is there");
    damage(host.relay.child.id(), &all[1..]);
    for _ in 63..=64 {
        send(trainer, |bias| bias[0] += 1.0);
    }
    trainer.number = None;
    trainer.until_status(|status| status["relays"][0]["holds"] == serde_json::json!([]));
    trainer.stays_sound();
    host.end();
}

#[test]
fn scrub_finds_sender_damage_and_no_worker_gets_it() {
    let mut host = Host::start();
    let trainer = &mut host.trainer;
    for _ in 1..=64 {
        trainer.send_with(|bias| bias[0] += 1.0);
    }
    // What was published is known of this one, so that the sender itself counts.
    let begun = Instant::now();
    while !text(&trainer.ask("scrub", &[]).stdout).starts_with("all of 2 versions") {
        assert!(begun.elapsed() < longest());
    }
    let all = trainer.weights.slice::<f32>("bias");
    damage(std::process::id(), all.expect("it is there"));
    let found = trainer.ask("scrub", &["--json"]);
    assert_eq!(found.status.code(), Some(1), "{}", text(&found.stdout));
    let scrub: Value = serde_json::from_slice(&found.stdout).expect("JSON");
    assert_eq!(scrub["others"].as_array().map(Vec::len), Some(1), "{scrub}");
    assert_eq!(scrub["others"][0]["agent"], 0);
    assert_eq!(scrub["others"][0]["pid"], std::process::id());
    assert_eq!(scrub["same"], 1, "the relay has what was published");
    // What changes from here on is not told from it.
    trainer.stays_sound();
    host.end();
}

#[test]
fn sender_without_a_port_is_said_to_be_one() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let mut weights = Tensors::new();
    weights.insert("bias", [1], [0.5_f32]).expect("a tensor");
    let path = dir.path().join("store").display().to_string();
    let store = StoreScheme::new(&path).expect("a scheme");
    let log = format!("weightsync log {path}");
    let memory = "share the memory of one machine";
    for (scheme, words) in [
        (AnyScheme::new(SharedMem::default()), memory),
        (AnyScheme::new(MultiProcess::default()), memory),
        (AnyScheme::new(store), &log),
        (AnyScheme::new(NoSync), "its scheme is none"),
    ] {
        let setup = SenderSetup::new("policy", &weights).expect("a model");
        let info = setup.scheme(scheme).expect("a place").init_info();
        let json = serde_json::to_string(&info).expect("JSON");
        let file = write(&dir, "info.json", &json);
        let file = file.to_str().expect("text");
        for (command, code) in [("scrub", 2), ("relay", 1)] {
            let said = said_by(&[command, "--info", file], code);
            assert!(said.contains(words), "{command}: {said}");
            assert!(said.contains("sender.status()"), "{command}: {said}");
        }
        let said = said_by(&["status", &json], 1);
        assert!(said.contains("name that by --info"), "{said}");
        let said = said_by(&["scrub", file], 2);
        assert!(said.contains(&format!("by --info {file}")), "{said}");
        // Nobody has opened the sender of this init info.
        if words == memory {
            let said = said_by(&["status", file], 1);
            assert!(said.contains("no sender"), "{said}");
        }
    }
    let info = SenderSetup::new("policy", &weights)
        .expect("a model")
        .init_info();
    let address = info.endpoint().address();
    for (arguments, code) in [
        (&["status", address][..], 1),
        (&["scrub", address], 2),
        (&["relay", "--join", address], 1),
    ] {
        let said = said_by(arguments, code);
        assert!(said.contains(memory), "{arguments:?}: {said}");
    }
    let said = said_by(&["status", "trainer"], 1);
    assert!(said.contains("expected HOST:PORT"), "{said}");
    let text = write(&dir, "text", "x");
    let said = said_by(&["status", "--info", text.to_str().expect("text")], 1);
    assert!(said.contains("expected an init info as JSON"), "{said}");
}

/// What the command says, which ends with this code.
fn said_by(arguments: &[&str], code: i32) -> String {
    let ended = weightsync(arguments).output().expect("it starts");
    let said = text(&ended.stderr);
    assert_eq!(ended.status.code(), Some(code), "{arguments:?}: {said}");
    assert!(!said.contains("firewall"), "{arguments:?}: {said}");
    said
}

/// Changes the last of these numbers wherever a process has all of them in memory that it
/// shares.
fn damage(pid: u32, numbers: &[f32]) {
    use std::os::unix::fs::FileExt;
    let wanted: Vec<u8> = numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect();
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("it is our child");
    let memory = format!("/proc/{pid}/mem");
    let memory = fs::File::options().read(true).write(true).open(memory);
    let memory = memory.expect("it is our child");
    let mut damaged = 0;
    for line in maps.lines().filter(|line| line.contains(" rw-s ")) {
        let (range, _) = line.split_once(' ').expect("an address comes first");
        let (start, end) = range.split_once('-').expect("two addresses");
        let address = |text| u64::from_str_radix(text, 16).expect("an address");
        let start = address(start);
        let mut bytes = vec![0; (address(end) - start) as usize];
        if memory.read_exact_at(&mut bytes, start).is_err() {
            continue;
        }
        let mut from = 0;
        while let Some(at) = bytes[from..]
            .windows(wanted.len())
            .position(|one| one == wanted)
        {
            let last = (from + at + wanted.len() - 4) as u64;
            memory
                .write_all_at(&(-1.0_f32).to_le_bytes(), start + last)
                .expect("it is mapped");
            from += at + wanted.len();
            damaged += 1;
        }
    }
    assert!(damaged > 0, "nowhere in {maps}");
}

#[test]
fn status_refuses_a_wrong_or_missing_token() {
    let trainer = Trainer::start();
    let other = trainer.file("other", "another token than the one it has");
    let open = trainer.file("open", "a token that anybody here can read");
    fs::set_permissions(&open, Permissions::from_mode(0o644)).expect("it is ours");
    let cases = [
        (Some(&other), "the other end refused the token"),
        (Some(&open), "chmod 600"),
        (None, "--token-file"),
    ];
    for (file, words) in cases {
        let join = ["--join", trainer.address.as_str()];
        for command in [&["relay", join[0], join[1]][..], &["status", join[1]]] {
            let mut asked = weightsync(command);
            if let Some(file) = file {
                asked.arg("--token-file").arg(file);
            }
            refused(&asked.output().expect("it starts"), words);
        }
    }
}

#[test]
fn absent_sender_fails_status_and_relay_waits() {
    let mut trainer = Trainer::start();
    trainer.sender = None;
    refused(&trainer.status(&[]), "no answer from");
    let mut relay = Running::start(trainer.relay());
    let looking = relay.line_with("looking for a sender");
    assert!(looking.contains(&trainer.address), "{looking}");
    relay.signal(Signal::INT);
    assert_eq!(relay.end(), Some(130));
}

/// It waits for new ones, and says so: nobody else makes them.
#[test]
fn relay_says_that_certificates_have_expired() {
    let dir = tempfile::tempdir().expect("a directory");
    let pki = dir.path().join("pki");
    let request = CertificateRequest {
        out: pki.clone(),
        hosts: vec!["127.0.0.1".into()],
        days: 0,
    };
    make(&request).expect("certificates");
    let expires = Tls::read(&pki, CertificateRole::Trainer)
        .expect("certificates")
        .expires();
    // They hold to the end of the second in which they were made.
    while SystemTime::now() < expires + Duration::from_secs(1) {
        thread::yield_now();
    }
    let encrypted = |arguments: &[&str]| {
        let mut command = weightsync(arguments);
        command.env("WEIGHTSYNC_TLS_LOOPBACK", "1");
        command.arg("--tls").arg(&pki);
        command
    };
    // It is no sender, and the handshake of TLS comes first.
    let mut other = Running::start(encrypted(&["serve", "--address", "127.0.0.1:0"]));
    let line = other.line_with("the synchronizer is at");
    let address = line.split([' ', ';']).find(|word| word.starts_with("127."));
    let address = address.expect("an address");
    let token = write(&dir, "token", "a token of at least 16 bytes");
    let mut relay = encrypted(&["relay", "--join", address]);
    relay.arg("--token-file").arg(token).stderr(Stdio::piped());
    let mut relay = Running::start(relay);
    let stderr = relay.child.stderr.take().expect("it was asked for");
    let mut said = String::new();
    let mut lines = BufReader::new(stderr);
    while !said.contains("tries again") {
        let read = lines.read_line(&mut said).expect("text");
        assert!(read > 0, "it ended: {said}");
    }
    assert!(
        said.contains("the other end's certificate has expired"),
        "{said}"
    );
}

/// It has failed, for this reason and with nothing to show.
fn refused(ended: &Output, words: &str) {
    let stderr = text(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{stderr}");
    assert!(stderr.starts_with("weightsync: "), "{stderr}");
    assert!(stderr.contains(words), "no {words:?} in\n{stderr}");
    assert_eq!(text(&ended.stdout), "");
}

/// A trainer, and a relay with one worker.
struct Host {
    trainer: Trainer,
    relay: Running,
    worker: JoinHandle<u64>,
}

impl Host {
    fn start() -> Self {
        let trainer = Trainer::start();
        let mut relay = Running::start(trainer.relay());
        relay.line_with("joined");
        let worker = trainer.worker(3);
        Self {
            trainer,
            relay,
            worker,
        }
    }

    fn end(mut self) {
        drop(self.trainer);
        self.relay.signal(Signal::INT);
        self.relay.end();
        self.worker.join().expect("no panic");
    }
}

/// A trainer in this process, and the file with its token.
struct Trainer {
    sender: Option<Sender>,
    weights: Tensors,
    /// The number of the next version, if it is to have one of its own.
    number: Option<u64>,
    info: InitInfo,
    address: String,
    dir: TempDir,
    token: PathBuf,
}

impl Trainer {
    fn start() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let token = write(&dir, "token", "the token of this test alone");
        let mut weights = Tensors::new();
        weights
            .insert("bias", [1 << 10], vec![0.0_f32; 1 << 10])
            .expect("a tensor");
        let scheme = Distributed::new()
            .share(Share::Relay)
            .deltas(Deltas::Always)
            .token(Token::from_file(&token).expect("it was written"));
        let setup = SenderSetup::new("policy", &weights).expect("a model");
        let setup = setup.scheme(scheme).expect("a place");
        let info = setup.init_info();
        let sender = setup.connect(&weights, Expect::Count(0), Some(longest()));
        Self {
            sender: Some(sender.expect("it waits for nobody")),
            weights,
            number: None,
            address: info.endpoint().address().into(),
            info,
            dir,
            token,
        }
    }

    fn file(&self, name: &str, token: &str) -> PathBuf {
        write(&self.dir, name, token)
    }

    /// A worker that takes what comes until the trainer closes; its last version.
    fn worker(&self, number: u32) -> JoinHandle<u64> {
        let setup = ReceiverSetup::new(self.info.clone(), number);
        let setup = setup;
        let mut receiver = setup
            .connect(Some(longest()))
            .expect("the trainer is there");
        thread::spawn(move || {
            let mut last = 0;
            while let Ok(Some(weights)) = receiver.recv_timeout(longest()) {
                last = weights.version().0;
            }
            last
        })
    }

    /// The same, of weights that are changed first.
    fn send_with(&mut self, change: impl FnOnce(&mut [f32])) -> u64 {
        change(self.weights.slice_mut::<f32>("bias").expect("it is there"));
        self.send()
    }

    /// The version that everybody has then.
    fn send(&mut self) -> u64 {
        let sender = self.sender.as_mut().expect("it is there");
        let options = match self.number {
            Some(number) => SendOptions::new().version(Version(number)),
            None => SendOptions::new(),
        };
        let report = sender.send_with(&self.weights, &options);
        let report = report.expect("it is sent");
        assert!(report.all_applied(), "{report}");
        report.version().unwrap().0
    }

    /// What changes from here on reaches everybody as it was published.
    fn stays_sound(&mut self) {
        for _ in 0..6 {
            self.send_with(|bias| bias[0] += 1.0);
            let found = self.ask("scrub", &[]);
            assert_eq!(found.status.code(), Some(0), "{}", text(&found.stdout));
        }
    }

    fn relay(&self) -> Command {
        let mut relay = weightsync(&["relay", "--join", &self.address]);
        relay.arg("--token-file").arg(&self.token);
        relay
    }

    fn status(&self, arguments: &[&str]) -> Output {
        self.ask("status", arguments)
    }

    fn ask(&self, command: &str, arguments: &[&str]) -> Output {
        let mut status = weightsync(&[command, &self.address]);
        status.args(arguments).arg("--token-file").arg(&self.token);
        status.output().expect("it starts")
    }

    /// Asks until the status is as it should be.
    fn until_status(&self, done: impl Fn(&Value) -> bool) -> Value {
        let begun = Instant::now();
        loop {
            let status = self.status(&["--json"]);
            assert_eq!(status.status.code(), Some(0), "{}", text(&status.stderr));
            let status = serde_json::from_slice(&status.stdout).expect("JSON");
            if done(&status) {
                return status;
            }
            assert!(begun.elapsed() < longest(), "{status:#}");
        }
    }
}

fn write(dir: &TempDir, name: &str, token: &str) -> PathBuf {
    let path = dir.path().join(name);
    fs::write(&path, token).expect("a file");
    fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("it is ours");
    path
}

/// The command, with nothing of this environment's own.
fn weightsync(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weightsync"));
    for variable in ["TOKEN", "TOKEN_FILE", "INSECURE_PLAINTEXT"] {
        command.env_remove(format!("WEIGHTSYNC_{variable}"));
    }
    command.args(arguments);
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A command whose output is read line by line.
struct Running {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Running {
    fn start(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
        let lines = BufReader::new(child.stdout.take().expect("it was asked for"));
        Self { child, lines }
    }

    fn line_with(&mut self, word: &str) -> String {
        let mut line = String::new();
        while !line.contains(word) {
            line.clear();
            let read = self.lines.read_line(&mut line).expect("text");
            assert!(read > 0, "it ended without {word:?}");
        }
        line
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it is our child");
    }

    /// Waits for its end; the exit code, if it was not a signal that ended it.
    fn end(&mut self) -> Option<i32> {
        self.child.wait().expect("it is our child").code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // After a failed assertion; otherwise it has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
