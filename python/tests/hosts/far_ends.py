"""A trainer, and workers that follow it until they learn of its end. Each line is JSON."""

import json
import os
import sys

import torch
import weightsync
from patience import patience

LONG = patience(30)
NUMEL = 1 << 18


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


def train(scheme: str) -> None:
    """Sends a version for each line of its input."""
    weights = {"w": torch.zeros(NUMEL)}
    with weightsync.Sender(weights, scheme=scheme) as sender:
        say(info=sender.init_info.to_json(), pid=os.getpid())
        sender.connect(workers=2, timeout=LONG)
        for value, _ in enumerate(sys.stdin, 1):
            weights["w"].fill_(value)
            report = sender.send(timeout=LONG)
            say(lines=[[line.worker, line.outcome] for line in report.workers])


def work(info: str, number: int) -> None:
    receiver = weightsync.Receiver(weightsync.InitInfo.from_json(info), number)
    receiver.connect(timeout=LONG)
    seen = 0.0
    while True:
        try:
            snapshot = receiver.receive(LONG)
        except weightsync.PeerError as error:
            return say(end=str(error))
        value = snapshot["w"]
        assert value.min() == value.max() >= seen, (seen, value.min(), value.max())
        seen = float(value.min())
        say(seen=seen)


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(sys.argv[2])
    else:
        work(sys.argv[2], int(sys.argv[3]))
