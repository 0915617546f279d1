"""The engines a trainer speaks to: an ``LLM``, an ``AsyncLLM``, a server. Every call is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Literal, NoReturn, TypeVar

from weightsync.errors import (
    DeadlineError,
    LifecycleError,
    PeerError,
    SettingError,
    WeightsyncError,
    WrongTypeError,
)
from weightsync.vllm import _compat

#: How requests that are under way fare in a pause.
Pause = Literal["keep", "wait", "abort"]

# No answer of a server is longer.
_LONGEST_ANSWER = 1 << 20
_SAID = re.compile(
    r"weightsync\[(old|new|unknown|open|asleep)\]: (.*?)(?:', please check the stack trace|\Z)",
    re.S,
)

_Answer = TypeVar("_Answer")


class EngineDiedError(PeerError):
    """The engine is gone, or does not answer as one."""


class EngineCallError(WeightsyncError, RuntimeError):
    """The engine refused a call, or failed in it."""

    def __init__(self, text: str, remedy: str = "retry") -> None:
        said = _SAID.search(text)
        #: What the engine's workers say that they hold now; "open" where an update was left
        #: unfinished, "asleep" where somebody else has paused the engine; None if they did not say.
        self.weights = said[1] if said else None
        super().__init__(said[2] if said else text.strip() or "it did not say why", remedy)


class Engine:
    """One engine. Its calls block, raise an error of :mod:`weightsync.errors`, and return within
    ``timeout`` seconds.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._interface: _compat.Interface | None = None

    def is_of(self, given: Any) -> bool:
        """Whether this is the engine that a trainer was given."""
        return given is self

    def version(self, timeout: float) -> str:
        """vLLM's version."""
        raise NotImplementedError

    def ranks(self, timeout: float) -> int:
        """How many workers it has: tensor, pipeline and data parallel ones."""
        raise NotImplementedError

    def pause(self, mode: Pause, clear: bool, timeout: float) -> None:
        """Stops it from generating."""
        raise NotImplementedError

    def resume(self, timeout: float) -> None:
        """Lets it generate."""
        raise NotImplementedError

    def is_paused(self, timeout: float) -> bool:
        """Whether it is paused, or asleep: vLLM does not say which."""
        raise NotImplementedError

    def reset_cache(self, timeout: float) -> None:
        """Drops what it has computed with older weights; requests under way compute theirs again."""
        raise NotImplementedError

    def sleep(self, level: int, timeout: float) -> None:
        """Frees its memory, as vLLM's levels say."""
        raise NotImplementedError

    def wake(self, tags: list[str], timeout: float) -> None:
        """Takes the memory back."""
        raise NotImplementedError

    def call(self, name: str, timeout: float, **arguments: Any) -> None:
        """One of vLLM's calls for weights."""
        raise NotImplementedError

    def check_thread(self) -> None:
        """Refuses a thread that the engine's own calls need."""

    def is_gone(self) -> None:
        """It has died: what answers later under this name may be of another version."""
        self._interface = None

    def interface(self, timeout: float) -> _compat.Interface:
        """How it is spoken to."""
        if self._interface is None:
            self._interface = _compat.interface(self.version(timeout))
        return self._interface

    def ask(self, timeout: float, **request: Any) -> None:
        """Asks its workers for something outside of an update."""
        request["timeout"] = timeout
        if self.interface(timeout).backend:
            self.call("init_weight_transfer_engine", timeout, init_info=request)
        else:
            self._extension(request, timeout)

    def start(self, timeout: float) -> None:
        """Begins an update."""
        if self.interface(timeout).backend:
            self.call("start_weight_update", timeout)

    def update(self, version: int, timeout: float) -> None:
        """Loads a version. The workers say whether they did when they are asked for ``loaded``."""
        request: dict[str, Any] = {"version": version, "timeout": timeout}
        if self.interface(timeout).backend:
            self.call("update_weights", timeout, update_info=request)
        else:
            self._extension({"do": "update", **request}, timeout)

    def finish(self, label: str | None, timeout: float) -> None:
        """Ends an update; the label is the version that requests carry from here on."""
        interface = self.interface(timeout)
        if interface.labels and label is not None:
            self.call("finish_weight_update", timeout, weight_version=label)
        elif interface.backend:
            self.call("finish_weight_update", timeout)

    def label(self, label: str, timeout: float) -> None:
        """Sets the label outside of an update."""
        if self.interface(timeout).labels:
            self.call("update_weight_version", timeout, new_version=label)

    def _extension(self, request: dict[str, Any], timeout: float) -> None:
        self.call("collective_rpc", timeout, method="weightsync", args=[json.dumps(request)])


