"""What keeps a worker's models as they are: holds, and the guards that take them automatically.

A hold belongs to a thread. A guard takes one for the time of a forward, of the module or of
any part of it, through hooks. torch.compile does not see them: no graph has them in it, and
none breaks on them.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("weightsync")


# Seconds for which another thread may keep the interpreter's lock while a version is loaded.
_SHORT_TURN = 20e-6


class _Turns:
    """Short turns at the interpreter's lock while any thread loads.

    A load calls torch a few times for each tensor, and each call releases the lock. To get it
    back takes up to a switch interval, 5 ms, while another thread runs Python. It takes far
    longer while that thread calls torch too: each release wakes the waiting thread, which comes
    too late, and waits a whole interval again before it may ask for its turn.
    """

    def __init__(self) -> None:
        # A signal's handler may load in the middle of this.
        self._lock = threading.RLock()
        # By thread, not counted: Ctrl-C may end a load before it has said that it began.
        self._loads: set[int] = set()
        # The interval of before, and the short one as the interpreter rounds it.
        self._usual = self._short = 0.0

    def shorten(self) -> None:
        with self._lock:
            if not self._loads:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual, _SHORT_TURN))
                self._short = sys.getswitchinterval()
            self._loads.add(threading.get_ident())

    def restore(self) -> None:
        with self._lock:
            self._loads.discard(threading.get_ident())
            # The worker may have set another one during the load.
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


_turns = _Turns()


class _Loading(threading.local):
    """Whether this thread is loading: it is alone with the models then."""

    depth = 0

    def __enter__(self) -> None:
        if self.depth == 0:
            _turns.shorten()
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            _turns.restore()


loading = _Loading()


class _Entered(threading.local):
    """The calls of this thread that hold the models: module, frame, and the permit it took."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any]] = []


class Hold:
    """Keeps the models of one background receiver as they are, for the thread that enters."""

    def __init__(self, acquire_permit: Callable[[], Any]) -> None:
        # None once the models do not change any more.
        self._acquire_permit: Callable[[], Any] | None = acquire_permit
        self._entered = _Entered()
        self._parents: _Entered | None = None
        _holds.add(self)

    def enter(self, module: Any = None, frame: Any = None) -> None:
        """From here on nothing changes: in a block, or while a module's forward is in `frame`."""
        calls = self._entered.calls
        if not calls:
            # The outermost call has the permit. A thread that loads is alone with the models.
            acquire_permit = None if loading.depth else self._acquire_permit
            calls.append((module, frame, None if acquire_permit is None else acquire_permit()))
            return
        around = calls[-1][1]
        if around is not None:
            here = frame or sys._getframe(1)
            while here is not around:
                here = here.f_back
                if here is None:
                    # Ctrl-C ended that forward: it has not told, nor released what it held.
                    self._release(calls.pop())
                    return self.enter(module, frame)
        calls.append((module, frame, None))

    def leave(self, module: Any = None) -> None:
        """The block, or the forward of this module, has ended."""
        calls = self._entered.calls
        at = len(calls) - 1
        while at >= 0 and calls[at][0] is not module:
            at -= 1
        if at < 0:
            # The guard was put on while that forward ran.
            return
        # Inner ones that Ctrl-C ended go with it.
        while len(calls) > at:
            self._release(calls.pop())

    def end(self) -> None:
        """The models do not change any more: nothing has to be held from here on."""
        self._acquire_permit = None

    @staticmethod
    def _release(call: tuple[Any, Any, Any]) -> None:
        if call[2] is not None:
            call[2].release()


class Guard:
    """Has a forward of a module, or of a part of it, hold the models while it runs."""

    def __init__(self, hold: Hold, module: Any) -> None:
        hide_from_compiler(_Hook.before, _Hook.after, Hold.enter, Hold.leave, Hold._release)
        self._hook = _Hook(hold)
        self._module = weakref.ref(module)
        self._handles: list[Any] = []
        # By id: a module may compare by value.
        self._covered: dict[int, weakref.ref[Any]] = {}
        _guards.add(self)
        self.cover()

    def cover(self) -> None:
        """Guards parts that are new in the module, too."""
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
        """Takes the hooks off again."""
        self._hook._hold = None
        for handle in self._handles:
            handle.remove()
        self._handles, self._covered = [], {}


