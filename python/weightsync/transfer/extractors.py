"""Extractors for plain modules, FSDP2 and tensor parallel, DeepSpeed ZeRO-3, and Megatron."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from weightsync.errors import WrongTypeError, WrongWeightsError
from weightsync.transfer.extractor import WeightExtractor, setting, tensors_of

# What of a sharded tensor is cast and sent at once, in bytes.
_PIECE = 4 << 20


class ModuleExtractor(WeightExtractor):
    """A plain torch module: parameters and persistent buffers, tied ones once.

    ``cfg`` may have ``weight_prefix``, which is put before each name. What needs no cast is read
    where it lies.
    """

    async def _extract_raw_weights(
        self, model: Any, generator_dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        if not isinstance(model, torch.nn.Module):
            raise WrongTypeError(f"expected a torch module, got a {type(model).__name__}")
        prefix = setting(self.cfg, "weight_prefix", "")
        return {prefix + name: one for name, one in tensors_of(model).items()}


class FsdpExtractor(ModuleExtractor):
    """Modules of ``fully_shard`` (FSDP2) and of tensor parallelism: their tensors are DTensors.

    Each rank casts its own part of a tensor and sends it to rank 0, into its final place. So
    half the bytes travel where the cast halves them, and rank 0 alone has whole tensors. A tensor
    that is sharded along several dimensions of its mesh, or holds partial sums, is gathered with
    ``full_tensor()`` and costs memory for one more tensor.
    """

    def _is_whole(self, param: torch.Tensor) -> bool:
        return not isinstance(param, DTensor)

    def _meets(self, param: torch.Tensor) -> bool:
        return isinstance(param, DTensor) and not _is_copied(param)

    def _ranks(self, params: Mapping[str, torch.Tensor]) -> tuple[Iterable[int], Iterable[Any]]:
        ranks: set[int] = set()
        groups: list[Any] = []
        # Each mesh once: all tensors of a model may have the same.
        meshes = {id(mesh): (name, mesh) for name, mesh in _meshes(params)}
        for name, mesh in meshes.values():
            # Of a part of a larger mesh, such as mesh["dp"], each part has all of the tensor.
            whole = _root_of(mesh).mesh.flatten().tolist()
            if 0 not in whole:
                raise WrongWeightsError(
                    f"{name}: its mesh must have rank 0 of the trainer, which sends; it has {whole}"
                )
            ranks.update(whole)
            groups += mesh.get_all_groups()
        return sorted(ranks), groups

    def _gather_batch(
        self, outs: Sequence[torch.Tensor | None], params: dict[str, torch.Tensor],
        dtypes: Sequence[torch.dtype],
    ) -> None:  # fmt: skip
        travelling = _Travelling()
        for out, (name, param), dtype in zip(outs, params.items(), dtypes, strict=True):
            dim = _sharded_dim(param) if isinstance(param, DTensor) else None
            if dim is None or self._on_all_ranks():
                self._gather_into(out, name, param, dtype)
            else:
                assert isinstance(param, DTensor)
                _gather_to_first(travelling, out, param, dim, dtype)
        travelling.finish()

    def _gather_into(
        self, out: torch.Tensor | None, name: str, param: torch.Tensor, dtype: torch.dtype
    ) -> None:
        whole = param
        if isinstance(param, DTensor):
            whole = param.to_local() if _is_copied(param) else param.full_tensor()
        if out is not None:
            out.copy_(whole)


class ZeroExtractor(ModuleExtractor):
    """Modules of DeepSpeed ZeRO-3: parameters are gathered one at a time.

    Gathering is DeepSpeed's own, so each rank has one whole parameter for a moment.
    """

    def _shape(self, name: str, param: torch.Tensor) -> tuple[int, ...]:
        return tuple(getattr(param, "ds_shape", param.shape))

    def _is_whole(self, param: torch.Tensor) -> bool:
        return not hasattr(param, "ds_id")

    def _gather_into(
        self, out: torch.Tensor | None, name: str, param: torch.Tensor, dtype: torch.dtype
    ) -> None:
        if not hasattr(param, "ds_id"):
            return super()._gather_into(out, name, param, dtype)
        import deepspeed

        with deepspeed.zero.GatheredParameters([param]):
            if out is not None:
                out.copy_(param.data)


class MegatronExtractor(WeightExtractor):
    """Models that a bridge knows: Megatron's, or any whose sharding callbacks hide.

    Args:
        cfg: as for :class:`WeightExtractor`.
        params: the tensors of this rank's model, under the names that the engine knows; the same
            names in the same order on all ranks.
        gather: the whole tensor of a name and its tensor here. It is called on all ranks, in
            order; what it returns is used on ranks that get chunks.
        shape: the whole shape of a name and its tensor here, without gathering; without it tensors
            are taken to be whole.
    """

    def __init__(
        self,
        cfg: Any = None,
        *,
        params: Callable[[Any], dict[str, torch.Tensor]],
        gather: Callable[[str, torch.Tensor], torch.Tensor],
        shape: Callable[[str, torch.Tensor], Any] | None = None,
    ) -> None:
        super().__init__(cfg)
        self._params, self._gather, self._whole_shape = params, gather, shape

    async def _extract_raw_weights(
        self, model: Any, generator_dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        return self._params(model)

    def _shape(self, name: str, param: torch.Tensor) -> tuple[int, ...]:
        return tuple(param.shape if self._whole_shape is None else self._whole_shape(name, param))

    def _is_whole(self, param: torch.Tensor) -> bool:
        return False

    def _gather_into(
        self, out: torch.Tensor | None, name: str, param: torch.Tensor, dtype: torch.dtype
    ) -> None:
        whole = self._gather(name, param)
        if out is None:
            return
        if whole.shape != out.shape:
            raise WrongWeightsError(
                f"{name}: shape says {list(out.shape)}, and gather made {list(whole.shape)}"
            )
        out.copy_(whole)


def _is_copied(param: DTensor) -> bool:
    """Whether each rank has all of a tensor."""
    return all(isinstance(one, Replicate) for one in param.placements)


def _meshes(params: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Any]]:
    for name, param in params.items():
        if isinstance(param, DTensor):
            yield name, param.device_mesh


def _sharded_dim(param: DTensor) -> int | None:
    """The one dimension of its mesh along which a tensor is sharded; None if it is not so simple."""
    sharded = [at for at, one in enumerate(param.placements) if not isinstance(one, Replicate)]
    # Its subclasses divide otherwise.
    simple = len(sharded) == 1 and type(param.placements[sharded[0]]) is Shard
    return sharded[0] if simple else None


class _Travelling:
    """Pieces on their way: each is held until it has arrived, or has been sent."""

    def __init__(self) -> None:
        self._works: deque[tuple[Any, Callable[[], object] | None, int]] = deque()
        self._held = 0

    def add(self, work: Any, then: Callable[[], object] | None = None, held: int = 0) -> None:
        """``held`` is the memory of a piece that is not in its final place."""
        self._works.append((work, then, held))
        self._held += held
        while self._held > 2 * _PIECE:
            self._finish_first()

    def finish(self) -> None:
        while self._works:
            self._finish_first()

    def _finish_first(self) -> None:
        work, then, held = self._works.popleft()
        work.wait()
        if then is not None:
            then()
        self._held -= held


def _root_of(mesh: Any) -> Any:
    """The mesh that this one is a part of; itself if it is none."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed import device_mesh

    # Up to torch 2.9.
    return device_mesh._mesh_resources.get_root_mesh(mesh)


