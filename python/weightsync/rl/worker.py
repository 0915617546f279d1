"""A worker on another host: ``python3 -m weightsync.rl.worker``.

A launcher gives it one line of JSON on its standard input, so that no secret is on a command line.
A worker that is started by hand joins with ``--join HOST:PORT`` and the trainer's token, in
``WEIGHTSYNC_TOKEN_FILE`` or ``WEIGHTSYNC_TOKEN``. It gets its environment and its policy from the
trainer, as code: a worker trusts its trainer.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from weightsync import _checks
from weightsync._native import TrainerLink
from weightsync.errors import SettingError, UnsupportedError, WeightsyncError
from weightsync.rl._columns import Key, Layout
from weightsync.rl._worker import Start, Worker, same_program, say_last_words, work

#: Seconds that a launched worker tries to join: as long as its trainer waits for it. Where nothing
#: listens any more it ends at once.
_LAUNCHED = 600.0

#: Seconds that a worker that joins on its own waits for its trainer.
_PATIENCE = 600.0


class NetworkLink:
    """The link to a trainer of another host."""

    def __init__(self, native: TrainerLink) -> None:
        self.native = native

    def hear(self) -> tuple[dict[str, Any], list[int]] | None:
        order = self.native.next()
        return None if order is None else (json.loads(order), [])

    def say(self, message: str, fds: Sequence[int] = ()) -> None:
        if fds:
            raise UnsupportedError(
                "what is asked of this worker, or what its frames hold, does not travel from another host"
            )
        self.native.say(message)

    def close(self) -> None:
        self.native.leave()


class RemoteWorker(Worker):
    """A worker whose frames travel: one part is sent while the next one is collected."""

    def __init__(self, start: Start, link: TrainerLink) -> None:
        super().__init__(start)
        self._native, self._link = link, NetworkLink(link)
        self._sender = ThreadPoolExecutor(1, "weightsync-frames")
        self._sending: list[Future[None] | None] = [None, None]
        self._turn = 0

    def do(self, order: dict[str, Any], fds: list[int]) -> dict[str, Any] | None:
        if order["do"] != "collect":
            return super().do(order, fds)
        turn, self._turn = self._turn, 1 - self._turn
        if (before := self._sending[turn]) is not None:
            before.result()
        if turn not in self._slots:
            self._slots[turn] = self._memory(order["steps"])
        super().do({**order, "slot": turn}, fds)
        self._sending[turn] = self._sender.submit(self._send, order["part"], turn)
        return None

    def close(self) -> None:
        self._sender.shutdown()
        super().close()

    def _memory(self, steps: int) -> dict[Key, np.ndarray]:
        """Arrays ``[P, steps, *shape]`` of this worker's own."""
        layout = Layout(self.columns, (self._envs, steps))
        return layout.views(np.zeros(layout.size, np.uint8))

    def _send(self, part: int, turn: int) -> None:
        try:
            columns = [(one.ctypes.data, one.nbytes) for one in self._slots[turn].values()]
            self._native.send_part(part, columns)
        except BaseException:
            # The trainer waits for this part. The environment may hang, and a link that was left
            # ends no process.
            try:
                with contextlib.suppress(WeightsyncError):
                    say_last_words(self._link, traceback.format_exc())
                    self._link.close()
            finally:
                os._exit(1)


def launched(given: dict[str, Any]) -> int:
    """Works as a launcher's line says, and returns the exit code."""
    # Ctrl-C reaches every process of the terminal. The trainer ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return _work(**given, patience=_LAUNCHED)


def _work(
    address: str,
    secret: str | None,
    tls: str,
    insecure_plaintext_code: bool,
    worker: int | None,
    ticket: int | None,
    patience: float,
) -> int:
    faulthandler.enable()
    place = (worker, ticket)
    native = TrainerLink(address, secret, tls or None, insecure_plaintext_code, place, patience)
    link = NetworkLink(native)
    settings = io.BytesIO(native.settings())
    theirs, ours = json.loads(settings.readline()), same_program()
    if theirs != ours:
        say_last_words(
            link,
            f"this host has {_listed(ours)}, and the trainer {_listed(theirs)}: install the same",
        )
        link.close()
        return 1
    return work(link, settings, lambda start: RemoteWorker(start, native))


def _listed(versions: dict[str, str]) -> str:
    return " and ".join(f"{name} {version}" for name, version in versions.items())


def _given(line: bytes) -> dict[str, Any]:
    """What a launcher's line says. It has a secret, so no error repeats it."""
    kinds = {
        "address": str,
        "secret": str,
        "tls": str,
        "insecure_plaintext_code": bool,
        "worker": int,
        "ticket": int,
    }
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        given = None
    if (
        not isinstance(given, dict)
        or given.keys() != kinds.keys()
        or not all(type(given[name]) is kind for name, kind in kinds.items())
    ):
        raise SettingError(
            "standard input: expected the trainer's line, which is JSON with "
            f"{', '.join(kinds)}, got {len(line)} bytes of something else: have the launcher pass "
            "its standard input on, or join with --join HOST:PORT"
        )
    return given


def _number(text: str) -> int:
    """A worker's number."""
    if not text.isdecimal() or int(text) >= 1 << 32:
        raise argparse.ArgumentTypeError(f"expected a number from 0 on, got {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: returns its exit code."""
    parser = argparse.ArgumentParser(
        "python3 -m weightsync.rl.worker",
        description="A worker of a collector on another host. Without --join it reads where its "
        "trainer is from its standard input, as a launcher tells it.",
    )
    parser.add_argument("--join", metavar="HOST:PORT", help="the trainer's address")
    parser.add_argument("--worker", type=_number, metavar="N", help="this worker's number")
    parser.add_argument(
        "--tls",
        metavar="DIR",
        help="the certificates of encrypted connections, as weightsync certs new makes them "
        "(default: WEIGHTSYNC_TLS_DIR, else the path that the trainer has told)",
    )
    parser.add_argument(
        "--insecure-plaintext-code",
        action="store_true",
        help="allow unencrypted connections to other machines: this worker runs what comes over "
        "them, so a program that can change that traffic can run programs here",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=_PATIENCE,
        metavar="SECONDS",
        help="how long to wait for the trainer (default: %(default)g)",
    )
    given = parser.parse_args(arguments)
    try:
        if given.tls is not None:
            # The link for frames and that for weights look there.
            os.environ["WEIGHTSYNC_TLS_DIR"] = _checks.absolute(given.tls)
        if given.join is None:
            if sys.stdin.isatty():
                parser.error("expected --join HOST:PORT, or a launcher's line on standard input")
            line = sys.stdin.buffer.readline()
            if not line:
                parser.error("standard input ended before the launcher's line came")
            return launched(_given(line))
        # Ctrl-C ends it: no interpreter has to be free for that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return _work(
            given.join, None, "", given.insecure_plaintext_code, given.worker, None, given.patience
        )
    except WeightsyncError as error:
        print(f"weightsync: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # As a worker process of one host ends: to take down the interpreter may take seconds.
    os._exit(code)
