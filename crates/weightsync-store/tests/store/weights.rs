//! Weights that say which they are.

use weightsync_core::{ModelId, Version};
use weightsync_engine::{Snapshot, Tensors};
use weightsync_store::{Loaded, ModelVersion, Which};

pub const MODEL: &str = "policy";

/// Weights that no other number has: `elements` counted up, but for one.
pub fn weights(number: u64, elements: usize) -> Tensors {
    let mut values: Vec<f64> = (0..elements).map(|at| at as f64).collect();
    values[number as usize % elements] = -1.0 - number as f64;
    let second = values.split_off(elements / 2);
    let mut weights = Tensors::new();
    for (name, values) in [("first", values), ("second", second)] {
        let shape = [values.len() as u64];
        weights.insert(name, shape, values).expect("plain tensors");
    }
    weights
}

/// The number of these weights.
///
/// # Errors
///
/// If they are nobody's: of several versions, or spoilt.
pub fn number(snapshot: &Snapshot) -> Result<u64, String> {
    let tensor = |name| -> Result<&[f64], String> {
        snapshot
            .slice(name)
            .map_err(|error| format!("{name}: {error}"))
    };
    let values = [tensor("first")?, tensor("second")?].concat();
    let mut changed = values.iter().enumerate();
    let changed: Vec<_> = changed
        .by_ref()
        .filter(|(at, value)| **value != *at as f64)
        .collect();
    match changed[..] {
        [(at, value)] if *value < 0.0 && (-value - 1.0) as usize % values.len() == at => {
            Ok((-value - 1.0) as u64)
        }
        _ => Err(format!(
            "{}: {} elements are not as they were saved",
            snapshot.version(),
            changed.len()
        )),
    }
}

/// The version that was loaded, and its number.
pub fn of(loaded: &Loaded) -> Result<(Version, u64), String> {
    let policy = loaded.set.only().map_err(|error| error.to_string())?;
    Ok((policy.version(), number(policy)?))
}

pub fn exactly(version: Version) -> Which {
    Which::Exactly(at(version))
}

pub fn at(version: Version) -> ModelVersion {
    ModelVersion {
        model: Some(ModelId::new(MODEL).expect("a plain name")),
        version,
    }
}
