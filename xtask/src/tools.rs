//! The tools a run needs that cargo does not bring: found where they are new enough, else
//! installed into the cache, or by the distribution.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::Error;
use crate::places::Places;
use crate::step;

/// Runs the tests: one process per test, a time limit on each.
pub const NEXTEST: Tool = Tool {
    name: "cargo-nextest",
    // Older ones may not name the attempt that a test is, which `orphans` reads.
    at_least: Version(0, 9, 138),
    install: Version(0, 9, 143),
};

/// Checks licences, sources and bans of the dependencies.
pub const DENY: Tool = Tool {
    name: "cargo-deny",
    at_least: Version(0, 20, 0),
    install: Version(0, 20, 2),
};

/// Namespaces and links: the hosts of the tests.
pub const IPROUTE: Package = Package {
    name: "iproute2",
    brings: &["ip", "tc"],
};

/// What a single stream over TCP can do.
pub const IPERF: Package = Package {
    name: "iperf3",
    brings: &["iperf3"],
};

/// Runs programs of other processors.
pub const QEMU: Package = Package {
    name: "qemu-user",
    brings: &["qemu-aarch64"],
};

/// Compiles and links for aarch64.
pub const AARCH64_GCC: Package = Package {
    name: "gcc-aarch64-linux-gnu",
    brings: &["aarch64-linux-gnu-gcc"],
};

/// The C library of aarch64, which is found from where programs are.
pub const AARCH64_LIBC: Package = Package {
    name: "libc6-dev-arm64-cross",
    brings: &["../aarch64-linux-gnu/lib/libc.a"],
};

/// A browser and the program that drives it: the tests of the synchronizer's page.
pub const CHROMIUM: Package = Package {
    name: "chromium-driver",
    brings: &["chromium", "chromedriver"],
};

/// Libraries that Mooncake's transfer engine is linked to, also where there is no hardware for them.
pub const MOONCAKE: [Package; 3] = [
    Package {
        name: "libibverbs1",
        brings: &["libibverbs.so.1", "libnl-3.so.200"],
    },
    Package {
        name: "libnuma1",
        brings: &["libnuma.so.1"],
    },
    Package {
        name: "libcurl4",
        brings: &["libcurl.so.4"],
    },
];

/// A program from the registry, with the versions that will do.
#[derive(Debug, Clone, Copy)]
pub struct Tool {
    name: &'static str,
    at_least: Version,
    install: Version,
}

impl Tool {
    /// The path of a version that will do: the one on `PATH`, the one in the cache, or one
    /// installed now (some minutes, and the registry must be reachable).
    pub fn provide(&self, places: &Places) -> Result<PathBuf, Error> {
        let home = places.tool(self.name, &self.install.to_string());
        let cached = home.join("bin").join(self.name);
        for candidate in [PathBuf::from(self.name), cached.clone()] {
            if let Some(version) = installed(&candidate).filter(|version| self.accepts(*version)) {
                eprintln!("{} {version}: {}", self.name, candidate.display());
                return Ok(candidate);
            }
        }
        self.install(places, &home)?;
        match installed(&cached) {
            Some(version) if self.accepts(version) => Ok(cached),
            _ => Err(self.missing("it was installed and does not run")),
        }
    }

    /// Tools below 1.0 change their configuration with the minor version, so a newer minor
    /// version is as unfit as an older patch.
    fn accepts(&self, version: Version) -> bool {
        (version.0, version.1) == (self.at_least.0, self.at_least.1) && version >= self.at_least
    }

    fn install(&self, places: &Places, home: &Path) -> Result<(), Error> {
        let build = home.join("build");
        let mut install = places.cargo();
        install
            .args(["install", "--locked", "--quiet", self.name, "--version"])
            .arg(self.install.to_string())
            .arg("--root")
            .arg(home)
            .arg("--target-dir")
            .arg(&build)
            // Built once and run for seconds: a fast build matters more than a fast program.
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
            .env_remove("RUSTFLAGS");
        let outcome = step::run(&format!("install {}", self.name), &mut install);
        // Hundreds of megabytes that no later step uses; a leftover does no harm.
        let _ = fs::remove_dir_all(&build);
        outcome
            .map(drop)
            .map_err(|error| self.missing(&error.to_string()))
    }

