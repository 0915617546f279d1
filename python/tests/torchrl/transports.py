"""Transports by TorchRL's protocol: named ones that stand alone, and one of a program's own."""

import gc
import multiprocessing
import queue
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch
import weightsync
from crew import Probe, hurry, refused
from patience import patience
from tiny import weights_of
from torch import multiprocessing as mp
from torchrl._utils import logger as torchrl_logger
from torchrl.weight_update import WeightStrategy

SOON = patience(30)
PROMPT = 10.0


def queued_worker(transport, pipe):
    """Receives until told to stop, and says what came of each call."""
    model = Probe()
    strategy = WeightStrategy()
    first = transport.setup_connection_and_weights_on_receiver(
        worker_idx=0, model=model, strategy=strategy
    )
    pipe.send((first is not None, model()))
    for timeout in iter(pipe.recv, None):
        got = transport.receive_weights(timeout=timeout, model=model, strategy=strategy)
        pipe.send((got is not None, model()))


def queue_transport(module, start, asynchronous):
    """`MPTransport`, constructed as TorchRL's: a queue, and weights one after the other."""
    context = mp.get_context(start)
    waiting = context.Queue()
    transport = module.MPTransport(weight_queue=waiting, ack_queue=context.Queue())
    here, there = context.Pipe()
    worker = context.Process(target=queued_worker, args=(transport, there), daemon=True)
    worker.start()
    learner = Probe()
    send = transport.send_weights_async if asynchronous else transport.send_weights
    with hurry("the first weights", SOON):
        send(weights_of(learner.filled(1.0)))
        transport.wait_ack(SOON)
        assert here.poll(SOON) and here.recv() == (True, (1.0, 1.0))
    here.send(0.05)
    assert here.poll(SOON) and here.recv() == (False, (1.0, 1.0)), "a timeout is None"
    for value in (2.0, 3.0):
        here.send(SOON)
        with hurry("weights", PROMPT):
            send(weights_of(learner.filled(value)))
            if asynchronous:
                assert transport.wait_ack(PROMPT).all_applied
        assert here.poll(SOON) and here.recv() == (True, (value, value))
    here.send(None)
    transport.shutdown()
    worker.join(SOON)
    assert worker.exitcode == 0


def shared_worker(transport, index, pipe):
    model = Probe()
    strategy = WeightStrategy()
    transport.setup_connection_and_weights_on_receiver(
        worker_idx=index, model=model, strategy=strategy
    )
    pipe.send(model())
    for timeout in iter(pipe.recv, None):
        transport.receive_weights(timeout=timeout, model=model, strategy=strategy)
        pipe.send(model())


def shared_transport(module, per_worker):
    """`SharedMemTransport`: weights by worker, sent to all, to some, or other ones to each."""
    context = mp.get_context("spawn")
    queues = {index: context.Queue() for index in range(2)}
    first = weights_of(Probe(1.0))
    firsts = {0: first, 1: weights_of(Probe(2.0)) if per_worker else first}
    transport = module.SharedMemTransport()
    transport.register_weights(firsts, queues, per_worker=per_worker)
    assert len(transport.unique_weights) == 1 + per_worker
    pipes, workers = [], []
    for index in queues:
        here, there = context.Pipe()
        args = (transport, index, there)
        workers.append(context.Process(target=shared_worker, args=args, daemon=True))
        workers[-1].start()
        pipes.append(here)

    def values(timeout=None):
        if timeout is not None:
            for pipe in pipes:
                pipe.send(timeout)
        return [pipe.recv()[0] if pipe.poll(SOON) else None for pipe in pipes]

    transport.setup_connection_and_weights_on_sender()
    started = values()
    # Of weights of one's own each, the first version may come before a worker's own.
    assert started == [1.0, 1.0] if not per_worker else started[0] == 1.0
    if per_worker:
        while values(0.0) != [1.0, 2.0]:
            pass
    for index in queues:
        pipes[index].send(SOON)
    with hurry("one worker's weights", PROMPT):
        assert transport.send_weights(weights_of(Probe(5.0)), worker_ids=[0]).worker(0)
    pipes[0].poll(SOON)
    assert pipes[0].recv()[0] == 5.0
    with hurry("other weights for each", PROMPT):
        pipes[0].send(SOON)
        report = transport.send_weights({0: weights_of(Probe(6.0)), 1: weights_of(Probe(7.0))})
    assert report.all_applied, report
    assert values() == [6.0, 7.0]
    with refused(ValueError, "no worker 7"):
        transport.send_weights({7: first})
    for pipe in pipes:
        pipe.send(None)
    transport.shutdown()
    for worker in workers:
        worker.join(SOON)


