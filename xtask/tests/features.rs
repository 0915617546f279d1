//! The documents are promises: each feature has tests that exist, the program they show is the one
//! that is tested, and their links lead somewhere.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// What a newcomer reads.
const DOCUMENTS: &[&str] = &["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "docs"];

/// What works, for people.
const TABLE: &str = "docs/features.md";

/// The tests of each row of that table.
const LIST: &str = "xtask/tests/features.txt";

#[test]
fn the_readme_shows_the_quickstart_as_it_is() {
    let readme = fs::read_to_string(root().join("README.md")).expect("README.md");
    let shown = readme
        .split_once("```rust,standalone_crate\n")
        .and_then(|(_, rest)| rest.split_once("```\n"))
        .map(|(program, _)| program)
        .expect("a program in the README");
    let path = root().join("crates/weightsync/examples/quickstart.rs");
    let example = fs::read_to_string(path).expect("the quickstart");
    // Its first line says how to run it, which the README does in words.
    let (first, program) = example.split_once('\n').expect("more than one line");
    assert!(first.starts_with("//!"), "{first}");
    assert_eq!(
        shown, program,
        "README.md and the quickstart example differ"
    );
}

/// Every file that a newcomer reads.
fn documents() -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = Vec::new();
    for document in DOCUMENTS.iter().map(|name| root().join(name)) {
        match document.is_dir() {
            true => files_below(&document, "md", &mut files),
            false => files.push(document),
        }
    }
    files
}

#[test]
fn every_link_between_documents_leads_somewhere() {
    let mut followed = 0;
    for file in documents() {
        let text = fs::read_to_string(&file).expect("a document in UTF-8");
        let folder = file.parent().expect("a file lies in a folder");
        for link in links(&text) {
            assert!(
                folder.join(link).exists(),
                "{} links to {link}, which does not exist",
                file.display()
            );
            followed += 1;
        }
    }
    assert!(followed > 0, "the documents have no link at all");
}

#[test]
fn rows_of_features_have_tests_that_exist() {
    let root = root();
    let read = |path| fs::read_to_string(root.join(path)).expect("a text in UTF-8");
    let (table, list) = (read(TABLE), read(LIST));
    // Read once, for the list has a thousand tests.
    let mut packages: HashMap<String, Vec<String>> = HashMap::new();
    let faults = faults(&table, &list, |package, test| {
        let (folder, extension, has): (_, _, fn(&str, &str) -> bool) = match package {
            "python" => (root.join("python/tests"), "py", has_python_test),
            "weightsync-fuzz" => (root.join("fuzz"), "rs", has_test),
            "xtask" => (root.join("xtask"), "rs", has_test),
            other => (root.join("crates").join(other), "rs", has_test),
        };
        let sources = packages
            .entry(package.to_owned())
            .or_insert_with(|| sources(&folder, extension));
        sources.iter().any(|source| has(source, test))
    });
    assert!(
        faults.is_empty(),
        "{TABLE} has the features, and {LIST} their tests: {faults:#?}"
    );
}

/// What is wrong with the table of features and the list of their tests.
fn faults(table: &str, list: &str, mut exists: impl FnMut(&str, &str) -> bool) -> Vec<String> {
    let rows: Vec<[&str; 4]> = features(table);
    let mut faults = Vec::new();
    if rows.is_empty() {
        faults.push("the table has no row".to_owned());
    }
    let mut without: Vec<&str> = rows.iter().map(|row| row[0]).collect();
    for [row, what, state, page] in &rows {
        if what.is_empty() || state.is_empty() || !page.contains("](") {
            faults.push(format!("`{row}` lacks what it is, its state or its page"));
        }
    }
    let mut row = "";
    for line in list.lines() {
        match (line.strip_prefix("  "), line.trim_start()) {
            (_, "") => {}
            (_, words) if words.starts_with('#') => {}
            (None, name) => {
                row = name;
                if !rows.iter().any(|[known, ..]| *known == row) {
                    faults.push(format!("`{row}` is no row of the table"));
                }
            }
            (Some(name), _) => match name.split_once("::") {
                Some((package, test)) if exists(package, test) => {
                    without.retain(|other| *other != row);
                }
                _ => faults.push(format!("`{row}` names {name}, which is no test")),
            },
        }
    }
    faults.extend(without.iter().map(|row| format!("`{row}` has no test")));
    faults
}

