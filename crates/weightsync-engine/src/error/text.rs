//! What errors say of lists, counts and what may be missing.

use weightsync_core::{LayoutMismatch, ModelId, Version, WorkerId, WorkerReport};

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
    match missing {
        [] => String::new(),
        missing => format!(" (missing: {})", list(missing, ", ")),
    }
}

/// How those went that had joined and are not there.
pub(super) fn gone_text(gone: &[WorkerReport]) -> String {
    gone.iter().map(|line| format!(", and {line}")).collect()
}

pub(super) fn refusals_text(refusals: &[(WorkerId, String)]) -> String {
    let lines = refusals.iter();
    let lines = lines.map(|(worker, reason)| format!("{worker}: {reason}"));
    list(lines, "; ")
}

/// A few of the names, so that a typing error is seen at once.
pub(super) fn some_names(known: &[String]) -> String {
    let names = known.iter().take(5).map(|name| format!("{name:?}"));
    match known.len() {
        0 => "none".into(),
        more if more > 5 => format!("{} and {} more", list(names, ", "), more - 5),
        _ => list(names, ", "),
    }
}

pub(super) fn names(models: &[ModelId]) -> String {
    match models {
        [] => "none".into(),
        models => list(models, ", "),
    }
}

pub(super) fn sent_text(versions: &[(ModelId, Version)]) -> String {
    let texts = versions.iter();
    list(
        texts.map(|(model, version)| format!("{model} {version}")),
        ", ",
    )
}

pub(super) fn pid_text(pid: &Option<u32>) -> String {
    pid.map_or(String::new(), |pid| format!(" (pid {pid})"))
}

pub(super) fn last_text(last: &Option<String>) -> String {
    let text = last
        .as_ref()
        .map(|last| format!(" (the last attempt: {last})"));
    text.unwrap_or_default()
}

pub(super) fn versions_text(known: &[Version]) -> String {
    match known {
        [] => "none is".into(),
        [one] => format!("{one} is"),
        several => format!("{} are", list(several, ", ")),
    }
}

pub(super) fn list(items: impl IntoIterator<Item: ToString>, separator: &str) -> String {
    let items = items.into_iter().map(|item| item.to_string());
    items.collect::<Vec<_>>().join(separator)
}
