use std::f64::consts::PI;

use rand::RngExt;

use super::{Env, EnvRng, Transition, begun};

const GRAVITY: f64 = 10.0;
const MAX_SPEED: f64 = 8.0;
const MAX_TORQUE: f32 = 2.0;
/// Seconds between two states.
const TAU: f64 = 0.05;
const MAX_STEPS: u32 = 200;

/// Pendulum-v1: swing a pendulum up and hold it there, by a torque.
///
/// Gymnasium's dynamics; the action is a torque in N m, clipped to ±2. The reward
/// is at most 0, the nearer the pendulum is to standing still upright. No episode
/// ends but by being cut after 200 steps.
#[derive(Clone, Debug, Default)]
pub struct Pendulum {
    angle: f64,
    speed: f64,
    steps: u32,
}

impl Pendulum {
    /// Angle from upright (rad), not wrapped, and angular velocity (rad/s).
    pub fn state(&self) -> [f64; 2] {
        [self.angle, self.speed]
    }

    /// Puts the pendulum into `state`; the count of steps goes on.
    pub fn set_state(&mut self, state: [f64; 2]) {
        [self.angle, self.speed] = state;
    }
}

impl Env for Pendulum {
    type Action = [f32; 1];
    const NAME: &'static str = "Pendulum-v1";
    const OBSERVATION_LEN: usize = 3;
    const ACTIONS: usize = 1;
    const ACTION_RANGE: [f32; 2] = [-MAX_TORQUE, MAX_TORQUE];

    fn new(rng: &mut EnvRng) -> Self {
        begun(rng)
    }

    fn reset(&mut self, rng: &mut EnvRng) {
        self.angle = rng.random_range(-PI..PI);
        self.speed = rng.random_range(-1.0..1.0);
        self.steps = 0;
    }

    fn observe(&self, out: &mut [f32]) {
        let seen = [self.angle.cos(), self.angle.sin(), self.speed];
        for (to, from) in out.iter_mut().zip(seen) {
            *to = from as f32;
        }
    }

    fn step(&mut self, [torque]: [f32; 1]) -> Transition {
        // The torque's own terms are of 32 bits in Gymnasium too.
        let torque = torque.clamp(-MAX_TORQUE, MAX_TORQUE);
        // Gymnasium costs the wrapped angle and integrates the angle as it is.
        let angle = (self.angle + PI).rem_euclid(2.0 * PI) - PI;
        let cost =
            angle * angle + 0.1 * (self.speed * self.speed) + f64::from(0.001 * (torque * torque));
        let rate = 3.0 * GRAVITY / 2.0 * self.angle.sin() + f64::from(3.0 * torque);
        self.speed = (self.speed + rate * TAU).clamp(-MAX_SPEED, MAX_SPEED);
        self.angle += self.speed * TAU;
        self.steps += 1;
        Transition {
            reward: -cost as f32,
            terminated: false,
            truncated: self.steps >= MAX_STEPS,
        }
    }
}
