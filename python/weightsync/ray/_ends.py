"""The two ends of a model whose workers are Ray actors."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from weightsync import _ends
from weightsync._checks import choice, only_version
from weightsync._deadline import Deadline
from weightsync._native import InitInfo
from weightsync._receiving import read
from weightsync.errors import LifecycleError, PeerError, WeightsyncError, WrongWeightsError
from weightsync.mapping import PerModel
from weightsync.model_receiver import Mode, ModelReceiver
from weightsync.ray import _cluster
from weightsync.ray._group import PLACE, Group, Member, Offer
from weightsync.scheme import Distributed
from weightsync.sender import Sender as _Sender

if TYPE_CHECKING:
    from typing import Self

logger = logging.getLogger("weightsync")

# Seconds until a sender that could not be joined is tried again, first and at most.
_AGAIN, _LONGEST = 1.0, 5.0

# Seconds that a try lasts at most in a worker's call, and in a thread of its own. A try in a call
# has a second at least: a worker whose waits are shorter would never move.
_IN_CALL, _IN_THREAD, _LEAST = 5.0, 60.0, 1.0


class Sender(_Sender):
    """The trainer's end, in a driver or in an actor. The first version is out once it is made.

    Workers find it by its model's name in the Ray namespace of the job. A trainer that Ray restarts
    makes it again, on any node, and the workers move to it.

    Args:
        model: as of :class:`weightsync.Sender`, as all other arguments are.
        scheme: settings of the transport, such as ``Distributed(deltas="never")``.
        insecure_plaintext: whether weights may travel between hosts without encryption, where
            there are no certificates. None: if ``WEIGHTSYNC_INSECURE_PLAINTEXT`` is 1.
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
        self._own_scheme = own
        self._group = Group(self.models, self._offer_again)
        try:
            self.connect(0, version=version, timeout=timeout)
            self._offer(timeout)
        except BaseException:
            self.shutdown()
            raise

    def _offer(self, timeout: float | None) -> None:
        taken = [one.worker for one in self.workers]
        self._group.offer(Offer.of(self._info.to_json(), self._own_scheme, taken), timeout)

    def _offer_again(self) -> None:
        self._offer(PLACE)

    @property
    def actors(self) -> dict[int, Member]:
        """Every worker that has joined, also if it has left since, by the number that reports have."""
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
        choice("safe_points", safe_points, "implied", "declared")
        _cluster.running()
        until = Deadline(timeout)
        names = [name] if info is None else read(info).models
        self._declared = safe_points == "declared"
        # The thread that moves to another sender has it.
        self._moving = threading.Lock()
        # A sender to which this worker is to move, when to try that again, and the pause after that.
        self._next: Offer | None = None
        self._retry, self._pause = 0.0, _AGAIN
        # The init info of a sender whose weights do not fit.
        self._misfit = ""
        # Counts the senders that came or were taken.
        self._news = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._receiver: ModelReceiver | None = None
        self._group = Group(names, self._join_again)
        try:
            while self._receiver is None:
                offer = self._group.after("", until)
                self._group.reach(offer)
                receiver = ModelReceiver(
                    offer.info, self._group.join(until), model=model, models=models,
                    context=context, mode=mode, mapping=mapping, device=device,
                )  # fmt: skip
                try:
                    receiver.connect(timeout=until.left())
                    self.background = receiver.start_background(safe_points)
                    self._receiver = receiver
                except PeerError:
                    # That sender has ended since, or has not noticed the end of this actor's last life.
                    receiver.shutdown()
                    if until.left() == 0:
                        raise
                    time.sleep(0.1)
                except BaseException:
                    receiver.shutdown()
                    raise
            self._group.follow(offer.info, self._moved, until)
        except BaseException:
            self._end(None)
            raise
        _ends.opened(self)

    @property
    def worker(self) -> int:
        """This worker's number, which reports have."""
        return self._own().worker

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
        return self._own().versions

    @property
    def run(self) -> tuple[int, str]:
        """The run of these versions: its epoch and id. A restarted trainer has another run."""
        return self._own().run

    def wait(
        self, version: int | dict[str, int] | None = None, *, timeout: float | None = None
    ) -> bool:
        """Waits until all models have at least this version, or, without one, a new one.

        The wait goes on after the trainer has died, until it is back.

        Args:
            version: of every model, or by name.
            timeout: in seconds. With declared safe points a move to a restarted trainer may take
                a second more.

        Returns:
            False if the timeout came first, or if the sender has shut down.
        """
        until = Deadline(timeout)
        run = self.run
        while True:
            news = self._news
            if self._declared:
                # With implied safe points a thread of its own moves.
                left = until.left()
                self._take(left, _IN_CALL if left is None else min(_IN_CALL, max(left, _LEAST)))
            if version is None and self.run != run:
                return True
            # From the run before on: the move may have come after the look at it.
            if self.background._wait(version, until, None if version else run):
                return True
            has_next = self._next is not None
            is_over = self.background.state == "closed" and not has_next
            if self._is_closed or is_over or until.left() == 0:
                return False
            # Its sender has died. A sender that cannot be joined now may be joined later.
            rest = until.left()
            if has_next:
                rest = _AGAIN if rest is None else min(_AGAIN, rest)
            with self._changed:
                is_new = self._changed.wait_for(lambda: self._news != news, rest)  # noqa: B023
            if not is_new and until.left() == 0:
                return False

    def safe_point(self) -> dict[str, int] | None:
        """Lets the models change here and now. It may wait some seconds for a restarted trainer.

        Returns:
            The models' versions by name if they changed, else None.
        """
        return self._take(0, _IN_CALL) or self.background.safe_point()

    def frozen(self) -> contextlib.AbstractContextManager[Any]:
        """Keeps the models unchanged inside ``with receiver.frozen():``, in this thread."""
        return self.background

    def shutdown(self) -> None:
        """Tells the sender that this worker leaves in order. Any number of times."""
        self._end(_ends.why)

    def _own(self) -> ModelReceiver:
        assert self._receiver is not None
        return self._receiver

    def _end(self, reason: str | None) -> None:
        self._is_closed = True
        self._tell()
        self._group.leave()
        if self._receiver is not None:
            self._receiver._end(reason)
        _ends.closed(self)

    def _tell(self) -> None:
        with self._changed:
            self._news += 1
            self._changed.notify_all()

    def _moved(self, offer: Offer) -> None:
        """There is another sender: a thread moves to it, if safe points are implied."""
        # Two directories may tell of one.
        is_new = offer.info != self._misfit
        # While another thread moves, `_take` asks whether it is followed.
        if is_new and self._moving.acquire(blocking=False):
            try:
                is_new = not self._follows(offer)
            finally:
                self._moving.release()
        # One that is not new has come back, and an offer between has gone.
        self._next = offer if is_new else None
        if is_new:
            self._retry, self._pause = 0.0, _AGAIN
        self._tell()
        # A directory that has died is followed again by `_join_again`.
        with contextlib.suppress(Exception):
            self._group.follow(offer.info, self._moved)
        if is_new and not self._declared:
            threading.Thread(target=_move, args=(weakref.ref(self), offer), daemon=True).start()

    def _follows(self, offer: Offer) -> bool:
        return self._own().info == read(offer.info)

    def _take(self, timeout: float | None, limit: float) -> dict[str, int] | None:
        """Moves to another sender, if there is one; in a safe point if those are declared.

        Args:
            timeout: how long to wait for a thread that moves already.
            limit: how long a try lasts at most.
        """
        is_held = bool(self.background._hold._entered.calls)
        if self._next is None or is_held or time.monotonic() < self._retry:
            return None
        if not self._moving.acquire(timeout=-1 if timeout is None else timeout):
            return None
        try:
            offer = self._next
            if offer is None or self._is_closed:
                return None
            if self._follows(offer):
                # Ctrl-C came once it had moved.
                self._next = None
                return None
            try:
                self._group.reach(offer)
                self._own().rejoin(offer.info, timeout=limit)
            except (WeightsyncError, _cluster.ray().exceptions.RayError) as error:
                if isinstance(error, WrongWeightsError):
                    # It never fits, so the worker waits for another one.
                    self._misfit = offer.info
                    if self._next is offer:
                        self._next = None
                self._retry = time.monotonic() + self._pause
                self._pause = min(2 * self._pause, _LONGEST)
                if not self._is_closed:
                    logger.warning("worker %d cannot join the next sender: %s", self.worker, error)
                return None
            if self._next is offer:
                self._next = None
        finally:
            self._moving.release()
        self._tell()
        logger.info("worker %d has joined the next sender", self.worker)
        # Another thread may shut it down meanwhile.
        with contextlib.suppress(LifecycleError):
            return self.versions
        return None

    def _join_again(self) -> None:
        """Joins the directory that was started again; the constructor does so itself."""
        if self._receiver is not None:
            self._group.follow(self._own().info.to_json(), self._moved)
            # The relays ended with the directory.
            self._group.relay()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(_ends.reason_of(error))

    def __repr__(self) -> str:
        return f"<weightsync.ray.Receiver {self.worker}: {self.background!r}>"


def _move(worker: weakref.ref[Receiver], offer: Offer) -> None:
    """Moves a worker to another sender. It keeps no worker alive between its tries."""

    def is_over() -> bool:
        receiver = worker()
        return receiver is None or receiver._is_closed or receiver._next is not offer

    while (receiver := worker()) is not None and not is_over():
        receiver._take(None, _IN_THREAD)
        # A sender that cannot be joined now may be joined later.
        changed, pause = receiver._changed, receiver._retry - time.monotonic()
        del receiver
        with changed:
            changed.wait_for(is_over, max(0.0, pause))
