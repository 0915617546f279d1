//! Questions for versions, and their answers.

use std::sync::atomic::Ordering;

use weightsync_core::Version;

use super::{Reader, Taken};
use crate::error::{Error, unexpected};
use crate::pins::Hold;
use crate::sync::load_acquire;
use crate::wait::Deadline;
use crate::wire::{Delivery, FromReader, Want};

impl Reader {
    /// Asks the sender for a version; it comes by [`answer`](Self::answer), also
    /// if this reader has had it before, and whatever is published meanwhile. One
    /// question at a time: a new one takes the place of one that is not answered
    /// yet.
    ///
    /// [`Want::AtLeast`] a version that there is not yet is answered when there
    /// is, or not at all; [`Want::Exactly`] is answered at once.
    ///
    /// # Errors
    ///
    /// [`Error::BadOption`] if this reader takes every version, or asks about a
    /// model it did not want, or for exactly `Version::NONE`; at least that is
    /// [`Want::Newest`]. [`Error::SenderDied`] or [`Error::SenderClosed`].
    pub fn ask(&mut self, want: Want) -> Result<(), Error> {
        self.book.header.usable()?;
        let bad = |option, expected, got: String| {
            Err(Error::BadOption {
                option,
                expected,
                got,
            })
        };
        if let Delivery::Every { .. } = self.delivery {
            let got = format!("{:?}", self.delivery);
            return bad("the delivery of a reader that asks", "newest or asked", got);
        }
        if let Want::AtLeast { model, .. } | Want::Exactly { model, .. } = want
            && !self.has(model)
        {
            return bad(
                "the model asked for",
                "one of this reader's",
                model.to_string(),
            );
        }
        // The sender takes a question about version 0 for a breach of the protocol.
        let want = match want {
            Want::AtLeast {
                version: Version::NONE,
                ..
            } => Want::Newest,
            Want::Exactly {
                version: Version::NONE,
                ..
            } => {
                return bad(
                    "the version asked for",
                    "one that can be published, from 1 on",
                    "0".into(),
                );
            }
            want => want,
        };
        if let Some(fault) = self.watch.fault() {
            return Err(fault);
        }
        self.close_question()?;
        self.question += 1;
        let question = self.question;
        let packet = FromReader::Ask { question, want }.encode();
        if !self.book.socket()?.send(&packet, &[])? {
            return Err(self.unheard().unwrap_or_else(|| self.why_over()));
        }
        self.asks = true;
        Ok(())
    }

    /// Waits for the answer to the last question; `None` if the deadline comes
    /// first, and then it can be waited for again, or [withdrawn](Self::withdraw).
    ///
    /// It takes nothing from what [`next`](Self::next) hands out, unless it is
    /// the newest: that is not handed out twice.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchVersion`], [`Error::BadOption`] if there is no question
    /// without an answer, and as [`next`](Self::next).
    pub fn answer(&mut self, deadline: Deadline) -> Result<Option<Taken>, Error> {
        self.book.header.usable()?;
        if !self.asks {
            return Err(Error::BadOption {
                option: "an answer",
                expected: "a question before it",
                got: "none".into(),
            });
        }
        let book = self.book.clone();
        let (answer, question) = (&book.mailbox()?.answer.0, self.question);
        let found = self.wait_for(question, deadline, || {
            let placed = load_acquire(&answer.question) == question;
            (placed || self.watch.has_answer(question)).then_some(())
        })?;
        if found.is_none() {
            return Ok(None);
        }
        let hold = match self.watch.take_answer(question) {
            Some(answer) => Err(answer),
            None => self.take_answer(),
        };
        let taken = match hold {
            Ok(Some(hold)) => self.hand_out(hold, deadline),
            Ok(None) => Err(unexpected("an answer", "its place was empty".into())),
            Err(error) => Err(error),
        };
        if !matches!(taken, Ok(None) | Err(Error::Interrupted)) {
            self.close_question()?;
        }
        taken
    }

    /// Takes back a question that has no answer yet. If the answer is on its way,
    /// it is not looked at.
    ///
    /// # Errors
    ///
    /// Only of the operating system; a sender that is gone needs no telling.
    pub fn withdraw(&mut self) -> Result<(), Error> {
        self.book.header.usable()?;
        if !self.asks {
            return Ok(());
        }
        self.close_question()?;
        let packet = FromReader::Withdraw.encode();
        self.book.socket()?.send(&packet, &[]).map(|_| ())
    }

    /// Pins the answer; as what is meant for this reader, where it is that.
    fn take_answer(&self) -> Result<Option<Hold>, Error> {
        let Some(mut hold) = self.book.pin_answer()? else {
            return Ok(None);
        };
        if self.delivery == Delivery::Newest {
            // Whatever is wrong with what it is told is for `next` to say.
            let live = self.book.look_live().ok().flatten();
            match live.filter(|live| live.is_of_the_set(&hold)) {
                Some(live) => hold = live,
                None => {
                    hold.sequence = 0;
                    return Ok(Some(hold));
                }
            }
        }
        Ok(Some(hold))
    }

    /// The answer to the last question, if it comes, is needed no more.
    fn close_question(&mut self) -> Result<(), Error> {
        self.asks = false;
        let through = &self.book.control()?.through;
        through.store(self.question, Ordering::Release);
        self.book.wake_sender();
        self.book.notify_room(self.book.mailbox()?);
        Ok(())
    }
}
