//! The processes: a trainer, a relay and a worker, through the public API alone.

use std::error::Error;
use std::io::Read;
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use weightsync_engine::{
    Expect, Pull, ReceiverSetup, SendOptions, Sender, SenderSetup, Snapshot, Tensors, Version,
    WaitFor,
};
use weightsync_link::access::Token;
use weightsync_link::tls::{CertificateRole, Tls};
use weightsync_net::scrub::Scrub;
use weightsync_net::status;
use weightsync_net::{Deltas, Distributed, Relay, RelayEvent, Verify};

use super::logs::Lines;
use super::messages::{Content, Join, Lead, Notice, Order, Role, Seen, Sent, TOKEN, emit};
use super::scale::longest;
use super::{attacks, crowd, liar};

type Outcome = Result<(), Box<dyn Error>>;

pub(crate) fn play(role: Role) -> Outcome {
    Lines::listen();
    match role {
        Role::Trainer(lead) => train(&lead),
        Role::Relay(root, tls) => {
            end_with_input();
            relay(&root, tls)
        }
        Role::Worker(join) => {
            end_with_input();
            work(join)
        }
        Role::Crowd(crowd) => {
            end_with_input();
            crowd::work(&crowd)
        }
        Role::Simulated(simulated) => {
            end_with_input();
            crowd::simulate(&simulated)
        }
        Role::Liar(root) => {
            end_with_input();
            liar::lie(&root)
        }
        Role::Attacker(root, attack, seed) => {
            attacks::attack(&root, attack, seed).map_err(|error| format!("{attack:?}: {error}"))?;
            emit(&Notice::Attacked);
            // The process ends when its test closes the input.
            std::io::stdin().read_to_end(&mut Vec::new())?;
            Ok(())
        }
    }
}

/// A process whose test is gone has nothing to do.
fn end_with_input() {
    thread::spawn(|| {
        for line in std::io::stdin().lines() {
            if line.is_err() {
                break;
            }
        }
        std::process::exit(0);
    });
}

pub(crate) fn token() -> Token {
    Token::new(TOKEN).expect("a token")
}

fn train(lead: &Lead) -> Outcome {
    let mut scheme = Distributed::new()
        .arity(lead.arity)
        .listen(&lead.listen)
        .token(token());
    scheme = match &lead.tls {
        Some(tls) => scheme.tls(tls),
        None => scheme.insecure_plaintext(),
    };
    if lead.verify {
        scheme = scheme.verify(Verify::Blake3);
    }
    if lead.pull {
        scheme = scheme.pull();
    }
    scheme = scheme.deltas(match lead.content {
        // Nothing is to be said of it but the bytes themselves.
        Content::Words { every: 1 } => Deltas::Never,
        // In a test it is not to depend on the machine.
        Content::Words { .. } => Deltas::Always,
        Content::Weights { deltas: true, .. } => Deltas::Auto,
        Content::Weights { deltas: false, .. } => Deltas::Never,
    });
    let mut versions = Versions::new(lead.bytes, lead.content)?;
    versions.fill(lead.word)?;
    let setup = SenderSetup::new("policy", &versions.tensors)?
        .scheme(scheme)?
        .run_dir(&lead.run_dir)?
        .send_timeout(Some(longest()));
    let info = setup.init_info();
    let address = info.endpoint().address().to_owned();
    emit(&Notice::Info(info));
    let sender = setup.connect(&versions.tensors, Expect::Count(0), Some(longest()))?;
    emit(&Notice::Ready {
        epoch: sender.run().epoch.0,
    });
    let tls = lead
        .tls
        .as_ref()
        .map(|path| Tls::read(path, CertificateRole::Worker));
    let tls = tls.transpose()?;
    let (sends, to_send) = mpsc::channel();
    let sending = thread::spawn(move || {
        if let Err(error) = send_all(sender, versions, &to_send) {
            emit(&Notice::Failed(error));
        }
    });
    for line in std::io::stdin().lines() {
        match serde_json::from_str(&line?)? {
            Order::Status => {
                let (secret, limit) = (token().secret(), Some(longest()));
                let status = status::ask(&address, &secret, tls.as_ref(), limit)?;
                emit(&Notice::Status(Box::new(status)));
            }
            Order::Scrub => {
                let (secret, limit) = (token().secret(), Some(longest()));
                let scrub = Scrub::ask(&address, &secret, tls.as_ref(), limit)?;
                emit(&Notice::Scrubbed(Box::new(scrub)));
            }
            order => sends.send(order)?,
        }
    }
    drop(sends);
    sending.join().map_err(|_| "the sending thread panicked")?;
    Ok(())
}

