//! `cargo xtask test frameworks`: the adapters for other frameworks, each with the real framework in
//! an environment of its own.
//!
//! They are heavy (SGLang has 11 GB), so the daily run leaves out those that nothing has changed for:
//! [`PASSED`] has a line for each, which says what was there when its tests last passed.

use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::marks::{self, Passed};
use crate::places::Places;
use crate::pytest;
use crate::python::{self, Environment};
use crate::step;
use crate::wheel;

/// Where the tests are.
const TESTS: &str = "python/tests/frameworks";

/// What each framework's tests last passed with. A run of them writes it.
const PASSED: Passed = Passed("python/tests/frameworks/passed.txt");

/// A framework, its environment, and what its tests depend on in the clone.
struct Framework {
    name: &'static str,
    environment: &'static Environment,
    /// Folders of [`TESTS`].
    tests: &'static [&'static str],
    /// Files and folders. The requirements and the tests are among them anyway.
    sources: &'static [&'static str],
}

const FRAMEWORKS: &[Framework] = &[TRL, VERL, SGLANG];

const TRL: Framework = Framework {
    name: "trl",
    environment: &python::TRL,
    tests: &["trl"],
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
    tests: &["verl", "nemo_rl"],
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
    tests: &["sglang"],
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
    fn tests(&self) -> impl Iterator<Item = String> {
        self.tests.iter().map(|folder| format!("{TESTS}/{folder}"))
    }

    /// Stands for everything that its tests depend on in the clone but the engine itself, which has
    /// tests of its own.
    fn mark(&self, root: &Path) -> Result<String, Error> {
        let sources = self.sources.iter().copied();
        let sources = sources.chain(self.environment.all_requirements());
        marks::of(root, sources.map(str::to_owned).chain(self.tests()))
    }

    /// The Python that sees the package and the framework.
    fn installed(&self, places: &Places, wheel: &Path) -> Result<PathBuf, Error> {
        let environment = self.environment.provide(places)?;
        wheel::install_over(places, &environment, self.name, wheel)
    }

    fn run(&self, places: &Places, wheel: &Path) -> Result<(), Error> {
        let own = self.installed(places, wheel)?;
        let mut tests = pytest::command(places, &own)?;
        step::run_reported(self.name, tests.args(self.tests())).map(drop)
    }
}

/// The Python that sees the package, just built, and SGLang.
pub fn installed_for_sglang(places: &Places) -> Result<PathBuf, Error> {
    let wheel = wheel::build(places, &python::TESTS.provide(places)?)?;
    SGLANG.installed(places, &wheel)
}

/// Runs the tests of all frameworks, or of those with these names, and notes what passed.
pub fn all(places: &Places, names: &[&str]) -> Result<(), Error> {
    if let Some(unknown) = names
        .iter()
        .find(|name| FRAMEWORKS.iter().all(|one| one.name != **name))
    {
        let known: Vec<&str> = FRAMEWORKS.iter().map(|one| one.name).collect();
        return Err(Error::Usage(format!(
            "there is no framework `{unknown}`: expected some of {}",
            known.join(", ")
        )));
    }
    let chosen = FRAMEWORKS
        .iter()
        .filter(|one| names.is_empty() || names.contains(&one.name));
    // Before the wheel is built: what is edited from here on was not tested.
    let marked: Vec<(&Framework, String)> = chosen
        .map(|one| Ok((one, one.mark(places.root())?)))
        .collect::<Result<_, Error>>()?;
    let wheel = wheel::build(places, &python::TESTS.provide(places)?)?;
    for (one, mark) in marked {
        one.run(places, &wheel)?;
        PASSED.note(places.root(), one.name, &mark)?;
    }
    Ok(())
}

/// Runs the tests of the frameworks that something has changed for since they passed.
pub fn changed(places: &Places, wheel: &Path) -> Result<(), Error> {
    for one in FRAMEWORKS {
        let mark = one.mark(places.root())?;
        if PASSED.has(places.root(), one.name, &mark)? {
            eprintln!(
                "── {}: nothing has changed since its tests passed (`cargo xtask test frameworks {}` \
                 runs them)",
                one.name, one.name
            );
        } else {
            one.run(places, wheel)?;
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
        tests: &["tried"],
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
        let tests = root.path().join(TESTS).join("tried");
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
