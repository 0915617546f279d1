"""What TRL calls, compared with what is there; and what needs no server."""

from __future__ import annotations

import importlib.metadata
import inspect
from typing import Any

import pytest
import torch
from trl.experimental.async_distillation import async_distillation_trainer
from trl.experimental.async_grpo import async_grpo_trainer
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

import weightsync.trl
from weightsync.engines import EngineReport, SyncReport
from weightsync.errors import LifecycleError, NotAppliedError, SettingError, UnsupportedError
from weightsync.trl import WeightTransfer


def parameters(function: Any) -> list[tuple[str, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(one.name, one.kind, one.default) for one in found]


@pytest.fixture
def client_class() -> Any:
    weightsync.trl.install()
    yield vllm_generation.VLLMClient
    weightsync.trl.uninstall()


@pytest.mark.parametrize("module", [async_grpo_trainer, async_distillation_trainer])
def test_transfer_has_the_calls_of_the_protocol(module: Any) -> None:
    protocol = {
        name: value
        for name, value in vars(module.WeightTransferProtocol).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    assert set(protocol) == {
        "init_weight_transfer", "pause", "send_weights", "resume", "destroy"
    }  # fmt: skip
    for name, function in protocol.items():
        assert parameters(getattr(WeightTransfer, name)) == parameters(function), name


def test_client_has_the_calls_of_trls(client_class: Any) -> None:
    replaced = [
        name
        for name, value in vars(weightsync.trl._Client).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]
    assert set(replaced) >= {"init_communicator", "update_named_params", "weight_update"}
    for name in replaced:
        ours, theirs = getattr(client_class, name), getattr(VLLMClient, name)
        assert parameters(ours) == parameters(theirs), name
    # Everything of TRL's client that speaks NCCL or updates weights is replaced.
    for name, function in inspect.getmembers(VLLMClient, inspect.isfunction):
        source = inspect.getsource(function)
        if any(word in source for word in ("communicator.", "NCCL", "._start_weight_update(")):
            assert name in replaced, name


def test_install_is_undone_by_uninstall() -> None:
    weightsync.trl.install()
    settings = {"timeout": 5.0, "info_files": {"http://a": "/run/engine.json"}}
    weightsync.trl.install(**settings)
    ours = vllm_generation.VLLMClient
    assert issubclass(ours, VLLMClient)
    assert (ours._original, ours._settings) == (VLLMClient, settings)
    weightsync.trl.uninstall()
    weightsync.trl.uninstall()
    assert vllm_generation.VLLMClient is VLLMClient


def test_wrong_settings_are_refused_at_once() -> None:
    for settings in ({"pause": "never"}, {"require": "most"}, {"info_files": {"a": "b"}}):
        with pytest.raises(SettingError):
            weightsync.trl.install(**settings)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match="not among the engines"):
        WeightTransfer("http://a", info_files={"http://b": "c"})
    for engines in ([], "localhost:8000"):
        with pytest.raises(SettingError, match="engines"):
            WeightTransfer(engines)


@pytest.mark.parametrize(
    ("second", "raising"),
    [("updated", []), ("dead", ["all"]), ("kept old", ["fresh", "all"]), ("held", ["all"])],
)
def test_sync_raises_as_require_says(second: str, raising: list[str]) -> None:
    lines = [EngineReport(one, one, 7, 0, None, 0.1) for one in ("updated", second)]
    raised = []
    for require in ("fresh", "any", "all"):
        try:
            WeightTransfer(["http://a"], require=require)._judge(SyncReport(7, lines))  # type: ignore[arg-type]
        except NotAppliedError:
            raised.append(require)
    assert raised == raising


def test_another_version_of_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.15.2")
    for call in (lambda: WeightTransfer("http://a"), weightsync.trl.install):
        with pytest.raises(UnsupportedError, match=r"1\.15\.2 is installed"):
            call()


def test_iterator_is_used_up_after_a_failure() -> None:
    ended = []

    def tensors() -> Any:
        for at in range(5):
            yield "same", torch.zeros(at + 1)
        ended.append(True)

    client = object.__new__(weightsync.trl._Client)
    with pytest.raises(LifecycleError):
        client.update_named_params([], tensors())
    assert ended


def test_last_tensor_is_read_before_the_end() -> None:
    # A merged adapter is taken out of the model when the iterator ends.
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}

    def merged() -> Any:
        yield from [("b", tensors["b"]), ("a", tensors["a"]), ("c", tensors["c"])]
        for tensor in tensors.values():
            tensor += 1

    groups = weightsync.trl._groups(merged(), ["a", "b", "c"])
    got = {name: tensor for group in groups for name, tensor in group}
    assert all(int(tensor.sum()) == 0 for tensor in got.values())
