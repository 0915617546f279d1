"""The example of a training loop."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import tiny

PROGRAM = Path(__file__).parents[3] / "examples/vllm_grpo.py"


def test_grpo_example_improves_its_reward(tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", PROGRAM, "--steps", "10", "--out", tmp_path / "curve"],
        env=tiny.surroundings(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with (tmp_path / "curve.csv").open() as file:
        rewards = [float(row["reward"]) for row in csv.DictReader(file)]
    assert len(rewards) == 10
    early, late = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert late > early + 0.02, rewards
    assert (tmp_path / "curve.svg").read_text().startswith("<svg")
