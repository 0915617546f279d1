"""How torch works where a worker calls it: in a forked process, and in inference mode."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

# Whether this process was forked, and its parent alone may have torch's threads.
_is_forked = False


def _in_child() -> None:
    global _is_forked
    _is_forked = True


os.register_at_fork(after_in_child=_in_child)


@contextlib.contextmanager
def without_threads() -> Iterator[None]:
    """In a forked process, torch computes in this thread alone: it would wait for its parent's."""
    torch = sys.modules.get("torch")
    if not _is_forked or torch is None or (before := torch.get_num_threads()) == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def as_worker() -> Iterator[None]:
    """Has torch work as a worker's model needs it, wherever the worker calls from.

    It makes tensors that can be trained, also in inference mode, and needs no thread that a forked
    process does not have.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    with torch.inference_mode(False), without_threads():
        yield
