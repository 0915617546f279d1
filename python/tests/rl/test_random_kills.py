"""Workers and trainers that are killed at random moments, while they fill a buffer in files."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from pathlib import Path

import pytest

from weightsync import rl

#: Of this many trainers one is killed every day, for each kind of collector.
FULL = 20

TRAINER = """
import sys
sys.path.insert(0, {tests!r})
from counting import Constant, Counting
from weightsync import PeerError, rl

def main(kind, directory):
    policy = Constant(1)
    buffer = rl.ReplayBuffer(1_000_000, directory=directory)
    collector = getattr(rl, kind)([Counting] * 3, policy, frames_per_batch=30, restart=True)
    for batch in collector:
        buffer.extend(batch)
        print(buffer.write_count, flush=True)
        policy.choose((collector.version + 1) % 3)
        collector.update_policy_weights_()

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def rounds() -> int:
    """As ``WEIGHTSYNC_SOAK`` scales them: "full", or a factor of what is done every day."""
    share = os.environ.get("WEIGHTSYNC_SOAK") or "1"
    return FULL if share == "full" else max(1, round(float(share)))


def seed() -> int:
    return int(os.environ.get("WEIGHTSYNC_SOAK_SEED") or time.time_ns())


def marked(mark: str) -> set[int]:
    """The processes that have inherited this from a trainer, and run."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if mark.encode() in environment and state != "Z":
            found.add(int(folder.name))
    return found


def segments() -> set[str]:
    return {one for one in os.listdir("/dev/shm") if "weightsync" in one}


def kill_some(trainer: subprocess.Popen[str], mark: str, draw: random.Random) -> int:
    """Kills workers, and then the trainer; returns how many frames were told."""
    assert trainer.stdout is not None
    told = 0
    # Some trainers are killed while they start.
    for _ in range(draw.randrange(5)):
        line = trainer.stdout.readline()
        assert line, "the trainer ended on its own"
        told = int(line)
        time.sleep(draw.random() * draw.choice([0.01, 0.1, 1.0]))
        workers = marked(mark) - {trainer.pid}
        if workers:
            os.kill(draw.choice(sorted(workers)), signal.SIGKILL)
    time.sleep(draw.random() * (0.1 if told else 4.0))
    assert trainer.poll() is None, "the trainer ended on its own"
    trainer.kill()
    rest = trainer.communicate()[0].splitlines(keepends=True)
    # The kill may have cut the last line.
    return max([told, *(int(line) for line in rest if line.endswith("\n"))])


def check_frames(directory: Path, told: int) -> None:
    """Each trajectory has its first steps, once and in order, with the actions of their versions."""
    buffer = rl.ReplayBuffer(
        1_000_000, directory=directory, sampler=rl.SamplerWithoutReplacement()
    )
    count = len(buffer)
    assert count == buffer.write_count >= told
    if not count:
        return
    frames = buffer.sample(count)
    steps = defaultdict(list)
    order = frames["index"].argsort()
    assert (frames["action"] == frames["collector", "policy_version"] % 3).all()
    for trajectory, before, after, reward in zip(
        frames["collector", "traj_ids"][order].tolist(),
        frames["observation"][order][:, 0].tolist(),
        frames["next", "observation"][order][:, 0].tolist(),
        frames["next", "reward"][order].flatten().tolist(),
        strict=True,
    ):
        assert before + 1 == after == reward
        steps[trajectory].append(after)
    for seen in steps.values():
        assert seen == [float(one + 1) for one in range(len(seen))]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("MultiSyncCollector", marks=pytest.mark.soak),
        "MultiAsyncCollector",
        pytest.param("DistributedSyncDataCollector", marks=pytest.mark.soak),
        pytest.param("DistributedDataCollector", marks=pytest.mark.soak),
    ],
)
def test_kills_at_random_lose_nothing(kind: str, tmp_path: Path) -> None:
    begun = seed()
    for at in range(rounds()):
        print(f"WEIGHTSYNC_SOAK_SEED={begun + at} WEIGHTSYNC_SOAK=1 repeats it")
        draw = random.Random(begun + at)
        mark, before = f"WEIGHTSYNC_TEST={uuid.uuid4()}", segments()
        temporary, directory = tmp_path / f"{at}-temporary", tmp_path / f"{at}-frames"
        temporary.mkdir(mode=0o700)
        with open(tmp_path / f"{at}-stderr", "w+b") as words:
            trainer = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    TRAINER.format(tests=str(Path(__file__).parent)),
                    kind,
                    directory,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=words,
                text=True,
                env={
                    **os.environ,
                    **dict([mark.split("=")]),
                    "TMPDIR": str(temporary),
                    "XDG_RUNTIME_DIR": str(temporary),
                    # torch makes such a folder where it is imported.
                    "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),
                },
            )
            try:
                told = kill_some(trainer, mark, draw)
            except BaseException:
                trainer.kill()
                words.seek(0)
                print(words.read().decode(errors="replace")[-10_000:])
                raise
        until = time.monotonic() + 60
        while left := marked(mark):
            assert time.monotonic() < until, f"processes {sorted(left)} are left"
            time.sleep(0.01)
        assert list(temporary.iterdir()) == []
        assert segments() <= before
        check_frames(directory, told)
