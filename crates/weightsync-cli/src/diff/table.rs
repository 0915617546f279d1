//! A comparison as a table for people to read.

use std::fmt::Write;

use super::compare::{FileComparison, Row, RowState, Sizes};
use super::tally::{Power, Summary};
use super::ulps::Unit;
use crate::words::{bytes, counted, elided, grouped, percent, shown};

/// The longest name that is shown whole.
const NAME: usize = 64;
const SHAPE: usize = 40;
/// Classes of steps that are told one by one.
const STEPS: usize = 6;

/// The table, and what it comes to.
pub fn text(comparison: &FileComparison) -> String {
    let heads = [
        "tensor",
        "dtype",
        "shape",
        "elements",
        "changed",
        "%",
        "median ULPs",
        "largest ULPs",
        "NaN",
    ];
    let mut lines = vec![heads.map(str::to_owned)];
    lines.extend(comparison.rows.iter().map(columns));
    let tensors = counted(comparison.rows.len(), "tensor");
    let total = numbers(comparison.elements, "", &comparison.total);
    lines.push(joined(["total".into(), String::new(), tensors], total));
    // Widths in characters: names of tensors may have others than ASCII.
    let widths: [usize; 9] = std::array::from_fn(|column| {
        let cells = lines.iter().map(|line| &line[column]);
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    });
    let mut text = String::new();
    for line in &lines {
        let mut row = String::new();
        for (column, (cell, width)) in line.iter().zip(widths).enumerate() {
            let _ = match column {
                0 => write!(row, "{cell:width$}"),
                1..3 => write!(row, "  {cell:width$}"),
                _ => write!(row, "  {cell:>width$}"),
            };
        }
        text.push_str(row.trim_end());
        text.push('\n');
    }
    text.push('\n');
    for sentence in sentences(comparison) {
        text.push_str(&sentence);
        text.push('\n');
    }
    text
}

/// The name of a tensor, short enough for a line.
pub fn name(row: &Row) -> String {
    elided(&shown(&row.tensor.name), NAME)
}

fn columns(row: &Row) -> [String; 9] {
    let tensor = &row.tensor;
    let (dtype, own) = (tensor.dtype.to_string(), shape(&tensor.shape));
    let unit = match row.unit {
        Unit::Element => "",
        Unit::Part => " parts",
        Unit::Byte => " bytes",
    };
    let bare = |what: &str| {
        let none = || String::new();
        let elements = grouped(row.elements) + unit;
        [elements, what.into(), none(), none(), none(), none()]
    };
    match &row.state {
        RowState::Compared(summary) => joined(
            [name(row), dtype, own],
            numbers(row.elements, unit, summary),
        ),
        RowState::OnlyInA => joined([name(row), dtype, own], bare("only in A")),
        RowState::OnlyInB => joined([name(row), dtype, own], bare("only in B")),
        RowState::Another {
            dtype: other,
            shape: others,
        } => {
            let from_to = |a: String, b: String| if a == b { a } else { format!("{a} → {b}") };
            let dtype = from_to(dtype, other.to_string());
            let shape = from_to(own, shape(others));
            joined([name(row), dtype, shape], bare("not compared"))
        }
    }
}

fn joined([a, b, c]: [String; 3], [d, e, f, g, h, i]: [String; 6]) -> [String; 9] {
    [a, b, c, d, e, f, g, h, i]
}

fn numbers(elements: u64, unit: &str, summary: &Summary) -> [String; 6] {
    let step = |step: Option<u64>| step.map_or("–".into(), grouped);
    [
        grouped(elements) + unit,
        grouped(summary.changed),
        percent(summary.changed, elements),
        step(summary.median_ulps),
        step(summary.largest_ulps),
        grouped(summary.nans()),
    ]
}

fn shape(shape: &[u64]) -> String {
    if shape.is_empty() {
        return "scalar".into();
    }
    let lens: Vec<String> = shape.iter().map(u64::to_string).collect();
    elided(&lens.join("×"), SHAPE)
}

