"""TorchRL's words for schemes, which `register` gives to the schemes here."""

import pytest
from torchrl import weight_update
from torchrl.weight_update import WeightSyncScheme, weight_sync_schemes
from weightsync import torchrl as ours

WORDS = {
    "none": "NoWeightSyncScheme",
    "shared": "SharedMemWeightSyncScheme",
    "process": "MultiProcessWeightSyncScheme",
    "distributed": "DistributedWeightSyncScheme",
    "rpc": "RPCWeightSyncScheme",
    "ray": "RayWeightSyncScheme",
}
GROUP = ours.ProcessGroupWeightSyncScheme


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    known = dict(weight_sync_schemes._WEIGHT_SYNC_SCHEMES)
    monkeypatch.setattr(weight_sync_schemes, "_WEIGHT_SYNC_SCHEMES", known)


@pytest.mark.parametrize("word", WORDS)
def test_register_adds_words_to_torchrl(word):
    for _ in range(2):
        ours.register()
    assert type(WeightSyncScheme.from_backend(f"weightsync-{word}")) is getattr(ours, WORDS[word])
    assert type(WeightSyncScheme.from_backend(word)) is getattr(weight_update, WORDS[word])


def test_register_adds_a_word_that_torchrl_lacks():
    assert type(ours.WeightSyncScheme.from_backend("process-group")) is GROUP
    ours.register()
    assert type(WeightSyncScheme.from_backend("weightsync-process-group")) is GROUP
    with pytest.raises(ValueError, match="'process-group'"):
        WeightSyncScheme.from_backend("process-group")


@pytest.mark.parametrize("word", WORDS)
def test_register_replaces_words_on_request(word):
    ours.register(replace=True)
    assert type(WeightSyncScheme.from_backend(word)) is getattr(ours, WORDS[word])


def test_register_gives_aliases_and_arguments():
    ours.register(replace=True)
    assert type(WeightSyncScheme.from_backend("weightsync")) is ours.SharedMemWeightSyncScheme
    assert type(WeightSyncScheme.from_backend("thread")) is ours.SharedMemWeightSyncScheme
    scheme = WeightSyncScheme.from_backend("weightsync-rpc", strategy="state_dict", sync=False)
    assert (scheme.strategy_str, scheme.sync) == ("state_dict", False)


def test_torchrl_has_no_words_before_register():
    with pytest.raises(ValueError, match="weightsync"):
        WeightSyncScheme.from_backend("weightsync")
