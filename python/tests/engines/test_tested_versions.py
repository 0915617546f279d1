"""The versions of other projects that adapters take."""

import importlib.metadata
import re
from pathlib import Path

import pytest

from weightsync import _tested
from weightsync.errors import UnsupportedError

DOCS = Path(__file__).parents[3] / "docs" / "frameworks.md"


def test_table_of_versions_is_what_adapters_check():
    rows = re.findall(r"^\| (\w+) \| ([\w. ]+) \| (run|read) \|$", DOCS.read_text(), re.M)
    checked = [
        (one.distribution, str(one), "run" if one.was_run else "read")
        for one in _tested.TESTED.values()
    ]
    assert rows == checked


@pytest.mark.parametrize("version", ["1.15.2", "1.17.0", "2.0", "0.33.1"])
def test_other_version_is_refused_in_a_line(version, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(UnsupportedError) as refused:
        _tested.check("trl")
    said = str(refused.value)
    assert said.startswith(f"weightsync.trl was tested with trl 1.16, and {version} is installed")
    assert "\n" not in said
    monkeypatch.setenv(_tested.VARIABLE, "1")
    _tested.check("trl")


@pytest.mark.parametrize("version", ["1.16.0", "1.16.9", "1.16.0rc1"])
def test_tested_version_is_taken(version, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    _tested.check("trl")


def test_missing_project_is_named():
    with pytest.raises(UnsupportedError, match="needs verl, which is not installed"):
        _tested.check("verl")
