"""TorchRL's older weight updaters for workers that may be on other hosts.

The weights go as TorchRL sends them: by Ray, by torch's RPC, or by a process group. A push
begins all workers' updates and then waits for every one.
"""

from __future__ import annotations

import abc
import operator
import threading
from collections.abc import Callable
from typing import Any

from tensordict import is_tensor_collection
from torchrl._utils import WEIGHT_SYNC_TIMEOUT
from torchrl.collectors import WeightUpdaterBase

from weightsync._deadline import Deadline
from weightsync.errors import PeerError, SettingError
from weightsync.ray import _cluster
from weightsync.torchrl._torch_rpc import answer_of
from weightsync.torchrl._updaters import Checked


class _Remote(Checked):
    """The base: begins the update of each worker, waits for all, and names those that failed."""

    policy_weights: Any
    weight_getter: Callable[[], Any] | None = None
    # One push at a time: a worker's answer does not say to which of two.
    _pushing: Any

    def __new__(cls, *_: Any, **__: Any) -> _Remote:
        made = super().__new__(cls)
        # Not in a constructor, which a subclass may replace.
        made._pushing = threading.RLock()
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_pushing"}

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        with self._pushing:
            super()._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)

    def _is_nothing(self, weights: Any) -> bool:
        if weights is None or (is_tensor_collection(weights) and weights.is_empty()):
            raise SettingError(
                f"{type(self).__name__}: there are no weights to push: pass them, or give "
                "policy_weights or weight_getter"
            )
        return False

    @abc.abstractmethod
    def _begin(self, worker: int, weights: Any) -> Any:
        """Begins a worker's update, and returns the argument of :meth:`_finish`."""

    @abc.abstractmethod
    def _finish(self, worker: int, begun: Any) -> None:
        """Waits until the worker has the weights."""

    def _shared(self, weights: Any) -> Any:
        """The weights in the form in which all workers get them."""
        return weights

    def _get_server_weights(self) -> Any:
        """The weights of a push without weights: the getter's, or the policy's as they are now."""
        if self.weight_getter is not None:
            return self.weight_getter()
        return None if self.policy_weights is None else self.policy_weights.data

    def _place(self, worker: Any) -> Any:
        # A policy factory may leave the trainer without weights to compare with.
        weights = self.policy_weights
        return None if weights is None or weights.is_empty() else weights

    def _sync_workers(self, workers: list[Any], weights: Any) -> None:
        self._wait(*self._begin_all(workers, weights))

    def _sync_weights_with_worker(self, worker_id: Any = None, server_weights: Any = None) -> None:
        self._sync_workers([worker_id], server_weights)

    def _begin_all(
        self, workers: list[Any], weights: Any
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        begun: dict[int, Any] = {}
        failed: dict[int, Exception] = {}
        if workers:
            weights = self._shared(weights)
        for worker in workers:
            try:
                begun[worker] = self._begin(worker, weights)
            except Exception as error:
                failed[worker] = error
        return begun, failed

    def _wait(self, begun: dict[int, Any], failed: dict[int, Exception]) -> None:
        """Waits for updates that were begun.

        Raises:
            PeerError: naming the workers that failed. The others have the weights.
        """
        for worker, one in begun.items():
            try:
                self._finish(worker, one)
            except Exception as error:
                failed[worker] = error
        if failed:
            lines = [f"worker {worker}: {words(error)}" for worker, error in failed.items()]
            raise PeerError(
                f"{len(failed)} of {len({*begun, *failed})} workers did not take the weights: "
                f"{'; '.join(lines)}",
                "retry",
            )


class RayWeightUpdater(_Remote, WeightUpdaterBase):
    """Updates collectors that are Ray actors; TorchRL's, with checks.

    A push waits until every actor has applied the weights. TorchRL's waits for none.

    Args:
        policy_weights: the policy's weights, as a TensorDict. A push without weights sends
            them if there is no getter.
        remote_collectors: the actors.
        max_interval: how many pushes an actor misses between two that it gets.
        weight_getter: returns the weights of a push without weights.
    """

    def __init__(
        self,
        policy_weights: Any,
        remote_collectors: list[Any],
        max_interval: int = 0,
        *,
        weight_getter: Callable[[], Any] | None = None,
    ) -> None:
        _check(policy_weights, weight_getter, max_interval=max_interval)
        self.policy_weights = policy_weights
        self.weight_getter = weight_getter
        self.remote_collectors = remote_collectors
        self.max_interval = max(0, max_interval)
        self._batches_since_weight_update = [0] * len(remote_collectors)

    def all_worker_ids(self) -> list[int]:
        """The numbers of all workers."""
        return list(range(len(self.remote_collectors)))

    def _skip_update(self, worker_id: Any) -> bool:
        self._batches_since_weight_update[worker_id] += 1
        return self._batches_since_weight_update[worker_id] <= self.max_interval

    def _shared(self, weights: Any) -> Any:
        # One copy in Ray's object store, whatever the number of workers. Where Ray has been shut
        # down, ray.put would start another.
        return _cluster.running().put(weights)

    def _begin(self, worker: int, weights: Any) -> Any:
        deadline = Deadline(WEIGHT_SYNC_TIMEOUT)
        return deadline, self.remote_collectors[worker].update_policy_weights_.remote(weights)

    def _finish(self, worker: int, begun: Any) -> None:
        import ray

        # Actors that do not answer take this time together, and not each of them.
        deadline, answer = begun
        ray.get(answer, timeout=deadline.left())
        self._batches_since_weight_update[worker] = 0


class RPCWeightUpdater(_Remote, WeightUpdaterBase):
    """Updates collectors that torch's RPC reaches; TorchRL's, with checks.

    Args:
        collector_infos: the workers' ``WorkerInfo``.
        collector_class: accepted for TorchRL's sake.
        collector_rrefs: references to the collectors.
        policy_weights: the policy's weights, as a TensorDict. A push without weights sends
            them if there is no getter.
        num_workers: how many workers there are.
        weight_getter: returns the weights of a push without weights.
    """

    def __init__(
        self,
        collector_infos: Any,
        collector_class: Any,
        collector_rrefs: Any,
        policy_weights: Any,
        num_workers: int,
        *,
        weight_getter: Callable[[], Any] | None = None,
    ) -> None:
        _check(policy_weights, weight_getter, num_workers=num_workers)
        if num_workers != len(collector_rrefs):
            raise SettingError(
                f"num_workers: expected {len(collector_rrefs)}, as many as collector_rrefs, got "
                f"{num_workers}"
            )
        self.collector_infos = collector_infos
        self.collector_class = collector_class
        self.collector_rrefs = collector_rrefs
        self.policy_weights = policy_weights
        self.weight_getter = weight_getter
        self.num_workers = num_workers
        self._is_waiting = True
        # Updates that a push with wait=False has begun.
        self._begun: list[tuple[dict[int, Any], dict[int, Exception]]] = []

    def all_worker_ids(self) -> list[int]:
        """The numbers of all workers."""
        return list(range(self.num_workers))

    def push_weights(
        self, policy_or_weights: Any = None, worker_ids: Any = None, *, wait: bool = True
    ) -> None:
        """Pushes weights to the workers, or to some of them.

        Args:
            policy_or_weights: a module, a TensorDict or a dict; None: the getter's, or
                the policy's.
            worker_ids: these workers alone.
            wait: whether to wait for the workers. The next push raises what went wrong
                with a push that did not wait.

        Raises:
            PeerError: naming the workers that did not take the weights.
        """
        with self._pushing:
            begun, self._begun = self._begun, []
            for one in begun:
                self._wait(*one)
            self._is_waiting = wait
            self._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)
        self._call_post_hooks()

    def __call__(
        self, policy_or_weights: Any = None, worker_ids: Any = None, *, wait: bool = True
    ) -> None:
        self.push_weights(policy_or_weights, worker_ids, wait=wait)

    def _sync_workers(self, workers: list[Any], weights: Any) -> None:
        begun, failed = self._begin_all(workers, weights)
        if self._is_waiting:
            self._wait(begun, failed)
        else:
            self._begun.append((begun, failed))

    def _begin(self, worker: int, weights: Any) -> Any:
        rref = self.collector_rrefs[worker]
        return rref.rpc_async(timeout=WEIGHT_SYNC_TIMEOUT).update_policy_weights_(weights)

    def _finish(self, worker: int, begun: Any) -> None:
        answer_of(begun)


