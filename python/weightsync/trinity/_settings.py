"""Trinity's ``synchronizer:`` block."""

from __future__ import annotations

import difflib
import importlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weightsync import _files
from weightsync.errors import SettingError, UnsupportedError

logger = logging.getLogger("weightsync")


@dataclass(frozen=True)
class Settings:
    """What Trinity's ``synchronizer:`` block says, as arguments of :class:`weightsync.Synchronizer`."""

    #: For ``Synchronizer.local(**settings.local)``.
    local: dict[str, Any]
    #: For ``sync.trainer(model, **settings.trainer)``; the method ``"checkpoint"`` also needs ``store=``.
    trainer: dict[str, Any]
    #: For ``sync.explorer("e0", model, **settings.explorer)``.
    explorer: dict[str, Any]
    #: For each ``sync(step, timeout=settings.timeout)``, in seconds.
    timeout: float


_METHODS = {name: name for name in ("nccl", "memory", "checkpoint")}
_METHODS |= {"online": "nccl", "offline": "checkpoint"}
_STYLES = {name: name for name in ("fixed", "explorer_driven", "trainer_driven", "fully_async")}
_STYLES |= {"dynamic_by_explorer": "explorer_driven", "dynamic_by_trainer": "trainer_driven"}
_NUMBERS = {
    "sync_interval": 1,
    "sync_offset": 0,
    "sync_timeout": 1,
    "explorer_sync_interval": 1,
    "trainer_sync_interval": 1,
}
_WORDS = {"sync_method": _METHODS, "sync_style": _STYLES}
# Of Trinity's own process group and actors.
# No configuration has more bytes.
_LONGEST = 16 << 20

_NOT_HERE = ("group_name", "wait_for_checkpoint", "explorer_world_size", "ray_namespace")


def settings_of(block: Mapping[str, Any] | str | os.PathLike[str]) -> Settings:
    """Reads Trinity's ``synchronizer:`` block: a mapping, or the path of a YAML file.

    Either is the block, or the whole configuration that has it.

    Raises:
        SettingError: naming the key or the value, and the one that was probably meant.
    """
    read: Any = block if isinstance(block, Mapping) else _yaml(block)
    if isinstance(read, Mapping) and "synchronizer" in read:
        read = read["synchronizer"] or {}
    if not isinstance(read, Mapping):
        raise SettingError(f"synchronizer: expected keys and values, got {read!r}")
    known = [*_WORDS, *_NUMBERS, *_NOT_HERE]
    for key in read:
        if key not in known:
            raise SettingError(f"synchronizer.{key} is no setting; {_nearest(str(key), known)}")

    def word(key: str, default: str) -> str:
        value = read.get(key)
        text = str(default if value is None else getattr(value, "value", value)).lower()
        if text not in _WORDS[key]:
            raise SettingError(f"synchronizer.{key}: {text!r} is unknown; {_nearest(text, _WORDS[key])}")
        return _WORDS[key][text]

    def number(key: str, default: int) -> int:
        value, least = read.get(key), _NUMBERS[key]
        if value is None:
            return default
        if type(value) is not int or value < least:
            raise SettingError(f"synchronizer.{key}: expected {least} or more, got {value!r}")
        return value

    interval, offset = number("sync_interval", 1), number("sync_offset", 0)
    of = {"style": word("sync_style", "fixed")}
    method = {"method": word("sync_method", "nccl")}
    ahead = {"offset": offset} if of["style"] == "fixed" else {}
    if offset and not ahead:
        logger.warning("synchronizer.sync_offset: the style %s has no offset", of["style"])
    intervals = {
        party: {"interval": number(f"{party}_sync_interval", interval)}
        for party in ("trainer", "explorer")
    }
    return Settings(
        local=method | of | ahead | {"interval": interval},
        trainer=method | of | ahead | intervals["trainer"],
        explorer=of | ahead | intervals["explorer"],
        timeout=float(number("sync_timeout", 3600)),
    )


def _yaml(path: str | os.PathLike[str]) -> Any:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError:
        raise UnsupportedError(
            f"reading {os.fspath(path)} needs PyYAML: pip install pyyaml, or pass the block as a dict"
        ) from None
    try:
        return yaml.safe_load(_files.read(path, _LONGEST).decode())
    except yaml.YAMLError as error:
        raise SettingError(f"{os.fspath(path)}: {error}") from None


def _nearest(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, list(known), 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
