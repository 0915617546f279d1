"""What a sender tells the receivers about a chunk: plain data, checked when it is parsed."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import torch

from weightsync.errors import WeightsyncError, WrongTypeError
from weightsync.transfer.chunk import ALIGNMENT, WeightChunk, dtype_name, dtype_of, layout

# More than any model has: what is beyond is refused before anything is allocated for it.
_MOST_TENSORS = 1 << 20
_MOST_BYTES = 1 << 46
_MOST_TEXT = 1 << 16
_MOST_DIMENSIONS = 64
_END = b"\nend-of-request"

R = TypeVar("R", bound="WeightUpdateRequest")


class RequestError(WeightsyncError, ValueError):
    """A request that cannot be: the message names the field, what it must be, and what came."""


@dataclass
class WeightUpdateRequest(ABC):
    """One chunk of one sync, or its end.

    ``version`` counts the syncs of a sender from 1, ``chunk`` the chunks of a sync from 0. A
    receiver keeps the chunks of a sync and loads them together when ``last`` is true; senders
    end a sync with a request without tensors, because an iterator does not say which chunk is
    its last.
    """

    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    version: int = 1
    chunk: int = 0
    last: bool = True

    #: The word by which :func:`request_from_dict` knows the class.
    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self.check()

    def __len__(self) -> int:
        return len(self.names)

    def check(self) -> None:
        """Raises a :class:`RequestError` that names the first field that cannot be."""
        _list("names", self.names, lambda at, name: _text(at, name))
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise RequestError(f"names: expected each name once, got {twice!r} again")
        _list("dtypes", self.dtypes, _dtype)
        _list("shapes", self.shapes, _shape)
        self._same_length("dtypes", "shapes")
        _integer("version", self.version, 1)
        _integer("chunk", self.chunk, 0)
        if not isinstance(self.last, bool):
            raise RequestError(f"last: expected true or false, got {_short(self.last)}")
        size = layout(self.torch_dtypes, self.shapes)[1]
        if size > _MOST_BYTES:
            raise RequestError(f"shapes: expected at most {_MOST_BYTES} bytes in all, got {size}")

    @property
    def torch_dtypes(self) -> list[torch.dtype]:
        """The dtypes as torch has them."""
        return [dtype_of(dtype) for dtype in self.dtypes]

    @property
    def tensor_bytes(self) -> int:
        """The bytes of all tensors."""
        each = zip(self.torch_dtypes, self.shapes, strict=True)
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in each)

    def to_dict(self) -> dict[str, Any]:
        """Strings, numbers, lists and dicts."""
        return {"kind": self.kind, **asdict(self)}

    @classmethod
    def from_dict(cls: type[R], data: Any) -> R:
        """Checks everything.

        Raises:
            RequestError: naming the field, what it must be, and what came.
        """
        if not isinstance(data, Mapping):
            raise RequestError(f"a request is a dict, got {_short(data)}")
        if data.get("kind") != cls.kind:
            raise RequestError(f"kind: expected {cls.kind!r}, got {_short(data.get('kind'))}")
        known = {one.name for one in fields(cls)}
        unknown = [str(key) for key in data if key != "kind" and key not in known]
        if unknown:
            raise RequestError(f"{_short(unknown[0])}: a {cls.kind} request has no such field")
        missing = sorted(known - set(data))
        if missing:
            raise RequestError(f"{missing[0]}: a {cls.kind} request needs this field, got none")
        return cls(**{name: data[name] for name in known})

    def serialize(self) -> bytes:
        """For a channel of bytes: JSON and an end marker, padded to a multiple of 4."""
        data = json.dumps(self.to_dict()).encode() + _END
        return data + bytes(-len(data) % ALIGNMENT)

    @classmethod
    def deserialize(cls: type[R], data: bytes) -> R:
        """What :meth:`serialize` made."""
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise RequestError(
                f"expected the bytes that serialize() returned, got {_short(data)}: pass them on as "
                "they are"
            )
        text, marker, padding = bytes(data).rpartition(_END)
        if not marker or padding.strip(b"\0"):
            raise RequestError("End marker not found: the request was cut off on its way")
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"Failed to deserialize: a request is JSON before its end marker: {error}"
            ) from None
        return cls.from_dict(parsed)

    def _same_length(self, *others: str) -> None:
        for other in others:
            if len(getattr(self, other)) != len(self.names):
                raise RequestError(
                    f"{other}: expected {len(self.names)} of them, because names and {other} must "
                    f"have the same length, got {len(getattr(self, other))}"
                )

    def _check_sizes(self, sizes: list[int]) -> None:
        _list("sizes", sizes, lambda at, size: _integer(at, size, 0))
        self._same_length("sizes")
        for at, (shape, size) in enumerate(zip(self.shapes, sizes, strict=True)):
            if math.prod(shape) != size:
                raise RequestError(
                    f"sizes[{at}]: expected {math.prod(shape)} elements of shape {shape}, got {size}"
                )


@dataclass
class BroadcastWeightUpdateRequest(WeightUpdateRequest):
    """``sizes``, in elements, says that the chunk comes as one packed buffer."""

    sizes: list[int] | None = None
    kind: ClassVar[str] = "broadcast"

    def check(self) -> None:
        super().check()
        if self.sizes is not None:
            self._check_sizes(self.sizes)


@dataclass
class CudaIpcHandle:
    """Memory of a GPU as CUDA and torch name it between processes; bytes are base64 text."""

    handle: str
    storage_bytes: int
    storage_offset: int
    ref_counter: str
    ref_counter_offset: int
    event: str
    event_sync: bool
    #: Where the tensor begins in the storage, in bytes.
    begin: int = 0

    def check(self, place: str, size: int) -> None:
        """Checks it as the memory of a tensor of ``size`` bytes."""
        for name, most in (("handle", 512), ("event", 512), ("ref_counter", 256)):
            self.bytes_of(name, most, place)
        name = self.bytes_of("ref_counter", 256, place)
        if not re.fullmatch(rb"/torch_\d+_\d+_\d+", name):
            # It becomes the name of shared memory: no other file may be opened by it.
            raise RequestError(f"{place}.ref_counter: expected a name of torch's, got {name!r}")
        for name_, most in (
            ("storage_bytes", _MOST_BYTES), ("storage_offset", _MOST_BYTES),
            ("ref_counter_offset", _MOST_BYTES), ("begin", self.storage_bytes),
        ):  # fmt: skip
            _integer(f"{place}.{name_}", getattr(self, name_), 0, most)
        if not isinstance(self.event_sync, bool):
            raise RequestError(f"{place}.event_sync: expected true or false")
        if self.begin + size > self.storage_bytes:
            raise RequestError(
                f"{place}: expected memory for {size} bytes from {self.begin}, "
                f"got {self.storage_bytes} bytes"
            )

    def bytes_of(self, name: str, most: int = 512, place: str = "handle") -> bytes:
        """A field that is base64 text, as bytes."""
        text = getattr(self, name)
        try:
            found = base64.b64decode(text, validate=True) if isinstance(text, str) else None
        except (binascii.Error, ValueError):
            found = None
        if found is None or len(found) > most:
            raise RequestError(
                f"{place}.{name}: expected base64 of at most {most} bytes, got {_short(text)}"
            )
        return found


#: Handles of one tensor by the UUID of the GPU that it lies on.
Handles = dict[str, CudaIpcHandle]


@dataclass
class CudaIpcWeightUpdateRequest(WeightUpdateRequest):
    """A handle for each tensor, on each GPU of the trainer."""

    ipc_handles: list[Handles] = field(default_factory=list)
    kind: ClassVar[str] = "cuda_ipc"

    def check(self) -> None:
        super().check()
        _list("ipc_handles", self.ipc_handles, lambda at, one: None)
        self._same_length("ipc_handles")
        each = zip(self.ipc_handles, self.torch_dtypes, self.shapes, strict=True)
        for at, (handles, dtype, shape) in enumerate(each):
            size = math.prod(shape) * dtype.itemsize
            self.ipc_handles[at] = _handles(f"ipc_handles[{at}]", handles, size)


@dataclass
class PackedCudaIpcWeightUpdateRequest(WeightUpdateRequest):
    """One handle for the chunk's packed buffer, on each GPU of the trainer."""

    sizes: list[int] = field(default_factory=list)
    ipc_handles: Handles = field(default_factory=dict)
    alignment: int = ALIGNMENT
    kind: ClassVar[str] = "packed_cuda_ipc"

    def check(self) -> None:
        super().check()
        self._check_sizes(self.sizes)
        _integer("alignment", self.alignment, ALIGNMENT, 1 << 16)
        if self.alignment & (self.alignment - 1):
            raise RequestError(f"alignment: expected a power of two, got {self.alignment}")
        # The end of a sync has no memory.
        if self.names or self.ipc_handles:
            self.check_handles()

    def check_handles(self) -> None:
        """Checks the handles, as memory of the packed buffer."""
        size = layout(self.torch_dtypes, self.shapes, self.alignment)[1]
        self.ipc_handles = _handles("ipc_handles", self.ipc_handles, size)


