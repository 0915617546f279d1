"""The checkpoint engine against verl's abstract class, and alone in this process."""

import asyncio
import gc
import importlib
import importlib.metadata
import inspect
import os
import sys
from pathlib import Path

import pytest
import torch

from named_weights import differing, weights
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
from verl.checkpoint_engine.base import (
    CheckpointEngineManager,
    CheckpointEngineWorker,
)

import weightsync.verl
from weightsync.errors import (
    LifecycleError,
    PeerError,
    SendError,
    SettingError,
    UnsupportedError,
    WrongWeightsError,
)
from weightsync.verl import WeightsyncCheckpointEngine

pytestmark = pytest.mark.timeout(120)


def names(method):
    """The names of a method's parameters, without the one that Ray adds."""
    return [name for name in inspect.signature(method).parameters if name != "_ray_trace_ctx"]


def test_methods_equal_those_of_the_abstract_class():
    assert CheckpointEngineRegistry.get("weightsync") is WeightsyncCheckpointEngine
    abstract = CheckpointEngine.__abstractmethods__
    assert abstract == {
        "prepare", "build_topology", "init_process_group", "send_weights", "receive_weights",
        "finalize",
    }  # fmt: skip
    for name in abstract - {"init_process_group"}:
        own, its = getattr(WeightsyncCheckpointEngine, name), getattr(CheckpointEngine, name)
        assert names(own) == names(its), name
    assert names(CheckpointEngine.init_process_group) == ["self", "kwargs"]
    assert WeightsyncCheckpointEngine.wire_format == "named_tensors"


def test_manager_calls_what_the_engine_expects():
    assert names(CheckpointEngineManager.build_process_group) == ["self", "rollout"]
    assert names(CheckpointEngineManager.update_weights) == ["self", "global_steps"]
    assert names(CheckpointEngineWorker.update_weights) == ["self", "global_steps"]
    # Rank 0 of the trainer alone is made with it, and the rollout workers without.
    # Its import needs the whole of verl.
    place = Path(inspect.getfile(CheckpointEngine)).parents[1] / "workers/engine_workers.py"
    source = place.read_text()
    assert "is_master=(torch.distributed.get_rank() == 0), bucket_size=bucket_size" in source
    assert "checkpoint_engine.send_weights(per_tensor_param, global_steps=global_steps)" in source


@pytest.mark.parametrize("version", ["0.8.3", "0.10.0"])
def test_import_refuses_other_versions_of_verl(monkeypatch, version):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    monkeypatch.delitem(sys.modules, "weightsync.verl")
    with pytest.raises(UnsupportedError, match=f"0.9, and {version} is installed") as caught:
        importlib.import_module("weightsync.verl")
    assert "\n" not in str(caught.value)


def engine(**settings):
    return CheckpointEngineRegistry.new("weightsync", bucket_size=1, timeout=20.0, **settings)


def joined(rollouts=1, **settings):
    """A trainer's engine and those of rollout workers, after the first two steps of an update."""
    trainer = engine(is_master=True, **settings)
    workers = [engine(**settings) for _ in range(rollouts)]
    join(trainer, workers)
    return trainer, workers


def join(trainer, workers):
    metadata = [one.prepare() for one in (trainer, *workers)]
    ours, theirs = WeightsyncCheckpointEngine.build_topology(1, len(workers), metadata)
    for each, arguments in ((ours, [trainer]), (theirs, workers)):
        for at, one in enumerate(arguments):
            one.init_process_group(**{name: values[at] for name, values in each.items()})


async def collect(worker):
    return {name: one.clone() async for name, one in worker.receive_weights()}


def update(trainer, workers, tensors, step=None):
    join(trainer, workers)

    async def both():
        received = asyncio.gather(*[collect(one) for one in workers])
        await asyncio.sleep(0)
        await trainer.send_weights(iter(tensors.items()), step)
        return await received

    found = asyncio.run(both())
    for one in (trainer, *workers):
        one.finalize()
    return found


def test_tensors_stay_while_a_worker_holds_them():
    trainer, workers = joined()
    held = {}

    async def hold():
        async for name, one in workers[0].receive_weights():
            held[name] = one

    join(trainer, workers)
    asyncio.run(trainer.send_weights(iter(weights(1).items()), 1))
    asyncio.run(hold())
    for step in (2, 3, 4):
        [got] = update(trainer, workers, weights(step), step)
        assert differing(got, weights(step)) == []
    assert differing(held, weights(1)) == []


