//! What is asked of a party before the service believes it.

use weightsync_core::synchronizer::Method;
use weightsync_engine::transport::Endpoint;
use weightsync_engine::{AnyScheme, Epoch, Error, InitInfo, Version};
use weightsync_link::tls::CertificateRole;
use weightsync_store::StoreScheme;

use super::super::events::since_1970;
use super::super::memory::check_number;
use super::super::settings::method_word;
use super::super::wire::{Join, RequestProblem, Role};
use super::{Caller, Service};
use crate::http::ConnectionInfo;
use crate::rpc::Addresses;

/// How far an epoch may be above this machine's clock, in milliseconds. A trainer may have its epoch from
/// a synchronizer that ran elsewhere, whose clock differed.
const CLOCKS_DIFFER: u64 = 24 * 3600 * 1000;

/// Schemes whose address is a name, or a file, of the service's own machine.
const LOCAL: [&str; 2] = ["shared-mem", "multi-process"];

impl Caller {
    /// Refuses a client whose certificate is not for this role. Where the connection is plain there are no
    /// certificates: on loopback, or with permission.
    pub(super) fn may_be(self, role: Role) -> Result<(), RequestProblem> {
        // Requests from inside this program pass: they are trusted as the program is.
        let Self::Client(came) = self else {
            return Ok(());
        };
        let reason = match (came.part, role) {
            // Without encryption there are no certificates. The token alone has let this client in.
            _ if !came.is_encrypted => return Ok(()),
            // The trainer's certificate is for every role. Any other that names a role is for
            // explorers.
            (Some(CertificateRole::Trainer), _) | (Some(_), Role::Explorer) => return Ok(()),
            (Some(part), Role::Trainer) => format!(
                "expected the trainer's certificate of a {role}, got a {part}'s: give this process \
                 trainer.pem (WEIGHTSYNC_TLS_DIR)"
            ),
            (None, _) => format!(
                "the certificate of this {role} is missing, or does not say what its owner is: give this \
                 process one of `weightsync certs new` (WEIGHTSYNC_TLS_DIR); without it the token lets \
                 a client read, and nothing else"
            ),
        };
        Err(RequestProblem::Refused { reason })
    }
}

impl Service {
    /// The epoch of a trainer that joins.
    pub(super) fn epoch_of(&self, join: &Join) -> Result<Epoch, RequestProblem> {
        let newest = self.core.epoch();
        // A trainer that joins for the first time gets an epoch. One that comes back brings its
        // own.
        let Some(epoch) = join.epoch else {
            // Above those of earlier lives that this one knows nothing of, as far as clocks agree.
            let next = newest.next().ok_or_else(|| RequestProblem::Refused {
                reason: format!(
                    "no epoch is left after {}: start the synchronizer with another run_dir",
                    newest.0
                ),
            })?;
            return Ok(next.max(Epoch(since_1970())));
        };
        // A newer trainer has joined since. The old one must not publish any more.
        if epoch < newest {
            let name = self.core.trainer().and_then(|one| self.members.get(&one));
            let reason = format!(
                "the trainer {:?} of epoch {} is fenced off: {} has taken its place with epoch {}; end \
                 this process",
                join.name,
                epoch.0,
                name.map_or("another trainer".into(), |other| format!(
                    "{:?}",
                    other.name
                )),
                newest.0
            );
            return Err(RequestProblem::Replaced { reason });
        }
        // One that is far above would fence off every later trainer, for good.
        let most = since_1970().saturating_add(CLOCKS_DIFFER).max(newest.0);
        if epoch.0 > most {
            let reason = format!(
                "the trainer {:?} comes with epoch {}: expected at most {most}, a day after this \
                 machine's clock (the newest trainer has {}); start the trainer again, which gives it \
                 a new epoch, and set the clocks",
                join.name, epoch.0, newest.0
            );
            return Err(RequestProblem::Refused { reason });
        }
        Ok(epoch)
    }

    /// Refuses a number for a trainer's version that is far above all that is known.
    pub(super) fn check_version(&self, version: Version) -> Result<(), RequestProblem> {
        // Versions that are only held count too: they were passed on before the trainer announced
        // them.
        let highest = self.core.highest().max(self.held.newest());
        check_number(version, highest).map_err(|reason| RequestProblem::Refused { reason })
    }

