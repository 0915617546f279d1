"""The flow of one trainer and its inference actors: initialize once, then sync."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from weightsync.errors import DeadlineError, LifecycleError, PeerError, SettingError
from weightsync.transfer.extractor import WeightExtractor, trainer_rank
from weightsync.transfer.init_info import (
    EmptyWeightSyncInitInfo,
    WeightSyncInitInfo,
    init_info_from_dict,
    rank_offsets,
)
from weightsync.transfer.strategy import (
    InferenceEngineClient,
    WeightLoader,
    WeightTransferReceiver,
    WeightTransferSender,
    WeightTransferStrategy,
    strategy_from_config,
    within,
)


class TrainingActor:
    """What each rank of the trainer has: an extractor, and a sender. All ranks make each call."""

    def __init__(self, extractor: WeightExtractor, model: Any, generator_dtype: Any = None) -> None:
        self._extractor, self._model, self._dtype = extractor, model, generator_dtype
        self._client: Any = None
        self.sender: WeightTransferSender | None = None
        #: What receivers were told, on rank 0: a worker that joins later needs it.
        self.init_info: WeightSyncInitInfo | None = None

    async def initialize_weight_sync(
        self,
        strategy: WeightTransferStrategy | None,
        cfg: Any,
        inference_client: InferenceEngineClient | None,
    ) -> None:
        """Connects the sender and all receivers. Without a strategy, ``cfg`` names it.

        Rank 0 alone needs the client. Each call of it ends by the strategy's timeout.
        """
        self.shutdown()
        strategy = strategy_from_config(cfg) if strategy is None else strategy
        self._client = inference_client
        plan = await self._extractor.extract_weights(self._model, self._dtype)
        if trainer_rank() != 0:
            self.sender = await strategy.create_sender(EmptyWeightSyncInitInfo())
            return
        if inference_client is None:
            raise LifecycleError("rank 0 of the trainer needs the inference client, got none")
        limit = strategy.timeout
        size = inference_client.get_world_size()
        workers, _ = await within(size, limit, "how many they are")
        info = await strategy.create_init_info(workers, getattr(plan, "metadata", None))
        # Each may wait for the other.
        telling = inference_client.init_weight_update_communicator(info)
        sender, told = await asyncio.gather(
            strategy.create_sender(info),
            within(telling, limit, "the init info"),
            return_exceptions=True,
        )
        # A sender that waited in vain knows for whom.
        late = isinstance(told, DeadlineError)
        for failed in (sender, told) if late else (told, sender):
            if isinstance(failed, BaseException):
                if isinstance(sender, WeightTransferSender):
                    sender.shutdown()
                raise failed
        assert isinstance(sender, WeightTransferSender)
        self.sender, self.init_info = sender, info

    async def sync_weights(self) -> int:
        """One sync; the number of the version that all inference workers have loaded."""
        if self.sender is None:
            error = LifecycleError("sync_weights comes after initialize_weight_sync")
            self._extractor._tell(error)
            raise error
        chunks = await self._extractor.extract_weights(self._model, self._dtype)
        await self.sender.send_chunks(chunks, self._client)
        return self.sender.version

    def shutdown(self) -> None:
        """Any number of times."""
        if self.sender is not None:
            self.sender.shutdown()
            self.sender = self.init_info = None


class InferenceActor:
    """What each inference worker has: a receiver, and a loader."""

    def __init__(self, strategy: WeightTransferStrategy, loader: WeightLoader) -> None:
        self._strategy, self._loader = strategy, loader
        self.receiver: WeightTransferReceiver | None = None

    @property
    def weight_version(self) -> int:
        """The version that this worker has loaded from its present receiver; 0 before the first."""
        return 0 if self.receiver is None else self.receiver.version

    async def init_weight_update_communicator(
        self, init_info: dict[str, Any], rank_offset: int, rank: int = 0
    ) -> None:
        """Creates the receiver."""
        info = init_info_from_dict(init_info)
        if self.receiver is not None:
            if not info.override_existing_receiver:
                return
            self.shutdown()
        self.receiver = await self._strategy.create_receiver(info, rank_offset, rank)

    async def update_named_weights(self, request: dict[str, Any]) -> dict[str, int]:
        """Does what a request says; the version that is loaded then."""
        if self.receiver is None:
            raise LifecycleError(
                "update_named_weights comes after init_weight_update_communicator"
            )
        parsed = self.receiver.parse_request(request)
        await self.receiver.receive_and_load_weights(parsed, self._loader)
        return {"version": self.receiver.version}

    def shutdown(self) -> None:
        """Any number of times. The model keeps its weights."""
        if self.receiver is not None:
            self.receiver.shutdown()
            self.receiver = None


class ActorClient(InferenceEngineClient):
    """A client of :class:`InferenceActor` objects, one for each inference worker.

    Args:
        actors: in the order of their ranks: deployment by deployment, and in each as
            :func:`rank_in_deployment` counts.
        deployment: how many workers a deployment has.
        call: ``call(actor, method, *arguments)`` calls an actor elsewhere, and returns an
            awaitable; without it actors are objects of this process. For Ray it is
            ``lambda actor, method, *args: getattr(actor, method).remote(*args)``.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        deployment: int = 1,
        call: Callable[..., Awaitable[Any]] | None = None,
    ) -> None:
        if not actors or deployment < 1 or len(actors) % deployment:
            raise SettingError(
                f"expected whole deployments of {deployment} actors, got {len(actors)} actors"
            )
        self._actors, self._deployment, self._call = list(actors), deployment, call or _call

    async def get_world_size(self) -> tuple[int, int]:
        return len(self._actors), self._deployment

    async def init_weight_update_communicator(self, init_info: WeightSyncInitInfo) -> None:
        first = getattr(init_info, "rank_offset", 1)
        count = len(self._actors) // self._deployment
        offsets = rank_offsets(count, self._deployment, first=first)
        data = init_info.to_dict()
        await self._all(
            "init_weight_update_communicator",
            [
                (data, offsets[at // self._deployment], at % self._deployment)
                for at in range(len(self._actors))
            ],
        )

    async def join(self, actor: Any, init_info: WeightSyncInitInfo, at: int | None = None) -> None:
        """Gives a worker that comes later the init info, and counts it from the next sync on.

        Args:
            actor: the new actor.
            init_info: :attr:`TrainingActor.init_info`.
            at: whose place it takes, such as that of a worker that died; None: a new place, in a
                deployment of its own.

        Raises:
            UnsupportedError: if the strategy has a ``fixed_membership``.
        """
        if at is None and self._deployment > 1:
            raise SettingError(
                f"at: expected a place from 0 to {len(self._actors) - 1}, because a deployment "
                f"has {self._deployment} workers, got None"
            )
        place = len(self._actors) if at is None else range(len(self._actors))[at]
        offset = getattr(init_info, "rank_offset", 1) + place // self._deployment * self._deployment
        told = (init_info.to_dict(), offset, place % self._deployment)
        await self._call(actor, "init_weight_update_communicator", *told)
        self._actors[place : place + 1] = [actor]

    async def update_named_weights(self, request: dict[str, Any]) -> list[Any]:
        return await self._all("update_named_weights", [(request,)] * len(self._actors))

    async def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls = [
            self._call(actor, method, *own)
            for actor, own in zip(self._actors, arguments, strict=True)
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failed = {at: one for at, one in enumerate(answers) if isinstance(one, BaseException)}
        if failed:
            each = "; ".join(f"worker {at}: {type(error).__name__}: {error}" for at, error in failed.items())
            raise PeerError(
                f"{len(failed)} of {len(self._actors)} inference workers failed in {method}: {each}"
            ) from next(iter(failed.values()))
        return answers


async def _call(actor: Any, method: str, *arguments: Any) -> Any:
    answer = getattr(actor, method)(*arguments)
    return await answer if inspect.isawaitable(answer) else answer
