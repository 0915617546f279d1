"""Rules between two forms of a model, for a sender or a receiver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping as Names, Sequence
from typing import Any, TypeAlias, TypeVar

from weightsync import _dtypes, _extra
from weightsync._checks import text
from weightsync._native import DryRun, Layout
from weightsync._native import Mapping as Native
from weightsync._source import module_tensors, tree
from weightsync.errors import MissingModelError, WrongTypeError
from weightsync.snapshot import Snapshot

__all__ = ["Mapping", "PerModel"]

_T = TypeVar("_T")


class Mapping:
    """Rules that rename, cast, transpose, fuse, split, drop and quantise tensors.

    Rules are applied in order, each to the result of the rule before it. A tensor that no
    rule matches stays the same. In a name one ``*`` stands for any text, dots included::

        mapping = (
            weightsync.Mapping()
            .rename("layers.*", "model.layers.*")
            .fuse(
                [f"model.layers.*.{part}_proj.weight" for part in "qkv"],
                into="model.layers.*.qkv_proj.weight",
            )
            .cast("*", torch.bfloat16)
        )
        print(mapping.dry_run(trainers_model, engines_model))
        sender = weightsync.Sender(trainers_model, mapping=mapping)

    Give the mapping to the :class:`Sender`, or to a :class:`ModelReceiver`. Each call
    returns a new mapping, with one rule more. A mapping can be pickled and compared.

    Raises:
        SettingError: if a rule makes no sense with any model.
    """

    __slots__ = ("_native",)

    _native: Native

    def __init__(self) -> None:
        self._native = Native()

    def rename(self, old: str, new: str) -> Mapping:
        """Renames tensors: ``a`` to ``b``, ``actor.*`` to ``policy.actor.*``."""
        return _of(self._native.rename(_name(old), _name(new)))

    def cast(self, tensors: str, dtype: Any) -> Mapping:
        """Casts to a floating-point dtype: ``torch.bfloat16``, ``"bfloat16"`` or ``"BF16"``.

        Under a star, tensors that are not floating-point stay the same.
        """
        return _of(self._native.cast(_name(tensors), _dtypes.name_of(dtype)))

    def transpose(self, tensors: str, order: Sequence[int] = (1, 0)) -> Mapping:
        """Reorders the dimensions: ``order`` lists the old dimension of each new one."""
        return _of(self._native.transpose(_name(tensors), list(order)))

    def fuse(self, parts: Sequence[str], into: str, dim: int = 0) -> Mapping:
        """Concatenates several tensors along a dimension into one."""
        return _of(self._native.fuse([_name(one) for one in parts], _name(into), dim))

    def split(
        self, tensor: str, into: Names[str, int] | Iterable[tuple[str, int]], dim: int = 0
    ) -> Mapping:
        """Splits one tensor into several: the name and the length along ``dim`` of each."""
        parts = list(into.items() if isinstance(into, Names) else into)
        for part in parts:
            _name(part[0])
        return _of(self._native.split(_name(tensor), parts, dim))

    def drop(self, tensors: str) -> Mapping:
        """Leaves tensors out."""
        return _of(self._native.drop(_name(tensors)))

    def quantise(
        self,
        tensors: str,
        to: str,
        block: tuple[int, int] | None = None,
        scale: str | None = None,
    ) -> Mapping:
        """Quantises matrices to eight bits. Their scales travel with them.

        =========================== ======= =============== =====================================
        rule                        values  float32 scales  shape of the scales
        =========================== ======= =============== =====================================
        ``"fp8", block=(128, 128)`` F8_E4M3 ``…_scale_inv`` ``[ceil(rows/128), ceil(columns/128)]``
        ``"fp8"``                   F8_E4M3 ``…_scale``     ``[1]``
        ``"int8"``                  I8      ``…_scale``     ``[rows, 1]``
        =========================== ======= =============== =====================================

        These are the names and shapes of block FP8 checkpoints (DeepSeek-V3's) and of
        compressed-tensors' W8A8 checkpoints; its block FP8 has ``scale="{}_scale"``. The values are, bit for bit, torch's
        ``(w.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)`` with
        ``scale = w.float().abs().amax() / 448``, and for int8
        ``(w.float() / scale).clamp(-128, 127).round().to(torch.int8)`` with
        ``scale = amax / 127.5``. A scale of 0 becomes ``torch.finfo(torch.float32).eps``, as
        compressed-tensors has it, and the values are 0. A NaN makes NaN of all values that
        share its scale (0 in int8). A cast before this rule does not count.

        Under a star, only floating-point tensors of two dimensions, or of three (a stack of
        matrices, each with scales of its own), are quantised. Rules that fuse, split or
        transpose the tensors come before this rule.

        Args:
            tensors: a name, or a pattern with a star.
            to: ``"fp8"`` or ``"int8"``.
            block: rows and columns of the values that share a scale, for ``"fp8"``; at most
                1,048,576 values.
            scale: another name for the scales: ``"{}"`` stands for the tensor's name.
        """
        return _of(self._native.quantise(_name(tensors), str(to), block, _name(scale)))

    @property
    def rules(self) -> list[str]:
        """The rules in words, in order."""
        return self._native.rules

    def dry_run(self, source: Any, target: Any) -> DryRun:
        """Reports the effect on each tensor of ``source``, without applying the rules.

        Args:
            source: the trainer's model: anything that a :class:`Sender` takes, or a
                :class:`Snapshot`. It may be on the meta device.
            target: the worker's model, likewise.

        Returns:
            The names without a place in ``target`` (``unmatched``), the names of
            ``target`` that would get no tensor (``missing``), tensors whose shape or dtype
            would differ, and rules that match no tensor. Print it to read it. Extra state
            is left out.
        """
        return self._native.dry_run(layout_of(source), layout_of(target))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self._native == other._native

    def __hash__(self) -> int:
        return hash(tuple(self.rules))

    def __reduce__(self) -> tuple[Any, tuple[Native]]:
        return _of, (self._native,)

    def __repr__(self) -> str:
        return repr(self._native)


#: One mapping for every model, or mappings by model name.
PerModel: TypeAlias = Mapping | Names[str, Mapping]


def by_model(
    mapping: PerModel | None, models: Iterable[str]
) -> dict[str, Native]:
    """The mapping of each model that has one."""
    models = list(models)
    if mapping is None:
        return {}
    if isinstance(mapping, Mapping):
        return dict.fromkeys(models, mapping._native)
    named = dict(mapping) if isinstance(mapping, Names) else {}
    if not named or not all(isinstance(one, Mapping) for one in named.values()):
        raise WrongTypeError(
            f"mapping: expected a weightsync.Mapping, or a dict of them by model, got {mapping!r}"
        )
    if unknown := [name for name in named if name not in models]:
        raise MissingModelError.among(unknown[0], models)
    return {name: one._native for name, one in named.items()}


def layout_of(weights: Any) -> Layout:
    """Names, dtypes and shapes of a model, without extra state."""
    if isinstance(weights, Snapshot):
        return weights._native.whole_layout
    if _dtypes.is_module(weights):
        found = [
            (_extra.joined(prefix, key), tensor)
            for prefix, _, _, key, tensor, _ in module_tensors(weights, "state_dict")
        ]
    else:
        found = [(name, tensor) for name, tensor, _ in tree(weights)[0]]
    return Layout([(name, *_dtypes.of(name, tensor)) for name, tensor in found])


def _name(name: _T) -> _T:
    return text("the name of a tensor", name)


def _of(native: Native) -> Mapping:
    made = Mapping.__new__(Mapping)
    made._native = native
    return made
