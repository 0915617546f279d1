//! A directory that fails when a test says so.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::format::HEAD;

use super::{Blob, Directory, Peer, Presence, Storage, Upload};

/// How a call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InjectedFault {
    /// It does nothing, and says so.
    Refused,
    /// It does what it is to do, and its answer gets lost.
    Lost,
    /// The same, and no later call does anything.
    Outage,
    /// It panics.
    Panic,
    /// It fails and is done later, as a slow server does it: a replacement of a file.
    Late,
    /// None fails, and each read of the head finds it with one more space at its end.
    Moving,
}

/// A directory whose calls are counted, and whose n-th call fails.
#[derive(Clone, Debug)]
pub(crate) struct Faulty {
    directory: Directory,
    plan: Arc<FaultPlan>,
}

#[derive(Debug)]
struct FaultPlan {
    calls: AtomicU64,
    /// The call that fails; none at `u64::MAX`.
    at: AtomicU64,
    fault: InjectedFault,
    /// The replacement that is still to be done, and the call before which it is.
    late: Mutex<Option<(u64, Swap)>>,
    /// Whether a late replacement has changed the head.
    landed: AtomicBool,
    /// What happens meanwhile, and the call before which it does.
    meanwhile: Mutex<Option<(u64, ConcurrentAction)>>,
}

/// What others do.
struct ConcurrentAction(Box<dyn FnOnce() + Send>);

impl fmt::Debug for ConcurrentAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an event")
    }
}

/// A file, and its bytes before and after.
type Swap = (String, Option<Vec<u8>>, Vec<u8>);

impl Faulty {
    pub(crate) fn new(directory: Directory, fault: InjectedFault) -> Self {
        let plan = FaultPlan {
            calls: AtomicU64::new(0),
            at: AtomicU64::new(u64::MAX),
            fault,
            late: Mutex::new(None),
            landed: AtomicBool::new(false),
            meanwhile: Mutex::new(None),
        };
        Self {
            directory,
            plan: Arc::new(plan),
        }
    }

    /// Counts from 0 again, and fails at this call.
    pub(crate) fn fail_at(&self, call: u64) {
        self.plan.calls.store(0, Ordering::SeqCst);
        self.plan.at.store(call, Ordering::SeqCst);
    }

    /// Counts from 0 again. Before this call, others do something; no call fails.
    pub(crate) fn meanwhile(&self, call: u64, event: impl FnOnce() + Send + 'static) {
        self.fail_at(u64::MAX);
        *self.plan.meanwhile.lock().unwrap() = Some((call, ConcurrentAction(Box::new(event))));
    }

    /// Counts from 0 again. What is late is done before this call. False if nothing is.
    pub(crate) fn land_at(&self, call: u64) -> bool {
        self.fail_at(u64::MAX);
        let mut late = self.plan.late.lock().unwrap();
        late.as_mut().map(|(at, _)| *at = call).is_some()
    }

    /// Whether a late replacement has changed the head.
    pub(crate) fn landed(&self) -> bool {
        self.plan.landed.load(Ordering::SeqCst)
    }

