//! Which connections a listener keeps, which one it closes for another, and how many strangers that
//! fail get an answer.
//!
//! Many processes may share an address. So a fault of one of them does not keep the others out.
//!
//! The input and the output are plain values; the caller brings the time.

use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rustix::process::{Resource, getrlimit};
use weightsync_mem::raise_files;

/// How many failures of one address are answered in a [`WINDOW`].
const ANSWERS: u32 = 20;

/// How long answers count.
const WINDOW: Duration = Duration::from_secs(10);

/// How many addresses have a count of their own; all others share one.
const ADDRESSES: usize = 1024;

/// What a connection is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// It has not proved itself yet.
    Unproved,
    /// It has, and asks for nothing now.
    Idle,
    /// Something is done for it: it is not closed for another one.
    Busy,
}

/// How many connections a listener keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Those that have not proved themselves yet.
    pub unproved: usize,
    /// How many of them may be of one address.
    pub unproved_of_one: usize,
    /// All connections.
    pub all: usize,
    /// How many of all may be of one address.
    pub of_one: usize,
}

impl ConnectionLimits {
    /// Room for so many strangers, and for any number of others.
    pub const STRANGERS: Self = Self {
        unproved: 256,
        unproved_of_one: 64,
        all: usize::MAX,
        of_one: usize::MAX,
    };

    /// Room for so many connections. One address may have three quarters of it: whatever that does,
    /// others find room.
    #[must_use]
    pub fn of(all: usize) -> Self {
        Self {
            // Strangers get half at the most, so that known clients find room.
            unproved: Self::STRANGERS.unproved.min(all / 2),
            unproved_of_one: Self::STRANGERS.unproved_of_one,
            all,
            of_one: all - all / 4,
        }
    }

    /// Room for at most so many connections, as far as half of this process's descriptors go: calls
    /// and files have the other half. Where `count` connections need it, the process gets as many
    /// descriptors as it may have.
    #[must_use]
    pub fn within_descriptors(most: usize, count: usize) -> Self {
        let room = || {
            let descriptors = getrlimit(Resource::Nofile).current;
            let half = descriptors.map_or(usize::MAX, |most| (most / 2) as usize);
            Self::of(most.min(half))
        };
        let now = room();
        match count >= now.of_one && raise_files() {
            true => room(),
            false => now,
        }
    }
}

/// There is no room for another connection, and none may be closed for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// All connections are busy.
    All,
    /// All connections of its address are busy, and there are as many as one may have.
    OfOne,
}

/// The connections that a listener keeps.
///
/// A new connection costs a look at its own address; only one that takes another's place costs a
/// look at each address.
#[derive(Debug)]
pub struct Admitted<T> {
    all: HashMap<u64, One<T>>,
    of_each: HashMap<IpAddr, OfOne>,
    /// How many have not proved themselves yet.
    unproved: usize,
    /// Counts what happens, and so tells what happened first.
    last: u64,
}

#[derive(Debug)]
struct One<T> {
    from: IpAddr,
    doing: Doing,
    /// When it began to do that.
    since: u64,
    handle: T,
}

/// The connections of one address: for each [`Doing`] their numbers, by when they began to do it.
#[derive(Debug, Default)]
struct OfOne([BTreeMap<u64, u64>; 3]);

impl OfOne {
    fn that_are(&self, doing: Doing) -> &BTreeMap<u64, u64> {
        &self.0[doing as usize]
    }

    fn that_are_mut(&mut self, doing: Doing) -> &mut BTreeMap<u64, u64> {
        &mut self.0[doing as usize]
    }

    fn count(&self) -> usize {
        self.0.iter().map(BTreeMap::len).sum()
    }

    /// When the one that has been doing this for the longest time began, and its number.
    fn oldest(&self, doing: Doing) -> Option<(u64, u64)> {
        let first = self.that_are(doing).first_key_value();
        first.map(|(since, number)| (*since, *number))
    }
}

