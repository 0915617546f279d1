"""The memory of tensors: exchanged, and freed when no other thread reads it any more."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from types import FrameType
from typing import Any, NamedTuple

from weightsync import _dtypes
from weightsync._targets.base import is_plain


def leave_shared_memory(tensors: list[Any]) -> None:
    """Gives tensors in host memory shared with other processes memory of their own.

    A model that torch.multiprocessing has pickled shares its memory with the process that
    pickled it: a load would write into the learner's weights, and other workers'.
    """
    import torch

    # Tensors that share a memory go on sharing one.
    rooms: dict[int, Any] = {}
    pairs: dict[int, tuple[Any, Any]] = {}
    for tensor in tensors:
        strided = tensor.layout == torch.strided and not _dtypes.is_lazy(tensor)
        if not strided or not tensor.is_cpu or not tensor.is_shared():
            continue
        if tensor.is_conj() or tensor.is_neg():
            # Of a view that computes its values, the values alone.
            pairs[id(tensor)] = (tensor, tensor.detach().resolve_conj().resolve_neg().clone())
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in rooms:
            room = torch.UntypedStorage(storage.nbytes(), device="cpu")
            ctypes.memmove(room.data_ptr(), storage.data_ptr(), storage.nbytes())
            rooms[storage.data_ptr()] = room
        own = tensor.detach().new_empty(0).set_(
            rooms[storage.data_ptr()], tensor.storage_offset(), tensor.size(), tensor.stride()
        )
        pairs[id(tensor)] = (tensor, own)
    retire(exchange(list(pairs.values())))


def copy_of(tensor: Any) -> Any:
    """A copy of a tensor.

    Of a row-major one in the host's memory it needs none of torch's threads. A process that was forked
    after torch had used them has them no more, and torch would wait for them without end.
    """
    import torch

    own = tensor.detach()
    if not is_plain(own):
        # The worker has moved it since.
        return own.clone()
    made = torch.empty_like(own, device="cpu")
    ctypes.memmove(made.data_ptr(), own.data_ptr(), own.nbytes)
    return made


def exchange(pairs: list[tuple[Any, Any]]) -> list[Any]:
    """Gives each first tensor the memory of the second, and returns what they had for `free`.

    ``tensor.data = other`` would do the same, but it keeps the interpreter's lock while it
    waits for a lock of autograd's. A thread that uses a parameter with gradients takes
    autograd's lock first and then the interpreter's: each would wait for the other. This
    operator releases the interpreter's lock.
    """
    import torch

    set_data = torch.ops.aten.set_data.default
    before = [tensor.detach() for tensor, _ in pairs]
    try:
        for tensor, other in pairs:
            set_data(tensor, other)
    except BaseException:
        retire(before)
        raise
    return before


def free(before: list[Any], *, in_slot: bool) -> None:
    """Frees the memory that tensors had before an exchange, while no forward runs.

    Args:
        in_slot: whether it is a version in the sender's memory. The sender needs that back before it
            can send the next one, and it stays mapped: an operator that still reads there gets other
            values. Other memory goes back to the system, and an operator that reads there ends the
            process.
    """
    if not before:
        return
    if not in_slot:
        retire(before, longest=0.0)
        _sweep_until(_MOST, 5.0)
        with _retiring:
            # A thread that stays in one call for so long is in no operator: memory stays bounded.
            while len(_retired) > _MOST and time.monotonic() - _retired[0].since > _LONGEST_OPERATOR:
                del _retired[0]
        return
    try:
        _let_others_run()
    except BaseException:
        # Ctrl-C ends one wait, and the memory needs it all the same.
        _let_others_run()
        raise
    finally:
        before.clear()
        _sweep()


class _Retired(NamedTuple):
    """Memory, and where each thread was when tensors had it no longer."""

    memory: list[Any]
    places: dict[int, tuple[int, int]]
    #: What threads that slept then had used of the processor, by the system's number.
    slept: dict[int, int]
    since: float


# What could not be freed yet.
_retired: list[_Retired] = []
_retiring = threading.RLock()
# The interpreter's end frees nothing of it: a thread may still compute then.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_retired))

# How many there may be while versions are loaded, before a load waits.
_MOST = 4

# No operator takes so many seconds.
_LONGEST_OPERATOR = 30.0

# A thread that has slept for so many seconds is in no operator, which would sleep for others for less.
_LONG_SLEEP = 5.0


def retire(before: list[Any], longest: float = 0.25) -> None:
    """Frees the memory that tensors had before an exchange, while forwards may run.

    Many operators read a parameter where it lies, and count themselves among its users in no way:
    the memory is freed when each thread has left the operator that it was in. What a thread still
    uses after `longest` seconds is freed by a later call.
    """
    if not before:
        return
    frames = _frames()
    slept = _asleep(_by_number()).sleepers
    with _retiring:
        _retired.append(_Retired(before[:], _places(frames), slept, time.monotonic()))
    before.clear()
    # While `frames` lives, no other frame has the place of one of these in memory.
    _sweep_until(0, longest)
    frames.clear()


def _sweep_until(most: int, longest: float) -> None:
    """Frees until no more than so many are left, or so many seconds have passed."""
    until, pause = time.monotonic() + longest, 50e-6
    while _sweep() > most and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, 1e-2)


def _sweep() -> int:
    """Frees what no thread uses any more, and returns how many are left."""
    if not _retired:
        return 0
    places, numbers = _places(_frames()), _by_number()
    asleep = _asleep(numbers)
    is_still = asleep.helpers is not None and asleep == _asleep(numbers)
    now = time.monotonic()

    def reads(one: _Retired, thread: int) -> bool:
        if places.get(thread) != one.places[thread]:
            return False
        number = numbers.get(thread)
        if number is None:
            # Python's list lacks it, so it is among the helpers.
            return not is_still
        used = asleep.sleepers.get(number)
        # Where nothing runs, a thread that sleeps waits for nobody in the middle of an operator.
        has_slept = now - one.since > _LONG_SLEEP and one.slept.get(number) == used
        return used is None or not (is_still or has_slept)

    with _retiring:
        # The list itself stays, as the interpreter's end is not to free it.
        _retired[:] = [one for one in _retired if any(reads(one, each) for each in one.places)]
        return len(_retired)


def _by_number() -> dict[int, int]:
    """The system's number of each thread that Python's list has."""
    return {
        one.ident: one.native_id
        for one in threading.enumerate()
        if one.ident is not None and one.native_id is not None
    }


class _Asleep(NamedTuple):
    """Threads that sleep, with what each has used of the processor."""

    #: Those that run Python, by the system's number.
    sleepers: dict[int, int]
    #: The others but weightsync's own, if all of them sleep.
    helpers: dict[int, int] | None


def _asleep(numbers: dict[int, int]) -> _Asleep:
    python = set(numbers.values())
    sleepers: dict[int, int] = {}
    helpers: dict[int, int] | None = {}
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        # Other systems do not tell.
        return _Asleep({}, None)
    for thread in threads:
        try:
            used = _processor_time(thread)
            name, sleeps = _name_and_sleep(thread)
        except OSError:
            # It has ended.
            continue
        if thread in python:
            sleepers |= {thread: used} if sleeps else {}
        elif not sleeps and not name.startswith(b"weightsync"):
            helpers = None
        elif helpers is not None and not name.startswith(b"weightsync"):
            helpers[thread] = used
    return _Asleep(sleepers, helpers)


def _frames() -> dict[int, FrameType]:
    """The innermost frame of each other thread that runs Python."""
    own = threading.get_ident()
    return {thread: one for thread, one in sys._current_frames().items() if thread != own}


def _places(frames: dict[int, FrameType]) -> dict[int, tuple[int, int]]:
    """Frames, and the instruction in each: a thread is in one operator until this changes."""
    return {thread: (id(frame), frame.f_lasti) for thread, frame in frames.items()}


# Processor time, in nanoseconds, in which a thread leaves those few instructions.
_A_FEW_INSTRUCTIONS = 20_000


def _let_others_run(longest: float = 5.0) -> None:
    """Waits until every other thread of this process has run for a moment, or sleeps.

    A busy machine may leave a thread between two instructions for a second. One that the system
    does not let run for `longest` seconds is not waited for.
    """
    own = threading.get_native_id()
    try:
        threads = {int(name) for name in os.listdir("/proc/self/task")} - {own}
        _processor_time(own)
    except OSError:
        # Other systems do not tell.
        if threading.active_count() > 1:
            time.sleep(0.01)
        return
    left = dict.fromkeys(threads, 0)
    for thread in threads:
        with contextlib.suppress(OSError):
            left[thread] = _processor_time(thread)
    until, pause = time.monotonic() + longest, 50e-6
    while left := {one: since for one, since in left.items() if not _slept_or_ran(one, since)}:
        if time.monotonic() > until:
            return
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)


def _slept_or_ran(thread: int, since: int) -> bool:
    try:
        if _processor_time(thread) - since > _A_FEW_INSTRUCTIONS:
            return True
        return _name_and_sleep(thread)[1]
    except OSError:
        # The thread has ended.
        return True


def _name_and_sleep(thread: int) -> tuple[bytes, bool]:
    """A thread's name, and whether it sleeps."""
    with open(f"/proc/self/task/{thread}/stat", "rb") as file:
        # The state follows the name, which may have any characters. One that waits for a disk may
        # do so between two instructions, for a page.
        before, _, behind = file.read().rpartition(b") ")
        return before.partition(b"(")[2], not behind.startswith((b"R", b"D"))


def _processor_time(thread: int) -> int:
    """What a thread has used, in nanoseconds, by the system's number of it."""
    # As pthread_getcpuclockid(3) numbers the clocks.
    return time.clock_gettime_ns(~thread << 3 | 6)


def _in_child() -> None:
    global _retiring
    _retiring = threading.RLock()


os.register_at_fork(after_in_child=_in_child)
