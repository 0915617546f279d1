"""Checks that several classes make of their arguments, each with one text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from typing import TypeVar

from weightsync.errors import ModelError, OperatingSystemError, SettingError

_T = TypeVar("_T")


def choice(setting: str, value: object, *allowed: str) -> None:
    """Refuses a value that the setting cannot have."""
    if value not in allowed:
        expected = " or ".join(f'"{one}"' for one in allowed)
        raise SettingError(f"{setting}: expected {expected}, got {value!r}")


def absolute(path: str | os.PathLike[str]) -> str:
    """The path, for processes that work in other directories."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError as error:
        raise OperatingSystemError(
            f"{os.fspath(path)!r} leads nowhere, as this process's working directory was removed: "
            "give an absolute path, or change to another directory"
        ) from error


def text(setting: str, value: _T) -> _T:
    """Refuses text that other processes cannot read: what Python makes of a file's name whose bytes are
    not UTF-8."""
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise SettingError(
                f"{setting}: expected text that is UTF-8, got {ascii(value)}, which has other bytes: "
                "use another name"
            ) from error
    return value


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
