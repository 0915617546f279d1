//! A worker between two relays.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;
use std::time::Duration;
use std::{env, thread};

use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketType, accept, bind, listen, recv, socket,
};
use weightsync_conformance::scale::{longest, prompt_limit};
use weightsync_core::WorkerRoute;
use weightsync_engine::transport::{Capabilities, Opening, Scheme, SenderTransport};
use weightsync_engine::{
    AnyScheme, BackgroundState, Epoch, Expect, InitInfo, ModelId, ReceiverSetup, SendOptions,
    SenderSetup, SnapshotsInBackground, Tensors, WaitFor,
};

use super::*;
use crate::agent::local::{self, NameOwner};
use crate::agent::tests::{Seen, drones, long_welcome, relay, trainer};
use crate::scheme::Share;
use crate::status;

/// Hears who joins, and lets nobody in.
#[derive(Clone, Debug, Default)]
struct Joins(Arc<Mutex<Option<Joining>>>);

impl Scheme for Joins {
    fn name(&self) -> &str {
        "distributed"
    }

    fn capabilities(&self) -> Capabilities {
        Distributed::new().capabilities()
    }

    fn allocate_endpoint(&self, _: &[ModelId], _: Option<&Path>) -> Result<Endpoint> {
        Err(Error::Interrupted)
    }

    fn open(&self, _: &Opening<'_>) -> Result<Box<dyn SenderTransport>> {
        Err(Error::Interrupted)
    }

    fn join(
        &self,
        _: &Endpoint,
        joining: &Joining,
        _: Deadline,
    ) -> Result<Box<dyn ReceiverTransport>> {
        *self.0.lock().unwrap() = Some(joining.clone());
        Err(Error::Interrupted)
    }
}

/// Worker 1's request to join.
fn joining(info: &InitInfo) -> Joining {
    let joins = Joins::default();
    let setup = ReceiverSetup::new(info.clone(), 1).scheme(joins.clone());
    setup.connect(Some(longest())).expect_err("it only listens");
    joins.0.lock().unwrap().take().unwrap()
}

fn worker(info: &InitInfo) -> NetReceiver {
    let joining = joining(info);
    let scheme = Distributed::new().share(Share::Relay);
    let deadline = Some(Instant::now() + longest());
    NetReceiver::join(&scheme, info.endpoint(), &joining, deadline).unwrap()
}

#[test]
fn interrupt_ends_a_wait_while_the_segment_changes() {
    let (_sender, info) = trainer();
    let mut receiver = worker(&info);
    let deadline = || Some(Instant::now() + longest());
    assert!(receiver.next(deadline()).unwrap().is_some());
    let interrupter = receiver.interrupter().unwrap();
    for has_segment in [false, true] {
        // As where a relay goes.
        let (found, handoff) = {
            let mut state = receiver.shared.state();
            let found = state.found.take().unwrap();
            state.interrupter.take_if(|_| !has_segment);
            let handoff = found.attached.handoff();
            (found, handoff)
        };
        drop(found);
        interrupter.interrupt();
        let mut found = receiver.shared.route.find(&handoff, deadline()).unwrap();
        found.attached.take_over(handoff).unwrap();
        SharedReceiver::take_in(&receiver.shared, found);
        let begun = Instant::now();
        // The new segment may have the version for it before this wait begins.
        while receiver.next(deadline()).unwrap().is_some() {}
        assert!(
            begun.elapsed() < longest() / 2,
            "{has_segment}: not interrupted"
        );
        // And no other.
        assert!(!receiver.shared.interrupted.load(Ordering::SeqCst));
    }
}

#[test]
fn child_of_a_worker_ends_only_with_the_worker() {
    let (_sender, info) = trainer();
    let (stop, running) = relay(&info);
    let receiver = worker(&info);
    let shared = receiver.shared.clone();
    // As where the worker leaves just now.
    shared.closed.store(true, Ordering::SeqCst);
    stop.stop();
    running.join().unwrap();
    let until = Instant::now() + longest();
    loop {
        SharedReceiver::notice(&shared);
        let state = shared.state();
        let found = state.found.as_ref().expect("it is the worker's to end");
        if found.has_lost_its_relay() {
            break;
        }
        assert!(Instant::now() < until, "the relay does not go");
        drop(state);
        thread::sleep(Duration::from_millis(1));
    }
    SharedReceiver::notice(&shared);
    assert!(shared.state().found.is_some());
}

