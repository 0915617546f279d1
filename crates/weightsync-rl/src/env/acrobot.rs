use std::f64::consts::PI;

use rand::RngExt;

use super::{Env, EnvRng, Transition, begun};

const LINK_LENGTH: f64 = 1.0;
const LINK_MASS: f64 = 1.0;
const LINK_CENTRE: f64 = 0.5;
const LINK_INERTIA: f64 = 1.0;
const GRAVITY: f64 = 9.8;
const MAX_SPEEDS: [f64; 2] = [4.0 * PI, 9.0 * PI];
const STEP: f64 = 0.2;
const MAX_STEPS: u32 = 500;

/// Acrobot-v1: swing the tip of two hanging links above a line by a torque
/// between them.
///
/// Gymnasium's dynamics, the equations of Sutton and Barto's book integrated
/// by one step of Runge and Kutta's method of fourth order. Actions push with
/// −1 (0), 0 (1) or 1 N m (2); a reward of −1 per step and of 0 for the step that
/// succeeds, and an episode cut after 500 steps.
#[derive(Clone, Debug, Default)]
pub struct Acrobot {
    state: [f64; 4],
    steps: u32,
}

impl Acrobot {
    /// The angle of the first link from hanging down, that of the second from the first, and the
    /// speeds of both.
    pub fn state(&self) -> [f64; 4] {
        self.state
    }

    /// Puts the links into `state`; the count of steps goes on.
    pub fn set_state(&mut self, state: [f64; 4]) {
        self.state = state;
    }
}

impl Env for Acrobot {
    type Action = u32;
    const NAME: &'static str = "Acrobot-v1";
    const OBSERVATION_LEN: usize = 6;
    const ACTIONS: usize = 3;

    fn new(rng: &mut EnvRng) -> Self {
        begun(rng)
    }

    fn reset(&mut self, rng: &mut EnvRng) {
        // Gymnasium begins with values of 32 bits, and goes on with 64.
        self.state = std::array::from_fn(|_| f64::from(rng.random_range(-0.1_f32..0.1)));
        self.steps = 0;
    }

    fn observe(&self, out: &mut [f32]) {
        let [first, second, first_speed, second_speed] = self.state;
        let seen = [
            first.cos(),
            first.sin(),
            second.cos(),
            second.sin(),
            first_speed,
            second_speed,
        ];
        for (to, from) in out.iter_mut().zip(seen) {
            *to = from as f32;
        }
    }

    fn step(&mut self, action: u32) -> Transition {
        let torque = f64::from(action.min(2)) - 1.0;
        let [first, second, first_speed, second_speed] = runge_kutta(self.state, torque);
        self.state = [
            wrapped(first),
            wrapped(second),
            first_speed.clamp(-MAX_SPEEDS[0], MAX_SPEEDS[0]),
            second_speed.clamp(-MAX_SPEEDS[1], MAX_SPEEDS[1]),
        ];
        let [first, second, ..] = self.state;
        let terminated = -first.cos() - (second + first).cos() > 1.0;
        self.steps += 1;
        Transition {
            reward: if terminated { 0.0 } else { -1.0 },
            terminated,
            truncated: self.steps >= MAX_STEPS,
        }
    }
}

/// The state one step later.
fn runge_kutta(state: [f64; 4], torque: f64) -> [f64; 4] {
    let moved = |by: [f64; 4], time: f64| -> [f64; 4] {
        std::array::from_fn(|at| state[at] + time * by[at])
    };
    let k1 = derivative(state, torque);
    let k2 = derivative(moved(k1, STEP / 2.0), torque);
    let k3 = derivative(moved(k2, STEP / 2.0), torque);
    let k4 = derivative(moved(k3, STEP), torque);
    std::array::from_fn(|at| {
        state[at] + STEP / 6.0 * (k1[at] + 2.0 * k2[at] + 2.0 * k3[at] + k4[at])
    })
}

fn derivative([first, second, first_speed, second_speed]: [f64; 4], torque: f64) -> [f64; 4] {
    let (m, l, lc, i, g) = (LINK_MASS, LINK_LENGTH, LINK_CENTRE, LINK_INERTIA, GRAVITY);
    let (sin, cos) = second.sin_cos();
    let d1 = m * lc * lc + m * (l * l + lc * lc + 2.0 * l * lc * cos) + i + i;
    let d2 = m * (lc * lc + l * lc * cos) + i;
    let phi2 = m * lc * g * (first + second - PI / 2.0).cos();
    let phi1 = -m * l * lc * second_speed * second_speed * sin
        - 2.0 * m * l * lc * second_speed * first_speed * sin
        + (m * lc + m * l) * g * (first - PI / 2.0).cos()
        + phi2;
    let second_rate =
        (torque + d2 / d1 * phi1 - m * l * lc * first_speed * first_speed * sin - phi2)
            / (m * lc * lc + i - d2 * d2 / d1);
    let first_rate = -(d2 * second_rate + phi1) / d1;
    [first_speed, second_speed, first_rate, second_rate]
}

/// An angle between −π and π.
fn wrapped(mut angle: f64) -> f64 {
    if !(-1e6..1e6).contains(&angle) {
        // Subtracting would take for ever, or change nothing.
        return (angle + PI).rem_euclid(2.0 * PI) - PI;
    }
    while angle > PI {
        angle -= 2.0 * PI;
    }
    while angle < -PI {
        angle += 2.0 * PI;
    }
    angle
}
