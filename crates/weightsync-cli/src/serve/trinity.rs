//! Translates the `synchronizer:` block of Trinity-RFT 0.6.

use std::fmt::Write as _;

use serde_json::{Map, Value};

use super::settings::nearest;

/// The keys of the block.
const KEYS: [&str; 11] = [
    "sync_method",
    "sync_style",
    "sync_interval",
    "sync_offset",
    "sync_timeout",
    "explorer_sync_interval",
    "trainer_sync_interval",
    "wait_for_checkpoint",
    // Trinity's own processes need these; a synchronizer does not.
    "group_name",
    "explorer_world_size",
    "ray_namespace",
];

/// The settings of `serve`, in TOML.
pub fn translate(yaml: &str) -> Result<String, String> {
    let all: Value = serde_saphyr::from_str(yaml).map_err(|error| error.to_string())?;
    let block = block_of(&all)?;
    let method = method_of(block)?;
    let style = style_of(block)?;
    let interval = number(block, "sync_interval")?.unwrap_or(1);
    if interval == 0 {
        return Err("synchronizer.sync_interval: expected 1 step or more, got 0".into());
    }
    let offset = number(block, "sync_offset")?.unwrap_or(0);
    let mut text = format!("method = \"{method}\"\nstyle = \"{style}\"\ninterval = {interval}\n");
    if style == "fixed" {
        let _ = writeln!(text, "offset = {offset}");
    }
    let mut note = |line: String| text.push_str(&format!("# {line}\n"));
    // What has no counterpart becomes a comment, so nothing is lost in silence.
    if style != "fixed" && offset != 0 {
        note(format!(
            "sync_offset is {offset}: only the style fixed has an offset"
        ));
    }
    for (key, party) in [
        ("explorer_sync_interval", "explorer"),
        ("trainer_sync_interval", "trainer"),
    ] {
        if let Some(own) = number(block, key)?
            && own != interval
        {
            note(format!("{key} is {own}: give the {party} interval={own}"));
        }
    }
    if let Some(seconds) = number(block, "sync_timeout")? {
        note(format!(
            "sync_timeout is {seconds}: give each sync timeout={seconds}"
        ));
    }
    if block.contains_key("wait_for_checkpoint") {
        note("wait_for_checkpoint is not needed: a version can be had once it is whole".into());
    }
    Ok(text)
}

/// The block with Trinity's settings of its synchronizer.
///
/// # Errors
///
/// It is not there, or has a key that Trinity does not know.
fn block_of(all: &Value) -> Result<&Map<String, Value>, String> {
    let block = match all.get("synchronizer") {
        Some(Value::Object(block)) => block,
        Some(_) => return Err("expected keys and values in `synchronizer:`".into()),
        None => return Err("there is no block `synchronizer:`".into()),
    };
    // An unknown key is an error: it may be a spelling of one that matters.
    for key in block.keys() {
        if !KEYS.contains(&key.as_str()) {
            return Err(format!(
                "there is no setting synchronizer.{key}; {}",
                nearest(key, &KEYS)
            ));
        }
    }
    Ok(block)
}

/// The method of `serve` for Trinity's.
fn method_of(block: &Map<String, Value>) -> Result<&'static str, String> {
    match word(block, "sync_method", "nccl")?.as_str() {
        "nccl" | "online" => Ok("nccl"),
        "memory" => Ok("memory"),
        "checkpoint" | "offline" => Ok("checkpoint"),
        other => {
            let known = ["nccl", "memory", "checkpoint", "online", "offline"];
            Err(format!(
                "there is no sync_method {other}; {}",
                nearest(other, &known)
            ))
        }
    }
}

/// The style of `serve` for Trinity's.
fn style_of(block: &Map<String, Value>) -> Result<&'static str, String> {
    match word(block, "sync_style", "fixed")?.as_str() {
        "fixed" => Ok("fixed"),
        "dynamic_by_explorer" | "explorer_driven" => Ok("explorer_driven"),
        "dynamic_by_trainer" | "trainer_driven" => Ok("trainer_driven"),
        "fully_async" => Ok("fully_async"),
        other => {
            let known = ["fixed", "explorer_driven", "trainer_driven", "fully_async"];
            Err(format!(
                "there is no sync_style {other}; {}",
                nearest(other, &known)
            ))
        }
    }
}

fn word(block: &Map<String, Value>, key: &str, default: &str) -> Result<String, String> {
    match block.get(key) {
        None | Some(Value::Null) => Ok(default.to_owned()),
        Some(Value::String(word)) => Ok(word.to_lowercase()),
        Some(other) => Err(format!("synchronizer.{key}: expected a word, got {other}")),
    }
}

fn number(block: &Map<String, Value>, key: &str) -> Result<Option<u64>, String> {
    match block.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64() {
            Some(number) => Ok(Some(number)),
            None => Err(format!(
                "synchronizer.{key}: expected a whole number, got {value}"
            )),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_of_trinity_is_translated() {
        let yaml = "project: x\nsynchronizer:\n  sync_method: 'memory'\n  sync_style: DYNAMIC_BY_EXPLORER\n  \
                    sync_interval: 10\n  sync_timeout: 1200\n  trainer_sync_interval: 5\n";
        let text = translate(yaml).unwrap();
        let expected = "method = \"memory\"\nstyle = \"explorer_driven\"\ninterval = 10\n\
                        # trainer_sync_interval is 5: give the trainer interval=5\n\
                        # sync_timeout is 1200: give each sync timeout=1200\n";
        assert_eq!(text, expected);
        let text = translate("synchronizer: {sync_interval: 10, sync_offset: 5}").unwrap();
        let expected = "method = \"nccl\"\nstyle = \"fixed\"\ninterval = 10\noffset = 5\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn wrong_block_is_named() {
        for (yaml, words) in [
            ("a: 1", "no block `synchronizer:`"),
            ("synchronizer: 3", "keys and values"),
            (
                "synchronizer: {sync_intervall: 3}",
                "did you mean sync_interval?",
            ),
            ("synchronizer: {sync_method: ncc}", "did you mean nccl?"),
            ("synchronizer: {sync_interval: -1}", "whole number"),
            ("synchronizer: {sync_interval: 0}", "1 step or more"),
            ("synchronizer: [", "line 1"),
        ] {
            let error = translate(yaml).unwrap_err();
            assert!(error.contains(words), "{yaml}: {error}");
        }
    }
}
