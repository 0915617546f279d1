"""What all collectors share: their settings, weights, counts, and running in the background."""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from weightsync import _ends
from weightsync._checks import choice
from weightsync.errors import (
    DeadlineError,
    LifecycleError,
    MissingModelError,
    SettingError,
    UnsupportedError,
    WrongTypeError,
)
from weightsync.rl._columns import POLICY_VERSION, Batch, Failure, parts_of
from weightsync.rl._policy import HAS_TORCH, exploration, is_tensordict_module
from weightsync.rl._progress import Progress
from weightsync.rl._rollout import Rules
from weightsync.rl._split import split_trajectories
from weightsync.rl._terms import (
    Asked,
    Named,
    SettingRuntimeError,
    Terms,
    is_torchrl_buffer,
    refuse_for_arrays,
)

if TYPE_CHECKING:
    from typing import Self

    from weightsync.rl._episodes import Episodes

logger = logging.getLogger("weightsync.rl")

ReturnType = Literal["torch", "numpy", "tensordict"]


@dataclass
class Collected:
    """A batch, before it is made into what its user asked for.

    Attributes:
        value: the frames; None where each part goes into a replay buffer on its own.
        frames: how many there are.
        versions: of the weights that chose the actions.
        parts: the frames of each worker, for a replay buffer.
    """

    value: Any
    frames: int
    versions: np.ndarray
    failures: list[Failure] = field(default_factory=list)
    dropped: int = 0
    parts: list[Any] = field(default_factory=list)

    @staticmethod
    def of(batch: Batch, parts: Sequence[Batch] = ()) -> Collected:
        """Those of a batch of arrays."""
        versions: np.ndarray = batch[POLICY_VERSION]
        parts = list(parts) or [batch]
        return Collected(batch, batch.numel(), versions, batch.failures, batch.dropped, parts)