class ServerEngine(Engine):
    """A server, by its URL. It runs with ``VLLM_SERVER_DEV_MODE=1``."""

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingError(f"expected a URL such as http://host:8000, got {url!r}")
        super().__init__(url.rstrip("/"))
        self._parts = parts

    def is_of(self, given: Any) -> bool:
        return given is self or (isinstance(given, str) and given.rstrip("/") == self.name)

    def version(self, timeout: float) -> str:
        return str(self._get("version", timeout).get("version", ""))

    def ranks(self, timeout: float) -> int:
        return int(self._get("get_world_size", timeout).get("world_size", 0))

    def pause(self, mode: Pause, clear: bool, timeout: float) -> None:
        self._post(f"pause?mode={mode}&clear_cache={_bool(clear)}", timeout)

    def resume(self, timeout: float) -> None:
        self._post("resume", timeout)

    def is_paused(self, timeout: float) -> bool:
        return bool(self._get("is_sleeping", timeout).get("is_sleeping"))

    def reset_cache(self, timeout: float) -> None:
        # Up to 0.27 the answer is empty.
        answer = self._post("reset_prefix_cache?reset_running_requests=true", timeout)
        _check_reset(answer.get("success", True))

    def sleep(self, level: int, timeout: float) -> None:
        self._post(f"sleep?level={level}", timeout)

    def wake(self, tags: list[str], timeout: float) -> None:
        self._post("wake_up?" + "&".join(f"tags={tag}" for tag in tags), timeout)

    def call(self, name: str, timeout: float, **arguments: Any) -> None:
        self._post(name, timeout, arguments)

    def _get(self, path: str, timeout: float) -> dict[str, Any]:
        return self._request("GET", path, None, timeout)

    def _post(
        self, path: str, timeout: float, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return self._request("POST", path, body or {}, timeout)

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float
    ) -> dict[str, Any]:
        parts = self._parts
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        assert parts.hostname is not None
        connection = kind(parts.hostname, parts.port, timeout=timeout)
        text = None if body is None else json.dumps(body)
        headers = {} if text is None else {"Content-Type": "application/json"}

        def exchange() -> tuple[int, bytes]:
            connection.request(method, f"{parts.path.rstrip('/')}/{path}", text, headers)
            answer = connection.getresponse()
            return answer.status, answer.read(_LONGEST_ANSWER)

        try:
            # The connection's own timeout is for each of its reads, and for each of its addresses.
            status, content = _Call(f"/{_bare(path)}", exchange).wait(timeout)
        except TimeoutError as error:
            raise DeadlineError(f"/{_bare(path)} did not answer in {timeout:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            said = str(error) or type(error).__name__
            raise EngineDiedError(f"/{_bare(path)}: {said}") from error
        finally:
            if connection.sock is not None:
                # It may be read in a thread.
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()
        try:
            answer = json.loads(content or b"{}")
        except ValueError:
            answer = {}
        if status == 404:
            raise EngineCallError(
                f"the server has no /{_bare(path)}: start it with VLLM_SERVER_DEV_MODE=1 and "
                '--weight-transfer-config \'{"backend": "weightsync"}\''
            )
        if status >= 400:
            raise EngineCallError(_error_of(answer) or f"/{_bare(path)} answered {status}")
        return answer if isinstance(answer, dict) else {}


class LocalEngine(Engine):
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

    _late: _Call[Any] | None = None

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
        self._late = _Call(name, lambda: call(**arguments))
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


class _Call(Generic[_Answer]):
    """A call in a thread of its own, which is left alone where it is late."""

    def __init__(self, name: str, call: Callable[[], _Answer]) -> None:
        self._name = name
        self._answers: list[_Answer] = []
        self._errors: list[Exception] = []

        def run() -> None:
            try:
                self._answers.append(call())
            except Exception as error:
                self._errors.append(error)

        self._thread = threading.Thread(target=run, name=f"weightsync {name}", daemon=True)
        self._thread.start()

    def wait(self, timeout: float) -> _Answer:
        """What it returns or raises.

        Raises:
            DeadlineError: if it is not over by then.
        """
        self._thread.join(timeout)
        if not self.is_over():
            raise DeadlineError(f"{self._name} did not come back in {timeout:g} s")
        if self._errors:
            raise self._errors[0]
        return self._answers[0]

    def is_over(self) -> bool:
        """Whether it has come back."""
        return not self._thread.is_alive()


def engine_of(given: Any, place: int) -> Engine:
    """The engine behind what a trainer was given."""
    if isinstance(given, Engine):
        return given
    if isinstance(given, str):
        return ServerEngine(given)
    if hasattr(given, "pause_generation"):
        return AsyncLLMEngine(f"AsyncLLM {place}", given)
    if hasattr(given, "llm_engine"):
        return LLMEngine(f"LLM {place}", given)
    raise WrongTypeError(
        "an engine is a vLLM LLM, an AsyncLLM or a server's URL, not a " + type(given).__name__
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


def _error_of(answer: Any) -> str | None:
    """The words of a server's refusal."""
    if not isinstance(answer, dict):
        return None
    error = answer.get("error", answer.get("detail"))
    text = error.get("message") if isinstance(error, dict) else error
    return str(text) if text else None


def _check_reset(done: Any) -> None:
    # Some versions return nothing.
    if done is False:
        raise EngineCallError("its prefix cache could not be reset: requests hold blocks of it")


def _bare(path: str) -> str:
    return path.split("?")[0]


def _bool(value: bool) -> str:
    return "true" if value else "false"
