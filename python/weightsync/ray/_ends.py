"""The two ends of a model whose workers are Ray actors."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from weightsync import _ends
from weightsync._checks import only_version
from weightsync._native import InitInfo
from weightsync._receiving import read
from weightsync.errors import PeerError, WeightsyncError
from weightsync.mapping import PerModel
from weightsync.model_receiver import Mode, ModelReceiver
from weightsync.ray import _cluster
from weightsync.ray._group import Group, Member, Offer
from weightsync.scheme import Distributed
from weightsync.sender import Sender as _Sender

if TYPE_CHECKING:
    from typing import Self

logger = logging.getLogger("weightsync")


class Sender(_Sender):
    """The trainer's end, in a driver or in an actor. The first version is out once it is made.

    Workers find it by its model's name in the Ray namespace of the job. A trainer that Ray restarts
    makes it again, on any node, and the workers move to it.

    Args:
        model: as of :class:`weightsync.Sender`, as all other arguments are.
        scheme: settings of the transport, such as ``Distributed(deltas="never")``.
        insecure_plaintext: whether weights may travel between hosts without encryption: there is no
            other way between hosts yet. None: if ``WEIGHTSYNC_INSECURE_PLAINTEXT`` is 1.
        version: the first version's number, such as the step that training goes on from.

    Raises:
        LifecycleError: if this process is in no Ray cluster.
        SettingError: if another sender of this name is alive in the job.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        name: str = "policy",
        scheme: Distributed | None = None,
        insecure_plaintext: bool | None = None,
        version: int | None = None,
        timeout: float | None = 60.0,
        **options: Any,
    ) -> None:
        _cluster.running()
        own = _cluster.listening(Distributed() if scheme is None else scheme, insecure_plaintext)
        super().__init__(model, name=name, scheme=own, timeout=timeout, **options)
        self._group = Group(self.models, lambda: self._offer(None))
        try:
            self.connect(0, version=version, timeout=timeout)
            self._offer(timeout)
        except BaseException:
            self.shutdown()
            raise

    def _offer(self, timeout: float | None) -> None:
        is_open = self._info.scheme != str(Distributed()) and "listen=" in self._info.scheme
        token = _cluster.token() if is_open else None
        self._group.offer(Offer(self._info.to_json(), _cluster.address(), is_open, token), timeout)

    @property
    def actors(self) -> dict[int, Member]:
        """The workers that have joined, by the numbers that reports give them."""
        return self._group.members()

    def shutdown(self) -> None:
        """Tells the workers that the sender ends, and frees everything. Any number of times."""
        try:
            super().shutdown()
        finally:
            self._group.leave()


