//! The command that is run for a version.

use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};
use weightsync_store::Pulled;

use crate::signals::Signals;

/// How often it is looked whether it has ended, or a signal has come.
const LOOK: Duration = Duration::from_millis(20);

/// How long it has to end after a signal, before it is killed.
const GRACE: Duration = Duration::from_secs(5);

/// Runs the command to its end. `None` if a signal came: then it has ended, too, and all that it started
/// and left in its process group.
pub fn run(command: &str, pulled: &Pulled, signals: &Signals) -> io::Result<Option<ExitStatus>> {
    let mut shell = Command::new("sh");
    shell
        // The path is an argument of the shell and no part of its script, so no path can be a
        // command.
        .arg("-c")
        .arg(script(command))
        .arg("sh")
        .arg(&pulled.path)
        .env("WEIGHTSYNC_CHECKPOINT", &pulled.path)
        .env("WEIGHTSYNC_VERSION", pulled.version.0.to_string())
        .env("WEIGHTSYNC_MODEL", pulled.model.as_str())
        .env("WEIGHTSYNC_DIGEST", pulled.digest.to_string())
        // The command reads nothing from the terminal.
        .stdin(Stdio::null())
        // So that a signal reaches what the shell has started.
        .process_group(0);
    // A second signal ends the command first, and then this process.
    signals.held(|| run_to_end(&mut shell, signals))
}

fn run_to_end(shell: &mut Command, signals: &Signals) -> io::Result<Option<ExitStatus>> {
    // A signal before the start: the command does not begin.
    if signals.caught().is_some() {
        return Ok(None);
    }
    let mut child = shell
        .spawn()
        .map_err(|error| io::Error::new(error.kind(), format!("starting the shell: {error}")))?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if signals.caught().is_some() {
            end(&mut child, signals)?;
            return Ok(None);
        }
        thread::sleep(LOOK);
    }
}

/// Ends a process group: a second signal kills it at once.
fn end(child: &mut Child, signals: &Signals) -> io::Result<()> {
    let group = Pid::from_child(child);
    // The whole group: what the shell has started gets the signal too.
    let _ = kill_process_group(group, Signal::TERM);
    let until = Instant::now() + GRACE;
    // It is not reaped, so that its number is nobody else's.
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let mut is_late = false;
    // A second signal, or the end of the time, kills the group below.
    while matches!(waitid(WaitId::Pid(group), options), Ok(None)) && !is_late && !signals.again() {
        thread::sleep(LOOK);
        is_late = Instant::now() >= until;
    }
    // Also after an orderly end of the shell: what it has left behind in the group ends.
    let _ = kill_process_group(group, Signal::KILL);
    if is_late {
        // Nobody may read it: the terminal may be gone, which is what SIGHUP says.
        let _ = writeln!(
            io::stderr(),
            "weightsync: the command is killed, as it did not end within {GRACE:?}"
        );
    }
    child.wait().map(drop)
}

/// The command for the shell. `{}` becomes the shell's own word for its first argument, quoted as the
/// place demands: no path can say anything to the shell.
fn script(command: &str) -> String {
    let mut script = String::with_capacity(command.len() + 8);
    // What is open: quotation marks, and parentheses and grave accents, within which quoting begins again.
    let mut open = Vec::new();
    let mut rest = command.chars().peekable();
    while let Some(one) = rest.next() {
        match (one, open.last()) {
            ('{', within) if rest.peek() == Some(&'}') => {
                rest.next();
                // Inside single quotation marks nothing is expanded, so the argument steps out of
                // them.
                script += match within {
                    Some('"') => "${1}",
                    Some('\'') => "'\"$1\"'",
                    _ => "\"$1\"",
                };
                continue;
            }
            // The innermost mark is closed by its own kind.
            (mark, Some(opened)) if mark == *opened => drop(open.pop()),
            (_, Some('\'')) => {}
            // An escaped character opens and closes nothing.
            ('\\', _) => {
                script.push(one);
                script.extend(rest.next());
                continue;
            }
            // Within `$( … )` quoting begins again, even inside double quotation marks.
            ('$', _) if rest.peek() == Some(&'(') => {
                script.push(one);
                script.extend(rest.next());
                open.push(')');
                continue;
            }
            ('(', Some(')')) => open.push(')'),
            ('`' | '"', _) => open.push(one),
            // Inside double quotation marks an apostrophe is a character like others.
            ('\'', within) if within != Some(&'"') => open.push(one),
            _ => {}
        }
        script.push(one);
    }
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_one_word_wherever_they_stand() {
        let path = "/tmp/a b'c\"d$(touch x)`e`\\f*\n{}";
        for (command, expected) in [
            ("printf %s {}", path.to_owned()),
            ("printf %s \"{}/x\"", format!("{path}/x")),
            ("printf %s 'at {}/x'", format!("at {path}/x")),
            ("printf %s \"it's {}\"", format!("it's {path}")),
            ("printf %s '\"'{}", format!("\"{path}")),
            ("printf %s \\'{}", format!("'{path}")),
            ("printf %s \"\\\"{}\"", format!("\"{path}")),
            ("printf %s {}{}", format!("{path}{path}")),
            (
                "printf %s \"$(printf '%s/' {} | cat)x\"",
                format!("{path}/x"),
            ),
            ("printf %s \"$( (printf '%s' \"{}\") )\"", path.to_owned()),
            ("printf %s \"`printf %s {}`\"", path.to_owned()),
            ("printf %s \"(\"{}\")\"", format!("({path})")),
            ("printf %s {", "{".into()),
            ("printf none", "none".into()),
        ] {
            let output = Command::new("sh")
                .args(["-c", &script(command), "sh", path])
                .output()
                .unwrap();
            assert_eq!(
                String::from_utf8(output.stdout).unwrap(),
                expected,
                "{command}"
            );
        }
    }
}