    /// Refuses an init info by which versions cannot come with the method, or that leads where its trainer
    /// has not shown that it is.
    pub(super) fn check_source(
        &self,
        caller: Caller,
        name: &str,
        method: Method,
        from: &InitInfo,
    ) -> Result<(), RequestProblem> {
        let scheme = from.scheme();
        let is_stored = StoreScheme::address_of(from).is_some();
        let wrong = |expected: &str| {
            let reason = format!(
                "the versions of the trainer {name:?} go by {}, and this synchronizer's method is {}: \
                 expected {expected}",
                word(scheme),
                method_word(method)
            );
            Err(RequestProblem::Refused { reason })
        };
        match method {
            Method::Checkpoint if is_stored => return Ok(()),
            Method::Checkpoint => return wrong("a store; give the trainer the store"),
            Method::Memory | Method::Direct if is_stored => {
                return wrong(
                    "a scheme that brings them from the trainer, such as distributed; give the trainer \
                     that, or both the method checkpoint",
                );
            }
            Method::Memory | Method::Direct => {}
        }
        // A scheme without weights would leave explorers waiting.
        match scheme.parse::<AnyScheme>() {
            Ok(known) if !known.capabilities().weights => {
                return wrong("a scheme that brings weights, such as distributed");
            }
            // Its explorers may know a scheme that this program does not.
            Err(Error::UnknownScheme { .. }) if method == Method::Direct => {}
            Err(error) => {
                let reason = format!("the init info of the trainer {name:?}: {error}");
                return Err(RequestProblem::Refused { reason });
            }
            Ok(_) => {}
        }
        // Only with `memory` does the service itself connect to the trainer.
        match (method, caller) {
            // This service is about to join it.
            (Method::Memory, Caller::Client(_)) if LOCAL.contains(&word(scheme)) => wrong(
                "distributed or rpc of a trainer in another process; distributed uses shared memory on \
                 one machine, too",
            ),
            (Method::Memory, Caller::Client(came)) => {
                may_lead_to(came, from.endpoint()).map_err(|reason| RequestProblem::Refused {
                    reason: format!("the init info of the trainer {name:?} {reason}"),
                })
            }
            _ => Ok(()),
        }
    }
}

/// Whether a client may have this service connect to an address: with the trainer's certificate
/// anywhere, as the trainer is trusted and the end there shows such a certificate, too. On loopback a
/// client could connect itself. Any other is to be where it comes from.
fn may_lead_to(came: ConnectionInfo, at: &Endpoint) -> Result<(), String> {
    // The canonical form: an IPv4 address in IPv6 form is the same address.
    let found = Addresses::of(at).map(|at| at.found.ip().to_canonical());
    let is_proved = came.part == Some(CertificateRole::Trainer);
    if is_proved || came.from.is_loopback() || found.is_ok_and(|found| found == came.from) {
        return Ok(());
    }
    let (from, address) = (came.from, at.address());
    Err(format!(
        "leads to {address:?}: expected {from}, from where it joins, as it has not shown the trainer's \
         certificate; have its sender listen there, or give the synchronizer and the trainer \
         certificates"
    ))
}

/// The word of a scheme.
fn word(scheme: &str) -> &str {
    scheme.split(':').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn came(from: &str, part: Option<CertificateRole>) -> ConnectionInfo {
        ConnectionInfo {
            from: from.parse().unwrap(),
            is_encrypted: part.is_some(),
            part,
        }
    }

    #[test]
    fn client_without_the_trainers_certificate_leads_to_itself_alone() {
        let leads = |from: &str, part, to: &str| {
            let at = Endpoint::new(to, [7; 16], false).unwrap();
            may_lead_to(came(from, part), &at)
        };
        for (from, to) in [
            ("192.0.2.7", "192.0.2.7:7070"),
            ("192.0.2.7", "[::ffff:192.0.2.7]:7070"),
            ("192.0.2.7", "192.0.2.7:7070 at 0.0.0.0:7070"),
            ("2001:db8::7", "[2001:db8::7]:7070"),
            ("127.0.0.1", "10.0.0.1:7070"),
        ] {
            assert_eq!(leads(from, None, to), Ok(()), "{from} to {to}");
        }
        for to in [
            "192.0.2.8:7070",
            "127.0.0.1:7070",
            "169.254.169.254:80",
            "192.0.2.8:7070 at 192.0.2.7:7070",
            "trainer:7070",
        ] {
            for part in [
                None,
                Some(CertificateRole::Worker),
                Some(CertificateRole::Relay),
            ] {
                let said = leads("192.0.2.7", part, to).unwrap_err();
                assert!(said.contains("expected 192.0.2.7"), "{said}");
            }
            assert_eq!(
                leads("192.0.2.7", Some(CertificateRole::Trainer), to),
                Ok(()),
                "{to}"
            );
        }
    }
}
