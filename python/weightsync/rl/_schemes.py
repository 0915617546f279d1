"""Schemes that a collector was given, as this package's engine knows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightsync.errors import SettingError, UnsupportedError
from weightsync.rl._base import has_weights
from weightsync.scheme import Scheme

#: TorchRL's schemes by the names of their classes, and what they are here. Those of this package have
#: the engine's scheme themselves.
_OF_TORCHRL = {
    "SharedMemWeightSyncScheme": "shared-mem",
    "MultiProcessWeightSyncScheme": "multi-process",
    "NoWeightSyncScheme": "none",
}


def engine_scheme(schemes: Mapping[str, Any]) -> tuple[Scheme | str, bool]:
    """The scheme of all models, as those that change together have one, and whether sends wait."""
    by_text = {str(one): one for one in map(_engine_scheme, schemes.values())}
    if len(by_text) > 1:
        raise SettingError(
            f"weight_sync_schemes: the models change together, so they have one scheme; got "
            f"{', '.join(by_text)}"
        )
    waits = all(getattr(one, "sync", True) for one in schemes.values())
    return next(iter(by_text.values()), "shared-mem"), waits


def _engine_scheme(scheme: Any) -> Scheme | str:
    if isinstance(scheme, (Scheme, str)):
        return scheme
    kinds = {kind.__name__: kind.__module__.split(".")[0] for kind in type(scheme).__mro__}
    if kinds.get("NoWeightSyncScheme") in ("torchrl", "weightsync"):
        # That of this package has an engine's scheme for the first weights.
        return "none"
    if isinstance(own := getattr(scheme, "_scheme", None), Scheme):
        return own
    for name, word in _OF_TORCHRL.items():
        if kinds.get(name) == "torchrl":
            return word
    raise UnsupportedError(
        f"weight_sync_schemes: a {type(scheme).__name__} cannot be used in these workers: give "
        "SharedMemWeightSyncScheme or MultiProcessWeightSyncScheme, or a scheme of weightsync such as "
        '"shared-mem"'
    )


def given_models(
    policy: Any, models: Mapping[str, Any] | None, schemes: Mapping[str, Any]
) -> dict[str, Any]:
    """The models that are sent, by id."""
    sent = {"policy": policy} if has_weights(policy) else {}
    for name, scheme in schemes.items():
        # One that was initialised before has its own model.
        model = getattr(scheme, "_model", None) if getattr(scheme, "initialized_on_sender", False) else None
        if name not in sent and has_weights(model):
            sent[name] = model
    sent |= models or {}
    for name in schemes:
        if name not in sent and name != "policy":
            raise SettingError(
                f"weight_sync_schemes has {name!r}, and nothing says where its weights come from: "
                f"give models={{{name!r}: …}}"
            )
    return sent