#[test]
fn a_worker_that_came_first_goes_to_its_hosts_relay() {
    let (mut sender, info) = trainer();
    let mut receiver = worker(&info);
    let shared = receiver.shared.clone();
    let deadline = || Some(Instant::now() + longest());
    let first = receiver.next(deadline()).unwrap().unwrap();
    receiver.applied(&first).unwrap();
    assert!(shared.state().found.as_ref().unwrap().is_its_own_agents());
    // The worker waits in a call all the time.
    let waits = thread::spawn(move || {
        let next = receiver.next(deadline()).unwrap();
        receiver.applied(next.as_ref().unwrap()).unwrap();
        (receiver, next)
    });
    let (stop, running) = relay(&info);
    let at = info.endpoint();
    let until = Instant::now() + longest();
    loop {
        let status = status::ask(at.address(), at.secret(), None, Some(longest())).unwrap();
        let own = std::process::id();
        // Both are this process: the relay is the one that serves.
        if let [relay] = &status.relays[..]
            && status.workers_by(WorkerRoute::Agent(relay.agent)).count() == 1
        {
            assert_eq!(status.relays[0].pid, own);
            break;
        }
        assert!(Instant::now() < until, "{status:#?}");
        thread::sleep(Duration::from_millis(1));
    }
    let mut weights = Tensors::new();
    weights.insert("bias", [2], vec![2.5_f32, 3.5]).unwrap();
    let report = sender.send(&weights).unwrap();
    assert!(report.all_applied(), "{report:?}");
    assert_eq!(report.workers.len(), 1, "{report:?}");
    let (receiver, next) = waits.join().unwrap();
    assert_eq!(next.unwrap().members()[0].snapshot.version().0, 2);
    assert!(shared.state().found.as_ref().unwrap().is_a_relays());
    drop(receiver);
    stop.stop();
    running.join().unwrap();
}

/// The names of this host's relays.
fn relay_names(info: &InitInfo) -> Vec<String> {
    let at = info.endpoint();
    local::names(at.secret(), at.address(), NameOwner::Host)
}

/// A socket with this name, which does not listen yet.
fn taken_name(name: &str) -> OwnedFd {
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    bind(&socket, &name).unwrap();
    socket
}

/// What the processes said first that have connected to it.
fn first_words(stopped: &OwnedFd) -> Vec<Vec<u8>> {
    rustix::io::ioctl_fionbio(stopped, true).unwrap();
    let heard = std::iter::from_fn(|| accept(stopped).ok());
    let words = heard.map(|socket| {
        let mut words = [0; 4096];
        let (count, _) = recv(&socket, &mut words, RecvFlags::DONTWAIT).unwrap();
        words[..count].to_vec()
    });
    words.collect()
}

fn until_at_a_relay(shared: &SharedReceiver) -> Arc<str> {
    let until = Instant::now() + longest();
    loop {
        let state = shared.state();
        if let Some(found) = state.found.as_ref().filter(|found| found.is_a_relays()) {
            return found.name.clone();
        }
        drop(state);
        assert!(Instant::now() < until, "it goes to no relay");
        thread::sleep(Duration::from_millis(1));
    }
}

/// One that is stopped is asked for a sign of life. Only a relay that gives one is joined, as the worker
/// can do nothing meanwhile.
#[test]
fn worker_joins_the_relay_that_answers_next_to_a_stopped_one() {
    let (_sender, info) = trainer();
    let receiver = worker(&info);
    let names = relay_names(&info);
    // Its thread looks at nothing meanwhile.
    let state = receiver.shared.state();
    let stopped = taken_name(&names[0]);
    let (stop, running) = relay(&info);
    listen(&stopped, 64).unwrap();
    drop(state);
    assert_eq!(*until_at_a_relay(&receiver.shared), *names[1]);
    let words = first_words(&stopped);
    assert!(!weightsync_mem::is_answered(&names[0], Some(Instant::now())).unwrap());
    let asks = first_words(&stopped).pop().unwrap();
    let others = words.iter().filter(|words| **words != asks);
    assert!(
        others.clone().all(Vec::is_empty),
        "{:?}",
        others.collect::<Vec<_>>()
    );
    drop(receiver);
    stop.stop();
    running.join().unwrap();
}

