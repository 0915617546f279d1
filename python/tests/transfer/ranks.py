"""What a rank of a trainer does in the tests of extraction."""

import asyncio
import time

import torch
import torch.distributed as dist
from parties import Net
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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

    extractor = transfer.FsdpExtractor

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
        elif kind in ("part", "other part"):
            # Of a mesh of 2 by 2, one dimension: the ranks along the other one have copies.
            mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("dp", "tp"))
            self.model = Net(width=20)
            self._randomize()
            self.want = _want(self.model)
            for layer in self.model.layers:
                fully_shard(layer, mesh=mesh["dp"] if kind == "part" else mesh["tp"])
        elif kind == "callback":
            self.make("fsdp")
            Rank.extractor = Called
            return
        elif kind == "stages":
            # Each half of the ranks has layers of its own.
            mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("pp", "dp"))
            self.model = nn.Sequential()
            self.model.add_module(f"stage{mesh.get_local_rank('pp')}", Net(width=20))
            fully_shard(self.model, mesh=mesh["dp"])
        elif kind == "others":
            # Rank 0 has no part of it.
            self.model = Net(width=20)
            mesh = DeviceMesh("cpu", list(range(1, self.world)))
            if dist.get_rank():
                fully_shard(self.model, mesh=mesh)
            return
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

    def attempt(self, how="", late=0.0):
        """An extraction, in which this rank may fail; how it ended, and after how many seconds."""
        time.sleep(late)
        kind = {"early": Early, "middle": Middle, "callback": Callback}.get(how, type(self).extractor)
        began, chunks = time.monotonic(), 0
        try:
            for _ in asyncio.run(kind({}).extract_weights(self.model, torch.float32)):
                chunks += 1
                if how == "stops":
                    return "stopped", "", time.monotonic() - began
        except Exception as error:
            return type(error).__name__, str(error), time.monotonic() - began
        return chunks, "", time.monotonic() - began

    def sync(self):
        """A sync of a rank that was not initialized."""
        actor = transfer.TrainingActor(transfer.FsdpExtractor({}), self.model, torch.float32)
        asyncio.run(actor.sync_weights())

    def make_alone(self):
        """Another model, which is whole on this rank."""
        self.sharded, self.model = self.model, Net(width=20)

    def make_again(self):
        self.model = self.sharded

    def all_reduce(self):
        """Whether the default group still works."""
        one = torch.ones(1)
        dist.all_reduce(one)
        return one.item()

    def end(self):
        dist.destroy_process_group()


class Early(transfer.FsdpExtractor):
    """Fails before anything is gathered."""

    async def _extract_raw_weights(self, model, generator_dtype):
        raise ValueError("no weights today")


class Middle(transfer.FsdpExtractor):
    """Fails in the middle."""

    def _gather_batch(self, outs, params, dtypes):
        if "layers.1.up.weight" in params:
            raise MemoryError("no room for layers.1")
        super()._gather_batch(outs, params, dtypes)


class Called(transfer.MegatronExtractor):
    """Gathers by a function of the user's, in a group that nothing else knows."""

    def __init__(self, cfg):
        super().__init__(cfg, params=lambda model: dict(model.named_parameters()), gather=self.whole)

    def whole(self, name, part):
        dist.all_reduce(torch.ones(1))
        return part.full_tensor()


class Callback(Called):
    def whole(self, name, part):
        if name == "layers.1.up.weight":
            raise KeyError("the bridge knows no layers.1")
        return super().whole(name, part)


def _want(model):
    want = {}
    for name, one in model.state_dict(keep_vars=True).items():
        if all(one is not other for other in want.values()):
            want[name] = one
    return {name: one.detach().clone() for name, one in want.items()}
