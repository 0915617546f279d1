//! How the return grew, and a picture of it.

use std::{collections::VecDeque, error::Error};

use plotters::prelude::*;
use weightsync_rl::frames::Frames;

/// Episodes in the mean that counts.
const WINDOW: usize = 100;
const SIZE: (u32, u32) = (960, 540);
const MEAN_COLOR: RGBColor = RGBColor(31, 119, 180);
const EPISODE_COLOR: RGBColor = RGBColor(174, 199, 232);
const GOAL_COLOR: RGBColor = RGBColor(214, 39, 40);

/// The returns of a training run.
#[derive(Default)]
pub struct Curve {
    frames: usize,
    last: VecDeque<f64>,
    /// Frames so far and the episode's return.
    episodes: Vec<(f64, f64)>,
    /// Frames so far and the mean of the last episodes.
    means: Vec<(f64, f64)>,
}

impl Curve {
    pub fn add(&mut self, frames: &Frames) {
        self.frames += frames.len();
        for episode in &frames.episodes {
            let reward = f64::from(episode.reward);
            self.last.push_back(reward);
            if self.last.len() > WINDOW {
                self.last.pop_front();
            }
            self.episodes.push((self.frames as f64, reward));
        }
        if let Some(mean) = self.rolling() {
            self.means.push((self.frames as f64, mean));
        }
    }

    /// Frames collected.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// How many episodes the mean is over.
    pub fn window(&self) -> usize {
        self.last.len()
    }

    /// The mean return of the last [`WINDOW`] episodes, once there are so many.
    pub fn mean(&self) -> Option<f64> {
        (self.last.len() == WINDOW).then(|| self.rolling())?
    }

    /// The same of as many as there are.
    fn rolling(&self) -> Option<f64> {
        let count = self.last.len();
        (count > 0).then(|| self.last.iter().sum::<f64>() / count as f64)
    }

    /// The curve as an SVG document.
    pub fn svg(&self, title: &str, goal: f64) -> Result<String, Box<dyn Error>> {
        let mut svg = String::new();
        {
            let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
            area.fill(&WHITE)?;
            let frames = self.frames.max(1) as f64;
            let highest = self.episodes.iter().map(|&(_, reward)| reward);
            let top = highest.fold(goal, f64::max) * 1.05;
            let mut chart = ChartBuilder::on(&area)
                .caption(title, ("sans-serif", 22))
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
            let dot = |&at: &(f64, f64)| Circle::new(at, 2, EPISODE_COLOR.filled());
            chart.draw_series(self.episodes.iter().map(dot))?;
            let mean = LineSeries::new(self.means.iter().copied(), MEAN_COLOR.stroke_width(2));
            chart
                .draw_series(mean)?
                .label(format!("mean of the last {WINDOW} episodes"))
                .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], MEAN_COLOR));
            chart
                .draw_series(LineSeries::new([(0.0, goal), (frames, goal)], GOAL_COLOR))?
                .label(format!("goal, {goal}"))
                .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], GOAL_COLOR));
            chart
                .configure_series_labels()
                .position(SeriesLabelPosition::LowerRight)
                .background_style(WHITE)
                .border_style(EPISODE_COLOR)
                .draw()?;
            area.present()?;
        }
        Ok(svg)
    }
}
