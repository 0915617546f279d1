"""A strategy in a package of its own: installed with pip, found by its entry point, and run."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest
from weightsync import transfer
from weightsync.errors import SettingError

EXAMPLE = Path(__file__).parents[3] / "examples/ray_direct_transport"


@pytest.mark.timeout(300)
def test_package_with_a_strategy_is_installed_and_syncs(tmp_path, monkeypatch):
    source, place = copytree(EXAMPLE, tmp_path / "source"), tmp_path / "packages"
    # Nothing is written into the clone, and no index is asked.
    pip = "-m pip install --quiet --no-index --no-deps --no-build-isolation --target".split()
    subprocess.run([sys.executable, *pip, place, source], check=True, capture_output=True)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    done = subprocess.run(
        [sys.executable, source / "sync.py"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "version 1 is on 2 workers\nversion 2 is on 2 workers\n" in done.stdout
    assert not [one for one in Path("/dev/shm").iterdir() if one.name.startswith("weightsync-ray")]


def test_entry_points_are_words_and_are_loaded_when_chosen(tmp_path, monkeypatch):
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
