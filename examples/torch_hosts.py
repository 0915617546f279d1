"""A trainer and workers that are started separately, as on several hosts.

    python examples/torch_hosts.py trainer --workers 2 join.json
    python examples/torch_hosts.py worker --number 0 join.json     # on each other host
    python examples/torch_hosts.py worker --number 1 join.json

On one host that is all. Between hosts the trainer listens at an address of its own
(`--scheme distributed:listen=0.0.0.0:7070`, or `rpc:initial=connect,listen=0.0.0.0:7070`),
every host has the same WEIGHTSYNC_TOKEN_FILE and its certificate (WEIGHTSYNC_TLS_DIR), and
join.json is copied to the others. It holds what lets a worker in: keep it as you keep the
token.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn

import weightsync


def train(options):
    model = nn.Linear(4, 2)
    with weightsync.Sender(model, scheme=options.scheme) as sender:
        written = options.info.with_suffix(".part")
        written.touch(mode=0o600)
        written.write_text(sender.init_info.to_json())
        written.rename(options.info)
        sender.connect(workers=options.workers)
        for step in range(1, options.steps + 1):
            with torch.no_grad():
                model.bias.fill_(step)
            print(sender.send())


def work(options):
    if not options.info.exists():
        raise SystemExit(
            f"{options.info} is not there: start the trainer, which writes it, then this worker; "
            "on another host, copy it there first"
        )
    info = weightsync.InitInfo.from_json(options.info.read_text())
    model = nn.Linear(4, 2)
    with weightsync.ModelReceiver(info, options.number, model=model) as receiver:
        receiver.connect()
        while True:
            try:
                version = receiver.receive(timeout=30.0)
            except weightsync.SenderClosedError:
                return
            host = os.uname().nodename
            print(f"worker {options.number} of {host} has v{version}: {model.bias[0]}")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    arguments.add_argument("role", choices=["trainer", "worker"])
    arguments.add_argument("info", type=Path)
    arguments.add_argument("--scheme", default="distributed")
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=3)
    arguments.add_argument("--number", type=int, default=0)
    options = arguments.parse_args()
    train(options) if options.role == "trainer" else work(options)


if __name__ == "__main__":
    main()
