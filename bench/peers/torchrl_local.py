"""TorchRL's schemes for one machine, measured: a sender and worker processes.

    python torchrl_local.py --scheme shared-mem --bytes 536870912 --tensors 64 --workers 4

One process is the sender, spawned ones are the workers. A round is one `scheme.send(weights=...)`,
timed from its call to its return, which is when every worker has said "updated". After the last
send of a request the workers look whether the values have arrived; that is not timed.

What travels: `--tensors` bfloat16 tensors of equal size, `--bytes` in all. The source is memory
that no worker's model is bound to, and it is written anew before each send, outside the timed
part. It is the same memory in every round, which suits TorchRL: multi-process moves a source to
shared memory when it sees it first and from then on passes descriptors only. The sender copies
with as many threads as torch takes by default, a worker with one, which is what TorchRL's
collectors give theirs; the memcpy beside it uses one.

Note what TorchRL's workers get: initialised with `weights` and `devices`, all workers on one
device are bound to one buffer, in both schemes. shared-mem updates that buffer, and each worker
then copies it onto itself; in multi-process each worker copies the source into it.

Spoken over stdin and stdout, a line each:

    <- {"first_s": 1.5}              the workers run; init, connect and the first send took so long
                                     (the start of the processes left out)
    -> round 3                       do three sends (`round` alone: one)
    <- {"sends_s": [...], "memcpys_s": [...]}
    -> quit                          or the end of stdin

Everything is bounded by `--deadline` seconds. When it passes, a worker dies, or a value has not
arrived, the workers are killed, stderr says why, and the exit status is 3. Whoever starts this
takes it along when it dies, and it its workers.
"""

import argparse
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
import time
from multiprocessing import connection

# PR_SET_PDEATHSIG, before the imports that take seconds; each worker imports this file too.
ctypes.CDLL(None).prctl(1, signal.SIGKILL)

import torch
from tensordict import TensorDict
from torch import multiprocessing as mp
from torch import nn
from torchrl.weight_update import MultiProcessWeightSyncScheme, SharedMemWeightSyncScheme

SCHEMES = {
    "shared-mem": SharedMemWeightSyncScheme,
    "multi-process": MultiProcessWeightSyncScheme,
}
DTYPE = torch.bfloat16
MODEL = "policy"


def main():
    args = arguments()
    context = mp.get_context("spawn")
    elements = args.bytes // DTYPE.itemsize // args.tensors
    # The buffer the workers are bound to, and the weights to send, in memory of their own.
    initial, source, scratch = (
        tensors(args.tensors, elements, value) for value in (0.0, 1.0, 2.0)
    )

    began = time.perf_counter()
    scheme = SCHEMES[args.scheme]()
    scheme.init_on_sender(
        model_id=MODEL,
        weights=initial,
        devices=[torch.device("cpu")] * args.workers,
        num_workers=args.workers,
        ctx=context,
    )
    first = time.perf_counter() - began

    workers = [Worker(context, scheme, index, args.tensors, elements) for index in range(args.workers)]
    with Guard(workers, args.deadline) as guard:
        for worker in workers:
            worker.hear("ready")
        began = time.perf_counter()
        for worker in workers:
            worker.tell("connect")
        scheme.connect()
        for worker in workers:
            worker.hear("connected")
        scheme.send(weights=source)
        first += time.perf_counter() - began
        check(workers, 1.0)
        say({"first_s": first})
        serve(scheme, workers, source, scratch, guard)
        guard.arm()
        scheme.shutdown()

    for worker in workers:
        worker.leave(args.deadline)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheme", choices=SCHEMES, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--deadline", type=float, default=120.0)
    args = parser.parse_args()
    if min(args.bytes, args.tensors, args.workers) < 1:
        parser.error("--bytes, --tensors and --workers are at least 1")
    if args.bytes % (args.tensors * DTYPE.itemsize):
        parser.error(f"--bytes is a multiple of {DTYPE.itemsize} times --tensors")
    return args


def tensors(count, elements, value):
    """Weights with every page touched."""
    return TensorDict(
        {f"layer_{index}": torch.full((elements,), value, dtype=DTYPE) for index in range(count)}
    )


