//! The glossary bans words. They are in no document, and in no comment, text or test name of the
//! code.

use std::fs;
use std::path::{Path, PathBuf};

/// What is read: the documents, and everything that a person reads in code.
const READ: &[&str] = &[
    ".config", "bench", "crates", "docs", "examples", "fuzz", "python", "xtask",
];

/// Folders below these that no person writes.
const BUILT: &[&str] = &["target", "__pycache__"];

/// The file that has the banned words as examples.
const THIS: &str = "xtask/tests/words.rs";

#[test]
fn glossary_words_are_in_no_document_comment_or_text() {
    let banned = banned();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    files_below(&root, "", &mut files);
    assert!(files.len() > 100, "{} files found", files.len());
    let mut found = Vec::new();
    for file in files.iter().filter(|file| *file != THIS) {
        // A file that a running test writes and removes again is not one of ours.
        let Ok(text) = fs::read_to_string(root.join(file)) else {
            continue;
        };
        for (line, passage) in passages(file, &text) {
            let words = format!(" {} ", words(&passage));
            let hits = banned
                .iter()
                .filter(|word| words.contains(&format!(" {word} ")));
            found.extend(hits.map(|word| format!("{file}:{line}: {word}")));
        }
    }
    assert!(
        found.is_empty(),
        "docs/glossary.md says what to write instead: {found:#?}"
    );
}

/// The first column of the glossary's last table.
fn banned() -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/glossary.md");
    let glossary = fs::read_to_string(path).expect("the glossary");
    let (_, table) = glossary
        .split_once("## Words that nothing here uses")
        .expect("the table of banned words");
    let rows = table.lines().filter(|line| line.starts_with("| `"));
    let banned: Vec<String> = rows
        .flat_map(|row| row.split('`').skip(1).step_by(2).map(str::to_owned))
        .collect();
    assert!(banned.len() > 5, "{banned:?}");
    banned
}

/// What a person reads in a file, with the line at which it begins.
fn passages(file: &str, text: &str) -> Vec<(usize, String)> {
    let extension = Path::new(file).extension().and_then(|end| end.to_str());
    match extension {
        Some("rs") => {
            // The conformance suite lists its scenarios, which carry no attribute.
            let is_tests = file.contains("/scenarios/");
            [
                code_passages(text, &RUST),
                test_names(text, "fn ", is_tests),
            ]
            .concat()
        }
        Some("py" | "pyi") => [
            code_passages(text, &PYTHON),
            test_names(text, "def test_", true),
        ]
        .concat(),
        Some("toml" | "sh" | "txt" | "yml") => code_passages(text, &PYTHON),
        _ => vec![(1, text.to_owned())],
    }
}

/// How a language writes comments and texts.
struct Language {
    comment: &'static str,
    /// The longest first.
    quotes: &'static [&'static str],
    has_lifetimes: bool,
}

const RUST: Language = Language {
    comment: "//",
    quotes: &["\""],
    has_lifetimes: true,
};

const PYTHON: Language = Language {
    comment: "#",
    quotes: &["\"\"\"", "'''", "\"", "'"],
    has_lifetimes: false,
};

/// The comments and texts of a source. Comments on lines that follow each other are one passage,
/// so that a phrase may go over a line's end.
fn code_passages(text: &str, language: &Language) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut line = 1;
    let mut last_comment = 0;
    let mut rest = text;
    while let Some(letter) = rest.chars().next() {
        let quote = language
            .quotes
            .iter()
            .find(|quote| rest.starts_with(**quote));
        if rest.starts_with(language.comment) {
            let (comment, after) = rest.split_at(rest.find('\n').unwrap_or(rest.len()));
            let comment = comment.trim_start_matches(['/', '!', '#']);
            match found.last_mut().filter(|_| last_comment + 1 == line) {
                Some((_, passage)) => passage.extend(["\n", comment]),
                None => found.push((line, comment.to_owned())),
            }
            last_comment = line;
            rest = after;
        } else if let Some(hashes) = raw_text(rest).filter(|_| language.has_lifetimes) {
            let (body, after) =
                split_after(&rest[hashes + 2..], &format!("\"{}", "#".repeat(hashes)));
            found.push((line, body.to_owned()));
            line += body.matches('\n').count();
            rest = after;
        } else if let Some(quote) = quote {
            let (body, after) = quoted(&rest[quote.len()..], quote);
            found.push((line, body.replace("\\n", " ")));
            line += body.matches('\n').count();
            rest = after;
        } else if language.has_lifetimes && letter == '\'' {
            rest = after_quote_character(rest);
        } else {
            line += usize::from(letter == '\n');
            rest = &rest[letter.len_utf8()..];
        }
    }
    found
}

