//! The tests, and the roles that this binary plays in the hosts of some.

#[path = "ends.rs"]
pub(crate) mod ends;
#[path = "left.rs"]
mod left;

use std::io::Read;
use std::panic::{self, AssertUnwindSafe};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use weightsync_conformance::hosts::{Hosts, HostsError, MOST};

use ends::{End, Pair, Words, longest};

/// The arguments that make this binary do something else than test.
const OCCUPY: &str = "role:occupy";
const REFUSED: &str = "role:refused";

pub(crate) fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let outcome = match arguments.next().as_deref() {
        Some(ends::LISTEN) => ends::listen(),
        Some(ends::CONNECT) => ends::connect(&arguments.next().unwrap_or_default()),
        Some(OCCUPY) => occupy(),
        Some(REFUSED) => refused(),
        _ => return libtest_mimic::run(&Arguments::from_args(), trials()).exit_code(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(3)
        }
    }
}

type Outcome = Result<(), Box<dyn std::error::Error>>;

type Test = fn() -> Outcome;

fn trials() -> Vec<Trial> {
    let tests: [(&str, Test); 10] = [
        ("every_host_reaches_every_other", reach),
        ("each_has_a_network_of_its_own", own),
        ("a_slow_link_is_slow_in_both_directions", slow),
        ("a_cut_link_carries_nothing_and_says_nothing", cut),
        ("a_silent_link_carries_nothing_and_says_nothing", silence),
        ("a_command_is_the_program_itself", itself),
        ("nothing_is_left_after_drop", dropped),
        ("nothing_is_left_after_a_panic", panicked),
        ("nothing_is_left_of_a_killed_run", killed),
        ("what_is_refused_says_why", refusals),
    ];
    let trial = |(name, test): (&str, Test)| {
        Trial::test(name, move || {
            test().map_err(|error| Failed::from(error.to_string()))
        })
    };
    tests.into_iter().map(trial).collect()
}

fn reach() -> Outcome {
    let hosts = Hosts::new(4)?;
    assert_eq!(hosts.count(), 4);
    for to in 0..4 {
        for from in 0..4 {
            let mut pair = Pair::new(&hosts, from, to)?;
            pair.near.write(b"there")?;
            assert_eq!(pair.far.read(5, longest())?, b"there", "{from} to {to}");
            pair.far.write(b"back")?;
            assert_eq!(pair.near.read(4, longest())?, b"back", "{to} to {from}");
        }
    }
    Ok(())
}

/// Two that listen on one port of 127.0.0.1 do not meet, nor do the hosts of two
/// tests, which have the same addresses.
fn own() -> Outcome {
    let (some, others) = (Hosts::new(2)?, Hosts::new(1)?);
    assert_eq!(some.address(0), others.address(0));
    let mut first = End::listen(&mut some.command(0, ends::program()?))?;
    let port = first.port;
    for (hosts, host) in [(&some, 1), (&others, 0)] {
        for address in ["127.0.0.1", "10.77.0.1"] {
            if (host, address) == (1, "10.77.0.1") {
                continue;
            }
            let to = format!("{address}:{port}");
            let said = hosts
                .command(host, ends::program()?)
                .args([ends::CONNECT, &to])
                .stdin(Stdio::null())
                .output()?;
            let said = String::from_utf8_lossy(&said.stderr).into_owned();
            assert!(said.contains("refused"), "{to}: {said}");
        }
    }
    let mut second = End::connect(&mut some.command(0, ends::program()?), "127.0.0.1", port)?;
    second.write(b"own")?;
    assert_eq!(first.read(3, longest())?, b"own");
    Ok(())
}

/// How fast is for benchmarks to say; here a thousandth of the rate has to be at
/// least twenty times as slow, either way.
fn slow() -> Outcome {
    let hosts = Hosts::new(2)?;
    let mut pair = Pair::new(&hosts, 0, 1)?;
    let bytes = vec![7; 192 << 10];
    let mut took = |near_to_far: bool| -> Result<Duration, Box<dyn std::error::Error>> {
        let (from, to) = match near_to_far {
            true => (&mut pair.near, &mut pair.far),
            false => (&mut pair.far, &mut pair.near),
        };
        let begun = Instant::now();
        from.write(&bytes)?;
        assert_eq!(to.read(bytes.len(), longest())?, bytes);
        Ok(begun.elapsed())
    };
    for near_to_far in [true, false] {
        hosts.rate(0, 1_000_000_000)?;
        let mut fast = took(near_to_far)?;
        for _ in 0..4 {
            fast = fast.min(took(near_to_far)?);
        }
        hosts.rate(0, 1_000_000)?;
        // A link that was broken is as slow as before.
        for fault in [Hosts::cut, Hosts::silence] {
            fault(&hosts, 0)?;
            hosts.restore(0)?;
        }
        let slow = took(near_to_far)?;
        println!("near to far: {near_to_far}, {fast:?} and {slow:?}");
        assert!(slow > 20 * fast, "{fast:?} and {slow:?}");
        // Nor may it be slower than it is said to be, by much.
        assert!(slow < Duration::from_secs(15), "{slow:?}");
        hosts.unlimited(0)?;
        let lifted = took(near_to_far)?;
        assert!(slow > 5 * lifted, "{lifted:?} and {slow:?}");
    }
    Ok(())
}