def shared_transport_after_a_refusal(module):
    """`SharedMemTransport`: once a first call has failed, the next one begins again."""
    queues = {index: queue.Queue() for index in range(2)}
    transport = module.SharedMemTransport()
    transport.register_weights({0: weights_of(Probe(1.0)), 1: {"other": torch.ones(3)}}, queues)
    for _ in range(2):
        with refused(weightsync.WrongWeightsError, "other"):
            transport.setup_connection_and_weights_on_sender()
        assert all(one.empty() for one in queues.values())
    transport.register_weights({index: weights_of(Probe(index + 1.0)) for index in queues}, queues)
    transport.setup_connection_and_weights_on_sender()
    for index in queues:
        receiving, model = module.SharedMemTransport(), Probe()
        receiving.register_weights({}, queues)
        with hurry("the first weights", SOON):
            receiving.setup_connection_and_weights_on_receiver(worker_idx=index, model=model)
            # The first version may come before a worker's own.
            while model() != (index + 1.0, index + 1.0):
                receiving.receive_weights(timeout=SOON, model=model)
        receiving.shutdown()
    transport.shutdown()


def shared_transport_without_queues(module):
    """`SharedMemTransport` with no worker to tell: it writes into the weights that were registered."""
    transport = module.SharedMemTransport()
    with refused(RuntimeError, "register_weights"):
        transport.send_weights(weights_of(Probe(1.0)))
    shared, said = weights_of(Probe(1.0)), []
    transport.register_weights({0: shared, 1: shared}, {})
    transport.setup_connection_and_weights_on_sender()
    with mock.patch.object(torchrl_logger, "debug", lambda *words: said.append(words)):
        assert transport.send_weights(weights_of(Probe(2.0))) is None
        # Dotted names are the same weights.
        transport.send_weights(weights_of(Probe(3.0)).flatten_keys(".").to_dict())
    assert value_of(shared) == 3.0
    numbers = Probe().state_dict().values()
    count, size = sum(one.numel() for one in numbers), sum(one.nbytes for one in numbers)
    assert {(words[0][:14], words[3], words[4]) for words in said} == {("Synced weights", count, size)}
    model, strategy = Probe(), WeightStrategy()
    assert transport.receive_weights(weights=shared, model=model, strategy=strategy) is shared
    assert model() == (3.0, 3.0)
    assert transport.receive_weights(model=model, strategy=strategy) is None
    each = module.SharedMemTransport()
    own = {worker: weights_of(Probe(1.0)) for worker in range(2)}
    each.register_weights(own, {}, per_worker=True)
    each.send_weights({0: weights_of(Probe(4.0)), 1: weights_of(Probe(5.0))})
    each.send_weights(weights_of(Probe(6.0)), worker_ids=[1])
    assert [value_of(weights) for weights in each.unique_weights] == [4.0, 6.0]
    with refused(ValueError, "7"):
        each.send_weights({7: weights_of(Probe(1.0))})


def value_of(weights):
    """The value of all elements, as a model has them."""
    model = Probe()
    WeightStrategy().apply_weights(model, weights)
    first, second = model()
    assert first == second
    return first


class PipeTransport:
    """A program's own: two methods, and pickled numbers through a pipe."""

    def __init__(self, pipe):
        self.pipe = pipe

    def send_weights(self, weights):
        self.pipe.send({name: value.tolist() for name, value in weights.flatten_keys().items()})
        said = self.pipe.recv() if self.pipe.poll(PROMPT) else None
        assert said == "applied", said

    def receive_weights(self, timeout=None, *, weights=None, model=None, strategy=None):
        if not self.pipe.poll(timeout):
            return None
        received = {name: torch.tensor(value) for name, value in self.pipe.recv().items()}
        strategy.apply_weights(model, received)
        self.pipe.send("applied")
        return received

    def setup_connection_and_weights_on_sender(self):
        pass

    def setup_connection_and_weights_on_receiver(self, *, worker_idx, **_):
        return None


