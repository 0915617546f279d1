"""TorchRL's schemes over weightsync: the same names, arguments and calls."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from weightsync.torchrl._given import model_of
from weightsync.torchrl._group import Group
from weightsync.torchrl._local import LocalScheme


class SharedMemWeightSyncScheme(LocalScheme):
    """Weights through shared memory: one copy, whatever the number of workers.

    A drop-in for TorchRL's. Workers read a whole version in place; what the trainer
    does to its own weights is seen by nobody before it is sent.

    Args:
        strategy: "tensordict" or "state_dict".
        sync: whether ``send`` returns once every worker has applied the version, or as
            soon as it is live.
        per_worker_weights: accepted as TorchRL has it; any worker can have its own.
        auto_register: of the older calls: whether the first ``update_weights`` of
            ``create_sender()`` says what the model is.
        mode: "bind": a worker's parameters from 64 KiB on lie in the version itself, at
            another address each time; "copy": everything is copied, and they stay where
            they are.
    """

    def __init__(
        self,
        strategy: str = "tensordict",
        sync: bool = True,
        per_worker_weights: bool = False,
        *,
        auto_register: bool = True,
        mode: Literal["bind", "copy"] = "bind",
    ) -> None:
        super().__init__(strategy, sync, mode=mode)
        self.per_worker_weights = per_worker_weights
        self.auto_register = auto_register


class MultiProcessWeightSyncScheme(LocalScheme):
    """Weights through a queue to each worker.

    A drop-in for TorchRL's; the arguments are its own. What passes through a queue says which
    version is meant: the weights themselves are read where they lie.

    Args:
        strategy: "tensordict" or "state_dict".
        sync: whether ``send`` waits until every worker has applied the version.
        mode: as of :class:`SharedMemWeightSyncScheme`.
    """

    _word = "multi-process"


class NoWeightSyncScheme(LocalScheme):
    """No weights are sent.

    A collector gives its workers a policy without values; these get the initial ones
    once, so that the same program runs.
    """

    def __init__(self, strategy: str = "tensordict", sync: bool = True) -> None:
        super().__init__(strategy, sync)

    def _group_in(self, context: Any) -> Group:
        return Group(self._word, "copy")

    def _init_on_sender_impl(
        self, *, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        self._model_id = model_id or "policy"
        factories = getattr(context, "policy_factory", None) or []
        model = model_of(context, self._model_id) if context is not None else None
        if isinstance(model, nn.Module) and not any(factories):
            super()._init_on_sender_impl(model_id=model_id, context=context, **kwargs)
        else:
            self._group = None

    def _setup_connection_and_weights_on_sender_impl(self, **kwargs: Any) -> None:
        if self._group is not None:
            super()._setup_connection_and_weights_on_sender_impl(**kwargs)
            self._group.leave(self._model_id or "policy", sender=True)

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Nothing."""

    def _init_on_receiver_impl(self, *, model_id: str, **kwargs: Any) -> None:
        self._model_id = model_id
        if self._group is not None:
            super()._init_on_receiver_impl(model_id=model_id, **kwargs)

    def _setup_connection_and_weights_on_receiver_impl(self, **kwargs: Any) -> None:
        # It stays until the sender closes: that is when every worker has its weights.
        if self._group is not None:
            super()._setup_connection_and_weights_on_receiver_impl(**kwargs)

    def receive(self, timeout: float | None = None) -> None:
        """Nothing comes."""
        return None
