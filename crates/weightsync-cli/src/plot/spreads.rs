//! How something is spread over tensors or classes: bars one below the other.

use std::error::Error;

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{SIZE, STRONG};

/// One bar, and what stands on either side of it.
pub struct SpreadBar {
    pub label: String,
    /// From 0 to 1.
    pub value: f64,
    pub text: String,
}

/// Bars that share one scale.
pub struct Spread<'a> {
    pub title: &'a str,
    pub shares: Vec<SpreadBar>,
    /// What stands below them, if it is not empty.
    pub more: String,
}

const ROW: i32 = 22;
const HEAD: i32 = 36;
const LABELS: i32 = 430;
/// Room for the text behind the longest bar.
const TEXTS: i32 = 170;

/// Draws one spread below the other; those without a bar are left out.
pub fn spreads(title: &str, spreads: &[Spread<'_>]) -> Result<String, Box<dyn Error>> {
    let drawn = || spreads.iter().filter(|spread| !spread.shares.is_empty());
    let heights = drawn().map(|spread| HEAD + ROW * lines(spread) + ROW);
    let height = 56 + heights.sum::<i32>();
    let mut svg = String::new();
    // The drawing area borrows the text, so it ends before the text is returned.
    {
        let area = SVGBackend::with_string(&mut svg, (SIZE.0, height as u32)).into_drawing_area();
        area.fill(&WHITE)?;
        let text = |size: u32| ("sans-serif", size).into_font().color(&BLACK);
        let ends_there = text(13).pos(Pos::new(HPos::Right, VPos::Top));
        area.draw(&Text::new(title.to_owned(), (16, 14), text(20)))?;
        let mut top = 56;
        for spread in drawn() {
            area.draw(&Text::new(spread.title.to_owned(), (16, top), text(16)))?;
            top += HEAD;
            let longest = spread.shares.iter().map(|share| share.value);
            // The smallest positive number: if all bars are empty, nothing is divided by zero.
            let longest = longest.fold(f64::MIN_POSITIVE, f64::max);
            let scale = f64::from(SIZE.0 as i32 - LABELS - TEXTS) / longest;
            for share in &spread.shares {
                // However little it is, it is seen.
                let end = LABELS + (share.value * scale).ceil() as i32;
                let at = (LABELS - 8, top + 2);
                area.draw(&Text::new(share.label.clone(), at, ends_there.clone()))?;
                area.draw(&Rectangle::new(
                    [(LABELS, top), (end, top + ROW - 6)],
                    STRONG.filled(),
                ))?;
                let at = (end + 6, top + 2);
                area.draw(&Text::new(share.text.clone(), at, text(13)))?;
                top += ROW;
            }
            if !spread.more.is_empty() {
                let at = (LABELS, top + 2);
                area.draw(&Text::new(spread.more.clone(), at, text(13)))?;
                top += ROW;
            }
            top += ROW;
        }
        area.present()?;
    }
    Ok(svg)
}

fn lines(spread: &Spread<'_>) -> i32 {
    spread.shares.len() as i32 + i32::from(!spread.more.is_empty())
}
