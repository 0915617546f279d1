"""The words that both ends know: what a server is started with, and what it is asked by."""

from __future__ import annotations

from typing import Any, NoReturn

from weightsync.errors import UnsupportedError

#: What ``--custom-weight-loader`` names on a server that takes versions.
LOADER = "weightsync.sglang.load"
#: What precedes a request in the ``action`` of ``/weights_checker``.
#:
#: Of SGLang's routes for weights this one alone reaches the scheduler while requests are under way:
#: each of the others waits until all of them have ended, unless the server is paused.
PREFIX = "weightsync "
#: What a request asks a rank for beyond a ``WorkerRequest``: "paused" or "running".
STATE = "state"
#: Another: to queue the requests of a paused server whose grammars are there. It answers
#: "compiling" if one waited for its grammar, and else "none".
GRAMMARS = "grammars"


def load(model: Any, named_tensors: Any) -> NoReturn:
    """What a server is started with: ``--custom-weight-loader weightsync.sglang.load``.

    The name has the server take the versions of a trainer. Weights themselves do not come this
    way.

    Raises:
        UnsupportedError: always. A server with weightsync answers so before SGLang calls this.
    """
    raise UnsupportedError(
        f"{LOADER} takes the versions of a weightsync sender, and no tensors: send them by "
        "weightsync.sglang.Trainer"
    )
