//! Where in a directory the weights are.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::{Reach, name_of, pickle, read_small, unusable};
use crate::anchor::{INDEX, SAFETENSORS};
use crate::error::{Result, StoreError};
use crate::format::{DATA, HEAD, VERSIONS, is_file_name};

/// The file in which a trainer says which step it saved last.
const LATEST: &str = "latest_checkpointed_iteration.txt";

/// Where a step's weights may be, below its directory.
const BELOW: [&str; 3] = ["actor/huggingface", "actor", "huggingface"];

/// How many missing files an error names.
const SHOWN: usize = 5;

pub(super) enum FoundCheckpoint {
    /// The directory is a store.
    Store,
    Files {
        /// The file, or the directory of the files.
        at: PathBuf,
        files: Vec<PathBuf>,
        index: Option<PathBuf>,
    },
}

pub(super) fn find(path: &Path, reach: &Reach) -> Result<FoundCheckpoint> {
    let about = fs::metadata(path);
    let about = about.map_err(StoreError::file("opening", path.display().to_string()))?;
    // A user who names a file means that file.
    if !about.is_dir() {
        return Ok(FoundCheckpoint::Files {
            at: path.into(),
            files: vec![path.into()],
            index: None,
        });
    }
    // A store itself, before its files could be taken for a checkpoint.
    if path.join(VERSIONS).is_dir() && (path.join(HEAD).exists() || path.join(DATA).is_dir()) {
        return Ok(FoundCheckpoint::Store);
    }
    // The directory itself comes before the steps below it.
    if let Some(found) = within(path, reach)? {
        return Ok(found);
    }
    // A directory of steps: the step that the trainer named, else the newest.
    let step = newest_step(path, reach)?;
    let at = step.as_deref().unwrap_or(path);
    if step.is_some()
        && let Some(found) = within(at, reach)?
    {
        return Ok(found);
    }
    Err(match pickle::in_directory(at, &BELOW)? {
        Some(refused) => refused,
        None => unusable(
            at,
            "it has no safetensors file: expected such a file, or a directory with model.safetensors, \
             shards and their index, or directories global_step_N",
        ),
    })
}

