"""TorchRL's schemes for Ray over weightsync: Ray carries the schemes, and no weights."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn
from torchrl._utils import WEIGHT_SYNC_TIMEOUT

from weightsync._deadline import Deadline
from weightsync.errors import DeadlineError, LifecycleError
from weightsync.ray import _cluster
from weightsync.ray._group import Group, Offer
from weightsync.scheme import Distributed
from weightsync.torchrl import _given
from weightsync.torchrl._native_scheme import NativeScheme
from weightsync.torchrl._ray_transports import RayModuleTransformReceiver, RayModuleTransformSender
from weightsync.torchrl._schemes import over_tcp

logger = logging.getLogger("weightsync")


class RayWeightSyncScheme(NativeScheme):
    """Weights to Ray actors: the trainer's memory on its own host, and a relay on each other host.

    A drop-in for TorchRL's, without a process group. Actors that die are lines of the report.

    Args:
        strategy: "tensordict" or "state_dict".
        backend: "gloo" or "nccl", for TorchRL's sake: weights go by weightsync, those of a GPU by way
            of the host's memory. With "nccl" a warning says so where there is no GPU.
        sync: whether ``send`` returns once every actor has applied the version, or as soon as it
            is live.
        insecure_plaintext: whether weights may travel between hosts without encryption, where
            there are no certificates. None: if ``WEIGHTSYNC_INSECURE_PLAINTEXT`` is 1. Without
            either all actors have to be on the trainer's host.
        mode, safe_points: as of :class:`SharedMemWeightSyncScheme`.

    Raises:
        UnsupportedError: for another backend.
    """

    def __init__(
        self,
        strategy: str = "tensordict",
        backend: str = "gloo",
        sync: bool = True,
        *,
        insecure_plaintext: bool | None = None,
        mode: Literal["bind", "copy"] = "bind",
        safe_points: Literal["implied", "declared"] = "implied",
    ) -> None:
        super().__init__(strategy, sync, mode=mode, safe_points=safe_points)
        self.backend = backend if backend == "nccl" else over_tcp(backend)
        self._scheme: Distributed = Distributed()
        self._insecure_plaintext = insecure_plaintext
        # This end of the group, and the actors' name of it.
        self._ray_group: Any = None
        self._ray_name = uuid.uuid4().hex

    @property
    def connection_info_name(self) -> str:
        """The name by which the actors find the trainer."""
        return f"weightsync-{self._ray_name}"

    def _init_on_sender_impl(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        remote_collectors: Sequence[Any] | None = None,
        model: nn.Module | None = None,
        num_workers: int | None = None,
        **kwargs: Any,
    ) -> None:
        self._scheme = _cluster.listening(self._scheme, self._insecure_plaintext)
        if self.backend == "nccl" and not torch.cuda.is_available():
            logger.warning(
                "backend='nccl': there is no GPU here, so weights go by shared memory on this host, and "
                "over TCP to others, as with 'gloo'"
            )
        if context is not None:
            # The collector's own model is looked up at each send.
            model = None
        elif remote_collectors is not None:
            num_workers = len(remote_collectors)
        is_again = self._group is not None
        super()._init_on_sender_impl(
            model_id=model_id, context=context, model=model, num_workers=num_workers, **kwargs
        )
        if is_again:
            # Actors of the run before do not follow this one.
            self._ray_name = uuid.uuid4().hex

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        if not self._local:
            self._ray_group = self._joined()
            self._offer()
        super()._setup_connection_and_weights_on_sender_impl(worker_idx=worker_idx, weights=weights)

    def _joined(self) -> Group:
        kind = type(self).__name__
        return Group([self.connection_info_name], self._offer, f"{kind} of {self._model_id!r}", kind)

    def _offer(self) -> None:
        group, own = self._ray_group, self._group
        if group is None:
            return
        if self.initialized_on_receiver:
            self._reach(group)
        elif own is not None and own.info is not None:
            # A sender that shuts down has nothing to offer.
            group.offer(Offer.of(own.info, self._scheme), WEIGHT_SYNC_TIMEOUT)

    def _reach(self, group: Group) -> None:
        # This asks for the host's relay, too.
        group.reach(group.after("", Deadline(WEIGHT_SYNC_TIMEOUT)))

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        # The relays end with the group's actor: this host asks the next one for another.
        self._ray_group = group = self._joined()
        try:
            self._reach(group)
            super()._setup_connection_and_weights_on_receiver_impl(worker_idx=worker_idx)
        except BaseException:
            self._ray_group = None
            group.leave()
            raise

    def shutdown(self) -> None:
        """Shuts down this process's end. Any number of times."""
        try:
            super().shutdown()
        finally:
            group, self._ray_group = getattr(self, "_ray_group", None), None
            if group is not None and self._is_own():
                group.leave()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ray_group": None}


