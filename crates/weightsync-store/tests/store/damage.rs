//! Every file of a store, spoilt in every way.

use std::fs;
use std::path::{Path, PathBuf};

use weightsync_conformance::scale;
use weightsync_core::Version;
use weightsync_store::{SaveOptions, Store, StoreError, Which, Writer};

use crate::weights::{MODEL, at, exactly, of, weights};

const ELEMENTS: usize = 4096;

/// The versions of the store: 1 and 5 are full ones.
const VERSIONS: u64 = 6;

fn options() -> SaveOptions {
    let mut options = SaveOptions::default();
    options.shard_bytes = 20_000;
    options.files = vec![("config.json".into(), b"{}".to_vec())];
    options
}

/// A store whose weights have the numbers of their versions.
fn make(dir: &Path) -> Store {
    let store = Store::open(dir.to_str().expect("a plain path")).expect("a path");
    let mut writer = Writer::claim(&store, options()).expect("a directory");
    for number in 1..=VERSIONS {
        if number == 5 {
            writer.save_whole_next();
        }
        writer
            .save_weights(MODEL, &weights(number, ELEMENTS))
            .expect("room");
    }
    store.set_name("best", &at(Version(2))).expect("a version");
    store
}

fn files(dir: &Path, all: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        match path.is_dir() {
            true => files(&path, all),
            false => all.push(path),
        }
    }
    all.sort();
}

/// What happens to a file.
#[derive(Clone, Copy, Debug)]
enum Harm {
    Cut(usize),
    Flip(usize),
    Grow,
    Remove,
    Directory,
}

impl Harm {
    /// Some for each kind; so many flips.
    fn all(len: usize, flips: usize) -> Vec<Self> {
        let mut all = vec![Self::Remove, Self::Directory, Self::Grow];
        let mut cuts = vec![0, 1, len / 2, len.saturating_sub(1)];
        cuts.retain(|cut| *cut < len);
        cuts.dedup();
        all.extend(cuts.into_iter().map(Self::Cut));
        // From both ends, where headers and the last bytes are, and in between.
        all.extend((0..len).step_by((len / flips).max(1)).map(Self::Flip));
        all.extend((0..len.min(flips)).map(Self::Flip));
        all
    }

    fn inflict(self, path: &Path, bytes: &[u8]) {
        let changed = match self {
            Self::Cut(len) => bytes[..len].to_vec(),
            Self::Grow => [bytes, &[b' ', 0, 1, 2][..]].concat(),
            Self::Flip(at) => {
                let mut bytes = bytes.to_vec();
                bytes[at] ^= 1 << (at % 8);
                bytes
            }
            Self::Remove => return fs::remove_file(path).expect("a file"),
            Self::Directory => {
                fs::remove_file(path).expect("a file");
                return fs::create_dir(path).expect("room");
            }
        };
        fs::write(path, changed).expect("room");
    }
}

/// The versions that can be loaded, each with its right weights. Others fail with what is damaged.
fn loadable(store: &Store, path: &Path, what: &str) -> Vec<u64> {
    let name = path.display().to_string();
    let mut good = Vec::new();
    for version in 1..=VERSIONS {
        match store.load(&exactly(Version(version))) {
            Ok(loaded) => {
                assert_eq!(of(&loaded), Ok((Version(version), version)), "{what}");
                good.push(version);
            }
            // A manifest that is not there is no version.
            Err(StoreError::NoSuchVersion { .. }) if !path.exists() => {}
            Err(error) => names(&error, &name, what),
        }
    }
    good
}

/// The error is about this file, or about a directory that it is missing from.
fn names(error: &StoreError, file: &str, what: &str) {
    let text = error.to_string();
    assert!(text.contains(file), "{what}: {text}");
}

