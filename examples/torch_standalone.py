"""A trainer and its workers with plain torch: no framework, nothing left behind.

    python examples/torch_standalone.py --workers 2 --steps 20

The trainer fits a small network to a sine; each worker runs the newest weights it has
been sent, in its own process, and says with each prediction which version made it.
"""

import argparse
import math

import torch
from torch import multiprocessing as mp
from torch import nn

import weightsync


def network():
    return nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))


def work(info, number, results):
    torch.set_num_threads(1)
    model = network()
    with weightsync.Receiver(info, number, model=model) as receiver:
        receiver.connect()
        version = receiver.version
        while True:
            error = loss_of(model).item()
            results.put((number, version, error))
            try:
                # A safe point: the model changes inside this call and nowhere else.
                version = receiver.receive(timeout=30.0)
            except weightsync.SenderClosedError:
                return


def loss_of(model):
    x = torch.linspace(-math.pi, math.pi, 256).unsqueeze(1)
    return nn.functional.mse_loss(model(x), x.sin())


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--scheme", default="shared-mem")
    options = arguments.parse_args()

    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    context = mp.get_context("spawn")
    results = context.Queue()
    with weightsync.Sender(model, scheme=options.scheme) as sender:
        workers = [
            context.Process(target=work, args=(sender.init_info, number, results))
            for number in range(options.workers)
        ]
        for worker in workers:
            worker.start()
        sender.connect(workers=options.workers)
        for step in range(options.steps):
            for _ in range(20):
                optimizer.zero_grad()
                loss_of(model).backward()
                optimizer.step()
            report = sender.send()
            if step % 5 == 4:
                print(report)
        own = loss_of(model).item()
        last = sender.version
    newest = {}
    while len(newest) < options.workers:
        number, version, error = results.get(timeout=60.0)
        if version == last:
            newest[number] = error
    for worker in workers:
        worker.join()
    print(f"trainer: error {own:.6f} at v{last}")
    for number, error in sorted(newest.items()):
        print(f"worker {number}: error {error:.6f} at v{last}")
    assert all(error == own for error in newest.values()), "a worker runs other weights"


if __name__ == "__main__":
    main()
