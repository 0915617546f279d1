//! Several senders side by side: models with schemes and frequencies of their
//! own.

use weightsync_core::ModelId;

use crate::error::{Error, Result};
use crate::options::SendOptions;
use crate::report::Report;
use crate::send_source::{Members, SendSource};
use crate::sender::Sender;

/// The senders of one trainer, found by the models they feed.
///
/// Models that are to flip together belong to one [`Sender`]
/// ([`SenderSetup::add_model`](crate::SenderSetup::add_model)); models with a scheme of their
/// own have a sender of their own. A set that spans two senders is refused before
/// anything is sent: no step could flip it whole.
#[derive(Debug, Default)]
pub struct Senders {
    senders: Vec<Sender>,
}

impl Senders {
    /// No senders.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a sender.
    ///
    /// # Errors
    ///
    /// [`Error::SameModelTwice`] if one of its models is fed already; the sender
    /// is shut down then.
    pub fn push(&mut self, sender: Sender) -> Result<()> {
        if let Some(model) = sender.models().find(|id| self.place(id.as_str()).is_ok()) {
            return Err(Error::SameModelTwice {
                model: model.clone(),
            });
        }
        self.senders.push(sender);
        Ok(())
    }

    /// The sender that feeds a model.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchModel`].
    pub fn of(&mut self, model: &str) -> Result<&mut Sender> {
        let place = self.place(model)?;
        Ok(&mut self.senders[place])
    }

    /// Every sender.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Sender> {
        self.senders.iter_mut()
    }

    /// Sends to whichever sender feeds the models; see
    /// [`Sender::send_with`].
    ///
    /// # Errors
    ///
    /// [`Error::MixedSenders`] for a set that spans several,
    /// [`Error::SeveralModels`] if it does not say which model it is about, and
    /// those of [`Sender::send_with`].
    pub fn send_with(
        &mut self,
        weights: &(impl SendSource + ?Sized),
        options: &SendOptions,
    ) -> Result<Report> {
        let named: Vec<&str> = match (weights.members(), &options.model) {
            (Members::Set(members), _) => members.iter().map(|(id, _)| *id).collect(),
            (_, Some(model)) => vec![model.as_str()],
            (Members::One(_) | Members::Registered, None) => Vec::new(),
        };
        let mut places = named.iter().map(|id| self.place(id));
        let place = match places.next() {
            Some(first) => first?,
            None if self.senders.len() == 1 => 0,
            None => {
                let known = self.ids().cloned().collect();
                return Err(Error::SeveralModels { known });
            }
        };
        for other in places {
            if other? != place {
                return Err(Error::MixedSenders {
                    models: named.iter().map(|id| (*id).to_owned()).collect(),
                });
            }
        }
        self.senders[place].send_with(weights, options)
    }

    fn place(&self, model: &str) -> Result<usize> {
        let mut senders = self.senders.iter();
        let found = senders.position(|sender| sender.models().any(|id| id.as_str() == model));
        found.ok_or_else(|| Error::no_such_model(model, self.ids()))
    }

    fn ids(&self) -> impl Iterator<Item = &ModelId> {
        self.senders.iter().flat_map(Sender::models)
    }
}