/// What the table comes to.
fn sentences(comparison: &FileComparison) -> Vec<String> {
    let counts = comparison.counts();
    let mut sentences = Vec::new();
    if comparison.same() {
        sentences.push(match comparison.rows.len() {
            0 => "A and B are the same: neither has a tensor.".into(),
            1 => "A and B are the same: the tensor is equal, bit by bit.".into(),
            all => format!(
                "A and B are the same: all {} tensors are equal, bit by bit.",
                grouped(all as u64)
            ),
        });
    } else {
        let parts = [
            (counts.changed, "changed"),
            (counts.only_in_a, "only in A"),
            (counts.only_in_b, "only in B"),
            (counts.not_compared, "of another dtype or shape in B"),
        ];
        let parts = parts.iter().filter(|(count, _)| *count > 0);
        let parts: Vec<String> = parts
            .map(|&(count, what)| format!("{} {what}", grouped(count)))
            .collect();
        let all = counted(comparison.rows.len(), "tensor");
        sentences.push(format!("A and B differ: of {all} {}.", parts.join(", ")));
    }
    sentences.extend(steps(comparison));
    let Summary {
        to_nan,
        from_nan,
        between_nans,
        ..
    } = comparison.total;
    if comparison.total.nans() > 0 {
        sentences.push(format!(
            "Changes to NaN: {}, from NaN: {}, between NaNs of other bits: {}; they have no step.",
            grouped(to_nan),
            grouped(from_nan),
            grouped(between_nans)
        ));
    }
    if comparison.total.changed > 0 {
        sentences.push(delta(&comparison.sizes));
    }
    if !comparison.metadata.is_empty() {
        let keys: Vec<String> = comparison.metadata.iter().map(|key| shown(key)).collect();
        sentences.push(format!("The metadata differs in {}.", keys.join(", ")));
    }
    sentences
}

/// How the steps are spread: the classes that most of them are in.
fn steps(comparison: &FileComparison) -> Option<String> {
    let all: u64 = comparison.steps.iter().map(|power| power.count).sum();
    let mut common: Vec<&Power> = comparison.steps.iter().collect();
    // The most common classes are chosen, and then told in the order of the steps.
    common.sort_by_key(|power| std::cmp::Reverse(power.count));
    common.truncate(STEPS);
    common.retain(|power| power.count > 0);
    common.sort_by_key(|power| power.from);
    let told: u64 = common.iter().map(|power| power.count).sum();
    let mut parts: Vec<String> = common
        .iter()
        .map(|power| format!("{}: {} %", span(power), percent(power.count, all)))
        .collect();
    // The shares that are told add up to all.
    if told < all {
        parts.push(format!("others: {} %", percent(all - told, all)));
    }
    let parts = parts.join(", ");
    (all > 0).then(|| format!("Steps in ULPs (of integers: differences): {parts}."))
}

/// The steps of a class, as a range.
pub fn span(power: &Power) -> String {
    match power.from == power.to {
        true => grouped(power.to),
        false => format!("{}–{}", grouped(power.from), grouped(power.to)),
    }
}

fn delta(sizes: &Sizes) -> String {
    let codec = |size: u64| {
        let ratio = sizes.dense as f64 / size.max(1) as f64;
        let ratio = match ratio {
            10.0.. => format!("{ratio:.0}"),
            _ => format!("{ratio:.2}"),
        };
        format!("{} ({ratio} : 1)", bytes(size))
    };
    let each = sizes.coded.iter();
    let each = each.map(|(name, size)| format!("{} by the codec {}", codec(*size), name.as_str()));
    let each = each.collect::<Vec<_>>().join(", ");
    let sent_dense = match sizes.coded.values().all(|size| *size >= sizes.dense) {
        true => ": it would be sent dense",
        false => "",
    };
    format!(
        "A delta takes {each}, for {} dense{sent_dense}.",
        bytes(sizes.dense)
    )
}
