"""TorchRL's transports to Ray actors, and its older ends for a module in an actor."""

from __future__ import annotations

import queue
from typing import Any, Literal

from weightsync import _paths
from weightsync._checks import choice
from weightsync._deadline import Deadline
from weightsync.errors import DeadlineError, LifecycleError
from weightsync.ray import _cluster
from weightsync.ray._group import Group, Offer
from weightsync.scheme import Distributed
from weightsync.torchrl._network_transports import TIMEOUT, CalledTransport
from weightsync.torchrl._older import WeightReceiver, WeightSender
from weightsync.torchrl._transports import _QueueTransport
from weightsync.torchrl._updaters import _as_tensordict

# The seconds that a worker waits for news of a sender after the one that it could not join.
_NEWS = 1.0


class RayTransport(CalledTransport):
    """A transport to one Ray actor, with TorchRL's constructor.

    A send calls ``_receive_weights_scheme`` of the actor, as TorchRL's does. Without an actor the
    worker calls :meth:`receive_weights`. Ray carries an init info, and no weights.

    Args:
        remote_actor: the actor; on the sender.
        worker_idx: the worker's number.
        backend: accepted for TorchRL's sake: weights go by shared memory on the trainer's host, and over
            TCP to another.
        connection_info_name: the name under which the two ends meet.
        model_id: accepted for TorchRL's sake.
    """

    # Not pickled: the sender's.
    _actor: Any = None
    # The model of calls that pass none.
    _model: Any = None

    def __init__(
        self,
        *,
        remote_actor: Any = None,
        worker_idx: int | None = None,
        backend: str = "gloo",
        connection_info_name: str = "connection_info",
        model_id: str | None = None,
    ) -> None:
        number = 0 if worker_idx is None else worker_idx
        super().__init__({number: _Meeting(connection_info_name, number)}, TIMEOUT)
        self._actor = remote_actor

    def set_model(self, model: Any) -> None:
        """Sets the model that weights are applied to where a call passes none."""
        self._model = model

    def setup_connection_and_weights_on_receiver(
        self, *, worker_idx: int | None = None, **kwargs: Any
    ) -> Any:
        """Joins, and takes the initial weights; as this worker, if its number is given."""
        meeting = self._queues[self._rank()]
        if worker_idx is not None and worker_idx not in self._queues:
            self._queues = {worker_idx: _Meeting(meeting.name, worker_idx)}
        return super().setup_connection_and_weights_on_receiver(**kwargs)

    def _open(self, weights: Any) -> bool:
        meeting = self._queues[self._rank()]
        self._scheme = meeting.scheme = _cluster.listening(Distributed())
        return super()._open(weights)

    def _tell(self, info: str) -> None:
        # A group notices when its sender is dropped.
        _QueueTransport._tell(self, info)

    def _target(self, model: Any, strategy: Any) -> Any:
        return super()._target(self._model if model is None else model, strategy)

    def _begin_call(self) -> Any:
        return None if self._actor is None else self._actor._receive_weights_scheme.remote()

    def _end_call(self, call: Any) -> None:
        _cluster.running().get(call, timeout=self.timeout)

    def shutdown(self) -> None:
        """Shuts down the ends that this process has. Any number of times."""
        super().shutdown()
        for meeting in self._queues.values():
            meeting.leave()


class _Meeting:
    """Where a worker finds the init info of one sender, by the methods of a queue: a group of Ray's."""

    # The sender's; None in a worker.
    scheme: Distributed | None = None

    def __init__(self, name: str, number: int) -> None:
        self.name, self._number = name, number
        self._group: Group | None = None
        self._info = ""

    def put(self, text: str) -> None:
        self._info = text
        self._offer()

    def get(self, block: bool = True, timeout: float | None = None) -> str:
        until = Deadline(timeout if block else _NEWS)
        try:
            offer = self._joined().after(self._info, until)
        except DeadlineError as error:
            raise queue.Empty from error
        # This asks for the host's relay, too.
        self._joined().reach(offer)
        self._info = offer.info
        return offer.info

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.leave()

    def _joined(self) -> Group:
        if self._group is None:
            name = f"{self.name}/{self._number}"
            self._group = Group([name], self._offer, f"the transport {name!r}", "RayWeightSyncScheme")
        return self._group

    def _offer(self) -> None:
        if self.scheme is not None:
            self._joined().offer(Offer.of(self._info, self.scheme), TIMEOUT)

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "_number": self._number, "_group": None, "_info": ""}


