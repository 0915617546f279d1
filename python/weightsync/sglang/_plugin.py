"""The entry point that SGLang calls in each of its processes."""

from __future__ import annotations

import logging

logger = logging.getLogger("weightsync")

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_WORKER = "sglang.srt.managers.tp_worker.BaseTpWorker"


def register() -> None:
    """Has SGLang call the hooks. It never raises: SGLang runs without them, too."""
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from weightsync.sglang import _hooks

        for name, hook in (
            ("__post_init__", _hooks.begin),
            ("check_weights", _hooks.check_weights),
            ("release_memory_occupation", _hooks.release),
            ("update_weights_from_tensor", _hooks.update_from_tensor),
            ("update_weights_from_disk", _hooks.update_from_disk),
            ("update_weights_from_distributed", _hooks.update_from_distributed),
            ("update_weights_from_ipc", _hooks.update_from_ipc),
        ):
            HookRegistry.register(f"{_MANAGER}.{name}", hook, HookType.AROUND)
        name = f"{_WORKER}.deserialize_own_rank"
        HookRegistry.register(name, _hooks.read_tensors, HookType.AROUND)
    except Exception as error:
        logger.error("weightsync is not available to SGLang: %s", error)
