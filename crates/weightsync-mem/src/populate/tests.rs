use std::os::fd::AsFd;
use std::sync::Arc;

use super::*;
use crate::error::Error;
use crate::map::OwnedFile;

/// The fields of `/proc/self/smaps` for the mappings of a memory file.
fn smaps(name: &str) -> Vec<String> {
    let all = std::fs::read_to_string("/proc/self/smaps").unwrap();
    // A mapping's first line has its name, if it has one, and its last its flags.
    let mut found = Vec::new();
    let mut one = String::new();
    for line in all.lines() {
        one.push_str(line);
        one.push('\n');
        if line.starts_with("VmFlags:") {
            let is_it = one.lines().next().is_some_and(|first| first.contains(name));
            found.extend(is_it.then(|| std::mem::take(&mut one)));
            one.clear();
        }
    }
    found
}

fn kib(smap: &str, field: &str) -> usize {
    let line = smap.lines().find(|line| line.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn flags(smap: &str) -> Vec<&str> {
    let line = smap.lines().find(|line| line.starts_with("VmFlags:"));
    line.unwrap().split_whitespace().skip(1).collect()
}

/// Whenever a page of a mapping is there, forked children and core files do not get
/// it.
#[test]
fn no_page_comes_before_forks_and_cores_are_barred() {
    const NAME: &str = "weightsync-test-barred";
    let len = PIECE + HUGE_PAGE + 4096;
    let making = std::thread::spawn(move || OwnedFile::new(NAME, len).unwrap());
    let mut looked = false;
    while !looked {
        looked = making.is_finished();
        for smap in smaps(NAME) {
            let flags = flags(&smap);
            let barred = flags.contains(&"dc") && flags.contains(&"dd");
            assert!(barred || kib(&smap, "Rss:") == 0, "{smap}");
        }
    }
    let file = making.join().unwrap();
    let peer = MemoryMap::of_peer(file.fd.as_fd(), len).unwrap();
    let all = smaps(NAME);
    assert_eq!(all.len(), 2, "{all:?}");
    for smap in all {
        assert!(flags(&smap).contains(&"dc") && flags(&smap).contains(&"dd"));
        // Before Linux 5.14 they come with the first touch.
        assert_eq!(kib(&smap, "Rss:"), len / 1024, "{smap}");
    }
    drop((file, peer));
    assert_eq!(smaps(NAME).len(), 0);
}

#[test]
fn a_large_mapping_has_huge_pages_if_there_are_any() {
    const NAME: &str = "weightsync-test-huge";
    let len = 4 * HUGE_PAGE + 3 * 4096;
    let file = OwnedFile::new(NAME, len).unwrap();
    let peer = MemoryMap::of_peer(file.fd.as_fd(), len).unwrap();
    let private = Arc::new(MemoryMap::private(file.fd.as_fd(), len).unwrap());
    for map in [&*file.map, &peer, &private] {
        assert_eq!(map.as_ptr().addr() % HUGE_PAGE, 0);
        assert!(map.copy_out(len).iter().all(|byte| *byte == 0));
    }
    let huge = |smap: &String| kib(smap, "ShmemPmdMapped:") + kib(smap, "FilePmdMapped:") > 0;
    let all = smaps(NAME);
    assert_eq!(all.len(), 3);
    if !all.iter().all(huge) {
        // The kernel has none: it does not make one when it is asked again.
        let start = file.map.as_ptr().cast();
        // SAFETY: the range is inside the mapping; its bytes stay the same.
        let done = unsafe { libc::madvise(start, HUGE_PAGE, libc::MADV_COLLAPSE) };
        assert_ne!(done, 0, "{all:?}");
    }
}

#[test]
fn a_file_that_is_not_needed_any_more_is_not_made() {
    let stop = AtomicBool::new(true);
    let made = OwnedFile::new_unless("weightsync-test-stop", 1 << 40, &stop);
    assert!(matches!(made, Err(Error::SenderClosed)), "{made:?}");
}

#[test]
fn populate_pieces_cover_all_once_and_report_failure() {
    for len in [0, 1, PIECE - 1, PIECE, PIECE + 1, 9 * PIECE + 5] {
        let done = AtomicUsize::new(0);
        let add = |piece: Range<usize>| {
            assert!(piece.end <= 7 + len && piece.len() <= PIECE);
            done.fetch_add(piece.len(), Ordering::Relaxed);
            Ok(())
        };
        in_pieces(7..7 + len, add).unwrap();
        assert_eq!(done.into_inner(), len);
    }
    let last = |piece: Range<usize>| match piece.end == 5 * PIECE {
        true => Err(Errno::NOMEM),
        false => Ok(()),
    };
    assert_eq!(in_pieces(0..5 * PIECE, last), Err(Errno::NOMEM));
}
