//! How a stage begins: its hosts, its versions, and whether its links are encrypted.

use weightsync_link::tls::{CertificateRequest, make};

use super::*;

impl Stage {
    /// This many hosts; the trainer is on the first, and its versions have this many bytes.
    pub(crate) fn new(hosts: usize, bytes: usize) -> Self {
        Self::with(hosts, bytes, false, 1, Content::Words { every: 1 })
    }

    /// The same, with other versions.
    pub(crate) fn of(hosts: usize, bytes: usize, content: Content) -> Self {
        Self::with(hosts, bytes, false, 1, content)
    }

    /// The same, with workers that ask for each version.
    pub(crate) fn pulled(hosts: usize, bytes: usize) -> Self {
        Self::with(hosts, bytes, true, 1, Content::Words { every: 1 })
    }

    /// The same, with so many hosts that fetch from each.
    pub(crate) fn tree(hosts: usize, bytes: usize, arity: usize) -> Self {
        Self::with(hosts, bytes, false, arity, Content::Words { every: 1 })
    }

    /// The same, with links that are encrypted.
    pub(crate) fn encrypted(hosts: usize, bytes: usize) -> Self {
        let words = Content::Words { every: 1 };
        Self::made(hosts, bytes, (false, 1), words, (true, false))
    }

    /// The same, with hosts that do not trust relays.
    pub(crate) fn verified(hosts: usize, bytes: usize, content: Content) -> Self {
        Self::made(hosts, bytes, (false, 1), content, (false, true))
    }

    /// The same, with links that are encrypted.
    pub(crate) fn verified_and_encrypted(hosts: usize, bytes: usize, content: Content) -> Self {
        Self::made(hosts, bytes, (false, 1), content, (true, true))
    }

    fn with(hosts: usize, bytes: usize, pull: bool, arity: usize, content: Content) -> Self {
        Self::made(hosts, bytes, (pull, arity), content, (false, false))
    }

    fn made(
        hosts: usize,
        bytes: usize,
        (pull, arity): (bool, usize),
        content: Content,
        (encrypted, verify): (bool, bool),
    ) -> Self {
        let hosts = Hosts::new(hosts).unwrap_or_else(|error| panic!("{error}"));
        let (report, inbox) = mpsc::channel();
        let mut stage = Self {
            hosts,
            run_dir: tempfile::tempdir().expect("a temporary directory"),
            tls: None,
            bytes,
            pull,
            arity,
            verify,
            content,
            processes: BTreeMap::new(),
            lives: 0,
            inbox,
            report,
            info: None,
            word: 0,
            words: BTreeMap::new(),
            epoch: 0,
            reports: BTreeMap::new(),
            sending: 0,
            statuses: 0,
            status: None,
            scrubbed: None,
            begun: Instant::now(),
            logs: Vec::new(),
            transcript: Vec::new(),
        };
        if encrypted {
            stage.make_certificates();
        }
        stage.start_trainer();
        stage
    }

    /// Makes certificates of a new authority, which are used from now on.
    pub(crate) fn make_certificates(&mut self) {
        let out = self.run_dir.path().join("pki");
        let _ = std::fs::remove_dir_all(&out);
        let request = CertificateRequest {
            out: out.clone(),
            hosts: vec![self.hosts.address(TRAINERS).to_string()],
            days: 2,
        };
        make(&request).expect("certificates");
        self.tls = Some(out);
    }

    /// Starts a relay that has the certificate of a worker.
    pub(crate) fn start_posing_relay(&mut self, host: usize) {
        let posing = self.run_dir.path().join("posing");
        let pki = self.tls.replace(posing.clone()).expect("certificates");
        std::fs::create_dir(&posing).expect("a folder");
        std::fs::copy(pki.join("worker.pem"), posing.join("relay.pem")).expect("a copy");
        self.start_relay(host);
        self.tls = Some(pki);
    }
}
