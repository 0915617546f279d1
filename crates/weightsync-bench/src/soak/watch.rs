//! What processes have, over time.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Duration;

use super::parts::Process;

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Threads,
    Descriptors,
    /// Memory of the process's own, in KiB.
    Own,
    /// Shared memory that it has mapped and used, in KiB.
    Shared,
    /// KiB on the disk.
    Disk,
}

impl Kind {
    /// How much more the median of the last part may be.
    fn may_grow(self, before: u64) -> u64 {
        match self {
            Self::Threads => 1,
            Self::Descriptors => 2,
            // An allocator does not give all back, and what it keeps differs by the hour.
            Self::Own => 2048 + before / 20,
            // A sender adds a slot where workers hold all that it has, and keeps it: here 4 MiB.
            Self::Shared => 2 * 4200,
            Self::Disk => 1024 + before / 10,
        }
    }
}

/// Every number that was seen.
#[derive(Default)]
pub(super) struct Samples(BTreeMap<(String, Kind), Vec<(Duration, u64)>>);

impl Samples {
    pub(super) fn note(&mut self, at: Duration, who: &str, kind: Kind, number: u64) {
        let of = self.0.entry((who.to_owned(), kind)).or_default();
        of.push((at, number));
    }

    /// Looks at these processes.
    pub(super) fn look<'a>(
        &mut self,
        at: Duration,
        processes: impl Iterator<Item = (&'a str, &'a Process)>,
    ) -> Result<(), Box<dyn Error>> {
        for (who, process) in processes {
            let proc = format!("/proc/{}", process.id());
            let count = |name: &str| Ok::<_, Box<dyn Error>>(fs::read_dir(name)?.count() as u64);
            self.note(at, who, Kind::Threads, count(&format!("{proc}/task"))?);
            self.note(at, who, Kind::Descriptors, count(&format!("{proc}/fd"))?);
            let status = fs::read_to_string(format!("{proc}/status"))?;
            for (line, kind) in [("RssAnon:", Kind::Own), ("RssShmem:", Kind::Shared)] {
                let found = status.lines().find_map(|one| one.strip_prefix(line));
                let kib = found.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
                self.note(at, who, kind, kib.ok_or("no such line in /proc")?);
            }
        }
        Ok(())
    }

    /// The median of the second fifth of the time, and of the last; what has grown.
    pub(super) fn compare(&self, report: &mut String) -> Result<Vec<String>, Box<dyn Error>> {
        let mut grown = Vec::new();
        writeln!(report, "| | | near the beginning | at the end | most |")?;
        writeln!(report, "|---|---|---|---|---|")?;
        for ((who, kind), all) in &self.0 {
            let len = all.len();
            let median = |part: &[(Duration, u64)]| {
                let mut numbers: Vec<u64> = part.iter().map(|(_, number)| *number).collect();
                numbers.sort_unstable();
                numbers.get(numbers.len() / 2).copied()
            };
            let parts = match len {
                0..5 => (median(all), median(all)),
                _ => (
                    median(&all[len / 5..len * 2 / 5]),
                    median(&all[len * 4 / 5..]),
                ),
            };
            let (Some(before), Some(after)) = parts else {
                continue;
            };
            let most = all.iter().map(|(_, number)| *number).max().unwrap_or(0);
            let line = format!("{who} | {kind:?} | {before} | {after} | {most}");
            writeln!(report, "| {line} |")?;
            if after > before + kind.may_grow(before) {
                grown.push(format!("{who}: {kind:?} from {before} to {after}"));
            }
        }
        Ok(grown)
    }

    pub(super) fn csv(&self) -> String {
        let mut text = String::from("seconds,who,what,number\n");
        for ((who, kind), all) in &self.0 {
            for (at, number) in all {
                let who = who.replace(',', ";");
                let _ = writeln!(text, "{:.1},{who},{kind:?},{number}", at.as_secs_f64());
            }
        }
        text
    }
}

/// KiB of all files below a folder.
pub(super) fn disk(dir: &Path) -> Result<u64, Box<dyn Error>> {
    let mut bytes = 0;
    // A file may be replaced while it is looked at.
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        match entry.metadata() {
            Ok(known) if known.is_dir() => bytes += disk(&entry.path())? * 1024,
            Ok(known) => bytes += known.len(),
            Err(_) => {}
        }
    }
    Ok(bytes / 1024)
}
