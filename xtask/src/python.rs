//! The Python environments of the tests, and of the implementations ours is compared with.
//!
//! An environment lies in the cache, outside every clone, under a name that says what it depends
//! on: the Python it was made with and the pinned lines of its requirements. It is made next to its
//! place and renamed when it is complete, so a half-made one is never used.

use std::ffi::OsString;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::Error;
use crate::places::{self, Places};
use crate::step;

/// What the Python tests, `bench/delta` and the scripts in `bench/peers` itself run in. One for all.
pub const TESTS: Environment = Environment {
    name: "tests",
    requirements: "python/requirements-test.txt",
    imports: "torch, torchrl, ray, zstandard, sentence_transformers, maturin, mypy, pytest, xdist",
    dependencies: Dependencies::OnGpu,
    on: None,
};

/// What some of the Python tests run in once more: the oldest torch the package supports, as
/// `torch` in pyproject.toml's optional dependencies says.
pub const OLDEST: Environment = Environment {
    name: "oldest",
    requirements: "python/requirements-oldest.txt",
    imports: "torch, numpy, ml_dtypes, pytest, pytest_timeout",
    dependencies: Dependencies::Listed,
    on: None,
};

/// What the tests of `weightsync.vllm` run in: vLLM for the CPU, with the torch that it brings.
pub const VLLM: Environment = Environment {
    name: "vllm",
    requirements: "python/requirements-vllm.txt",
    imports: "vllm, torch, transformers, pytest, pytest_timeout, xdist",
    dependencies: Dependencies::Listed,
    on: None,
};

/// What the tests of stores in S3 run their server in, and what the test of deploy/kubernetes checks
/// its files with.
pub const OBJECTS: Environment = Environment {
    name: "objects",
    requirements: "python/requirements-objects.txt",
    imports: "moto.server, moto.s3.responses, werkzeug.serving, flask_cors, kubernetes_validate, yaml",
    dependencies: Dependencies::Listed,
    on: None,
};

/// What the scripts in `bench/peers/net` run in: made for `cargo xtask bench net` alone. What loads
/// only where more is installed says so itself when it is measured.
pub const NET: Environment = Environment {
    name: "net",
    requirements: "python/requirements-net.txt",
    imports: "torch, numpy, ray, zmq",
    dependencies: Dependencies::Listed,
    on: Some(&TESTS),
};

/// What checks the code for macOS, which some crates compile C for.
pub const ZIG: Environment = Environment {
    name: "zig",
    requirements: "python/requirements-zig.txt",
    imports: "ziglang",
    dependencies: Dependencies::Listed,
    on: None,
};

/// What the tests of `weightsync.trl` run in.
pub const TRL: Environment = Environment {
    name: "trl",
    requirements: "python/requirements-trl.txt",
    imports: "trl, vllm, torch, transformers, pytest",
    dependencies: Dependencies::Listed,
    on: Some(&VLLM),
};

/// What the tests of `weightsync.verl` and `weightsync.nemo_rl` run in.
pub const VERL: Environment = Environment {
    name: "verl",
    requirements: "python/requirements-verl.txt",
    imports: "verl, ray, torch, pytest",
    dependencies: Dependencies::Listed,
    on: Some(&TESTS),
};

/// What the tests of `weightsync.sglang` run in: 11 GB.
pub const SGLANG: Environment = Environment {
    name: "sglang",
    requirements: "python/requirements-sglang.txt",
    imports: "sglang, torch, transformers, pytest",
    dependencies: Dependencies::Listed,
    on: None,
};

/// What is looked for on `PATH`, in this order: the first that is new enough is taken.
const INTERPRETERS: &[&str] = &[
    "python3",
    "python3.14",
    "python3.13",
    "python3.12",
    "python3.11",
];

/// The oldest Python the package supports, as `requires-python` in pyproject.toml says.
const AT_LEAST: (u32, u32) = (3, 11);

