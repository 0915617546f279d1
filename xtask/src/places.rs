//! Where things live: the clone, the cache outside it, build output and tools.
//!
//! A fresh clone should be warm, so build output goes to a cache keyed by the compiler that made
//! it. Cargo's own fingerprints tell the lock file, features and flags apart, hence no further key:
//! one on the lock file would build every dependency again when a single one changes. What they
//! do not tell apart is the path of the clone, which tests have compiled in: output of the
//! workspace's own crates is removed when another clone than the last one builds.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Error;
use crate::step;

/// The directories of one run. Holding it holds the lock on shared build output.
#[derive(Debug)]
pub struct Places {
    root: PathBuf,
    cache: PathBuf,
    target: PathBuf,
    rustc: Rustc,
    /// Two clones building into one directory would swap the programs their tests start.
    lock: Option<File>,
}

impl Places {
    /// Finds the directories and, where build output is shared with other clones, waits until no
    /// other run uses it. The lock ends with this process, however it dies.
    pub fn open() -> Result<Self, Error> {
        // `cargo run` says which clone asks; the path compiled in is that of the clone which built.
        let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
            .unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let root = Path::new(&manifest)
            .parent()
            .map(Path::to_path_buf)
            .filter(|root| root.join("Cargo.lock").exists())
            .ok_or_else(|| Error::Missing {
                what: "the clone xtask was built in".into(),
                fix: "run `cargo xtask` from the clone you work in".into(),
            })?;
        let rustc = Rustc::ask()?;
        let cache = cache_root(std::env::var_os("XDG_CACHE_HOME"), std::env::var_os("HOME"))?;
        let chosen = ["CARGO_TARGET_DIR", "CARGO_BUILD_TARGET_DIR"]
            .into_iter()
            .find_map(|name| std::env::var_os(name).filter(|value| !value.is_empty()));
        let (target, lock) = match chosen {
            Some(dir) => (root.join(dir), None),
            None => {
                let dir = cache.join("target").join(rustc.key());
                let lock = lock(&dir)?;
                (dir, Some(lock))
            }
        };
        let places = Self {
            root,
            cache,
            target,
            rustc,
            lock,
        };
        if places.lock.is_some() {
            places.take_over()?;
        }
        Ok(places)
    }

    /// Makes shared build output this clone's: cargo takes a crate of another clone for this one's
    /// where the sources are as old, and its tests then look for their files over there.
    fn take_over(&self) -> Result<(), Error> {
        let record = self.target.join("clone");
        let mine = self.root.as_os_str().as_encoded_bytes();
        if fs::read(&record).is_ok_and(|last| last == mine) {
            return Ok(());
        }
        for (target, profile) in [
            (self.target.clone(), "dev"),
            (self.target.clone(), "release"),
            (self.cfg_target("loom"), "release"),
            (self.cfg_target("portable"), "dev"),
        ] {
            let mut clean = self.cargo();
            clean
                .args(["clean", "--workspace", "--quiet", "--profile", profile])
                .env("CARGO_TARGET_DIR", target);
            step::run("another clone's output", &mut clean)?;
        }
        fs::write(&record, mine).map_err(|source| Error::Io {
            doing: format!("writing {}", record.display()),
            source,
        })
    }

    /// Where cargo builds to.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Where cargo builds what is compiled with a `cfg`.
    fn cfg_target(&self, cfg: &str) -> PathBuf {
        self.target.join(cfg)
    }

    /// Has cargo, or a tool that calls it, compile every crate with a `cfg`. It gets a build directory
    /// of its own: one shared with ordinary builds would be rebuilt at each change between the two.
    pub fn with_cfg<'a>(&self, command: &'a mut Command, cfg: &str) -> &'a mut Command {
        let flags = match std::env::var("RUSTFLAGS") {
            Ok(flags) if !flags.trim().is_empty() => format!("{flags} --cfg {cfg}"),
            _ => format!("--cfg {cfg}"),
        };
        command
            .env("CARGO_TARGET_DIR", self.cfg_target(cfg))
            .env("RUSTFLAGS", flags)
    }

    /// The compiler in use.
    pub fn rustc(&self) -> &Rustc {
        &self.rustc
    }

    /// Where one version of a tool is installed when the machine does not bring it.
    pub fn tool(&self, name: &str, version: &str) -> PathBuf {
        self.cache
            .join("tools")
            .join(format!("{name}-{version}-{}", self.rustc.host))
    }

    /// The clone.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where Python environments are.
    pub fn environments(&self) -> PathBuf {
        self.cache.join("python")
    }

    /// Where data is that benchmarks measure.
    pub fn data(&self) -> PathBuf {
        self.cache.join("data")
    }

    /// A cargo command in the clone, building to [`Places::target`].
    pub fn cargo(&self) -> Command {
        self.command(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
    }

    /// Any program in the clone that may call cargo.
    pub fn command(&self, program: impl Into<OsString>) -> Command {
        let mut command = Command::new(program.into());
        command
            .current_dir(&self.root)
            .env("CARGO_TARGET_DIR", &self.target);
        command
    }
}

