//! Names with at most one star.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::MappingError;

/// A tensor's name, or a family of names: one `*` in it stands for any text, dots
/// included, at least one character long.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Pattern {
    before: String,
    /// What follows the star, if there is one.
    after: Option<String>,
}

impl Pattern {
    /// Whether it is a family of names.
    pub fn has_star(&self) -> bool {
        self.after.is_some()
    }

    /// What the star stands for in this name: empty text if there is no star,
    /// `None` if it is another name.
    pub fn matches<'a>(&self, name: &'a str) -> Option<&'a str> {
        let rest = name.strip_prefix(self.before.as_str())?;
        match &self.after {
            None => rest.is_empty().then_some(""),
            Some(after) => rest
                .strip_suffix(after.as_str())
                .filter(|star| !star.is_empty()),
        }
    }

    /// The name in which the star stands for this text.
    pub(super) fn name(&self, star: &str) -> String {
        match &self.after {
            None => self.before.clone(),
            Some(after) => [&self.before, star, after].concat(),
        }
    }
}

impl FromStr for Pattern {
    type Err = MappingError;

    fn from_str(text: &str) -> Result<Self, MappingError> {
        let bad = |problem| {
            Err(MappingError::BadPattern {
                pattern: text.chars().take(200).collect(),
                problem,
            })
        };
        let (before, after) = match text.split_once('*') {
            None => (text, None),
            // With two stars a name could match in several ways.
            Some((_, after)) if after.contains('*') => return bad("it has more than one star"),
            Some((before, after)) => (before, Some(after.to_owned())),
        };
        if text.is_empty() {
            return bad("it is empty");
        }
        let before = before.to_owned();
        Ok(Self { before, after })
    }
}

impl TryFrom<String> for Pattern {
    type Error = MappingError;

    fn try_from(text: String) -> Result<Self, MappingError> {
        text.parse()
    }
}

impl From<Pattern> for String {
    fn from(pattern: Pattern) -> Self {
        pattern.to_string()
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.before)?;
        match &self.after {
            None => Ok(()),
            Some(after) => write!(f, "*{after}"),
        }
    }
}