def scheme_over(module):
    class PipeScheme(module.WeightSyncScheme):
        def __init__(self, pipes):
            super().__init__("tensordict")
            self.pipes = pipes

        def create_transport(self, *, pipe):
            return PipeTransport(pipe)

        def _init_on_sender_impl(self, *, model_id, num_workers):
            self.model_id = model_id
            for index in range(num_workers):
                self._register_worker_sender(worker_idx=index, pipe=self.pipes[index])

        def _init_on_receiver_impl(self, *, model_id, context=None, model, worker_idx):
            self.model_id, self.model, self.worker_idx = model_id, model, worker_idx
            self._register_transport_receiver(pipe=self.pipes[worker_idx])

    return PipeScheme


def own_transport(module):
    """A scheme of a program's own over its own transport, in the lifecycle of the others."""
    here, there = multiprocessing.Pipe()

    def work():
        scheme, model = scheme_over(module)([there]), Probe()
        scheme.init_on_receiver(model_id="policy", model=model, worker_idx=0)
        scheme.connect(worker_idx=0)
        assert scheme.receive(timeout=0.0) is None
        there.send("nothing came")
        while model()[0] != 2.0:
            scheme.receive(timeout=SOON)

    worker = mp.get_context("fork").Process(target=work, daemon=True)
    worker.start()
    scheme = scheme_over(module)([here])
    with refused(RuntimeError, "nitialized"):
        scheme.send(weights_of(Probe()))
    scheme.init_on_sender(model_id="policy", num_workers=1)
    scheme.connect()
    assert here.poll(SOON) and here.recv() == "nothing came"
    learner = Probe()
    for value in (1.0, 2.0):
        scheme.send(weights_of(learner.filled(value)))
    with refused(ValueError, "3"):
        scheme.send(weights_of(learner), worker_ids=[3])
    worker.join(SOON)
    assert worker.exitcode == 0


def store_transport(module):
    """`DistributedTransport`, constructed as TorchRL's: a store brings a worker the init info."""
    store = torch.distributed.HashStore()
    sending = module.DistributedTransport(store=store, rank=2)
    receiving = module.DistributedTransport(store=store, rank=2)
    model, strategy = Probe(), WeightStrategy()
    assert receiving.receive_weights(timeout=0.01, model=model, strategy=strategy) is None
    with hurry("weights", PROMPT), ThreadPoolExecutor() as threads:
        sending.send_weights(weights_of(Probe(1.0)))
        joined = threads.submit(
            receiving.setup_connection_and_weights_on_receiver, model=model, strategy=strategy
        )
        sending.wait_ack()
        assert joined.result() is not None and model() == (1.0, 1.0)
        for value in (2.0, 3.0):
            received = threads.submit(receiving.receive_weights, model=model, strategy=strategy)
            assert sending.send_weights(weights_of(Probe(value))).all_applied
            assert received.result() is not None and model() == (value, value)
    receiving.shutdown()
    sending.shutdown()
    first = module.DistributedTransport(store=store, rank=3)
    second = module.DistributedTransport(store=store, rank=3)
    with hurry("initial weights", PROMPT):
        first.send_initial_weights(weights_of(Probe(4.0)))
        assert value_of(second.receive_initial_weights()) == 4.0
    second.shutdown()
    first.shutdown()


def store_transports_of_two_models(module):
    """A rank of a store is one transport's until that one is shut down or dropped."""
    store = torch.distributed.HashStore()

    def sending():
        return module.DistributedTransport(store=store, rank=2)

    def received():
        """What a new worker's transport receives."""
        receiving, model = module.DistributedTransport(store=store, rank=2), Probe()
        receiving.setup_connection_and_weights_on_receiver(model=model)
        receiving.shutdown()
        return model()

    first, second = sending(), sending()
    with hurry("weights", PROMPT), ThreadPoolExecutor() as threads:
        first.send_weights(weights_of(Probe(1.0)))
        for _ in range(2):
            with refused(weightsync.SettingError, "rank 2 has another transport"):
                second.send_weights(weights_of(Probe(2.0)))
        assert threads.submit(received).result() == (1.0, 1.0)
        first.shutdown()
        second.send_weights(weights_of(Probe(2.0)))
        assert threads.submit(received).result() == (2.0, 2.0)
        del second
        gc.collect()
        third = sending()
        third.send_weights(weights_of(Probe(3.0)))
        assert threads.submit(received).result() == (3.0, 3.0)
    third.shutdown()
