"""TorchRL's schemes over weightsync: the same names, arguments and calls."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from weightsync.errors import LifecycleError, SettingError, UnsupportedError
from weightsync.scheme import Distributed, MultiProcess, Rpc
from weightsync.torchrl import _torch_rpc
from weightsync.torchrl._given import model_of
from weightsync.torchrl._group import Group
from weightsync.torchrl._native_scheme import NativeScheme
from weightsync.torchrl._torch_rpc import CallGroup


class SharedMemWeightSyncScheme(NativeScheme):
    """Weights through shared memory: one copy, whatever the number of workers.

    A drop-in for TorchRL's. Workers read a whole version in place. They do not see the
    trainer's changes to its weights before it sends them.

    Args:
        strategy: "tensordict" or "state_dict".
        sync: whether ``send`` returns once every worker has applied the version, or as
            soon as it is live.
        per_worker_weights: accepted for TorchRL's sake; any worker can have its own.
        auto_register: for the older calls: whether the first ``update_weights`` of
            ``create_sender()`` registers the model.
        mode: "bind": a worker's parameters from 64 KiB on lie in the version itself, at
            another address each time; "copy": everything is copied, and they stay where
            they are.
        safe_points: "implied": a worker's weights change whenever no forward of the model is
            running; "declared": in its ``scheme.receive()`` and
            ``scheme.background.safe_point()`` only, for workers that train.
    """

    def __init__(
        self,
        strategy: str = "tensordict",
        sync: bool = True,
        per_worker_weights: bool = False,
        *,
        auto_register: bool = True,
        mode: Literal["bind", "copy"] = "bind",
        safe_points: Literal["implied", "declared"] = "implied",
    ) -> None:
        super().__init__(strategy, sync, mode=mode, safe_points=safe_points)
        self.per_worker_weights = per_worker_weights
        self.auto_register = auto_register


class MultiProcessWeightSyncScheme(NativeScheme):
    """Weights through a queue to each worker.

    A drop-in for TorchRL's, with the same arguments. A queue carries the version's number,
    and workers read the weights in place.

    Args:
        strategy: "tensordict" or "state_dict".
        sync: whether ``send`` waits until every worker has applied the version.
        mode, safe_points: as of :class:`SharedMemWeightSyncScheme`.
    """

    _scheme = MultiProcess()


class NoWeightSyncScheme(NativeScheme):
    """Sends no weights after the first.

    A collector gives its workers a policy without values. The workers get the initial
    values once, so that the same program runs.
    """

    def __init__(self, strategy: str = "tensordict", sync: bool = True) -> None:
        super().__init__(strategy, sync)

    def _group_in(self, context: Any) -> Group:
        return Group(self._scheme, "copy")

    def _init_on_sender_impl(
        self, *, model_id: str | None = None, context: Any = None, **kwargs: Any
    ) -> None:
        self._model_id = model_id or "policy"
        factories = getattr(context, "policy_factory", None) or []
        model = model_of(context, self._model_id) if context is not None else None
        has_weights = isinstance(model, nn.Module) and bool(model.state_dict())
        if has_weights and not any(factories):
            super()._init_on_sender_impl(model_id=model_id, context=context, **kwargs)
        else:
            self._group = None

    def _setup_connection_and_weights_on_sender_impl(self, **kwargs: Any) -> None:
        if self._group is not None:
            super()._setup_connection_and_weights_on_sender_impl(**kwargs)
            self._group.leave(self._model_id or "policy", sender=True)

    def send(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Sends nothing."""

    def _init_on_receiver_impl(self, *, model_id: str, **kwargs: Any) -> None:
        self._model_id = model_id
        if self._group is not None:
            super()._init_on_receiver_impl(model_id=model_id, **kwargs)

    def _setup_connection_and_weights_on_receiver_impl(self, **kwargs: Any) -> None:
        # The worker stays until the sender closes, which is when every worker has its weights.
        if self._group is not None:
            super()._setup_connection_and_weights_on_receiver_impl(**kwargs)

    def receive(self, timeout: float | None = None) -> None:
        """Returns None, since no weights are sent."""
        return None


