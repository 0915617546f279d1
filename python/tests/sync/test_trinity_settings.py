"""Trinity's settings."""

import sys

import pytest
import torch

import weightsync
from weightsync.trinity import settings_of


def test_settings_of_trinity_become_arguments(tmp_path):
    read = settings_of(
        {
            "sync_method": "MEMORY",
            "sync_style": "Fixed",
            "sync_interval": 10,
            "sync_offset": 5,
            "trainer_sync_interval": 4,
            "explorer_sync_interval": None,
            "sync_timeout": 1200,
            "group_name": "weights",
        }
    )
    assert read.timeout == 1200.0
    with weightsync.Synchronizer.local(**read.local) as sync:
        with sync.trainer(torch.nn.Linear(2, 2), **read.trainer) as trainer:
            assert trainer.method == "memory"
            assert [bool(trainer.need_sync(step)) for step in (3, 4)] == [False, True]
            with sync.explorer("e0", torch.nn.Linear(2, 2), **read.explorer) as explorer:
                assert explorer.sync(0)
                assert trainer.sync(4)
                assert [bool(explorer.need_sync(step)) for step in (14, 15)] == [False, True]


@pytest.mark.parametrize(
    ("block", "method", "style"),
    [
        ({}, "nccl", "fixed"),
        ({"sync_method": "online", "sync_style": "dynamic_by_explorer"}, "nccl", "explorer_driven"),
        ({"sync_method": "OFFLINE", "sync_style": "DYNAMIC_BY_TRAINER"}, "checkpoint", "trainer_driven"),
        ({"sync_method": "memory", "sync_style": "fully_async"}, "memory", "fully_async"),
    ],
)
def test_aliases_of_trinity_are_known(block, method, style):
    read = settings_of({"synchronizer": block})
    assert (read.local["method"], read.local["style"], read.timeout) == (method, style, 3600.0)
    weightsync.Synchronizer.local(**read.local).shutdown()


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"sync_intervall": 1}, "sync_intervall is no setting; did you mean sync_interval?"),
        ({"sync_method": "ncc"}, "'ncc' is unknown; did you mean nccl?"),
        ({"sync_style": "x"}, "there are fixed, explorer_driven"),
        ({"sync_interval": 0}, "sync_interval: expected 1 or more, got 0"),
        ({"sync_offset": "2"}, "sync_offset: expected 0 or more, got '2'"),
        ({"synchronizer": 3}, "expected keys and values, got 3"),
    ],
)
def test_wrong_setting_of_trinity_is_named(block, words):
    with pytest.raises(weightsync.SettingError) as raised:
        settings_of(block)
    assert words in str(raised.value)


def test_yaml_file_of_trinity_is_read(tmp_path, monkeypatch):
    pytest.importorskip("yaml")
    path = tmp_path / "run.yaml"
    path.write_text("project: x\nsynchronizer:\n  sync_method: 'memory'\n  sync_interval: 3\n")
    assert settings_of(path).trainer == {"method": "memory", "style": "fixed", "offset": 0, "interval": 3}
    path.write_text("synchronizer: [")
    with pytest.raises(weightsync.SettingError, match=r"run\.yaml: (.|\n)*line 1"):
        settings_of(path)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(weightsync.UnsupportedError, match="pip install pyyaml"):
        settings_of(str(path))