/// The rows of the table of features, without its head.
fn features(table: &str) -> Vec<[&str; 4]> {
    let lines = table.lines().filter_map(|line| line.strip_prefix("| "));
    let rows = lines.map(|line| {
        let mut cells = line.trim_end().trim_end_matches('|').split(" | ");
        // A row that lacks cells is a fault, and not passed over.
        [(); 4].map(|()| cells.next().unwrap_or_default().trim())
    });
    rows.skip(1).collect()
}

#[test]
fn features_are_faulty_without_a_row_a_page_or_a_test() {
    let table = "| row | what it is | state | page |\n|---|---|---|---|\n\
                 | A1 one | first | done | [P](p.md) |\n| A2 `two` | second | not yet: x | [P](p.md) |\n";
    let list = "# words\n\nA1 one\n  # words\n  xtask::first\n\nA2 `two`\n  python::test_second\n";
    let known = ["xtask::first", "python::test_second"];
    let faults = |table: &str, list: &str| {
        faults(table, list, |package, test| {
            known.contains(&format!("{package}::{test}").as_str())
        })
    };
    assert_eq!(faults(table, list), [""; 0]);
    let cases = [
        (
            "A2 `two`\n",
            "A3 three\n",
            "`A3 three` is no row of the table",
        ),
        (
            "xtask::first",
            "xtask::gone",
            "`A1 one` names xtask::gone, which is no test",
        ),
        (
            "xtask::first",
            "first",
            "`A1 one` names first, which is no test",
        ),
        ("  xtask::first\n", "", "`A1 one` has no test"),
        ("A2 `two`\n  python", "  python", "`A2 `two`` has no test"),
    ];
    for (from, to, expected) in cases {
        let found = faults(table, &list.replace(from, to));
        assert!(found.contains(&expected.to_owned()), "{to}: {found:?}");
    }
    let lacks = ["`A1 one` lacks what it is, its state or its page"];
    assert_eq!(faults(&table.replacen("[P](p.md)", "p.md", 1), list), lacks);
    assert_eq!(faults(&table.replacen("done", "", 1), list), lacks);
    assert_eq!(faults(&table.replacen("| done ", "", 1), list), lacks);
    let empty = ["the table has no row"];
    assert_eq!(faults("", ""), empty);
}

#[test]
fn every_test_the_security_page_names_exists() {
    let root = root();
    let text = fs::read_to_string(root.join("docs/security.md")).expect("docs/security.md");
    // Its tests are named without their crates.
    let is_name = |code: &&str| {
        let of_test = |letter: char| letter.is_ascii_lowercase() || letter == '_';
        // An option such as `max_slots` has one underscore.
        code.matches('_').count() > 1 && code.chars().all(of_test)
    };
    let named: Vec<&str> = text.split('`').skip(1).step_by(2).filter(is_name).collect();
    assert!(!named.is_empty(), "it names no test at all");
    let all = ["crates", "fuzz"].map(|folder| sources(&root.join(folder), "rs"));
    let exists = |name: &&str| all.iter().flatten().any(|source| has_test(source, name));
    let missing: Vec<&str> = named.into_iter().filter(|name| !exists(name)).collect();
    assert!(
        missing.is_empty(),
        "docs/security.md names tests that do not exist: {missing:#?}"
    );
}

