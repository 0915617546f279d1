"""What schemes need of TorchRL's collectors, and the little they change about them."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torchrl.weight_update import WeightStrategy

from weightsync.errors import ModelError


def is_single(context: Any) -> bool:
    """Whether it is a collector whose policy is in this process."""
    from torchrl.collectors import Collector

    return isinstance(context, Collector)


def apply_here(context: Any, model_id: str | None, weights: Any, strategy: WeightStrategy) -> None:
    """Gives weights to a model of a collector in this process, inline."""
    name = model_id or "policy"
    models = [getattr(context, name, None)] if name == "policy" else []
    if name == "policy":
        models.append(getattr(context, "_policy_w_state_dict", None))
        if weights is None:
            weights = getattr(context, "_orig_policy", None)
    else:
        from weightsync import _paths

        models.append(_paths.resolve(context, name))
    for model in {id(one): one for one in models if isinstance(one, nn.Module)}.values():
        if weights is not None and weights is not model:
            strategy.apply_weights(model, strategy.extract_weights(weights))


def flip_together(collector: Any) -> None:
    """Lets a collector send several models' weights as one update, and check them first.

    TorchRL sends them one after the other, so that a worker runs two of them that do not
    belong together, and an unknown name is found after others were sent. Here this
    collector's way is replaced by one that sends a set; it returns the report.
    """
    if "_weight_update_impl" in vars(collector) or not hasattr(collector, "_weight_update_impl"):
        return
    found = weakref.ref(collector)
    upstream = type(collector)._weight_update_impl

    def update(
        policy_or_weights: Any = None,
        *,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights_dict: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        here = found()
        assert here is not None
        schemes = here._weight_sync_schemes or {}
        plain = not kwargs and (weights_dict is None or policy_or_weights is None)
        if not plain or (weights_dict is not None and model_id is not None):
            return upstream(
                here,
                policy_or_weights=policy_or_weights,
                worker_ids=worker_ids,
                model_id=model_id,
                weights_dict=weights_dict,
                **kwargs,
            )
        wanted = {model_id or "policy": policy_or_weights} if weights_dict is None else weights_dict
        unknown = [name for name in wanted if name not in schemes]
        if unknown:
            raise KeyError(
                f"Model '{unknown[0]}' not found in registered weight sync schemes. "
                f"Available models: {list(schemes)}"
            )
        return send_set(schemes, wanted, worker_ids)

    collector._weight_update_impl = update
    _shut_down_together(collector)


def _shut_down_together(collector: Any) -> None:
    """Ends this package's schemes with their collector: TorchRL leaves that to the collector of
    garbage, and what is open stays so until then."""
    from weightsync.torchrl._schemes import _LocalScheme

    found = weakref.ref(collector)
    upstream = type(collector).shutdown

    def shutdown(*args: Any, **kwargs: Any) -> Any:
        here = found()
        assert here is not None
        try:
            return upstream(here, *args, **kwargs)
        finally:
            for scheme in (here._weight_sync_schemes or {}).values():
                if isinstance(scheme, _LocalScheme):
                    scheme.shutdown()

    collector.shutdown = shutdown


def send_set(schemes: dict[str, Any], wanted: dict[str, Any], worker_ids: Any) -> Any:
    """Sends weights of several models so that each worker runs all of them or none."""
    from weightsync.torchrl._schemes import _LocalScheme

    if len(wanted) == 1:
        name, weights = next(iter(wanted.items()))
        return schemes[name].send(weights=weights, worker_ids=worker_ids)
    groups = {id(getattr(schemes[name], "_group", None)) for name in wanted}
    first = schemes[next(iter(wanted))]
    if len(groups) > 1 or not isinstance(first, _LocalScheme) or first._group is None:
        kinds = ", ".join(f"{name}: {type(schemes[name]).__name__}" for name in wanted)
        raise ModelError(
            f"these models cannot flip together ({kinds}): use one kind of scheme for them, or "
            "update them one by one"
        )
    given = {
        name: None if weights is None else schemes[name]._extracted(weights)
        for name, weights in wanted.items()
    }
    group = first._connected("send")
    return group.send(given, first._workers(worker_ids), first._wait())


def bump_at_next_forward(collector: Any, module: Any) -> None:
    """Counts the policy's version up before its next forward.

    A step that is under way belongs to the weights before: its frame is stamped so.
    """
    if not isinstance(module, nn.Module):
        collector.increment_version()
        return
    pending = getattr(collector, "_weightsync_bumps", None)
    if pending is not None:
        pending.count += 1
        return
    collector._weightsync_bumps = pending = _Bumps(collector)
    pending.count = 1
    module.register_forward_pre_hook(pending, prepend=True)


class _Bumps:
    """Versions that were applied since the policy's last forward."""

    def __init__(self, collector: Any = None) -> None:
        self._collector = None if collector is None else weakref.ref(collector)
        self.count = 0

    def __call__(self, module: Any, args: Any) -> None:
        collector = self._collector and self._collector()
        while collector is not None and self.count:
            self.count -= 1
            collector.increment_version()

    def __deepcopy__(self, memo: Any) -> _Bumps:
        return _Bumps()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _Bumps, ()