fn send_all(
    mut sender: Sender,
    mut versions: Versions,
    orders: &mpsc::Receiver<Order>,
) -> Result<(), String> {
    let text = |error: weightsync_engine::Error| error.to_string();
    for order in orders {
        let (word, options) = match order {
            Order::Send { word, deadline } => (word, SendOptions::new().timeout(Some(deadline))),
            Order::Publish { word } => (word, SendOptions::new().wait(WaitFor::Sent)),
            Order::Forget { worker } => {
                sender.forget([worker]).map_err(text)?;
                continue;
            }
            Order::Status | Order::Scrub => continue,
        };
        versions.fill(word).map_err(text)?;
        emit(&Notice::Sending { word });
        let before = cpu();
        let report = sender
            .send_with(&versions.tensors, &options)
            .map_err(text)?;
        emit(&Notice::Sent(Sent::of(word, &report, cpu() - before)));
    }
    Ok(())
}

/// Processor time of this process since it began.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn relay(root: &str, tls: Option<PathBuf>) -> Outcome {
    let relay = Relay::with_token(root, &token());
    let relay = match tls {
        Some(tls) => relay.tls(tls),
        None => relay.insecure_plaintext(),
    };
    relay.run(|news| match news {
        RelayEvent::Joined { .. } => emit(&Notice::Joined),
        RelayEvent::Closed => emit(&Notice::SenderGone { died: false }),
        RelayEvent::Died => emit(&Notice::SenderGone { died: true }),
        news => emit(&Notice::Log(news.to_string())),
    })?;
    Ok(())
}

