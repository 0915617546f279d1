"""The scenarios of torch's RPC: workers of plain processes, and those of TorchRL's collectors."""

import contextlib
import gc
import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from concurrent import futures

from patience import patience
import torch
import weightsync
from crew import SOON, Probe, _die_with_parent, hurry, line, refused
from tiny import weights_of
from torch import multiprocessing as mp
from torch.distributed import rpc
from weightsync.torchrl import WeightStrategy
from weightsync.torchrl._group import Group
from weightsync.torchrl._torch_rpc import _join, answer_of

# A send to workers that are there. Only a fault lets it pass.
PROMPT = 10.0

# What a worker's process keeps, by number: its scheme and its model.
_kept = {}


@contextlib.contextmanager
def processes(workers):
    """This process and its workers, in one group of torch's RPC; their names and processes."""
    with tempfile.TemporaryDirectory() as folder:
        names = [f"worker{number}" for number in range(workers)]
        started = []
        for rank, name in enumerate(names, 1):
            started.append(mp.Process(target=_serve, args=(name, rank, workers + 1, folder)))
            started[-1].start()
        _begin("trainer", 0, workers + 1, folder)
        try:
            yield names, started
        finally:
            # A worker may be dead, and would be waited for.
            rpc.shutdown(graceful=False)
            for process in started:
                process.kill()
                process.join()


def _serve(name, rank, world, folder):
    _die_with_parent()
    torch.set_num_threads(1)
    _begin(name, rank, world, folder)
    rpc.shutdown()


def _begin(name, rank, world, folder):
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{folder}/group", num_worker_threads=4, _transports=["uv"]
    )
    rpc.init_rpc(name, rank=rank, world_size=world, rpc_backend_options=options)


@contextlib.contextmanager
def following(module, workers=2, strategy=None, **how):
    """A sender's scheme, and workers that follow it; the names and the processes."""
    with processes(workers) as (names, started):
        scheme = module.RPCWeightSyncScheme(**how)
        scheme.init_on_sender(model_id="policy", model=Probe(1.0), workers=names)
        for number, name in enumerate(names):
            rpc.rpc_sync(name, follow, args=(scheme, number, strategy))
        try:
            with hurry("the rendez-vous", 30.0):
                scheme.connect()
            yield scheme, names, started
        finally:
            scheme.shutdown()


@contextlib.contextmanager
def heard():
    """What the logger says meanwhile."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("weightsync")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


# What workers do when they are called.


def follow(scheme, number, strategy):
    model = Probe()
    _kept[number] = scheme, model
    if strategy is not None:
        scheme.strategy = strategy()
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=number)
    scheme.connect(worker_idx=number)


def leave(number):
    _kept.pop(number)[0].shutdown()


def open_files():
    """The number of files that the process has open, once unused objects are gone."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def read(number):
    scheme, model = _kept[number]
    return scheme.version, model()


def watch(number, last):
    """Reads until a pass sees the last value; the passes that saw a mix."""
    torn, model = [], _kept[number][1]
    while (seen := model())[1] < last:
        if seen[0] != seen[1]:
            torn.append(seen)
    return torn


def values(names):
    return [rpc.rpc_sync(name, read, args=(number,))[1][0] for number, name in enumerate(names)]


def is_joining(number):
    return _kept[number][0]._group._session is not None


def freeze(number):
    """Holds the model in a thread that does not come back to it."""
    _kept[number][0].frozen().__enter__()


def is_waiting(number):
    return _kept[number][0].background._native._lock._is_wanted


def receive(number, timeout):
    """The version that came by a call of the worker's own, or None."""
    scheme = _kept[number][0]
    return None if scheme.receive(timeout) is None else scheme.version


def receive_while_frozen(number, held):
    """A thread that holds the model cannot wait for it; another one looks, and gives up."""
    scheme = _kept[number][0]
    background = scheme.background
    with scheme.frozen():
        if held == "another thread":
            with futures.ThreadPoolExecutor() as threads:
                assert threads.submit(background.safe_point).result() is None
                assert not threads.submit(background.wait, timeout=0.05).result()
            return
        for call in (background.safe_point, background.wait):
            with refused(weightsync.LifecycleError, "frozen"):
                call()


def follow_again(number):
    """Another object of the scheme takes the worker's number, and has not joined."""
    _kept["first"] = _kept[number]
    follow(pickle.loads(pickle.dumps(_kept[number][0])), number, None)


