"""TorchRL's weight synchronisation over weightsync, by one changed import::

    from weightsync.torchrl import SharedMemWeightSyncScheme
    collector = MultiCollector(..., weight_sync_schemes={"policy": SharedMemWeightSyncScheme()})
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrl.collectors import WeightUpdaterBase
from torchrl.weight_update import (
    InitialSyncTransport,
    TransportBackend,
    WeightStrategy,
    WeightSyncBackend,
)

from weightsync.torchrl._base import WeightSyncScheme
from weightsync.torchrl._network_transports import DistributedTransport, RPCTransport
from weightsync.torchrl._older import WeightReceiver, WeightSender
from weightsync.torchrl._ray import RayModuleTransformScheme, RayWeightSyncScheme
from weightsync.torchrl._ray_transports import (
    RayActorTransport,
    RayModuleTransformReceiver,
    RayModuleTransformSender,
    RayTransport,
)
from weightsync.torchrl._registry import register
from weightsync.torchrl._remote_updaters import (
    DistributedWeightUpdater,
    RayWeightUpdater,
    RPCWeightUpdater,
)
from weightsync.torchrl._process_group import ProcessGroupWeightSyncScheme
from weightsync.torchrl._schemes import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
)
from weightsync.torchrl._transports import MPTransport, SharedMemTransport
from weightsync.torchrl._updaters import MultiProcessedWeightUpdater, VanillaWeightUpdater

if TYPE_CHECKING:
    from weightsync.torchrl._sync_collector import DistributedSyncCollector

__all__ = [
    "DistributedSyncCollector",
    "DistributedTransport",
    "DistributedWeightSyncScheme",
    "DistributedWeightUpdater",
    "InitialSyncTransport",
    "MPTransport",
    "MultiProcessWeightSyncScheme",
    "MultiProcessedWeightUpdater",
    "NoWeightSyncScheme",
    "RPCTransport",
    "ProcessGroupWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RPCWeightUpdater",
    "RayActorTransport",
    "RayModuleTransformReceiver",
    "RayModuleTransformScheme",
    "RayModuleTransformSender",
    "RayTransport",
    "RayWeightSyncScheme",
    "RayWeightUpdater",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "TransportBackend",
    "VanillaWeightUpdater",
    "WeightReceiver",
    "WeightSender",
    "WeightStrategy",
    "WeightSyncBackend",
    "WeightSyncScheme",
    "WeightUpdaterBase",
    "register",
]


def __getattr__(name: str) -> Any:
    # TorchRL's module of distributed collectors takes long to import.
    if name == "DistributedSyncCollector":
        from weightsync.torchrl._sync_collector import DistributedSyncCollector

        return DistributedSyncCollector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
