"""What all collectors share: their settings, weights, counts, and running in the background."""

from __future__ import annotations

import abc
import contextlib
import logging
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from weightsync import _ends
from weightsync._checks import choice
from weightsync.errors import DeadlineError, LifecycleError, MissingModelError, SettingError, WrongTypeError
from weightsync.rl._columns import Batch, Failure
from weightsync.rl._policy import HAS_TORCH, exploration, is_tensordict_module
from weightsync.rl._progress import Progress
from weightsync.rl._rollout import Rules
from weightsync.rl._split import split_trajectories

if TYPE_CHECKING:
    from typing import Self

logger = logging.getLogger("weightsync.rl")

ReturnType = Literal["torch", "numpy", "tensordict"]


class BaseCollector(abc.ABC):
    """The settings, the weights and the counts of a collector."""

    def __init__(
        self,
        policy: Any,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        policy_factory: Any = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int | None = None,
        reset_at_each_iter: bool = False,
        reset_when_done: bool = True,
        exploration_type: Any = "random",
        device: Any = None,
        storing_device: Any = None,
        policy_device: Any = None,
        split_trajs: bool = False,
        postproc: Callable[[Any], Any] | None = None,
        update_at_each_batch: bool = False,
        replay_buffer: Any = None,
        seed: int | None = None,
        return_type: ReturnType | None = None,
        progress: bool | None = None,
    ) -> None:
        frames_per_batch = whole("frames_per_batch", frames_per_batch)
        if frames_per_batch < 1:
            raise SettingError(f"frames_per_batch: expected 1 or more, got {frames_per_batch}")
        if policy is not None and policy_factory is not None:
            raise SettingError("give a policy or a policy_factory, not both")
        if policy is not None and not callable(policy):
            raise WrongTypeError(f"the policy is a function or a torch module, got {policy!r}")
        self.policy = policy
        self.frames_per_batch = frames_per_batch
        self.total_frames = -1 if total_frames is None else total_frames
        self._init_random = init_random_frames or 0
        longest = max(0, whole("max_frames_per_traj", max_frames_per_traj or 0))
        self._rules = Rules(longest, reset_at_each_iter, reset_when_done)
        self._explore = exploration(exploration_type)
        self._policy_device = device if policy_device is None else policy_device
        self._storing_device = storing_device
        self._split, self._postproc = split_trajs, postproc
        self._update_at_each_batch = update_at_each_batch
        self.replay_buffer = replay_buffer
        self._seed = seed
        self._return_type = _return_type(return_type, policy)
        self._frames = 0
        self._iterator: Iterator[Any] | None = None
        #: A batch that is not handed out yet.
        self._collected: Batch | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        # One thread at a time collects, or changes how it is done. Who waits for the turn holds the
        # gate, so that a thread that collects without a pause lets others have a turn.
        self._gate, self._turn = threading.Lock(), threading.RLock()
        self._progress = Progress(progress, self.total_frames)

    #: Those of the newest batch, as :class:`Batch` has them: a TensorDict has not.
    failures: Sequence[Failure] = ()
    dropped = 0

    #: Until the collector has something to close.
    _closed = True

    def _opened(self) -> None:
        """From here on the collector has to be closed."""
        self._closed = False
        _ends.opened(self)

    @property
    def frames(self) -> int:
        """How many frames were handed out, or written into the replay buffer."""
        return self._frames

    @property
    @abc.abstractmethod
    def version(self) -> int:
        """The version of the policy's weights that was sent last; 0 before the first."""

    def __iter__(self) -> Iterator[Any]:
        """Batches until ``total_frames`` are there. With a replay buffer each item is None."""
        self._check_foreground()
        return self._batches()

    def next(self) -> Any:
        """The next batch; None once ``total_frames`` are there."""
        self._check_foreground()
        if self._iterator is None:
            self._iterator = iter(self)
        try:
            return next(self._iterator, None)
        except BaseException:
            # A generator that raised has ended. The collector may go on.
            self._iterator = None
            raise

    def _check_foreground(self) -> None:
        if self._thread is not None:
            raise LifecycleError(
                "the collector runs in the background since start(): call async_shutdown() first, "
                "or read the replay buffer"
            )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A turn of this thread."""
        with self._gate:
            self._turn.acquire()
        try:
            if self._closed:
                raise LifecycleError("the collector was shut down: make another")
            yield
        finally:
            self._turn.release()

    def _batches(self) -> Iterator[Any]:
        while not self._is_full():
            yield self._next_batch()
        self._progress.end()

    def _is_full(self) -> bool:
        return 0 <= self.total_frames <= self._frames

    def _next_batch(self) -> Any:
        if self._update_at_each_batch and has_weights(self.policy):
            self.update_policy_weights_()
        with self._alone():
            if self._collected is None:
                self._collected = self._collect()
            batch = self._collected
        result = self._finished(batch)
        # Ctrl-C before this leaves the batch for the next call.
        self._collected = None
        self._frames += batch.numel()
        self._progress.show(self._frames, self.version, batch)
        self.failures, self.dropped = batch.failures, batch.dropped
        for failure in batch.failures:
            logger.warning("%s", failure)
        if self.replay_buffer is None:
            return result
        self.replay_buffer.extend(result)
        return None

    def _finished(self, batch: Batch) -> Any:
        """The batch in the form that its user asked for."""
        result: Any = batch
        if self._return_type != "numpy":
            result = _to_torch(batch, self._storing_device)
        if self._split:
            result = split_trajectories(result)
        if self._return_type == "tensordict":
            result = result.to_tensordict()
        return result if self._postproc is None else self._postproc(result)

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> Any:
        """Sends weights to the workers, and waits until they have them.

        Args:
            policy_or_weights: a module, a state dict, a TensorDict, or weights by worker
                (``{0: …, 1: …}``); None: the collector's policy.
            weights: the same, by another name.
            policy: the same, by another name.
            worker_ids: these workers alone.
            model_id: the model that the weights are of; ``"policy"`` without it.
            weights_dict: several models at once, by id: on each worker all change, or none.

        Returns:
            The :class:`weightsync.Report`; None for a policy that nothing is sent to.

        Raises:
            MissingModelError: if there is no such model.
            WrongWeightsError: naming the tensors that do not fit.
        """
        given = [one for one in (policy_or_weights, weights, policy) if one is not None]
        if len(given) > 1:
            raise SettingError(
                "update_policy_weights_ takes the weights once: as policy_or_weights, weights or policy"
            )
        if weights_dict is not None and (given or model_id is not None):
            raise SettingError(
                "update_policy_weights_ takes weights_dict, or weights of one model, not both"
            )
        if weights_dict is None:
            weights_dict = {model_id or "policy": given[0] if given else None}
        if not weights_dict:
            raise SettingError("weights_dict is empty: expected weights by model id")
        return self._update(dict(weights_dict), worker_ids)

    def start(self) -> None:
        """Fills the replay buffer in the background, until :meth:`async_shutdown`."""
        if self.replay_buffer is None:
            raise SettingError("start() fills a replay buffer: give the collector replay_buffer=…")
        if self._thread is not None:
            raise LifecycleError("the collector has been started already")
        self._stopping.clear()
        self._iterator = None
        name = "weightsync-collector"
        # Between two batches the thread does not keep the collector: one that is dropped ends.
        args = (weakref.ref(self), self._stopping)
        self._thread = threading.Thread(target=_run, args=args, name=name, daemon=True)
        self._thread.start()

    def _collect_in_background(self) -> bool:
        """Collects a batch, and says whether there are more to come."""
        try:
            if not self._is_full():
                self._next_batch()
                return True
            self._progress.end()
        except BaseException as error:
            self._failure = error
            if not self._stopping.is_set():
                logger.exception("the collector stopped")
        return False

    @property
    def is_running(self) -> bool:
        """Whether the collector collects in the background."""
        return self._thread is not None and self._thread.is_alive()

    def async_shutdown(self, timeout: float | None = None) -> None:
        """Ends what :meth:`start` began, after the batch under way, and the collector.

        Args:
            timeout: seconds to wait for that batch; None: as long as it takes.

        Raises:
            DeadlineError: if the batch takes longer; the collector goes on then.
            Exception: that which ended the collection before.
        """
        self._stopping.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout)
            if thread.is_alive():
                raise DeadlineError(
                    f"the batch under way did not end within {timeout} s: call async_shutdown again, "
                    "with more time"
                )
        self.shutdown()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def shutdown(self) -> None:
        """Ends the workers, after the batch that :meth:`start` has under way.

        Any number of times; batches stay valid.
        """
        self._stopping.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._thread = None
        if not self._closed:
            self._progress.end()
            self._close()
            self._closed = True
        _ends.closed(self)

    def _end(self, reason: str | None) -> None:
        self.shutdown()

    @abc.abstractmethod
    def set_seed(self, seed: int) -> int:
        """Seeds environments and draws: environment ``i`` of all gets ``seed + i``.

        Each begins a new episode with the next part that it has not been asked for.

        Returns:
            A seed that none of them has.
        """

    @abc.abstractmethod
    def reset(self) -> None:
        """Has all environments begin new episodes, with the next part that is asked for."""

    def state_dict(self) -> dict[str, Any]:
        """The count of frames and the number of the next trajectory, to go on with in
        :meth:`load_state_dict`.
        """
        # In this order: what a running collector does meanwhile makes the number too large at most.
        return {"frames": self._frames, "next_trajectory": self._next_trajectory}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on counting from a saved state. All trajectories of the batches to come have numbers
        that were not given before.
        """
        with self._alone():
            self._frames = state["frames"]
            # Older states have no number.
            self._go_on_from(max(self._next_trajectory, state.get("next_trajectory", 0)))

    @property
    @abc.abstractmethod
    def _next_trajectory(self) -> int:
        """The number of the next trajectory."""

    @abc.abstractmethod
    def _go_on_from(self, trajectory: int) -> None:
        """Has all trajectories get numbers from this one on."""

    def _random_steps(self, steps: int, ordered: int) -> int:
        """How many steps of a part are random; as in TorchRL, whole batches."""
        return steps if ordered < self._init_random else 0

    @abc.abstractmethod
    def _collect(self) -> Batch:
        ...

    @abc.abstractmethod
    def _update(self, weights: dict[str, Any], worker_ids: Any) -> Any:
        ...

    @abc.abstractmethod
    def _close(self) -> None:
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        if not self._closed:
            with contextlib.suppress(Exception):
                self.shutdown()