def hold(number):
    """Keeps the model from a load, until `give_back`."""
    held, over = threading.Event(), threading.Event()

    def keep():
        with _kept[number][0].frozen():
            held.set()
            over.wait()

    threading.Thread(target=keep, daemon=True).start()
    held.wait()
    _kept["over"] = over


def give_back():
    _kept.pop("over").set()


def send_until_applied(scheme, value):
    """A send passes over a worker that was late and has not moved since; the next one may not."""
    while not scheme.send(Probe(value)).all_applied:
        pass


class Refusing(WeightStrategy):
    """Refuses one value."""

    def apply_weights(self, destination, weights, inplace=True):
        if weights["layers", "0"][0] == 2.0:
            raise ValueError("no twos here")
        super().apply_weights(destination, weights, inplace)


# The scenarios.


def calls_load(module, mode):
    """First weights with `connect`; then all workers, one, and each its own."""
    with following(module, mode=mode) as (scheme, names, _):
        assert values(names) == [1.0, 1.0]
        with hurry("sends", PROMPT):
            assert scheme.send(Probe(2.0)).all_applied
            assert values(names) == [2.0, 2.0]
            assert line(scheme.send(Probe(3.0), worker_ids=[1]), 1) == "applied"
            assert values(names) == [2.0, 3.0]
            scheme.send({0: Probe(4.0), 1: Probe(5.0)})
            assert values(names) == [4.0, 5.0]
            report = scheme.send(Probe(6.0))
        versions = [rpc.rpc_sync(name, read, args=(at,))[0] for at, name in enumerate(names)]
        assert versions == [report.version] * 2 and values(names) == [6.0, 6.0]


def dead_worker(module):
    """A worker that was killed is a line, and the other has the version."""
    with following(module) as (scheme, names, started):
        os.kill(started[0].pid, signal.SIGKILL)
        started[0].join()
        for value in (2.0, 3.0):
            with hurry("a send without a worker", PROMPT):
                report = scheme.send(Probe(value), timeout=patience(30))
            assert line(report, 0) == "died" and line(report, 1) == "applied", report
            assert rpc.rpc_sync(names[1], read, args=(1,))[1] == (value, value)


def refusal(module):
    """A worker that cannot load a version says why at once, and takes the next one."""
    with following(module, strategy=Refusing) as (scheme, names, _):
        with hurry("a send that is refused", PROMPT):
            report = scheme.send(Probe(2.0), timeout=patience(30))
        assert [one.outcome for one in report.failed] == ["refused"] * 2, report
        assert "no twos here" in report.failed[0].reason
        with hurry("a send", PROMPT):
            assert scheme.send(Probe(3.0)).all_applied
        assert values(names) == [3.0, 3.0]


def wrong_weights(module):
    """Weights that cannot be sent leave no worker waiting for them."""
    with following(module) as (scheme, names, _):
        group, calls = scheme._group, []
        call = group._call
        group._call = lambda *how: calls.append(how) or call(*how)
        for wrong in (Probe(2.0, numel=5), {0: Probe(2.0, numel=5)}):
            try:
                scheme.send(wrong)
            except weightsync.WrongWeightsError:
                pass
            else:
                raise AssertionError("these are not the model's weights")
        assert calls == [], "no worker was called"
        with hurry("a send", PROMPT):
            assert scheme.send(Probe(3.0)).all_applied
        assert values(names) == [3.0, 3.0]


def stopped_worker(module):
    """A send ends by its own limit, though a worker's process does not answer."""
    with following(module) as (scheme, names, started):
        os.kill(started[1].pid, signal.SIGSTOP)
        with hurry("a send with a limit", 3.0):
            report = scheme.send(Probe(2.0), timeout=1.0)
        assert line(report, 0) == "applied" and line(report, 1) == "late", report
        os.kill(started[1].pid, signal.SIGCONT)
        with hurry("a send", PROMPT):
            send_until_applied(scheme, 3.0)
        assert values(names) == [3.0, 3.0]


def failed_call(module):
    """A send waits for no worker whose call has failed, and a warning says why."""
    with following(module) as (scheme, names, _), heard() as said:
        rpc.rpc_sync(names[1], follow_again, args=(1,))
        with hurry("a send whose call fails", PROMPT):
            report = scheme.send(Probe(2.0), timeout=8 * SOON)
        assert line(report, 0) == "applied" and line(report, 1) == "late", report
        assert any("the call of worker 1 failed" in one and "not joined" in one for one in said)


