//! Bars, as an SVG document.

use std::error::Error;

use plotters::prelude::*;

const WIDTH: u32 = 960;
const STRONG: RGBColor = RGBColor(31, 119, 180);
const GOAL: RGBColor = RGBColor(214, 39, 40);

/// One bar: what it is of, how long, and where its target lies.
pub struct Bar {
    pub label: String,
    pub value: f64,
    pub target: Option<f64>,
}

/// Draws bars one below the other, each with its label next to it and a stroke
/// at its target; the bars share one scale.
pub fn bars(title: &str, unit: &str, bars: &[Bar]) -> Result<String, Box<dyn Error>> {
    const ROW: u32 = 26;
    const LABELS: i32 = 430;
    let height = ROW * bars.len() as u32 + 70;
    let longest = bars
        .iter()
        .map(|bar| bar.value.max(bar.target.unwrap_or(0.0)));
    let longest = longest.fold(f64::MIN_POSITIVE, f64::max);
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        area.fill(&WHITE)?;
        let text = |size: u32| ("sans-serif", size).into_font().color(&BLACK);
        area.draw(&Text::new(title.to_owned(), (16, 14), text(20)))?;
        let scale = f64::from(WIDTH as i32 - LABELS - 90) / longest;
        let at = |value: f64| LABELS + (value * scale) as i32;
        for (row, bar) in bars.iter().enumerate() {
            let top = 56 + (ROW * row as u32) as i32;
            let bottom = top + ROW as i32 - 8;
            area.draw(&Text::new(bar.label.clone(), (16, top + 2), text(13)))?;
            let color = match bar.target {
                Some(target) if bar.value > target => GOAL,
                _ => STRONG,
            };
            area.draw(&Rectangle::new(
                [(LABELS, top), (at(bar.value), bottom)],
                color.filled(),
            ))?;
            let end = at(bar.value.max(bar.target.unwrap_or(0.0))) + 6;
            area.draw(&Text::new(
                format!("{:.2} {unit}", bar.value),
                (end, top + 2),
                text(13),
            ))?;
            if let Some(target) = bar.target {
                let stroke = [(at(target), top - 2), (at(target), bottom + 2)];
                area.draw(&PathElement::new(stroke, BLACK.stroke_width(2)))?;
            }
        }
        area.present()?;
    }
    Ok(svg)
}
