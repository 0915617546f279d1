"""Holds, which keep a worker's models unchanged, and guards, which take holds automatically.

A hold belongs to a thread. A guard takes a hold for each forward of the module, or of any part
of it, through hooks. torch.compile does not see the hooks: they are in no graph and break none.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from weightsync.errors import LifecycleError

logger = logging.getLogger("weightsync")


# Seconds for which another thread may keep the interpreter's lock while a version is loaded.
_SHORT_INTERVAL = 20e-6


class _SwitchInterval:
    """Short turns at the interpreter's lock while any thread loads.

    A load calls torch a few times for each tensor, and each call releases the lock. To get it
    back takes up to a switch interval, 5 ms, while another thread runs Python. It takes far
    longer while that thread calls torch too: each release wakes the waiting thread, which comes
    too late, and waits a whole interval again before it may ask for its turn.
    """

    def __init__(self) -> None:
        # A signal's handler may load in the middle of this.
        self._lock = threading.RLock()
        # The threads, not their number: Ctrl-C may end a load before it was added.
        self._loads: set[int] = set()
        # The usual interval, and the short one as the interpreter rounds it.
        self._usual = self._short = 0.0

    def shorten(self) -> None:
        with self._lock:
            if not self._loads:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual, _SHORT_INTERVAL))
                self._short = sys.getswitchinterval()
            self._loads.add(threading.get_ident())

    def restore(self) -> None:
        with self._lock:
            self._loads.discard(threading.get_ident())
            # The worker may have set another interval during the load.
            if not self._loads and sys.getswitchinterval() == self._short:
                sys.setswitchinterval(self._usual)

    def in_child(self) -> None:
        """Of the threads that load, only the one that forked can be in a forked child."""
        self._lock = threading.RLock()
        loads, self._loads = self._loads, set()
        if threading.get_ident() in loads:
            self._loads.add(threading.get_ident())
        elif loads:
            self.restore()


_switch_interval = _SwitchInterval()


class _Loading(threading.local):
    """Whether this thread is loading. No other thread uses the models then."""

    depth = 0

    def __enter__(self) -> None:
        if self.depth == 0:
            _switch_interval.shorten()
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            _switch_interval.restore()


loading = _Loading()


class _HoldingCalls(threading.local):
    """This thread's calls that hold the models: the module, its frame, and the permit taken."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any]] = []


class Hold:
    """Keeps the models of one background receiver as they are, for the thread that enters."""

    def __init__(self, acquire_permit: Callable[[], Any]) -> None:
        # None once the models do not change any more.
        self._acquire_permit: Callable[[], Any] | None = acquire_permit
        self._entered = _HoldingCalls()
        self._parents: _HoldingCalls | None = None
        _holds.add(self)

    def enter(self, module: Any = None, frame: Any = None) -> None:
        """Keeps the models unchanged: for a block, or for a module's forward in `frame`."""
        calls = self._entered.calls
        if not calls:
            # The outermost call has the permit. A thread that loads is alone with the models.
            calls.append((module, frame, None if loading.depth else self._acquire()))
            return
        around = calls[-1][1]
        if around is not None:
            here = frame or sys._getframe(1)
            while here is not around:
                here = here.f_back
                if here is None:
                    # Ctrl-C ended that forward before its hook could release the permit.
                    self._release(calls.pop())
                    return self.enter(module, frame)
        calls.append((module, frame, None))

    def leave(self, module: Any = None) -> None:
        """Ends the block, or the forward of this module."""
        calls = self._entered.calls
        at = len(calls) - 1
        while at >= 0 and calls[at][0] is not module:
            at -= 1
        if at < 0:
            # The guard was added while that forward ran.
            return
        # Inner calls that Ctrl-C ended are dropped too.
        while len(calls) > at:
            self._release(calls.pop())

    def _acquire(self) -> Any:
        while (acquire_permit := self._acquire_permit) is not None:
            try:
                permit = acquire_permit()
            except LifecycleError:
                if acquire_permit is self._acquire_permit:
                    raise
                continue
            if acquire_permit is self._acquire_permit:
                return permit
            # The receiver has moved to another sender while this thread waited.
            permit.release()
        return None

    def end(self) -> None:
        """Makes the hold do nothing from here on: the models do not change any more."""
        self._acquire_permit = None

    @staticmethod
    def _release(call: tuple[Any, Any, Any]) -> None:
        if call[2] is not None:
            call[2].release()


class Guard:
    """Holds the models while a forward of a module, or of a part of it, runs."""

    def __init__(self, hold: Hold, module: Any) -> None:
        hide_from_compiler(_Hook.before, _Hook.after, Hold.enter, Hold.leave, Hold._acquire, Hold._release)
        self._hook = _Hook(hold)
        self._module = weakref.ref(module)
        self._handles: list[Any] = []
        # By id: a module may compare by value.
        self._covered: dict[int, weakref.ref[Any]] = {}
        _guards.add(self)
        self.cover()

    def cover(self) -> None:
        """Guards the parts that the module has gained."""
        module = self._module()
        if module is None:
            return
        for part in _parts(module):
            known = self._covered.get(id(part))
            if known is None or known() is not part:
                self._covered[id(part)] = weakref.ref(part)
                self._handles += [
                    part.register_forward_pre_hook(self._hook.before, prepend=True),
                    part.register_forward_hook(self._hook.after, always_call=True),
                ]

    def remove(self) -> None:
        """Removes the hooks."""
        self._hook._hold = None
        for handle in self._handles:
            handle.remove()
        self._handles, self._covered = [], {}


