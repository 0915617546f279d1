"""The parts of the package that need no engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from weightsync import transfer
from weightsync.engines import _restart
from weightsync.engines._checkpoint import Checkpoint
from weightsync.engines._ranks import Ranks
from weightsync.engines._request import WorkerRequest
from weightsync.errors import DeadlineError, LoadError, SettingError, UnsupportedError
from weightsync.vllm import _compat
from weightsync.vllm._engines import ServerEngine
from weightsync.vllm._load import VllmPlace
from weightsync.vllm._transfer import UpdateInfo, WeightsyncEngine
from weightsync.vllm.extension import WorkerExtension


class Group:
    """As vLLM's group of ranks."""

    def __init__(self, rank):
        self.world_size, self.rank_in_group, self.cpu_group = 2, rank, dist.group.WORLD


def agree(rank, store, answers):
    """One rank of two: what it hears of its calls."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    ranks, said = Ranks(lambda: Group(rank)), []
    said.append(ranks.agree(None, 30, ("run", 3)))
    said.append(ranks.agree("it broke" if rank else None, 30, ("run", 3)))
    said.append(ranks.agree(None, 30, ("run", 3 + rank)))
    said.append(ranks.newest(3 + rank, 30))
    began = time.monotonic()
    if rank == 0:
        # The other rank does not come.
        said += [ranks.agree(None, 0.5), ranks.agree(None, 30)]
        assert time.monotonic() - began < 5
    answers[rank] = said
    # Rank 0's store is in its process.
    while len(answers) < 2:
        time.sleep(0.05)


def test_ranks_agree_on_failures_and_versions(tmp_path):
    answers = torch.multiprocessing.Manager().dict()
    torch.multiprocessing.spawn(agree, (tmp_path / "store", answers), nprocs=2)
    differ = "the ranks do not hold the same: rank 0 version 3, rank 1 version 4"
    heard = [None, "rank 1: it broke", differ, 4]
    assert answers[1] == heard
    assert answers[0][:4] == heard
    late, later = answers[0][4:]
    assert late == later
    assert "restart the engine" in late


def test_request_ends_by_its_deadline():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip():
            connection, _ = listener.accept()
            with connection:
                try:
                    # Each byte comes well before a timeout of the socket.
                    for byte in b"HTTP/1.1 200 OK\r\n" + b"x" * 1000:
                        connection.send(bytes([byte]))
                        time.sleep(0.1)
                except OSError:
                    pass

        thread = threading.Thread(target=drip)
        thread.start()
        engine = ServerEngine(f"http://127.0.0.1:{listener.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(DeadlineError, match="/version did not answer in 0.5 s"):
            engine.version(0.5)
        assert time.monotonic() - began < 3
        thread.join(10)
        assert not thread.is_alive()


def test_dead_server_may_come_back_as_another_version(monkeypatch):
    engine = ServerEngine("http://127.0.0.1:9")
    monkeypatch.setattr(engine, "version", lambda timeout: "0.32.0")
    assert engine.interface(1).labels
    engine.is_gone()
    monkeypatch.setattr(engine, "version", lambda timeout: "0.25.0")
    assert not engine.interface(1).labels


@pytest.mark.parametrize(
    ("version", "can", "words"),
    [
        ("0.17.0", (False, False, False), "worker_extension_cls"),
        ("0.24.0", (False, False, True), "worker_extension_cls"),
        ("0.25.1", (True, False, True), None),
        ("0.28.0", (True, True, True), None),
        ("0.33.0", (True, True, True), None),
        ("0.34.0", (True, True, True), "upgrade weightsync"),
    ],
)
def test_versions_are_spoken_to_as_they_can(version, can, words):
    assert _compat.interface(version) == can
    concern = _compat.concern(version)
    assert (words in concern) if words else concern is None


def test_versions_without_a_way_in_are_refused():
    words = "vLLM 0.16.0 is too old: weightsync needs 0.17 or newer"
    with pytest.raises(UnsupportedError, match=f"^{words}$"):
        _compat.interface("0.16.0")
    assert _compat.concern("0.16.0") == words


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"do": "dance"}, "do: expected one of join, "),
        ({"do": "join", "sender": 3}, "sender: expected JSON text"),
        ({"do": "update", "version": -1}, "version: expected a whole number from 0 on, got -1"),
        ({"do": "update", "timeout": "1"}, "timeout: expected a number from 0 on"),
        ({"do": "join", "asleep": 1}, "asleep: expected true or false"),
    ],
)
def test_requests_are_checked_by_backend_and_extension(asked, words):
    text = json.dumps(asked)
    for parse in (
        lambda: WorkerRequest(**asked),
        lambda: WorkerExtension().weightsync(text),
    ):
        with pytest.raises(SettingError, match=words):
            parse()


def test_backend_refuses_what_it_cannot_do():
    with pytest.raises(SettingError, match="version: expected a whole number"):
        UpdateInfo(version=True)
    with pytest.raises(UnsupportedError, match="weightsync.vllm.Trainer"):
        WeightsyncEngine.trainer_send_weights(iter(()), {})


def test_engine_without_its_trainer_does_not_start(tmp_path, monkeypatch, caplog):
    class Worker:
        def begin(self, request):
            assert (request.first_worker, request.ranks, request.timeout) == (2, 3, 5)
            raise LoadError("the sender\nis gone")

    path = tmp_path / "engine.json"
    _restart.begin(Worker())
    monkeypatch.setenv(_restart.VARIABLE, str(path))
    _restart.begin(Worker())
    assert "begins with its checkpoint" in caplog.text
    _restart.write(str(path), "{}", 2, 3, 5)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(LoadError) as raised:
        _restart.begin(Worker())
    assert "newest version: the sender is gone (WEIGHTSYNC_ENGINE_INFO=" in str(raised.value)
    path.write_text("not JSON")
    with pytest.raises(LoadError, match="no info file of an engine"):
        _restart.begin(Worker())


def vllm_config(**sizes):
    parallel = {"world_size": 1, "world_size_across_dp": 1, "data_parallel_rank": 0, "rank": 0}
    model = SimpleNamespace(hf_config=None, model="nothing")
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**parallel, **sizes}), model_config=model
    )


@pytest.mark.parametrize("in_memory", [False, True])
def test_vllm_loader_goes_back_in_the_same_form(monkeypatch, in_memory):
    loaded = []

    def load(place, tensors, version=None):
        loaded.append(dict(tensors))
        if loaded[-1]["w"] == 2:
            raise RuntimeError("the load failed midway")

    monkeypatch.setattr(VllmPlace, "load", load)
    monkeypatch.setattr(VllmPlace, "load_first", lambda place: loaded.append("first"))
    monkeypatch.setattr(Checkpoint, "compare", lambda *given: in_memory)
    monkeypatch.setattr(
        Checkpoint, "of_memory", lambda self, tensors: [*tensors, ("of", "memory")]
    )
    loader = transfer.VllmLoader(None, vllm_config())
    for value in (2, 1, 2):
        with contextlib.suppress(RuntimeError):
            asyncio.run(loader.load_weights({"w": torch.tensor(value)}))
    form = {"of": "memory"} if in_memory else {}
    new = [{"w": value, **form} for value in (2, 1, 2, 1)]
    assert loaded == [new[0], "first", *new[1:]]


def test_vllm_loader_refuses_several_ranks():
    with pytest.raises(UnsupportedError, match="this one has 2"):
        transfer.VllmLoader(None, vllm_config(world_size=2, world_size_across_dp=2))
