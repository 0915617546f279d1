//! How the return grew, and a picture of it.

use std::{collections::VecDeque, error::Error};

use weightsync_rl::frames::Frames;

use crate::plot;

/// Episodes in the mean that counts.
const WINDOW: usize = 100;

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
        // Episodes that ended in this batch all count at its end.
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
        plot::learning(&plot::Learning {
            title,
            goal,
            window: WINDOW,
            frames: self.frames,
            episodes: &self.episodes,
            means: &self.means,
        })
    }
}
