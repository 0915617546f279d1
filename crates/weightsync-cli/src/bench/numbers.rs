//! Sizes, durations and medians.

use std::str::FromStr;
use std::time::Duration;

/// A count that is not 0.
pub fn some(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|count| *count > 0);
    count.ok_or_else(|| "expected a whole number from 1 on".into())
}

/// A number of bytes, as people write it: `64KiB`, `1GiB`, `500MB`, `4096`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is not a size: write a number with B, KiB, MiB, GiB, KB, MB or \
                        GB"
            )
        };
        let text = text.trim();
        // The unit begins at the first letter, so a space before it is allowed.
        let unit_at = text
            .find(|c: char| c.is_ascii_alphabetic())
            .unwrap_or(text.len());
        let (number, unit) = text.split_at(unit_at);
        let factor: u64 = match unit.to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "kb" => 1000,
            "mb" => 1_000_000,
            "gb" => 1_000_000_000,
            _ => return Err(wrong()),
        };
        let number: u64 = number.trim().parse().map_err(|_| wrong())?;
        number.checked_mul(factor).map(Self).ok_or_else(wrong)
    }
}

impl std::fmt::Display for Size {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            bytes if bytes >= 1 << 30 && bytes.is_multiple_of(1 << 30) => {
                write!(f, "{} GiB", bytes >> 30)
            }
            bytes if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => {
                write!(f, "{} MiB", bytes >> 20)
            }
            bytes if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) => {
                write!(f, "{} KiB", bytes >> 10)
            }
            bytes => write!(f, "{bytes} B"),
        }
    }
}

/// Durations of one kind, in the order they were measured.
#[derive(Clone, Debug, Default)]
pub struct Times(Vec<Duration>);

impl Times {
    /// Adds one.
    pub fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    /// Those of another time as well.
    pub fn extend(&mut self, others: &Self) {
        self.0.extend(&others.0);
    }

    /// As many are shorter as are longer.
    pub fn median(&self) -> Duration {
        self.percentile(50)
    }

    /// The smallest time that `percent` of all are not longer than.
    pub fn percentile(&self, percent: usize) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort();
        // The nearest rank: a time that was measured, and not a value between two.
        let rank = (sorted.len() * percent).div_ceil(100).max(1) - 1;
        sorted.get(rank).copied().unwrap_or_default()
    }
}

/// How many times as long as the baseline it took.
pub fn ratio(time: Duration, baseline: Duration) -> f64 {
    time.as_secs_f64() / baseline.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        for (text, bytes) in [
            ("1GiB", 1 << 30),
            ("64 KiB", 65536),
            ("500MB", 500_000_000),
            ("7", 7),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "GiB", "1.5GiB", "-1", "1TiB", "99999999999GiB"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn percentiles_are_measured_values() {
        let mut times = Times::default();
        (1..=200)
            .rev()
            .for_each(|ms| times.push(Duration::from_millis(ms)));
        assert_eq!(times.median(), Duration::from_millis(100));
        assert_eq!(times.percentile(99), Duration::from_millis(198));
    }
}