/// The weights in a directory, or where trainers put them below it.
fn within(dir: &Path, reach: &Reach) -> Result<Option<FoundCheckpoint>> {
    let below = BELOW.iter().map(|below| dir.join(below));
    for dir in std::iter::once(dir.to_owned()).chain(below) {
        if dir.is_dir()
            && let Some(found) = directly(dir, reach)?
        {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// The weights in a directory, whole: all that its index names, or else all that the names of its files
/// count up to.
fn directly(at: PathBuf, reach: &Reach) -> Result<Option<FoundCheckpoint>> {
    let all = names(&at)?;
    let only = format!("model{SAFETENSORS}");
    // The name that programs look for first.
    let has_only = all.contains(&only);
    // An index settles which files belong together.
    let index = index_of(&at, &all, has_only)?;
    if let Some(index) = index {
        let files = shards(&at, &index, reach)?;
        if has_only && index == at.join(INDEX) && !files.contains(&at.join(&only)) {
            return Err(two_splits(&at, &only, INDEX));
        }
        let index = Some(index);
        return Ok(Some(FoundCheckpoint::Files { at, files, index }));
    }
    // Nothing says which files there are, so one of these may be another.
    if let Some(name) = all.iter().find(|name| is_unfinished(name)) {
        let what = format!("{name} was not written to its end: finish that, or remove it");
        return Err(unusable(&at, what));
    }
    let names = all.iter().map(String::as_str);
    let names = names.filter(|name| name.ends_with(SAFETENSORS) && !name.starts_with('.'));
    let mut names: Vec<&str> = names.collect();
    if has_only {
        if let Some(other) = names.iter().find(|name| is_numbered_as(name, "model")) {
            return Err(two_splits(&at, &only, other));
        }
        names = vec![&only];
    }
    // Without an index, the numbers in the names tell whether a file is missing.
    check_numbers(&at, &names)?;
    let files: Vec<_> = names.into_iter().map(|name| at.join(name)).collect();
    let index = None;
    Ok((!files.is_empty()).then_some(FoundCheckpoint::Files { at, files, index }))
}

/// Whether a file is one that a download or a copy has not finished, by its name.
fn is_unfinished(name: &str) -> bool {
    const ENDS: [&str; 8] = [
        "aria2",
        "crdownload",
        "download",
        "filepart",
        "part",
        "partial",
        "temp",
        "tmp",
    ];
    let end = name.rsplit_once('.').map(|(_, end)| end);
    end == Some("incomplete")
        || name.contains(SAFETENSORS) && end.is_some_and(|end| ENDS.contains(&end))
}

/// The index of a directory. That of another name counts where nothing else says what the weights are.
fn index_of(at: &Path, names: &[String], has_only: bool) -> Result<Option<PathBuf>> {
    if names.iter().any(|name| name == INDEX) {
        return Ok(Some(at.join(INDEX)));
    }
    let is_one = |name: &&String| {
        name.contains(".safetensors.index.") && name.ends_with(".json") && !name.starts_with('.')
    };
    let found: Vec<_> = names.iter().filter(is_one).collect();
    match found[..] {
        [] => Ok(None),
        _ if has_only => Ok(None),
        [index] => Ok(Some(at.join(index))),
        [one, other, ..] => Err(unusable(
            at,
            format!(
                "it has two indexes, {one} and {other}: leave the one of the model that is meant"
            ),
        )),
    }
}

fn two_splits(at: &Path, one: &str, other: &str) -> StoreError {
    let what = format!(
        "{one} and {other} are two checkpoints: remove the one that is not meant, or give the file itself"
    );
    unusable(at, what)
}

/// A file that says that it is one of several, such as `model-00002-of-00003.safetensors`.
struct Numbered<'a> {
    /// What is before and behind the numbers.
    around: (&'a str, &'a str),
    number: &'a str,
    of: &'a str,
}

impl<'a> Numbered<'a> {
    fn of(name: &'a str) -> Option<Self> {
        let bare = name.strip_suffix(SAFETENSORS)?;
        let at = bare.rfind("-of-").or_else(|| bare.rfind("_of_"))?;
        let (before, behind) = (&bare[..at], &bare[at + 4..]);
        let is_digit = |one: char| one.is_ascii_digit();
        let stem = before.trim_end_matches(is_digit);
        let rest = behind.trim_start_matches(is_digit);
        let number = &before[stem.len()..];
        let of = &behind[..behind.len() - rest.len()];
        (!number.is_empty() && !of.is_empty()).then_some(Self {
            around: (stem, rest),
            number,
            of,
        })
    }
}

fn is_numbered_as(name: &str, stem: &str) -> bool {
    Numbered::of(name).is_some_and(|one| one.around.0.trim_end_matches(['-', '_']) == stem)
}

/// Refuses files that count up to a number and are not all there.
fn check_numbers(at: &Path, names: &[&str]) -> Result<()> {
    // By what is around the numbers: a directory may have the files of several models.
    let mut splits: BTreeMap<(&str, &str), Vec<(&str, Numbered<'_>)>> = BTreeMap::new();
    for name in names {
        if let Some(one) = Numbered::of(name) {
            splits.entry(one.around).or_default().push((name, one));
        }
    }
    for files in splits.values() {
        let (first, of) = (files[0].0, files[0].1.of);
        if let Some((other, _)) = files.iter().find(|(_, one)| one.of != of) {
            return Err(two_splits(at, first, other));
        }
        let numbers: BTreeSet<u64> = files
            .iter()
            .filter_map(|(_, one)| one.number.parse().ok())
            .collect();
        let count: u64 = of.parse().unwrap_or(u64::MAX);
        // Some programs count from 0.
        let from = u64::from(!numbers.contains(&0));
        let expected = from..count.saturating_add(from);
        if let Some((other, _)) = files.iter().find(|(_, one)| {
            !one.number
                .parse()
                .is_ok_and(|number| expected.contains(&number))
        }) {
            let what =
                format!("{other} is one more than the {count} that it says there are: remove it");
            return Err(unusable(at, what));
        }
        let absent = expected.filter(|number| !numbers.contains(number));
        let absent: Vec<_> = absent
            .take(SHOWN + 1)
            .map(|number| in_place_of(first, &files[0].1, number))
            .collect();
        if !absent.is_empty() {
            let more = if absent.len() > SHOWN {
                " and more"
            } else {
                ""
            };
            let shown = absent[..absent.len().min(SHOWN)].join(", ");
            let what = format!("{shown}{more}: missing, as {first} says that it is one of {count}");
            return Err(unusable(at, what));
        }
    }
    check_gaps(at, names)
}

/// The name of another file of the split.
fn in_place_of(name: &str, one: &Numbered<'_>, number: u64) -> String {
    let (start, end) = (one.around.0.len(), one.around.0.len() + one.number.len());
    format!(
        "{}{number:0width$}{}",
        &name[..start],
        &name[end..],
        width = end - start
    )
}

/// Refuses a gap in files that are numbered without a count: `consolidated.00.safetensors`,
/// `consolidated.01.safetensors`, …. A single file may be numbered for another reason.
fn check_gaps(at: &Path, names: &[&str]) -> Result<()> {
    let mut series: BTreeMap<&str, BTreeMap<u64, &str>> = BTreeMap::new();
    for name in names.iter().filter(|name| Numbered::of(name).is_none()) {
        let Some(bare) = name.strip_suffix(SAFETENSORS) else {
            continue;
        };
        let stem = bare.trim_end_matches(|one: char| one.is_ascii_digit());
        if let Ok(number) = bare[stem.len()..].parse() {
            series.entry(stem).or_default().insert(number, name);
        }
    }
    for (stem, files) in series {
        let (Some((first, _)), Some((last, name))) =
            (files.first_key_value(), files.last_key_value())
        else {
            continue;
        };
        let is_known = stem == "consolidated.";
        if files.len() == 1 && !is_known {
            continue;
        }
        // Some programs count from 1.
        let from = u64::from(*first > 0 && !is_known);
        if let Some(absent) = (from..*last).find(|number| !files.contains_key(number)) {
            let width = name.len() - SAFETENSORS.len() - stem.len();
            let what =
                format!("{stem}{absent:0width$}{SAFETENSORS} is missing, and {name} is there");
            return Err(unusable(at, what));
        }
    }
    Ok(())
}

/// The files that an index names, each once.
fn shards(at: &Path, index: &Path, reach: &Reach) -> Result<Vec<PathBuf>> {
    let map = super::read_index(index, reach)?;
    let mut names: Vec<_> = map.iter().map(|(tensor, file)| (file, tensor)).collect();
    names.sort();
    // An index names each file once for every tensor in it.
    names.dedup_by_key(|(file, _)| *file);
    let paths = names.into_iter().map(|(file, tensor)| {
        // Other files of this computer are no part of the checkpoint.
        if !is_file_name(file) {
            let what = format!(
                "it has tensor {tensor:?} in {file:?}: expected the name of a file in {}",
                at.display()
            );
            return Err(unusable(index, what));
        }
        let path = at.join(file);
        match path.exists() {
            true => Ok(path),
            false => Err(unusable(
                at,
                format!("{file} is missing, which its index names for tensor {tensor:?}"),
            )),
        }
    });
    paths.collect()
}

/// The directory `global_step_N` that was saved last.
fn newest_step(dir: &Path, reach: &Reach) -> Result<Option<PathBuf>> {
    let names = names(dir)?;
    let steps = names.iter().filter_map(|name| {
        let step: u64 = name.strip_prefix("global_step_")?.parse().ok()?;
        dir.join(name).is_dir().then_some((step, name))
    });
    let steps: Vec<_> = steps.collect();
    // The trainer may be writing one that is newer than what it says.
    let said = read_small(&dir.join(LATEST), 64, reach).ok();
    let said: Option<u64> = said.and_then(|text| String::from_utf8(text).ok()?.trim().parse().ok());
    let newest = match said {
        Some(said) if !steps.is_empty() => {
            let found = steps.iter().find(|(step, _)| *step == said);
            let missing = || {
                let what = format!(
                    "global_step_{said} is missing, which {LATEST} names: give the directory of the \
                     step that is meant"
                );
                unusable(dir, what)
            };
            Some(found.ok_or_else(missing)?)
        }
        _ => steps.iter().max(),
    };
    Ok(newest.map(|(_, name)| dir.join(name)))
}

/// What a directory contains, in order.
pub(super) fn names(dir: &Path) -> Result<Vec<String>> {
    let failed = || StoreError::file("listing", dir.display().to_string());
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed())? {
        names.push(name_of(&entry.map_err(failed())?.path()));
    }
    names.sort();
    Ok(names)
}
