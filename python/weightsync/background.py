"""Receiving in a thread of its own, while the worker's loop goes on as it is."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from typing import Any

from weightsync import _ends
from weightsync._native import Background as Native
from weightsync._target import ModuleTarget, Target, loading


class Background:
    """What :meth:`Receiver.start_background` returns.

    A module does not change while its forward runs, nor inside ``with`` of this; in
    between, whole versions at a time, it does. Several models flip together.
    """

    def __init__(self, native: Native, targets: dict[str, Target], one: bool) -> None:
        self._pid = os.getpid()
        self._native = native
        self._one = one
        self._targets = targets
        self._seats = threading.local()
        self._guards: list[_Guard] = []
        for target in targets.values():
            if isinstance(target, ModuleTarget) and (module := target._module()) is not None:
                self.guard(module)

    def guard(self, module: Any) -> None:
        """Keeps the models as they are while this module's forward runs, too."""
        self._guards.append(_Guard(self, module))

    def safe_point(self) -> Any:
        """Lets the models change here and now; their versions if they did, else None."""
        return self._versions(self._native.safe_point())

    def wait(
        self, version: int | dict[str, int] | None = None, *, timeout: float | None = None
    ) -> bool:
        """Waits until the models have at least this version, or, without one, a new one.

        Returns:
            False if the timeout came first, or nothing will arrive any more.
        """
        if isinstance(version, int):
            version = dict.fromkeys(self.versions, version)
        return self._native.wait(version or {}, timeout)

    @property
    def version(self) -> int:
        """The version this worker runs, of its first model."""
        versions = self.versions
        # By name, they are in another order.
        return versions.get(next(iter(self._targets), ""), next(iter(versions.values()), 0))

    @property
    def versions(self) -> dict[str, int]:
        """The version of each model that this worker runs."""
        return self._native.versions()

    @property
    def run(self) -> tuple[int, str]:
        """The run of these versions: its epoch and id."""
        return self._native.run()

    @property
    def state(self) -> str:
        """What it does: "following", "searching", "closed", "died" or "failed"."""
        return self._native.state()[0]

    @property
    def failure(self) -> str | None:
        """Why the newest version could not be applied, if it could not."""
        return self._native.state()[2]

    def shutdown(self) -> None:
        """Ends the thread and leaves. Any number of times; models keep what they have."""
        # Modules are guarded until nothing loads any more.
        self._native.shutdown()
        for guard in self._guards:
            guard.remove()
        self._guards = []
        for target in self._targets.values():
            if isinstance(target, Target):
                target.release()
        _ends.closed(self)

    def __del__(self) -> None:
        if not sys.is_finalizing() and os.getpid() == self._pid:
            self.shutdown()

    def __enter__(self) -> Background:
        """Keeps the models as they are, in this thread, until ``with`` ends."""
        self._enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def __repr__(self) -> str:
        return repr(self._native)

    def _enter(self, frame: Any = None) -> None:
        seats = self._seats.__dict__.setdefault("taken", [])
        if frame is not None and seats:
            # A forward that was ended by Ctrl-C has not told: what it held is let go of.
            while seats and seats[-1][1] is not None and not _is_running(seats[-1][1]):
                self._leave()
        # One seat for each thread: a nested forward is inside the outer one. Whoever loads
        # is alone with the models, and may look at them.
        taken = None if seats or loading.depth else self._native.take_seat()
        seats.append((taken, frame))

    def _leave(self) -> None:
        seats = self._seats.__dict__.get("taken")
        if seats and (seat := seats.pop()[0]) is not None:
            seat.release()

    def _versions(self, versions: dict[str, int] | None) -> Any:
        if versions is None:
            return None
        return next(iter(versions.values())) if self._one else versions


def _is_running(frame: Any) -> bool:
    """Whether a call of this thread has not ended."""
    here: Any = sys._getframe(1)
    while here is not None:
        if here is frame:
            return True
        here = here.f_back
    return False


class _Guard:
    """Keeps a module as it is while its forward runs."""

    def __init__(self, background: Background, module: Any) -> None:
        self._hook = _Hook(background)
        self._handles = [
            module.register_forward_pre_hook(self._hook.before, prepend=True),
            module.register_forward_hook(self._hook.after, always_call=True),
        ]

    def remove(self) -> None:
        self._hook.end()
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _Hook:
    """The two ends of a forward. A copy of the module has copies that do nothing."""

    def __init__(self, background: Background | None = None) -> None:
        # A module may outlive what guards it.
        self._background: weakref.ref[Background] | None = (
            None if background is None else weakref.ref(background)
        )

    def end(self) -> None:
        self._background = None

    def before(self, module: Any, args: Any) -> None:
        background = self._here()
        if background is not None:
            background._enter(sys._getframe(1))

    def after(self, module: Any, args: Any, output: Any) -> None:
        background = self._here()
        if background is not None:
            background._leave()

    def _here(self) -> Background | None:
        """The background receiver, if it is this process's: a forked child has none."""
        background = None if self._background is None else self._background()
        if background is None or background._pid != os.getpid():
            return None
        return background

    def __deepcopy__(self, memo: Any) -> _Hook:
        return _Hook()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Hook, ()