def cover(module: Any) -> None:
    """Guards new parts of a module, if the module is guarded."""
    for guard in list(_guards):
        if guard._module() is module:
            guard.cover()


def is_hook(hook: Any) -> bool:
    """Whether a hook of a module is a guard's, which changes nothing in what a forward returns."""
    return type(getattr(hook, "__self__", None)) is _Hook


def is_hook_of(hook: Any, hold: Hold | None) -> bool:
    """Whether it is a guard's that does nothing while this thread has this hold."""
    return is_hook(hook) and hook.__self__._hold in (None, hold)


def _parts(module: Any) -> list[Any]:
    """The module itself, and the parts whose forwards read weights."""
    import torch

    found, seen, left = [], set(), [module]
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        reads = next(part.parameters(), None) is not None or next(part.buffers(), None) is not None
        if isinstance(part, torch.jit.ScriptModule):
            # A scripted module takes no such hooks.
            continue
        if part is not module:
            # torch leaves the fast path of an encoder layer that has hooks.
            if not reads or isinstance(part, torch.nn.TransformerEncoderLayer):
                continue
        found.append(part)
        left.extend(part.children())
    return found


class _Hook:
    """The hooks at both ends of a forward. In a copy of the module they do nothing."""

    def __init__(self, hold: Hold | None = None) -> None:
        self._hold = hold

    def before(self, module: Any, args: Any) -> None:
        if _is_compiling():
            _inlined()
        # Another thread may remove the guard meanwhile.
        elif (hold := self._hold) is not None:
            hold.enter(module, sys._getframe(1))

    def after(self, module: Any, args: Any, output: Any) -> None:
        if not _is_compiling() and (hold := self._hold) is not None:
            hold.leave(module)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Hook, ()


# torch.compile and the hooks. It calls the hooks of a compiled module's root outside the graph,
# and would compile them too: their code is excepted. It traces the hooks of parts that it
# compiles into one graph, where they do nothing. The compiled function holds the models then.


# torch's own function, once there is a guard.
_is_compiling: Callable[[], bool] = bool


def hide_from_compiler(*functions: Any) -> None:
    """Makes torch.compile skip functions of hooks that run outside its graphs.

    Calls torch's C functions, since ``torch.compiler.disable`` imports the whole compiler,
    which takes seconds, and breaks graphs.
    """
    import torch

    global _is_compiling
    # Not is_compiling, which is true in all threads while one thread compiles.
    _is_compiling = torch.compiler.is_dynamo_compiling
    frames = torch._C._dynamo.eval_frame
    for function in functions:
        if hasattr(frames, "set_code_exec_strategy"):
            skip = frames._FrameAction.SKIP
            frames.set_code_exec_strategy(
                function.__code__, frames._FrameExecStrategy(skip, skip)
            )
        else:
            frames.skip_code(function.__code__)


def _inlined() -> None:
    """Guards the compiled function around a guarded forward; torch calls this as it traces."""
    import torch

    if getattr(torch.compiler, "is_exporting", bool)():
        return
    caller = _compiled_call()
    if not _live():
        return
    if caller is None:
        logger.warning(
            "a guarded forward was compiled into a larger function, which is not guarded: "
            "call that function inside `with receiver.frozen():`"
        )
    elif _enter_holds not in caller["self"].enter_exit_hooks:
        # Later calls, and the current one.
        caller["self"].enter_exit_hooks.append(_enter_holds)
        caller["cleanups"].append(_enter_holds())


def _live() -> list[Hold]:
    return [hold for hold in list(_holds) if hold._acquire_permit is not None]


def _enter_holds() -> Callable[[], None]:
    """Enters every hold there is at a compiled call, and returns the function that leaves them."""
    entered = _live()
    for hold in entered:
        hold.enter()

    def leave() -> None:
        for hold in reversed(entered):
            hold.leave()

    return leave


def _compiled_call() -> dict[str, Any] | None:
    """The local variables of this thread's outermost call of a compiled function."""
    found, frame = None, sys._getframe(1)
    while frame is not None:
        # `_fn` is the wrapper's name up to torch 2.8.
        if frame.f_code.co_name in ("compile_wrapper", "_fn") and "cleanups" in frame.f_locals:
            found = frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
    return found if hasattr((found or {}).get("self"), "enter_exit_hooks") else None


# By this mark torch calls the function as it compiles, and does not trace it.
_inlined._dynamo_marked_constant = True  # type: ignore[attr-defined]

_holds: weakref.WeakSet[Hold] = weakref.WeakSet()
_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


def _in_child() -> None:
    _switch_interval.in_child()
    # A forked child cannot use its parent's receivers, and must not release their permits.
    for hold in list(_holds):
        hold.end()
        hold._parents, hold._entered = hold._entered, _HoldingCalls()


os.register_at_fork(after_in_child=_in_child)
