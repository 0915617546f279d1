//! When and how versions travel, in the words of users.

use std::num::NonZero;
use std::str::FromStr;

use weightsync_core::synchronizer::{Method, Style};
use weightsync_engine::{Error, Result};

/// The words for [`Method`], the usual ones first.
const METHODS: [(&str, Method); 5] = [
    ("nccl", Method::Direct),
    ("memory", Method::Memory),
    ("checkpoint", Method::Checkpoint),
    ("online", Method::Direct),
    ("offline", Method::Checkpoint),
];

/// The words for the kinds of [`Style`].
const STYLES: [&str; 7] = [
    "fixed",
    "dynamic_by_explorer",
    "dynamic_by_trainer",
    "fully_async",
    "bounded",
    "explorer_driven",
    "trainer_driven",
];

/// The method that a word names.
///
/// # Errors
///
/// [`Error::BadSetting`] with the words there are.
pub fn method(word: &str) -> Result<Method> {
    let found = METHODS.iter().find(|(known, _)| *known == word);
    found.map(|(_, method)| *method).ok_or_else(|| {
        bad(
            "method",
            &one_of(METHODS.iter().map(|(word, _)| *word)),
            word,
        )
    })
}

/// The usual word for a method.
pub fn method_word(method: Method) -> &'static str {
    // The first word of a method is the usual one.
    let found = METHODS.iter().find(|(_, known)| *known == method);
    found.map_or("memory", |(word, _)| word)
}

/// A style in the words of users: see [`Style`].
///
/// ```
/// use weightsync_serve::synchronizer::StyleWords;
///
/// let style: StyleWords = "fixed".parse()?;
/// style.interval(4).offset(2).style()?;
/// assert!("fixd".parse::<StyleWords>().is_err());
/// # Ok::<(), weightsync::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct StyleWords {
    word: &'static str,
    interval: Option<u64>,
    offset: Option<u64>,
    lag: Option<u64>,
}

impl StyleWords {
    /// Steps between two syncs; 1 by default.
    pub fn interval(self, steps: impl Into<Option<u64>>) -> Self {
        Self {
            interval: steps.into(),
            ..self
        }
    }

    /// For `fixed`: by how many steps explorers are ahead of the trainer; 0 by default.
    pub fn offset(self, steps: impl Into<Option<u64>>) -> Self {
        Self {
            offset: steps.into(),
            ..self
        }
    }

    /// For `bounded`: how many versions an explorer may be behind; 1 by default.
    pub fn lag(self, versions: impl Into<Option<u64>>) -> Self {
        Self {
            lag: versions.into(),
            ..self
        }
    }

    /// The style.
    ///
    /// # Errors
    ///
    /// [`Error::BadSetting`] for an interval of 0, and a setting that belongs to another style.
    pub fn style(self) -> Result<Style> {
        let interval = self.interval.unwrap_or(1);
        let interval = NonZero::new(interval)
            .ok_or_else(|| bad("interval", "1 step or more", &interval.to_string()))?;
        // A setting of another style is an error, so that a mistake is not ignored.
        for (name, value, of) in [
            ("offset", self.offset, "fixed"),
            ("lag", self.lag, "bounded"),
        ] {
            if let Some(value) = value.filter(|_| self.word != of) {
                let expected = format!(
                    "none: it belongs to the style {of}, and this one is {}",
                    self.word
                );
                return Err(bad(name, &expected, &value.to_string()));
            }
        }
        Ok(match self.word {
            "fixed" => Style::Fixed {
                interval,
                offset: self.offset.unwrap_or(0),
            },
            "dynamic_by_explorer" | "explorer_driven" => Style::ByExplorer { interval },
            "dynamic_by_trainer" | "trainer_driven" => Style::ByTrainer { interval },
            "fully_async" => Style::FullyAsync {
                trainer: interval,
                explorer: interval,
            },
            // `word` is one of the list above, so this is `bounded`.
            _ => Style::Bounded {
                interval,
                lag: self.lag.unwrap_or(1),
            },
        })
    }
}

impl FromStr for StyleWords {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        let found = STYLES.iter().find(|known| **known == word);
        let word = found.ok_or_else(|| bad("style", &one_of(STYLES.into_iter()), word))?;
        Ok(Self {
            word,
            interval: None,
            offset: None,
            lag: None,
        })
    }
}

/// The usual word for a style.
pub(super) fn style_word(style: Style) -> &'static str {
    match style {
        Style::Fixed { .. } => "fixed",
        Style::ByExplorer { .. } => "dynamic_by_explorer",
        Style::ByTrainer { .. } => "dynamic_by_trainer",
        Style::FullyAsync { .. } => "fully_async",
        Style::Bounded { .. } => "bounded",
    }
}

/// Whether explorers of a style ever synchronise with a trainer of another one: if each waits for the
/// other to begin, nobody does.
pub(super) fn fit(trainer: Style, explorer: Style) -> bool {
    // Explorers of these styles ask without a version being there. A trainer that waits for them is
    // then woken.
    let asks = matches!(explorer, Style::Fixed { .. } | Style::ByExplorer { .. });
    asks || !matches!(trainer, Style::ByExplorer { .. })
}

pub(super) fn bad(setting: &str, expected: &str, got: &str) -> Error {
    Error::BadSetting {
        setting: setting.into(),
        expected: expected.into(),
        got: got.into(),
    }
}

fn one_of<'a>(words: impl Iterator<Item = &'a str>) -> String {
    let words: Vec<_> = words.collect();
    format!("one of {}", words.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_name_methods_and_styles() {
        for (word, expected) in METHODS {
            assert_eq!(method(word).unwrap(), expected);
            assert_eq!(method(method_word(expected)).unwrap(), expected);
        }
        for word in STYLES {
            let style = word.parse::<StyleWords>().unwrap().style().unwrap();
            let usual: StyleWords = style_word(style).parse().unwrap();
            assert_eq!(usual.style().unwrap(), style);
        }
        let error = method("ncl").unwrap_err().to_string();
        assert!(error.contains("nccl, memory, checkpoint"), "{error}");
    }

    #[test]
    fn setting_of_another_style_is_refused() {
        let fixed: StyleWords = "fixed".parse().unwrap();
        assert!(fixed.interval(0).style().is_err());
        let error = fixed.lag(2).style().unwrap_err().to_string();
        assert!(error.contains("belongs to the style bounded"), "{error}");
        let bounded: StyleWords = "bounded".parse().unwrap();
        assert!(bounded.offset(1).style().is_err());
        assert!(bounded.lag(3).style().is_ok());
    }

    #[test]
    fn parties_that_wait_for_each_other_do_not_fit() {
        let style = |word: &str| word.parse::<StyleWords>().unwrap().style().unwrap();
        for word in STYLES {
            assert!(fit(style("fixed"), style(word)), "{word}");
            assert!(fit(style(word), style("dynamic_by_explorer")), "{word}");
        }
        for word in ["dynamic_by_trainer", "fully_async", "bounded"] {
            assert!(!fit(style("dynamic_by_explorer"), style(word)), "{word}");
        }
    }
}
