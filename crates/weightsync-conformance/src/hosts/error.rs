//! Why there are no hosts, and what to do about it.

use std::fs;
use std::io;

use super::MOST;

/// Why hosts could not be made or changed. None goes away without a change: a call that
/// failed will fail again until the machine has been changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostsError {
    /// A program is not installed.
    #[error(
        "hosts for tests need `{program}`, which is not on PATH\n  fix: install {package} (Debian: apt install {package})"
    )]
    Missing {
        /// Its name.
        program: &'static str,
        /// What brings it.
        package: &'static str,
    },
    /// The machine refuses to make namespaces.
    #[error(
        "hosts for tests need a user and a network namespace, which are refused: {said}\n  fix: {fix}"
    )]
    NotAllowed {
        /// What `unshare` said.
        said: String,
        /// What to allow, from what the kernel says of its settings.
        fix: String,
    },
    /// More than one bridge is asked to join.
    #[error("{count} hosts were asked for, and {MOST} is the most")]
    TooMany {
        /// How many were asked for.
        count: usize,
    },
    /// A step of the setup, or a change to a link, failed.
    #[error(
        "`{step}` failed: {said}\n  fix: if that is unknown or not supported, the kernel lacks it: \
         modprobe veth bridge sch_tbf"
    )]
    Failed {
        /// The commands that `ip` or `tc` were given.
        step: String,
        /// What they said.
        said: String,
    },
    /// A program could not be started, or said nothing for too long.
    #[error("{doing}: {source}")]
    Io {
        /// What was being done.
        doing: String,
        /// What the system answered.
        source: io::Error,
    },
}

impl HostsError {
    pub(super) fn io(doing: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Io { doing, source }
    }

    /// A refusal, explained by the kernel's settings.
    pub(super) fn refused(said: &str) -> Self {
        Self::NotAllowed {
            said: said.trim().into(),
            fix: fix(|name| fs::read_to_string(format!("/proc/sys/{name}")).ok()),
        }
    }
}

/// The settings that refuse namespaces: where the value is this, then that helps.
const SETTINGS: [(&str, &str, &str); 4] = [
    (
        "user/max_user_namespaces",
        "0",
        "sysctl user.max_user_namespaces=10000",
    ),
    (
        "user/max_net_namespaces",
        "0",
        "sysctl user.max_net_namespaces=10000",
    ),
    (
        "kernel/unprivileged_userns_clone",
        "0",
        "sysctl kernel.unprivileged_userns_clone=1, or run as root",
    ),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or run as root",
    ),
];

/// What to allow, by the first setting that refuses.
fn fix(setting: impl Fn(&str) -> Option<String>) -> String {
    SETTINGS
        .into_iter()
        .find(|(name, refuses, _)| setting(name).is_some_and(|value| value.trim() == *refuses))
        .map_or_else(
            || {
                "if this is a container, start it with `--privileged`, or with \
                 `--cap-add SYS_ADMIN --security-opt seccomp=unconfined`"
                    .into()
            },
            |(_, _, fix)| fix.into(),
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_explained_by_the_setting_that_refuses() {
        for (name, value, words) in [
            (
                "user/max_user_namespaces",
                "0\n",
                "user.max_user_namespaces=10000",
            ),
            (
                "user/max_net_namespaces",
                "0\n",
                "user.max_net_namespaces=10000",
            ),
            ("kernel/unprivileged_userns_clone", "0\n", "userns_clone=1"),
            (
                "kernel/apparmor_restrict_unprivileged_userns",
                "1\n",
                "userns=0",
            ),
            ("user/max_user_namespaces", "96365\n", "--privileged"),
            ("kernel/unprivileged_userns_clone", "1\n", "--privileged"),
        ] {
            let got = fix(|asked| (asked == name).then(|| value.to_owned()));
            assert!(got.contains(words), "{name} = {value}: {got}");
        }
    }
}
