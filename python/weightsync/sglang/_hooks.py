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
from weightsync.sglang._names import GRAMMARS, LOADER, PREFIX, STATE, load
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
            if said == {"do": GRAMMARS}:
                return "compiling" if self._queue_with_grammars() else "none"
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

    def _queue_with_grammars(self) -> bool:
        """What SGLang does between batches, and does not while it is paused; whether any waited."""
        scheduler = self._manager.scheduler
        waits = self._is_paused() and len(scheduler.grammar_manager) > 0
        if waits:
            # It looks for a few milliseconds, and all ranks together.
            for request in scheduler.grammar_manager.get_ready_grammar_requests():
                scheduler._add_request_to_queue(request)
        return waits

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


def release(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """``/release_memory_occupation``: weights that it frees come back, and not whole."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

    if _rank is not None and (not request.tags or GPU_MEMORY_TYPE_WEIGHTS in request.tags):
        _rank.worker.do(WorkerRequest("forget"))
    return original(manager, request)


class _UnreadError(Exception):
    """A payload that could not be read: the model is as it was."""


def read_tensors(original: Callable[..., Any], worker: Any, payload: Any) -> Any:
    """How SGLang reads its own part of a payload, which comes before it writes any of it."""
    try:
        return original(worker, payload)
    except Exception as error:
        raise _UnreadError(_line(error)) from error


def update_from_tensor(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """``/update_weights_from_tensor``: refused where the model has a trainer's versions.

    What fails after they were read ends the server, as it does without weightsync: the model may
    be a mix.
    """
    from sglang.srt.managers import io_struct

    refused = _refused(request.load_format)
    if refused is None:
        try:
            return _other(original, manager, request)
        except _UnreadError as error:
            if _rank is None or _rank.worker.ranks > 1:
                # The other ranks wait for this one.
                raise
            refused = f"the tensors cannot be read: {error}"
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
