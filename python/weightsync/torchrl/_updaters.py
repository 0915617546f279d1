"""TorchRL's older weight updaters on one host, which push weights to workers."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import MultiProcessedWeightUpdater as _MultiProcessed
from torchrl.collectors import VanillaWeightUpdater as _Vanilla

from weightsync.torchrl._collector import compare
from weightsync.torchrl._given import unknown_worker


class Checked:
    """The base of all updaters: a mapping hook between server and worker, and whole updates."""

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        """The hook from the server's weights to the workers'; by default they are the same."""
        return _as_tensordict(server_weights)

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Pushes weights to the workers, or to some of them.

        Weights that are not given are pulled from the server. Workers and tensors are
        checked before any weights change.
        """
        wanted = self.all_worker_ids()
        if worker_ids is not None:
            wanted = _chosen(worker_ids, wanted)
        weights = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        mapped = _as_tensordict(self._maybe_map_weights(weights))
        # RPCCollector pushes to nobody where no worker is due.
        if wanted != [] and self._is_nothing(mapped):
            return
        # The vanilla updater has no workers: its policy is in this process.
        wanted = [None] if wanted is None else [one for one in wanted if not self._skip_update(one)]
        for worker in wanted:
            if (place := self._place(worker)) is not None:
                compare(place, mapped, "the policy")
        self._sync_workers(wanted, mapped)

    def _is_nothing(self, weights: Any) -> bool:
        """Whether there are no weights, and the push does nothing."""
        return weights is None

    def _sync_workers(self, workers: list[Any], weights: Any) -> None:
        for worker in workers:
            self._sync_weights_with_worker(worker_id=worker, server_weights=weights)

    def _sync_weights_with_worker(self, worker_id: Any = None, server_weights: Any = None) -> None:
        self._place(worker_id).data.update_(server_weights.data)


class VanillaWeightUpdater(Checked, _Vanilla):
    """Updates a policy in this process; TorchRL's, with checks."""

    def _place(self, worker: Any) -> Any:
        return self.policy_weights


class MultiProcessedWeightUpdater(Checked, _MultiProcessed):
    """Updates the weights of each device's workers; TorchRL's, with checks."""

    def _place(self, worker: Any) -> Any:
        return self._policy_weights[worker]


def _chosen(worker_ids: Any, known: list[Any] | None) -> list[Any]:
    """The workers that are meant: one, or several of any iterable; each once.

    Raises:
        SettingError: naming a worker that does not exist.
    """
    is_one = isinstance(worker_ids, (str, torch.device)) or hasattr(worker_ids, "__index__")
    wanted = list(worker_ids) if isinstance(worker_ids, Iterable) and not is_one else [worker_ids]
    for one in wanted:
        # 1.0 equals 1, and is no number of a worker.
        if known is not None and (isinstance(one, float) or one not in known):
            raise unknown_worker(one, known)
    numbers = [operator.index(one) if hasattr(one, "__index__") else one for one in wanted]
    return list(dict.fromkeys(numbers))


def _as_tensordict(weights: Any) -> Any:
    if isinstance(weights, nn.Module):
        return TensorDict.from_module(weights).data
    if isinstance(weights, dict):
        weights = TensorDict(weights)
        if any("." in key for key in weights.keys()):
            return weights.unflatten_keys(".")
    return weights
