"""A proxy between a trainer and its workers, which meddles with what passes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

#: What becomes of some bytes on their way to the trainer; None: the connection is cut.
Meddle = Callable[[int, bytes], bytes | None]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Proxy:
    """Passes connections on to a port of this host.

    Args:
        to: the port.
        meddle: called with how many bytes of its connection came before, and the next ones.
    """

    def __init__(self, to: int, meddle: Meddle) -> None:
        self._to, self._meddle = to, meddle
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._start(self._accept)

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=run, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                worker, _ = self._listener.accept()
                trainer = socket.create_connection(("127.0.0.1", self._to))
                self._sockets += [worker, trainer]
                self._start(self._pass_on, worker, trainer, self._meddle)
                self._start(self._pass_on, trainer, worker, lambda _, data: data)

    def _pass_on(self, source: socket.socket, into: socket.socket, meddle: Meddle) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                changed = meddle(passed, data)
                passed += len(data)
                if changed is None:
                    break
                into.sendall(changed)
        for one in (source, into):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for one in [self._listener, *self._sockets]:
            one.close()