/// It heard that its relay is silent, and has found another one since.
#[test]
fn worker_leaves_no_relay_but_the_silent_one() {
    let (_sender, info) = trainer();
    let (stop, running) = relay(&info);
    let receiver = worker(&info);
    let silent = until_at_a_relay(&receiver.shared);
    stop.stop();
    running.join().unwrap();
    let _taken = taken_name(&silent);
    let (stop, running) = relay(&info);
    assert_ne!(until_at_a_relay(&receiver.shared), silent);
    assert!(!SharedReceiver::leave_a_silent_relay(
        &receiver.shared,
        &silent
    ));
    until_at_a_relay(&receiver.shared);
    drop(receiver);
    stop.stop();
    running.join().unwrap();
}

/// With which scheme a copy of this program is to be a trainer.
const SCHEME: &str = "WEIGHTSYNC_TEST_SCHEME";

/// The copy of this program that acts as the trainer, until its input ends: each line is a send.
#[test]
fn as_a_trainer() {
    let Ok(scheme) = env::var(SCHEME) else {
        return;
    };
    let mut weights = Tensors::new();
    weights.insert("bias", [2], vec![0.5_f32, 1.5]).unwrap();
    let scheme = scheme.parse::<AnyScheme>().unwrap();
    let setup = SenderSetup::new("policy", &weights).unwrap();
    let setup = setup.scheme(scheme).unwrap();
    println!("\n{}", serde_json::to_string(&setup.init_info()).unwrap());
    let mut sender = setup
        .connect(&weights, Expect::Count(0), Some(longest()))
        .unwrap();
    for line in std::io::stdin().lines() {
        line.unwrap();
        let sent = SendOptions::new().wait(WaitFor::Sent);
        sender.send_with(&weights, &sent).unwrap();
    }
    sender.shutdown();
}

/// A trainer that is a process of its own.
fn trainer_apart(scheme: &str) -> (Child, InitInfo) {
    let mut trainer = Command::new(env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "receiver::tests::as_a_trainer"])
        .env(SCHEME, scheme)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(trainer.stdout.take().unwrap()).lines();
    let mut lines = lines.map(Result::unwrap);
    let info = lines.find(|line| line.starts_with('{')).unwrap();
    thread::spawn(move || lines.for_each(drop));
    (trainer, serde_json::from_str(&info).unwrap())
}

/// For longer than five handshakes take that nobody answers: it may be in a debugger.
#[test]
fn a_trainer_that_was_stopped_is_found_again() {
    let [.., high, low] = std::process::id().to_be_bytes();
    let scheme = format!("distributed:listen=127.8.{high}.{low}:7070,share=none");
    let (mut trainer, info) = trainer_apart(&scheme);
    let setup = ReceiverSetup::new(info, 1);
    let mut receiver = setup.connect(Some(longest())).unwrap();
    assert_eq!(
        receiver
            .recv_timeout(longest())
            .unwrap()
            .unwrap()
            .version()
            .0,
        1
    );
    let signal = |name: &str| {
        let pid = trainer.id().to_string();
        let sent = Command::new("kill").args([name, &pid]).status().unwrap();
        assert!(sent.success());
    };
    signal("-STOP");
    let nothing = receiver.recv_timeout(Duration::from_secs(14));
    assert!(matches!(nothing, Ok(None)), "{nothing:?}");
    signal("-CONT");
    writeln!(trainer.stdin.as_mut().unwrap()).unwrap();
    assert_eq!(
        receiver
            .recv_timeout(longest())
            .unwrap()
            .unwrap()
            .version()
            .0,
        2
    );
    drop(trainer.stdin.take());
    let error = receiver.recv_timeout(longest()).unwrap_err();
    assert!(error.is_sender_closed(), "{error}");
    trainer.wait().unwrap();
}

/// The next sender at the port is of another run, which no worker joins.
#[test]
fn endless_wait_ends_with_a_trainer_at_its_own_port() {
    let [.., high, low] = std::process::id().to_be_bytes();
    for share in ["all", "none"] {
        for killed in [false, true] {
            let scheme = format!("distributed:listen=127.7.{high}.{low}:7070,share={share}");
            let (mut trainer, info) = trainer_apart(&scheme);
            let setup = ReceiverSetup::new(info, 1);
            let receiver = setup.connect(Some(longest())).unwrap();
            let background = receiver.snapshots_in_background().unwrap();
            let (tell, ended) = std::sync::mpsc::channel();
            let waits = thread::spawn(move || {
                let waited = background.wait(None, |_| false).unwrap();
                let _ = tell.send(());
                (waited.is_none(), background.status().unwrap().state)
            });
            match killed {
                true => trainer.kill().unwrap(),
                false => drop(trainer.stdin.take()),
            }
            let ended = ended.recv_timeout(longest());
            trainer.wait().unwrap();
            assert!(ended.is_ok(), "{scheme}, {killed}: it still waits");
            let (nothing, state) = waits.join().unwrap();
            let expected = match killed {
                true => matches!(state, BackgroundState::Died { .. }),
                false => matches!(state, BackgroundState::Closed),
            };
            assert!(nothing && expected, "{scheme}, {killed}: {state:?}");
        }
    }
}