@dataclass
class WeightsyncUpdateRequest(WeightUpdateRequest):
    """The version is in the native engine under this number: no tensors are listed."""

    model: str = "policy"
    kind: ClassVar[str] = "weightsync"

    def check(self) -> None:
        super().check()
        _text("model", self.model)


@dataclass
class LoraLoadRequest(WeightUpdateRequest):
    """An adapter to be loaded from a path, under a name."""

    lora_path: str = ""
    lora_name: str = ""
    kind: ClassVar[str] = "lora"

    def check(self) -> None:
        super().check()
        _text("lora_path", self.lora_path)
        if self.lora_name:
            _text("lora_name", self.lora_name)
        if "\0" in self.lora_path + self.lora_name:
            raise RequestError("lora_path, lora_name: expected text without a zero byte")


def described(chunk: WeightChunk) -> dict[str, Any]:
    """The fields of a request that describe a chunk."""
    return {
        "names": list(chunk.names),
        "dtypes": [dtype_name(dtype) for dtype in chunk.dtypes],
        "shapes": [list(shape) for shape in chunk.shapes],
    }


def _handles(place: str, value: Any, size: int) -> Handles:
    if not isinstance(value, Mapping) or not 0 < len(value) <= 1024:
        raise RequestError(f"{place}: expected handles by GPU UUID, got {_short(value)}")
    found: Handles = {}
    names = {one.name for one in fields(CudaIpcHandle)}
    for uuid, handle in value.items():
        _text(f"{place}: a GPU's UUID", uuid)
        if isinstance(handle, Mapping):
            if set(handle) != names:
                odd = sorted(map(str, set(handle) ^ names))[0]
                raise RequestError(f"{place}[{uuid!r}].{odd}: missing, or no field of a handle")
            handle = CudaIpcHandle(**handle)
        if not isinstance(handle, CudaIpcHandle):
            raise RequestError(f"{place}[{uuid!r}]: expected a handle, got {_short(handle)}")
        handle.check(f"{place}[{uuid!r}]", size)
        found[uuid] = handle
    return found


