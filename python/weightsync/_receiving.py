"""The base of both receivers: joining a sender and leaving it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from weightsync import _ends
from weightsync._checks import one_model, only_version, text
from weightsync._native import InitInfo, Session
from weightsync.errors import LifecycleError, SenderClosedError

if TYPE_CHECKING:
    from typing import Self


class Receiving(_ends.AsyncWith):
    """A worker's end. Subclasses return versions or load them."""

    def __init__(
        self, info: InitInfo, worker: int, models: Sequence[str] | None, device: object
    ) -> None:
        self._pid = os.getpid()
        for name in models or ():
            text("the name of a model", name)
        label = text("device", str(device))
        self._session = Session.prepare_receiver(info, worker, models, label)
        self._info, self._worker, self._device = info, worker, label
        self._models = list(info.models if models is None else models)
        self._connected = False
        _ends.made(self)

    def connect(self, *, timeout: float | None = 60.0) -> None:
        """Joins the sender, waits for it if necessary, and takes the initial weights.

        Raises:
            DeadlineError: if the sender, or its first version, is not there in time.
            WrongWeightsError: naming each tensor that does not fit; the sender learns it too.
        """
        if timeout != 0:
            _ends.refuse_lone_receiver(self._info)
        self._join(timeout)
        self._connected = True
        _ends.opened(self)

    def _join(self, timeout: float | None) -> None:
        self._session.connect_receiver(None, timeout)

    @property
    def info(self) -> InitInfo:
        """The init info of the sender."""
        return self._info

    @property
    def models(self) -> list[str]:
        """The names of the models that this worker receives."""
        return list(self._models)

    @property
    def version(self) -> int:
        """The version that this worker runs; 0 before ``connect``.

        Raises:
            ModelError: if the worker receives several models, which :attr:`versions` has.
        """
        one_model("version", self._models, "versions")
        return only_version(self.versions)

    @property
    def versions(self) -> dict[str, int]:
        """The version of each model that this worker runs; 0 before ``connect``."""
        return self._session.versions() if self._connected else dict.fromkeys(self._models, 0)

    @property
    def run(self) -> tuple[int, str]:
        """The run of these versions: its epoch and id."""
        return self._session.run()

    @property
    def travelled(self) -> int | None:
        """Bytes of weights that this process has moved since it joined the sender, as they were encoded.

        They came over a network, or out of a store. None if the weights come through memory that the
        sender, or a relay of this host, fills.
        """
        return self._session.travelled()

    @property
    def worker(self) -> int:
        """This worker's number."""
        return self._worker

    def shutdown(self) -> None:
        """Tells the sender that this worker leaves in order. Any number of times.

        The worker's weights stay valid. A worker that ends without this call has failed,
        unless its program ends without an exception. The sender's reports have a line for a
        failed worker until the worker is back, or forgotten.
        """
        self._end(_ends.why)

    def fail(self, reason: str) -> None:
        """Leaves as a worker that has failed: the sender's reports give the reason.

        ``with receiver: …`` does so automatically with an exception that leaves it.
        """
        self._end(reason)

    def _end(self, reason: str | None) -> None:
        self._session.shutdown(reason)
        _ends.closed(self)

    def __del__(self) -> None:
        if not hasattr(self, "_session") or sys.is_finalizing():
            return
        if os.getpid() == self._pid:
            self._end(_ends.DROPPED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(_ends.reason_of(error))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._worker}: {self._session!r}>"

    def __getstate__(self) -> Any:
        raise LifecycleError(
            "a receiver is a live end and cannot be pickled: make one there from the init info"
        )

    def _new(self, receive: Callable[[], Any]) -> Iterator[Any]:
        while True:
            try:
                version = receive()
            except SenderClosedError:
                return
            if version is not None:
                yield version

    def _only(self, call: str, instead: str) -> None:
        """Refuses a call for one model where the worker receives several."""
        one_model(call, self._models, instead)

    def _asked(self, model: str | None, version: int | None, at_least: int | None) -> str:
        """The model whose version a pull names."""
        if model is None and (version, at_least) != (None, None):
            self._only("a version without model=", "pull_set(…, model=NAME)")
        # The newest set is the same, whichever model is named.
        return self._models[0] if model is None else model


def read(info: InitInfo | str) -> InitInfo:
    """An init info, also from its JSON text."""
    return InitInfo.from_json(info) if isinstance(info, str) else info
