//! `cargo xtask bench GROUP`: one group of benchmarks, built for release.
//!
//! A group is a hidden subcommand of `weightsync bench`, so that it measures through the same code
//! as a user does. It prints a table, or with `--json` one object a line (`case`, `value`, `unit`,
//! `baseline`, `ratio`, `target`, `met`); with `--plot` it also draws. A flag that a group does not
//! offer is refused by the group itself.

use crate::error::Error;
use crate::places::Places;
use crate::step;

/// Every group; a new one is a line here.
const GROUPS: &[Group] = &[Group {
    name: "mem",
    command: "run --release --package weightsync-cli --bin weightsync -- bench mem",
    about: "publish to applied over shared memory, beside the same run's memcpy",
}];

/// A group of benchmarks and the cargo command that runs it.
struct Group {
    name: &'static str,
    command: &'static str,
    about: &'static str,
}

/// Builds and runs the group named by the first argument, passing the flags on.
pub fn run(places: &Places, args: &[&str]) -> Result<(), Error> {
    let (group, flags) = parse(args)?;
    let mut command = places.cargo();
    command.args(group.command.split(' ')).args(flags);
    step::run_last(&format!("bench {}", group.name), &mut command)
}

/// The groups, one a line.
pub fn listing() -> String {
    let lines: Vec<String> = GROUPS
        .iter()
        .map(|group| format!("  {:<8}{}", group.name, group.about))
        .collect();
    lines.join("\n")
}

fn parse<'a>(args: &[&'a str]) -> Result<(&'static Group, Vec<&'a str>), Error> {
    let (flags, names): (Vec<&str>, Vec<&str>) = args.iter().partition(|arg| arg.starts_with('-'));
    if let Some(flag) = flags
        .iter()
        .find(|flag| !matches!(**flag, "--json" | "--plot"))
    {
        return Err(usage(&format!("bench does not know `{flag}`")));
    }
    let [name] = names[..] else {
        return Err(usage("bench wants one group"));
    };
    let group = GROUPS
        .iter()
        .find(|group| group.name == name)
        .ok_or_else(|| usage(&format!("there is no group `{name}`")))?;
    Ok((group, flags))
}

fn usage(what: &str) -> Error {
    Error::Usage(format!(
        "{what}\nusage: cargo xtask bench GROUP [--json] [--plot]\ngroups:\n{}",
        listing()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_passed_on_wherever_they_stand() {
        for args in [["mem", "--json", "--plot"], ["--json", "mem", "--plot"]] {
            let (group, flags) = parse(&args).expect("a known group");
            assert_eq!((group.name, flags), ("mem", vec!["--json", "--plot"]));
        }
    }

    #[test]
    fn what_is_not_known_is_refused_with_the_groups() {
        let cases: [&[&str]; 4] = [&[], &["disk"], &["mem", "mem"], &["mem", "--fast"]];
        for args in cases {
            let error = parse(args).err().expect("refused");
            assert!(error.to_string().contains("  mem "), "{args:?}: {error}");
            assert_eq!(error.exit_code(), 2, "{args:?}");
        }
    }
}
