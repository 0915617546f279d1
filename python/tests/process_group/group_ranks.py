"""What a rank of a process group does in these tests."""

import contextlib
import gc
import os
import pickle
import signal
import socket
import threading
import time

import torch
import torch.distributed as dist
import weightsync
from patience import patience
from tensordict import LazyStackedTensorDict, TensorDict
from torch import nn
from weightsync import process_group

# What a test waits for at most where only a failure would let it pass.
LONG = patience(20)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def foreign_backend(store, rank, size, timeout):
    """A backend that torch does not know as gloo."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


class Net(nn.Module):
    """A tied weight, buffers of both kinds, a scalar, an empty tensor, small and large tensors."""

    def __init__(self, fill, width=64):
        super().__init__()
        self.up = nn.Linear(width, 200)
        self.down = nn.Linear(200, width, bias=False)
        self.again = nn.Linear(200, width, bias=False)
        self.again.weight = self.down.weight
        self.narrow = nn.Parameter(torch.zeros(33, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.zeros(()))
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.turned = nn.Parameter(torch.zeros(6, 4).t())
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.fill(fill)

    def fill(self, value):
        with torch.no_grad():
            for one in self.state_dict().values():
                one.fill_(value)
        return self

    def forward(self, x):
        return self.down(self.up(x))


def tree_of(fill, kind):
    """The same nested tensors as a dict, or as a TensorDict."""
    made = {"a": {"w": torch.full((3, 5), fill)}, "b": torch.full((2,), int(fill))}
    return TensorDict(made) if kind == "tensordict" else made


def make(kind, fill):
    if kind == "net":
        return Net(fill)
    if kind == "wide":
        return Net(fill, width=96)
    if kind == "meta":
        return Net(fill).to("meta")
    if kind == "lazy":
        net = Net(fill)
        net.up = nn.LazyLinear(200)
        return net
    if kind == "hollow":
        net = Net(fill)
        net.up.weight.untyped_storage().resize_(0)
        return net
    if kind == "expanded":
        net = Net(fill)
        net.norm.running_mean = torch.zeros(1).expand(3)
        return net
    if kind == "state dict":
        return Net(fill).state_dict()
    if kind in ("tensordict", "dict"):
        return tree_of(fill, kind)
    if kind == "empty":
        return {}
    if kind == "views":
        # Two that compute their values from the memory of a third.
        memory = torch.complex(torch.full((8,), fill), torch.arange(8.0))
        return {"conjugate": memory.conj(), "negative": memory.conj().imag, "memory": memory}
    if kind == "single":
        # torch's word for contiguous: the stride of a single element may be any.
        memory = torch.full((50,), fill)
        return {"one": memory[:1].as_strided((1,), (5,)), "other": memory.view(1, 50)[:, 3]}
    if kind == "single module":
        module = nn.Module()
        for name, tensor in make("single", fill).items():
            module.register_parameter(name, nn.Parameter(tensor))
        return module
    if kind == "sparse":
        return {"w": torch.full((3, 5), fill).to_sparse()}
    if kind == "wrapper":
        from torch.testing._internal.two_tensor import TwoTensor

        return {"w": TwoTensor(torch.full((3, 5), fill), torch.full((3, 5), fill))}
    if kind == "overlapping":
        memory = torch.full((8, 8), fill)
        return {"whole": memory, "rows": memory[:4]}
    if kind == "apart":
        return {"whole": torch.full((8, 8), fill), "rows": torch.full((4, 8), fill + 1)}
    if kind == "lazy stack":
        parts = [TensorDict({"w": torch.full((8,), fill)}, batch_size=[]) for _ in range(4)]
        return LazyStackedTensorDict(*parts, stack_dim=0)
    if kind == "stack":
        return {"w": torch.full((4, 8), fill)}
    # A send of several pieces takes long enough for a test to come in between.
    return {f"part{at}": torch.full((5 << 18,), float(fill)) for at in range(int(kind))}


def values_of(model):
    """All values that the model's tensors have."""
    if isinstance(model, nn.Module):
        tensors = model.state_dict().values()
    else:
        tensors = TensorDict(model).flatten_keys(".").values()
    return sorted({v for one in tensors if one.numel() for v in (one.min().item(), one.max().item())})


