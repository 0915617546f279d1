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
    with weightsync.ModelReceiver(info, number, model=model) as receiver:
        receiver.connect()
        try:
            while True:
                # A safe point: the model changes inside these calls and nowhere else.
                if ":pull" in info.scheme:
                    receiver.pull(at_least=receiver.version + 1, timeout=30.0)
                else:
                    receiver.receive(timeout=30.0)
        except weightsync.SenderClosedError:
            results.put((number, receiver.version, loss_of(model).item()))


def loss_of(model):
    x = torch.linspace(-math.pi, math.pi, 256).unsqueeze(1)
    return nn.functional.mse_loss(model(x), x.sin())


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    arguments.add_argument("--workers", type=int, default=2)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--scheme", default="shared-mem")
    options = arguments.parse_args()
    if options.scheme == "none":
        arguments.error("the scheme none carries nothing, so workers would wait for ever")

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
        # One that fails before it has joined ends the wait.
        sender.connect(workers=options.workers, processes=workers)
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
    for worker in workers:
        worker.join()
    assert all(worker.exitcode == 0 for worker in workers), "a worker has failed"
    print(f"trainer: error {own:.6f} at v{last}")
    for number, version, error in sorted(results.get(timeout=60.0) for _ in workers):
        print(f"worker {number}: error {error:.6f} at v{version}")
        # One that asks for versions may have asked for the last too late.
        assert version < last or error == own, "a worker runs other weights"


if __name__ == "__main__":
    main()
