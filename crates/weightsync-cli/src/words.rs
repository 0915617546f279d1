//! Numbers and names, as people read them.

/// Words of others, without what would move a terminal's cursor.
pub fn shown(text: &str) -> String {
    text.chars()
        // Names come from files and from other hosts. A control character in them could change what
        // a terminal shows.
        .map(|one| if one.is_control() { '?' } else { one })
        .collect()
}

/// At most `most` characters of a text: its middle goes, as names differ at their ends.
pub fn elided(text: &str, most: usize) -> String {
    let count = text.chars().count();
    if count <= most {
        return text.to_owned();
    }
    let kept = most.saturating_sub(1);
    // The end gets the larger half: names of tensors differ there.
    let head = kept / 2;
    let begin: String = text.chars().take(head).collect();
    let end: String = text.chars().skip(count - (kept - head)).collect();
    format!("{begin}…{end}")
}

/// How many of something there are.
pub fn counted(count: usize, what: &str) -> String {
    match count {
        1 => format!("1 {what}"),
        count => format!("{} {what}s", grouped(count as u64)),
    }
}

/// A number with a comma before every three digits.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of bytes.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ => format!("{value:.1} {}", UNITS[unit]),
    }
}

/// A share in percent, which is 0 or 100 only if it is none or all.
pub fn percent(part: u64, all: u64) -> String {
    match 100.0 * part as f64 / all.max(1) as f64 {
        // A small share is not shown as none, and a large one not as all.
        _ if part == 0 => "0".to_owned(),
        _ if part == all => "100".to_owned(),
        percent if percent < 0.01 => "<0.01".to_owned(),
        percent if percent > 99.99 => ">99.99".to_owned(),
        percent => format!("{percent:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_names_read_well() {
        for (got, expected) in [
            (elided("layers.0.weight", 15), "layers.0.weight"),
            (elided("layers.10.mlp.weight", 9), "laye…ight"),
            (elided("ééééé", 4), "é…éé"),
            (shown("a\u{1b}[2J\n"), "a?[2J?"),
            (counted(1, "tensor"), "1 tensor"),
            (counted(10_000, "tensor"), "10,000 tensors"),
            (grouped(0), "0"),
            (grouped(999), "999"),
            (grouped(1_234_567), "1,234,567"),
            (bytes(1023), "1023 B"),
            (bytes(3 << 29), "1.5 GiB"),
            (percent(0, 0), "0"),
            (percent(1, 1_000_000), "<0.01"),
            (percent(1, 3), "33.33"),
            (percent(999_999, 1_000_000), ">99.99"),
            (percent(7, 7), "100"),
        ] {
            assert_eq!(got, expected);
        }
    }
}
