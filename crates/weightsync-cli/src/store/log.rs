//! `weightsync log`: the versions of a store.

use std::error::Error;
use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;
use weightsync_store::{Damage, Store, StoredModel, StoredVersion, Versions};

use crate::SUCCESS;
use crate::output::print;
use crate::words::{bytes, counted, shown};

/// What `log` is asked for.
#[derive(clap::Args)]
pub struct LogArgs {
    /// The store
    #[arg(value_name = "STORE")]
    store: String,
    /// How many versions, of the newest
    #[arg(short = 'n', value_name = "N")]
    newest: Option<usize>,
    /// One JSON object a line: a version, the newest first, or what is damaged
    #[arg(long)]
    json: bool,
}

/// Shows what is there, the newest first.
pub fn run(args: &LogArgs) -> Result<u8, Box<dyn Error>> {
    let store = Store::open(&args.store)?;
    let found = store.newest_versions(args.newest.unwrap_or(usize::MAX))?;
    let Versions {
        mut versions,
        all,
        damage,
        ..
    } = found;
    // Most likely a wrong address. An empty list would look like an empty store.
    if all == 0 && damage.is_empty() {
        return Err(format!("{} has no version: check its address", args.store).into());
    }
    // The library has the oldest first.
    versions.reverse();
    print(&match args.json {
        true => json(&versions, &damage)?,
        false => text(
            &versions,
            args.newest.filter(|newest| *newest < all).map(|_| all),
            &damage,
        ),
    })?;
    Ok(SUCCESS)
}

const HEADINGS: [&str; 7] = [
    "version", "stored", "to read", "changed", "at", "by", "names",
];

/// `all` is how many there are, if not all are shown.
fn text(versions: &[StoredVersion], all: Option<usize>, damage: &[Damage]) -> String {
    let mut rows = vec![HEADINGS.map(String::from)];
    for version in versions {
        // A model without changes in a version has nothing of its own there.
        let changed = version.models.iter().filter(|model| model.changed);
        rows.extend(changed.map(|model| row(version, model)));
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths = [0, 1, 2, 3, 4, 5, 6].map(|column| width(column).unwrap_or(0));
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            // Numbers end where those above them end.
            let _ = match column {
                1..=3 => write!(line, "{cell:>width$}  "),
                _ => write!(line, "{cell:<width$}  "),
            };
        }
        text += line.trim_end();
        text.push('\n');
    }
    if let Some(all) = all {
        let _ = writeln!(text, "{} in all", counted(all, "version"));
    }
    for damage in damage {
        let _ = writeln!(text, "{}", shown(&damage.to_string()));
    }
    text
}

fn row(version: &StoredVersion, model: &StoredModel) -> [String; 7] {
    let changes = match (model.deltas, model.changes) {
        (0, _) => "whole".into(),
        (_, Some(changes)) => format!("{} %", super::share(changes)),
        (_, None) => String::new(),
    };
    [
        format!("{} {}", shown(model.model.as_str()), model.version),
        bytes(model.stored_bytes),
        bytes(model.read_bytes),
        changes,
        time(version.at),
        shown(&version.writer),
        shown(&version.names.join(", ")),
    ]
}

#[derive(Serialize)]
struct LogLine<'a> {
    sequence: u64,
    run: String,
    writer: &'a str,
    at: f64,
    names: &'a [String],
    models: Vec<LogModel<'a>>,
}

#[derive(Serialize)]
struct LogModel<'a> {
    model: &'a str,
    version: u64,
    digest: String,
    changed: bool,
    stored_bytes: u64,
    read_bytes: u64,
    deltas: usize,
    changes: Option<f64>,
    directory: &'a str,
}

fn json(versions: &[StoredVersion], damage: &[Damage]) -> serde_json::Result<String> {
    let mut text = String::new();
    for version in versions {
        let models = version.models.iter().map(|model| LogModel {
            model: model.model.as_str(),
            version: model.version.0,
            digest: model.digest.to_string(),
            changed: model.changed,
            stored_bytes: model.stored_bytes,
            read_bytes: model.read_bytes,
            deltas: model.deltas,
            changes: model.changes,
            directory: &model.directory,
        });
        let line = LogLine {
            sequence: version.sequence,
            run: version.run.to_string(),
            writer: &version.writer,
            at: version.at.as_secs_f64(),
            names: &version.names,
            models: models.collect(),
        };
        text += &serde_json::to_string(&line)?;
        text.push('\n');
    }
    for Damage { file, what, .. } in damage {
        let line = serde_json::json!({ "damage": { "file": file, "what": what } });
        let _ = writeln!(text, "{line}");
    }
    Ok(text)
}

/// A time since 1970, in UTC.
fn time(since: Duration) -> String {
    let seconds = since.as_secs();
    // The civil calendar by arithmetic alone: no time zone and no table.
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Years begin in March here, so that the day that only some of them have is their last. Day 0 is
    // the first of March of the year 0.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, expected) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_735_689_599, "2024-12-31 23:59:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(time(Duration::from_secs(seconds)), expected);
        }
        // The clock of a writer may say anything.
        assert!(time(Duration::from_millis(u64::MAX)).ends_with("UTC"));
    }
}
