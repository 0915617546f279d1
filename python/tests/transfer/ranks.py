"""What a rank of a trainer does in the tests of extraction."""

import asyncio

import torch
import torch.distributed as dist
from parties import Net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from weightsync import transfer


class Odd(nn.Module):
    """Shapes that no number of ranks divides, a tied weight, a buffer, a scalar."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.blocks = nn.ModuleList(nn.Linear(5, width) for width in (1, 3, 13))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.embed(x))


class Rank:
    """One rank of a gloo group."""

    def __init__(self, rank, world, port):
        torch.manual_seed(0)
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
        )
        self.world = world

    def make(self, kind):
        mesh = init_device_mesh("cpu", (self.world,))
        torch.manual_seed(7)
        if kind == "fsdp":
            self.model = Net(width=20)
            self._randomize()
            self.want = _want(self.model)
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        elif kind == "odd":
            self.model = Odd()
            self.want = _want(self.model)
            fully_shard(self.model, mesh=mesh)
        elif kind == "tensor parallel":
            self.model = Net(width=20)
            self._randomize()
            self.want = _want(self.model)
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for layer in self.model.layers:
                parallelize_module(layer, mesh, plan)
        elif kind == "both":
            mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("dp", "tp"))
            self.model = Net(width=20)
            self._randomize()
            self.want = _want(self.model)
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for layer in self.model.layers:
                parallelize_module(layer, mesh["tp"], plan)
                fully_shard(layer, mesh=mesh["dp"])
        elif kind == "copies":
            mesh = init_device_mesh("cpu", (2, self.world // 2))
            self.model = nn.Sequential(nn.Sequential(nn.Linear(6, 9)))
            self.want = _want(self.model)
            for part, name in ((self.model[0][0], "weight"), (self.model[0][0], "bias")):
                whole = getattr(part, name)
                placed = distribute_tensor(whole.detach(), mesh, [Replicate(), Shard(0)])
                setattr(part, name, nn.Parameter(placed))
        assert any(isinstance(one, DTensor) for one in self.model.parameters())

    def _randomize(self):
        with torch.no_grad():
            for one in self.model.parameters():
                one.normal_()

    def extract(self, cfg, dtype):
        """Whether what came equals the model before it was sharded, bit by bit."""
        extractor = transfer.FsdpExtractor(cfg)
        got = {}
        for chunk in asyncio.run(extractor.extract_weights(self.model, dtype)):
            assert not set(got) & set(chunk.names)
            got.update((n, t.clone()) for n, t in zip(chunk.names, chunk.tensors, strict=True))
        if not got:
            return "nothing"
        want = {
            name: one.to(dtype) if one.is_floating_point() else one
            for name, one in self.want.items()
        }
        assert list(got) == list(want)
        for name, one in want.items():
            assert got[name].dtype == one.dtype and torch.equal(got[name], one), name
        return len(got)

    def end(self):
        dist.destroy_process_group()


def _want(model):
    want = {}
    for name, one in model.state_dict(keep_vars=True).items():
        if all(one is not other for other in want.values()):
            want[name] = one
    return {name: one.detach().clone() for name, one in want.items()}