/// The number of `#` of the raw text that begins here, if one does.
fn raw_text(rest: &str) -> Option<usize> {
    let after = rest.strip_prefix('r')?;
    let text = after.trim_start_matches('#');
    text.starts_with('"').then_some(after.len() - text.len())
}

fn split_after<'a>(text: &'a str, end: &str) -> (&'a str, &'a str) {
    text.split_once(end).unwrap_or((text, ""))
}

/// A text up to its closing quote, and what follows that.
fn quoted<'a>(text: &'a str, quote: &str) -> (&'a str, &'a str) {
    let mut at = 0;
    while let Some(letter) = text[at..].chars().next() {
        if text[at..].starts_with(quote) {
            return (&text[..at], &text[at + quote.len()..]);
        }
        at += letter.len_utf8();
        if letter == '\\' {
            at += text[at..].chars().next().map_or(0, char::len_utf8);
        }
    }
    (text, "")
}

/// What follows a character in quotes, or the quote of a lifetime.
fn after_quote_character(rest: &str) -> &str {
    let after = &rest[1..];
    let mut letters = after.char_indices();
    match (letters.next(), letters.next()) {
        (Some((_, '\\')), Some((at, escaped))) => {
            split_after(&after[at + escaped.len_utf8()..], "'").1
        }
        (Some(_), Some((at, '\''))) => &after[at + 1..],
        _ => after,
    }
}

/// The names of functions, with spaces in place of underscores: those of tests, or all of them.
fn test_names(text: &str, keyword: &str, all: bool) -> Vec<(usize, String)> {
    let mut is_test = false;
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if let Some((_, name)) = line.split_once(keyword).filter(|_| all || is_test) {
            let end = name.find(['(', '<']).unwrap_or(name.len());
            found.push((at + 1, name[..end].replace('_', " ")));
        }
        let marked = line == "#[test]" || line.starts_with("#[tokio::test");
        is_test = marked || (is_test && line.starts_with("#["));
    }
    found
}

/// The words of a passage in small letters, one space between them: code is left out.
fn words(text: &str) -> String {
    let prose = text.split("```").step_by(2);
    let prose = prose.flat_map(|part| part.split('`').step_by(2));
    let prose: Vec<String> = prose.map(str::to_lowercase).collect();
    let joined = prose.join(" ");
    let words =
        joined.split(|letter: char| !letter.is_alphanumeric() && !['\'', '_'].contains(&letter));
    let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
    words.join(" ")
}

#[test]
fn code_is_not_among_the_words_of_a_document() {
    let text = "It is, by\n itself, `beside` that.\n```sh\nanew\n```\nLet go";
    assert_eq!(words(text), "it is by itself that let go");
}

#[test]
fn passages_are_comments_strings_and_test_names() {
    let rust = "// one\n//! two\nlet beside = 'x'; // three\nfn f<'a>(x: &'a str) { g('\\'', \"four \\\" five\"); }\n\
                #[test]\nfn six_seven() { r#\"eight\"nine\"# }\n";
    let read = |file, text| -> Vec<(usize, String)> {
        let passages = passages(file, text).into_iter();
        passages.map(|(line, text)| (line, words(&text))).collect()
    };
    let expected = [
        (1, "one two three"),
        (4, "four five"),
        (6, "eight nine"),
        (6, "six seven"),
    ];
    assert_eq!(
        read("a.rs", rust),
        expected.map(|(line, text)| (line, text.to_owned()))
    );
    let python = "'''one\ntwo'''\n# three\ndef test_four(): g('five', \"it's\")\n";
    let expected = [
        (1, "one two"),
        (3, "three"),
        (4, "five"),
        (4, "it's"),
        (4, "four"),
    ];
    assert_eq!(
        read("a.py", python),
        expected.map(|(line, text)| (line, text.to_owned()))
    );
}

/// The files that a person reads, by their paths from the root.
fn files_below(root: &Path, folder: &str, found: &mut Vec<String>) {
    let mut entries: Vec<PathBuf> = fs::read_dir(root.join(folder))
        .expect("a folder that can be read")
        .map(|entry| entry.expect("an entry of the folder").path())
        .collect();
    entries.sort();
    for entry in entries {
        let name = entry.file_name().and_then(|name| name.to_str());
        let name = name.expect("a name in UTF-8");
        let path = match folder {
            "" => name.to_owned(),
            folder => format!("{folder}/{name}"),
        };
        let extension = entry.extension().and_then(|end| end.to_str());
        let is_read = !folder.is_empty() || READ.contains(&name);
        if entry.is_dir() && !entry.is_symlink() {
            if is_read && !BUILT.contains(&name) {
                files_below(root, &path, found);
            }
        } else if matches!(
            extension,
            Some("md" | "rs" | "py" | "pyi" | "toml" | "sh" | "txt" | "yml")
        ) {
            found.push(path);
        }
    }
}