/// An environment and what is in it.
#[derive(Debug, Clone, Copy)]
pub struct Environment {
    name: &'static str,
    /// The requirements file, in the clone. Its lines are pinned: the same lines give the same
    /// environment.
    requirements: &'static str,
    /// What must be importable before it counts as complete.
    imports: &'static str,
    dependencies: Dependencies,
    /// An environment whose packages it sees too, after its own.
    on: Option<&'static Environment>,
}

/// Where the packages come from that the packages of an environment depend on.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Dependencies {
    /// Its lines name all that are needed without a GPU.
    Listed,
    /// The same, and on a machine with a GPU pip installs those that a GPU needs.
    OnGpu,
}

/// Has torch load without CUDA's libraries.
const STAND_INS: &str = include_str!("cuda_stand_ins.py");

/// What NVIDIA's driver makes.
const GPU: &str = "/dev/nvidiactl";

impl Environment {
    /// The environment's Python: one made before, or one made now (minutes, and the package index
    /// must be reachable).
    pub fn provide(&self, places: &Places) -> Result<PathBuf, Error> {
        let interpreters: Vec<OsString> = INTERPRETERS.iter().map(Into::into).collect();
        self.provide_with(&interpreters, places.root(), &places.environments())
    }

    /// The requirements files of it and of those that it is on, in the clone.
    pub fn all_requirements(&self) -> impl Iterator<Item = &'static str> {
        std::iter::successors(Some(self), |one| one.on).map(|one| one.requirements)
    }

    fn provide_with(
        &self,
        interpreters: &[OsString],
        root: &Path,
        environments: &Path,
    ) -> Result<PathBuf, Error> {
        let on = self
            .on
            .map(|one| one.provide_with(interpreters, root, environments))
            .transpose()?;
        let requirements = root.join(self.requirements);
        let mut text = fs::read_to_string(&requirements).map_err(|source| Error::Io {
            doing: format!("reading {}", requirements.display()),
            source,
        })?;
        if let Some(on) = &on {
            // Its place changes with its lines.
            text.push_str(&format!("\n{}\n", on.display()));
        }
        if self.resolves() {
            text.push_str("\nwith what a GPU needs\n");
        }
        text.push_str(STAND_INS);
        let (python, version) = choose(interpreters)?;
        let _lock = places::lock(environments)?;
        let home = environments.join(format!("{}-{}", self.name, key(&version, &text)));
        let own = home.join("bin/python");
        if runs(&own) {
            eprintln!("{} environment: {}", self.name, home.display());
            return Ok(own);
        }
        let making = environments.join(format!("{}.making", self.name));
        // What a killed run left, or an environment whose Python has been uninstalled.
        clear(&making)?;
        clear(&home)?;
        let made = self
            .make(python, &requirements, on.as_deref(), &making)
            // The environment's Python finds its packages from where it lies, so it may move; the
            // scripts next to it, such as `pip`, may not, and nothing calls them.
            .and_then(|()| places::rename(&making, &home));
        if let Err(error) = made {
            // The reason is the failure before it.
            let _ = fs::remove_dir_all(&making);
            return Err(error);
        }
        Ok(own)
    }

    fn make(
        &self,
        python: &OsString,
        requirements: &Path,
        on: Option<&Path>,
        making: &Path,
    ) -> Result<(), Error> {
        let missing = |what: &str, error: &Error, fix: &str| Error::Missing {
            what: format!("the Python environment `{}` ({what}: {error})", self.name),
            fix: fix.into(),
        };
        let mut venv = Command::new(python);
        venv.args(["-m", "venv"]).arg(making);
        step::run(&format!("{} environment", self.name), &mut venv).map_err(|error| {
            let fix = "install Python's venv module (Debian: apt install python3-venv)";
            missing("it could not be begun", &error, fix)
        })?;

        eprintln!("(once: a minute or more, and up to several GB)");
        let own = making.join("bin/python");
        if let Some(on) = on {
            see(&own, on)?;
        }
        let mut pip = Command::new(&own);
        pip.args("-m pip install --quiet --disable-pip-version-check --no-input".split(' '))
            // Building torch from its sources would take hours and fail. Each environment is made
            // once, so a copy of what was downloaded would be gigabytes that nobody reads.
            .args(["--only-binary=:all:", "--no-cache-dir"])
            .arg("--requirement")
            .arg(requirements);
        if !self.resolves() {
            pip.arg("--no-deps");
        }
        step::run(&format!("{} packages", self.name), &mut pip).map_err(|error| {
            let fix = format!(
                "make the package index reachable (pip's own settings apply), with a Python that \
                 {} has wheels for, and run this again",
                requirements.display()
            );
            missing("its packages could not be installed", &error, &fix)
        })?;

        let script = making.join("cuda_stand_ins.py");
        fs::write(&script, STAND_INS).map_err(|source| Error::Io {
            doing: format!("writing {}", script.display()),
            source,
        })?;
        let mut stand_ins = Command::new(&own);
        stand_ins.arg(script);
        step::run(&format!("{} stand-ins for CUDA", self.name), &mut stand_ins).map_err(
            |error| {
                let fix =
                    "install a C compiler with its binutils (Debian: apt install gcc binutils)";
                missing("torch has no stand-ins for CUDA", &error, fix)
            },
        )?;

        let mut import = Command::new(&own);
        import.args(["-c", &format!("import {}", self.imports)]);
        step::run(&format!("{} imports", self.name), &mut import)
            .map(drop)
            .map_err(|error| {
                let fix = format!("see what the import of {} says above", self.imports);
                missing("its packages do not load", &error, &fix)
            })
    }
}