class Receiver(_ends.AsyncWith):
    """A worker's end, in an actor. The model has the newest version once it is made.

    From then on it follows the sender: the model changes whenever no forward of it, or of a part of
    it, runs. So an actor that makes it in its ``__init__`` never acts with other weights, also after
    Ray restarted it.

    Args:
        info: the sender's init info. It says the models' names alone: an actor that joins later, or
            that was restarted, finds the sender that is there then.
        model, models, context, mode, mapping, device: as of :class:`weightsync.ModelReceiver`.
        name: the model's name, in place of ``info``.
        safe_points: ``"implied"``, or ``"declared"``: the model changes in :meth:`safe_point` and
            :meth:`wait` alone, for workers that train.
        timeout: how long to wait for the sender, in seconds.

    Raises:
        DeadlineError: if there is no sender in time.
        PeerError: if the sender is on another host, and listens for its own alone.
        WrongWeightsError: naming each tensor that does not fit.
    """

    def __init__(
        self,
        info: InitInfo | str | None = None,
        *,
        model: object = None,
        models: Mapping[str, Any] | Sequence[str] | None = None,
        context: object = None,
        name: str = "policy",
        mode: Mode = "bind",
        mapping: PerModel | None = None,
        device: object = "cpu",
        safe_points: Literal["implied", "declared"] = "implied",
        timeout: float | None = 60.0,
    ) -> None:
        _cluster.running()
        until = None if timeout is None else time.monotonic() + timeout
        names = [name] if info is None else read(info).models
        self._declared = safe_points == "declared"
        self._lock = threading.RLock()
        self._is_closed = False
        # A sender that waits for a safe point.
        self._next: Offer | None = None
        self._arrived = threading.Event()
        self._receiver: Any = None
        self._group = Group(names, self._join_again)
        number = 0
        try:
            worker = self._group.join(_left(until))
            while True:
                offer = self._group.after(number, _left(until))
                receiver = ModelReceiver(
                    offer.info, worker, model=model, models=models, context=context, mode=mode,
                    mapping=mapping, device=device,
                )  # fmt: skip
                try:
                    receiver.connect(timeout=_left(until))
                    break
                except PeerError:
                    # That sender has ended since; another may come.
                    number = offer.number
        except BaseException:
            self._group.leave()
            raise
        self._receiver = receiver
        self.background = receiver.start_background(safe_points)
        self._follow(offer)
        _ends.opened(self)

    @property
    def worker(self) -> int:
        """This worker's number, which reports have."""
        return self._receiver.worker

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
        return self._receiver.versions

    @property
    def run(self) -> tuple[int, str]:
        """The run of these versions: its epoch and id. A restarted trainer has another run."""
        return self._receiver.run

    def wait(
        self, version: int | dict[str, int] | None = None, *, timeout: float | None = None
    ) -> bool:
        """Waits until all models have at least this version, or, without one, a new one.

        The wait goes on while the trainer is restarted.

        Args:
            version: of every model, or by name.
            timeout: in seconds.

        Returns:
            False if the timeout came first, or if the sender has shut down.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            self._arrived.clear()
            run = self.run
            self._take()
            if version is None and self.run != run:
                return True
            try:
                if self.background.wait(version, timeout=_left(until)):
                    return True
            except WeightsyncError:
                if self._is_closed:
                    raise
            if self._is_closed or self.background.state == "closed" or _left(until) == 0:
                return False
            # Its sender has died.
            if not self._arrived.wait(_left(until)):
                return False

    def safe_point(self) -> dict[str, int] | None:
        """Lets the models change here and now.

        Returns:
            The models' versions by name if they changed, else None.
        """
        return self._take() or self.background.safe_point()

    def frozen(self) -> contextlib.AbstractContextManager[Any]:
        """Keeps the models unchanged inside ``with receiver.frozen():``, in this thread."""
        return self.background

    def shutdown(self) -> None:
        """Tells the sender that this worker leaves in order. Any number of times."""
        self._end(_ends.why)

    def _end(self, reason: str | None) -> None:
        self._is_closed = True
        self._arrived.set()
        self._group.leave()
        # A move to another sender goes on until it is there, or has failed.
        self._receiver._end(reason)
        _ends.closed(self)

    def _follow(self, offer: Offer) -> None:
        self._group.follow(offer.number, self._moved)

    def _moved(self, offer: Offer) -> None:
        """There is a newer sender."""
        with self._lock:
            self._next = offer
        if not self._declared:
            self._take()
        self._arrived.set()
        self._follow(offer)

    def _take(self) -> dict[str, int] | None:
        """Moves to a newer sender, if there is one."""
        with self._lock:
            offer, self._next = self._next, None
            if offer is None or self._is_closed:
                return None
            try:
                self._receiver.rejoin(offer.info)
            except WeightsyncError as error:
                logger.warning("worker %d cannot join the restarted sender: %s", self.worker, error)
                return None
            logger.info("worker %d has joined the restarted sender", self.worker)
            return self.versions

    def _join_again(self) -> None:
        """Joins the directory that was started again, and the sender if it is another one."""
        if self._receiver is None:
            # The constructor asks the directory itself.
            return
        self._group.join(None)
        offer = self._group.after(0, None)
        if self._receiver.info != read(offer.info):
            self._moved(offer)
        else:
            self._follow(offer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(_ends.reason_of(error))

    def __repr__(self) -> str:
        return f"<weightsync.ray.Receiver {self.worker}: {self.background!r}>"


def _left(until: float | None) -> float | None:
    return None if until is None else max(0.0, until - time.monotonic())