class DistributedWeightUpdater(_Remote, WeightUpdaterBase):
    """Updates the workers of a DistributedCollector over its process group; TorchRL's, with checks.

    As TorchRL has it, one worker is named by its rank, from 1 on, and several by a list of
    numbers from 0 on.

    A push that a worker has not answered in time fails. The next push to this worker waits for
    that answer first. The answer alone is limited, by the timeout of the store: a worker whose
    process is stopped, and does not take the tensors, keeps the push until it goes on or ends,
    because TorchRL's process group has no limit for that.

    Args:
        store: the store of the collector, which carries instructions and answers.
        policy_weights: the policy's weights, as a TensorDict. They give the order of the
            tensors. A push without weights sends them if there is no getter.
        num_workers: how many workers there are.
        sync: whether the collector is synchronous.
        weight_getter: returns the weights of a push without weights.
    """

    def __init__(
        self,
        store: Any,
        policy_weights: Any,
        num_workers: int,
        sync: bool,
        *,
        weight_getter: Callable[[], Any] | None = None,
    ) -> None:
        _check(policy_weights, weight_getter, num_workers=num_workers)
        self._store = store
        self.policy_weights = policy_weights
        self.weight_getter = weight_getter
        self.num_workers = num_workers
        self._sync = sync
        self._batches_since_weight_update = [0] * num_workers

    def all_worker_ids(self) -> list[int]:
        """The numbers of all workers, from 0 on."""
        return list(range(self.num_workers))

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        if hasattr(worker_ids, "__index__"):
            rank = operator.index(worker_ids)
            if not 1 <= rank <= self.num_workers:
                raise SettingError(
                    f"there is no worker of rank {rank}; the ranks are 1 to {self.num_workers}"
                )
            worker_ids = [rank - 1]
        super()._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)

    def _shared(self, weights: Any) -> Any:
        place = self._place(None)
        if place is None:
            raise SettingError(
                "DistributedWeightUpdater: expected policy_weights, got none: the workers take the "
                "tensors in the order of the policy's weights. Give them, or use "
                "DistributedWeightSyncScheme"
            )
        return place.data.clone().update_(weights)

    def _sync_workers(self, workers: list[Any], weights: Any) -> None:
        # Those that owe an answer are waited for when all others have begun.
        last = sorted(workers, key=lambda worker: bool(self._store.check([_owes(worker + 1)])))
        super()._sync_workers(last, weights)

    def _begin(self, worker: int, weights: Any) -> None:
        rank = worker + 1
        if self._store.check([_owes(rank)]):
            # A late answer to an earlier push would pass for the answer to this one.
            self._take_answer(rank)
        # What another instruction left is no answer to this push.
        self._store.delete_key(f"NODE_{rank}_out")
        self._store.set(_owes(rank), b"update_weights")
        self._store.set(f"NODE_{rank}_in", b"update_weights")
        try:
            if self._sync:
                weights.send(rank)
            else:
                weights.isend(rank)
        except Exception:
            # No answer is to come: the next push fails as this one, and at once.
            self._store.delete_key(_owes(rank))
            raise

    def _finish(self, worker: int, begun: Any) -> None:
        self._take_answer(worker + 1)
        self._batches_since_weight_update[worker] = 0

    def _take_answer(self, rank: int) -> None:
        out = f"NODE_{rank}_out"
        try:
            status = self._store.get(out)
        except RuntimeError as error:
            raise PeerError(
                f"no answer came, and the next push waits for it first: {words(error)}", "retry"
            ) from error
        self._store.delete_key(_owes(rank))
        self._store.delete_key(out)
        if status != b"updated":
            raise PeerError(f"expected the answer 'updated', got {status!r}")


def _check(policy_weights: Any, weight_getter: Any, **numbers: Any) -> None:
    """Checks the arguments of a constructor.

    Raises:
        SettingError: naming the argument that cannot be.
    """
    if policy_weights is not None and not is_tensor_collection(policy_weights):
        raise SettingError(
            f"policy_weights: expected a TensorDict, got {type(policy_weights).__name__}; of a "
            "module that is TensorDict.from_module(module).data"
        )
    if weight_getter is not None and not callable(weight_getter):
        raise SettingError(f"weight_getter: expected a function, got {weight_getter!r}")
    for name, value in numbers.items():
        if not hasattr(value, "__index__"):
            raise SettingError(f"{name}: expected a whole number, got {value!r}")


def _owes(rank: int) -> str:
    """The store's key that is there while a worker owes the answer to a push."""
    return f"weightsync/NODE_{rank}_owes"


def words(error: Exception) -> str:
    """What an error says, without the tracebacks of other processes."""
    # Ray's errors have the worker's own as their cause.
    error = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("On WorkerInfo"):
        # torch's RPC says first where it was, and then what.
        return lines[1]
    return lines[0] if lines else type(error).__name__
