"""Versions over a process group whose backend is NCCL, with models on the GPU.

Two ranks share one GPU, so NCCL itself refuses their collectives; the ends make gloo links.
"""

import pytest
import torch
import torch.distributed as dist
from group_ranks import LONG, free_port
from torch import nn
from weightsync import process_group


class Rank:
    """One rank of an NCCL group, with an end whose model is on the GPU."""

    def __init__(self, rank, world, port, mode):
        torch.cuda.set_device(0)
        dist.init_process_group(
            "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
        )
        torch.manual_seed(rank)
        self.model = nn.Sequential(nn.Linear(300, 500), nn.BatchNorm1d(500)).cuda()
        if rank == 0:
            self.end = process_group.Sender(self.model, timeout=LONG)
        else:
            self.end = process_group.Receiver(self.model, timeout=LONG, mode=mode)

    def send(self, value):
        nn.init.constant_(self.model[0].weight, value)
        return self.end.send().version

    def receive(self):
        return self.end.receive(LONG)

    def sums(self):
        return [tensor.double().sum().item() for tensor in self.model.state_dict().values()]

    def places(self):
        return [tensor.device.type for tensor in self.model.state_dict().values()]

    def shutdown(self):
        self.end.shutdown()
        dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["bind", "copy"])
def test_group_of_nccl_carries_versions(actor, mode):
    port = free_port()
    ranks = [actor(Rank, rank, 2, port, mode) for rank in range(2)]
    for version in (1, 2, 3):
        ranks[1].order("receive")
        ranks[0].order("send", float(version))
        assert [one.answer() for one in ranks] == [version, version]
        assert ranks[0].ask("sums") == ranks[1].ask("sums")
        assert set(ranks[1].ask("places")) == {"cuda"}
    for one in ranks:
        one.order("shutdown")
    for one in ranks:
        one.answer()
