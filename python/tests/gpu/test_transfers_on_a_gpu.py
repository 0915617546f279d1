"""Transfers by CUDA IPC and NCCL: a trainer and inference workers on one GPU."""

import asyncio

import pytest
import torch
import torch.distributed as dist
from actors import Raised
from group_ranks import free_port
from parties import Net, Worker, trainer
from weightsync import transfer
from weightsync.errors import LoadError, PeerError

IPC = ["cuda_ipc", "packed_cuda_ipc"]
ALL = ["weightsync", *IPC]


class OnGpu(Worker):
    """An inference worker whose model is on the GPU."""

    def __init__(self, strategy, fault=None, width=64, device=0):
        torch.cuda.set_device(device)
        super().__init__(strategy, fault, width)
        self.model.cuda()

    def memory(self):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()


def config(word, timeout=30.0):
    return {"strategy": word, "strategy_settings": {"timeout": timeout}}


@pytest.mark.parametrize("word", ALL)
def test_workers_of_the_gpu_have_each_sync(actor, word):
    workers = [actor(OnGpu, config(word)) for _ in range(2)]
    model = Net(fill=1.0).cuda()
    training, client = trainer(model, workers)

    async def run():
        await training.initialize_weight_sync(None, config(word), client)
        for version in (1, 2, 3):
            model.fill(float(version))
            assert await training.sync_weights() == version
            assert [one.ask("state") for one in workers] == [(version, float(version))] * 2

    asyncio.run(run())
    for one in workers:
        one.ask("shutdown")
    training.shutdown()


@pytest.mark.parametrize("word", IPC)
def test_every_bit_of_a_large_chunk_arrives(actor, word):
    worker = actor(Large, config(word))
    model = torch.nn.Linear(4096, 4096, dtype=torch.bfloat16, device="cuda")
    extractor = transfer.ModuleExtractor({})
    training, client = trainer(model, [worker], extractor=extractor, dtype=torch.bfloat16)
    asyncio.run(training.initialize_weight_sync(None, config(word), client))
    for _ in range(3):
        torch.nn.init.normal_(model.weight)
        asyncio.run(training.sync_weights())
        assert worker.ask("bits") == _sum(model.weight)


class Large(OnGpu):
    def __init__(self, strategy):
        torch.cuda.set_device(0)
        self.model = torch.nn.Linear(4096, 4096, dtype=torch.bfloat16, device="cuda")
        made = transfer.strategy_from_config(strategy)
        self.actor = transfer.InferenceActor(made, transfer.ModuleLoader(self.model))
        self.fault = None

    def bits(self):
        return _sum(self.model.weight)


def _sum(tensor):
    """A number that depends on every bit and its place."""
    bits = tensor.detach().view(torch.int16).long().flatten()
    return int((bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum())


@pytest.mark.parametrize("word", IPC)
def test_failed_load_keeps_the_weights_on_the_gpu(actor, word):
    workers = [actor(OnGpu, config(word)), actor(OnGpu, config(word), "load")]
    model = Net(fill=1.0).cuda()
    training, client = trainer(model, workers)

    async def run():
        await training.initialize_weight_sync(None, config(word), client)
        with pytest.raises((LoadError, PeerError), match="out of order"):
            await training.sync_weights()
        assert workers[1].ask("state") == (0, -1.0)
        workers[1].ask("forgive")
        model.fill(2.0)
        assert await training.sync_weights() == 2

    asyncio.run(run())
    assert [one.ask("state") for one in workers] == [(2, 2.0)] * 2


@pytest.mark.parametrize("word", IPC)
def test_killed_worker_is_an_error_and_no_hang(actor, word):
    workers = [actor(OnGpu, config(word)), actor(OnGpu, config(word), ("die", 2, 1))]
    model = Net(fill=1.0).cuda()
    training, client = trainer(model, workers)

    async def run():
        await training.initialize_weight_sync(None, config(word), client)
        assert await training.sync_weights() == 1
        model.fill(2.0)
        with pytest.raises((PeerError, Raised)):
            await training.sync_weights()
        assert workers[0].ask("state") == (1, 1.0)

    asyncio.run(run())


@pytest.mark.parametrize("word", IPC)
def test_no_memory_of_the_gpu_is_kept(actor, word):
    worker = actor(OnGpu, config(word), None, 512)
    model = Net(fill=1.0, width=512).cuda()
    training, client = trainer(model, [worker])
    asyncio.run(training.initialize_weight_sync(None, config(word), client))
    asyncio.run(training.sync_weights())
    ours, theirs = torch.cuda.memory_allocated(), worker.ask("memory")
    for value in range(20):
        model.fill(float(value))
        asyncio.run(training.sync_weights())
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() <= ours
    assert worker.ask("memory") <= theirs


@pytest.mark.parametrize("word", ALL)
def test_fsdp_over_nccl_is_extracted(actor, word):
    """One rank is all that NCCL allows on one GPU."""
    worker = actor(OnGpu, config(word))
    method, device = f"tcp://127.0.0.1:{free_port()}", torch.device("cuda:0")
    dist.init_process_group("nccl", init_method=method, rank=0, world_size=1, device_id=device)
    try:
        model = Net().cuda()
        dist.fsdp.fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cuda", (1,)))
        extractor = transfer.FsdpExtractor({
            "group_by_module": True, "batch_size_threshold_gb": 1e-4, "yield_on_all_ranks": True,
        })  # fmt: skip
        training, client = trainer(model, [worker], extractor=extractor)
        asyncio.run(training.initialize_weight_sync(None, config(word), client))
        for version in (1, 2):
            with torch.no_grad():
                for one in model.parameters():
                    one.fill_(version + 1.0)
            assert asyncio.run(training.sync_weights()) == version
            assert worker.ask("state") == (version, version + 1.0)
        training.shutdown()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("word", ["broadcast", "packed_broadcast"])
def test_nccl_carries_between_gpus_and_not_on_one(actor, word):
    """NCCL refuses two ranks on one GPU: both ends say so, and the worker keeps its weights."""
    settings = {"backend": "nccl", "device": "cuda", "timeout": 30.0}
    cfg = {"strategy": word, "strategy_settings": settings}
    several = torch.cuda.device_count() > 1
    worker = actor(OnGpu, cfg, None, 64, int(several))
    model = Net(fill=1.0).cuda()
    training, client = trainer(model, [worker])
    asyncio.run(training.initialize_weight_sync(None, cfg, client))
    if several:
        for version in (1, 2, 3):
            model.fill(float(version))
            assert asyncio.run(training.sync_weights()) == version
            assert worker.ask("state") == (version, float(version))
    else:
        with pytest.raises(PeerError, match="rank 1 .* failed during chunk 0 of sync 1"):
            asyncio.run(training.sync_weights())
        assert worker.ask("state") == (0, -1.0)
    training.shutdown()