    fn land(&self) -> io::Result<()> {
        let mut late = self.plan.late.lock().unwrap();
        let calls = self.plan.calls.load(Ordering::SeqCst);
        match late.take_if(|(at, _)| *at == calls) {
            Some((_, (path, old, new))) => {
                let swapped = self.directory.swap(&path, old.as_deref(), &new)?;
                let published = swapped && path == HEAD;
                self.plan.landed.fetch_or(published, Ordering::SeqCst);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Fails no more. Returns how many calls there were.
    pub(crate) fn mend(&self) -> u64 {
        self.plan.at.store(u64::MAX, Ordering::SeqCst);
        self.plan.calls.load(Ordering::SeqCst)
    }
}

impl FaultPlan {
    fn call<T>(&self, run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let call = self.calls.fetch_add(1, Ordering::SeqCst);
        let event = self
            .meanwhile
            .lock()
            .unwrap()
            .take_if(|(at, _)| *at == call);
        if let Some((_, ConcurrentAction(event))) = event {
            event();
        }
        let at = self.at.load(Ordering::SeqCst);
        let failed = || Err(io::Error::other(format!("call {call} fails")));
        match self.fault {
            InjectedFault::Outage if at != u64::MAX && call > at => failed(),
            _ if call != at => run(),
            InjectedFault::Refused | InjectedFault::Late | InjectedFault::Moving => failed(),
            InjectedFault::Panic => panic!("call {call} panics"),
            InjectedFault::Lost | InjectedFault::Outage => run().and_then(|_| failed()),
        }
    }
}

impl Storage for Faulty {
    fn name(&self, path: &str) -> String {
        self.directory.name(path)
    }

    fn read(&self, path: &str) -> io::Result<Option<Vec<u8>>> {
        self.land()?;
        let read = self.plan.call(|| self.directory.read(path))?;
        let moving = read
            .as_ref()
            .filter(|_| path == HEAD && self.plan.fault == InjectedFault::Moving);
        if let Some(bytes) = moving {
            self.directory.put(path, &[bytes, &b" "[..]].concat())?;
        }
        Ok(read)
    }

    fn swap(&self, path: &str, old: Option<&[u8]>, new: &[u8]) -> io::Result<bool> {
        self.land()?;
        let swapped = self.plan.call(|| self.directory.swap(path, old, new));
        if swapped.is_err() && self.plan.fault == InjectedFault::Late {
            let swap = (path.to_owned(), old.map(<[u8]>::to_vec), new.to_vec());
            *self.plan.late.lock().unwrap() = Some((u64::MAX, swap));
        }
        swapped
    }

    fn put(&self, path: &str, bytes: &[u8]) -> io::Result<()> {
        self.plan.call(|| self.directory.put(path, bytes))
    }

    fn settle(&self, path: &str) -> io::Result<()> {
        self.plan.call(|| self.directory.settle(path))
    }

    fn upload(&self, path: &str) -> io::Result<Box<dyn Upload>> {
        let upload = self.plan.call(|| self.directory.upload(path))?;
        let plan = self.plan.clone();
        Ok(Box::new(FaultyUpload { upload, plan }))
    }

    fn open(&self, path: &str) -> io::Result<Option<Box<dyn Blob>>> {
        let blob = self.plan.call(|| self.directory.open(path))?;
        Ok(blob.map(|blob| -> Box<dyn Blob> {
            let plan = self.plan.clone();
            Box::new(FaultyBlob { blob, plan })
        }))
    }

    fn list(&self, dir: &str) -> io::Result<Vec<String>> {
        self.plan.call(|| self.directory.list(dir))
    }

    fn remove(&self, path: &str) -> io::Result<()> {
        self.plan.call(|| self.directory.remove(path))
    }

    fn announce(&self, path: &str, about: &[u8]) -> io::Result<Box<dyn Presence>> {
        self.plan.call(|| self.directory.announce(path, about))
    }

    fn peer(&self, path: &str) -> io::Result<Option<Box<dyn Peer>>> {
        self.plan.call(|| self.directory.peer(path))
    }

    fn tidy(&self) -> io::Result<()> {
        self.plan.call(|| self.directory.tidy())
    }

    fn why_not_temporary(&self) -> io::Result<Option<String>> {
        self.plan.call(|| self.directory.why_not_temporary())
    }

    fn clear_temporary(&self) -> io::Result<()> {
        self.plan.call(|| self.directory.clear_temporary())
    }

    fn vacate(&self, empty: &dyn Fn() -> bool) -> io::Result<bool> {
        self.plan.call(|| self.directory.vacate(empty))
    }

    fn notices_death(&self) -> bool {
        self.directory.notices_death()
    }

    fn codec(&self) -> weightsync_core::delta::Codec {
        self.directory.codec()
    }

    fn pauses(&self) -> (Duration, Duration) {
        self.directory.pauses()
    }
}

struct FaultyUpload {
    upload: Box<dyn Upload>,
    plan: Arc<FaultPlan>,
}

impl Upload for FaultyUpload {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.plan.call(|| self.upload.write(bytes))
    }

    fn finish(self: Box<Self>) -> io::Result<()> {
        let Self { upload, plan } = *self;
        plan.call(|| upload.finish())
    }
}

struct FaultyBlob {
    blob: Box<dyn Blob>,
    plan: Arc<FaultPlan>,
}

impl Blob for FaultyBlob {
    fn bytes(&self) -> u64 {
        self.blob.bytes()
    }

    fn read_at(&self, offset: u64, place: &mut [u8]) -> io::Result<()> {
        self.plan.call(|| self.blob.read_at(offset, place))
    }
}
