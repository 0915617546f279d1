"""The page on transfers, and a strategy in a package of its own."""

import re
import subprocess
import sys
from pathlib import Path

from patience import patience
import pytest
from weightsync import transfer
from weightsync.errors import SettingError

ROOT = Path(__file__).parents[3]


def test_documented_example_runs(tmp_path):
    text = (ROOT / "docs/transfer.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.S | re.M)
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, tmp_path / "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(55))
    assert (done.returncode, done.stdout) == (0, "version 1\n"), done.stderr


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
