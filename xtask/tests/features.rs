//! `docs/features.md` is a promise: the tests it names must exist.

use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn every_test_the_feature_table_names_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let text = fs::read_to_string(root.join("docs/features.md")).expect("docs/features.md");
    let named: Vec<(&str, &str)> = named_tests(&text).collect();
    assert!(!named.is_empty(), "the table names no test at all");

    let missing: Vec<String> = named
        .into_iter()
        .filter(|(package, test)| {
            let folder = match *package {
                "weightsync-fuzz" => root.join("fuzz"),
                "xtask" => root.join("xtask"),
                other => root.join("crates").join(other),
            };
            !sources(&folder).iter().any(|source| has_test(source, test))
        })
        .map(|(package, test)| format!("{package}::{test}"))
        .collect();
    assert!(
        missing.is_empty(),
        "docs/features.md names tests that do not exist: {missing:#?}"
    );
}

#[test]
fn a_function_that_is_no_test_does_not_count() {
    let source = "#[test]\nfn first() {}\n\n    #[test]\n    #[should_panic]\n    fn second() {}\nfn third() {}\n\
                  trials![\n    group::fourth,\n]\nuse group::{fifth, group::sixth,\n};\n";
    let found =
        ["first", "second", "third", "fir", "fourth", "sixth"].map(|name| has_test(source, name));
    assert_eq!(found, [true, true, false, false, true, false]);
    let table = "| row | text with `code` | `weightsync-mem::a_name`, `xtask::b` |";
    let named: Vec<_> = named_tests(table).collect();
    assert_eq!(named, [("weightsync-mem", "a_name"), ("xtask", "b")]);
}

/// The pieces of code of the form `package::test`.
fn named_tests(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines()
        .filter(|line| line.starts_with('|'))
        .flat_map(|line| line.split('`').skip(1).step_by(2))
        .filter_map(|code| code.split_once("::"))
}

/// Whether a source has a function of that name right under the attributes of a test, or lists it
/// by its module on a line of its own, as a harness of ours does.
fn has_test(source: &str, name: &str) -> bool {
    let function = format!("fn {name}(");
    let listed = format!("::{name},");
    let mut is_test = false;
    source.lines().map(str::trim).any(|line| {
        let found = is_test && line.starts_with(&function);
        is_test = line == "#[test]" || (is_test && line.starts_with("#["));
        found || (line.ends_with(&listed) && !line.contains([' ', '(']))
    })
}

fn sources(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders: Vec<PathBuf> = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder)
            .unwrap_or_else(|error| panic!("reading {}: {error}", folder.display()));
        for path in entries.map(|entry| entry.expect("an entry of the folder").path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(fs::read_to_string(&path).expect("a source in UTF-8"));
            }
        }
    }
    found
}