    fn missing(&self, why: &str) -> Error {
        let Self {
            name,
            at_least,
            install,
        } = self;
        Error::Missing {
            what: format!(
                "{name} {}.{}, at least {at_least} ({why})",
                at_least.0, at_least.1
            ),
            fix: format!("cargo install --locked {name} --version {install}"),
        }
    }
}

/// What the distribution brings: programs, or libraries.
#[derive(Debug, Clone, Copy)]
pub struct Package {
    /// Debian's name of it.
    name: &'static str,
    /// What has to be there. What has `.so` in its name is a library.
    brings: &'static [&'static str],
}

impl Package {
    /// Returns when all of it is there: before, or after an installation by `apt-get` where this
    /// user may do that.
    pub fn provide(&self) -> Result<(), Error> {
        let Some(what) = self.lacks() else {
            return Ok(());
        };
        let missing = |why: &str| Error::Missing {
            what: format!("{what}{why}"),
            fix: format!("apt install {} (that is Debian's name of it)", self.name),
        };
        if !is_root() || !runs("apt-get") {
            return Err(missing(""));
        }
        let name = self.name;
        let mut update = apt();
        let mut install = apt();
        install.args(["--yes", "--no-install-recommends", "install", name]);
        step::run(&format!("lists for {name}"), update.arg("update"))
            .and_then(|_| step::run(&format!("install {name}"), &mut install))
            .map_err(|error| missing(&format!(" ({error})")))?;
        match self.lacks() {
            None => Ok(()),
            Some(_) => Err(missing(" (it was installed and is not there)")),
        }
    }

    /// The first that is not there.
    fn lacks(&self) -> Option<&'static str> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut folders: Vec<PathBuf> = std::env::split_paths(&path).collect();
        // Not on everybody's PATH.
        folders.extend(["/usr/sbin", "/sbin"].map(PathBuf::from));
        self.lacks_among(&folders, known_libraries)
    }

    fn lacks_among(
        &self,
        folders: &[PathBuf],
        libraries: impl Fn() -> String,
    ) -> Option<&'static str> {
        self.brings
            .iter()
            .copied()
            .find(|what| match what.contains(".so") {
                true => !libraries().split_whitespace().any(|word| word == *what),
                false => !folders.iter().any(|folder| folder.join(what).is_file()),
            })
    }
}

