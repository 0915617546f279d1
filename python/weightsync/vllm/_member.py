"""One engine of a trainer: what it has, and how a version gets there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from weightsync._native import EngineUpdate, Report
from weightsync.errors import DeadlineError, WeightsyncError
from weightsync.sender import Sender
from weightsync.vllm._engines import Engine, EngineCallError, EngineDiedError, Pause
from weightsync.vllm._report import EngineReport

_Weights = Literal["old", "new", "unknown"]


@dataclass(frozen=True)
class Rules:
    """How engines are updated."""

    pause: Pause
    reset_prefix_cache: bool
    timeout: float


@dataclass(frozen=True)
class Sent:
    """The version that engines are to have."""

    sender: Sender
    version: int
    began: float
    #: Where it was just sent.
    report: Report | None

    @property
    def bytes(self) -> int:
        """What brought it to a host."""
        if self.report is None:
            return self.sender.snapshot()._native.layout.payload_bytes
        delta = self.report.delta_bytes
        return self.report.bytes if delta is None else delta


class Member:
    """An engine, its workers' numbers, and what it is known to have."""

    def __init__(self, engine: Engine, take: Callable[[int], int]) -> None:
        self.name = engine.name
        self._engine = engine
        self._take = take
        self._first: int | None = None
        self._ranks = 0
        self._version: int | None = None
        # It is paused, and nobody knows that its weights are whole.
        self._held = False
        #: The level it sleeps at.
        self.asleep: int | None = None

    @property
    def workers(self) -> list[int]:
        """The sender's numbers of its ranks."""
        return [] if self._first is None else list(range(self._first, self._first + self._ranks))

    def sync(self, sent: Sent, rules: Rules) -> EngineReport:
        """Brings a version that was just sent to the engine."""
        if self.asleep is not None:
            return self._line(sent, "asleep")
        return self._guarded(sent, rules)

    def refresh(self, sent: Sent, rules: Rules) -> EngineReport:
        """Brings the newest version, unless the engine has it."""
        if self.asleep is not None:
            return self._line(sent, "asleep")
        return self._guarded(sent, rules, unless_there=True)

    def sleep(self, level: int, timeout: float) -> None:
        """Puts the engine to sleep."""
        self._engine.sleep(level, timeout)
        self.asleep = level

    def wake(self, sent: Sent, rules: Rules) -> EngineReport:
        """Wakes the engine with the newest version."""
        level, self.asleep = self.asleep, None
        tags = ["kv_cache"] if level else []
        try:
            if level:
                self._engine.wake(["weights"], rules.timeout)
        except EngineDiedError as error:
            return self._line(sent, "dead", reason=f"wake_up: {error}")
        except (EngineCallError, WeightsyncError) as error:
            self.asleep = level
            return self._line(sent, "asleep", reason=f"wake_up: {error}")
        return self._guarded(sent, rules, tags=tags)

    def _guarded(self, sent: Sent, rules: Rules, **how: Any) -> EngineReport:
        """What nobody expects is a line, too: the others have theirs."""
        try:
            return self._update(sent, rules, **how)
        except Exception as error:
            self._held = True
            return self._line(sent, "held", reason=f"{type(error).__name__}: {error}")

    def _update(
        self, sent: Sent, rules: Rules, *, unless_there: bool = False, tags: list[str] | None = None
    ) -> EngineReport:
        try:
            self._prepare(sent, rules.timeout)
        except EngineDiedError as error:
            return self._dead(sent, str(error))
        except (EngineCallError, WeightsyncError) as error:
            outcome = "held" if self._held else "kept old"
            return self._line(sent, outcome, reason=f"not paused: {error}")
        if unless_there and not self._held and self._loaded(sent) == sent.version:
            return self._line(sent, "updated")
        return self._drive(sent, rules, tags or [])

    def _prepare(self, sent: Sent, timeout: float) -> None:
        """Before the pause: every rank has joined, has the version, and has compared it."""
        engine = self._engine
        engine.interface(timeout)
        if self._first is None:
            self._ranks = engine.ranks(timeout)
            self._first = self._take(self._ranks)
        try:
            self._join(sent, timeout)
        except EngineCallError as error:
            if error.weights != "open":
                raise
            # A trainer has left it so, or a call came too late.
            engine.finish(None, timeout)
            self._join(sent, timeout)
        # One that has just joined has what was sent, whatever the report says of its number.
        lines = [] if sent.report is None or self._version is None else sent.report.workers
        for line in lines:
            if line.worker in self.workers and line.outcome == "late":
                raise DeadlineError(f"worker {line.worker} did not fetch it in time")

    def _join(self, sent: Sent, timeout: float) -> None:
        self._engine.ask(
            timeout,
            do="join",
            sender=sent.sender.init_info.to_json(),
            first_worker=self._first,
            version=sent.version,
        )

    def _drive(self, sent: Sent, rules: Rules, tags: list[str]) -> EngineReport:
        """Pause, start, update, finish, resume; what follows a failure is the core's to say."""
        update, was_held, paused = EngineUpdate(), self._held, time.monotonic()
        call = update.begin()
        while call is not None:
            try:
                self._make(call, sent, rules, tags)
                call = update.done()
            except EngineDiedError as error:
                call = update.died(str(error))
            except (EngineCallError, WeightsyncError) as error:
                if was_held and call in ("pause", "start"):
                    return self._line(sent, "held", reason=f"{call} failed: {error}")
                if call == "update":
                    self._end(rules.timeout)
                call = update.failed(str(error), self._known(call, error, update.weights))
        took = time.monotonic() - paused
        outcome = update.outcome or "held"
        if outcome == "dead":
            return self._dead(sent, update.reason)
        self._held = outcome == "held"
        if update.weights == "new":
            self._version = self._label(sent)
        elif update.weights == "unknown":
            self._version = None
        return self._line(sent, outcome, pause=took, reason=update.reason)

    def _make(self, call: str, sent: Sent, rules: Rules, tags: list[str]) -> None:
        engine, timeout = self._engine, rules.timeout
        match call:
            case "pause":
                engine.pause(rules.pause, rules.reset_prefix_cache, timeout)
            case "start":
                engine.start(timeout)
            case "update":
                engine.update(sent.version, timeout)
            case "finish":
                engine.finish(str(self._label(sent)), timeout)
                if rules.reset_prefix_cache:
                    engine.reset_cache(timeout)
            case "restore":
                engine.ask(timeout, do="restore")
            case "resume":
                if tags:
                    engine.wake(tags, timeout)
                engine.resume(timeout)

    def _end(self, timeout: float) -> None:
        """Ends an update that failed; if that fails too, the next sync does it."""
        with contextlib.suppress(EngineCallError, WeightsyncError):
            self._engine.finish(None, timeout)

    def _known(self, call: str, error: Exception, before: _Weights) -> _Weights:
        """What the engine is known to hold after a call that failed."""
        said = error.weights if isinstance(error, EngineCallError) else None
        if said in ("old", "new", "unknown"):
            return said
        # The workers' start and finish do nothing: only a load changes weights.
        known: dict[str, _Weights] = {"start": "old", "finish": "new", "resume": before}
        return known.get(call, "unknown")

    def _loaded(self, sent: Sent) -> int | None:
        """The version that all ranks of the engine say they run; None if they differ."""
        has = {one.worker: one.version for one in sent.sender.workers}
        versions = {has.get(worker) for worker in self.workers}
        return versions.pop() if len(versions) == 1 else None

    def _label(self, sent: Sent) -> int:
        """The version that was loaded: a newer one, should somebody else have sent it."""
        return max(self._loaded(sent) or 0, sent.version)

    def _dead(self, sent: Sent, reason: str | None) -> EngineReport:
        # A server that comes back has its first weights, and is not paused.
        self._version, self._held = None, False
        return self._line(sent, "dead", reason=reason)

    def _line(
        self, sent: Sent, outcome: str, *, pause: float | None = None, reason: str | None = None
    ) -> EngineReport:
        size = sent.bytes if outcome == "updated" else 0
        took = time.monotonic() - sent.began
        return EngineReport(self.name, outcome, self._version, size, pause, took, reason)
