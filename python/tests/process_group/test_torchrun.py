"""Programs that torchrun starts, as in docs/process-group.md; trainers of several ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

from patience import patience
import pytest

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "process-group.md"


def torchrun(*program):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "4", *map(str, program)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=patience(55))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_torchrun_runs_the_page(tmp_path):
    program = tmp_path / "train.py"
    (first,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.S | re.M)
    program.write_text(first)
    said = torchrun(program)
    assert re.search(r"v3, .* to 3 ranks", said) and said.count("has v3") == 3


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("tensor parallel", marks=pytest.mark.soak)])
def test_sharded_trainer_sends_whole_tensors(kind):
    said = torchrun(HERE / "trainers.py", kind)
    assert said.count("is done") == 4


def test_late_trainer_rank_is_named_and_group_goes_on():
    said = torchrun(HERE / "trainers.py", "late")
    assert said.count("is done") == 4


def test_trainer_rank_that_fails_is_named_at_once_and_group_goes_on():
    said = torchrun(HERE / "trainers.py", "failing")
    assert said.count("is done") == 4


def test_trainer_rank_that_fails_in_the_middle_keeps_none_waiting():
    said = torchrun(HERE / "trainers.py", "broken")
    assert said.count("is done") == 4


def test_sharded_scheme_goes_on_after_failed_calls():
    said = torchrun(HERE / "trainers.py", "scheme")
    assert said.count("is done") == 4