class DistributedWeightSyncScheme(NativeScheme):
    """Weights to workers on any host: they dial in, over TCP.

    A drop-in for TorchRL's, without a process group, a store or a world size: workers
    join and leave at any time. On the trainer's own host they read its shared memory;
    on another host they read the memory of the host's relay (the command
    ``weightsync relay``, see ``docs/python.md``), or fetch for themselves.

    The scheme reaches a worker of another host pickled, once ``init_on_sender`` has been
    called; or the worker joins by the init info of :meth:`get_store_info`.

    There is no ``pull`` here: TorchRL's workers follow each send. For workers that ask for
    versions use a :class:`weightsync.Sender` with ``scheme=Distributed(pull=True)`` and
    :class:`weightsync.ModelReceiver`.

    Args:
        backend: "gloo" (or "tcp"): over TCP. There is no "nccl", "mpi" or "ucc" here.
        sync: whether ``send`` returns once every worker has applied the version, or as
            soon as it is live.
        timeout: accepted for TorchRL's sake; each wait here has its own timeout.
        strategy: "tensordict" or "state_dict".
        mode, safe_points: as of :class:`SharedMemWeightSyncScheme`.
        scheme: how weights travel, as a :class:`weightsync.Distributed`.
        settings: the arguments of :class:`weightsync.Distributed` by name, in place of ``scheme``.
        run_dir: a directory of this user; with it, workers find a restarted trainer.

    Raises:
        UnsupportedError: for a backend that is not here, and for ``pull``.
    """

    def __init__(
        self,
        backend: str = "gloo",
        sync: bool = True,
        timeout: float = 3600.0,
        *,
        strategy: str = "tensordict",
        mode: Literal["bind", "copy"] = "bind",
        safe_points: Literal["implied", "declared"] = "implied",
        scheme: Distributed | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(strategy, sync, mode=mode, safe_points=safe_points, run_dir=run_dir)
        self.backend = over_tcp(backend)
        self.timeout = timeout
        self._scheme = replace(scheme or Distributed(), **settings)
        if self._scheme.pull:
            raise UnsupportedError(
                "pull does not go with TorchRL's workers, which follow each send: leave it out, or use "
                "weightsync.Sender and weightsync.ModelReceiver"
            )

    def get_store_info(self) -> dict[str, Any]:
        """The trainer's host and port, and the init info as text, once the trainer is set up.

        A :class:`weightsync.ModelReceiver` joins by the init info.
        """
        info = self._group.info if self._group is not None else None
        if info is None:
            raise LifecycleError("call init_on_sender first: it decides where workers connect")
        address = json.loads(info)["at"]["address"]
        return {**_host_and_port(address), "init_info": info}


class RPCWeightSyncScheme(NativeScheme):
    """The trainer calls each worker; the worker fetches, checks, applies and answers.
    Nothing in the worker waits for weights.

    A drop-in for TorchRL's. In TorchRL's RPCCollector, and with ``workers`` of
    :meth:`init_on_sender`, the calls are those of ``torch.distributed.rpc``, and the
    weights go as with :class:`DistributedWeightSyncScheme`. Otherwise torch's RPC is not
    needed: the trainer calls an HTTP endpoint of the scheme's own.

    Args:
        strategy: "tensordict" or "state_dict".
        sync: whether ``send`` waits until every worker has applied the version.
        mode, safe_points: as of :class:`SharedMemWeightSyncScheme`. Calls of torch's RPC
            are safe points.
        initial: "send": the first weights come with the first send, as TorchRL has it;
            "connect": with the rendez-vous. The default is "connect" in a collector, whose
            workers begin to act before the first send, and with torch's RPC; otherwise "send".
        settings: the other arguments of :class:`weightsync.Rpc` by name.
        run_dir: a directory of this user; with it, workers find a restarted trainer.
    """

    def __init__(
        self,
        strategy: str = "tensordict",
        sync: bool = True,
        *,
        mode: Literal["bind", "copy"] = "bind",
        safe_points: Literal["implied", "declared"] = "implied",
        initial: Literal["send", "connect"] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(strategy, sync, mode=mode, safe_points=safe_points, run_dir=run_dir)
        self._initial = initial
        self._scheme: Rpc = Rpc(initial="send" if initial is None else initial, **settings)
        # torch RPC: what the workers know this scheme by, and the workers.
        self._key = uuid.uuid4().hex
        self._callees: list[Any] = []

    def _init_on_sender_impl(
        self,
        *,
        context: Any = None,
        workers: Sequence[Any] | None = None,
        num_workers: int | None = None,
        **kwargs: Any,
    ) -> None:
        """As TorchRL's.

        Args:
            context: a collector, or another object that has the models.
            workers: the workers' names in torch's RPC, or their ``WorkerInfo``, by number.
            num_workers: how many workers there are, if neither of the others says it.

        Raises:
            UnsupportedError: if the installed torch has no RPC, or for a setting that does
                not go with it.
            LifecycleError: if torch's RPC is not initialised in this process.
            SettingError: if ``workers`` are no names, or not ``num_workers``.
        """
        if workers is not None:
            _check_workers(workers, num_workers)
        infos = getattr(context, "collector_infos", None) if workers is None else workers
        self._callees = list(infos or [])
        if self._callees:
            _torch_rpc.require()
            if self._run_dir is not None or self._initial == "send":
                raise UnsupportedError(
                    "torch's RPC goes with neither run_dir nor initial='send': its processes "
                    "cannot take a restarted trainer in, and connect brings the first weights"
                )
            num_workers = len(self._callees)
        super()._init_on_sender_impl(context=context, num_workers=num_workers, **kwargs)

    def _group_in(self, context: Any) -> Group:
        if self._callees:
            return self._call_group()
        if context is not None and self._initial is None:
            self._scheme = replace(self._scheme, initial="connect")
        return super()._group_in(context)

    def _call_group(self) -> CallGroup:
        bulk = Distributed(
            listen=self._scheme.listen,
            advertise=self._scheme.advertise,
            tls=self._scheme.tls,
            insecure_plaintext=self._scheme.insecure_plaintext,
        )
        return CallGroup(bulk, self._mode, self._key, self._callees)

    def _init_on_receiver_impl(self, *, model_id: str, **kwargs: Any) -> None:
        if self._group is None and _torch_rpc.is_running():
            # RPCCollector makes its workers before it initialises the sender.
            self._group = self._call_group()
        super()._init_on_receiver_impl(model_id=model_id, **kwargs)

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        super()._setup_connection_and_weights_on_receiver_impl(worker_idx=worker_idx)
        if isinstance(self._group, CallGroup):
            assert self._worker_idx is not None
            _torch_rpc.wait_for_calls(self, self._key, self._worker_idx)

    def _join_by(self, state: dict[str, Any], timeout: float) -> None:
        """Joins by the trainer's first call."""
        assert isinstance(self._group, CallGroup) and self._worker_model is not None
        assert self._worker_idx is not None
        if self._group.join_by(state, self._worker_idx, timeout):
            self._seen = self._worker_model.count
            self._pass_on_first()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_callees": []}


def _check_workers(workers: Any, num_workers: int | None) -> None:
    is_list = isinstance(workers, Sequence) and not isinstance(workers, (str, bytes))
    if not is_list or not workers:
        raise SettingError(
            "workers: expected a list of the workers' names in torch's RPC, or of their "
            f"WorkerInfo, got {workers!r}. Without torch's RPC leave it out, and pass num_workers"
        )
    if num_workers not in (None, len(workers)):
        raise SettingError(
            f"num_workers: expected {len(workers)}, as many as workers, got {num_workers!r}"
        )


def over_tcp(backend: str) -> str:
    """Checks the name of a backend.

    Raises:
        UnsupportedError: for a backend that is not over TCP.
    """
    if backend not in _OVER_TCP:
        raise UnsupportedError(
            f"there is no backend {backend!r}: weights go over TCP here, by "
            f"backend={' or '.join(map(repr, _OVER_TCP))}, also those of models on a GPU, "
            "by way of the host's memory"
        )
    return backend


def _host_and_port(address: str) -> dict[str, Any]:
    """The parts of "host:port" or "[::1]:port"."""
    host, _, port = address.rpartition(":")
    return {"host": host.removeprefix("[").removesuffix("]"), "port": int(port)}


# TorchRL's name for its backend over TCP, and the protocol's.
_OVER_TCP = ("gloo", "tcp")
