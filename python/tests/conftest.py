"""What every test is held to: it ends in its time, and no process outlives it.

The process that runs the tests adopts what their processes leave behind (it is their *subreaper*). So
a worker of a trainer that was killed is found here too.
"""

import contextlib
import ctypes
import os
import signal
import time

import pytest
from patience import patience

_PR_SET_CHILD_SUBREAPER = 36

# Helpers of multiprocessing, which serve the whole run. What the first one forks is a test's own.
_FORK_SERVER = b"multiprocessing.forkserver"
_HELPERS = (_FORK_SERVER, b"multiprocessing.resource_tracker")

# How long what has been told to end may take.
_ENDING = 10.0

_ended = pytest.StashKey[list[str]]()
_failed = pytest.StashKey[bool]()

# Processes of fixtures that outlive a test, by number and time of their start.
_kept: set[tuple[int, str]] = set()


def pytest_configure(config):
    config.stash[_ended] = []
    # A shell has what it runs in the background ignore Ctrl-C, and so would the processes of tests.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def pytest_collection_modifyitems(config, items):
    """Leaves tests for the soak to it: a cheaper test can fail for the same reasons."""
    factor = os.environ.get("WEIGHTSYNC_SOAK") or "1"
    if factor == "full" or float(factor) > 1.0:
        return
    soak = [item for item in items if item.get_closest_marker("soak")]
    if soak and len(soak) < len(items):
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item not in soak]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Sets the test's time limit, by the load of the machine when it begins."""
    mark = item.get_closest_marker("timeout")
    if item.config.getoption("--timeout", None) is None:
        limit = mark.args[0] if mark else float(item.config.getini("timeout"))
        how = mark.kwargs if mark else {}
        item.add_marker(pytest.mark.timeout(patience(limit), **how), append=False)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """Keeps what a fixture starts for more than one test."""
    if fixturedef.scope == "function":
        return (yield)
    before = set(_descendants())
    result = yield
    _kept.update(one for one in _descendants() if one not in before)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Ends what the test has left behind, and fails the test if it had passed."""
    result = yield
    failed = item.stash.get(_failed, False)
    # A process that was told to end takes a moment. After a failure nothing was told.
    until = time.monotonic() + (0.0 if failed else patience(_ENDING))
    while (left := _left_behind()) and time.monotonic() < until:
        time.sleep(0.005)
    ended = [_end(one, item.nodeid) for one in left]
    item.config.stash[_ended] += ended
    if ended:
        item.add_report_section("teardown", "processes ended", "\n".join(ended))
    if ended and not failed:
        pytest.fail("the test left processes behind:\n" + "\n".join(ended), pytrace=False)
    return result


def pytest_sessionfinish(session):
    # A process of pytest-xdist tells the one that prints.
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["ended"] = session.config.stash[_ended]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Hears which processes a process of pytest-xdist has ended."""
    node.config.stash[_ended] += getattr(node, "workeroutput", {}).get("ended", [])


def pytest_unconfigure(config):
    """Ends what is left, however the run ended."""
    for one in _descendants():
        _end(one, "the run")


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[_ended]:
        terminalreporter.section("processes that tests left behind, ended")
        for line in config.stash[_ended]:
            terminalreporter.write_line(line)


def _left_behind():
    """The processes below this one that no fixture and no helper accounts for."""
    left, kept = [], set()
    for pid, start, parent, command in _below(os.getpid()):
        helper = parent == os.getpid() and any(name in command for name in _HELPERS)
        if helper or (pid, start) in _kept or parent in kept:
            # What a fork server forks is not its own.
            if _FORK_SERVER not in command:
                kept.add(pid)
        else:
            left.append((pid, start))
    return left


def _descendants():
    return [(pid, start) for pid, start, _, _ in _below(os.getpid())]


def _below(root):
    """The living processes below one, parents first."""
    for task in _listed(f"/proc/{root}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{root}/task/{task}/children") as file:
            children = [int(word) for word in file.read().split()]
            for pid in children:
                with contextlib.suppress(OSError):
                    with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline", "rb") as cmd:
                        fields, command = stat.read().rpartition(")")[2].split(), cmd.read()
                    if fields[0] != "Z":
                        yield pid, fields[19], root, command
                yield from _below(pid)


def _listed(folder):
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def _end(process, of):
    """Ends a process that is the one which was seen, and says which it was."""
    pid, start = process
    line = f"process {pid} of {of}"
    with contextlib.suppress(OSError):
        # The file descriptor stays that of this process, whatever takes the number.
        descriptor = os.pidfd_open(pid)
        try:
            with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline", "rb") as cmd:
                if stat.read().rpartition(")")[2].split()[19] == start:
                    words = cmd.read().decode(errors="replace").split("\0")
                    line += ": " + " ".join(words)[:120]
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
    return line
