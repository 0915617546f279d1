"""A trainer and workers that are Ray actors."""

import os
import signal

import torch

import weightsync
import weightsync.ray


def net(value, size=64):
    module = torch.nn.Linear(size, size)
    fill(module, value)
    return module


def fill(module, value):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


class Trainer:
    """It sends its newest step again after a restart."""

    def __init__(self, first=1.0, **options):
        self.model = net(first)
        self.sender = weightsync.ray.Sender(self.model, **options)

    def send(self, value):
        fill(self.model, value)
        report = self.sender.send()
        return report.version, [(one.worker, one.outcome) for one in report.workers]

    def expect(self, workers):
        """Waits until these have joined."""
        self.sender.wait_for(workers)

    def actors(self):
        return {number: str(one) for number, one in self.sender.actors.items()}

    def info(self):
        return self.sender.init_info

    def pid(self):
        return os.getpid()

    def end(self):
        self.sender.shutdown()


class Worker:
    def __init__(self, info=None, **options):
        self.model = net(0.0)
        self.receiver = weightsync.ray.Receiver(info, model=self.model, **options)
        self.first = self.value()

    def value(self):
        # The model may change at any other time.
        with self.receiver.frozen():
            values = {value.item() for one in self.model.parameters() for value in one.aminmax()}
        assert len(values) == 1, values
        return values.pop()

    def state(self):
        return self.receiver.worker, self.receiver.version, self.first, self.value()

    def until(self, value):
        """Waits until the model has this value, and returns how it was found first."""
        while self.value() != value:
            self.receiver.wait()
        return self.receiver.version

    def train(self, value):
        """Declared safe points: the model is this worker's own between them."""
        before = self.value()
        while self.receiver.safe_point() is None:
            assert self.value() == before
            if self.receiver.wait(timeout=0.01):
                break
        return self.value()

    def pid(self):
        return os.getpid()

    def end(self):
        self.receiver.shutdown()


def kill(cluster, actor):
    """Ends an actor's process as the system does where memory is short."""
    os.kill(cluster.get(actor.pid.remote()), signal.SIGKILL)
