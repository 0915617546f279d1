"""The backend: what vLLM makes in each of its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightsync.vllm._worker import EngineWorker, Place


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What a trainer asks of a worker outside of an update."""

    #: "join": be joined to the sender, and have a version that fits. "loaded": say whether the
    #: last update failed. "restore": bring the last whole version back.
    do: str
    #: The sender's init info, as JSON text.
    sender: str = ""
    #: The worker number of this engine's rank 0.
    first_worker: int = 0
    #: The version to have, at least.
    version: int = 0
    #: In seconds.
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.do not in ("join", "loaded", "restore"):
            raise ValueError(f'do: expected "join", "loaded" or "restore", got {self.do!r}')
        _check(self, "sender", str)
        _check(self, "first_worker", int)
        _check(self, "version", int)
        _check(self, "timeout", (int, float))


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which version to load; the worker has it already."""

    version: int
    timeout: float = 60.0

    def __post_init__(self) -> None:
        _check(self, "version", int)
        _check(self, "timeout", (int, float))


class WeightsyncEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads the versions of a weightsync sender into one vLLM worker.

    All of a load, vLLM's layerwise reload included, happens inside ``receive_weights``: the
    sender's reports then say what is true, and a load that fails is undone there.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, given: Any, *rest: Any) -> None:
        # Up to 0.24 (config, parallel_config, model), then (config, vllm_config, device, model).
        super().__init__(config, given, *rest)
        self._worker = EngineWorker(Place.of(given, rest[-1]))

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        match init_info.do:
            case "join":
                self._worker.join(
                    init_info.sender, init_info.first_worker, init_info.version, init_info.timeout
                )
            case "loaded":
                self._worker.loaded()
            case _:
                self._worker.restore()

    def start_weight_update(self) -> None:
        self._worker.start()

    def receive_weights(self, update_info: UpdateInfo, load_weights: Any = None) -> None:
        # Up to 0.24 vLLM gives a function that loads; the model has the same one.
        self._worker.update(update_info.version, update_info.timeout)

    def finish_weight_update(self) -> None:
        self._worker.finish()

    def shutdown(self) -> None:
        self._worker.leave()


def _check(info: Any, name: str, kind: type | tuple[type, ...]) -> None:
    value = getattr(info, name)
    if not isinstance(value, kind) or isinstance(value, bool) or (kind is not str and value < 0):
        raise ValueError(f"{name}: expected {kind}, zero or more, got {value!r}")
