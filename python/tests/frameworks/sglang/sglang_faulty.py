"""A plugin of SGLang with faults: a rank's model fails in the middle of a load, or ends with its
server, when a file says so.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: Names the file, which has "raise" or "die", how many loads do that, and on which rank.
VARIABLE = "WEIGHTSYNC_TEST_FAULT"
# Tensors that are loaded before the fault.
_MIDWAY = 9


def register() -> None:
    """The entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.models.llama.LlamaForCausalLM.load_weights"
    HookRegistry.register(target, _load, HookType.AROUND)


def _load(original: Callable[..., Any], model: Any, tensors: Any) -> Any:
    from sglang.srt.runtime_context import get_parallel

    told = Path(os.environ[VARIABLE])
    what, left, rank = told.read_text().split() if told.exists() else ("", "0", "0")
    if int(left) > 0 and int(rank) == get_parallel().tp_rank:
        # Written whole: another rank may be reading.
        new = told.with_suffix(".new")
        new.write_text(f"{what} {int(left) - 1} {rank}")
        os.replace(new, told)
        tensors = _until_midway(tensors, what)
    return original(model, tensors)


def _until_midway(tensors: Any, what: str) -> Iterator[Any]:
    for place, pair in enumerate(tensors):
        if place == _MIDWAY:
            if what == "die":
                # All processes of the server are of one group.
                os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)
            raise RuntimeError("the load failed midway")
        yield pair
