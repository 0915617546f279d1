"""The sources of a scheme: the arguments in which TorchRL passes them, and collectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from weightsync import _paths
from weightsync.errors import ModelError, SettingError, WrongTypeError


def check(
    scheme: str,
    sources: dict[str, Any],
    *,
    model_id: str | None,
    devices: Any,
    device_map_fn: Any,
    num_workers: int | None,
) -> None:
    """Checks that ``init_on_sender`` was called in one of TorchRL's forms, and no mixture.

    Args:
        scheme: the scheme's name, for errors.
        sources: ``params_map``, ``context``, ``model`` and ``weights``; one of them is given.

    Raises:
        SettingError: naming the arguments that are missing, or too many.
        WrongTypeError: if the model is no torch module.
    """
    given = [name for name, value in sources.items() if value is not None]
    if hasattr(sources["context"], "remote_collectors") and len(given) > 1:
        raise SettingError(f"RayCollector takes RayWeightSyncScheme, not {scheme}")
    if len(given) != 1:
        raise SettingError(
            f"init_on_sender: expected one of {', '.join(sources)}, got "
            f"{' and '.join(given) or 'none'}"
        )
    also = {"devices": devices, "device_map_fn": device_map_fn}
    too_much = [name for name, value in also.items() if value is not None]
    source = sources[given[0]]
    if given[0] == "params_map":
        if not by_worker(source):
            raise SettingError("params_map: expected a dict of weights by worker number, not empty")
        if too_much or num_workers is not None:
            raise SettingError(
                "params_map names the workers: leave out devices, device_map_fn and num_workers"
            )
    elif given[0] == "context":
        if model_id is None:
            raise SettingError("a context needs the model_id to look up in it")
        if too_much:
            raise SettingError(f"the context has the devices: leave out {' and '.join(too_much)}")
    elif given[0] == "model" and not isinstance(source, nn.Module):
        raise WrongTypeError(f"{scheme} sends torch modules, not {type(source).__name__}")
    elif len(too_much) == 2:
        raise SettingError("give devices or device_map_fn, not both")
    elif device_map_fn is not None and num_workers is None:
        raise SettingError("device_map_fn needs num_workers")
    elif not too_much and num_workers is None:
        raise SettingError("the number of workers is unknown: pass devices or num_workers")


def model_of(context: Any, name: str) -> Any:
    """A model of a collector or another context; None if there is no policy."""
    if name == "policy" and not hasattr(context, "policy") and hasattr(context, "get_model"):
        return context.get_model(name)
    if name == "policy":
        fallback = getattr(context, "_fallback_policy", None)
        return fallback if fallback is not None else getattr(context, "policy", None)
    return _paths.resolve(context, name)


def model_here(context: Any, name: str) -> Any:
    """A model that the trainer's collector or context is to have.

    Raises:
        ModelError: if it does not.
    """
    try:
        return model_of(context, name)
    except ModelError as error:
        raise ModelError(
            f"{error}: this process needs the model, because a send reads its weights here, and a "
            f"{type(context).__name__} may have its environments in the workers alone. For a "
            "MultiCollector call init_on_sender(model=…, devices=…) of this scheme first"
        ) from error


def devices_of(context: Any) -> list[Any]:
    """The device of each of a collector's workers."""
    devices = getattr(context, "policy_device", None)
    if isinstance(devices, (list, tuple)):
        return list(devices)
    workers = getattr(context, "num_workers", None)
    if isinstance(workers, int):
        return [devices] * workers
    raise SettingError(
        f"a {type(context).__name__} does not say how many workers there are: the context needs "
        "policy_device (a list) or num_workers"
    )


def is_on(own: Any, device: torch.device) -> bool:
    """Whether a worker's device matches another, which may have no index and match them all."""
    own = torch.device("cpu" if own is None else own)
    same = own.type == device.type
    return same and (device.index is None or (own.index or 0) == device.index)


def device_of(given: Any) -> torch.device:
    """A device of ``worker_ids``.

    Raises:
        SettingError: if it is none.
    """
    try:
        return torch.device(given)
    except (RuntimeError, TypeError):
        raise SettingError(
            f"worker_ids: expected numbers of workers, or their devices such as 'cuda:0', got {given!r}"
        ) from None


def by_worker(weights: Any) -> bool:
    """Whether these are weights by worker number, ``{0: …, 1: …}``."""
    is_dict = isinstance(weights, dict) and bool(weights)
    return is_dict and all(isinstance(key, int) for key in weights)


def unknown_worker(worker: Any, known: Iterable[Any]) -> SettingError:
    """The error for a worker that does not exist."""
    # The text "1" is not the number.
    said = repr(worker) if isinstance(worker, str) else worker
    return SettingError(
        f"there is no worker {said}; there is {', '.join(map(str, known)) or 'none'}"
    )


def refusing(name: str) -> Callable[[], Any]:
    """A source that refuses: this process does not have the model."""
    def current() -> Any:
        raise ModelError(
            f"{name!r} has other weights for each worker: pass the weights, or a dict by worker"
        )

    return current


def initial_only(
    first: Any, name: str, whose: str = "is made by a factory in each worker"
) -> Callable[[], Any]:
    """A source of initial weights, which refuses once they have been sent.

    Args:
        whose: where the model is, for the error; by default a factory makes it.
    """
    held = [first]

    def current() -> Any:
        if not held:
            raise ModelError(
                f"{name!r} {whose}, and this process has none: pass the weights"
            )
        return held[0]

    current.spent = held.clear  # type: ignore[attr-defined]
    return current
