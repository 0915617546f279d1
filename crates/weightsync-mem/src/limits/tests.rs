use std::fs;

use super::*;

const MIB: u64 = 1 << 20;

/// A tree of files like the system's, removed when dropped.
struct Tree(PathBuf);

impl Tree {
    fn new(name: &str, files: &[(&str, &str)]) -> Self {
        let root = std::env::temp_dir().join(format!("weightsync-{name}-{}", std::process::id()));
        for (path, text) in files {
            let path = root.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        Self(root)
    }

    fn least_left(&self) -> Option<(u64, Option<u64>)> {
        let (proc, groups) = (self.0.join("proc"), self.0.join("groups"));
        let system = System {
            proc: &proc,
            groups: &groups,
        };
        system.least_left()
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const MEMORY: (&str, &str) = (
    "proc/meminfo",
    "MemTotal: 8192 kB\nMemAvailable:    4096 kB\nSwapFree:   1024 kB\n",
);

#[test]
fn without_a_group_the_machine_is_the_limit() {
    let tree = Tree::new("machine", &[MEMORY]);
    assert_eq!(tree.least_left(), Some((5 * MIB, None)));
    let nothing = Tree::new("nothing", &[]);
    assert_eq!(nothing.least_left(), None);
}

#[test]
fn the_group_with_the_least_left_is_the_limit() {
    let own = ("proc/self/cgroup", "0::/slice/job\n");
    let limit = ("groups/slice/memory.max", "3145728\n");
    let used = ("groups/slice/memory.current", "2097152\n");
    let stat = "anon 7\ninactive_file 524288\nactive_file 0\n";
    let cached = ("groups/slice/memory.stat", stat);
    let none = ("groups/slice/job/memory.max", "max\n");
    let mut files = vec![MEMORY, own, limit, used, cached, none];
    let least = |files: &[_]| Tree::new("groups", files).least_left();
    // 1 MiB, and half of one that is cached.
    assert_eq!(least(&files), Some((3 * MIB / 2, Some(3 * MIB))));
    // Swap counts as far as the group may use it and the machine has it.
    files.push(("groups/slice/memory.swap.current", "0\n"));
    files.push(("groups/slice/memory.swap.max", "262144\n"));
    assert_eq!(least(&files), Some((7 * MIB / 4, Some(3 * MIB))));
    *files.last_mut().unwrap() = ("groups/slice/memory.swap.max", "max\n");
    assert_eq!(least(&files), Some((5 * MIB / 2, Some(3 * MIB))));
}

#[test]
fn a_group_of_the_older_interface_counts_too() {
    let own = ("proc/self/cgroup", "5:cpu:/\n4:memory,x:/job\n0::/\n");
    let limit = ("groups/memory/job/memory.limit_in_bytes", "2097152\n");
    let used = ("groups/memory/job/memory.usage_in_bytes", "1048576\n");
    let none = "9223372036854771712\n";
    let above = ("groups/memory/memory.limit_in_bytes", none);
    let tree = Tree::new("older", &[MEMORY, own, limit, used, above]);
    assert_eq!(tree.least_left(), Some((MIB, Some(2 * MIB))));
}

#[test]
fn more_memory_than_there_is_is_refused_in_words() {
    check_memory(1).unwrap();
    let error = check_memory(1 << 60).unwrap_err();
    let words = error.to_string();
    assert!(
        words.starts_with("1073741824.0 GiB of shared memory are needed"),
        "{words}"
    );
    let group = Error::NoMemory {
        wanted: 3 << 30,
        left: MIB,
        limit: Some(1 << 30),
    };
    let of = "but of the 1.0 GiB that a control group allows 1 MiB are left";
    assert!(group.to_string().contains(of), "{group}");
}
