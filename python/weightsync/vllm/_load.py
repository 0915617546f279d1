"""vLLM's layerwise reload, whole or undone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from weightsync.engines._checkpoint import Checkpoint
from weightsync.engines._ranks import Group
from weightsync.engines._worker import Place
from weightsync.errors import UnsupportedError


class VllmPlace(Place):
    """A worker of vLLM, which vLLM made with this configuration."""

    def __init__(self, vllm_config: Any, model: Any) -> None:
        parallel = vllm_config.parallel_config
        index = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        self.rank = index * parallel.world_size + parallel.rank
        self._config, self._model = vllm_config, model

    def checkpoint(self) -> Checkpoint:
        config = self._config.model_config
        return Checkpoint(config.hf_config, str(config.model), getattr(config, "revision", None))

    def load(self, tensors: Iterable[tuple[str, Any]], version: int | None = None) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        with self._surroundings():
            _repack_experts(self._model)
            initialize_layerwise_reload(self._model)
            try:
                self._model.load_weights(tensors)
            finally:
                # Also after a failure: a model whose reload was not finished cannot be begun again.
                finalize_layerwise_reload(self._model, self._config.model_config)

    def load_first(self) -> None:
        from vllm.model_executor.model_loader import get_model_loader

        config = self._config.load_config
        read = getattr(get_model_loader(config), "get_all_weights", None)
        if read is None:
            raise UnsupportedError(
                "the weights that the engine started with cannot be read again: its load format "
                f"is {config.load_format!r}"
            )
        self.load(read(self._config.model_config, self._model))

    def group(self) -> Group | None:
        from vllm.distributed import parallel_state

        group: Group = parallel_state.get_world_group()
        return None if group.world_size == 1 else group

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        """What vLLM itself loads in."""
        import torch
        from vllm.config import set_current_vllm_config

        device = torch.device(self._config.device_config.device)
        with torch.no_grad(), device, set_current_vllm_config(self._config):
            yield


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