def _gather_to_first(
    travelling: _Travelling,
    out: torch.Tensor | None,
    param: DTensor,
    at: int,
    dtype: torch.dtype,
) -> None:
    """Gathers a tensor that is sharded along one dimension of its mesh to rank 0."""
    mesh, placement = param.device_mesh, param.placements[at]
    assert isinstance(placement, Shard)
    ranks = mesh.mesh
    where = (ranks == 0).nonzero()
    if len(where) != 1:
        # Another part of the mesh has rank 0, and all of the tensor.
        return
    # The ranks that hold the parts: a line through rank 0. The others have copies.
    line = ranks[tuple(slice(None) if d == at else w for d, w in enumerate(where[0].tolist()))]
    peers: list[int] = line.tolist()
    if dist.get_rank() not in peers:
        return
    group, own, dim = mesh.get_group(at), param.to_local(), placement.dim % param.ndim
    # A part of whole rows that is not cast travels in one piece, from its place to its place.
    in_place = dim == 0 and param.dtype == dtype
    if out is None:
        for piece in _pieces(own, in_place):
            made = piece.to(dtype).contiguous()
            held = 0 if made.data_ptr() == piece.data_ptr() else made.nbytes
            travelling.add(dist.isend(made, 0, group), lambda made=made: None, held)
        return
    # As torch.chunk divides.
    step = -(-param.shape[dim] // len(peers))
    mine = out[:0]
    for place, peer in enumerate(peers):
        begin = min(place * step, out.shape[dim])
        part = out.narrow(dim, begin, min(step, out.shape[dim] - begin))
        if peer == 0:
            mine = part
            continue
        for piece in _pieces(part, in_place):
            if piece.is_contiguous():
                travelling.add(dist.irecv(piece, peer, group))
            else:
                made = torch.empty(piece.shape, dtype=piece.dtype, device=piece.device)
                put = lambda piece=piece, made=made: piece.copy_(made)  # noqa: E731
                travelling.add(dist.irecv(made, peer, group), put, made.nbytes)
    # While the others' parts are on their way.
    mine.copy_(own)


def _pieces(part: torch.Tensor, whole: bool) -> Iterator[torch.Tensor]:
    """A part in the pieces in which it travels: the same at both ends, whatever the dtype."""
    if part.numel() == 0:
        return
    rows = max(1, _PIECE // 4 // max(1, part.numel() // part.shape[0]))
    yield from [part] if whole else part.split(rows)
