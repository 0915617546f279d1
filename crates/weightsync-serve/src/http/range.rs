//! The part of a body that a request asks for.

use std::ops::Range;

use hyper::StatusCode;
use hyper::header::{ACCEPT_RANGES, CONTENT_RANGE, HeaderMap, HeaderValue, IF_RANGE, RANGE};

/// A request asks for a part that there is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoSuchRange {
    all: u64,
}

impl NoSuchRange {
    /// The status and the words of the answer, whose headers get how much there is.
    pub(crate) fn answer(self, headers: &mut HeaderMap) -> (StatusCode, String) {
        let all = self.all;
        content_range(headers, format!("bytes */{all}"));
        let words = format!("expected one range of bytes within {all}");
        (StatusCode::RANGE_NOT_SATISFIABLE, words)
    }
}

/// The part of a body of so many bytes that a request asks for: all of it, unless it has a range, and if
/// its earlier part has this tag.
pub(crate) fn asked(
    request: &HeaderMap,
    all: u64,
    tag: Option<&str>,
) -> Result<(StatusCode, Range<u64>), NoSuchRange> {
    // Bytes of another content must not be appended to an earlier part, so the whole body answers a
    // request whose tag does not fit.
    let earlier = request.get(IF_RANGE);
    let is_of_it = earlier.is_none_or(|earlier| earlier.to_str().ok() == tag);
    match request.get(RANGE).filter(|_| is_of_it) {
        None => Ok((StatusCode::OK, 0..all)),
        Some(range) => match part_of(range, all) {
            Some(part) => Ok((StatusCode::PARTIAL_CONTENT, part)),
            None => Err(NoSuchRange { all }),
        },
    }
}

/// Says in an answer's headers which part of how many bytes it has.
pub(crate) fn describe(headers: &mut HeaderMap, status: StatusCode, part: &Range<u64>, all: u64) {
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if status == StatusCode::PARTIAL_CONTENT {
        content_range(
            headers,
            format!("bytes {}-{}/{all}", part.start, part.end - 1),
        );
    }
}

fn content_range(headers: &mut HeaderMap, text: String) {
    if let Ok(value) = HeaderValue::from_str(&text) {
        headers.insert(CONTENT_RANGE, value);
    }
}

/// The range that a request asks for, within this many bytes.
fn part_of(range: &HeaderValue, all: u64) -> Option<Range<u64>> {
    // One range only. A list of ranges has a comma, which no number contains, so it counts as no
    // range that this server has.
    let (first, last) = range
        .to_str()
        .ok()?
        .strip_prefix("bytes=")?
        .split_once('-')?;
    let number = |text: &str| {
        // `parse` would also accept a leading `+`.
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| text.parse::<u64>().ok()).flatten()
    };
    let part = match (first, last) {
        // The last so many bytes.
        ("", last) => all.saturating_sub(number(last)?)..all,
        (first, "") => number(first)?..all,
        // A request may name an end after the last byte. The part then ends with the body.
        (first, last) => number(first)?..number(last)?.saturating_add(1).min(all),
    };
    // An empty part has no last byte to name.
    (part.start < part.end).then_some(part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_range_within_the_bytes_is_understood() {
        let part = |text: &str| part_of(&HeaderValue::from_str(text).unwrap(), 10);
        for (text, expected) in [
            ("bytes=0-", Some(0..10)),
            ("bytes=3-", Some(3..10)),
            ("bytes=3-3", Some(3..4)),
            ("bytes=3-100", Some(3..10)),
            ("bytes=-4", Some(6..10)),
            ("bytes=-40", Some(0..10)),
            ("bytes=10-", None),
            ("bytes=5-4", None),
            ("bytes=-0", None),
            ("bytes=-", None),
            ("bytes=a-b", None),
            ("bytes=+1-2", None),
            ("bytes=0-1,3-4", None),
            ("bytes=0-99999999999999999999999", None),
            ("items=0-1", None),
            ("", None),
        ] {
            assert_eq!(part(text), expected, "{text}");
        }
    }
}
