//! What the demo trains: a task, an algorithm, and the settings that suit the two.

use std::error::Error;

use clap::ValueEnum;
use weightsync_rl::{
    collector::Task,
    dqn::{Dqn, DqnConfig, QNetwork},
    env::Gym,
    learn::Learner,
    ppo::{ActorCritic, Ppo, PpoConfig},
};

/// What is trained in.
#[derive(Clone, Debug)]
pub enum Environment {
    BuiltIn(Task),
    /// Of Gymnasium, by its id.
    Gym(String),
}

impl Environment {
    /// Reads the argument `--env`.
    pub fn parse(text: &str) -> Result<Self, String> {
        Ok(Self::BuiltIn(match text {
            "cartpole" => Task::CartPole,
            "pendulum" => Task::Pendulum,
            "mountain-car" => Task::MountainCar,
            "acrobot" => Task::Acrobot,
            _ => match text.strip_prefix("gym:") {
                Some(id) if !id.is_empty() => return Ok(Self::Gym(id.to_owned())),
                _ => {
                    return Err(
                        "expected cartpole, pendulum, mountain-car, acrobot, or gym:ID \
                                with an id of Gymnasium such as gym:CartPole-v1"
                            .into(),
                    );
                }
            },
        }))
    }

    fn task(self, python: &str) -> Result<Task, weightsync_rl::Error> {
        Ok(match self {
            Self::BuiltIn(task) => task,
            Self::Gym(id) => Task::Gym(Gym::find(&id, python)?),
        })
    }
}

/// How it is trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Algorithm {
    /// Proximal policy optimisation
    Ppo,
    /// Deep Q-learning, of discrete actions
    Dqn,
}

impl Algorithm {
    pub fn name(self) -> &'static str {
        match self {
            Self::Ppo => "PPO",
            Self::Dqn => "DQN",
        }
    }
}

/// A task, an algorithm and their settings.
#[derive(Debug)]
pub struct Job {
    pub task: Task,
    pub algorithm: Algorithm,
    /// The mean return of the last episodes that ends the demo.
    pub goal: f64,
    pub frames_per_batch: usize,
    /// Seconds to reach the goal in.
    pub time_limit: u64,
}

const HIDDEN: [usize; 2] = [64, 64];

impl Job {
    /// Gymnasium is asked about its task, and what was not chosen is chosen here.
    pub fn new(
        environment: Environment,
        python: &str,
        algorithm: Option<Algorithm>,
        goal: Option<f64>,
    ) -> Result<Self, Box<dyn Error>> {
        // The task of Gymnasium is asked first: goal and algorithm depend on it.
        let task = environment.task(python)?;
        let name = task.name();
        let algorithm = algorithm.unwrap_or(match name {
            // The goal is rarely met by chance: what it earned has to be learned from again.
            "MountainCar-v0" => Algorithm::Dqn,
            _ => Algorithm::Ppo,
        });
        if algorithm == Algorithm::Dqn && task.is_continuous() {
            let refused = format!(
                "DQN chooses among discrete actions, and those of {name} are \
                                   continuous: use --algo ppo"
            );
            return Err(refused.into());
        }
        let threshold = match &task {
            Task::Gym(gym) => gym.reward_threshold().map(f64::from),
            _ => None,
        };
        // The user's goal comes first, then that of the task.
        let goal = goal.or(match name {
            "CartPole-v1" => Some(475.0),
            "Acrobot-v1" => Some(-100.0),
            "MountainCar-v0" => Some(-110.0),
            // Gymnasium has no threshold: the pendulum stands after a second or two.
            "Pendulum-v1" => Some(-250.0),
            _ => threshold,
        });
        let Some(goal) = goal else {
            let refused = format!(
                "Gymnasium names no mean return at which {name} is solved: name \
                                   one with --goal"
            );
            return Err(refused.into());
        };
        Ok(Self {
            goal,
            frames_per_batch: match (algorithm, name) {
                (Algorithm::Ppo, "CartPole-v1") => 512,
                (Algorithm::Ppo, _) => 2048,
                (Algorithm::Dqn, _) => 256,
            },
            time_limit: match name {
                "CartPole-v1" => 60,
                _ => 300,
            },
            task,
            algorithm,
        })
    }

    /// What makes better weights of frames, with its first weights.
    pub fn learner(&self, seed: u64) -> Result<Box<dyn Learner>, weightsync_rl::Error> {
        let (inputs, outputs) = (self.task.observation_len(), self.task.actions());
        Ok(match self.algorithm {
            Algorithm::Ppo => {
                let model = match self.task.is_continuous() {
                    true => ActorCritic::gaussian(inputs, &HIDDEN, outputs, seed)?,
                    false => ActorCritic::new(inputs, &HIDDEN, outputs, seed)?,
                };
                Box::new(Ppo::new(model, self.ppo(), seed)?)
            }
            Algorithm::Dqn => {
                let model = QNetwork::new(inputs, &HIDDEN, outputs, seed)?;
                Box::new(Dqn::new(model, DqnConfig::for_task(&self.task), seed)?)
            }
        })
    }

    fn ppo(&self) -> PpoConfig {
        let config = PpoConfig::default();
        match self.task.name() {
            "CartPole-v1" => config,
            "Pendulum-v1" => PpoConfig {
                learning_rate: 3e-3,
                target_kl: 0.1,
                discount: 0.9,
                trace: 0.95,
                ..config
            },
            _ => PpoConfig {
                discount: 0.99,
                trace: 0.95,
                ..config
            },
        }
    }
}
