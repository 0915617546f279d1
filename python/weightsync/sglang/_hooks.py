"""What weightsync does inside of SGLang's scheduler, in hooks around its calls for weights.

A hook is given the call that it surrounds. Where a call of the scheduler raises, the server ends: so
no hook does once the server serves.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from weightsync import _tested
from weightsync.engines import _restart
from weightsync.engines._request import WorkerRequest
from weightsync.engines._worker import EngineWorker, UpdateError
from weightsync.errors import SettingError, WeightsyncError
from weightsync.sglang._names import LOADER, PREFIX, STATE, load
from weightsync.sglang._place import SglangPlace

logger = logging.getLogger("weightsync")


class Rank:
    """This process's rank of the server."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.worker = self._made()

    def answer(self, text: str) -> str:
        """Does what a trainer asks for."""
        try:
            said = json.loads(text)
            if said == {"do": STATE}:
                return "paused" if self._is_paused() else "running"
            request = WorkerRequest(**said)
        except (TypeError, ValueError) as error:
            raise SettingError(f"the request cannot be read: {error}") from error
        if request.do == "join" and self._manager.offload_tags:
            raise UpdateError("its memory was released, and has not come back", "asleep")
        self.worker.do(request)
        return "done"

    def begin_again(self) -> None:
        """The model has what SGLang has loaded, and nothing of a sender."""
        self.worker.leave()
        self.worker = self._made()

    def _made(self) -> EngineWorker:
        return EngineWorker(SglangPlace(self._manager.tp_worker.model_runner))

    def _is_paused(self) -> bool:
        return bool(self._manager.scheduler._engine_paused)


# SGLang runs one scheduler in a process. None on a server that takes no versions.
_rank: Rank | None = None


def begin(original: Callable[..., None], manager: Any) -> None:
    """The model has its checkpoint, and nothing was served yet.

    Raises:
        UnsupportedError: if this version of SGLang was not tested: the server then does not start.
        LoadError: if the server was told of a trainer, and has no version of it.
    """
    global _rank
    original(manager)
    from sglang.srt.runtime_context import get_model

    if LOADER not in (get_model().custom_weight_loader or []):
        return
    _tested.check("sglang")
    _rank = Rank(manager)
    _restart.begin(_rank.worker)


def check_weights(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """``/weights_checker``: a trainer's requests, and SGLang's own."""
    if _rank is None or not request.action.startswith(PREFIX):
        return original(manager, request)
    from sglang.srt.managers import io_struct

    try:
        said = _rank.answer(request.action[len(PREFIX) :])
    except Exception as error:
        return io_struct.CheckWeightsReqOutput(success=False, message=_line(error))
    return io_struct.CheckWeightsReqOutput(success=True, message=said)


def update_from_tensor(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """``/update_weights_from_tensor``: refused where the model has a trainer's versions."""
    from sglang.srt.managers import io_struct

    refused = _refused(request.load_format)
    if refused is None:
        try:
            return _other(original, manager, request)
        except Exception as error:
            if _rank is None or _rank.worker._ranks.count > 1:
                # The other ranks wait for this one.
                raise
            refused = f"the tensors cannot be loaded: {_line(error)}"
    logger.error("/update_weights_from_tensor: %s", refused)
    return io_struct.UpdateWeightsFromTensorReqOutput(success=False, message=refused)


def update_from_disk(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """``/update_weights_from_disk``, as above."""
    from sglang.srt.managers import io_struct

    if (refused := _refused()) is None:
        return _other(original, manager, request)
    return io_struct.UpdateWeightFromDiskReqOutput(
        success=False, message=refused, num_paused_requests=0
    )


def update_from_distributed(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """``/update_weights_from_distributed``, as above."""
    from sglang.srt.managers import io_struct

    if (refused := _refused()) is None:
        return _other(original, manager, request)
    return io_struct.UpdateWeightsFromDistributedReqOutput(success=False, message=refused)


def update_from_ipc(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """``/update_weights_from_ipc``, as above."""
    from sglang.srt.managers import io_struct

    if (refused := _refused()) is None:
        return _other(original, manager, request)
    return io_struct.UpdateWeightsFromIPCReqOutput(success=False, message=refused)


def _other(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """An update of SGLang's own."""
    try:
        return original(manager, request)
    finally:
        if _rank is not None:
            _rank.begin_again()


def _refused(load_format: str | None = None) -> str | None:
    """Why weights that come another way are not loaded; None if they are."""
    if load_format == LOADER:
        try:
            load(None, None)
        except WeightsyncError as error:
            return str(error)
    if _rank is not None and _rank.worker.is_joined:
        return (
            "this engine has the versions of a weightsync sender: take it out of its trainer "
            "(trainer.remove) before it is given other weights"
        )
    return None


def _line(error: Exception) -> str:
    said = str(error) or type(error).__name__
    return said if isinstance(error, WeightsyncError) else f"{type(error).__name__}: {said}"
