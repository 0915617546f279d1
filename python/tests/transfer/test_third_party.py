"""The page on transfers, and a strategy in a package of its own, installed with pip and run."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import copytree

from patience import patience
import pytest
from weightsync import transfer
from weightsync.errors import SettingError

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/ray_direct_transport"


def test_documented_example_runs(tmp_path):
    text = (ROOT / "docs/transfer.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.S | re.M)
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, tmp_path / "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(55))
    assert (done.returncode, done.stdout) == (0, "version 1\n"), done.stderr


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


def test_entry_point_is_loaded_when_chosen(tmp_path, monkeypatch):
    info = tmp_path / "thirdparty-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdparty\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[weightsync.transfer.strategies]\n"
        "thirdparty = weightsync.transfer.broadcast:BroadcastStrategy\n"
        "broadcast = no_such_module:Class\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "thirdparty" in transfer.strategies()
    made = transfer.strategy_from_config("thirdparty")
    assert type(made).__name__ == "BroadcastStrategy"
    # What is registered comes first.
    assert type(transfer.strategy_from_config("broadcast")) is type(made)
    (info / "entry_points.txt").write_text(
        "[weightsync.transfer.strategies]\nthirdparty = no_such_module:Class\n"
    )
    with pytest.raises(SettingError, match="'thirdparty' .no_such_module:Class. cannot be made"):
        transfer.strategy_from_config("thirdparty")
