//! Models by path: `env.value_net`, `transforms[0].net`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use weightsync_core::names::MAX_DEPTH;

/// The longest path, in bytes.
const MAX_BYTES: usize = 4096;

/// Where a model stands in a tree of them: names and places in lists. It is
/// resolved by the process that has the tree.
///
/// ```
/// use weightsync::model::{ModelPath, PathPart};
///
/// let path: ModelPath = "transforms[0].net".parse()?;
/// assert_eq!(path.parts()[1], PathPart::Index(0));
/// assert_eq!(path.to_string(), "transforms[0].net");
/// # Ok::<(), weightsync::model::ModelPathError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ModelPath {
    /// At least one.
    parts: Vec<PathPart>,
}

/// One step of a path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PathPart {
    /// What has this name.
    Name(String),
    /// What stands at this place of a list, from 0.
    Index(usize),
}

/// Why a path leads to no model.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelPathError {
    /// Text that is no path.
    #[error("{path:?} is not a path to a model: at byte {offset}, {problem}")]
    Malformed {
        /// The text, or its beginning.
        path: String,
        /// Where.
        offset: usize,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A part of the path does not exist.
    #[error("{path} does not exist: {} has no {part}; it has {}", place(.below), listed(.known))]
    NoSuchPart {
        /// The path.
        path: ModelPath,
        /// The part that does not exist.
        part: PathPart,
        /// The parts before it, which lead somewhere.
        below: String,
        /// What there is instead.
        known: Vec<PathPart>,
    },
    /// The path ends between models.
    #[error("{path} is not a model; below it are {}", listed(.known))]
    NoModel {
        /// The path.
        path: ModelPath,
        /// What it leads on to.
        known: Vec<PathPart>,
    },
    /// The place is taken.
    #[error("there is a model at {path} already")]
    Taken {
        /// The path.
        path: ModelPath,
    },
}

impl ModelPath {
    /// Its steps, at least one.
    pub fn parts(&self) -> &[PathPart] {
        &self.parts
    }

    /// The text of its first steps.
    pub(crate) fn beginning(&self, steps: usize) -> String {
        let mut text = String::new();
        for part in &self.parts[..steps.min(self.parts.len())] {
            if matches!(part, PathPart::Name(_)) && !text.is_empty() {
                text.push('.');
            }
            text.push_str(&part.to_string());
        }
        text
    }

    pub(crate) fn from_parts(parts: Vec<PathPart>) -> Self {
        debug_assert!(!parts.is_empty());
        Self { parts }
    }
}

impl FromStr for ModelPath {
    type Err = ModelPathError;

    fn from_str(text: &str) -> Result<Self, ModelPathError> {
        let malformed = |offset, problem| ModelPathError::Malformed {
            path: text.chars().take(200).collect(),
            offset,
            problem,
        };
        // Paths come with init infos, so from other processes.
        if text.len() > MAX_BYTES {
            return Err(malformed(MAX_BYTES, "it is too long"));
        }
        let mut parts = Vec::new();
        let mut rest = text;
        loop {
            let offset = text.len() - rest.len();
            if parts.len() == MAX_DEPTH {
                return Err(malformed(offset, "it has too many parts"));
            }
            if let Some(index) = rest.strip_prefix('[') {
                let (digits, after) = index
                    .split_once(']')
                    .ok_or_else(|| malformed(offset, "a bracket is not closed"))?;
                // One path has one spelling: no leading zeros, no sign.
                let plain = digits == "0" || !digits.starts_with(['0', '+']);
                let index = digits.parse().ok().filter(|_| plain);
                let index =
                    index.ok_or_else(|| malformed(offset + 1, "a place is a number from 0"))?;
                parts.push(PathPart::Index(index));
                rest = after;
            } else {
                let end = rest.find(['.', '[', ']']).unwrap_or(rest.len());
                let (name, after) = rest.split_at(end);
                if name.is_empty() || name.chars().any(char::is_control) {
                    return Err(malformed(offset, "a name is missing"));
                }
                parts.push(PathPart::Name(name.to_owned()));
                rest = after;
            }
            let offset = text.len() - rest.len();
            match rest.chars().next() {
                None => return Ok(Self { parts }),
                Some('[') => {}
                Some('.') if rest[1..].starts_with('[') => {
                    return Err(malformed(
                        offset + 1,
                        "a place follows its list without a dot",
                    ));
                }
                Some('.') => rest = &rest[1..],
                Some(_) => return Err(malformed(offset, "a dot or a bracket is missing")),
            }
        }
    }
}

impl TryFrom<String> for ModelPath {
    type Error = ModelPathError;

    fn try_from(text: String) -> Result<Self, ModelPathError> {
        text.parse()
    }
}

impl From<ModelPath> for String {
    fn from(path: ModelPath) -> Self {
        path.to_string()
    }
}

impl fmt::Display for ModelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.beginning(self.parts.len()))
    }
}

impl fmt::Display for PathPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Index(index) => write!(f, "[{index}]"),
        }
    }
}

fn place(below: &str) -> &str {
    match below {
        "" => "the root",
        below => below,
    }
}

fn listed(known: &[PathPart]) -> String {
    let mut names: Vec<_> = known.iter().take(8).map(ToString::to_string).collect();
    match known.len() {
        0 => names.push("nothing".to_owned()),
        more if more > 8 => names.push(format!("{} more", more - 8)),
        _ => {}
    }
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_read_and_written() {
        let name = |name: &str| PathPart::Name(name.to_owned());
        let cases = [
            ("policy", vec![name("policy")]),
            ("env.value_net", vec![name("env"), name("value_net")]),
            (
                "transforms[0]",
                vec![name("transforms"), PathPart::Index(0)],
            ),
            (
                "a[10][2].b",
                vec![
                    name("a"),
                    PathPart::Index(10),
                    PathPart::Index(2),
                    name("b"),
                ],
            ),
            ("[3].net", vec![PathPart::Index(3), name("net")]),
        ];
        for (text, parts) in cases {
            let path: ModelPath = text.parse().unwrap();
            assert_eq!(path.parts(), parts);
            assert_eq!(path.to_string(), text);
            let json = serde_json::to_string(&path).unwrap();
            assert_eq!(serde_json::from_str::<ModelPath>(&json).unwrap(), path);
        }
    }

    #[test]
    fn model_path_names_the_place_of_a_syntax_error() {
        let cases = [
            ("", 0, "name is missing"),
            (".a", 0, "name is missing"),
            ("a.", 2, "name is missing"),
            ("a..b", 2, "name is missing"),
            ("a]", 1, "dot or a bracket"),
            ("a[0", 1, "not closed"),
            ("a[]", 2, "number from 0"),
            ("a[-1]", 2, "number from 0"),
            ("a[+1]", 2, "number from 0"),
            ("a[01]", 2, "number from 0"),
            ("a[99999999999999999999]", 2, "number from 0"),
            ("a[0]b", 4, "dot or a bracket"),
            ("a.[0]", 2, "without a dot"),
        ];
        for (text, at, expected) in cases {
            match text.parse::<ModelPath>() {
                Err(ModelPathError::Malformed {
                    offset, problem, ..
                }) => {
                    assert!(problem.contains(expected), "{text}: {problem}");
                    assert_eq!(offset, at, "{text}");
                }
                other => panic!("{text}: {other:?}"),
            }
        }
        assert!("a.".repeat(MAX_DEPTH).parse::<ModelPath>().is_err());
        assert!("a".repeat(MAX_BYTES + 1).parse::<ModelPath>().is_err());
    }
}
