"""The files by which engines that restart find their trainer."""

import json
import os

import pytest
from weightsync.engines import _restart
from weightsync.errors import LoadError, SettingError


def test_pipe_in_place_of_an_info_file_hangs_no_engine(tmp_path, monkeypatch):
    path = tmp_path / "engine.json"
    os.mkfifo(path)
    monkeypatch.setenv(_restart.VARIABLE, str(path))
    with pytest.raises(LoadError, match="not a regular file"):
        _restart.begin(None)


@pytest.mark.parametrize("text", ["not JSON", "{}", '{"sender": "x"}', "[1]"])
def test_file_that_is_no_info_file_stays(text, tmp_path):
    path = tmp_path / "notes.json"
    path.write_text(text)
    with pytest.raises(SettingError, match="no info file of an engine"):
        _restart.write(str(path), "{}", 2, 3, 5)
    assert (path.read_text(), os.listdir(tmp_path)) == (text, ["notes.json"])
    for text in ("", json.dumps({"sender": "", "first_worker": 0, "ranks": 1, "timeout": 1})):
        path.write_text(text)
        _restart.write(str(path), "{}", 2, 3, 5)
        assert json.loads(path.read_text())["first_worker"] == 2


def test_info_file_that_cannot_be_written_leaves_no_secret(tmp_path):
    with pytest.raises(TypeError):
        _restart.write(str(tmp_path / "engine.json"), b"not JSON", 2, 3, 5)
    assert os.listdir(tmp_path) == []
