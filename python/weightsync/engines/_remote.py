"""An engine of any kind that reads a checkpoint when a route of its HTTP server says so."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from weightsync import _checks, _files
from weightsync.engines._base import Engine, EngineCallError, EngineDiedError, Pause
from weightsync.engines._checkpoint import Checkpoint
from weightsync.engines._http import Server, refusal
from weightsync.engines._request import WorkerRequest
from weightsync.engines._worker import EngineWorker, Place, UpdateError
from weightsync.errors import (
    DeadlineError,
    OperatingSystemError,
    SettingError,
    UnsupportedError,
)

#: A path that is posted to, or a path and the JSON object that is posted.
Route = str | tuple[str, Mapping[str, Any]]

_CALLS = ("update", "pause", "resume", "reset_cache", "label")
# As vLLM calls the weights that an engine starts with.
_FIRST = "default"
# No configuration of a model has more bytes.
_LARGEST_CONFIG = 16 << 20
# Files of a checkpoint that hold weights, or say where they are.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


class Remote(Engine):
    """A server that loads a checkpoint's folder when it is told to, for a :class:`Trainer`.

    This process receives each version as a worker does, writes it as a folder of safetensors, and
    posts the engine's own route. Where the engine refuses, the version before is posted again::

        weightsync.engines.Remote(
            "http://host:30000",
            routes={
                "update": ("/update_weights_from_disk", {"model_path": "{directory}"}),
                "pause": ("/pause_generation", {"mode": "retract"}),
                "resume": ("/continue_generation", {}),
                "reset_cache": "/flush_cache",
            },
            like="/models/llama",
        )

    The engine reads the whole folder each time, whatever has changed, and must see the folder.

    Args:
        url: the server's.
        routes: what is posted for ``"update"``, and, where the engine can do it, for ``"pause"``,
            ``"resume"``, ``"reset_cache"`` and ``"label"``. In a path and in the texts of its object
            ``{version}`` and ``{directory}`` stand for the version and its folder, and ``{mode}``
            for the trainer's ``pause``. An engine without ``"pause"`` has to answer each request
            with one version by its own means. An answer outside of 200 to 299, and a JSON object
            with ``"success": false``, is a refusal.
        like: the folder of the checkpoint that the engine started with. Its files but weights come
            next to each version's, versions are compared with it, and it is posted again where the
            first version fails. Without it the engine alone says whether a version fits.
        directory: where the folders are made; below the system's temporary folder by default, where
            an engine of another user cannot read them. An engine on another host needs one that
            both see. A trainer that is killed leaves its last folder there.
        api_key: the key that the server was started with.
    """

    # What answers at its URL may have restarted.
    knows_its_weights = False

    def __init__(
        self,
        url: str,
        *,
        routes: Mapping[str, Route],
        like: str | os.PathLike[str] | None = None,
        directory: str | os.PathLike[str] | None = None,
        api_key: str | None = None,
    ) -> None:
        self._server = Server(url, "give the routes that it has", api_key)
        super().__init__(self._server.url)
        if unknown := [name for name in routes if name not in _CALLS]:
            raise SettingError(f"routes: expected some of {', '.join(_CALLS)}, got {unknown[0]!r}")
        if "update" not in routes:
            raise SettingError('routes: expected one for "update", which loads a checkpoint')
        if ("pause" in routes) != ("resume" in routes):
            raise SettingError('routes: expected both of "pause" and "resume", or neither')
        self._like = None if like is None else Path(_checks.absolute(like))
        if self._like is not None and not self._like.is_dir():
            raise SettingError(f"like: expected a checkpoint's folder, got {os.fspath(self._like)!r}")
        self._routes = {name: _route(name, given) for name, given in routes.items()}
        self._folders = _Folders(directory)
        self._begin()

    def _begin(self) -> None:
        self._place = _FolderPlace(self)
        self._worker = EngineWorker(self._place)

    def is_of(self, given: Any) -> bool:
        return given is self or self._server.is_of(given)

    def check(self, timeout: float) -> None:
        pass

    def ranks(self, timeout: float) -> int:
        return 1

    def pause(self, mode: Pause, clear: bool, timeout: float) -> None:
        self._post("pause", timeout, mode=mode)

    def resume(self, timeout: float) -> None:
        self._post("resume", timeout)

    def is_paused(self, timeout: float) -> bool:
        # No route tells. One that somebody else has paused is updated, and resumed.
        return False

    def reset_cache(self, timeout: float) -> None:
        self._post("reset_cache", timeout)

    def ask(self, timeout: float, **request: Any) -> None:
        self._place.timeout = timeout
        try:
            self._worker.do(WorkerRequest(timeout=timeout, **request))
        except UpdateError as error:
            self._fail(error)
        if request["do"] == "leave":
            self._folders.keep(None)

    def start(self, timeout: float) -> None:
        self._worker.start()

    def update(self, version: int, timeout: float) -> None:
        self._place.timeout, self._place.late = timeout, None
        self._worker.update(version, timeout)
        if self._place.died is not None:
            raise EngineDiedError(self._place.died)

    def finish(self, label: str | None, timeout: float) -> None:
        self._worker.finish()
        if label is not None:
            self.label(label, timeout)

    def label(self, label: str, timeout: float) -> None:
        self._post("label", timeout, version=label)

    def is_gone(self) -> None:
        # What comes back there has the weights that it starts with.
        self._worker.leave()
        self._folders.keep(None)
        self._begin()

    def load(self, folder: Path, version: int | None, timeout: float) -> None:
        """Has the engine load a folder."""
        label = _FIRST if version is None else str(version)
        self._post("update", timeout, directory=str(folder), version=label)

    def _post(self, name: str, timeout: float, **values: str) -> None:
        if name not in self._routes:
            return
        path, body = self._routes[name]
        answer = self._server.post(_filled(path, values), timeout, _filled(body, values))
        if answer.get("success") is False:
            raise EngineCallError(refusal(answer) or f"{path} answered that it did not succeed")

    def _fail(self, error: UpdateError) -> NoReturn:
        if self._place.died is not None:
            raise EngineDiedError(self._place.died) from error
        raise EngineCallError(str(error)) from error


class _FolderPlace(Place):
    """Writes a version where the engine reads it."""

    rank = 0

    def __init__(self, engine: Remote) -> None:
        self._engine = engine
        self.timeout = 0.0
        #: Why the engine is gone.
        self.died: str | None = None
        #: Why the engine may still load what it was given in this update.
        self.late: str | None = None

    def checkpoint(self) -> Checkpoint:
        like = self._engine._like
        if like is None:
            return _AnyCheckpoint()
        return Checkpoint(_config(like), str(like), None)

    def load(self, tensors: Iterable[tuple[str, Any]], version: int | None = None) -> None:
        folders, like = self._engine._folders, self._engine._like
        folder = folders.new(f"v{version}")
        try:
            _write(folder, tensors, like)
            self._tell(folder, version)
        except DeadlineError:
            folders.remove_later(folder)
            raise
        except BaseException:
            folders.remove(folder)
            raise
        # The engine has read the one before.
        folders.keep(folder)

    def load_first(self) -> None:
        like = self._engine._like
        if like is None:
            raise UnsupportedError(
                "the weights that the engine started with are not known: give their folder as "
                "Remote(like=…)"
            )
        self._tell(like, None)

    def group(self) -> None:
        return None

    def _tell(self, folder: Path, version: int | None) -> None:
        if self.died is not None:
            raise EngineDiedError(self.died)
        if self.late is not None:
            # A way back could come before that load, which then leaves the new weights.
            raise EngineCallError(f"nobody knows which weights it has: {self.late}")
        try:
            self._engine.load(folder, version, self.timeout)
        except DeadlineError as error:
            self.late = str(error)
            raise
        except EngineDiedError as error:
            self.died = str(error)
            raise


def _config(folder: Path) -> Any:
    """The configuration of a checkpoint: as transformers has it, or as it stands in the file."""
    try:
        from transformers import AutoConfig

        # It knows which tensors its module has in another form than the checkpoint.
        return AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception:
        # Without transformers, or for a model that it does not know, the files alone are compared.
        pass
    try:
        return SimpleNamespace(**json.loads(_files.read(folder / "config.json", _LARGEST_CONFIG)))
    except (OSError, ValueError, TypeError):
        return SimpleNamespace()


class _AnyCheckpoint(Checkpoint):
    """One that every version fits, as far as this process knows."""

    def __init__(self) -> None:
        pass

    def compare(self, what: str, sent: Any) -> bool:
        return False


class _Folders:
    """The folders of versions; each is removed once the engine has read a newer one."""

    def __init__(self, directory: str | os.PathLike[str] | None) -> None:
        # The engine has a working directory of its own.
        self._directory = None if directory is None else _checks.absolute(directory)
        # Below the system's temporary folder they are for the engines of this user.
        self._mode = 0o700 if directory is None else 0o755
        self._begin()

    def _begin(self) -> None:
        try:
            self._all = Path(tempfile.mkdtemp(prefix="weightsync-", dir=self._directory))
        except OSError as error:
            raise OperatingSystemError(f"directory: no folder can be made there: {error}") from error
        self._owner = os.getpid()
        _files.removed_with(self, self._all)
        self._kept: Path | None = None
        # The engine may still read these.
        self._late: list[Path] = []
        self._all.chmod(self._mode)

    def new(self, name: str) -> Path:
        """Makes a folder."""
        if os.getpid() != self._owner:
            # This process was forked. Its parent's folders are not its own to remove.
            self._begin()
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._all))
        folder.chmod(self._mode)
        return folder

    def remove_later(self, folder: Path) -> None:
        """Removes it with the next one that is kept, or that is late."""
        for one in self._late:
            self.remove(one)
        self._late = [folder]

    def keep(self, folder: Path | None) -> None:
        """Removes the one that was kept before."""
        gone, self._late = self._late, []
        if self._kept is not None:
            gone.append(self._kept)
        self._kept = folder
        for one in gone:
            self.remove(one)

    def remove(self, folder: Path) -> None:
        _files.remove(folder, self._owner)


def _write(folder: Path, tensors: Iterable[tuple[str, Any]], like: Path | None) -> None:
    from safetensors.torch import save_file

    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name, tensor in tensors:
        # safetensors refuses two names of one memory.
        found[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    try:
        # Readers look for the format.
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
        for file in [] if like is None else like.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copy(file, folder)
    except OSError as error:
        raise OperatingSystemError(f"the version cannot be written to {folder}: {error}") from error


def _route(name: str, given: Route) -> tuple[str, dict[str, Any]]:
    pair = (given, {}) if isinstance(given, str) else given
    path, body = pair if isinstance(pair, tuple) and len(pair) == 2 else (None, None)
    if not isinstance(path, str) or not isinstance(body, Mapping):
        raise SettingError(
            f"routes[{name!r}]: expected a path, or a path and an object, got {given!r}"
        )
    return path.lstrip("/"), dict(body)


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    """The same with the values in place of their names in braces."""
    if isinstance(value, str):
        for name, one in values.items():
            value = value.replace(f"{{{name}}}", one)
        return value
    if isinstance(value, Mapping):
        return {key: _filled(one, values) for key, one in value.items()}
    return [_filled(one, values) for one in value] if isinstance(value, (list, tuple)) else value
