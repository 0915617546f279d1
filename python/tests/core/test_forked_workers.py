"""Workers that are forked from a trainer whose torch has used its threads."""

import subprocess
import sys
from pathlib import Path

import forked_worker
import pytest
from ends import LONG

PROGRAM = str(Path(__file__).parent / "forked_worker.py")
CASES = [("products", end, "net") for end in forked_worker.ENDS]
CASES += [(work, "by_with", "net") for work in forked_worker.WORK if work != "products"]
CASES += [("elements", "by_with", kind) for kind in forked_worker.KINDS if kind != "net"]
CASES += [("elements", "by_passing_on", "views")]


@pytest.mark.parametrize(("work", "end", "kind"), CASES, ids=lambda one: one)
def test_forked_worker_ends_after_its_trainer_used_torchs_threads(work, end, kind):
    subprocess.run([sys.executable, PROGRAM, work, end, kind], check=True, timeout=2 * LONG)
