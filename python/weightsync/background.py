"""Receiving in a thread of its own, while the worker's loop runs unchanged."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from weightsync import _ends
from weightsync._checks import only_version
from weightsync._deadline import Deadline
from weightsync._guard import Guard, Hold
from weightsync._native import Background as Native
from weightsync._targets import ModuleTarget, Target
from weightsync.errors import LifecycleError

if TYPE_CHECKING:
    from weightsync._native import InitInfo, Session
    from weightsync.model_receiver import ModelReceiver


class Background:
    """A background receiver, as :meth:`ModelReceiver.start_background` starts it.

    A module does not change while a forward of it, or of a part of it, runs, nor inside
    ``with background:``. At other times it changes, by whole versions. Several models flip
    together.
    """

    def __init__(self, native: Native, targets: dict[str, Target]) -> None:
        self._pid = os.getpid()
        self._native = native
        self._has_ended = False
        self._targets = targets
        self._hold = Hold(native.acquire_permit)
        self._guards: list[Guard] = []
        for target in targets.values():
            if isinstance(target, ModuleTarget) and (module := target._module()) is not None:
                self.guard(module)

    def guard(self, module: Any) -> None:
        """Also keeps the models unchanged while a forward of this module, or of its parts, runs."""
        self._guards.append(Guard(self._hold, module))

    def safe_point(self) -> dict[str, int] | None:
        """Lets the models change here and now.

        Returns:
            The models' versions by name if they changed, else None.
        """
        versions: dict[str, int] | None = self._ask("safe_point")
        return versions

    def wait(
        self, version: int | dict[str, int] | None = None, *, timeout: float | None = None
    ) -> bool:
        """Waits until all models have at least this version, or, without one, a new one.

        Args:
            version: of every model, or by name.
            timeout: in seconds.

        Returns:
            False if the timeout came first, or if no version can arrive any more; without
            a timeout also if the sender has shut down.
        """
        return self._wait(version, Deadline(timeout), None if version else self.run)

    def _wait(
        self,
        version: int | dict[str, int] | None,
        until: Deadline,
        run: tuple[int, str] | None,
    ) -> bool:
        """The same, where a version of another run than this one counts as new."""
        wanted = dict.fromkeys(self.versions, version) if isinstance(version, int) else version
        while True:
            native = self._native
            if run is not None and self.run != run:
                # The move has brought a version.
                return True
            try:
                if native.wait(wanted or {}, until.left(), run):
                    return True
            except LifecycleError:
                if native is self._native:
                    raise
                continue
            # The receiver may have moved to another sender meanwhile.
            if native is self._native or until.left() == 0:
                return False

    @property
    def version(self) -> int:
        """The version that this worker runs.

        Raises:
            ModelError: if the worker runs several models, which :attr:`versions` has.
        """
        return only_version(self.versions)

    @property
    def versions(self) -> dict[str, int]:
        """The version of each model that this worker runs, by name."""
        versions: dict[str, int] = self._ask("versions")
        return versions

    @property
    def run(self) -> tuple[int, str]:
        """The run of these versions: its epoch and id."""
        run: tuple[int, str] = self._ask("run")
        return run

    @property
    def state(self) -> str:
        """The receiver's state: "following", "searching", "closed", "died" or "failed".

        After the death of a sender with a run directory the receiver searches. Once such
        a sender has shut down the state is "closed", and the receiver still follows the
        next sender.
        """
        state: str = self._ask("state")[0]
        return state

    @property
    def failure(self) -> str | None:
        """Why the newest version could not be applied, or why a sender that answers cannot be
        followed; None if there is no such reason.
        """
        failure: str | None = self._ask("state")[2]
        return failure

    def _move(
        self, receiver: ModelReceiver, session: Session, info: InitInfo, timeout: float | None
    ) -> None:
        """Exchanges the thread for one of another session, while no thread uses the models."""
        before = self._native

        def exchange() -> None:
            if self._has_ended:
                raise LifecycleError("the receiver was shut down")
            native = session.start_background(receiver._loaders, receiver._is_declared)
            acquire_permit = native.acquire_permit
            # One statement without a call: Ctrl-C comes before it or after it.
            self._native, self._hold._acquire_permit, receiver._session, receiver._info = (
                native,
                acquire_permit,
                session,
                info,
            )

        try:
            before.hand_over(exchange, timeout)
        finally:
            # Also where Ctrl-C came after the exchange.
            if self._native is not before:
                before.shutdown(None)

    def _ask(self, call: str) -> Any:
        while True:
            native = self._native
            try:
                return getattr(native, call)()
            except LifecycleError:
                # The receiver may have moved to another sender meanwhile.
                if native is self._native:
                    raise

    def shutdown(self) -> None:
        """Ends the thread and leaves. Any number of times; models keep their weights."""
        self._end(_ends.why)

    def _end(self, reason: str | None) -> None:
        # Modules stay guarded until the thread that loads has ended, and one that a move has begun.
        self._has_ended, ended = True, None
        while ended is not self._native:
            ended = self._native
            ended.shutdown(reason)
        self._hold.end()
        for guard in self._guards:
            guard.remove()
        self._guards = []
        for target in self._targets.values():
            if isinstance(target, Target):
                target.release()
        _ends.closed(self)

    def __del__(self) -> None:
        if not sys.is_finalizing() and os.getpid() == self._pid:
            self._end(_ends.DROPPED)

    def __enter__(self) -> Background:
        """Keeps the models unchanged, in this thread, until the ``with`` block ends."""
        self._hold.enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._hold.leave()

    def __repr__(self) -> str:
        return repr(self._native)
