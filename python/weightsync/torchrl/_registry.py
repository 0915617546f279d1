"""The words by which TorchRL makes schemes, such as those of a configuration file."""

from __future__ import annotations

from torchrl.weight_update.weight_sync_schemes import register_weight_sync_backend

from weightsync.torchrl import _ray, _schemes
from weightsync.torchrl._base import WeightSyncScheme
from weightsync.torchrl._process_group import ProcessGroupWeightSyncScheme

#: The schemes by TorchRL's words for them; TorchRL has no ``process-group``.
SCHEMES: dict[str, type[WeightSyncScheme]] = {
    "none": _schemes.NoWeightSyncScheme,
    "shared": _schemes.SharedMemWeightSyncScheme,
    "process": _schemes.MultiProcessWeightSyncScheme,
    "distributed": _schemes.DistributedWeightSyncScheme,
    "rpc": _schemes.RPCWeightSyncScheme,
    "ray": _ray.RayWeightSyncScheme,
    "process-group": ProcessGroupWeightSyncScheme,
}


def register(*, replace: bool = False) -> None:
    """Registers the schemes here with TorchRL's ``WeightSyncScheme.from_backend``.

    ``"weightsync-shared"`` is then the scheme here that ``"shared"`` is of TorchRL's, and
    so are the words ``none``, ``process``, ``distributed``, ``rpc`` and ``ray``. TorchRL has no
    ``"process-group"``: its scheme here is ``"weightsync-process-group"``.
    ``"weightsync"`` alone is shared memory. Calling this again changes nothing.

    Args:
        replace: whether TorchRL's own words mean the schemes here, too, with
            ``"process-group"`` among them.
    """
    _register("weightsync", SCHEMES["shared"])
    for word, scheme in SCHEMES.items():
        _register(f"weightsync-{word}", scheme)
        if replace:
            _register(word, scheme)


def _register(word: str, scheme: type[WeightSyncScheme]) -> None:
    # A later registration takes the word over.
    register_weight_sync_backend(word)(scheme)
