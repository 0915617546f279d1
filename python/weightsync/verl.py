"""verl's checkpoint engine ``weightsync``.

In verl's configuration::

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: weightsync
      custom_backend_module: weightsync.verl

Rank 0 of the trainer has a :class:`weightsync.Sender`, and each rollout worker a
:class:`weightsync.Receiver`. Both stay open from one update to the next, so that the changes alone
travel from the second update on.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

import torch

from weightsync import _tested

_tested.check("verl")

from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry  # noqa: E402
from verl.utils.device import (  # noqa: E402
    get_device_id,
    get_device_name,
    is_device_available,
    is_support_ipc,
)

from weightsync._stream import TIMEOUT, Incoming, Outgoing, Place, drain  # noqa: E402
from weightsync.errors import LifecycleError, SettingError  # noqa: E402

__all__ = ["WeightsyncCheckpointEngine"]

logger = logging.getLogger("weightsync")


@CheckpointEngineRegistry.register("weightsync")
class WeightsyncCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One end of an update, in a trainer's rank or in a rollout worker.

    Args:
        bucket_size: in bytes, of the buckets in which verl's adapter for vLLM hands tensors on.
            Nothing is packed into buckets here.
        is_master: whether this is rank 0 of the trainer.
        rebuild_group: whether ``finalize`` closes the ends, so that each update is whole.
        timeout: how long each wait lasts at most, in seconds.
        insecure_plaintext: whether weights may travel between hosts without encryption; None: if
            ``WEIGHTSYNC_INSECURE_PLAINTEXT`` is 1.
        scheme: settings of :class:`weightsync.Distributed`, such as ``{"deltas": "always"}``.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        rebuild_group: bool = False,
        timeout: float = TIMEOUT,
        insecure_plaintext: bool | None = None,
        scheme: Mapping[str, Any] | None = None,
    ) -> None:
        self.bucket_size, self.is_master = bucket_size, is_master
        self.rebuild_group, self.timeout = rebuild_group, timeout
        self._settings: dict[str, Any] = {
            "timeout": timeout, "insecure_plaintext": insecure_plaintext, "scheme": scheme,
        }  # fmt: skip
        self._outgoing: Outgoing | None = None
        self._incoming: Incoming | None = None
        #: The version that this end has sent or received last; 0 before.
        self.version = 0
        # The version after which the next update's comes.
        self._after = 0

    def prepare(self) -> dict[str, Any]:
        """Where the trainer is, from its rank 0; nothing from the others."""
        if not self.is_master:
            return {}
        if self._outgoing is None or self._outgoing.is_closed:
            self._outgoing = Outgoing(self.version, **self._settings)
        return {"place": self._outgoing.place}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Has every rollout worker join rank 0 of the trainer."""
        place = metadata[0].get("place") if metadata and metadata[0] else None
        if place is None:
            raise SettingError(
                "the trainer's rank 0 did not say where it is: expected its metadata first, from "
                "an engine made with is_master=True"
            )
        return {"place": [None] * actor_wg_world_size}, {"place": [place] * rollout_world_size}

    def init_process_group(self, place: Place | None) -> None:
        """Joins rank 0 of the trainer, unless this end has; None in the trainer itself."""
        if place is None:
            return
        incoming = self._incoming
        if incoming is None or incoming.is_closed or incoming.info != place["info"]:
            self._leave()
            self._incoming = Incoming(place, self.timeout)
        self._after = place["version"]

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float] | None:
        """Publishes the weights from rank 0; other ranks take part in gathering them.

        Args:
            weights: names and tensors, each name once.
            global_steps: the version's number if it is larger than the last version's. Else the
                number is the next one, as it is without a step.

        Returns:
            The metric ``checkpoint_engine/version`` from rank 0.

        Raises:
            WrongWeightsError: if names, dtypes or shapes are not those of the first update.
            DeadlineError: naming the workers that hold every slot.
        """
        if not self.is_master:
            drain(weights)
            return None
        if self._outgoing is None:
            raise LifecycleError("send_weights was called before prepare")
        # In the caller's thread: gathering uses its device, its streams and its no_grad.
        with torch.no_grad():
            version = self._outgoing.send(weights, global_steps)
        self.version = version
        logger.info("step %s is version %d", global_steps, version)
        return {"checkpoint_engine/version": float(version)}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yields the tensors of the update, which lie in the version itself.

        A tensor stays valid as long as it is referenced, and keeps the version's slot so long. A
        tensor that is larger than a bucket is a copy on this process's device, if that has memory
        which other processes can open: verl hands it to vLLM by its place there.

        Raises:
            DeadlineError: if the update does not come within the timeout.
            PeerError: if the trainer died, or its send failed.
        """
        if self._incoming is None:
            raise LifecycleError(
                "receive_weights was called before init_process_group, or by the trainer"
            )
        snapshot = await self._incoming.receive(self._after)
        self.version = self._after = snapshot.version
        logger.info("step %s is version %d", global_steps, self.version)
        # verl takes a machine without any for one with GPUs.
        has_handles = is_device_available() and is_support_ipc()
        for name in snapshot:
            tensor = snapshot[name]
            if tensor.nbytes > self.bucket_size and has_handles:
                tensor = tensor.to(f"{get_device_name()}:{get_device_id()}")
            yield name, tensor

    def finalize(self) -> None:
        """Keeps the ends for the next update, unless ``rebuild_group`` is set."""
        if self.rebuild_group:
            self.close()

    def close(self) -> None:
        """Closes this end, as its garbage collection and the end of its process do."""
        if self._outgoing is not None:
            self._outgoing.close()
        self._leave()

    def _leave(self) -> None:
        incoming, self._incoming = self._incoming, None
        if incoming is not None:
            incoming.close()
