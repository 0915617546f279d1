"""What the tests of transfers start: inference workers, and ranks of a trainer."""

import asyncio
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from weightsync import transfer
from weightsync.transfer import chunk as chunks
from weightsync.transfer.strategy import WeightTransferReceiver

#: For what must happen; only what fails waits for it to pass.
SOON = 30.0


class Net(nn.Module):
    """Two layers of two modules each, all of one value, with names as a language model has them."""

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
