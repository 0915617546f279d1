"""A trainer that is written against SkyRL 0.3.0's interface, with its imports changed."""

import asyncio

import torch
from parties import Net, Worker, call
from weightsync import transfer
from weightsync.transfer.skyrl import (
    BroadcastInitInfo,
    BroadcastTransferStrategy,
    LoraLoadRequest,
    WeightChunk,
    WeightExtractor,
    get_transfer_strategy,
    get_transfer_strategy_cls,
    yield_module_grouped_chunks,
)


class Extractor(WeightExtractor):
    """Keeps its model, and yields chunks of strings and lists."""

    def __init__(self, model, threshold):
        self.model, self.threshold = model, threshold

    def extract_weights(self, dtype):
        yield from yield_module_grouped_chunks(
            params=self.model.state_dict(),
            dtype=dtype,
            gather_tensor_fn=lambda param: param,
            get_shape_fn=lambda name, param, tensor: list(tensor.shape),
            batch_size_threshold_gb=self.threshold,
        )

    def get_weight_metadata(self, dtype):
        state = self.model.state_dict()
        return {
            "names": list(state),
            "dtype_names": [str(dtype).split(".")[-1]] * len(state),
            "shapes": [list(one.shape) for one in state.values()],
        }


def test_trainer_of_the_older_interface_syncs(actor):
    strategy = transfer.strategy_from_config("packed_broadcast")
    workers = [actor(Worker, "packed_broadcast") for _ in range(2)]
    assert strategy.packed
    model = Net(fill=1.0)
    extractor = Extractor(model, 0.0)
    client = transfer.ActorClient(workers, call=call)

    class Config:
        weight_sync_backend = "gloo"
        run_engines_locally = True

    cls = get_transfer_strategy_cls(weight_sync_backend="gloo", colocate_all=True)
    assert cls is BroadcastTransferStrategy

    async def run():
        total, _ = await client.get_world_size()
        info = cls.create_init_info(Config(), inference_world_size=total)
        assert not info.override_existing_receiver and info.world_size == 3
        sender, _ = await asyncio.gather(
            asyncio.to_thread(cls.create_sender, init_info=info, inference_client=client),
            client.init_weight_update_communicator(info),
        )
        for version in (1, 2):
            model.fill(float(version))
            await sender.send_chunks(
                extractor.extract_weights(torch.float32),
                weight_metadata=extractor.get_weight_metadata(torch.float32),
            )
            assert [one.ask("state") for one in workers] == [(version, float(version))] * 2
        sender.teardown()
        sender.teardown()

    asyncio.run(run())


def test_older_names_have_the_older_forms():
    info = BroadcastInitInfo(True, "10.0.0.1", 4321, 1, 9)
    servers = info.for_servers(world_size_per_server=4, num_servers=4, dp_size=2)
    assert [one.rank_offset for one in servers] == [1, 1, 5, 5]
    assert servers[3].to_api_payload() == {
        "master_address": "10.0.0.1", "master_port": 4321, "rank_offset": 5, "world_size": 9,
    }  # fmt: skip
    assert get_transfer_strategy("nccl", True) == "ipc"
    assert get_transfer_strategy("nccl", False) == "nccl"
    chunk = WeightChunk(
        names=["a"], dtypes=["torch.bfloat16"], shapes=[[2]], tensors=[torch.zeros(2).bfloat16()]
    )
    assert chunk.total_size_bytes == 4
    assert LoraLoadRequest(lora_path="/adapter").lora_name == ""


def test_grouping_batches_whole_modules():
    model = Net(width=16)
    # A layer is 4,288 bytes in float32.
    assert [len(one) for one in Extractor(model, 9000 / (1 << 30)).extract_weights(torch.float32)] == [8, 4]
    assert [len(one) for one in Extractor(model, 0).extract_weights(torch.float32)] == [4, 4, 4]
    assert list(Extractor(torch.nn.Module(), 1).extract_weights(torch.float32)) == []
