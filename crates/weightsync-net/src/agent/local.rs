//! The names at which processes of one host find each other.

use weightsync_mem::{Error, Listener};

/// How many names there are. A forked child of a dead process may keep a name; the next one is
/// used then.
const NAMES: u8 = 8;

/// Which process a name belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameOwner {
    /// The trainer's.
    Sender,
    /// A relay's.
    Host,
}

/// The names in the order in which they are tried: abstract socket names, which belong to the
/// network namespace. Only a process with the secret can make them. Everybody on the host can
/// read names in use, but cannot derive the others from them.
pub(crate) fn names(secret: &[u8; 16], address: &str, owner: NameOwner) -> Vec<String> {
    let mut hasher = blake3::Hasher::new_derive_key("weightsync-net 2026-11 local names");
    hasher.update(secret);
    // Both words have one length, so an owner cannot run into the address that follows.
    hasher.update(match owner {
        NameOwner::Sender => b"sender",
        NameOwner::Host => b"host\0\0",
    });
    hasher.update(address.as_bytes());
    let names = 0..NAMES;
    names
        .map(|number| {
            let hex = hasher.clone().update(&[number]).finalize().to_hex();
            format!("weightsync/net/{}", &hex[..32])
        })
        .collect()
}

/// How a name is taken: for the processes of this host, or at least for this process.
pub(crate) type Listen = fn(&str) -> Result<Listener, Error>;

/// The first name that no process uses, including those of other users.
pub(crate) fn first_free(names: &[String], listen: Listen) -> Result<(Listener, String), Error> {
    let mut taken = Vec::new();
    for name in names {
        match listen(name) {
            Ok(listener) => return Ok((listener, name.clone())),
            // Another process serves this name, or a forked child of a dead one keeps it.
            Err(Error::AddressInUse { address }) => taken.push(address),
            Err(error) => return Err(error),
        }
    }
    Err(Error::AddressInUse {
        address: taken.join(", "),
    })
}
