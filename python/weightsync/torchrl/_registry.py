"""The words by which TorchRL makes schemes, such as those of a configuration file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchrl.weight_update.weight_sync_schemes import register_weight_sync_backend


def register(*, replace: bool = False) -> None:
    """Registers the schemes here with TorchRL's ``WeightSyncScheme.from_backend``.

    ``"weightsync-shared"`` is then the scheme here that ``"shared"`` is of TorchRL's, and
    so are the words ``none``, ``process``, ``distributed``, ``rpc`` and ``ray``.
    ``"weightsync"`` alone is shared memory. Calling this again changes nothing.

    Args:
        replace: whether TorchRL's own words mean the schemes here, too.
    """
    from weightsync.torchrl import _schemes

    schemes: dict[str, Callable[..., Any]] = {
        "none": _schemes.NoWeightSyncScheme,
        "shared": _schemes.SharedMemWeightSyncScheme,
        "process": _schemes.MultiProcessWeightSyncScheme,
        "distributed": _schemes.DistributedWeightSyncScheme,
        "rpc": _schemes.RPCWeightSyncScheme,
        "ray": _ray_scheme,
    }
    _register("weightsync", _schemes.SharedMemWeightSyncScheme)
    for word, scheme in schemes.items():
        _register(f"weightsync-{word}", scheme)
        if replace:
            _register(word, scheme)


def _register(word: str, scheme: Callable[..., Any]) -> None:
    # TorchRL calls what is registered, and a later registration takes the word over.
    register_weight_sync_backend(word)(scheme)  # type: ignore[arg-type]


def _ray_scheme(**kwargs: Any) -> Any:
    """Makes the scheme for Ray, which is looked up here because Ray may not be installed."""
    from weightsync import torchrl

    package: Any = torchrl
    return package.RayWeightSyncScheme(**kwargs)