/// What identifies the compiler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rustc {
    /// Such as `1.95.0`.
    pub release: String,
    /// Such as `x86_64-unknown-linux-gnu`.
    pub host: String,
    commit: String,
}

impl Rustc {
    fn ask() -> Result<Self, Error> {
        let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let text = step::output(Command::new(rustc).arg("-vV"), "rustc -vV")?;
        Self::parse(&text).ok_or_else(|| Error::Unreadable {
            what: "`rustc -vV`".into(),
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
                .map(|value| value.trim().to_owned())
        };
        Some(Self {
            release: field("release")?,
            host: field("host")?,
            commit: field("commit-hash")?,
        })
    }

    /// A directory name that differs between compilers whose output does not mix.
    fn key(&self) -> String {
        let commit: String = self.commit.chars().take(9).collect();
        format!("{}-{commit}-{}", self.release, self.host)
    }
}

fn cache_root(xdg: Option<OsString>, home: Option<OsString>) -> Result<PathBuf, Error> {
    // The XDG specification has relative paths ignored.
    xdg.map(PathBuf::from)
        .filter(|path| path.is_absolute())
        .or_else(|| {
            home.filter(|home| !home.is_empty())
                .map(|home| PathBuf::from(home).join(".cache"))
        })
        .map(|base| base.join("weightsync"))
        .ok_or_else(|| Error::Missing {
            what: "a cache directory".into(),
            fix: "set HOME, or XDG_CACHE_HOME to an absolute path".into(),
        })
}

/// Waits until no other run uses the directory, which is made if there is none.
pub fn lock(dir: &Path) -> Result<File, Error> {
    let path = dir.join("xtask.lock");
    let io = |source| Error::Io {
        doing: format!("locking {}", path.display()),
        source,
    };
    fs::create_dir_all(dir).map_err(io)?;
    let file = File::create(&path).map_err(io)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            eprintln!("waiting for another run to leave {}", dir.display());
            file.lock().map_err(io)?;
        }
        Err(TryLockError::Error(source)) => return Err(io(source)),
    }
    Ok(file)
}

/// Moves what was made to the place where it is looked for.
pub fn rename(making: &Path, home: &Path) -> Result<(), Error> {
    fs::rename(making, home).map_err(|source| Error::Io {
        doing: format!("moving {} to {}", making.display(), home.display()),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_tells_compilers_apart() {
        let text = "rustc 1.95.0 (59807616e 2026-04-14)\nbinary: rustc\n\
                    commit-hash: 59807616e1fa2540724bfbac14d7976d7e4a3860\n\
                    host: x86_64-unknown-linux-gnu\nrelease: 1.95.0\nLLVM version: 22.1\n";
        let rustc = Rustc::parse(text).expect("rustc's own text");
        assert_eq!(rustc.key(), "1.95.0-59807616e-x86_64-unknown-linux-gnu");
        assert_eq!(Rustc::parse("rustc 1.95.0"), None);
    }

    #[test]
    fn the_cache_follows_xdg_then_home() {
        let cases: [(Option<&str>, Option<&str>, Option<&str>); 5] = [
            (Some("/x"), Some("/h"), Some("/x/weightsync")),
            (Some("relative"), Some("/h"), Some("/h/.cache/weightsync")),
            (None, Some("/h"), Some("/h/.cache/weightsync")),
            (None, Some(""), None),
            (None, None, None),
        ];
        for (xdg, home, expected) in cases {
            let got = cache_root(xdg.map(Into::into), home.map(Into::into)).ok();
            assert_eq!(got, expected.map(PathBuf::from), "{xdg:?} {home:?}");
        }
    }
}
