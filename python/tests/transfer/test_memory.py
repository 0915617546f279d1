"""What one sync costs rank 0 in memory, and what a sync that fails midway leaves."""

import asyncio
import time
import weakref

import pytest
import torch
from parties import Net, Worker, threaded, trainer
from torch import nn
from weightsync import transfer
from weightsync.errors import SettingError, WrongWeightsError
from weightsync.transfer.native import WeightsyncStrategy

KIB = 1 / (1 << 20)


class Watched(transfer.ModuleExtractor):
    """Knows which of its batches are alive when the next one is made."""

    takes = 0.0

    def __init__(self, cfg=None, fails_at=None):
        super().__init__(cfg)
        self.alive, self.most, self.made, self.fails_at = weakref.WeakSet(), 0, 0, fails_at

    async def extract_weights(self, model, generator_dtype):
        plan = await super().extract_weights(model, generator_dtype)
        return Chunks(self, plan)


class Chunks:
    def __init__(self, own, plan):
        self._own, self._plan, self.metadata = own, plan, plan.metadata
        own.made = 0

    def __iter__(self):
        for chunk in self._plan:
            own = self._own
            own.alive.update(chunk.tensors)
            own.most = max(own.most, len(own.alive))
            own.made += 1
            time.sleep(own.takes)
            if own.made == own.fails_at:
                raise OSError("the trainer's disk is full")
            yield chunk
            del chunk


def sync(training, client=None, word=None):
    async def run():
        if word is not None:
            await training.initialize_weight_sync(None, word, client)
        return await training.sync_weights()

    return asyncio.run(run())


def start(extractor, model, dtype=torch.bfloat16):
    workers = [Worker("weightsync"), Worker("weightsync")]
    for one in workers:
        one.model.to(dtype)
    training, _ = trainer(model, workers, extractor=extractor, dtype=dtype)
    return training, workers, transfer.ActorClient(workers, call=threaded)


def end(training, workers):
    training.shutdown()
    for one in workers:
        one.shutdown()


def test_no_more_than_one_batch_is_alive():
    extractor = Watched({"group_by_module": True})
    training, workers, client = start(extractor, Net(fill=1.0))
    assert sync(training, client, "weightsync") == 1
    training._model.fill(2.0)
    assert sync(training) == 2
    # A module of three has four tensors.
    assert extractor.most == 4
    assert [one.state() for one in workers] == [(2, 2.0)] * 2
    end(training, workers)


def test_rank_0_has_one_batch_more_than_its_model():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024, bias=False)) for _ in range(16)))
    sizes = [parameter.nbytes for parameter in model.parameters()]
    strategy = WeightsyncStrategy()

    class Nobody(transfer.InferenceEngineClient):
        async def get_world_size(self):
            return 0, 1

        async def init_weight_update_communicator(self, init_info):
            pass

        async def update_named_weights(self, request):
            pass

    training = transfer.TrainingActor(
        transfer.ModuleExtractor({"group_by_module": True}), model, torch.bfloat16
    )

    async def run():
        await training.initialize_weight_sync(strategy, None, Nobody())
        await training.sync_weights()
        assert training.sender is not None
        with _PeakOfPrivateMemory() as peak:
            # No worker is there, which the report of a second sync calls a failure.
            with pytest.raises(Exception, match="no worker"):
                await training.sync_weights()
        return peak.grown

    # Two copies of the model would be 96 MiB.
    assert asyncio.run(run()) <= 2 * sizes[0] + (4 << 20)
    training.shutdown()


class _PeakOfPrivateMemory:
    """How much this process's own memory grows meanwhile: without what is shared, such as slots."""

    def __enter__(self):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        self._before, self._shared = self._read("VmRSS"), self._read("RssShmem")
        self.grown = 0
        return self

    def __exit__(self, *_):
        # Slots are shared memory, and count where they were touched for the first time.
        slots = max(0, self._read("RssShmem") - self._shared)
        self.grown = self._read("VmHWM") - self._before - slots

    @staticmethod
    def _read(name):
        with open("/proc/self/status") as file:
            (line,) = [line for line in file if line.startswith(name + ":")]
        return int(line.split()[1]) << 10


