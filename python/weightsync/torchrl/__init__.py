"""TorchRL's weight synchronisation over weightsync, by one changed import::

    from weightsync.torchrl import SharedMemWeightSyncScheme
    collector = MultiCollector(..., weight_sync_schemes={"policy": SharedMemWeightSyncScheme()})
"""

from __future__ import annotations

from torchrl.weight_update import TransportBackend, WeightStrategy

from weightsync.torchrl._base import WeightSyncScheme
from weightsync.torchrl._older import WeightReceiver, WeightSender
from weightsync.torchrl._schemes import (
    DistributedWeightSyncScheme,
    MultiProcessWeightSyncScheme,
    NoWeightSyncScheme,
    RPCWeightSyncScheme,
    SharedMemWeightSyncScheme,
)
from weightsync.torchrl._transports import MPTransport, SharedMemTransport
from weightsync.torchrl._updaters import MultiProcessedWeightUpdater, VanillaWeightUpdater

__all__ = [
    "DistributedWeightSyncScheme",
    "MPTransport",
    "MultiProcessWeightSyncScheme",
    "MultiProcessedWeightUpdater",
    "NoWeightSyncScheme",
    "RPCWeightSyncScheme",
    "SharedMemTransport",
    "SharedMemWeightSyncScheme",
    "TransportBackend",
    "VanillaWeightUpdater",
    "WeightReceiver",
    "WeightSender",
    "WeightStrategy",
    "WeightSyncScheme",
]
