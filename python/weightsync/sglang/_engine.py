"""A server of SGLang, as a trainer speaks to it."""

from __future__ import annotations

import json
from typing import Any

from weightsync import _tested
from weightsync.engines import _base
from weightsync.engines._base import EngineCallError, Pause
from weightsync.engines._http import Server
from weightsync.errors import UnsupportedError
from weightsync.sglang._names import LOADER, PREFIX, STATE

_REMEDY = f"install weightsync next to SGLang, and start it with --custom-weight-loader {LOADER}"


class Engine(_base.Engine):
    """A server of SGLang, by its URL.

    It is started with ``--custom-weight-loader weightsync.sglang.load``.
    """

    def __init__(self, url: str) -> None:
        self._server = Server(url, _REMEDY)
        super().__init__(self._server.url)
        self._ranks = 0

    def is_of(self, given: Any) -> bool:
        return given is self or self._server.is_of(given)

    def check(self, timeout: float) -> None:
        if self._ranks:
            return
        info = self._server.get("server_info", timeout)
        _tested.check_version("sglang", str(info.get("version", "none")), "is on the server")
        if LOADER not in (info.get("custom_weight_loader") or []):
            raise EngineCallError(f"the server takes no versions: {_REMEDY}")
        states = info.get("internal_states") or [{}]
        self._ranks = int(states[0].get("world_size", 0))

    def ranks(self, timeout: float) -> int:
        self.check(timeout)
        return self._ranks

    def is_gone(self) -> None:
        self._ranks = 0

    def pause(self, mode: Pause, clear: bool, timeout: float) -> None:
        if mode == "wait":
            raise UnsupportedError(
                'SGLang has no pause that lets requests end first: use pause="keep" or "abort"'
            )
        # SGLang drops its cache only where no request holds a part of it. Retracted requests wait
        # in the queue, and compute theirs again.
        kept = "retract" if clear else "in_place"
        self._server.post("pause_generation", timeout, {"mode": kept if mode == "keep" else mode})

    def resume(self, timeout: float) -> None:
        self._server.post("continue_generation", timeout)

    def is_paused(self, timeout: float) -> bool:
        # Replicas that share attention answer one by one.
        return "paused" in self._weights(timeout, do=STATE)

    def reset_cache(self, timeout: float) -> None:
        try:
            self._server.post("flush_cache", timeout)
        except EngineCallError as error:
            raise EngineCallError(
                "its radix cache could not be flushed: requests hold a part of it"
            ) from error

    def ask(self, timeout: float, **request: Any) -> None:
        self._weights(timeout, **request, timeout=timeout)

    def start(self, timeout: float) -> None:
        # The load begins and ends what SGLang's own updates do.
        pass

    def update(self, version: int, timeout: float) -> None:
        self.ask(timeout, do="update", version=version)

    def finish(self, label: str | None, timeout: float) -> None:
        if label is not None:
            self.label(label, timeout)

    def label(self, label: str, timeout: float) -> None:
        # Otherwise SGLang aborts all requests here.
        body = {"new_version": label, "abort_all_requests": False}
        self._server.post("update_weight_version", timeout, body)

    def _weights(self, timeout_: float, **request: Any) -> str:
        """What the server's ranks answer to a request."""
        body = {"action": PREFIX + json.dumps(request)}
        try:
            answer = self._server.post("weights_checker", timeout_, body)
        except EngineCallError as error:
            if "Unsupported action" in str(error):
                raise EngineCallError(
                    f"the server has not loaded weightsync's plugin: {_REMEDY}"
                ) from error
            raise
        return str(answer.get("message", ""))
