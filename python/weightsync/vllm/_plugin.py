"""The entry point that vLLM calls in each of its processes, possibly several times."""

from __future__ import annotations

import logging

from weightsync.vllm import _compat

logger = logging.getLogger("weightsync")

#: What ``weight_transfer_config={"backend": …}`` names.
BACKEND = "weightsync"


def register() -> None:
    """Registers the backend with vLLM. It never raises: vLLM runs without it, too."""
    try:
        import vllm

        if concern := _compat.concern(vllm.__version__):
            logger.warning("%s", concern)
        if _compat.parse(vllm.__version__) < _compat.BACKEND:
            return
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        if BACKEND not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(
                BACKEND, "weightsync.vllm._transfer", "WeightsyncEngine"
            )
    except Exception as error:
        logger.error("the vLLM backend %r is not available: %s", BACKEND, error)
