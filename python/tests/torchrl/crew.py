"""The processes of a test: one that runs a check, and the workers it starts.

A check is run in a process of its own, with a deadline, because a fault may show as a wait that
never ends: then the check and all that it has started are killed, and `Hung` is raised, which is an
`AssertionError` as any other way to fail a check. The process is forked from a server that has
imported TorchRL already, so that it costs milliseconds and has none of pytest's state.
"""

import contextlib
import copy
import ctypes
import importlib
import multiprocessing
import os
import signal
import traceback

import torch
from patience import patience
from torch import multiprocessing as mp
from torch import nn

# What the schemes of a test are taken from.
MODULES = {"theirs": "torchrl.weight_update", "ours": "weightsync.torchrl"}
SCHEMES = {
    "shared-mem": "SharedMemWeightSyncScheme",
    "multi-process": "MultiProcessWeightSyncScheme",
}
# Between hosts: TorchRL's want process groups, and are not run next to them.
NETWORK = {"distributed": "DistributedWeightSyncScheme", "rpc": "RPCWeightSyncScheme"}


def scheme_by(module, name, *args, **how):
    """A scheme by its short name; over TCP also here, where the trainer's memory is near."""
    if name in SCHEMES:
        return getattr(module, SCHEMES[name])(*args, **how)
    how |= {"share": "none"} if name == "distributed" else {"initial": "connect"}
    how.update(zip(("strategy", "sync"), args, strict=False))
    return getattr(module, NETWORK[name])(**how)


# For a start or an answer.
SOON = patience(30)

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "torchrl.collectors", "torchrl.weight_update"])


class Hung(AssertionError):
    """A check, or an answer it waited for, did not come by its deadline."""


@contextlib.contextmanager
def refused(kind, said):
    """Checks that the block raises this kind of error, and that the error says this."""
    try:
        yield
    except kind as error:
        assert said in str(error), error
    else:
        raise AssertionError(f"nothing has raised a {kind.__name__}: {said}")


def bounded(check, module, *args):
    """Runs `check(module, *args)` in a process of its own.

    `module` is a key of `MODULES`. Raises what the check raises, as an `AssertionError` with the
    traceback if it was one and as a `RuntimeError` if not, and `Hung` if it is not through soon,
    or by a deadline that it names itself with `hurry`. Nothing it started outlives this call.
    """
    here, there = _SERVER.Pipe()
    process = _SERVER.Process(target=_run, args=(there, check, module, args))
    process.start()
    there.close()
    try:
        return _outcome(here, process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        here.close()


def _outcome(here, process):
    doing, within = "the check", SOON
    while here.poll(within):
        try:
            kind, *said = here.recv()
        except EOFError:
            process.join()
            raise RuntimeError(f"the check's process ended ({process.exitcode})") from None
        if kind == "hurry":
            doing, within = said
        elif kind == "failed":
            raise AssertionError(said[0])
        elif kind == "raised":
            raise RuntimeError(said[0])
        else:
            return said[0]
    raise Hung(f"{doing} was not through after {within} s")


def _run(pipe, check, module, args):
    global _caller, _ours
    os.setsid()
    _die_with_parent()
    torch.set_num_threads(1)
    # Locks of a queue are then without a name, so that nothing is left of it after a kill.
    mp.set_start_method("fork", force=True)
    _caller = pipe
    _ours = module == "ours"
    pipe.send(("hurry", "the check", SOON))
    try:
        result = check(importlib.import_module(MODULES[module]), *args)
    except AssertionError:
        pipe.send(("failed", traceback.format_exc()))
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))
    else:
        pipe.send(("passed", result))
    pipe.close()
    # Not by `sys.exit`, which would join whatever a scheme has left running.
    os._exit(0)


_caller = None
_ours = True


@contextlib.contextmanager
def hurry(doing, within):
    """Inside a check: the block is to be through `within` seconds; else the check has hung."""
    # Most of TorchRL's waits never end, so its schemes are not waited for as long.
    _caller.send(("hurry", doing, patience(within) if _ours else within))
    yield
    _caller.send(("hurry", "the check", SOON))


def _die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Probe(nn.Module):
    """A model whose every element has one value, so that a pass over it sees a mix of versions.

    Its forward reads each parameter in full and answers the smallest and the largest value.
    """

    def __init__(self, fill=0.0, tensors=3, numel=4):
        super().__init__()
        shape = (tensors, numel)
        self.layers = nn.ParameterList(nn.Parameter(row.clone()) for row in torch.full(shape, fill))

    def forward(self, _=None):
        seen = [layer.detach().aminmax() for layer in self.layers]
        return min(low.item() for low, _ in seen), max(high.item() for _, high in seen)

    def fill(self, value):
        with torch.no_grad():
            for layer in self.layers:
                layer.fill_(value)
        return self

    def filled(self, value):
        """Another model like this one, all of whose elements are `value`."""
        return copy.deepcopy(self).fill(value)