class BaseCollector(Named, abc.ABC):
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
        extend_buffer: bool = True,
        trajs_per_batch: int | None = None,
        trajs_per_write: int | None = None,
        traj_format: Literal["padded", "cat"] | None = None,
        weight_updater: Any = None,
        weight_recv_schemes: Any = None,
        worker_idx: int | None = None,
        **asked: Any,
    ) -> None:
        #: Whether frames are TensorDicts. The environment decides it.
        self._is_tensordict = False
        self._asked = Asked.of(asked, type(self).__name__)
        frames_per_batch = whole("frames_per_batch", frames_per_batch)
        if frames_per_batch < 1:
            raise SettingError(f"frames_per_batch: expected 1 or more, got {frames_per_batch}")
        if weight_recv_schemes is not None:
            raise UnsupportedError(
                "weight_recv_schemes: the workers of this collector follow its own sender of weights, and "
                "no other collector's: give the weights to update_policy_weights_()"
            )
        if policy is not None and not callable(policy):
            raise WrongTypeError(f"the policy is a function or a torch module, got {policy!r}")
        self.policy = policy
        self.frames_per_batch = self.requested_frames_per_batch = frames_per_batch
        self.total_frames = _total(total_frames)
        self._init_random = init_random_frames or 0
        self.worker_idx = worker_idx
        self.extend_buffer = extend_buffer
        self._per_batch, self._per_write = trajs_per_batch, trajs_per_write
        self._format = _trajectory_format(traj_format, trajs_per_batch)
        self._episodes: Episodes | None = None
        longest = max(0, whole("max_frames_per_traj", max_frames_per_traj or 0))
        self._rules = Rules(longest, reset_at_each_iter, reset_when_done)
        self._explore = exploration(exploration_type)
        self._policy_device = device if policy_device is None else policy_device
        self._storing_device = storing_device
        self._device = device
        for name, value in (("split_trajs", split_trajs), ("trajs_per_batch", trajs_per_batch)):
            if value and not self._asked.track_traj_ids:
                raise SettingError(f"{name}={value!r} requires track_traj_ids=True")
        self._split, self.postproc = bool(split_trajs), postproc
        self._update_at_each_batch = update_at_each_batch
        self.replay_buffer = replay_buffer
        self._seed = seed
        self._asked_type = return_type
        self._return_type = _return_type(return_type, policy, replay_buffer)
        self._frames, self._iter = 0, -1
        self._iterator: Iterator[Any] | None = None
        #: A batch that is not handed out yet.
        self._collected: Collected | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        # One thread at a time collects, or changes how it is done. Who waits for the turn holds the
        # gate, so that a thread that collects without a pause lets others have a turn.
        self._gate, self._turn = threading.Lock(), threading.RLock()
        self._whose_turn: int | None = None
        self._progress = Progress(progress, self.total_frames)
        self._weight_updater: Any = None
        if weight_updater is not None:
            self.weight_updater = weight_updater

    #: Those of the newest batch, as :class:`Batch` has them: a TensorDict has not.
    failures: Sequence[Failure] = ()
    dropped = 0

    #: Until the collector has something to close.
    _closed = True

    def _opened(self) -> None:
        """From here on the collector has to be closed."""
        self._closed = False
        _ends.opened(self)

    # Under the names that TorchRL's collectors have them by, and its trainers read.

    @property
    def init_random_frames(self) -> int:
        """So many frames have random actions first."""
        return max(0, int(self._init_random))

    @property
    def max_frames_per_traj(self) -> int:
        """An episode is truncated after so many frames; 0: never."""
        return self._rules.max_frames_per_traj

    @property
    def reset_at_each_iter(self) -> bool:
        """Whether each batch begins new episodes."""
        return self._rules.reset_at_each_iter

    @property
    def split_trajs(self) -> bool:
        """Whether batches are split into trajectories."""
        return self._split

    @property
    def trajs_per_batch(self) -> int | None:
        """How many whole trajectories a batch has; None: batches have a number of frames."""
        return self._per_batch

    @property
    def set_truncated(self) -> bool:
        """Whether the last frame of each batch is marked as truncated."""
        return self._asked.set_truncated

    def iterator(self) -> Iterator[Any]:
        """The same as ``iter(collector)``."""
        return iter(self)

    @property
    def frames(self) -> int:
        """How many frames were handed out, or written into the replay buffer."""
        return self._frames

    def _terms(self, **more: Any) -> Terms:
        """How one rollout collects TensorDicts."""
        given = {
            "max_frames_per_traj": self._rules.max_frames_per_traj,
            "reset_at_each_iter": self._rules.reset_at_each_iter,
            "exploration_type": self._explore,
            **vars(self._asked),
        }
        return Terms(**{**given, **more})

    def _check_form(self) -> None:
        """Refuses what does not go with the environment, once it is known."""
        if self._is_tensordict:
            if not self._rules.reset_when_done:
                raise SettingError("reset_when_done=False: environments of TorchRL are reset when done")
            if self._asked_type not in (None, "tensordict"):
                raise SettingError(
                    f"return_type={self._asked_type!r}: frames of an environment of TorchRL are TensorDicts"
                )
            self._return_type = "tensordict"
            if self._per_batch is not None:
                from weightsync.rl._episodes import Episodes

                self._episodes = Episodes()
            if self.replay_buffer is not None and not self.extend_buffer:
                if self.postproc is not None or self._split:
                    raise WrongTypeError(
                        "extend_buffer=False writes single frames, and postproc and split_trajs need whole "
                        "batches: leave one of them out"
                    )
            return
        self._asked.refuse()
        given = {"extend_buffer": (self.extend_buffer, True), "trajs_per_batch": (self._per_batch, None)}
        given["trajs_per_write"] = (self._per_write, None)
        for name, (value, default) in given.items():
            if value is not default:
                refuse_for_arrays(name, value)

    def __len__(self) -> int:
        """How many batches there are in all."""
        if self.total_frames <= 0:
            raise LifecycleError("a collector without total_frames goes on for ever, and has no length")
        return -(-self.total_frames // self.requested_frames_per_batch)

    def __bool__(self) -> bool:
        return True

    def stats(self) -> dict[str, Any]:
        """How far the collector is: numbers alone, read without asking any worker."""
        stats: dict[str, Any] = {"frames": int(self._frames), "batches": self._iter + 1}
        if self.total_frames >= 0:
            stats["total_frames"] = self.total_frames
            stats["completed"] = self._is_full()
        stats["requested_frames_per_batch"] = self.requested_frames_per_batch
        if isinstance(self.policy_version, int):
            stats["policy_version"] = self.policy_version
        return stats

    @property
    def policy_version(self) -> int | str | None:
        """The version that ``track_policy_version`` counts; None without it."""
        return None

    def get_policy_version(self) -> int | str | None:
        """The same as :attr:`policy_version`, for those who can only call."""
        return self.policy_version

    @property
    def weight_updater(self) -> Any:
        """The updater that :meth:`update_policy_weights_` calls, of TorchRL's older kind; None: none."""
        return self._weight_updater

    @weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        if value is not None:
            if not hasattr(value, "register_collector") and callable(value):
                value = value()
            value.register_collector(self)
        self._weight_updater = value

    @property
    def _legacy_weight_updater(self) -> bool:
        return self._weight_updater is not None

    def getattr_rb(self, attr: str) -> Any:
        """An attribute of the replay buffer."""
        return getattr(self.replay_buffer, attr)

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
        if self._whose_turn == threading.get_ident():
            yield
            return
        with self._gate:
            self._turn.acquire()
        self._whose_turn = threading.get_ident()
        try:
            if self._closed:
                raise LifecycleError("the collector was shut down: make another")
            yield
        finally:
            self._whose_turn = None
            self._turn.release()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Within this nothing is collected in the background, and the replay buffer stays as it is."""
        if not self.is_running():
            raise LifecycleError("pause: the collector does not run in the background: call start() first")
        with self._alone():
            yield

    def _batches(self) -> Iterator[Any]:
        while not self._is_full():
            batch = self._next_batch()
            if self._episodes is None or self.replay_buffer is not None:
                yield batch
                continue
            self._episodes.add(batch)
            while len(self._episodes) >= (self._per_batch or 1):
                yield self._episodes.take(self._per_batch or 1, self._format)
        self._progress.end()

    def _is_full(self) -> bool:
        return 0 <= self.total_frames <= self._frames

    def _next_batch(self) -> Any:
        if self._update_at_each_batch and has_weights(self.policy):
            self.update_policy_weights_()
        with self._alone():
            if self._collected is None:
                self._collected = self._collect()
            collected = self._collected
        is_stored = self.replay_buffer is not None and not self._ignore_rb
        result: Any = None
        # What goes into a replay buffer is each worker's own: the buffer's rows are frames of one.
        if is_stored and (self._is_tensordict or is_torchrl_buffer(self.replay_buffer)):
            parts = [self._finished(one, self._splits_parts) for one in collected.parts]
        else:
            result = self._finished(collected.value)
            parts = [result]
        # Ctrl-C before this leaves the batch for the next call.
        self._collected = None
        self._frames += collected.frames
        self._iter += 1
        self._progress.show(self._frames, self.version, collected.versions)
        self.failures, self.dropped = collected.failures, collected.dropped
        for failure in collected.failures:
            logger.warning("%s", failure)
        if not is_stored:
            return result
        for one in parts:
            self._store(one)
        return None

    @property
    def _names_rows(self) -> bool:
        """Whether the rows of split batches are named, as they are by TorchRL's ``MultiSyncCollector``."""
        return False

    #: Whether parts are split that go into a replay buffer of TorchRL.
    _splits_parts = True

    def _finished(self, batch: Any, splits: bool = True) -> Any:
        """The batch in the form that its user asked for."""
        if self._is_tensordict:
            return self._finished_tensordict(batch, splits)
        result: Any = batch
        if self._return_type != "numpy":
            result = _to_torch(batch, self._storing_device)
        if self._split and splits:
            result = split_trajectories(result)
        if self._return_type == "tensordict":
            result = result.to_tensordict()
        return result if self.postproc is None else self.postproc(result)

    def _finished_tensordict(self, batch: Any, splits: bool = True) -> Any:
        if self._split and splits:
            from torchrl.collectors.utils import split_trajectories as split

            batch = split(batch, prefix="collector")
            if self._names_rows:
                batch.names = [*[None] * (batch.ndim - 1), "time"]
        if self.postproc is not None:
            if batch.device is not None and hasattr(self.postproc, "to"):
                self.postproc = self.postproc.to(batch.device) or self.postproc
            batch = self.postproc(batch)
        private = [key for key in batch.keys(True) if any(one.startswith("_") for one in parts_of(key))]
        return batch.exclude(*private, inplace=True) if private else batch

    def _store(self, batch: Any) -> None:
        """Writes a batch into the replay buffer."""
        if self._episodes is not None:
            self._episodes.add(batch)
            for whole_ones in self._episodes.drain(self._per_write):
                self.replay_buffer.extend(_for_buffer(whole_ones, self.replay_buffer))
        elif not self._is_tensordict:
            self.replay_buffer.extend(batch)
        elif self.extend_buffer:
            self.replay_buffer.extend(_for_buffer(batch, self.replay_buffer))
        else:
            for frame in batch.unbind(-1):
                self.replay_buffer.add(frame)

    #: Whether batches are handed out although there is a replay buffer: their user writes them.
    _ignore_rb = False

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        *,
        weights: Any = None,
        policy: Any = None,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: Mapping[str, Any] | None = None,
        **more: Any,
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
        if "policy_weights" in more:
            warnings.warn(
                "policy_weights is an older name of policy_or_weights", DeprecationWarning, stacklevel=2
            )
            policy_or_weights = more.pop("policy_weights")
        given = [one for one in (policy_or_weights, weights, policy) if one is not None]
        if len(given) > 1:
            raise SettingError(
                "update_policy_weights_ takes the weights once: as policy_or_weights, weights or policy"
            )
        if weights_dict is not None and (given or model_id is not None):
            raise SettingError(
                "update_policy_weights_ takes weights_dict, or weights of one model, not both"
            )
        if self._weight_updater is not None:
            if weights_dict is not None or model_id is not None:
                raise SettingError(
                    "the collector's weight_updater knows one model: give weights, and neither weights_dict "
                    "nor model_id"
                )
            return self._weight_updater(
                policy_or_weights=given[0] if given else None, worker_ids=worker_ids, **more
            )
        if more:
            raise WrongTypeError(f"update_policy_weights_ has no argument {', '.join(more)}")
        if weights_dict is None:
            weights_dict = {model_id or "policy": given[0] if given else None}
        if not weights_dict:
            raise SettingError("weights_dict is empty: expected weights by model id")
        return self._update(dict(weights_dict), worker_ids)

    def start(self) -> None:
        """Fills the replay buffer in the background, until :meth:`async_shutdown`.

        While it does so, another call has no effect.
        """
        if self.replay_buffer is None:
            raise SettingRuntimeError(
                "start() fills a replay buffer: give the collector replay_buffer=…"
            )
        if self.is_running():
            return
        if self._thread is not None:
            raise LifecycleError("the collector has stopped: async_shutdown() says why")
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
            with self._alone():
                if not self._is_full():
                    self._next_batch()
                    return True
            self._progress.end()
        except BaseException as error:
            self._failure = error
            if not self._stopping.is_set():
                logger.exception("the collector stopped")
        return False

    def is_running(self) -> bool:
        """Whether the collector collects in the background."""
        return self._thread is not None and self._thread.is_alive()

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
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
        self.shutdown(close_env=close_env)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Ends the workers, after the batch that :meth:`start` has under way.

        Any number of times; batches stay valid.

        Args:
            timeout: has no effect: a worker that does not end is killed.
            close_env: whether the environment is closed; those of workers always are.
            raise_on_error: whether an error on the way is raised.
        """
        try:
            self._shut_down(close_env)
        except Exception:
            if raise_on_error:
                raise

    def _shut_down(self, close_env: bool) -> None:
        self._stopping.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._thread = None
        if not self._closed:
            self._progress.end()
            self._close(close_env)
            self._closed = True
        _ends.closed(self)

    def _end(self, reason: str | None) -> None:
        self.shutdown()

    @property
    def closed(self) -> bool:
        """Whether the collector was shut down."""
        return self._closed

    @abc.abstractmethod
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
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
        if self._is_tensordict:
            return self._state_of_tensordicts()
        return {"frames": self._frames, "next_trajectory": self._next_trajectory}

    def _state_of_tensordicts(self) -> dict[str, Any]:
        raise NotImplementedError

    def _load_state_of_tensordicts(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on counting from a saved state. All trajectories of the batches to come have numbers
        that were not given before.
        """
        with self._alone():
            if self._is_tensordict:
                self._load_state_of_tensordicts(state)
                return
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
    def _collect(self) -> Collected:
        ...

    @abc.abstractmethod
    def _update(self, weights: dict[str, Any], worker_ids: Any) -> Any:
        ...

    @abc.abstractmethod
    def _close(self, close_env: bool) -> None:
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


def _return_type(given: ReturnType | None, policy: Any, buffer: Any) -> ReturnType:
    if given is not None:
        choice("return_type", given, "torch", "numpy", "tensordict")
    if is_torchrl_buffer(buffer):
        if given not in (None, "tensordict"):
            raise SettingError(f"return_type={given!r}: a replay buffer of TorchRL takes TensorDicts")
        return "tensordict"
    if given is not None:
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


def _total(frames: Any) -> int:
    """How many frames a collector ends after; -1: it does not end."""
    is_endless = frames is None or (isinstance(frames, float) and frames == math.inf)
    return -1 if is_endless else whole("total_frames", frames)


def whole(setting: str, value: Any) -> int:
    """The whole number that a setting is. ``1e6`` is one, too."""
    try:
        is_float = isinstance(value, float) and value.is_integer()
        return int(value) if is_float else operator.index(value)
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


def _trajectory_format(given: Any, trajs_per_batch: int | None) -> Literal["padded", "cat"]:
    if given is None:
        return "padded"
    choice("traj_format", given, "padded", "cat")
    if given != "padded" and trajs_per_batch is None:
        raise SettingError("traj_format has no effect without trajs_per_batch, which asks for trajectories")
    kept: Literal["padded", "cat"] = given
    return kept


def _for_buffer(batch: Any, buffer: Any) -> Any:
    """The frames as a replay buffer of TorchRL takes them: on the device it names."""
    import torch

    storage = getattr(buffer, "_storage", None)
    device = getattr(storage, "device", None)
    if device is None or device == "auto":
        return batch
    device = torch.device(device)
    if any(value.device != device for value in batch.values(True, True) if hasattr(value, "device")):
        return batch
    return batch.copy().clear_device_().to(device)
