//! What hosts leave in the system.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use weightsync_conformance::hosts::Hosts;

use crate::linux::ends::{Words, longest};

/// The names of the network interfaces of this process.
pub(crate) fn interfaces() -> io::Result<BTreeSet<String>> {
    let text = fs::read_to_string("/proc/self/net/dev")?;
    let names = text.lines().filter_map(|line| line.split_once(':'));
    Ok(names.map(|(name, _)| name.trim().into()).collect())
}

/// Starts processes in each host: one that ignores every signal that can be ignored,
/// and one that has left it.
pub(crate) fn occupy(hosts: &Hosts) -> Result<(Vec<Child>, Seen), Box<dyn Error>> {
    let mut seen = Seen::default();
    let mut children = Vec::new();
    for host in 0..hosts.count() {
        let script = "trap '' HUP INT TERM; setsid sleep 1000 & \
                      echo $(readlink /proc/$$/ns/user /proc/$$/ns/net); \
                      exec sleep 1000";
        let mut child = hosts
            .command(host, "sh")
            .args(["-c", script])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let line = Words::of(&mut child).line(longest())?;
        seen.0.extend(Seen::parse(&line)?.0);
        children.push(child);
    }
    Ok((children, seen))
}

/// Namespaces, told as words in a line: such as `net:[4026532000]`.
#[derive(Default)]
pub(crate) struct Seen(BTreeSet<String>);

impl Seen {
    pub(crate) fn parse(line: &str) -> Result<Self, Box<dyn Error>> {
        let words: BTreeSet<String> = line.split_whitespace().map(Into::into).collect();
        match words.len() >= 2 && words.iter().all(|word| word.ends_with(']')) {
            true => Ok(Self(words)),
            false => Err(format!("no namespaces: {line}").into()),
        }
    }

    /// Who is in one of them, as far as we may see.
    pub(crate) fn inhabitants(&self) -> io::Result<Vec<Inhabitant>> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc")?.flatten() {
            let number: Option<i32> = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok());
            let Some(process) = number.and_then(Pid::from_raw) else {
                continue;
            };
            let inside = ["ns/user", "ns/net"].into_iter().any(|namespace| {
                // It may have ended meanwhile, and others' are not ours to see.
                fs::read_link(entry.path().join(namespace))
                    .is_ok_and(|name| self.0.contains(&name.display().to_string()))
            });
            if inside
                && !is_dead(&entry.path())
                && let Ok(handle) = pidfd_open(process, PidfdFlags::empty())
            {
                found.push(Inhabitant { process, handle });
            }
        }
        Ok(found)
    }

    /// Fails if anybody is in one of the namespaces, or they are kept by a file.
    pub(crate) fn gone(&self) -> Result<(), Box<dyn Error>> {
        let left = self.inhabitants()?;
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let mounted: Vec<_> = self
            .0
            .iter()
            .filter(|name| mounts.contains(*name))
            .collect();
        match left.is_empty() && mounted.is_empty() {
            true => Ok(()),
            false => Err(format!("left: {left:?}, mounted: {mounted:?}").into()),
        }
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|name| write!(f, "{name} "))
    }
}

/// A process in one of some namespaces.
#[derive(Debug)]
pub(crate) struct Inhabitant {
    process: Pid,
    handle: OwnedFd,
}

impl Inhabitant {
    /// Waits for its end.
    pub(crate) fn end(&self, until: Instant) -> Result<(), Box<dyn Error>> {
        let mut fds = [PollFd::new(&self.handle, PollFlags::IN)];
        let left = until.saturating_duration_since(Instant::now());
        match rustix::event::poll(&mut fds, Some(&Timespec::try_from(left)?))? {
            0 => Err(format!("{:?} still runs", self.process).into()),
            _ => Ok(()),
        }
    }
}

/// One that nobody has waited for yet is in its user namespace, but does nothing.
fn is_dead(process: &Path) -> bool {
    let state = fs::read_to_string(process.join("stat")).unwrap_or_default();
    state
        .rsplit_once(") ")
        .is_none_or(|(_, state)| state.starts_with(['Z', 'X']))
}