def _list(place: str, value: Any, check: Callable[[str, Any], None]) -> None:
    if not isinstance(value, list):
        raise RequestError(f"{place}: expected a list, got {_short(value)}")
    if len(value) > _MOST_TENSORS:
        raise RequestError(f"{place}: expected at most {_MOST_TENSORS} items, got {len(value)}")
    for at, one in enumerate(value):
        check(f"{place}[{at}]", one)


def _text(place: str, value: Any) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= _MOST_TEXT:
        raise RequestError(
            f"{place}: expected text of 1 to {_MOST_TEXT} characters, got {_short(value)}"
        )


def _dtype(place: str, value: Any) -> None:
    try:
        if isinstance(value, str):
            dtype_of(value)
            return
    except WrongTypeError:
        pass
    raise RequestError(f"{place}: expected the name of a dtype, such as 'bfloat16', got {_short(value)}")


def _shape(place: str, value: Any) -> None:
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        raise RequestError(
            f"{place}: expected a list of at most {_MOST_DIMENSIONS} numbers, got {_short(value)}"
        )
    for one in value:
        _integer(place, one, 0)


def _integer(place: str, value: Any, least: int, most: int = 1 << 62) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise RequestError(
            f"{place}: expected an integer from {least} to {most}, got {_short(value)}"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
