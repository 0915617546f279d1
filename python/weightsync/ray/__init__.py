"""Weights of models that Ray actors run.

Ray carries the init info. Weights go by weightsync's own transport: shared memory on the trainer's
host, and one relay on each other host::

    sender = weightsync.ray.Sender(model)                        # in the trainer, driver or actor
    receiver = weightsync.ray.Receiver(info, model=policy)       # in an actor's __init__
    print(sender.send())
"""

from __future__ import annotations

from weightsync.ray._ends import Receiver, Sender
from weightsync.ray._group import Member

__all__ = ["Member", "Receiver", "Sender", "register"]


def register() -> None:
    """Adds weightsync to Ray's direct transport, which is alpha in Ray, for tensors of the CPU.

    ``@ray.method(tensor_transport="WEIGHTSYNC")`` then has a method's tensors go our way, and
    ``ray.put(tensors, _tensor_transport="WEIGHTSYNC")`` an object's. Call it before actors are made.
    """
    from weightsync.ray import _direct

    _direct.register()
