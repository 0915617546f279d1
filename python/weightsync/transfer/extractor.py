"""Extraction: the trainer's weights as chunks, gathered batch by batch."""

from __future__ import annotations

import hashlib
import json
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from weightsync import _dtypes
from weightsync._source import check_readable, check_whole
from weightsync.errors import LifecycleError, SettingError, UnsupportedError, WrongWeightsError
from weightsync.transfer._flags import FlagAndMethod
from weightsync.transfer._group import GRACE
from weightsync.transfer._together import Gathering, extracting
from weightsync.transfer.chunk import WeightChunk, dtype_name, dtype_of, layout, unpack


class WeightExtractor(ABC):
    """Turns a training backend's model into :class:`WeightChunk` objects.

    Every rank of the trainer calls :meth:`extract_weights` and iterates over what it returns,
    because gathering is collective; rank 0 gets the chunks, the others none.

    A subclass returns its tensors from :meth:`_extract_raw_weights`, whole or still sharded. If
    they are sharded, it says so in :meth:`_is_whole` and gathers one in :meth:`_gather_into`,
    when the batch of this tensor is made.

    ``_group_by_module`` and ``_batch_by_threshold`` are flags and methods at once: assign a bool,
    call the method, or read the flag in a condition.

    Args:
        cfg: settings, as a dict, a config or an object: ``group_by_module``,
            ``batch_size_threshold_gb`` (GiB of a batch; more than 0 turns batching on), and
            ``yield_on_all_ranks`` (chunks on each rank, as CUDA IPC between several GPUs wants).
    """

    def __init__(self, cfg: Any = None) -> None:
        self.cfg = cfg
        self._group_by_module = bool(setting(cfg, "group_by_module", False))
        self._batch_by_threshold = bool(setting(cfg, "batch_size_threshold_gb", 0.0))

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        FlagAndMethod.keep(cls)

    def _should_group_by_module(self) -> bool:
        return bool(self._group_by_module)

    def _should_batch_by_threshold(self) -> bool:
        return bool(self._batch_by_threshold)

    @FlagAndMethod
    def _group_by_module(self, params: dict[str, torch.Tensor]) -> dict[str, list[str]]:
        """Names by module: a parameter's name without its last two parts."""
        modules: dict[str, list[str]] = {}
        for name in params:
            modules.setdefault(".".join(name.split(".")[:-2]), []).append(name)
        return modules

    @FlagAndMethod
    def _batch_by_threshold(
        self, chunks: Iterator[WeightChunk], threshold_gb: float
    ) -> Iterator[list[WeightChunk]]:
        """Whole chunks together, up to the threshold; one that is larger stays alone.

        It is called with chunks on the meta device: their tensors have no memory yet.
        """
        batch: list[WeightChunk] = []
        size = 0
        for chunk in chunks:
            more = chunk.total_size_bytes or 0
            if size > 0 and size + more > threshold_gb * (1 << 30):
                yield batch
                batch, size = [], 0
            batch.append(chunk)
            size += more
        if batch:
            yield batch

    @abstractmethod
    async def _extract_raw_weights(
        self, model: Any, generator_dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """The weights by name, whole or still sharded; they are cast later."""

    async def extract_weights(self, model: Any, generator_dtype: torch.dtype) -> ExtractionPlan:
        """One sync's chunks, to be iterated over once, on all ranks.

        A consumer that drops a chunk before it asks for the next one never has more than one
        batch in memory.
        """
        gathering = self._gathering()
        with nullcontext() if gathering is None else gathering.failing():
            raw = await self._extract_raw_weights(model, generator_dtype)
            plan = self._plan(raw, generator_dtype)
        plan.gathering = gathering
        return plan

    def _gathering(self) -> Gathering | None:
        """What this rank and the others say to each other in an extraction; None if it gathers nothing."""
        gathers = type(self)._is_whole is not WeightExtractor._is_whole
        return extracting() if gathers else None

    def _tell(self, error: BaseException) -> None:
        """Tells the other ranks, which extract, that this one fails before it does."""
        gathering = self._gathering()
        if gathering is not None:
            gathering.fail(error)

    # What a backend says about its tensors. The defaults are those of whole tensors.

    def _shape(self, name: str, param: torch.Tensor) -> tuple[int, ...]:
        """The whole shape of a tensor."""
        return tuple(param.shape)

    def _is_whole(self, param: torch.Tensor) -> bool:
        """Whether this rank can read the tensor as it is."""
        return True

    def _meets(self, param: torch.Tensor) -> bool:
        """Whether ranks gather the tensor together."""
        return not self._is_whole(param)

    def _ranks(
        self, params: Mapping[str, torch.Tensor]
    ) -> tuple[Iterable[int] | None, Iterable[Any] | None]:
        """The ranks that gather these tensors, and their process groups; None: all, any."""
        return None, None

    def _gather_into(
        self, out: torch.Tensor | None, name: str, param: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """Writes the whole tensor, cast, to ``out``. All ranks enter, some without ``out``."""
        if out is not None:
            out.copy_(param)

    def _gather_batch(
        self, outs: Sequence[torch.Tensor | None], params: dict[str, torch.Tensor],
        dtypes: Sequence[torch.dtype],
    ) -> None:  # fmt: skip
        """Gathers the tensors of one batch, each as :meth:`_gather_into` does."""
        for out, (name, param), dtype in zip(outs, params.items(), dtypes, strict=True):
            self._gather_into(out, name, param, dtype)

    def _yields(self) -> bool:
        """Whether this rank gets the chunks."""
        return trainer_rank() == 0 or self._on_all_ranks()

    def _on_all_ranks(self) -> bool:
        return bool(setting(getattr(self, "cfg", None), "yield_on_all_ranks", False))

    def _plan(
        self, raw: Mapping[str, torch.Tensor], generator_dtype: torch.dtype | str | None
    ) -> ExtractionPlan:
        target = None if generator_dtype is None else dtype_of(generator_dtype)
        for name, param in raw.items():
            _dtypes.of_tensor(name, param)
        params = _untied(raw)
        planned = {}
        for name, param in params.items():
            # Integers, and the eight-bit values of quantised weights, keep their types.
            casts = target is not None and param.is_floating_point() and param.itemsize > 1
            dtype = target if casts else param.dtype
            if self._is_whole(param):
                # What is cast may be of a class that only torch can read.
                (check_readable if dtype == param.dtype else check_whole)(name, param)
            planned[name] = torch.empty(self._shape(name, param), dtype=dtype, device="meta")
        if self._should_group_by_module():
            groups = list(self._group_by_module(params).items())
        else:
            groups = [(name.rpartition(".")[0], [name]) for name in params]
        chunks = [
            _chunk(names, [planned[name] for name in names], module) for module, names in groups
        ]
        batches = [[chunk] for chunk in chunks]
        if self._should_batch_by_threshold():
            batches = list(self._batch_by_threshold(iter(chunks), self._threshold_gb()))
        sent = [name for batch in batches for chunk in batch for name in chunk.names]
        if sorted(sent) != sorted(params):
            odd = sorted(set(sent) ^ set(params)) or [one for one in sent if sent.count(one) > 1]
            raise WrongWeightsError(
                f"groups and batches must have each tensor once: {odd[0]!r} is missing, unknown "
                "or there twice"
            )
        return ExtractionPlan(self, params, batches)

    def _threshold_gb(self) -> float:
        value = setting(getattr(self, "cfg", None), "batch_size_threshold_gb", 1.0)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise SettingError(f"batch_size_threshold_gb: expected GiB above 0, got {value!r}")
        return float(value)


class ExtractionPlan:
    """The chunks of one sync, made as they are asked for, and iterated over once."""

    def __init__(
        self,
        extractor: WeightExtractor,
        params: dict[str, torch.Tensor],
        batches: Sequence[Sequence[WeightChunk]],
    ) -> None:
        #: Whether each rank gets the chunks, and not rank 0 alone.
        self.on_all_ranks = extractor._on_all_ranks()
        #: Names, dtype names and shapes of all tensors, in order; known before anything is gathered.
        self.metadata: dict[str, list[Any]] = {"names": [], "dtype_names": [], "shapes": []}
        for batch in batches:
            for chunk in batch:
                self.metadata["names"] += chunk.names
                self.metadata["dtype_names"] += [dtype_name(dtype) for dtype in chunk.dtypes]
                self.metadata["shapes"] += [list(shape) for shape in chunk.shapes]
        #: What this rank and the others say to each other where tensors are gathered.
        self.gathering: Gathering | None = None
        self._count = len(batches)
        self._made: Iterator[WeightChunk] | None = None
        self._parts: Any = extractor, params, batches

    @property
    def mark(self) -> str:
        """Stands for all tensors, in order: it is the same on each rank."""
        return hashlib.sha256(json.dumps(self.metadata).encode()).hexdigest()

    def __len__(self) -> int:
        """The number of chunks."""
        return self._count

    def __iter__(self) -> Iterator[WeightChunk]:
        if self._made is not None:
            raise LifecycleError(
                "the chunks of an extraction are iterated over once: call extract_weights again, "
                "on all ranks of the trainer"
            )
        return self._begun()

    def __next__(self) -> WeightChunk:
        return next(self._made or self._begun())

    def _begun(self) -> Iterator[WeightChunk]:
        # It has nothing of this object, so that it ends with the loop over it.
        parts, self._parts = self._parts, None
        mark = self.mark if self.gathering is not None else ""
        self._made = _made(*parts, self.gathering, mark)
        return self._made


def trainer_rank() -> int:
    """The rank of this process in the trainer's default process group; 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def setting(cfg: Any, name: str, default: Any) -> Any:
    """A setting of a dict, a config or an object; the default where there is none."""
    if isinstance(cfg, Mapping):
        return cfg.get(name, default)
    return getattr(cfg, name, default)


def _made(
    own: WeightExtractor,
    params: dict[str, torch.Tensor],
    batches: Sequence[Sequence[WeightChunk]],
    gathering: Gathering | None,
    mark: str,
) -> Iterator[WeightChunk]:
    gathered = {name: param for name, param in params.items() if own._meets(param)}
    if gathering is None or not gathered:
        yield from _chunks(own, params, batches, None)
        return
    with gathering.failing():
        gathering.enter(mark, GRACE, *own._ranks(gathered))
        del gathered
        yield from _chunks(own, params, batches, gathering)


def _chunks(
    own: WeightExtractor,
    params: dict[str, torch.Tensor],
    batches: Sequence[Sequence[WeightChunk]],
    gathering: Gathering | None,
) -> Iterator[WeightChunk]:
    yields, memory = own._yields(), Memory()
    for at, batch in enumerate(batches):
        names = [name for chunk in batch for name in chunk.names]
        planned = [tensor for chunk in batch for tensor in chunk.tensors]
        module = batch[0].module_name if len(batch) == 1 else None
        if gathering is not None:
            gathering.look()
        with torch.no_grad():
            found = {name: params.pop(name) for name in names}
            tensors, packed = _gathered(own, found, planned, memory if yields else None)
        if gathering is not None and at == len(batches) - 1:
            gathering.leave()
        if yields:
            chunk = _chunk(names, tensors, module, packed)
            # The consumer has the only reference when the next batch is made.
            del tensors
            yield chunk
            del chunk


def _gathered(
    own: WeightExtractor,
    params: dict[str, torch.Tensor],
    planned: list[torch.Tensor],
    memory: Memory | None,
) -> tuple[list[torch.Tensor], bool]:
    """The tensors of a batch, and whether they lie in one buffer."""
    if all(
        own._is_whole(param) and param.dtype == plan.dtype and param.is_contiguous()
        for param, plan in zip(params.values(), planned, strict=True)
    ):
        # They are read where they lie.
        return [param.detach() for param in params.values()], False
    dtypes = [plan.dtype for plan in planned]
    shapes = [plan.shape for plan in planned]
    outs: list[torch.Tensor] = []
    if memory is not None:
        device = next(iter(params.values())).device
        buffer = memory.take(layout(dtypes, shapes)[1], device)
        outs = unpack(buffer, dtypes, shapes)
    own._gather_batch(outs or [None] * len(planned), params, dtypes)
    return outs, True


class Memory:
    """Buffers on the host: one is used again once no tensor of it is held.

    Memory that is new costs as much time in page faults as the gathering itself.

    Args:
        count: how many buffers are kept.
    """

    def __init__(self, count: int = 1) -> None:
        self._count = count
        self._kept: list[mmap.mmap] = []

    def take(self, size: int, device: torch.device) -> torch.Tensor:
        """A buffer of bytes."""
        if device.type != "cpu" or not size:
            return torch.empty(size, dtype=torch.uint8, device=device)
        at = next((at for at in range(len(self._kept)) if self._is_free(at, size)), None)
        if at is None:
            # Before the new one is made, so that one that is not held is freed.
            del self._kept[: len(self._kept) + 1 - self._count]
            # Private: a forked child must not see what is written later.
            self._kept.append(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            at = -1
        return torch.frombuffer(self._kept[at], dtype=torch.uint8, count=size)

    def _is_free(self, at: int, size: int) -> bool:
        # The references: the list, the call's argument, and torch's while a tensor lives.
        return len(self._kept[at]) >= size and sys.getrefcount(self._kept[at]) <= 2


def _chunk(
    names: list[str], tensors: list[torch.Tensor], module: str | None, packed: bool = False
) -> WeightChunk:
    dtypes = [tensor.dtype for tensor in tensors]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    return WeightChunk(list(names), tensors, dtypes, shapes, module, packed=packed)


def _untied(raw: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor once, under the first of its names."""
    seen: set[Any] = set()
    found = {}
    for name, tensor in raw.items():
        key = identity(tensor)
        if key not in seen:
            found[name] = tensor
        seen.add(key)
    return found


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of a module; all of it has to be tensors.

    Raises:
        UnsupportedError: naming an extra state.
    """
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise UnsupportedError(
                f"{name!r} is extra state, a {type(value).__name__}, and a transfer carries "
                "tensors only: use the native transport, weightsync.Sender(model)"
            )
    return {name: one for name, one in state.items() if one is not None}


def identity(tensor: torch.Tensor) -> Any:
    """A value that two tensors share if they are one tensor under two names."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel() and not tensor.is_meta:
        # Of the same memory a conjugate view, or a negative one, has other values.
        view = tensor.is_conj(), tensor.is_neg()
        return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), *view)
    return id(tensor)
