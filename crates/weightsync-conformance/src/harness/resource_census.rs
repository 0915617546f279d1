//! What a process has, and what is left when everything is over.

use std::fs;
use std::path::Path;
use std::time::Instant;

use rustix::io::Errno;
use rustix::process::{WaitId, WaitIdOptions, waitid};

use super::command::ResourceCensus;
use super::scale::longest;

/// Marks every process that a scenario starts, and theirs.
pub(crate) const TOKEN: &str = "WEIGHTSYNC_CONFORMANCE_TOKEN";

/// What this process has.
pub(crate) fn take() -> ResourceCensus {
    ResourceCensus {
        descriptors: count("/proc/self/fd"),
        threads: count("/proc/self/task"),
        shared_maps: shared_maps(),
    }
}

/// Waits a moment for threads that were joined to leave the lists, then says
/// what is there more than before, if anything.
pub(crate) fn grown(before: ResourceCensus) -> Option<String> {
    let deadline = Instant::now() + longest() / 8;
    loop {
        let now = take();
        let more = now.descriptors > before.descriptors
            || now.threads > before.threads
            || now.shared_maps > before.shared_maps;
        if !more {
            return None;
        }
        if Instant::now() > deadline {
            return Some(format!(
                "it had {before:?} and has {now:?}: {:#?}",
                descriptors()
            ));
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// What this process has at the beginning of a scenario, to be compared with the
/// end.
#[derive(Debug)]
pub(crate) struct Census {
    token: String,
    resource_census: ResourceCensus,
    shm: Vec<String>,
}

impl Census {
    /// Takes resource_census. `token` marks the scenario's processes.
    pub(crate) fn take(token: &str) -> Self {
        Self {
            token: token.to_owned(),
            resource_census: take(),
            shm: own_shm(token),
        }
    }

    /// No process, thread, descriptor, mapping or shared file is left, and nobody
    /// listens at these addresses.
    pub(crate) fn assert_nothing_left(&self, addresses: &[String]) {
        // The orphans of a killed process take a moment to be ended.
        let deadline = Instant::now() + longest();
        while !self.processes().is_empty() && Instant::now() < deadline {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let left: Vec<_> = self.processes().into_iter().map(describe).collect();
        assert!(left.is_empty(), "processes are left: {left:#?}");
        let any = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        assert_eq!(
            waitid(WaitId::All, any).err(),
            Some(Errno::CHILD),
            "a child is left"
        );
        if let Some(grown) = grown(self.resource_census) {
            panic!("something is left in this process: {grown}");
        }
        assert_eq!(own_shm(&self.token), self.shm, "shared files are left");
        let listening = listening(addresses);
        assert!(listening.is_empty(), "sockets are left: {listening:#?}");
    }

    /// Processes that carry the token, but for zombies.
    fn processes(&self) -> Vec<u32> {
        let mark = format!("{TOKEN}={}\0", self.token);
        let all = fs::read_dir("/proc").expect("there is /proc").flatten();
        let all = all.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let marked = all.filter(|pid: &u32| {
            let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environ
                .windows(mark.len())
                .any(|window| window == mark.as_bytes())
        });
        marked.collect()
    }
}

/// The sockets of this machine at one of these addresses.
pub(crate) fn listening(addresses: &[String]) -> Vec<String> {
    let sockets = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let mut lines: Vec<_> = sockets.lines().map(str::to_owned).collect();
    lines.retain(|line| addresses.iter().any(|address| line.contains(address)));
    lines
}

/// What a process and its threads are doing.
pub(crate) fn describe(pid: u32) -> String {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return format!("process {pid} is gone");
    };
    let threads = threads.flatten().map(|thread| {
        let read = |name| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
        let (name, stat) = (read("comm"), read("stat"));
        let state = state_in(&stat).unwrap_or('?');
        format!("{} {state} in {:?}", name.trim(), read("syscall").trim())
    });
    format!("process {pid}: {}", threads.collect::<Vec<_>>().join("; "))
}

/// The letter for what a process's main thread is doing.
pub(crate) fn state(pid: u32) -> Option<char> {
    state_in(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn state_in(stat: &str) -> Option<char> {
    stat.rsplit(") ").next()?.chars().next()
}

fn own_shm(token: &str) -> Vec<String> {
    let all = fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let names = all.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.contains(token)).collect()
}

fn shared_maps() -> usize {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines()
        .filter(|line| line.contains("/memfd:weightsync") || line.contains("/dev/shm/"))
        .count()
}

fn descriptors() -> Vec<String> {
    let all = fs::read_dir("/proc/self/fd")
        .into_iter()
        .flatten()
        .flatten();
    let targets = all.filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.map(|target| target.display().to_string()).collect()
}

fn count(dir: impl AsRef<Path>) -> usize {
    fs::read_dir(dir).expect("there is /proc").count()
}
