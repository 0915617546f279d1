//! A learning curve.

use std::error::Error;

use plotters::prelude::*;

use super::{SIZE, STRONG};

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
        let returns = || learning.episodes.iter().map(|&(_, reward)| reward);
        // The goal is always in the picture, also if no return comes near it.
        let (low, high) = (
            returns().fold(learning.goal.min(0.0), f64::min),
            returns().fold(learning.goal, f64::max),
        );
        let margin = (high - low) * 0.05;
        // Returns that are never negative begin at the axis.
        let bottom = if low < 0.0 { low - margin } else { 0.0 };
        let mut chart = ChartBuilder::on(&area)
            .caption(learning.title, ("sans-serif", 22))
            .margin(16)
            .x_label_area_size(44)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..frames, bottom..high + margin)?;
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
