"""Moves a model's weights from the trainer to every worker that runs it.

Versioned, verified, never half-written, in time set by what changed and not by how
many workers listen::

    sender = weightsync.Sender(model)            # the trainer
    info = sender.init_info                      # hand it to the workers
    sender.connect(workers=4)
    report = sender.send()

    receiver = weightsync.ModelReceiver(info, worker, model=model)   # a worker
    receiver.connect()
    receiver.receive(timeout=0)

``weightsync.torchrl`` has TorchRL's schemes, by one changed import.
"""

from __future__ import annotations

from weightsync._native import (
    DryRun,
    InitInfo,
    PendingSend,
    Report,
    WorkerReport,
    WorkerStatus,
    __version__,
)
from weightsync.background import Background
from weightsync.cascade import Cascade
from weightsync.errors import (
    CorruptError,
    DeadlineError,
    LifecycleError,
    LoadError,
    MissingModelError,
    MissingTensorError,
    ModelError,
    NotAppliedError,
    OperatingSystemError,
    PeerError,
    SenderClosedError,
    SendError,
    SettingError,
    UnsupportedError,
    WeightsyncError,
    WrongTypeError,
    WrongWeightsError,
)
from weightsync.mapping import Mapping
from weightsync.model_receiver import ModelReceiver
from weightsync.receiver import Receiver
from weightsync.scheme import Distributed, MultiProcess, NoSync, Rpc, Scheme, SharedMem, StoreScheme
from weightsync.sender import Sender
from weightsync.snapshot import Snapshot
from weightsync.store import Saved, Saving, Store, StoredModel, StoredVersion
from weightsync.synchronizer import Explorer, Need, Synced, Synchronizer, Trained, Trainer

__all__ = [
    "Background",
    "Cascade",
    "CorruptError",
    "DeadlineError",
    "Distributed",
    "DryRun",
    "Explorer",
    "InitInfo",
    "LifecycleError",
    "LoadError",
    "Mapping",
    "MissingModelError",
    "MissingTensorError",
    "ModelError",
    "ModelReceiver",
    "MultiProcess",
    "Need",
    "NoSync",
    "NotAppliedError",
    "OperatingSystemError",
    "PeerError",
    "PendingSend",
    "Receiver",
    "Report",
    "Rpc",
    "Saved",
    "Saving",
    "Scheme",
    "SendError",
    "Sender",
    "SenderClosedError",
    "SettingError",
    "SharedMem",
    "Snapshot",
    "Store",
    "StoreScheme",
    "StoredModel",
    "StoredVersion",
    "Synced",
    "Synchronizer",
    "Trained",
    "Trainer",
    "UnsupportedError",
    "WeightsyncError",
    "WorkerReport",
    "WorkerStatus",
    "WrongTypeError",
    "WrongWeightsError",
    "__version__",
]
