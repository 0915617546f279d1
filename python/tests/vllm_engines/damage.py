"""What stands between a trainer and an engine, and damages a chunk when it is armed."""

from __future__ import annotations

import json
import re
import socket
import threading
from typing import Any

# Less than a chunk, and more than a message.
_LARGE = 4096


class Proxy:
    """Passes on what two ends say. Once armed, it flips a bit of the next chunk of the trainer."""

    def __init__(self, info: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        found = re.search(r"127\.0\.0\.1:([1-9]\d*)", info)
        assert found is not None, json.loads(info)
        self._to = int(found[1])
        own = self._listener.getsockname()[1]
        #: The sender's init info, whose address is this.
        self.info = info.replace(found[0], f"127.0.0.1:{own}")
        self.armed = False
        #: Chunks.
        self.damaged = 0
        self._sockets: list[socket.socket] = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                worker, _ = self._listener.accept()
            except OSError:
                return
            trainer = socket.create_connection(("127.0.0.1", self._to))
            self._sockets += [worker, trainer]
            for pair in ((worker, trainer, False), (trainer, worker, True)):
                threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, of: socket.socket, to: socket.socket, is_trainer: bool) -> None:
        try:
            while data := of.recv(1 << 16):
                if is_trainer and self.armed and len(data) > _LARGE:
                    self.armed = False
                    self.damaged += 1
                    middle = len(data) // 2
                    data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
                to.sendall(data)
        except OSError:
            pass
        for end in (of, to):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: Any) -> None:
        for one in self._sockets:
            one.close()
