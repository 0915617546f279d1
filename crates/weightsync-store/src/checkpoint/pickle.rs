//! Pickled checkpoints, which are refused: reading one can run any code.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::{find, name_of};
use crate::error::{Result, StoreError};

/// How the names of pickled files end.
const ENDS: [&str; 7] = [".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".distcp"];

fn has_its_name(name: &str) -> bool {
    ENDS.iter().any(|end| name.ends_with(end))
}

/// Whether a file that is no safetensors file is a pickled one, by its name or by how it begins.
pub(super) fn is_one(path: &Path, file: &File) -> bool {
    let mut start = [0; 4];
    file.read_exact_at(&mut start, 0).is_ok()
        && (has_its_name(&name_of(path))
            || start == *b"PK\x03\x04"
            || matches!(start, [0x80, 2..=5, ..]))
}

/// The refusal of a file.
pub(super) fn refused(path: &Path) -> StoreError {
    let name = path.display().to_string();
    if name.ends_with(".distcp") {
        return distributed(path.parent().unwrap_or(path), path);
    }
    let into = quoted(&path.with_extension("safetensors").display().to_string());
    StoreError::Pickled {
        convert: format!(
            "python -c 'import sys, torch; from safetensors.torch import save_file; \
             d = torch.load(sys.argv[1], map_location=\"cpu\", weights_only=True); \
             d = d.get(\"state_dict\", d); \
             save_file({{k: v.contiguous().clone() for k, v in d.items()}}, sys.argv[2])' {} {into}",
            quoted(&name)
        ),
        path: name,
    }
}

/// The refusal of a directory whose weights are pickled, if they are.
pub(super) fn in_directory(dir: &Path, below: &[&str]) -> Result<Option<StoreError>> {
    let dirs = below.iter().map(|below| dir.join(below));
    for at in std::iter::once(dir.to_owned()).chain(dirs) {
        if !at.is_dir() {
            continue;
        }
        let names = find::names(&at)?;
        let Some(name) = names.iter().find(|name| has_its_name(name)) else {
            // DeepSpeed writes its files one directory further down.
            if names.iter().any(|name| name == "zero_to_fp32.py") {
                return Ok(Some(deepspeed(&at)));
            }
            continue;
        };
        let path = at.join(name);
        let starts = |start| names.iter().any(|name: &String| name.starts_with(start));
        return Ok(Some(match () {
            () if starts("zero_to_fp32.py") => deepspeed(&at),
            () if name.ends_with(".distcp") => distributed(&at, &path),
            () if starts("model_world_size_") => StoreError::Pickled {
                convert: format!(
                    "python -m verl.model_merger merge --backend fsdp --local_dir {} --target_dir {}",
                    quoted(&at.display().to_string()),
                    target(&at)
                ),
                path: path.display().to_string(),
            },
            () if starts("pytorch_model") && starts("config.json") => StoreError::Pickled {
                convert: format!(
                    "python -c 'import sys; from transformers import AutoModelForCausalLM as M; \
                     M.from_pretrained(sys.argv[1], torch_dtype=\"auto\").save_pretrained(sys.argv[2])' \
                     {} {}",
                    quoted(&at.display().to_string()),
                    target(&at)
                ),
                path: path.display().to_string(),
            },
            () => refused(&path),
        }));
    }
    Ok(None)
}

fn deepspeed(at: &Path) -> StoreError {
    let dir = quoted(&at.display().to_string());
    let script = quoted(&at.join("zero_to_fp32.py").display().to_string());
    StoreError::Pickled {
        convert: format!("python {script} {dir} {} --safe_serialization", target(at)),
        path: at.display().to_string(),
    }
}

/// A checkpoint of torch.distributed: to be made one file first.
fn distributed(dir: &Path, path: &Path) -> StoreError {
    let whole = dir.with_extension("pt");
    let convert = format!(
        "python -m torch.distributed.checkpoint.format_utils dcp_to_torch {} {}; then push that file, \
         which says how to go on",
        quoted(&dir.display().to_string()),
        quoted(&whole.display().to_string())
    );
    StoreError::Pickled {
        path: path.display().to_string(),
        convert,
    }
}

/// A directory next to the one that is converted.
fn target(at: &Path) -> String {
    let mut name = at.as_os_str().to_owned();
    name.push("-safetensors");
    quoted(&name.to_string_lossy())
}

/// A word of a shell's command.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+=:,@%".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text.into(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}