class RayModuleTransformScheme(RayWeightSyncScheme):
    """Weights to the module of TorchRL's ``RayModuleTransform``. The sender drives it, at connect too.

    A drop-in for TorchRL's: ``RayModuleTransform(module=…, weight_sync_scheme=scheme)``, and then
    ``scheme.send(weights)``, or a collector with ``weight_sync_schemes={"transform_module": scheme}``.

    Args:
        strategy, backend, sync, insecure_plaintext, mode, safe_points: as of
            :class:`RayWeightSyncScheme`.
    """

    # The transform, which calls `_set_transform` once it has its actor.
    _transform: Any = None

    def _set_transform(self, ray_transform: Any) -> None:
        self._transform = ray_transform

    def _init_on_sender_impl(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        model: nn.Module | None = None,
        ray_transform: Any = None,
        **kwargs: Any,
    ) -> None:
        if ray_transform is not None:
            self._transform = ray_transform
        if self._transform is None:
            raise LifecycleError(
                "this scheme has no transform: pass it to RayModuleTransform(weight_sync_scheme=…), "
                "which calls init_on_sender and connect"
            )
        name = model_id or "module"
        is_given = model is not None or bool(kwargs)
        if not is_given:
            # The actor's own weights are the first version.
            model = self._answer(self._transform._actor._getattr.remote("module"))
        super()._init_on_sender_impl(model_id=name, model=model, num_workers=1, **kwargs)
        if not is_given:
            assert self._group is not None
            whose = "is the transform's module, in its actor"
            self._group._weights[name] = _given.initial_only(model, name, whose)
        if context is not None:
            self.context = context

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        joined = self._transform._actor._init_weight_sync_scheme.remote(
            scheme=self, model_id=self._model_id
        )
        self._calls = SimpleNamespace(_sync_futures=[joined])
        super()._setup_connection_and_weights_on_sender_impl(worker_idx=worker_idx, weights=weights)
        self._answer(joined)

    def _answer(self, asked: Any) -> Any:
        ray = _cluster.running()
        try:
            return ray.get(asked, timeout=WEIGHT_SYNC_TIMEOUT)
        except ray.exceptions.GetTimeoutError:
            raise DeadlineError(
                f"{self._transform._actor} of the transform did not answer within "
                f"{WEIGHT_SYNC_TIMEOUT:g} s: does the cluster have what the actor asks for, such as "
                "CPUs, and is the actor idle?",
                "retry",
            ) from None

    def _init_on_receiver_impl(self, *, model_id: str, context: Any = None, **kwargs: Any) -> None:
        kwargs = {"worker_idx": 0, **kwargs}
        if context is not None:
            kwargs.setdefault("model", context.module)
        super()._init_on_receiver_impl(model_id=model_id, **kwargs)

    def create_sender(self) -> RayModuleTransformSender:
        """The sending half of the older calls."""
        return RayModuleTransformSender(self)

    def create_receiver(self) -> RayModuleTransformReceiver:
        """The receiving half of the older calls."""
        return RayModuleTransformReceiver(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_transform": None, "_calls": None}