#[test]
fn join_of_a_slow_sender_ends_by_deadline_and_signal() {
    let (sender, info) = trainer();
    let at = info.endpoint().clone();
    sender.shutdown();
    let (_runtime, _, _heard) = drones(at.address(), at.secret(), long_welcome());
    let join = |deadline| {
        let begun = Instant::now();
        let setup = ReceiverSetup::new(info.clone(), 1);
        let ended = setup.connect(deadline).unwrap_err();
        assert!(begun.elapsed() < longest() / 2, "{:?}", begun.elapsed());
        ended
    };
    let ended = join(Some(Duration::from_millis(100)));
    assert!(matches!(ended, Error::NoSender { .. }), "{ended}");
    let ended = weightsync_engine::interruptible(|| true, || join(Some(3 * longest())));
    assert!(matches!(ended, Error::Interrupted), "{ended}");
}

fn weights() -> Tensors {
    let mut weights = Tensors::new();
    weights.insert("bias", [2], vec![0.5_f32, 1.5]).unwrap();
    weights
}

/// A trainer that has the place of those before it of this run directory.
fn restarted(dir: &Path) -> SenderSetup {
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let scheme = Distributed::new().share(Share::Nothing);
    setup.scheme(scheme).unwrap().run_dir(dir).unwrap()
}

/// A background receiver whose trainer has gone.
fn searching(dir: &Path) -> (InitInfo, SnapshotsInBackground) {
    let setup = restarted(dir);
    let info = setup.init_info();
    let sender = setup
        .connect(&weights(), Expect::Count(0), Some(longest()))
        .unwrap();
    let receiver = ReceiverSetup::new(info.clone(), 1);
    let receiver = receiver.connect(Some(longest())).unwrap();
    let background = receiver.snapshots_in_background().unwrap();
    sender.shutdown();
    (info, background)
}

#[test]
fn background_receiver_joining_a_successor_ends() {
    let dir = tempfile::tempdir().unwrap();
    let (info, background) = searching(dir.path());
    let at = info.endpoint();
    let (_runtime, _, seen) = drones(at.address(), at.secret(), long_welcome());
    assert_eq!(seen.recv_timeout(longest()).unwrap(), Seen::Accepted);
    let begun = Instant::now();
    drop(background);
    assert!(begun.elapsed() < prompt_limit(), "{:?}", begun.elapsed());
}

#[test]
fn failed_attempt_does_not_end_the_route_search() {
    let (sender, info) = trainer();
    let receiver = worker(&info);
    sender.shutdown();
    let at = info.endpoint();
    // The program there sends invalid messages.
    let (_runtime, _, seen) = drones(at.address(), at.secret(), Vec::new());
    let shared = receiver.shared.clone();
    let closed = Arc::new(AtomicBool::new(false));
    let (own, ends) = (shared.clone(), closed.clone());
    let search = thread::spawn(move || {
        own.route
            .find_again(own.run, &Handoff::default(), &ends, Waits::default())
    });
    for _ in 0..3 {
        for expected in [Seen::Accepted, Seen::Left] {
            assert_eq!(seen.recv_timeout(longest()).unwrap(), expected);
        }
    }
    closed.store(true, Ordering::SeqCst);
    assert!(search.join().unwrap().unwrap().is_none());
}

#[test]
fn a_sender_that_answers_nobody_is_dead_after_a_while() {
    let (sender, info) = trainer();
    let receiver = worker(&info);
    sender.shutdown();
    // As the forked child of a dead one keeps it.
    let _kept = std::net::TcpListener::bind(info.endpoint().address()).unwrap();
    let begun = Instant::now();
    let closed = AtomicBool::new(false);
    let waits = Waits {
        silent: Duration::from_secs(3),
        ..Waits::default()
    };
    let SharedReceiver { route, run, .. } = &*receiver.shared;
    let found = route.find_again(*run, &Handoff::default(), &closed, waits);
    assert!(matches!(found, Err(Error::SenderDied { .. })), "{found:?}");
    assert!(begun.elapsed() >= waits.silent, "{:?}", begun.elapsed());
}

