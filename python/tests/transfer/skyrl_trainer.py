"""A trainer as SkyRL 0.3.0's users write one: only its imports are this package's."""

import asyncio

import torch
import torch.distributed
from parties import Net, Worker, threaded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from weightsync import transfer
from weightsync.transfer.skyrl import (
    WeightChunk,
    WeightExtractor,
    get_transfer_strategy_cls,
    yield_module_grouped_chunks,
)


class ShardedExtractor(WeightExtractor):
    """Keeps its model; it has no constructor of the base class to call."""

    def __init__(self, model, group_by_module=False, batch_size_threshold_gb=0.0):
        self.model = model
        self.group_by_module = group_by_module
        self.batch_size_threshold_gb = batch_size_threshold_gb

    def extract_weights(self, dtype):
        params = self.model.state_dict()
        if self.group_by_module:
            yield from yield_module_grouped_chunks(
                params=params,
                dtype=dtype,
                gather_tensor_fn=self._gather,
                get_shape_fn=lambda name, param, tensor: list(tensor.shape),
                batch_size_threshold_gb=self.batch_size_threshold_gb,
            )
            return
        for name, param in params.items():
            tensor = self._gather(param).to(dtype).detach().contiguous()
            yield WeightChunk([name], [str(dtype)], [list(tensor.shape)], [tensor])

    def get_weight_metadata(self, dtype):
        state = self.model.state_dict()
        return {
            "names": list(state),
            "dtype_names": [str(dtype).split(".")[-1] for _ in state],
            "shapes": [list(one.shape) for one in state.values()],
        }

    def _gather(self, param):
        return param.full_tensor() if isinstance(param, DTensor) else param


class EngineConfig:
    weight_sync_backend = "gloo"
    run_engines_locally = True
    model_dtype = "bfloat16"


class SkyRank:
    """A rank of the trainer. Every rank makes every call."""

    def __init__(self, rank, world, port):
        torch.distributed.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
        )
        self.model = Net(fill=1.0)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (world,)))
        self.workers = []
        if rank == 0:
            self.workers = [Worker("packed_broadcast") for _ in range(2)]
        # On the other ranks the client is there, and is not called.
        self.client = transfer.ActorClient(self.workers or [None, None], call=threaded)

    def init_weight_sync_state(self, group_by_module):
        asyncio.run(self._init())
        self.extractor = ShardedExtractor(self.model, group_by_module, 0.0)

    async def _init(self):
        strategy = get_transfer_strategy_cls(
            weight_sync_backend=EngineConfig.weight_sync_backend, colocate_all=False
        )
        world_size, _ = await self.client.get_world_size()
        info = strategy.create_init_info(EngineConfig(), inference_world_size=world_size)
        tasks = [
            asyncio.to_thread(
                strategy.create_sender, init_info=info, inference_client=self.client
            )
        ]
        if torch.distributed.get_rank() == 0:
            tasks.append(self.client.init_weight_update_communicator(info))
        self.sender = (await asyncio.gather(*tasks))[0]
        torch.distributed.barrier()

    def broadcast_to_inference_engines(self, value):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)
        dtype = torch.float32
        asyncio.run(
            self.sender.send_chunks(
                self.extractor.extract_weights(dtype),
                weight_metadata=self.extractor.get_weight_metadata(dtype),
            )
        )
        return [one.state() for one in self.workers]

    def end(self):
        self.sender.teardown()
        self.sender.teardown()
        for one in self.workers:
            one.shutdown()
        torch.distributed.destroy_process_group()
