//! Workers' questions that have no answer yet. A broken link loses the questions that it
//! carried, so the agent asks them again on the next link.

use weightsync_mem::WorkerInstance;

use super::Driver;
use crate::relay::plan::Input;
use crate::wire::message::{ToRoot, Want};

/// A worker's question.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question {
    number: u64,
    want: Want,
}

impl Driver {
    /// A worker asks; the question replaces its earlier one.
    pub(super) fn asks(&mut self, who: WorkerInstance, number: u64, want: Want) {
        let asked = Some(Question { number, want });
        if let Some(open) = self.open_question(who) {
            *open = asked;
        }
        self.ask(who, Question { number, want });
    }

    /// A worker withdraws its question; nothing is fetched for it any more.
    pub(super) fn withdraws(&mut self, who: WorkerInstance) -> Option<Input> {
        let open = self.open_question(who).and_then(Option::take);
        self.send(&ToRoot::Withdraw {
            worker: who.worker,
            instance: who.instance,
        });
        let question = open?.number;
        Some(Input::Withdrawn { who, question })
    }

    /// Whether a worker waits for the answer to this question.
    pub(super) fn waits_for(&mut self, who: WorkerInstance, number: u64) -> bool {
        let open = self.open_question(who);
        open.is_some_and(|open| open.is_some_and(|open| open.number == number))
    }

    /// A worker has been answered, up to this question.
    pub(super) fn is_answered(&mut self, who: WorkerInstance, through: u64) {
        if let Some(open) = self.open_question(who) {
            open.take_if(|open| open.number <= through);
        }
    }

    /// The sender knows a worker again, but has none of its questions.
    pub(super) fn ask_again(&mut self, who: WorkerInstance) {
        if let Some(open) = self.open_question(who).and_then(|open| *open) {
            self.ask(who, open);
        }
    }

    fn ask(&mut self, who: WorkerInstance, Question { number, want }: Question) {
        self.send(&ToRoot::Ask {
            worker: who.worker,
            instance: who.instance,
            question: number,
            want,
        });
    }

    fn open_question(&mut self, who: WorkerInstance) -> Option<&mut Option<Question>> {
        let worker = self.workers.get_mut(&who.worker);
        let worker = worker.filter(|one| one.who == who)?;
        Some(&mut worker.asks)
    }
}
