//! A comparison as a picture.

use std::error::Error;

use super::compare::{FileComparison, Row, RowState};
use super::table;
use crate::plot::{self, Spread};
use crate::words::{counted, elided, grouped, percent};

/// Tensors that are drawn at most.
const MOST: usize = 60;
/// The longest name next to a bar.
const NAME: usize = 60;

/// Draws the tensors that changed most, in the order of the file, and how the steps are spread.
pub fn draw(comparison: &FileComparison) -> Result<String, Box<dyn Error>> {
    let mut tensors: Vec<(usize, &Row, f64)> = Vec::new();
    for (at, row) in comparison.rows.iter().enumerate() {
        if let RowState::Compared(summary) = row.state {
            let share = summary.changed as f64 / row.elements.max(1) as f64;
            tensors.push((at, row, share));
        }
    }
    // Of equals the first: sorting keeps their order.
    tensors.sort_by(|(_, _, one), (_, _, other)| other.total_cmp(one));
    let more = tensors.len().saturating_sub(MOST);
    tensors.truncate(MOST);
    // Back in the order of the file, where neighbours belong together.
    tensors.sort_by_key(|(at, _, _)| *at);
    let bars = tensors.iter().map(|(_, row, share)| plot::SpreadBar {
        label: elided(&table::name(row), NAME),
        value: *share,
        text: match row.state {
            RowState::Compared(summary) => format!("{} %", percent(summary.changed, row.elements)),
            _ => String::new(),
        },
    });
    let all: u64 = comparison.steps.iter().map(|power| power.count).sum();
    let steps = comparison.steps.iter().map(|power| plot::SpreadBar {
        label: table::span(power),
        value: power.count as f64 / all.max(1) as f64,
        text: format!("{} % ({})", percent(power.count, all), grouped(power.count)),
    });
    let counts = comparison.counts();
    let compared = counts.same + counts.changed;
    let title = format!(
        "{} % of {} in {} changed",
        percent(comparison.total.changed, comparison.elements),
        counted(comparison.elements as usize, "element"),
        counted(compared as usize, "tensor"),
    );
    let spreads = [
        Spread {
            title: "Changed elements, by tensor",
            shares: bars.collect(),
            more: match more {
                0 => String::new(),
                more => format!(
                    "and {} more, which changed no more than these",
                    grouped(more as u64)
                ),
            },
        },
        Spread {
            title: "Steps in ULPs (of integers: differences)",
            shares: steps.collect(),
            more: String::new(),
        },
    ];
    plot::spreads(&title, &spreads)
}
