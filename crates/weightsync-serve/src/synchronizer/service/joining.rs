//! Parties that join and leave.

use weightsync_core::synchronizer::{Departure, Event, Method, Party, Style};
use weightsync_engine::Epoch;

use super::super::events::What;
use super::super::memory::Bridge;
use super::super::settings::{fit, method_word, style_word};
use super::super::wire::{Join, Joined, MAX_NAME, PROTOCOL, Problem, Role};
use super::{Input, Member, REMEMBERED, Service};

impl Service {
    pub(super) fn join(&mut self, join: Join) -> Result<Joined, Problem> {
        let refused = |reason: String| Err(Problem::Refused { reason });
        if join.protocol != PROTOCOL {
            return refused(format!(
                "the synchronizer speaks protocol {PROTOCOL}, the {} {:?} speaks {}: install the same \
                 weightsync on both",
                join.role, join.name, join.protocol
            ));
        }
        if join.name.is_empty() || join.name.len() > MAX_NAME {
            return refused(format!(
                "the name of the {} has {} bytes: expected 1 to {MAX_NAME}",
                join.role,
                join.name.len()
            ));
        }
        let most = self.options.max_parties;
        if self.members.len() >= most {
            return refused(format!(
                "the synchronizer has {most} parties, as many as it may have: raise its max_parties"
            ));
        }
        let style = join.style.unwrap_or(self.options.style);
        self.check_styles(join.role, &join.name, style)?;
        if let Some(method) = join.method
            && !self.core.choose(method)
        {
            return refused(format!(
                "method={}: this synchronizer has a trainer with method={} already; give the same, or \
                 start another synchronizer",
                method_word(method),
                method_word(self.core.method())
            ));
        }
        match join.role {
            Role::Trainer => self.join_trainer(join, style),
            Role::Explorer => Ok(self.join_explorer(join, style)),
        }
    }

    pub(super) fn check_styles(&self, role: Role, name: &str, style: Style) -> Result<(), Problem> {
        for member in self.members.values().filter(|one| one.role != role) {
            let (trainer, explorer) = match role {
                Role::Trainer => (style, member.style),
                Role::Explorer => (member.style, style),
            };
            if !fit(trainer, explorer) {
                let reason = format!(
                    "the {role} {name:?} has the style {}, and the {} {:?} has {}: each would wait for \
                     the other; give one of them another style",
                    style_word(style),
                    member.role,
                    member.name,
                    style_word(member.style)
                );
                return Err(Problem::Refused { reason });
            }
        }
        Ok(())
    }

    pub(super) fn join_trainer(&mut self, join: Join, style: Style) -> Result<Joined, Problem> {
        let Some(from) = join.from else {
            let reason = "a trainer says where its versions can be had".into();
            return Err(Problem::Refused { reason });
        };
        let epoch = match join.epoch {
            Some(epoch) if epoch < self.core.epoch() => {
                let name = self.core.trainer().and_then(|one| self.members.get(&one));
                let reason = format!(
                    "the trainer {:?} of epoch {} is fenced off: {} has taken its place with epoch {}; \
                     end this process",
                    join.name,
                    epoch.0,
                    name.map_or("another trainer".into(), |other| format!(
                        "{:?}",
                        other.name
                    )),
                    self.core.epoch().0
                );
                return Err(Problem::Replaced { reason });
            }
            Some(epoch) => epoch,
            None => Epoch(self.core.epoch().0 + 1),
        };
        let party = self.enter(Role::Trainer, join.name, style);
        self.tell(Event::TrainerJoined(party, epoch, join.step, style));
        self.record.note(epoch, None);
        self.source = Some(from.clone());
        if self.core.method() == Method::Memory {
            self.retire_bridge();
            let inputs = self.inputs.clone();
            let tell = move |said| drop(inputs.send(Input::FromBridge(party, said)));
            self.bridge = Some(
                Bridge::start(from, self.held.clone(), tell).map_err(|error| Problem::Refused {
                    reason: format!("the synchronizer cannot start a thread: {error}"),
                })?,
            );
        }
        // One that was here before the synchronizer was.
        if join.version > self.core.newest().0 && self.core.method() == Method::Checkpoint {
            self.published(party, join.version, join.version_step);
        } else if join.version > self.core.newest().0 {
            self.remember(join.version, join.version_step);
        }
        Ok(self.joined(party, style, 0))
    }

    pub(super) fn join_explorer(&mut self, join: Join, style: Style) -> Joined {
        let next = self.workers.len() as u32 + 1;
        let worker = *self.workers.entry(join.name.clone()).or_insert(next);
        let party = self.enter(Role::Explorer, join.name, style);
        self.tell(Event::ExplorerJoined(party, join.version, join.step, style));
        self.joined(party, style, worker)
    }

    /// Gives a party its number. One of its name and role is replaced.
    pub(super) fn enter(&mut self, role: Role, name: String, style: Style) -> Party {
        let same = self.members.iter();
        let old = same.filter(|(_, one)| one.role == role && one.name == name);
        for old in old.map(|(party, _)| *party).collect::<Vec<_>>() {
            if role == Role::Explorer {
                let reason = format!("another explorer has joined with the name {name:?}");
                self.leave(old, Some(reason.clone()));
                self.replaced
                    .insert(old, reason + "; give each explorer a name of its own");
                if self.replaced.len() > REMEMBERED {
                    self.replaced.pop_first();
                }
            }
        }
        self.last += 1;
        let party = Party(self.last);
        self.events.note(What::Joined, role, &name, |event| {
            event.style = Some(style_word(style));
        });
        let member = Member {
            name,
            role,
            style,
            waiting: None,
            ended: None,
            reason: None,
            met: None,
        };
        self.members.insert(party, member);
        party
    }

    pub(super) fn joined(&self, party: Party, style: Style, worker: u32) -> Joined {
        let (newest, newest_step) = self.core.newest();
        Joined {
            party: party.0,
            worker,
            method: self.core.method(),
            style,
            epoch: self.core.epoch(),
            highest: self.core.highest().max(self.held.newest()),
            newest,
            newest_step,
        }
    }

    /// A party is not there any more: in order, or for a reason.
    pub(super) fn leave(&mut self, party: Party, reason: Option<String>) {
        let Some(member) = self.members.remove(&party) else {
            return;
        };
        let what = match reason {
            None => What::Stopped,
            Some(_) => What::Died,
        };
        self.events.note(what, member.role, &member.name, |event| {
            event.reason.clone_from(&reason);
        });
        if let Some(waiting) = member.waiting {
            (waiting.answer)(Err(Problem::Unknown {}));
        }
        match member.role {
            Role::Trainer => {
                self.retire_bridge();
                let how = match reason {
                    None => Departure::Stopped,
                    Some(_) => Departure::Died,
                };
                self.tell(Event::TrainerLeft(party, how));
            }
            Role::Explorer => self.tell(Event::ExplorerLeft(party)),
        }
    }

    /// Ends the bridge to a trainer, without a wait for its thread.
    pub(super) fn retire_bridge(&mut self) {
        self.retired.retain(|bridge| !bridge.is_over());
        if let Some(bridge) = self.bridge.take() {
            bridge.stop();
            self.retired.push(bridge);
        }
    }
}