impl Environment {
    /// Whether pip finds out what its packages depend on.
    fn resolves(&self) -> bool {
        self.dependencies == Dependencies::OnGpu && Path::new(GPU).exists()
    }
}

/// Has one Python see the packages of another one, after its own.
pub fn see(python: &Path, other: &Path) -> Result<(), Error> {
    let packages = |python: &Path| -> Result<String, Error> {
        let mut ask = Command::new(python);
        ask.args([
            "-c",
            "import sysconfig; print(sysconfig.get_path('purelib'))",
        ]);
        let mut found = step::output(&mut ask, "python")?;
        found.truncate(found.trim_end().len());
        Ok(found)
    };
    let link = PathBuf::from(packages(python)?).join("packages.pth");
    // What the other one sees is of files of this kind, too, and Python does not follow those: they
    // are read where a path is added as one of packages.
    let line = format!("import site; site.addsitedir({:?})\n", packages(other)?);
    fs::write(&link, line).map_err(|source| Error::Io {
        doing: format!("writing {}", link.display()),
        source,
    })
}

/// A command of a Python whose packages are its environment's alone, not those of the shell that
/// started this.
pub fn command(places: &Places, python: &Path) -> Command {
    let mut command = places.command(python);
    for name in ["PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV"] {
        command.env_remove(name);
    }
    command
}

/// The first interpreter that is new enough, and its version.
fn choose(interpreters: &[OsString]) -> Result<(&OsString, String), Error> {
    let mut seen: Vec<String> = Vec::new();
    for python in interpreters {
        let Some(version) = version(python) else {
            continue;
        };
        if is_new_enough(&version) {
            return Ok((python, version));
        }
        seen.push(format!("{} is {version}", python.display()));
    }
    let (major, minor) = AT_LEAST;
    Err(Error::Missing {
        what: match seen.is_empty() {
            true => format!("Python {major}.{minor} or newer"),
            false => format!("Python {major}.{minor} or newer ({})", seen.join(", ")),
        },
        fix: format!(
            "install Python {major}.{minor} or newer with its venv module, as `python3` on PATH"
        ),
    })
}

/// The version and platform of a Python, one line; none if it does not run.
fn version(python: &OsString) -> Option<String> {
    let ask = "import platform, sys; print(sys.implementation.cache_tag, \
               platform.python_version(), platform.machine())";
    let output = Command::new(python)
        .args(["-c", ask])
        .stdin(Stdio::null())
        // A version manager's stand-in for a Python that is not chosen explains itself at length.
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    (output.status.success() && !text.trim().is_empty()).then(|| text.trim().to_owned())
}

