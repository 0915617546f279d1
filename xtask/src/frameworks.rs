//! `cargo xtask test frameworks`: the package with other frameworks, each with the real framework in
//! an environment of its own.
//!
//! They are heavy (SGLang has 11 GB), so CI leaves out those that nothing has changed for: [`PASSED`]
//! has a line for each, which says what was there when its tests last passed.

use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::marks::{self, Passed};
use crate::places::Places;
use crate::pytest;
use crate::python::{self, Environment};
use crate::report::{Report, Runner};
use crate::wheel::{self, Profile};

/// What each framework's tests last passed with. A run of them writes it.
const PASSED: Passed = Passed("python/tests/frameworks/passed.txt");

/// A framework, its environment, and what its tests depend on in the clone.
#[derive(Debug)]
pub struct Framework {
    /// What the command calls it.
    pub name: &'static str,
    environment: &'static Environment,
    /// Files and folders of tests.
    tests: &'static [&'static str],
    /// How pytest runs them.
    options: &'static [&'static str],
    /// Files and folders. The requirements and the tests are among them anyway.
    sources: &'static [&'static str],
}

const FRAMEWORKS: &[Framework] = &[OLDEST_TORCH, TORCHRL, RAY, VLLM, TRL, VERL, SGLANG];

/// The oldest torch that the package supports: sending from and loading into modules, tensors of
/// every dtype, threads that share a module, and the guard, without torch's own compiler of code.
const OLDEST_TORCH: Framework = Framework {
    name: "oldest-torch",
    environment: &python::OLDEST,
    tests: &[
        "python/tests/core/test_background.py",
        "python/tests/core/test_compile.py",
        "python/tests/core/test_dtypes.py",
        "python/tests/core/test_modules.py",
        "python/tests/core/test_readers.py",
    ],
    options: &["-k", "not inductor"],
    sources: &[
        "python/tests/core/actors.py",
        "python/tests/core/ends.py",
        "python/weightsync/_checks.py",
        "python/weightsync/_dtypes.py",
        "python/weightsync/_ends.py",
        "python/weightsync/_extra.py",
        "python/weightsync/_guard.py",
        "python/weightsync/_receiving.py",
        "python/weightsync/_source.py",
        "python/weightsync/_targets",
        "python/weightsync/_view.py",
        "python/weightsync/background.py",
        "python/weightsync/model_receiver.py",
        "python/weightsync/receiver.py",
        "python/weightsync/sender.py",
        "python/weightsync/snapshot.py",
    ],
};

/// TorchRL's own schemes, by the checks that ours pass: they show which checks can fail, and change
/// with TorchRL alone.
const TORCHRL: Framework = Framework {
    name: "torchrl",
    environment: &python::TESTS,
    tests: &["python/tests/torchrl"],
    options: &["-m", "peers", "--numprocesses=4"],
    sources: &[],
};

/// Ray's actors, a cluster on this host for each file: it takes a core to start.
const RAY: Framework = Framework {
    name: "ray",
    environment: &python::TESTS,
    tests: &["python/tests/ray_actors"],
    options: &["--numprocesses=2", "--dist=loadscope"],
    sources: &[
        "examples/ray_direct_transport",
        "python/tests/patience.py",
        "python/tests/sync/trinity_world.py",
        "python/tests/torchrl/crew.py",
        "python/weightsync/_stream.py",
        "python/weightsync/ray",
        "python/weightsync/torchrl/_group.py",
        "python/weightsync/torchrl/_ray.py",
        "python/weightsync/torchrl/_remote_updaters.py",
        "python/weightsync/trinity",
    ],
};

const VLLM: Framework = Framework {
    name: "vllm",
    environment: &python::VLLM,
    tests: &["python/tests/vllm_engines"],
    // An engine takes a core and some gigabytes of memory.
    options: &["--numprocesses=2", "--dist=loadscope"],
    sources: &[
        "python/weightsync/_tested.py",
        "python/weightsync/engines",
        "python/weightsync/lora",
        "python/weightsync/staleness.py",
        "python/weightsync/vllm",
    ],
};

const TRL: Framework = Framework {
    name: "trl",
    environment: &python::TRL,
    tests: &["python/tests/frameworks/trl"],
    options: &[],
    sources: &[
        "python/weightsync/trl.py",
        "python/weightsync/_tested.py",
        "python/weightsync/lora",
        "python/tests/vllm_engines/tiny.py",
        "python/weightsync/vllm",
        "python/weightsync/engines",
    ],
};

const VERL: Framework = Framework {
    name: "verl",
    environment: &python::VERL,
    tests: &[
        "python/tests/frameworks/verl",
        "python/tests/frameworks/nemo_rl",
    ],
    options: &[],
    sources: &[
        "python/weightsync/verl.py",
        "python/weightsync/nemo_rl.py",
        "python/weightsync/_stream.py",
        "python/weightsync/_tested.py",
        "python/weightsync/ray",
        "python/tests/frameworks/named_weights.py",
    ],
};

const SGLANG: Framework = Framework {
    name: "sglang",
    environment: &python::SGLANG,
    tests: &["python/tests/frameworks/sglang"],
    options: &[],
    sources: &[
        "python/weightsync/sglang",
        "python/weightsync/staleness.py",
        "python/weightsync/_tested.py",
        "python/weightsync/lora",
        "python/tests/vllm_engines/adapted.py",
        "python/weightsync/engines",
    ],
};