def any_limit(module, limit):
    """Limits that a clock, a lock or torch cannot take are limits all the same."""
    with following(module) as (scheme, names, _), heard() as said:
        with hurry("a send", PROMPT):
            report = scheme.send(Probe(2.0), timeout=limit)
        if limit:
            assert report.all_applied
        # A worker without a limit may be late, and its call is then no other failure.
        assert not any("the call of worker" in one for one in said) or not report.all_applied, said
        with hurry("a send", PROMPT):
            scheme.send({0: Probe(3.0), 1: Probe(4.0)}, timeout=limit or None)
            send_until_applied(scheme, 5.0)
        assert values(names) == [5.0, 5.0]


def held_model(module):
    """A version that waits for frozen() is late, and the model goes on with the one before."""
    with following(module) as (scheme, names, _), heard() as said:
        rpc.rpc_sync(names[1], hold, args=(1,))
        with hurry("a send to a held model", PROMPT):
            report = scheme.send(Probe(2.0), timeout=1.0)
        assert line(report, 0) == "applied" and line(report, 1) == "late", report
        assert not any("half loaded" in one for one in said), said
        assert values(names) == [2.0, 1.0]
        rpc.rpc_sync(names[1], give_back)
        with hurry("a send", PROMPT):
            send_until_applied(scheme, 3.0)
        assert values(names) == [3.0, 3.0]


def interrupted(module):
    """Ctrl-C ends the wait for the answer of a call."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.get_ident()

    def interrupt():
        while sys._current_frames()[main].f_code.co_filename != threading.__file__:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    with processes(1) as (names, _):
        call = rpc.rpc_async(names[0], time.sleep, args=(8 * SOON,))
        with hurry("the end of a wait", PROMPT):
            try:
                threading.Thread(target=interrupt, daemon=True).start()
                answer_of(call)
            except KeyboardInterrupt:
                return
        raise AssertionError("the wait went on")


def forwards(module, mode):
    """Forwards of another thread see one version each."""
    with following(module, workers=1, mode=mode) as (scheme, names, _):
        watching = rpc.rpc_async(names[0], watch, args=(0, 60.0))
        with hurry("sends", 30.0):
            for value in range(2, 61):
                assert scheme.send(Probe(float(value))).all_applied
        assert watching.wait() == []


def shut_down(module):
    """Trainer and worker shut down, and leave no file and no thread; the worker can join again."""
    with processes(1) as (names, _):
        left = []
        for _ in range(3):
            scheme = module.RPCWeightSyncScheme()
            scheme.init_on_sender(model_id="policy", model=Probe(1.0), workers=names)
            rpc.rpc_sync(names[0], follow, args=(scheme, 0, None))
            scheme.connect()
            assert scheme.send(Probe(2.0)).all_applied
            rpc.rpc_sync(names[0], leave, args=(0,))
            scheme.shutdown()
            threads = len(os.listdir("/proc/self/task"))
            left.append((threads, open_files(), rpc.rpc_sync(names[0], open_files)))
        assert left[1] == left[2], left


def waiting_call(module, ends):
    """A call for a version that never comes ends when either end shuts down."""
    with following(module, workers=1) as (scheme, names, _):
        call = scheme._group._call_loads(None, 99, 60.0)[0]
        with hurry("the end of a call", PROMPT):
            if ends == "worker":
                rpc.rpc_sync(names[0], leave, args=(0,))
            else:
                scheme.shutdown()
            assert call.wait(), "there was nothing to load"


def joining_worker(module):
    """A worker whose rendez-vous does not end shuts down at once."""
    with processes(1) as (names, _):
        scheme = module.RPCWeightSyncScheme()
        scheme.init_on_sender(model_id="policy", model=Probe(1.0), workers=names)
        rpc.rpc_sync(names[0], follow, args=(scheme, 0, None))
        group = scheme._group
        # Nothing was published: the worker waits for it.
        joining = group._call(0, 60.0, _join, group.__getstate__(), 60.0)
        with hurry("the end of a rendez-vous", PROMPT):
            while not rpc.rpc_sync(names[0], is_joining, args=(0,)):
                time.sleep(0.01)
            rpc.rpc_sync(names[0], leave, args=(0,))
            assert joining.wait(), "the worker has left"
        scheme.shutdown()


def waiting_load(module):
    """A load that waits for a forward ends when its worker shuts down."""
    with following(module, workers=1) as (scheme, names, _), futures.ThreadPoolExecutor() as pool:
        rpc.rpc_sync(names[0], freeze, args=(0,))
        sent = pool.submit(scheme.send, Probe(2.0))
        with hurry("the end of a load", PROMPT):
            while not rpc.rpc_sync(names[0], is_waiting, args=(0,)):
                time.sleep(0.01)
            rpc.rpc_sync(names[0], leave, args=(0,))
            assert not sent.result().all_applied


def own_waits(module):
    """A worker's own calls wait no longer than they say, and load what the trainer sent."""
    with following(module, workers=1) as (scheme, names, _):
        with hurry("calls of a worker", PROMPT):
            assert rpc.rpc_sync(names[0], receive, args=(0, 0.05)) is None
            for held in ("this thread", "another thread"):
                rpc.rpc_sync(names[0], receive_while_frozen, args=(0, held))
            taken = rpc.rpc_async(names[0], receive, args=(0, 30.0))
            # Without the call that makes the worker load.
            Group.send(scheme._group, {"policy": Probe(2.0)}, None, "applied")
            assert taken.wait() == 2
        assert values(names) == [2.0]


