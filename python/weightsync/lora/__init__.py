"""LoRA: an adapter sent alone, or merged into its base weights on the way.

:func:`adapter_of` gives the tensors of a PEFT model's adapter to a ``Sender``, and
:class:`Adapters` makes each version that arrives a PEFT directory under a name of its own.
:class:`VllmAdapters` loads these into a vLLM engine of this process, and :class:`ServerAdapters`
into a server of vLLM or SGLang. :func:`merged` gives the whole model with the adapter added to its
weights.
"""

from weightsync.lora._adapters import (
    CONFIG,
    Adapter,
    Adapters,
    adapter_of,
    save_adapter,
    versioned_name,
)
from weightsync.lora._engines import ServerAdapters, VllmAdapters
from weightsync.lora._merged import merged

__all__ = [
    "CONFIG",
    "Adapter",
    "Adapters",
    "ServerAdapters",
    "VllmAdapters",
    "adapter_of",
    "merged",
    "save_adapter",
    "versioned_name",
]
