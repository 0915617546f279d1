"""vLLM's engines: an ``LLM``, an ``AsyncLLM``, a server."""

from __future__ import annotations

import abc
import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from weightsync.engines._base import Call, Engine, EngineCallError, EngineDiedError, Pause
from weightsync.engines._http import Server
from weightsync.errors import (
    DeadlineError,
    LifecycleError,
    SettingError,
    UnsupportedError,
    WrongTypeError,
)
from weightsync.vllm import _compat


class VllmEngine(Engine):
    """An engine of vLLM, and how its version is spoken to."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._interface: _compat.Interface | None = None

    @abc.abstractmethod
    def version(self, timeout: float) -> str:
        """vLLM's version."""

    @abc.abstractmethod
    def call(self, name: str, timeout: float, **arguments: Any) -> None:
        """One of vLLM's calls for weights."""

    def check(self, timeout: float) -> None:
        self.interface(timeout)

    def check_sleeps(self, timeout: float) -> None:
        if not self.interface(timeout).sleeps:
            raise UnsupportedError(
                "this vLLM generates before a version can be loaded when it wakes: upgrade it to "
                "0.24 or newer"
            )

    def is_gone(self) -> None:
        self._interface = None

    def interface(self, timeout: float) -> _compat.Interface:
        """How it is spoken to."""
        if self._interface is None:
            self._interface = _compat.interface(self.version(timeout))
        return self._interface

    def ask(self, timeout: float, **request: Any) -> None:
        request["timeout"] = timeout
        if self.interface(timeout).backend:
            self.call("init_weight_transfer_engine", timeout, init_info=request)
        else:
            self._extension(request, timeout)

    def start(self, timeout: float) -> None:
        if self.interface(timeout).backend:
            self.call("start_weight_update", timeout)

    def update(self, version: int, timeout: float) -> None:
        request: dict[str, Any] = {"version": version, "timeout": timeout}
        if self.interface(timeout).backend:
            self.call("update_weights", timeout, update_info=request)
        else:
            self._extension({"do": "update", **request}, timeout)

    def finish(self, label: str | None, timeout: float) -> None:
        interface = self.interface(timeout)
        if interface.labels and label is not None:
            self.call("finish_weight_update", timeout, weight_version=label)
        elif interface.backend:
            self.call("finish_weight_update", timeout)

    def label(self, label: str, timeout: float) -> None:
        if self.interface(timeout).labels:
            self.call("update_weight_version", timeout, new_version=label)

    def _extension(self, request: dict[str, Any], timeout: float) -> None:
        self.call("collective_rpc", timeout, method="weightsync", args=[json.dumps(request)])


class ServerEngine(VllmEngine):
    """A server, by its URL. It runs with ``VLLM_SERVER_DEV_MODE=1``."""

    def __init__(self, url: str) -> None:
        self._server = Server(
            url,
            "start it with VLLM_SERVER_DEV_MODE=1 and "
            '--weight-transfer-config \'{"backend": "weightsync"}\'',
        )
        super().__init__(self._server.url)
        self.is_unencrypted = self._server.is_unencrypted

    def is_of(self, given: Any) -> bool:
        return given is self or self._server.is_of(given)

    def version(self, timeout: float) -> str:
        return str(self._server.get("version", timeout).get("version", ""))

    def ranks(self, timeout: float) -> int:
        return int(self._server.get("get_world_size", timeout).get("world_size", 0))

    def pause(self, mode: Pause, clear: bool, timeout: float) -> None:
        self._server.post(f"pause?mode={mode}&clear_cache={_bool(clear)}", timeout)

    def resume(self, timeout: float) -> None:
        self._server.post("resume", timeout)

    def is_paused(self, timeout: float) -> bool:
        return bool(self._server.get("is_sleeping", timeout).get("is_sleeping"))

    def reset_cache(self, timeout: float) -> None:
        # Up to 0.27 the answer is empty.
        answer = self._server.post("reset_prefix_cache?reset_running_requests=true", timeout)
        _check_reset(answer.get("success", True))

    def sleep(self, level: int, timeout: float) -> None:
        self._server.post(f"sleep?level={level}", timeout)

    def wake(self, tags: list[str], timeout: float) -> None:
        self._server.post("wake_up?" + "&".join(f"tags={tag}" for tag in tags), timeout)

    def call(self, name: str, timeout: float, **arguments: Any) -> None:
        self._server.post(name, timeout, arguments)


