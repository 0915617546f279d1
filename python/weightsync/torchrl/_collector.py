"""TorchRL's collectors: their models, and the few calls of theirs that schemes replace."""

from __future__ import annotations

import sys
import threading
import weakref
from functools import cache
from typing import Any

import torch
from torch import nn
from torchrl.weight_update import WeightStrategy

from weightsync import _paths
from weightsync._guard import hide_from_compiler
from weightsync._source import tree
from weightsync.errors import LifecycleError, MissingModelError, ModelError, WrongWeightsError
from weightsync.torchrl._given import by_worker


def is_single(context: Any) -> bool:
    """Whether it is a collector whose policy is in this process."""
    from torchrl.collectors import Collector

    return isinstance(context, Collector)


def first_worker(context: Any) -> int:
    """The number of a collector's first worker: its rank, where rank 0 is the trainer."""
    ranked = ("DistributedCollector", "DistributedSyncCollector")
    bases = [one for one in type(context).__mro__ if one.__module__.startswith("torchrl.")]
    return int(any(one.__name__ in ranked for one in bases))


def apply_here(context: Any, model_id: str | None, weights: Any, strategy: WeightStrategy) -> None:
    """Applies weights to a model of a collector in this process: all tensors, or none."""
    name = model_id or "policy"
    if name == "policy":
        models = [getattr(context, own, None) for own in ("policy", "_policy_w_state_dict")]
        if weights is None:
            weights = getattr(context, "_orig_policy", None)
    else:
        models = [_paths.resolve(context, name)]
    for model in {id(one): one for one in models if isinstance(one, nn.Module)}.values():
        if weights is not None and weights is not model:
            extracted = strategy.extract_weights(weights)
            compare(strategy.extract_weights(model), extracted, name)
            strategy.apply_weights(model, extracted)


def compare(own: Any, came: Any, name: str) -> None:
    """Refuses weights that do not fit, before any tensor changes.

    Raises:
        WrongWeightsError: naming the tensors.
    """

    def specs(weights: Any) -> dict[str, tuple[int, ...]]:
        found, _ = tree(weights)
        return {tensor: tuple(value.shape) for tensor, value, _ in found}

    expected, got = specs(own), specs(came)
    wrong = [f"{one} is missing" for one in expected if one not in got]
    wrong += [f"{one} is unknown" for one in got if one not in expected]
    wrong += [
        f"{one} has shape {list(got[one])}, expected {list(shape)}"
        for one, shape in expected.items()
        if one in got and got[one] != shape
    ]
    if wrong:
        some = "; ".join(wrong[:5]) + ("; …" if len(wrong) > 5 else "")
        raise WrongWeightsError(f"these are not the weights of {name}: {some}")


def flip_together(collector: Any) -> None:
    """Makes a collector send several models' weights as one update, and check their names first.

    TorchRL sends the models one by one: a worker runs a pair that does not belong together,
    and an unknown name is found after other models were sent. It also leaves its schemes open
    when it shuts down. This collector object gets a subclass of its class that does neither.
    """
    collector.__class__ = _together(type(collector))


@cache
def _together(base: type) -> type:
    """A subclass of a collector's class: models flip together, and schemes end with it."""
    if hasattr(base, "_weightsync"):
        return base

    class Together(base):  # type: ignore[misc, valid-type]
        _weightsync = True
        _weightsync_has_ended = False

        def _weight_update_impl(
            self,
            policy_or_weights: Any = None,
            *,
            worker_ids: Any = None,
            model_id: str | None = None,
            weights_dict: dict[str, Any] | None = None,
            **kwargs: Any,
        ) -> Any:
            if self._weightsync_has_ended:
                raise LifecycleError("this collector has been shut down: it has no workers to update")
            schemes = self._weight_sync_schemes or {}
            mixed = weights_dict is not None and (
                policy_or_weights is not None or model_id is not None
            )
            if kwargs or mixed:
                return super()._weight_update_impl(
                    policy_or_weights=policy_or_weights,
                    worker_ids=worker_ids,
                    model_id=model_id,
                    weights_dict=weights_dict,
                    **kwargs,
                )
            wanted = {model_id or "policy": policy_or_weights}
            wanted = wanted if weights_dict is None else weights_dict
            unknown = [name for name in wanted if name not in schemes]
            if unknown:
                raise MissingModelError.among(unknown[0], schemes)
            # TorchRL's collector first does what it does before an update, as RayCollector
            # connects its workers. It then sends the models one by one, which only notes them.
            noted = _noting.models = {}
            try:
                super()._weight_update_impl(worker_ids=worker_ids, weights_dict=wanted)
            finally:
                _noting.models = None
            schemes = self._weight_sync_schemes or {}
            return send_set(schemes, noted, worker_ids) if noted else None

        def _send_weights_scheme(self, **given: Any) -> None:
            if _noting.models is None:
                super()._send_weights_scheme(**given)
            else:
                _noting.models[given["model_id"]] = given["processed_weights"]

        def shutdown(self, *args: Any, **kwargs: Any) -> Any:
            from weightsync.torchrl._native_scheme import NativeScheme

            self._weightsync_has_ended = True
            try:
                return super().shutdown(*args, **kwargs)
            finally:
                for scheme in (getattr(self, "_weight_sync_schemes", None) or {}).values():
                    if isinstance(scheme, NativeScheme):
                        scheme.shutdown()

    if hasattr(base, "_lazy_initialize_weight_sync"):
        setattr(Together, "_lazy_initialize_weight_sync", _connecting_once(base))
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Together, name, getattr(base, name))
    return Together


