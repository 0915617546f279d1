"""What the README and the examples show runs as it is, and leaves nothing."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import patience

ROOT = Path(__file__).parents[2]


def run(arguments, cwd):
    """Runs a program as its user would; its output."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=patience(55)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_readme(tmp_path):
    text = (ROOT / "README.md").read_text()
    programs = re.findall(r"^```python\n(.*?)^```", text, flags=re.S | re.M)
    assert len(programs) == 1
    assert len([line for line in programs[0].splitlines() if line]) <= 20
    program = tmp_path / "program.py"
    program.write_text(programs[0])
    said = run([program], tmp_path)
    assert "applied by 4 of 4 workers" in said, said
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


@pytest.mark.parametrize(
    "scheme", ["shared-mem", pytest.param("multi-process", marks=pytest.mark.soak)]
)
def test_standalone(tmp_path, scheme):
    program = ROOT / "examples/torch_standalone.py"
    said = run([program, "--steps", "5", "--scheme", scheme], tmp_path)
    assert said.count("at v6") == 3, said
    assert not list(tmp_path.iterdir())


@pytest.mark.soak
def test_standalone_whose_workers_ask(tmp_path):
    said = run([ROOT / "examples/torch_standalone.py", "--scheme", "shared-mem:pull"], tmp_path)
    assert [line for line in said.splitlines() if line.startswith("worker 1: error")], said


def test_standalone_says_that_none_carries_nothing(tmp_path):
    command = [sys.executable, ROOT / "examples/torch_standalone.py", "--scheme", "none"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(55))
    assert done.returncode == 2 and "carries nothing" in done.stderr, done.stderr


def test_slow_and_fast_explorers_synchronise(tmp_path):
    said = run([ROOT / "examples/synchronizer.py"], tmp_path)
    assert "the page is at http://127.0.0.1:" in said
    # One version more for each explorer that asked while the trainer waited for samples.
    assert re.search(r"v(3[1-9]|[4-9]\d) of step 120: synced", said), said
    assert all(f"\n{name}: v" in said for name in ("slow", "fast")), said


def test_host_worker_asks_for_the_trainer_first(tmp_path):
    command = [sys.executable, ROOT / "examples/torch_hosts.py", "worker", "join.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(55))
    assert done.returncode == 1, done.stderr
    assert "start the trainer" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "scheme",
    [
        "distributed",
        pytest.param("distributed:share=none", marks=pytest.mark.soak),
        pytest.param("rpc:initial=connect", marks=pytest.mark.soak),
    ],
)
def test_hosts(tmp_path, scheme):
    """Each is started separately, and finds the trainer by a file."""
    example, info = [sys.executable, ROOT / "examples/torch_hosts.py"], tmp_path / "join.json"

    def start(*arguments):
        arguments = [*example, *arguments, info]
        return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)

    running = [start("trainer", "--scheme", scheme)]
    try:
        until = time.monotonic() + 100
        while not info.exists():
            assert time.monotonic() < until and running[0].poll() is None
            time.sleep(0.05)
        running += [start("worker", "--number", number) for number in "01"]
        said = [process.communicate(timeout=until - time.monotonic())[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * 3, said
    assert said[0].count("applied by 2 of 2 workers") == 3, said
    assert all("has v4: 3.0" in worker for worker in said[1:]), said
    assert [path.name for path in tmp_path.iterdir()] == ["join.json"]


@pytest.mark.parametrize(
    "scheme", ["shared-mem", pytest.param("multi-process", marks=pytest.mark.soak)]
)
def test_cartpole(tmp_path, scheme):
    """Some batches of it: whether it learns is a matter of minutes, and of its own command."""
    program = ROOT / "examples/torchrl_cartpole.py"
    done = subprocess.run(
        [sys.executable, program, "--frames", "2048", "--scheme", scheme],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patience(55),
    )
    # Not after so few frames.
    assert done.returncode == 1, done.stdout + done.stderr
    assert "after 2048 frames" in done.stdout, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())
