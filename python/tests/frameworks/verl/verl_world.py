"""A trainer and rollout workers as verl has them: worker groups of Ray actors, without GPUs."""

import asyncio
import os
import signal
from types import SimpleNamespace

from named_weights import differing, weights
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig


def config(**kwargs):
    """The setting of a user, and the engine's own settings."""
    return CheckpointEngineConfig(
        backend="weightsync",
        custom_backend_module="weightsync.verl",
        engine_kwargs={"weightsync": {"timeout": 60.0, **kwargs}},
    )


class Trainer(Worker):
    """A rank of the trainer, whose update_weights is that of verl's ActorRolloutRefWorker."""

    def __init__(self, config):
        super().__init__()
        kwargs = config.engine_kwargs.get(config.backend, {})
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend, is_master=self.rank == 0, bucket_size=1 << 20, **kwargs
        )
        self.given, self.drained, self.dies_after = weights(0), 0, None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_weights(self, tensors, dies_after=None):
        self.given, self.drained, self.dies_after = tensors, 0, dies_after

    def _per_tensor(self):
        for name, tensor in self.given.items():
            if self.dies_after == self.drained and self.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            # What the consumer keeps by reference alone would be seen to change.
            lent = tensor.clone()
            yield name, lent
            lent.zero_()
            self.drained += 1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps=None, mode="auto"):
        metrics = await self.checkpoint_engine.send_weights(
            self._per_tensor(), global_steps=global_steps
        )
        return metrics or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method, *args, **kwargs):
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_drained(self):
        return self.drained


class Adapter:
    """Stands for verl's ServerAdapter: it keeps a copy of what it is given."""

    replica_rank, is_leader_rank = 0, True

    def __init__(self):
        self.got, self.steps, self.dies, self.refuses = {}, [], False, False

    async def update_weights(self, weights, global_steps=None, wire_format="named_tensors"):
        assert wire_format == "named_tensors"
        got = {}
        async for name, tensor in weights:
            got[name] = tensor.clone()
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.refuses:
                raise ValueError("this rollout refuses")
            await asyncio.sleep(0)
        self.got = got
        self.steps.append(global_steps)


class Rollout(CheckpointEngineWorker):
    """verl's own worker, with an adapter that needs no server."""

    def __init__(self, config):
        rollout = SimpleNamespace(name="vllm", mode="async", checkpoint_engine=config)
        super().__init__(rollout, None, Adapter())

    def compare(self, expected):
        """What differs, the version, and the bytes that have travelled."""
        incoming = self.checkpoint_engine._incoming
        receiver = incoming and incoming._receiver
        travelled = receiver.travelled if receiver else None
        differs = differing(self.server_adapter.got, expected)
        return differs, self.checkpoint_engine.version, travelled

    def set_fault(self, **faults):
        vars(self.server_adapter).update(faults)

    def get_open_files(self):
        return len(os.listdir("/proc/self/fd"))


class Replica:
    """Stands for verl's RolloutReplica, whose server needs a GPU."""

    def __init__(self, workers):
        self.workers = workers
        self.calls = []

    def __getattr__(self, name):
        async def call(**_):
            self.calls.append(name)

        return call