def serve(scheme, workers, source, scratch, guard):
    """Answers requests until the last."""
    done = 0
    while True:
        guard.rest()
        request = sys.stdin.readline().split()
        guard.arm()
        if not request or request == ["quit"]:
            return
        if request[0] != "round" or len(request) > 2:
            raise ValueError(f"{request}: expected `round`, `round N` or `quit`")
        count = int(request[1]) if len(request) == 2 else 1
        sends = []
        for _ in range(count):
            done += 1
            # Whole numbers up to 256 are exact in bfloat16, and neighbours differ.
            value = float(2 + done % 250)
            for tensor in source.values():
                tensor.fill_(value)
            began = time.perf_counter()
            scheme.send(weights=source)
            sends.append(time.perf_counter() - began)
        check(workers, value)
        say({"sends_s": sends, "memcpys_s": [memcpy(source, scratch) for _ in range(count)]})


def memcpy(source, scratch):
    """Seconds that one thread takes to copy the weights once."""
    pairs = [(scratch[name], source[name]) for name in source.keys()]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    began = time.perf_counter()
    for to, of in pairs:
        to.copy_(of)
    took = time.perf_counter() - began
    torch.set_num_threads(threads)
    return took


def check(workers, value):
    for worker in workers:
        worker.tell(value)
    for worker in workers:
        worker.hear("arrived")


def say(answer):
    print(json.dumps(answer), flush=True)


class Worker:
    """A worker process, as the sender sees it."""

    def __init__(self, context, scheme, index, count, elements):
        self.index = index
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=work, args=(index, scheme, count, elements, theirs), daemon=True
        )
        self.process.start()
        theirs.close()

    def tell(self, message):
        self.pipe.send(message)

    def hear(self, expected):
        got = self.pipe.recv()
        if got != expected:
            raise RuntimeError(f"worker {self.index}: expected {expected!r}, got {got!r}")

    def leave(self, deadline):
        """Ends the process, by force if it does not end itself."""
        with contextlib.suppress(OSError):
            self.tell(None)
        self.process.join(deadline)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            sys.exit(3)


def work(index, scheme, count, elements, pipe):
    """What a worker process does: TorchRL's own thread receives, this one looks at the result."""
    # Standard output belongs to the sender's answers.
    os.dup2(2, 1)
    torch.set_num_threads(1)
    model = Model(count, elements)
    scheme.init_on_receiver(model_id=MODEL, model=model, worker_idx=index)
    pipe.send("ready")
    try:
        while (message := pipe.recv()) is not None:
            if message == "connect":
                scheme.connect(worker_idx=index)
                pipe.send("connected")
            else:
                pipe.send(model.difference(message) or "arrived")
    except EOFError:
        # The sender is gone without a word, and TorchRL's threads would wait for it.
        os._exit(1)


class Model(nn.Module):
    def __init__(self, count, elements):
        super().__init__()
        for index in range(count):
            weights = torch.empty(elements, dtype=DTYPE)
            self.register_parameter(f"layer_{index}", nn.Parameter(weights, requires_grad=False))

    def difference(self, expected):
        """The first place looked at whose value is not the expected one, in words."""
        for name, weights in self.named_parameters():
            for at in (0, weights.numel() // 2, weights.numel() - 1):
                if (got := weights[at].item()) != expected:
                    return f"{name}[{at}] is {got}, expected {expected}"
        return None


class Guard:
    """Ends all processes when a worker dies or an armed deadline passes: TorchRL would wait on."""

    def __init__(self, workers, deadline):
        self.workers = workers
        self.deadline = deadline
        self.orders, self.inbox = mp.Pipe()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self):
        self.thread.start()
        self.arm()
        return self

    def __exit__(self, kind, error, trace):
        if error is not None:
            # An answer that is wrong leaves workers behind that may never end by themselves.
            sys.excepthook(kind, error, trace)
            self.end("the sender failed")
        self.orders.close()
        self.thread.join()

    def arm(self):
        self.orders.send(True)

    def rest(self):
        self.orders.send(False)

    def watch(self):
        ends = {worker.process.sentinel: worker for worker in self.workers}
        until = None
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            ready = connection.wait([self.inbox, *ends], timeout=left)
            if self.inbox in ready:
                try:
                    armed = self.inbox.recv()
                except EOFError:
                    return
                until = time.monotonic() + self.deadline if armed else None
            elif ready:
                self.end(f"worker {ends[ready[0]].index} died")
            else:
                self.end(f"nothing came back within {self.deadline:g} s")

    def end(self, why):
        print(f"torchrl_local.py: {why}; killing the workers", file=sys.stderr, flush=True)
        for worker in self.workers:
            worker.process.kill()
        os._exit(3)


if __name__ == "__main__":
    main()
