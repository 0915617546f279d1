//! Different weights for different workers.

use std::time::Duration;

use weightsync_core::WorkerId;

use super::Sender;
use super::publishing::base;
use crate::error::{Error, Result};
use crate::extract::WeightExtractor;
use crate::options::SendOptions;
use crate::pending::InFlight;
use crate::publish;
use crate::report::Report;
use crate::send_source::{Members, resolve};
use crate::transport::Targets;

impl Sender {
    /// Sends different weights of one model to different workers, and changes
    /// only them. Workers that are given the same source share one version and
    /// one pass over it; every source becomes a version with a number of its
    /// own. The report has a line for each worker.
    ///
    /// A worker that joins later under another number runs what was sent to all
    /// last.
    ///
    /// # Errors
    ///
    /// As [`send_with`](Self::send_with), [`Error::SameWorkerTwice`],
    /// [`Error::SameVersionTwice`] for a number with several sources, and
    /// [`Error::EmptySet`] if no worker is named. These, and sources that do not
    /// fit, are found before the first source is published. A source that fails
    /// while it is read, and missing room, can come later: what was published
    /// before such an error stays.
    pub fn send_each<'a, W: Into<WorkerId>>(
        &mut self,
        weights: impl IntoIterator<Item = (W, &'a dyn WeightExtractor)>,
        options: &SendOptions,
    ) -> Result<Report> {
        let mut groups: Vec<(&'a dyn WeightExtractor, Vec<WorkerId>)> = Vec::new();
        for (worker, source) in weights {
            let worker = worker.into();
            // The second source would replace the first at that worker.
            if groups.iter().any(|(_, known)| known.contains(&worker)) {
                return Err(Error::SameWorkerTwice { worker });
            }
            // One source is one pass and one version, for however many workers.
            match groups
                .iter_mut()
                .find(|(one, _)| std::ptr::addr_eq(*one, source))
            {
                Some((_, workers)) => workers.push(worker),
                None => groups.push((source, vec![worker])),
            }
        }
        if groups.is_empty() {
            return Err(Error::EmptySet);
        }
        let (since, mut until) = self.times(options);
        // Everything that can be known is checked first: a publication cannot be taken back.
        self.check_each(&groups, options)?;
        let mut all: Option<InFlight> = None;
        for (source, workers) in groups {
            let options = options.clone().workers(workers);
            let one = self.publish(Members::One(source), &options, since, until)?;
            // Later by the time in which this source was written.
            until = one.deadline;
            match &mut all {
                None => all = Some(one),
                Some(all) => {
                    all.outstanding.extend(one.outstanding);
                    all.versions.extend(one.versions);
                    all.bytes += one.bytes;
                    // Counted from the start of the send, so the last one covers all passes.
                    all.copied = one.copied;
                    all.deadline = one.deadline;
                    if let (Some(all), Some(one)) = (&mut all.partial, one.partial) {
                        // Each tensor is named once, however many groups carry it.
                        let new: Vec<_> =
                            one.into_iter().filter(|one| !all.contains(one)).collect();
                        all.extend(new);
                    }
                }
            }
        }
        let all = all.unwrap_or_else(|| unreachable!("there is a group"));
        all.finish(options.wait, until)
    }

    /// Finds whatever can be wrong with sources for several workers before
    /// anything is published.
    fn check_each(
        &self,
        groups: &[(&dyn WeightExtractor, Vec<WorkerId>)],
        options: &SendOptions,
    ) -> Result<()> {
        self.need("a send to some workers", |can| can.subsets)?;
        // Each source is published as a version of its own. The second of one number would be
        // refused, after the first has gone out.
        if let Some(version) = options.version
            && groups.len() > 1
        {
            return Err(Error::SameVersionTwice {
                version,
                sources: groups.len(),
            });
        }
        for (source, workers) in groups {
            let members = Members::One(*source);
            let models = &self.setup.models;
            // As the publication does it, but nothing is read.
            for (index, source) in resolve(members, options.model.as_deref(), models)? {
                let prepared = &self.setup.models[index].prepared;
                publish::check(prepared, source, options.partial)?;
                if options.partial {
                    let targets = Targets::Workers(workers.clone());
                    base(&self.setup, &*self.transport, index, &targets)?;
                }
            }
        }
        Ok(())
    }

    /// Sends to the workers of each device the weights that are meant for it:
    /// one pass and one version for each distinct device. Without a worker
    /// nothing is sent, and the report is empty.
    ///
    /// A worker that joins later runs what was sent to all last, whatever its
    /// device.
    ///
    /// # Errors
    ///
    /// As [`send_each`](Self::send_each).
    pub fn send_by_device<'a>(
        &mut self,
        mut weights: impl FnMut(&str) -> &'a dyn WeightExtractor,
        options: &SendOptions,
    ) -> Result<Report> {
        self.need("a send to some workers", |can| can.subsets)?;
        let workers = self.workers();
        if workers.is_empty() {
            return Ok(Report {
                versions: Vec::new(),
                bytes: 0,
                partial: None,
                changes: None,
                copied: Duration::ZERO,
                took: Duration::ZERO,
                level: options.wait,
                workers: Vec::new(),
            });
        }
        // The caller is asked once for each device.
        let mut devices: Vec<(&str, &'a dyn WeightExtractor)> = Vec::new();
        let each = workers.iter().map(|status| {
            let device = status.device.as_str();
            let known = devices.iter().find(|(one, _)| *one == device);
            let source = known.map(|(_, source)| *source).unwrap_or_else(|| {
                let source = weights(device);
                devices.push((device, source));
                source
            });
            (status.worker.0, source)
        });
        let each: Vec<_> = each.collect();
        self.send_each(each, options)
    }
}
