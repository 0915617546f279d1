"""The backend: what vLLM makes in each of its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightsync.engines import _restart
from weightsync.engines._request import WorkerRequest, number
from weightsync.engines._worker import EngineWorker
from weightsync.errors import UnsupportedError
from weightsync.vllm._load import VllmPlace


@dataclass
class InitInfo(WorkerRequest, WeightTransferInitInfo):
    """What a trainer asks of a worker outside of an update."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Which version to load; the worker has it already."""

    version: int
    timeout: float = 60.0

    def __post_init__(self) -> None:
        number("version", self.version, int)
        number("timeout", self.timeout, (int, float))


class WeightsyncEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads the versions of a weightsync sender into one vLLM worker.

    All of a load, vLLM's layerwise reload included, happens inside ``receive_weights``: the
    sender's reports then say what is true, and a load that fails is undone there.

    vLLM makes this when the worker has loaded its checkpoint and serves nothing yet. An engine that
    was told where its trainer is gets the newest version here.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._worker = EngineWorker(VllmPlace(vllm_config, model))
        _restart.begin(self._worker)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self._worker.do(init_info)

    def start_weight_update(self) -> None:
        self._worker.start()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        self._worker.update(update_info.version, update_info.timeout)

    def finish_weight_update(self) -> None:
        self._worker.finish()

    def shutdown(self) -> None:
        self._worker.leave()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> NoReturn:
        """vLLM before 0.28 has its trainers call this; :class:`weightsync.vllm.Trainer` sends."""
        raise UnsupportedError(
            "the backend 'weightsync' sends through weightsync.vllm.Trainer: call its sync"
        )
