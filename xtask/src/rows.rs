//! `cargo xtask bench rows`: what `bench GROUP --json` printed, as the tables of the appendix.
//!
//! The page has a place for each group, between two marks, so that a run of one group replaces that
//! group's tables and leaves all others. The rows do not say where they were measured, so the caller
//! does.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::error::Error;
use crate::places::Places;

/// The page, from the clone's root.
const APPENDIX: &str = "docs/performance-rows.md";

const HEAD: &str = "| case | value | baseline | ratio | target | |\n|---|---|---|---|---|---|\n";

const USAGE: &str = "\
usage: cargo xtask bench rows --on MACHINE FILE...
  MACHINE  where the rows were measured, in words
  FILE     what `cargo xtask bench GROUP --json` printed, named GROUP.json";

/// Writes the rows of these files into the page.
pub fn run(places: &Places, args: &[&str]) -> Result<(), Error> {
    match args {
        ["--on", machine, files @ ..] if !files.is_empty() => write(places.root(), machine, files),
        _ => Err(Error::Usage(USAGE.into())),
    }
}

/// Puts the rows of each file into the place of the group that the file is named after. If one file
/// cannot be used, the page stays as it is.
fn write(root: &Path, machine: &str, files: &[impl AsRef<Path>]) -> Result<(), Error> {
    let appendix = root.join(APPENDIX);
    let mut page = read(&appendix)?;
    for file in files.iter().map(AsRef::as_ref) {
        let group = file.file_stem().unwrap_or_default().to_string_lossy();
        let table = table(&file.display().to_string(), &read(file)?)?;
        page = replace(&page, &group, &format!("Measured on {machine}.\n\n{table}"))?;
    }
    fs::write(&appendix, page).map_err(|source| Error::Io {
        doing: format!("writing {}", appendix.display()),
        source,
    })
}

fn read(file: &Path) -> Result<String, Error> {
    fs::read_to_string(file).map_err(|source| Error::Io {
        doing: format!("reading {}", file.display()),
        source,
    })
}

/// The marks before and after a group's tables.
fn marks(group: &str) -> [String; 2] {
    [
        format!("<!-- rows of {group} -->\n"),
        format!("<!-- end of {group} -->\n"),
    ]
}

/// The page with this text between a group's marks.
fn replace(page: &str, group: &str, text: &str) -> Result<String, Error> {
    let [begin, end] = marks(group);
    let replaced = page.split_once(&begin).and_then(|(before, rest)| {
        let (_, after) = rest.split_once(&end)?;
        Some(format!("{before}{begin}{text}{end}{after}"))
    });
    replaced.ok_or_else(|| Error::Missing {
        what: format!("the place of `{group}` in {APPENDIX}"),
        fix: "name the file after its group, as in `mem.json`".into(),
    })
}

/// The table of a file's rows, an object a line.
fn table(file: &str, text: &str) -> Result<String, Error> {
    let mut table = HEAD.to_owned();
    for (at, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let row = serde_json::from_str(line).ok().and_then(|row| cells(&row));
        let row = row.ok_or_else(|| Error::Unreadable {
            what: format!("{file}, line {}: it is no row", at + 1),
        })?;
        let _ = writeln!(table, "{row}");
    }
    if table == HEAD {
        return Err(Error::Unreadable {
            what: format!("{file}: it has no rows"),
        });
    }
    Ok(table)
}

/// A row as a line of the table.
fn cells(row: &Value) -> Option<String> {
    let case = row["case"].as_str()?.replace('|', "\\|");
    let value = figure(row["value"].as_f64()?);
    let unit = row["unit"].as_str()?;
    // JSON has no number for what divides by nothing.
    let or_nothing = |name: &str| row[name].as_f64().map_or_else(|| "–".into(), figure);
    let (baseline, ratio) = (or_nothing("baseline"), or_nothing("ratio"));
    let target = row["target"].as_f64();
    let outcome = match (target, row["met"].as_bool()) {
        (Some(_), Some(true)) => "met",
        (Some(_), _) => "**missed**",
        (None, Some(true)) => "works",
        (None, _) => "–",
    };
    // 2.4 times faster is a ratio of 0.41666….
    let target = target.map_or_else(
        || "none".into(),
        |target| format!("≤ {}", (target * 1e3).round() / 1e3),
    );
    Some(format!(
        "| {case} | {value} {unit} | {baseline} | {ratio} | {target} | {outcome} |"
    ))
}

