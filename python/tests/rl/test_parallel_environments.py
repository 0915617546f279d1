"""Environments in processes of their own, under one worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting import Constant, Counting, Pixels, zeros

import weightsync
from weightsync import rl


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(one) for one in text.split()]


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until, "a process is left"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"reset_at_each_iter": True}, marks=pytest.mark.soak),
        pytest.param({"max_frames_per_traj": 3}, marks=pytest.mark.soak),
    ],
)
def test_parallel_frames_equal_serial_ones(settings: dict[str, Any]) -> None:
    makers = [lambda: Counting(3), Counting, lambda: Counting(7)]
    batches = []
    for kind in (rl.SerialEnv, rl.ParallelEnv):
        with rl.Collector(
            kind(3, makers), Constant(1), frames_per_batch=30, seed=1, return_type="numpy", **settings
        ) as collector:
            batches.append([collector.next() for _ in range(3)])
    for serial, parallel in zip(*batches, strict=True):
        assert parallel.batch_size == serial.batch_size == (3, 10)
        for key, value in serial.columns().items():
            assert np.array_equal(parallel.columns()[key], value), key


def test_parallel_environments_have_nested_columns() -> None:
    env = rl.ParallelEnv(2, Pixels, context="spawn")
    with rl.Collector(
        env, frames_per_batch=4, policy=None, init_random_frames=100, return_type="numpy"
    ) as collector:
        batch = collector.next()
    assert batch["pixels"].shape == (2, 2, 3, 4)
    assert (batch["next", "pixels"] == 7).all()


@pytest.mark.parametrize("fault", ["", pytest.param("hang", marks=pytest.mark.soak)])
def test_parallel_environments_end_with_their_worker(fault: str) -> None:
    envs = rl.ParallelEnv(2, lambda: Counting(fault=fault, at=12))
    with rl.MultiSyncCollector([envs], zeros, frames_per_batch=20) as collector:
        collector.next()
        worker = collector.pid(0)
        assert worker is not None and collector._slots is not None
        pids = children(worker)
        assert len(pids) >= 2
        if fault:
            # Both hang in their step when the worker is killed.
            collector._order(0, collector._slots.take(), 0)
        os.kill(worker, signal.SIGKILL)
        wait_until_gone(pids)


def test_environment_that_raises_is_made_again() -> None:
    env = rl.ParallelEnv(2, lambda: Counting(fault="raise", at=12))
    with rl.Collector(env, zeros, frames_per_batch=20) as collector:
        collector.next()
        with pytest.raises(RuntimeError, match="the pole broke"):
            collector.next()
        assert collector.next()["observation"][0, :6, 0].tolist() == [0, 1, 2, 3, 4, 0]


INTERRUPTED = """
import os, signal, sys, threading
sys.path.insert(0, {tests!r})
from counting import Counting, zeros
from weightsync import rl

class Slow(Counting):
    def step(self, action):
        if self.taken == 12: os.kill(os.getppid(), signal.SIGINT); signal.pause()
        return super().step(action)

collector = rl.Collector(rl.ParallelEnv(2, [Slow, Counting]), zeros, frames_per_batch=20)
collector.next()
try:
    collector.next()
    raise SystemExit("it was not interrupted")
except KeyboardInterrupt:
    pass
print(collector.next()["observation"][0, :6, 0].tolist())
collector.shutdown()
"""


def test_ctrl_c_leaves_parallel_environments_usable() -> None:
    program = INTERRUPTED.format(tests=str(Path(__file__).parent))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout == "[0.0, 1.0, 2.0, 3.0, 4.0, 0.0]\n", ended.stderr


def test_parallel_environment_takes_no_made_one() -> None:
    with pytest.raises(weightsync.SettingError, match="give functions"):
        rl.ParallelEnv(1, Counting())


MINE = """
import gymnasium, numpy as np

class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 9, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, frameskip=1): pass
    def reset(self, *, seed=None, options=None): return np.full(2, 7, np.float32), {}
    def step(self, action): return np.full(2, 7, np.float32), 1.0, False, False, {}
"""

REGISTERS = """
from weightsync import rl

class Nameless:
    __module__ = None
    def __call__(self): return None

gymnasium.register("Unused-v0", entry_point=lambda lock=__import__("threading").Lock(): None)
gymnasium.register("Nameless-v0", entry_point=Nameless())
gymnasium.register("Mine-v0", entry_point=Mine)
gymnasium.register("Named-v0", entry_point="__main__:Mine")

def torchrl():
    from torchrl.envs import GymEnv
    return GymEnv("Mine-v0")

def packaged():
    import registers_itself
    return gymnasium.make("Packaged-v0")

import registers_itself
makers = (lambda: gymnasium.make("Mine-v0"), lambda: gymnasium.make("Named-v0"), packaged, torchrl)
for make in makers:
    collector = rl.MultiSyncCollector([make], None, frames_per_batch=4)
    print(collector.next()["observation"].ravel()[:2].tolist())
    collector.shutdown()
"""


def test_workers_know_environments_that_the_program_registers(tmp_path: Path) -> None:
    package = f'{MINE}\ngymnasium.register("Packaged-v0", entry_point=Mine)\n'
    (tmp_path / "registers_itself.py").write_text(package)
    program = f"import sys; sys.path.append({str(tmp_path)!r})\n{MINE}{REGISTERS}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout == "[7.0, 7.0]\n" * 4, ended.stderr
    assert "Overriding" not in ended.stderr
