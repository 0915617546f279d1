"""TorchRL's DistributedSyncCollector, which takes no scheme, with the scheme of this package."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torchrl.collectors.distributed import DistributedSyncCollector as _TorchRLCollector

from weightsync.torchrl._schemes import DistributedWeightSyncScheme


class DistributedSyncCollector(_TorchRLCollector):
    """TorchRL's, with the same arguments. Its weights go by :class:`DistributedWeightSyncScheme`.

    TorchRL's takes no scheme, and makes its own.
    """

    def _init_workers(self) -> None:
        if self._weight_sync_schemes is not None:
            for theirs in self._weight_sync_schemes.values():
                theirs.shutdown()
            scheme = _GroupScheme(self.backend, self.num_workers + 1)
            scheme.init_on_sender(model_id="policy", context=self, num_workers=self.num_workers)
            self._weight_sync_schemes = {"policy": scheme}
        super()._init_workers()


class _GroupScheme(DistributedWeightSyncScheme):
    """A scheme whose ``connect`` also makes the process group, which carries the frames."""

    def __init__(self, group_backend: str, world_size: int) -> None:
        super().__init__()
        self._group_backend = group_backend
        self._world_size = world_size

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        rank = 0 if self.initialized_on_sender else self._rank(worker_idx)
        torch.distributed.init_process_group(
            self._group_backend,
            rank=rank,
            world_size=self._world_size,
            timeout=timedelta(seconds=self.timeout),
        )
        super().connect(worker_idx=worker_idx, weights=weights)

    def _rank(self, worker_idx: int | None) -> int:
        # The collector numbers its workers by rank.
        return (self._worker_idx or 0) + self._first_worker if worker_idx is None else worker_idx