impl Framework {
    /// What pytest is told, so that it runs the tests.
    pub fn arguments(&self) -> Vec<String> {
        let all = self.options.iter().chain(self.tests);
        all.map(|one| (*one).to_owned()).collect()
    }

    /// The Python that sees the package and the framework.
    pub fn installed(&self, places: &Places, wheel: &Path) -> Result<PathBuf, Error> {
        let environment = self.environment.provide(places)?;
        wheel::install_over(places, &environment, self.name, wheel)
    }

    /// Stands for everything that its tests depend on in the clone but the engine itself, which has
    /// tests of its own.
    fn mark(&self, root: &Path) -> Result<String, Error> {
        let sources = self.sources.iter().chain(self.tests).copied();
        let sources = sources.chain(self.environment.all_requirements());
        marks::of(root, sources.map(str::to_owned))
    }

    /// Whether its tests passed.
    fn run(&self, places: &Places, report: &mut Report, wheel: &Path) -> bool {
        let alone = format!("cargo xtask test frameworks {}", self.name);
        let prepare = || pytest::command(places, &self.installed(places, wheel)?);
        match prepare() {
            Ok(mut tests) => {
                let runner = Runner::Pytest {
                    with: Some(self.name),
                };
                tests.args(self.arguments());
                report.tests(places, self.name, &alone, runner, &mut tests)
            }
            Err(error) => {
                report.not_run(self.name, &alone, &error.to_string());
                false
            }
        }
    }
}

/// The framework of this name.
pub fn named(name: &str) -> Result<&'static Framework, Error> {
    FRAMEWORKS
        .iter()
        .find(|one| one.name == name)
        .ok_or_else(|| {
            let known: Vec<&str> = FRAMEWORKS.iter().map(|one| one.name).collect();
            Error::Usage(format!(
                "there is no framework `{name}`: expected some of {}",
                known.join(", ")
            ))
        })
}

/// Runs the tests of all frameworks, or of those with these names, and notes what passed.
pub fn run(places: &Places, names: &[&str]) -> Result<(), Error> {
    let chosen: Vec<&Framework> = match names {
        [] => FRAMEWORKS.iter().collect(),
        names => names
            .iter()
            .map(|name| named(name))
            .collect::<Result<_, _>>()?,
    };
    let mut report = Report::begin();
    these(places, &mut report, &chosen)?;
    report.end()
}

/// Runs the tests of all frameworks, as steps of a longer run.
pub fn all(places: &Places, report: &mut Report) -> Result<(), Error> {
    these(places, report, &FRAMEWORKS.iter().collect::<Vec<_>>())
}

/// Runs the tests of the frameworks that something has changed for since they passed.
pub fn changed(places: &Places, report: &mut Report) -> Result<(), Error> {
    let mut changed = Vec::new();
    for one in FRAMEWORKS {
        if PASSED.has(places.root(), one.name, &one.mark(places.root())?)? {
            eprintln!(
                "── {}: nothing has changed since its tests passed (`cargo xtask test frameworks {}` \
                 runs them)",
                one.name, one.name
            );
        } else {
            changed.push(one);
        }
    }
    these(places, report, &changed)
}

fn these(places: &Places, report: &mut Report, chosen: &[&Framework]) -> Result<(), Error> {
    if chosen.is_empty() {
        return Ok(());
    }
    // Before the wheel is built: what is edited from here on was not tested.
    let marked: Vec<(&Framework, String)> = chosen
        .iter()
        .map(|one| Ok((*one, one.mark(places.root())?)))
        .collect::<Result<_, Error>>()?;
    let alone = format!("cargo xtask test frameworks {}", chosen[0].name);
    let wheel = report.step("wheel for frameworks", &alone, || {
        wheel::build(places, &python::TESTS.provide(places)?, Profile::Tests)
    });
    for (one, mark) in marked {
        let Some(wheel) = &wheel else {
            let alone = format!("cargo xtask test frameworks {}", one.name);
            report.not_run(one.name, &alone, "there is no wheel");
            continue;
        };
        if one.run(places, report, wheel) {
            PASSED.note(places.root(), one.name, &mark)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const TRIED: Framework = Framework {
        name: "tried",
        environment: &python::TRL,
        tests: &["python/tests/frameworks/tried"],
        options: &[],
        sources: &["python/weightsync/tried.py"],
    };

    fn clone() -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        let files = [
            "python/weightsync/tried.py",
            "python/tests/frameworks/tried/test_it.py",
        ];
        for file in files.into_iter().chain(python::TRL.all_requirements()) {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().expect("a parent")).expect("folders");
            fs::write(path, file).expect("a file");
        }
        root
    }

    #[test]
    fn mark_differs_where_a_file_does() {
        let root = clone();
        let mark = || TRIED.mark(root.path()).expect("a mark");
        let tests = root.path().join(TRIED.tests[0]);
        let before = mark();
        fs::create_dir(tests.join("__pycache__")).expect("a folder");
        fs::write(tests.join("__pycache__/test_it.pyc"), "").expect("a file");
        assert_eq!(mark(), before);
        let mut seen = vec![before];
        for (file, text) in [("test_it.py", "other"), ("test_new.py", "")] {
            fs::write(tests.join(file), text).expect("a file");
            assert!(!seen.contains(&mark()));
            seen.push(mark());
        }
    }

    #[test]
    fn frameworks_name_what_is_there() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for one in FRAMEWORKS {
            one.mark(&root).expect(one.name);
        }
    }
}
