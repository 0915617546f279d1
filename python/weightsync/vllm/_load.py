"""vLLM's layerwise reload, whole or undone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from weightsync import _extra
from weightsync.errors import UnsupportedError
from weightsync.snapshot import Snapshot

if TYPE_CHECKING:
    from weightsync._native import Snapshot as NativeSnapshot
    from weightsync.vllm._worker import Place


def tensors_of(snapshot: NativeSnapshot) -> Iterator[tuple[str, Any]]:
    """The tensors of a version, read in place; tied ones under each of their names."""
    tensors = Snapshot(snapshot)
    return ((name, tensors[name]) for name in tensors if not _extra.is_extra(name))


def load(place: Place, tensors: Iterable[tuple[str, Any]]) -> None:
    """Loads every tensor of a checkpoint through vLLM's own loader."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    with _surroundings(place):
        _repack_experts(place.model)
        initialize_layerwise_reload(place.model)
        try:
            place.model.load_weights(tensors)
        finally:
            # Also after a failure: a model whose reload was not finished cannot be begun again.
            finalize_layerwise_reload(place.model, place.model_config)


def load_first(place: Place) -> None:
    """Loads what vLLM started with: its own checkpoint, read once more."""
    from vllm.model_executor.model_loader import get_model_loader

    loader = get_model_loader(place.vllm_config.load_config)
    read = getattr(loader, "get_all_weights", None)
    if read is None:
        raise UnsupportedError(
            "the weights that the engine started with cannot be read again: its load format "
            f"is {place.vllm_config.load_config.load_format!r}"
        )
    load(place, read(place.model_config, place.model))


def _repack_experts(model: Any) -> None:
    """Has vLLM arrange the experts for its kernels once more, as in its first load.

    On the CPU it does so in the first load alone: from the second on the kernels would read
    tensors that are not in their arrangement, and answer with something else, without an error.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if type(method).__name__ == "UnquantizedFusedMoEMethod" and hasattr(method, "moe_kernel"):
            method.moe_kernel = None


@contextlib.contextmanager
def _surroundings(place: Place) -> Iterator[None]:
    """What vLLM itself loads in."""
    import torch
    from vllm.config import set_current_vllm_config

    device = torch.device(place.vllm_config.device_config.device)
    with torch.no_grad(), device, set_current_vllm_config(place.vllm_config):
        yield
