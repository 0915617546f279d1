"""SGLang's model, and how a version gets into it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weightsync.engines._checkpoint import Checkpoint
from weightsync.engines._ranks import Group
from weightsync.engines._worker import Place
from weightsync.errors import UnsupportedError


class SglangPlace(Place):
    """A rank of SGLang, by the runner of its model."""

    # SGLang passes on the answer of its first rank alone.
    raises_everywhere = True

    def __init__(self, runner: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        self._runner = runner
        self.rank = int(get_parallel().tp_rank)

    def checkpoint(self) -> Checkpoint:
        self._check_loads()
        config = self._runner.model_config
        return Checkpoint(config.hf_config, str(config.model_path), config.revision)

    def load(self, tensors: Iterable[tuple[str, Any]], version: int | None = None) -> None:
        import torch
        from sglang.srt.model_loader.loader import DefaultModelLoader
        from sglang.srt.model_loader.utils import set_default_torch_dtype

        model, device = self._runner.model, torch.device(self._runner.device)
        if device.type == "cuda":
            # A batch that SGLang began before the pause may still read the weights.
            torch.cuda.synchronize(device)
        with torch.no_grad(), set_default_torch_dtype(self._runner.model_config.dtype):
            # As SGLang's own update from disk does, and its way back after a failure.
            DefaultModelLoader.restore_weights_before_loading(model, device)
            DefaultModelLoader.load_weights_and_postprocess(model, tensors, device)

    def load_first(self) -> None:
        from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader

        runner = self._runner
        loader = get_model_loader(runner.load_config, runner.model_config)
        if not isinstance(loader, DefaultModelLoader):
            raise UnsupportedError(
                "the weights that the engine started with cannot be read again: its load format "
                f"is {runner.load_config.load_format!r}"
            )
        source = DefaultModelLoader.Source.init_new(runner.model_config, runner.model)
        self.load(loader._get_weights_iterator(source))

    def group(self) -> Group | None:
        from sglang.srt.runtime_context import get_parallel

        group: Group = get_parallel().tp_group
        return None if group.world_size == 1 else group

    def _check_loads(self) -> None:
        """Refuses where SGLang refuses its own updates: it would go on with what it has cached."""
        from sglang.srt.model_executor.model_runner_components import weight_updater

        if said := weight_updater._unsupported_derived_weight_cache_error(self._runner.model):
            raise UnsupportedError(said)
        self._runner.weight_updater._assert_weight_cache_inactive("weightsync")
