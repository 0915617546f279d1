"""torch.compile next to a background receiver: it sees no guard, and what it made is guarded."""

import contextlib
import threading
import warnings

import pytest
import torch
import torch._inductor.config
import weightsync
from ends import LONG, beside, pair
from torch import nn

pytestmark = pytest.mark.timeout(600)

NUMEL = 32 * 1024


class _Stop:
    """Where a compiled forward stands still, once it is asked to."""

    def __init__(self):
        self.asked, self.there, self.go = (threading.Event() for _ in range(3))


_stop = _Stop()


@torch.library.custom_op("weightsync_tests::stand", mutates_args=())
def stand(given: torch.Tensor) -> torch.Tensor:
    if _stop.asked.is_set():
        _stop.there.set()
        assert _stop.go.wait(LONG)
    return given.clone()


@stand.register_fake
def _(given):
    return torch.empty_like(given)


stand.register_autograd(lambda _, gradient: gradient)


class Add(nn.Module):
    def __init__(self, fill):
        super().__init__()
        self.weight = nn.Parameter(torch.full((NUMEL,), float(fill)))

    def forward(self, given):
        return given + self.weight


class Stand(nn.Module):
    def forward(self, given):
        return stand(given)


class Own(nn.Module):
    """As the Sequential, in a class that is not torch's."""

    def __init__(self, fill):
        super().__init__()
        self.parts = nn.ModuleList([Add(fill), Stand(), Add(fill)])

    def forward(self, given):
        for part in self.parts:
            given = part(given)
        return given


def _of_torch(fill):
    return nn.Sequential(Add(fill), Stand(), Add(fill))


def _module(model, **how):
    return torch.compile(model, **how)


def _in_place(model, **how):
    model.compile(**how)
    return model


def _function(model, **how):
    return torch.compile(lambda given: model(given), **how)


MAKES = [Own, _of_torch]
WAYS = [_module, _in_place, _function]
BACKENDS = [
    ("eager", True, MAKES, WAYS),
    ("eager", False, MAKES, WAYS),
    ("inductor", True, [Own], [_module, _function]),
]
CASES = [
    pytest.param(make, way, backend, full, id=f"{backend}-{full}-{make.__name__}-{way.__name__}")
    for backend, full, makes, ways in BACKENDS
    for make in makes
    for way in ways
]


@pytest.fixture(scope="module", autouse=True)
def _compiler(request):
    """Threads of torch's compiler stay for the whole run."""
    if not any("inductor" in item.name for item in request.session.items):
        return
    torch._inductor.config.compile_threads = 1
    # The compiler's progress bars start a thread that stays, where tqdm is installed.
    with contextlib.suppress(ImportError):
        from tqdm import tqdm

        tqdm.monitor_interval = 0
    torch.compile(torch.sin)(torch.ones(4, requires_grad=True)).sum().backward()


@pytest.fixture(autouse=True)
def _fresh():
    global _stop
    _stop = _Stop()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def _fill(model, value):
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(value)
    return model


@pytest.mark.parametrize("safe_points", ["implied", "declared"])
@pytest.mark.parametrize(("make", "way", "backend", "full"), CASES)
def test_compiled_forwards_are_full_graphs_and_guarded(make, way, backend, full, safe_points):
    given = torch.zeros(NUMEL)
    # What torch makes of the same without a guard; of some ways older ones make several graphs.
    way(make(0.0), backend=backend, fullgraph=full)(given)
    counted = torch._dynamo.utils.counters
    graphs = counted["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counted.clear()

    trainer, worker = make(1.0), make(0.0)
    with pair(trainer, worker) as (sender, receiver):
        background = receiver.start_background(safe_points)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled = way(worker, backend=backend, fullgraph=full)
            seen = [compiled(given).unique().tolist() for _ in range(3)]
        assert seen == [[2.0]] * 3
        assert counted["stats"]["unique_graphs"] == graphs > 0
        assert not counted["graph_break"]

        # In the middle of it, nothing changes.
        _stop.asked.set()
        last = []
        with beside(lambda: last.append(compiled(given))):
            assert _stop.there.wait(LONG)
            report = sender.send(_fill(trainer, 2.0), wait="staged", timeout=LONG)
            assert report.all_reached and not report.all_applied
            assert background.version == 1
            assert background.safe_point() is None
            _stop.go.set()
        assert last[0].unique().tolist() == [2.0]
        assert background.wait(2, timeout=LONG)
        assert compiled(given).unique().tolist() == [4.0]
        # Nothing was compiled again for another address.
        assert counted["stats"]["unique_graphs"] == graphs
        background.shutdown()
        assert compiled(given).unique().tolist() == [4.0]


def test_the_first_compiled_call_is_guarded_too():
    trainer, worker = _of_torch(1.0), _of_torch(0.0)
    given = torch.zeros(NUMEL)
    with pair(trainer, worker) as (sender, receiver), torch.no_grad():
        background = receiver.start_background()
        compiled = torch.compile(worker, backend="eager", fullgraph=True)
        _stop.asked.set()
        first = []
        with beside(lambda: first.append(compiled(given))):
            assert _stop.there.wait(LONG)
            sender.send(_fill(trainer, 2.0), wait="staged", timeout=LONG)
            assert background.version == 1
            _stop.go.set()
        assert first[0].unique().tolist() == [2.0]
        assert background.wait(2, timeout=LONG)
        background.shutdown()


def test_frozen_guards_modules_compiled_earlier():
    trainer, worker = _of_torch(1.0), _of_torch(0.0)
    given = torch.zeros(NUMEL)
    compiled = torch.compile(worker, backend="eager", fullgraph=True)
    with pair(trainer, worker) as (sender, receiver), torch.no_grad():
        compiled(given)
        background = receiver.start_background()
        with receiver.frozen():
            first = compiled(given)
            sender.send(_fill(trainer, 2.0), wait="staged", timeout=LONG)
            assert torch.equal(compiled(given), first)
        assert background.wait(2, timeout=LONG)
        assert compiled(given).unique().tolist() == [4.0]
        background.shutdown()


def test_a_guarded_module_is_exported_as_it_is():
    trainer, worker = Own(1.0), Own(0.0)
    with pair(trainer, worker) as (_, receiver):
        background = receiver.start_background()
        program = torch.export.export(worker, (torch.zeros(NUMEL),))
        assert program.module()(torch.zeros(NUMEL)).unique().tolist() == [2.0]
        background.shutdown()
        with pytest.raises(weightsync.LifecycleError):
            background.wait(timeout=0)
