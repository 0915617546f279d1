"""What loads the versions of an adapter: an engine of this process, or a server."""

from __future__ import annotations

import abc
import contextlib
import inspect
import json
import logging
import re
from collections.abc import Collection, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

from weightsync._checks import choice, seconds
from weightsync.engines._http import Server
from weightsync.errors import (
    DeadlineError,
    LifecycleError,
    LoadError,
    UnsupportedError,
    WeightsyncError,
    WrongTypeError,
)
from weightsync.lora._adapters import CONFIG, Adapter, Adapters, folder_prefix

if TYPE_CHECKING:
    from weightsync.snapshot import Snapshot

logger = logging.getLogger("weightsync")

#: What a request names a version by.
_Handle = TypeVar("_Handle")


class _Loader(abc.ABC, Generic[_Handle]):
    """Keeps one version of an adapter loaded."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._live: tuple[Adapter, _Handle] | None = None
        self._closed = False

    @property
    def live(self) -> Adapter | None:
        """The version that was loaded last."""
        return self._live[0] if self._live else None

    def _load(self, snapshot: Snapshot) -> _Handle:
        if self._closed:
            raise LifecycleError("these adapters are closed")
        self._check(snapshot)
        try:
            loaded = self._loaded()
        except DeadlineError:
            raise
        except Exception as error:
            raise LoadError(f"the engine does not say what it has: {error}") from error
        made = self._save(snapshot, loaded)
        before = self._live
        if before and not self._is_loaded(before[0], loaded):
            self._live = None
        if self._live and self._live[0] == made:
            return self._live[1]
        if not made.path.exists():
            raise LoadError(f"{made.name} was live before and has been removed: send it once more")
        with self._undone(made):
            try:
                handle = self._add(made)
            except (LoadError, DeadlineError):
                raise
            except Exception as error:
                raise LoadError(f"the engine cannot load {made.name}: {error}") from error
        was_live, self._live = self._live, (made, handle)
        if was_live:
            self._unload(was_live[0])
        if before and before[0] != made:
            self._adapters.remove(before[0])
        return handle

    @contextlib.contextmanager
    def _undone(self, made: Adapter) -> Iterator[None]:
        """After an error, neither the engine nor the disk has the version."""
        try:
            yield
        except BaseException:
            # It may have failed in one of the engine's processes alone.
            with contextlib.suppress(Exception):
                self._remove(made)
            self._adapters._forget(made)
            raise

    def _unload(self, old: Adapter) -> None:
        try:
            self._remove(old)
        except Exception as error:
            now = f"{self._live[0].name} is live, but the" if self._live else "the"
            logger.warning("%s engine did not unload %s: %s", now, old.name, str(error))

    def close(self) -> None:
        """Unloads the adapter and removes its directories."""
        if self._closed:
            return
        self._closed = True
        live, self._live = self._live, None
        try:
            if live:
                self._unload(live[0])
        finally:
            self._adapters.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, snapshot: Snapshot) -> None:
        """Refuses what the engine would take for something else."""

    @abc.abstractmethod
    def _loaded(self) -> Collection[Any]:
        """What the engine has: adapters by what :meth:`_save` must not use."""

    @abc.abstractmethod
    def _save(self, snapshot: Snapshot, loaded: Collection[Any]) -> Adapter:
        """Makes the version's directory."""

    @abc.abstractmethod
    def _is_loaded(self, made: Adapter, loaded: Collection[Any]) -> bool:
        """Whether the engine still has the live version."""

    @abc.abstractmethod
    def _add(self, made: Adapter) -> _Handle:
        """Has the engine load a version."""

    @abc.abstractmethod
    def _remove(self, made: Adapter) -> None:
        """Has the engine unload a version."""


_Self = TypeVar("_Self", bound=_Loader[Any])


class VllmAdapters(_Loader[Any]):
    """Brings an adapter's versions into a vLLM ``LLM`` that was made with ``enable_lora=True``::

        adapters = weightsync.lora.VllmAdapters(llm, "policy")
        request = adapters.load(receiver.receive())
        llm.generate(prompts, sampling, lora_request=request)

    Each version is a LoRA of its own name, number and path, which vLLM caches by. So no request
    gets weights of another version than its name says. Give the engine room for two:
    ``max_loras=2``, or ``max_cpu_loras=2``.

    Raises:
        UnsupportedError: for an engine that is called with ``await``, such as ``AsyncLLM``.
    """

    def __init__(self, llm: Any, name: str, folder: str | Path | None = None) -> None:
        self._engine = getattr(llm, "llm_engine", llm)
        if not hasattr(self._engine, "add_lora"):
            raise WrongTypeError(f"expected a vllm.LLM, got {type(llm).__name__}")
        if inspect.iscoroutinefunction(self._engine.add_lora):
            raise UnsupportedError(
                f"{type(self._engine).__name__}.add_lora is called with await, and load() waits for "
                "nothing: make the directory with Adapters.save(snapshot), and give its name, "
                "number and path to the engine's own add_lora as a LoRARequest"
            )
        super().__init__(Adapters(name, folder))

    def load(self, snapshot: Snapshot) -> Any:
        """Loads a version and returns its ``LoRARequest``, for ``generate``.

        The engine then unloads the version before it, and its directory is removed: call this
        when no request uses that one any more. If loading fails, the version before it stays, and
        the same snapshot can be loaded once more.

        Raises:
            LoadError: if the engine refuses the version.
        """
        return self._load(snapshot)

    def _loaded(self) -> Collection[Any]:
        loaded: Collection[int] = self._engine.list_loras()
        return loaded

    def _save(self, snapshot: Snapshot, loaded: Collection[Any]) -> Adapter:
        return self._adapters.save(snapshot, loaded)

    def _is_loaded(self, made: Adapter, loaded: Collection[Any]) -> bool:
        # vLLM loads one that its cache has dropped again by the request's path.
        return True

    def _add(self, made: Adapter) -> Any:
        request = import_module("vllm.lora.request").LoRARequest(
            lora_name=made.name, lora_int_id=made.number, lora_path=str(made.path)
        )
        if not self._engine.add_lora(request):
            raise LoadError(f"the engine did not load {made.name}")
        return request

    def _remove(self, made: Adapter) -> None:
        self._engine.remove_lora(made.number)


