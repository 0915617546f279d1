//! Who is with the models, and what waits for the moment when nobody is.
//!
//! The decisions are on plain values; only [`Seat`]s wait.

use std::sync::{Arc, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use crate::background::desk::Desk;
use crate::error::{Error, Result};
use crate::set::SetSnapshot;

/// How long a thread lets a waiting version go first. Not longer: a thread that holds
/// a guard may be waiting for this very thread.
const COURTESY: Duration = Duration::from_millis(10);

/// The room with the models.
#[derive(Debug, Default)]
pub(super) struct Room {
    staged: Option<SetSnapshot>,
    seats: Seats,
    /// Threads that wait to come in.
    queue: usize,
}

/// Who is in it.
#[derive(Debug, Default)]
struct Seats {
    /// Threads that only look, with how many guards each.
    shared: Vec<(ThreadId, usize)>,
    /// The thread that changes something.
    alone: Option<ThreadId>,
    /// A version waits until everybody has left.
    wanted: bool,
}

/// What a thread comes in for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Shared,
    Alone,
}

/// Whether it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Admission {
    Now,
    /// It may, but a version has been waiting for longer.
    AfterYou,
    /// Not before somebody leaves.
    Later,
    /// Never: it would wait for itself.
    Never,
}

impl Room {
    pub(super) fn holds(&self, me: ThreadId) -> bool {
        self.seats.holds(me)
    }

    pub(super) fn has_staged(&self) -> bool {
        self.staged.is_some()
    }

    /// Puts a set there for the next safe point; returns the one it replaces.
    pub(super) fn stage(&mut self, set: SetSnapshot) -> Option<SetSnapshot> {
        self.staged.replace(set)
    }

    /// Takes the set and has the room alone, if nobody is in it. Otherwise it
    /// asks, if it is to, that the last thread to leave wakes the receiving thread.
    pub(super) fn take_staged(&mut self, me: ThreadId, ask: bool) -> Option<SetSnapshot> {
        if !self.seats.is_empty() {
            self.seats.wanted |= ask;
            return None;
        }
        self.seats.wanted = false;
        self.seats.enter(Access::Alone, me);
        self.staged.take()
    }

    /// Whether the room is empty; otherwise the last thread to leave tells.
    pub(super) fn asks_for_staged(&mut self) -> bool {
        self.seats.wanted = !self.seats.is_empty();
        !self.seats.wanted
    }

    pub(super) fn asks_no_more(&mut self) {
        self.seats.wanted = false;
    }

    pub(super) fn leave(&mut self, me: ThreadId) {
        self.seats.leave(me);
    }

    pub(super) fn into_staged(self) -> Option<SetSnapshot> {
        self.staged
    }
}

impl Seats {
    fn holds(&self, me: ThreadId) -> bool {
        self.alone == Some(me) || self.looks(me)
    }

    fn looks(&self, me: ThreadId) -> bool {
        self.shared.iter().any(|(one, _)| *one == me)
    }

    fn admits(&self, access: Access, me: ThreadId) -> Admission {
        let own = self.alone == Some(me);
        match access {
            Access::Shared if own => Admission::Never,
            Access::Alone if own || self.looks(me) => Admission::Never,
            _ if self.alone.is_some() => Admission::Later,
            Access::Alone if !self.shared.is_empty() => Admission::Later,
            // One that looks already would wait for itself.
            Access::Shared if self.looks(me) => Admission::Now,
            _ if self.wanted => Admission::AfterYou,
            _ => Admission::Now,
        }
    }

    fn enter(&mut self, access: Access, me: ThreadId) {
        match access {
            Access::Alone => self.alone = Some(me),
            Access::Shared => match self.shared.iter_mut().find(|(one, _)| *one == me) {
                Some((_, count)) => *count += 1,
                None => self.shared.push((me, 1)),
            },
        }
    }

    fn leave(&mut self, me: ThreadId) {
        if self.alone == Some(me) {
            self.alone = None;
        } else if let Some(at) = self.shared.iter().position(|(one, _)| *one == me) {
            self.shared[at].1 -= 1;
            if self.shared[at].1 == 0 {
                self.shared.swap_remove(at);
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.alone.is_none() && self.shared.is_empty()
    }
}

/// A thread's place in the room, left when dropped.
#[derive(Debug)]
pub(super) struct Seat<'a> {
    desk: &'a Desk<Room>,
    me: ThreadId,
}

impl<'a> Seat<'a> {
    /// Comes in, as soon as it may.
    ///
    /// # Errors
    ///
    /// [`Error::GuardHeld`], [`Error::Interrupted`].
    pub(super) fn take(desk: &'a Desk<Room>, access: Access, call: &'static str) -> Result<Self> {
        let me = come_in(desk, access, call)?;
        Ok(Self { desk, me })
    }
}

impl Drop for Seat<'_> {
    fn drop(&mut self) {
        go_out(self.desk, self.me);
    }
}

/// The place of a thread that only looks, for callers that cannot borrow the desk. It
/// is the thread's that took it, wherever it is dropped.
#[derive(Debug)]
pub(super) struct OwnedSeat {
    /// A caller that stops the thread at the desk does not wait for this.
    desk: Weak<Desk<Room>>,
    me: ThreadId,
}