/// Whether a line of [`version`] is that of a Python the package supports.
fn is_new_enough(version: &str) -> bool {
    let mut numbers = version
        .split_whitespace()
        .nth(1)
        .into_iter()
        .flat_map(|word| word.split('.'))
        .map_while(|part| part.parse().ok());
    let found: (Option<u32>, Option<u32>) = (numbers.next(), numbers.next());
    found >= (Some(AT_LEAST.0), Some(AT_LEAST.1))
}

/// Differs when the Python or a pinned line does, not when a comment does.
fn key(version: &str, requirements: &str) -> String {
    let pinned = requirements
        .lines()
        .map(|line| line.split('#').next().unwrap_or(line).trim())
        .filter(|line| !line.is_empty());
    // Should another toolchain hash differently, the environment is made once more.
    let mut hasher = DefaultHasher::new();
    version.hash(&mut hasher);
    pinned.for_each(|line| line.hash(&mut hasher));
    let plain: Vec<&str> = version.split_whitespace().collect();
    format!("{}-{:016x}", plain.join("-"), hasher.finish())
}

fn runs(python: &Path) -> bool {
    Command::new(python)
        .args(["-c", "pass"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Removes a folder and all that is in it, if it is there.
pub fn clear(folder: &Path) -> Result<(), Error> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::Io {
            doing: format!("removing {}", folder.display()),
            source: error,
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A `python3` that does what its surroundings say: `FAIL` in its folder makes the step named
    /// there fail, and each installation is a line in `installed`.
    const PYTHON: &str = "#!/bin/sh\n\
        here=\"HERE\"\n\
        case \"$*\" in\n\
        *platform*) step=version; echo cpython-399 3.99.0 x86_64 ;;\n\
        *venv*) step=venv; mkdir -p \"$3/bin\" && cp \"$0\" \"$3/bin/python\" ;;\n\
        *pip*) step=pip; echo pip >> \"$here/installed\" ;;\n\
        *torchrl*) step=imports ;;\n\
        *) step=pass ;;\n\
        esac\n\
        [ \"$(cat \"$here/fail\" 2>/dev/null)\" != \"$step\" ]\n";

    /// A clone and a cache in a folder of their own.
    struct Scene(tempfile::TempDir);

    impl Scene {
        fn new() -> Self {
            let scene = Self(tempfile::tempdir().expect("a folder"));
            let python = PYTHON.replace("HERE", &scene.path("").display().to_string());
            fs::write(scene.path("python3"), python).expect("python3");
            let executable = fs::Permissions::from_mode(0o755);
            fs::set_permissions(scene.path("python3"), executable).expect("mode");
            fs::create_dir_all(scene.path("python")).expect("python");
            scene.pin("torch==1\n");
            scene
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn pin(&self, lines: &str) {
            fs::write(self.path(TESTS.requirements), lines).expect("requirements");
        }

        fn fail(&self, step: &str) {
            fs::write(self.path("fail"), step).expect("fail");
        }

        fn provide(&self) -> Result<PathBuf, Error> {
            let python = self.path("python3").into_os_string();
            TESTS.provide_with(&[python], self.0.path(), &self.path("cache"))
        }

        fn installations(&self) -> usize {
            fs::read_to_string(self.path("installed")).map_or(0, |text| text.lines().count())
        }

        /// The environments there are, complete or not.
        fn environments(&self) -> usize {
            let entries = fs::read_dir(self.path("cache")).expect("the cache");
            entries
                .filter(|entry| entry.as_ref().is_ok_and(|entry| entry.path().is_dir()))
                .count()
        }
    }

    #[test]
    fn an_environment_is_made_once_for_its_pinned_lines() {
        let scene = Scene::new();
        let python = scene.provide().expect("made");
        assert!(runs(&python), "{}", python.display());
        scene.pin("# said differently\n\ntorch==1   # the same\n");
        assert_eq!(scene.provide().expect("found"), python);
        assert_eq!(scene.installations(), 1);
        scene.pin("torch==2\n");
        assert_ne!(scene.provide().expect("another"), python);
        assert_eq!((scene.installations(), scene.environments()), (2, 2));
    }

    #[test]
    fn a_half_made_one_is_never_used_and_the_fix_is_said() {
        let cases = [
            ("version", "as `python3` on PATH"),
            ("venv", "python3-venv"),
            ("pip", "make the package index reachable"),
            ("imports", "says above"),
        ];
        for (step, fix) in cases {
            let scene = Scene::new();
            scene.fail(step);
            let text = scene.provide().expect_err(step).to_string();
            assert!(text.contains(fix), "{step}: {text}");
            // What a killed run leaves.
            fs::create_dir_all(scene.path("cache/tests.making/bin")).expect("a leftover");
            scene.fail("nothing");
            scene.provide().expect(step);
            assert_eq!(scene.environments(), 1, "{step}");
        }
    }

    #[test]
    fn one_whose_python_is_gone_is_made_again() {
        let scene = Scene::new();
        let python = scene.provide().expect("made");
        fs::remove_file(&python).expect("removed");
        assert_eq!(scene.provide().expect("made again"), python);
        assert_eq!(scene.installations(), 2);
    }

    #[test]
    fn the_first_interpreter_that_is_new_enough_is_taken() {
        let folder = tempfile::tempdir().expect("a folder");
        let stand_in = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("an interpreter");
            let executable = fs::Permissions::from_mode(0o755);
            fs::set_permissions(&path, executable).expect("mode");
            path.into_os_string()
        };
        let absent = folder.path().join("absent").into_os_string();
        let broken = stand_in("broken", "echo cpython-312 3.12.0 x86_64; exit 127");
        let old = stand_in("old", "echo cpython-39 3.9.18 x86_64");
        let new = stand_in("new", "echo cpython-311 3.11.0 x86_64");
        let newer = stand_in("newer", "echo cpython-314 3.14.1 x86_64");

        let all = [absent.clone(), broken, old.clone(), new.clone(), newer];
        let (python, version) = choose(&all).expect("one is new enough");
        assert_eq!(
            (python, version.as_str()),
            (&new, "cpython-311 3.11.0 x86_64")
        );
        let text = choose(&[absent, old]).expect_err("3.9").to_string();
        for part in ["Python 3.11 or newer", "3.9.18", "fix: install"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        let cases = [
            ("cpython-310 3.10.14 x86_64", false),
            ("cpython-39 3.9.18 x86_64", false),
            ("cpython-311 3.11.0rc1 x86_64", true),
            ("cpython-314 3.14.0+ aarch64", true),
            ("cpython-400 4.0.0 x86_64", true),
            ("cpython-27 2.7.18 x86_64", false),
            ("Python", false),
        ];
        for (version, expected) in cases {
            assert_eq!(is_new_enough(version), expected, "{version}");
        }
    }

    #[test]
    fn the_key_names_the_python() {
        let one = key("cpython-311 3.11.7 x86_64", "torch==1");
        assert!(one.starts_with("cpython-311-3.11.7-x86_64-"), "{one}");
        assert_ne!(one, key("cpython-312 3.12.1 x86_64", "torch==1"));
        assert_ne!(one, key("cpython-311 3.11.7 x86_64", "torch==1\nnumpy==1"));
    }

    #[test]
    fn every_requirement_is_pinned() {
        for environment in [TESTS, OLDEST, VLLM, NET, TRL, VERL, SGLANG] {
            let path = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("..")
                .join(environment.requirements);
            let text = fs::read_to_string(path).expect("requirements");
            // Options are for a package whose line follows.
            let lines = text.lines().filter(|line| !line.starts_with(['#', '-']));
            let loose: Vec<&str> = lines.filter(|line| !line.contains("==")).collect();
            assert!(loose.is_empty(), "{}: {loose:?}", environment.name);
        }
    }
}
