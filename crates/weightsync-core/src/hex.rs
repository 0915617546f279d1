//! Fixed-size byte strings as lower-case hexadecimal.

use serde::de::{self, Deserialize, Deserializer};
use serde::{Serialize, Serializer};

pub(crate) fn encode(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes
        .iter()
        .flat_map(|byte| [byte >> 4, byte & 15])
        .map(|nibble| char::from(DIGITS[usize::from(nibble)]))
        .collect()
}

/// Reads exactly `N` bytes, in either case.
pub(crate) fn decode<const N: usize>(text: &str) -> Option<[u8; N]> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    // Before any digit is read: the text comes from outside and may be long.
    if pairs.len() != N || !rest.is_empty() {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, &[high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = nibble(high)? << 4 | nibble(low)?;
    }
    Some(bytes)
}

fn nibble(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).map(|value| value as u8)
}

/// For `#[serde(with)]`: hexadecimal where people read it, plain bytes elsewhere.
pub(crate) fn serialize<const N: usize, S: Serializer>(
    bytes: &[u8; N],
    serializer: S,
) -> Result<S::Ok, S::Error>
where
    [u8; N]: Serialize,
{
    if serializer.is_human_readable() {
        serializer.serialize_str(&encode(bytes))
    } else {
        bytes.serialize(serializer)
    }
}

pub(crate) fn deserialize<'de, const N: usize, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<[u8; N], D::Error>
where
    [u8; N]: Deserialize<'de>,
{
    if deserializer.is_human_readable() {
        let text = String::deserialize(deserializer)?;
        decode(&text)
            .ok_or_else(|| de::Error::custom(format_args!("expected {} hexadecimal digits", 2 * N)))
    } else {
        <[u8; N]>::deserialize(deserializer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_and_refuses() {
        assert_eq!(encode(&[0, 0x1f, 0xff]), "001fff");
        assert_eq!(decode("001Fff"), Some([0, 0x1f, 0xff]));
        for bad in ["", "001f", "001ffff", "001fff00", "00 fff", "00é1f"] {
            assert_eq!(decode::<3>(bad), None, "{bad:?}");
        }
    }
}
