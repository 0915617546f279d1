//! The tests and the benchmarks, and the roles that this binary plays in their hosts.

mod attacks;
mod bench;
mod chain;
mod crowd;
mod damage;
mod deaths;
mod encrypted;
mod hostile;
mod liar;
mod links;
mod logs;
mod messages;
mod roles;
mod scale;
mod schedules;
mod slow;
mod stage;
mod stopped;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

use messages::{ROLE, Role};

pub(crate) fn main() -> ExitCode {
    let Ok(role) = std::env::var(ROLE) else {
        let measures = std::env::args().any(|argument| argument == "--bench");
        return if measures { bench::run() } else { test() };
    };
    let role: Role = match serde_json::from_str(&role) {
        Ok(role) => role,
        Err(error) => {
            eprintln!("{ROLE}: {error}");
            return ExitCode::from(2);
        }
    };
    match roles::play(role) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            messages::emit(&messages::Notice::Failed(error.to_string()));
            ExitCode::from(3)
        }
    }
}

fn test() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Tests that measure must not run side by side.
    arguments.test_threads.get_or_insert(1);
    libtest_mimic::run(&arguments, trials()).exit_code()
}

fn trials() -> Vec<Trial> {
    let tests: Vec<(&str, fn())> = [
        chain::TESTS,
        deaths::TESTS,
        encrypted::TESTS,
        links::TESTS,
        schedules::TESTS,
        hostile::TESTS,
        damage::TESTS,
        liar::TESTS,
        slow::TESTS,
        stopped::TESTS,
    ]
    .concat();
    let trial = |(name, test): (&str, fn())| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    };
    tests.into_iter().map(trial).collect()
}