def _connecting_once(base: Any) -> Any:
    """RayCollector's first connection, which its next update does not make again if a worker failed.

    The other workers have joined, and go on. The first update raises what the worker failed by.
    """

    def connect(self: Any) -> None:
        try:
            base._lazy_initialize_weight_sync(self)
        except Exception:
            schemes = (self._weight_sync_schemes or {}).values()
            self._weight_sync_initialized = all(one.synchronized_on_sender for one in schemes)
            raise

    return connect


class _NotedModels(threading.local):
    """The weights by model of the update that this thread is about to send."""

    models: dict[str, Any] | None = None


_noting = _NotedModels()


def connecting_collector(scheme: Any) -> Any:
    """The collector that is calling a scheme's ``connect``, if that was initialised before."""
    frame = sys._getframe(1)
    for _ in range(8):
        frame = frame.f_back
        if frame is None:
            return None
        caller = frame.f_locals.get("self")
        schemes = getattr(caller, "_weight_sync_schemes", None)
        if isinstance(schemes, dict) and any(one is scheme for one in schemes.values()):
            return caller if hasattr(caller, "_weight_update_impl") else None
    return None


def send_set(schemes: dict[str, Any], wanted: dict[str, Any], worker_ids: Any) -> Any:
    """Sends weights of several models; each worker changes all of the models, or none."""
    from weightsync.torchrl._native_scheme import NativeScheme

    if len(wanted) == 1:
        name, weights = next(iter(wanted.items()))
        return schemes[name].send(weights=weights, worker_ids=worker_ids)
    groups = {id(getattr(schemes[name], "_group", None)) for name in wanted}
    first = schemes[next(iter(wanted))]
    if len(groups) > 1 or not isinstance(first, NativeScheme) or first._group is None:
        kinds = ", ".join(f"{name}: {type(schemes[name]).__name__}" for name in wanted)
        raise ModelError(
            f"these models cannot change together ({kinds}): use one kind of scheme for them, or "
            "update them one by one"
        )
    for name, weights in wanted.items():
        if name in first._group._each or by_worker(weights):
            raise ModelError(
                f"{name!r} has other weights for each worker: update this model alone"
            )
    given = {
        name: None if weights is None else schemes[name]._extracted(weights)
        for name, weights in wanted.items()
    }
    group, chosen = first._connected("send"), first._workers(worker_ids)
    return None if chosen == [] else group.send(given, chosen, first._wait())


def bump_at_next_forward(collector: Any, module: Any, version: int) -> None:
    """Increments the policy's version before its next forward.

    The frame of a step that is running is of the weights before. A version that the worker
    goes back from before the next forward does not count.
    """
    if not isinstance(module, nn.Module):
        collector.increment_version()
        return
    bumps = getattr(collector, "_weightsync_bumps", None)
    if bumps is None:
        collector._weightsync_bumps = bumps = _Bumps(collector)
    bumps.follow(module)
    bumps.applied(version)


class _Bumps:
    """Versions that were applied since the policy's last forward."""

    def __init__(self, collector: Any = None) -> None:
        self._collector = None if collector is None else weakref.ref(collector)
        self._versions: list[int] = []
        self._module: weakref.ref[Any] | None = None
        self._handle: Any = None

    def follow(self, module: Any) -> None:
        """Moves the hook to this module, which is the policy from here on."""
        if self._module is not None and self._module() is module:
            return
        if self._handle is not None:
            self._handle.remove()
        self._module = weakref.ref(module)
        # After the guard's hook: every version that was applied until then counts.
        self._handle = module.register_forward_pre_hook(self.before)
        hide_from_compiler(_Bumps.before)

    def applied(self, version: int) -> None:
        """Adds a version; a lower one replaces those that are newer."""
        if self._versions and version < self._versions[-1]:
            self._versions = [one for one in self._versions if one <= version]
        else:
            self._versions.append(version)

    def before(self, module: Any, args: Any) -> None:
        """The hook: reports the versions to the collector as the policy's forward begins."""
        if torch.compiler.is_compiling():
            return
        collector = self._collector and self._collector()
        while collector is not None and self._versions:
            self._versions.pop()
            collector.increment_version()

    # The hook is copied with its module. The copy is another policy, and not the collector's.
    def __deepcopy__(self, memo: Any) -> _Bumps:
        return _Bumps()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Bumps, ()
