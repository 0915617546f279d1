"""Rules between two forms of a model, on either side of the journey."""

from __future__ import annotations

from collections.abc import Iterable, Mapping as Names, Sequence
from typing import Any, TypeAlias

from weightsync import _dtypes
from weightsync._native import DryRun, Layout
from weightsync._native import Mapping as Native
from weightsync._source import module_tensors, tree
from weightsync.errors import MissingModelError, WrongTypeError
from weightsync.snapshot import Snapshot

__all__ = ["Mapping", "PerModel"]


class Mapping:
    """Rules that rename, cast, transpose, fuse, split and drop tensors.

    Rules are applied in order, each to what the one before it left; a tensor that no
    rule matches stays as it is. In a name one ``*`` stands for any text, dots included::

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
        """Another name: ``a`` to ``b``, ``actor.*`` to ``policy.actor.*``."""
        return _of(self._native.rename(old, new))

    def cast(self, tensors: str, dtype: Any) -> Mapping:
        """Another floating-point dtype: ``torch.bfloat16``, ``"bfloat16"`` or ``"BF16"``.

        Under a star, tensors that are not floating-point stay as they are.
        """
        return _of(self._native.cast(tensors, _dtypes.name_of(dtype)))

    def transpose(self, tensors: str, order: Sequence[int] = (1, 0)) -> Mapping:
        """The dimensions in another order: for each, the one that it was."""
        return _of(self._native.transpose(tensors, list(order)))

    def fuse(self, parts: Sequence[str], into: str, dim: int = 0) -> Mapping:
        """Several tensors behind each other along a dimension, as one."""
        return _of(self._native.fuse(list(parts), into, dim))

    def split(
        self, tensor: str, into: Names[str, int] | Iterable[tuple[str, int]], dim: int = 0
    ) -> Mapping:
        """One tensor as several: the name and the length along ``dim`` of each, in order."""
        parts = into.items() if isinstance(into, Names) else into
        return _of(self._native.split(tensor, list(parts), dim))

    def drop(self, tensors: str) -> Mapping:
        """No such tensor."""
        return _of(self._native.drop(tensors))

    @property
    def rules(self) -> list[str]:
        """The rules in words, in order."""
        return self._native.rules

    def dry_run(self, source: Any, target: Any) -> DryRun:
        """What would happen to each tensor of ``source``, without doing it.

        Args:
            source: the trainer's model: what a :class:`Sender` takes, or a
                :class:`Snapshot`. It may be on the meta device.
            target: the worker's model, likewise.

        Returns:
            Every name that has no place in ``target`` (``unmatched``), every one of
            ``target`` that would get nothing (``missing``), what would have another shape
            or dtype, and rules that match nothing. Print it to read it. Extra state is not
            looked at.
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


#: One mapping for every model, or one for each of some models, by name.
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
    """Names, dtypes and shapes of a model, extra state aside."""
    if isinstance(weights, Snapshot):
        return weights._native.whole_layout
    if _dtypes.is_module(weights):
        found = [
            (f"{prefix}.{key}" if prefix else key, tensor)
            for prefix, _, _, key, tensor, _ in module_tensors(weights, "state_dict")
        ]
    else:
        found = [(name, tensor) for name, tensor, _ in tree(weights)[0]]
    return Layout([(name, *_dtypes.of(name, tensor)) for name, tensor in found])


def _of(native: Native) -> Mapping:
    made = Mapping.__new__(Mapping)
    made._native = native
    return made
