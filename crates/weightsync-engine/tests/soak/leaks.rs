//! Nothing is left when everything is over, and nothing piles up meanwhile.

use std::fs;
use std::path::Path;
use std::time::Instant;

use rustix::io::Errno;
use rustix::process::{WaitId, WaitIdOptions, waitid};

use crate::scale::longest;

/// Marks every process a test starts, and theirs.
pub const TOKEN: &str = "WEIGHTSYNC_SOAK_TOKEN";

/// What this process has, to be compared with what it has later.
#[derive(Debug)]
pub struct Census {
    token: String,
    descriptors: usize,
    threads: usize,
}

impl Census {
    /// Takes stock. `token` is part of the names of everything the test makes.
    pub fn take(token: &str) -> Self {
        Self {
            token: token.to_owned(),
            descriptors: count("/proc/self/fd"),
            threads: count("/proc/self/task"),
        }
    }

    /// No process, thread, descriptor, segment or socket is left.
    pub fn assert_nothing_left(&self) {
        // The orphans of a killed trainer, and threads that were joined, take a
        // moment to leave the lists.
        let deadline = Instant::now() + longest();
        while (!self.processes().is_empty() || count("/proc/self/task") > self.threads)
            && Instant::now() < deadline
        {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        let left = self.processes();
        let told: Vec<_> = left.iter().map(|pid| describe(*pid)).collect();
        assert!(left.is_empty(), "processes are left: {told:#?}");
        let any = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        assert_eq!(
            waitid(WaitId::All, any).err(),
            Some(Errno::CHILD),
            "a child is left"
        );
        assert_eq!(count("/proc/self/task"), self.threads, "threads");
        assert_eq!(count("/proc/self/fd"), self.descriptors, "descriptors");
        // A memory file lives through descriptors, mappings and processes alone.
        assert_eq!(segments(), 0, "mapped segments");
        let sockets = fs::read_to_string("/proc/net/unix").expect("there is /proc");
        let own: Vec<_> = sockets
            .lines()
            .filter(|line| line.contains(&self.token))
            .collect();
        assert!(own.is_empty(), "sockets are left: {own:#?}");
    }

    /// Processes that carry the token, other than this one and zombies.
    fn processes(&self) -> Vec<u32> {
        let mark = format!("{TOKEN}={}\0", self.token);
        let all = fs::read_dir("/proc").expect("there is /proc").flatten();
        all.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .filter(|pid| {
                let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
                environ
                    .windows(mark.len())
                    .any(|window| window == mark.as_bytes())
            })
            .collect()
    }
}

/// A run directory holds the epoch, the key and where its sender was, and nothing
/// else.
pub fn assert_tidy(run_dir: &Path) {
    let files = fs::read_dir(run_dir).expect("it is there").flatten();
    let mut names: Vec<_> = files.map(|file| file.file_name()).collect();
    names.sort();
    let address = names.remove(0).into_string().expect("letters");
    assert!(
        address.starts_with("address-") && !address.ends_with(".new"),
        "{address}"
    );
    assert_eq!(names, ["epoch", "key"]);
}

/// In a reader: every trainer after the first costs as many descriptors and
/// mapped segments as the one before, unless a snapshot is held.
pub fn same_descriptors(before: &mut Option<[usize; 2]>, holds: bool) -> Result<(), String> {
    let now = || [count("/proc/self/fd"), segments()];
    let Some([fds, maps]) = *before else {
        *before = Some(now());
        return Ok(());
    };
    // A segment may have grown since, to 8 slots at most. Each slot is a descriptor and a
    // mapping.
    let deadline = Instant::now() + longest() / 8;
    loop {
        let [fds_now, maps_now] = now();
        if holds || (fds_now <= fds + 8 && maps_now <= maps + 8) {
            return Ok(());
        }
        if Instant::now() > deadline {
            return Err(format!(
                "it had {fds} descriptors and {maps} mapped segments, and has {fds_now} and {maps_now}"
            ));
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// In a trainer: readers that went leave no descriptors behind.
pub fn bounded_descriptors(most: usize) -> Result<(), String> {
    match count("/proc/self/fd") {
        now if now > most => Err(format!("{now} descriptors are open where {most} suffice")),
        _ => Ok(()),
    }
}

/// What a process and its threads are doing.
pub fn describe(pid: u32) -> String {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return format!("process {pid} is gone");
    };
    let threads = threads.flatten().map(|thread| {
        let read = |name| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
        let (name, stat) = (read("comm"), read("stat"));
        let state = stat
            .rsplit(") ")
            .next()
            .and_then(|rest| rest.chars().next());
        format!(
            "{} {} in {:?}",
            name.trim(),
            state.unwrap_or('?'),
            read("syscall").trim()
        )
    });
    format!("process {pid}: {}", threads.collect::<Vec<_>>().join("; "))
}

fn segments() -> usize {
    let maps = fs::read_to_string("/proc/self/maps").expect("there is /proc");
    maps.lines()
        .filter(|line| line.contains("/memfd:weightsync"))
        .count()
}

fn count(dir: &str) -> usize {
    fs::read_dir(dir).expect("there is /proc").count()
}
