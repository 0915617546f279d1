"""A server of SGLang, as a trainer speaks to it."""

from __future__ import annotations

import json
import time
from typing import Any

from weightsync import _tested
from weightsync.engines import _base
from weightsync.engines._base import EngineCallError, EngineDiedError, Pause
from weightsync.engines._http import Server
from weightsync.errors import UnsupportedError
from weightsync.sglang._names import GRAMMARS, LOADER, PREFIX, STATE

_REMEDY = f"install weightsync next to SGLang, and start it with --custom-weight-loader {LOADER}"
# The least time that a call is given, in seconds.
_LEAST = 0.1


class Engine(_base.Engine):
    """A server of SGLang, by its URL.

    It is started with ``--custom-weight-loader weightsync.sglang.load``.

    Args:
        url: the server's.
        api_key: the key that the server was started with.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self._server = Server(url, _REMEDY, api_key)
        super().__init__(self._server.url)
        self.is_unencrypted = self._server.is_unencrypted
        self._ranks = 0
        # Whether it computes the next tokens before it has looked at the last ones.
        self._overlaps = True

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
        self._overlaps = info.get("disable_overlap_schedule") is not True

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
        if mode == "keep" and not clear and self._overlaps:
            raise UnsupportedError(
                "SGLang's overlap schedule is on, and a token that old weights computed would get "
                "the new version: start the server with --disable-overlap-schedule, or leave "
                "reset_prefix_cache=True"
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
        until = time.monotonic() + timeout
        while True:
            left = max(until - time.monotonic(), _LEAST)
            try:
                self._server.post("flush_cache", left)
                return
            except EngineCallError as error:
                # SGLang drops nothing while a request waits for its grammar, and a paused server
                # does not look whether that has come.
                if time.monotonic() < until and self._weights(left, do=GRAMMARS) == "compiling":
                    continue
                raise EngineCallError(
                    "its radix cache could not be flushed: requests hold a part of it, or wait "
                    "for their grammars"
                ) from error

    def ask(self, timeout: float, **request: Any) -> None:
        try:
            self._weights(timeout, **request, timeout=timeout)
        except EngineCallError as error:
            if request["do"] == "join" and error.weights in (None, "old"):
                self._check_ranks(timeout)
            raise

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

    def _check_ranks(self, timeout: float) -> None:
        """Says that the server has started again, where it has another number of ranks."""
        had, self._ranks = self._ranks, 0
        self.check(timeout)
        if had not in (0, self._ranks):
            raise EngineDiedError(
                f"the server has restarted with another --tp: it has {self._ranks} ranks, and had "
                f"{had}; sync or refresh once more"
            )

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
