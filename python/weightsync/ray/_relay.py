"""The relay of a host, as a Ray actor."""

from __future__ import annotations

import logging
import os
import sys
import threading

from weightsync import InitInfo, _native
from weightsync.ray import _cluster

logger = logging.getLogger("weightsync")


class Relay:
    """Runs ``weightsync relay`` in the process of an actor.

    Args:
        info: the sender's init info as JSON.
        token: the sender's token, with which the relay serves the next host.
    """

    def __init__(self, info: str, token: str | None) -> None:
        if token is not None and "WEIGHTSYNC_TOKEN_FILE" not in os.environ:
            os.environ["WEIGHTSYNC_TOKEN"] = token
        # What the sender has set goes for the relay, too. An environment of its own comes first.
        self._settings: list[str] = []
        for setting in InitInfo.from_json(info).scheme.partition(":")[2].split(","):
            name, _, value = setting.partition("=")
            if name == "insecure-plaintext":
                self._settings += ["--insecure-plaintext"]
            elif name == "tls" and not os.environ.get("WEIGHTSYNC_TLS_DIR"):
                self._settings += ["--tls", value]
        # The command reads a file. This one is of this process alone.
        self._info = os.memfd_create("weightsync-info")
        os.write(self._info, info.encode())
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        arguments = ["relay", "--info", f"/dev/fd/{self._info}", *self._settings]
        code = _native.command(arguments, [sys.executable, "-m", "weightsync"])
        # It ends when the host has another relay already. A signal ends this process.
        logger.warning("this host's relay has ended with exit code %d", code)
        if code >= 128:
            os._exit(code)
