//! Queries and operations on the processes, through the kernel.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::{Actor, Stage};

impl Stage {
    /// A process's own memory in bytes, without what it shares.
    pub(crate) fn memory(&self, who: Actor) -> u64 {
        let path = format!("/proc/{}/smaps_rollup", self.pid(who));
        let text = std::fs::read_to_string(path).expect("a process that runs");
        let line = text.lines().find_map(|line| line.strip_prefix("Pss_Anon:"));
        let kib = line.and_then(|line| line.split_whitespace().next());
        let kib: u64 = kib.and_then(|kib| kib.parse().ok()).expect("its memory");
        kib << 10
    }

    /// How many slots a process has made.
    pub(crate) fn slots(&self, who: Actor) -> usize {
        let files = std::fs::read_dir(format!("/proc/{}/fd", self.pid(who)));
        let files = files.expect("a process that runs");
        let names = files.filter_map(|file| std::fs::read_link(file.ok()?.path()).ok());
        names
            .filter(|name| name.to_string_lossy().contains("memfd:weightsync-slot"))
            .count()
    }

    /// Has every version that a process shares damaged, but for its first bytes.
    pub(crate) fn damage(&self, who: Actor) {
        const SOUND: u64 = 4 << 10;
        let pid = self.pid(who);
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"));
        let maps = maps.expect("a process that runs");
        let memory = File::options().write(true).open(format!("/proc/{pid}/mem"));
        let memory = memory.expect("a process that runs");
        let mut damaged = 0;
        for line in maps.lines().filter(|line| line.contains(" rw-s ")) {
            let range = line
                .split(' ')
                .next()
                .and_then(|range| range.split_once('-'));
            let (start, end) = range.expect("two addresses");
            let address = |text| u64::from_str_radix(text, 16).expect("an address");
            let (start, end) = (address(start), address(end));
            if end - start < self.bytes as u64 {
                continue;
            }
            let wrong = vec![0x55; self.bytes - SOUND as usize];
            let written = memory.write_all_at(&wrong, start + SOUND);
            written.expect("it is mapped");
            damaged += 1;
        }
        assert!(damaged > 0, "nothing is as large: {maps}");
    }

    /// Bytes that a host has received over its link, as one of its processes sees it.
    pub(crate) fn came_to(&self, who: Actor) -> u64 {
        let path = format!("/proc/{}/net/dev", self.pid(who));
        let text = std::fs::read_to_string(path).expect("a process that runs");
        let line = text
            .lines()
            .find_map(|line| line.trim().strip_prefix("eth0:"));
        let first = line.and_then(|line| line.split_whitespace().next());
        first.and_then(|bytes| bytes.parse().ok()).expect("a link")
    }
}
