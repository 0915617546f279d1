"""A trainer or an explorer as a process of its own, which does what its standard input says."""

import sys

from patience import patience
import torch

from weightsync import Synchronizer


def trainer(address, method, store, step):
    model = torch.nn.Linear(64, 64)
    fill(model, step)
    options = {"store": store} if method == "checkpoint" else {}
    sync = Synchronizer.connect(address)
    party = sync.trainer(model, method=method, style="fully_async", step=int(step), **options)
    print("joined", party.version, party.epoch, flush=True)
    for line in sys.stdin:
        step = int(line)
        fill(model, step)
        trained = party.sync(step, timeout=patience(30))
        explorers = ",".join(f"{one.name}={one.version}" for one in trained.explorers)
        print(trained.ended.replace(" ", "_"), trained.version, explorers or "-", flush=True)
    party.shutdown()
    sync.shutdown()


def explorer(address, name):
    model = torch.nn.Linear(64, 64)
    fill(model, -1)
    sync = Synchronizer.connect(address)
    party = sync.explorer(name, model, style="fully_async")
    print("joined", flush=True)
    for line in sys.stdin:
        synced = party.sync(int(line), timeout=patience(30))
        (value,) = {float(one) for tensor in model.parameters() for one in tensor.detach().aminmax()}
        print(synced.ended.replace(" ", "_"), synced.version, synced.step, value, flush=True)
    party.shutdown()
    sync.shutdown()


def fill(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(value))


if __name__ == "__main__":
    {"trainer": trainer, "explorer": explorer}[sys.argv[1]](*sys.argv[2:])
