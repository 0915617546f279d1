"""DeepSpeed ZeRO-3 on the CPU, with 2 gloo ranks, where DeepSpeed is installed."""

import asyncio
import importlib.util
import os
import socket

import pytest
import torch
import torch.distributed as dist
from parties import Net
from weightsync import transfer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)


class ZeroRank:
    """A rank of a trainer whose parameters ZeRO-3 has divided."""

    def __init__(self, rank, world, port):
        # Its launcher would say this.
        os.environ.update(
            DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
        dist.init_process_group("gloo", rank=rank, world_size=world)
        import deepspeed

        # Its own operations are compiled when they are used, for minutes; gloo does without.
        deepspeed.ops.__compatible_ops__.clear()
        torch.manual_seed(7)
        model = Net(width=20)
        with torch.no_grad():
            for one in model.parameters():
                one.normal_()
        self.want = {name: one.detach().clone() for name, one in model.state_dict().items()}
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
        engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
        self.model = engine.module
        assert all(hasattr(one, "ds_id") and not one.numel() for one in self.model.parameters())

    def extract(self, cfg, dtype):
        """Whether what came equals the model before it was divided, bit by bit."""
        plan = asyncio.run(transfer.ZeroExtractor(cfg).extract_weights(self.model, dtype))
        shapes = dict(zip(plan.metadata["names"], plan.metadata["shapes"], strict=True))
        assert shapes == {name: list(one.shape) for name, one in self.want.items()}
        got = {}
        for chunk in plan:
            got.update((n, t.clone()) for n, t in zip(chunk.names, chunk.tensors, strict=True))
        # Each rank has its part again.
        assert not any(one.numel() for one in self.model.parameters())
        if not got:
            return "nothing"
        for name, one in self.want.items():
            assert torch.equal(got[name], one.to(dtype)), name
        return len(got)

    def end(self):
        dist.destroy_process_group()


@pytest.mark.timeout(300)
def test_zero_3_models_come_whole_to_rank_0(actor):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [actor(ZeroRank, rank, 2, port) for rank in range(2)]

    def all_(method, *args):
        for one in ranks:
            one.order(method, *args)
        return [one.answer(within=240) for one in ranks]

    for cfg in ({}, {"group_by_module": True, "batch_size_threshold_gb": 4 / (1 << 20)}):
        for dtype in (torch.float32, torch.bfloat16):
            assert all_("extract", cfg, dtype) == [12, "nothing"]
    assert all_("extract", {"yield_on_all_ranks": True}, torch.float32) == [12, 12]
    all_("end")
