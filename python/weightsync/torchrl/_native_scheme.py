"""The base of the schemes of all transports: the trainer's half, and a worker's."""

from __future__ import annotations

import contextlib
import operator
import os
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import nn

from weightsync import _ends, _paths
from weightsync._checks import choice
from weightsync._deadline import Deadline
from weightsync._native import Snapshot as NativeSnapshot
from weightsync._view import weights_of
from weightsync.errors import LifecycleError, ModelError, SettingError, WrongTypeError
from weightsync.scheme import Scheme, SharedMem
from weightsync.torchrl import _collector, _given, _older
from weightsync.torchrl._base import WeightSyncScheme
from weightsync.torchrl._formats import applies, extracts, formatted
from weightsync.torchrl._group import Group, WorkerModel
from weightsync.torchrl._transports import SchemeTransport


class NativeScheme(WeightSyncScheme):
    """A scheme of this package's engine. Workers follow it in a thread of their own.

    The weights of a worker's model change while its forward is not running. A send
    returns a report with a line for every worker. A worker that has died or refuses is
    also a warning of the logger ``weightsync``.
    """

    # The engine's scheme.
    _scheme: Scheme = SharedMem()

    def __init__(
        self,
        strategy: str = "tensordict",
        sync: bool = True,
        *,
        mode: Literal["bind", "copy"] = "bind",
        safe_points: Literal["implied", "declared"] = "implied",
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(strategy)
        choice("mode", mode, "bind", "copy")
        choice("safe_points", safe_points, "implied", "declared")
        self.sync = sync
        self._mode = mode
        self._safe_points = safe_points
        self._run_dir = None if run_dir is None else os.fspath(run_dir)
        self.per_worker_weights = False
        self.auto_register = True
        self._group: Group | None = None
        self._worker_model: WorkerModel | None = None
        self._seen = 0
        # The calls by which workers join, where the scheme has made them.
        self._calls: Any = None
        # Sends that its transports have not waited for, by worker.
        self._pending: dict[int | None, Any] = {}
        self._devices: list[Any] | None = None
        self._map: Callable[[int, Any], Any] | None = None
        # Whether the model is in this process, with a collector that has no workers.
        self._local = False
        # The number that the collector gives its first worker.
        self._first_worker = 0

    # The trainer's half.

    def init_on_sender(self, *args: Any, **kwargs: Any) -> None:
        """As TorchRL's; nothing is communicated.

        Raises:
            LifecycleError: if the workers have joined this scheme.
        """
        # Before anything changes: the scheme goes on as it was.
        if self.synchronized_on_sender and self._group is not None:
            raise LifecycleError(
                "init_on_sender: this scheme has its workers: call shutdown() first, or make "
                "another scheme"
            )
        super().init_on_sender(*args, **kwargs)

    def _init_on_sender_impl(
        self,
        *,
        model_id: str | None = None,
        context: Any = None,
        weights: Any = None,
        model: nn.Module | None = None,
        params_map: dict[int, Any] | None = None,
        devices: list[Any] | None = None,
        device_map_fn: Callable[[int, Any], Any] | None = None,
        num_workers: int | None = None,
        ctx: Any = None,
        **kwargs: Any,
    ) -> None:
        _given.check(
            type(self).__name__,
            {"params_map": params_map, "context": context, "model": model, "weights": weights},
            model_id=model_id,
            devices=devices,
            device_map_fn=device_map_fn,
            num_workers=num_workers,
        )
        self._local = context is not None and _collector.is_single(context)
        if self._local:
            self._model_id, self.context, self._group = model_id, context, None
            return
        self._model_id = name = model_id or "policy"
        self._devices = None
        each: Callable[[], dict[int, Any]] | None = None
        current: Callable[[], Any]
        if params_map is not None:
            workers = sorted(params_map)
            values = list(params_map.values())
            current = _given.refusing(name)
            if all(one is values[0] for one in values):
                current = lambda: values[0]  # noqa: E731
            else:
                each = lambda: params_map  # noqa: E731
        elif context is not None:
            self.context = context
            self._first_worker = _collector.first_worker(context)
            self._devices = list(_given.devices_of(context))
            workers = list(range(len(self._devices)))
            current, each = self._of_context(context, name)
        else:
            source = model if model is not None else weights
            current = lambda: source  # noqa: E731
            if device_map_fn is not None:
                workers = list(range(num_workers or 0))
                self._map = device_map_fn
                each = lambda: self._mapped(current(), workers)  # noqa: E731
            else:
                self._devices = list(devices or [])
                workers = list(range(num_workers or len(self._devices)))
        if each is not None:
            self.per_worker_weights = True
        self._group = self._group_in(context)
        self._group.add(name, self.strategy_str, workers, current, each)
        self._worker_model = None
        if context is not None:
            _collector.flip_together(context)

    def _group_in(self, context: Any) -> Group:
        """The group of the collector's schemes with the same settings, or a new one."""
        if context is None:
            return Group(*self._kind())
        schemes = getattr(context, "_weight_sync_schemes", None) or {}
        for other in schemes.values():
            group = getattr(other, "_group", None)
            alike = isinstance(other, NativeScheme) and other is not self
            if alike and group is not None and group.kind() == self._kind():
                if not group.is_connected:
                    return group
        return Group(*self._kind())

    def _kind(self) -> tuple[Scheme, str, str | None]:
        return self._scheme, self._mode, self._run_dir

    def _of_context(
        self, context: Any, name: str
    ) -> tuple[Callable[[], Any], Callable[[], dict[int, Any]] | None]:
        """The weights of a collector's model, looked up at each send."""
        model = _given.model_here(context, name)
        if model is None and name == "policy":
            factories = list(getattr(context, "policy_factory", None) or [])
            if factories and all(one is factories[0] for one in factories):
                return _given.initial_only(factories[0](), name), None
            if any(factories):
                policies = {at: make() for at, make in enumerate(factories) if make is not None}
                return _given.refusing(name), _given.initial_only(policies, name)
        if not isinstance(model, nn.Module):
            raise WrongTypeError(
                f"{type(self).__name__} sends torch modules, and the collector's {name!r} is "
                f"{type(model).__name__}: a policy without weights needs no scheme"
            )
        # Weak references: unused collectors and schemes are freed at once.
        found, own = weakref.ref(context), weakref.ref(self)

        def current() -> Any:
            here, scheme = found(), own()
            if here is None or scheme is None:
                raise ModelError(f"the collector of {name!r} is gone: pass the weights")
            return scheme._extracted(_given.model_of(here, name))

        return current, None

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        if self._local:
            return
        assert self._group is not None
        _ends.opened(self)
        context = self._calls if self.context is None else self.context
        if context is None:
            # The scheme was initialised before its collector was made.
            context = _collector.connecting_collector(self)
            if context is not None:
                _collector.flip_together(context)
        self._group.connect(self._model_id or "policy", weights, context)

    def send(
        self,
        weights: Any = None,
        worker_ids: int | Iterable[int] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Sends weights, and returns a :class:`weightsync.Report`.

        Args:
            weights: None for the registered model; a module, TensorDict, state dict or
                nested dict; a path of a model; or any of these by worker, ``{0: …, 1: …}``.
            worker_ids: the only workers that change, by number or by device. Without any
                nothing is sent, and there is no report.
            timeout: how long the send waits at most, in seconds; without it TorchRL's limit.
        """
        if self._local and self.initialized_on_sender:
            given = None if weights is None else self._extracted(weights)
            return _collector.apply_here(self.context, self._model_id, given, self._strategy)
        group = self._connected("send")
        name, wait = self._model_id or "policy", self._wait()
        chosen = self._workers(worker_ids)
        if chosen == []:
            # RPCCollector asks for this where no worker is due: no version is for nobody.
            return None
        each = None
        if _given.by_worker(weights):
            each = {
                self._known(worker): self._extracted(one)
                for worker, one in weights.items()
                if chosen is None or worker in chosen
            }
        elif weights is None and name in group._each:
            own = group._each[name]()
            each = own if chosen is None else {one: own[one] for one in own if one in chosen}
        elif self._map is not None:
            workers = group.worker_ids if chosen is None else chosen
            each = self._mapped(self._extracted(weights), workers)
        if each is not None:
            return group.send_each(name, each, wait, timeout) if each else None
        given = None if weights is None else self._extracted(weights)
        return group.send({name: given}, chosen, wait, timeout)

    def _mapped(self, weights: Any, workers: list[int]) -> dict[int, Any]:
        """Each worker's weights, as ``device_map_fn`` makes them."""
        assert self._map is not None
        if isinstance(weights, nn.Module):
            weights = TensorDict.from_module(weights).data
        return {worker: self._map(worker, weights) for worker in workers}

    def _wait(self) -> str:
        return "applied" if self.sync else "sent"

    def _workers(self, worker_ids: Any) -> list[int] | None:
        if worker_ids is None:
            return None
        if isinstance(worker_ids, (str, torch.device)) or hasattr(worker_ids, "__index__"):
            worker_ids = [worker_ids]
        workers: list[int] = []
        for one in worker_ids:
            if hasattr(one, "__index__"):
                workers.append(self._known(operator.index(one)))
                continue
            device = _given.device_of(one)
            found = [at for at, own in enumerate(self._devices or []) if _given.is_on(own, device)]
            if not found:
                raise SettingError(
                    f"no worker is on {device}; they are on "
                    f"{', '.join(str(own or 'cpu') for own in self._devices or []) or 'none'}"
                )
            workers.extend(found)
        return workers

    def _known(self, worker: int) -> int:
        assert self._group is not None
        known = self._group.worker_ids
        if worker not in known:
            raise _given.unknown_worker(worker, known)
        return worker

    def _extracted(self, source: Any) -> Any:
        """The weights of a source. A module is read in place, unless its strategy extracts."""
        if isinstance(source, str):
            if self.context is None:
                raise ModelError(f"the path {source!r} needs a context to start at")
            source = _paths.resolve(self.context, source)
        if source is None:
            raise ModelError(
                f"there are no weights of {self._model_id!r} in this process: pass them to send"
            )
        merges = self.strategy_str == "state_dict" and hasattr(source, "merge_and_unload")
        if merges or extracts(self._strategy):
            return self._strategy.extract_weights(source)
        return source

    def prepare_weights(
        self, weights: Any, model_id: str, strategy: Any, context: Any = None
    ) -> Any:
        """The weights that a send would send: the given ones, or the registered model's."""
        if weights is None and self._group is not None and model_id in self._group._weights:
            return strategy.extract_weights(self._group._weights[model_id]())
        return super().prepare_weights(weights, model_id, strategy, context)

    # A worker's half.

    def _init_on_receiver_impl(
        self,
        *,
        model_id: str,
        context: Any = None,
        model: Any = None,
        worker_idx: int | None = None,
        **kwargs: Any,
    ) -> None:
        if self._group is None or not self._group.in_this_process().can_join:
            raise LifecycleError(
                "this scheme knows no sender: call init_on_sender in the trainer, and then pass "
                "the scheme to the worker"
            )
        if context is not None:
            if worker_idx is None:
                worker_idx = getattr(context, "worker_idx", None)
            model = _given.model_of(context, model_id)
        if model is None and self._model_ref is not None:
            model = self._model_ref()
        self._model_id, self._model_ref = model_id, None
        self._worker_model = WorkerModel(model_id, self._mode)
        self._worker_model.loaded = self._loaded
        # This looks the strategy up at each load, since it may be replaced.
        self._worker_model.apply = self._applied_by_strategy
        if context is not None:
            self.context = context
        if model is not None:
            self.model = model
        self._worker_idx = None if worker_idx is None else worker_idx - self._first_worker

    @property
    def model(self) -> Any:
        """The worker's model. A new model in its place gets its weights."""
        return super().model

    @model.setter
    def model(self, model: Any) -> None:
        if model is None:
            self._model_ref = None
            return
        before = self._model_ref() if self._model_ref is not None else None
        try:
            self._model_ref = weakref.ref(model)
        except TypeError:
            return
        if self._worker_model is not None and model is not before:
            self._worker_model.replace(model)

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        assert self._group is not None and self._worker_model is not None
        if worker_idx is not None:
            self._worker_idx = worker_idx - self._first_worker
        if self._worker_idx is None:
            raise LifecycleError("a worker needs its number: connect(worker_idx=…)")
        _ends.opened(self)
        declared = self._safe_points == "declared"
        self._group.join(
            self._model_id or "policy", self._worker_idx, self._worker_model, declared
        )
        self._seen = self._worker_model.count
        self._pass_on_first()

    def _pass_on_first(self) -> None:
        """Sends this worker's first weights to sub-workers that have joined before it did."""
        schemes = getattr(self.context, "_weight_sync_schemes", None) or {}
        own = schemes.get(self._model_id)
        if self._worker_model is None or self._worker_model.weights() is None:
            return
        if isinstance(own, NativeScheme) and own.synchronized_on_sender:
            self._pass_on()

    @property
    def context(self) -> Any:
        """The collector, or another object that has the models, or None."""
        return super().context

    @context.setter
    def context(self, context: Any) -> None:
        self._context_ref = None if context is None else weakref.ref(context)
        if self.initialized_on_receiver and self.synchronized_on_receiver:
            self._pass_on_first()

    def receive(self, timeout: float | None = None) -> Any:
        """The weights that were applied since the last call, or None.

        The background receiver applies weights; this call only waits for them. With
        ``timeout=None`` it waits for the next version, until the sender ends; with shared
        memory it returns at once. With ``safe_points="declared"`` it is a safe point, and
        weights are applied in it.
        """
        if not self.initialized_on_receiver or not self.synchronized_on_receiver:
            raise LifecycleError("receive: call init_on_receiver and connect first")
        assert self._worker_model is not None and self._group is not None
        model, background = self._worker_model, self._group.background
        if self._safe_points == "declared" and background is not None:
            background.safe_point()
        waits = timeout is not None or not isinstance(self._scheme, SharedMem)
        if waits and timeout != 0 and background is not None:
            # Before the count: a version that arrives in between is newer than this. A trainer that
            # has started again numbers its versions from 1.
            run, version = background.run, model.version
            if model.count == self._seen:
                wanted = {self._model_id or "policy": version + 1}
                background._wait(wanted, Deadline(timeout), run)
        if model.count == self._seen:
            return None
        self._seen = model.count
        return self._formatted(model.weights())

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Applies the given weights to the worker's model, until the next version."""
        if not self.initialized_on_receiver:
            raise LifecycleError("apply_weights is a worker's call: call init_on_receiver there")
        if self.model is None:
            raise LifecycleError("there is no model to apply weights to")
        background = self._group.background if self._group is not None else None
        if background is None:
            self._strategy.apply_weights(self.model, weights, inplace=inplace)
            return
        with background:
            self._strategy.apply_weights(self.model, weights, inplace=inplace)

    def _loaded(self, snapshot: NativeSnapshot) -> None:
        """Called after each load: passes the version on, and stamps frames with it."""
        if self.context is None or self._worker_model is None or self._worker_model.count <= 1:
            return
        if not self._pass_on():
            context, group = self.context, self._group
            if hasattr(context, "increment_version"):
                if self._model_id == "policy" or "policy" not in group.models:
                    _collector.bump_at_next_forward(context, self.model, snapshot.version)
            elif hasattr(context, "update_policy_weights_"):
                context.update_policy_weights_(
                    model_id=self._model_id,
                    policy_or_weights=self._formatted(self._worker_model.weights()),
                )

    def _pass_on(self) -> bool:
        """Sends the model's weights to sub-workers, if the context has some.

        Raises:
            NotAppliedError: if a sub-worker has not applied it. The trainer's report then
                gives this error as the reason.
        """
        context = self.context
        schemes = getattr(context, "_weight_sync_schemes", None) or {}
        if not schemes:
            return False
        weights = self._worker_model.weights()
        scheme = schemes.get(self._model_id)
        if isinstance(scheme, NativeScheme):
            if scheme._takes_formats():
                weights = scheme._formatted(weights)
            # Otherwise dotted names, which can name the extra state of any module.
            report = _collector.send_set(schemes, {self._model_id: weights}, None)
            if report is not None and report.workers:
                report.ensure_applied()
        else:
            weights = self._formatted(weights)
            context.update_policy_weights_(model_id=self._model_id, policy_or_weights=weights)
        return True

    def _takes_formats(self) -> bool:
        """Whether weights pass through functions of the user before they are sent."""
        return extracts(self._strategy) or self._map is not None

    def _applied_by_strategy(self, snapshot: NativeSnapshot) -> bool:
        """Applies a version by the strategy if that overrides it; returns whether it did."""
        if not applies(self._strategy) or self.model is None:
            return False
        self._strategy.apply_weights(self.model, self._formatted(weights_of(snapshot)))
        return True

    def _formatted(self, weights: dict[str, Any] | None) -> Any:
        return None if weights is None else formatted(weights, self.strategy_str)

    # Both.

    @property
    def weights(self) -> Any:
        """The weights that a send would send, or, on a worker, its model's; or None."""
        if self.initialized_on_sender and self._group is not None:
            current = self._group._weights.get(self._model_id or "policy")
            try:
                return None if current is None else self._strategy.extract_weights(current())
            except ModelError:
                return None
        model = self._model_ref() if self._model_ref is not None else None
        return None if model is None else self._strategy.extract_weights(model)

    @property
    def background(self) -> Any:
        """A worker's :class:`weightsync.Background`; None before ``connect``."""
        return None if self._group is None else self._group.background

    def frozen(self) -> contextlib.AbstractContextManager[Any]:
        """Keeps a worker's model unchanged inside ``with scheme.frozen():``, in this thread.

        Code that reads weights outside any forward needs it.
        """
        background = self.background
        return contextlib.nullcontext() if background is None else background

    @property
    def sender_transports(self) -> dict[int, Any] | None:
        """A transport for each worker, by its number; on the sender."""
        if self._group is None or not self.initialized_on_sender:
            return None
        return {worker: SchemeTransport(self, worker) for worker in self._group.worker_ids}

    @property
    def receiver_transport(self) -> Any:
        """The worker's own transport."""
        if self._group is None or not self.initialized_on_receiver:
            return None
        return SchemeTransport(self)

    def create_transport(self, **kwargs: Any) -> Any:
        """A transport of this scheme, by TorchRL's protocol."""
        return SchemeTransport(self)

    def create_sender(self) -> Any:
        """The sending half of the older calls; see :class:`weightsync.torchrl.WeightSender`."""
        return _older.WeightSender(self, self.auto_register)

    def create_receiver(self) -> Any:
        """The receiving half of the older calls."""
        return _older.WeightReceiver(self)

    @property
    def version(self) -> int:
        """The version sent last, or, on a worker, the version that it runs."""
        group = self._group
        if group is None:
            return 0
        if group.background is not None:
            return group.background.versions.get(self._model_id or "policy", 0)
        if group.sender is not None and self.synchronized_on_sender:
            return group.sender.versions.get(self._model_id or "policy", 0)
        return 0

    @property
    def workers(self) -> Any:
        """Every connected worker with the versions it has loaded; on the sender."""
        return self._connected("workers").sender.workers

    def shutdown(self) -> None:
        """Shuts down this process's end. Any number of times."""
        group = getattr(self, "_group", None)
        if group is not None and self._is_own():
            name = self._model_id or "policy"
            if self.initialized_on_sender:
                group.leave(name, sender=True)
            elif self.initialized_on_receiver:
                group.leave(name, sender=False)
        _ends.closed(self)
        super().shutdown()
        # The scheme can be initialised again.
        self._initialized_on_sender = self._initialized_on_receiver = False
        self._synchronized_on_sender = self._synchronized_on_receiver = False

    def _connected(self, call: str) -> Group:
        if not self.initialized_on_sender:
            raise LifecycleError(f"{call}: call init_on_sender first, in the trainer")
        if not self.synchronized_on_sender or self._group is None:
            raise LifecycleError(f"{call}: call connect first")
        return self._group

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_weights", None)
        state["_worker_model"] = state["_devices"] = state["_map"] = None
        state["_pending"] = {}
        return state

    def __repr__(self) -> str:
        half = "sender" if self.initialized_on_sender else None
        half = "receiver" if self.initialized_on_receiver else half
        return f"<{type(self).__name__} of {self._model_id}: {half or 'not initialised'}>"
