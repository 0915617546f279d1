"""The scenarios of workers whose model torch.multiprocessing has pickled: it is in shared memory."""

import copy

import torch
from crew import SOON, hurry
from distributed_collectors import PROMPT, collecting, halves
from tiny import policy
from torch import multiprocessing as mp
from torch import nn
from torchrl.collectors.distributed import DistributedCollector

# Parameters of 64 KiB and more are bound unless everything is copied.
NUMEL = {"small": 4, "large": 32 * 1024}


class Weighted(nn.Module):
    """A parameter and a buffer of one value, and another name of a part of the parameter."""

    def __init__(self, value=0.0, numel=1):
        super().__init__()
        self.weight = nn.Parameter(torch.full((numel,), value))
        self.part = nn.Parameter(self.weight.detach()[:1])
        self.register_buffer("mean", torch.full((3,), value))

    def forward(self, rows):
        return self.weight[:1].expand(rows.shape).clone()

    def values(self):
        """All values that the module has."""
        return {one.item() for tensor in self.state_dict().values() for one in tensor.unique()}

    def fill(self, value):
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.fill_(value)
        return self


def _worker(scheme, index, model, pipe):
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=index)
    scheme.connect(worker_idx=index)
    for _ in iter(pipe.recv, None):
        with scheme.frozen():
            pipe.send((model.values(), model.part.data_ptr() == model.weight.data_ptr()))
    scheme.shutdown()


def standalone(module, size, mode):
    """What a worker loads reaches neither the learner nor another worker."""
    context = mp.get_context("spawn")
    learner = Weighted(1.0, NUMEL[size])
    scheme = module.SharedMemWeightSyncScheme(mode=mode)
    scheme.init_on_sender(model_id="policy", model=learner, num_workers=2)
    pipes, workers = [], []
    for index in range(2):
        here, there = context.Pipe()
        args = (scheme, index, learner, there)
        workers.append(context.Process(target=_worker, args=args, daemon=True))
        workers[-1].start()
        pipes.append(here)

    def values():
        for pipe in pipes:
            pipe.send("values")
        return [pipe.recv() if pipe.poll(SOON) else None for pipe in pipes]

    with hurry("the rendez-vous", SOON):
        scheme.connect()
    assert learner.weight.is_shared() and learner.mean.is_shared(), "its pickles share its memory"
    with hurry("sends", SOON):
        learner.fill(5.0)
        # Two parameters of one memory, which goes on to be one.
        assert values() == [({1.0}, True)] * 2, "nothing was sent"
        scheme.send(copy.deepcopy(learner).fill(3.0), worker_ids=[1])
        assert [one for one, _ in values()] == [{1.0}, {3.0}] and learner.values() == {5.0}
        scheme.send({index: copy.deepcopy(learner).fill(8.0 + index) for index in range(2)})
        assert [one for one, _ in values()] == [{8.0}, {9.0}] and learner.values() == {5.0}
    for pipe, worker in zip(pipes, workers, strict=True):
        pipe.send(None)
        worker.join(SOON)
        assert worker.exitcode == 0
    scheme.shutdown()


def collector(module):
    """The workers of a DistributedCollector, which get the policy pickled."""
    mp.set_start_method("spawn", force=True)
    schemes = {"policy": module.DistributedWeightSyncScheme()}

    def weighted(value):
        return policy(module=Weighted(value))

    how = {"first": weighted, "sync": True, "weight_sync_schemes": schemes}
    with collecting(DistributedCollector, **how) as (made, batches):
        learner = made.policy.module
        assert learner.weight.is_shared(), "its pickles share its memory"
        next(batches)
        with hurry("updates", PROMPT):
            made.update_policy_weights_({0: weighted(8.0), 1: weighted(9.0)})
        assert [set(one.flatten().tolist()) for one in halves(batches)] == [{8.0}, {9.0}]
        assert learner.values() == {1.0}
        learner.fill(5.0)
        assert [set(one.flatten().tolist()) for one in halves(batches)] == [{8.0}, {9.0}]
        with hurry("an update of one worker", PROMPT):
            made.update_policy_weights_(weighted(3.0), worker_ids=[1])
        assert [set(one.flatten().tolist()) for one in halves(batches)] == [{3.0}, {8.0}]
        assert learner.values() == {5.0}