def test_tensor_larger_than_a_bucket_goes_the_way_of_verls_adapter(monkeypatch):
    """By verl's own functions. A device without memory stands in for a GPU."""
    transfer = pytest.importorskip("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer")
    monkeypatch.setattr(weightsync.verl, "is_support_ipc", lambda: True)
    monkeypatch.setattr(weightsync.verl, "is_device_available", lambda: True)
    monkeypatch.setattr(weightsync.verl, "get_device_name", lambda: "meta")
    monkeypatch.setattr(weightsync.verl, "get_device_id", lambda: 0)
    trainer, workers = joined()
    given = weights(1)
    workers[0].bucket_size = min(one.nbytes for one in given.values())
    join(trainer, workers)
    asyncio.run(trainer.send_weights(iter(given.items()), 1))
    handed = []

    class Socket:
        send_pyobj, recv = handed.append, bytes

    async def hand_on():
        sender = transfer.BucketedWeightSender.__new__(transfer.BucketedWeightSender)
        sender.socket = Socket
        async for name, one in workers[0].receive_weights():
            is_large = one.nbytes > workers[0].bucket_size
            assert one.device.type == ("meta" if is_large else "cpu"), name
            if is_large:
                sender._direct_send_large_weight(name, one)

    asyncio.run(hand_on())
    assert handed
    for message in handed:
        for name, meta in message["bucket_meta"].items():
            assert transfer.rebuild_ipc(meta["handle"], 0).shape == given[name].shape
    # What it was before: a handle of the host's memory has no place for a device.
    with pytest.raises((IndexError, TypeError)):
        transfer.rebuild_ipc(transfer.reduce_tensor(given["embed"]), 0)


def test_slot_is_free_when_the_consumer_stops():
    trainer, workers = joined()

    async def first():
        async for name, one in workers[0].receive_weights():
            return name, one.clone()

    # More often than there are slots.
    for step in range(1, 9):
        join(trainer, workers)
        asyncio.run(trainer.send_weights(iter(weights(step).items()), step))
        assert asyncio.run(first())[0] == "embed"


def test_error_of_the_generator_reaches_both_sides(caplog):
    trainer, workers = joined()
    update(trainer, workers, weights(1), 1)
    join(trainer, workers)

    def broken():
        yield "embed", weights(2)["embed"]
        raise ZeroDivisionError("the trainer's own")

    async def both():
        received = asyncio.ensure_future(collect(workers[0]))
        await asyncio.sleep(0.2)
        with pytest.raises(ZeroDivisionError, match="the trainer's own"):
            await trainer.send_weights(broken(), 2)
        with pytest.raises(PeerError, match="closed its end before version 2 was out"):
            await received

    asyncio.run(both())
    assert "a send failed: ZeroDivisionError: the trainer's own" in caplog.text
    [got] = update(trainer, workers, weights(3), 3)
    assert differing(got, weights(3)) == []
    assert trainer.version == workers[0].version == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda given: {**given, "norm.bias": given["norm.bias"].double()},
        lambda given: {**given, "norm.bias": given["norm.bias"][:-1]},
        lambda given: {name: one for name, one in given.items() if name != "scale"},
    ],
    ids=["dtype", "shape", "missing"],
)
def test_send_refuses_another_layout_by_name(change):
    trainer, workers = joined()
    update(trainer, workers, weights(1))
    left = iter(change(weights(2)).items())
    with pytest.raises(WrongWeightsError, match="norm.bias|scale is missing"):
        asyncio.run(trainer.send_weights(left))
    # Gathering is collective, so that nothing is left over.
    assert list(left) == []


def test_first_send_refuses_no_weights_at_all():
    trainer, _ = joined()
    with pytest.raises(SendError, match="nothing to send"):
        asyncio.run(trainer.send_weights(iter(())))


def test_first_send_refuses_a_name_that_comes_twice():
    trainer, _ = joined()
    one = torch.ones(2)
    with pytest.raises(WrongWeightsError, match="a has come twice"):
        asyncio.run(trainer.send_weights(iter([("a", one), ("a", one)])))


def count_open():
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("how", ["dropped", "closed", "rebuild_group"])
def test_ends_leave_nothing_after_an_update(how):
    def run():
        trainer, workers = joined(2, rebuild_group=how == "rebuild_group")
        for step in (1, 2):
            found = update(trainer, workers, weights(step), step)
            assert [differing(got, weights(step)) for got in found] == [[], []]
        if how == "closed":
            for one in (trainer, *workers):
                one.close()

    run()
    before = count_open()
    for _ in range(3):
        run()
    assert count_open() <= before


def test_worker_is_cancelled_while_it_waits():
    trainer, workers = joined()

    async def main():
        waiting = asyncio.ensure_future(collect(workers[0]))
        await asyncio.sleep(0.2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    [got] = update(trainer, workers, weights(1))
    assert differing(got, weights(1)) == []


def test_worker_of_another_host_is_refused_by_name(monkeypatch):
    from weightsync import _stream

    place = engine(is_master=True).prepare()["place"]
    monkeypatch.setattr(_stream, "_is_in_cluster", lambda: True)
    monkeypatch.setattr(_stream._cluster, "address", lambda: "10.0.0.9")
    with pytest.raises(PeerError, match="on 10.0.0.8 .* and this is 10.0.0.9: give that process"):
        engine().init_process_group({**place, "address": "10.0.0.8"})


def test_settings_are_refused_with_their_names():
    for scheme, text in (({"listen": "a:1"}, "listen cannot be set"), ({"no": 1}, "'no'")):
        with pytest.raises(SettingError, match=text):
            engine(is_master=True, scheme=scheme).prepare()
    with pytest.raises(SettingError, match="rank 0 did not say where it is"):
        WeightsyncCheckpointEngine.build_topology(1, 1, [{}, {}])


def test_calls_are_refused_before_a_group_is_formed():
    with pytest.raises(LifecycleError, match="before prepare"):
        asyncio.run(engine(is_master=True).send_weights(iter(())))
    with pytest.raises(LifecycleError, match="before init_process_group"):
        asyncio.run(collect(engine()))
