//! Room for the trainer to write into itself.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use weightsync_core::{Layout, Version};

use super::publishing::stage;
use super::{Sender, need};
use crate::error::{Error, Result};
use crate::options::SendOptions;
use crate::pending::InFlight;
use crate::publish::Prepared;
use crate::report::Report;
use crate::scheme::AnyScheme;
use crate::send_history::SendHistory;
use crate::transport::{Staging, Targets, deadline};

impl Sender {
    /// Lends room to write the next version into: the model's own extraction is
    /// then the only pass over memory.
    ///
    /// # Errors
    ///
    /// As [`send`](Self::send), [`Error::Unsupported`], and [`Error::SeveralModels`].
    pub fn loan(&mut self) -> Result<Loan<'_>> {
        self.setup.only_model()?;
        self.loan_at(0)
    }

    /// As [`loan`](Self::loan), for one of several models.
    ///
    /// # Errors
    ///
    /// As [`loan`](Self::loan), and [`Error::NoSuchModel`].
    pub fn loan_of(&mut self, model: &str) -> Result<Loan<'_>> {
        let index = self.index_of(model)?;
        self.loan_at(index)
    }

    fn loan_at(&mut self, model: usize) -> Result<Loan<'_>> {
        self.need("lending slots", |can| can.loan)?;
        let since = Instant::now();
        let timeout = self.setup.send_timeout;
        let staging = stage(&mut *self.transport, &[model], deadline(timeout))?;
        Ok(Loan {
            staging,
            model,
            prepared: &self.setup.models[model].prepared,
            scheme: &self.setup.scheme,
            timeout,
            since,
            history: self.history.clone(),
        })
    }
}

/// Room lent to the trainer's own extraction; see [`Sender::loan`].
///
/// Dropped without [`publish`](Self::publish), nothing has happened.
#[derive(Debug)]
pub struct Loan<'a> {
    staging: Box<dyn Staging + 'a>,
    model: usize,
    prepared: &'a Prepared,
    scheme: &'a AnyScheme,
    timeout: Option<Duration>,
    since: Instant,
    history: Arc<SendHistory>,
}

impl Loan<'_> {
    /// The tensors to write.
    pub fn layout(&self) -> &Layout {
        &self.prepared.layout
    }

    /// One tensor's place: contiguous, row-major, little-endian. It holds bytes
    /// of some older version at first: write all of it.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchTensor`].
    pub fn tensor_mut(&mut self, name: &str) -> Result<&mut [u8]> {
        let layout = &self.prepared.layout;
        let index = layout
            .index_of(name)
            .ok_or_else(|| Error::no_such_tensor(name, layout))?;
        Ok(self.staging.tensor_mut(self.model, index))
    }

    /// Every tensor's place in layout order, to be written in any order and
    /// from any number of threads.
    pub fn tensors_mut(&mut self) -> Vec<&mut [u8]> {
        self.staging.tensors_mut(self.model)
    }

    /// Makes what was written the next version and waits until every worker has
    /// loaded it, or has a line in the report that says why not.
    ///
    /// # Errors
    ///
    /// Those of the memory. As after a [`send`](Sender::send), the version is
    /// live all the same if it was the wait for the workers that failed.
    pub fn publish(self) -> Result<Report> {
        self.publish_with(&SendOptions::new())
    }

    /// As [`publish`](Self::publish), with options. The timeout counts from the loan.
    ///
    /// # Errors
    ///
    /// As [`publish`](Self::publish), and, before anything is published,
    /// [`Error::Unsupported`] for what the scheme cannot do,
    /// [`Error::OtherModel`] if the options name another model, and
    /// [`Error::WholeLoan`] if they say that it is a part.
    pub fn publish_with(mut self, options: &SendOptions) -> Result<Report> {
        let timeout = options.timeout.unwrap_or(self.timeout);
        // The trainer's time with the loan counts: a loan keeps a slot from every other send.
        let until = timeout.and_then(|timeout| self.since.checked_add(timeout));
        self.check(options)?;
        if let Some(version) = options.version {
            self.staging.number(self.model, version)?;
        }
        if options.wait_late {
            self.staging.wait_for_late();
        }
        let outstanding = self.staging.publish(&options.targets)?;
        let version = outstanding
            .versions()
            .first()
            .map_or(Version::NONE, |(_, version)| *version);
        let in_flight = InFlight {
            versions: vec![(self.prepared.id.clone(), version)],
            outstanding: vec![outstanding],
            bytes: self.prepared.layout.payload_bytes(),
            // A loan is written in full, so nothing of an older version is left in it.
            partial: None,
            since: self.since,
            copied: self.since.elapsed(),
            deadline: until,
            settled: Mutex::new(Vec::new()),
            history: self.history,
        };
        in_flight.noted().finish(options.wait, until)
    }

    fn check(&self, options: &SendOptions) -> Result<()> {
        if options.targets != Targets::All {
            need(self.scheme, "a send to some workers", |can| can.subsets)?;
        }
        let id = &self.prepared.id;
        if let Some(named) = &options.model
            && named != id.as_str()
        {
            return Err(Error::OtherModel {
                named: named.clone(),
                got: vec![id.as_str().into()],
            });
        }
        match options.partial {
            true => Err(Error::WholeLoan { model: id.clone() }),
            false => Ok(()),
        }
    }
}
