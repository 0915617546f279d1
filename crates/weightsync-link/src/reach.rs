//! The settings that every scheme over a network has.

use std::path::PathBuf;

use weightsync_engine::settings::{Setting, flag, set_flag};

use crate::address::{bad, told};

/// A scheme whose trainer listens.
pub trait Reached: Sized {
    /// Where the trainer listens, if it was said.
    fn listen(&mut self) -> &mut Option<String>;

    /// Where workers reach the trainer, if that is another address.
    fn advertise(&mut self) -> &mut Option<String>;

    /// Where the certificates are, if it was said.
    fn tls(&mut self) -> &mut Option<PathBuf>;

    /// Whether unencrypted connections to other machines are allowed.
    fn insecure_plaintext(&mut self) -> &mut bool;
}

/// Where the certificates are, for workers that may run in another folder.
pub fn certificates(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

/// The setting `listen`.
pub const fn listen<S: Reached + Clone>() -> Setting<S> {
    Setting {
        key: "listen",
        takes: "HOST:PORT",
        about: "where the trainer listens; 127.0.0.1 at a port that the system chooses, without it",
        set: |scheme, value| {
            told("listen", value)?;
            *scheme.listen() = Some(value.into());
            Ok(())
        },
        get: |scheme| scheme.clone().listen().take(),
    }
}

/// The setting `advertise`.
pub const fn advertise<S: Reached + Clone>() -> Setting<S> {
    Setting {
        key: "advertise",
        takes: "HOST:PORT",
        about: "the address at which workers reach the trainer, if `listen` is another one; port 0 is \
                the listening port",
        set: |scheme, value| {
            told("advertise", value)?;
            *scheme.advertise() = Some(value.into());
            Ok(())
        },
        get: |scheme| scheme.clone().advertise().take(),
    }
}

/// The setting `tls`.
pub const fn tls<S: Reached + Clone>() -> Setting<S> {
    Setting {
        key: "tls",
        takes: "DIR",
        about: "the certificates of encrypted links, a folder or a file; workers look for theirs at \
                the same path, unless WEIGHTSYNC_TLS_DIR names another",
        set: |scheme, value| match value {
            "" => Err(bad("tls", "a folder or a file of certificates", value).into()),
            path => {
                *scheme.tls() = Some(certificates(path.into()));
                Ok(())
            }
        },
        get: |scheme| {
            let path = scheme.clone().tls().take();
            path.map(|path| path.display().to_string())
        },
    }
}

/// The setting `insecure-plaintext`.
pub const fn insecure_plaintext<S: Reached + Clone>() -> Setting<S> {
    Setting {
        key: "insecure-plaintext",
        takes: "",
        about: "allows unencrypted connections to other machines; workers take this from the init info",
        set: |scheme, value| {
            *scheme.insecure_plaintext() = flag(value)?;
            Ok(())
        },
        get: |scheme| set_flag(*scheme.clone().insecure_plaintext()),
    }
}