#[test]
fn a_function_that_is_no_test_does_not_count() {
    let source = "#[test]\nfn first() {}\n\n    #[test]\n    #[should_panic]\n    fn second() {}\nfn third() {}\n\
                  trials![\n    group::fourth,\n]\nuse group::{fifth, group::sixth,\n};\n\
                  (\n    \"seventh\",\n    seventh,\n)\nsay(\"eighth\", 8);\n\
                  scenarios![\n    group::ninth[One Two],\n    group::tenth[],\n]\n\
                  &[\n    (\"eleventh\", group::run),\n]\nlist = &[(\"no\", group::no)];\n\
                  &[(\"twelfth\", group::run)];\n#[tokio::test]\nasync fn thirteenth() {}\n";
    let names = [
        "first",
        "second",
        "fourth",
        "seventh",
        "ninth",
        "tenth",
        "eleventh",
        "twelfth",
        "thirteenth",
    ];
    assert_eq!(names.map(|name| has_test(source, name)), [true; 9]);
    let names = ["third", "fir", "sixth", "eighth", "no"];
    assert_eq!(names.map(|name| has_test(source, name)), [false; 5]);
    let source = "def test_one():\n    pass\nclass Two:\n    def test_two(self):\n        pass\n\
                  def three():\n    test_four()\n";
    let names = ["test_one", "test_two", "three", "test_four", "test_o"];
    let expected = [true, true, false, false, false];
    assert_eq!(names.map(|name| has_python_test(source, name)), expected);
}

#[test]
fn links_outside_the_repository_are_skipped() {
    let text = "[a](docs/a.md#part) and [b](https://example.org/b), [c](../c.rs); `f(x)` [d] (e)";
    assert_eq!(links(text).collect::<Vec<_>>(), ["docs/a.md", "../c.rs"]);
}

/// The targets of the links to other files, without the part of the file they name.
fn links(text: &str) -> impl Iterator<Item = &str> {
    text.split("](")
        .skip(1)
        .filter_map(|rest| rest.split_once(')'))
        .map(|(target, _)| target.split('#').next().unwrap_or(target))
        .filter(|target| !target.is_empty() && !target.contains("://"))
}

/// Whether a source has a function of that name right under the attributes of a test, or lists it
/// on a line of its own, by its module (with what it needs in brackets) or as a text, as our own
/// harnesses do.
fn has_test(source: &str, name: &str) -> bool {
    let function = format!("fn {name}(");
    let listed = format!("::{name},");
    let with_needs = format!("::{name}[");
    let quoted = format!("\"{name}\",");
    let paired = format!("(\"{name}\", ");
    let mut is_test = false;
    source.lines().map(str::trim).any(|line| {
        let found = is_test && line.trim_start_matches("async ").starts_with(&function);
        let marked = line == "#[test]" || line.starts_with("#[tokio::test");
        is_test = marked || (is_test && line.starts_with("#["));
        let scenario = line.contains(&with_needs) && line.ends_with("],");
        found
            || line == quoted
            || (line.trim_start_matches("&[").starts_with(&paired)
                && ["),", "{", ")];"].iter().any(|end| line.ends_with(end)))
            || scenario
            || (line.ends_with(&listed) && !line.contains([' ', '(']))
    })
}

/// Whether a source has a function of that name which pytest, or unittest, takes for a test.
fn has_python_test(source: &str, name: &str) -> bool {
    let function = format!("def {name}(");
    let lines = || source.lines().map(str::trim_start);
    name.starts_with("test_") && lines().any(|line| line.starts_with(&function))
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn sources(folder: &Path, extension: &str) -> Vec<String> {
    let mut files = Vec::new();
    files_below(folder, extension, &mut files);
    let read = |path: &PathBuf| fs::read_to_string(path).expect("a source in UTF-8");
    files.iter().map(read).collect()
}

fn files_below(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    let mut folders: Vec<PathBuf> = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder)
            .unwrap_or_else(|error| panic!("reading {}: {error}", folder.display()));
        for path in entries.map(|entry| entry.expect("an entry of the folder").path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|own| own == extension) {
                found.push(path);
            }
        }
    }
}
