"""TorchRL's schemes for one machine, measured: a sender and worker processes.

    python torchrl_local.py --scheme shared-mem --bytes 536870912 --tensors 64 --workers 4

One process is the sender, spawned ones are the workers. A round is one `scheme.send(weights=...)`,
timed from its call to its return, which is when every worker has said "updated". After the last
send of a request the workers look whether the values have arrived; that is not timed.

What travels: `--tensors` bfloat16 tensors of equal size, `--bytes` in all. The source is memory
that no worker's model is bound to, and it is written again before each send, outside the timed
part. It is the same memory in every round, which suits TorchRL: multi-process moves a source to
shared memory when it sees it first and from then on passes descriptors only. The sender copies
with as many threads as torch takes by default, a worker with one, which is what TorchRL's
collectors give theirs; the memcpy next to it uses one.

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
arrived, the workers are killed, stderr says why, and the exit status is 3. The program that starts
this takes it along when it dies, and it its workers.
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "net"))

from common import (
    Answers,
    Guard,
    Worker,
    die_with_parent,
    difference,
    memcpy,
    requests,
    tensors,
    value_of,
)

# Before the imports that take seconds; each worker imports this file too.
die_with_parent()

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
    answers = Answers()
    context = mp.get_context("spawn")
    elements = args.bytes // DTYPE.itemsize // args.tensors
    # The buffer the workers are bound to, and the weights to send, in memory of their own.
    initial, source, scratch = (
        weights(args.tensors, elements, value) for value in (0.0, value_of(0), 2.0)
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

    workers = [
        Worker(index, work, (index, scheme, args.tensors, elements), context)
        for index in range(args.workers)
    ]
    with Guard(args.deadline) as guard:
        guard.watch_over(worker.process for worker in workers)
        expect_from_all(workers, "ready")
        began = time.perf_counter()
        send_to_all(workers, "connect")
        scheme.connect()
        expect_from_all(workers, "connected")
        scheme.send(weights=source)
        first += time.perf_counter() - began
        check(workers, value_of(0))
        answers.say({"first_s": first})
        serve(scheme, workers, (source, scratch), guard, answers)
        guard.arm()
        scheme.shutdown()
        guard.watch_over([])
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


def weights(count, elements, value):
    """Weights of this value, by name."""
    named = enumerate(tensors((count, elements), value))
    return TensorDict({f"layer_{index}": tensor for index, tensor in named})


def serve(scheme, workers, memory, guard, answers):
    """Answers requests until the last."""
    source, scratch = memory
    done = 0
    for count in requests(guard):
        sends = []
        for _ in range(count):
            done += 1
            for tensor in source.values():
                tensor.fill_(value_of(done))
            began = time.perf_counter()
            scheme.send(weights=source)
            sends.append(time.perf_counter() - began)
        check(workers, value_of(done))
        copies = [memcpy(scratch.values(), source.values()) for _ in range(count)]
        answers.say({"sends_s": sends, "memcpys_s": copies})


def check(workers, value):
    send_to_all(workers, value)
    expect_from_all(workers, "arrived")


def send_to_all(workers, message):
    for worker in workers:
        worker.pipe.send(message)


def expect_from_all(workers, expected):
    for worker in workers:
        worker.expect(expected)


def work(index, scheme, count, elements, pipe):
    """What a worker process does: TorchRL's own thread receives, this one looks at the result."""
    # Standard output belongs to the sender's answers.
    os.dup2(2, 1)
    torch.set_num_threads(1)
    model = Model(count, elements)
    scheme.init_on_receiver(model_id=MODEL, model=model, worker_idx=index)
    pipe.send("ready")
    try:
        while (message := pipe.recv()) != "leave":
            if message == "connect":
                scheme.connect(worker_idx=index)
                pipe.send("connected")
            else:
                got = list(model.parameters())
                pipe.send(difference(got, message) or "arrived")
    except EOFError:
        # The sender is gone without a word, and TorchRL's threads would wait for it.
        os._exit(1)


class Model(nn.Module):
    def __init__(self, count, elements):
        super().__init__()
        for index in range(count):
            weights = torch.empty(elements, dtype=DTYPE)
            self.register_parameter(f"layer_{index}", nn.Parameter(weights, requires_grad=False))


if __name__ == "__main__":
    main()
