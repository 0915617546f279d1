"""What every test of the plain package is held to: nothing is left behind."""

import contextlib
import gc
import os
import time
from multiprocessing import resource_tracker

import pytest
import torch
from actors import STARTS
from actors import actors as _actors
from patience import patience


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call":
        item.stash[_PASSED] = report.passed
    return report


_PASSED = pytest.StashKey()


@pytest.fixture(scope="session", autouse=True)
def _ready():
    """What stays for the whole run: helpers of multiprocessing."""
    resource_tracker.ensure_running()
    process = STARTS["server"].Process(target=int)
    process.start()
    process.join()
    process.close()
    # What was imported is not looked through again after each test.
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_left(request, _ready):
    """No descriptor, thread or mapping of shared memory outlives a test, and no process does."""
    # TorchRL's collectors set another number, and torch keeps the threads that it starts.
    torch.set_num_threads(1)
    gc.collect()
    before = _open()
    yield
    if not request.node.stash.get(_PASSED, False):
        return
    gc.collect()
    deadline = time.monotonic() + patience(10.0)
    while any(_more_than(before).values()) and time.monotonic() < deadline:
        # A thread that was joined is still there for a moment, on its way out. What it held until then
        # may be garbage that only a collection frees.
        os.sched_yield()
        gc.collect()
    left = _more_than(before)
    names = [_named(thread) for thread in left["threads"]]
    assert not any(left.values()), f"left behind: {left}, threads' names: {names}"


@pytest.fixture
def actor():
    """Makes an :class:`actors.Actor`; all are ended with the test."""
    with _actors() as make:
        yield make


def _more_than(before):
    after = _open()
    return {kind: sorted(after[kind] - before[kind]) for kind in after}


def _named(thread):
    with contextlib.suppress(FileNotFoundError), open(f"/proc/self/task/{thread}/comm") as file:
        return file.read().strip()
    return "ended meanwhile"


def _open():
    descriptors = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            descriptors.add((number, os.readlink(f"/proc/self/fd/{number}")))
    with open("/proc/self/maps") as file:
        mapped = {line.split()[0] for line in file if "memfd:" in line}
    threads = os.listdir("/proc/self/task")
    return {
        "descriptors": descriptors,
        # Torch starts a thread for each device at the first backward pass of a process, and keeps them.
        "threads": {one for one in threads if not _named(one).startswith("pt_autograd_")},
        "mappings": mapped,
    }