impl<T> Default for Admitted<T> {
    fn default() -> Self {
        Self {
            all: HashMap::new(),
            of_each: HashMap::new(),
            unproved: 0,
            last: 0,
        }
    }
}

impl<T> Admitted<T> {
    /// Adds a connection. Returns its number and, if there are too many, the handle of the one to
    /// close. That is one of the same address where that has too many, and else one of the address
    /// that has the most: the one that has been idle for the longest time, or else the oldest that
    /// has not proved itself. An honest client proves itself quickly, so it is not the oldest for
    /// long.
    ///
    /// # Errors
    ///
    /// [`Full`] if there are too many, and all are busy.
    pub fn enter(
        &mut self,
        from: IpAddr,
        doing: Doing,
        room: &ConnectionLimits,
        handle: T,
    ) -> Result<(u64, Option<T>), Full> {
        let closes = self.closes(from, doing, room)?;
        let closed = closes.and_then(|number| self.remove(number));
        // The time of its entry is also its number: no other event has it.
        let since = self.now();
        self.count_in(since, from, doing, since);
        let one = One {
            from,
            doing,
            since,
            handle,
        };
        self.all.insert(since, one);
        Ok((since, closed.map(|one| one.handle)))
    }

    /// Notes what a connection does now. False if it was closed for another one.
    pub fn is_now(&mut self, number: u64, doing: Doing) -> bool {
        let now = self.now();
        let Some(one) = self.all.get_mut(&number) else {
            return false;
        };
        let (from, before, since) = (one.from, one.doing, one.since);
        (one.doing, one.since) = (doing, now);
        self.count_out(from, before, since);
        self.count_in(number, from, doing, now);
        true
    }

    /// A connection has ended.
    pub fn leave(&mut self, number: u64) {
        self.remove(number);
    }

    /// Whether a connection was neither closed for another one, nor has ended.
    pub fn has(&self, number: u64) -> bool {
        self.all.contains_key(&number)
    }

