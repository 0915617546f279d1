"""Records golden trajectories of built-in tasks from Gymnasium.

    pip install gymnasium && python record_gymnasium.py

writes a JSON file for each task next to this file. Each trajectory
holds its float64 states (one more than its actions), the float32 observation
after every step as Gymnasium returned it, and the flags of every step.
"""

import json
import pathlib

import gymnasium as gym
import numpy as np

HERE = pathlib.Path(__file__).parent


def balance(state, _rng):
    x, v, angle, spin = state
    return int(0.1 * x + 0.3 * v + 4.0 * angle + spin > 0.0)


def swing(state, _rng):
    return 2 if state[1] >= 0.0 else 0


def pump(state, _rng):
    """Pushes the way in which the second link swings."""
    return 2 if state[3] >= 0.0 else 0


def always(action):
    return lambda _state, _rng: action


def swing_up(state, _rng):
    """Pumps the pendulum with all it has."""
    return np.array([2.0 if state[1] >= 0.0 else -2.0], dtype=np.float32)


def any_torque(_state, rng):
    """Also more than there is: it is clipped."""
    return rng.uniform(-3.0, 3.0, size=1).astype(np.float32)


def coin(state, rng):
    return int(rng.integers(2))


def any_of_three(state, rng):
    return int(rng.integers(3))


def drift(state, rng):
    """Balances about a leaning pole, so that the cart runs out of the track."""
    x, v, angle, spin = state
    return int(4.0 * (angle - 0.05) + spin > 0.0)


def record(env_id, policy, seed):
    env = gym.make(env_id)
    env.reset(seed=seed)
    rng = env.unwrapped.np_random
    states = [[float(s) for s in env.unwrapped.state]]
    steps = []
    while True:
        action = policy(states[-1], rng)
        observation, reward, terminated, truncated, _ = env.step(action)
        states.append([float(s) for s in env.unwrapped.state])
        steps.append(
            {
                "action": [float(f"{a:.9g}") for a in action] if isinstance(action, np.ndarray) else action,
                "observation": [float(f"{o:.9g}") for o in observation],
                "reward": float(reward),
                "terminated": bool(terminated),
                "truncated": bool(truncated),
            }
        )
        if terminated or truncated:
            return {"states": states, "steps": steps}


def write(name, env_id, runs):
    trajectories = [record(env_id, policy, seed) for policy, seed in runs]
    golden = {"source": f"{env_id}, gymnasium {gym.__version__}", "trajectories": trajectories}
    (HERE / name).write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    for t in trajectories:
        last = t["steps"][-1]
        print(name, len(t["steps"]), "terminated" if last["terminated"] else "truncated", t["states"][-1])


write(
    "cartpole.json",
    "CartPole-v1",
    [(balance, 1), (drift, 2), (always(0), 3), (always(1), 4), (coin, 5), (coin, 6)],
)
write(
    "mountain_car.json",
    "MountainCar-v0",
    [(swing, 1), (any_of_three, 2), (always(0), 3)],
)
write(
    "acrobot.json",
    "Acrobot-v1",
    [(pump, 1), (any_of_three, 2), (always(2), 3)],
)
write(
    "pendulum.json",
    "Pendulum-v1",
    [(swing_up, 1), (any_torque, 2)],
)
