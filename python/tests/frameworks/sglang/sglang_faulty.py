"""A plugin of SGLang with faults: a rank's model fails in the middle of a load, or ends with its
server, or requests wait for grammars, when a file says so.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

#: Names the file, which has "raise" or "die", how many loads do that, and on which rank; or
#: "compile", and how many requests wait until a paused server is asked for their grammars.
VARIABLE = "WEIGHTSYNC_TEST_FAULT"
# Tensors that are loaded before the fault.
_MIDWAY = 9


def register() -> None:
    """The entry point."""
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not torch.cuda.is_available():
        # SGLang calls this on the CPU, too, after a release of memory.
        torch.cuda.synchronize = lambda device=None: None
        _keep_unpinned(torch)
    target = "sglang.srt.models.llama.LlamaForCausalLM.load_weights"
    HookRegistry.register(target, _load, HookType.AROUND)
    grammars = "sglang.srt.constrained.grammar_manager.GrammarManager"
    HookRegistry.register(f"{grammars}.process_req_with_grammar", _wait, HookType.AROUND)
    HookRegistry.register(f"{grammars}.has_waiting_grammars", _has_waiting, HookType.AROUND)


def _keep_unpinned(torch: Any) -> None:
    """SGLang's LoRA pins memory on the CPU, too, and torch has no pinned memory without a GPU."""
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor
    for name in ("tensor", "zeros", "empty"):
        make = getattr(torch, name)

        @functools.wraps(make)
        def unpinned(*given: Any, make: Any = make, pin_memory: bool = False, **how: Any) -> Any:
            return make(*given, **how)

        setattr(torch, name, unpinned)


def _load(original: Callable[..., Any], model: Any, tensors: Any) -> Any:
    from sglang.srt.runtime_context import get_parallel

    what, left, rank = _told()
    if what != "compile" and left > 0 and rank == get_parallel().tp_rank:
        _tell(what, left - 1, rank)
        tensors = _until_midway(tensors, what)
    return original(model, tensors)


def _wait(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    what, left, rank = _told()
    if what != "compile" or left < 1:
        return original(manager, request)
    # SGLang takes a request without a grammar for one that need not wait any more.
    manager.grammar_backend = SimpleNamespace(reset=lambda: None)
    manager.grammar_queue.append(request)
    _tell(what, left - 1, rank)
    return True


def _has_waiting(original: Callable[..., Any], manager: Any) -> Any:
    # As if it compiled as long as the file says so.
    return _told()[0] != "compile" and original(manager)


def _told() -> tuple[str, int, int]:
    told = Path(os.environ[VARIABLE])
    what, left, rank = told.read_text().split() if told.exists() else ("", "0", "0")
    return what, int(left), int(rank)


def _tell(what: str, left: int, rank: int) -> None:
    # Written whole: another rank may be reading.
    told = Path(os.environ[VARIABLE])
    new = told.with_suffix(".new")
    new.write_text(f"{what} {left} {rank}")
    os.replace(new, told)


def _until_midway(tensors: Any, what: str) -> Iterator[Any]:
    for place, pair in enumerate(tensors):
        if place == _MIDWAY:
            if what == "die":
                # All processes of the server are of one group.
                os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)
            raise RuntimeError("the load failed midway")
        yield pair
