//! Where in a directory the weights are.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Bounds, name_of, pickle, read_small, unusable};
use crate::anchor::{INDEX, SAFETENSORS};
use crate::error::{Result, StoreError};
use crate::format::{DATA, HEAD, VERSIONS, is_file_name};

/// The file in which a trainer says which step it saved last.
const LATEST: &str = "latest_checkpointed_iteration.txt";

/// Where a step's weights may be, below its directory.
const BELOW: [&str; 3] = ["actor/huggingface", "actor", "huggingface"];

pub(super) enum Found {
    /// The directory is a store.
    Store,
    Files {
        /// The file, or the directory of the files.
        at: PathBuf,
        files: Vec<PathBuf>,
        index: Option<PathBuf>,
    },
}

pub(super) fn find(path: &Path, bounds: Option<&Bounds>) -> Result<Found> {
    let about = fs::metadata(path);
    let about = about.map_err(StoreError::file("opening", path.display().to_string()))?;
    if !about.is_dir() {
        return Ok(Found::Files {
            at: path.into(),
            files: vec![path.into()],
            index: None,
        });
    }
    if path.join(VERSIONS).is_dir() && (path.join(HEAD).exists() || path.join(DATA).is_dir()) {
        return Ok(Found::Store);
    }
    if let Some(found) = within(path, bounds)? {
        return Ok(found);
    }
    let step = newest_step(path)?;
    let at = step.as_deref().unwrap_or(path);
    if step.is_some()
        && let Some(found) = within(at, bounds)?
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
fn within(dir: &Path, bounds: Option<&Bounds>) -> Result<Option<Found>> {
    let below = BELOW.iter().map(|below| dir.join(below));
    for dir in std::iter::once(dir.to_owned()).chain(below) {
        if dir.is_dir()
            && let Some(found) = directly(dir, bounds)?
        {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn directly(at: PathBuf, bounds: Option<&Bounds>) -> Result<Option<Found>> {
    let index = at.join(INDEX);
    if index.exists() {
        bounds.map_or(Ok(()), |bounds| bounds.check(&index))?;
        let files = shards(&at, &index)?;
        let index = Some(index);
        return Ok(Some(Found::Files { at, files, index }));
    }
    let only = at.join(format!("model{SAFETENSORS}"));
    let files = match only.exists() {
        true => vec![only],
        false => {
            let mut names = names(&at)?;
            names.retain(|name| name.ends_with(SAFETENSORS) && !name.starts_with('.'));
            names.into_iter().map(|name| at.join(name)).collect()
        }
    };
    let index = None;
    Ok((!files.is_empty()).then_some(Found::Files { at, files, index }))
}

/// The files that an index names, each once.
fn shards(at: &Path, index: &Path) -> Result<Vec<PathBuf>> {
    let map = super::read_index(index)?;
    let mut names: Vec<_> = map.iter().map(|(tensor, file)| (file, tensor)).collect();
    names.sort();
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
fn newest_step(dir: &Path) -> Result<Option<PathBuf>> {
    let names = names(dir)?;
    let steps = names.iter().filter_map(|name| {
        let step: u64 = name.strip_prefix("global_step_")?.parse().ok()?;
        dir.join(name).is_dir().then_some((step, name))
    });
    let steps: Vec<_> = steps.collect();
    // The trainer may be writing one that is newer than what it says.
    let said = read_small(&dir.join(LATEST), 64).ok();
    let said = said.and_then(|text| String::from_utf8(text).ok()?.trim().parse().ok());
    let said = steps.iter().find(|(step, _)| Some(*step) == said);
    let newest = said.or(steps.iter().max());
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