def cover(module: Any) -> None:
    """Guards what is new in a module, if it is guarded."""
    for guard in list(_guards):
        if guard._module() is module:
            guard.cover()


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
            # It takes no such hooks.
            continue
        if part is not module:
            # torch computes an encoder layer another way, more slowly, if it has hooks.
            if not reads or isinstance(part, torch.nn.TransformerEncoderLayer):
                continue
        found.append(part)
        left.extend(part.children())
    return found


class _Hook:
    """The two ends of a forward. A copy of the module has copies that do nothing."""

    def __init__(self, hold: Hold | None = None) -> None:
        self._hold = hold

    def before(self, module: Any, args: Any) -> None:
        if _is_compiling():
            _inlined()
        # Another thread may take the guard off meanwhile.
        elif (hold := self._hold) is not None:
            hold.enter(module, sys._getframe(1))

    def after(self, module: Any, args: Any, output: Any) -> None:
        if not _is_compiling() and (hold := self._hold) is not None:
            hold.leave(module)

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Hook, ()


# What torch.compile makes of hooks. It calls those of a compiled module's root outside of the
# graph, and would compile them too: their code is excepted. Of parts that it compiles into one
# graph it traces the hooks, which do nothing there. What was compiled holds the models then.


# torch's own function, once there is a guard.
_is_compiling: Callable[[], bool] = bool


def hide_from_compiler(*functions: Any) -> None:
    """Has torch.compile leave functions of hooks alone that run outside of what it compiles.

    By the C functions, since ``torch.compiler.disable`` imports all of the compiler, which
    takes seconds, and breaks a graph.
    """
    import torch

    global _is_compiling
    # Not is_compiling, which is true in all threads while one of them compiles.
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
    """Called once as a guarded forward is compiled into a larger graph, for what calls that."""
    import torch

    if getattr(torch.compiler, "is_exporting", bool)():
        return
    caller = _compiled_call()
    if not _live():
        return
    if caller is None:
        logger.warning(
            "a forward that is guarded was compiled into a larger function, which is not: "
            "call that inside `with receiver.frozen():`"
        )
    elif _entry not in caller["self"].enter_exit_hooks:
        # The calls to come, and the one that is on.
        caller["self"].enter_exit_hooks.append(_entry)
        caller["cleanups"].append(_entry())


def _live() -> list[Hold]:
    return [hold for hold in list(_holds) if hold._acquire_permit is not None]


def _entry() -> Callable[[], None]:
    """Enters every receiver's hold, also of receivers that came after the compiling; what it
    returns leaves them."""
    entered = _live()
    for hold in entered:
        hold.enter()

    def leave() -> None:
        for hold in reversed(entered):
            hold.leave()

    return leave


def _compiled_call() -> dict[str, Any] | None:
    """The variables of the outermost call of something compiled, in this thread."""
    found, frame = None, sys._getframe(1)
    while frame is not None:
        # The second is its name up to torch 2.8.
        if frame.f_code.co_name in ("compile_wrapper", "_fn") and "cleanups" in frame.f_locals:
            found = frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]
    return found if hasattr((found or {}).get("self"), "enter_exit_hooks") else None


# torch's own mark of a function to call as it compiles, and not to trace.
_inlined._dynamo_marked_constant = True  # type: ignore[attr-defined]

_holds: weakref.WeakSet[Hold] = weakref.WeakSet()
_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


def _in_child() -> None:
    _turns.in_child()
    # A forked child has no receivers of its parent's, and must not release what that holds.
    for hold in list(_holds):
        hold.end()
        hold._parents, hold._entered = hold._entered, _Entered()


os.register_at_fork(after_in_child=_in_child)
