"""Collectors: `cargo xtask bench collect`.

    PYTHONPATH=bench/common python bench/collect --weightsync PATH [--json] [--only TEXT]

Ours and a peer take turns in one run, and medians are shown. A value is the time of 1000 frames.
Collectors collect from CartPole-v1 on this host, but for pictures that come over loopback; replay
buffers sample from memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from rows import Row, show_all

from weightsync import rl

ROUNDS = 7


def policy() -> torch.nn.Module:
    """An MLP with two layers of 64."""
    nn = torch.nn
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
    )


@dataclass
class Way:
    """A way to collect: ``run`` collects, and returns how many frames."""

    run: Callable[[], int]
    close: Callable[[], Any]


def ours(envs: list[Any], net: Any, frames: int) -> Way:
    collector = rl.MultiSyncCollector(envs, net, frames_per_batch=frames)
    return Way(lambda: collector.next().numel(), collector.shutdown)


def theirs(workers: int, envs: int | None, frames: int) -> Way:
    """TorchRL's collector."""
    import torchrl_peer

    return of_torchrl(torchrl_peer.MultiSyncCollector, policy(), workers, envs, frames)


def of_torchrl(
    kind: Any, net: Any, workers: int, envs: int | None, frames: int, updates: bool = False
) -> Way:
    """A collector of this kind, with an environment and a policy of TorchRL."""
    import torchrl_peer

    collector = torchrl_peer.collector(net, workers, envs, frames, kind)
    iterator = iter(collector)

    def run() -> int:
        if updates:
            collector.update_policy_weights_()
        return int(next(iterator).numel())

    return Way(run, collector.shutdown)


def with_torchrl(workers: int, envs: int | None, frames: int, width: int = 0) -> dict[str, Way]:
    """Both with the same environment and the same policy, which is updated each time if it is large."""
    from torchrl.collectors import MultiSyncCollector

    def net() -> torch.nn.Module:
        nn = torch.nn
        if not width:
            return policy()
        return nn.Sequential(
            nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
        )

    return {
        name: of_torchrl(kind, net(), workers, envs, frames, bool(width))
        for name, kind in (("ours", rl.MultiSyncCollector), ("TorchRL's MultiSyncCollector", MultiSyncCollector))
    }


def vector(kind: Any, envs: int, steps: int) -> Way:
    """A vector environment of Gymnasium, stepped with random actions, whose frames are kept."""
    env = kind([lambda: gymnasium.make("CartPole-v1")] * envs)
    env.reset(seed=0)

    def run() -> int:
        kept = [env.step(env.action_space.sample())[:4] for _ in range(steps)]
        return len(kept) * envs

    return Way(run, env.close)


class Slow(gymnasium.Wrapper):  # type: ignore[misc]
    """An environment whose steps wait."""

    def __init__(self, seconds: float) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self._seconds = seconds

    def step(self, action: Any) -> Any:
        time.sleep(self._seconds)
        return super().step(action)


@dataclass
class Case:
    """Ways to collect that take turns; each row compares the first with another one."""

    name: str
    ways: Callable[[], dict[str, Way]]
    targets: dict[str, float]
    #: The most milliseconds that 1000 frames of ours may take.
    most: float | None = None

    def rows(self) -> Iterator[Row]:
        ways = self.ways()
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        try:
            for number in range(ROUNDS + 1):
                for name, way in ways.items():
                    begun = time.perf_counter()
                    frames = way.run()
                    # The first round warms up.
                    if number:
                        seconds[name].append((time.perf_counter() - begun) / frames * 1000)
        finally:
            for way in ways.values():
                way.close()
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        for other, target in self.targets.items():
            yield Row.over(f"{self.name}, against {other}", medians["ours"], medians[other], target)
        if self.most is not None:
            other = next(iter(self.targets))
            yield Row.within(f"{self.name}", medians["ours"], medians[other], self.most)


