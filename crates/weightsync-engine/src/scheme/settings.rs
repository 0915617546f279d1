//! The settings of a scheme, each declared once.
//!
//! A scheme has a table of [`Setting`]s. What reads and prints its text, what an error says is
//! expected, and what the documents and Python's classes say of it, follow from that table or are
//! compared with it by a test.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use super::cut;
use crate::error::{Error, Result};

/// One setting of the scheme `S`.
pub struct Setting<S: 'static> {
    /// Its name in the scheme's text.
    pub key: &'static str,
    /// The values that it takes, for people; empty for a flag.
    pub takes: &'static str,
    /// What it does, in one sentence.
    pub about: &'static str,
    /// Sets it to the value of a text.
    pub set: fn(&mut S, &str) -> Result<(), Wrong>,
    /// Its value as text, empty for a flag that is set; `None` where nothing is set.
    pub get: fn(&S) -> Option<String>,
}

/// Why a value is none of a setting's.
#[derive(Debug)]
pub enum Wrong {
    /// It is none that the setting takes.
    Value,
    /// Something else is wrong with it.
    Because(Error),
}

impl From<Error> for Wrong {
    fn from(error: Error) -> Self {
        Self::Because(error)
    }
}

/// A setting as documents and other languages have it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Declared {
    /// Its name in the scheme's text.
    pub key: &'static str,
    /// The values that it takes, for people; empty for a flag.
    pub takes: &'static str,
    /// What it does, in one sentence.
    pub about: &'static str,
    /// The value that it has where nothing sets it, if there is one.
    pub default: Option<String>,
}

/// Reads the settings of the scheme `name`.
///
/// # Errors
///
/// [`Error::BadSetting`] for a name that no setting has, with those there are, and for a value that a
/// setting does not take.
pub fn read<S: Default>(
    name: &str,
    table: &[Setting<S>],
    given: &BTreeMap<String, String>,
) -> Result<S> {
    let mut scheme = S::default();
    for (key, value) in given {
        let Some(setting) = table.iter().find(|setting| setting.key == key) else {
            let known: Vec<_> = table.iter().map(Setting::to_string).collect();
            let known = match known.is_empty() {
                true => "none at all".to_owned(),
                false => known.join(", "),
            };
            return Err(Error::BadSetting {
                setting: cut(key),
                expected: format!("a setting of {name}: {known}"),
                got: cut(key),
            });
        };
        (setting.set)(&mut scheme, value).map_err(|wrong| match wrong {
            Wrong::Because(error) => error,
            Wrong::Value => Error::BadSetting {
                setting: cut(key),
                expected: match setting.takes {
                    "" => "no value, true or false".into(),
                    takes => takes.into(),
                },
                got: cut(value),
            },
        })?;
    }
    Ok(scheme)
}

/// The settings that differ from those of `S::default()`, as a scheme's text has them.
pub fn given<S: Default>(scheme: &S, table: &[Setting<S>]) -> Vec<(String, String)> {
    // A setting that is as usual is not in the text.
    let usual = S::default();
    let given = table.iter().filter_map(|setting| {
        let value =
            (setting.get)(scheme).filter(|_| (setting.get)(scheme) != (setting.get)(&usual))?;
        Some((setting.key.to_owned(), value))
    });
    given.collect()
}

/// The settings of a table.
pub fn declared<S: Default>(table: &[Setting<S>]) -> Vec<Declared> {
    let usual = S::default();
    let declared = table.iter().map(|setting| Declared {
        key: setting.key,
        takes: setting.takes,
        about: setting.about,
        default: (setting.get)(&usual),
    });
    declared.collect()
}

/// The value of a flag.
///
/// # Errors
///
/// [`Wrong::Value`].
pub fn flag(value: &str) -> Result<bool, Wrong> {
    match value {
        "" | "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(Wrong::Value),
    }
}

/// A flag as the text of a setting.
pub fn set_flag(is_set: bool) -> Option<String> {
    is_set.then(String::new)
}

/// A number in a range.
///
/// # Errors
///
/// [`Wrong::Value`].
pub fn number<N: FromStr + PartialOrd>(value: &str, range: RangeInclusive<N>) -> Result<N, Wrong> {
    let number = value.parse().ok();
    number
        .filter(|number| range.contains(number))
        .ok_or(Wrong::Value)
}

/// One of a setting's words.
///
/// # Errors
///
/// [`Wrong::Value`].
pub fn word<W: FromStr>(value: &str) -> Result<W, Wrong> {
    value.parse().map_err(|_| Wrong::Value)
}

impl<S> fmt::Display for Setting<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.takes {
            "" => f.write_str(self.key),
            takes => write!(f, "{}={takes}", self.key),
        }
    }
}
