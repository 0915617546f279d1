"""What people use today to bring weights to other processes over TCP, measured.

    python bench/peers/net --scheme gloo-send --bytes 1073741824 --tensors 64 --workers 1

One process has the weights, others are the workers, and everything goes over 127.0.0.1. A send is
timed from its call until every worker has said that all bytes are in memory of its own. Before
each send the source is written again, outside the timed part; after the last send of a request the
workers look whether the values have arrived, which is not timed either.

    scheme           of                     how
    gloo-send        torch.distributed      a send for each tensor and worker, received in place
    gloo-broadcast   torch.distributed      a broadcast for each tensor, received in place
    zmq-push         pyzmq                  a message for each worker, PUSH to PULL
    zmq-pub          pyzmq                  one message, PUB to SUB
    mooncake         Mooncake's engine      a write for each tensor and worker into its memory, tcp
    nixl             NIXL, over UCX         the same, UCX confined to tcp
    ray              Ray's object store     one put, each worker gets it and copies it

Each is used as it installs, with its documented defaults; what a script sets nevertheless, and
why, is said at the head of each. The versions are those of python/requirements-net.txt.

What travels: `--tensors` bfloat16 tensors of equal size, `--bytes` in all. The memcpy next to it is
one of the same bytes with one thread.

Spoken over stdin and stdout, a line each:

    <- {"first_s": 1.5}              connect and the first send took so long (the start of the
                                     processes left out)
    -> round 3                       do three sends (`round` alone: one)
    <- {"sends_s": [...], "memcpys_s": [...]}
    -> quit                          or the end of stdin

With `--rounds N` stdin is left alone: after the first, N sends follow, each with a line, and a
summary:

    <- {"first_s": 1.5}
    <- {"sends_s": [0.4], "memcpys_s": [0.1]}
    <- {"scheme": "gloo-send", "workers": 1, "bytes": ..., "median_s": 0.4, "bytes_per_s": ...}

Everything is bounded by `--deadline` seconds. When it passes, a worker dies, or a value has not
arrived, the workers are killed, stderr says why, and the exit status is 3. The program that starts
this takes it along when it dies, and it its workers.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time

from common import Answers, Guard, Method, Payload, die_with_parent, requests, value_of

#: The module and the class of each.
SCHEMES = {
    "gloo-send": ("of_gloo", "Send"),
    "gloo-broadcast": ("of_gloo", "Broadcast"),
    "zmq-push": ("of_zmq", "Push"),
    "zmq-pub": ("of_zmq", "Publish"),
    "mooncake": ("of_mooncake", "Mooncake"),
    "nixl": ("of_nixl", "Nixl"),
    "ray": ("of_ray", "Ray"),
}


def main() -> None:
    die_with_parent()
    args = arguments()
    answers = Answers()
    with Guard(args.deadline) as guard:
        payload = Payload(args.bytes, args.tensors)
        module, name = SCHEMES[args.scheme]
        start = getattr(importlib.import_module(module), name)
        method = start(payload, args.workers, args.deadline)
        bench = Bench(payload, method)
        answers.say({"first_s": bench.first()})
        if args.rounds is None:
            serve(bench, guard, answers)
        else:
            rounds(bench, guard, answers, args)
        guard.arm()
        method.close()
    sys.stderr.flush()
    # Threads of other packages do not all end on their own.
    os._exit(0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scheme", choices=SCHEMES, required=True)
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--deadline", type=float, default=120.0)
    parser.add_argument("--rounds", type=int)
    args = parser.parse_args()
    if min(args.bytes, args.tensors, args.workers, args.rounds or 1) < 1:
        parser.error("--bytes, --tensors, --workers and --rounds are at least 1")
    if args.bytes % (args.tensors * Payload.ITEM):
        parser.error(f"--bytes is a multiple of {Payload.ITEM} times --tensors")
    return args


class Bench:
    """Sends, each of other values than the last."""

    def __init__(self, payload: Payload, method: Method) -> None:
        self.payload = payload
        self.method = method
        self.done = 0

    def first(self) -> float:
        """Connects and sends, in seconds."""
        began = time.perf_counter()
        self.method.connect()
        took = time.perf_counter() - began
        return took + self.sends(1)[0]

    def sends(self, count: int) -> list[float]:
        """So many sends, in seconds each."""
        self.method.expect(count)
        took = []
        for _ in range(count):
            self.done += 1
            self.payload.write(value_of(self.done))
            began = time.perf_counter()
            self.method.send()
            took.append(time.perf_counter() - began)
        self.method.check(value_of(self.done))
        return took

    def memcpys(self, count: int) -> list[float]:
        """So many copies of the same bytes, in seconds each."""
        return [self.payload.memcpy() for _ in range(count)]


def serve(bench: Bench, guard: Guard, answers: Answers) -> None:
    """Answers requests until the last."""
    for count in requests(guard):
        sends = bench.sends(count)
        answers.say({"sends_s": sends, "memcpys_s": bench.memcpys(count)})


def rounds(bench: Bench, guard: Guard, answers: Answers, args: argparse.Namespace) -> None:
    """As many sends as were asked for at the start."""
    took: list[float] = []
    for _ in range(args.rounds):
        guard.arm()
        took += bench.sends(1)
        answers.say({"sends_s": took[-1:], "memcpys_s": bench.memcpys(1)})
    median = statistics.median(took)
    answers.say(
        {
            "scheme": args.scheme,
            "workers": args.workers,
            "bytes": args.bytes,
            "median_s": median,
            "bytes_per_s": args.bytes / median,
        }
    )


if __name__ == "__main__":
    main()