def _run(of: weakref.ref[BaseCollector], stopping: threading.Event) -> None:
    """What the thread of a started collector does."""
    while not stopping.is_set():
        collector = of()
        if collector is None or not collector._collect_in_background():
            return
        del collector


def check_known(weights: Mapping[str, Any], known: list[str]) -> None:
    """Refuses weights of a model that the collector does not have."""
    for name in weights:
        if name not in known:
            raise MissingModelError.among(name, known)


def _return_type(given: ReturnType | None, policy: Any) -> ReturnType:
    if given is not None:
        choice("return_type", given, "torch", "numpy", "tensordict")
        return given
    if is_tensordict_module(policy):
        return "tensordict"
    return "torch" if HAS_TORCH else "numpy"


def _to_torch(batch: Batch, device: Any) -> Batch:
    """The same batch with tensors on the same memory, or on a device."""
    import torch

    columns = {key: torch.from_numpy(value) for key, value in batch.columns().items()}
    if device is not None:
        columns = {key: value.to(device) for key, value in columns.items()}
    return batch.with_columns(columns, batch.batch_size)


def has_weights(policy: Any) -> bool:
    """Whether there is anything to send."""
    return hasattr(policy, "state_dict") and bool(policy.state_dict())


def whole(setting: str, value: Any) -> int:
    """The whole number that a setting is."""
    try:
        return operator.index(value)
    except TypeError:
        raise SettingError(f"{setting}: expected a whole number, got {value!r}") from None


def steps_of(frames_per_batch: int, rows: int) -> int:
    """The steps ``T`` of a batch in which so many environments take part.

    Raises:
        SettingError: naming the next size that can be shared out.
    """
    if frames_per_batch % rows:
        fits = -(-frames_per_batch // rows) * rows
        raise SettingError(
            f"frames_per_batch={frames_per_batch} cannot be shared out among {rows} environments: "
            f"expected a multiple of {rows}, such as {fits}"
        )
    return frames_per_batch // rows
