"""What the tests of transfers start: inference workers, and ranks of a trainer."""

import asyncio
import os
import signal
import threading
from multiprocessing.connection import Client, Listener

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

    def __init__(self, strategy, fault=None, width=64):
        self.model = Net(fill=-1.0, width=width)
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

    def serve(self, address):
        """Answers the calls of trainers of other processes, in a thread."""
        listener = Listener(address)

        def answer():
            while True:
                with listener.accept() as trainer:
                    _answer(self, trainer)

        threading.Thread(target=answer, daemon=True).start()

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
    answer = asyncio.ensure_future(asyncio.to_thread(actor.answer))
    try:
        return await asyncio.shield(answer)
    except asyncio.CancelledError:
        # What is asked next must not get this answer. A worker that stands still gives none.
        await asyncio.wait({answer}, timeout=5)
        raise


def trainer(model, workers, *, extractor=None, dtype=torch.float32, deployment=1):
    """A trainer of this process, and its client."""
    extractor = extractor or transfer.ModuleExtractor(
        {"group_by_module": True, "batch_size_threshold_gb": 1e-5}
    )
    client = transfer.ActorClient(workers, call=call, deployment=deployment)
    return transfer.TrainingActor(extractor, model, dtype), client


def _answer(worker, trainer):
    try:
        while True:
            method, args = trainer.recv()
            try:
                answer = True, getattr(worker, method)(*args)
            except Exception as error:
                answer = False, str(error)
            trainer.send(answer)
    except (EOFError, OSError):
        # The trainer is gone.
        pass


class Trainer:
    """A trainer of a process of its own, for workers that serve at addresses."""

    def __init__(self, addresses):
        self.model = Net()
        self.extractor = Dying({"group_by_module": True})
        self.links = [Client(address) for address in addresses]

    def initialize(self, cfg):
        self.training = transfer.TrainingActor(self.extractor, self.model, torch.float32)
        client = transfer.ActorClient(self.links, call=_over_link)
        asyncio.run(self.training.initialize_weight_sync(None, cfg, client))

    def sync(self, value, dies_at=None):
        self.model.fill(value)
        self.extractor.dies_at = dies_at
        return asyncio.run(self.training.sync_weights())


class Dying(transfer.ModuleExtractor):
    """Is killed when a chunk is asked for."""

    dies_at = None

    async def extract_weights(self, model, generator_dtype):
        plan = await super().extract_weights(model, generator_dtype)
        begun = plan._begun
        plan._begun = lambda: self._until_death(begun())
        return plan

    def _until_death(self, chunks):
        for at, chunk in enumerate(chunks):
            if at == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            yield chunk


async def _over_link(link, method, *args):
    def ask():
        link.send((method, args))
        done, answer = link.recv()
        if not done:
            raise RuntimeError(answer)
        return answer

    return await asyncio.to_thread(ask)


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
