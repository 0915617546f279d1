"""A worker's extension that receives by ``weightsync.transfer``."""

from __future__ import annotations

import asyncio
from typing import Any

from weightsync import transfer

# Tensors that are loaded before the fault.
_MIDWAY = 9


class TransferWorker:
    """What a trainer's client calls through ``collective_rpc``."""

    _actor: transfer.InferenceActor | None = None

    def init_transfer(self, strategy: str, *told: Any) -> None:
        of: Any = self
        loader = transfer.VllmLoader(of.model_runner.model, of.vllm_config)
        self._actor = transfer.InferenceActor(transfer.strategy_from_config(strategy), loader)
        asyncio.run(self._actor.init_weight_update_communicator(*told))

    def update_transfer(self, request: dict[str, Any]) -> Any:
        assert self._actor is not None
        return asyncio.run(self._actor.update_named_weights(request))

    def fail_next_load(self) -> None:
        model: Any = self.model_runner.model  # type: ignore[attr-defined]
        load_weights = model.load_weights

        def load(tensors: Any) -> Any:
            model.load_weights = load_weights
            return load_weights(_until_midway(tensors))

        model.load_weights = load

    def end_transfer(self) -> None:
        assert self._actor is not None
        self._actor.shutdown()


def _until_midway(tensors: Any) -> Any:
    for place, pair in enumerate(tensors):
        if place == _MIDWAY:
            raise RuntimeError("the load failed midway")
        yield pair
