"""What a trainer asks of an engine. Every call is bounded."""

from __future__ import annotations

import abc
import re
import threading
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

from weightsync.errors import DeadlineError, PeerError, UnsupportedError, WeightsyncError

#: How requests that are under way fare in a pause.
Pause = Literal["keep", "wait", "abort"]

_SAID = re.compile(
    r"weightsync\[(old|new|unknown|open|asleep)\]: (.*?)(?:', please check the stack trace|\Z)",
    re.S,
)

_Answer = TypeVar("_Answer")


class EngineDiedError(PeerError):
    """The engine is gone, or does not answer as one."""


class EngineCallError(WeightsyncError, RuntimeError):
    """The engine refused a call, or failed in it."""

    def __init__(self, text: str, remedy: str = "retry") -> None:
        said = _SAID.search(text)
        #: What the engine's workers say that they hold now; "open" where an update was left
        #: unfinished, "asleep" where somebody else has paused the engine; None if they did not say.
        self.weights = said[1] if said else None
        super().__init__(said[2] if said else text.strip() or "it did not say why", remedy)


class Engine(abc.ABC):
    """One engine. Its calls block, raise an error of :mod:`weightsync.errors`, and return within
    ``timeout`` seconds.
    """

    #: Whether its workers know what it has. Where they do not, a refresh loads in any case.
    knows_its_weights = True
    #: Whether what its workers are asked leaves this machine in plain text.
    is_unencrypted = False

    def __init__(self, name: str) -> None:
        self.name = name

    def is_of(self, given: Any) -> bool:
        """Whether this is the engine that a trainer was given."""
        return given is self

    @abc.abstractmethod
    def check(self, timeout: float) -> None:
        """Refuses an engine of a version that cannot be updated. It is called first."""

    @abc.abstractmethod
    def ranks(self, timeout: float) -> int:
        """How many workers it has: tensor, pipeline and data parallel ones."""

    @abc.abstractmethod
    def pause(self, mode: Pause, clear: bool, timeout: float) -> None:
        """Stops it from generating."""

    @abc.abstractmethod
    def resume(self, timeout: float) -> None:
        """Lets it generate."""

    @abc.abstractmethod
    def is_paused(self, timeout: float) -> bool:
        """Whether it is paused, or asleep: an engine may not say which."""

    @abc.abstractmethod
    def reset_cache(self, timeout: float) -> None:
        """Drops what it has computed with older weights; requests under way compute theirs again."""

    @abc.abstractmethod
    def ask(self, timeout: float, **request: Any) -> None:
        """Asks its workers for something outside of an update: a ``WorkerRequest``."""

    @abc.abstractmethod
    def start(self, timeout: float) -> None:
        """Begins an update."""

    @abc.abstractmethod
    def update(self, version: int, timeout: float) -> None:
        """Loads a version. The workers say whether they did when they are asked for ``loaded``."""

    @abc.abstractmethod
    def finish(self, label: str | None, timeout: float) -> None:
        """Ends an update; the label is the version that requests carry from here on."""

    @abc.abstractmethod
    def label(self, label: str, timeout: float) -> None:
        """Sets the label outside of an update."""

    def check_sleeps(self, timeout: float) -> None:
        """Refuses an engine that cannot be brought a version between its wake and its first answer."""
        raise UnsupportedError(f"{self.name} cannot be put to sleep")

    def sleep(self, level: int, timeout: float) -> None:
        """Frees its memory, as vLLM's levels say."""
        raise UnsupportedError(f"{self.name} cannot be put to sleep")

    def wake(self, tags: list[str], timeout: float) -> None:
        """Takes the memory back."""
        raise UnsupportedError(f"{self.name} cannot be put to sleep")

    def check_thread(self) -> None:
        """Refuses a thread that the engine's own calls need."""

    def is_gone(self) -> None:
        """It has died: what answers later under this name may be of another version."""


class Call(Generic[_Answer]):
    """A call in a thread of its own, which is left alone where it is late."""

    def __init__(self, name: str, call: Callable[[], _Answer]) -> None:
        self._name = name
        self._answers: list[_Answer] = []
        self._errors: list[Exception] = []

        def run() -> None:
            try:
                self._answers.append(call())
            except Exception as error:
                self._errors.append(error)

        self._thread = threading.Thread(target=run, name=f"weightsync {name}", daemon=True)
        self._thread.start()

    def wait(self, timeout: float) -> _Answer:
        """What it returns or raises.

        Raises:
            DeadlineError: if it is not over by then.
        """
        self._thread.join(timeout)
        if not self.is_over():
            raise DeadlineError(f"{self._name} did not come back in {timeout:g} s")
        if self._errors:
            raise self._errors[0]
        return self._answers[0]

    def is_over(self) -> bool:
        """Whether it has come back."""
        return not self._thread.is_alive()
