"""What every test is held to: it ends in its time, and no process outlives it.

A process counts as the test's if it is below the process that runs the tests, or if its environment
names the test: a worker whose trainer was killed is found by that.
"""

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

import pytest
from patience import patience

# Names the test in the environment of what it starts.
_TEST = "WEIGHTSYNC_TEST"

# Helpers of multiprocessing, which serve the whole run. What the first one forks is a test's own.
_FORK_SERVER = b"multiprocessing.forkserver"
_HELPERS = (_FORK_SERVER, b"multiprocessing.resource_tracker")

# How long what has been told to end may take.
_ENDING = 10.0

_ended = pytest.StashKey[list[str]]()
_failed = pytest.StashKey[bool]()

# Processes of fixtures that outlive a test, by number and time of their start; and their commands.
_kept: dict[tuple[int, str], bytes] = {}

_number = itertools.count()


def pytest_configure(config):
    config.stash[_ended] = []
    config.pluginmanager.register(_Fixtures())
    # What was there before the run is not a test's.
    _keep(_below_this(_processes()))
    # What tests start as programs imports `patience` too.
    places = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    # A shell has what it runs in the background ignore Ctrl-C, and so would the processes of tests.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_collection_modifyitems(config, items):
    """Leaves out what tests another package and what is for soaks, unless it is asked for."""
    if config.getoption("markexpr"):
        return
    named = tuple(one for one in config.args if "::" in one)
    marked = (item for item in items if any(map(item.get_closest_marker, ("peers", "soak"))))
    out = [item for item in marked if not item.nodeid.startswith(named)]
    if len(out) < len(items):
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Sets the test's time limit, by the load of the machine when it begins."""
    mark = item.get_closest_marker("timeout")
    if item.config.getoption("--timeout", None) is None:
        limit = mark.args[0] if mark else float(item.config.getini("timeout"))
        how = mark.kwargs if mark else {}
        item.add_marker(pytest.mark.timeout(patience(limit), **how), append=False)
    os.environ[_TEST] = f"{os.getpid()}-{next(_number)}"
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


class _Fixtures:
    """A plugin of its own: pytest asks no conftest.py below its root about fixtures of the session."""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        """Keeps what a fixture starts for more than one test."""
        if fixturedef.scope == "function":
            return (yield)
        before = _below_this(_processes())
        result = yield
        _keep(_below_this(_processes()) - before)
        return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Ends what the test has left behind, and fails the test if it had passed."""
    passed = False
    try:
        result = yield
        passed = not item.stash.get(_failed, False)
    finally:
        # A process that was told to end takes a moment. After a failure nothing was told.
        until, pause = time.monotonic() + (patience(_ENDING) if passed else 0.0), 0.005
        while (left := _left_behind()) and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        ended = [_end(one, item.nodeid) for one in left]
        item.config.stash[_ended] += ended
        if ended:
            item.add_report_section("teardown", "processes ended", "\n".join(ended))
    if ended and passed:
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
    # Multiprocessing's helpers end with this process, and tidy up.
    for one in _left_behind():
        _end(one, "the run")


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[_ended]:
        terminalreporter.section("processes that tests left behind, ended")
        for line in config.stash[_ended]:
            terminalreporter.write_line(line)


def _left_behind():
    """The processes of the test that no fixture and no helper accounts for."""
    processes = _processes()
    below = _below_this(processes)
    mark = f"{_TEST}={os.environ.get(_TEST)}".encode()
    left = []
    for pid, (start, parent) in processes.items():
        mine = (pid, start) in below or mark in _read(pid, "environ").split(b"\0")
        if pid != os.getpid() and mine and not _accounted(pid, parent, processes):
            left.append((pid, start))
    return left


def _accounted(pid, parent, processes):
    """Whether a fixture keeps the process or one above it, or it is a helper of multiprocessing."""
    if parent == os.getpid() and any(name in _read(pid, "cmdline") for name in _HELPERS):
        return True
    while pid in processes:
        start, parent = processes[pid]
        if (pid, start) in _kept or _is_started_again(pid, parent, processes):
            return True
        # What a fork server forks is not its own.
        if _FORK_SERVER in _read(parent, "cmdline"):
            return False
        pid = parent
    return False


def _keep(those):
    _kept.update({one: _read(one[0], "cmdline") for one in those})


def _is_started_again(pid, parent, processes):
    """Whether it takes the place of a fixture's process, which a test has ended."""
    command = _read(pid, "cmdline")
    # The commands of multiprocessing's processes, and of forked ones, do not tell them apart.
    is_own = command and command != _read(os.getpid(), "cmdline")
    if parent != os.getpid() or not is_own or b"multiprocessing" in command:
        return False
    ended = (one for one in _kept if processes.get(one[0], ("",))[0] != one[1])
    return any(_kept[one] == command for one in ended)


def _below_this(processes):
    """The processes below this one."""
    below, found = {os.getpid()}, True
    while found:
        found = {pid for pid, (_, parent) in processes.items() if parent in below} - below
        below |= found
    return {(pid, processes[pid][0]) for pid in below if pid != os.getpid()}


def _processes():
    """Every living process of the machine: the time of its start, and its parent."""
    processes = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            state, parent, *rest = _fields(name) or ("Z", 0)
            if state != "Z":
                processes[int(name)] = rest[17], int(parent)
    return processes


def _fields(pid):
    # The name before them may have any characters.
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def _read(pid, name):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""


def _end(process, of):
    """Ends a process that is the one which was seen, and says which it was."""
    pid, start = process
    line = f"process {pid} of {of}"
    with contextlib.suppress(OSError):
        # The file descriptor stays that of this process, whatever takes the number.
        descriptor = os.pidfd_open(pid)
        try:
            if _fields(pid)[19:20] == [start]:
                line += ": " + " ".join(_read(pid, "cmdline").decode(errors="replace").split("\0"))[:120]
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
    return line
