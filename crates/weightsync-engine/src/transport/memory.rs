//! The transport of the local schemes: slots and mailboxes in shared memory.

mod attached;
mod segment;

use std::path::Path;
use std::time::{Duration, Instant};

use weightsync_core::{ModelId, SenderStatus};
use weightsync_mem::{
    AttachOptions, Deadline, Delivery, Listener, Resume, SegmentReader, check_sharing,
};

pub use self::attached::{Attached, Handoff};
pub use self::segment::Segment;
use crate::error::{Error, Result};
use crate::run_dir;
use crate::transport::{
    Endpoint, Joining, Opening, ReceiverTransport, SenderTransport, waits_for_a_restart,
};

/// What the local schemes have in common.
pub(crate) struct LocalMemory;

impl LocalMemory {
    pub(crate) fn place(models: &[ModelId], run_dir: Option<&Path>) -> Result<Endpoint> {
        Endpoint::fresh(models, run_dir)
    }

    pub(crate) fn open(opening: &Opening<'_>, max_queue: u8) -> Result<Box<dyn SenderTransport>> {
        let at = opening.at;
        // With a run directory each sender has a new address: a child that a dead trainer had
        // forked may still listen at the old one.
        let listener = match at.lookup() {
            None => Listener::at(at.address())?,
            Some(file) => {
                let ids = opening.models.iter().map(|model| model.id.clone());
                run_dir::listen(file, &ids.collect::<Vec<_>>())?
            }
        };
        Ok(Box::new(Segment::open(opening, listener, max_queue)?))
    }

    pub(crate) fn ask_status(at: &Endpoint, timeout: Duration) -> Result<SenderStatus> {
        let since = Instant::now();
        let address = match at.lookup() {
            None => Some(at.address().to_owned()),
            Some(file) => run_dir::look_up(file)?,
        };
        let found = match &address {
            Some(address) => run_dir::status_at(address, timeout)?,
            None => None,
        };
        found.ok_or_else(|| Error::NoSender {
            address: address.unwrap_or_else(|| at.address().into()),
            waited: since.elapsed(),
            last: None,
        })
    }

    pub(crate) fn join(
        at: &Endpoint,
        joining: &Joining,
        (delivery, own_copy): (Delivery, bool),
        deadline: Deadline,
    ) -> Result<Box<dyn ReceiverTransport>> {
        // Before the wait for a sender, which could not end well on other systems.
        check_sharing()?;
        let options = AttachOptions {
            address: match at.lookup() {
                None => at.address().into(),
                Some(file) => format!("the address in {}", file.display()),
            },
            secret: *at.secret(),
            worker: joining.worker,
            seen: joining.seen,
            models: Some(joining.wanted.clone()),
            delivery,
            device: joining.device.clone(),
            wait: joining.wait,
            instance: 0,
            resume: Resume::default(),
        };
        // Without a run directory the address never changes.
        let reader = match at.lookup() {
            None => SegmentReader::attach(&options, deadline)?,
            Some(file) => {
                let mut attempts = 0;
                // The file is read for each attempt: a trainer that starts meanwhile writes its
                // address there.
                let attached = SegmentReader::attach_by(&options, deadline, || {
                    attempts += 1;
                    // The first attempt has found nobody.
                    if attempts == 2
                        && let Some(ended) = run_dir::ended(file)?
                    {
                        waits_for_a_restart(&options.address, &ended);
                    }
                    run_dir::look_up(file)
                });
                // The error says what is known: that a sender was there, and has ended.
                attached.map_err(|error| match error {
                    Error::NoSender {
                        address, waited, ..
                    } => Error::NoSender {
                        address,
                        waited,
                        last: run_dir::ended(file).ok().flatten(),
                    },
                    error => error,
                })?
            }
        };
        Ok(Box::new(Attached::new(reader, joining, own_copy)?))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use weightsync_core::{Dtype, Epoch, Layout, Run, Version, WorkerId};
    use weightsync_mem::WaitStyle;

    use super::*;
    use crate::attributes::Attributes;
    use crate::setup::DigestPolicy;
    use crate::transport::{ModelSpec, SendHistory, Targets, TransferOptions};

    fn soon() -> Deadline {
        Some(Instant::now() + Duration::from_secs(20))
    }

    #[test]
    fn applied_versions_are_reported_per_model() {
        let models = ["actor", "critic"].map(|id| ModelSpec {
            id: ModelId::new(id).unwrap(),
            layout: Layout::new([(id.to_owned(), Dtype::U8, vec![9])]).unwrap(),
            attributes: Attributes::default(),
        });
        let ids = models.clone().map(|model| model.id);
        let at = LocalMemory::place(&ids, None).unwrap();
        let opening = Opening {
            at: &at,
            run: Run {
                epoch: Epoch(1),
                id: [1; 16],
            },
            models: &models,
            options: TransferOptions {
                slots: 2,
                max_slots: 2,
                history: 0,
                wait: WaitStyle::default(),
                digest: DigestPolicy::OnRequest,
            },
            history: &Arc::new(SendHistory::new("shared-mem", at.address(), &models)),
        };
        let mut sender = LocalMemory::open(&opening, 0).unwrap();
        // In another order than the sender has them.
        let joining = Joining {
            worker: WorkerId(0),
            seen: Epoch(0),
            models: ids.to_vec(),
            wanted: vec![1, 0],
            device: String::new(),
            wait: WaitStyle::default(),
            single_attempt: false,
        };
        let mut worker =
            LocalMemory::join(&at, &joining, (Delivery::Newest, false), soon()).unwrap();
        for (sent, applied) in [(0, [1, 0]), (1, [1, 1]), (1, [1, 2])] {
            let staging = sender.stage(&[sent], soon()).unwrap();
            staging.publish(&Targets::All).unwrap();
            let set = worker.next(soon()).unwrap().unwrap();
            worker.applied(&set).unwrap();
            assert_eq!(sender.workers()[0].versions, applied.map(Version));
        }
    }
}
