"""A trainer and two inference workers, which are Ray actors: two syncs by ``ray_direct``.

After `pip install examples/ray_direct_transport`: `python sync.py`.
"""

import asyncio

import ray
import torch
from weightsync import transfer


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self):
        torch.set_num_threads(1)
        self.model = torch.nn.Linear(256, 64)
        loader = transfer.ModuleLoader(self.model)
        self.actor = transfer.InferenceActor(transfer.strategy_from_config("ray_direct"), loader)

    async def init_weight_update_communicator(self, *told):
        await self.actor.init_weight_update_communicator(*told)

    async def update_named_weights(self, request):
        return await self.actor.update_named_weights(request)

    def state(self):
        return self.actor.weight_version, self.model.weight.sum().item()


async def main():
    workers = [Worker.remote() for _ in range(2)]
    # The wait for workers to join ends by a timeout, and does not include their start.
    await asyncio.gather(*(one.__ray_ready__.remote() for one in workers))
    client = transfer.ActorClient(
        workers, call=lambda actor, method, *told: getattr(actor, method).remote(*told)
    )
    model = torch.nn.Linear(256, 64)
    training = transfer.TrainingActor(transfer.ModuleExtractor(), model)
    await training.initialize_weight_sync(None, "ray_direct", client)
    for step in range(2):
        with torch.no_grad():
            model.weight.fill_(step + 1)
        version = await training.sync_weights()
        states = await asyncio.gather(*(one.state.remote() for one in workers))
        assert states == [(version, model.weight.sum().item())] * 2, states
        print(f"version {version} is on {len(states)} workers")
    training.shutdown()


if __name__ == "__main__":
    # The strategy registers its transport, and actors that are made later know it.
    transfer.strategy_from_config("ray_direct")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        asyncio.run(main())
    finally:
        ray.shutdown()