pub fn loads_give_no_damaged_weights() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = make(dir.path());
    let mut all = Vec::new();
    files(dir.path(), &mut all);
    let flips = usize::try_from(scale::rounds(1000, 12)).expect("few");
    for path in all {
        let bytes = fs::read(&path).expect("a file");
        for harm in Harm::all(bytes.len(), flips) {
            let what = format!("{} after {harm:?}", path.display());
            harm.inflict(&path, &bytes);
            let name = path.display().to_string();
            let good = loadable(&store, &path, &what);
            match store.load(&Which::Newest) {
                Ok(loaded) => {
                    let (version, number) = of(&loaded).expect(&what);
                    assert_eq!(version.0, number, "{what}");
                    assert_eq!(Some(&number), good.last(), "{what}");
                    let named = loaded.damage.iter().any(|damage| damage.file == name);
                    assert!(named || number == VERSIONS, "{what}: {:?}", loaded.damage);
                }
                Err(error) => {
                    assert!(good.is_empty(), "{what}: {error}");
                    names(&error, &name, &what);
                }
            }
            let found = store.versions().expect(&what).damage;
            let of_list = name.ends_with("head.json") || name.contains("/versions/");
            // Of a manifest that is missing, but for the newest, the place alone is known.
            let gone = matches!(harm, Harm::Remove)
                && !name.contains("head")
                && good.last() == Some(&VERSIONS);
            let noticed = found.iter().any(|damage| match gone {
                true => damage.file.ends_with("versions") && name.starts_with(&damage.file),
                false => damage.file == name,
            });
            assert_eq!(noticed, of_list, "{what}: {found:?}");
            if let Harm::Directory = harm {
                fs::remove_dir(&path).expect("empty");
            }
            fs::write(&path, &bytes).expect("room");
        }
    }
    assert_eq!(
        loadable(&store, dir.path(), "unharmed").len() as u64,
        VERSIONS
    );
}

pub fn writers_go_on_after_damage() {
    let made = tempfile::tempdir().expect("a directory");
    make(made.path());
    let mut all = Vec::new();
    files(made.path(), &mut all);
    for path in all {
        let bytes = fs::read(&path).expect("a file");
        let harms = [
            Harm::Remove,
            Harm::Cut(bytes.len() / 2),
            Harm::Flip(bytes.len() / 3),
        ];
        for harm in harms.into_iter().filter(|_| !bytes.is_empty()) {
            let what = format!("{} after {harm:?}", path.display());
            let dir = tempfile::tempdir().expect("a directory");
            copy(made.path(), dir.path());
            let path = dir
                .path()
                .join(path.strip_prefix(made.path()).expect("below"));
            let store = Store::open(dir.path().to_str().expect("a plain path")).expect("a path");
            harm.inflict(&path, &bytes);
            let before = loadable(&store, &path, &what);
            for number in [100, 101] {
                let mut writer = Writer::claim(&store, options()).expect(&what);
                writer.read_base().expect(&what);
                writer
                    .save_weights(MODEL, &weights(number, ELEMENTS))
                    .expect(&what);
                let loaded = store.load(&Which::Newest).expect(&what);
                assert_eq!(of(&loaded).map(|it| it.1), Ok(number), "{what}");
                assert_eq!(loaded.damage, [], "{what}");
            }
            // A version whose manifest is damaged is none any more; its number stays used.
            let after: Vec<_> = before
                .iter()
                .copied()
                .filter(|version| {
                    let loaded = store.load(&exactly(Version(*version)));
                    loaded.is_ok_and(|loaded| of(&loaded) == Ok((Version(*version), *version)))
                })
                .collect();
            assert_eq!(after, before, "{what}");
        }
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("room");
    for entry in fs::read_dir(from).expect("a directory") {
        let entry = entry.expect("an entry");
        let to = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy(&entry.path(), &to),
            false => drop(fs::copy(entry.path(), to).expect("room")),
        }
    }
}

/// The time in a manifest is for people: one that is years off makes no difference. Files have whatever
/// times the clock gave them, and those make none either.
pub fn clocks_decide_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let store = make(dir.path());
    let mut all = Vec::new();
    files(dir.path(), &mut all);
    let years = std::time::Duration::from_secs(3600 * 24 * 365 * 30);
    for (index, path) in all.iter().enumerate() {
        let file = fs::File::options().append(true).open(path).expect("a file");
        let now = std::time::SystemTime::now();
        let then = if index % 2 == 0 {
            now + years
        } else {
            now - years
        };
        file.set_modified(then).expect("a time");
    }
    assert_eq!(
        loadable(&store, dir.path(), "other times").len() as u64,
        VERSIONS
    );
    let mut options = options();
    options.keep = "2".parse().expect("a rule");
    let mut writer = Writer::claim(&store, options).expect("a store");
    writer
        .save_weights(MODEL, &weights(7, ELEMENTS))
        .expect("room");
    let versions = store.versions().expect("a store").versions;
    let there: Vec<_> = versions.iter().map(|one| one.models[0].version.0).collect();
    assert_eq!(there, [2, 6, 7]);
}