fn work(join: Join) -> Outcome {
    // Only that it is on its host.
    emit(&Notice::Joined);
    let pulls = join.info.scheme().contains("pull");
    let setup = ReceiverSetup::new(join.info, join.worker);
    let mut receiver = loop {
        match setup.clone().connect(Some(join.patience)) {
            Ok(receiver) => break receiver,
            // There is no sender for longer than that.
            Err(weightsync_engine::Error::NoSender { .. }) => {}
            Err(weightsync_engine::Error::NoInitialWeights { .. }) if join.patience < longest() => {
            }
            Err(error) => return Err(error.into()),
        }
    };
    let mut next = Version(1);
    loop {
        let received = match pulls {
            // One question, without a limit.
            true => receiver.pull(Pull::at_least(next)),
            false => receiver.recv_timeout(longest()),
        };
        if let Ok(Some(snapshot)) = &received {
            next = snapshot.version().next();
        }
        match received {
            Ok(Some(snapshot)) => emit(&Notice::Seen(Seen {
                epoch: snapshot.run().epoch.0,
                version: snapshot.version().0,
                word: word_of(&snapshot)?,
                travelled: receiver.travelled(),
            })),
            Ok(None) => {}
            Err(weightsync_engine::Error::SenderDied { .. }) => {
                emit(&Notice::SenderGone { died: true })
            }
            Err(error) if error.is_sender_closed() => emit(&Notice::SenderGone { died: false }),
            // The successor is not there yet.
            Err(weightsync_engine::Error::NoSender { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// A trainer's versions, one after the other.
struct Versions {
    tensors: Tensors,
    content: Content,
    training: Option<Training>,
}

impl Versions {
    fn new(bytes: usize, content: Content) -> weightsync_engine::Result<Self> {
        let mut tensors = Tensors::new();
        let mut training = None;
        match content {
            // Several lengths; one is not a multiple of a block.
            Content::Words { .. } => {
                let words = bytes / 8;
                let first = words / 3 + 5;
                for (name, words) in [("first", first), ("bias", 3), ("last", words - first - 3)] {
                    tensors.insert(name, [words as u64], vec![0_i64; words])?;
                }
            }
            Content::Weights {
                percent, single, ..
            } => {
                let elements = bytes / if single { 4 } else { 2 };
                tensors.insert("word", [1], vec![0_i64])?;
                match single {
                    true => tensors.insert("weights", [elements as u64], vec![0_f32; elements])?,
                    false => {
                        let zeros = vec![half::bf16::ZERO; elements];
                        tensors.insert("weights", [elements as u64], zeros)?;
                    }
                }
                training = Some(Training::new(elements, percent));
            }
        }
        Ok(Self {
            tensors,
            content,
            training,
        })
    }

    fn fill(&mut self, word: u64) -> weightsync_engine::Result<()> {
        match (self.content, &mut self.training) {
            (Content::Words { every }, _) => fill(&mut self.tensors, word, every),
            (Content::Weights { single, .. }, Some(training)) => {
                training.step(word);
                self.tensors.slice_mut::<i64>("word")?[0] = word as i64;
                if single {
                    let weights = self.tensors.slice_mut::<f32>("weights")?;
                    weights.copy_from_slice(&training.weights);
                } else {
                    let weights = self.tensors.slice_mut::<half::bf16>("weights")?;
                    for (to, from) in weights.iter_mut().zip(&training.weights) {
                        *to = half::bf16::from_f32(*from);
                    }
                }
                Ok(())
            }
            (Content::Weights { .. }, None) => unreachable!("made with it"),
        }
    }
}

/// Weights in single precision, and how far a step goes.
struct Training {
    weights: Vec<f32>,
    step: f32,
}

impl Training {
    /// Values with a standard deviation of 0.02, of which about this many percent change their
    /// bfloat16 in each step.
    fn new(elements: usize, percent: f64) -> Self {
        let noise = Noise(1);
        let weights: Vec<f32> = noise.take(elements).map(|normal| 0.02 * normal).collect();
        let some = &weights[..elements.min(1 << 18)];
        let changed = |step: f32| {
            let pairs = some.iter().zip(Noise(2));
            let moved = pairs.filter(|(weight, normal)| {
                half::bf16::from_f32(**weight) != half::bf16::from_f32(**weight + step * normal)
            });
            100.0 * moved.count() as f64 / some.len() as f64
        };
        let (mut low, mut high) = (1e-12_f32, 1.0_f32);
        for _ in 0..40 {
            let middle = (low * high).sqrt();
            match changed(middle) > percent {
                true => high = middle,
                false => low = middle,
            }
        }
        Self { weights, step: low }
    }

    fn step(&mut self, number: u64) {
        for (weight, normal) in self.weights.iter_mut().zip(Noise(3 + number)) {
            *weight += self.step * normal;
        }
    }
}

/// Numbers of a normal distribution, near enough: sums of four even ones.
struct Noise(u64);

impl Iterator for Noise {
    type Item = f32;

    fn next(&mut self) -> Option<f32> {
        let mut sum = 0.0;
        for _ in 0..4 {
            self.0 = self
                .0
                .wrapping_mul(0x5851_f42d_4c95_7f2d)
                .wrapping_add(0x1405_7b7e_f767_814f);
            sum += (self.0 >> 40) as f32 / (1 << 24) as f32 - 0.5;
        }
        // Each has a variance of a twelfth.
        Some(sum * 3.0_f32.sqrt())
    }
}

/// Every element says which word it is of, and no version says anything of what changes
/// in the next.
fn fill(weights: &mut Tensors, word: u64, every: u64) -> weightsync_engine::Result<()> {
    for name in ["first", "bias", "last"] {
        for (at, element) in weights.slice_mut::<i64>(name)?.iter_mut().enumerate() {
            *element = element_of(word, every, at);
        }
    }
    let bias = weights.slice_mut::<i64>("bias")?;
    bias[..2].copy_from_slice(&[word as i64, every as i64]);
    Ok(())
}

/// Not the word itself: one version would be another and one step everywhere, and go to
/// the next host as that. One element in so many is of this word, and the others of those
/// before it.
fn element_of(word: u64, every: u64, at: usize) -> i64 {
    let late = (word + every - at as u64 % every) % every;
    let last = word.saturating_sub(late);
    let mut mixed = last
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(at as u64);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed ^ mixed >> 31) as i64
}

/// The word that every element of a version is of.
fn word_of(snapshot: &Snapshot) -> Result<u64, Box<dyn Error>> {
    if let Ok([word]) = snapshot.slice::<i64>("word") {
        return Ok(*word as u64);
    }
    let [word, every, _] = *snapshot.slice::<i64>("bias")? else {
        return Err("no bias of three".into());
    };
    let (word, every) = (word as u64, every as u64);
    for name in ["first", "last"] {
        let mut all = snapshot.slice::<i64>(name)?.iter().enumerate();
        let torn = all.find(|(at, element)| **element != element_of(word, every, *at));
        if let Some((at, element)) = torn {
            return Err(format!(
                "version {} is torn: {word} in `bias`, and {element} in `{name}` at {at}",
                snapshot.version(),
            )
            .into());
        }
    }
    Ok(word)
}