fn cut() -> Outcome {
    broken(Hosts::cut)
}

fn silence() -> Outcome {
    broken(Hosts::silence)
}

/// How long nothing has to come: what does come takes a hundredth of it.
const BRIEF: Duration = Duration::from_millis(300);

fn broken(fault: fn(&Hosts, usize) -> Result<(), HostsError>) -> Outcome {
    let hosts = Hosts::new(3)?;
    hosts.rate(1, 100_000_000)?;
    let mut pair = Pair::new(&hosts, 0, 1)?;
    let mut others = Pair::new(&hosts, 0, 2)?;
    for broken in [1, 0] {
        fault(&hosts, broken)?;
        pair.near.write(b"one")?;
        pair.far.write(b"two")?;
        for end in [&mut pair.near, &mut pair.far] {
            assert_eq!(end.read(1, BRIEF)?, b"", "with host {broken} cut off");
            assert!(end.runs()?, "its connection is not to end");
        }
        if broken == 1 {
            others.near.write(b"past")?;
            assert_eq!(others.far.read(4, longest())?, b"past");
        }
        // Twice is as good as once.
        fault(&hosts, broken)?;
        hosts.restore(broken)?;
        hosts.restore(broken)?;
        assert_eq!(pair.far.read(3, longest())?, b"one");
        assert_eq!(pair.near.read(3, longest())?, b"two");
    }
    Ok(())
}

fn itself() -> Outcome {
    let hosts = Hosts::new(1)?;
    let mut child = hosts
        .command(0, "sh")
        .args(["-c", "echo $$ $PWD $WORD; exec cat"])
        .current_dir("/proc")
        .env("WORD", "word")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut words = Words::of(&mut child);
    let expected = format!("{} /proc word", child.id());
    assert_eq!(words.line(longest())?, expected);
    child.kill()?;
    assert_eq!(child.wait()?.to_string(), "signal: 9 (SIGKILL)");
    Ok(())
}

fn dropped() -> Outcome {
    let before = left::interfaces()?;
    let hosts = Hosts::new(2)?;
    let (mut children, seen) = left::occupy(&hosts)?;
    drop(hosts);
    // Not only named by the kernel: dead, and their parent told so.
    for child in &mut children {
        assert_eq!(child.wait()?.to_string(), "signal: 9 (SIGKILL)");
    }
    seen.gone()?;
    assert_eq!(left::interfaces()?, before);
    Ok(())
}

fn panicked() -> Outcome {
    let mut children = Vec::new();
    let mut seen = None;
    let outcome = panic::catch_unwind(AssertUnwindSafe(|| {
        let hosts = Hosts::new(2).expect("hosts");
        let (started, namespaces) = left::occupy(&hosts).expect("processes");
        children = started;
        seen = Some(namespaces);
        panic!("on purpose, with {} hosts", hosts.count());
    }));
    assert!(outcome.is_err());
    for child in &mut children {
        assert_eq!(child.wait()?.to_string(), "signal: 9 (SIGKILL)");
    }
    seen.ok_or("it came further than this")?.gone()
}

/// In a process that is killed, and cannot do anything about what it has made.
fn killed() -> Outcome {
    let before = left::interfaces()?;
    let mut child = Command::new(ends::program()?)
        .arg(OCCUPY)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut words = Words::of(&mut child);
    let seen = left::Seen::parse(&words.line(longest())?)?;
    let inhabitants = seen.inhabitants()?;
    // Three in each host, with who keeps it, and who keeps the world.
    assert!(inhabitants.len() > 2 * 3, "{inhabitants:?}");
    child.kill()?;
    child.wait()?;
    let until = Instant::now() + longest();
    inhabitants.iter().try_for_each(|one| one.end(until))?;
    seen.gone()?;
    assert_eq!(left::interfaces()?, before);
    Ok(())
}

/// Makes hosts with something in them, says so, and ends only by a signal.
fn occupy() -> Outcome {
    let hosts = Hosts::new(2)?;
    let (_children, seen) = left::occupy(&hosts)?;
    println!("{seen}");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn refusals() -> Outcome {
    let error = Hosts::new(MOST + 1).expect_err("too many");
    assert!(matches!(error, HostsError::TooMany { .. }), "{error}");

    let hosts = Hosts::new(1)?;
    let error = hosts.rate(0, 0).expect_err("no rate").to_string();
    assert!(error.contains("qdisc replace dev eth0"), "{error}");
    let panics = panic::catch_unwind(AssertUnwindSafe(|| hosts.cut(1)));
    assert!(panics.is_err(), "there is no host 1");

    // In there, the setting is that user namespace's own.
    let output = hosts
        .command(0, ends::program()?)
        .arg(REFUSED)
        .stdin(Stdio::null())
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("are refused: unshare"), "{said}");
    assert!(
        said.contains("fix: sysctl user.max_user_namespaces"),
        "{said}"
    );
    Ok(())
}

/// Wants hosts where there may be none.
fn refused() -> Outcome {
    std::fs::write("/proc/sys/user/max_user_namespaces", "0")?;
    Hosts::new(1)?;
    Ok(())
}
