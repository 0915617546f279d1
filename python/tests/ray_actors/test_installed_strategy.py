"""A strategy in a package of its own, installed with pip and run with Ray."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import copytree

import pytest
from patience import patience

EXAMPLE = Path(__file__).parents[3] / "examples/ray_direct_transport"


@pytest.mark.timeout(600)
def test_installed_strategy_syncs(tmp_path, monkeypatch):
    source, place = copytree(EXAMPLE, tmp_path / "source"), tmp_path / "packages"
    # Nothing is written into the clone, and no index is asked.
    pip = "-m pip install --quiet --no-index --no-deps --no-build-isolation --target".split()
    subprocess.run([sys.executable, *pip, place, source], check=True, capture_output=True)
    path = [str(place), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    for _ in range(3):
        # The paths of Ray's sockets must be short.
        with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
            monkeypatch.setenv("RAY_TMPDIR", folder)
            done = subprocess.run(
                [sys.executable, source / "sync.py"], capture_output=True, text=True, timeout=patience(140)
            )
        # Ray gives its own processes 15 s to start, and ends where the machine is too busy.
        if done.returncode == 0 or "Started a local Ray instance" in done.stderr:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert "version 1 is on 2 workers\nversion 2 is on 2 workers\n" in done.stdout