class Worker:
    """What a worker process does when asked; a test's own workers derive from it.

    The scheme has been connected when an order comes. `model` is what it loads.
    """

    def __init__(self, scheme, index, model):
        self.scheme, self.index, self.model = scheme, index, model
        self.context = None

    def prepare(self):
        """Before the scheme is initialised."""

    def connect(self):
        self.scheme.init_on_receiver(
            model_id="policy", context=self.context, model=self.model, worker_idx=self.index
        )
        self.scheme.connect(worker_idx=self.index)

    def read(self):
        """The smallest and the largest value, as a pass over the model sees them."""
        return self.model()

    def watch(self, last, passes):
        """Reads until a pass is torn or sees `last`, and at most so often; what it saw."""
        seen = [(0.0, 0.0)]
        for _ in range(passes):
            seen.append(self.model())
            if seen[-1][0] != seen[-1][1] or seen[-1][0] >= last:
                break
        torn = [pair for pair in seen if pair[0] != pair[1]]
        return torn, len({low for low, high in seen if low == high})

    def receive(self, timeout):
        """Whether `receive` has given something."""
        return self.scheme.receive(timeout=timeout) is not None


class Crew:
    """A sender's worker processes, from start to end; use it as a context manager."""

    def __init__(self, scheme, models, worker=Worker, start="fork", sender=None):
        """`models`: the model of each worker; `start`: how its process is made.

        `sender` is the scheme that sends, if the workers get something else.
        """
        context = mp.get_context(start)
        self.scheme, self.processes, self.pipes = sender or scheme, [], []
        for index, model in enumerate(models):
            here, there = context.Pipe()
            # Made from scratch there: a model that is pickled would share its memory.
            state = {name: value.numpy() for name, value in model.state_dict().items()}
            args = (there, worker, scheme, index, copy.deepcopy(model).to("meta"), state)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def __enter__(self):
        self.scheme.connect()
        for index in range(len(self.processes)):
            self.answer(index)
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()

    def order(self, index, name, *args):
        """Tells a worker to do something; `answer` has what came of it."""
        self.pipes[index].send((name, args))

    def answer(self, index, within=SOON):
        if not self.pipes[index].poll(within):
            raise Hung(f"worker {index} did not answer within {within} s")
        kind, value = self.pipes[index].recv()
        if kind == "raised":
            raise AssertionError(f"worker {index} raised:\n{value}")
        return value

    def has_answered(self, index):
        return self.pipes[index].poll()

    def ask(self, index, name, *args, within=SOON):
        self.order(index, name, *args)
        return self.answer(index, within)

    def values(self):
        """What a pass over the model of each worker sees."""
        return [self.ask(index, "read") for index in range(len(self.processes))]

    def signal(self, index, number):
        os.kill(self.processes[index].pid, number)
        if number == signal.SIGKILL:
            self.processes[index].join()
        elif number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.processes[index].pid, os.WSTOPPED | os.WNOWAIT)


def _serve(pipe, worker, scheme, index, model, state):
    _die_with_parent()
    torch.set_num_threads(1)
    # A copy, because the process's own arguments live as long as it does.
    model = copy.deepcopy(model).to_empty(device="cpu")
    model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
    try:
        worker = worker(scheme, index, model)
        del model
        worker.prepare()
        worker.connect()
        pipe.send(("done", None))
        for name, args in iter(pipe.recv, None):
            try:
                pipe.send(("done", getattr(worker, name)(*args)))
            except Exception:
                pipe.send(("raised", traceback.format_exc()))
    except EOFError:
        pass
    except Exception:
        pipe.send(("raised", traceback.format_exc()))


@contextlib.contextmanager
def standing(scheme, learner, /, workers=2, worker=Worker, start="fork", fill=0.0, **how):
    """A scheme with so many workers, each with a model like the learner, filled.

    `how` is what the sender is initialised with, if not by the learner and a device per worker.
    """
    if not how:
        how = {"model": learner, "devices": [torch.device("cpu")] * workers}
    scheme.init_on_sender(model_id="policy", ctx=mp.get_context(start), **how)
    with Crew(scheme, [learner.filled(fill) for _ in range(workers)], worker, start) as crew:
        yield crew


def line(report, worker):
    """The word a send's report has for a worker, in lower case; `None` if it has none.

    TorchRL's `send` returns nothing, so there it is always `None`.
    """
    for said in getattr(report, "workers", ()):
        if int(said.worker) == worker:
            return str(said.outcome).lower()
    return None


def send_by(scheme, weights, seconds, **how):
    """A send that is to be through by a deadline, in the way the scheme has for it."""
    try:
        return scheme.send(weights, timeout=seconds, **how)
    except TypeError as refused:
        if "timeout" not in str(refused):
            raise
    # TorchRL's `send` takes no deadline; its own way is to wait for the answers apart.
    scheme.sync, sync = False, scheme.sync
    try:
        scheme.send(weights, **how)
        return scheme._wait_for_ack(timeout=seconds)
    finally:
        scheme.sync = sync