def missing_worker(module):
    """The trainer's `connect` names a worker that has not connected, and can be called again."""
    with processes(2) as (names, started):
        scheme = module.RPCWeightSyncScheme()
        scheme.init_on_sender(model_id="policy", model=Probe(1.0), workers=names)
        rpc.rpc_sync(names[0], follow, args=(scheme, 0, None))
        try:
            scheme.connect()
        except weightsync.PeerError as error:
            assert "1 of 2" in str(error) and "worker 1 (worker1)" in str(error), error
            assert "init_on_receiver" in str(error)
        else:
            raise AssertionError("worker 1 is not there")
        rpc.rpc_sync(names[1], follow, args=(scheme, 1, None))
        scheme.connect()
        assert scheme.send(Probe(2.0)).all_applied
        assert values(names) == [2.0, 2.0]
        scheme.shutdown()


def transport(module, has_collector):
    """`RPCTransport`, constructed as TorchRL's: with a collector that it calls, or without one."""
    with processes(1) as (names, _):
        holder = rpc.remote(names[0], Holder, args=(module.RPCTransport(worker_rank=1),))
        sending = module.RPCTransport(
            collector_info=rpc.get_worker_info(names[0]),
            collector_rref=holder if has_collector else None,
            worker_rank=1,
        )
        for value in (1.0, 2.0, 3.0):
            received = None if has_collector else holder.rpc_async()._receive_weights_scheme()
            with hurry("weights", PROMPT):
                report = sending.send_weights(weights_of(Probe(value)))
                assert value == 1.0 or report.all_applied
                if received is not None:
                    received.wait()
            assert holder.rpc_sync().read() == (value, value)
        holder.rpc_sync().shutdown()
        sending.shutdown()


def transports_of_two_models(module):
    """A worker's box is one transport's until that one is shut down, also if it was not read."""
    with processes(1) as (names, _):
        holder = rpc.remote(names[0], Holder, args=(module.RPCTransport(worker_rank=1),))
        # It does not call the worker to receive.
        first = module.RPCTransport(collector_info=names[0], worker_rank=1)
        second = module.RPCTransport(collector_info=names[0], collector_rref=holder, worker_rank=1)
        first.send_weights_async(weights_of(Probe(1.0)))
        for _ in range(2):
            with refused(weightsync.SettingError, "rank 1 has another transport"):
                second.send_weights(weights_of(Probe(2.0)))
        first.shutdown()
        for value in (2.0, 3.0):
            with hurry("weights", PROMPT):
                second.send_weights(weights_of(Probe(value)))
            assert holder.rpc_sync().read() == (value, value)
        holder.rpc_sync().shutdown()
        second.shutdown()


class Holder:
    """A model that a transport brings weights for, with the method of a collector."""

    def __init__(self, transport):
        self.transport, self.model = transport, Probe()

    def _receive_weights_scheme(self):
        assert self.transport.receive_weights(model=self.model) is not None

    def read(self):
        return self.model()

    def shutdown(self):
        self.transport.shutdown()
