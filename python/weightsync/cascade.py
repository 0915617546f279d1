"""A worker that feeds workers of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

from weightsync import _ends
from weightsync._checks import numbers
from weightsync._native import Cascade as Native
from weightsync._native import InitInfo, Report
from weightsync._receiving import read
from weightsync.scheme import Scheme

if TYPE_CHECKING:
    from weightsync._native import _Setup


class Cascade(_ends.AsyncWith):
    """A worker that passes on what its trainer sends, under the same version numbers.

    The trainer's report counts this worker once its sub-workers have the version, and
    names sub-workers that do not have it. The constructor joins the trainer and takes the
    initial weights. Sub-workers join by :attr:`init_info`; :meth:`connect` waits for them.

    Args:
        info: the trainer's init info, also as JSON text.
        worker: this worker's number, for the trainer.
        scheme: how weights travel to the sub-workers, as of :class:`Sender`.
        run_dir: a directory of this user; with it, sub-workers find a restarted cascade.
        timeout: how long the cascade waits for the trainer, and a version for the
            sub-workers, in seconds.
    """

    def __init__(
        self,
        info: InitInfo | str,
        worker: int = 0,
        *,
        scheme: Scheme | str = "shared-mem",
        run_dir: str | os.PathLike[str] | None = None,
        timeout: float | None = 60.0,
    ) -> None:
        setup: _Setup = {
            "scheme": str(scheme),
            "run_dir": None if run_dir is None else os.fspath(run_dir),
            "cast": None,
            "slots": None,
            "history": 0,
            "checksums": False,
            "digest": False,
            "copy_threads": 1,
            "async_send_limit": None,
            "deadline": timeout,
        }
        self._native = Native.join(read(info), worker, setup, timeout)
        _ends.opened(self)

    @property
    def init_info(self) -> InitInfo:
        """The init info by which sub-workers join."""
        return self._native.init_info

    def connect(self, workers: int | Iterable[int] = 1, *, timeout: float | None = 60.0) -> None:
        """Waits until the sub-workers have the initial weights; the trainer counts them then."""
        self._native.connect(workers, timeout)

    def forward(self, timeout: float | None = None) -> Report | None:
        """Waits for the next version and passes it on; the report, or None at the timeout."""
        return self._native.forward(timeout)

    def start_background(self) -> None:
        """Passes every further version on, in a thread of its own."""
        self._native.start_background()

    @property
    def last(self) -> Report | None:
        """The report of the version that the background thread passed on last."""
        return self._native.last

    def forget(self, worker_ids: int | Iterable[int]) -> None:
        """Removes sub-workers that failed, died or were lost from the reports, for good."""
        self._native.forget(numbers(worker_ids))

    def shutdown(self) -> None:
        """Leaves the trainer in order and disconnects the sub-workers. Any number of times."""
        self._end(_ends.why)

    def _end(self, reason: str | None) -> None:
        self._native.shutdown(reason)
        _ends.closed(self)

    def __enter__(self) -> Cascade:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(_ends.reason_of(error))

    def __repr__(self) -> str:
        return repr(self._native)