/// A relay allocates its slots before it answers, here and over a link.
#[test]
fn worker_waits_for_a_local_trainer_without_dialling() {
    let (_other, info) = trainer();
    let secret = [6; 16];
    let (_runtime, root, seen) = drones("127.0.0.1:0", &secret, long_welcome());
    let names = local::names(&secret, &root, NameOwner::Sender);
    let at = Endpoint::new(root, secret, false).unwrap();
    let route = Route::new(&Distributed::new(), &at, &joining(&info)).unwrap();
    let _silent = weightsync_mem::Listener::at(&names[0]).unwrap();
    for patience in [Duration::ZERO, Duration::from_millis(1200)] {
        let deadline = Some(Instant::now() + patience);
        let found = route.find(&Handoff::default(), deadline);
        assert!(matches!(found, Err(Error::NoSender { .. })), "{found:?}");
    }
    assert!(seen.try_recv().is_err(), "it dials");
}

/// A trainer without certificates, say, which ends what begins with a handshake of TLS.
#[test]
fn worker_says_how_its_last_attempt_ended() {
    let (_other, info) = trainer();
    // What is there hangs up once, or always. Later connections are silent until the deadline, which
    // says less.
    for hung_up in [1, usize::MAX] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            let mut incoming = listener.incoming();
            for stream in incoming.by_ref().take(hung_up) {
                let mut stream = stream.unwrap();
                stream.shutdown(std::net::Shutdown::Write).unwrap();
                // To close with bytes unread would reset the connection.
                let _ = std::io::copy(&mut stream, &mut std::io::sink());
            }
            incoming.collect::<Vec<_>>()
        });
        let at = Endpoint::new(address.clone(), [6; 16], false).unwrap();
        let route = Route::new(&Distributed::new(), &at, &joining(&info)).unwrap();
        let soon = Instant::now() + Duration::from_millis(500);
        let error = route.find(&Handoff::default(), Some(soon));
        let error = error.unwrap_err().to_string();
        let last = format!("(the last attempt: {address}: the other end");
        assert!(error.contains(&last), "{error}");
    }
}

/// Whatever is at another of its names: a process that a dead one has forked, say.
#[test]
fn worker_finds_its_trainer_by_each_name() {
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let setup = setup.scheme(Distributed::new()).unwrap();
    let info = setup.init_info();
    let at = info.endpoint();
    let names = local::names(at.secret(), at.address(), NameOwner::Sender);
    let _silent = weightsync_mem::Listener::at(&names[0]).unwrap();
    let _sender = setup
        .connect(&weights(), Expect::Count(0), Some(longest()))
        .unwrap();
    let route = Route::new(&Distributed::new(), at, &joining(&info)).unwrap();
    let found = route
        .find(&Handoff::default(), Some(Instant::now() + longest()))
        .unwrap();
    assert!(!found.is_its_own_agents() && !found.is_a_relays());
}

#[test]
fn worker_whose_number_stays_taken_gets_an_error() {
    let (_sender, info) = trainer();
    let first = worker(&info);
    let scheme = Distributed::new().share(Share::Relay);
    let route = Route::new(&scheme, info.endpoint(), &joining(&info)).unwrap();
    let closed = AtomicBool::new(false);
    let run = first.shared.run;
    let look = |denied| {
        let waits = Waits {
            denied,
            ..Waits::default()
        };
        route.find_again(run, &Handoff::default(), &closed, waits)
    };
    let found = look(Duration::from_millis(100));
    let is_denied = matches!(&found, Err(Error::Denied { .. }));
    assert!(is_denied, "{found:?}");
    // The sender may not have noticed yet that the other worker has gone.
    let found = thread::scope(|scope| {
        let search = scope.spawn(|| look(longest()));
        drop(first);
        search.join().unwrap()
    });
    assert!(matches!(found, Ok(Some(_))), "{found:?}");
}

/// It would be refused for its own number.
#[test]
fn worker_has_left_a_successor_before_it_joins_it() {
    let (_sender, info) = trainer();
    let scheme = Distributed::new().share(Share::Relay);
    let route = Route::new(&scheme, info.endpoint(), &joining(&info)).unwrap();
    let before = Run {
        epoch: Epoch(0),
        id: [1; 16],
    };
    let closed = AtomicBool::new(false);
    for _ in 0..5 {
        let handoff = Handoff::default();
        let found = route.find_again(before, &handoff, &closed, Waits::default());
        assert!(matches!(found, Err(Error::SenderDied { .. })), "{found:?}");
        let deadline = Some(Instant::now() + longest());
        drop(route.find(&handoff, deadline).unwrap());
    }
}