/// Two digits after the point, or as many as show two that are not 0.
fn figure(value: f64) -> String {
    let digits = match value.abs() {
        nothing if nothing < 1e-6 => 2,
        size => (1.0 - size.log10().floor()).clamp(2.0, 7.0) as usize,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench;

    const ROWS: &str = r#"{"case":"a, N = 1","value":51.831,"unit":"ms","baseline":92.7,"ratio":0.5591,"target":0.8,"met":true}
{"case":"a|b","value":0.0448,"unit":"µs","baseline":512,"ratio":0.0000875,"target":0.4166666,"met":false}

{"case":"c","value":0,"unit":"%","baseline":null,"ratio":null,"target":null,"met":true}
{"case":"d","value":2000,"unit":"×","baseline":1,"ratio":2000,"target":null,"met":null}
"#;

    #[test]
    fn table_has_a_line_for_each_row() {
        let expected = "| case | value | baseline | ratio | target | |\n|---|---|---|---|---|---|\n\
                        | a, N = 1 | 51.83 ms | 92.70 | 0.56 | ≤ 0.8 | met |\n\
                        | a\\|b | 0.045 µs | 512.00 | 0.000087 | ≤ 0.417 | **missed** |\n\
                        | c | 0.00 % | – | – | none | works |\n\
                        | d | 2000.00 × | 1.00 | 2000.00 | none | – |\n";
        assert_eq!(table("mem.json", ROWS).expect("rows"), expected);
    }

    #[test]
    fn table_refuses_lines_that_are_no_rows_and_names_them() {
        for (text, named) in [
            ("", "no rows"),
            ("\n\n", "no rows"),
            ("{\"case\":\"a\"}", "line 1"),
            (&format!("{ROWS}case  value  baseline"), "line 6"),
        ] {
            let error = table("mem.json", text).expect_err("refused").to_string();
            assert!(error.contains(named), "{text:?}: {error}");
        }
    }

    #[test]
    fn replace_changes_the_tables_of_one_group() {
        let page = "# All\n<!-- rows of mem -->\nold\n<!-- end of mem -->\nwhy\n\
                    <!-- rows of net -->\nnet's\n<!-- end of net -->\nend\n";
        let once = replace(page, "mem", "new\n").expect("it has a place");
        assert_eq!(once, page.replace("old\n", "new\n"));
        let twice = replace(&once, "mem", "newer\n").expect("it keeps its place");
        assert_eq!(twice, page.replace("old\n", "newer\n"));
        for without in ["me", "all", ""] {
            assert!(replace(page, without, "new\n").is_err(), "{without:?}");
        }
        let open = page.replace("<!-- end of mem -->\n", "");
        assert!(replace(&open, "mem", "new\n").is_err());
    }

    #[test]
    fn write_changes_the_page_if_every_file_can_be_used() {
        let root = tempfile::tempdir().expect("a folder");
        let page = root.path().join(APPENDIX);
        let old = "<!-- rows of mem -->\nold\n<!-- end of mem -->\n<!-- rows of net -->\nnet's\n\
                   <!-- end of net -->\n";
        fs::create_dir(root.path().join("docs")).expect("a folder");
        fs::write(&page, old).expect("the page");
        let files = [
            ("mem.json", ROWS),
            ("net.json", "none"),
            ("other.json", ROWS),
        ];
        let files = files.map(|(name, text)| {
            let file = root.path().join(name);
            fs::write(&file, text).expect("a file");
            file
        });
        for unusable in [&files[1], &files[2], &root.path().join("absent.json")] {
            let both = [files[0].clone(), unusable.clone()];
            assert!(write(root.path(), "a machine", &both).is_err());
            assert_eq!(read(&page).expect("the page"), old, "{unusable:?}");
        }
        write(root.path(), "a machine", &files[..1]).expect("rows of a group");
        let table = table("mem.json", ROWS).expect("rows");
        let new = format!("Measured on a machine.\n\n{table}");
        assert_eq!(read(&page).expect("the page"), old.replace("old\n", &new));
    }

    #[test]
    fn appendix_has_a_place_for_every_group() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let page = read(&root.join(APPENDIX)).expect("the page");
        for group in bench::names() {
            let replaced = replace(&page, group, "new\n").expect("its place");
            assert_ne!(replaced, page, "{group}");
            let command = format!("`cargo xtask bench {group}`");
            assert!(page.contains(&command), "{command} is not on the page");
        }
    }
}