def in_rust(program: Path) -> dict[str, Way]:
    """The Rust policy and environment: the program collects as many batches as a line says."""
    batches = 100
    command = [str(program), "collect", "--workers", "2", "--envs", "8", "--frames", "2048"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    ask, answers = process.stdin, process.stdout

    def run() -> int:
        print(batches, file=ask, flush=True)
        return int(answers.readline())

    def close() -> None:
        ask.close()
        process.wait()
        answers.close()

    return {"ours": Way(run, close), "TorchRL's MultiSyncCollector": theirs(2, 8, 2048)}


def of_torch() -> dict[str, Way]:
    return {
        "ours": ours([rl.SerialEnv(8, "CartPole-v1")] * 2, policy(), 2048),
        "TorchRL's MultiSyncCollector": theirs(2, 8, 2048),
    }


def of_rust() -> dict[str, Way]:
    """Rust steps the environments, and runs the policy."""
    return {
        "ours": ours([rl.BuiltinEnv("CartPole-v1", 8)] * 2, rl.MLP(4, 2), 4096),
        "TorchRL's MultiSyncCollector": theirs(2, 8, 4096),
    }


def of_vectors() -> dict[str, Way]:
    from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

    return {
        "ours": ours([rl.SerialEnv(8, "CartPole-v1")] * 2, None, 8000),
        "SyncVectorEnv": vector(SyncVectorEnv, 16, 500),
        "AsyncVectorEnv": vector(AsyncVectorEnv, 16, 500),
    }


def of_slow_worker() -> dict[str, Way]:
    """Three fast workers, and one that takes ten times as long."""

    def collecting(envs: list[Any]) -> Way:
        collector = rl.MultiAsyncCollector(envs, None, frames_per_batch=20)

        def run() -> int:
            return sum(collector.next().numel() for _ in range(30))

        return Way(run, collector.shutdown)

    fast: list[Any] = [lambda: Slow(0.001)] * 3
    return {
        "ours": collecting([*fast, lambda: Slow(0.01)]),
        "the fast workers alone": collecting(fast),
    }


def of_replay() -> dict[str, Way]:
    """A sample of 256 from a million frames of 1 KiB."""
    import torchrl_peer
    from tensordict import TensorDict

    mine = rl.ReplayBuffer(FRAMES, batch_size=256)
    peer = torchrl_peer.buffer(FRAMES, 256)
    for _ in range(0, FRAMES, 50_000):
        frames = torch.randint(0, 255, (50_000, 1024), dtype=torch.uint8)
        mine.extend(rl.Batch({"observation": frames}, (50_000,)))
        peer.extend(TensorDict({"observation": frames}, [50_000]))

    def way(sample: Callable[[], Any]) -> Way:
        def run() -> int:
            return sum(sample()["observation"].shape[0] for _ in range(200))

        return Way(run, lambda: None)

    return {"ours": way(mine.sample), "TorchRL's ReplayBuffer": way(peer.sample)}


def of_cpprb() -> dict[str, Way]:
    """The same against cpprb, an optional peer."""
    import cpprb

    ways = of_replay()
    del ways["TorchRL's ReplayBuffer"]
    peer = cpprb.ReplayBuffer(FRAMES, {"observation": {"shape": 1024, "dtype": "uint8"}})
    for _ in range(0, FRAMES, 50_000):
        peer.add(observation=torch.randint(0, 255, (50_000, 1024), dtype=torch.uint8).numpy())

    def run() -> int:
        return sum(peer.sample(256)["observation"].shape[0] for _ in range(200))

    return {**ways, "cpprb": Way(run, lambda: None)}


FRAMES = 1_000_000


class Picture(gymnasium.Env[Any, Any]):
    """Shows a picture of 1 MiB, which costs nothing to make."""

    def __init__(self) -> None:
        self.action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = gymnasium.spaces.Box(0, 255, (1 << 20,), np.uint8)
        self._picture: np.ndarray = np.arange(1 << 20).astype(np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._picture, {}

    def step(self, action: Any) -> Any:
        return self._picture, 0.0, False, False, {}


def bytes_per_second(seconds: int) -> float:
    """What iperf3 brings through one connection over loopback."""
    program = shutil.which("iperf3")
    if program is None:
        raise RuntimeError("iperf3 is not installed\n  fix: apt install iperf3")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    serve = [program, "-s", "-1", "--forceflush", "-B", "127.0.0.1", "-p", port]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        while "Server listening" not in server.stdout.readline():
            assert server.poll() is None
        send = [program, "-c", "127.0.0.1", "-p", port, "-l", "1M", "-J", "-t", str(seconds)]
        report = json.loads(subprocess.run(send, check=True, capture_output=True).stdout)
        server.stdout.read()
    return float(report["end"]["sum_received"]["bits_per_second"]) / 8


@dataclass
class OverLoopback:
    """Pictures from a worker that joins over loopback, against iperf3 in turns."""

    name: str

    def rows(self) -> Iterator[Row]:
        steps, batches = 32, 8
        collector = rl.DistributedDataCollector(
            [Picture], None, frames_per_batch=steps, return_type="numpy"
        )
        per_frame, ours, theirs = 0.0, [], []
        try:
            for number in range(ROUNDS + 1):
                # Two parts were collected ahead, while iperf3 ran.
                for _ in range(3):
                    batch = collector.next()
                begun = time.perf_counter()
                for _ in range(batches):
                    batch = collector.next()
                seconds = (time.perf_counter() - begun) / (batches * steps)
                per_frame = sum(one.nbytes for one in batch.columns().values()) / steps
                rate = bytes_per_second(1)
                # The first round warms up.
                if number:
                    ours.append(seconds * 1000)
                    theirs.append(per_frame / rate * 1000)
        finally:
            collector.shutdown()
        pair = statistics.median(ours), statistics.median(theirs)
        yield Row.over(f"{self.name}, against iperf3", *pair, 1 / 0.8)


CPPRB = Case("replay buffer, 1M × 1 KiB, sample 256", of_cpprb, {"cpprb": 1 / 1.5})

CASES = [
    OverLoopback("pictures of 1 MiB over loopback"),
    Case("replay buffer, 1M × 1 KiB, sample 256", of_replay, {"TorchRL's ReplayBuffer": 0.5}),
    CPPRB,
    Case("CartPole, torch policy, 2 workers × 8", of_torch, {"TorchRL's MultiSyncCollector": 0.2}),
    Case(
        "CartPole, Rust policy from Python, 2 workers × 8",
        of_rust,
        {"TorchRL's MultiSyncCollector": 1 / 50},
        most=2.0,
    ),
    Case(
        "16 Gymnasium environments in 2 workers",
        of_vectors,
        {"SyncVectorEnv": 1 / 1.5, "AsyncVectorEnv": 0.2},
    ),
    Case(
        "TorchRL's GymEnv of CartPole, 4 workers",
        partial(with_torchrl, 4, None, 1024),
        {"TorchRL's MultiSyncCollector": 1 / 1.5},
    ),
    Case(
        "TorchRL's SerialEnv of 64, 2 workers",
        partial(with_torchrl, 2, 64, 2048),
        {"TorchRL's MultiSyncCollector": 1 / 1.2},
    ),
    Case(
        "TorchRL's GymEnv, 10 M parameters updated each batch, 2 workers",
        partial(with_torchrl, 2, None, 64, 3160),
        {"TorchRL's MultiSyncCollector": 0.5},
    ),
    Case("multi-async, one worker 10 × slower", of_slow_worker, {"the fast workers alone": 1 / 0.9}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures collectors")
    parser.add_argument(
        "--weightsync", type=Path, required=True, help="weightsync-bench, for Rust's figures"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    args = parser.parse_args()
    rust = Case(
        "CartPole, Rust policy, 2 workers × 8",
        partial(in_rust, args.weightsync),
        {"TorchRL's MultiSyncCollector": 1 / 50},
        # 500,000 frames a second.
        most=2.0,
    )
    cases = [rust, *CASES]
    if importlib.util.find_spec("cpprb") is None:
        # No environment of the project has it: it is compared with where somebody installed it.
        print("no figures of cpprb, which is not installed\n  fix: pip install cpprb", file=sys.stderr)
        cases.remove(CPPRB)
    show_all(cases, args.only, args.json)


if __name__ == "__main__":
    main()
