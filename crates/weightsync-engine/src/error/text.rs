//! What errors say of lists, counts and what may be missing.

use weightsync_core::{LayoutMismatch, ModelId, Version, WorkerId};
use weightsync_mem::Holder;

use crate::report::WorkerReport;

/// How many of the expected workers joined: where they were expected by number,
/// others that are there too do not count.
pub(super) fn expected_among(expected: &usize, joined: &[WorkerId], missing: &[WorkerId]) -> usize {
    match missing.len() {
        0 => joined.len(),
        missing => expected.saturating_sub(missing),
    }
}

/// How the sender's model differs from a worker's, and whether the sender could cast.
pub(crate) fn misfit_text(mismatch: &LayoutMismatch) -> String {
    match mismatch.wanted_float() {
        None => mismatch.to_string(),
        Some(dtype) => format!("{mismatch}; the sender can cast: cast={:?}", dtype.name()),
    }
}

pub(super) fn missing_text(missing: &[WorkerId]) -> String {
    if missing.is_empty() {
        return String::new();
    }
    let names: Vec<_> = missing.iter().map(ToString::to_string).collect();
    format!(" (missing: {})", names.join(", "))
}

/// How those went that had joined and are not there.
pub(super) fn gone_text(gone: &[WorkerReport]) -> String {
    gone.iter().map(|line| format!(", and {line}")).collect()
}

pub(super) fn refusals_text(refusals: &[(WorkerId, String)]) -> String {
    let lines: Vec<_> = refusals
        .iter()
        .map(|(worker, reason)| format!("{worker}: {reason}"))
        .collect();
    lines.join("; ")
}

/// A few of the names, so that a typing error is seen at once.
pub(super) fn some_names(known: &[String]) -> String {
    let mut text = known
        .iter()
        .take(5)
        .map(|name| format!("{name:?}"))
        .collect::<Vec<_>>()
        .join(", ");
    match known.len() {
        0 => text.push_str("none"),
        more if more > 5 => text.push_str(&format!(" and {} more", more - 5)),
        _ => {}
    }
    text
}

pub(super) fn names(models: &[ModelId]) -> String {
    let names: Vec<_> = models.iter().map(ModelId::as_str).collect();
    match names.is_empty() {
        true => "none".into(),
        false => names.join(", "),
    }
}

pub(super) fn sent_text(versions: &[(ModelId, Version)]) -> String {
    let texts = versions.iter();
    let texts: Vec<_> = texts
        .map(|(model, version)| format!("{model} {version}"))
        .collect();
    texts.join(", ")
}

pub(super) fn holders_text(holders: &[Holder]) -> String {
    let lines: Vec<_> = holders.iter().map(ToString::to_string).collect();
    lines.join("; ")
}

pub(super) fn list_of_versions(versions: &[Version]) -> String {
    let texts: Vec<_> = versions.iter().map(ToString::to_string).collect();
    texts.join(", ")
}

pub(super) fn pid_text(pid: &Option<u32>) -> String {
    pid.map_or(String::new(), |pid| format!(" (pid {pid})"))
}

pub(super) fn versions_text(known: &[Version]) -> String {
    match known {
        [] => "none is".into(),
        [one] => format!("{one} is"),
        several => format!("{} are", list_of_versions(several)),
    }
}