class RayActorTransport:
    """TorchRL's older transport to an actor that has a module, such as that of ``RayModuleTransform``.

    The weights go by Ray's object store. A :class:`RayModuleTransformScheme` needs no store.

    Args:
        actor_ref: the actor.
        update_method: "tensordict" or "state_dict", the form that the actor takes.
        tensor_transport: "object_store", or a transport of Ray's tensors, such as "nixl".
    """

    def __init__(
        self,
        actor_ref: Any = None,
        update_method: Literal["tensordict", "state_dict"] = "tensordict",
        tensor_transport: str = "object_store",
    ) -> None:
        choice("update_method", update_method, "tensordict", "state_dict")
        self._actor = actor_ref
        self._form, self._way = update_method, tensor_transport
        self._call: Any = None

    def set_actor(self, actor_ref: Any) -> None:
        """Sets the actor."""
        self._actor = actor_ref

    def send_weights(self, *given: Any) -> None:
        """Sends weights, the last of the arguments, and waits until the actor has applied them."""
        self.send_weights_async(*given)
        self.wait_ack()

    def send_weights_async(self, *given: Any) -> None:
        """Sends weights, the last of the arguments; :meth:`wait_ack` waits until they are applied."""
        if self._actor is None:
            raise LifecycleError("there is no actor to send to: call set_actor first")
        ray, weights = _cluster.running(), _as_tensordict(given[-1])
        how = {} if self._way == "object_store" else {"_tensor_transport": self._way}
        if self._form == "state_dict":
            held = ray.put(weights.flatten_keys(".").to_dict(), **how)
            self._call = self._actor._update_weights_state_dict.remote(state_dict=held)
        else:
            held = ray.put(weights, **how)
            self._call = self._actor._update_weights_tensordict.remote(params=held)

    def wait_ack(self, timeout: float | None = None) -> None:
        """Waits until the last send is applied, and raises the actor's error."""
        call, self._call = self._call, None
        if call is None:
            raise LifecycleError("nothing was sent: call send_weights_async first")
        _cluster.running().get(call, timeout=TIMEOUT if timeout is None else timeout)

    def receive_weights(self, timeout: float | None = None, **_: Any) -> None:
        """Returns None: an actor is called with its weights."""
        return None

    def check_connection(self) -> bool:
        """Whether there are a cluster and an actor."""
        return self._actor is not None and bool(_cluster.ray().is_initialized())


class RayModuleTransformSender(WeightSender):
    """The sending half of TorchRL's older calls, for the module of a ``RayModuleTransform``."""

    def __init__(self, scheme: Any) -> None:
        super().__init__(scheme)
        self._transport = RayActorTransport(update_method=scheme.strategy_str)

    def register_model(self, weights: Any) -> None:
        """Does nothing: the actor has its model."""

    def register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        """Sets the actor, by its handle or its transform."""
        self._transport.set_actor(getattr(pipe_or_context, "_actor", pipe_or_context))

    def update_weights(
        self, weights: Any = None, worker_ids: Any = None, timeout: float | None = TIMEOUT
    ) -> None:
        """Sends weights, and waits until the actor has applied them."""
        self.update_weights_async(weights)
        self.wait_async(timeout)

    def update_weights_async(self, weights: Any = None, worker_ids: Any = None) -> None:
        """As :meth:`update_weights`, but returns at once."""
        if self._transport._actor is None and self._context is not None:
            self.register_worker(0, _paths.resolve(self._context, self._model_id))
        self._transport.send_weights_async(weights)

    def wait_async(self, timeout: float | None = TIMEOUT) -> None:
        """Waits for the last send."""
        self._transport.wait_ack(timeout)


class RayModuleTransformReceiver(WeightReceiver):
    """The receiving half of TorchRL's older calls, in the actor of a ``RayModuleTransform``."""

    def register_worker_transport(self, pipe: Any) -> None:
        """Does nothing: the actor is called with its weights."""

    def receive(self, timeout: float | None = None) -> bool:
        """Returns False: the actor is called with its weights, and :meth:`apply_weights` applies them."""
        return False
