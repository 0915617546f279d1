"""What an update is compared with: vLLM's own load of tensors that lie in memory."""

from __future__ import annotations

import glob
import time

import torch


class Baseline:
    """An extension of vLLM's workers."""

    _tensors: list[tuple[str, torch.Tensor]] | None = None

    def load_again(self, folder: str) -> float:
        """Seconds of one load of the checkpoint in ``folder``. The first call reads its files."""
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        if self._tensors is None:
            # Cloned: what `load_file` returns is mapped from the file.
            self._tensors = [
                (name, tensor.clone())
                for file in sorted(glob.glob(f"{folder}/*.safetensors"))
                for name, tensor in load_file(file).items()
            ]
        model = self.model_runner.model
        with torch.no_grad(), torch.device("cpu"), set_current_vllm_config(self.vllm_config):
            began = time.perf_counter()
            initialize_layerwise_reload(model)
            model.load_weights(iter(self._tensors))
            finalize_layerwise_reload(model, self.model_runner.model_config)
            return time.perf_counter() - began
