//! Checks how much memory and how many open files this process may still have.
//!
//! The system kills a process that takes more memory than its group allows, without an error.
//! These checks refuse such a request first, with the reason.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::Error;

/// The root of the system's files; another directory in tests.
#[derive(Clone, Copy)]
struct System<'a> {
    proc: &'a Path,
    groups: &'a Path,
}

/// Refuses memory that this process cannot have: more than the machine has available, or than a
/// control group has left, swap included.
///
/// # Errors
///
/// [`Error::NoMemory`].
pub(crate) fn check_memory(wanted: u64) -> Result<(), Error> {
    let system = System {
        proc: Path::new("/proc"),
        groups: Path::new("/sys/fs/cgroup"),
    };
    match system.least_left() {
        Some((left, limit)) if left < wanted => Err(Error::NoMemory {
            wanted,
            left,
            limit,
        }),
        _ => Ok(()),
    }
}

impl System<'_> {
    /// The least memory left anywhere, and the limit if it is a group's.
    fn least_left(self) -> Option<(u64, Option<u64>)> {
        let machine = self.machine().map(|left| (left, None));
        let groups = self.groups().into_iter();
        let groups = groups.map(|(left, limit)| (left, Some(limit)));
        groups.chain(machine).min_by_key(|(left, _)| *left)
    }

    fn machine(self) -> Option<u64> {
        Some(self.free("MemAvailable:")? + self.free("SwapFree:").unwrap_or(0))
    }

    fn free(self, of: &str) -> Option<u64> {
        let text = read_to_string(self.proc.join("meminfo")).ok()?;
        number_after(&text, of)?.checked_mul(1 << 10)
    }

    /// What this process's memory group and each group above it have left, if they have a limit.
    fn groups(self) -> Vec<(u64, u64)> {
        // A file that is missing or has another form sets no limit: this check must not refuse what
        // the system would allow.
        let own = read_to_string(self.proc.join("self/cgroup")).unwrap_or_default();
        let swap = self.free("SwapFree:").unwrap_or(0);
        let mut found = Vec::new();
        for line in own.lines() {
            let mut parts = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else {
                continue;
            };
            let (base, names) = match controllers {
                // Version 2 has one line without controllers. Version 1 has a hierarchy for each
                // controller.
                "" => (self.groups.to_owned(), &UNIFIED),
                _ if controllers.split(',').any(|one| one == "memory") => {
                    (self.groups.join("memory"), &LEGACY)
                }
                _ => continue,
            };
            let own = PathBuf::from(path.trim_start_matches('/'));
            // The groups above have limits of their own, which count for all groups below.
            let all = own.ancestors();
            found.extend(all.filter_map(|at| names.left(&base.join(at), swap)));
        }
        found
    }
}

/// The names of a memory group's files.
struct GroupFiles {
    limit: &'static str,
    used: &'static str,
    /// The lines of `memory.stat` whose memory can be dropped.
    cached: [&'static str; 2],
    swap: Option<(&'static str, &'static str)>,
}

const UNIFIED: GroupFiles = GroupFiles {
    limit: "memory.max",
    used: "memory.current",
    cached: ["inactive_file ", "active_file "],
    swap: Some(("memory.swap.max", "memory.swap.current")),
};

const LEGACY: GroupFiles = GroupFiles {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cached: ["total_inactive_file ", "total_active_file "],
    swap: None,
};

impl GroupFiles {
    /// What a group has left, if the machine has this much `swap`, and the group's limit; `None`
    /// without a limit.
    fn left(&self, group: &Path, swap: u64) -> Option<(u64, u64)> {
        let number =
            |name| -> Option<u64> { read_to_string(group.join(name)).ok()?.trim().parse().ok() };
        // The older interface writes "no limit" as a number near the largest.
        let limit = number(self.limit).filter(|limit| *limit < 1 << 60)?;
        let used = number(self.used)?;
        let stat = read_to_string(group.join("memory.stat")).unwrap_or_default();
        let cached = self
            .cached
            .map(|name| number_after(&stat, name).unwrap_or(0));
        let swapped = self.swap.and_then(|(most, used)| {
            // "max" is no number: the group may use all swap of the machine.
            let most = number(most).unwrap_or(u64::MAX);
            Some(swap.min(most.saturating_sub(number(used)?)))
        });
        // The kernel drops cached files before it kills a process.
        let used = used.saturating_sub(cached.iter().sum());
        Some((limit.saturating_sub(used) + swapped.unwrap_or(0), limit))
    }
}

/// The number after a word at the beginning of a line.
fn number_after(text: &str, word: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(word))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Raises this process's limit on open files as far as it may. False if it was already there.
pub fn raise_files() -> bool {
    let limit = getrlimit(Resource::Nofile);
    // The soft limit can only go up to the hard one without privileges.
    if limit.current == limit.maximum {
        return false;
    }
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, raised).is_ok()
}

/// How many files this process may have open now.
pub(crate) fn files() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

#[cfg(test)]
mod tests;