impl OwnedSeat {
    /// Comes in, as soon as it may.
    pub(super) fn take(desk: &Arc<Desk<Room>>, call: &'static str) -> Result<Self> {
        let me = come_in(desk, Access::Shared, call)?;
        Ok(Self {
            desk: Arc::downgrade(desk),
            me,
        })
    }

    /// Comes in if it may at once, and without waiting for a lock.
    pub(super) fn try_take(desk: &Arc<Desk<Room>>, call: &'static str) -> Result<Option<Self>> {
        let me = std::thread::current().id();
        let Some(mut book) = desk.try_open() else {
            return Ok(None);
        };
        match book.board.seats.admits(Access::Shared, me) {
            Admission::Now => {}
            Admission::Never => return Err(Error::GuardHeld { call }),
            Admission::Later | Admission::AfterYou => return Ok(None),
        }
        book.board.seats.enter(Access::Shared, me);
        Ok(Some(Self {
            desk: Arc::downgrade(desk),
            me,
        }))
    }
}

impl Drop for OwnedSeat {
    fn drop(&mut self) {
        if let Some(desk) = self.desk.upgrade() {
            go_out(&desk, self.me);
        }
    }
}

/// Takes a seat for this thread.
fn come_in(desk: &Desk<Room>, access: Access, call: &'static str) -> Result<ThreadId> {
    let me = std::thread::current().id();
    let mut until = None;
    let mut book = desk.open();
    loop {
        let left = match book.board.seats.admits(access, me) {
            Admission::Now => break,
            Admission::Never => return Err(Error::GuardHeld { call }),
            Admission::Later => None,
            Admission::AfterYou => {
                let until = *until.get_or_insert_with(|| Instant::now() + COURTESY);
                match until.saturating_duration_since(Instant::now()) {
                    Duration::ZERO => break,
                    left => Some(left),
                }
            }
        };
        book.board.queue += 1;
        book = match desk.rest(book, left) {
            Ok(book) => book,
            Err(interrupted) => {
                desk.open().board.queue -= 1;
                return Err(interrupted);
            }
        };
        book.board.queue -= 1;
    }
    book.board.seats.enter(access, me);
    Ok(me)
}

/// Leaves a seat of a thread, and tells those who wait for that.
fn go_out(desk: &Desk<Room>, me: ThreadId) {
    if !desk.is_own() {
        return;
    }
    let mut book = desk.open();
    let Room { seats, queue, .. } = &mut book.board;
    seats.leave(me);
    let wanted = seats.wanted && seats.is_empty();
    let queued = *queue > 0;
    drop(book);
    if wanted {
        desk.tell(|_| ());
    } else if queued {
        desk.note(|_| ());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Every order in which three threads can come, ask and leave: nobody is
    /// with the models while one changes them, and nobody waits for itself.
    #[test]
    fn writer_of_the_models_is_alone() {
        let threads: Vec<_> = (0..3)
            .map(|_| {
                std::thread::spawn(|| std::thread::current().id())
                    .join()
                    .unwrap()
            })
            .collect();
        let mut seen = HashSet::new();
        let mut paths = vec![Vec::new()];
        while let Some(path) = paths.pop() {
            let seats = replay(&path, &threads);
            let mut state: Vec<_> = threads
                .iter()
                .map(|me| {
                    let count = seats.shared.iter().find(|(one, _)| one == me);
                    (
                        seats.alone == Some(*me),
                        count.map_or(0, |(_, count)| *count),
                    )
                })
                .collect();
            assert!(
                seats.alone.is_none() || seats.shared.is_empty(),
                "{path:?}: {seats:?}"
            );
            state.push((seats.wanted, 0));
            if !seen.insert(state) || path.len() > 6 {
                continue;
            }
            for who in 0..3 {
                for what in [Step::Look, Step::Change, Step::Ask, Step::Leave] {
                    let mut longer = path.clone();
                    longer.push((who, what));
                    paths.push(longer);
                }
            }
        }
        assert!(seen.len() > 20, "{}", seen.len());
    }

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Look,
        Change,
        Ask,
        Leave,
    }

    fn replay(path: &[(usize, Step)], threads: &[ThreadId]) -> Seats {
        let mut seats = Seats::default();
        for (who, what) in path {
            let me = threads[*who];
            let held = seats.holds(me);
            let changes = seats.alone == Some(me);
            let access = match what {
                Step::Look => Access::Shared,
                Step::Change => Access::Alone,
                Step::Ask => {
                    seats.wanted = !seats.is_empty();
                    continue;
                }
                Step::Leave => {
                    seats.leave(me);
                    continue;
                }
            };
            let admission = seats.admits(access, me);
            // It never waits for a guard of its own.
            let never = changes || held && access == Access::Alone;
            assert_eq!(admission == Admission::Never, never, "{path:?}");
            if held && !never {
                assert_eq!(admission, Admission::Now, "{path:?}");
            }
            if matches!(admission, Admission::Now | Admission::AfterYou) {
                seats.enter(access, me);
            }
        }
        seats
    }
}
