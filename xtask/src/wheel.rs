//! The Python package as its users get it: a wheel, built once, and installed where it is tested.
//!
//! One place has it before the packages of the tests' environment: there the Python tests run, and the
//! benchmarks that compare with other packages. Each framework has such a place. One is empty but for
//! the wheel, and holds it to what it promises: no compiler, no other package. Each run makes its
//! places again, in the build directory: an old package file would hide that the wheel lacks it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::Error;
use crate::places::Places;
use crate::python;
use crate::step;

/// How the wheel is compiled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Profile {
    /// As the Rust tests are, and with their crates.
    Tests,
    /// As users get it, and as it is measured.
    Release,
}

/// `cargo xtask wheel`: builds the wheel as its users get it, and says where it is.
pub fn run(places: &Places) -> Result<(), Error> {
    let wheel = build(places, &python::TESTS.provide(places)?, Profile::Release)?;
    println!("{}", wheel.display());
    Ok(())
}

/// Builds the wheel with the environment's maturin, into `wheels` of the build directory.
pub fn build(places: &Places, python: &Path, profile: Profile) -> Result<PathBuf, Error> {
    let folder = places.target().join("wheels");
    python::clear(&folder)?;
    let mut maturin = python::command(places, python);
    maturin
        .args("-m maturin build --locked --quiet".split(' '))
        // For the stable interface of 3.11: any newer interpreter can build and use it.
        .arg("--interpreter")
        .arg(python)
        .arg("--out")
        .arg(&folder);
    if profile == Profile::Tests {
        maturin.args(["--profile", "dev"]);
    }
    step::run("wheel", &mut maturin)?;
    only_wheel(&folder)
}

/// Installs the wheel before the packages of the environment of `python`, in a place of that `name`,
/// and returns the Python that sees both.
pub fn install_over(
    places: &Places,
    python: &Path,
    name: &str,
    wheel: &Path,
) -> Result<PathBuf, Error> {
    let (home, own) = make(places, python, name)?;
    python::see(&own, python)?;
    install(places, python, &home, wheel)?;
    Ok(own)
}

/// Installs the wheel where there is nothing else, and tests it there.
pub fn test_alone(places: &Places, python: &Path, wheel: &Path) -> Result<Duration, Error> {
    let (home, own) = make(places, python, "empty")?;
    install(places, python, &home, wheel)?;
    let mut tests = python::command(places, &own);
    tests
        // Isolated: neither the clone nor the user's own packages are seen.
        .args("-I -B -m unittest discover --pattern smoke.py --start-directory".split(' '))
        .arg(places.root().join("python/tests/empty"));
    step::run("wheel in an empty environment", &mut tests)
}

/// An environment without packages, and its Python.
fn make(places: &Places, python: &Path, name: &str) -> Result<(PathBuf, PathBuf), Error> {
    let home = places.target().join("python").join(name);
    python::clear(&home)?;
    let mut venv = python::command(places, python);
    venv.args("-m venv --without-pip".split(' ')).arg(&home);
    step::run(&format!("{name} environment"), &mut venv)?;
    let own = home.join("bin/python");
    Ok((home, own))
}

/// Installs the wheel with the pip of `python`. It must bring all it needs: no index is asked, and
/// a dependency that is missing is an error.
fn install(places: &Places, python: &Path, home: &Path, wheel: &Path) -> Result<(), Error> {
    let mut pip = python::command(places, python);
    pip.args("-m pip --isolated --quiet --disable-pip-version-check --python".split(' '))
        .arg(home)
        .args("install --no-index".split(' '))
        .arg(wheel);
    step::run("install", &mut pip).map(drop)
}

fn only_wheel(folder: &Path) -> Result<PathBuf, Error> {
    let entries = fs::read_dir(folder).map_err(|source| Error::Io {
        doing: format!("reading {}", folder.display()),
        source,
    })?;
    let wheels: Vec<PathBuf> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|end| end == "whl"))
        .collect();
    match <[PathBuf; 1]>::try_from(wheels) {
        Ok([wheel]) => Ok(wheel),
        Err(wheels) => Err(Error::Unreadable {
            what: format!(
                "{}: expected one wheel, found {}",
                folder.display(),
                wheels.len()
            ),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheel_installs_only_the_one_just_built() {
        let folder = tempfile::tempdir().expect("a folder");
        let text = only_wheel(folder.path()).expect_err("none").to_string();
        assert!(text.contains("found 0"), "{text}");
        let wheel = folder.path().join("weightsync-0.1.0-cp311-abi3-linux.whl");
        for name in [&wheel, &folder.path().join("weightsync-0.1.0.tar.gz")] {
            fs::write(name, "").expect("a file");
        }
        assert_eq!(only_wheel(folder.path()).expect("one"), wheel);
        fs::write(folder.path().join("other.whl"), "").expect("a file");
        let text = only_wheel(folder.path()).expect_err("two").to_string();
        assert!(text.contains("found 2"), "{text}");
    }
}
