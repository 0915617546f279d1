"""What receivers must know to join a sender: plain values that rank 0 of the trainer makes."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from weightsync._native import InitInfo
from weightsync.errors import SettingError


@dataclass
class WeightSyncInitInfo(ABC):
    """Data for the initialization alone.

    ``override_existing_receiver`` says whether an inference actor that has a receiver makes a
    new one in its place; without it the actor keeps the one it has.
    """

    override_existing_receiver: bool = False

    #: The word by which :func:`init_info_from_dict` knows the class.
    kind: ClassVar[str] = ""
    _kinds: ClassVar[dict[str, type[WeightSyncInitInfo]]] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        # Subclasses of a kind, as a third party makes them, name a kind of their own.
        if "kind" in cls.__dict__:
            WeightSyncInitInfo._kinds[cls.kind] = cls

    def __post_init__(self) -> None:
        _check(self, "override_existing_receiver", bool)

    def to_dict(self) -> dict[str, Any]:
        """Strings, numbers and booleans: it crosses any boundary."""
        return {"kind": self.kind, **asdict(self)}


def init_info_from_dict(data: Any) -> WeightSyncInitInfo:
    """What ``to_dict`` made, of any kind.

    Raises:
        SettingError: naming the field, what it must be, and what came.
    """
    if not isinstance(data, Mapping):
        raise SettingError(f"an init info is a dict, got a {type(data).__name__}")
    kind = data.get("kind")
    found = WeightSyncInitInfo._kinds.get(kind) if isinstance(kind, str) else None
    if found is None:
        known = ", ".join(sorted(WeightSyncInitInfo._kinds))
        raise SettingError(f"kind: expected one of {known}, got {kind!r}")
    given = {key: value for key, value in data.items() if key != "kind"}
    odd = set(given) ^ {one.name for one in fields(found)}
    if odd:
        first = sorted(map(str, odd))[0]
        problem = "has no such field" if first in given else "needs this field, got none"
        raise SettingError(f"{first}: an init info of kind {kind} {problem}")
    return found(**given)


@dataclass
class EmptyWeightSyncInitInfo(WeightSyncInitInfo):
    """For strategies whose receivers need nothing beforehand."""

    kind: ClassVar[str] = "empty"


@dataclass
class TorchDistributedWeightSyncInitInfo(WeightSyncInitInfo):
    """Where rank 0 of the trainer waits for receivers, to form a process group with them.

    ``world_size`` counts rank 0 of the trainer and all receivers; ``rank_offset`` is the rank of
    the first of them, 1 as it is made. ``total_bytes`` bounds what a receiver allocates for one
    sync; 0 where the trainer does not know.
    """

    master_addr: str = "127.0.0.1"
    master_port: int = 0
    rank_offset: int = 1
    world_size: int = 2
    group_name: str = "weightsync"
    backend: str = "gloo"
    total_bytes: int = 0
    kind: ClassVar[str] = "torch_distributed"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("master_addr", "group_name", "backend"):
            _check(self, name, str)
        for name, least, most in (
            ("master_port", 0, 65535),
            ("rank_offset", 1, 1 << 20),
            ("world_size", 2, 1 << 20),
            ("total_bytes", 0, 1 << 62),
        ):
            _check(self, name, int)
            if not least <= getattr(self, name) <= most:
                got = getattr(self, name)
                raise SettingError(f"{name}: expected {least} to {most}, got {got}")
        if not self.master_addr or not self.group_name:
            raise SettingError("master_addr, group_name: expected text that is not empty")


@dataclass
class WeightsyncInitInfo(WeightSyncInitInfo):
    """The init info of the native engine as JSON. It holds the secret that lets a worker in."""

    info: str = ""
    kind: ClassVar[str] = "weightsync"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, "info", str)
        # Refuses what is none.
        InitInfo.from_json(self.info)


def rank_offsets(
    num_servers: int, world_size_per_server: int, dp_size: int = 1, first: int = 1
) -> list[int]:
    """The rank offset of each server of an inference deployment.

    Servers that are data-parallel replicas of one deployment share an offset, because each adds
    its own data-parallel rank to it; the offset advances from one deployment to the next, by
    ``world_size_per_server``, which counts tensor, pipeline and data parallel workers.
    """
    if num_servers < 1 or world_size_per_server < 1 or dp_size < 1 or num_servers % dp_size:
        raise SettingError(
            f"expected servers in groups of dp_size, got {num_servers} servers of "
            f"{world_size_per_server} workers and dp_size {dp_size}"
        )
    return [first + at // dp_size * world_size_per_server for at in range(num_servers)]


def rank_in_deployment(
    tp_rank: int, pp_rank: int = 0, dp_rank: int = 0, *, tp_size: int = 1, pp_size: int = 1
) -> int:
    """The rank of a worker within its deployment, to be added to the rank offset."""
    if not (0 <= tp_rank < tp_size and 0 <= pp_rank < pp_size and dp_rank >= 0):
        raise SettingError(
            f"expected ranks below tp_size {tp_size} and pp_size {pp_size}, got tp_rank {tp_rank}, "
            f"pp_rank {pp_rank}, dp_rank {dp_rank}"
        )
    return (dp_rank * pp_size + pp_rank) * tp_size + tp_rank


def _check(info: WeightSyncInitInfo, name: str, kind: type) -> None:
    value = getattr(info, name)
    if type(value) is not kind:
        raise SettingError(f"{name}: expected {kind.__name__}, got {value!r}")
