//! `weightsync scrub`: checks that every host holds the versions that were published.

use std::{error::Error, fmt::Write};

use weightsync_net::scrub::{Scrub, ScrubCheck, Verdict};

use super::SenderArgs;
use crate::output::print;
use crate::store::TROUBLE;
use crate::words::{counted, shown};
use crate::{FAILURE, SUCCESS};

/// Asks, and shows the answer.
pub fn run(args: &SenderArgs) -> Result<u8, Box<dyn Error>> {
    let (address, secret, tls) = args.endpoint()?;
    let scrub = Scrub::ask(&address, &secret, tls.as_ref(), args.timeout())?;
    print(&match args.json {
        true => serde_json::to_string_pretty(&scrub)? + "\n",
        false => text(&scrub),
    })?;
    // Damage comes first: it is the worse news.
    Ok(match (scrub.differing().next(), &scrub.others[..]) {
        (Some(_), _) => FAILURE,
        (None, []) => SUCCESS,
        (None, _) => TROUBLE,
    })
}

/// What was found, for people to read.
fn text(scrub: &Scrub) -> String {
    let mut text = String::new();
    for check in &scrub.others {
        let model = scrub.models.get(usize::from(check.model));
        let model = shown(model.map_or("?", String::as_str));
        let of = format!("{model} v{}", check.version);
        let what = match &check.verdict {
            Verdict::Differs { expected, got } => format!(
                "{of} is damaged: digest {}, expected {}{}",
                shown(got),
                shown(expected),
                consequence(check),
            ),
            Verdict::Replaced => format!("{of} was replaced before it could be compared"),
            Verdict::Gone => format!("disconnected before it could compare {of}"),
            other => format!("{of}: {other:?}"),
        };
        let _ = writeln!(text, "{}: {what}", who(check));
    }
    if scrub.left_out > 0 {
        let _ = writeln!(
            text,
            "{} more not listed: the answer was full",
            scrub.left_out
        );
    }
    let same = counted(scrub.same, "version");
    let all = if scrub.others.is_empty() {
        "all of "
    } else {
        ""
    };
    let verb = if scrub.same == 1 { "is" } else { "are" };
    let _ = writeln!(
        text,
        "{all}{same} that hosts hold {verb} what was published"
    );
    text
}

fn who(check: &ScrubCheck) -> String {
    match check.agent {
        0 => format!("sender {} (pid {})", shown(&check.address), check.pid),
        agent => format!(
            "agent {agent} on {} ({}, pid {})",
            shown(&check.name),
            shown(&check.address),
            check.pid
        ),
    }
}

/// What comes of it that it is not what was published.
fn consequence(check: &ScrubCheck) -> String {
    let workers: Vec<String> = check.workers.iter().map(u32::to_string).collect();
    let run = match &workers[..] {
        [] => String::new(),
        [one] => format!("; worker {one} runs it until then"),
        many => format!("; workers {} run it until then", many.join(", ")),
    };
    format!("; the next version comes whole{run}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(agent: u64, verdict: Verdict) -> ScrubCheck {
        ScrubCheck {
            agent,
            name: format!("host-{agent}\u{1b}[2J"),
            address: "10.0.0.1".into(),
            pid: 7,
            model: 0,
            version: 64,
            workers: vec![3, 4],
            verdict,
        }
    }

    #[test]
    fn scrub_names_damaged_versions_and_consequences() {
        let scrub = Scrub {
            run: "epoch 3".into(),
            models: vec!["policy".into()],
            same: 1,
            others: vec![
                check(
                    2,
                    Verdict::Differs {
                        expected: "aa".into(),
                        got: "bb".into(),
                    },
                ),
                check(0, Verdict::Replaced),
                check(3, Verdict::Gone),
            ],
            left_out: 1,
        };
        let expected = "\
agent 2 on host-2?[2J (10.0.0.1, pid 7): policy v64 is damaged: digest bb, expected aa; \
the next version comes whole; workers 3, 4 run it until then
sender 10.0.0.1 (pid 7): policy v64 was replaced before it could be compared
agent 3 on host-3?[2J (10.0.0.1, pid 7): disconnected before it could compare policy v64
1 more not listed: the answer was full
1 version that hosts hold is what was published
";
        assert_eq!(text(&scrub), expected);
    }
}
