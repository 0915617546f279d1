"""Checks that several classes make of their arguments, each with one text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from weightsync.errors import ModelError, SettingError


def choice(setting: str, value: object, *allowed: str) -> None:
    """Refuses a value that the setting cannot have."""
    if value not in allowed:
        expected = " or ".join(f'"{one}"' for one in allowed)
        raise SettingError(f"{setting}: expected {expected}, got {value!r}")


def seconds(setting: str, value: object) -> None:
    """Refuses what is no limit of a call."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not value > 0:  # type: ignore[operator]
        raise SettingError(f"{setting}: expected seconds, more than zero, got {value!r}")


def one_model(call: str, models: Iterable[str], instead: str) -> None:
    """Refuses a call for one model at an end of several."""
    models = list(models)
    if len(models) > 1:
        raise ModelError(
            f"{call} is for one model, and here there are {', '.join(models)}: use {instead}"
        )


def numbers(worker_ids: int | Iterable[int]) -> list[int]:
    """The numbers of one worker or of several."""
    if isinstance(worker_ids, Iterable) and not isinstance(worker_ids, str):
        return list(worker_ids)
    # The native module refuses a value that is no number.
    return [worker_ids]  # type: ignore[list-item]


def only_version(versions: Mapping[str, int]) -> int:
    """The version of the only model; 0 where there is none."""
    one_model("version", versions, "versions")
    return next(iter(versions.values()), 0)