class _Routes(NamedTuple):
    """How a server loads adapters."""

    load: str
    unload: str
    remedy: str


_ROUTES = {
    "vllm": _Routes(
        "v1/load_lora_adapter",
        "v1/unload_lora_adapter",
        "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1; "
        'for SGLang, give engine="sglang"',
    ),
    "sglang": _Routes(
        "load_lora_adapter",
        "unload_lora_adapter",
        'start SGLang with --enable-lora; for vLLM, give engine="vllm"',
    ),
}


class ServerAdapters(_Loader[str]):
    """Brings an adapter's versions into a server of vLLM or SGLang::

        adapters = weightsync.lora.ServerAdapters("http://host:8000", "policy")
        model = adapters.load(receiver.receive())                  # "policy-v2-" and the run's id
        client.completions.create(model=model, prompt=…)

    The server reads the directory, so it must see ``folder``. vLLM is started with
    ``--enable-lora``, ``--max-loras 2`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`` in its
    environment, SGLang with ``--enable-lora``, ``--max-lora-rank`` and ``--lora-target-modules``.

    Args:
        url: the server's.
        name: the adapter's. A server has one object of each name: it unloads what another object
            of the name, such as that of a killed process, has left there.
        folder: as for :class:`Adapters`.
        engine: ``"vllm"`` or ``"sglang"``.
        api_key: the key that the server was started with.
        timeout: the limit of each call, in seconds. A load is three calls at most, and one for
            each version that was left.
    """

    def __init__(
        self,
        url: str,
        name: str,
        folder: str | Path | None = None,
        *,
        engine: Literal["vllm", "sglang"] = "vllm",
        api_key: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        choice("engine", engine, *_ROUTES)
        seconds("timeout", timeout)
        self._routes, self._engine = _ROUTES[engine], engine
        self._server = Server(url, self._routes.remedy, api_key)
        self._timeout = timeout
        #: What an object of this name has left on the server.
        self._left: set[str] = set()
        super().__init__(Adapters(name, folder))

    def load(self, snapshot: Snapshot) -> str:
        """Loads a version and returns its name, which requests give as their model.

        For SGLang's own ``/generate`` it is the ``lora_path``. The server then unloads the version
        before it, and its directory is removed: call this when no request uses that one any more.
        If loading fails, the version before it stays, and the same snapshot can be loaded once
        more. A server that has started again gets the version by the next load, of the same
        snapshot too.

        Raises:
            LoadError: if the server refuses the version, or is not there.
            DeadlineError: if it does not answer in time.
        """
        before = self.live
        live = self._load(snapshot)
        for left in self._left - {live, before.name if before else live}:
            with contextlib.suppress(WeightsyncError):
                self._post(self._routes.unload, lora_name=left)
        return live

    def _loaded(self) -> Collection[Any]:
        answer = self._server.get("v1/models", self._timeout)
        cards = answer.get("data")
        if not isinstance(cards, list):
            raise LoadError("/v1/models lists no models")
        cards = [one for one in cards if isinstance(one, dict)]
        folder = re.compile(re.escape(folder_prefix(self._adapters.name)) + "[a-z0-9_]+")
        self._left = {
            str(one.get("id"))
            for one in cards
            if folder.fullmatch(Path(str(one.get("root"))).parent.name)
        }
        return {str(one.get("id")) for one in cards}

    def _check(self, snapshot: Snapshot) -> None:
        if self._engine != "sglang" or CONFIG not in snapshot:
            return
        config = json.loads(bytes(snapshot[CONFIG].tolist()))
        for name in ("alpha_pattern", "rank_pattern", "use_rslora"):
            if config.get(name):
                raise UnsupportedError(
                    f"the adapter has {name}, and SGLang scales all layers of an adapter by its "
                    "lora_alpha and r alone, so its answers would be others: train without, or send "
                    "lora.merged(model)"
                )

    def _save(self, snapshot: Snapshot, loaded: Collection[Any]) -> Adapter:
        return self._adapters._save_for_server(snapshot, loaded)

    def _is_loaded(self, made: Adapter, loaded: Collection[Any]) -> bool:
        return made.name in loaded

    def _add(self, made: Adapter) -> str:
        self._post(self._routes.load, lora_name=made.name, lora_path=str(made.path))
        return made.name

    def _remove(self, made: Adapter) -> None:
        self._post(self._routes.unload, lora_name=made.name)

    def _post(self, path: str, **body: str) -> None:
        self._server.post(path, self._timeout, body)
