"""One engine of a trainer: what it has, and how a version gets there."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from weightsync._native import EngineUpdate, Report
from weightsync.errors import DeadlineError, WeightsyncError
from weightsync.sender import Sender
from weightsync.engines import _restart
from weightsync.engines._base import Engine, EngineCallError, EngineDiedError, Pause
from weightsync.engines._report import EngineReport

logger = logging.getLogger("weightsync")

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
    def run(self) -> str:
        """The sender's run, which a version's number belongs to."""
        epoch, name = self.sender.snapshot()._native.run
        return f"{epoch} {name}"

    def bytes(self, *, new: bool) -> int:
        """What brought it to a host; ``new`` if the engine has no version before it."""
        if self.report is None or new:
            return self.sender.snapshot()._native.layout.payload_bytes
        delta = self.report.delta_bytes
        return self.report.bytes if delta is None else delta


class Member:
    """An engine, its workers' numbers, and what it is known to have."""

    def __init__(
        self, engine: Engine, take: Callable[[int], int], info_file: str | None = None
    ) -> None:
        self.name = engine.name
        self.engine = engine
        self._take = take
        self._info_file = info_file
        # What that file holds.
        self._written: tuple[str, int] | None = None
        self._first: int | None = None
        self._ranks = 0
        # Whether its ranks were counted since it started.
        self._counted = False
        self._version: int | None = None
        # A pause of this trainer was tried, and no resume has succeeded since.
        self._paused = False
        # The thread that drives the engine has it: Ctrl-C ends a call of the trainer, and not its threads.
        self._turn = threading.Lock()
        # Nobody knows that its weights are whole.
        self._held = False
        # Its workers wait to hear that an update is over.
        self._joined = False
        # What it has computed may be of weights that it had before.
        self._stale = False
        # It began this update without a version.
        self._new = True
        # This update has set the label.
        self._labelled = False
        #: The level it sleeps at.
        self.asleep: int | None = None

    @property
    def workers(self) -> list[int]:
        """The sender's numbers of its ranks."""
        return [] if self._first is None else list(range(self._first, self._first + self._ranks))

    @contextlib.contextmanager
    def alone(self, timeout: float) -> Iterator[None]:
        """Waits until no other thread drives the engine.

        Raises:
            DeadlineError: if one still does after so many seconds.
        """
        if not self._turn.acquire(timeout=timeout):
            raise DeadlineError(
                f"a call that was interrupted has driven it for {timeout:g} s since: call again once "
                "that has ended"
            )
        try:
            yield
        finally:
            self._turn.release()

    def drive(
        self,
        update: Callable[[Member, Sent, Rules], EngineReport | None],
        sent: Sent,
        rules: Rules,
    ) -> EngineReport | None:
        """Makes an update. What nobody expects is a line, too: the others have theirs."""
        try:
            with self.alone(rules.timeout):
                return update(self, sent, rules)
        except BaseException as error:
            return self._line(sent, self._stuck(), reason=f"{type(error).__name__}: {error}")

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
        before = self.asleep
        if level:
            self.engine.check_sleeps(timeout)
        if level == 2:
            self._forget(timeout)
        # A sleep that is late comes later.
        self.asleep = level
        try:
            self.engine.sleep(level, timeout)
        except EngineCallError:
            self.asleep = before
            raise

    def wake(self, sent: Sent, rules: Rules) -> EngineReport | None:
        """Wakes the engine with the newest version; None if it does not sleep."""
        try:
            if self.asleep is None:
                if self._paused or not self.engine.is_paused(rules.timeout):
                    return None
                self.engine.check_sleeps(rules.timeout)
                # Somebody else put it to sleep, and its weights may be discarded.
                self._forget(rules.timeout)
                self.asleep = 2
            if self.asleep:
                self.engine.wake(["weights"], rules.timeout)
        except EngineDiedError as error:
            return self._dead(sent, f"wake_up: {error}")
        except WeightsyncError as error:
            return self._line(sent, "asleep", reason=f"wake_up: {error}")
        return self._guarded(sent, rules)

    def leave(self, timeout: float) -> None:
        """Leaves the sender, if the engine still answers; it keeps the weights it has."""
        if self._first is not None:
            with contextlib.suppress(WeightsyncError), self.alone(timeout):
                self.engine.ask(timeout, do="leave")

    def _forget(self, timeout: float) -> None:
        """The engine's weights are, or will be, discarded: no update may count on them."""
        self.engine.ask(timeout, do="forget")
        self._held = True

    def _guarded(self, sent: Sent, rules: Rules, *, unless_there: bool = False) -> EngineReport:
        """What nobody expects is a line, too: the others have theirs."""
        try:
            line = self._update(sent, rules, unless_there)
        except Exception as error:
            self._held = self._held or self._paused
            line = self._line(sent, self._stuck(), reason=f"{type(error).__name__}: {error}")
        if self._joined and not self._paused:
            # An engine that somebody else pauses from here on is not taken for one of ours.
            try:
                self.engine.ask(rules.timeout, do="over")
                self._joined = False
            except Exception as error:
                # The engine has what the line says, and hears of it with the next update.
                logger.warning("%s was not told that its update is over: %s", self.name, error)
        return line

    def _stuck(self) -> str:
        """How an engine is whose update could not begin."""
        if self.asleep is not None:
            return "asleep"
        if self._held:
            return "held"
        return "not resumed" if self._paused else "kept old"

    def _update(self, sent: Sent, rules: Rules, unless_there: bool) -> EngineReport:
        self._new = self._version is None
        try:
            self._prepare(sent, rules.timeout)
            if not self.engine.knows_its_weights:
                if unless_there:
                    # It may have restarted.
                    self._forget(rules.timeout)
            elif unless_there and not self._held and not self._paused and self._has(sent):
                return self._there(sent, rules.timeout)
        except EngineDiedError as error:
            return self._dead(sent, str(error))
        except WeightsyncError as error:
            if isinstance(error, EngineCallError) and error.weights == "asleep":
                return self._line(sent, "asleep", reason=str(error))
            return self._line(sent, self._stuck(), reason=f"not paused: {error}")
        return self._drive(sent, rules)

    def _prepare(self, sent: Sent, timeout: float) -> None:
        """Before the pause: every rank has joined, has the version, and has compared it."""
        engine = self.engine
        engine.check(timeout)
        if not self._counted:
            ranks = engine.ranks(timeout)
            if ranks < 1:
                raise EngineCallError(f"it says that it has {ranks} workers: expected 1 or more")
            if ranks != self._ranks:
                # Nobody waits for the old ones.
                sent.sender.forget(self.workers)
                self._ranks, self._first = ranks, self._take(ranks)
            self._counted = True
        # One that has just joined has what was sent, whatever the report says of its number.
        lines = [] if sent.report is None or self._version is None else sent.report.workers
        for line in lines:
            if line.worker in self.workers and line.outcome == "late":
                raise DeadlineError(f"worker {line.worker} did not fetch it in time")
        try:
            self._join(sent, timeout)
        except EngineCallError as error:
            if error.weights != "open":
                raise
            # A trainer has left it so, or a call came too late.
            self._paused = True
            engine.finish(None, timeout)
            self._join(sent, timeout)

    def _join(self, sent: Sent, timeout: float) -> None:
        assert self._first is not None
        sender = sent.sender.init_info.to_json()
        ours = self._paused or self.asleep is not None
        try:
            self.engine.ask(
                timeout,
                do="join",
                sender=sender,
                first_worker=self._first,
                ranks=self._ranks,
                run=sent.run,
                version=sent.version,
                asleep=not ours and self.engine.is_paused(timeout),
            )
        except EngineCallError as error:
            if error.weights != "unknown":
                raise
            # The engine has joined. Another trainer may have left it so.
            self._held = True
        self._joined = True
        if self._info_file is not None and self._written != (sender, self._first):
            _restart.write(self._info_file, sender, self._first, self._ranks, timeout)
            self._written = (sender, self._first)

    def _has(self, sent: Sent) -> bool:
        return self._loaded(sent) == sent.version

    def _there(self, sent: Sent, timeout: float) -> EngineReport:
        """The engine has the version: it was updated, or it has restarted with it."""
        if self._version != sent.version:
            self.engine.label(str(sent.version), timeout)
            self._version = sent.version
        return self._line(sent, "updated")

    def _drive(self, sent: Sent, rules: Rules) -> EngineReport:
        """Pause, start, update, finish, resume; what follows a failure is the core's to say."""
        update, began = EngineUpdate(), time.monotonic()
        # Its weights may not be those that it had, so that it cannot just go on.
        cannot_go_on = self._held or self.asleep is not None
        self._labelled = False
        call = update.begin()
        while call is not None:
            try:
                self._make(call, update, sent, rules)
                call = update.done()
            except EngineDiedError as error:
                call = update.died(str(error))
            except WeightsyncError as error:
                if cannot_go_on and call in ("pause", "start"):
                    return self._line(sent, self._stuck(), reason=f"{call} failed: {error}")
                if call == "update":
                    self._end(rules.timeout)
                call = update.failed(str(error), self._known(call, error, update.weights))
        took = time.monotonic() - began
        outcome: str = update.outcome or "held"
        if outcome == "dead":
            return self._dead(sent, update.reason)
        self._held = outcome == "held"
        if update.weights == "new":
            self._version = self._label(sent)
        elif update.weights == "unknown":
            self._version = None
        if self.asleep is not None:
            outcome = "asleep"
        return self._line(sent, outcome, pause=took, reason=update.reason)

    def _make(self, call: str, update: EngineUpdate, sent: Sent, rules: Rules) -> None:
        engine, timeout = self.engine, rules.timeout
        match call:
            case "pause":
                self._paused = True
                engine.pause(rules.pause, rules.reset_prefix_cache, timeout)
            case "start":
                engine.start(timeout)
            case "update":
                engine.update(sent.version, timeout)
                # A rank acknowledges a version once all ranks have loaded it. So the sender knows
                # what became of a version that it has just sent, and to ask the engine would
                # lengthen the pause. An older acknowledgement says nothing of this load.
                fresh = sent.report is not None and not self._held and self.asleep is None
                if not (fresh and self._has(sent)):
                    engine.ask(timeout, do="loaded")
            case "finish":
                self._stale = True
                self._reset(rules)
                engine.finish(str(self._label(sent)), timeout)
                self._labelled = True
            case "restore":
                engine.ask(timeout, do="restore", version=sent.version)
            case "resume":
                self._resume(update, sent, rules)

    def _resume(self, update: EngineUpdate, sent: Sent, rules: Rules) -> None:
        """Lets it generate, with a label that is true and nothing of older weights."""
        engine, timeout = self.engine, rules.timeout
        new = update.weights == "new"
        if self.asleep is not None and not new:
            raise EngineCallError("it sleeps on: it has not the newest version")
        if new and not self._labelled:
            self._stale = True
        if self._stale:
            self._reset(rules)
        if new and not self._labelled:
            engine.label(str(self._label(sent)), timeout)
        if self.asleep:
            engine.wake(["kv_cache"], timeout)
        engine.resume(timeout)
        self.asleep, self._paused = None, False

    def _reset(self, rules: Rules) -> None:
        if rules.reset_prefix_cache:
            self.engine.reset_cache(rules.timeout)
        self._stale = False

    def _end(self, timeout: float) -> None:
        """Ends an update that failed; if that fails too, the next sync does it."""
        with contextlib.suppress(WeightsyncError):
            self.engine.finish(None, timeout)

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
        # What comes back under its name is not paused, and may be another program.
        self._version = self.asleep = None
        self._counted = self._paused = self._held = self._joined = self._stale = False
        self.engine.is_gone()
        return self._line(sent, "dead", reason=reason)

    def _line(
        self, sent: Sent, outcome: str, *, pause: float | None = None, reason: str | None = None
    ) -> EngineReport:
        size = sent.bytes(new=self._new) if outcome == "updated" else 0
        took = time.monotonic() - sent.began
        return EngineReport(self.name, outcome, self._version, size, pause, took, reason)
