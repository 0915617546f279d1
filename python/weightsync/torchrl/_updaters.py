"""TorchRL's older weight updaters on one host: push to chosen workers, pull, map, hooks."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from torch import nn
from torchrl.collectors import MultiProcessedWeightUpdater as _MultiProcessed
from torchrl.collectors import VanillaWeightUpdater as _Vanilla

from weightsync.errors import ModelError
from weightsync.torchrl._collector import compare


class _Checked:
    """What both do: a mapping hook between server and worker, and whole updates only."""

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        """The hook between the server's weights and the workers'; as they are by default."""
        return _as_tensordict(server_weights)

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> Any:
        """Pushes weights to the workers, or to some of them, and calls the post-hooks.

        Without weights they are pulled from the server. Workers and tensors are checked
        before anything changes.
        """
        known = self.all_worker_ids()
        if worker_ids is not None and known is not None:
            worker_ids = worker_ids if isinstance(worker_ids, (list, tuple)) else [worker_ids]
            unknown = [one for one in worker_ids if one not in known]
            if unknown:
                raise ModelError(f"there is no worker {unknown[0]}; there are {known}")
        weights = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        if weights is not None:
            mapped = _as_tensordict(self._maybe_map_weights(weights))
            for place in self._places(worker_ids):
                compare(place, mapped, "the policy")
        return super().push_weights(weights, worker_ids)


class VanillaWeightUpdater(_Checked, _Vanilla):
    """Updates a policy in this process; TorchRL's, with checks."""

    def _places(self, worker_ids: Any) -> list[Any]:
        return [self.policy_weights]

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        if server_weights is not None:
            self.policy_weights.data.update_(_as_tensordict(server_weights).data)


class MultiProcessedWeightUpdater(_Checked, _MultiProcessed):
    """Updates the weights of each device's workers; TorchRL's, with checks."""

    def _places(self, worker_ids: Any) -> list[Any]:
        wanted = self._policy_weights if worker_ids is None else worker_ids
        return [self._policy_weights[worker] for worker in wanted]

    def _sync_weights_with_worker(self, worker_id: Any, server_weights: Any) -> None:
        if server_weights is not None:
            self._policy_weights[worker_id].data.update_(_as_tensordict(server_weights).data)


def _as_tensordict(weights: Any) -> Any:
    if isinstance(weights, nn.Module):
        return TensorDict.from_module(weights).data
    if isinstance(weights, dict):
        weights = TensorDict(weights)
        if any("." in key for key in weights.keys()):
            return weights.unflatten_keys(".")
    return weights