fn apt() -> Command {
    let mut apt = Command::new("apt-get");
    apt.arg("-qq").env("DEBIAN_FRONTEND", "noninteractive");
    // What it says is not the output of the command that needs the package, such as `bench --json`.
    apt.stdout(io::stderr());
    apt
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

/// What the dynamic linker finds, each with where it is.
fn known_libraries() -> String {
    let ask = |program: &str| {
        Command::new(program)
            .arg("-p")
            .stdin(Stdio::null())
            .output()
    };
    ask("ldconfig")
        .or_else(|_| ask("/sbin/ldconfig"))
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default()
}

/// Fails with the command that brings it when a component of the toolchain is not installed.
pub fn component(places: &Places, subcommand: &str, component: &str) -> Result<(), Error> {
    let found = places
        .cargo()
        .args([subcommand, "--version"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    match found {
        true => Ok(()),
        false => Err(Error::Missing {
            what: format!("`cargo {subcommand}`"),
            fix: format!("rustup component add {component}"),
        }),
    }
}

/// Returns when the toolchain has the standard library of a target.
pub fn target(places: &Places, target: &str) -> Result<(), Error> {
    let there = || {
        let mut rustc = places.command("rustc");
        let libdir = rustc.args(["--print", "target-libdir", "--target", target]);
        let libdir = step::output(libdir, "rustc").unwrap_or_default();
        Path::new(libdir.trim()).is_dir()
    };
    if there() {
        return Ok(());
    }
    let mut add = Command::new("rustup");
    let added = step::run(
        &format!("add {target}"),
        add.args(["target", "add", target]),
    );
    match added {
        Ok(_) if there() => Ok(()),
        _ => Err(Error::Missing {
            what: format!("the standard library of {target}"),
            fix: format!("rustup target add {target}"),
        }),
    }
}

/// Major, minor, patch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Version(u32, u32, u32);

impl Version {
    /// The version in a line such as `cargo-deny 0.20.2` or `cargo-nextest 0.9.143 (60fa45f63)`.
    /// A pre-release counts as none: it may lack what its release has.
    fn find(text: &str) -> Option<Self> {
        text.split_whitespace().find_map(|word| {
            let mut parts = word.split('.').map(|part| part.parse().ok());
            let version = Self(parts.next()??, parts.next()??, parts.next()??);
            parts.next().is_none().then_some(version)
        })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

fn runs(program: &str) -> bool {
    Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

fn installed(program: &Path) -> Option<Version> {
    let output = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .output()
        .ok()?;
    Version::find(&String::from_utf8_lossy(&output.stdout)).filter(|_| output.status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_what_tools_print() {
        let cases = [
            ("cargo-deny 0.20.2", Some(Version(0, 20, 2))),
            (
                "cargo-nextest 0.9.143 (60fa45f63 2026-08-04)\nrelease: 0.9.143",
                Some(Version(0, 9, 143)),
            ),
            ("cargo-nextest 0.9.143-rc.1 (60fa45f63 2026-08-04)", None),
            ("cargo-deny", None),
            ("1.2", None),
            ("1.2.3.4", None),
            ("", None),
        ];
        for (text, expected) in cases {
            assert_eq!(Version::find(text), expected, "{text:?}");
        }
    }

    #[test]
    fn tool_needs_the_same_minor_and_a_recent_patch() {
        let cases = [
            (Version(0, 9, 137), false),
            (Version(0, 9, 138), true),
            (Version(0, 9, 143), true),
            (Version(0, 10, 0), false),
            (Version(1, 9, 100), false),
        ];
        for (version, expected) in cases {
            assert_eq!(NEXTEST.accepts(version), expected, "{version}");
        }
    }

    #[test]
    fn tools_accept_the_version_they_install() {
        for tool in [NEXTEST, DENY] {
            assert!(tool.accepts(tool.install), "{tool:?}");
        }
    }

    #[test]
    fn a_package_is_there_when_all_it_brings_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let folders = [folder.path().to_path_buf()];
        let libraries = || {
            "\tlibnl-3.so.200 (libc6,x86-64) => /lib/x86_64-linux-gnu/libnl-3.so.200\n\
             \tlibibverbs.so.10 (libc6,x86-64) => /lib/libibverbs.so.10\n"
                .to_owned()
        };
        assert_eq!(IPROUTE.lacks_among(&folders, libraries), Some("ip"));
        fs::write(folder.path().join("ip"), "").expect("ip");
        assert_eq!(IPROUTE.lacks_among(&folders, libraries), Some("tc"));
        fs::write(folder.path().join("tc"), "").expect("tc");
        assert_eq!(IPROUTE.lacks_among(&folders, libraries), None);

        assert_eq!(
            MOONCAKE[0].lacks_among(&folders, libraries),
            Some("libibverbs.so.1")
        );
        let both = || format!("{}\tlibibverbs.so.1 (libc6)\n", libraries());
        assert_eq!(MOONCAKE[0].lacks_among(&folders, both), None);
    }

    #[test]
    fn a_missing_tool_names_the_command_that_brings_it() {
        let text = DENY.missing("not found").to_string();
        assert!(
            text.contains("cargo install --locked cargo-deny --version 0.20.2"),
            "{text}"
        );
    }
}
