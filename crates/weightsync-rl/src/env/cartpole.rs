use rand::RngExt;

use super::{Env, EnvRng, Transition, begun};

const GRAVITY: f64 = 9.8;
const POLE_MASS: f64 = 0.1;
const TOTAL_MASS: f64 = POLE_MASS + 1.0;
/// Half of the pole's length.
const LENGTH: f64 = 0.5;
const POLE_MOMENT: f64 = POLE_MASS * LENGTH;
const FORCE: f64 = 10.0;
/// Seconds between two states.
const TAU: f64 = 0.02;
const X_LIMIT: f64 = 2.4;
const ANGLE_LIMIT: f64 = 12.0 * 2.0 * std::f64::consts::PI / 360.0;
const MAX_STEPS: u32 = 500;

/// CartPole-v1: push a cart left (0) or right (1) so that its pole stays up.
///
/// Gymnasium's dynamics (explicit Euler in `f64`, observed as `f32`), a reward
/// of 1 per step, and an episode cut after 500 steps.
#[derive(Clone, Debug, Default)]
pub struct CartPole {
    /// Position, velocity, angle, angular velocity.
    state: [f64; 4],
    steps: u32,
}

impl CartPole {
    /// Position (m), velocity (m/s), angle (rad) and angular velocity (rad/s).
    pub fn state(&self) -> [f64; 4] {
        self.state
    }

    /// Puts cart and pole into `state`; the count of steps goes on.
    pub fn set_state(&mut self, state: [f64; 4]) {
        self.state = state;
    }
}

impl Env for CartPole {
    type Action = u32;
    const NAME: &'static str = "CartPole-v1";
    const OBSERVATION_LEN: usize = 4;
    const ACTIONS: usize = 2;

    fn new(rng: &mut EnvRng) -> Self {
        begun(rng)
    }

    fn reset(&mut self, rng: &mut EnvRng) {
        self.state = std::array::from_fn(|_| rng.random_range(-0.05..0.05));
        self.steps = 0;
    }

    fn observe(&self, out: &mut [f32]) {
        for (to, from) in out.iter_mut().zip(self.state) {
            *to = from as f32;
        }
    }

    fn step(&mut self, action: u32) -> Transition {
        let [x, velocity, angle, spin] = self.state;
        let force = if action == 0 { -FORCE } else { FORCE };
        let (sin, cos) = (angle.sin(), angle.cos());
        let push = (force + POLE_MOMENT * (spin * spin) * sin) / TOTAL_MASS;
        let angular = (GRAVITY * sin - cos * push)
            / (LENGTH * (4.0 / 3.0 - POLE_MASS * (cos * cos) / TOTAL_MASS));
        let linear = push - POLE_MOMENT * angular * cos / TOTAL_MASS;
        // Explicit Euler: the new state follows from the old speeds.
        self.state = [
            x + TAU * velocity,
            velocity + TAU * linear,
            angle + TAU * spin,
            spin + TAU * angular,
        ];
        self.steps += 1;

        let [x, _, angle, _] = self.state;
        Transition {
            reward: 1.0,
            terminated: x.abs() > X_LIMIT || angle.abs() > ANGLE_LIMIT,
            truncated: self.steps >= MAX_STEPS,
        }
    }
}