#[test]
fn impostor_at_the_address_does_not_end_a_background() {
    let dir = tempfile::tempdir().unwrap();
    let (info, background) = searching(dir.path());
    let at = info.endpoint();
    // The program there sends invalid messages, or has another token.
    for (secret, complaint) in [
        (*at.secret(), "invalid message"),
        ([9; 16], "refused the token"),
    ] {
        let (runtime, ..) = drones(at.address(), &secret, Vec::new());
        let until = Instant::now() + longest();
        loop {
            let status = background.status().unwrap();
            let says = status.failure.is_some_and(|why| why.contains(complaint));
            let over = matches!(
                status.state,
                BackgroundState::Died { .. } | BackgroundState::Failed { .. }
            );
            assert!(!over, "{:?}", status.state);
            if says {
                break;
            }
            assert!(Instant::now() < until, "{complaint}");
            thread::sleep(Duration::from_millis(1));
        }
        drop(runtime);
    }
    // Which it has joined by then.
    let setup = restarted(dir.path());
    let sender = setup
        .connect(&weights(), Expect::Count(1), Some(longest()))
        .unwrap();
    drop(background);
    sender.shutdown();
}

#[test]
fn a_call_says_why_there_is_no_other_way() {
    let (_sender, info) = trainer();
    let mut receiver = worker(&info);
    receiver.shared.state().ended = Some(SearchEnd::Hindered("no room".into()));
    let error = receiver.next(Some(Instant::now() + longest())).unwrap_err();
    assert!(error.to_string().contains("no room"), "{error}");
    receiver.shared.state().ended = Some(SearchEnd::Died);
    let error = receiver.next(Some(Instant::now() + longest())).unwrap_err();
    assert!(matches!(error, Error::SenderDied { .. }), "{error}");
}

#[test]
fn worker_whose_new_relay_dies_finds_the_next() {
    let (_sender, info) = trainer();
    let receiver = worker(&info);
    // As where it went to a relay, which has gone before it was done with that.
    assert!(!receiver.shared.has_looked());
    assert!(receiver.shared.state().looks.is_some());
    receiver.shared.state().is_own_agent = false;
    assert!(receiver.shared.has_looked());
    assert!(receiver.shared.state().looks.is_none());
}

/// Two workers with one number: the one over shared memory is first, so the one over a link is
/// refused at once.
#[test]
fn one_of_two_workers_gets_a_contested_number() {
    let setup = SenderSetup::new("policy", &weights()).unwrap();
    let setup = setup.scheme(Distributed::new()).unwrap();
    let near = setup.init_info();
    let mut sender = setup
        .connect(&weights(), Expect::Count(0), Some(longest()))
        .unwrap();
    let mut far = serde_json::to_value(&near).unwrap();
    far["scheme"] = "distributed:share=none".into();
    let far: InitInfo = serde_json::from_value(far).unwrap();
    let count = weightsync_conformance::scale::rounds(5_000, 40);
    let mut won = [0, 0];
    for number in 0..count as u32 {
        let start = Barrier::new(2);
        let join = |info: &InitInfo| {
            let setup = ReceiverSetup::new(info.clone(), number);
            start.wait();
            setup.connect(Some(longest()))
        };
        let begun = Instant::now();
        let both = thread::scope(|scope| {
            let far = scope.spawn(|| join(&far));
            [join(&near), far.join().unwrap()]
        });
        assert!(begun.elapsed() < longest() / 2, "{:?}", begun.elapsed());
        let mut there = Vec::new();
        for (route, joined) in both.into_iter().enumerate() {
            match joined {
                Ok(receiver) => {
                    won[route] += 1;
                    there.push(receiver);
                }
                Err(error) => {
                    let words = error.to_string();
                    assert!(words.contains("is already connected"), "{words}");
                }
            }
        }
        let [mut winner] = <[_; 1]>::try_from(there).unwrap();
        let workers = sender.workers();
        let of_it = workers.iter().filter(|one| one.worker.0 == number);
        assert_eq!(of_it.count(), 1, "{workers:?}");
        // Each send arrives. They go to all workers: a version for one worker is kept for it, and
        // would take a slot for each number.
        let options = SendOptions::new().wait(WaitFor::Sent);
        let report = sender.send_with(&weights(), &options).unwrap();
        let sent = report.version().unwrap();
        while winner.recv_timeout(longest()).unwrap().unwrap().version() < sent {}
    }
    println!("{won:?} came first by memory and by a link");
}
