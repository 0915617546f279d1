"""Threads that use a worker's parameters in torch's own ways while versions are loaded into them.

In processes of their own: what waits for itself there keeps the interpreter's lock.
"""

import functools
import hashlib
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import weightsync
from ends import LONG, all_ended, beside
from torch import nn
from weightsync._targets.memory import _let_others_run, _processor_time

LAYERS = 24
SENDS = 60


def deep(value=0.0):
    """Weights that are bound, biases that are copied."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(LAYERS)))
    return fill(model, value)


def fill(model, value):
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(value)
    return model


def with_gradients(model, receiver):
    for parameter in model.parameters():
        parameter.view(-1)[0]


def without_gradients(model, receiver):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[0].item()


def by_edges(model, receiver):
    for parameter in model.parameters():
        torch.autograd.graph.get_gradient_edge(parameter)


def with_hooks(model, receiver):
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None).remove()
    # Up to torch 2.6 these calls release the interpreter's lock for less time than a waiting
    # thread needs to wake. Without a pause that thread would need luck to get it.
    time.sleep(0.0005)


def with_python_alone(model, receiver):
    for _ in range(10_000):
        pass


def by_polling(model, receiver):
    pass


def with_an_optimizer(model, receiver):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()


def by_functional_call(model, receiver):
    with receiver.frozen():
        own = {name: one.detach().clone() for name, one in model.named_parameters()}
        torch.func.functional_call(model, own, torch.ones(1, 128))


def by_forwards_of_parts(model, receiver):
    given = torch.ones(1, 128)
    for part in model:
        part(given)


compiled = functools.cache(functools.partial(torch.compile, backend="eager"))


def by_compiled_forward(model, receiver):
    compiled(model)(torch.ones(1, 128))


class Reader:
    """A worker whose main thread uses its model while the background receiver loads into it."""

    def __init__(self, info, mode):
        self.model = deep()
        self.receiver = weightsync.ModelReceiver(info, 0, model=self.model, mode=mode)

    def connect(self):
        self.receiver.connect(timeout=LONG)

    def use(self, use, last):
        """Until that version is here; whether all of it is."""
        background = self.receiver.start_background()
        while background.version < last:
            use(self.model, self.receiver)
        with self.receiver.frozen():
            return all((one == last).all().item() for one in self.model.parameters())

    def fork_beside_readers(self, last):
        """Memory of its own before each fork, which another thread reads."""
        over = False

        def read():
            while not over:
                with_gradients(self.model, self.receiver)

        with beside(read):
            try:
                while self.receiver.version < last:
                    self.receiver.receive(LONG)
                    if (child := os.fork()) == 0:
                        os._exit(0)
                    os.waitpid(child, 0)
            finally:
                over = True
        return True


def _sent_to(worker, sender, trainer, *order, sends=SENDS):
    worker.order("connect")
    sender.connect(1, timeout=LONG)
    worker.answer()
    worker.order(*order, sends)
    for value in range(2, sends + 1):
        report = sender.send(fill(trainer, value), timeout=LONG)
        assert report.all_applied, report
    return worker.answer()


USES = [
    with_gradients,
    without_gradients,
    by_edges,
    with_hooks,
    with_python_alone,
    by_polling,
    by_functional_call,
    by_forwards_of_parts,
    by_compiled_forward,
]


@pytest.mark.parametrize("scheme", ["shared-mem", "multi-process"])
@pytest.mark.parametrize("use", USES, ids=lambda one: one.__name__)
def test_a_worker_uses_parameters_while_they_are_bound(actor, use, scheme):
    trainer = deep(1.0)
    sender = weightsync.Sender(trainer, scheme=scheme)
    with all_ended(sender):
        worker = actor(Reader, sender.init_info, "bind")
        assert _sent_to(worker, sender, trainer, "use", use), "not all of the last version"


@pytest.mark.parametrize("mode", ["bind", "copy"])
def test_optimizer_steps_while_versions_arrive(actor, mode):
    trainer = deep(1.0)
    sender = weightsync.Sender(trainer)
    with all_ended(sender):
        worker = actor(Reader, sender.init_info, mode)
        _sent_to(worker, sender, trainer, "use", with_an_optimizer)


def test_worker_forks_while_a_thread_reads_parameters(actor):
    trainer = deep(1.0)
    sender = weightsync.Sender(trainer)
    with all_ended(sender):
        worker = actor(Reader, sender.init_info, "bind")
        assert _sent_to(worker, sender, trainer, "fork_beside_readers", sends=15)


def test_old_memory_is_kept_until_preempted_threads_have_run():
    """A thread that the system has stopped may be about to use it."""
    processor = min(os.sched_getaffinity(0))
    own, over, started = [], threading.Event(), threading.Event()

    def work():
        own.append(threading.get_native_id())
        os.sched_setaffinity(0, {processor})
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        started.set()
        # This runs without the interpreter's lock, as torch's operators do.
        while not over.is_set():
            hashlib.sha256(bytes(1 << 20))

    busy = f"import os; os.sched_setaffinity(0, {{{processor}}}); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE) as other, beside(work):
        try:
            other.stdout.readline()
            assert started.wait(LONG), "it did not become a thread that the system puts last"
            for _ in range(3):
                since = _processor_time(own[0])
                _let_others_run(longest=LONG)
                assert _processor_time(own[0]) > since, "it has not run"
        finally:
            over.set()
            other.kill()


def test_old_memory_is_not_kept_for_threads_that_sleep():
    over = threading.Event()
    begun = time.monotonic()
    with beside(over.wait, over.wait):
        _let_others_run(longest=LONG)
        over.set()
    assert time.monotonic() - begun < LONG