def leftovers():
    """This process's threads and descriptors."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


class Rank:
    """One rank of a gloo group, with its end."""

    def __init__(self, rank, world, port, timeout):
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
        )
        self.rank, self.timeout, self.group = rank, timeout, None
        self.ends = []

    def open(self, kind="net", fill=0.0, **how):
        self.model = make(kind, fill)
        how.setdefault("timeout", self.timeout)
        how["name"] = how.pop("model", "policy")
        receives = how.pop("receives", self.rank != how.get("src", 0))
        end = process_group.Receiver if receives else process_group.Sender
        self.end = end(self.model, self.group, **how)
        self.ends.append(self.end)

    def subgroup(self, members, backend="gloo"):
        if backend != "gloo":
            dist.Backend.register_backend(backend, foreign_backend, devices=["cpu"])
        # Every rank of the default group makes it.
        group = dist.new_group(members, backend=backend)
        self.group = group if self.rank in members else None

    def wait_at_most(self, seconds):
        """Bounds the waits of a send, and not those in which the ends were made."""
        self.end._timeout = self.end._group._timeout = seconds

    def fill(self, value):
        if isinstance(self.model, nn.Module):
            self.model.fill(value)
        else:
            TensorDict(self.model).apply_(lambda one: one.fill_(value))

    def send(self, *model):
        report = self.end.send(*[make(*one) for one in model])
        return None if report is None else report.to_dict() | {"text": str(report)}

    def receive(self, timeout=LONG):
        return self.end.receive(timeout)

    def receive_interrupted(self):
        """What ends a receive, Ctrl-C included."""
        try:
            return self.receive()
        except BaseException as error:
            return type(error).__name__

    def values(self):
        return values_of(self.model)

    def lists(self):
        """The values of a dict's tensors."""
        return {
            name: torch.view_as_real(one.resolve_conj()).tolist() if one.is_complex() else one.tolist()
            for name, one in self.model.items()
        }

    def default_device(self, name):
        torch.set_default_device(name)

    def version(self):
        return self.end.version

    def shutdown(self):
        self.end.shutdown()
        self.end.shutdown()

    def drop(self, which):
        """Drops the end, the model and the group in an order."""
        for name in which:
            if name == "group":
                dist.destroy_process_group()
            elif name == "end":
                self.end, self.ends = None, []
            else:
                self.model = None
            gc.collect()

    def tied(self):
        return self.model.again.weight is self.model.down.weight

    def forward(self):
        return self.model(torch.ones(64)).sum().item()

    def addresses(self):
        return [one.data_ptr() for one in self.model.parameters()]

    def damage(self, piece=0):
        """Makes the checksums of the next version wrong: as if bytes had changed on their way."""
        import weightsync.process_group._receiver as module

        plain, seen = module.checksum, []

        def other(data):
            seen.append(data)
            if len(seen) == piece + 1:
                module.checksum = plain
                data[3] ^= 16
            return plain(data)

        module.checksum = other

    def interrupt_load(self, kind):
        """Makes the next load fail after it has changed a part of the model."""
        import weightsync.process_group._target as module

        plain, error = module.exchange, {"error": RuntimeError, "Ctrl-C": KeyboardInterrupt}[kind]

        def other(pairs):
            module.exchange = plain
            plain(pairs[:1])
            raise error("the load was interrupted")

        module.exchange = other

    def note_sends(self):
        """Notes which pieces are filled, and when receivers are told of a version."""
        import weightsync.process_group._sender as module

        self.noted = noted = []
        fill, tell = module.Weights.fill, self.end._group.tell

        def fills(weights, piece, buffer):
            noted.append(piece)
            fill(weights, piece, buffer)

        def tells(*args):
            noted.append("tell")
            tell(*args)

        module.Weights.fill, self.end._group.tell = fills, tells

    def notes(self):
        return self.noted

    def gather_slowly(self, piece):
        """A piece seems to have been gathered for longer than any timeout."""
        import weightsync.process_group._sender as module

        plain = module.Weights.fill

        def fill(weights, at, buffer):
            plain(weights, at, buffer)
            if at == piece:
                weights.gathered += 1e6

        module.Weights.fill = fill

    def die_at(self, piece):
        """Kills this process as it sends, or has received, a piece."""
        import weightsync.process_group._receiver as receiver
        import weightsync.process_group._sender as sender

        module, seen = (sender if self.rank == 0 else receiver), []
        plain = module.checksum

        def other(data):
            seen.append(data)
            if len(seen) == piece + 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(data)

        module.checksum = other

    def begun(self):
        """Whether a version has begun to arrive; returns once it has."""
        message = self.end._group.next(LONG)
        self.end._group._messages.put(message)
        return message is not None

    def pickle(self):
        pickle.dumps(self.end)

    def fork(self):
        """What a forked child gets from the calls of this end, and how it ends."""
        here, there = os.pipe()
        child = os.fork()
        if child == 0:
            call = self.end.send if hasattr(self.end, "send") else self.end.receive
            try:
                call()
                said = "nothing"
            except weightsync.errors.LifecycleError as error:
                said = str(error)
            self.end.shutdown()
            self.end = self.ends = None
            gc.collect()
            os.write(there, said.encode())
            os._exit(0)
        os.close(there)
        with os.fdopen(here, "rb") as pipe:
            said = pipe.read().decode()
        return said, os.waitpid(child, 0)[1]

    def shutdown_while_receiving(self):
        """What a receive that waits in another thread gets as this end shuts down."""
        said = []

        def wait():
            try:
                said.append(self.end.receive())
            except weightsync.WeightsyncError as error:
                said.append(type(error).__name__)

        thread = threading.Thread(target=wait)
        thread.start()
        self.end.shutdown()
        thread.join(LONG)
        return said

    def shutdown_while_sending(self, seconds=None):
        """What a send that waits in another thread gets as this end shuts down; and before that what
        another one gets that may wait so many seconds.
        """
        said, waits = [], threading.Event()
        plain = self.end._group.next

        def following(timeout):
            if timeout:
                waits.set()
            return plain(timeout)

        def send():
            try:
                said.append(self.end.send())
            except weightsync.WeightsyncError as error:
                said.append(type(error).__name__)
                if isinstance(error, weightsync.DeadlineError):
                    said.append(str(error))

        self.end._group.next = following
        thread = threading.Thread(target=send, name="other")
        thread.start()
        waits.wait(LONG)
        if seconds is not None:
            self.end._timeout = seconds
            send()
        self.end.shutdown()
        thread.join(LONG)
        return said

    def send_in_threads(self, count):
        reports = []
        threads = [
            threading.Thread(target=lambda: reports.append(self.end.send().version))
            for _ in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)
        return sorted(reports)

    def cycles(self, count, world):
        """Opens, uses and closes ends; returns what is left after the first and the last."""
        left = []
        for _ in range(count):
            self.open("net", 1.0)
            self.send() if self.rank == 0 else self.receive()
            with contextlib.suppress(weightsync.PeerError):
                self.end.shutdown()
            dist.barrier()
            self.drop(["end", "model"])
            left.append(leftovers())
        return left[1], left[-1]

    def own_collectives(self, count):
        """The group's own collectives, while the end waits in another thread."""
        total = 0
        for at in range(count):
            one = torch.tensor([at])
            dist.all_reduce(one)
            total += one.item()
        return total

    def own_collectives_and_versions(self, count):
        """Both at once: what the collectives gave, and the last version."""
        versions = []

        def follow():
            for _ in range(count):
                versions.append(self.end.send().version if self.rank == 0 else self.receive())

        thread = threading.Thread(target=follow)
        thread.start()
        total = self.own_collectives(count)
        thread.join(LONG)
        return total, versions[-1]

    # TorchRL's scheme.

    def scheme(self, **how):
        from weightsync.torchrl import ProcessGroupWeightSyncScheme

        self.model = make("net", 3.0 if self.rank == 0 else -1.0)
        self.end = ProcessGroupWeightSyncScheme(timeout=self.timeout, **how)
        if self.rank == 0:
            self.end.init_on_sender(model_id="policy", model=self.model)
        else:
            worker = self.rank - 1
            self.end.init_on_receiver(model_id="policy", model=self.model, worker_idx=worker)
        self.end.connect()

    def scheme_connect_again(self):
        """Connects a sender after a call that failed; returns whether that one did."""
        from weightsync.torchrl import ProcessGroupWeightSyncScheme

        self.model = make("net", 3.0)
        self.end = ProcessGroupWeightSyncScheme(timeout=self.timeout)
        self.end.init_on_sender(model_id="policy", context=self)
        try:
            self.end.connect(weights="no.such.model")
        except weightsync.ModelError:
            self.end.connect(weights=self.model)
            return True
        return False

    def scheme_send(self, workers=None):
        return self.end.send(worker_ids=workers).version

    def scheme_receive(self, timeout=LONG):
        return self.end.receive(timeout) is not None

    def scheme_values(self):
        with self.end.frozen():
            return values_of(self.model)

    def scheme_freeze(self):
        """Holds the model in another thread, for longer than a load waits."""
        self.end._following._timeout = 1.0
        held, self.thawed = threading.Event(), threading.Event()

        def hold():
            with self.end.frozen():
                held.set()
                self.thawed.wait()

        self.holding = threading.Thread(target=hold, daemon=True)
        self.holding.start()
        held.wait()

    def scheme_thaw(self):
        self.thawed.set()
        self.holding.join()

    def scheme_hold(self):
        """Keeps the model unchanged from here on, in this thread."""
        self.hold = self.end.frozen()
        self.hold.__enter__()

    def scheme_frozen_forward(self):
        """Whether a forward of another thread ends while a version waits for this thread's hold."""
        lock = self.end._following._lock
        with contextlib.ExitStack() as stack:
            stack.push(self.hold)
            while not lock._is_wanted:
                time.sleep(0.001)
            thread = threading.Thread(target=self.forward)
            thread.start()
            thread.join(LONG)
            return not thread.is_alive() and lock._is_wanted

    def scheme_frozen_receive(self):
        with self.end.frozen():
            self.end.receive(LONG)

    def scheme_drop(self):
        """Whether the thread ends, and the model's hooks go, once the scheme is dropped."""
        thread = self.end._following._thread
        self.end = None
        gc.collect()
        thread.join(LONG)
        return not thread.is_alive() and not self.model._forward_pre_hooks

    def scheme_frozen_shutdown(self):
        with self.end.frozen():
            self.end.shutdown()

    def scheme_shutdown(self):
        self.end.shutdown()
        self.end.shutdown()

    def scheme_pickle(self):
        pickle.dumps(self.end)
