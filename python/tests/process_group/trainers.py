"""A program for torchrun: two ranks of a trainer with sharded weights, and two workers."""

import sys
import time

from patience import patience
import torch
import torch.distributed as dist
import weightsync
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from weightsync.torchrl import ProcessGroupWeightSyncScheme


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 30), nn.Linear(30, 5), nn.BatchNorm1d(5))


def be_late(sender, rank, group):
    """One rank calls send after the other has given up; all ranks hear who was late."""
    sender._timeout = 1.0
    for late in (1, 0):
        for caller in (1 - late, late):
            if rank == caller:
                try:
                    sender.send()
                    raise AssertionError("a send without the other rank has returned")
                except weightsync.DeadlineError as error:
                    assert f"rank {late} (" in str(error) and f"rank {1 - late} (" not in str(error)
            dist.barrier(group)
    sender._timeout = 60.0


class Odd(nn.Sequential):
    """A model whose tensors a rank cannot list."""

    def named_modules(self, *args, **how):
        raise ValueError("not today")


def fail_before(sender, rank, model, group):
    """A rank fails before it gathers: all hear of it at once, and the group goes on."""
    for failing in (1, 0):
        odd = Odd(*model) if rank == failing else None
        began = time.monotonic()
        try:
            sender.send(odd)
            raise AssertionError("a send that one rank has failed has returned")
        except ValueError:
            assert rank == failing
        except weightsync.PeerError as error:
            assert rank != failing and f"rank {failing} (" in str(error)
            assert "ValueError: not today" in str(error) and "closed" not in str(error)
        assert time.monotonic() - began < patience(15)
        dist.barrier(group)
    # What rank 1 would gather is something else.
    other = model if rank == 0 else nn.Sequential(model[0])
    try:
        sender.send(other)
        raise AssertionError("ranks have gathered different weights")
    except weightsync.WrongWeightsError as error:
        assert "gathers other tensors than rank" in str(error)
    dist.barrier(group)


def fail_while(sender, rank):
    """A rank fails in the middle: no rank waits, and each is told why."""
    from weightsync.transfer import extractors

    if rank == 1:
        plain = extractors._gather_to_first

        def gather(*args):
            extractors._gather_to_first = plain
            raise MemoryError("no room")

        extractors._gather_to_first = gather
    began = time.monotonic()
    try:
        sender.send()
        raise AssertionError("a send that one rank has failed has returned")
    except (MemoryError, weightsync.PeerError) as error:
        assert (rank == 1) == isinstance(error, MemoryError)
        assert rank == 1 or ("rank 1 (" in str(error) and "MemoryError: no room" in str(error)), error
    assert time.monotonic() - began < patience(15)


def send_by_scheme(rank, model, group):
    """A rank whose call fails before it gathers goes on with the others at the next call."""
    scheme = ProcessGroupWeightSyncScheme(timeout=patience(30))
    scheme.init_on_sender(model_id="policy", model=model)
    scheme.connect()
    for failing in (0, 1):
        try:
            scheme.send(**({"weights": "no.such.model"} if rank == failing else {}))
            raise AssertionError("a send that one rank has failed has returned")
        except weightsync.PeerError as error:
            assert rank != failing and f"rank {failing} (" in str(error) and "ModelError: " in str(error)
        except weightsync.ModelError:
            assert rank == failing
        dist.barrier(group)
    # All of the workers: also on the rank that only gathers.
    report = scheme.send(worker_ids=[0, 1])
    assert (report is None) == (rank == 1) and scheme.version == 2
    dist.barrier()
    scheme.shutdown()


def take_by_scheme(rank, model):
    scheme = ProcessGroupWeightSyncScheme(timeout=patience(30), ranks=[2, 3])
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=rank - 2)
    scheme.connect()
    assert scheme.receive(60) is not None and scheme.version == 2
    dist.barrier()
    scheme.shutdown()


def main(kind):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # new_group is collective: all ranks of the default group make the mesh's groups.
    trainers = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "shard"))["shard"]
    if rank < 2:
        model = net(5)
        if kind != "tensor parallel":
            fully_shard(model, mesh=trainers)
        else:
            parallelize_module(model, trainers, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        assert any(isinstance(one, DTensor) for one in model.parameters())
        if kind == "scheme":
            send_by_scheme(rank, model, trainers.get_group())
            return end(rank)
        sender = weightsync.process_group.Sender(model, timeout=patience(30))
        if kind == "late":
            be_late(sender, rank, trainers.get_group())
        if kind == "failing":
            fail_before(sender, rank, model, trainers.get_group())
        if kind == "broken":
            fail_while(sender, rank)
            sender.shutdown()
            return end(rank)
        for version in (1, 2):
            report = sender.send()
            assert (report is None) == (rank == 1) and sender.version == version
            if report is not None:
                assert report.ensure_applied().version == version
                assert [line.rank for line in report.ranks] == [2, 3]
        dist.barrier()
        if rank == 0:
            sender.shutdown()
        dist.barrier()
        # Rank 1 does not wait for rank 0, which gathers no more.
        try:
            sender.send()
            raise AssertionError("a send of a closed group has returned")
        except (weightsync.PeerError, weightsync.errors.LifecycleError) as error:
            assert ("has shut down" in str(error)) == (rank == 1)
        sender.shutdown()
    else:
        model, want = net(rank), net(5).state_dict()
        if kind == "scheme":
            take_by_scheme(rank, model)
            state = model.state_dict()
            assert all(torch.equal(state[name], one) for name, one in want.items())
            return end(rank)
        receiver = weightsync.process_group.Receiver(model, timeout=patience(30))
        if kind == "broken":
            try:
                receiver.receive()
                raise AssertionError("a version has come whose gathering has failed")
            except weightsync.PeerError as error:
                assert "MemoryError: no room" in str(error)
            receiver.shutdown()
            return end(rank)
        for version in (1, 2):
            assert receiver.receive() == version
            state = model.state_dict()
            assert all(torch.equal(state[name], one) for name, one in want.items())
        dist.barrier()
        dist.barrier()
        receiver.shutdown()
    return end(rank)


def end(rank):
    dist.destroy_process_group()
    print(f"rank {rank} is done", flush=True)


if __name__ == "__main__":
    import weightsync.process_group

    main(sys.argv[1])
