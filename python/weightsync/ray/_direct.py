"""A transport of Ray's direct transport: tensors of an object go by weightsync."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import torch
from ray.experimental import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
    register_tensor_transport,
)
from ray.experimental.rdt.util import transport_manager_info

from weightsync._view import View
from weightsync.errors import DeadlineError, PeerError, UnsupportedError
from weightsync.ray import _cluster
from weightsync.ray._group import check_reach
from weightsync.receiver import Receiver
from weightsync.scheme import Distributed
from weightsync.sender import Sender

#: The transport, as ``tensor_transport=`` and ``ray.put(…, _tensor_transport=…)`` name it.
NAME = "WEIGHTSYNC"


#: The seconds in which the process that made an object answers. Ray's own limit is longer.
LIMIT = 20.0
#: The bytes a second that a network is slow with: the tensors come within the wait, too.
_SLOW = 50e6


def register() -> None:
    """Adds the transport, once for each process.

    Call it before the actors' classes are written and their actors made: Ray passes custom
    transports on to an actor when it makes it, and not when it restarts it. An actor with
    ``max_restarts`` calls it in its ``__init__`` too.
    """
    if NAME not in transport_manager_info:
        register_tensor_transport(NAME, ["cpu"], Transport, torch.Tensor)


@dataclass
class Published(TensorTransportMetadata):
    """Where the tensors of an object are; without an init info there are none."""

    info: str = ""
    address: str = ""
    #: Whether readers on other hosts reach them.
    is_open: bool = False


class Transport(TensorTransportManager):
    """Tensors of an object are a version, which its readers on the same host map without a copy."""

    def __init__(self) -> None:
        self._senders: dict[str, Sender] = {}

    def tensor_transport_backend(self) -> str:
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> Published:
        published = Published([(one.shape, one.dtype) for one in rdt_object], "cpu")
        if rdt_object:
            tensors = {str(at): one.detach() for at, one in enumerate(rdt_object)}
            scheme = _cluster.listening(Distributed(pull=True))
            sender = Sender(tensors, scheme=scheme)
            sender.connect(0)
            self._senders[obj_id] = sender
            published.info = sender.init_info.to_json()
            published.address, published.is_open = _cluster.address(), scheme.listen is not None
        return published

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        source = tensor_transport_metadata
        if not source.info:
            return []
        check_reach("the process that made this object", source.address, source.is_open)
        # No two readers have the same number, and nobody deals numbers out.
        size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in source.tensor_meta)
        limit = LIMIT + size / _SLOW
        with Receiver(source.info, int.from_bytes(os.urandom(4))) as receiver:
            try:
                receiver.connect(timeout=limit)
            except DeadlineError as error:
                raise PeerError(
                    f"the process that made this object, on {source.address}, did not bring its "
                    f"tensors within {limit:.0f} s: it is gone, or the network is slow"
                ) from error
            snapshot = receiver.latest()
        assert snapshot is not None
        # What a reader writes is its own, so no warning is due.
        view = View(snapshot._native, quiet=True)
        tensors = [view.tensor(str(at)) for at in range(len(source.tensor_meta))]
        for buffer, tensor in zip(target_buffers or (), tensors, strict=False):
            buffer.copy_(tensor)
        return target_buffers or tensors

    def send_multiple_tensors(
        self, tensors: list[Any], tensor_transport_metadata: Any, communicator_metadata: Any
    ) -> None:
        raise UnsupportedError("a one-sided transport sends nothing: its readers fetch")

    def garbage_collect(
        self, obj_id: str, tensor_transport_meta: Any, tensors: list[Any]
    ) -> None:
        sender = self._senders.pop(obj_id, None)
        if sender is not None:
            sender.shutdown()

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        pass
