//! How long one target runs.

use std::time::Duration;

const DEFAULT_SECONDS: f64 = 1.0;
const FULL_SECONDS: f64 = 60.0;

/// The time one target may take, from `WEIGHTSYNC_FUZZ_SECONDS` and `WEIGHTSYNC_SOAK`.
///
/// # Panics
/// If either holds something else than it should: a run of another length than asked for would
/// pass silently.
pub fn time_box() -> Duration {
    let seconds = std::env::var("WEIGHTSYNC_FUZZ_SECONDS").ok();
    let soak = std::env::var("WEIGHTSYNC_SOAK").ok();
    match parse(seconds.as_deref(), soak.as_deref()) {
        Ok(time) => time,
        Err(what) => panic!("{what}"),
    }
}

fn parse(seconds: Option<&str>, soak: Option<&str>) -> Result<Duration, String> {
    let factor = |name: &str, text: &str| {
        text.parse()
            .ok()
            .filter(|value: &f64| value.is_finite() && *value > 0.0)
            .ok_or_else(|| format!("{name} is `{text}`: expected a number above 0"))
    };
    let given = |text: Option<&str>| text.filter(|text| !text.is_empty()).map(str::to_owned);
    let base = match given(seconds) {
        Some(text) => Some(factor("WEIGHTSYNC_FUZZ_SECONDS", &text)?),
        None => None,
    };
    let seconds = match given(soak).as_deref() {
        Some("full") => base.unwrap_or(FULL_SECONDS),
        Some(text) => base.unwrap_or(DEFAULT_SECONDS) * factor("WEIGHTSYNC_SOAK", text)?,
        None => base.unwrap_or(DEFAULT_SECONDS),
    };
    Duration::try_from_secs_f64(seconds).map_err(|error| format!("{seconds} s per target: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_follows_both_variables() {
        let cases = [
            (None, None, Some(1000)),
            (None, Some(""), Some(1000)),
            (None, Some("0.1"), Some(100)),
            (None, Some("full"), Some(60_000)),
            (Some("10"), None, Some(10_000)),
            (Some("10"), Some("2"), Some(20_000)),
            (Some("10"), Some("full"), Some(10_000)),
            (Some("0"), None, None),
            (None, Some("-1"), None),
            (None, Some("long"), None),
            (Some("1e300"), None, None),
        ];
        for (seconds, soak, millis) in cases {
            let got = parse(seconds, soak).ok();
            assert_eq!(
                got,
                millis.map(Duration::from_millis),
                "{seconds:?} {soak:?}"
            );
        }
    }
}
