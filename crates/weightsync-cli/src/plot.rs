//! Pictures, as SVG documents.

mod spreads;

use std::error::Error;

use plotters::prelude::*;

pub use self::spreads::{Share, Spread, spreads};

const SIZE: (u32, u32) = (960, 540);
const STRONG: RGBColor = RGBColor(31, 119, 180);
const PALE: RGBColor = RGBColor(174, 199, 232);
const GOAL: RGBColor = RGBColor(214, 39, 40);

/// How a policy's return grew.
pub struct Learning<'a> {
    pub title: &'a str,
    /// The mean return that was to be reached.
    pub goal: f64,
    /// Episodes in a mean.
    pub window: usize,
    pub frames: usize,
    /// Frames so far and an episode's return.
    pub episodes: &'a [(f64, f64)],
    /// Frames so far and the mean of the last episodes.
    pub means: &'a [(f64, f64)],
}

/// Draws a learning curve.
pub fn learning(learning: &Learning<'_>) -> Result<String, Box<dyn Error>> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let frames = learning.frames.max(1) as f64;
        let highest = learning.episodes.iter().map(|&(_, reward)| reward);
        let top = highest.fold(learning.goal, f64::max) * 1.05;
        let mut chart = ChartBuilder::on(&area)
            .caption(learning.title, ("sans-serif", 22))
            .margin(16)
            .x_label_area_size(44)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..frames, 0.0..top)?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .x_desc("frames")
            .y_desc("return of an episode")
            .x_label_formatter(&|frames| format!("{frames:.0}"))
            .y_label_formatter(&|reward| format!("{reward:.0}"))
            .draw()?;
        let dot = |&at: &(f64, f64)| Circle::new(at, 2, PALE.filled());
        chart.draw_series(learning.episodes.iter().map(dot))?;
        let mean = LineSeries::new(learning.means.iter().copied(), STRONG.stroke_width(2));
        chart
            .draw_series(mean)?
            .label(format!("mean of the last {} episodes", learning.window))
            .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], STRONG));
        chart
            .draw_series(LineSeries::new(
                [(0.0, learning.goal), (frames, learning.goal)],
                GOAL,
            ))?
            .label(format!("goal, {}", learning.goal))
            .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], GOAL));
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .background_style(WHITE)
            .border_style(PALE)
            .draw()?;
        area.present()?;
    }
    Ok(svg)
}

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
        let area = SVGBackend::with_string(&mut svg, (SIZE.0, height)).into_drawing_area();
        area.fill(&WHITE)?;
        let text = |size: u32| ("sans-serif", size).into_font().color(&BLACK);
        area.draw(&Text::new(title.to_owned(), (16, 14), text(20)))?;
        let scale = f64::from(SIZE.0 as i32 - LABELS - 90) / longest;
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
