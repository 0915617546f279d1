//! Senders that may have few files open, in processes of their own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use weightsync_mem::{CopyOptions, Error, SegmentReader, raise_files};

use super::forks::Parent;
use super::{address, attach, publish, slots, take, within, writer};

fn limit(soft: u64, hard: Option<u64>) {
    let limit = Rlimit {
        current: Some(soft),
        maximum: hard,
    };
    setrlimit(Resource::Nofile, limit).unwrap();
}

#[test]
fn sender_raises_its_limit_for_a_thousand_workers() {
    // The workers are all in this process, and take more than the sender.
    const OF_A_WORKER: u64 = 12;
    raise_files();
    let hard = getrlimit(Resource::Nofile).maximum;
    let workers = hard.map_or(1000, |hard| (hard / OF_A_WORKER).min(1000)) as u32;
    let address = address();
    let sender = Parent::fork(|| {
        limit(u64::from(workers) + 24, hard);
        let mut writer = writer(&address, slots(2, 2));
        publish(&mut writer, 1, CopyOptions::default());
        std::mem::forget(writer);
    });
    let readers = (0..workers).map(|worker| {
        let mut reader = SegmentReader::attach(&attach(&address, worker), within(60)).unwrap();
        take(&mut reader);
        reader
    });
    let readers: Vec<_> = readers.collect();
    assert_eq!(readers.len(), workers as usize);
    drop(sender);
}

#[test]
fn a_sender_out_of_files_does_not_blame_its_workers() {
    const WORKERS: u32 = 60;
    let address = address();
    let gone = Arc::new(AtomicBool::new(false));
    let coming = std::thread::spawn({
        let (address, gone) = (address.clone(), gone.clone());
        move || {
            let mut joined = Vec::new();
            while joined.len() < WORKERS as usize && !gone.load(Ordering::Relaxed) {
                let soon = Some(Instant::now() + Duration::from_secs(1));
                let info = attach(&address, joined.len() as u32);
                joined.extend(SegmentReader::attach(&info, soon));
            }
            joined
        }
    });
    let sender = Parent::fork(|| {
        limit(64, Some(64));
        let writer = writer(&address, slots(2, 2));
        let error = loop {
            match writer.wait_readers(within(1), |there| there.workers.len() == WORKERS as usize) {
                Ok(met) => assert!(!met),
                Err(error) => break error,
            }
        };
        assert!(
            matches!(error, Error::TooManyFiles { limit: Some(64) }),
            "{error}"
        );
        std::mem::forget(writer);
    });
    drop(sender);
    gone.store(true, Ordering::Relaxed);
    assert!(coming.join().unwrap().len() < WORKERS as usize);
}
