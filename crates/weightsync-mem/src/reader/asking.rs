//! Questions for versions, and their answers.

use std::sync::atomic::Ordering;

use weightsync_core::Version;

use super::{SegmentReader, Taken};
use crate::error::{Error, bad, unexpected};
use crate::pins::PinnedSet;
use crate::sync::load_acquire;
use crate::wait::Deadline;
use crate::wire::{Delivery, ReaderMessage, Want};

impl SegmentReader {
    /// Asks the sender for a set, which [`answer`](Self::answer) returns. It comes even if this
    /// reader had it before, and whatever is published meanwhile. A reader has one question: a new
    /// one replaces an unanswered one.
    ///
    /// [`Want::AtLeast`] a version that does not exist yet is answered once it exists, or never.
    /// [`Want::Exactly`] is answered at once.
    ///
    /// # Errors
    ///
    /// [`Error::BadOption`] if this reader takes every version, or asks about a model that it did
    /// not want, or for exactly version 0; and those of the operating system.
    pub fn ask(&mut self, want: Want) -> Result<(), Error> {
        self.book.header.usable()?;
        if let Delivery::Every { .. } = self.delivery {
            let got = format!("{:?}", self.delivery);
            return Err(bad(
                "the delivery of a reader that asks",
                "newest or asked",
                got,
            ));
        }
        if let Want::AtLeast { model, .. } | Want::Exactly { model, .. } = want
            && !self.has(model)
        {
            return Err(bad(
                "the model of a question",
                "a model of this reader",
                model,
            ));
        }
        // The sender would take a question about version 0 for a breach of the protocol.
        let want = match want {
            Want::AtLeast {
                version: Version::NONE,
                ..
            } => Want::Newest,
            Want::Exactly {
                version: Version::NONE,
                ..
            } => {
                return Err(bad("the version of a question", "a version from 1 on", "0"));
            }
            want => want,
        };
        // The watch has ended, so an answer over the socket would not be seen.
        if let Some(fault) = self.watch.fault() {
            return Err(fault);
        }
        // The sender may use the place of the earlier answer from here on.
        self.close_question()?;
        self.question += 1;
        let question = self.question;
        let packet = ReaderMessage::Ask { question, want }.encode();
        // The question was not sent, so no answer is awaited.
        if !self.book.socket()?.send(&packet, &[])? {
            return Err(self.unheard().unwrap_or_else(|| self.why_over()));
        }
        self.asks = true;
        Ok(())
    }

    /// Waits for the answer to the last question. `None` if the deadline comes first; the caller
    /// may wait again, or [withdraw](Self::withdraw) the question.
    ///
    /// The answer does not affect what [`next`](Self::next) returns, except that a set is not
    /// returned twice if it is also the newest.
    ///
    /// # Errors
    ///
    /// [`Error::NoSuchVersion`], [`Error::BadOption`] if there is no open question, and as
    /// [`next`](Self::next).
    pub fn answer(&mut self, deadline: Deadline) -> Result<Option<Taken>, Error> {
        self.book.header.usable()?;
        if !self.asks {
            return Err(bad("an answer", "a question before it", "none"));
        }
        let book = self.book.clone();
        let (answer, question) = (&book.mailbox()?.answer.0, self.question);
        let found = self.wait_for(question, deadline, || {
            // An answer comes by the mailbox. That there is no such version comes over the socket.
            let placed = load_acquire(&answer.question) == question;
            (placed || self.watch.has_answer(question)).then_some(())
        })?;
        if found.is_none() {
            return Ok(None);
        }
        // Each question has one outcome, so at most one of the two is there.
        let hold = match self.watch.take_answer(question) {
            Some(answer) => Err(answer),
            None => self.take_answer(),
        };
        let taken = match hold {
            Ok(Some(hold)) => self.hand_out(hold, deadline),
            Ok(None) => Err(unexpected("an answer", "an empty mailbox".into())),
            Err(error) => Err(error),
        };
        // Slots of the answer may still be on their way. The question then stays open, and the next
        // call takes the answer.
        if !matches!(taken, Ok(None) | Err(Error::Interrupted)) {
            self.close_question()?;
        }
        taken
    }

    /// Withdraws an unanswered question. An answer that is already on its way is ignored.
    ///
    /// # Errors
    ///
    /// Only those of the operating system; a sender that is gone need not know.
    pub fn withdraw(&mut self) -> Result<(), Error> {
        self.book.header.usable()?;
        if !self.asks {
            return Ok(());
        }
        self.close_question()?;
        let packet = ReaderMessage::Withdraw.encode();
        self.book.socket()?.send(&packet, &[]).map(|_| ())
    }

    /// Pins the answer; if it is also the reader's newest set, as that.
    fn take_answer(&self) -> Result<Option<PinnedSet>, Error> {
        let Some(mut hold) = self.book.pin_answer()? else {
            return Ok(None);
        };
        if self.delivery == Delivery::Newest {
            // `next` reports any problem of the live word.
            let live = self.book.look_live().ok().flatten();
            match live.filter(|live| live.is_of_the_set(&hold)) {
                Some(live) => hold = live,
                // The answer is another set, such as an older version. As 0 it says nothing about
                // publications.
                None => {
                    hold.sequence = 0;
                    return Ok(Some(hold));
                }
            }
        }
        Ok(Some(hold))
    }

    /// Ends the last question: an answer that still comes is no longer needed.
    fn close_question(&mut self) -> Result<(), Error> {
        self.asks = false;
        let through = &self.book.control()?.through;
        // The word before the wake-up: a sender that looks then may clear the answer.
        through.store(self.question, Ordering::Release);
        self.book.wake_sender();
        self.book.notify_room(self.book.mailbox()?);
        Ok(())
    }
}