@pytest.mark.parametrize("at", [1, 2, 3])
def test_failed_extraction_leaves_the_old_version(at):
    extractor = Watched({"group_by_module": True})
    training, workers, client = start(extractor, Net(fill=1.0))
    assert sync(training, client, "weightsync") == 1
    extractor.fails_at = at
    training._model.fill(2.0)
    with pytest.raises(OSError, match="the trainer's disk is full"):
        sync(training)
    sender = training.sender._sender
    assert sender.version == 1
    snapshot = sender.snapshot()
    assert all((one == 1).all() for one in dict(snapshot).values())
    del snapshot
    assert [one.state() for one in workers] == [(1, 1.0)] * 2
    extractor.fails_at = None
    training._model.fill(3.0)
    assert sync(training) == 3
    assert [one.state() for one in workers] == [(3, 3.0)] * 2
    end(training, workers)


def test_extraction_may_take_longer_than_the_timeout():
    extractor = Watched({"group_by_module": True})
    word = {"strategy": "weightsync", "strategy_settings": {"timeout": 3.0}}
    training, workers, client = start(extractor, Net(fill=1.0))
    extractor.takes = 1.2
    assert sync(training, client, word) == 1
    assert sync(training) == 2
    assert training.sender.report.all_applied
    end(training, workers)


def test_first_extraction_may_fail():
    extractor = Watched({"group_by_module": True}, fails_at=2)
    training, workers, client = start(extractor, Net(fill=1.0))
    with pytest.raises(OSError, match="the trainer's disk is full"):
        sync(training, client, "weightsync")
    extractor.fails_at = None
    assert sync(training) == 2
    assert [one.state() for one in workers] == [(2, 1.0)] * 2
    end(training, workers)


class Odd:
    """Chunks that are not those of the metadata."""

    def __init__(self, wrong):
        self._wrong = wrong

    async def extract_weights(self, model, generator_dtype):
        plan = await transfer.ModuleExtractor().extract_weights(model, generator_dtype)
        return Chunked(list(plan), plan.metadata, self._wrong)


class Chunked(list):
    def __init__(self, chunks, metadata, wrong):
        super().__init__(wrong(chunks))
        self.metadata = metadata


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda chunks: chunks[:-1], "layers.2.down.bias is missing: no chunk has brought it"),
        (lambda chunks: [*chunks, chunks[0]], "layers.0.up.weight has come with an earlier chunk"),
        (
            lambda chunks: [
                transfer.WeightChunk(["other"], [torch.zeros(1)], ["float32"], [(1,)]), *chunks
            ],
            "other: expected no such tensor, got F32",
        ),
        (
            lambda chunks: [
                transfer.WeightChunk(chunks[0].names, [torch.zeros(3)], ["float32"], [(3,)]),
                *chunks[1:],
            ],
            r"layers.0.up.weight: expected F32 \[128, 64\], got F32 \[3\]",
        ),
    ],
)
def test_chunks_that_do_not_fit_are_named(wrong, said):
    training, workers, client = start(Odd(wrong), Net(fill=1.0), torch.float32)
    with pytest.raises(WrongWeightsError, match=said):
        sync(training, client, "weightsync")
    end(training, workers)


def test_chunks_may_come_in_another_order():
    training, workers, client = start(Odd(lambda chunks: chunks[::-1]), Net(fill=5.0), torch.float32)
    assert sync(training, client, "weightsync") == 1
    assert [one.state() for one in workers] == [(1, 5.0)] * 2
    end(training, workers)


def test_mapping_gets_all_chunks():
    import weightsync

    mapping = weightsync.Mapping().rename("layers.*", "layers.*")
    word = {"strategy": "weightsync", "strategy_settings": {"options": {"mapping": mapping}}}
    training, workers, client = start(transfer.ModuleExtractor(), Net(fill=1.0), torch.float32)
    assert sync(training, client, word) == 1
    assert [one.state() for one in workers] == [(1, 1.0)] * 2
    end(training, workers)
    with pytest.raises(SettingError, match="copy_threads: expected 0 or 1"):
        WeightsyncStrategy(options={"copy_threads": 4})


def test_report_says_what_the_loader_said():
    training, workers, client = start(transfer.ModuleExtractor(), Net(fill=1.0), torch.float32)
    assert sync(training, client, "weightsync") == 1
    workers[1].loader.fault = "load"
    training._model.fill(2.0)
    with pytest.raises(Exception, match="out of order"):
        sync(training)
    lines = {line.worker: line for line in training.sender.report.workers}
    assert lines[0].outcome == "applied"
    assert lines[1].outcome == "refused" and "out of order" in str(lines[1])
    assert [one.state() for one in workers] == [(2, 2.0), (1, 1.0)]
    workers[1].forgive()
    assert sync(training) == 3
    assert training.sender.report.all_applied
    end(training, workers)
