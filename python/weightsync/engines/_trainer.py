"""The trainer's end: each version on every engine, and a line for each that says so."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from weightsync._checks import seconds
from weightsync._turns import Turns
from weightsync.errors import LifecycleError, ModelError, SettingError
from weightsync.scheme import PLAINTEXT_VARIABLE, may_tell_in_plaintext
from weightsync.sender import Sender
from weightsync.engines._base import Engine, EngineCallError, Pause
from weightsync.engines._member import Member, Rules, Sent
from weightsync.engines._report import EngineReport, SyncReport


class Trainer:
    """Brings what a sender sends to engines: fetch, compare, pause, load, resume.

    Engines are driven at the same time, and one that fails or is gone is one line of the report.
    An engine generates with whole versions only: where a load fails, the weights before it come
    back, and an engine that has neither stays paused until a sync has brought it a version.

    All sends of the sender go through this.

    Calls block. An ``LLM`` serves one thread at a time, and calls of two threads at once end it: no
    other thread may generate during a call. A trainer that runs in the event loop of its
    ``AsyncLLM`` calls :meth:`sync_async`, and the other methods in a thread
    (``await asyncio.to_thread(trainer.wake)``).

    Args:
        sender: of the engines' model alone. It is connected by the first sync unless it is.
        engines: an ``LLM``, an ``AsyncLLM`` (from inside its event loop), the URL of a server of
            vLLM, or an engine of another kind, such as ``weightsync.sglang.Engine(url)``; see
            :meth:`add`.
        pause: how requests under way fare: ``"keep"`` freezes them, and they go on with the new
            weights; ``"wait"`` lets them end first; ``"abort"`` ends them.
        reset_prefix_cache: whether what the old weights computed is dropped after an update;
            frozen requests then compute it again.
        timeout: for each call to an engine, for the fetch, and for a call of this trainer that another
            thread has begun, in seconds.
        first_worker: the sender's worker number for the first engine's first rank; the others
            follow.
    """

    def __init__(
        self,
        sender: Sender,
        engines: Iterable[Any] = (),
        *,
        pause: Pause = "keep",
        reset_prefix_cache: bool = True,
        timeout: float = 60.0,
        first_worker: int = 0,
    ) -> None:
        if pause not in ("keep", "wait", "abort"):
            raise SettingError(f'pause: expected "keep", "wait" or "abort", got {pause!r}')
        seconds("timeout", timeout)
        if len(sender.models) != 1:
            raise ModelError(
                f"an engine runs one model, and the sender has {', '.join(sender.models)}: make a "
                "sender for the engines' model alone"
            )
        self._sender = sender
        self._rules = Rules(pause, reset_prefix_cache, timeout)
        self._numbers = _Numbers(first_worker)
        self._members: list[Member] = []
        self._made = 0
        # One sync at a time.
        self._turns = Turns()
        for engine in engines:
            self.add(engine)

    @property
    def engines(self) -> list[str]:
        """The names of the engines, as the reports have them."""
        return [member.name for member in self._members]

    def add(self, engine: Any, *, info_file: str | os.PathLike[str] | None = None) -> str:
        """Adds an engine, and returns its name. It gets the newest version at the next sync, or
        at once by :meth:`refresh`.

        Args:
            engine: an ``LLM``, an ``AsyncLLM``, the URL of a server of vLLM, or another engine.
            info_file: where to write what the engine needs to join. An engine whose variable
                ``WEIGHTSYNC_ENGINE_INFO`` names this file has the newest version whenever it
                restarts, before it serves. The file holds the sender's secret, and its owner alone
                can read it.

        Raises:
            SettingError: for an engine that is there already, and for an ``http://`` URL of another
                machine where the sender has a secret and plain text is not allowed.
        """
        made = _engine_of(engine, self._made)
        if made.is_unencrypted and not may_tell_in_plaintext(self._sender.scheme):
            raise SettingError(
                f"{made.name}: an engine is told how to join, and the sender's secret would travel "
                "to that machine in plain text: give an https:// URL, or, if you trust that network, "
                "allow it with the scheme's insecure_plaintext=True or with "
                f"{PLAINTEXT_VARIABLE}=1"
            )
        # A sync calls each engine from a thread of its own: an ``LLM`` that was added twice would
        # be called from two at once, which ends it.
        for member in self._members:
            if member.name == made.name or member.engine.is_of(engine):
                raise SettingError(
                    f"{member.name} is among the engines already: remove it first, or add another"
                )
        self._made += 1
        file = None if info_file is None else os.fspath(info_file)
        self._members = [*self._members, Member(made, self._numbers.take, file)]
        return made.name

    def remove(self, name: str) -> None:
        """Takes an engine out of the reports, and has it leave the sender. It keeps the weights
        it has. One that does not answer is left as it is.
        """
        member = self._member(name)
        member.engine.check_thread()
        with self._turns.take("remove", self._rules.timeout):
            self._members = [one for one in self._members if one is not member]
            try:
                member.leave(self._rules.timeout)
            finally:
                # Also where a call that was interrupted drives it on.
                self._sender.forget(member.workers)

    def sync(self, step: int | None = None, *, weights: Any = None) -> SyncReport:
        """Sends the model's weights, and brings them to every engine that is awake.

        Args:
            step: the version's number, such as the training step; it must grow. None: one more
                than the version before.
            weights: what to send in place of the sender's model.

        Raises:
            WrongWeightsError: if the weights are not as the sender was set up. What an engine
                refuses is a line of the report.
            LifecycleError: in the event loop of one of the engines.
            DeadlineError: if another thread is in a call of this trainer for all of the timeout.
        """
        self._check_thread()
        with self._turns.take("sync", self._rules.timeout):
            began = time.monotonic()
            sent = self._send(step, weights, began)
            return self._all(Member.sync, sent, self._members)

    async def sync_async(self, step: int | None = None, *, weights: Any = None) -> SyncReport:
        """As :meth:`sync`, in a thread: for a trainer in the event loop of its ``AsyncLLM``."""
        return await asyncio.to_thread(self.sync, step, weights=weights)

    def refresh(self) -> SyncReport:
        """Brings engines that do not have the newest version up to it, and sends nothing.

        For engines that were added, have restarted, or have failed.
        """
        self._check_thread()
        with self._turns.take("refresh", self._rules.timeout):
            return self._all(Member.refresh, self._last(), self._members)

    def sleep(self, name: str | None = None, *, level: int = 1) -> None:
        """Puts an engine, or all of them, to sleep; syncs pass it over until it wakes.

        Level 1 keeps the weights in the host's memory, and level 2 discards them: put engines to
        sleep by this method, so that their workers know.

        Raises:
            EngineCallError: naming the engines that cannot sleep. The others do.
        """
        self._check_thread()
        if level not in (0, 1, 2):
            raise SettingError(f"level: expected 0, 1 or 2, got {level!r}")
        with self._turns.take("sleep", self._rules.timeout):
            failed = []
            for member in self._chosen(name):
                try:
                    with member.alone(self._rules.timeout):
                        member.sleep(level, self._rules.timeout)
                except Exception as error:
                    failed.append(f"{member.name} does not sleep: {error}")
        if failed:
            raise EngineCallError("; ".join(failed))

    def wake(self, name: str | None = None) -> SyncReport:
        """Wakes an engine, or all that sleep: each has the newest version before it generates.

        An engine that cannot be brought to the newest version sleeps on, and its line says why.
        """
        self._check_thread()
        with self._turns.take("wake", self._rules.timeout):
            return self._all(Member.wake, self._last(), self._chosen(name))

    def _send(self, step: int | None, weights: Any, began: float) -> Sent:
        if not self._sender.is_connected:
            # Engines join later, one by one.
            timeout = self._rules.timeout
            self._sender.connect(0, weights=weights, version=step, timeout=timeout)
            if step in (None, self._sender.version):
                return self._last(began)
        report = self._sender.send(
            weights, wait="staged", version=step, timeout=self._rules.timeout
        )
        return Sent(self._sender, report.version, began, report)

    def _last(self, began: float | None = None) -> Sent:
        if not self._sender.is_connected:
            raise LifecycleError("nothing was sent yet: call sync first")
        began = time.monotonic() if began is None else began
        return Sent(self._sender, self._sender.version, began, None)

    def _all(
        self,
        update: Callable[[Member, Sent, Rules], EngineReport | None],
        sent: Sent,
        members: list[Member],
    ) -> SyncReport:
        """Updates engines, each in a thread of its own. Each of their calls has its end.

        Ctrl-C ends the wait. The threads go on, so that no engine is left in the middle.
        """
        lines: dict[str, EngineReport | None] = {}

        def one(member: Member) -> None:
            lines[member.name] = member.drive(update, sent, self._rules)

        threads = [
            threading.Thread(target=one, args=(member,), name=f"weightsync {member.name}")
            for member in members
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        made = [lines[member.name] for member in members]
        return SyncReport(sent.version, [line for line in made if line is not None])

    def _check_thread(self) -> None:
        for member in self._members:
            member.engine.check_thread()

    def _member(self, name: str) -> Member:
        for member in self._members:
            if member.name == name:
                return member
        raise SettingError(f"there is no engine {name!r}; there is {', '.join(self.engines)}")

    def _chosen(self, name: str | None) -> list[Member]:
        return self._members if name is None else [self._member(name)]

    def __repr__(self) -> str:
        return f"<Trainer of {self._sender!r}: {', '.join(self.engines) or 'no engine yet'}>"


def _engine_of(given: Any, place: int) -> Engine:
    """The engine behind what a trainer was given: one of vLLM, unless it says what it is."""
    if isinstance(given, Engine):
        return given
    from weightsync.vllm._engines import engine_of

    return engine_of(given, place)


class _Numbers:
    """The sender's worker numbers, handed out to engines as they are met."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._lock = threading.Lock()

    def take(self, count: int) -> int:
        with self._lock:
            first, self._next = self._next, self._next + count
            return first
