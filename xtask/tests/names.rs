//! A type name means one thing: the product's crates use it once, unless both are the same idea.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// How many of a hundred names may be used again, for the same idea: a type and its class in Python,
/// or its form for another system.
const AGAIN: usize = 5;

/// What every module may have.
const EVERYWHERE: &[&str] = &["Error", "Result"];

/// Names that say nothing alone.
const EMPTY: &[&str] = &["Lost", "NotIn", "Place", "Shared", "Why"];

/// Crates and modules that are no part of the product.
const TESTS: &[&str] = &[
    "loom",
    "simulation",
    "test",
    "testing",
    "tests",
    "weightsync-bench",
    "weightsync-conformance",
];

#[test]
fn type_names_are_used_once_in_the_workspace() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let mut names: BTreeMap<String, BTreeSet<PathBuf>> = BTreeMap::new();
    for package in folder(&crates).filter(|package| !is_test(package)) {
        types_below(&package.join("src"), &mut names);
    }
    assert!(names.len() > 500, "{} type names found", names.len());
    let empty: Vec<_> = names
        .iter()
        .filter(|(name, _)| EMPTY.contains(&name.as_str()))
        .collect();
    assert!(empty.is_empty(), "names that say nothing: {empty:#?}");
    let again: Vec<_> = names
        .iter()
        .filter(|(name, files)| files.len() > 1 && !EVERYWHERE.contains(&name.as_str()))
        .collect();
    assert!(
        again.len() * 100 <= names.len() * AGAIN,
        "{} of {} type names are used again: {again:#?}",
        again.len(),
        names.len()
    );
}

/// Adds the types of all files below a folder.
fn types_below(path: &Path, names: &mut BTreeMap<String, BTreeSet<PathBuf>>) {
    for path in folder(path).filter(|path| !is_test(path)) {
        if path.is_dir() {
            types_below(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).expect("code in UTF-8");
            for name in product_of(&text).filter_map(type_name) {
                names
                    .entry(name.to_owned())
                    .or_default()
                    .insert(path.clone());
            }
        }
    }
}

fn folder(path: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(path).expect("a folder that can be read");
    entries.map(|entry| entry.expect("an entry of the folder").path())
}

fn is_test(path: &Path) -> bool {
    let name = path.file_stem().and_then(|name| name.to_str());
    name.is_none_or(|name| TESTS.contains(&name))
}

/// The lines above the tests that a file ends with.
fn product_of(text: &str) -> impl Iterator<Item = &str> {
    let next = text.lines().skip(1).chain([""]);
    text.lines()
        .zip(next)
        .take_while(|(line, next)| {
            *line != "#[cfg(test)]" || !next.starts_with("mod ") || !next.ends_with('{')
        })
        .map(|(line, _)| line)
}

/// The name of the type that a line begins to define.
fn type_name(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let line = match line.strip_prefix("pub(") {
        Some(rest) => rest.split_once(") ")?.1,
        None => line.strip_prefix("pub ").unwrap_or(line),
    };
    let (kind, rest) = line.split_once(' ')?;
    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
    let is_type = matches!(kind, "struct" | "enum" | "trait" | "union");
    is_type.then(|| &rest[..end.unwrap_or(rest.len())])
}
