"""``WeightTransfer`` in a loop that calls it as TRL does, with real servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch

from weightsync.errors import DeadlineError, NotAppliedError, WrongWeightsError


def weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """As ``AsyncGRPOTrainer._streaming_iter`` yields them."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()


def sync(transfer: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """As ``AsyncGRPOTrainer._sync_weight_merged`` calls it."""
    transfer.pause()
    transfer.send_weights(tensors)
    transfer.resume()


def test_servers_generate_as_transformers_do(servers: Any, transfers: Any) -> None:
    model = tiny.llama(1)
    transfer = transfers([server.url for server in servers])
    assert transfer.version == 0
    transfer.init_weight_transfer()
    for step in range(1, 4):
        tiny.change(model, step, 0.01 if step > 1 else 1.0)
        sync(transfer, weights(model))
        expected = tiny.greedy(model)
        assert [server.ask() for server in servers] == [expected] * 2
        assert transfer.version == step
        assert transfer.report.all_synced
        # It is what the outputs are labelled with.
        assert [one.get("weight_info")["weight_version"] for one in servers] == [str(step)] * 2
    sizes = [line.bytes for line in transfer.report.engines]
    assert max(sizes) > 0


def test_changes_alone_travel_between_hosts(servers: Any, transfers: Any) -> None:
    model = tiny.llama(2)
    # As between hosts.
    transfer = transfers(servers[0].url, scheme="distributed:share=none,deltas=always")
    sync(transfer, weights(model))
    whole = transfer.report.engines[0].bytes
    tiny.change(model, 1, 0.01)
    sync(transfer, weights(model))
    assert servers[0].ask() == tiny.greedy(model)
    assert transfer.report.engines[0].bytes < whole / 20


def test_wrong_shape_leaves_the_old_weights(servers: Any, transfers: Any) -> None:
    model = tiny.llama(3)
    transfer = transfers(servers[0].url)
    sync(transfer, weights(model))
    expected = tiny.greedy(model)
    other = dict(weights(tiny.llama(4)))
    name = "model.layers.1.mlp.down_proj.weight"
    other[name] = other[name][:, :64]
    with pytest.raises(WrongWeightsError, match=name):
        sync(transfer, iter(other.items()))
    assert (servers[0].ask(), transfer.version) == (expected, 1)
    # And the next one is as any other.
    sync(transfer, weights(tiny.llama(4)))
    assert (servers[0].ask(), transfer.version) == (tiny.greedy(tiny.llama(4)), 2)


def test_another_model_is_refused_by_the_engine(servers: Any, transfers: Any) -> None:
    before = servers[0].ask()
    transfer = transfers(servers[0].url)
    with pytest.raises(NotAppliedError, match="is not this engine's model"):
        sync(transfer, weights(tiny.llama(5, intermediate_size=64)))
    assert transfer.report.engines[0].outcome == "kept old"
    assert servers[0].ask() == before


def test_iterator_that_raises_sends_nothing(servers: Any, transfers: Any) -> None:
    model = tiny.llama(6)
    transfer = transfers(servers[0].url)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(tiny.llama(7)))[:5]
        raise ZeroDivisionError("the trainer's own")

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            sync(transfer, broken())
        sync(transfer, weights(model))
        assert servers[0].ask() == tiny.greedy(model)
        tiny.change(model, 1)


def test_versions_go_on_after_destroy(servers: Any, transfers: Any) -> None:
    transfer = transfers(servers[0].url, first_version=7)
    sync(transfer, weights(tiny.llama(8)))
    assert transfer.version == 7
    transfer.destroy()
    transfer.destroy()
    assert servers[0].ask() == tiny.greedy(tiny.llama(8))
    sync(transfer, weights(tiny.llama(9)))
    assert transfer.version == 8
    assert servers[0].ask() == tiny.greedy(tiny.llama(9))


def test_killed_server_is_one_line(servers: Any, transfers: Any) -> None:
    model = tiny.llama(10)
    transfer = transfers([server.url for server in servers])
    strict = transfers([server.url for server in servers], require="all")
    sync(transfer, weights(model))
    servers[1].kill()
    try:
        tiny.change(model, 1)
        sync(transfer, weights(model))
        assert servers[0].ask() == tiny.greedy(model)
        assert [line.outcome for line in transfer.report.engines] == ["updated", "dead"]
        with pytest.raises(NotAppliedError, match="expected all of them"):
            sync(strict, weights(model))
        assert strict.report.engines[0].outcome == "updated"
    finally:
        servers[1].start()
        servers[1].wait()
    # It has its checkpoint, until the next sync.
    tiny.change(model, 2)
    sync(transfer, weights(model))
    assert transfer.report.all_synced
    assert [server.ask() for server in servers] == [tiny.greedy(model)] * 2


def test_no_engine_left_raises(servers: Any, transfers: Any) -> None:
    transfer = transfers("http://127.0.0.1:9", ready_timeout=0.1)
    with pytest.raises(DeadlineError, match="no answer on /health"):
        transfer.init_weight_transfer()
    with pytest.raises(NotAppliedError, match="dead"):
        sync(transfer, weights(tiny.llama(11)))
    with_one = transfers([servers[0].url, "http://127.0.0.1:9"], ready_timeout=0.1)
    with_one.init_weight_transfer()
