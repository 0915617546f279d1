"""What the tests of transfers start: inference workers, and ranks of a trainer."""

import asyncio
import os
import signal

import torch
import torch.distributed as dist
import torch.distributed.device_mesh
import torch.distributed.fsdp
from torch import nn
from weightsync import transfer


class Net(nn.Module):
    """Three layers of two modules each, all of one value, with names as a language model has them."""

    def __init__(self, fill=0.0, width=64):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.fill(fill)

    def fill(self, value):
        with torch.no_grad():
            for one in self.parameters():
                one.fill_(value)
        return self

    @property
    def value(self):
        """The one value that all elements have."""
        values = {v for one in self.parameters() for v in (one.min().item(), one.max().item())}
        assert len(values) == 1, f"torn: {sorted(values)}"
        return values.pop()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return self.down(self.up(x))


class Worker:
    """An inference worker. `fault` says at what it fails, or is killed."""

    def __init__(self, strategy, fault=None):
        self.model = Net(fill=-1.0)
        self.loader = Faulty(self.model)
        self.loader.fault = fault
        made = transfer.strategy_from_config(strategy)
        self.actor = transfer.InferenceActor(made, self.loader)
        self.fault = fault

    def init_weight_update_communicator(self, *args):
        asyncio.run(self.actor.init_weight_update_communicator(*args))

    def update_named_weights(self, request):
        if self.fault == ("die", request["version"], request["chunk"]):
            os.kill(os.getpid(), signal.SIGKILL)
        return asyncio.run(self.actor.update_named_weights(request))

    def forgive(self):
        self.loader.fault = None

    def state(self):
        return self.actor.weight_version, self.model.value

    def shutdown(self):
        self.actor.shutdown()
        self.actor.shutdown()


class Faulty(transfer.ModuleLoader):
    fault = None

    async def load_weights(self, named_tensors):
        if self.fault == "load":
            raise RuntimeError("the engine is out of order")
        await super().load_weights(named_tensors)


async def call(actor, method, *args):
    """How a client of these tests calls an actor of another process."""
    actor.order(method, *args)
    return await asyncio.to_thread(actor.answer)


def trainer(model, workers, *, extractor=None, dtype=torch.float32, deployment=1):
    """A trainer of this process, and its client."""
    extractor = extractor or transfer.ModuleExtractor(
        {"group_by_module": True, "batch_size_threshold_gb": 1e-5}
    )
    client = transfer.ActorClient(workers, call=call, deployment=deployment)
    return transfer.TrainingActor(extractor, model, dtype), client


class Rank:
    """A rank of a sharded trainer, whose rank 0 syncs to workers that are objects of its own."""

    def __init__(self, rank, world, port):
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
        )
        mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
        self.model = Net()
        dist.fsdp.fully_shard(self.model, mesh=mesh)
        self.rank, self.workers = rank, []

    def initialize(self, word):
        if self.rank == 0:
            self.workers = [Worker(word), Worker(word, "load")]
        extractor = transfer.FsdpExtractor(
            {"group_by_module": True, "batch_size_threshold_gb": 1e-4}
        )
        client = transfer.ActorClient(self.workers, call=threaded) if self.workers else None
        self.trainer = transfer.TrainingActor(extractor, self.model, torch.float32)
        asyncio.run(self.trainer.initialize_weight_sync(None, word, client))

    def sync(self, value):
        with torch.no_grad():
            for one in self.model.parameters():
                one.fill_(value)
        return asyncio.run(self.trainer.sync_weights())

    def states(self):
        return [one.state() for one in self.workers]

    def forgive(self):
        for one in self.workers:
            one.forgive()

    def end(self):
        self.trainer.shutdown()
        for one in self.workers:
            one.shutdown()
        dist.destroy_process_group()


async def threaded(worker, method, *args):
    """Calls a worker of this process in a thread of its own."""
    return await asyncio.to_thread(getattr(worker, method), *args)