    /// Forgets connections for which this does not hold.
    pub(crate) fn retain(&mut self, of: impl Fn(&T) -> bool) {
        let all = self.all.iter();
        let gone: Vec<u64> = all
            .filter(|(_, one)| !of(&one.handle))
            .map(|(number, _)| *number)
            .collect();
        for number in gone {
            self.leave(number);
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.all.len()
    }

    fn now(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn remove(&mut self, number: u64) -> Option<One<T>> {
        let one = self.all.remove(&number)?;
        self.count_out(one.from, one.doing, one.since);
        Some(one)
    }

    fn count_in(&mut self, number: u64, from: IpAddr, doing: Doing, since: u64) {
        self.unproved += usize::from(doing == Doing::Unproved);
        let of_one = self.of_each.entry(from).or_default();
        of_one.that_are_mut(doing).insert(since, number);
    }

    fn count_out(&mut self, from: IpAddr, doing: Doing, since: u64) {
        self.unproved -= usize::from(doing == Doing::Unproved);
        if let Entry::Occupied(mut of_one) = self.of_each.entry(from) {
            of_one.get_mut().that_are_mut(doing).remove(&since);
            if of_one.get().count() == 0 {
                of_one.remove();
            }
        }
    }

    /// The connection that is closed for another one from here, if there are too many.
    fn closes(
        &self,
        from: IpAddr,
        doing: Doing,
        room: &ConnectionLimits,
    ) -> Result<Option<u64>, Full> {
        let is_stranger = doing == Doing::Unproved;
        // An address with too many pays with one of its own connections, so it cannot push others
        // out.
        if let Some(of_it) = self.of_each.get(&from) {
            let number_of = |doing| of_it.oldest(doing).map(|(_, number)| number);
            if is_stranger && of_it.that_are(Doing::Unproved).len() >= room.unproved_of_one {
                return Ok(number_of(Doing::Unproved));
            }
            if of_it.count() >= room.of_one {
                let closes = number_of(Doing::Idle).or_else(|| number_of(Doing::Unproved));
                return closes.map(Some).ok_or(Full::OfOne);
            }
        }
        // Then the address with the most strangers pays.
        if is_stranger && self.unproved >= room.unproved {
            let unproved = |of_one: &OfOne| of_one.that_are(Doing::Unproved).len();
            if let Some(oldest) = self.oldest(Doing::Unproved, unproved) {
                return Ok(Some(oldest));
            }
        }
        if self.all.len() < room.all {
            return Ok(None);
        }
        // An idle client can connect again at no loss. A stranger may be in the middle of its
        // handshake.
        let idle = self.oldest(Doing::Idle, OfOne::count);
        let closes = idle.or_else(|| self.oldest(Doing::Unproved, OfOne::count));
        closes.map(Some).ok_or(Full::All)
    }

    /// The connection that has been doing this for the longest time, of those of the address that
    /// has the most of them, as counted here.
    fn oldest(&self, doing: Doing, count: impl Fn(&OfOne) -> usize) -> Option<u64> {
        let oldest_of_each = self.of_each.values().filter_map(|of_one| {
            let (since, number) = of_one.oldest(doing)?;
            // The address with the most connections first, and of equal ones the oldest.
            Some((Reverse(count(of_one)), since, number))
        });
        oldest_of_each.min().map(|(.., number)| number)
    }
}

/// How many failures were answered lately, by address.
#[derive(Debug, Default)]
pub(crate) struct Answers {
    given: HashMap<IpAddr, Given>,
    /// The shared count of all addresses without one of their own.
    others: Option<Given>,
}

#[derive(Debug, Clone, Copy)]
struct Given {
    since: Instant,
    count: u32,
}

impl Answers {
    /// Whether a failure from this address gets an answer. Otherwise the connection is closed
    /// without one.
    pub(crate) fn gives(&mut self, from: IpAddr, now: Instant) -> bool {
        self.given
            .retain(|_, given| now.duration_since(given.since) < WINDOW);
        let fresh = Given {
            since: now,
            count: 0,
        };
        let known = self.given.len() < ADDRESSES || self.given.contains_key(&from);
        let given = match known {
            true => self.given.entry(from).or_insert(fresh),
            false => self.others.get_or_insert(fresh),
        };
        if now.duration_since(given.since) >= WINDOW {
            *given = fresh;
        }
        let gives = given.count < ANSWERS;
        given.count += u32::from(gives);
        gives
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u16) -> IpAddr {
        let [high, low] = last.to_be_bytes();
        IpAddr::from([10, 0, high, low])
    }

    /// Connections whose handles are what the test calls them.
    #[derive(Default)]
    struct Crowd(Admitted<usize>);

    impl Crowd {
        /// The handle of the connection that is closed for this one.
        fn enter(&mut self, from: u16, doing: Doing, handle: usize) -> Result<Option<usize>, Full> {
            let room = ConnectionLimits {
                unproved: 16,
                unproved_of_one: 4,
                ..ConnectionLimits::of(40)
            };
            let entered = self.0.enter(address(from), doing, &room, handle);
            entered.map(|(_, closed)| closed)
        }

        /// Has the connections of an address do something.
        fn all_do(&mut self, from: u16, doing: Doing) {
            let of_it = self.0.all.iter();
            let mut of_it: Vec<_> = of_it
                .filter(|(_, one)| one.from == address(from))
                .map(|(number, _)| *number)
                .collect();
            of_it.sort_unstable();
            for number in of_it {
                assert!(self.0.is_now(number, doing));
            }
        }
    }

    #[test]
    fn strangers_of_one_address_evict_each_other() {
        let mut crowd = Crowd::default();
        assert_eq!(crowd.enter(2, Doing::Unproved, 1000), Ok(None));
        for number in 0..12 {
            let gone = crowd.enter(1, Doing::Unproved, number);
            assert_eq!(gone, Ok(number.checked_sub(4)));
        }
        crowd.0.retain(|one| *one == 1000);
        assert_eq!(crowd.enter(1, Doing::Unproved, 0), Ok(None));
        assert_eq!(crowd.0.count(), 2);
    }

    #[test]
    fn strangers_are_evicted_from_the_busiest_address() {
        let mut crowd = Crowd::default();
        // One that has proved itself does not count among them.
        assert_eq!(crowd.enter(9, Doing::Busy, 1000), Ok(None));
        for number in 0..3 {
            assert_eq!(crowd.enter(1, Doing::Unproved, number), Ok(None));
        }
        for number in 3..16 {
            let gone = crowd.enter(10 + number as u16, Doing::Unproved, number);
            assert_eq!(gone, Ok(None));
        }
        for number in 0..2 {
            let gone = crowd.enter(2000 + number as u16, Doing::Unproved, 2000);
            assert_eq!(gone, Ok(Some(number)));
        }
        assert_eq!(crowd.0.count(), 17);
    }

    #[test]
    fn idle_connections_of_one_address_keep_nobody_out() {
        let mut crowd = Crowd::default();
        for number in 0..30 {
            assert_eq!(crowd.enter(1, Doing::Idle, number), Ok(None));
        }
        // Another one of that address closes the one that has been idle for the longest time.
        assert_eq!(crowd.enter(1, Doing::Unproved, 30), Ok(Some(0)));
        crowd.all_do(1, Doing::Busy);
        // If none of them is idle, others still find room.
        assert_eq!(crowd.enter(1, Doing::Unproved, 31), Err(Full::OfOne));
        for number in 100..110 {
            assert_eq!(crowd.enter(number as u16, Doing::Busy, number), Ok(None));
        }
        assert_eq!(crowd.enter(2, Doing::Unproved, 200), Err(Full::All));
        assert_eq!(crowd.0.count(), 40);
    }

    #[test]
    fn full_listener_closes_the_oldest_idle_connection() {
        let mut crowd = Crowd::default();
        for number in 0..20 {
            assert_eq!(crowd.enter(1, Doing::Idle, number), Ok(None));
        }
        for number in 20..40 {
            assert_eq!(crowd.enter(number as u16, Doing::Idle, number), Ok(None));
        }
        // The first of the busiest address has just been asked something.
        let first = *crowd.0.all.keys().min().unwrap();
        assert!(crowd.0.is_now(first, Doing::Busy));
        assert!(crowd.0.is_now(first, Doing::Idle));
        assert_eq!(crowd.enter(2, Doing::Unproved, 40), Ok(Some(1)));
        crowd.all_do(1, Doing::Busy);
        assert_eq!(crowd.enter(2, Doing::Unproved, 41), Ok(Some(20)));
        for number in 21..40 {
            crowd.all_do(number, Doing::Busy);
        }
        // A stranger is closed before nobody comes in.
        assert_eq!(crowd.enter(3, Doing::Unproved, 42), Ok(Some(40)));
        crowd.0.leave(first);
        assert!(!crowd.0.has(first) && !crowd.0.is_now(first, Doing::Idle));
        assert_eq!(crowd.enter(3, Doing::Unproved, 43), Ok(None));
    }

    #[test]
    fn gate_stops_answers_only_to_frequent_failures() {
        let (mut answers, start) = (Answers::default(), Instant::now());
        for _ in 0..ANSWERS {
            assert!(answers.gives(address(1), start));
        }
        assert!(!answers.gives(address(1), start));
        assert!(answers.gives(address(2), start));
        assert!(answers.gives(address(1), start + WINDOW));
    }

    #[test]
    fn gate_bounds_the_addresses_it_remembers() {
        let (mut answers, start) = (Answers::default(), Instant::now());
        for last in 0..10_000 {
            let _ = answers.gives(address(last), start);
        }
        assert_eq!(answers.given.len(), ADDRESSES);
        assert!(!answers.gives(address(20_000), start));
        assert!(answers.gives(address(3), start));
        assert!(answers.gives(address(20_000), start + WINDOW));
    }
}