class LocalEngine(VllmEngine):
    """An engine that runs in this process, or whose front end does."""

    def __init__(self, name: str, engine: Any) -> None:
        super().__init__(name)
        self._engine = engine

    def is_of(self, given: Any) -> bool:
        return given is self or given is self._engine

    def version(self, timeout: float) -> str:
        import vllm

        return str(vllm.__version__)

    def ranks(self, timeout: float) -> int:
        parallel = self._config().parallel_config
        return int(getattr(parallel, "world_size_across_dp", parallel.world_size))

    def reset_cache(self, timeout: float) -> None:
        _check_reset(self._do("reset_prefix_cache", timeout, reset_running_requests=True))

    def sleep(self, level: int, timeout: float) -> None:
        self._do("sleep", timeout, level=level)

    def wake(self, tags: list[str], timeout: float) -> None:
        self._do("wake_up", timeout, tags=tags)

    def call(self, name: str, timeout: float, **arguments: Any) -> None:
        if name == "collective_rpc":
            arguments["args"] = tuple(arguments["args"])
        elif "init_info" in arguments:
            arguments = {"request": self._requests().WeightTransferInitRequest(**arguments)}
        elif "update_info" in arguments:
            arguments = {"request": self._requests().WeightTransferUpdateRequest(**arguments)}
        self._do(name, timeout, **arguments)

    def _do(self, name: str, timeout: float, **arguments: Any) -> Any:
        raise NotImplementedError

    def _config(self) -> Any:
        raise NotImplementedError

    def _requests(self) -> Any:
        from vllm.distributed.weight_transfer import base

        return base

    def _raise(self, name: str, error: Exception) -> NoReturn:
        if type(error).__name__ == "EngineDeadError":
            raise EngineDiedError(f"{name}: {str(error) or 'the engine core is gone'}") from error
        raise EngineCallError(str(error) or type(error).__name__) from error


class LLMEngine(LocalEngine):
    """An ``LLM``. Its calls cannot be given up: one that is late goes on in its thread."""

    _late: Call[Any] | None = None

    def pause(self, mode: Pause, clear: bool, timeout: float) -> None:
        # Level 0 stops the scheduler, and no more.
        self._do("sleep", timeout, level=0, mode=mode)

    def resume(self, timeout: float) -> None:
        self._do("wake_up", timeout, tags=["scheduling"])

    def is_paused(self, timeout: float) -> bool:
        return bool(self._call("is_sleeping", timeout, self._engine.llm_engine.is_sleeping))

    def _do(self, name: str, timeout: float, **arguments: Any) -> Any:
        return self._call(name, timeout, getattr(self._engine, name), **arguments)

    def _call(self, name: str, timeout: float, call: Callable[..., Any], **arguments: Any) -> Any:
        if self._late is not None and not self._late.is_over():
            raise DeadlineError("an earlier call of it has not come back yet")
        self._late = Call(name, lambda: call(**arguments))
        try:
            return self._late.wait(timeout)
        except DeadlineError:
            raise
        except Exception as error:
            self._raise(name, error)

    def _config(self) -> Any:
        return self._engine.llm_engine.vllm_config


class AsyncLLMEngine(LocalEngine):
    """An ``AsyncLLM``; its calls run in its event loop, which must be running."""

    def __init__(self, name: str, engine: Any) -> None:
        super().__init__(name, engine)
        self._loop = _loop_of(engine)

    def pause(self, mode: Pause, clear: bool, timeout: float) -> None:
        self._do("pause_generation", timeout, mode=mode, clear_cache=clear)

    def resume(self, timeout: float) -> None:
        self._do("resume_generation", timeout)

    def check_thread(self) -> None:
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            return
        if here is self._loop:
            raise LifecycleError(
                f"this call would block the event loop that {self.name} runs in: use "
                "`await trainer.sync_async()`; for the other calls, such as wake, "
                "`await asyncio.to_thread(trainer.wake)`"
            )

    def is_paused(self, timeout: float) -> bool:
        return bool(self._do("is_sleeping", timeout))

    def _do(self, name: str, timeout: float, **arguments: Any) -> Any:
        if self._loop.is_closed():
            raise EngineDiedError(f"{name}: its event loop is closed")
        call: Coroutine[Any, Any, Any] = getattr(self._engine, name)(**arguments)
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(timeout)
        except TimeoutError as error:
            future.cancel()
            raise DeadlineError(f"{name} did not come back in {timeout:g} s") from error
        except Exception as error:
            self._raise(name, error)

    def _config(self) -> Any:
        return self._engine.vllm_config


def engine_of(given: Any, place: int) -> VllmEngine:
    """vLLM's engine behind what a trainer was given."""
    if isinstance(given, str):
        return ServerEngine(given)
    if hasattr(given, "pause_generation"):
        return AsyncLLMEngine(f"AsyncLLM {place}", given)
    if hasattr(given, "llm_engine"):
        return LLMEngine(f"LLM {place}", given)
    raise WrongTypeError(
        "an engine is a vLLM LLM, an AsyncLLM, a server's URL or an Engine, not a " + type(given).__name__
    )


def _loop_of(engine: Any) -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        handler = getattr(engine, "output_handler", None)
        if handler is not None:
            loop: asyncio.AbstractEventLoop = handler.get_loop()
            return loop
    raise SettingError("add an AsyncLLM inside its event loop: in a coroutine that runs there")


def _check_reset(done: Any) -> None:
    # Some versions return nothing.
    if done is False:
        raise EngineCallError("its prefix cache could not be reset: requests hold blocks of it")


def _bool(value: bool) -> str:
    return "true" if value else "false"
