"""Weights of Trinity's processes: where they are published, and how others get them."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weightsync import _dtypes, _extra
from weightsync.errors import ModelError, PeerError, UnsupportedError, WrongTypeError, WrongWeightsError
from weightsync.ray import _cluster
from weightsync.receiver import Receiver
from weightsync.scheme import Distributed
from weightsync.sender import Sender
from weightsync.snapshot import Snapshot

# Trinity looks for the actor under this name.
NAME = "synchronizer"


@dataclass(frozen=True)
class Place:
    """Where the weights of a version can be had: what travels through Ray in their place."""

    info: str
    #: The number that the weights have there. A trainer may begin again at an earlier step.
    number: int
    version: int
    host: str


@dataclass(frozen=True)
class Held:
    """The weights of a version, and where others get them."""

    snapshot: Snapshot
    place: Place


class Later:
    """Becomes the result of a call in the process that unpickles it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


class Outlet:
    """Publishes state dicts of any kind, one after the other."""

    def __init__(self, history: int = 0) -> None:
        self._history = history
        self._lock = threading.Lock()
        self._sender: Sender | None = None
        # Where versions are that went out again, by their first place.
        self._again: dict[Place, Place] = {}

    def send(self, state: Mapping[str, Any], version: int) -> Held:
        for name, value in state.items():
            if not isinstance(name, str):
                raise WrongTypeError(f"a state dict has tensors by name, and {name!r} is no text")
            is_tensor = _dtypes.is_tensor(value) or _dtypes.is_array(value)
            if not is_tensor or name.rpartition(".")[2] == _extra.TORCH_NAME:
                raise UnsupportedError(
                    f"{name}, a {type(value).__name__}: tensors alone reach explorers, so take it out"
                )
        with self._lock:
            # Other names or shapes need another sender.
            with contextlib.suppress(WrongWeightsError):
                if self._sender is not None:
                    self._sender.send(state, wait="sent")
                    return self._held(self._sender, version)
            self._end()
            scheme = _cluster.listening(Distributed(pull=True))
            sender = Sender(state, scheme=scheme, history=self._history, slots=(2, 32))
            # Every send brings its own state dict. The first one would stay in memory.
            sender._models = dict.fromkeys(sender._models)
            sender.connect(0, weights=state)
            self._sender = sender
            return self._held(sender, version)

    def place(self, held: Held) -> Place:
        """Where to get weights that may not be the newest."""
        with self._lock:
            sender, place = self._sender, self._again.get(held.place, held.place)
            if sender is None or place.number >= sender.version - self._history:
                return place
            # It goes out again, under another number, once for all who ask.
            sender.send(held.snapshot, wait="sent")
            self._again[held.place] = place = self._held(sender, place.version).place
            oldest = sender.version - self._history
            self._again = {one: at for one, at in self._again.items() if at.number >= oldest}
            return place

    def close(self) -> None:
        with self._lock:
            self._end()

    @staticmethod
    def _held(sender: Sender, version: int) -> Held:
        info = sender.init_info.to_json()
        place = Place(info, sender.version, version, socket.gethostname())
        return Held(sender.snapshot(), place)

    def _end(self) -> None:
        sender, self._sender, self._again = self._sender, None, {}
        if sender is not None:
            sender.shutdown()


class Inlet:
    """Fetches versions, and stays connected to where the last one came from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._info = ""
        self._receiver: Receiver | None = None

    def snapshot(self, place: Place) -> Snapshot:
        with self._lock:
            try:
                if self._receiver is None or self._info != place.info:
                    self._end()
                    self._receiver, self._info = self._join(place), place.info
                snapshot = self._receiver.pull(version=place.number)
            except BaseException:
                # The next call joins again.
                self._end()
                raise
            assert snapshot is not None
            return snapshot

    def close(self) -> None:
        with self._lock:
            self._end()

    @staticmethod
    def _join(place: Place) -> Receiver:
        # No two readers have the same number, and nobody deals numbers out.
        receiver = Receiver(place.info, int.from_bytes(os.urandom(4)))
        try:
            receiver.connect()
        except PeerError as error:
            if place.host == socket.gethostname():
                raise
            raise PeerError(
                f"the weights are on {place.host}, and this is {socket.gethostname()}: give every "
                "process a token (WEIGHTSYNC_TOKEN_FILE). Also give it certificates "
                "(WEIGHTSYNC_TLS_DIR), or have weights travel between hosts without encryption "
                f"(WEIGHTSYNC_INSECURE_PLAINTEXT=1) ({error})"
            ) from error
        return receiver

    def _end(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.shutdown()


# Of this process: what it publishes, what it reads, the version whose tensors it takes one by one,
# and the calls that say that it is there.
published, reader = Outlet(), Inlet()
_taken: dict[Place, Snapshot] = {}
presence: dict[str, Any] = {}


def _in_child() -> None:
    # A forked child cannot use its parent's ends.
    global published, reader
    published, reader = Outlet(), Inlet()
    _taken.clear()
    presence.clear()


os.register_at_fork(after_in_child=_in_child)


def state_dict(place: Place, namespace: str, exact: bool) -> tuple[dict[str, Any], int]:
    snapshot, at = _read(place, namespace, exact)
    return dict(snapshot), at.version


def item(place: Place, namespace: str, name: str, last: bool) -> tuple[str, Any]:
    snapshot = _taken.pop(place, None) or _read(place, namespace, exact=True)[0]
    _taken.clear()
    if not last:
        _taken[place] = snapshot
    return name, snapshot[name]


def _read(place: Place, namespace: str, exact: bool) -> tuple[Snapshot, Place]:
    ray, at = _cluster.ray(), place
    while True:
        try:
            return reader.snapshot(at), at
        except ModelError as gone:
            # Newer versions went out since. The actor says where this one is now.
            try:
                actor = ray.get_actor(NAME, namespace=namespace)
            except ValueError:
                # The actor has ended.
                raise gone from None
            before, at = at, ray.get(actor.place_of.remote(place, exact))
            if at == before:
                raise
