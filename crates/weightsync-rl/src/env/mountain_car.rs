use rand::RngExt;

use super::{Env, EnvRng, Transition, begun};

const FORCE: f64 = 0.001;
const GRAVITY: f64 = 0.0025;
const POSITION: (f64, f64) = (-1.2, 0.6);
const MAX_SPEED: f64 = 0.07;
const GOAL: f64 = 0.5;
const MAX_STEPS: u32 = 200;

/// MountainCar-v0: rock a weak car out of a valley.
///
/// Gymnasium's dynamics; actions push left (0), not at all (1) or right (2);
/// a reward of −1 per step, and an episode cut after 200 steps.
#[derive(Clone, Debug, Default)]
pub struct MountainCar {
    position: f64,
    velocity: f64,
    steps: u32,
}

impl MountainCar {
    /// Position and velocity.
    pub fn state(&self) -> [f64; 2] {
        [self.position, self.velocity]
    }

    /// Puts the car into `state`; the count of steps goes on.
    pub fn set_state(&mut self, state: [f64; 2]) {
        [self.position, self.velocity] = state;
    }
}

impl Env for MountainCar {
    type Action = u32;
    const NAME: &'static str = "MountainCar-v0";
    const OBSERVATION_LEN: usize = 2;
    const ACTIONS: usize = 3;

    fn new(rng: &mut EnvRng) -> Self {
        begun(rng)
    }

    fn reset(&mut self, rng: &mut EnvRng) {
        self.position = rng.random_range(-0.6..-0.4);
        self.velocity = 0.0;
        self.steps = 0;
    }

    fn observe(&self, out: &mut [f32]) {
        for (to, from) in out.iter_mut().zip(self.state()) {
            *to = from as f32;
        }
    }

    fn step(&mut self, action: u32) -> Transition {
        let push = f64::from(action.min(2)) - 1.0;
        self.velocity += push * FORCE + (3.0 * self.position).cos() * -GRAVITY;
        self.velocity = self.velocity.clamp(-MAX_SPEED, MAX_SPEED);
        self.position = (self.position + self.velocity).clamp(POSITION.0, POSITION.1);
        // The left wall stops the car.
        if self.position == POSITION.0 && self.velocity < 0.0 {
            self.velocity = 0.0;
        }
        self.steps += 1;
        Transition {
            reward: -1.0,
            terminated: self.position >= GOAL && self.velocity >= 0.0,
            truncated: self.steps >= MAX_STEPS,
        }
    }
}
