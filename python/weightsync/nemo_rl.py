"""NeMo-RL's checkpoint engine: ``refit_transport: "weightsync.nemo_rl:Transport"``.

Rank 0 of the policy has a :class:`weightsync.Sender`, and each generation worker a
:class:`weightsync.Receiver`. Both stay open from one refit to the next, so that the changes alone
travel from the second refit on.

NeMo-RL's interface was read, and not run: PyPI has a placeholder of that name. The class has the
methods of its ``CheckpointEngine`` and does not inherit from it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any

import torch

from weightsync._stream import TIMEOUT, Incoming, Outgoing, Place, drain
from weightsync.errors import LifecycleError, PeerError, SettingError, UnsupportedError

__all__ = ["Transport"]


class Transport:
    """One end of a refit, in a policy worker or in a generation worker.

    Args:
        bucket_size: how many bytes of tensors a batch has at most, unless one tensor has more.
        release_after_refit: NeMo-RL's own setting: it calls :meth:`finalize` after each refit, and
            each refit is whole.
        timeout: how long each wait lasts at most, in seconds.
        insecure_plaintext: whether weights may travel between hosts without encryption; None: if
            ``WEIGHTSYNC_INSECURE_PLAINTEXT`` is 1.
        scheme: settings of :class:`weightsync.Distributed`, such as ``{"deltas": "always"}``.
        shard_expert_weights: must be False: each worker gets whole tensors.
    """

    def __init__(
        self,
        bucket_size: int,
        release_after_refit: bool = False,
        timeout: float = TIMEOUT,
        insecure_plaintext: bool | None = None,
        scheme: Mapping[str, Any] | None = None,
        shard_expert_weights: bool = False,
    ) -> None:
        if shard_expert_weights:
            raise UnsupportedError(
                "shard_expert_weights: weightsync sends whole tensors to every worker: leave it out"
            )
        #: NeMo-RL reads it.
        self.shard_expert_weights = False
        self.bucket_size, self.release_after_refit = bucket_size, release_after_refit
        self.timeout = timeout
        self._settings: dict[str, Any] = {
            "timeout": timeout, "insecure_plaintext": insecure_plaintext, "scheme": scheme,
        }  # fmt: skip
        self._outgoing: Outgoing | None = None
        self._place: Place | None = None
        self._incoming: Incoming | None = None
        self._is_draining = False
        #: The version that this end has sent or received last; 0 before.
        self.version = 0

    def get_target_weight_layout(self) -> dict[str, Any] | None:
        """None: each worker gets whole tensors."""
        return None

    def prepare(self) -> dict[str, Any]:
        """Where this process would send from. Only rank 0 of the policy keeps its place."""
        self.finalize()
        self._outgoing = Outgoing(self.version, **self._settings)
        return {"place": self._outgoing.place}

    def init_policy_process_group(
        self,
        *,
        worker_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],
    ) -> None:
        """Makes rank 0 the sender. Others take part in gathering."""
        self._is_draining = worker_rank != 0
        if self._is_draining:
            self.finalize()

    def init_rollout_process_group(
        self,
        *,
        rollout_rank: int,
        train_world_size: int,
        rollout_world_size: int,
        metadata: list[Any],
    ) -> None:
        """Joins rank 0 of the policy, whose metadata is first."""
        self.finalize()
        first = metadata[0] if metadata else None
        if not isinstance(first, Mapping) or "place" not in first:
            raise SettingError(
                "metadata: expected that of rank 0 of the policy first, from its prepare"
            )
        self._place, self.version = first["place"], first["place"]["version"]
        self._incoming = Incoming(first["place"], self.timeout)

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Publishes the weights from rank 0; other ranks take part in gathering them.

        Raises:
            WrongWeightsError: if names, dtypes or shapes are not those of the first refit.
            DeadlineError: naming the workers that hold every slot.
        """
        if self._is_draining:
            return drain(weights)
        if self._outgoing is None:
            raise LifecycleError(
                "send_weights was called before prepare, or by a generation worker"
            )
        # In the caller's thread: gathering uses its device, its streams and its no_grad.
        self.version = self._outgoing.send(weights)

    async def receive_weight_batches(
        self,
    ) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yields the tensors of the refit in batches; they lie in the version itself.

        A tensor stays valid as long as it is referenced, and keeps the version's slot so long.

        Raises:
            DeadlineError: if the refit does not come within the timeout.
            PeerError: if the trainer died, or its send failed.
        """
        if self._place is None:
            raise LifecycleError(
                "receive_weight_batches was called by the policy, before "
                "init_rollout_process_group, or after the policy's end was closed: call finalize "
                "on all, and form the group again"
            )
        if self._incoming is None or self._incoming.is_closed:
            # An error closed it, and the policy may be well.
            self._incoming = Incoming(self._place, self.timeout)
        try:
            snapshot = await self._incoming.receive(self.version)
        except PeerError:
            # Nobody comes back to this place.
            self._place = None
            raise
        self.version = snapshot.version
        batch: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name in snapshot:
            tensor = snapshot[name]
            if batch and size + tensor.nbytes > self.bucket_size:
                yield batch
                batch, size = [], 0
            batch.append((name, tensor))
            size += tensor.nbytes
        if batch:
            yield batch

    def finalize(self) -> None:
        """Closes this end, as its garbage collection and the end of its process do."""
        if self._outgoing is not None:
            self._outgoing.close()
        if self._incoming is not None:
            self._incoming.close()
        self._outgoing = self._incoming = self._place = None
