"""TorchRL's older weight updaters on one host: push to chosen workers, pull, map, hooks."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchrl.collectors import MultiProcessedWeightUpdater as _MultiProcessed
from torchrl.collectors import VanillaWeightUpdater as _Vanilla

from weightsync.errors import ModelError


class _Checked:
    """What both do: a mapping hook between server and worker, and whole updates only."""

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        """The hook between the server's weights and the workers'; as they are by default."""
        if isinstance(server_weights, nn.Module):
            from tensordict import TensorDict

            return TensorDict.from_module(server_weights).data
        return server_weights

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> Any:
        """Pushes weights to the workers, or to some of them, and calls the post-hooks.

        Without weights they are pulled from the server. Workers and tensors are checked
        before anything changes.
        """
        known = self.all_worker_ids()
        if worker_ids is not None and known is not None:
            wanted = worker_ids if isinstance(worker_ids, (list, tuple)) else [worker_ids]
            unknown = [one for one in wanted if one not in known]
            if unknown:
                raise ModelError(f"there is no worker {unknown[0]}; there are {known}")
        return super().push_weights(policy_or_weights, worker_ids)


class VanillaWeightUpdater(_Checked, _Vanilla):
    """Updates a policy in this process; TorchRL's, with checks."""

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
        if server_weights is not None:
            _update(self.policy_weights, server_weights)


class MultiProcessedWeightUpdater(_Checked, _MultiProcessed):
    """Updates the weights of each device's workers; TorchRL's, with checks."""

    def _sync_weights_with_worker(self, worker_id: Any, server_weights: Any) -> None:
        if server_weights is not None:
            _update(self._policy_weights[worker_id].data, server_weights)


def _update(place: Any, weights: Any) -> None:
    """Writes all tensors or none: what does not fit is found first."""
    own = set(place.keys(True, True))
    came = set(weights.keys(True, True))
    missing, unknown = sorted(map(str, own - came)), sorted(map(str, came - own))
    if missing or unknown:
        raise ModelError(
            f"these are not the policy's weights: missing {', '.join(missing) or 'none'}, unknown "
            f"{', '.join(unknown) or 'none'}"
        )
    for name in own:
        expected, got = place.get(name), weights.get(name)
        if expected.shape != got.shape:
            raise ModelError(f"{name} is {list(got.shape)}, and should be {list(expected.shape)}")
    place.data.update_(weights.data)
